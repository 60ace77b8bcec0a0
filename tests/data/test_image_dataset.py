"""Claims about data sets of decoded images: cache, workers, features, and images that cannot be read."""

import os

import pytest
import torch
from image_data import assert_own, dataset, encoded, good_items, picture, prepare, spec_of, undecoded
from PIL import Image as PILImage

from hf_vit.data import image_dataset
from hf_vit.data.image_dataset import ImageDataset, check_unreadable
from hf_vit.data.loader import data_loader
from hf_vit.data.sources import load_splits
from hf_vit.system.errors import UserError


@pytest.fixture
def uncached(monkeypatch):
    monkeypatch.setattr(image_dataset, "CACHE_BYTES", 0)


def test_images_are_named_by_row_and_by_the_file_in_the_folder_of_the_data(tmp_path):
    for number in range(8):
        file = tmp_path / ("cat", "dog")[number // 4] / f"{number} b.png"
        file.parent.mkdir(exist_ok=True)
        picture().save(file)
    in_rows, _, _ = prepare({"train": dataset([0, 0, 1, 1])}, fraction=0.5)
    for splits in (prepare(load_splits(str(tmp_path)), fraction=0.5)[0], in_rows):
        images = ImageDataset(splits["eval"], spec_of())
        numbers, files = images.sources(torch.arange(len(images)).flip(0))
        assert numbers == splits["eval"]["row"][::-1]
        names = [f"{('cat', 'dog')[row // 4]}/{row} b.png" for row in numbers]
        assert files == (["", ""] if splits is in_rows else names)


def test_cached_images_equal_images_decoded_by_workers(monkeypatch):
    rows, batches = undecoded(good_items(5)), [[3, 1], [0, 4]]
    cached = list(data_loader(ImageDataset(rows, spec_of()), batches, num_workers=2))
    monkeypatch.setattr(image_dataset, "CACHE_BYTES", 0)
    images = ImageDataset(rows, spec_of())
    assert images.cache is None
    for one, other in zip(cached, data_loader(images, batches, num_workers=2), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in ("images", "labels", "index"))
        assert other["images"].is_contiguous()


@pytest.mark.parametrize("rows", [[0, 2, 3], [0, 1, 2, 3, 4], [4]])
def test_features_stand_in_the_place_of_their_images(rows):
    images = ImageDataset(undecoded(good_items(5), labels=[0, 1, 1, 0, 1]), spec_of(), keep_full=True)
    table, count = torch.randn(len(rows), 7), len(rows)
    features = images.with_features(table, torch.tensor(rows))
    places = [*range(count)][::-1]
    ids = [*places, count]  # the first one comes a second time
    (batch,) = data_loader(features, [ids], num_workers=2)
    assert len(features) == count
    assert torch.equal(batch["images"], table[[*places, 0]])
    assert torch.equal(batch["labels"], images.labels[torch.tensor(rows)[[*places, 0]]])
    assert batch["index"].tolist() == ids
    assert features.row_numbers(batch["index"]) == [rows[place] for place in (*places, 0)]
    assert (len(images), images.cache.ndim) == (5, 4)


def test_there_are_as_many_workers_as_cores(uncached, monkeypatch):
    """torch warns of more, and a warning fails a test."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    (batch,) = data_loader(ImageDataset(undecoded(good_items(3)), spec_of()), [[2, 1]])
    assert batch["index"].tolist() == [2, 1]


# ----------------------------------------------------------------------------------------------------------------------
# Images that cannot be read


BAD = {
    "no bytes": {"bytes": b"", "path": "some.jpg"},
    "half a file": {"bytes": encoded(picture(0, (64, 64)), "JPEG")[:900], "path": "some.jpg"},
    "no such file": {"bytes": None, "path": "/nowhere/some.jpg"},
    "decompression bomb": {"bytes": encoded(PILImage.new("L", (160, 60))), "path": "some.jpg"},
    "nothing": None,
}


@pytest.fixture(params=BAD)
def one_bad(request, monkeypatch):
    """Four images, of which number 2 cannot be read."""
    monkeypatch.setattr(PILImage, "MAX_IMAGE_PIXELS", 4200)
    items = good_items(4)
    items[2] = BAD[request.param]
    return undecoded(items)


@pytest.mark.parametrize("limit", [2**31, 0])
def test_a_bad_image_is_named_by_row_and_file_with_the_remedy(one_bad, limit, monkeypatch):
    monkeypatch.setattr(image_dataset, "CACHE_BYTES", limit)
    with pytest.raises(UserError, match=r"row 2 .*--on_bad_image skip") as error:
        list(data_loader(ImageDataset(one_bad, spec_of()), [[0, 1], [2, 3]], num_workers=0))
    assert ("some.jpg" in str(error.value)) == (one_bad[2]["image"] is not None)


def test_a_bad_image_is_taken_out_of_the_cache_and_counted(one_bad):
    images = ImageDataset(one_bad, spec_of(), on_bad_image="skip")
    assert len(images) == len(images.cache) == 3
    assert (images.rows["row"][:], images.labels.tolist()) == ([0, 1, 3], [0, 1, 1])
    assert "row 2" in "".join(images.skipped)


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_cache_another_image_takes_the_place_in_training_and_none_in_scoring(workers, uncached):
    items = good_items(4)
    items[2] = BAD["half a file"]
    rows, ids = undecoded(items), [[1, 2, 7, 0], [2, 3]]  # 7 is 3, for the second time
    for keep_full, wanted in ((True, [[1, 7, 7, 0], [3, 3]]), (False, [[1, 7, 0], [3]])):
        images = ImageDataset(rows, spec_of(), on_bad_image="skip", keep_full=keep_full)
        batches = list(data_loader(images, ids, workers))
        assert [batch["index"].tolist() for batch in batches] == wanted
        for batch in batches:
            assert_own(batch, items, rows["label"][:])
        assert len(images.skipped) == 1  # though it came twice


def test_a_batch_of_bad_images_alone_stops_training_and_is_left_out_of_scoring(uncached):
    rows = undecoded([*good_items(2), BAD["half a file"], BAD["half a file"]])
    scoring = ImageDataset(rows, spec_of(), on_bad_image="skip")
    assert [batch["index"].tolist() for batch in data_loader(scoring, [[0, 1], [2, 3]])] == [[0, 1]]
    with pytest.raises(UserError, match="row 2"):
        list(data_loader(ImageDataset(rows, spec_of(), "skip", keep_full=True), [[2, 3]], num_workers=0))


def test_a_data_set_of_bad_images_alone_is_an_error():
    with pytest.raises(UserError, match="row 0"):
        ImageDataset(undecoded([BAD["no bytes"]] * 2), spec_of(), on_bad_image="skip")


def parts(*broken, counts=((0, 0, 0, 1, 1), (0, 1, 1))):
    """The parts of a data set of cats (0) and dogs (1), without the images of these (part, row)."""
    for part, labels in enumerate(counts):
        items = [
            BAD["no bytes"] if (part, row) in broken else item for row, item in enumerate(good_items(len(labels)))
        ]
        yield ImageDataset(undecoded(items, labels), spec_of(), on_bad_image="skip")


def test_a_class_is_judged_by_all_of_its_images(caplog, monkeypatch):
    monkeypatch.setattr(image_dataset.logger, "propagate", True)
    check_unreadable(list(parts((1, 1), (1, 2), (0, 0))), ["cat", "dog"], "skip")  # no dog is left to score
    assert "cat 1 of 4, dog 2 of 4" in caplog.text
    with pytest.raises(UserError, match="dog"):
        check_unreadable(list(parts((0, 3), (0, 4), (1, 1), (1, 2))), ["cat", "dog"], "skip")


def test_stop_names_the_broken_images_of_all_parts_at_once_and_counts_more_than_ten():
    with pytest.raises(UserError) as error:
        check_unreadable(list(parts((0, 1), (1, 0))), [], "stop")
    assert all(name in str(error.value) for name in ("row 1 ", "row 0 "))
    with pytest.raises(UserError, match=r"row 9 .*12"):
        ImageDataset(undecoded([BAD["no bytes"]] * 12 + good_items(1)), spec_of())

"""Claims about data sets of decoded images: cache, workers, features, and images that cannot be read."""

import dataclasses
import os

import pytest
import torch
from datasets import Image
from image_data import assert_own, dataset, encoded, good_items, grainy, item_of, picture, prepare, spec_of, undecoded
from PIL import Image as PILImage

from hf_vit.data import image_dataset
from hf_vit.data.augment import augment
from hf_vit.data.image_dataset import FeatureDataset, ImageDataset
from hf_vit.data.image_spec import training_image_spec
from hf_vit.data.loader import data_loader
from hf_vit.data.sampling import EPOCH_STRIDE, epoch_batches, sequential_batches
from hf_vit.data.sources import load_splits


def test_a_broken_image_is_named_by_row_and_file(tmp_path):
    for index, name in enumerate(("cat", "dog")):
        (tmp_path / name).mkdir()
        picture().save(tmp_path / name / f"{index}.png")
    (tmp_path / "dog" / "broken.png").write_bytes(b"this is no picture")
    splits, _, _ = prepare(load_splits(str(tmp_path)), train=None, eval_split="train")
    with pytest.raises(ValueError, match=r"row 2 \(.*broken.png\) cannot be read as an image"):
        ImageDataset(splits["eval"], spec_of())


def test_a_broken_row_is_named_by_its_number_before_any_split():
    whole = dataset([0] * 8 + [1] * 8).cast_column("image", Image(decode=False))
    images = [dict(row) for row in whole["image"]]
    images[13] = {"bytes": b"no picture", "path": None}
    broken = whole.remove_columns("image").add_column("image", images, feature=Image(decode=False))
    splits, _, _ = prepare({"train": broken}, fraction=0.25)
    with pytest.raises(ValueError, match="row 13 cannot be read as an image"):
        [ImageDataset(splits[role], spec_of()) for role in ("train", "eval")]


def test_images_are_named_by_row_and_by_the_file_in_the_folder_of_the_data(tmp_path):
    for name in ("cat", "dog"):
        for number in range(4):
            (tmp_path / name).mkdir(exist_ok=True)
            picture().save(tmp_path / name / f"{number} b.png")
    splits, _, _ = prepare(load_splits(str(tmp_path)), fraction=0.5)
    for part in splits.values():
        images = ImageDataset(part, spec_of())
        numbers, files = images.sources(torch.arange(len(images)).flip(0))
        assert numbers == part["row"][::-1]
        assert files == [f"{('cat', 'dog')[row // 4]}/{row % 4} b.png" for row in numbers]


def test_rows_that_hold_their_images_name_no_file():
    images = ImageDataset(prepare({"train": dataset([0, 0, 1, 1])}, fraction=0.5)[0]["eval"], spec_of())
    assert images.sources(torch.arange(2)) == (images.rows["row"][:], ["", ""])


def test_cached_images_equal_images_decoded_by_workers(monkeypatch):
    rows = dataset([0, 1, 0, 1, 1]).cast_column("image", Image(decode=False))
    batches = [[3, 1], [0, 4]]
    cached = list(data_loader(ImageDataset(rows, spec_of()), batches, num_workers=2))
    monkeypatch.setattr(image_dataset, "CACHE_BYTES", 0)
    images = ImageDataset(rows, spec_of())
    assert images.cache is None
    for one, other in zip(cached, data_loader(images, batches, num_workers=2), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in ("images", "labels", "index"))


@pytest.mark.parametrize("how", [dict(resize=(16, 20)), dict(resize=(5, 20)), dict(fast_resize=True), {}])
def test_a_decoded_batch_is_one_piece_of_memory(how, monkeypatch):
    monkeypatch.setattr(image_dataset, "CACHE_BYTES", 0)
    images = ImageDataset(undecoded([item_of(grainy(), "JPEG")] * 3), dataclasses.replace(spec_of(), **how))
    batch = images.__getitems__([0, 2])["images"]
    assert (batch.shape, batch.is_contiguous()) == ((2, 3, 8, 12), True)


@pytest.mark.parametrize("rows", [[0, 2, 3], [0, 1, 2, 3, 4], [1, 2], [4]])
def test_features_stand_in_the_place_of_their_images(rows):
    images = ImageDataset(undecoded(good_items(5), labels=[0, 1, 1, 0, 1]), spec_of(), keep_full=True)
    table, labels = torch.randn(len(rows), 7), images.labels
    features = FeatureDataset(images, table, torch.tensor(rows))
    count = len(rows)
    assert len(features) == count
    order = list(range(count))[::-1]
    ids = [*order, count]  # the first one comes a second time
    for batch in (features.__getitems__(ids), *data_loader(features, [ids], num_workers=2)):
        places = [*order, 0]
        assert torch.equal(batch["images"], table[places])
        assert torch.equal(batch["labels"], labels[torch.tensor(rows)[places]])
        assert batch["index"].tolist() == ids
        assert features.row_numbers(batch["index"]) == [rows[place] for place in places]


def test_features_keep_the_number_of_each_row_and_what_was_skipped(monkeypatch):
    items = good_items(5)
    items[1] = {"bytes": b"no picture", "path": None}
    for cached in (True, False):
        if not cached:
            monkeypatch.setattr(image_dataset, "CACHE_BYTES", 0)
        images = ImageDataset(undecoded(items), spec_of(), on_bad_image="skip", keep_full=True)
        batches = list(data_loader(images, sequential_batches(len(images), 2), num_workers=0))
        seen = sorted(set(torch.cat([batch["index"] for batch in batches]).tolist()))
        features = FeatureDataset(images, torch.randn(4, 7), torch.tensor(seen))
        assert features.row_numbers(torch.arange(4)) == [0, 2, 3, 4]
        assert features.labels.tolist() == [0, 0, 1, 0]
        assert len(features.skipped) == 1


BAD = {
    "no bytes": {"bytes": b"", "path": "some.jpg"},
    "half a file": {"bytes": encoded(picture(0, (64, 64)), "JPEG")[:900], "path": "some.jpg"},
    "text": {"bytes": b"this is no picture", "path": "some.jpg"},
    "no such file": {"bytes": None, "path": "/nowhere/some.jpg"},
    "decompression bomb": {"bytes": encoded(PILImage.new("L", (60, 60))), "path": "some.jpg"},
    "nothing": None,
}


@pytest.fixture(params=BAD)
def one_bad(request, monkeypatch):
    """Four images, of which number 2 cannot be read, and whether its file has a name."""
    monkeypatch.setattr(PILImage, "MAX_IMAGE_PIXELS", 1000)
    items = good_items(4)
    items[2] = BAD[request.param]
    if request.param == "half a file":
        monkeypatch.setattr(PILImage, "MAX_IMAGE_PIXELS", 10_000)
    return undecoded(items), items[2] is not None


@pytest.mark.parametrize("cached", [True, False])
def test_training_stops_at_a_bad_image_and_names_row_file_and_remedy(one_bad, cached, monkeypatch):
    rows, named = one_bad
    if not cached:
        monkeypatch.setattr(image_dataset, "CACHE_BYTES", 0)
    where = r"row 2 \(.*some.jpg\) cannot" if named else "row 2 cannot"
    with pytest.raises(ValueError, match=rf"{where} be read as an image: .*; .*--on_bad_image skip"):
        list(data_loader(ImageDataset(rows, spec_of()), [[0, 1], [2, 3]], num_workers=0))


def test_a_bad_image_is_taken_out_of_the_cache_and_counted(one_bad):
    images = ImageDataset(one_bad[0], spec_of(), on_bad_image="skip")
    assert len(images) == len(images.cache) == 3
    assert images.rows["row"][:] == [0, 1, 3]
    assert images.labels.tolist() == [0, 1, 1]
    assert len(images.skipped) == 1
    assert "row 2" in next(iter(images.skipped))


def test_without_a_cache_another_image_takes_the_place_in_training_and_none_in_scoring(one_bad, monkeypatch):
    monkeypatch.setattr(image_dataset, "CACHE_BYTES", 0)
    rows, ids = one_bad[0], [[1, 2, 7, 0], [2, 3]]  # 7 is 3, for the second time
    training = ImageDataset(rows, spec_of(), on_bad_image="skip", keep_full=True)
    batches = list(data_loader(training, ids, num_workers=0))
    assert [len(batch["images"]) for batch in batches] == [4, 2]
    for batch, wanted in zip(batches, ids, strict=True):
        assert set(batch["index"].tolist()) == set(wanted) - {2}
        assert_own(batch, rows["image"][:], rows["label"][:])
    assert len(training.skipped) == 1  # though it came twice
    scoring = ImageDataset(rows, spec_of(), on_bad_image="skip")
    batches = list(data_loader(scoring, ids, num_workers=0))
    assert [batch["index"].tolist() for batch in batches] == [[1, 7, 0], [3]]
    for batch in batches:
        assert_own(batch, rows["image"][:], rows["label"][:])


def test_a_batch_of_bad_images_alone_stops_training_and_is_left_out_of_scoring(monkeypatch):
    monkeypatch.setattr(image_dataset, "CACHE_BYTES", 0)
    rows = undecoded([*good_items(2), BAD["text"], BAD["text"]])
    batches = [[0, 1], [2, 3]]
    scored = list(data_loader(ImageDataset(rows, spec_of(), on_bad_image="skip"), batches, num_workers=0))
    assert [batch["index"].tolist() for batch in scored] == [[0, 1]]
    with pytest.raises(ValueError, match="no image of a whole batch of 2 can be read; row 2"):
        list(data_loader(ImageDataset(rows, spec_of(), on_bad_image="skip", keep_full=True), batches, num_workers=0))


def test_a_data_set_of_bad_images_alone_is_an_error():
    with pytest.raises(ValueError, match="none of the 2 images can be read; row 0"):
        ImageDataset(undecoded([BAD["text"]] * 2), spec_of(), on_bad_image="skip")


def test_worker_processes_report_bad_images(monkeypatch):
    monkeypatch.setattr(image_dataset, "CACHE_BYTES", 0)
    rows = undecoded([*good_items(3), BAD["text"]])
    images = ImageDataset(rows, spec_of(), on_bad_image="skip", keep_full=True)
    batches = list(data_loader(images, [[0, 3], [2, 1]], num_workers=2))
    assert [batch["index"].tolist() for batch in batches] == [[0, 0], [2, 1]]
    assert len(images.skipped) == 1
    with pytest.raises(ValueError, match=r"^row 3 .*--on_bad_image skip"):
        list(data_loader(ImageDataset(rows, spec_of(), keep_full=True), [[0, 3], [2, 1]], num_workers=2))


def test_there_are_as_many_workers_as_cores(monkeypatch):
    """torch warns of more, and a warning fails a test."""
    monkeypatch.setattr(image_dataset, "CACHE_BYTES", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    (batch,) = data_loader(ImageDataset(undecoded(good_items(3)), spec_of()), [[2, 1]])
    assert batch["index"].tolist() == [2, 1]


def test_augmentation_and_order_are_stable_under_the_number_of_workers(monkeypatch):
    monkeypatch.setattr(image_dataset, "CACHE_BYTES", 0)
    photos = undecoded([item_of(grainy(), "JPEG")] * 6)
    images = ImageDataset(photos, training_image_spec(spec_of(), photos, "resized"), keep_full=True, seed=1)
    order = [[2 * EPOCH_STRIDE + number for number in ids] for ids in epoch_batches(6, 3, seed=1, epoch=2)]

    def epoch(workers):
        batches = data_loader(images, order, workers)
        how = dict(flip=True, auto_augment="rand", jitter=0.3, erase=0.5)
        return torch.cat([augment(rows["images"], rows["index"], 1, 2, spec_of(), **how) for rows in batches])

    assert torch.equal(epoch(0), epoch(2))

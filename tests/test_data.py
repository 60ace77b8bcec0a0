"""Claims about data sets, columns, splits, decoding and order."""

import itertools

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from PIL import Image as PILImage
from transformers import ViTImageProcessorPil

from hf_vit import HFViTConfig, data
from hf_vit.augment import normalize


def picture(seed=0, size=(20, 14), mode="RGB"):
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    return PILImage.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, *channels), dtype=np.uint8))


def dataset(labels, names=("cat", "dog"), **columns):
    rows = {"image": [picture(i) for i in range(len(labels))], "label": labels, **columns}
    kinds = {name: Value("string") for name in columns}
    return Dataset.from_dict(rows, Features(image=Image(), label=ClassLabel(names=list(names)), **kinds))


def prepare(splits, train="train", fraction=0.25, **how):
    return data.prepare(DatasetDict(splits), train_split=train, eval_fraction=fraction, **how)


def form_of(size=(8, 12), channels=3, processor=None):
    processor = processor or ViTImageProcessorPil(size={"height": size[0], "width": size[1]})
    return data.image_form(processor, HFViTConfig(image_size=size, patch_size=4, num_channels=channels))


def test_columns_are_found_by_their_type():
    named = dataset([0, 1], note=["a", "b"]).rename_columns({"image": "photo", "label": "animal"})
    assert data.find_columns(named, None, None) == ("photo", "animal")


@pytest.mark.parametrize("column", ["image", "label"])
def test_a_missing_column_is_an_error_that_lists_the_columns(column):
    lacking = dataset([0, 1], note=["a", "b"]).remove_columns(column)
    with pytest.raises(ValueError, match=r"--(image|label)_column.*note \(string\)"):
        data.find_columns(lacking, None, None)
    with pytest.raises(ValueError, match=r"no such column.*note \(string\)"):
        data.find_columns(lacking, "nothing", "nothing")


def test_two_image_columns_must_be_told_apart():
    rows = {"first": [picture(0)], "second": [picture(1)], "label": [1]}
    both = Dataset.from_dict(rows, Features(first=Image(), second=Image(), label=ClassLabel(names=["a", "b"])))
    with pytest.raises(ValueError, match="2 columns"):
        data.find_columns(both, None, None)
    assert data.find_columns(both, "second", None) == ("second", "label")


def test_a_validation_split_goes_before_a_test_split():
    train, validation, test = dataset([0, 1]), dataset([0, 1, 1]), dataset([0] * 4)
    _, names, scored = prepare({"train": train, "test": test, "validation": validation})
    assert (names, scored) == (["cat", "dog"], "validation")
    assert prepare({"train": train, "test": test})[2] == "test"
    assert prepare({"train": train, "test": test}, eval_split="train")[2] == "train"


def test_without_a_second_split_part_of_train_is_set_aside_by_class():
    splits, _, scored = prepare({"train": dataset([0] * 30 + [1] * 10)})
    assert scored == "part of train"
    assert np.bincount(splits["eval"]["label"]).tolist() == [8, 2]
    assert np.bincount(splits["train"]["label"]).tolist() == [22, 8]
    again, _, _ = prepare({"train": dataset([0] * 30 + [1] * 10)})
    assert again["eval"]["image"][:] == splits["eval"]["image"][:]


def test_a_class_of_one_image_stays_in_train_and_too_few_images_are_an_error():
    assert 12 not in data.set_aside(np.array([0] * 12 + [1]), 0.25, seed=0)
    with pytest.raises(ValueError, match="no image can be set aside"):
        data.set_aside(np.array([0, 1]), 0.1, seed=0)


def test_text_labels_become_classes_and_unknown_ones_are_named():
    def words(labels):
        return dataset([0] * len(labels)).remove_columns("label").add_column("label", labels)

    splits, names, _ = prepare({"train": words(["b", "a", "b"]), "test": words(["a"])})
    assert names == ["a", "b"]
    assert splits["train"]["label"][:] == [1, 0, 1]
    assert splits["eval"]["label"][:] == [0]
    with pytest.raises(ValueError, match="labels z of the split 'test'"):
        prepare({"train": words(["b", "a"]), "test": words(["z"])})


def test_a_split_that_is_empty_unknown_or_unlabelled_is_an_error():
    with pytest.raises(ValueError, match="'train' is empty"):
        prepare({"train": dataset([]), "test": dataset([0])})
    with pytest.raises(ValueError, match="no split 'dev'; it has train"):
        prepare({"train": dataset([0, 1])}, eval_split="dev")
    with pytest.raises(ValueError, match="outside 0 to 1, the first is -1 in row 1"):
        prepare({"train": dataset([0, 1]), "test": dataset([0, -1])})


def test_loading_knows_folders_files_and_the_embedded_set(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(2):
            picture().save(tmp_path / "photos" / name / f"{index}.png")
    _, names, _ = prepare(data.load(str(tmp_path / "photos")), fraction=0.5)
    assert names == ["cat", "dog"]
    dataset([0, 1, 1]).to_parquet(tmp_path / "some.parquet")
    assert len(data.load(str(tmp_path / "some.parquet"))["train"]) == 3
    (tmp_path / "some.txt").write_text("no data")
    with pytest.raises(ValueError, match=r"some.txt is no data file"):
        data.load(str(tmp_path / "some.txt"))
    embedded = data.load("fashion-mnist-mini")
    assert np.bincount(embedded["train"]["label"]).tolist() == [1000] * 10
    assert np.bincount(embedded["test"]["label"]).tolist() == [200] * 10


def test_a_broken_image_is_named_by_row_and_file(tmp_path):
    for index, name in enumerate(("cat", "dog")):
        (tmp_path / name).mkdir()
        picture().save(tmp_path / name / f"{index}.png")
    (tmp_path / "dog" / "broken.png").write_bytes(b"this is no picture")
    splits, _, _ = prepare(data.load(str(tmp_path)), train=None, eval_split="train")
    with pytest.raises(ValueError, match=r"row 2 \(.*broken.png\) cannot be read as an image"):
        data.Images(splits["eval"], form_of())


def test_a_broken_row_is_named_by_its_number_before_any_split():
    whole = dataset([0] * 8 + [1] * 8).cast_column("image", Image(decode=False))
    images = [dict(row) for row in whole["image"]]
    images[13] = {"bytes": b"no picture", "path": None}
    broken = whole.remove_columns("image").add_column("image", images, feature=Image(decode=False))
    splits, _, _ = prepare({"train": broken}, fraction=0.25)
    with pytest.raises(ValueError, match="row 13 cannot be read as an image"):
        [data.Images(splits[role], form_of()) for role in ("train", "eval")]


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_decoded_and_normalised_images_equal_the_image_processor(mode):
    processor = ViTImageProcessorPil(
        size={"height": 8, "width": 12}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4], do_convert_rgb=True
    )
    form = form_of(processor=processor)
    image = picture(1, mode=mode)
    rows = Dataset.from_dict({"image": [image], "label": [0]}, Features(image=Image(), label=ClassLabel(names=["x"])))
    batch = data.Images(rows.cast_column("image", Image(decode=False)), form).__getitems__([0])
    wanted = processor([image.convert("RGB")], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(normalize(batch["images"], form), wanted, atol=1e-6, rtol=0)


def test_a_rotated_photo_is_turned_upright(tmp_path):
    image = picture(size=(8, 12))
    exif = PILImage.Exif()
    exif[0x0112] = 6  # the camera was turned by a quarter
    image.save(tmp_path / "turned.png", exif=exif)
    decoded = data.decode({"bytes": None, "path": str(tmp_path / "turned.png")}, form_of((12, 8)))
    np.testing.assert_array_equal(decoded, np.asarray(image.rotate(-90, expand=True)))


def test_cached_images_equal_images_decoded_by_workers(monkeypatch):
    rows = dataset([0, 1, 0, 1, 1]).cast_column("image", Image(decode=False))
    batches = [[3, 1], [0, 4]]
    cached = list(data.loader(data.Images(rows, form_of()), batches, num_workers=2))
    monkeypatch.setattr(data, "CACHE_BYTES", 0)
    images = data.Images(rows, form_of())
    assert images.cache is None
    for one, other in zip(cached, data.loader(images, batches, num_workers=2), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in ("images", "labels", "index"))


def test_an_epoch_shows_every_image_once_and_depends_on_seed_and_epoch_alone():
    epoch = list(data.epoch_batches(12, 4, seed=1, epoch=3))
    assert sorted(itertools.chain(*epoch)) == list(range(12))
    assert epoch == list(data.epoch_batches(12, 4, seed=1, epoch=3))
    assert epoch != list(data.epoch_batches(12, 4, seed=1, epoch=4))
    assert epoch != list(data.epoch_batches(12, 4, seed=2, epoch=3))


def test_two_processes_see_the_batches_of_one():
    whole = list(data.epoch_batches(21, 6, seed=0, epoch=0))
    halves = [list(data.epoch_batches(21, 3, 0, 0, rank, 2)) for rank in range(2)]
    assert [a + b for a, b in zip(*halves, strict=True)] == whole
    scored = [itertools.chain(*data.batches_in_order(10, 3, rank, 2)) for rank in range(2)]
    assert sorted(itertools.chain(*scored)) == list(range(10))


def test_fewer_images_than_a_batch_still_fill_one():
    (batch,) = data.epoch_batches(3, 8, seed=0, epoch=0)
    assert len(batch) == 8
    assert {i % 3 for i in batch} == {0, 1, 2}
    assert len(set(batch)) == 8  # an image that comes again is another sample, augmented anew


def test_labels_are_matched_by_name_and_others_refused():
    matched = data.match_labels(torch.tensor([0, 1, 1]), ["cat", "dog"], {0: "dog", 1: "cat"})
    assert matched.tolist() == [1, 0, 0]
    assert data.match_labels(torch.tensor([0]), ["cat"], {0: "dog", 1: "cat"}).tolist() == [1]
    with pytest.raises(ValueError, match=r"does not know 1 of the data set's 2 labels: \['eel'\]"):
        data.match_labels(torch.tensor([0]), ["eel", "dog"], {0: "dog", 1: "cat"})


def test_scoring_without_a_split_to_score_and_missing_labels_are_errors():
    with pytest.raises(ValueError, match="no validation or test split; name one with --split: train"):
        prepare({"train": dataset([0, 1])}, train=None)
    words = dataset([0, 1]).remove_columns("label").add_column("label", ["a", None])
    with pytest.raises(ValueError, match="1 labels of the split 'train' are missing, the first in row 1"):
        prepare({"train": words})


def test_sixteen_bits_are_scaled_not_clipped(tmp_path):
    PILImage.fromarray(np.full((8, 12), 32768, dtype=np.uint16)).save(tmp_path / "deep.png")
    assert data.decode({"bytes": None, "path": str(tmp_path / "deep.png")}, form_of()).mean() == 127

"""Claims about data sets, columns, splits, decoding and order."""

import contextlib
import dataclasses
import itertools
import json
import re
import shutil
import tarfile
import zipfile
from io import BytesIO

import numpy as np
import PIL
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from PIL import Image as PILImage
from PIL import ImageOps
from transformers import (
    BitImageProcessorPil,
    CLIPImageProcessorPil,
    ConvNextImageProcessorPil,
    DeiTImageProcessorPil,
    MobileViTImageProcessorPil,
    ViTImageProcessorPil,
)

from hf_vit import HFViTConfig
from hf_vit.data import image_dataset, sources
from hf_vit.data.augment import augment
from hf_vit.data.columns import find_columns, match_labels
from hf_vit.data.crops import crop_params
from hf_vit.data.decoding import decode_image, decode_rows, open_image, stack_images
from hf_vit.data.image_dataset import FeatureDataset, ImageDataset
from hf_vit.data.image_files import AllowedFiles
from hf_vit.data.image_spec import ImageSpec, image_spec_of, training_image_spec
from hf_vit.data.loader import data_loader
from hf_vit.data.normalization import normalize
from hf_vit.data.sampling import EPOCH_STRIDE, epoch_batches, sequential_batches
from hf_vit.data.sources import load_splits
from hf_vit.data.splits import class_weights, prepare_splits, stratified_holdout
from hf_vit.data.streaming import ImageStream, prepare_stream


def picture(seed=0, size=(20, 14), mode="RGB"):
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    return PILImage.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, *channels), dtype=np.uint8))


def dataset(labels, names=("cat", "dog"), **columns):
    rows = {"image": [picture(i) for i in range(len(labels))], "label": labels, **columns}
    kinds = {name: Value("string") for name in columns}
    return Dataset.from_dict(rows, Features(image=Image(), label=ClassLabel(names=list(names)), **kinds))


def prepare(splits, train="train", fraction=0.25, **how):
    return prepare_splits(DatasetDict(splits), train_split=train, eval_fraction=fraction, **how)


def spec_of(size=(8, 12), channels=3, processor=None):
    processor = processor or ViTImageProcessorPil(size={"height": size[0], "width": size[1]})
    return image_spec_of(processor, HFViTConfig(image_size=size, patch_size=4, num_channels=channels))


def test_columns_are_found_by_their_type():
    named = dataset([0, 1], note=["a", "b"]).rename_columns({"image": "photo", "label": "animal"})
    assert find_columns(named, None, None) == ("photo", "animal")


@pytest.mark.parametrize("column", ["image", "label"])
def test_a_missing_column_is_an_error_that_lists_the_columns(column):
    lacking = dataset([0, 1], note=["a", "b"]).remove_columns(column)
    with pytest.raises(ValueError, match=r"--(image|label)_column.*note \(string\)"):
        find_columns(lacking, None, None)
    with pytest.raises(ValueError, match=r"no such column.*note \(string\)"):
        find_columns(lacking, "nothing", "nothing")


def test_two_image_columns_must_be_told_apart():
    rows = {"first": [picture(0)], "second": [picture(1)], "label": [1]}
    both = Dataset.from_dict(rows, Features(first=Image(), second=Image(), label=ClassLabel(names=["a", "b"])))
    with pytest.raises(ValueError, match="2 columns"):
        find_columns(both, None, None)
    assert find_columns(both, "second", None) == ("second", "label")


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
    assert 12 not in stratified_holdout(np.array([0] * 12 + [1]), 0.25, seed=0)
    with pytest.raises(ValueError, match="no image can be held out"):
        stratified_holdout(np.array([0, 1]), 0.1, seed=0)


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
    _, names, _ = prepare(load_splits(str(tmp_path / "photos")), fraction=0.5)
    assert names == ["cat", "dog"]
    dataset([0, 1, 1]).to_parquet(tmp_path / "some.parquet")
    assert len(load_splits(str(tmp_path / "some.parquet"))["train"]) == 3
    (tmp_path / "some.txt").write_text("no data")
    with pytest.raises(ValueError, match=r"some.txt is no data file"):
        load_splits(str(tmp_path / "some.txt"))
    embedded = load_splits("fashion-mnist-mini")
    assert np.bincount(embedded["train"]["label"]).tolist() == [1000] * 10
    assert np.bincount(embedded["test"]["label"]).tolist() == [200] * 10


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


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_decoded_and_normalised_images_equal_the_image_processor(mode):
    processor = ViTImageProcessorPil(
        size={"height": 8, "width": 12}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4], do_convert_rgb=True
    )
    spec = spec_of(processor=processor)
    image = picture(1, mode=mode)
    rows = Dataset.from_dict({"image": [image], "label": [0]}, Features(image=Image(), label=ClassLabel(names=["x"])))
    batch = ImageDataset(rows.cast_column("image", Image(decode=False)), spec).__getitems__([0])
    wanted = processor([image.convert("RGB")], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(normalize(batch["images"], spec), wanted, atol=1e-6, rtol=0)


def test_a_rotated_photo_is_turned_upright(tmp_path):
    image = picture(size=(8, 12))
    exif = PILImage.Exif()
    exif[0x0112] = 6  # the camera was turned by a quarter
    image.save(tmp_path / "turned.png", exif=exif)
    decoded = decode_image({"bytes": (tmp_path / "turned.png").read_bytes(), "path": None}, spec_of((12, 8)))
    np.testing.assert_array_equal(decoded, np.asarray(image.rotate(-90, expand=True)))


def test_cached_images_equal_images_decoded_by_workers(monkeypatch):
    rows = dataset([0, 1, 0, 1, 1]).cast_column("image", Image(decode=False))
    batches = [[3, 1], [0, 4]]
    cached = list(data_loader(ImageDataset(rows, spec_of()), batches, num_workers=2))
    monkeypatch.setattr(image_dataset, "CACHE_BYTES", 0)
    images = ImageDataset(rows, spec_of())
    assert images.cache is None
    for one, other in zip(cached, data_loader(images, batches, num_workers=2), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in ("images", "labels", "index"))


def test_an_epoch_shows_every_image_once_and_depends_on_seed_and_epoch_alone():
    epoch = list(epoch_batches(12, 4, seed=1, epoch=3))
    assert sorted(itertools.chain(*epoch)) == list(range(12))
    assert epoch == list(epoch_batches(12, 4, seed=1, epoch=3))
    assert epoch != list(epoch_batches(12, 4, seed=1, epoch=4))
    assert epoch != list(epoch_batches(12, 4, seed=2, epoch=3))


def test_two_processes_see_the_batches_of_one():
    whole = list(epoch_batches(21, 6, seed=0, epoch=0))
    halves = [list(epoch_batches(21, 3, 0, 0, rank, 2)) for rank in range(2)]
    assert [a + b for a, b in zip(*halves, strict=True)] == whole
    scored = [itertools.chain(*sequential_batches(10, 3, rank, 2)) for rank in range(2)]
    assert sorted(itertools.chain(*scored)) == list(range(10))


def test_fewer_images_than_a_batch_still_fill_one():
    (batch,) = epoch_batches(3, 8, seed=0, epoch=0)
    assert len(batch) == 8
    assert {i % 3 for i in batch} == {0, 1, 2}
    assert len(set(batch)) == 8  # an image that comes again is another sample, augmented anew


def test_labels_are_matched_by_name_and_others_refused():
    matched = match_labels(torch.tensor([0, 1, 1]), ["cat", "dog"], {0: "dog", 1: "cat"})
    assert matched.tolist() == [1, 0, 0]
    assert match_labels(torch.tensor([0]), ["cat"], {0: "dog", 1: "cat"}).tolist() == [1]
    with pytest.raises(ValueError, match=r"does not know 1 of the data set's 2 labels: \['eel'\]"):
        match_labels(torch.tensor([0]), ["eel", "dog"], {0: "dog", 1: "cat"})


def test_scoring_without_a_split_to_score_and_missing_labels_are_errors():
    with pytest.raises(ValueError, match="no validation or test split; name one with --split: train"):
        prepare({"train": dataset([0, 1])}, train=None)
    words = dataset([0, 1]).remove_columns("label").add_column("label", ["a", None])
    with pytest.raises(ValueError, match="1 labels of the split 'train' are missing, the first in row 1"):
        prepare({"train": words})


def test_sixteen_bits_are_scaled_not_clipped(tmp_path):
    PILImage.fromarray(np.full((8, 12), 32768, dtype=np.uint16)).save(tmp_path / "deep.png")
    item = {"bytes": (tmp_path / "deep.png").read_bytes(), "path": None}
    assert decode_image(item, spec_of()).mean() == 127


# ----------------------------------------------------------------------------------------------------------------------
# Where the images come from: numbers 0 to 3 are for training, 4 and 5 for scoring, the even ones are cats


ANIMALS = ("cat", "dog")


def animal(number):
    return ANIMALS[number % 2]


def encoded(image, kind="PNG", **how):
    file = BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def pictures(numbers):
    return [encoded(picture(number, (8, 12))) for number in numbers]


def known(splits, split="train", **how):
    """The (class, number) of each picture of a split; it is found by its pixels."""
    chosen, names, _ = prepare(splits, train=None, eval_split=split, **how)
    images = ImageDataset(chosen["eval"], spec_of())
    numbers = [
        next(n for n in range(6) if np.array_equal(np.asarray(picture(n, (8, 12))), image.permute(1, 2, 0)))
        for image in images.cache
    ]
    return {(names[label], number) for label, number in zip(images.labels.tolist(), numbers, strict=True)}


def all_of(numbers):
    return {(animal(number), number) for number in numbers}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """photos/train/cat/0.png, ..., photos/val/dog/5.png"""
    folder = tmp_path_factory.mktemp("sources") / "photos"
    for number, image in enumerate(pictures(range(6))):
        file = folder / ("train" if number < 4 else "val") / animal(number) / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(image)
    return folder


def write_table(path, numbers, folder, separator=","):
    lines = [("file", "kind")]
    lines += [(f"{folder}/{'train' if n < 4 else 'val'}/{animal(n)}/{n}.png", animal(n)) for n in numbers]
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(dict(zip(lines[0], line, strict=True))) for line in lines[1:]))
    else:
        path.write_text("\n".join(separator.join(line) for line in lines))
    return str(path)


def write_tar(path, images, labels, start=0):
    with tarfile.open(path, "w") as tar:
        for number, (image, label) in enumerate(zip(images, labels, strict=True), start):
            for suffix, content in (("png", image), ("cls", str(label).encode())):
                entry = tarfile.TarInfo(f"{number:04}.{suffix}")
                entry.size = len(content)
                tar.addfile(entry, BytesIO(content))
    return str(path)


def table_of(numbers, column="image", kind=None):
    rows = {column: pictures(numbers), "label": [number % 2 for number in numbers]}
    if kind is None:
        rows[column] = [{"bytes": image, "path": None} for image in rows[column]]
    return Dataset.from_dict(rows, Features({column: kind or Image(), "label": ClassLabel(names=list(ANIMALS))}))


def test_a_folder_of_class_folders_keeps_its_splits(photos):
    splits = load_splits(str(photos))
    assert known(splits) == all_of(range(4))
    assert known(splits, "validation") == all_of([4, 5])


@pytest.mark.parametrize(("suffix", "separator"), [(".csv", ","), (".tsv", "\t"), (".jsonl", None)])
def test_a_table_names_images_below_itself_by_relative_or_absolute_paths(photos, suffix, separator):
    beside = write_table(photos.parent / f"list{suffix}", range(4), "photos", separator)
    absolute = write_table(photos.parent / f"absolute{suffix}", range(4), photos, separator)
    for table in (beside, absolute):
        assert known(load_splits(table), label_column="kind") == all_of(range(4))


def test_a_folder_of_tables_has_a_split_for_each(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "photos")
    write_table(tmp_path / "train.csv", range(4), "photos")
    write_table(tmp_path / "val.csv", [4, 5], "photos")
    splits = load_splits(str(tmp_path))
    assert known(splits, label_column="kind") == all_of(range(4))
    assert known(splits, "validation", label_column="kind") == all_of([4, 5])


def test_tar_shards_are_read_alone_or_as_a_folder(tmp_path):
    for name, numbers in (("train-0000", [0, 1]), ("train-0001", [2, 3]), ("val-0000", [4, 5])):
        write_tar(tmp_path / f"{name}.tar", pictures(numbers), [n % 2 for n in numbers])
    named = {"label_names": list(ANIMALS)}
    splits = load_splits(str(tmp_path))
    assert known(splits, **named) == all_of(range(4))
    assert known(splits, "validation", **named) == all_of([4, 5])
    assert known(load_splits(str(tmp_path / "val-0000.tar")), **named) == all_of([4, 5])


def test_parquet_and_arrow_files_saved_folders_and_columns_of_bytes_are_read(tmp_path):
    table = table_of(range(4))
    table.to_parquet(tmp_path / "table.parquet")
    table.save_to_disk(str(tmp_path / "saved"))
    DatasetDict(train=table, test=table_of([4, 5])).save_to_disk(str(tmp_path / "both"))
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    (tmp_path / "table.arrow").write_bytes(arrow.read_bytes())
    for name in ("table.parquet", "table.arrow", "saved", "both"):
        assert known(load_splits(str(tmp_path / name))) == all_of(range(4)), name
    assert known(load_splits(str(tmp_path / "both")), "test") == all_of([4, 5])
    table_of(range(4), "png", Value("binary")).to_parquet(tmp_path / "bytes.parquet")
    assert known(load_splits(str(tmp_path / "bytes.parquet")), image_column="png") == all_of(range(4))


@pytest.mark.parametrize(
    "name",
    [
        "./nowhere",
        "/nowhere/at/all",
        "~/nowhere-at-all",
        "a/b/nowhere",
        "../nowhere.csv",
        "nowhere.csv",
        "data/nowhere.tar",
    ],
)
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name):
    with pytest.raises(ValueError, match=r"--dataset_name .*nowhere.*: there is no such folder or file here"):
        load_splits(name)


def test_webdatasets_cls_is_a_label_column():
    rows = Dataset.from_dict(
        {"png": [{"bytes": pictures([0])[0], "path": None}], "cls": [1], "__key__": ["x"]},
        Features({"png": Image(), "cls": Value("int64"), "__key__": Value("string")}),
    )
    assert find_columns(rows, None, None) == ("png", "cls")


def test_a_column_of_text_or_numbers_holds_no_images():
    rows = dataset([0, 1], note=["a", "b"])
    for column, kind in (("note", "string"), ("label", "ClassLabel")):
        with pytest.raises(ValueError, match=rf"--image_column {column}: it holds no images; .*{column} \({kind}\)"):
            find_columns(rows, column, None)


def test_a_table_whose_text_names_no_image_files_is_an_error(tmp_path):
    (tmp_path / "list.csv").write_text("note,label\nhello,1\ngood bye,0\n")
    with pytest.raises(
        ValueError, match=r"no column of type Image: name one with --image_column.*note \((large_)?string\)"
    ):
        prepare(load_splits(str(tmp_path / "list.csv")))


# ----------------------------------------------------------------------------------------------------------------------
# Classes, and parts of them


def plain(labels):
    """Labels that are bare numbers or text."""
    return dataset([0] * len(labels)).remove_columns("label").add_column("label", labels)


def labels_of(splits):
    return {role: rows["label"][:] for role, rows in splits.items()}


def test_bare_numbers_are_places_in_label_names():
    splits, names, _ = prepare({"train": plain([2, 0, 2]), "test": plain([0])}, label_names=["ant", "bee", "cow"])
    assert names == ["ant", "bee", "cow"]
    assert labels_of(splits) == {"train": [2, 0, 2], "eval": [0]}
    with pytest.raises(ValueError, match=r"labels 3 of the split 'test' do not occur in --label_names"):
        prepare({"train": plain([2, 0]), "test": plain([3])}, label_names=["ant", "bee", "cow"])


def test_label_names_give_text_labels_their_order():
    splits, names, _ = prepare({"train": plain(["b", "a"]), "test": plain(["a"])}, label_names=["c", "b", "a"])
    assert names == ["c", "b", "a"]
    assert labels_of(splits) == {"train": [1, 2], "eval": [2]}
    with pytest.raises(ValueError, match=r"labels a of the split 'train' do not occur in --label_names"):
        prepare({"train": plain(["b", "a"]), "test": plain(["b"])}, label_names=["b", "c"])


def test_classes_that_training_lacks_are_an_error_that_names_them():
    splits = {"train": dataset([0, 1], "abcd"), "test": dataset([0, 3, 2, 3], "abcd")}
    with pytest.raises(ValueError, match=r"'test' has images of 2 classes that the split 'train' has none of: c, d;"):
        prepare(splits)
    assert labels_of(prepare({**splits, "test": dataset([0], "abcd")})[0])["eval"] == [0]


def test_one_class_alone_cannot_be_trained_on():
    with pytest.raises(ValueError, match=r"the 3 training images are all of one class \(dog\)"):
        prepare({"train": dataset([1, 1, 1])})
    assert labels_of(prepare({"test": dataset([1, 1])}, train=None)[0]) == {"eval": [1, 1]}


def test_parts_of_the_training_images_are_by_class_and_by_seed():
    train = dataset([0] * 20 + [1] * 8 + [2], "abc")
    rows_of = lambda **how: {role: rows["row"][:] for role, rows in prepare({"train": train}, **how)[0].items()}
    whole, half, few = rows_of(), rows_of(train_fraction=0.5), rows_of(shots=1)
    assert whole["eval"] == half["eval"] == few["eval"]
    assert set(half["train"]) < set(whole["train"])
    assert not set(whole["train"]) & set(whole["eval"])
    counts = lambda rows: np.bincount(np.asarray(train["label"])[rows]).tolist()
    assert [counts(part["train"]) for part in (whole, half, few)] == [[15, 6, 1], [8, 3, 1], [1, 1, 1]]
    assert half == rows_of(train_fraction=0.5)
    assert half["train"] != rows_of(train_fraction=0.5, seed=1)["train"]
    assert 28 in few["train"]  # the only image of its class


def test_more_shots_than_images_name_the_class_and_its_count():
    with pytest.raises(ValueError, match=r"--shots 3: the class 'dog' has only 2 training images"):
        prepare({"train": dataset([0, 0, 0, 1, 1]), "test": dataset([0])}, shots=3)


def test_class_weights_are_inverse_counts_with_mean_one():
    labels = torch.tensor([0, 0, 0, 2])
    weights = class_weights(labels, 4)
    torch.testing.assert_close(weights, torch.tensor([4 / (2 * 3), 0, 4 / 2, 0]))
    assert weights[labels].mean() == 1


# ----------------------------------------------------------------------------------------------------------------------
# Pixels


def item_of(image, kind="PNG", **how):
    return {"bytes": encoded(image, kind, **how), "path": None}


def smooth(width, height):
    """A picture that any good resizing treats alike, and that shows how it is turned."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return PILImage.fromarray(np.stack([x, y, 255 - x], axis=2).astype(np.uint8))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("mode", "kind", "how"),
    [
        *[(mode, "PNG", {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")],
        ("P", "PNG", {"transparency": bytes([0, 128, 255])}),
        ("P", "GIF", {"transparency": 3}),
        *[(mode, "JPEG", {}) for mode in ("L", "RGB", "CMYK", "YCbCr")],
    ],
)
def test_every_mode_of_image_decodes_as_pil_converts_it(mode, kind, how, channels):
    item = item_of(picture(3, (8, 12)).convert(mode), kind, **how)
    image = PILImage.open(BytesIO(item["bytes"]))
    if how:
        image = image.convert("RGBA")
    wanted = np.asarray(image.convert({1: "L", 3: "RGB"}[channels])).reshape(8, 12, channels)
    np.testing.assert_array_equal(decode_image(item, spec_of(channels=channels)), wanted)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("dtype", "kind"), [(np.uint16, "PNG"), (np.uint16, "TIFF"), (np.int32, "TIFF")])
def test_sixteen_bits_become_eight_in_every_channel(dtype, kind, channels):
    deep = np.random.default_rng(0).integers(0, 65536, (8, 12)).astype(dtype)
    decoded = decode_image(item_of(PILImage.fromarray(deep), kind), spec_of(channels=channels))
    np.testing.assert_array_equal(decoded, np.repeat(deep[..., None] // 257, channels, axis=2))


def test_floating_point_pixels_are_refused():
    with pytest.raises(ValueError, match="floating-point numbers of no stated range"):
        decode_image(item_of(PILImage.fromarray(np.ones((8, 12), np.float32)), "TIFF"), spec_of())


PROCESSORS = {
    "ViT": lambda: ViTImageProcessorPil(size={"height": 14, "width": 12}),
    "DeiT": lambda: DeiTImageProcessorPil(size={"height": 14, "width": 14}, crop_size={"height": 13, "width": 12}),
    "CLIP": lambda: CLIPImageProcessorPil(size={"shortest_edge": 12}, crop_size={"height": 12, "width": 12}),
    "DINOv2": lambda: BitImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 14, "width": 14}),
    "ViT, the middle": lambda: ViTImageProcessorPil(
        size={"shortest_edge": 16}, do_center_crop=True, crop_size={"height": 14, "width": 12}
    ),
    "crop larger than the image": lambda: BitImageProcessorPil(
        size={"shortest_edge": 9}, crop_size={"height": 14, "width": 12}
    ),
}


@pytest.mark.parametrize("size", [(37, 53), (53, 36), (12, 12), (10, 91), (16, 17)])
@pytest.mark.parametrize("name", PROCESSORS)
def test_each_kind_of_image_processor_is_followed_to_the_pixel(name, size):
    processor, image = PROCESSORS[name](), picture(1, size)
    spec = image_spec_of(processor, HFViTConfig())
    wanted = processor(image, do_rescale=False, do_normalize=False, return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(decode_image(item_of(image), spec).transpose(2, 0, 1), wanted)


@pytest.mark.parametrize(
    "processor",
    [
        ConvNextImageProcessorPil(size={"shortest_edge": 16}),
        MobileViTImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 12, "width": 12}),
        ViTImageProcessorPil(size={"height": 14, "width": 12}, do_normalize=False),
        ViTImageProcessorPil(size={"height": 14, "width": 12}, rescale_factor=1 / 127.5),
    ],
    ids=["ConvNeXt", "MobileViT", "not normalised", "rescaled otherwise"],
)
def test_an_image_processor_that_does_more_makes_the_pixels_itself(processor):
    spec = image_spec_of(processor, HFViTConfig())
    assert spec.processor is processor
    images = [picture(number, (37, 53)) for number in range(3)]
    wanted = processor(images, return_tensors="pt")["pixel_values"]
    rows = ImageDataset(undecoded([item_of(image) for image in images]), spec)
    assert rows.cache is None
    got = torch.cat([normalize(batch["images"], spec) for batch in data_loader(rows, [[0, 1], [2]], 0)])
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)


def undecoded(items, labels=None, names=ANIMALS):
    """Rows as `prepare` gives them."""
    labels = [number % 2 for number in range(len(items))] if labels is None else labels
    kinds = Features(image=Image(decode=False), label=ClassLabel(names=list(names)), row=Value("int64"))
    return Dataset.from_dict({"image": items, "label": labels, "row": list(range(len(items)))}, kinds)


def test_a_large_jpeg_is_scored_as_pillow_decodes_and_resizes_it():
    photo, spec = item_of(smooth(480, 320), "JPEG"), spec_of((16, 24))
    opened = PILImage.open(BytesIO(photo["bytes"]))
    np.testing.assert_array_equal(decode_image(photo, spec), np.asarray(opened.resize((24, 16), spec.resample)))


# ----------------------------------------------------------------------------------------------------------------------
# JPEG files, decoded by another library than Pillow


def grainy(size=(37, 53), mode="RGB"):
    """Slopes under noise, of odd sides: where colours are stored at half the size, all rules of how they grow again count."""
    height, width = size
    noise = np.asarray(picture(0, size)).astype(int) // 4
    return PILImage.fromarray((np.asarray(smooth(width, height)) * 3 // 4 + noise).astype(np.uint8)).convert(mode)


JPEGS = {
    **{
        f"4:{name}{', progressive' if progressive else ''}": ("RGB", dict(subsampling=at, progressive=progressive))
        for at, name in enumerate(("4:4", "2:2", "2:0"))
        for progressive in (False, True)
    },
    "grey": ("L", {}),
    "grey, progressive": ("L", dict(progressive=True)),
    "coarse": ("RGB", dict(quality=5)),
    "stored as RGB": ("RGB", dict(keep_rgb=True)),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("mode", "how"), JPEGS.values(), ids=JPEGS)
def test_a_jpeg_has_the_very_pixels_that_pillow_reads(mode, how, channels, shrunk_to):
    item = item_of(grainy(mode=mode), "JPEG", **how)
    wanted = PILImage.open(BytesIO(item["bytes"])).convert({1: "L", 3: "RGB"}[channels])
    opened = open_image(item, channels)
    assert opened.mode == wanted.mode
    np.testing.assert_array_equal(np.asarray(opened), np.asarray(wanted))
    assert shrunk_to == [(37, 53)]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_jpeg_is_turned_as_its_camera_was_held(mode, orientation, shrunk_to):
    exif = PILImage.Exif()
    exif[0x0112] = orientation
    item = item_of(grainy(mode=mode), "JPEG", exif=exif)
    wanted = ImageOps.exif_transpose(PILImage.open(BytesIO(item["bytes"])))
    assert wanted.size == ((53, 37) if orientation < 5 else (37, 53))
    np.testing.assert_array_equal(np.asarray(open_image(item, 3)), np.asarray(wanted.convert("RGB")))
    assert len(shrunk_to) == 1
    height, width = decode_image(item, dataclasses.replace(spec_of((12, 8)), fast_resize=True)).shape[:2]
    assert (height, width) == (12, 8)


def test_a_jpeg_of_four_inks_is_read_by_pillow(shrunk_to):
    item = item_of(grainy(mode="CMYK"), "JPEG")
    wanted = PILImage.open(BytesIO(item["bytes"])).convert("RGB")
    np.testing.assert_array_equal(np.asarray(open_image(item, 3)), np.asarray(wanted))
    assert shrunk_to == []


def test_of_several_pictures_in_one_jpeg_the_first_is_taken(shrunk_to):
    item = item_of(grainy(), "MPO", save_all=True, append_images=[picture(1, (37, 53))])
    with PILImage.open(BytesIO(item["bytes"])) as several:
        assert (several.format, several.n_frames) == ("MPO", 2)
        np.testing.assert_array_equal(np.asarray(open_image(item, 3)), np.asarray(several))
    assert shrunk_to == [(37, 53)]


def test_a_jpeg_on_disk_is_decoded_as_one_in_memory(tmp_path, shrunk_to):
    item = item_of(grainy(), "JPEG")
    (tmp_path / "photo.jpg").write_bytes(item["bytes"])
    rows = [{"row": 0, "image": {"bytes": None, "path": "photo.jpg"}}]
    (beside,), _ = decode_rows(rows, spec_of(), files=AllowedFiles(str(tmp_path)))
    np.testing.assert_array_equal(beside, decode_image(item, spec_of()))
    assert len(shrunk_to) == 2


def damaged():
    whole = encoded(grainy((64, 64)), "JPEG")
    marks = bytearray(whole)
    marks[len(whole) // 2 : len(whole) // 2 + 40 : 2] = bytes(20)
    cuts = {f"{name} lacking": whole[:-cut] for name, cut in (("1 byte", 1), ("2 bytes", 2), ("100 bytes", 100))}
    halves = {f"{part:.0%} of it": whole[: int(part * len(whole))] for part in (0.1, 0.3, 0.5, 0.9)}
    return {**cuts, **halves, "zeros in the midst": bytes(marks), "more behind the end": whole + b"more"}


@pytest.mark.parametrize("content", damaged().values(), ids=damaged())
def test_a_damaged_jpeg_is_read_where_pillow_reads_it_and_to_its_pixels(content):
    item = {"bytes": content, "path": None}
    try:
        wanted = np.asarray(PILImage.open(BytesIO(content)).convert("RGB"))
    except OSError as error:
        unknown = isinstance(error, PIL.UnidentifiedImageError)
        wanted = "no known format" if unknown else re.escape(str(error).partition("(")[0])
        with pytest.raises((OSError, ValueError), match=wanted):
            open_image(item, 3)
    else:
        np.testing.assert_array_equal(np.asarray(open_image(item, 3)), wanted)


@pytest.mark.parametrize("how", [{}, {"fast_resize": True}, {"crop_scale": 0.9}])
@pytest.mark.parametrize("part", [0.2, 0.6, 0.95])
def test_a_jpeg_that_was_cut_off_is_an_error_that_names_its_row_and_file(part, how):
    whole = encoded(grainy((64, 64)), "JPEG")
    good, bad = ({"bytes": one, "path": "some.jpg"} for one in (whole, whole[: int(part * len(whole))]))
    spec = dataclasses.replace(spec_of(), **how)
    params = crop_params(torch.arange(2), spec, seed=0)
    images, sentences = decode_rows([{"image": good, "row": 4}, {"image": bad, "row": 7}], spec, params)
    assert [image is None for image in images] == [False, True]
    (sentence,) = sentences
    assert sentence.startswith("row 7 (some.jpg) cannot be read as an image: ")


# ----------------------------------------------------------------------------------------------------------------------
# Resizing to train, and cutting out the middle


SAME_AS_PILLOW = [getattr(PILImage.Resampling, name) for name in ("NEAREST", "BOX", "HAMMING", "LANCZOS")]


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("size", [(37, 53), (5, 7), (8, 12), (200, 13)])
@pytest.mark.parametrize("resample", [PILImage.Resampling.BILINEAR, PILImage.Resampling.BICUBIC])
def test_torch_resizes_a_training_image_within_two_of_pillow(resample, size, channels):
    spec = dataclasses.replace(spec_of(channels=channels), resample=int(resample))
    item = item_of(picture(2, size))
    exact = decode_image(item, spec).astype(int)
    fast = decode_image(item, dataclasses.replace(spec, fast_resize=True)).astype(int)
    assert exact.shape == fast.shape == (8, 12, channels)
    assert np.abs(fast - exact).max() <= (0 if size == (8, 12) else 2)


def test_torch_and_not_pillow_resizes_training_images_and_pillow_the_others(monkeypatch):
    calls, interpolate = [], torch.nn.functional.interpolate
    monkeypatch.setattr(
        torch.nn.functional, "interpolate", lambda *args, **how: calls.append(how["mode"]) or interpolate(*args, **how)
    )
    spec = spec_of()
    assert spec.resample == PILImage.Resampling.BILINEAR
    decode_image(item_of(picture(2, (37, 53))), spec)
    assert calls == []
    for resample in (PILImage.Resampling.BILINEAR, PILImage.Resampling.BICUBIC):
        decode_image(
            item_of(picture(2, (37, 53))), dataclasses.replace(spec, fast_resize=True, resample=int(resample))
        )
    assert calls == ["bilinear", "bicubic"]


@pytest.mark.parametrize("size", [(37, 53), (5, 7)])
@pytest.mark.parametrize("resample", SAME_AS_PILLOW, ids=lambda resample: resample.name)
def test_other_resamplings_of_a_training_image_are_pillows_to_the_pixel(resample, size):
    spec = dataclasses.replace(spec_of(), resample=int(resample), fast_resize=True)
    wanted = picture(2, size).resize((12, 8), resample)
    np.testing.assert_array_equal(decode_image(item_of(picture(2, size)), spec), np.asarray(wanted))


@pytest.mark.parametrize("fast_resize", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "size", [(14, 12), (13, 11), (12, 10), (9, 20), (21, 9), (10, 15), (30, 21), (31, 20), (1, 1), (13, 12), (14, 13)]
)
def test_the_middle_is_cut_out_as_pillow_does_with_black_where_the_image_ends(size, channels, fast_resize):
    image, (height, width) = picture(1, size), size
    top, left = (height - 14) // 2, (width - 12) // 2
    wanted = np.asarray(image.convert({1: "L", 3: "RGB"}[channels]).crop((left, top, left + 12, top + 14)))
    spec = ImageSpec(14, 12, channels, 2, (0.5,) * channels, (0.5,) * channels, resize=size, fast_resize=fast_resize)
    np.testing.assert_array_equal(decode_image(item_of(image), spec), wanted.reshape(14, 12, channels))


def test_a_batch_is_one_piece_of_memory_however_its_images_lie():
    images = [np.asarray(picture(number, (8, 12))).copy() for number in range(4)]
    laid = [images[0], images[1].copy(order="F"), np.tile(images[2], (2, 2, 1))[:8, :12], images[3]]
    laid[3] = np.ascontiguousarray(images[3].transpose(2, 0, 1)).transpose(1, 2, 0)
    assert sum(image.flags.c_contiguous for image in laid) == 1
    batch = stack_images(laid)
    assert (batch.shape, batch.dtype, batch.is_contiguous()) == ((4, 3, 8, 12), torch.uint8, True)
    assert torch.equal(batch, torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2))


@pytest.mark.parametrize("how", [dict(resize=(16, 20)), dict(resize=(5, 20)), dict(fast_resize=True), {}])
def test_a_decoded_batch_is_one_piece_of_memory(how, monkeypatch):
    monkeypatch.setattr(image_dataset, "CACHE_BYTES", 0)
    images = ImageDataset(undecoded([item_of(grainy(), "JPEG")] * 3), dataclasses.replace(spec_of(), **how))
    batch = images.__getitems__([0, 2])["images"]
    assert (batch.shape, batch.is_contiguous()) == ((2, 3, 8, 12), True)


# ----------------------------------------------------------------------------------------------------------------------
# Features in the place of images


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


# ----------------------------------------------------------------------------------------------------------------------
# Images that cannot be read


def good_items(count):
    return [{"bytes": image, "path": None} for image in pictures(range(count))]


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


def assert_own(batch, items, labels):
    """Each place of a batch holds the image and the label that its index says."""
    for image, label, index in zip(batch["images"], batch["labels"], (batch["index"] % len(items)), strict=True):
        np.testing.assert_array_equal(image.permute(1, 2, 0), decode_image(items[index], spec_of()))
        assert label == labels[index]


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


# ----------------------------------------------------------------------------------------------------------------------
# The order


def ids_of(*how, **more):
    return list(itertools.chain(*epoch_batches(*how, **more)))


@pytest.mark.parametrize("counts", [(30, 6), (37, 2, 1), (11, 5, 4, 3, 2, 2, 1, 1, 1, 1)])
def test_balanced_sampling_draws_each_class_as_often_within_one(counts):
    labels = np.repeat(np.arange(len(counts)), counts)
    for epoch in range(5):
        ids = ids_of(len(labels), 1, 0, epoch, labels=labels)
        assert len(ids) == len(labels)
        assert np.ptp(np.bincount(labels[np.array(ids) % len(labels)], minlength=len(counts))) <= 1


@pytest.mark.parametrize(("counts", "batch_size"), [((30, 6), 4), ((2, 1), 8)])
def test_an_image_that_is_drawn_again_gets_a_further_id(counts, batch_size):
    labels = np.repeat(np.arange(len(counts)), counts)
    ids = ids_of(len(labels), batch_size, 0, 0, labels=labels)
    assert len(ids) == len(set(ids))
    rows, times = np.unique(np.array(ids) % len(labels), return_counts=True)
    assert (times[labels[rows] == 1] > 1).any()
    assert np.ptp(times[labels[rows] == 1]) <= 1


@pytest.mark.parametrize(("count", "repeats"), [(50, 2), (50, 4), (3, 2)])
def test_repeated_images_stand_in_their_batch_with_other_ids_and_apart(count, repeats):
    batches = list(epoch_batches(count, 8, 0, 0, repeats=repeats))
    assert len(batches) == max(1, count // 8)
    for ids in map(np.array, batches):
        assert len(set(ids.tolist())) == len(ids) == 8
        _, times = np.unique(ids % count, return_counts=True)
        if count >= 8:
            assert times.tolist() == [repeats] * (8 // repeats)
            assert (ids[0::2] % count != ids[1::2] % count).all()
    if count >= 8:
        seen = np.concatenate([np.unique(np.array(ids) % count) for ids in batches])
        assert len(seen) == len(set(seen.tolist()))  # no image stands in two batches of an epoch


@pytest.mark.parametrize("how", [{"repeats": 3}, {"labels": np.repeat([0, 1], (30, 6))}])
def test_two_processes_see_the_batches_of_one_however_images_are_drawn(how):
    whole = list(epoch_batches(36, 8, 0, 1, **how))
    halves = [list(epoch_batches(36, 4, 0, 1, rank, 2, **how)) for rank in range(2)]
    assert [a + b for a, b in zip(*halves, strict=True)] == whole


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


# ----------------------------------------------------------------------------------------------------------------------
# Streams: 22 images in three shards, in the order of their numbers; 4 to score


COUNT = 22


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    """datasets waits five seconds after each pass over several Parquet files."""
    monkeypatch.setattr("datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)


@pytest.fixture(scope="module", params=["tar", "parquet"])
def shards(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for name, start, stop in (("train-0", 0, 9), ("train-1", 9, 16), ("train-2", 16, COUNT), ("validation-0", 0, 4)):
        if request.param == "tar":
            numbers = range(start, stop)
            write_tar(folder / f"{name}.tar", pictures(numbers), [n % 2 for n in numbers], start)
        else:
            table_of(range(start, stop)).to_parquet(folder / f"{name}.parquet")
    return folder


def stream_of(folder, seed=0, on_bad_image="stop", buffer=6, lanes=4, **how):
    rows, _, names, _ = prepare_stream(
        load_splits(str(folder), streaming=True), **{"label_names": list(ANIMALS), **how}
    )
    return ImageStream(rows, names, spec_of(), seed, buffer, on_bad_image, lanes)


def batches_of(stream, count, batch_size, rank=0, world=1, step=0):
    """The first `count` batches from `step` on."""
    with contextlib.closing(stream.batches(step, batch_size, rank, world)) as batches:
        return [batch for _, batch in itertools.islice(batches, count)]


def seen_in(stream, *how, **where):
    """(id, (pixels, label)) of each image of some batches, in their order."""
    return [
        (index, (image.numpy().tobytes(), label))
        for batch in batches_of(stream, *how, **where)
        for index, image, label in zip(batch["index"].tolist(), batch["images"], batch["labels"].tolist(), strict=True)
    ]


def test_a_streams_splits_are_the_training_stream_and_a_whole_split_to_score(shards):
    _, held, names, scored = prepare_stream(load_splits(str(shards), streaming=True), label_names=list(ANIMALS))
    assert (names, scored) == (list(ANIMALS), "validation")
    assert held["row"][:] == [0, 1, 2, 3]
    images = ImageDataset(held, spec_of())
    assert images.labels.tolist() == [0, 1, 0, 1]
    assert_own(images.__getitems__([0, 1, 2, 3]), good_items(4), [0, 1, 0, 1])


def test_a_streams_order_depends_on_the_seed_alone(shards):
    first = seen_in(stream_of(shards), 11, 4)
    assert seen_in(stream_of(shards), 11, 4) == first
    assert [pixels for _, pixels in seen_in(stream_of(shards, seed=1), 11, 4)] != [pixels for _, pixels in first]
    assert [pixels for _, pixels in first[:COUNT]] != [pixels for _, pixels in first[COUNT : 2 * COUNT]]


def test_each_pass_of_a_stream_shows_every_image_once_with_an_id_of_its_own(shards):
    known_pixels = {np.asarray(picture(n, (8, 12))).transpose(2, 0, 1).tobytes(): n for n in range(COUNT)}
    seen = seen_in(stream_of(shards), 3 * COUNT, 1)
    numbers = [known_pixels[pixels] for _, (pixels, _) in seen]
    for start in range(0, 3 * COUNT, COUNT):
        assert sorted(numbers[start : start + COUNT]) == list(range(COUNT))
    assert [number % 2 for number in numbers] == [label for _, (_, label) in seen]
    assert len({index for index, _ in seen}) == 3 * COUNT
    pairs = {(number, index % EPOCH_STRIDE) for number, (index, _) in zip(numbers, seen, strict=True)}
    assert len(pairs) == COUNT  # the place of an image is the same in each pass


@pytest.mark.parametrize(("together", "world"), [(12, 2), (12, 4), (6, 3), (10, 2)])
def test_any_number_of_processes_sees_together_what_one_sees_of_a_stream(shards, together, world):
    steps = 2 * COUNT // together + 1
    whole = [index for index, _ in seen_in(stream_of(shards, lanes=3), steps, together)]
    streams = [stream_of(shards, lanes=3) for _ in range(world)]
    parts = [batches_of(stream, steps, together // world, rank, world) for rank, stream in enumerate(streams)]
    assert [index for step in zip(*parts, strict=True) for part in step for index in part["index"].tolist()] == whole
    if world == 3:  # a process a shard
        assert [list(stream.lengths) for stream in streams] == [[0], [1], [2]]


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("knows", [True, False])
def test_a_stream_goes_on_at_any_step_as_if_it_had_not_stopped(shards, knows, lanes):
    stream = stream_of(shards, lanes=lanes)
    whole = [batch["index"].tolist() for batch in batches_of(stream, 24, 3)]
    for step in range(24):
        resumed = stream_of(shards, lanes=lanes)
        resumed.lengths = dict(stream.lengths) if knows else {}
        assert [batch["index"].tolist() for batch in batches_of(resumed, 24 - step, 3, step=step)] == whole[step:]


def test_a_streamed_label_outside_the_names_is_an_error(tmp_path):
    for name, labels in (("train", [0, 1, 2]), ("validation", [0])):
        write_tar(tmp_path / f"{name}.tar", pictures(range(len(labels))), labels)
    with pytest.raises(ValueError, match=r"row 2 has the label 2, none of the 2 classes"):
        batches_of(stream_of(tmp_path), 3, 1)


def test_an_unknown_label_of_the_split_to_score_is_an_error(tmp_path):
    for name, labels in (("train", [0, 1]), ("validation", [0, 5])):
        write_tar(tmp_path / f"{name}.tar", pictures(range(len(labels))), labels)
    with pytest.raises(ValueError, match=r"labels 5 of the split 'validation' do not occur in --label_names"):
        stream_of(tmp_path)


def test_text_labels_of_a_stream_are_places_in_label_names(tmp_path):
    for name, numbers in (("train", range(4)), ("validation", [0, 1])):
        text = table_of(numbers).remove_columns("label").add_column("label", [animal(n) for n in numbers])
        text.to_parquet(tmp_path / f"{name}.parquet")
    (batch,) = batches_of(stream_of(tmp_path, label_names=["dog", "cat"]), 1, 4)
    assert batch["labels"].tolist() == [1 - index % 2 for index in batch["index"].tolist()]
    with pytest.raises(ValueError, match=r"the labels \(label\) are bare string.*pass --label_names FILE"):
        stream_of(tmp_path, label_names=None)


def test_a_stream_of_bare_numbers_needs_label_names_and_one_of_classes_does_not(shards):
    if any(shards.glob("*.parquet")):
        assert stream_of(shards, label_names=None).names == list(ANIMALS)
    else:
        with pytest.raises(ValueError, match=r"the labels \(cls\) are bare int64.*pass --label_names FILE"):
            stream_of(shards, label_names=None)


def test_a_stream_without_a_split_to_score_is_an_error(tmp_path):
    tar = write_tar(tmp_path / "train.tar", pictures([0, 1]), [0, 1])
    with pytest.raises(ValueError, match=r"--streaming needs the split 'train' and another one to score.*has train"):
        prepare_stream(load_splits(tar, streaming=True), label_names=list(ANIMALS))


def test_bad_images_of_a_stream_stop_it_or_are_skipped(tmp_path):
    images = pictures(range(8))
    images[5] = b"no picture"
    write_tar(tmp_path / "train.tar", images, [n % 2 for n in range(8)])
    write_tar(tmp_path / "validation.tar", pictures([0]), [0])
    with pytest.raises(ValueError, match=r"row 5 .*cannot be read as an image.*--on_bad_image skip"):
        batches_of(stream_of(tmp_path), 2, 4)
    stream = stream_of(tmp_path, on_bad_image="skip")
    batches = batches_of(stream, 2, 4)
    assert [len(batch["images"]) for batch in batches] == [4, 4]
    assert {index for batch in batches for index in batch["index"].tolist()} == set(range(8)) - {5}
    for batch in batches:
        assert_own(batch, good_items(8), [n % 2 for n in range(8)])
    assert len(stream.skipped) == 1
    with pytest.raises(ValueError, match="no image of a whole batch can be read; row 5"):
        batches_of(stream_of(tmp_path, on_bad_image="skip"), 8, 1)


def test_a_stream_of_tables_reads_the_files_they_name(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "photos")
    write_table(tmp_path / "train.csv", range(4), "photos")
    write_table(tmp_path / "val.csv", [4, 5], "photos")
    (batch,) = batches_of(stream_of(tmp_path, label_column="kind"), 1, 4)
    assert_own(batch, good_items(4), [n % 2 for n in range(4)])


def test_an_image_inside_an_archive_is_read_where_it_lies(tmp_path):
    """A streamed folder of images names its files so: zip://FILE::ARCHIVE."""
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        archive.writestr("cat/0.png", pictures([0])[0])
    rows = [{"row": 0, "image": {"bytes": None, "path": f"zip://cat/0.png::{tmp_path / 'photos.zip'}"}}]
    (inside,), _ = decode_rows(rows, spec_of(), files=AllowedFiles(str(tmp_path)))
    np.testing.assert_array_equal(inside, np.asarray(picture(0, (8, 12))))


def test_a_streamed_jpeg_is_not_decoded_and_packed_again_on_its_way(tmp_path):
    jpeg = encoded(picture(0, (64, 64)), "JPEG", quality=95)
    for name in ("train", "validation"):
        write_tar(tmp_path / f"{name}.tar", [jpeg], [0])
    rows, held, _, _ = prepare_stream(load_splits(str(tmp_path), streaming=True), label_names=list(ANIMALS))
    assert [row["image"]["bytes"] for row in rows] == [jpeg]
    assert held[0]["image"]["bytes"] == jpeg


def test_a_streams_split_to_score_is_read_anew_when_its_file_has_changed(tmp_path):
    for count in (1, 3):
        for name, numbers in (("train", [0, 1]), ("validation", range(count))):
            table_of(numbers).to_parquet(tmp_path / f"{name}.parquet")
        held = prepare_stream(load_splits(str(tmp_path), streaming=True))[1]
        assert len(held) == count


def test_a_file_of_no_split_beside_others_is_an_error_that_names_it(tmp_path):
    for name in ("train", "test", "holdout"):
        (tmp_path / f"{name}.csv").write_text("image,label\na.png,cat\nb.png,dog\n")
    with pytest.raises(ValueError, match=r"holdout.csv are of no split; wanted names that begin with train"):
        load_splits(str(tmp_path))


def test_labels_that_a_model_names_twice_are_matched_by_place_or_refused():
    labels, twice = torch.tensor([0, 2]), {0: "crane", 1: "ibis", 2: "crane"}
    assert match_labels(labels, ["crane", "ibis", "crane"], twice).tolist() == [0, 2]
    with pytest.raises(ValueError, match="several of its labels crane"):
        match_labels(labels, ["crane", "ibis", "rail"], twice)


def class_folders(folder, *names, count=3, suffix=".png"):
    for name in names:
        (folder / name).mkdir(parents=True)
        for index in range(count):
            picture(index).save(folder / name / f"{index}{suffix}")


def test_folders_of_splits_may_be_written_with_capitals(tmp_path):
    class_folders(tmp_path, "Training/cat", "Training/dog", "Testing/cat", "Testing/dog")
    splits, names, scored = prepare(load_splits(str(tmp_path)))
    assert (names, scored, len(splits["train"]), len(splits["eval"])) == (["cat", "dog"], "test", 6, 6)


@pytest.mark.parametrize("stray", ["list.csv", "photos.tar"])
def test_a_stray_file_beside_class_folders_is_no_data_set(stray, tmp_path):
    class_folders(tmp_path, "cat", "dog")
    (tmp_path / stray).write_text("a,b\n1,2\n")
    assert len(load_splits(str(tmp_path))["train"]) == 6


def test_a_table_beside_the_images_it_names_is_the_data_set(tmp_path):
    class_folders(tmp_path, "images")
    (tmp_path / "list.csv").write_text("file,class\nimages/0.png,cat\nimages/1.png,dog\n")
    splits, names, _ = prepare(load_splits(str(tmp_path)), train=None, eval_split="train")
    assert (names, len(splits["eval"])) == (["cat", "dog"], 2)


def test_a_broken_archive_is_named(tmp_path):
    (tmp_path / "train-0.tar").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"train-0.tar cannot be read as webdataset"):
        load_splits(str(tmp_path))


def test_pictures_of_formats_that_are_not_read_are_counted(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sources.logger, "propagate", True)
    class_folders(tmp_path, "cat", "dog")
    for index in range(2):
        (tmp_path / "cat" / f"{index}.heic").touch()
    load_splits(str(tmp_path))
    assert "2 .heic files are not read" in caplog.text


def test_each_class_of_two_has_an_image_that_is_scored():
    aside = stratified_holdout(np.array([0] * 50 + [1] * 3 + [2]), 0.1, seed=0)
    assert np.bincount(np.array([0] * 50 + [1] * 3 + [2])[aside], minlength=3).tolist() == [5, 1, 0]

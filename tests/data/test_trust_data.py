"""What a data set, an image or an image processor that nobody should trust may not do to who reads it."""

import functools
import json
import os
import random
import subprocess
import zipfile

import image_data
import numpy as np
import pyarrow.parquet
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image
from image_data import encoded
from PIL import Image as PILImage
from transformers import BitImageProcessorPil, ConvNextImageProcessorPil, ViTImageProcessorPil

from hf_vit import HFViTConfig
from hf_vit.data.columns import find_columns, select_image_and_label
from hf_vit.data.crops import crop_params
from hf_vit.data.decoding import decode_image, decode_rows
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_files import FORMATS, AllowedFiles, allowed_files, hub_files, restrict_files
from hf_vit.data.image_spec import image_spec_of, training_image_spec
from hf_vit.data.sources import load_splits
from hf_vit.data.splits import prepare_splits
from hf_vit.evaluation.classifiers import load_processor
from hf_vit.system.errors import UserError


def spec_of(processor=None):
    return image_spec_of(processor or ViTImageProcessorPil(size={"height": 8, "width": 8}), HFViTConfig())


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A data folder with an image and an archive, links in it that lead out, and private images beside it."""
    for place in ("data/cat", "private"):
        (tmp_path / place).mkdir(parents=True)
        picture().save(tmp_path / place / "x.png")
    for place in ("data", "private"):
        with zipfile.ZipFile(tmp_path / place / "photos.zip", "w") as archive:
            archive.write(tmp_path / "data" / "cat" / "x.png", "cat/x.png")
    (tmp_path / "data" / "link.png").symlink_to(tmp_path / "private" / "x.png")
    (tmp_path / "data" / "links").symlink_to(tmp_path / "private")
    (tmp_path / "data" / "within.png").symlink_to("cat/x.png")
    (tmp_path / "data" / "zero.png").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "data" / "pipe.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


picture = functools.partial(image_data.picture, size=(8, 8))


def rows_to_score(name):
    return prepare_splits(load_splits(str(name)))[0]["eval"]


# What a row may say that is read, and that is refused.
OWN = ["cat/x.png", "HOME/data/cat/x.png", "within.png", "zip://cat/x.png::HOME/data/photos.zip"]
NOT_OWN = [
    "../private/x.png", "HOME/private/x.png", "link.png", "links/x.png", "zero.png", "/dev/zero", "pipe.png", "cat", "",
    "file://HOME/private/x.png", "zip://cat/x.png::HOME/private/photos.zip", "zip://cat/x.png::pipe.png",
    "zip://cat/x.png::http://127.0.0.1:9/photos.zip", "simplecache::http://127.0.0.1:9/x.png", "http://127.0.0.1:9/x.png",
    "https://huggingface.co/datasets/alice/other/resolve/main/x.png", "hf://datasets/alice/other@main/x.png",
]  # fmt: skip


@pytest.mark.parametrize("path", OWN + NOT_OWN, ids=repr)
def test_a_row_of_a_data_set_names_files_of_that_data_set_alone(path, home):
    said = path.replace("HOME", str(home))
    rows = {"image": [{"bytes": None, "path": said}], "label": [0]}
    kinds = Features(image=Image(), label=ClassLabel(names=["cat"]))
    table = Dataset.from_dict(rows, kinds).data.table
    pyarrow.parquet.write_table(table, home / "data" / "train.parquet")  # `to_parquet` would read what is named
    rows = Dataset.from_parquet(str(home / "data" / "train.parquet")).cast_column("image", Image(decode=False))
    rows = restrict_files({"train": rows}, AllowedFiles(str(home / "data")))["train"]
    split = select_image_and_label(rows, ("image", "label"))
    (pixels,), bad = decode_rows([{**split[0], "row": 0}], spec_of(), files=allowed_files(split))
    if path in OWN:
        np.testing.assert_array_equal(pixels, np.asarray(picture()))
    else:
        assert str(home / "data") in bad[0]


def test_a_table_that_names_private_images_stops_the_run_and_says_which(home):
    lines = [f"{home}/private/x.png,cat,{split}" for split in ("train", "val")] + ["cat/x.png,dog,train"]
    (home / "data" / "a.csv").write_text("\n".join(["file,label,split", *lines]))
    with pytest.raises(ValueError, match=r"private/x.png.*/data"):
        ImageDataset(rows_to_score(home / "data" / "a.csv"), spec_of())


@pytest.mark.parametrize(
    ("path", "allowed"),
    {
        "hf://datasets/alice/own@0123abc/cat/x.png": True,
        "https://huggingface.co/datasets/alice/own/resolve/main/x.png": True,
        "zip://cat/x.png::COPY/snapshots/0123abc/photos.zip": True,
        "hf://datasets/alice/own-private@main/x.png": False,
        "hf://datasets/alice/other@main/x.png": False,
        "hf://datasets/alice/own@main/../../other/x.png": False,
        "hf://datasets/alice/own@main/%2e%2e/x.png": False,
        "hf://alice/own/x.png": False,
        "https://huggingface.co.evil.org/datasets/alice/own/resolve/main/x.png": False,
        "http://huggingface.co/datasets/alice/own/resolve/main/x.png": False,
        "COPY-private/snapshots/0123abc/x.png": False,
        "/etc/x.png": False,
    }.items(),
)
def test_a_row_from_the_hub_names_files_of_its_own_repository(path, allowed):
    files = hub_files("alice/own")
    path = path.replace("COPY", files.folder)
    if allowed:
        assert files.resolve(path) == path
    else:
        with pytest.raises(ValueError, match="alice/own"):
            files.resolve(path)


def test_links_that_a_walk_of_the_users_own_folder_finds_are_followed(home):
    for split in ("train", "validation"):
        for name in ("cat", "dog"):
            (home / "linked" / split / name).mkdir(parents=True)
            (home / "linked" / split / name / "0.png").symlink_to(home / "private" / "x.png")
    (home / "shortcut").symlink_to(home / "linked")
    assert len(ImageDataset(rows_to_score("shortcut"), spec_of())) == 2
    for split in ("train", "validation"):  # where a table chooses among the links, they are not
        (home / "linked" / split / "metadata.csv").write_text("file_name,label\ncat/0.png,cat\ndog/0.png,dog\n")
    with pytest.raises(ValueError, match=r"0.png"):
        ImageDataset(rows_to_score("shortcut"), spec_of())


def test_a_label_column_of_images_is_not_decoded_to_find_labels(home):
    item = {"bytes": None, "path": str(home / "private" / "x.png")}
    rows = Dataset.from_dict({"image": [item], "label": [item]}, Features(image=Image(), label=Image()))
    with pytest.raises(UserError, match="label"):
        find_columns(rows, "image", "label")


# ----------------------------------------------------------------------------------------------------------------------
# Formats


@pytest.mark.parametrize("kind", ["PPM", "EPS"])
def test_a_format_that_the_handbook_does_not_promise_is_not_opened_whatever_its_name(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "check_call", lambda *_, **__: pytest.fail("Ghostscript was started"))
    (tmp_path / "x.jpg").write_bytes(encoded(picture(), kind))
    rows = [{"row": 3, "image": {"bytes": None, "path": "x.jpg"}}]
    for spec in (spec_of(), training_image_spec(spec_of(), None, "resized")):
        params = crop_params(torch.arange(1), spec, 0)
        _, (message,) = decode_rows(rows, spec, params, AllowedFiles(str(tmp_path)))
        assert "JPEG, PNG, WEBP, GIF, BMP, TIFF" in message


@pytest.mark.parametrize("kind", [*FORMATS, "MPO"])
def test_the_promised_formats_are_opened(kind):
    again = {"save_all": True, "append_images": [picture(1)]} if kind == "MPO" else {}
    assert decode_image({"bytes": encoded(picture(), kind, **again), "path": None}, spec_of()).shape == (8, 8, 3)


# ----------------------------------------------------------------------------------------------------------------------
# Sizes


@pytest.mark.parametrize("processor", [BitImageProcessorPil, ConvNextImageProcessorPil])
def test_a_long_thin_image_is_refused_before_it_fills_the_memory(processor):
    """196 bytes of PNG, 1 x 60,000 pixels, which a shorter side of 224 would make 3,000,000,000"""
    spec = spec_of(processor(size={"shortest_edge": 224}))
    for size in ((1, 60_000), (60_000, 1)):
        item = {"bytes": encoded(PILImage.new("L", size)), "path": None}
        with pytest.raises(ValueError, match=rf"{size[0]} x {size[1]} pixels"):
            decode_image(item, spec)


WRONG = {
    "size": [{"height": 10**9, "width": 16}, {"height": "16", "width": 16}], "crop_size": [{"height": -1, "width": 16}],
    "image_mean": [["a", 0, 0], [float("nan")] * 3], "image_std": [[0.0, 1, 1]], "rescale_factor": [float("inf")], "resample": [77],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:divide by zero|invalid value")
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_an_image_processor_with_a_number_that_no_model_has_is_refused(name, value):
    processor = ViTImageProcessorPil(
        size={"height": 8, "width": 8}, do_center_crop=True, crop_size={"height": 8, "width": 8}
    )
    setattr(processor, name, value)
    with pytest.raises(UserError, match="rocessor"):
        image_spec_of(processor, HFViTConfig())


@pytest.mark.parametrize("size", [[3, 10**9, 16], [3, 16], [3, 16.5, 16], 16])
def test_a_timm_repository_with_an_impossible_input_size_is_refused(size, tmp_path):
    cfg = {"input_size": size, "mean": [0.5] * 3, "std": [0.5] * 3}
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit", "pretrained_cfg": cfg}))
    with pytest.raises(ValueError, match="input_size"):
        load_processor(str(tmp_path))


# ----------------------------------------------------------------------------------------------------------------------
# Fuzz


def test_mutated_files_are_read_or_refused_with_a_sentence():
    """Files of each format with bytes changed, cut and repeated give an image, or a sentence."""
    rng, readable = random.Random(0), 0
    whole = [encoded(picture(), kind) for kind in FORMATS]
    specs = [spec_of(), training_image_spec(spec_of(), None, "resized")]
    for number in range(1200):
        content, spec = bytearray(whole[number % len(whole)]), specs[number % len(specs)]
        for _ in range(rng.choice((1, 1, 3, 20))):
            place = rng.randrange(len(content) + 1)
            content[place : place + rng.choice((0, 1, 1, 4))] = rng.randbytes(rng.choice((0, 1, 1, 4)))
        content = bytes(content[: rng.choice((len(content), rng.randrange(len(content) + 1)))])
        row = {"image": {"bytes": content, "path": None}, "row": number}
        (image,), errors = decode_rows([row], spec, crop_params(torch.tensor([number]), spec, 0))
        readable += image is not None
        assert (image is None) == (len(errors) == 1)
    assert 100 < readable < 1100

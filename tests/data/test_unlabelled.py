"""Claims about images to predict: what a name stands for, what its rows are called, and what they may read."""

import os

import pytest
from datasets import DatasetDict
from image_data import pictures, spec_of, table_of

from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.loader import data_loader
from hf_vit.data.sampling import sequential_batches
from hf_vit.data.unlabelled import load_unlabelled
from hf_vit.system.errors import UserError


@pytest.fixture
def folder(tmp_path):
    """Five images in folders of two depths, and files that are none."""
    names = ["b.png", "a/2.PNG", "a/deep/=1.png", "B/x.jpg", "a::b.png"]
    for name, image in zip(names, pictures(range(5)), strict=True):
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_bytes(image)
    for name in ("notes.txt", "labels.csv", ".hidden.png", "a/._2.png"):
        (tmp_path / "mine" / name).write_text("file,label\nb.png,1\n")
    return tmp_path / "mine"


def read(images):
    """The names of the images that can be read, and the messages of the others."""
    data = ImageDataset(images.rows, spec_of(), "skip", decode_first=False)
    batches = data_loader(data, sequential_batches(len(data), 2), 0)
    return [name for batch in batches for name in images.names(batch["index"].tolist())], list(data.skipped)


def test_a_folder_stands_for_all_its_images_in_the_order_of_their_names_and_a_file_for_itself(folder):
    images = load_unlabelled(str(folder))
    assert images.key == "file"
    assert read(images) == (["B/x.jpg", "a/2.PNG", "a/deep/=1.png", "a::b.png", "b.png"], [])
    assert read(load_unlabelled(str(folder / "a" / "2.PNG"))) == (["2.PNG"], [])


@pytest.mark.parametrize("name", ["", "b.png"])
def test_image_files_have_no_splits(folder, name):
    with pytest.raises(UserError, match="--split test"):
        load_unlabelled(str(folder / name), split="test")
    assert len(load_unlabelled(str(folder / name), default_split="train").rows) > 0


def test_a_list_names_files_anywhere_as_it_spells_them(folder, tmp_path):
    os.rename(folder / "b.png", folder / "b\u2028b.png")  # what Unicode calls a line end
    lines = [
        "mine/b\u2028b.png",
        "",
        f"{folder}/a/2.PNG",
        "mine/../mine/B/x.jpg",
        "mine/gone.png",
        "https://host/1.png",
    ]
    (tmp_path / "list.txt").write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    names, unreadable = read(load_unlabelled(str(tmp_path / "list.txt")))
    assert names == [lines[0], *lines[2:4]]
    for line, message in zip(lines[4:], unreadable, strict=True):
        assert f"({line})" in message


def test_rows_of_a_table_are_called_as_it_calls_them_and_stay_in_its_folder(folder, tmp_path):
    (tmp_path / "secret.png").write_bytes(pictures([0])[0])
    (folder / "labels.csv").write_text(f"file\n./b.png\n{tmp_path}/secret.png\n../secret.png\na/2.PNG\n")
    images = load_unlabelled(str(folder / "labels.csv"))
    names, unreadable = read(images)
    assert (images.key, names) == ("file", ["./b.png", "a/2.PNG"])
    assert [str(folder) in message for message in unreadable] == [True, True]


def test_rows_that_hold_their_images_are_called_by_their_number(tmp_path):
    table_of(range(5), column="photo").to_parquet(tmp_path / "rows.parquet")
    images = load_unlabelled(str(tmp_path))
    assert images.key == "row"
    assert read(images) == ([0, 1, 2, 3, 4], [])


def write_splits(folder):
    DatasetDict({"train": table_of([0, 1]), "test": table_of([2])}).save_to_disk(folder)


BAD = {
    "an empty folder": ("images", lambda path: path.mkdir(), {}, "CLASS/IMAGE"),
    "an empty list": ("images.txt", lambda path: path.write_text("\n"), {}, "images.txt"),
    "no split": ("images", write_splits, {}, "train, test.*--split"),
    "an unknown split": ("images", write_splits, {"split": "val"}, "train, test.*val"),
    "an unknown column": ("images", write_splits, {"split": "test", "image_column": "photo"}, "--image_column photo"),
    "a table without a header": ("images.csv", lambda path: path.write_text("a.png\nb.png\n"), {}, "a.png"),
    "no such folder": ("images/", lambda path: None, {}, "images/"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_stands_for_no_images_is_one_clear_error(what, tmp_path):
    name, write, how, needed = BAD[what]
    write(tmp_path / name)
    with pytest.raises(ValueError, match=needed):
        load_unlabelled(f"{tmp_path}/{name}", **how)


def test_what_is_left_out_is_said(folder, caplog):
    (folder / "a" / "linked").symlink_to(folder / "B")
    (folder / "c.HEIC").write_bytes(pictures([0])[0])
    assert len(load_unlabelled(str(folder)).rows) == 5
    assert "1 links" in caplog.text
    assert "1 .heic" in caplog.text

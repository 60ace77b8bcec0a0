"""Claims about images to predict: what a name stands for, what its rows are called, and what they may read."""

import os

import pytest
from datasets import DatasetDict
from image_data import pictures, spec_of, table_of, write_table

from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.loader import data_loader
from hf_vit.data.sources import load_splits
from hf_vit.data.unlabelled import load_unlabelled


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
    batches = [list(range(len(images.rows)))[start : start + 2] for start in range(0, len(images.rows), 2)]
    found = list(
        data_loader(ImageDataset(images.rows, spec_of(), "skip", decode_first=False), batches, 0, keep_empty=True)
    )
    assert all(batch["images"] is None or len(batch["images"]) == len(batch["index"]) for batch in found)
    names = [name for batch in found for name in images.names(batch["index"].tolist())]
    return names, [message for batch in found for message in batch["errors"]]


def test_a_folder_stands_for_all_its_images_in_the_order_of_their_names(folder):
    images = load_unlabelled(str(folder))
    assert images.key == "file"
    assert read(images) == (["B/x.jpg", "a/2.PNG", "a/deep/=1.png", "a::b.png", "b.png"], [])


def test_a_list_may_be_of_powershell_and_a_name_may_hold_what_unicode_calls_a_line_end(folder, tmp_path):
    os.rename(folder / "b.png", folder / "b\u2028b.png")
    (tmp_path / "list.txt").write_bytes("mine/b\u2028b.png\r\nmine/B/x.jpg\r\n".encode("utf-16"))
    assert read(load_unlabelled(str(tmp_path / "list.txt"))) == (["mine/b\u2028b.png", "mine/B/x.jpg"], [])


@pytest.mark.parametrize("name", ["", "b.png"])
def test_image_files_have_no_splits(folder, name):
    with pytest.raises(
        ValueError, match=r"--split test: .* is read as image files, which have no splits; name the folder"
    ):
        load_unlabelled(str(folder / name), split="test")
    assert len(load_unlabelled(str(folder / name), default_split="train").rows) > 0


def test_class_folders_and_split_folders_are_folders(photos):
    images = load_unlabelled(str(photos))
    assert read(images) == (sorted(str(file.relative_to(photos)) for file in photos.rglob("*.png")), [])
    assert images.rows.column_names == ["image"]


def test_a_file_stands_for_itself(folder):
    assert read(load_unlabelled(str(folder / "a" / "2.PNG"))) == (["2.PNG"], [])


def test_a_list_names_files_anywhere_as_it_spells_them(folder, tmp_path):
    lines = [
        "mine/b.png",
        "",
        f"{folder}/a/2.PNG",
        "mine/../mine/B/x.jpg",
        "mine/gone.png",
        "https://host/1.png",
        "mine",
    ]
    (tmp_path / "list.txt").write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    images = load_unlabelled(str(tmp_path / "list.txt"))
    names, unreadable = read(images)
    assert (images.key, names) == ("file", [lines[0], lines[2], lines[3]])
    missing, address, no_file = unreadable
    assert missing.startswith("row 3 (mine/gone.png) cannot be read as an image: [Errno 2]")
    assert "it is an address; wanted a file on this machine" in address
    assert no_file.endswith("is no regular file")


def test_rows_of_a_table_are_called_as_it_calls_them_and_stay_in_its_folder(photos, tmp_path):
    table = write_table(photos / "table.csv", range(4), ".")
    with open(table, "a") as file:
        file.write(f"\n{tmp_path}/secret.png,cat\n../data.png,cat\n")
    (tmp_path / "secret.png").write_bytes(pictures([0])[0])
    images = load_unlabelled(table)
    names, unreadable = read(images)
    assert (images.key, names) == ("file", [f"./train/{'cat' if n % 2 == 0 else 'dog'}/{n}.png" for n in range(4)])
    assert [f"only files in {photos} are" in message for message in unreadable] == [True, True]


def test_rows_that_hold_their_images_are_called_by_their_number(tmp_path):
    table_of(range(5), column="photo").to_parquet(tmp_path / "rows.parquet")
    images = load_unlabelled(str(tmp_path / "rows.parquet"))
    assert images.key == "row"
    assert read(images) == ([0, 1, 2, 3, 4], [])
    table_of(range(6), column="photo").to_parquet(tmp_path / "rows.parquet")
    assert load_unlabelled(str(tmp_path / "rows.parquet")).source != images.source


def test_a_file_that_comes_or_goes_changes_the_source(folder):
    before = load_unlabelled(str(folder)).source
    assert load_unlabelled(str(folder)).source == before
    os.rename(folder / "b.png", folder / "c.png")
    assert load_unlabelled(str(folder)).source != before


def test_a_batch_without_a_readable_image_is_reported_too(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.jpg").write_text("no image" if number < 2 else "")
    names, unreadable = read(load_unlabelled(str(tmp_path)))
    assert names == []
    assert [message.partition(" cannot")[0] for message in unreadable] == [f"row {n} ({n}.jpg)" for n in range(4)]


def write_splits(folder):
    DatasetDict({"train": table_of([0, 1]), "test": table_of([2])}).save_to_disk(folder)


BAD = {
    "an empty folder": (lambda path: path.mkdir(), {}, "holds no images: wanted files such as .jpg"),
    "an empty list": (lambda path: path.write_text("\n"), {}, "is empty: wanted the path of an image file in each line"),
    "no split": (write_splits, {}, "has the splits train, test: name one with --split"),
    "unknown split": (write_splits, {"split": "val"}, "has no split 'val'; it has train, test"),
    "unknown column": (write_splits, {"split": "test", "image_column": "photo"}, "--image_column photo: there is no such column"),
    "a table without names": (lambda path: path.write_text("a.png\nb.png\n"), {}, "begins with a.png: wanted a first line"),
    "no such folder": (lambda path: None, {}, "there is no such folder or file here"),
}  # fmt: skip


@pytest.mark.parametrize(("write", "how", "message"), BAD.values(), ids=BAD)
def test_what_stands_for_no_images_is_one_clear_error(write, how, message, tmp_path):
    name = "images.txt" if "is empty" in message else "images.csv" if "first line" in message else "images/"
    write(tmp_path / name)
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        load_unlabelled(str(tmp_path / name), **how)


def test_links_to_folders_are_named(folder, tmp_path, caplog):
    for name in ("linked", "mine/a/linked"):
        (tmp_path / name).symlink_to(folder / "B")
    assert len(load_unlabelled(str(folder)).rows) == 5
    assert "links to folders are not followed: a/linked" in caplog.text
    (tmp_path / "all").mkdir()
    (tmp_path / "linked").rename(tmp_path / "all" / "linked")
    for load in (load_unlabelled, load_splits):
        with pytest.raises(ValueError, match=r"holds no .*links to folders are not followed: linked"):
            load(str(tmp_path / "all"))


def test_names_that_are_not_utf8_are_counted(tmp_path):
    os.close(os.open(os.fsencode(tmp_path) + b"/caf\xe9.png", os.O_CREAT))
    with pytest.raises(ValueError, match=r"has 1 file names that are not UTF-8, the first is 'caf\\udce9.png'"):
        load_unlabelled(str(tmp_path))

"""Claims about what a name stands for: each layout gives the splits and classes that its pictures show, or one error that says why."""

import os
from collections import defaultdict
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import DatasetDict
from image_data import ANIMALS, dataset, encoded, pictures, table_of, write_tar
from loopback_hub import Hub
from PIL import Image

from hf_vit.data.image_files import allowed_files, read_image_bytes
from hf_vit.data.sources import load_splits, read_source, refuse_nested_folders
from hf_vit.data.splits import prepare_splits, select_and_encode
from hf_vit.data.summary import summary
from hf_vit.data.unlabelled import load_unlabelled
from hf_vit.system.errors import UserError


COLOURS = {"r": (250, 0, 0), "g": (0, 250, 0), "b": (0, 0, 250)}


def paint(folder, files):
    """Files such as `cat/1.png r, dog/2.png g`: pictures of one colour; `eel/` is an empty folder."""
    for file in files.split(", "):
        name, colour = (file[:-2], file[-1]) if file[-2:-1] == " " else (file, None)
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_bytes(encoded(Image.new("RGB", (8, 8), COLOURS[colour])) if colour else b"nothing")


def seen(splits, **columns):
    """{split: {class: the colours of its pictures}}."""
    how = dict.fromkeys(("image_column", "label_column", "label_names", "label_separator", "label_columns")) | columns
    encoded, names = select_and_encode(splits, {name: name for name in splits}, **how)
    found = {}
    for split, rows in encoded.items():
        found[split] = defaultdict(str)
        for row in rows:
            content = read_image_bytes(row["image"], allowed_files(rows))
            pixel = Image.open(BytesIO(content)).getpixel((0, 0))
            labels = row["label"] if isinstance(row["label"], list) else [row["label"]]
            for label in labels:
                found[split][names[label]] += next(c for c in COLOURS if COLOURS[c] == pixel)
    return found


CAT_DOG = {"cat": "rr", "dog": "gg"}
FLAT = "1.png r, 2.png r, 3.png g, 4.png g"
# What lies in a folder, what else is asked for, and the classes of each split.
FOLDERS = {
    "class folders": ("cat/1.png r, cat/2.jpg r, dog/1.PNG g, dog/2.webp g", {}, {"train": CAT_DOG}),
    "folders in class folders": ("cat/in/1.png r, cat/out/2.png r, dog/in/1.png g, dog/2.png g", {}, {"train": CAT_DOG}),
    "splits": ("train/cat/1.png r, train/dog/2.png g, val/cat/3.png r, test/dog/4.png g", {},
               {"train": {"cat": "r", "dog": "g"}, "validation": {"cat": "r"}, "test": {"dog": "g"}}),
    "other words for splits, in a wrapper": ("set/TRAIN/cat/1.png r, set/TRAIN/dog/2.png g, set/Dev/cat/3.png r, set/eval/dog/4.png g", {},
                               {"train": {"cat": "r", "dog": "g"}, "validation": {"cat": "r"}, "test": {"dog": "g"}}),
    "train and test as classes": ("train/1.png r, train/2.png r, bus/1.png g, bus/2.png g", {}, {"train": {"train": "rr", "bus": "gg"}}),
    "a test split without classes": ("train/cat/1.png r, train/dog/1.png g, test/1.png b, test/2.png b, test/3.png b", {},
                                     {"train": {"cat": "r", "dog": "g"}}),
    "what systems leave behind": ("cat/1.png r, cat/2.png r, dog/1.png g, dog/2.png g, cat/._1.png b, .DS_Store, .thumbs/1.png b, "
                                  "@eaDir/1.png b, __MACOSX/cat/1.png b, eel/", {}, {"train": CAT_DOG}),
    "images above the class folders": ("1.png b, cat/1.png r, cat/2.png r, dog/1.png g, dog/2.png g", {}, {"train": CAT_DOG}),
    "a folder beside the splits": ("train/cat/1.png r, train/dog/1.png g, extra/cat/2.png b", {}, {"train": {"cat": "r", "dog": "g"}}),
    "classes one level deeper": ("pets/cat/1.png r, pets/dog/1.png g, fish/eel/1.png b", {"class_level": 2},
                                 {"train": {"cat": "r", "dog": "g", "eel": "b"}}),
}  # fmt: skip


@pytest.mark.parametrize("layout", FOLDERS)
def test_the_folder_below_the_split_is_the_class_and_all_images_are_there_to_predict(layout, tmp_path):
    files, how, expected = FOLDERS[layout]
    paint(tmp_path, files)
    assert seen(load_splits(str(tmp_path), **how)) == expected
    hidden = ("._", ".thumbs", "@eaDir", "__MACOSX")
    images = [file for file in files.split(", ") if " " in file and not any(name in file for name in hidden)]
    rows = load_unlabelled(str(tmp_path))  # to predict
    names = rows.names(list(range(len(rows.rows))))
    assert (len(names), names) == (len(images), sorted(names))


PATHS = [("1.png", "cat"), ("2.png", "cat"), ("3.png", "dog"), ("4.png", "dog")]
LINES = "".join(f"{path},{label}\n" for path, label in PATHS)
WITH_SPLIT = "file,label,split\n1.png,cat,train\n3.png,dog,Training\n2.png,cat,val\n4.png,dog,TEST\n"
JSON_ROWS = [f'{{"path": "{path}", "class": "{label}"}}' for path, label in PATHS]
TABLES = {
    "commas": ("a.csv", "image,label\n" + LINES, {}, {"train": CAT_DOG}),
    "semicolons": ("a.csv", "file_name;category\n" + LINES.replace(",", ";"), {}, {"train": CAT_DOG}),
    ".tsv with blanks": ("a.TSV", "file\tclass\n" + LINES.replace(",", " \t "), {}, {"train": CAT_DOG}),
    "columns of other names": ("a.csv", "where,what,label\n" + LINES.replace("\n", ",x\n"),
                                                            {"image_column": "where", "label_column": "what"}, {"train": CAT_DOG}),
    "JSON lines": ("a.jsonl", "\n".join(JSON_ROWS), {}, {"train": CAT_DOG}),
    "labels that look like dates": ("a.jsonl", '{"file": "1.png", "label": "2021-05-01"}\n{"file": "3.png", "label": "x"}', {}, {"train": {"2021-05-01": "r", "x": "g"}}),
    "a column of splits": ("a.csv", WITH_SPLIT, {}, {"train": {"cat": "r", "dog": "g"}, "validation": {"cat": "r"}, "test": {"dog": "g"}}),
    "cells are text": ("a.csv", "file,label\n1.png,01\n2.png,1\n3.png,None\n4.png,NA\n", {}, {"train": {"01": "r", "1": "r", "None": "g", "NA": "g"}}),
    "what looks like several labels": ("a.csv", "file,label\n1.png,a;b\n2.png,a\n3.png,b\n4.png,b\n", {}, {"train": {"a;b": "r", "a": "r", "b": "gg"}}),
    "several labels": ("a.csv", "file,label\n1.png,a;b\n2.png,a\n3.png,\n4.png,b\n", {"label_separator": ";"}, {"train": {"a": "rr", "b": "rg"}}),
    "columns of 0 and 1": ("a.csv", "file,a,b\n1.png,1,1\n2.png,1,0\n3.png,0,0\n4.png,0,1\n", {"label_columns": "a,b"},
                           {"train": {"a": "rr", "b": "rg"}}),
}  # fmt: skip


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_names_images_and_their_labels(kind, tmp_path):
    name, text, columns, expected = TABLES[kind]
    paint(tmp_path, FLAT)
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    splits = load_splits(str(tmp_path / name), image_column=columns.get("image_column"))
    assert seen(splits, **columns) == expected
    assert [name for name in ("train", "validation", "test") if name in splits] == list(splits)


def test_a_parquet_table_names_its_images(tmp_path):
    paint(tmp_path, FLAT)
    paths, labels = zip(*PATHS, strict=True)
    pq.write_table(pa.table({"path": pa.array(paths, pa.large_string()), "label": labels}), tmp_path / "a.parquet")
    assert seen(load_splits(str(tmp_path / "a.parquet"))) == {"train": CAT_DOG}


def test_metadata_beside_images_names_their_labels(tmp_path):
    paint(tmp_path, FLAT)
    (tmp_path / "metadata.csv").write_text("file_name,label\n" + LINES)
    assert seen(load_splits(str(tmp_path))) == {"train": CAT_DOG}


def write_shards(folder):
    for name, numbers in (("train-0000", [0, 1]), ("train-0001", [2, 3]), ("val-0000", [4, 5])):
        write_tar(folder / f"{name}.tar", pictures(numbers), [n % 2 for n in numbers])


def write_parquet(folder):
    (folder / "data").mkdir()
    for split in ("train", "test"):
        table_of(range(4)).to_parquet(folder / "data" / f"{split}-0.parquet")
    paint(folder, "banner.png b")


DATA_SETS = {
    "tar shards": (write_shards, {"train": 4, "validation": 2}),
    "Parquet": (write_parquet, {"train": 4, "test": 4}),
    "save_to_disk": (lambda folder: table_of(range(4)).save_to_disk(folder), {"train": 4}),
    "save_to_disk of splits": (lambda folder: DatasetDict(train=table_of(range(4)), test=table_of([2])).save_to_disk(folder), {"train": 4, "test": 1}),
}  # fmt: skip


@pytest.mark.parametrize("kind", DATA_SETS)
def test_a_data_set_is_read_by_datasets(kind, tmp_path):
    write, expected = DATA_SETS[kind]
    splits = load_splits(str(write(tmp_path) or tmp_path))
    assert {name: len(rows) for name, rows in splits.items()} == expected
    label_names = list(ANIMALS) if "tar" in kind else None
    rows = prepare_splits(splits, train_split=None, eval_split="train", label_names=label_names)[0]["eval"]
    for row in rows:
        assert row["label"] == pictures(range(4)).index(read_image_bytes(row["image"], allowed_files(rows))) % 2


def in_table(text, name="a.csv"):
    def write(folder):
        paint(folder, FLAT)
        (folder / name).write_text(text)
        return folder / name

    return write


def laid_out(files):
    return lambda folder: paint(folder, files)


def write_other_classes(folder):
    dataset([0, 1], ["cat", "dog"]).to_parquet(folder / "train.parquet")
    dataset([0, 1], ["dog", "cat"]).to_parquet(folder / "test.parquet")


REFUSED = {
    "nothing": (laid_out("eel/"), "CLASS/IMAGE"),
    "flat images": (laid_out(FLAT), r".png \(4\)"),
    "tables alone": (laid_out("train.csv, test.csv"), r"--dataset_name .*test.csv"),
    "class folders to stream": (laid_out("cat/1.png r, dog/1.png g"), "--streaming"),
    "a class that train lacks": (laid_out("train/cat/1.png r, train/dog/1.png g, val/images/1.png r"), "images"),
    "Parquet beside class folders": (laid_out("cat/1.png r, dog/1.png g, more.parquet"), "more.parquet"),
    "classes in another order": (write_other_classes, "test.parquet"),
    "a column that stands twice": (in_table("file,label,label\n1.png,a,b\n"), "label"),
    "files that are not there": (in_table("file,label\n1.png,a\n7.png,a\n8.png,b\n9.png,b\n10.png,b\n"), r"row 1 .*7.png.*row 3 has '9.png'$"),
    "a shorter row": (in_table("file,label\n1.png,a\n2.png\n"), "row 1"),
    "no column of paths": (in_table("note,label\nhello,a\n"), r"--image_column.*note, label"),
    "no column of labels": (in_table("file,comment\n1.png,a\n"), r"--label_column.*comment"),
    "broken JSON": (in_table('{"file": ', "a.jsonl"), "a.jsonl"),
    "an unknown split": (in_table("file,label,split\n1.png,a,train\n2.png,a,holdout\n"), "row 1 has 'holdout'"),
    "numbers with decimals": (in_table("file,label\n1.png,3.7\n2.png,4.2\n3.png,5\n4.png,6\n"), "--problem_type regression"),
    "rows that contradict each other": (in_table("file,label\n1.png,a\n1.png,b\n2.png,a\n2.png,b\n"), "1.png"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_one_error_with_what_the_user_needs(what, tmp_path):
    write, needed = REFUSED[what]
    with pytest.raises(UserError, match=f"(?s){needed}"):
        prepare_splits(load_splits(str(write(tmp_path) or tmp_path), streaming="to stream" in what))


def test_a_folder_that_links_to_itself_is_read_once(tmp_path):
    paint(tmp_path, "cat/1.png r, dog/1.png g")
    (tmp_path / "cat" / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "cat" / "pipe.png")
    source = read_source(str(tmp_path))
    assert len(source.splits["train"]) == 2
    assert "1 links" in " ".join(source.skipped)


def test_a_class_level_that_no_folder_has_is_an_error(tmp_path):
    paint(tmp_path, "cat/1.png r, dog/1.png g, table.csv")
    for name, level in ((tmp_path, 0), (tmp_path, 2), (tmp_path / "table.csv", 1)):
        with pytest.raises(UserError, match=f"--class_level.*{level}"):
            load_splits(str(name), class_level=level)


def test_a_file_name_that_is_not_utf8_is_an_error(tmp_path):
    paint(tmp_path, "cat/1.png r, dog/1.png g")
    os.close(os.open(os.fsencode(tmp_path) + b"/cat/caf\xe9.png", os.O_CREAT))
    for load in (load_splits, load_unlabelled):
        with pytest.raises(UserError, match="caf"):
            load(str(tmp_path))


def test_rows_and_classes_are_in_the_order_of_the_files_paths(tmp_path):
    paint(tmp_path, "b/2.png r, b/10.png r, B/1.png g, a/x/3.png b, a.c/1.png b")
    rows = load_splits(str(tmp_path))["train"]
    files = [str(Path(item["path"]).relative_to(tmp_path)) for item in rows["image"]]
    assert files == sorted(files)
    assert rows.features["label"].names == ["B", "a", "a.c", "b"]
    assert rows._fingerprint == load_splits(str(tmp_path))["train"]._fingerprint


def test_the_summary_counts_what_is_read_and_what_is_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = "a.png b, train/cat/1.png r, train/cat/2.png r, train/dog/1.png g, train/dog/2.heic, val/cat/1.png r, test/1.png r, eel.csv"
    paint(tmp_path / "photos", files)
    source = read_source("photos")
    splits, labels, scored = prepare_splits(source.splits)
    train, evaluated, *left_out = summary(splits, {"train": "train", "eval": scored}, labels, source)
    assert train == "train: 3 images, 2 classes (cat 2, dog 1), from photos/train"
    assert evaluated == "validation: 1 image, 2 classes (cat 1, dog 0), from photos/val"
    for part in ("1 .heic", "2 images outside", "--dataset_name photos/eel.csv"):
        assert part in " ".join(left_out)


def test_of_several_configurations_the_default_is_read_and_what_is_no_split_is_named(tmp_path):
    for name, classes in (("coarse", ["a", "b"]), ("fine", ["c", "d"])):
        dataset([0, 1], classes).to_parquet(tmp_path / f"{name}.parquet")
    configs = "- config_name: coarse\n  default: true\n  data_files: coarse*\n- config_name: fine\n  data_files: fine*"
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}\n---\n")
    read = read_source(str(tmp_path))
    assert read.splits["train"].features["label"].names == ["a", "b"]
    assert any("fine" in phrase for phrase in read.skipped)
    assert load_splits(str(tmp_path), "fine")["train"].features["label"].names == ["c", "d"]


@pytest.mark.parametrize("name", ["./none", "~/none-at-all", "a/b/none", "data/none.tar", "my none", ""])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name):
    with pytest.raises(ValueError, match="--dataset_name"):
        load_splits(name)


def test_a_run_is_not_kept_among_its_images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paint(tmp_path, "photos/cat/1.png r")
    for run in ("photos", "photos/run"):
        with pytest.raises(UserError, match="--output_dir"):
            refuse_nested_folders("photos", run)
    refuse_nested_folders("photos", "runs/x")


def test_a_name_that_is_nowhere_is_asked_of_the_hub_once_and_not_again_if_nobody_answers(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with Hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        with pytest.raises(UserError, match="alice/photos"):
            load_splits("alice/photos")
    assert [path for _, path in hub.requests if "datasets" in path] == ["/api/datasets/alice/photos"]
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waited to try again"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    with pytest.raises(UserError, match=r"alice/nowhere_kept.*cannot be reached"):
        load_splits("alice/nowhere_kept")

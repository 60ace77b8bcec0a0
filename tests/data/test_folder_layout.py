"""Claims about folders of images: which folder is a split, which one a class, and what is said of the rest."""

import os
import re

import pytest
from datasets import load_dataset
from image_data import picture, prepare, spec_of

from hf_vit.data.folder_layout import scan_folder
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.sources import load_splits, refuse_nested_folders
from hf_vit.data.splits import describe_scored, prepare_splits
from hf_vit.system import progress


def write(root, *files):
    """Empty files: only their names are looked at."""
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()


def found(splits) -> dict:
    """{split: {class: number of images}}"""
    return {
        split: {name: rows["label"][:].count(index) for index, name in enumerate(rows.features["label"].names)}
        for split, rows in splits.items()
    }


@pytest.fixture
def said(caplog, monkeypatch):
    """What was warned of, as one text."""
    monkeypatch.setattr(progress.logger, "propagate", True)
    return lambda: caplog.text


ONE_EACH = {"cat": 1, "dog": 1}
LAYOUTS = {
    "class folders": (["cat/1.jpg", "dog/1.jpg"], {"train": ONE_EACH}, ""),
    "folders of operating systems": (
        ["cat/1.jpg", "dog/1.jpg", "$RECYCLE.BIN/1.jpg", "lost+found/1.jpg", "cat/@eaDir/1.jpg/SYNOPHOTO_THUMB_M.jpg"],
        {"train": ONE_EACH},
        "",
    ),
    "files that may be images": (
        ["cat/1.jpg", "dog/1.jpg", "dog/2", "dog/3.jpg_large", "dog/4.nef", "dog/notes.txt"],
        {"train": ONE_EACH},
        "1 .nef files are not read(.|\n)*: 1 without a suffix, 1 .jpg_large files are left alone: if they are images, give them",
    ),
    "classes with a number behind the word of a split": (
        ["Test 1/1.jpg", "Test 2/2.jpg"],
        {"train": {"Test 1": 1, "Test 2": 1}},
        "",
    ),
    "two folders for a split": (
        ["train/cat/1.jpg", "train/dog/1.jpg", "Train/cat/2.jpg", "test/cat/1.jpg"],
        {"train": {"cat": 2, "dog": 1}, "test": {"cat": 1, "dog": 0}},
        "the split train is that of Train, train",
    ),
    "folders in class folders": (
        ["cat/indoor/1.jpg", "cat/outdoor/2.jpg", "dog/indoor/3.jpg"],
        {"train": {"cat": 2, "dog": 1}},
        "the classes are the folders in .*photos: cat, dog; folders inside them, such as indoor, make no classes",
    ),
    "images beside folders in class folders": (
        ["cat/indoor/1.jpg", "cat/2.jpg", "dog/3.jpg"],
        {"train": {"cat": 2, "dog": 1}},
        "such as indoor, make no classes",
    ),
    "a folder in each class folder": (
        ["train/n01/images/1.JPEG", "train/n02/images/2.JPEG", "val/n01/images/3.JPEG", "val/n02/images/4.JPEG"],
        {"train": {"n01": 1, "n02": 1}, "validation": {"n01": 1, "n02": 1}},
        "the classes are the folders in .*photos/train, .*photos/val: n01, n02; folders inside them, such as images, make",
    ),
    "a folder that wraps all": (
        ["dataset/cat/1.jpg", "dataset/dog/1.jpg", "__MACOSX/dataset/cat/._1.jpg", "licence.txt", "overview.png"],
        {"train": ONE_EACH},
        "images in no class folder are left out: 1 in .*the folders in .*photos/dataset: cat, dog",
    ),
    "wrapped splits": (
        ["a/b/train/cat/1.jpg", "a/b/train/dog/1.jpg", "a/b/val/cat/1.jpg", "a/b/val/dog/1.jpg"],
        {"train": ONE_EACH, "validation": ONE_EACH},
        "the folders in .*photos/a/b/train, .*photos/a/b/val: cat, dog",
    ),
    "splits that wrap": (
        [
            "training_set/training_set/cat/1.jpg",
            "training_set/training_set/dog/1.jpg",
            "test_set/test_set/cat/1.jpg",
            "test_set/test_set/dog/1.jpg",
        ],
        {"train": ONE_EACH, "test": ONE_EACH},
        "the folders in .*training_set/training_set, .*test_set/test_set: cat, dog",
    ),
    "a test split of one class": (
        ["train/cat/1.jpg", "train/dog/1.jpg", "test/cat/indoor/1.jpg", "test/cat/outdoor/1.jpg"],
        {"train": ONE_EACH, "test": {"cat": 2, "dog": 0}},
        "such as indoor, make no classes",
    ),
    "Roboflow's splits": (
        [f"{split}/{name}/1.jpg" for split in ("train", "valid", "test") for name in ("cat", "dog")],
        {"train": ONE_EACH, "validation": ONE_EACH, "test": ONE_EACH},
        "",
    ),
    "splits in capitals, numbered or with a word before": (
        ["Train2017/cat/1.jpg", "Train2017/dog/1.jpg", "my_TEST/cat/1.jpg", "my_TEST/dog/1.jpg"],
        {"train": ONE_EACH, "test": ONE_EACH},
        "",
    ),
    "a folder that is no split beside splits": (
        ["seg_train/cat/1.jpg", "seg_train/dog/1.jpg", "seg_test/cat/1.jpg", "seg_test/dog/1.jpg", "seg_pred/1.jpg"],
        {"train": ONE_EACH, "test": ONE_EACH},
        "images in no class folder are left out: 1 in .*photos/seg_pred",
    ),
    "test images without classes": (
        ["train/cat/1.jpg", "train/dog/1.jpg", "test/images/1.jpg", "test/images/2.jpg", "test/images/3.jpg"],
        {"train": ONE_EACH},
        "images in no class folder are left out: 3 in .*photos/test/images",
    ),
    "a class named as a split": (
        ["cat/1.jpg", "test/1.jpg", "train/1.jpg"],
        {"train": {"cat": 1, "test": 1, "train": 1}},
        "the classes are the folders in .*photos: cat, test, train",
    ),
    "splits of longer names": (
        [f"{split}/{name}/1.jpg" for split in ("TrainingImages", "validate", "testset") for name in ("cat", "dog")],
        {"train": ONE_EACH, "validation": ONE_EACH, "test": ONE_EACH},
        "",
    ),
    "a split that is held out": (
        [f"{split}/{name}/1.jpg" for split in ("train", "holdout", "unseen") for name in ("cat", "dog")],
        {"train": ONE_EACH, "test": ONE_EACH},
        "images in no class folder are left out: 1 in .*photos/unseen/cat, 1 in .*photos/unseen/dog",
    ),
    "a class that begins like a split": (
        [f"{name}/{place}/1.jpg" for name in ("hills", "valley") for place in "ab"],
        {"train": {"hills": 2, "valley": 2}},
        "hills, valley; folders inside them, such as a, make no classes",
    ),
    "a class named like a split in two splits": (
        [
            f"{split}/{name}/{place}/1.jpg"
            for split in ("train", "val")
            for name in ("cat", "valley")
            for place in "ab"
        ],
        {"train": {"cat": 2, "valley": 2}, "validation": {"cat": 2, "valley": 2}},
        "cat, valley; folders inside them, such as a, make no classes",
    ),
    "splits beside another folder of folders": (
        ["train/cat/1.jpg", "train/dog/1.jpg", "test/1.jpg", "docs/a/1.jpg", "docs/b/1.jpg"],
        {"train": ONE_EACH},
        "images in no class folder are left out",
    ),
    "folds": (
        [f"{fold}/{name}/1.jpg" for fold in ("fold_1", "fold_2") for name in ("cat", "dog")],
        {"train": {"fold_1": 2, "fold_2": 2}},
        "are taken for classes: fold_1, fold_2; if they are none",
    ),
    "images and their masks": (
        ["images/1.jpg", "annotations/trimaps/1.png"],
        {"train": {"annotations": 1, "images": 1}},
        "are taken for classes: annotations, images",
    ),
    "a class whose name begins with the word of a split": (
        [f"{name}/{place}/1.jpg" for name in ("train station", "bus stop") for place in ("a", "b")],
        {"train": {"bus stop": 2, "train station": 2}},
        "the classes are the folders in .*photos: bus stop, train station; folders inside them, such as a, make",
    ),
    "a split beside a folder of flat images": (
        ["train/cat/1.jpg", "train/dog/1.jpg", "figures/1.jpg"],
        {"train": ONE_EACH},
        "images in no class folder are left out: 1 in .*photos/figures",
    ),
    "hidden and other files": (
        ["cat/1.jpg", "cat/.ipynb_checkpoints/2.jpg", "cat/Thumbs.db", "cat/.DS_Store", "dog/1.jpg", "dog/._1.jpg"],
        {"train": ONE_EACH},
        "",
    ),
    "suffixes in any case": (
        ["cat/1.JPG", "cat/2.Jpg", "cat/3.jpeg", "dog/1.Png", "dog/2.WebP"],
        {"train": {"cat": 3, "dog": 2}},
        "",
    ),
    "names of all kinds": (
        ["猫/1 [a]*?.jpg", "cat, big; [x]{y}/ü.jpg", "dog 'n' \"co\"/%20.jpg"],
        {"train": {"cat, big; [x]{y}": 1, "dog 'n' \"co\"": 1, "猫": 1}},
        "",
    ),
    "an archive beside": (["cat/1.jpg", "dog/1.jpg", "photos.zip"], {"train": ONE_EACH}, "are not read: photos.zip"),
    "names of splits in names of files": (["cat/test_1.jpg", "dog/2.jpg"], {"train": ONE_EACH}, ""),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("streaming", [False, True])
def test_the_class_is_the_first_folder_below_the_split(layout, streaming, tmp_path, said):
    files, wanted, sentence = LAYOUTS[layout]
    write(tmp_path / "photos", *files)
    splits = load_splits(str(tmp_path / "photos"), streaming=streaming)
    if streaming:
        labels = {split: [row["label"] for row in rows] for split, rows in splits.items()}
        names = next(iter(splits.values())).features["label"].names
        splits_found = {
            split: {name: some.count(index) for index, name in enumerate(names)} for split, some in labels.items()
        }
    else:
        splits_found = found(splits)
    assert splits_found == wanted
    assert re.search(sentence, said(), re.DOTALL) if sentence else said() == ""


REFUSED = {
    "no folders": (
        ["1.jpg", "2.jpg"],
        r"photos: the images of this folder \(2, such as .*photos/1.jpg\) lie in no folder of a class; wanted .*photos/CLASS/",
    ),
    "splits without class folders": (
        ["train/1.jpg", "val/2.jpg", "val/3.jpg"],
        r"photos: the images of train, val \(3\) lie in no class folders; wanted .*photos/train/CLASS/IMAGE",
    ),
    "one split without class folders": (
        ["train/1.jpg", "val/cat/2.jpg", "val/dog/2.jpg"],
        r"photos: the images of train \(1, such as .*train/1.jpg\) lie in no folder of the training classes",
    ),
    "Tiny-ImageNet's validation images": (
        ["train/n01/images/1.JPEG", "train/n02/images/2.JPEG", "val/images/3.JPEG", "val/val_annotations.txt"],
        r"photos: the images of val \(1, such as .*photos/val/images/3.JPEG\) lie in no folder of the training classes "
        r"\(n01, n02\); wanted .*photos/val/CLASS/3.JPEG: sort .* or move val away to hold out a part of train",
    ),
    "most images beside class folders": (
        ["1.jpg", "2.jpg", "3.jpg", "cat/1.jpg", "dog/1.jpg"],
        r"photos: most images lie in no class folder: 3 in .*photos; wanted photos/CLASS/IMAGE",
    ),
    "a class in a format that is not read": (
        ["cat/1.jpg", "bird/1.jpg", "dog/1.HEIC", "dog/2.heic"],
        r"photos/dog holds 2 .heic files and no image that is read: save them as .jpg or .png, or move the folder away",
    ),
    "a run among the classes": (
        ["cat/1.jpg", "dog/1.jpg", "runs/mine/metrics.jsonl", "runs/mine/model/figures/confusion.png"],
        r"photos/runs/mine is a run of train.py, whose pictures would become images to train on: move it out of .*photos",
    ),
    "a test split of other classes": (
        ["train/cat/1.jpg", "train/dog/1.jpg", "test/eel/1.jpg", "test/owl/1.jpg"],
        r"the images of test \(2, such as .*\) lie in no folder of the training classes \(cat, dog\); .* or move test away",
    ),
    "classes in other capitals": (
        ["train/Cat/1.jpg", "train/Dog/1.jpg", "test/cat/1.jpg", "test/dog/1.jpg"],
        r"photos: the images of test .* of the training classes \(Cat, Dog\); cat differs only in capitals; wanted",
    ),
    "COCO": (
        ["train2017/1.jpg", "val2017/2.jpg"],
        r"photos: the images of train2017, val2017 \(2\) lie in no class folders; wanted .*photos/train2017/CLASS/IMAGE",
    ),
    "splits in words of their own": (
        ["Train Images/1.jpg", "test_images/2.jpg", "trainval/3.jpg"],
        r"photos: the images of Train Images, test_images, trainval \(3\) lie in no class folders",
    ),
    "splits in class folders": (
        ["cat/train/1.jpg", "cat/test/2.jpg", "dog/train/1.jpg", "dog/test/2.jpg"],
        r"photos: the class folder cat holds splits \(cat/test, cat/train\), which .*; wanted the splits above the classes, such as "
        r".*photos/train/cat",
    ),
    "splits of unknown names": (
        [f"{split}/{name}/1.jpg" for split in ("tr", "va", "te") for name in ("cat", "dog")],
        r"photos: te, tr, va and other folders hold the same folders \(cat, dog\), as splits do; wanted the names train, validation and test",
    ),
    "one split of a known name": (
        [f"{split}/{name}/1.jpg" for split in ("Entrainement", "Test") for name in ("cat", "dog")],
        r"photos: Test and other folders hold the same folders",
    ),
    "a folder that is a split or a class": (
        ["train/ice/1.jpg", "train/tgv/1.jpg", "car/audi/1.jpg", "car/bmw/1.jpg"],
        "photos: train may be a split or a class, as car beside it holds folders, too: if it is a class, rename it",
    ),
    "no files": (
        [],
        r"photos holds no files; wanted a folder per class of .jpg, .png, .* or Parquet, CSV or tar files",
    ),
    "no images that are read": (["cat/1.heic", "dog/1.heic"], r"photos holds 2 .heic files and no image that is read"),
    "no images": (["notes.txt", "cat/readme.pdf"], r"photos holds 1 .pdf, 1 .txt files and no image that is read"),
}


@pytest.mark.parametrize("layout", REFUSED)
def test_a_layout_without_classes_is_refused_at_once(layout, tmp_path):
    """a folder of images whose classes cannot be told | one sentence: the layout that was found, and the one that is wanted"""
    files, sentence = REFUSED[layout]
    (tmp_path / "photos").mkdir()
    write(tmp_path / "photos", *files)
    with pytest.raises(ValueError, match=sentence):
        load_splits(str(tmp_path / "photos"))


def test_one_class_alone_is_scored_and_not_trained_on(tmp_path):
    write(tmp_path, "cat/1.jpg", "cat/2.jpg")
    splits, names, _ = prepare_splits(load_splits(str(tmp_path)), train_split=None, eval_split="train")
    assert (names, splits["eval"]["label"][:]) == (["cat"], [0, 0])
    with pytest.raises(ValueError, match=r"the 2 training images are all of one class \(cat\); wanted two or more"):
        prepare(load_splits(str(tmp_path)))


def test_a_class_that_training_lacks_is_an_error(tmp_path):
    write(tmp_path, "train/cat/1.jpg", "train/dog/1.jpg", "val/cat/1.jpg", "val/eel/1.jpg")
    with pytest.raises(
        ValueError, match=r"'validation' has images of 1 classes that the split 'train' has none of: eel"
    ):
        prepare(load_splits(str(tmp_path)))


def test_empty_folders_images_of_other_formats_and_links_to_folders_are_named(tmp_path, said):
    write(tmp_path / "photos", "cat/1.jpg", "cat/2.heic", "dog/1.jpg", "eel/notes.txt")
    (tmp_path / "photos" / "fox").symlink_to(tmp_path / "photos" / "cat")
    assert found(load_splits(str(tmp_path / "photos"))) == {"train": ONE_EACH}
    for sentence in ("1 .heic files are not read", "eel hold no images", "links to folders are not followed: fox"):
        assert sentence in said()


def test_only_the_main_process_speaks(tmp_path, said, monkeypatch):
    write(tmp_path, "cat/indoor/1.jpg", "dog/1.jpg")
    monkeypatch.setenv("RANK", "1")
    load_splits(str(tmp_path))
    assert said() == ""


def test_only_regular_files_and_links_to_them_are_listed(tmp_path):
    write(tmp_path, "photos/cat/1.jpg", "photos/dog/1.jpg", "elsewhere.jpg")
    cat = tmp_path / "photos" / "cat"
    (cat / "linked.jpg").symlink_to(tmp_path / "elsewhere.jpg")
    (cat / "broken.jpg").symlink_to(tmp_path / "nowhere.jpg")
    (cat / "zero.jpg").symlink_to("/dev/zero")
    os.mkfifo(cat / "pipe.jpg")
    assert sorted(scan_folder(tmp_path / "photos").images["cat"]) == ["1.jpg", "linked.jpg"]


NAMES = [
    "cat",
    "cat-2",
    "cat 3",
    "Cat",
    "cat.d",
    "cat_1",
    "ca",
    "été",
    "10",
    "9",
]  # "cat-2/1.png" sorts before "cat/1.png"


@pytest.mark.parametrize("splits", [("",), ("train/", "val/", "test/"), ("data/train/", "data/test/")])
def test_the_rows_are_those_of_datasets_in_its_order(splits, tmp_path):
    """a folder that `datasets` reads, too | the same splits, rows, labels and names in the same order: runs go on"""
    for split in splits:
        for name in NAMES:
            write(tmp_path / "photos", *(f"{split}{name}/{number}.png" for number in (1, 10, 2, "a", "B", "_")))
    wanted = load_dataset(str(tmp_path / "photos"))
    ours = load_splits(str(tmp_path / "photos"))
    assert list(ours) == list(wanted)
    for split, rows in ours.items():
        assert rows.features["label"] == wanted[split].features["label"]
        assert rows["label"][:] == wanted[split]["label"][:]
        paths = wanted[split].cast_column("image", rows.features["image"])["image"][:]
        assert rows["image"][:] == paths


def test_the_fingerprint_is_that_of_the_files_names(tmp_path):
    write(tmp_path, "cat/1.jpg", "dog/1.jpg")
    before = load_splits(str(tmp_path))["train"]._fingerprint
    assert load_splits(str(tmp_path))["train"]._fingerprint == before
    write(tmp_path, "dog/2.jpg")
    assert load_splits(str(tmp_path))["train"]._fingerprint != before


def test_images_of_a_folder_are_decoded_from_their_files(tmp_path):
    for number, name in enumerate(("cat", "dog")):
        (tmp_path / name / "indoor").mkdir(parents=True)
        picture(number, (8, 12)).save(tmp_path / name / "indoor" / "1.png")
    rows = prepare_splits(load_splits(str(tmp_path)), train_split=None, eval_split="train")[0]["eval"]
    assert len(ImageDataset(rows, spec_of())) == 2


@pytest.mark.parametrize(
    ("data", "run", "sentence"),
    [
        ("photos", "photos/run", "--output_dir lies in the folder of the data"),
        ("photos", "photos", "--output_dir lies in the folder of the data"),
        ("runs/mine/photos", "runs/mine", "the data lies in the folder of --output_dir"),
        ("photos", ".", "the data lies in the folder of --output_dir"),
        ("link", "photos/run", "--output_dir lies in the folder of the data"),
    ],
)
def test_a_run_is_not_kept_among_its_images_nor_these_in_a_run(data, run, sentence, tmp_path, monkeypatch):
    """--output_dir in the data folder, or the reverse | refused before anything is read"""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "photos/cat/1.jpg", "runs/mine/photos/cat/1.jpg")
    (tmp_path / "link").symlink_to("photos")
    with pytest.raises(ValueError, match=rf"{sentence}, so that pictures of the run would become images to train on"):
        refuse_nested_folders(data, run)
    refuse_nested_folders("photos", "photos-run")
    refuse_nested_folders("alice/photos", "alice")
    refuse_nested_folders("fashion-mnist-mini", ".")


def test_held_out_images_are_called_so():
    assert describe_scored("part of train") == "the held-out validation images"
    assert describe_scored("test") == "the test images"

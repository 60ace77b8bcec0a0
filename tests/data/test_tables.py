"""Claims about tables: which split and class an image gets, and what is said where that cannot be told."""

import pytest
from image_data import animal, pictures, write_tar

from hf_vit.data.sources import load_splits


def write_images(folder, names):
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(pictures([number])[0])


def rows_of(numbers, header="image,label"):
    return "\n".join([header, *(f"images/{n}.png,{animal(n)}" for n in numbers)])


@pytest.fixture
def folder(tmp_path):
    """images/0.png ... images/5.png; even numbers are cats"""
    write_images(tmp_path, [f"images/{number}.png" for number in range(6)])
    return tmp_path


@pytest.mark.parametrize(("train", "test"), [("labels_train", "labels_test"), ("Train2024", "my-Test")])
def test_a_word_anywhere_in_the_name_of_a_table_says_its_split(train, test, folder):
    (folder / f"{train}.csv").write_text(rows_of(range(4)))
    (folder / f"{test}.csv").write_text(rows_of([4, 5]))
    assert {split: len(rows) for split, rows in load_splits(str(folder)).items()} == {"train": 4, "test": 2}


@pytest.mark.parametrize("names", [("photos_train", "photos_test"), ("train-0", "test-0")])
def test_a_word_anywhere_in_the_name_of_a_shard_says_its_split(names, tmp_path):
    for name in names:
        write_tar(tmp_path / f"{name}.tar", pictures([0, 1]), [0, 1])
    assert list(load_splits(str(tmp_path))) == ["train", "test"]


def test_numbered_tables_and_shards_are_parts_of_one_split(folder, tmp_path):
    for number in range(3):
        (folder / f"photos-{number:04}.csv").write_text(rows_of([2 * number, 2 * number + 1]))
    assert {split: len(rows) for split, rows in load_splits(str(folder)).items()} == {"train": 6}
    (tmp_path / "shards").mkdir()
    for number in range(2):
        write_tar(tmp_path / "shards" / f"{number:05}.tar", pictures([0, 1]), [0, 1])
    assert len(load_splits(str(tmp_path / "shards"))["train"]) == 4


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (("train", "holdout"), r"holdout.csv are of no split, beside train.csv"),
        (("train", "sample_submission"), r"sample_submission.csv are of no split, beside train.csv"),
        (("labels", "labels_old"), r"holds several data sets, or the splits of one: labels.csv, labels_old.csv"),
        (("labels_v1", "labels_v2"), r"labels_v1.csv, labels_v2.csv; wanted one, .* name one with --dataset_name"),
    ],
)
def test_tables_whose_split_cannot_be_told_are_not_trained_on(names, sentence, folder):
    """a table that may be a test set, or another version of the first | one error that names it"""
    for name in names:
        (folder / f"{name}.csv").write_text(rows_of(range(4)))
    with pytest.raises(ValueError, match=sentence):
        load_splits(str(folder))


@pytest.mark.parametrize("names", [("train-0", "holdout-0"), ("cats", "dogs")])
def test_shards_whose_split_cannot_be_told_are_not_trained_on(names, tmp_path):
    for name in names:
        write_tar(tmp_path / f"{name}.tar", pictures([0, 1]), [0, 1])
    with pytest.raises(ValueError, match=r"are of no split|holds several data sets"):
        load_splits(str(tmp_path))

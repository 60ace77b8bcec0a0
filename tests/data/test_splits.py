"""Claims about columns, labels, classes and splits."""

import numpy as np
import pytest
import torch
from datasets import ClassLabel, List, concatenate_datasets
from image_data import dataset, prepare

from hf_vit.data.columns import find_columns, label_tensor, match_labels
from hf_vit.data.splits import (
    class_weights,
    default_split,
    describe_scored,
    is_test_split,
    stratified_holdout,
    stratified_subset,
)
from hf_vit.system.errors import UserError


def plain(labels, column="label", kind=None):
    """Images with labels that are bare numbers, text, lists, or what `kind` is."""
    rows = dataset([0] * len(labels)).remove_columns("label")
    return rows.add_column(column, labels, feature=kind)


def test_columns_are_found_by_their_type_or_a_usual_name_or_must_be_told_apart():
    named = dataset([0, 1], note=["a", "b"]).rename_columns({"image": "photo", "label": "animal"})
    assert find_columns(named, None, None) == ("photo", "animal")
    shard = plain([1, 0], "cls").add_column("__key__", ["x", "y"]).rename_column("image", "png")
    assert find_columns(shard, None, None) == ("png", "cls")
    both = concatenate_datasets([named, named.select_columns("photo").rename_column("photo", "second")], axis=1)
    with pytest.raises(UserError, match="--image_column photo, second"):
        find_columns(both, None, None)
    assert find_columns(both, "second", None) == ("second", "animal")


@pytest.mark.parametrize(
    ("lacking", "columns", "needed"),
    [
        ("image", (None, None), r"--image_column.*note"),
        ("label", (None, None), r"--label_column.*note"),
        ("image", ("note", "label"), "--image_column note"),
    ],
)
def test_an_unsuitable_column_is_an_error_that_lists_the_columns(lacking, columns, needed):
    rows = dataset([0, 1], note=["a", "b"]).remove_columns(lacking)
    with pytest.raises(UserError, match=needed):
        find_columns(rows, *columns)


def test_validation_goes_before_test_and_other_names_are_known_in_any_case():
    rows = dataset([0, 1])
    assert prepare({"train": rows, "test": rows, "validation": rows})[2] == "validation"
    assert prepare({"train": rows, "test": rows}, eval_split="train")[2] == "train"
    for name, is_test in (("eval", True), ("Validation", False), ("testing", True), ("dev", False)):
        splits = {"train": rows, name: rows}
        assert prepare(splits)[2] == default_split(splits) == name
        assert is_test_split(name) == is_test
    assert not is_test_split("part of test")
    assert "held-out" in describe_scored("part of train")


def test_a_class_of_one_image_stays_in_train_and_one_of_two_is_scored():
    labels = np.array([0] * 50 + [1] * 3 + [2])
    assert np.bincount(labels[stratified_holdout(labels, 0.1, seed=0)], minlength=3).tolist() == [5, 1, 0]
    with pytest.raises(UserError, match="--eval_split"):
        stratified_holdout(np.array([0, 1]), 0.1, seed=0)


LISTS = [["dog", "cat"], ["cat"], [], ["dog"]]
SEVERAL = {
    "names": (plain(LISTS), {}),
    "ClassLabel": (plain([[1, 0], [0], [], [1]], kind=List(ClassLabel(names=["cat", "dog"]))), {}),
    "text": (plain(["dog; cat", "cat", None, "dog"]), {"label_separator": ";"}),
    "columns": (
        dataset([0] * 4).add_column("cat", [1.0, 1, 0, 0]).add_column("dog", [True, False, False, True]),
        {"label_columns": "cat,dog"},
    ),
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_several_labels_an_image_are_read_from_lists_text_and_columns(kind):
    rows, how = SEVERAL[kind]
    splits, names, _ = prepare({"train": rows, "test": rows}, **how)
    assert names == ["cat", "dog"]
    for part in splits.values():
        assert label_tensor(part).tolist() == [[1, 1], [1, 0], [0, 0], [0, 1]]


BOTH = dataset([0, 1])
# The splits, what is asked for, and what the error names.
REFUSED = {
    "an unknown split": ({"train": BOTH, "test": BOTH}, {"eval_split": "tset"}, "tset.*train, test"),
    "no label": ({"train": BOTH, "test": dataset([0, None])}, {}, "test.*row 1"),
    "an unlabelled split": ({"train": BOTH, "test": dataset([0, -1])}, {}, "test.*-1"),
    "a class of a ClassLabel": ({"train": BOTH, "test": dataset([0, 1], ["owl", "dog"])}, {}, "test.*owl"),
    "one class": ({"train": dataset([1, 1, 1])}, {}, "dog"),
    "0 and 1 in a list": ({"train": plain([[0, 1, 0], [1, 0, 0]])}, {}, "--label_columns.*row 0"),
    "0.7 in a column of 0 and 1": ({"train": plain([0.0, 0.7])}, {"label_columns": "label"}, "label.*row 1 has 0.7"),
    "a number beyond the names": ({"train": plain([2, 0, 1]), "test": plain([3])}, {"label_names": list("abc")}, "test.*3"),
    "numbers that may begin at 0 or 1": ({"train": plain([1, 2])}, {"label_names": list("abc")}, "--label_names.*wanted 1, 2,"),
    "a misspelled name": ({"train": BOTH}, {"label_names": ["dog", "Cat"]}, "--label_names.*wanted cat"),
    "more shots than images": ({"train": dataset([0, 0, 0, 1, 1]), "test": dataset([0])}, {"shots": 3}, "--shots 3.*dog.*2"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_trained_on_is_an_error_that_names_it(what):
    splits, how, needed = REFUSED[what]
    with pytest.raises(UserError, match=needed):
        prepare(splits, **how)


@pytest.mark.parametrize(
    ("labels", "named", "expected"),
    [
        (dataset([0, 1]), ["dog", "fish", "cat"], [2, 0]),
        (dataset([0, 1, 2], ["1", "10", "2"]), ["one", "two", "ten"], [0, 2, 1]),  # folders are sorted as text
        (plain(["b", "a"]), ["c", "b", "a"], [1, 2]),
        (plain([3, 1, 2]), ["ant", "bee", "cow"], [2, 0, 1]),
    ],
)
def test_label_names_find_their_classes(labels, named, expected):
    splits, names, _ = prepare({"train": labels, "test": labels}, label_names=named)
    assert names == named
    assert splits["train"]["label"][:] == splits["eval"]["label"][:] == expected


@pytest.mark.parametrize("classes", [list("abcdefghij"), ["-1", "2", "9", "10"], ["01", "1", "10", "1a"]])
def test_classes_that_are_text_are_sorted_and_whole_numbers_by_their_value(classes):
    assert prepare({"train": plain([*classes[::-1], *classes])})[1] == classes


ORDER = dataset([0, 1, 2], ["dog", "eel", "cat"])


@pytest.mark.parametrize(
    ("test", "names", "expected"),
    [
        (ORDER, ["eel", "dog", "cat"], [1, 0, 2]),
        (dataset([1, 2], ["owl", "dog", "cat"]), None, [1, 0]),
        (plain(["dog", "cat"]), None, [1, 0]),
    ],
)
def test_splits_whose_class_labels_differ_are_matched_by_name(test, names, expected):
    train = dataset([0, 1, 2], ["cat", "dog", "eel"])
    splits, found, _ = prepare({"train": train, "test": test}, label_names=names)
    assert (found, splits["eval"]["label"][:]) == (names or ["cat", "dog", "eel"], expected)


def test_parts_of_the_training_images_are_by_class_and_by_seed():
    train = dataset([0] * 20 + [1] * 8 + [2] * 4, "abc")
    rows_of = lambda **how: {role: rows["row"][:] for role, rows in prepare({"train": train}, **how)[0].items()}
    assert prepare({"train": train})[2] == "part of train"
    whole, few, other = rows_of(), rows_of(shots=3), rows_of(shots=3, seed=1)
    assert sorted(whole["train"] + whole["eval"]) == list(range(32))
    assert whole["eval"] == few["eval"]
    assert set(few["train"]) < set(whole["train"])
    counts = lambda rows: np.bincount(np.asarray(train["label"])[rows]).tolist()
    assert (counts(whole["train"]), counts(few["train"])) == ([15, 6, 3], [3, 3, 3])
    assert few == rows_of(shots=3)
    assert few["train"] != other["train"]
    assert few["eval"] != other["eval"]


def test_each_of_several_labels_with_two_images_is_on_both_sides():
    """300 images of 12 labels, from frequent to rare."""
    labels = (np.random.default_rng(0).random((300, 12)) < np.geomspace(0.4, 0.008, 12)).astype(np.float32)
    few = labels[stratified_subset(labels[:, :6], list("abcdef"), 4, 0), :6]  # 4 shots
    assert ((few.sum(axis=0) >= 3).all(), len(few) < 40) == (True, True)
    held_out = stratified_holdout(labels, 0.1, 0)
    counts, taken = labels.sum(axis=0), labels[held_out].sum(axis=0)
    assert ((taken > 0) & (taken < counts))[counts > 1].all()
    assert (taken[counts == 1] == 0).all()
    assert np.abs(taken - 0.1 * counts).max() <= 3
    assert np.array_equal(held_out, stratified_holdout(labels, 0.1, 0))


def test_the_last_image_of_a_label_is_never_held_out():
    labels = np.array([[1, 1, 0], [1, 1, 0], [1, 0, 1], [0, 0, 1]], np.float32)
    for seed in range(10):
        assert (labels[stratified_holdout(labels, 0.5, seed)].sum(axis=0) < labels.sum(axis=0)).all()


def test_class_weights_are_inverse_counts_with_mean_one_and_of_several_labels_without_over_with():
    labels = torch.tensor([0, 0, 0, 2])
    torch.testing.assert_close(class_weights(labels, 4), torch.tensor([4 / (2 * 3), 0, 4 / 2, 0]))
    several = torch.tensor([[1.0, 0, 1], [0, 0, 1], [0, 0, 1], [0, 0, 1]])
    assert class_weights(several, 3).tolist() == [3.0, 1.0, 1.0]


def test_labels_are_matched_to_those_of_a_model_by_name():
    assert match_labels(torch.tensor([0, 1, 1]), ["cat", "dog"], {0: "dog", 1: "cat"}).tolist() == [1, 0, 0]
    labels, twice = torch.tensor([0, 2]), {0: "crane", 1: "ibis", 2: "crane"}
    assert match_labels(labels, ["crane", "ibis", "crane"], twice).tolist() == [0, 2]
    for names in (["crane", "ibis", "rail"], ["eel"]):
        with pytest.raises(UserError, match=names[0]):
            match_labels(labels, names, twice)

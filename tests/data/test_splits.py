"""Claims about columns, labels, classes and splits."""

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, List, Value
from image_data import dataset, picture, pictures, prepare

from hf_vit.data.columns import find_columns, label_tensor, match_labels
from hf_vit.data.splits import class_weights, default_split, is_test_split, stratified_holdout, stratified_subset
from hf_vit.system import progress


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
    assert prepare({"train": train, "test": test, "valid": validation})[2] == "valid"
    assert prepare({"train": train, "test": test}, eval_split="train")[2] == "train"


def test_a_split_called_as_folders_are_is_scored_and_one_that_is_not_used_is_named(caplog, monkeypatch):
    train, other = dataset([0, 1] * 4), dataset([0, 1])
    for name, is_test in (("eval", True), ("holdout", True), ("Validation", False), ("testing", True)):
        scored = prepare({"train": train, name: other})[2]
        assert (scored, is_test_split(scored)) == (name, is_test)
        assert default_split({"train": train, name: other}) == name
    assert not is_test_split("part of test")
    monkeypatch.setattr(progress.logger, "propagate", True)
    prepare({"train": train, "validation": other, "test": other})
    assert caplog.text == ""
    prepare({"train": train, "extra": other})
    assert "neither trained on nor scored: the split extra" in caplog.text


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
    with pytest.raises(
        ValueError, match=r"1 labels of the split 'train' are missing, the first in row 1; .*pass --label_sep"
    ):
        prepare({"train": words})


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


def test_numbers_with_decimals_are_no_classes():
    with pytest.raises(
        ValueError,
        match=r"numbers with decimals \(3.7, 4.2 ...\), and float targets \(regression\) are not supported; wanted",
    ):
        prepare({"train": plain([3.7, 4.2, 5.0])})
    assert prepare({"train": plain([1.0, 0.0, 1.0])}, fraction=0.5)[1] == ["0.0", "1.0"]


@pytest.mark.parametrize(
    "labels",
    [
        ["red", "bag", "red;bag"],
        ["red; bag", "blue; bag", "red; shoe"],
        ["red|bag", "bag|red", "blue|bag"],
        ["scab", "rust", "scab,rust", "scab"],
    ],
)
def test_several_labels_in_one_text_are_no_class(labels):
    with pytest.raises(
        ValueError, match=r"looks like several labels, as .* and .* occur in others, too: pass --label_separator '.'"
    ):
        prepare({"train": plain(labels)})


def test_a_separator_in_a_name_is_said_and_no_error(caplog, monkeypatch):
    monkeypatch.setattr(progress.logger, "propagate", True)
    for names in (["AC;DC", "Rush"], ["Felidae|lion", "Felidae|tiger"]):
        assert prepare({"train": plain(names * 4)})[1] == sorted(names)
        assert f"the label {names[0]!r} is taken for the name of one class" in caplog.text
    caplog.clear()
    assert prepare({"train": plain(["maillot", "maillot, tank suit"] * 4)})[1] == ["maillot", "maillot, tank suit"]
    assert caplog.text == ""


def with_labels(labels, kind=None):
    """Images whose column `labels` holds lists of labels, a text, or what `kind` is."""
    rows = dataset([0] * len(labels)).remove_columns("label")
    return rows.add_column("labels", labels, feature=kind)


LISTS = [["dog", "cat"], ["cat"], [], ["dog"]]
HOT = [[1, 1], [1, 0], [0, 0], [0, 1]]


@pytest.mark.parametrize("several", ["names", "ClassLabel", "text", "columns of 0 and 1"])
def test_several_labels_an_image_are_read_from_lists_text_and_columns(several):
    how = {}
    if several == "names":
        rows = with_labels(LISTS)
    elif several == "ClassLabel":
        indices = [[["cat", "dog"].index(name) for name in names] for names in LISTS]
        rows = with_labels(indices, List(ClassLabel(names=["cat", "dog"])))
    elif several == "text":
        rows, how = with_labels(["dog; cat", "cat", None, "dog"]), {"label_separator": ";"}
    else:
        rows = dataset([0] * 4).add_column("cat", [1, 1, 0, 0]).add_column("dog", [True, False, False, True])
        how = {"label_columns": "cat,dog"}
    splits, names, _ = prepare({"train": rows, "test": rows}, **how)
    assert names == ["cat", "dog"]
    for part in splits.values():
        assert label_tensor(part).tolist() == HOT


@pytest.mark.parametrize(
    ("rows", "how", "message"),
    [
        (with_labels([["cat"], ["dog", None]]), {}, "labels of the split 'train' are missing, the first in row 1"),
        (with_labels([[0, 1, 0], [1, 0, 0]]), {}, r"row 0 .* has the label '0' twice; .*--label_columns"),
        (with_labels([[0.5], [1.0]]), {}, "numbers with decimals"),
        (with_labels([["cat"], ["cat"]]), {}, "the 2 training images are all given the same labels"),
        (with_labels([["cat"], ["dog"]]), {"label_separator": ";"}, "the labels .labels. are List; wanted text"),
        (with_labels([["cat"], ["dog"]]), {"label_column": "labels", "label_columns": "cat"}, "does not go with"),
        (with_labels([0.0, 0.7]), {"label_columns": "labels"}, "neither 0 nor 1, the first is 0.7 in row 1"),
        (with_labels([0, 1]), {"label_columns": "labels,owl"}, r"there is no column owl; the columns are image"),
    ],
)
def test_labels_that_are_no_lists_of_classes_are_refused_with_what_was_wanted(rows, how, message):
    with pytest.raises(ValueError, match=message):
        prepare({"train": rows, "test": rows}, **how)


def test_a_label_that_no_training_image_has_is_named():
    train, test = with_labels([["cat"], ["dog"]]), with_labels([["cat", "owl"]])
    with pytest.raises(ValueError, match="labels owl of the split 'test' do not occur in the training split"):
        prepare({"train": train, "test": test})
    kind = List(ClassLabel(names=["cat", "dog", "owl"]))
    with pytest.raises(ValueError, match="'test' has images of 1 classes that the split 'train' has none of: owl"):
        prepare({"train": with_labels([[0], [1]], kind), "test": with_labels([[0, 2]], kind)})


def random_labels(seed, count=300, num_labels=12):
    """Lists of labels from frequent to rare, as 0 and 1 (n, L)."""
    rng = np.random.default_rng(seed)
    return (rng.random((count, num_labels)) < np.geomspace(0.4, 0.008, num_labels)).astype(np.float32)


@pytest.mark.parametrize("seed", range(5))
def test_each_of_several_labels_with_two_images_is_on_both_sides(seed):
    labels = random_labels(seed)
    held_out = stratified_holdout(labels, 0.1, seed)
    counts, taken = labels.sum(axis=0), labels[held_out].sum(axis=0)
    assert ((taken > 0) & (taken < counts))[counts > 1].all()
    assert (taken[counts == 1] == 0).all()
    assert np.abs(taken - 0.1 * counts).max() <= 3
    assert 25 <= len(held_out) <= 36
    assert np.array_equal(held_out, stratified_holdout(labels, 0.1, seed))


def test_labels_that_cannot_all_be_on_both_sides_are_still_split():
    triangle = np.array([[1, 1, 0], [1, 0, 1], [0, 1, 1]], np.float32)
    assert 0 < len(stratified_holdout(triangle, 0.5, 0)) < 3


def test_shots_of_several_labels_are_about_as_many_of_each():
    labels = random_labels(0)[:, :6]
    kept = stratified_subset(labels, list("abcdef"), 1.0, 4, seed=0)
    assert (labels[kept].sum(axis=0) >= 3).all()
    assert len(kept) < 40
    with pytest.raises(ValueError, match="the class 'c' has only 58"):
        stratified_subset(labels, list("abcdef"), 1.0, 60, seed=0)


def test_weights_of_several_labels_are_images_without_over_images_with():
    labels = torch.tensor([[1.0, 0, 1], [0, 0, 1], [0, 0, 1], [0, 0, 1]])
    assert class_weights(labels, 3).tolist() == [3.0, 1.0, 1.0]


def test_a_split_that_is_not_there_is_named_beside_those_that_are():
    with pytest.raises(ValueError, match=r"no split 'tset'; it has train, test: name one of these with --eval_split"):
        prepare({"train": dataset([0, 1]), "test": dataset([0])}, eval_split="tset")


def test_label_names_give_text_labels_their_order():
    splits, names, _ = prepare({"train": plain(["b", "a"]), "test": plain(["a"])}, label_names=["c", "b", "a"])
    assert names == ["c", "b", "a"]
    assert labels_of(splits) == {"train": [1, 2], "eval": [2]}
    with pytest.raises(ValueError, match=r"labels a of the split 'train' do not occur in --label_names"):
        prepare({"train": plain(["b", "a"]), "test": plain(["b"])}, label_names=["b", "c"])


@pytest.mark.parametrize(
    ("classes", "named", "expected"),
    [
        (["cat", "dog"], ["dog", "cat"], [1, 0]),  # by name
        (["1", "10", "2"], ["one", "two", "ten"], [0, 2, 1]),  # by number: folders are sorted as text
        (["cat", "dog"], ["dog", "fish", "cat "], [2, 0]),
        (["cat", "dog"], ["Dog", "Cat"], [1, 0]),
        (["cat", "dog"], ["Katze", "Hund"], [0, 1]),  # in the order of the data set
        (["0", "1"], ["zero", "one", "two"], [0, 1]),
    ],
)
def test_label_names_find_their_classes(classes, named, expected):
    indices = list(range(len(classes)))
    splits, names, _ = prepare({"train": dataset(indices, classes), "test": dataset([1], classes)}, label_names=named)
    assert names == named
    assert labels_of(splits) == {"train": expected, "eval": [expected[1]]}


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        (["dog", "cat", "brid"], r"lacks 1 of the 3 classes \('bird'\) and has 1 names of no class \('brid'\)"),
        (["dog", "cat"], r"lacks 1 of the 3 classes \('bird'\) and has 0 names of no class"),
        (
            ["Hund", "Katze", "Vogel", "Aal"],
            r"has 4 names and the data set has 3 classes \(bird, cat, dog\), none of which",
        ),
        (["Hund", "Katze"], r"has 2 names and the data set has 3 classes"),
    ],
)
def test_label_names_that_fit_in_part_are_an_error_that_says_where(named, sentence):
    with pytest.raises(ValueError, match=f"--label_names {sentence}"):
        prepare({"train": dataset([0, 1, 2], ["bird", "cat", "dog"])}, label_names=named)


@pytest.mark.parametrize(
    ("classes", "named", "line"),
    [
        (["cat", "dog"], ["Katze", "Hund"], "cat is called Katze, dog is called Hund"),
        (["10", "2"], ["two", "ten"], "2 is called two, 10 is called ten"),
        (["1", "2"], ["one", "two"], ""),
        (["cat", "dog"], ["dog", "cat"], ""),
    ],
)
def test_names_given_by_the_order_of_the_classes_are_shown(classes, named, line, caplog, monkeypatch):
    monkeypatch.setattr(progress.logger, "propagate", True)
    prepare({"train": dataset([0, 0, 1, 1], classes)}, label_names=named)
    assert line in caplog.text if line else caplog.text == ""


def test_splits_whose_class_labels_differ_are_matched_by_name():
    train, test = dataset([0, 1, 2], ["cat", "dog", "eel"]), dataset([0, 1, 2], ["dog", "eel", "cat"])
    splits, names, _ = prepare({"train": train, "test": test})
    assert (names, labels_of(splits)["eval"]) == (["cat", "dog", "eel"], [1, 2, 0])
    splits, _, _ = prepare({"train": train, "test": test}, label_names=["eel", "dog", "cat"])
    assert labels_of(splits) == {"train": [2, 1, 0], "eval": [1, 0, 2]}
    kinds = [List(ClassLabel(names=names)) for names in (["cat", "dog"], ["dog", "cat"])]
    lists = {"train": with_labels([[0], [1]], kinds[0]), "test": with_labels([[0], [0, 1], []], kinds[1])}
    assert label_tensor(prepare(lists)[0]["eval"]).tolist() == [[0, 1], [1, 1], [0, 0]]
    more = ["owl", "dog", "cat"]
    assert labels_of(prepare({"train": train, "test": dataset([1, 2], more)})[0])["eval"] == [1, 0]
    with pytest.raises(ValueError, match=r"'test' has images of 1 classes that the training split does not know: owl"):
        prepare({"train": train, "test": dataset([0, 2], more)})


def test_a_class_label_that_is_missing_is_an_error_that_names_its_row():
    with pytest.raises(ValueError, match="1 labels of the split 'test' are missing, the first in row 1"):
        prepare({"train": dataset([0, 1]), "test": dataset([0, None])})


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
    assert whole["eval"] != rows_of(seed=1)["eval"]
    assert 28 in few["train"]  # the only image of its class


def test_more_shots_than_images_name_the_class_and_its_count():
    with pytest.raises(ValueError, match=r"--shots 3: the class 'dog' has only 2 training images"):
        prepare({"train": dataset([0, 0, 0, 1, 1]), "test": dataset([0])}, shots=3)


def test_class_weights_are_inverse_counts_with_mean_one():
    labels = torch.tensor([0, 0, 0, 2])
    weights = class_weights(labels, 4)
    torch.testing.assert_close(weights, torch.tensor([4 / (2 * 3), 0, 4 / 2, 0]))
    assert weights[labels].mean() == 1


def test_labels_that_a_model_names_twice_are_matched_by_place_or_refused():
    labels, twice = torch.tensor([0, 2]), {0: "crane", 1: "ibis", 2: "crane"}
    assert match_labels(labels, ["crane", "ibis", "crane"], twice).tolist() == [0, 2]
    with pytest.raises(ValueError, match="several of its labels crane"):
        match_labels(labels, ["crane", "ibis", "rail"], twice)


def test_each_class_of_two_has_an_image_that_is_scored():
    aside = stratified_holdout(np.array([0] * 50 + [1] * 3 + [2]), 0.1, seed=0)
    assert np.bincount(np.array([0] * 50 + [1] * 3 + [2])[aside], minlength=3).tolist() == [5, 1, 0]

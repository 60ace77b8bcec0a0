"""Each metric is what a plain loop counts, and its `evaluate` module says the same; intervals are what they claim to be."""

import math
from collections import Counter

import evaluate
import numpy as np
import pytest

from hf_vit.evaluation import metrics
from hf_vit.evaluation.scores import metric


NAMES = ["accuracy", "balanced_accuracy", "macro_f1", "calibration_error"]


def answers(seed, count=60, classes=7, known=6):
    """Random answers, of which about half are right; the last of the classes never occurs."""
    rng = np.random.default_rng(seed)
    references = rng.integers(known, size=count)
    predictions = np.where(rng.random(count) < 0.5, references, rng.integers(classes, size=count))
    others = [rng.permutation([label for label in range(classes) if label != first])[:4] for first in predictions]
    return dict(
        predictions=predictions,
        references=references,
        top5=np.column_stack([predictions, np.array(others)]),
        confidences=rng.uniform(0.2, 1, count),
    )


def only(values, *names):
    return {name: values[name] for name in names}


# ----------------------------------------------------------------------------------------------------------------------
# Plain loops


def slow_accuracy(predictions, references):
    return sum(int(p == r) for p, r in zip(predictions, references, strict=True)) / len(references)


def slow_top_k_accuracy(predictions, references):
    return sum(int(r in list(p)) for p, r in zip(predictions, references, strict=True)) / len(references)


def slow_balanced_accuracy(predictions, references):
    recalls = []
    for label in set(references.tolist()):
        of_label = [p for p, r in zip(predictions, references, strict=True) if r == label]
        recalls.append(of_label.count(label) / len(of_label))
    return sum(recalls) / len(recalls)


def slow_macro_f1(predictions, references):
    scores = []
    for label in set(references.tolist()) | set(predictions.tolist()):
        pairs = [(p == label, r == label) for p, r in zip(predictions, references, strict=True)]
        true, false, missed = pairs.count((True, True)), pairs.count((True, False)), pairs.count((False, True))
        precision, recall = true / (true + false) if true else 0, true / (true + missed) if true else 0
        scores.append(2 * precision * recall / (precision + recall) if true else 0)
    return sum(scores) / len(scores)


def slow_calibration_error(predictions, references, confidences, bins=15):
    total = 0
    for low in range(bins):
        inside = [i for i, c in enumerate(confidences) if low / bins < c <= (low + 1) / bins]
        if inside:
            right = sum(int(predictions[i] == references[i]) for i in inside) / len(inside)
            total += len(inside) * abs(right - sum(confidences[i] for i in inside) / len(inside))
    return total / len(references)


def slow_confusion_matrix(predictions, references, num_labels):
    counts = Counter(zip(references.tolist(), predictions.tolist(), strict=True))
    return [[counts[row, column] for column in range(num_labels)] for row in range(num_labels)]


@pytest.mark.parametrize("seed", range(5))
def test_each_metric_equals_a_plain_loop(seed):
    values = answers(seed)
    pair = only(values, "predictions", "references")
    top5 = dict(predictions=values["top5"], references=values["references"])
    assert metrics.accuracy(**pair) == pytest.approx(slow_accuracy(**pair), abs=1e-12)
    assert metrics.top_k_accuracy(**top5) == pytest.approx(slow_top_k_accuracy(**top5), abs=1e-12)
    assert metrics.balanced_accuracy(**pair) == pytest.approx(slow_balanced_accuracy(**pair), abs=1e-12)
    assert metrics.macro_f1(**pair) == pytest.approx(slow_macro_f1(**pair), abs=1e-12)
    for bins in (1, 4, 15, 100):
        arguments = dict(**pair, confidences=values["confidences"], bins=bins)
        assert metrics.calibration_error(**arguments) == pytest.approx(slow_calibration_error(**arguments), abs=1e-12)
    assert metrics.confusion_matrix(**pair, num_labels=8).tolist() == slow_confusion_matrix(**pair, num_labels=8)


def test_lists_are_taken_as_arrays_are():
    values = {name: value.tolist() for name, value in answers(0).items()}
    pair = only(values, "predictions", "references")
    assert metrics.top_k_accuracy(values["top5"], np.array(values["references"])) > metrics.accuracy(**pair) > 0
    assert 0 < metrics.calibration_error(**pair, confidences=values["confidences"]) < 1
    assert metrics.confusion_matrix(**pair, num_labels=7).sum() == 60


@pytest.mark.parametrize("name", ["accuracy", "balanced_accuracy", "macro_f1"])
def test_all_right_is_one_and_all_wrong_is_zero(name):
    references = np.array([0, 0, 2, 5])
    assert getattr(metrics, name)(references, references) == 1.0
    assert getattr(metrics, name)(references + 1, references) == 0.0


# ----------------------------------------------------------------------------------------------------------------------
# Calibration, confusion, classes


def test_calibration_error_of_a_hand_example():
    """Two bins of (0, 0.5] and (0.5, 1]: |1 - 0.6| on 2 of 5 images, |2 - 2.4| on 3 of them."""
    error = metrics.calibration_error([1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0.2, 0.4, 0.7, 0.8, 0.9], bins=2)
    assert error == pytest.approx((abs(1 - 0.6) + abs(2 - 2.4)) / 5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bins", [2, 5, 10, 15, 20])
def test_a_confidence_on_an_edge_belongs_to_the_bin_below(bins, dtype):
    """With a right image in the middle of that bin and a wrong one in the middle of the next: only so does the gap stay whole."""
    for edge in range(1, bins):
        middle = (edge - 0.5) / bins
        confidences = np.array([edge / bins, middle, (edge + 0.5) / bins]).astype(dtype)
        error = metrics.calibration_error([1, 0, 0], [0, 0, 1], confidences, bins)
        gap_below, gap_above = abs(1 - confidences[:2].sum()), abs(0 - confidences[2])
        assert error == pytest.approx((gap_below + gap_above) / 3, abs=1e-6)


def test_confidences_of_zero_and_of_one_are_in_the_outer_bins():
    assert metrics.calibration_error([0, 0], [0, 1], [1.0, 0.0]) == 0.0
    assert metrics.calibration_error([0, 0], [1, 0], np.array([1 + 1e-7, 0.0])) == pytest.approx(1.0)


def test_the_row_of_a_confusion_is_the_true_class_and_the_column_the_answer():
    confusion = metrics.confusion_matrix(predictions=[2, 2, 0], references=[1, 1, 0], num_labels=4)
    assert confusion.shape == (4, 4)
    assert confusion[1, 2] == 2
    assert confusion[0, 0] == 1
    assert confusion.sum() == 3


def test_scores_of_each_class_are_those_of_a_hand_count():
    """a: 2 of 3 found, one b called a; c: there are none, one b was called c; d: neither there nor called."""
    confusion = metrics.confusion_matrix([0, 0, 1, 0, 1, 2], [0, 0, 0, 1, 1, 1], 4)
    a, b, c, d = metrics.per_class(confusion, ["a", "b", "c", "d"])
    assert a == {"label": "a", "images": 3, "precision": 2 / 3, "recall": 2 / 3, "f1": pytest.approx(2 / 3)}
    assert b == {"label": "b", "images": 3, "precision": 1 / 2, "recall": 1 / 3, "f1": pytest.approx(2 / 5)}
    assert c == {"label": "c", "images": 0, "precision": 0.0, "recall": None, "f1": 0.0}
    assert d == {"label": "d", "images": 0, "precision": None, "recall": None, "f1": None}


def test_the_means_over_the_classes_are_the_balanced_accuracy_and_macro_f1():
    values = answers(3)
    pair = only(values, "predictions", "references")
    rows = metrics.per_class(metrics.confusion_matrix(**pair, num_labels=9), list("abcdefghi"))
    mean = lambda name: np.mean([row[name] for row in rows if row[name] is not None])
    assert metrics.balanced_accuracy(**pair) == pytest.approx(mean("recall"))
    assert metrics.macro_f1(**pair) == pytest.approx(mean("f1"))


# ----------------------------------------------------------------------------------------------------------------------
# As `evaluate` modules


@pytest.mark.parametrize("name", [*NAMES, "top_k_accuracy", "confusion_matrix"])
def test_an_evaluate_module_loaded_by_path_equals_its_function(name):
    values = answers(1)
    arguments = only(values, "predictions", "references")
    if name == "top_k_accuracy":
        arguments["predictions"] = values["top5"]
    if name == "calibration_error":
        arguments |= dict(confidences=values["confidences"], bins=7)
    if name == "confusion_matrix":
        arguments["num_labels"] = 9
    module = evaluate.load(str(next(iter(metrics.__path__)) + f"/{name}.py"))
    found = module.compute(**arguments)
    assert list(found) == [name]
    np.testing.assert_allclose(found[name], getattr(metrics, name)(**arguments), rtol=0, atol=1e-12)
    assert module.description == getattr(metrics, name).__doc__


def test_a_module_that_was_loaded_computes_more_than_once():
    for seed in (2, 3):
        values = only(answers(seed), "predictions", "references")
        assert metric("accuracy").compute(**values) == {"accuracy": metrics.accuracy(**values)}


# ----------------------------------------------------------------------------------------------------------------------
# Intervals


def answers_of_a_model(seed, count, right=0.8, classes=10, gap=0.0):
    """Answers that are right with the probability `right`, less or more sure by chance; confidence is too large by `gap`."""
    rng = np.random.default_rng(seed)
    sure = rng.uniform(right - 0.15, right + 0.15, count)
    references = rng.integers(classes, size=count)
    predictions = np.where(
        rng.random(count) < sure, references, (references + 1 + rng.integers(8, size=count)) % classes
    )
    top5 = (predictions[:, None] + np.arange(5)) % classes
    return dict(predictions=predictions, references=references, top5=top5, confidences=sure + gap)


def values_of(predictions, references, top5, confidences):
    return {
        "accuracy": metrics.accuracy(predictions, references),
        "top5_accuracy": metrics.top_k_accuracy(top5, references),
        "balanced_accuracy": metrics.balanced_accuracy(predictions, references),
        "macro_f1": metrics.macro_f1(predictions, references),
        "calibration_error": metrics.calibration_error(predictions, references, confidences),
    }


@pytest.mark.parametrize("seed", range(3))
def test_intervals_contain_the_value_and_shrink_with_the_number_of_images(seed):
    widths = []
    for count in (100, 1600):
        values = answers_of_a_model(seed, count, right=0.6, gap=0.2)
        intervals = metrics.intervals(**values, resamples=200)
        assert list(intervals) == list(values_of(**values))
        for name, value in values_of(**values).items():
            low, high = intervals[name]
            assert 0 <= low < value < high <= 1, name
        widths.append({name: high - low for name, (low, high) in intervals.items()})
    for name in widths[0]:  # 16 times the images: a quarter of the width
        assert 2.5 < widths[0][name] / widths[1][name] < 6, name


def test_the_interval_of_a_calibrated_models_error_contains_the_error():
    """The error of a resample is larger than that of the images themselves: what is drawn must not be taken as it is."""
    outside = []
    for seed in range(6):
        values = answers_of_a_model(seed, 2000)
        low, high = metrics.intervals(**values, resamples=200)["calibration_error"]
        if not low <= values_of(**values)["calibration_error"] <= high:
            outside.append(seed)
    assert outside == []


def test_the_interval_of_macro_f1_contains_it_where_classes_have_few_images():
    outside = []
    for seed in range(6):
        values = answers_of_a_model(seed, 400, classes=200)
        intervals = metrics.intervals(**values, resamples=200)
        for name in ("balanced_accuracy", "macro_f1"):
            low, high = intervals[name]
            if not low <= values_of(**values)[name] <= high:
                outside.append((seed, name))
    assert outside == []


def test_intervals_are_the_same_for_the_same_seed_alone():
    values = answers_of_a_model(0, 100)
    once, again, other = (metrics.intervals(**values, resamples=50, seed=seed) for seed in (1, 1, 2))
    assert once == again
    assert once != other


def test_intervals_of_accuracy_are_those_of_the_normal_approximation():
    values = answers_of_a_model(0, 1000)
    share = values_of(**values)["accuracy"]
    half = 1.96 * math.sqrt(share * (1 - share) / 1000)
    low, high = metrics.intervals(**values)["accuracy"]
    assert [low, high] == pytest.approx([share - half, share + half], abs=0.15 * half)


def test_95_percent_intervals_contain_the_true_accuracy_about_that_often():
    """Of 100 data sets; between 88 and 100 is what such an interval can be told to do, with four standard errors."""
    hits = 0
    for seed in range(100):
        low, high = metrics.intervals(**answers_of_a_model(seed, 150), resamples=100)["accuracy"]
        hits += low <= 0.8 <= high
    assert 87 <= hits <= 100


@pytest.mark.parametrize("count", [1, 2, 6, 30, 10_000])
def test_the_bounds_of_wilsons_interval_are_shares_that_the_count_is_just_compatible_with(count):
    """Each bound p solves |share - p| = 1.96 sqrt(p (1 - p) / n), the test that the interval inverts."""
    for right in {0, 1, count // 3, count - 1, count}:
        low, high = metrics.wilson_interval(right, count)
        assert 0 <= low <= right / count <= high <= 1
        assert low < high
        for bound in (low, high):
            apart = 1.959964 * math.sqrt(bound * (1 - bound) / count)
            assert abs(right / count - bound) == pytest.approx(apart, abs=1e-12)


def test_two_of_six_right_is_not_said_to_be_as_few_as_none():
    references = np.zeros(6, int)
    predictions = np.array([0, 0, 1, 1, 1, 1])
    values = dict(
        predictions=predictions, references=references, top5=predictions[:, None], confidences=np.full(6, 0.6)
    )
    assert metrics.intervals(**values, resamples=20)["accuracy"] == pytest.approx([0.0968, 0.7000], abs=1e-4)


@pytest.mark.parametrize("right", [0, 1])
def test_one_image_leaves_every_interval_wide(right):
    values = dict(predictions=[right], references=[1], top5=[[right]], confidences=[0.7])
    intervals = metrics.intervals(**values, resamples=20)
    assert intervals["calibration_error"] == [0.0, 1.0]
    assert all(high - low > 0.75 for low, high in intervals.values())


def test_where_all_predictions_are_right_the_exact_bound_is_given():
    values = answers_of_a_model(0, 30, right=2.0)
    intervals = metrics.intervals(**values | {"confidences": np.ones(30)}, resamples=20)
    assert intervals.pop("calibration_error") == [0.0, 0.0]
    for name in ("accuracy", "top5_accuracy"):
        assert intervals.pop(name) == metrics.wilson_interval(30, 30)
    for low, high in intervals.values():  # with all of 30 right at this true accuracy, one time in forty
        assert (low**30, high) == (pytest.approx(0.025), 1.0)
    wrong = values | {"references": (values["references"] + 1) % 7, "top5": values["top5"][:, :1]}
    low, high = metrics.intervals(**wrong, resamples=20)["balanced_accuracy"]
    assert (low, (1 - high) ** 30) == (0.0, pytest.approx(0.025))

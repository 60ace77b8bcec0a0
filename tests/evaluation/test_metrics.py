"""Each metric is scikit-learn's or a plain loop's, its `evaluate` module says the same, and intervals are what they claim to be."""

import math
import subprocess
import sys

import evaluate
import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn

from hf_vit.evaluation import intervals, metrics, scores
from hf_vit.evaluation.scores import class_means, classification_report, compute_metrics


MODULE = metrics.__file__


@pytest.fixture
def fewer_resamples(monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 100)


def answers(seed=0, count=60, classes=7, right=0.5, sharpness=2.0):
    """Logits (n, L), of which about `right` name the true class, and labels; the last class never occurs."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes - 1, (count,), generator=generator)
    named = torch.randint(classes, (count,), generator=generator)
    named = torch.where(torch.rand(count, generator=generator) < right, labels, named)
    noise = torch.rand(count, classes, generator=generator)
    return noise + sharpness * torch.nn.functional.one_hot(named, classes), labels


def slow_calibration_error(confidences, correct, bins=15):
    total, places = 0, (confidences * bins).ceil()
    for place in places.unique():
        inside = places == place
        total += inside.sum() * (confidences[inside].mean() - correct[inside].float().mean()).abs()
    return total.item() / len(confidences)


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
def test_each_metric_equals_scikit_learn_or_a_plain_loop():
    logits, labels = answers()
    confidences, predicted = logits.softmax(1).max(1)
    assert compute_metrics(logits, labels) == pytest.approx(
        {
            "accuracy": sklearn.accuracy_score(labels, predicted),
            "top5_accuracy": sklearn.top_k_accuracy_score(labels, logits, k=5, labels=range(7)),
            "balanced_accuracy": sklearn.balanced_accuracy_score(labels, predicted),
            "macro_f1": sklearn.f1_score(labels, predicted, average="macro"),
            "calibration_error": slow_calibration_error(confidences, predicted == labels),
            "loss": sklearn.log_loss(labels, logits.double().softmax(1), labels=range(7)),
        },
        abs=1e-6,
    )


def test_scores_of_each_class_are_those_of_a_hand_count():
    """a: 2 of 3 found, one b called a; c: there are none, one b was called c; d: neither there nor called."""
    logits, labels = torch.eye(4)[[0, 0, 1, 0, 1, 2]], torch.tensor([0, 0, 0, 1, 1, 1])
    rows = classification_report(logits, labels, ["a", "b", "c", "d"])["per_class"]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    assert columns["label"] == ["a", "b", "c", "d"]
    assert columns["images"] == [3, 3, 0, 0]
    assert columns["precision"] == [2 / 3, 1 / 2, 0.0, None]
    assert columns["recall"] == [2 / 3, 1 / 3, None, None]
    assert columns["f1"] == [pytest.approx(2 / 3), pytest.approx(2 / 5), 0.0, None]


@pytest.mark.parametrize("name", metrics.METRICS)
def test_an_evaluate_module_loaded_by_path_says_the_same(name):
    logits, labels = answers()
    confidences, predictions = (values.numpy() for values in logits.softmax(1).max(1))
    confusion = scores.confusion_matrix(predictions, labels, 7)
    wanted = compute_metrics(logits, labels)
    wanted |= {"top_k_accuracy": wanted["top5_accuracy"], **class_means(confusion)}
    more = {
        "top_k_accuracy": dict(predictions=logits.topk(5).indices.numpy()),
        "calibration_error": dict(confidences=confidences),
    }
    arguments = dict(predictions=predictions, references=labels.numpy()) | more.get(name, {})
    module = evaluate.load(MODULE, name)
    for _ in range(2):
        found = module.compute(**arguments)
        assert list(found) == [name]
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=1e-12)


def test_evaluate_modules_load_and_combine_in_a_process_without_a_network(tmp_path):
    code = (
        "import socket, evaluate\n"
        "def refuse(*_): raise SystemExit('a connection was opened')\n"
        "socket.socket.connect = socket.create_connection = refuse\n"
        f"pair = [evaluate.load({MODULE!r}, name) for name in ('accuracy', 'macro_f1')]\n"
        "print(evaluate.combine(pair).compute(predictions=[0, 2, 1], references=[0, 1, 1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"HF_HOME": str(tmp_path)},
    )
    assert eval(done.stdout) == {"accuracy": pytest.approx(2 / 3), "macro_f1": pytest.approx(5 / 9)}, done.stderr


def test_intervals_contain_the_value_and_shrink_with_the_number_of_images(fewer_resamples):
    widths = []
    for count in (100, 1600):
        logits, labels = answers(0, count, classes=10, right=0.6, sharpness=4.0)
        found, values = intervals.intervals(logits, labels), compute_metrics(logits, labels)
        assert all(0 <= low < values[name] < high <= 1 for name, (low, high) in found.items())
        widths.append({name: high - low for name, (low, high) in found.items()})
    for name in widths[0]:  # 16 times the images: a quarter of the width
        assert 2 < widths[0][name] / widths[1][name] < 7, name


@pytest.mark.parametrize("seed", range(2))
def test_intervals_of_what_resampling_biases_contain_the_value(seed, fewer_resamples):
    """The calibration error of a resample is larger than that of the images, and few images of a class give another macro F1."""
    logits, labels = answers(seed, 400, classes=100, right=0.8, sharpness=6.5)
    values = compute_metrics(logits, labels)
    for name, (low, high) in intervals.intervals(logits, labels).items():
        assert low <= values[name] <= high, name
        assert abs((low + high) / 2 - values[name]) < (high - low) / 4, name


def test_the_interval_of_a_share_is_wilsons():
    """Each bound p solves |share - p| = 1.96 sqrt(p (1 - p) / n)."""
    for bound in intervals.share_interval(8, 10):
        assert abs(0.8 - bound) == pytest.approx(1.959964 * math.sqrt(bound * (1 - bound) / 10), abs=1e-6)


def test_where_all_predictions_are_right_the_exact_bound_is_given(fewer_resamples):
    logits, labels = answers(count=30, right=1.0, sharpness=100.0)
    found = intervals.intervals(logits, labels)
    for name in ("balanced_accuracy", "macro_f1"):  # with all of 30 right at this true accuracy, one time in forty
        low, high = found[name]
        assert (low**30, high) == (pytest.approx(0.025), 1.0)
    low, high = intervals.intervals(logits, (labels + 1) % logits.shape[1])["balanced_accuracy"]
    assert (low, (1 - high) ** 30) == (0.0, pytest.approx(0.025))  # all of 30 wrong

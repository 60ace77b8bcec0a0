"""Logits and labels to the scores that results.json holds."""

import functools
from pathlib import Path

import evaluate
import numpy as np
import torch
from torch import nn

from hf_vit.evaluation import metrics
from hf_vit.evaluation.multi_label import given_labels, multi_label_metrics, multi_label_report, worst_images
from hf_vit.evaluation.prediction import check_finite


@functools.cache
def metric(name: str):
    """An `evaluate` module of hf_vit/evaluation/metrics."""
    return evaluate.load(str(Path(metrics.__file__).parent / f"{name}.py"))


def _arrays(logits, labels) -> dict[str, np.ndarray]:
    """What the metrics take: predictions, references and confidences (n,), and top5 (n, 5 or fewer)."""
    confidences, predictions = logits.softmax(dim=1).max(dim=1)
    top5 = logits.topk(min(5, logits.shape[1]), dim=1).indices
    tensors = {"predictions": predictions, "references": labels, "top5": top5, "confidences": confidences}
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def compute_metrics(
    logits: torch.Tensor, labels: torch.Tensor, thresholds: torch.Tensor | None = None
) -> dict[str, float]:
    """Logits (n, L) and class indices (n,) -> accuracy, top5_accuracy (of more than five classes), balanced_accuracy, macro_f1,
    calibration_error (all in [0, 1], see hf_vit/evaluation/metrics) and loss, the mean cross-entropy.

    Args:
        thresholds: (L,) where an image has several labels (n, L): the metrics are those of `multi_label_metrics`.

    Raises:
        ValueError: if a logit is not finite.
    """
    check_finite(logits)
    if thresholds is not None:
        return multi_label_metrics(logits, labels, thresholds)
    arrays = _arrays(logits, labels)
    pair = {name: arrays[name] for name in ("predictions", "references")}
    scores = metric("accuracy").compute(**pair)
    if logits.shape[1] > 5:
        top5 = metric("top_k_accuracy").compute(predictions=arrays["top5"], references=arrays["references"])
        scores["top5_accuracy"] = top5["top_k_accuracy"]
    for name in ("balanced_accuracy", "macro_f1"):
        scores |= metric(name).compute(**pair)
    scores |= metric("calibration_error").compute(**pair, confidences=arrays["confidences"])
    return {**scores, "loss": nn.functional.cross_entropy(logits, labels).item()}


def headline(metrics: dict[str, float]) -> tuple[str, float]:
    """The metric by which a model is judged, and its value in [0, 1]: accuracy, or of several labels an image mean average
    precision."""
    name = "mean_average_precision" if "mean_average_precision" in metrics else "accuracy"
    return name, metrics[name]


def classification_report(
    logits: torch.Tensor, labels: torch.Tensor, names: list[str], thresholds: torch.Tensor | None = None
) -> dict:
    """What `compute_metrics` leaves out: {"intervals": {metric: [low, high]}, "calibration": [...], "per_class": [...],
    "confusion_matrix": (L, L) rows}; with `thresholds` that of `multi_label_report`."""
    if thresholds is not None:
        return multi_label_report(logits, labels, names, thresholds)
    arrays = _arrays(logits, labels)
    intervals = metrics.intervals(**arrays)
    if logits.shape[1] <= 5:
        del intervals["top5_accuracy"]
    pair = {name: arrays[name] for name in ("predictions", "references")}
    confusion = metric("confusion_matrix").compute(**pair, num_labels=len(names))["confusion_matrix"]
    return {
        "intervals": intervals,
        "calibration": metrics.calibration_bins(**pair, confidences=arrays["confidences"]),
        "per_class": metrics.per_class(confusion, names),
        "confusion_matrix": confusion.tolist(),
    }


def surest_mistakes(
    labels: torch.Tensor, logits: torch.Tensor, count: int = 12, thresholds: torch.Tensor | None = None
) -> torch.Tensor:
    """Row numbers of the `count` most confident wrong predictions, the surest first; fewer if there are fewer.

    Args:
        labels: (n,) true classes.
        logits: (n, L).
        thresholds: (L,) where an image has several labels (n, L): see `worst_images`.
    """
    if thresholds is not None:
        return worst_images(labels, logits, thresholds, count)
    confidences, predictions = logits.softmax(dim=1).max(dim=1)
    wrong = (predictions != labels).nonzero().flatten()
    return wrong[confidences[wrong].argsort(descending=True, stable=True)][:count]


def format_prediction(logits: torch.Tensor, labels: list[str], thresholds: torch.Tensor | None = None) -> str:
    """The predicted class of logits (L,), such as "Bag (98%)"; with `thresholds` (L,) all labels that reach theirs."""
    if thresholds is not None:
        given = given_labels(logits, thresholds).nonzero().flatten().tolist()
        return ", ".join(f"{labels[index]} ({logits[index].sigmoid():.0%})" for index in given) or "no label"
    confidence, index = logits.softmax(dim=0).max(dim=0)
    return f"{labels[index]} ({confidence:.0%})"

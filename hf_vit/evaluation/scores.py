"""Logits and labels to the scores that results.json holds."""

import functools
from pathlib import Path

import evaluate
import numpy as np
import torch
from torch import nn

from hf_vit.evaluation import metrics
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


def compute_metrics(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Logits (n, L) and class indices (n,) -> accuracy, top5_accuracy (of more than five classes), balanced_accuracy, macro_f1,
    calibration_error (all in [0, 1], see hf_vit/evaluation/metrics) and loss, the mean cross-entropy.

    Raises:
        ValueError: if a logit is not finite.
    """
    check_finite(logits)
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


def classification_report(logits: torch.Tensor, labels: torch.Tensor, names: list[str]) -> dict:
    """What `compute_metrics` leaves out: {"intervals": {metric: [low, high]}, "calibration": [...], "per_class": [...],
    "confusion_matrix": (L, L) rows}."""
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


def surest_mistakes(labels: torch.Tensor, logits: torch.Tensor, count: int = 12) -> torch.Tensor:
    """Row numbers of the `count` most confident wrong predictions, the surest first; fewer if there are fewer.

    Args:
        labels: (n,) true classes.
        logits: (n, L).
    """
    confidences, predictions = logits.softmax(dim=1).max(dim=1)
    wrong = (predictions != labels).nonzero().flatten()
    return wrong[confidences[wrong].argsort(descending=True, stable=True)][:count]


def format_prediction(logits: torch.Tensor, labels: list[str]) -> str:
    """The predicted class of logits (L,), such as "Bag (98%)"."""
    confidence, index = logits.softmax(dim=0).max(dim=0)
    return f"{labels[index]} ({confidence:.0%})"

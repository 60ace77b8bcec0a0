"""Logits and labels to the scores that results.json holds.

scikit-learn is imported where it computes, for that takes a second.
"""

import numpy as np
import torch
from torch import nn

from hf_vit.evaluation.multi_label import (
    given_labels,
    label_rows,
    label_scores,
    multi_label_metrics,
    multi_label_report,
)


BINS = 15  # of confidence


def confusion_matrix(predictions, references, num_labels: int) -> np.ndarray:
    """(L, L) counts: row the true class, column the predicted one."""
    from sklearn import metrics

    return metrics.confusion_matrix(references, predictions, labels=np.arange(num_labels))


def class_scores(confusion: np.ndarray) -> dict[str, np.ndarray]:
    """precision, recall and f1 (L,) of a confusion matrix, see `label_scores`."""
    return label_scores(confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0))


def class_means(confusion: np.ndarray) -> dict[str, float]:
    """balanced_accuracy, the mean recall of the classes that occur, and macro_f1, the mean F1 of those that occur or were
    predicted; in [0, 1]."""
    scores = class_scores(confusion)
    return {"balanced_accuracy": float(np.nanmean(scores["recall"])), "macro_f1": float(np.nanmean(scores["f1"]))}


def calibration_bins(confidences, correct) -> list[dict]:
    """Of each of `BINS` equally wide ranges of confidence, (a, b] as in arXiv 1706.04599: its upper end, how many images it
    holds, and their mean confidence and accuracy in [0, 1], None where it holds none.

    Args:
        confidences, correct: (n,), the probability of each predicted class, and whether it is the true one.
    """
    bin_of = np.clip(np.ceil(np.asarray(confidences) * BINS).astype(int) - 1, 0, BINS - 1)
    count = lambda weights=None: np.bincount(bin_of, weights=weights, minlength=BINS).tolist()
    rows = zip(count(), count(confidences), count(correct), strict=True)
    return [
        {
            "up_to": (number + 1) / BINS,
            "images": images,
            "confidence": confidence / images if images else None,
            "accuracy": accuracy / images if images else None,
        }
        for number, (images, confidence, accuracy) in enumerate(rows)
    ]


def calibration_error(confidences, correct) -> float:
    """Expected calibration error in [0, 1]: |accuracy - mean confidence| of the images in each of 15 equally wide ranges
    of confidence, weighted by their number ("On Calibration of Modern Neural Networks", arXiv 1706.04599, equation 3)."""
    filled = [row for row in calibration_bins(confidences, correct) if row["images"]]
    return float(sum(row["images"] * abs(row["accuracy"] - row["confidence"]) for row in filled) / len(confidences))


def judge(logits: torch.Tensor, labels: torch.Tensor, thresholds: torch.Tensor | None = None):
    """What the model says of each image, how sure or how far off it is, and whether it is right, (n,) each: the predicted class and
    its probability, or with `thresholds` which labels it gives, (n, L), and the binary cross-entropy."""
    if thresholds is None:
        confidences, answers = logits.softmax(dim=1).max(dim=1)
        return answers, confidences, answers == labels
    answers = given_labels(logits, thresholds)
    losses = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(dim=1)
    return answers, losses, (answers == labels.bool()).all(dim=1)


def top5_correct(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]).any(dim=1)


def compute_metrics(
    logits: torch.Tensor, labels: torch.Tensor, thresholds: torch.Tensor | None = None
) -> dict[str, float]:
    """Logits (n, L) and class indices (n,) -> accuracy, top5_accuracy (of more than five classes), balanced_accuracy, macro_f1,
    calibration_error (all in [0, 1]) and loss, the mean cross-entropy.

    Args:
        thresholds: (L,) where an image has several labels (n, L): the metrics are those of `multi_label_metrics`.
    """
    if thresholds is not None:
        return multi_label_metrics(logits, labels, thresholds)
    answers, confidences, correct = (values.numpy() for values in judge(logits, labels))
    scores = {"accuracy": float(correct.mean())}
    if logits.shape[1] > 5:
        scores["top5_accuracy"] = top5_correct(logits, labels).double().mean().item()
    scores |= class_means(confusion_matrix(answers, labels, logits.shape[1]))
    scores["calibration_error"] = calibration_error(confidences, correct)
    return {**scores, "loss": nn.functional.cross_entropy(logits, labels).item()}


def headline(metrics: dict[str, float]) -> tuple[str, float]:
    """The metric by which a model is judged, and its value in [0, 1]: accuracy, or of several labels an image mean average
    precision."""
    name = "mean_average_precision" if "mean_average_precision" in metrics else "accuracy"
    return name, metrics[name]


def classification_report(
    logits: torch.Tensor, labels: torch.Tensor, names: list[str], thresholds: torch.Tensor | None = None
) -> dict:
    """What `compute_metrics` leaves out: {"calibration": [...], "per_class": [...], "confusion_matrix": (L, L) rows}; with
    `thresholds` that of `multi_label_report`."""
    if thresholds is not None:
        return multi_label_report(logits, labels, names, thresholds)
    answers, confidences, correct = (values.numpy() for values in judge(logits, labels))
    confusion = confusion_matrix(answers, labels, len(names))
    return {
        "calibration": calibration_bins(confidences, correct),
        "per_class": label_rows(names, confusion.sum(axis=1), class_scores(confusion)),
        "confusion_matrix": confusion.tolist(),
    }


def surest_mistakes(
    labels: torch.Tensor, logits: torch.Tensor, count: int = 12, thresholds: torch.Tensor | None = None
) -> torch.Tensor:
    """Row numbers of the `count` most confident wrong predictions, the surest first; fewer if there are fewer. Arguments as of
    `compute_metrics`."""
    _, sureness, correct = judge(logits, labels, thresholds)
    wrong = (~correct).nonzero().flatten()
    return wrong[sureness[wrong].argsort(descending=True, stable=True)][:count]


def format_prediction(logits: torch.Tensor, names: list[str], thresholds: torch.Tensor | None = None) -> str:
    """The predicted class of logits (L,), such as "Bag (98%)"; with `thresholds` (L,) all labels that reach theirs."""
    if thresholds is None:
        probabilities = logits.softmax(dim=0)
        given = [int(probabilities.argmax())]
    else:
        probabilities = logits.sigmoid()
        given = given_labels(logits, thresholds).nonzero().flatten().tolist()
    return ", ".join(f"{names[index]} ({probabilities[index]:.0%})" for index in given) or "no label"

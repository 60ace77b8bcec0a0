"""Several labels an image: which of them a model gives, and how good they are.

Each label has a probability of its own, the sigmoid of its logit, and an image gets those that reach their threshold. The scores
are scikit-learn's, which is imported where it is needed: it takes a second, and one label an image does without it.
"""

import numpy as np
import pandas as pd
import torch
from torch import nn

from hf_vit.system.errors import UserError
from hf_vit.system.text import counted


MULTI_LABEL = "multi_label_classification"  # the `problem_type` of such a model, as transformers names it
DEFAULT_THRESHOLD = 0.5
FEWEST_POSITIVES = 5  # images with a label and without it, below which its threshold is not chosen


def class_names(config) -> list[str]:
    """The names of a model's classes, in the order of its logits."""
    return [config.id2label[index] for index in range(config.num_labels)]


def thresholds_of(config) -> torch.Tensor | None:
    """The thresholds (L,) of a model that gives several labels an image; 0.5 each where its config holds none. None of a model
    that gives one label.

    Raises:
        ValueError: if the config holds thresholds of other labels, or one outside of 0 to 1.
    """
    if config.problem_type != MULTI_LABEL:
        return None
    names = class_names(config)
    # No field of the architecture: older models and others' have none.
    stored = getattr(config, "thresholds", None) or dict.fromkeys(names, DEFAULT_THRESHOLD)
    if not isinstance(stored, dict) or set(stored) != set(names):
        raise UserError(f"thresholds in config.json must have the labels {', '.join(names)}, got {stored}")
    values = [stored[name] for name in names]
    if wrong := [value for value in values if type(value) not in (int, float) or not 0 <= value <= 1]:
        raise UserError(f"thresholds in config.json must be in [0, 1], got {wrong[0]!r}")
    return torch.tensor(values)


def check_task(labels: torch.Tensor, thresholds: torch.Tensor | None):
    """Raise ValueError unless images and model both have one label an image, (n,) and None, or both several, (n, L) and (L,)."""
    if (labels.ndim == 2) != (thresholds is not None):
        raise UserError(
            "images and model must both have one label an image, or both several: fine-tune the model on such images first"
        )


def choose_thresholds(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The threshold (L,) of each label with the best F1 on these images, half-way to the next lower probability.

    A label that fewer than `FEWEST_POSITIVES` images have, or lack, gets 0.5.

    Args:
        logits: (n, L).
        labels: (n, L), 0 and 1.
    """
    from sklearn.metrics import precision_recall_curve

    chosen = torch.full((labels.shape[1],), DEFAULT_THRESHOLD)
    probabilities, truth = logits.sigmoid().double().numpy(), labels.numpy()
    for index, count in enumerate(truth.sum(axis=0)):
        if min(count, len(truth) - count) < FEWEST_POSITIVES:
            continue
        precision, recall, values = precision_recall_curve(truth[:, index], probabilities[:, index])
        f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
        best = int(f1[:-1].argmax())  # the last point has no threshold
        below = values[best - 1] if best > 0 else 0.0
        chosen[index] = (values[best] + below) / 2
    return chosen


def given_labels(logits: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """Which labels reach their threshold, bool (n, L)."""
    return logits.sigmoid() >= thresholds


def average_precisions(probabilities: np.ndarray, truth: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """scikit-learn's average precision of each label (L,), NaN of labels that no image has.

    Args:
        probabilities, truth: (n, L).
        weights: (n,) of the images.
    """
    from sklearn.metrics import average_precision_score

    positives = truth.sum(axis=0) if weights is None else weights @ truth
    present, found = np.flatnonzero(positives), np.full(truth.shape[1], np.nan)
    for index in present:
        found[index] = average_precision_score(truth[:, index], probabilities[:, index], sample_weight=weights)
    return found


def multi_label_metrics(logits: torch.Tensor, labels: torch.Tensor, thresholds: torch.Tensor) -> dict[str, float]:
    """Logits, labels (n, L) -> mean_average_precision, macro_f1 (both means over the labels that some image has), micro_f1,
    exact_match (the share of images all of whose labels are right), all in [0, 1], and loss, the mean binary cross-entropy.

    Raises:
        ValueError: if no image has a label.
    """
    from sklearn.metrics import accuracy_score, f1_score

    truth, given = labels.numpy().astype(int), given_labels(logits, thresholds).numpy().astype(int)
    present = np.flatnonzero(truth.any(axis=0))
    if len(present) == 0:
        raise UserError(f"none of {counted(len(truth), 'image')} has a label: wanted images with labels to score")
    return {
        "mean_average_precision": float(np.nanmean(average_precisions(logits.sigmoid().numpy(), truth))),
        "micro_f1": float(f1_score(truth, given, average="micro", zero_division=0)),
        "macro_f1": float(f1_score(truth, given, average="macro", labels=present, zero_division=0)),
        "exact_match": float(accuracy_score(truth, given)),
        "loss": nn.functional.binary_cross_entropy_with_logits(logits, labels).item(),
    }


def multi_label_report(logits: torch.Tensor, labels: torch.Tensor, names: list[str], thresholds: torch.Tensor) -> dict:
    """What `multi_label_metrics` leaves out: {"per_class": [...], "thresholds": (L,), "confusion_matrix": (L, 4) true positives,
    false positives, false negatives and true negatives, "labels_without_images": count}."""
    truth, given = labels.numpy().astype(int), given_labels(logits, thresholds).numpy().astype(int)
    precisions = average_precisions(logits.sigmoid().numpy(), truth)
    right, support, predicted = (truth & given).sum(axis=0), truth.sum(axis=0), given.sum(axis=0)
    counts = np.stack([right, predicted - right, support - right, len(truth) - support - predicted + right], axis=1)
    scores = {"average_precision": precisions, **label_scores(right, support, predicted)}
    return {
        "per_class": label_rows(names, support, scores),
        "confusion_matrix": counts.tolist(),
        "thresholds": thresholds.tolist(),
        "labels_without_images": int((~truth.any(axis=0)).sum()),
    }


def label_scores(true_positives: np.ndarray, support: np.ndarray, predicted: np.ndarray) -> dict[str, np.ndarray]:
    """precision, recall and f1 (L,) of counts of images, NaN where there is nothing to divide by.

    scikit-learn gives the same from predictions, in 2.7 ms; the bootstrap takes a thousand of them.
    """
    with np.errstate(invalid="ignore"):
        return {
            "precision": true_positives / predicted,
            "recall": true_positives / support,
            "f1": 2 * true_positives / (support + predicted),
        }


def label_rows(names: list[str], support: np.ndarray, scores: dict[str, np.ndarray]) -> list[dict]:
    """A row a label: its name, images and scores, None for NaN."""
    table = pd.DataFrame({"label": names, "images": support, **scores}).astype(object)
    return table.where(table.notna(), None).to_dict("records")

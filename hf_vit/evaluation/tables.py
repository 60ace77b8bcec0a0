"""What a model says of each image, as the columns of a table."""

import pandas as pd
import torch

from hf_vit.evaluation.multi_label import given_labels
from hf_vit.evaluation.scores import judge
from hf_vit.system.text import csv_text


LABEL_SEPARATOR = ";"


def prediction_table(
    rows: list[int],
    files: list[str],
    labels: torch.Tensor,
    logits: torch.Tensor,
    names: list[str],
    thresholds: torch.Tensor | None = None,
) -> str:
    """CSV with a line per image, in the order given, to find the mistakes in: its row in the split, file, label, predicted class, its
    probability, and whether that is right. Where an image has several labels, they are joined by ";", and the binary cross-entropy
    stands in the place of the probability.

    Args:
        rows, files: n each; a file is "" where the row names none.
        labels: (n,) true classes.
        logits: (n, L).
        names: L class names.
        thresholds: (L,) where an image has several labels (n, L).
    """
    answers, numbers, correct = judge(logits, labels, thresholds)
    table = pd.DataFrame(
        {
            "row": rows,
            "file": files,
            "label": label_texts(labels, names),
            "predicted": label_texts(answers, names),
            "confidence" if thresholds is None else "loss": numbers,
            "correct": ["true" if one else "false" for one in correct],
        }
    )
    return csv_text(table, float_format="%.6f")


def label_texts(labels: torch.Tensor, names: list[str]) -> list[str]:
    """The names of classes (n,), or of several labels an image (n, L), such as "cat;dog"."""
    if labels.ndim == 1:
        return [names[index] for index in labels.tolist()]
    return [LABEL_SEPARATOR.join(names[index] for index in row.nonzero().flatten().tolist()) for row in labels]


def image_names(rows: list[int], files: list[str]) -> list[str]:
    """What a picture calls images: their files, or rows such as "row 17"."""
    return [file or f"row {row}" for row, file in zip(rows, files, strict=True)]


def best_labels(logits: torch.Tensor, top_k: int, thresholds: torch.Tensor | None = None) -> torch.Tensor:
    """What `prediction_columns` shows of logits (n, L): (n, K), the probabilities of the best `top_k`, then these labels; with
    `top_k` 0 all probabilities; before them, with `thresholds` (L,), which labels reach theirs."""
    probabilities = logits.softmax(dim=1) if thresholds is None else logits.sigmoid()
    best = [probabilities] if top_k == 0 else probabilities.topk(min(top_k, logits.shape[1]), dim=1)
    given = [] if thresholds is None else [given_labels(logits, thresholds.to(logits.device))]
    return torch.cat([*given, *best], dim=1)


def prediction_columns(values: torch.Tensor, names: list[str], top_k: int, several: bool, taken: str) -> dict:
    """Columns `label_1`, `probability_1`, ... of the best k, or with `top_k` 0 a column of probabilities for each label; before them,
    if an image has `several` labels, `labels`: those that reach their thresholds.

    Args:
        values: as `best_labels` gives them.
        taken: the name of a column before these.
    """
    columns = {}
    if several:
        given, values = values[:, : len(names)], values[:, len(names) :]
        columns["labels"] = label_texts(given, names)
    if top_k == 0:
        for number, label in enumerate(names):
            unique = names.count(label) == 1 and label not in (taken, "labels")
            columns[label if unique else f"{label} ({number})"] = values[:, number].numpy()
        return columns
    probabilities, labels = values.chunk(2, dim=1)
    for rank in range(labels.shape[1]):
        columns[f"label_{rank + 1}"] = label_texts(labels[:, rank].int(), names)
        columns[f"probability_{rank + 1}"] = probabilities[:, rank].numpy()
    return columns

"""The prediction for each image as a table, to find the mistakes in."""

import pandas as pd
import torch

from hf_vit.evaluation.multi_label import given_labels, image_losses
from hf_vit.system.escapes import csv_text


LABEL_SEPARATOR = ";"


def prediction_table(
    rows: list[int],
    files: list[str],
    labels: torch.Tensor,
    logits: torch.Tensor,
    names: list[str],
    thresholds: torch.Tensor | None = None,
) -> str:
    """CSV with a line per image, in the order given: its row in the split, file, label, predicted class, its probability, and
    whether that is right. Where an image has several labels, they are joined by ";", and the binary cross-entropy stands in the
    place of the probability.

    Args:
        rows, files: n each; a file is "" where the row names none.
        labels: (n,) true classes.
        logits: (n, L).
        names: L class names.
        thresholds: (L,) where an image has several labels (n, L).
    """
    if thresholds is None:
        confidences, predicted = logits.softmax(dim=1).max(dim=1)
        true, said = ([names[index] for index in classes] for classes in (labels, predicted))
        number, correct = {"confidence": confidences}, predicted == labels
    else:
        given = given_labels(logits, thresholds)
        true, said = ([join_labels(row, names) for row in table] for table in (labels, given))
        number, correct = {"loss": image_losses(labels, logits)}, (given == labels.bool()).all(dim=1)
    table = pd.DataFrame({"row": rows, "file": files, "label": true, "predicted": said} | number)
    return csv_text(table.assign(correct=["true" if one else "false" for one in correct]), float_format="%.6f")


def join_labels(given: torch.Tensor, names: list[str]) -> str:
    """The names of the labels that are given, (L,), such as "cat;dog"."""
    return LABEL_SEPARATOR.join(names[index] for index in given.nonzero().flatten().tolist())


def answers_and_truths(
    labels: torch.Tensor, logits: torch.Tensor, names: list[str], thresholds: torch.Tensor
) -> tuple[list[str], list[str], list[bool]]:
    """Of several labels an image (n, L): those that the model gives, the true ones, and whether they are the same."""
    given = given_labels(logits, thresholds)
    said, true = ([join_labels(row, names) or "none" for row in rows] for rows in (given, labels))
    return said, true, (given == labels.bool()).all(dim=1).tolist()


def image_names(rows: list[int], files: list[str]) -> list[str]:
    """What a picture calls images: their files, or rows such as "row 17"."""
    return [file or f"row {row}" for row, file in zip(rows, files, strict=True)]

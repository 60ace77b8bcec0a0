"""The prediction for each image as a table, to find the mistakes in."""

import csv
import io

import torch

from hf_vit.evaluation.multi_label import given_labels, image_losses
from hf_vit.system.escapes import csv_cell


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

    CSV and not Parquet: people open it in a spreadsheet, to sort and filter it.

    Args:
        rows, files: n each; a file is "" where the row names none.
        labels: (n,) true classes.
        logits: (n, L).
        names: L class names.
        thresholds: (L,) where an image has several labels (n, L).
    """
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    if thresholds is not None:
        given, losses = given_labels(logits, thresholds), image_losses(labels, logits).tolist()
        writer.writerow(["row", "file", "label", "predicted", "loss", "correct"])
        for row, file, truth, answer, loss in zip(rows, files, labels.bool(), given, losses, strict=True):
            correct = "true" if truth.equal(answer) else "false"
            said = [csv_cell(text) for text in (file, join_labels(truth, names), join_labels(answer, names))]
            writer.writerow([row, *said, f"{loss:.6f}", correct])
        return table.getvalue()
    names = [csv_cell(name) for name in names]
    confidences, predicted = (values.tolist() for values in logits.softmax(dim=1).max(dim=1))
    writer.writerow(["row", "file", "label", "predicted", "confidence", "correct"])
    for row, file, label, answer, confidence in zip(rows, files, labels.tolist(), predicted, confidences, strict=True):
        correct = "true" if label == answer else "false"
        writer.writerow([row, csv_cell(file), names[label], names[answer], f"{confidence:.6f}", correct])
    return table.getvalue()


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

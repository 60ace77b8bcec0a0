"""The prediction for each image as a table, to find the mistakes in."""

import csv
import io

import torch

from hf_vit.system.escapes import csv_cell


def prediction_table(
    rows: list[int], files: list[str], labels: torch.Tensor, logits: torch.Tensor, names: list[str]
) -> str:
    """CSV with a line per image, in the order given: its row in the split, file, label, predicted class, its probability, and
    whether that is right.

    CSV and not Parquet: people open it in a spreadsheet, to sort and filter it.

    Args:
        rows, files: n each; a file is "" where the row names none.
        labels: (n,) true classes.
        logits: (n, L).
        names: L class names.
    """
    table, names = io.StringIO(), [csv_cell(name) for name in names]
    confidences, predicted = (values.tolist() for values in logits.softmax(dim=1).max(dim=1))
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["row", "file", "label", "predicted", "confidence", "correct"])
    for row, file, label, answer, confidence in zip(rows, files, labels.tolist(), predicted, confidences, strict=True):
        correct = "true" if label == answer else "false"
        writer.writerow([row, csv_cell(file), names[label], names[answer], f"{confidence:.6f}", correct])
    return table.getvalue()


def image_names(rows: list[int], files: list[str]) -> list[str]:
    """What a picture calls images: their files, or rows such as "row 17"."""
    return [file or f"row {row}" for row, file in zip(rows, files, strict=True)]

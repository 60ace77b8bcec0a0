"""Predictions and embeddings as CSV, Parquet or .npy files, made of `Parts` without holding them all."""

import csv
import glob
import os
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from hf_vit.evaluation.multi_label import given_labels
from hf_vit.evaluation.parts import Parts
from hf_vit.evaluation.prediction_table import join_labels
from hf_vit.system.errors import UserError
from hf_vit.system.escapes import csv_cell, printable
from hf_vit.system.files import sync


BESIDE = (".unreadable.txt", ".rows.csv")  # endings of the files that are written beside an output file


def check_output_file(name: str, suffixes: tuple[str, ...], overwrite: bool) -> Path:
    """The output file; ValueError if its suffix is none of these, or if there is such a file that may not be replaced."""
    output = Path(name).expanduser()
    if output.suffix.lower() not in suffixes:
        raise UserError(f"--output_file {name}: wanted a name that ends in {' or '.join(suffixes)}")
    if output.is_dir():
        raise UserError(f"--output_file {name} is a folder; wanted the name of a file in it")
    for file in (output, *(output.with_name(output.name + ending) for ending in BESIDE)):
        if file.exists() and not overwrite:
            what = f"--output_file {name}" if file == output else f"{file}, which goes with --output_file {name},"
            raise UserError(f"{what} exists: name another, or pass --overwrite true to replace it")
    return output


def finish_output(parts: Parts, output: Path, write: Callable[[Path, int], None]) -> str:
    """Make the output file of all parts, which then go, and `FILE.unreadable.txt` if some images could not be read.

    Args:
        write: (path, number of rows) -> writes the file, and possibly others whose names begin with its name.

    Returns:
        What was done, in a sentence or two.

    Raises:
        ValueError: if no image could be read.
    """
    aside, unreadable, first = parts.folder / output.name, 0, []
    errors = aside.with_name(f"{output.name}.unreadable.txt")
    with open(errors, "w", encoding="utf-8") as file:
        for message in parts.unreadable():
            file.write(f"{printable(message)}\n")
            unreadable += 1
            first += [printable(message)] if len(first) < 3 else []
    if unreadable == parts.count:
        parts.remove()  # the next command looks at the images again
        raise UserError(f"none of the {parts.count:,} images can be read; {first[0]}")
    if not unreadable:
        errors.unlink()
        output.with_name(errors.name).unlink(missing_ok=True)  # of an output file that is replaced
    write(aside, parts.count - unreadable)
    made = sorted(parts.folder.glob(f"{glob.escape(output.name)}*"), reverse=True)  # the output file comes last
    for file in made:
        sync(file)
        os.replace(file, output.with_name(file.name))
    sync(output.parent)
    parts.remove()
    text = f"{parts.count - unreadable:,} images are in {output}"
    if unreadable:
        more = "" if unreadable <= len(first) else "; ..."
        text += f"; {unreadable:,} cannot be read, see {output.with_name(errors.name)}: {'; '.join(first)}{more}"
    return text


def prediction_columns(
    key: str, names: list, results: dict[str, torch.Tensor], labels: list[str], top_k: int
) -> dict[str, list]:
    """Columns of n images: `file` or `row`, then `label_1`, `probability_1`, ... of the best k, or with `top_k` 0 a column of
    probabilities for each label; before them, where an image has several labels, `labels`: those that reach their thresholds.

    Args:
        names: (n,), what the column `key` holds.
        results: as `best_labels` gives them.
    """
    columns = {key: names}
    if "given" in results:
        columns["labels"] = [join_labels(given, labels) for given in results["given"]]
    probabilities = results["probabilities"].T.numpy()
    if top_k == 0:
        taken = Counter([*columns, *labels])
        for number, (label, column) in enumerate(zip(labels, probabilities, strict=True)):
            columns[label if taken[label] == 1 else f"{label} ({number})"] = column
        return columns
    for rank, (indices, column) in enumerate(zip(results["labels"].T.tolist(), probabilities, strict=True), 1):
        columns[f"label_{rank}"] = [labels[index] for index in indices]
        columns[f"probability_{rank}"] = column
    return columns


def best_labels(logits: torch.Tensor, top_k: int, thresholds: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Logits (n, L) -> `probabilities` and `labels` (n, k) of the best k, the best first; with `top_k` 0 only `probabilities`
    (n, L).

    Args:
        thresholds: (L,) where an image has several labels: each has a probability of its own, the sigmoid, and `given` (n, L) says
            which reach their thresholds; otherwise the probabilities sum to 1.
    """
    given = {} if thresholds is None else {"given": given_labels(logits, thresholds.to(logits.device))}
    probabilities = logits.softmax(dim=1) if thresholds is None else logits.sigmoid()
    if top_k == 0:
        return {"probabilities": probabilities, **given}
    best = probabilities.topk(min(top_k, logits.shape[1]), dim=1)
    return {"probabilities": best.values, "labels": best.indices.int(), **given}


def write_table(file: Path, parts: Iterable[dict]):
    """Columns of each part -> a CSV or, by the suffix of `file`, a Parquet file."""
    tables = (pa.table(columns) for columns in parts)
    first = next(tables)
    if file.suffix.lower() == ".parquet":
        with pq.ParquetWriter(file, first.schema) as writer:
            for table in chain([first], tables):
                writer.write_table(table)
        return
    with open(file, "w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened)
        writer.writerow([csv_cell(name) for name in first.column_names])
        for table in chain([first], tables):
            writer.writerows(zip(*(map(_cell, column.to_pylist()) for column in table.columns), strict=True))


def _cell(value: str | float) -> str:
    return csv_cell(value) if isinstance(value, str) else f"{value:.6g}" if isinstance(value, float) else str(value)


def embedding_columns(key: str, names: list, embeddings: torch.Tensor) -> dict:
    """Columns `key` and `embedding`, lists of D numbers, of embeddings (n, D)."""
    values = pa.array(embeddings.flatten().numpy())
    return {key: names, "embedding": pa.FixedSizeListArray.from_arrays(values, embeddings.shape[1])}


def write_npy(file: Path, count: int, parts: Iterable[torch.Tensor]):
    """Embeddings (n, D) of each part -> a .npy file, float32 (count, D)."""
    array, start = None, 0
    for embeddings in parts:
        if array is None:
            array = np.lib.format.open_memmap(file, "w+", np.float32, (count, embeddings.shape[1]))
        array[start : start + len(embeddings)] = embeddings.numpy()
        start += len(embeddings)
    array.flush()

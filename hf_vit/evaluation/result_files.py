"""Predictions and embeddings as CSV, Parquet or .npy files, made of `Parts` without holding them all."""

import glob
import os
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from hf_vit.evaluation.multi_label import given_labels
from hf_vit.evaluation.parts import Parts
from hf_vit.evaluation.prediction_table import join_labels
from hf_vit.system.errors import UserError
from hf_vit.system.escapes import csv_text, printable
from hf_vit.system.files import sync


BESIDE = (".unreadable.txt", ".rows.csv")  # endings of the files that are written beside an output file


def check_output_file(name: str, suffixes: tuple[str, ...], overwrite: bool) -> Path:
    """The output file; ValueError if its suffix is none of these, or if there is such a file that may not be replaced."""
    output = Path(name).expanduser()
    if output.suffix.lower() not in suffixes or output.is_dir():
        raise UserError(f"--output_file must name a file that ends in {' or '.join(suffixes)}, got {name}")
    for file in (output, *(output.with_name(output.name + ending) for ending in BESIDE)):
        if file.exists() and not overwrite:
            raise UserError(f"--output_file {name}: {file} exists; name another, or pass --overwrite true")
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
    errors, aside = [printable(message) for message in parts.unreadable()], parts.folder / output.name
    count = parts.count - len(errors)
    if count == 0:
        parts.remove()  # the next command looks at the images again
        raise UserError(f"none of the {parts.count:,} images can be read; {errors[0]}")
    listed = output.with_name(f"{output.name}.unreadable.txt")
    listed.unlink(missing_ok=True)  # of an output file that is replaced
    if errors:
        (parts.folder / listed.name).write_text("".join(f"{error}\n" for error in errors), encoding="utf-8")
    write(aside, count)
    made = sorted(parts.folder.glob(f"{glob.escape(output.name)}*"), reverse=True)  # the output file comes last
    for file in made:
        sync(file)
        os.replace(file, output.with_name(file.name))
    parts.remove()
    text = f"{count:,} image{'s are' if count > 1 else ' is'} in {output}"
    return text + (f"; {len(errors):,} cannot be read, see {listed}: {errors[0]}" if errors else "")


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
        for number, (label, column) in enumerate(zip(labels, probabilities, strict=True)):
            unique = labels.count(label) == 1 and label not in (key, "labels")
            columns[label if unique else f"{label} ({number})"] = column
        return columns
    for rank, (indices, column) in enumerate(zip(results["labels"].T.tolist(), probabilities, strict=True), 1):
        columns[f"label_{rank}"] = [labels[index] for index in indices]
        columns[f"probability_{rank}"] = column
    return columns


def embedding_columns(key: str, names: list, embeddings: torch.Tensor) -> dict:
    """Columns `key` and `embedding`, lists of D numbers, of embeddings (n, D)."""
    values = pa.array(embeddings.flatten().numpy())
    return {key: names, "embedding": pa.FixedSizeListArray.from_arrays(values, embeddings.shape[1])}


def write_table(file: Path, parts: Iterable[dict]):
    """Columns of each part -> a CSV or, by the suffix of `file`, a Parquet file."""
    if file.suffix.lower() == ".parquet":
        tables = (pa.table(columns) for columns in parts)
        first = next(tables)
        with pq.ParquetWriter(file, first.schema) as writer:
            for table in chain([first], tables):
                writer.write_table(table)
        return
    with open(file, "w", newline="", encoding="utf-8") as opened:
        for number, columns in enumerate(parts):
            opened.write(csv_text(pd.DataFrame(columns), header=number == 0, float_format="%.6g"))


def write_npy(file: Path, count: int, parts: Iterable[torch.Tensor]):
    """Embeddings (n, D) of each part -> a .npy file, float32 (count, D)."""
    array, start = None, 0
    for embeddings in parts:
        if array is None:
            array = np.lib.format.open_memmap(file, "w+", np.float32, (count, embeddings.shape[1]))
        array[start : start + len(embeddings)] = embeddings.numpy()
        start += len(embeddings)
    array.flush()

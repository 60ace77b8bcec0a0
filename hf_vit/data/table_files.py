"""Reads CSV, TSV, JSON and JSONL files. CSV cells are read as text, so that 01 and 1 are two labels."""

import csv
import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from hf_vit.data.folder_layout import listed
from hf_vit.system.errors import UserError


TABLE_FORMATS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json"}  # suffixes in lower case


def is_csv(file: Path) -> bool:
    return TABLE_FORMATS[file.suffix.lower()] == "csv"


def read_table(file: Path) -> pa.Table:
    """The rows of a table; the cells of CSV and TSV files are text, empty ones None.

    Raises:
        ValueError: if it cannot be read, has no rows, or rows with more cells than its header.
    """
    try:
        table = read_csv(file) if is_csv(file) else read_json(file)
    except (ValueError, OSError, pa.ArrowException) as error:  # pandas' and json's errors are ValueErrors
        raise UserError(
            f"{file.name} cannot be read as {TABLE_FORMATS[file.suffix.lower()]}: {str(error).strip()}"
        ) from error
    if len(table) == 0:
        raise UserError(f"{file.name} has no rows: wanted a row for each image below the header")
    return table


def read_csv(file: Path) -> pa.Table:
    """A CSV file as text, whatever separates its cells; "None" and "NA" may be classes."""
    separator = find_separator(file)
    frame = pd.read_csv(file, sep=separator, dtype=str, keep_default_na=False, na_values=[""])
    names = [str(name).strip() for name in frame.columns]
    if not isinstance(frame.index, pd.RangeIndex):  # pandas takes the first cells for names of rows
        raise UserError(
            f"its rows have more cells than its header ({listed(names)}): quote cells that hold {separator!r}, and end no line "
            "with it"
        )
    if len(set(names)) < len(names):
        raise UserError(f"two columns have the same name ({listed(names)}): rename one")
    return pa.table([pa.array(frame[name], pa.string(), from_pandas=True) for name in frame.columns], names)


def find_separator(file: Path) -> str:
    """What separates the cells of a header: a comma, or a tab in a .tsv file; if neither is there, a semicolon or tab (or comma)."""
    usual = "\t" if file.suffix.lower() == ".tsv" else ","
    with open(file, encoding="utf-8-sig", newline="") as lines:
        header = next((line for line in lines if line.strip()), "")
    cells = {separator: len(next(csv.reader([header], delimiter=separator), [])) for separator in (usual, *",;\t")}
    return next((separator for separator in cells if cells[separator] > 1), usual)


def read_json(file: Path) -> pa.Table:
    """JSON Lines, or a JSON list of objects; keys that a row lacks are None."""
    text = file.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = []
        for number, line in enumerate(text.split("\n"), 1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except ValueError as error:
                raise UserError(f"line {number}: {error}") from error
    if not all(isinstance(row, dict) for row in rows):
        raise UserError('wanted a list of objects, such as {"image": "1.jpg", "label": "cat"}')
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})


def holds_rows(file: Path) -> bool:
    """Whether a .json file begins as a list, or as JSON Lines: others may be large, and are no tables."""
    with open(file, encoding="utf-8-sig", errors="replace") as lines:
        first = lines.readline(2**16).strip()
    try:
        return first.startswith("[") or isinstance(json.loads(first), dict)
    except ValueError:
        return False


def header_of(file: Path) -> list[str]:
    """The names of a table's columns."""
    if file.suffix == ".parquet":
        return pq.read_schema(file).names
    if is_csv(file):
        return list(pd.read_csv(file, sep=find_separator(file), nrows=0).columns)
    with open(file, encoding="utf-8-sig") as lines:
        return list(json.loads(lines.readline() or "{}"))

"""Tables of image files: a column of paths, relative to the table, one of labels, and perhaps one called `split`.

A new format is a function from its file to a `pyarrow.Table`, a line in `READERS`, and its suffix in `folders.TABLE_SUFFIXES`.
"""

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict

from hf_vit.data.columns import choose_column, refuse_rows
from hf_vit.data.folders import SPLIT_OF_WORD, SPLITS, suffix_of
from hf_vit.data.image_files import AllowedFiles, rows_of_files
from hf_vit.system.errors import UserError
from hf_vit.system.text import listed


PATH_COLUMNS = ("image", "file_name", "filename", "file", "path")


def read_csv(file: Path) -> pa.Table:
    """Cells of text, without the blanks around it. The first line says whether commas, semicolons or tabs separate them."""
    with open(file, encoding="utf-8-sig") as lines:
        first = lines.readline()
    separator = "\t" if suffix_of(file.name) == ".tsv" else max(",;\t", key=first.count)
    cells = pd.read_csv(file, sep=separator, header=None, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    columns = [pa.array(cells[place][1:].str.strip(), pa.string(), from_pandas=True) for place in cells]
    return pa.table(columns, [str(name).strip() for name in cells.loc[0]])


def read_json(file: Path) -> pa.Table:
    """One object a line; text stays text, also where it looks like a number or a date."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise UserError('its rows must be objects, such as {"image": "1.jpg", "label": "cat"}')
    return pa.Table.from_pandas(pd.DataFrame(rows, dtype=object), preserve_index=False)


READERS = {".csv": read_csv, ".tsv": read_csv, ".jsonl": read_json, ".parquet": pq.read_table}


def read_table(file: Path, image_column: str | None = None) -> Dataset:
    """The rows of a table, its column of paths as undecoded images, restricted to the table's folder.

    Args:
        image_column: by default the only one of `PATH_COLUMNS`.

    Raises:
        UserError: if the table cannot be read, has the same column twice, or a row names no file that is there.
    """
    try:
        table = READERS[suffix_of(file.name)](file)
    except (ValueError, OSError, OverflowError, pa.ArrowException) as error:
        raise UserError(f"{file} cannot be read as a table: {error}") from error
    columns = table.column_names
    if twice := {name for name in columns if columns.count(name) > 1}:
        raise UserError(f"{file} has two columns {listed(sorted(twice))}: rename one of them")
    usual = [name for name in columns if name.lower() in PATH_COLUMNS]
    column = choose_column(columns, "--image_column", image_column, usual, columns)
    names = table[column].to_pylist()
    if isinstance(names[0] if names else None, dict | bytes):
        raise UserError(f"{file} holds its images: it is read by the name of its folder, --dataset_name {file.parent}")
    is_file = lambda name: isinstance(name, str) and os.path.isfile(file.parent / name)
    wrong = [row for row, name in enumerate(names) if not is_file(name)]
    refuse_rows(f"{file}: the column {column} must name files in {file.parent}", wrong, names)
    others = {name: table[name] for name in columns if name != column}
    return rows_of_files(names, AllowedFiles(str(file.parent.resolve())), others, column)


def divide_by_split(rows: Dataset) -> DatasetDict:
    """A split for each word in the column `split` of a table; all rows are `train` where there is none.

    Raises:
        UserError: for a row whose split is no word of `SPLIT_OF_WORD`.
    """
    column = next((name for name in rows.column_names if name.lower() == "split"), None)
    if column is None:
        return DatasetDict(train=rows)
    words = rows[column][:]
    splits = np.array([SPLIT_OF_WORD.get(str(word).lower(), "") for word in words])
    refuse_rows(f"the column {column} must hold {', '.join(SPLIT_OF_WORD)}", np.flatnonzero(splits == ""), words)
    return DatasetDict({name: rows.select(np.flatnonzero(splits == name)) for name in SPLITS if name in splits})

"""Tables of image files: which of a folder is the data set, what its rows name, and which split they belong to.

A table is a CSV, TSV, JSON or JSONL file whose rows name images in or below its own folder. What cannot be told for
sure is an error, or a warning that says what was done.
"""

import hashlib
import os
import re
from collections import Counter, defaultdict
from functools import cache, partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, DatasetInfo, Features, Image, IterableDatasetDict, Value
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from PIL import Image as PILImage

from hf_vit.data.columns import LABEL_COLUMNS
from hf_vit.data.folder_layout import (
    IMAGE_SUFFIXES,
    SPLIT_OF_WORD,
    FolderScan,
    class_folder_names,
    is_like_split,
    listed,
    scan_folder,
    split_of_name,
)
from hf_vit.data.image_files import AllowedFiles, RestrictedImage
from hf_vit.data.table_files import TABLE_FORMATS, header_of, holds_rows, is_csv, read_table
from hf_vit.system.errors import UserError
from hf_vit.system.progress import warn


IMAGE_TYPE = Image().pa_type  # a struct of bytes and path
SPLIT_COLUMNS = ("split", "set", "subset", "partition")
OTHER_SPLIT_COLUMNS = ("fold", "is_test", "is_train", "is_valid")  # which do not say what is to be scored in words
# photos-0000, photos_1-of-8 or 0001; labels_v2 is another version of labels_v1, and no second part of it
NUMBERED = re.compile(r"(.*?)(?<![vV\d])\d+(-of-\d+)?")
INTEGERS = r"^(0|-?[1-9]\d{0,17})$"
DECIMALS = r"^-?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][-+]?\d+)?$"
METADATA = ImageFolder.METADATA_FILENAMES
# What audit.py, eval.py, embed.py and train.py write, and columns of what predict.py does.
NO_DATA = (".duplicates.csv", ".labels.csv", ".predictions.csv", ".rows.csv", "confusion_matrix.csv")
PREDICTED = {"label_1", "probability_1"}
NAMES_NO_IMAGE = "it names no image of the folder"
BOOLEANS = "^(True|TRUE|true|False|FALSE|false)$"


def load_tables(files: list[Path]) -> DatasetDict:
    """The splits of tables; columns that name image files hold undecoded images, restricted to the tables' folder.

    Raises:
        ValueError: if a table cannot be read, or its split or the images of its rows cannot be told.
    """
    folder, tables = files[0].parent, {}
    stems = cache(partial(index_stems, folder))
    for file in files:
        try:
            tables[file] = read_table(file)
            check_header(tables[file], file)
        except ValueError as error:
            raise UserError(f"{folder}: {error}") from error
        tables[file], _ = link_paths(tables[file], file, stems)
        if not image_columns(tables[file]):
            tables[file], reason = link_stems(tables[file], file, stems())
            if reason not in (None, NAMES_NO_IMAGE):
                raise UserError(f"{file}: {reason}: write paths with their suffix, relative to {folder}")
    return to_splits(join_tables(tables), folder, all(is_csv(file) for file in files))


def find_tables(
    scan: FolderScan, metadata: bool, label_column: str | None
) -> tuple[DatasetDict | None, dict[str, str]]:
    """The data set that tables beside the images of a folder describe, or None; and for the tables that are not used, why.

    Args:
        metadata: whether `datasets` reads the folder's files called `metadata` (`has_metadata`).
        label_column: the column or columns, with commas between them, that a flag names; tables then go before class folders.

    Raises:
        ValueError: as `load_tables`; if a CSV table cannot be read; if no table names images, and one has a row for each of them.
    """
    tables, unused, classes = {}, {}, class_folder_names(scan)
    for file in root_files(scan, TABLE_FORMATS, () if metadata else METADATA):
        try:
            if file.suffix.lower() == ".json" and not holds_rows(file):
                raise UserError("it is no list of rows")
            table = read_table(file)
            check_header(table, file)
        except ValueError as error:
            if is_csv(file) and (label_column or not classes):
                raise UserError(f"{scan.path}: {error}; mend it, or move it away") from error
            unused[file.name] = str(error)
            continue
        if not set(table.column_names) >= PREDICTED:
            tables[file] = table
    rows = {file.name: len(table) for file, table in tables.items()}
    tables, others = link_tables(tables, cache(partial(index_stems, scan.path, scan)))
    unused |= others
    if tables:
        splits = join_tables(tables)
        may_be_folders = classes and not label_column and not all(split_of_name(file.stem) for file in tables)
        reason = why_folders_go_first(splits, classes, scan.count()) if may_be_folders else None
        if classes and not label_column and not names_images_in(splits, classes):
            in_folders = sum(
                len(names) for folder, names in scan.images.items() if not classes.isdisjoint(folder.split("/"))
            )
            if in_folders > sum(map(len, splits.values())):  # and not thumbnails beside the images of the table
                reason = "it names no image of the class folders"
        if reason is None:
            named, count = listed(file.name for file in tables), sum(map(len, splits.values()))
            if scan.count() > 1:
                counts = f"{count:,} rows, {scan.count():,} images"
                warn(f"{scan.path}: images and labels are those of {named}, and folders are no classes ({counts})")
            return to_splits(splits, scan.path, all(map(is_csv, tables))), unused
        unused |= {file.name: reason for file in tables}
    below = [name for name in scan.data_files if "/" in name and name.lower().endswith((".csv", ".tsv", ".jsonl"))]
    if below and not metadata and not tables:
        unused[listed(sorted(below), 3)] = "only tables in the folder itself are read"
    same = [name for name, count in rows.items() if count == scan.count() and name not in METADATA and not tables]
    if same:
        raise UserError(
            f"{scan.path / same[0]} has a row for each of the {scan.count():,} images, but {unused[same[0]]}: write paths relative to "
            f"{scan.path}, or move the table away if the folders are the classes"
        )
    return None, unused


def why_folders_go_first(splits: dict[str, pa.Table], classes: set[str], num_images: int) -> str | None:
    """Why class folders go before tables of their images: these have no labels, or list a part of the images, without a usual name
    of labels or under the names of the folders. None if the tables go first."""
    first, count = next(iter(splits.values())), sum(map(len, splits.values()))
    labels = [name for name in first.column_names if name.lower() in LABEL_COLUMNS]
    is_part = count < num_images
    if not could_be_labelled(first) or (is_part and not labels):
        return f"it has no column of labels ({listed(first.column_names)}): name one with --label_column"
    if (
        is_part
        and len(labels) == 1
        and {str(label) for rows in splits.values() for label in rows[labels[0]].to_pylist()} <= classes
    ):
        return f"it lists {count:,} of {num_images:,} images: to read these alone, name the table with --dataset_name"
    return None


def names_images_in(splits: dict[str, pa.Table], classes: set[str]) -> bool:
    """Whether tables name an image in a folder of one of these names, or below it."""
    paths = (
        path for table in splits.values() for column in image_columns(table) for path in image_paths(table, column)
    )
    return any(not classes.isdisjoint(path.split("/")[:-1]) for path in paths if path)


def link_tables(tables: dict[Path, pa.Table], stems) -> tuple[dict[Path, pa.Table], dict[str, str]]:
    """The tables that name images by their paths, or else without suffix and with labels, linked to them; and why others do not."""
    linked, unused = {}, {}
    for file, table in tables.items():
        linked[file], reason = link_paths(table, file, stems)
        if reason is not None:
            unused[file] = reason
    if len(unused) == len(tables):
        for file, table in tables.items():
            if not image_columns(linked[file]):
                linked[file], reason = link_stems(table, file, stems())
                unused[file] = reason
                if reason is None and not could_be_labelled(linked[file]):
                    unused[file] = f"it has no column of labels beside {listed(image_columns(linked[file]))}"
                elif reason is None:
                    del unused[file]
    return {file: linked[file] for file in tables if file not in unused}, {
        file.name: reason for file, reason in unused.items()
    }


def root_files(scan: FolderScan, suffixes, also=()) -> list[Path]:
    """Data files in a folder itself that have one of these suffixes, without those that a recipe or, unless they are named in `also`,
    an ImageFolder keeps there."""
    names = [name for name in scan.data_files if "/" not in name and os.path.splitext(name)[1].lower() in suffixes]
    kept = [name for name in names if not name.endswith(NO_DATA) and (name in also or name not in METADATA)]
    return [scan.path / name for name in sorted(kept)]


def has_metadata(scan: FolderScan) -> bool:
    """Whether a `metadata` file of the folder is one by which `datasets` reads images: it names files and, beside class folders,
    something that could be their labels."""
    described = []
    has_splits = any("/" not in folder and split_of_name(folder) for folder in scan.folders)
    for name in scan.data_files:
        file, above_splits = scan.path / name, has_splits and "/" not in name  # which `datasets` does not look at
        if name.rpartition("/")[2] not in METADATA or above_splits:
            continue
        try:
            header = header_of(file)
        except (ValueError, OSError, pa.ArrowException) as error:
            raise UserError(f"{file} cannot be read: {error}; mend it, or move it away") from error
        if any(name.endswith(("file_name", "file_names")) for name in header):
            described.append(file)
    if not described or any(file.suffix == ".parquet" for file in described) or not class_folder_names(scan):
        return bool(described)
    return any(could_be_labelled(read_table(file), "file_name") for file in described)


def could_be_labelled(table: pa.Table, image_column: str | None = None) -> bool:
    """Whether a column has a usual name of labels, or values some of which repeat."""
    names = {name for name in table.column_names if name.lower() not in SPLIT_COLUMNS}
    for name in names - {image_column, *image_columns(table)}:
        values = set(map(str, table[name].to_pylist()))
        if name.lower() in LABEL_COLUMNS or 1 < len(values) < len(table) or pa.types.is_list(table[name].type):
            return True
    return False


def image_columns(table: pa.Table) -> list[str]:
    return [field.name for field in table.schema if field.type == IMAGE_TYPE]


def image_paths(table: pa.Table, column: str) -> list[str | None]:
    return pc.replace_substring(pc.struct_field(table[column], "path"), "\\", "/").to_pylist()


def check_header(table: pa.Table, file: Path):
    """Raises ValueError if the first line of a table names an image, and no columns."""
    if of_images := [name for name in table.column_names if Path(name).suffix.lower() in IMAGE_SUFFIXES]:
        raise UserError(
            f"{file.name} begins with {of_images[0]}: wanted a first line that names the columns, such as image,label"
        )


def text_columns(table: pa.Table) -> list[str]:
    return [field.name for field in table.schema if pa.types.is_string(field.type)]


def link_paths(table: pa.Table, file: Path, stems) -> tuple[pa.Table, str | None]:
    """Text columns of file names with the suffix of an image become image columns.

    If none of the files is there, they are those of the same names in folders below, if there is one of each name.

    Args:
        stems: returns `index_stems` of the table's folder.

    Returns:
        The table, and why its rows name no images, or None.
    """
    PILImage.init()  # registers the suffixes of all formats
    exists, reason = False, NAMES_NO_IMAGE
    for column in text_columns(table):
        names = table[column].to_pylist()
        first = next((name.strip() for name in names if name and name.strip()), "")
        if Path(first).suffix.lower() not in PILImage.EXTENSION:
            continue
        names = [clean_path(file.parent, name) for name in names]
        if any(os.path.exists(file.parent / name) for name in names if name):
            exists = True
        elif found := match_images(names, column, file, stems()):
            names, exists = found, True
            warn(f"{file.name}: the files of its column {column} are those of these names in folders below")
        else:
            reason = f"none of the files in its column {column} is there, such as {first}"
        table = with_images(table, column, names)
    return table, None if exists else reason


def cast_paths_to_images(splits):
    """Splits of Parquet or Arrow files, whose text columns that name image files become image columns if no column holds images."""
    features = next(iter(splits.values())).features or {}
    if any(isinstance(feature, (Image, dict)) or feature == Value("binary") for feature in features.values()):
        return splits
    PILImage.init()
    for column in [name for name, feature in features.items() if feature in (Value("string"), Value("large_string"))]:
        values = (row[column] for rows in splits.values() for row in rows.select_columns([column]))
        first = next(filter(None, values), "")
        if Path(first).suffix.lower() in PILImage.EXTENSION:
            for split in splits:
                splits[split] = splits[split].cast_column(column, Image(decode=False))
    return splits


def link_stems(table: pa.Table, file: Path, stems: dict[str, list[str]]) -> tuple[pa.Table, str | None]:
    """The text column whose names without suffix are those of most images becomes the image column; returns as `link_paths`."""
    best, names, reason, split = None, [], NAMES_NO_IMAGE, split_of_name(file.stem)
    for column in text_columns(table):
        if column.lower() in (*LABEL_COLUMNS, *SPLIT_COLUMNS):
            continue
        cells = table[column].to_pylist()
        if 2 * sum(len(find_image(name, stems, split)) > 1 for name in cells) > len(cells):
            reason = f"names in its column {column} stand for several images each, such as {cells[0]}"
        elif len(set(cells)) > len(set(names)) and (found := match_images(cells, column, file, stems)):
            best, names = column, found
    if best is None:
        return table, reason
    warn(f"{file.name}: its column {best} names images without their suffix")
    return with_images(table, best, names), None


def match_images(names: list[str | None], column: str, file: Path, stems: dict[str, list[str]]) -> list[str | None]:
    """The paths of the images that `names` stand for, by `find_image`; empty if most stand for none, or for several.

    Raises:
        ValueError: if most names stand for one image, and some do not.
    """
    split = split_of_name(file.stem)
    images = [find_image(name, stems, split) if name else [None] for name in names]
    wrong = [row for row, found in enumerate(images) if len(found) != 1]
    if not any(names) or 2 * len(wrong) > len(names):
        return []
    if wrong:
        found = listed(sorted(images[wrong[0]])) or "no image"
        raise UserError(
            f"{file}: {len(wrong)} of the {len(names)} names in its column {column} are those of no image or of several, such as "
            f"{names[wrong[0]]} in row {wrong[0]} ({found}): write paths with their suffix, relative to {file.parent}"
        )
    return [found for (found,) in images]


def strip_text(table: pa.Table) -> pa.Table:
    """A table without the blanks around its text; empty text is None."""
    for column in text_columns(table):
        text = pc.utf8_trim_whitespace(table[column])
        text = pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)
        table = table.set_column(table.column_names.index(column), column, text)
    return table


def with_images(table: pa.Table, column: str, names: list[str | None]) -> pa.Table:
    """A table whose `column` holds undecoded images, those of the files `names`."""
    missing = pa.array([name is None for name in names])
    files = [pa.nulls(len(names), pa.binary()), pa.array(names, pa.string())]
    images = pa.StructArray.from_arrays(files, fields=list(IMAGE_TYPE), mask=missing)
    return table.set_column(table.column_names.index(column), column, images)


def clean_path(folder: Path, name: str | None) -> str | None:
    """A path with backslashes or blanks around it as the file is called, if it is there so alone."""
    if name is None or (name == name.strip() and "\\" not in name) or (folder / name).exists():
        return name
    cleaned = name.strip().replace("\\", "/")
    return cleaned if (folder / cleaned).exists() else name


def index_stems(folder: Path, scan: FolderScan | None = None) -> dict[str, list[str]]:
    """Paths of the images below a folder, relative to it, by their names without folder and suffix."""
    stems = defaultdict(list)
    try:
        scan = scan or scan_folder(folder)
    except OSError:  # a folder that may not be listed, such as one of another user in /tmp
        return stems
    for below, names in scan.images.items():
        for name in names:
            stems[os.path.splitext(name)[0]].append(f"{below}/{name}" if below else name)
    return stems


def find_image(name: str | None, stems: dict[str, list[str]], split: str | None = None) -> list[str]:
    """The images that a name stands for: the one at that path, or those whose paths end with it, with or without suffix.

    Args:
        split: that of the table: 0.jpg of train.csv is train/0.jpg rather than test/0.jpg.
    """
    name = (name or "").strip().replace("\\", "/").removeprefix("./")
    stem, suffix = os.path.splitext(name)
    stem = stem if suffix.lower() in IMAGE_SUFFIXES else name
    found = stems.get(stem.rpartition("/")[2], [])
    ends = [path for path in found if f"/{path}".endswith(f"/{name}")]
    ends = ends or [path for path in found if f"/{os.path.splitext(path)[0]}".endswith(f"/{name}")]
    ends = [path for path in ends if name in (path, os.path.splitext(path)[0])] or ends
    return (split and [path for path in ends if split_of_name(path.partition("/")[0]) == split]) or ends


def split_files(files: list[Path]) -> dict[str, list[Path]]:
    """Data files by split: a word of the name decides, as for folders. One file, or numbered files without such a word, are "train".

    Raises:
        ValueError: if some names have a split word and others none, or if files without one are not numbered.
    """
    if len(files) == 1:
        return {"train": files}
    files_of_split = defaultdict(list)
    for file in files:
        files_of_split[split_of_name(file.stem)].append(file)
    if unknown := files_of_split.pop(None, []):
        named = listed(file.name for file in unknown)
        if files_of_split:
            raise UserError(
                f"{files[0].parent}: the split of {named} cannot be told beside "
                f"{listed(file.name for file in files if file not in unknown)}; wanted train, validation or test in each name: rename "
                "them, move them away, or name one file with --dataset_name"
            )
        numbered = [NUMBERED.fullmatch(file.stem) for file in unknown]
        if not all(numbered) or len({match[1] for match in numbered}) > 1:
            raise UserError(
                f"{files[0].parent} holds several data sets, or the splits of one: {named}; wanted one, names such as train and "
                "test, or numbers (photos-0000, photos-0001): name one with --dataset_name, or rename them"
            )
        return {"train": unknown}
    return {split: files_of_split[split] for split in ("train", "validation", "test") if split in files_of_split}


def join_tables(tables: dict[Path, pa.Table]) -> dict[str, pa.Table]:
    """Tables -> one for each split. A test table without labels is left out, and taken out of `tables`.

    Raises:
        ValueError: as `split_files`; if an image is in two tables of a split, or columns differ.
    """
    splits, images = {}, {column for table in tables.values() for column in image_columns(table)}
    for file, table in tables.items():
        for column in images.intersection(text_columns(table)):
            table = with_images(table, column, table[column].to_pylist())
        tables[file] = strip_text(table)
    files_of_split = split_files(list(tables))
    for split, files in files_of_split.items():
        for file in files[1:]:
            refuse_other_columns(tables[files[0]], tables[file], files[0].name, file.name)
        parts = [tables[file].select(tables[files[0]].column_names) for file in files]
        splits[split] = pa.concat_tables(parts, promote_options="permissive")
        for column in image_columns(splits[split]) if len(files) > 1 else []:
            seen = {}
            for file, part in zip(files, parts, strict=True):
                for image in part[column].to_pylist():
                    if image and seen.setdefault(image["path"], file) != file:
                        raise UserError(
                            f"{file.parent}: {image['path']} is in {seen[image['path']].name} and in {file.name}, both of the "
                            f"split {split!r}: name one with --dataset_name, or move one away"
                        )
    first, *others = splits
    for split in others:
        names = [files_of_split[name][0].name for name in (first, split)]
        if split == "test" and lacks_labels(splits[first], splits[split]):
            warn(f"{names[1]} has not the labels of {names[0]} and is left out")
            del splits[split]
            for file in files_of_split[split]:
                del tables[file]
        else:
            refuse_other_columns(splits[first], splits[split], *names)
    if list(splits) == ["train"]:
        named = any(split_of_name(file.stem) for file in tables)  # train.csv itself says its split
        splits = divide_by_column(splits, SPLIT_COLUMNS if named else None)
        if list(splits) == ["train"] and not named and could_be_labelled(splits["train"]):
            splits = divide_by_folder(splits)
    return splits


def lacks_labels(train: pa.Table, test: pa.Table) -> bool:
    """Whether a test table is one as competitions hand it out: without the column of labels, or with an empty one."""
    usual = [name for name in train.column_names if name.lower() in LABEL_COLUMNS]
    if usual:
        return all(name not in test.column_names or test[name].null_count == len(test) for name in usual)
    return set(test.column_names) < set(train.column_names)


def divide_by_column(splits: dict[str, pa.Table], columns: tuple[str, ...] | None) -> dict[str, pa.Table]:
    """A training table with a column of splits -> a table for each.

    Args:
        columns: names, in lower case, that it may have; None for any.
    """
    (table,) = splits.values()
    for column in sorted(text_columns(table), key=lambda name: name.lower() not in SPLIT_COLUMNS):
        if column.lower() in LABEL_COLUMNS or (columns is not None and column.lower() not in columns):
            continue
        words = [SPLIT_OF_WORD.get((word or "").lower()) for word in table[column].to_pylist()]
        if column.lower() not in SPLIT_COLUMNS and (None in words or len(set(words)) < 2):
            continue
        if None in words:
            unknown = table[column][words.index(None)].as_py()
            if "train" in words and len(set(words)) > 2:
                raise UserError(
                    f"the column {column} says the split of most rows, but {unknown!r} in row {words.index(None)} is none: wanted "
                    "train, validation or test in each"
                )
            warn(f"the column {column} is not used, as {unknown!r} in it is no split: all rows train")
            continue
        return divided_by(words, table, f"the column {column} says the split")
    if others := [name for name in table.column_names if name.lower() in OTHER_SPLIT_COLUMNS]:
        warn(
            f"the column {listed(others)} is not used, and all rows train: wanted train, validation and test in a column split"
        )
    return splits


def divide_rows(splits):
    """Rows of Parquet or Arrow files in one training split, with a column such as `split` that says theirs -> a split for each."""
    features = next(iter(splits.values())).features or {}
    texts = [name for name, feature in features.items() if feature in (Value("string"), Value("large_string"))]
    columns = [name for name in texts if name.lower() in SPLIT_COLUMNS]
    if list(splits) != ["train"] or len(columns) != 1:
        return splits
    if isinstance(splits, IterableDatasetDict):
        warn(f"the column {columns[0]} is not used by a stream: all rows train")
        return splits
    words = [SPLIT_OF_WORD.get((word or "").lower()) for word in splits["train"][columns[0]][:]]
    if None in words or len(set(words)) < 2:
        return splits
    numbers = divided_by(words, pa.table({"row": range(len(words))}), f"the column {columns[0]} says the split")
    return DatasetDict({split: splits["train"].select(rows["row"].to_numpy()) for split, rows in numbers.items()})


def divided_by(words: list[str], table: pa.Table, reason: str) -> dict[str, pa.Table]:
    """A table -> one for each split, where `words` says that of each row; a warning says why."""
    names = [split for split in dict.fromkeys(SPLIT_OF_WORD.values()) if split in words]
    divided = {split: table.filter(pc.equal(pa.array(words), split)) for split in names}
    warn(f"{reason}: " + ", ".join(f"{len(rows):,} {split}" for split, rows in divided.items()))
    return divided


def divide_by_folder(splits: dict[str, pa.Table]) -> dict[str, pa.Table]:
    """A training table whose images lie in folders of several splits, such as train/ and test/ -> a table for each."""
    (table,) = splits.values()
    for column in image_columns(table):
        folders = [(path or "").split("/")[:-1] for path in image_paths(table, column)]
        depth = 0
        while folders and all(len(folder) > depth and folder[depth] == folders[0][depth] for folder in folders):
            depth += 1
        names = [folder[depth] if len(folder) > depth else "" for folder in folders]
        words = [split_of_name(name) if is_like_split(name) else None for name in names]
        if None not in words and "train" in words and len(set(words)) > 1:
            return divided_by(words, table, "the folders of the images say the split")
    return splits


def warn_of_repeated_images(splits: dict[str, pa.Table]):
    """A line for each pair of splits, or split, in which several rows name the same image."""
    split_of, repeated = {}, Counter()
    for split, table in splits.items():
        columns = image_columns(table)
        for path in filter(None, image_paths(table, columns[0]) if len(columns) == 1 else ()):
            before = split_of.setdefault(path, None)
            if before is not None:
                repeated[split, before] += 1
            split_of[path] = before or split
    for (split, before), count in repeated.items():
        other = "a row before them names" if split == before else f"is of the split {before}, too"
        warn(f"rows of the split {split} whose image {other}: {count:,}")


def refuse_other_columns(first: pa.Table, other: pa.Table, first_name: str, other_name: str):
    """Raises ValueError if two tables of a data set have different columns."""
    if missing := [name for name in first.column_names if name not in other.column_names]:
        raise UserError(
            f"{other_name} lacks {listed(missing)} of {first_name}: wanted the same columns in both, or name one with --dataset_name"
        )
    if more := [name for name in other.column_names if name not in first.column_names]:
        raise UserError(
            f"{other_name} has {listed(more)}, which {first_name} lacks: wanted the same columns in both, or name one with "
            "--dataset_name"
        )


def to_splits(tables: dict[str, pa.Table], folder: Path, infer_numbers: bool) -> DatasetDict:
    """Tables of the splits -> data sets whose images are restricted to `folder`.

    Args:
        infer_numbers: turn columns of the text of numbers into numbers, as CSV files need it.
    """
    warn_of_repeated_images(tables)
    splits, of_text = DatasetDict(), text_columns(next(iter(tables.values()))) if infer_numbers else []
    kinds = {name: column_type([table[name] for table in tables.values()]) for name in of_text}
    for split, table in tables.items():
        for column, kind in kinds.items():
            table = table.set_column(table.column_names.index(column), column, table[column].cast(kind))
        table = table.replace_schema_metadata(None)
        features = Features.from_arrow_schema(table.schema)
        for column in image_columns(table):
            features[column] = RestrictedImage(decode=False, files=AllowedFiles(str(folder)))
        digest = hashlib.sha256(str(table.schema).encode())
        for batch in table.combine_chunks().to_batches():
            digest.update(batch.serialize())
        splits[split] = Dataset(table, DatasetInfo(features=features), fingerprint=digest.hexdigest()[:16])
    return splits


def column_type(columns: list[pa.ChunkedArray]) -> pa.DataType:
    """The type of a column of text in all splits: whole numbers only if none would change its text (01, 1e3), decimals, booleans,
    or text."""
    text = pa.chunked_array([chunk for column in columns for chunk in column.chunks], pa.string()).drop_null()
    is_all = lambda pattern: len(text) > 0 and pc.all(pc.match_substring_regex(text, pattern)).as_py()
    if is_all(INTEGERS):
        return pa.int64()
    if is_all(BOOLEANS):
        return pa.bool_()
    has_point = pc.any(pc.match_substring(text, ".")).as_py()  # 1e3 and 1000 are two labels
    return pa.float64() if has_point and is_all(DECIMALS) else pa.string()

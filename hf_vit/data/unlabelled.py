"""Images to predict: a folder, a file, a list of files or any data set, as rows without labels."""

import hashlib
import os
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import ClassLabel, Dataset, DatasetDict, DatasetInfo, Features, Image

from hf_vit.data.columns import find_image_column
from hf_vit.data.folder_layout import IMAGE_SUFFIXES, UNREAD_SUFFIXES, listed
from hf_vit.data.image_files import AllowedFiles, RestrictedImage
from hf_vit.data.sources import FILE_FORMATS, is_saved_data_set, load_splits
from hf_vit.data.splits import stratified_holdout, stratified_subset
from hf_vit.data.table_files import TABLE_FORMATS
from hf_vit.system.errors import UserError
from hf_vit.system.progress import warn
from hf_vit.system.recipes_folder import EMBEDDED


FIND_SUFFIXES = {*IMAGE_SUFFIXES, *UNREAD_SUFFIXES}  # those that are not read are named as unreadable


@dataclass(frozen=True)
class NamedFiles(AllowedFiles):
    """Files that the user named, or that were found by listing a folder of the user's: they may be anywhere on this machine."""

    def resolve(self, path: str) -> str:
        """The location of a file; relative paths start at `folder`. ValueError for an address."""
        if "://" in path:
            raise UserError("it is an address; wanted a file on this machine: download it first")
        return os.path.join(self.folder, path)


@dataclass
class UnlabelledRows:
    """Rows of images, and how a table calls them.

    Args:
        rows: a column `image`, undecoded.
        key: "file" if the source names files, as `names` gives them; otherwise "row".
        source: what the rows are, as JSON: it differs if the images do, as far as names, sizes and dates of files tell.
    """

    rows: Dataset
    key: str
    source: dict

    def names(self, index: list[int]) -> list[str] | list[int]:
        """What the column `key` holds for these rows: file names as the source has them, or row numbers."""
        if self.key == "row":
            return index
        return [item["path"] for item in self.rows[index]["image"]]


def prepare_unlabelled(
    train: Dataset, scored: Dataset | None, eval_fraction: float, train_fraction: float, seed: int
) -> DatasetDict:
    """The splits "train" and "eval" as `prepare_splits` gives them, of images without labels: all are of one class.

    Args:
        train, scored: a column `image`, undecoded; of `scored` None, `eval_fraction` of the others is held out.
    """
    as_one_class = lambda rows: rows.add_column(
        "label", np.zeros(len(rows), int), feature=ClassLabel(names=["image"])
    ).add_column("row", np.arange(len(rows)))
    train = as_one_class(train)
    if scored is None:
        held_out = stratified_holdout(np.zeros(len(train), int), eval_fraction, seed)
        train, scored = train.select(np.setdiff1d(np.arange(len(train)), held_out)), train.select(held_out)
    else:
        scored = as_one_class(scored)
    if train_fraction < 1:
        kept = stratified_subset(np.zeros(len(train), int), ["image"], train_fraction, None, seed)
        train = train.select(kept)
    return DatasetDict(train=train, eval=scored)


def load_unlabelled(
    name: str,
    config: str | None = None,
    split: str | None = None,
    image_column: str | None = None,
    flag: str = "--split",
    default_split: str | None = None,
) -> UnlabelledRows:
    """The images that `name` stands for; labels are ignored.

    Args:
        name: a folder with images in it or below it; an image file; a text file that names an image file a line, whose
            relative paths start at the text file's folder; or a data set, as `load_splits` takes it.
        split: of a data set; needed if it has several, unless there is a `default_split`.
        flag: what errors call it.
        default_split: for a data set alone, if no split is given.

    Raises:
        ValueError: if there are no images, the data set, its split or its column of images cannot be found, or a split of files
            is asked for.
    """
    path, files = Path(name).expanduser(), _find_files(name)
    if files is not None and split is not None:
        raise UserError(
            f"{flag} {split}: {path} is read as image files, which have no splits; name the folder or the list of those images"
        )
    if files is not None:
        return files
    splits = load_splits(name, config)
    split = split or default_split
    if split is None and len(splits) > 1:
        raise UserError(f"{name} has the splits {', '.join(splits)}: name one with {flag}")
    split = next(iter(splits)) if split is None else split
    if split not in splits:
        raise UserError(f"{name} has no split {split!r}; it has {', '.join(splits)}: name one of them with {flag}")
    rows = splits[split]
    if len(rows) == 0:
        raise UserError(f"{name} has no images in its split {split!r}: name another with {flag}")
    is_table = path.is_file() and path.suffix.lower() in TABLE_FORMATS
    files = [str(path.resolve())] if is_table else [file["filename"] for file in rows.cache_files]
    files = [(file, os.stat(file)) for file in files]
    source = {
        "dataset": name if name in EMBEDDED or not path.exists() else str(path.resolve()),
        "config": config,
        "split": split,
        "rows": len(rows),
        "files": [[file, stat.st_size, stat.st_mtime_ns] for file, stat in files],
    }
    column = find_image_column(rows, image_column)
    if not isinstance(rows.features[column], RestrictedImage):
        rows = rows.cast_column(column, Image(decode=False))
    rows = rows.select_columns([column])
    rows = rows if column == "image" else rows.rename_column(column, "image")
    return UnlabelledRows(rows, "file" if is_table else "row", {**source, "column": column})


def _list_images(path: Path) -> tuple[list[str], list[str]]:
    """Sorted names of the image files in a folder or below it, relative to it, and of the links to folders, which are not
    followed; hidden ones are left out."""
    names, links = [], []
    for folder, folders, files in os.walk(path, onerror=_raise):
        folders[:] = [each for each in folders if not each.startswith((".", "__"))]  # as `datasets` does
        below = os.path.relpath(folder, path)
        location = lambda name, below=below: name if below == "." else f"{below}/{name}"
        links += [location(each) for each in folders if os.path.islink(os.path.join(folder, each))]
        names += [
            location(file)
            for file in files
            if not file.startswith(".") and os.path.splitext(file)[1].lower() in FIND_SUFFIXES
        ]
    return sorted(names), sorted(links)


def _raise(error: OSError):
    raise error


def _find_files(name: str) -> UnlabelledRows | None:
    """The image files of a folder, of a list, or the one; None if `name` is a data set."""
    path = Path(name).expanduser()
    if name in EMBEDDED:
        return None
    if path.is_file() and path.suffix.lower() == ".txt":
        raw = path.read_bytes()
        encoding = "utf-16" if raw[:2] in (BOM_UTF16_LE, BOM_UTF16_BE) else "utf-8-sig"  # PowerShell writes the former
        lines = [line.strip() for line in raw.decode(encoding, errors="surrogateescape").split("\n")]
        return _named_files(path, path.parent, [line for line in lines if line])
    if path.is_file() and path.suffix.lower() in FIND_SUFFIXES:
        return _named_files(path, path.parent, [path.name])
    if path.is_dir() and not is_saved_data_set(path):
        names, links = _list_images(path)
        if names:
            if links:
                warn(f"{path}: links to folders are not followed: {listed(links)}")
            return _named_files(path, path, names)
        if not any(file.suffix.lower() in FILE_FORMATS for file in path.rglob("*")):
            linked = f" (links to folders are not followed: {listed(links)})" if links else ""
            raise UserError(
                f"{path} holds no images: wanted files such as .jpg or .png in it or in folders below it{linked}"
            )
    return None


def _named_files(path: Path, folder: Path, names: list[str]) -> UnlabelledRows:
    """Rows of files that the folder or file `path` stands for.

    Raises:
        ValueError: if there are none, or a name is not UTF-8, which tables cannot hold.
    """
    if not names:
        raise UserError(f"{path} is empty: wanted the path of an image file in each line")
    if wrong := [name for name in names if name != name.encode(errors="ignore").decode()]:
        raise UserError(
            f"{path} has {len(wrong)} file names that are not UTF-8, the first is {wrong[0]!r}: rename them, with convmv for example"
        )
    paths = pa.array(names, pa.string())
    images = pa.StructArray.from_arrays([pa.nulls(len(names), pa.binary()), paths], names=["bytes", "path"])
    feature = RestrictedImage(decode=False, files=NamedFiles(str(folder.resolve())))
    rows = Dataset(pa.table({"image": images}), DatasetInfo(features=Features(image=feature)))
    digest = hashlib.sha256("\0".join(names).encode()).hexdigest()
    source = {"dataset": str(path.resolve()), "rows": len(names), "names": digest}
    return UnlabelledRows(rows, "file", source)

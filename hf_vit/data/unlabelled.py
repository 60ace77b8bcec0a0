"""Images to predict: a folder, a file, a list of files or any data set, as rows without labels."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset

from hf_vit.data.columns import find_image_column, select_image_and_label
from hf_vit.data.folders import list_folder, suffix_of
from hf_vit.data.image_files import IMAGE_SUFFIXES, NamedFiles, rows_of_files
from hf_vit.data.sources import data_files, is_saved_data_set, read_source
from hf_vit.system.errors import UserError
from hf_vit.system.progress import warn


@dataclass
class UnlabelledRows:
    """Rows of images, and how a table calls them.

    Args:
        rows: a column `image`, undecoded.
        key: "file" if the source names files, as `names` gives them; otherwise "row".
    """

    rows: Dataset
    key: str

    def names(self, index: list[int]) -> list[str] | list[int]:
        """What the column `key` holds for these rows: file names as the source has them, or row numbers."""
        if self.key == "row":
            return index
        return [item["path"] for item in self.rows[index]["image"]]


def as_one_class(rows: Dataset) -> Dataset:
    """Rows of the column `image` with the columns `label`, of one class, and `row`."""
    rows = rows.add_column("label", np.zeros(len(rows), int), feature=ClassLabel(names=["image"]))
    return rows.add_column("row", np.arange(len(rows)))


def load_unlabelled(
    name: str,
    config: str | None = None,
    split: str | None = None,
    image_column: str | None = None,
    default_split: str | None = None,
) -> UnlabelledRows:
    """The images that `name` stands for; labels are ignored.

    Args:
        name: a folder with images in it or below it; an image file; a text file that names an image file a line, whose
            relative paths start at the text file's folder; or a data set, as `read_source` takes it.
        split: of a data set; needed if it has several, unless there is a `default_split`.
        default_split: for a data set alone, if no split is given.

    Raises:
        UserError: if there are no images, the data set, its split or its column of images cannot be found, or a split of files
            is asked for.
    """
    path, files = Path(name).expanduser(), find_files(name)
    if files is not None:
        if split is not None:
            raise UserError(
                f"--split {split}: {path} is read as image files, which have no splits; name the folder of these"
            )
        return files
    splits, split = read_source(name, config, image_column=image_column).splits, split or default_split
    if split is None and len(splits) == 1:
        (split,) = splits
    if split not in splits or len(splits[split]) == 0:
        raise UserError(
            f"{name} has the splits {', '.join(splits)}, got {split}: name one that has images with --split"
        )
    rows = splits[split]
    rows = select_image_and_label(rows, (find_image_column(rows, image_column),))
    names_files = path.exists() and rows[0]["image"]["bytes"] is None
    return UnlabelledRows(rows, "file" if names_files else "row")


def find_files(name: str) -> UnlabelledRows | None:
    """The image files of a folder, of a list, or the one; None if `name` is a data set."""
    path = Path(name).expanduser()
    if path.is_file() and suffix_of(path.name) == ".txt":
        lines = path.read_text(encoding="utf-8-sig", errors="surrogateescape").split("\n")
        return named_files(path, path.parent, [line.strip() for line in lines if line.strip()])
    if path.is_file() and suffix_of(path.name) in IMAGE_SUFFIXES:
        return named_files(path, path.parent, [path.name])
    if path.is_dir() and not is_saved_data_set(path):
        found = list_folder(path)
        if found.images and not data_files(found):
            for phrase in found.skipped():
                warn(f"left out: {phrase}")
            names = [f"{folder}/{image}".lstrip("/") for folder, images in found.images.items() for image in images]
            return named_files(path, path, sorted(names))
    return None


def named_files(path: Path, folder: Path, names: list[str]) -> UnlabelledRows:
    """Rows of files that the folder or file `path` stands for; UserError if there are none."""
    if not names:
        raise UserError(f"{path} is empty: wanted the path of an image file in each line")
    return UnlabelledRows(rows_of_files(names, NamedFiles(str(folder.resolve())), {}), "file")

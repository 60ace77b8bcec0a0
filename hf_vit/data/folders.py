"""Folders of images: one walk lists them, and the folder below the split is the class: [WRAPPER/][SPLIT/]CLASS/.../IMAGE."""

import os
import shlex
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from datasets import ClassLabel, Dataset, DatasetDict

from hf_vit.data.image_files import IMAGE_SUFFIXES, UNREAD_SUFFIXES, NamedFiles, rows_of_files
from hf_vit.system.errors import UserError
from hf_vit.system.progress import progress_bar
from hf_vit.system.text import counted, listed


SPLIT_OF_WORD = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "val", "valid", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval"), "test"),
}  # the names of splits, in any case
SPLITS = tuple(dict.fromkeys(SPLIT_OF_WORD.values()))
TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
SYSTEM_FOLDERS = {"$RECYCLE.BIN", "System Volume Information", "lost+found", "@eaDir", "#recycle", "__MACOSX"}
READABLE = """--dataset_name reads
  USER/NAME      a data set of the Hub
  DATA_FOLDER    with Parquet, Arrow or tar files, from save_to_disk, or with images and metadata.csv, .jsonl or .parquet
  IMAGE_FOLDER   CLASS/.../IMAGE.jpg, or train/CLASS/... and test/CLASS/...; --class_level 2 for classes one folder deeper
  TABLE          .csv, .tsv, .jsonl or .parquet, with a column of paths (--image_column) and of labels (--label_column)"""


@dataclass
class Listing:
    """What lies below a folder. Paths are relative to it, with `/`; "" is the folder itself.

    Args:
        path: the folder, as the user named it.
        images: the names of the images in each folder that has some.
        files: all other files.
        left_out: what no script reads, and how many of each.
    """

    path: Path
    images: dict[str, list[str]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def skipped(self) -> list[str]:
        """What is left out, a phrase each."""
        return [f"{count:,} {what}" for what, count in sorted(self.left_out.items())]

    def tables(self) -> list[str]:
        """The `--dataset_name` of each table, the outermost first."""
        files = sorted(self.files, key=lambda file: (file.count("/"), file))
        return [command(self.path / file) for file in files if suffix_of(file) in TABLE_SUFFIXES]


def list_folder(path: Path) -> Listing:
    """Lists all files below a folder in one walk. Hidden files and folders and those of operating systems are passed over; links to
    files are followed, links to folders are not."""
    found, waiting = Listing(path), [""]
    with progress_bar(f"listing {path.name}", "images") as bar:
        while waiting:
            folder, images = waiting.pop(), []
            with os.scandir(path / folder) as entries:
                for entry in entries:
                    name, location = entry.name, f"{folder}/{entry.name}" if folder else entry.name
                    if name.startswith(".") or name in SYSTEM_FOLDERS:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(location)
                    elif (suffix := suffix_of(name)) in IMAGE_SUFFIXES and entry.is_file():  # no pipe or device
                        images.append(name)
                    elif entry.is_symlink() and entry.is_dir():
                        found.left_out["links to folders, which are not followed"] += 1
                    elif suffix in UNREAD_SUFFIXES:
                        found.left_out[f"{suffix} files: save them as .jpg or .png"] += 1
                    else:
                        found.files.append(location)
            found.images |= {folder: images} if images else {}
            bar.update(len(images))
    return found


def class_folders(found: Listing, class_level: int) -> tuple[DatasetDict, dict[str, str], list[str]]:
    """The splits of a folder of images, with the columns `image` (undecoded) and `label`, in the order of the files' paths.

    Args:
        class_level: which folder below the split is the class, from 1.

    Returns:
        The splits; the folder of each; and what is left out, a phrase each.

    Raises:
        UserError: if there are no class folders, or a split has classes that train lacks.
    """
    if class_level < 1:
        raise UserError(f"--class_level must be >= 1, got {class_level}")
    split_of = split_folders(found)
    depth = len(Path(next(iter(split_of))).parts)
    rows, stray = defaultdict(list), 0
    for folder, images in found.images.items():
        parts = Path(folder).parts
        split, below = split_of.get("/".join(parts[:depth])), parts[depth:]
        if split is None or len(below) < class_level:
            stray += len(images)
        else:
            rows[split] += [(f"{folder}/{image}", below[class_level - 1]) for image in images]
    if not rows:
        advice = [*found.tables(), f"sort the images into folders, one a class: {found.path}/CLASS/IMAGE.jpg"]
        raise folder_error(found, "no image lies in a class folder", advice[0])
    classes = {split: {label for _, label in of_split} for split, of_split in rows.items()}
    for split, of_split in classes.items():
        if unknown := of_split - classes.get("train", of_split):
            what = f"the split {split} has classes that train lacks: {listed(sorted(unknown))}"
            raise folder_error(found, what, "give both the same class folders")
    names = sorted(set().union(*classes.values()))
    splits = {split: to_dataset(found.path, sorted(rows[split]), names) for split in SPLITS if split in rows}
    skipped = [f"{counted(stray, 'image')} outside of class folders (--class_level {class_level})"]
    folders = {split: str(found.path / folder) for folder, split in split_of.items()}
    return DatasetDict(splits), folders, found.skipped() + skipped * (stray > 0)


def split_folders(found: Listing) -> dict[str, str]:
    """The folders that hold the class folders, each with its split; `train` where there are no splits."""
    inner = defaultdict(set)  # the sub-folders of each folder that have images in or below them
    for folder in found.images:
        while folder:
            parent = folder.rpartition("/")[0]
            inner[parent].add(folder)
            folder = parent
    word = lambda folder: SPLIT_OF_WORD.get(folder.rpartition("/")[2].lower())
    base, *more = sorted(inner[""]) or [""]
    if more or not inner[base] or word(base):
        base = ""
    splits = {folder: word(folder) for folder in sorted(inner[base]) if word(folder)}
    if any(inner[folder] for folder in splits) or len(splits) == len(inner[base]) > 0:
        return splits
    return {base: "train"}  # "train" and "test" may be classes, too


def to_dataset(path: Path, rows: list[tuple[str, str]], names: list[str]) -> Dataset:
    """Rows of (file, class) pairs; the files are relative to `path`."""
    kind, folder = ClassLabel(names=names), str(path.resolve())
    labels = kind.str2int([label for _, label in rows])
    rows = rows_of_files([f"{folder}/{file}" for file, _ in rows], NamedFiles(folder), {})
    return rows.add_column("label", labels, feature=kind)


def folder_error(found: Listing, what: str, advice: str) -> UserError:
    """An error: what is wrong with a folder, what lies there, what can be read, and what to do."""
    counts = Counter(map(suffix_of, chain(found.files, *found.images.values())))
    there = listed((f"{suffix} ({count:,})" for suffix, count in sorted(counts.items())), 10) or "nothing"
    skipped = "".join(f"\nleft out: {phrase}" for phrase in found.skipped())
    return UserError(f"{found.path}: {what}. Files there: {there}{skipped}\n{READABLE}\nTry: {advice}")


def command(path: Path) -> str:
    return f"--dataset_name {shlex.quote(str(path))}"


def suffix_of(name: str) -> str:
    return os.path.splitext(name)[1].lower()

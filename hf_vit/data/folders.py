"""Folders of images: one walk lists them, and the folder below the split is the class: [WRAPPER/][SPLIT/]CLASS/.../IMAGE."""

import os
import shlex
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import pyarrow as pa
from datasets import ClassLabel, Dataset, DatasetDict

from hf_vit.data.image_files import IMAGE_SUFFIXES, UNREAD_SUFFIXES, AllowedFiles, rows_of_files
from hf_vit.system.errors import UserError
from hf_vit.system.progress import progress_bar
from hf_vit.system.text import counted, listed, printable


SPLIT_OF_WORD = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "val", "valid", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval"), "test"),
}  # the names of splits, in any case
SPLITS = tuple(dict.fromkeys(SPLIT_OF_WORD.values()))
TABLE_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
SYSTEM_FOLDERS = {"$RECYCLE.BIN", "System Volume Information", "lost+found", "@eaDir", "#recycle"}
TREE = 10  # lines of an error that say what lies in a folder
READABLE = """--dataset_name reads
  USER/NAME      a data set of the Hub
  DATA_FOLDER    with Parquet, Arrow or tar files, from save_to_disk, or with images and metadata.csv, .jsonl or .parquet
  IMAGE_FOLDER   CLASS/.../IMAGE.jpg, or train/CLASS/... and test/CLASS/...; --class_level 2 for classes one folder deeper
  TABLE          .csv, .tsv, .json, .jsonl or .parquet, with a column of paths (--image_column) and of labels (--label_column)"""


@dataclass
class Listing:
    """What lies below a folder. Paths are relative to it, with `/`; "" is the folder itself.

    Args:
        path: the folder, as the user named it.
        images: the names of the images in each folder that has some.
        unread: the names of images of formats that are not read, likewise.
        files: all other files.
        links: links to folders, which are not followed.
    """

    path: Path
    images: dict[str, list[str]] = field(default_factory=dict)
    unread: dict[str, list[str]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)

    def skipped(self) -> list[str]:
        """What no script reads, a phrase each."""
        counts = sorted(Counter(map(suffix_of, chain(*self.unread.values()))).items())
        phrases = [f"{count:,} {suffix} files: save them as .jpg or .png" for suffix, count in counts]
        return phrases + [f"links to folders, which are not followed: {listed(self.links)}"] * bool(self.links)


def list_folder(path: Path) -> Listing:
    """Lists all files below a folder in one walk. Hidden files and folders and those of operating systems are passed over; links to
    files are followed, links to folders are not."""
    found, waiting = Listing(path), [""]
    with progress_bar(f"listing {path.name}", "images") as bar:
        while waiting:
            folder = waiting.pop()
            images, unread = [], []
            with os.scandir(path / folder) as entries:
                for entry in entries:
                    name, location = entry.name, f"{folder}/{entry.name}" if folder else entry.name
                    if name.startswith(".") or name in SYSTEM_FOLDERS:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if not name.startswith("__"):  # __MACOSX
                            waiting.append(location)
                    elif (suffix := suffix_of(name)) in IMAGE_SUFFIXES and entry.is_file():  # no pipe or device
                        images.append(name)
                    elif entry.is_symlink() and entry.is_dir():
                        found.links.append(location)
                    elif suffix in UNREAD_SUFFIXES:
                        unread.append(name)
                    else:
                        found.files.append(location)
            found.images |= {folder: images} if images else {}
            found.unread |= {folder: unread} if unread else {}
            bar.update(len(images))
    return found


def class_folders(found: Listing, class_level: int | None) -> tuple[DatasetDict, dict[str, str], list[str]]:
    """The splits of a folder of images, with the columns `image` (undecoded) and `label`, in the order of the files' paths.

    Args:
        class_level: which folder below the split is the class. None is the first, unless these look like splits.

    Returns:
        The splits; the folder of each; and what is left out, a phrase each.

    Raises:
        UserError: if there are no class folders, or which folders are the classes cannot be told.
    """
    split_of, level = split_folders(found), 1 if class_level is None else class_level
    if level < 1:
        raise UserError(f"--class_level must be >= 1, got {level}")
    depth = len(Path(next(iter(split_of))).parts)
    rows, left_out, lost = defaultdict(list), Counter(), defaultdict(set)
    inner = defaultdict(lambda: defaultdict(set))  # {split: {class: its folders}}
    for folder in found.images | found.unread:
        parts = Path(folder).parts
        split, below = split_of.get("/".join(parts[:depth])), parts[depth:]
        images = [f"{folder}/{image}" for image in found.images.get(folder, ())]
        if split is None or len(below) < level:
            left_out[folder] += len(images)
        else:
            rows[split] += [(image, below[level - 1]) for image in images]
            lost[split].add(below[level - 1])
            inner[split][below[0]].update(below[1:2])
    stray = sum(left_out[folder] for folder, split in split_of.items() if split in rows)
    if stray >= sum(map(len, rows.values())):
        what = (
            f"{counted(stray, 'image') if stray else 'all images'} in no class folder"
            if found.images
            else "no image that is read"
        )
        raise folder_error(found, what)
    if class_level is None:
        refuse_folders_like_splits(found, inner)
    classes = {split: {label for _, label in of_split} for split, of_split in rows.items()}
    for split, of_split in classes.items():
        if unread := lost[split] - of_split:
            raise folder_error(found, f"no image of {listed(sorted(unread))} is read: save them as .jpg or .png")
        if unknown := of_split - classes.get("train", of_split):
            folder = next(folder for folder in split_of if split_of[folder] == "train")
            advice = (
                f"give both the same class folders, or read the training images alone: {command(found.path / folder)}"
            )
            what = f"the split {split} has classes that train lacks: {listed(sorted(unknown))}"
            raise folder_error(found, what, advice)
    names, skipped = sorted(set().union(*classes.values())), []
    splits = {split: to_dataset(found.path, sorted(rows[split]), names) for split in SPLITS if split in rows}
    if left_out.total():
        places = listed(found.path / folder for folder in +left_out)
        skipped.append(
            f"{counted(left_out.total(), 'image')} above the class folders (--class_level {level}), in {places}"
        )
    return DatasetDict(splits), {split: str(found.path / folder) for folder, split in split_of.items()}, skipped


def split_folders(found: Listing) -> dict[str, str]:
    """The folders that hold the class folders, each with its split; `train` where there are no splits.

    Raises:
        UserError: if the folders are splits without classes, or some may be splits or classes.
    """
    inner = defaultdict(set)  # the sub-folders of each folder that have images in or below them
    for folder in found.images | found.unread:
        while folder:
            parent = folder.rpartition("/")[0]
            inner[parent].add(folder)
            folder = parent
    word = lambda folder: SPLIT_OF_WORD.get(folder.rpartition("/")[2].lower())
    base, *more = sorted(inner[""]) or [""]
    if more or not inner[base] or word(base):
        base = ""
    splits = {folder: word(folder) for folder in sorted(inner[base]) if word(folder)}
    others = sorted(inner[base] - splits.keys())
    if not any(inner[folder] for folder in splits):  # "train" and "test" may be classes, too
        if splits and not others:
            raise folder_error(found, f"{listed(splits)} hold no class folders")
        return {base: "train"}
    if doubtful := [folder for folder in others if inner[folder]]:
        advice = f"rename {doubtful[0]} or move it away"
        raise folder_error(found, f"{listed(doubtful)} beside {listed(splits)} may be a split or a class", advice)
    return splits


def refuse_folders_like_splits(found: Listing, inner: dict[str, dict[str, set[str]]]):
    """Raises UserError if all would-be classes of a split hold the same two or more folders, as training_set/cat and fold_1/cat do.

    Args:
        inner: the folders in each class of each split.
    """
    for classes in inner.values():
        same, *others = classes.values()
        if len(same) > 1 and all(other == same for other in others):
            names = listed(sorted(classes))
            advice = f"--class_level 2 if {listed(sorted(same))} are the classes, --class_level 1 if {names} are; splits are called {', '.join(SPLIT_OF_WORD)}"
            raise folder_error(found, f"{names} all hold the same folders ({listed(sorted(same))})", advice)


def to_dataset(path: Path, rows: list[tuple[str, str]], names: list[str]) -> Dataset:
    """Rows of (file, class) pairs; the files are relative to `path`."""
    kind, allowed = ClassLabel(names=names), AllowedFiles(path.resolve().as_posix(), links=True)  # of our own listing
    labels = pa.array(kind.str2int([label for _, label in rows]), pa.int64())
    paths = [f"{allowed.folder}/{file}" for file, _ in rows]
    return rows_of_files(paths, allowed, {"label": labels}, label=kind)


def folder_error(found: Listing, what: str, advice: str | None = None) -> UserError:
    """An error: what is wrong with a folder, what lies there, what can be read, and what to do."""
    images = (f"{folder}/{name}" for some in (found.images, found.unread) for folder in some for name in some[folder])
    files = chain(found.files, images)
    tops = ((file.lstrip("/").partition("/"), suffix_of(file)) for file in files)
    counts = Counter(
        f"{top}/" if below else top if suffix not in IMAGE_SUFFIXES else suffix for (top, below, _), suffix in tops
    )
    lines = [f"{printable(name)} ({count:,})" for name, count in sorted(counts.items())] or ["nothing"]
    lines = lines if len(lines) <= TREE else [*lines[: TREE - 1], f"... and {len(lines) - TREE + 1:,} more"]
    left_out = "".join(f"\nleft out: {phrase}" for phrase in found.skipped())
    tree = "\n  ".join([f"{found.path}: {what}. Files there:", *lines])
    return UserError(f"{tree}{left_out}\n{READABLE}\nTry: {advice or likeliest(found)}")


def likeliest(found: Listing) -> str:
    """What a folder that cannot be read as it is most likely needs."""
    by_depth = sorted(found.files, key=lambda file: (file.count("/"), file))
    if tables := [file for file in by_depth if suffix_of(file) in TABLE_SUFFIXES]:
        return command(found.path / tables[0])
    if archives := [file for file in by_depth if suffix_of(file) in (".zip", ".gz", ".tar", ".7z", ".rar")]:
        return f"unpack {archives[0]}"
    return f"sort the images into folders, one a class: {found.path}/CLASS/IMAGE.jpg"


def command(path: Path) -> str:
    return f"--dataset_name {shlex.quote(str(path))}"


def suffix_of(name: str) -> str:
    return os.path.splitext(name)[1].lower()

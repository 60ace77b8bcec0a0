"""Folders of images: one walk lists the files, and the folders above a file say its split and its class.

The data folder, or a single folder that wraps it, holds the folders of the splits, or else those of the classes. The class of an
image is the first folder below its split, however deep the image lies; `imagefolder` of `datasets` takes the innermost folder, for
which cat/indoor and dog/indoor are one class.
"""

import hashlib
import os
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from datasets import ClassLabel, Dataset, DatasetDict, DatasetInfo, Features
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

from hf_vit.data.image_files import AllowedFiles, RestrictedImage
from hf_vit.system.errors import UserError
from hf_vit.system.progress import progress_bar, warn


SPLIT_OF_WORD = {
    **dict.fromkeys(("train", "training", "trainset", "trainingset"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "validate", "dev", "valset", "validationset"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation", "testset", "evalset"), "test"),
}  # the split that a word in the name of a file or folder stands for
LIKE_SPLITS = re.compile(
    r"(train|training|trainval|test|testing|val|valid|validation)(data|dataset|sets?|images?|imgs?|photos)?\d*|trn|tst|tr|te|va",
    re.IGNORECASE,
)
UNLIKE_CLASSES = re.compile(
    r"(fold|split|part|batch)[-_ ]?\d+|original|augmented|images|annotations|masks|trimaps|JPEGImages|Segmentation(Class|Object)",
    re.IGNORECASE,
)
# Folders that no user made.
OF_SYSTEMS = {"$RECYCLE.BIN", "System Volume Information", "lost+found", "@eaDir", "#recycle"}
# Files of the formats in `image_files.FORMATS`, whatever the case of their suffix, and other images.
IMAGE_SUFFIXES = {".apng", ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
RAW_SUFFIXES = {".arw", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".raf", ".rw2"}
UNREAD_SUFFIXES = {*ImageFolder.EXTENSIONS, *RAW_SUFFIXES, ".avif", ".heic", ".heif", ".jxl"} - IMAGE_SUFFIXES
NO_IMAGES = {  # files that lie beside images
    ".bak", ".cfg", ".db", ".doc", ".docx", ".gz", ".htm", ".html", ".ini", ".ipynb", ".lnk", ".log", ".lst", ".m", ".mat", ".md",
    ".npy", ".npz", ".pbtxt", ".pdf", ".pkl", ".py", ".pyc", ".rst", ".sh", ".sqlite", ".toml", ".txt", ".url", ".xls", ".xlsx",
    ".xml", ".xmp", ".yaml", ".yml",
}  # fmt: skip
DATA_SUFFIXES = {".arrow", ".csv", ".json", ".jsonl", ".parquet", ".tar", ".tsv", ".zip"}


@dataclass
class FolderScan:
    """What lies below a folder, hidden files aside. Paths are relative to it, with `/`; "" is the folder itself.

    Args:
        images: names of the images in each folder that has some.
        unread: for each folder, how many images have which suffix of a format that is not read.
        folders: all folders.
        links: links to folders, which are not followed.
        data_files: tables, archives, and other files that hold data sets.
        others: how many of the remaining files have which suffix.
    """

    path: Path
    images: dict[str, list[str]] = field(default_factory=dict)
    unread: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))
    folders: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    data_files: list[str] = field(default_factory=list)
    others: Counter = field(default_factory=Counter)

    def count(self, folder: str = "") -> int:
        """The number of images in a folder or below it."""
        return sum(len(names) for inner, names in self.images.items() if lies_in(inner, folder))

    def count_unread(self, folder: str = "") -> str:
        """Images of other formats in a folder or below it, in words, such as "2 .heic"; empty if there are none."""
        return counted(sum((found for inner, found in self.unread.items() if lies_in(inner, folder)), Counter()))


def split_of_name(name: str) -> str | None:
    """The split that the first such word in the name of a file or folder stands for, or None: `Testing`, `train2017`, `seg_train`,
    `TrainImages`."""
    words = [word.lower() for word in (name, *re.split(r"[-._ 0-9]|(?<=[a-z])(?=[A-Z])", name))]
    return next((SPLIT_OF_WORD[word] for word in words if word in SPLIT_OF_WORD), None)


def is_like_split(name: str) -> bool:
    """Whether a name says no more than a split, as `train`, `train2017`, `Test Images` and `trainval` do."""
    return name.lower() in SPLIT_OF_WORD or (
        len(name) > 2 and LIKE_SPLITS.fullmatch(re.sub("[-_. ]", "", name)) is not None
    )


def lies_in(inner: str, folder: str) -> bool:
    return not folder or inner == folder or inner.startswith(f"{folder}/")


def counted(suffixes: Counter) -> str:
    return ", ".join(f"{count:,} {suffix or 'without a suffix'}" for suffix, count in sorted(suffixes.items()))


def listed(names, most: int = 5) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (" ..." if len(names) > most else "")


def scan_folder(path: Path) -> FolderScan:
    """Lists all files below a folder in one walk.

    As for `datasets`, names that begin with `.`, and folders that begin with `__` (`__MACOSX`), are hidden, and so are those of
    operating systems (`OF_SYSTEMS`); links to files are followed, links to folders are not.
    """
    scan, waiting = FolderScan(path), [""]
    with progress_bar(f"listing {path.name}", "images") as bar:
        while waiting:
            folder = waiting.pop()
            images = []
            with os.scandir(path / folder) as entries:
                for entry in entries:
                    name, suffix = entry.name, os.path.splitext(entry.name)[1].lower()
                    location = f"{folder}/{name}" if folder else name
                    if name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if not name.startswith("__") and name not in OF_SYSTEMS:
                            scan.folders.append(location)
                            waiting.append(location)
                    elif entry.is_dir():
                        scan.links.append(location)
                    elif suffix in IMAGE_SUFFIXES:
                        if entry.is_file():  # no pipe, device or broken link
                            images.append(name)
                    elif suffix in UNREAD_SUFFIXES:
                        scan.unread[folder][suffix] += 1
                    elif suffix in DATA_SUFFIXES:
                        scan.data_files.append(location)
                    else:
                        scan.others[suffix] += 1
            if images:
                scan.images[folder] = images
                bar.update(len(images))
    return scan


def image_folder_splits(scan: FolderScan) -> DatasetDict:
    """The splits of a folder of images, with the columns `image` (undecoded) and `label`, in the order of the files' paths.

    A warning says what is left out and, where folders wrap the class folders or lie in them, what was taken for the classes.

    Raises:
        ValueError: if images lie in no class folder (it says which layout was found and which one is wanted), or in a run.
    """
    if runs := [file.rpartition("/")[0] for file in scan.data_files if name_of(file) == "metrics.jsonl"]:
        raise UserError(
            f"{scan.path / runs[0]} is a run of train.py, whose pictures would become images to train on: move it out of "
            f"{scan.path}"
        )
    below = subfolders_with_images(scan)
    bases, wrapped = find_bases(scan, below)
    class_of = {  # class folder: (split, class)
        folder: (split, name_of(folder)) for split in bases for base in bases[split] for folder in below[base]
    }
    drop_unlabelled_splits(scan, bases, class_of)
    names = sorted({name for _, name in class_of.values()})
    notes = notes_on_empty_folders(scan, bases, below, names) + notes_on_doubtful_classes(scan, class_of, below)

    refuse_inner_splits(scan, class_of, below)
    rows, left_out, inner = defaultdict(list), Counter(), set()
    for folder, images in scan.images.items():
        owner = folder
        while owner and owner not in class_of:
            owner = owner.rpartition("/")[0]
        if owner not in class_of:
            left_out[folder] += len(images)
            continue
        if folder != owner:
            inner.add(folder[len(owner) + 1 :])
        split, name = class_of[owner]
        rows[split] += [(f"{folder}/{image}", name) for image in images]
    if left_out:
        places = listed(f"{count:,} in {scan.path / folder}" for folder, count in left_out.most_common())
        notes.append(f"images in no class folder are left out: {places}")
        if sum(left_out[base] for split in rows for base in bases[split]) > sum(map(len, rows.values())):
            raise UserError(
                f"{scan.path}: most images lie in no class folder: {places}; wanted {scan.path.name}/CLASS/IMAGE"
            )
    if inner or wrapped or not SPLIT_OF_WORD.keys().isdisjoint(map(str.lower, names)):
        within = f"; folders inside them, such as {min(inner)}, make no classes" if inner else ""
        folders = listed(str(scan.path / base) for split in bases if split in rows for base in bases[split])
        notes.append(f"the classes are the folders in {folders}: {listed(names, 10)}{within}")
    notes += [
        f"the split {split} is that of {listed(folders)}" for split, folders in bases.items() if len(folders) > 1
    ]
    for note in notes:
        warn(f"{scan.path}: {note}")
    return DatasetDict({split: to_dataset(scan.path, sorted(rows[split]), names) for split in bases if rows[split]})


def class_folder_names(scan: FolderScan) -> set[str]:
    """The names of the class folders, of all splits; none if images lie in no such folders, or all in one."""
    below = subfolders_with_images(scan)
    try:
        bases, _ = find_bases(scan, below)
    except ValueError:
        return set()
    names = {name_of(folder) for folders in bases.values() for base in folders for folder in below[base]}
    return names if len(names) > 1 else set()


def subfolders_with_images(scan: FolderScan) -> dict[str, list[str]]:
    """For each folder, its sub-folders with images in them or below them, sorted."""
    below = defaultdict(set)
    for folder in scan.images:
        while folder:
            parent = folder.rpartition("/")[0]
            below[parent].add(folder)
            folder = parent
    return defaultdict(list, {folder: sorted(found) for folder, found in below.items()})


def find_bases(scan: FolderScan, below: dict[str, list[str]]) -> tuple[dict[str, list[str]], bool]:
    """The folders whose sub-folders are the classes, by split ("train" if there are no splits), and whether other folders wrap
    some of them.

    Args:
        below: for each folder, its sub-folders with images in them or below them.

    Raises:
        ValueError: if the folders are splits, and no class folders are in them.
    """
    root = ""  # or the only folder of folders, as archives unpack
    while len(below[root]) == 1 and below[only := below[root][0]]:
        if len(scan.images.get(root, ())) > scan.count(only):
            break
        if split_folders(scan, below, root) and not split_folders(scan, below, only):
            break
        root = only
    splits = split_folders(scan, below, root)
    if not splits:
        splits_named = {split_of_name(name) or name for name in map(name_of, below[root])}
        # Test 1 and Test 2 may be classes.
        if len(splits_named) > 1 and all(
            is_like_split(name_of(folder)) and not below[folder] for folder in below[root]
        ):
            raise UserError(
                f"{scan.path}: the images of {listed(below[root])} ({scan.count():,}) lie in no class folders; wanted "
                f"{scan.path / below[root][0]}/CLASS/IMAGE"
            )
        return {"train": [root]}, root != ""

    # training_set/training_set/cat: a split's only folder wraps its classes, unless it is a class of another split.
    is_wrapper = lambda folder: len(below[folder]) == 1 and folder not in scan.images and below[below[folder][0]]
    folders = [folder for of_split in splits.values() for folder in of_split]
    classes = {name_of(inner) for folder in folders if not is_wrapper(folder) for inner in below[folder]}
    bases, wrapped = {}, root != ""
    for split, of_split in splits.items():
        bases[split] = []
        for folder in of_split:
            while is_wrapper(folder) and name_of(below[folder][0]) not in classes:
                folder, wrapped = below[folder][0], True
            bases[split].append(folder)
    return bases, wrapped


def split_folders(scan: FolderScan, below: dict[str, list[str]], root: str) -> dict[str, list[str]]:
    """The sub-folders of `root` that are splits, by split; empty if its sub-folders are classes.

    A name such as `val`, `Testing`, `train2017` or `seg_train` is that of a split if folders with images are in it: "train" and
    "test" may be classes, too. Beside folders of other names, these are splits if they are as many, and one is for training.

    Raises:
        ValueError: if one folder of such a name is beside others that hold folders, too: it may be a split, or a class.
    """
    splits, others = defaultdict(list), []
    for folder in below[root]:
        split = split_of_name(name_of(folder))
        if split is None:
            others.append(folder)
        else:
            splits[split].append(folder)
    held_out = [folder for folder in others if name_of(folder).lower() == "holdout"]
    if held_out and "test" not in splits:
        splits["test"] = held_out
        others = [folder for folder in others if folder not in held_out]
    for split, folders in splits.items():  # `test` rather than `test-multiple_fruits` beside it
        splits[split] = [folder for folder in folders if name_of(folder).lower() in SPLIT_OF_WORD] or folders
    if sum(bool(below[folder]) for folders in splits.values() for folder in folders) < max(1, len(others)):
        return {}
    if others and "train" not in splits:
        return {}
    alike = [folder for folder in others if len(below[folder]) > 1]
    if alike and len(splits) < 2:
        if any(" " in name_of(folder) for folder in splits["train"]):  # `train station` beside `bus stop`
            return {}
        raise UserError(
            f"{scan.path}: {listed(splits['train'])} may be a split or a class, as {listed(alike)} beside it holds folders, too: "
            "if it is a class, rename it; if it is a split, name the other validation or test, or move it away"
        )
    return {split: splits[split] for split in ("train", "validation", "test") if split in splits}


def drop_unlabelled_splits(scan: FolderScan, bases: dict[str, list[str]], class_of: dict[str, tuple[str, str]]):
    """Takes a test split without class folders, or with one folder that is no class of the training split, as competitions hand
    it out, out of `class_of`.

    Raises:
        ValueError: if the training or the validation split has no such class, or a test split with several folders.
    """
    classes = {split: {name for of, name in class_of.values() if of == split} for split in bases}
    trained = classes.get("train") or set().union(*classes.values())
    folded = {name.casefold() for name in trained}
    for split, found in classes.items():
        if found & trained:
            continue
        in_capitals = sorted(name for name in found if name.casefold() in folded)
        if split != "test" or not trained or len(found) > 1 or in_capitals:
            folder = bases[split][0]
            first, images = next(item for item in scan.images.items() if lies_in(item[0], folder))
            known = f"of the training classes ({listed(sorted(trained), 3)})" if trained else "of a class"
            known += f"; {in_capitals[0]} differs only in capitals" if in_capitals else ""
            way_out = f", or move {folder} away to hold out a part of train" if split != "train" else ""
            raise UserError(
                f"{scan.path}: the images of {folder or 'this folder'} ({scan.count(folder):,}, such as "
                f"{scan.path / first / min(images)}) lie in no folder {known}; wanted {scan.path / folder}/CLASS/"
                f"{min(images)}: sort them into such folders{way_out}"
            )
        for folder in [folder for folder, (of, _) in class_of.items() if of == split]:
            del class_of[folder]


def refuse_inner_splits(scan: FolderScan, class_of: dict[str, tuple[str, str]], below):
    """Raises ValueError if class folders hold the folders of several splits, as cat/train and cat/test do."""
    held = {folder: {split_of_name(name_of(inner)): inner for inner in below[folder]} for folder in class_of}
    for folder, inner in held.items():
        if {"train", "test"} <= inner.keys() or {"train", "validation"} <= inner.keys():
            shown = listed(sorted(inner[split] for split in inner if split is not None))
            raise UserError(
                f"{scan.path}: the class folder {folder} holds splits ({shown}), which would all be trained on; wanted the splits "
                f"above the classes, such as {scan.path / 'train' / name_of(folder)}"
            )


def notes_on_empty_folders(scan: FolderScan, bases, below, names: list[str]) -> list[str]:
    """Sentences on images of other formats, links, and folders that make no classes since no image in them is read.

    Raises:
        ValueError: if all images of a class are of formats that are not read.
    """
    notes, empty = [], []
    for base in (base for folders in bases.values() for base in folders):
        found = {folder for folder in scan.folders if folder.rpartition("/")[0] == base} - {*below[base]}
        for folder in sorted(found):
            unread = scan.count_unread(folder)
            if unread and name_of(folder) not in names:
                raise UserError(
                    f"{scan.path / folder} holds {unread} files and no image that is read: save them as .jpg or .png, or "
                    "move the folder away"
                )
            empty.append(folder)
    if unread := scan.count_unread():
        notes.append(f"{unread} files are not read: save them as .jpg or .png")
    if others := counted(Counter({suffix: count for suffix, count in scan.others.items() if suffix not in NO_IMAGES})):
        notes.append(f"{others} files are left alone: if they are images, give them the suffix of their format")
    if empty:
        notes.append(f"{listed(empty)} hold no images")
    if scan.links:
        notes.append(f"links to folders are not followed: {listed(sorted(scan.links))}")
    if archives := sorted(file for file in scan.data_files if file.endswith(".zip")):
        notes.append(f"archives beside images are not read: {listed(archives)}")
    return notes


def notes_on_doubtful_classes(scan: FolderScan, class_of: dict[str, tuple[str, str]], below) -> list[str]:
    """A sentence on classes whose names or folders are rather those of splits, or of other parts of a data set.

    Raises:
        ValueError: if one is named like a split, and another holds folders of the same names, as trn/cat, tst/cat and so on.
    """
    inner_of = {folder: set(map(name_of, below[folder])) for folder in class_of}
    like_splits = [
        folder for folder in class_of if LIKE_SPLITS.fullmatch(name_of(folder)) and len(inner_of[folder]) > 1
    ]
    has_splits = len({split for split, _ in class_of.values()}) > 1
    alike = {
        name_of(folder): inner_of[folder] & inner_of[other]
        for folder in (() if has_splits else like_splits)
        for other in class_of
        if name_of(other) != name_of(folder) and len(inner_of[folder] & inner_of[other]) > 1
    }
    if alike:
        same = listed(sorted(next(iter(alike.values()))), 3)
        raise UserError(
            f"{scan.path}: {listed(sorted(alike))} and other folders hold the same folders ({same}), as splits do; wanted the names train, validation "
            "and test for splits, and others for classes: rename them"
        )
    doubtful = sorted({name for _, name in class_of.values() if UNLIKE_CLASSES.fullmatch(name)})
    if not doubtful:
        return []
    advice = "if they are none, give --dataset_name the folder that holds the class folders"
    return [f"folders of such names are taken for classes: {listed(doubtful)}; {advice}"]


def to_dataset(path: Path, rows: list[tuple[str, str]], names: list[str]) -> Dataset:
    """A data set of (file, class) pairs; the files are relative to `path`."""
    index_of = {name: index for index, name in enumerate(names)}
    try:
        files = pa.array([f"{path.as_posix()}/{file}" for file, _ in rows], pa.string())
    except UnicodeEncodeError as error:
        raise UserError(f"{path}: the name of a file is no UTF-8 ({error.object!r}): rename it") from error
    images = pa.StructArray.from_arrays([pa.nulls(len(rows), pa.binary()), files], ["bytes", "path"])
    labels = pa.array([index_of[name] for _, name in rows], pa.int64())
    feature = RestrictedImage(decode=False, files=AllowedFiles(str(path), links=True))  # the paths are our own listing
    features = Features(image=feature, label=ClassLabel(names=names))
    digest = hashlib.sha256(repr(names).encode(errors="surrogateescape"))
    for buffer in (*files.buffers(), *labels.buffers()):
        digest.update(buffer or b"")
    table = pa.table({"image": images, "label": labels})
    return Dataset(table, DatasetInfo(features=features), fingerprint=digest.hexdigest()[:16])


def name_of(folder: str) -> str:
    return folder.rpartition("/")[2]

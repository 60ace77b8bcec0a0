"""Loads data sets from the Hub, local folders, data files and tables: splits of rows whose images are not yet decoded."""

import glob
from collections import Counter, defaultdict
from pathlib import Path

from datasets import DatasetDict, Image, IterableDatasetDict, load_dataset, load_from_disk
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from huggingface_hub import DatasetCard
from PIL import Image as PILImage
from transformers.utils import logging
from yaml import YAMLError

from hf_vit.data.image_files import AllowedFiles, hub_files, restrict_files
from hf_vit.system.escapes import as_license
from hf_vit.system.hub_names import refuse_mistyped_path


logger = logging.get_logger(__name__)

EMBEDDED = {"fashion-mnist-mini": Path(__file__).parents[2] / "recipes" / "data" / "fashion-mnist-mini"}
FILE_FORMATS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".tar": "webdataset",
}
TABLES = ("csv", "json")  # formats that name image files and do not hold them
SPLIT_OF_WORD = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}  # the split that the first word of a file's or folder's name stands for
IMAGE_SUFFIXES = tuple(ImageFolder.EXTENSIONS)  # of the images that `datasets` finds in a folder
UNREAD_SUFFIXES = (".avif", ".dng", ".heic", ".heif", ".jxl")  # of images that it does not find


def load_splits(name: str, config: str | None = None, streaming: bool = False) -> DatasetDict | IterableDatasetDict:
    """The splits of a data set, their images undecoded and restricted to its own files (`image_files.AllowedFiles`).

    Args:
        name: a Hub id; a local folder (class folders of images, Parquet files, WebDataset tar shards, CSV tables named after
            their split, `save_to_disk`); a Parquet, Arrow, CSV, JSON or tar file; or the name of an embedded data set. Tables
            name image files in or below their own folder.
        config: the configuration of a Hub data set that has several.
        streaming: read during training, without a local copy.

    Raises:
        ValueError: if the data does not exist or cannot be read.
    """
    path = EMBEDDED.get(name, Path(name).expanduser())
    if name in EMBEDDED and not path.is_dir():
        raise ValueError(f"{name} lies in recipes/data of the repository, which is not beside this installation")
    if not path.exists():
        refuse_mistyped_path(name, "--dataset_name")
        try:
            return restrict_files(load_dataset(name, config, streaming=streaming), hub_files(name))
        except OSError as error:  # no such repository, or no connection to the Hub
            raise ValueError(
                f"--dataset_name {name}: there is no such folder or file here ({Path.cwd()}), and the Hub does not give it: {error}"
            ) from error
    path = path.resolve()  # `datasets` resolves the paths of the files it finds
    if path.is_file():
        return _load_files([path], streaming)
    return _load_folder(path, config, streaming)


def dataset_license(name: str) -> str | None:
    """The licence in the data set's card (README.md in its folder or on the Hub); None if there is none."""
    path = EMBEDDED.get(name, Path(name).expanduser())
    try:
        if not path.exists():
            card = DatasetCard.load(name)
        elif (text := (path / "README.md").read_text(encoding="utf-8")).startswith("---"):
            card = DatasetCard(text)
        else:
            return None
    except (
        OSError,
        ValueError,
        YAMLError,
    ):  # no such data set, no card, an unreadable card, or no connection to the Hub
        return None
    return as_license(card.data.to_dict().get("license"))


def _load_folder(path: Path, config: str | None, streaming: bool):
    """A folder written by `save_to_disk`, of tar shards, of tables, or of images."""
    if (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
        saved = load_from_disk(str(path))
        splits = saved if isinstance(saved, DatasetDict) else DatasetDict(train=saved)
        return restrict_files(splits, AllowedFiles(str(path)))
    has_images = any(file.suffix.lower() in IMAGE_SUFFIXES for file in path.rglob("*"))
    shards = sorted(path.glob("*.tar"))
    if shards and not has_images:
        return _load_files(shards, streaming)
    tables = sorted(
        file for file in path.glob("*.csv") if file.name != "metadata.csv"
    )  # which belongs to an ImageFolder
    if tables:
        splits = _load_files(tables, streaming)
        features = (next(iter(splits.values())).features or {}).values()
        if not has_images or any(isinstance(feature, Image) for feature in features):
            return splits  # otherwise the tables name no images: they are not the data set
    return _load_image_folder(path, config, streaming)


def _load_files(files: list[Path], streaming: bool):
    """Data files of one format. With several files, the first word of a file's name decides its split."""
    suffix = files[0].suffix
    if suffix not in FILE_FORMATS:
        raise ValueError(f"{files[0]} is no data file; wanted one of {', '.join(FILE_FORMATS)}, or a folder of images")
    files_of_split, unknown = defaultdict(list), []
    for file in files:
        word = file.stem.replace("_", "-").partition("-")[0].lower()
        if word not in SPLIT_OF_WORD:
            unknown.append(file.name)
        files_of_split[SPLIT_OF_WORD.get(word, "train") if len(files) > 1 else "train"].append(str(file))
    if len(files_of_split) > 1 and unknown:
        raise ValueError(
            f"{files[0].parent}: {', '.join(unknown)} are of no split; wanted names that begin with {', '.join(SPLIT_OF_WORD)}"
        )
    kind = FILE_FORMATS[suffix]
    is_table, options = kind in TABLES, {"sep": "\t"} if suffix == ".tsv" else {}
    try:
        splits = load_dataset(kind, data_files=dict(files_of_split), streaming=streaming and not is_table, **options)
    except Exception as error:  # each format raises its own
        names = ", ".join(file.name for file in files[:3])
        raise ValueError(f"{files[0].parent}: {names} cannot be read as {kind}: {error.__cause__ or error}") from error
    if is_table:
        splits = _cast_paths_to_images(splits)
    splits = restrict_files(splits, AllowedFiles(str(files[0].parent)))
    if streaming and is_table:  # the table is small, the files it names are not
        return IterableDatasetDict({name: rows.to_iterable_dataset() for name, rows in splits.items()})
    return splits


def _load_image_folder(path: Path, config: str | None, streaming: bool):
    """Class folders, possibly inside split folders, or Parquet files, as `datasets` finds them."""
    _warn_of_unread_images(path)
    folders = [folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith((".", "__"))]
    are_splits = folders and all(folder.name.lower() in SPLIT_OF_WORD for folder in folders)
    if are_splits and any(folder.name != folder.name.lower() for folder in folders):  # `datasets` knows no "Train"
        files_of_split = defaultdict(list)
        for folder in folders:
            files_of_split[SPLIT_OF_WORD[folder.name.lower()]].append(f"{glob.escape(str(folder))}/**")
        splits = load_dataset("imagefolder", data_files=dict(files_of_split), streaming=streaming)
    else:
        splits = load_dataset(str(path), config, streaming=streaming)
    lists_files = next(iter(splits.values())).info.builder_name == "imagefolder" and not any(path.rglob("metadata.*"))
    return restrict_files(splits, AllowedFiles(str(path), links=lists_files))


def _warn_of_unread_images(path: Path):
    """Count the images that `datasets` leaves out because of their suffix."""
    read = {*IMAGE_SUFFIXES, *(suffix.upper() for suffix in IMAGE_SUFFIXES)}  # but not .Jpg
    images = {*IMAGE_SUFFIXES, *UNREAD_SUFFIXES}
    suffixes = (file.suffix for file in path.rglob("*") if not file.name.startswith("."))
    unread = Counter(suffix for suffix in suffixes if suffix.lower() in images and suffix not in read)
    if unread:
        counts = ", ".join(f"{count} {suffix}" for suffix, count in sorted(unread.items()))
        logger.warning(f"{path}: {counts} files are not read: save them as .jpg or .png")


def _cast_paths_to_images(splits: DatasetDict) -> DatasetDict:
    """Casts text columns that name image files to image columns."""
    PILImage.init()  # registers the suffixes of all formats

    for column in list(next(iter(splits.values())).features):
        values = (value for rows in splits.values() for value in rows[column] if value is not None)
        first = next(values, None)
        if isinstance(first, str) and Path(first).suffix.lower() in PILImage.EXTENSION:
            splits = splits.cast_column(column, Image(decode=False))
    return splits

"""Hub ids, folders, tables and tar shards -> batches of uint8 images and labels, in an order that only (seed, epoch) decides."""

import contextlib
import glob
import hashlib
import itertools
import math
import multiprocessing.connection
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from datasets import (
    ClassLabel,
    Dataset,
    DatasetDict,
    Image,
    IterableDataset,
    IterableDatasetDict,
    Value,
    load_dataset,
    load_from_disk,
)
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from huggingface_hub import DatasetCard
from PIL import ExifTags, ImageOps
from PIL import Image as PILImage
from torch.utils.data import DataLoader
from transformers.utils import logging
from yaml import YAMLError

from hf_vit.data import crops
from hf_vit.data.augment import normalize
from hf_vit.data.images import NO_FILES, Files, ImageFile, files_of, files_on_hub, opened, read_bytes, restrict
from hf_vit.system.hardware import own_cores
from hf_vit.system.hub_names import refuse_mistyped_path
from hf_vit.system.memory import available_memory


logger = logging.get_logger(__name__)

EMBEDDED = {"fashion-mnist-mini": Path(__file__).parents[2] / "recipes" / "data" / "fashion-mnist-mini"}
FILE_FORMATS = {
    ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".tar": "webdataset",
}  # fmt: skip
LABELS = ("label", "labels", "class", "cls", "category", "target")  # what a column of labels may be called
TABLES = ("csv", "json")  # formats that name image files and do not hold them
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}  # first words of file names, and the splits they mean
TO_SCORE = ("validation", "val", "test")  # the split that is scored where none is named: the first there is
EXTENSIONS = tuple(ImageFolder.EXTENSIONS)  # of the images that the library finds in a folder
CACHE_BYTES = 2 * 2**30  # splits that decode to less than this stay in memory, and
CACHE_SHARE = 0.25  # to less than this part of what is available
MOST_DEATHS = 3  # of worker processes that are replaced
PASS = 2**40  # more images than a data set has; an id holds its epoch in multiples of it


# ----------------------------------------------------------------------------------------------------------------------
# Where the images come from


def load(name: str, config: str | None = None, streaming: bool = False) -> DatasetDict | IterableDatasetDict:
    """The splits of a data set. Its images are not decoded, and may name only files that are its own (`images.Files`).

    Args:
        name: a Hub id; a local folder (class folders of images, Parquet, WebDataset tar shards or CSV tables named by their
            split, `save_to_disk`); a Parquet, Arrow, CSV, JSON or tar file; or the name of an embedded set. Tables name
            image files in their own folder or below it.
        config: configuration of a Hub data set that has several.
        streaming: read while training, without a copy on this disk.

    Raises:
        ValueError: if there is no such data, or no images and labels in it.
    """
    path = EMBEDDED.get(name, Path(name).expanduser())
    if name in EMBEDDED and not path.is_dir():
        raise ValueError(f"{name} lies in recipes/data of the repository, which is not beside this installation")
    if not path.exists():
        refuse_mistyped_path(name, "--dataset_name")
        here = f"--dataset_name {name}: there is no such folder or file here ({Path.cwd()})"
        try:
            return restrict(load_dataset(name, config, streaming=streaming), files_on_hub(name))
        except OSError as error:  # no such repo, or no Hub
            raise ValueError(f"{here}, and the Hub does not give it: {error}") from error
    path = path.resolve()  # as `datasets` names what it finds
    if (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
        saved = load_from_disk(str(path))
        splits = saved if isinstance(saved, DatasetDict) else DatasetDict(train=saved)
        return restrict(splits, Files(str(path)))
    if path.is_file():
        if path.suffix not in FILE_FORMATS:
            raise ValueError(f"{path} is no data file; wanted one of {', '.join(FILE_FORMATS)}, or a folder of images")
        return _load_files([path], streaming)
    shards, tables = sorted(path.glob("*.tar")), sorted(path.glob("*.csv"))
    tables = [file for file in tables if file.name != "metadata.csv"]  # which belongs to an ImageFolder
    pictures = any(file.suffix.lower() in EXTENSIONS for file in path.rglob("*"))
    if shards and not pictures:
        return _load_files(shards, streaming)
    if tables:  # one that names no images lies beside them by accident
        splits = _load_files(tables, streaming)
        columns = (next(iter(splits.values())).features or {}).values()
        if not pictures or any(isinstance(kind, Image) for kind in columns):
            return splits
    return _load_folder(path, config, streaming)


def license_of(name: str) -> str | None:
    """The licence that the card of a data set names, its README.md in its folder or on the Hub; None where nothing says it."""
    path = EMBEDDED.get(name, Path(name).expanduser())
    try:
        if not path.exists():
            card = DatasetCard.load(name)
        elif (text := (path / "README.md").read_text(encoding="utf-8")).startswith("---"):
            card = DatasetCard(text)
        else:
            return None
    except (OSError, ValueError, YAMLError):  # no card, or none that can be read, no such data set, or no Hub
        return None
    found = card.data.to_dict().get("license")
    return ", ".join(map(str, found)) if isinstance(found, list) else found


def _load_files(files: list[Path], streaming: bool):
    """Data files of one kind; among several, the first word of each name says its split."""
    by_split: dict[str, list[str]] = {}
    unknown = []
    for file in files:
        word = file.stem.replace("_", "-").partition("-")[0].lower()
        if word not in SPLITS:
            unknown.append(file.name)
        by_split.setdefault(SPLITS.get(word, "train") if len(files) > 1 else "train", []).append(str(file))
    if len(by_split) > 1 and unknown:
        raise ValueError(
            f"{files[0].parent}: {', '.join(unknown)} are of no split; wanted names that begin with {', '.join(SPLITS)}"
        )
    kind = FILE_FORMATS[files[0].suffix]
    table, options = kind in TABLES, {"sep": "\t"} if files[0].suffix == ".tsv" else {}
    try:
        splits = load_dataset(kind, data_files=by_split, streaming=streaming and not table, **options)
    except Exception as error:  # each format raises its own
        names = ", ".join(file.name for file in files[:3])
        raise ValueError(f"{files[0].parent}: {names} cannot be read as {kind}: {error.__cause__ or error}") from error
    if table:
        splits = _paths_to_images(splits)
    splits = restrict(splits, Files(str(files[0].parent)))
    if streaming and table:  # the table is small, the files it names are not
        return IterableDatasetDict({name: rows.to_iterable_dataset() for name, rows in splits.items()})
    return splits


def _load_folder(path: Path, config: str | None, streaming: bool):
    """Class folders, alone or below folders of splits; or Parquet files, as the library finds them."""
    folders = [folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith((".", "__"))]
    readable = {*EXTENSIONS, *(suffix.upper() for suffix in EXTENSIONS)}  # and not .Jpg
    pictures = {*EXTENSIONS, ".avif", ".dng", ".heic", ".heif", ".jxl"}
    suffixes = (file.suffix for file in path.rglob("*") if not file.name.startswith("."))
    left_out = Counter(suffix for suffix in suffixes if suffix.lower() in pictures and suffix not in readable)
    if left_out:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(left_out.items()))
        logger.warning(f"{path}: {kinds} files are not read: save them as .jpg or .png")
    capitals = any(folder.name != folder.name.lower() for folder in folders)
    if capitals and folders and all(folder.name.lower() in SPLITS for folder in folders):  # "Train", "Test"
        by_split: dict[str, list[str]] = {}
        for folder in folders:
            by_split.setdefault(SPLITS[folder.name.lower()], []).append(f"{glob.escape(str(folder))}/**")
        splits = load_dataset("imagefolder", data_files=by_split, streaming=streaming)
    else:
        splits = load_dataset(str(path), config, streaming=streaming)
    names_itself = next(iter(splits.values())).info.builder_name != "imagefolder" or any(path.rglob("metadata.*"))
    return restrict(splits, Files(str(path), links=not names_itself))


def _paths_to_images(splits):
    """Columns of text that names image files -> columns of images."""
    PILImage.init()

    def names_files(column) -> bool:
        values = (value for data in splits.values() for value in data[column] if value is not None)
        first = next(values, None)
        return isinstance(first, str) and Path(first).suffix.lower() in PILImage.EXTENSION

    for column in [name for name in next(iter(splits.values())).features if names_files(name)]:
        splits = splits.cast_column(column, Image(decode=False))
    return splits


def find_columns(data: Dataset, image_column: str | None, label_column: str | None) -> tuple[str, str]:
    """Names of the image and the label column: those given, or the only ones of feature type Image and ClassLabel.

    Where no column is a ClassLabel, one that is called so ("label", "class", "cls" as in WebDataset) is taken.

    Raises:
        ValueError: if one is not there, or several could be meant; it lists the columns there are.
    """
    there = "; the columns are " + ", ".join(f"{name} ({_kind(kind)})" for name, kind in data.features.items())
    found = []
    for name, wanted, flag in ((image_column, Image, "--image_column"), (label_column, ClassLabel, "--label_column")):
        if name is None:
            fitting = [column for column, kind in data.features.items() if isinstance(kind, wanted)]
            if not fitting and wanted is ClassLabel:
                others = [column for column in data.features if column != found[0]]
                fitting = [column for column in others if column.lower() in LABELS]
            if len(fitting) != 1:
                number = "no column" if not fitting else f"{len(fitting)} columns ({', '.join(fitting)})"
                hint = "; in a folder of images, wanted two or more sub-folders, one a class, and no image beside them"
                raise ValueError(
                    f"the data set has {number} of type {wanted.__name__}: name one with {flag}{there}"
                    + (hint if list(data.features) == ["image"] else "")
                )
            name = fitting[0]
        elif name not in data.features:
            raise ValueError(f"{flag} {name}: there is no such column{there}")
        elif wanted is Image and not _holds_images(data.features[name]):
            raise ValueError(f"{flag} {name}: it holds no images{there}")
        if wanted is ClassLabel and not isinstance(data.features[name], (ClassLabel, Value)):
            raise ValueError(f"{flag} {name}: it holds neither text nor numbers{there}")
        found.append(name)
    return found[0], found[1]


def _kind(feature) -> str:
    if isinstance(feature, Image):
        return "Image"
    return feature.dtype if isinstance(feature, Value) else type(feature).__name__


def _holds_images(feature) -> bool:
    """Whether a column is one of images, or of the bytes of image files."""
    return (
        isinstance(feature, Image)
        or feature == Value("binary")
        or (isinstance(feature, dict) and set(feature) == {"bytes", "path"})
    )


def prepare(
    splits: DatasetDict,
    *,
    train_split: str | None = "train",
    eval_split: str | None = None,
    eval_fraction: float = 0.1,
    image_column: str | None = None,
    label_column: str | None = None,
    label_names: list[str] | None = None,
    train_fraction: float = 1.0,
    shots: int | None = None,
    seed: int = 0,
) -> tuple[DatasetDict, list[str], str]:
    """The splits to use, each with the columns `image` (undecoded), `label` (class index) and `row` (its number in the
    split as it came), the class names, and what is scored.

    Args:
        splits: as `load` gives them.
        train_split: None for scoring only.
        eval_split: if None: "validation", else "test", else a part of the training split, set aside by class.
        eval_fraction: that part.
        label_names: names of the classes, for labels that are bare numbers; their order is the classes' order.
        train_fraction: part of each class that is trained on, of what is left after the part set aside.
        shots: images of each class that are trained on.
        seed: decides what is set aside and left out.

    Returns:
        The splits "train" and "eval"; the names; and what "eval" is: the name of a split, or "part of train".

    Raises:
        ValueError: for an unknown or empty split, columns that cannot be found, labels that are no class index or that
            training lacks, and more shots than there are images.
    """
    for name in (train_split, eval_split):
        if name is not None and name not in splits:
            raise ValueError(
                f"the data set has no split {name!r}; it has {', '.join(splits)}: name it with "
                + ("--train_split" if name == train_split else "--eval_split (or --split, to score)")
            )
    if eval_split is None:
        known = [name for name in TO_SCORE if name in splits and name != train_split]
        eval_split = known[0] if known else None
    chosen = {"train": splits[train_split]} if train_split is not None else {}
    if eval_split is not None:
        chosen["eval"] = splits[eval_split]
    if not chosen:
        raise ValueError(f"the data set has no validation or test split; name one with --split: {', '.join(splits)}")
    names_of = {"train": train_split, "eval": eval_split}
    for role, data in chosen.items():
        if len(data) == 0:
            raise ValueError(f"the split {names_of[role]!r} is empty")

    columns = find_columns(next(iter(chosen.values())), image_column, label_column)
    numbered = lambda data: data.add_column("row", np.arange(len(data)))  # a broken image is named by this number
    chosen = DatasetDict({role: numbered(rename(data, columns)) for role, data in chosen.items()})
    chosen, names = encode_labels(chosen, label_names, names_of)
    if train_split is not None:
        labels = np.asarray(chosen["train"]["label"])
        if len(np.unique(labels)) < 2:
            raise ValueError(
                f"the {len(labels)} training images are all of one class ({names[labels[0]]}); wanted two or more"
            )
        if "eval" not in chosen:
            eval_split = f"part of {train_split}"
            aside = set_aside(labels, eval_fraction, seed)
            kept = np.setdiff1d(np.arange(len(labels)), aside)
            chosen = DatasetDict(train=chosen["train"].select(kept), eval=chosen["train"].select(aside))
        elif untrained := sorted(set(chosen["eval"]["label"]) - set(labels.tolist())):
            raise ValueError(
                f"the split {eval_split!r} has images of {len(untrained)} classes that the split {train_split!r} has none "
                f"of: {', '.join(names[label] for label in untrained[:5])}; take them out, or train on some"
            )
        if train_fraction < 1 or shots is not None:
            kept = subset(np.asarray(chosen["train"]["label"]), names, train_fraction, shots, seed)
            chosen["train"] = chosen["train"].select(kept)
    return chosen, names, eval_split


def rename(data, columns: tuple[str, str]):
    """Only the image and the label column, called `image` (undecoded) and `label`."""
    if not isinstance(data.features[columns[0]], ImageFile):
        data = data.cast_column(columns[0], Image(decode=False))
    data = data.select_columns(list(columns))
    for old, new in zip(columns, ("image", "label"), strict=True):
        if old != new:
            data = data.rename_column(old, new)
    return data


def encode_labels(
    chosen: DatasetDict, label_names: list[str] | None, names_of: dict[str, str]
) -> tuple[DatasetDict, list[str]]:
    """Labels of any kind -> class indices, and the names of the classes: `label_names`, else those of a ClassLabel, else the
    sorted values of the training split."""
    first = next(iter(chosen.values()))
    if isinstance(first.features["label"], ClassLabel):
        names = label_names or first.features["label"].names
    else:
        for role, data in chosen.items():
            empty = [row for row, label in enumerate(data["label"]) if label is None or label != label]
            if empty:
                raise ValueError(
                    f"{len(empty)} labels of the split {names_of[role]!r} are missing, the first in row {empty[0]}"
                )
        values = sorted(set(first["label"]), key=lambda label: (str(type(label)), label))
        if label_names is not None:
            values = label_names if isinstance(values[0], str) else range(len(label_names))
        names = label_names or [str(value) for value in values]
        index = {value: i for i, value in enumerate(values)}
        source = "the training split" if label_names is None else "--label_names"
        for role, data in list(chosen.items()):
            if unknown := sorted({str(label) for label in data["label"] if label not in index}):
                raise ValueError(
                    f"labels {', '.join(unknown[:5])} of the split {names_of[role]!r} do not occur in {source}"
                )
            encoded = [index[label] for label in data["label"]]
            chosen[role] = data.remove_columns("label").add_column("label", encoded, feature=ClassLabel(names=names))
    for role, data in chosen.items():
        labels = np.asarray(data["label"])
        wrong = np.flatnonzero((labels < 0) | (labels >= len(names)))
        if len(wrong):
            raise ValueError(
                f"{len(wrong)} labels of the split {names_of[role]!r} lie outside 0 to {len(names) - 1}, the first is "
                f"{labels[wrong[0]]} in row {wrong[0]}: an unlabelled split cannot be used"
            )
    return chosen, names


def set_aside(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Row numbers of about `fraction` of each class: one at least, and every class keeps one at least.

    Raises:
        ValueError: if that leaves nothing to set aside.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for label in np.unique(labels):
        of_class = rng.permutation(np.flatnonzero(labels == label))
        rows.append(of_class[: min(max(1, round(fraction * len(of_class))), len(of_class) - 1)])
    if sum(map(len, rows)) == 0:
        raise ValueError(
            f"no image can be set aside to score: none of the {len(np.unique(labels))} classes has more than one of the "
            f"{len(labels)} training images; add images, or name --eval_split"
        )
    return np.sort(np.concatenate(rows))


def subset(labels: np.ndarray, names: list[str], fraction: float, shots: int | None, seed: int) -> np.ndarray:
    """Row numbers of `fraction` of each class (one at least), or of `shots` of each.

    Raises:
        ValueError: if a class has fewer than `shots`.
    """
    rng = np.random.default_rng([seed, 1])
    rows = []
    for label in np.unique(labels):
        of_class = rng.permutation(np.flatnonzero(labels == label))
        if shots is not None and shots > len(of_class):
            raise ValueError(
                f"--shots {shots}: the class {names[label]!r} has only {len(of_class)} training images; take fewer shots"
            )
        rows.append(of_class[: shots if shots is not None else max(1, round(fraction * len(of_class)))])
    return np.sort(np.concatenate(rows))


def class_weights(labels: torch.Tensor, num_labels: int) -> torch.Tensor:
    """Weights (L,) of the loss that give every class the same say: n / (classes * n of the class); their mean over the
    images is 1, and a class without images has 0."""
    counts = torch.bincount(labels, minlength=num_labels).float()
    return torch.where(counts > 0, len(labels) / ((counts > 0).sum() * counts.clamp(min=1)), 0.0)


def match_labels(labels: torch.Tensor, names: list[str], id2label: dict[int, str]) -> torch.Tensor:
    """Class indices of a data set (n,) -> those of a model that calls its classes `id2label`; matched by name.

    Raises:
        ValueError: if the data set names a class that the model does not know.
    """
    models = [id2label[index] for index in range(len(id2label))]
    if models == names:
        return labels
    index_of = {name: index for index, name in enumerate(models)}
    if twice := sorted({name for name in names if models.count(name) > 1}):
        raise ValueError(
            f"the model calls several of its labels {', '.join(twice[:5])}: which one is meant cannot be told"
        )
    unknown = sorted(set(names) - set(index_of))
    if unknown:
        raise ValueError(
            f"the model does not know {len(unknown)} of the data set's {len(names)} labels: {unknown[:5]}; it knows "
            f"{sorted(index_of)[:5]}; score a data set with the model's labels, or fine-tune the model on this one"
        )
    return torch.tensor([index_of[name] for name in names])[labels]


# ----------------------------------------------------------------------------------------------------------------------
# Bytes to pixels


@dataclass(frozen=True)
class ImageForm:
    """What a model wants to see, as its image processor says: size in pixels, channels, PIL's resampling, mean and std.

    `resize` is None where an image is stretched to this size at once; else its shorter side, or its height and width, before
    the middle is cut out. `processor` is an image processor that these numbers cannot describe; it then makes the pixels,
    normalised, and only `channels` is read of the rest.

    Two are for training only. `draft` has images resized by torch, faster and not to the pixel what the image processor gives.
    Where there is a `crop_scale`, a random part of at least so much of the photo's area is cut out and resized.
    """

    height: int
    width: int
    channels: int
    resample: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: int | tuple[int, int] | None = None
    draft: bool = False
    crop_scale: float | None = None
    processor: Any = None

    def normalize(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 (B, C, H, W) -> float32, see `augment.normalize`."""
        return normalize(images, self)


def image_form(processor, config) -> ImageForm:
    """The form of a model's images, from its image processor and its config.

    A processor that does something else than resize (and cut out the middle), divide by 255 and normalise is kept in the
    form and called on each image.

    Raises:
        ValueError: if the processor asks for sizes or numbers that no model has.
    """
    asked = processor.to_dict()
    crops.check_processor(asked)
    size = asked.get("size") or {}
    last, resize = size, None
    if asked.get("do_center_crop"):
        last = asked.get("crop_size") or {}
        resize = size.get("shortest_edge") or (size.get("height"), size.get("width"))
    channels = getattr(config, "num_channels", 3)
    plain = all(asked.get(name) in (True, None) for name in ("do_resize", "do_rescale", "do_normalize"))
    plain &= abs((asked.get("rescale_factor") or 1 / 255) - 1 / 255) < 1e-9
    plain &= all(asked.get(name) is not None for name in ("image_mean", "image_std", "resample"))
    plain &= not any(asked.get(name) for name in ("do_flip_channel_order", "crop_pct", "include_top", "do_pad"))
    if not (plain and {"height", "width"} <= set(last) and resize != (None, None)):
        return ImageForm(0, 0, channels, 0, (), (), processor=processor)
    mean, std = tuple(asked["image_mean"]), tuple(asked["image_std"])
    return ImageForm(last["height"], last["width"], channels, int(asked["resample"]), mean, std, resize)


def training_form(form: ImageForm, images: Dataset | None, crop: str, crop_scale: float = 0.35) -> ImageForm:
    """The form in which training images are decoded: the model's or, with `crop` "resized", random parts of the photos.

    Where most of 32 images are no larger than the model's and have its proportions, they are decoded whole instead, once where
    memory allows, and `augment` cuts parts out of each batch. A stream, `images` None, is taken to be of photos.
    """
    if crop != "resized":
        return form
    small = []
    for item in [] if images is None else images[:: max(1, len(images) // 32)]["image"]:
        with contextlib.suppress(Exception):  # a bad one is named when it is decoded
            with opened(read_bytes(item, files_of(images))) as image:
                width, height = image.size
            small.append(width <= form.width and height <= form.height and width * form.height == height * form.width)
    if 2 * sum(small) > len(small):
        return replace(form, resize=None, draft=True)
    return replace(form, resize=None, crop_scale=crop_scale)


MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # PIL's, by the number of channels
JPEG = ("JPEG", "MPO")  # PIL's formats that JPEG decoders read
SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations of a photo whose width is stored as its height


def open_image(item: dict, channels: int) -> PILImage.Image:
    """One undecoded image, `{"bytes": ..., "path": ...}` with its bytes -> upright, of 8 bits a channel.

    Args:
        channels: 1 (grey), 3 or 4.

    Raises:
        ValueError, OSError: if it cannot be read as an image of 8 or 16 bits a channel.
    """
    content = read_bytes(item)
    with opened(content) as image:
        return _upright(content, image, channels)


def _upright(content: bytes, image: PILImage.Image, channels: int, factor: int = 1) -> PILImage.Image:
    """As `open_image`, of a file that Pillow has opened; a JPEG file `factor` times smaller."""
    pixels = _jpeg(content, image, factor)
    if pixels is not None:
        decoded = PILImage.fromarray(pixels.squeeze(2) if image.mode == "L" else pixels)
        decoded.info, image = image.info, decoded  # with the EXIF data
    elif factor > 1:
        image.draft(None, tuple(side // factor for side in image.size))
    ImageOps.exif_transpose(image, in_place=True)  # the other way copies every photo
    if image.mode.startswith("I"):  # Pillow would clip 16 bits at 255; mode "I" may hold 8 or 16 of them
        values = np.asarray(image)
        sixteen = image.mode != "I" or values.max() > 255
        image = PILImage.fromarray((values // 257 if sixteen else values).clip(0, 255).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of no stated range; save it with 8 or 16 bits")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    image.load()
    return image if image.mode == MODES[channels] else image.convert(MODES[channels])


def _jpeg(content: bytes, image: PILImage.Image, factor: int) -> np.ndarray | None:
    """A JPEG file that Pillow has opened, decoded to the same pixels in half the time, or `factor` times smaller: (h, w, C).
    None for other files, and for those that Pillow alone can read: four inks, or damage."""
    colours = {"RGB": "RGB", "L": "GRAY"}.get(image.mode)
    if image.format not in JPEG or colours is None:
        return None
    width, height = (-(-side // factor) for side in image.size)
    with contextlib.suppress(ValueError):  # Pillow reads what it can of a damaged file, or says what is wrong
        return simplejpeg.decode_jpeg(content, colours, min_height=height, min_width=width, min_factor=1)
    return None


def _random_part(item: dict, form: ImageForm, numbers: list[float]) -> np.ndarray:
    """A random part of a photo, resized to uint8 (H, W, C); a JPEG file is decoded as small as that allows."""
    content = read_bytes(item)
    with opened(content) as image:
        is_jpeg, turned = image.format in JPEG, image.getexif().get(ExifTags.Base.Orientation, 1)
        box = crops.crop_box(*(image.size[::-1] if turned in SIDEWAYS else image.size), numbers, form.crop_scale)
        factor = crops.shrink_factor(box, form.height, form.width) if is_jpeg else 1
        pixels = None
        if turned == 1 and image.mode == MODES[form.channels]:  # without the detour through Pillow, which copies twice
            pixels = _jpeg(content, image, factor)
        if pixels is None:
            image = _upright(content, image, form.channels, factor)
            pixels = np.array(image).reshape(*image.size[::-1], form.channels)
    left, top, right, bottom = (side // factor for side in box)  # whole pixels of the smaller photo
    return crops.resize(pixels[top:bottom, left:right], form.height, form.width, form.resample)


def decode(item: dict, form: ImageForm, numbers: list[float] | None = None) -> np.ndarray:
    """One undecoded image, as for `open_image` -> uint8 (H, W, C), as the image processor resizes it.

    Args:
        numbers: which part is cut out, `crops.crop_numbers` (22,), where the form has a `crop_scale`.

    Raises:
        ValueError, OSError: as `open_image`.
    """
    if form.crop_scale is not None:
        return _random_part(item, form, numbers)
    image = open_image(item, form.channels)
    if form.processor is not None:
        crops.check_shape(image.size, form.processor)
        return form.processor(image, return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)  # (H, W, C), float
    if form.resize is not None:
        return crops.resize_center(image, form.resize, form.height, form.width, form.resample)
    if form.draft:
        pixels = np.array(image).reshape(*image.size[::-1], -1)
        return crops.resize(pixels, form.height, form.width, form.resample)
    if image.size != (form.width, form.height):
        image = image.resize((form.width, form.height), form.resample)
    return np.array(image).reshape(form.height, form.width, form.channels)


def numbers_of(ids: torch.Tensor, form: ImageForm, seed: int) -> list[list[float] | None]:
    """For each id (b,) the numbers by which `decode` cuts out a random part; None where the form asks for none."""
    if form.crop_scale is None:
        return [None] * len(ids)
    return crops.crop_numbers(ids % PASS, seed, ids // PASS).tolist()


def decode_rows(
    rows: list[dict], form: ImageForm, numbers: list[list[float] | None] | None = None, files: Files = NO_FILES
) -> tuple[list[np.ndarray | None], list[str]]:
    """Rows of `prepare` -> images, None for those that cannot be read; and a sentence on each of those. `files` are those that
    the rows may name."""
    images, bad = [], []
    for row, of_row in zip(rows, numbers or [None] * len(rows), strict=True):
        try:
            content = read_bytes(row["image"], files)
            images.append(decode({"bytes": content, "path": None}, form, of_row))
        except Exception as error:  # so do file systems and image processors
            where = f" ({row['image']['path']})" if row["image"] and row["image"]["path"] else ""
            images.append(None)
            bad.append(f"row {row['row']}{where} cannot be read as an image: {error}")
    return images, bad


def as_batch(images: list[np.ndarray]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(image).permute(2, 0, 1) for image in images]).contiguous()  # (b, C, H, W)


def stand_ins(good: list[int], count: int) -> list[int]:
    """For each of `count` places in a batch itself where it is `good`, else the next one that is, behind the end the first."""
    return [min(good, key=lambda place: (place - wanted) % count) for wanted in range(count)]


def check_classes(data: Dataset, good: list[int], example: str):
    """What skipping images that cannot be read does to the classes of `data`: a warning with counts; of `good`, row numbers, are
    those that can.

    Raises:
        ValueError: if nothing of a class is left.
    """
    labels, names = np.asarray(data["label"]), data.features["label"].names
    before, after = (np.bincount(some, minlength=len(names)) for some in (labels, labels[good]))
    if gone := [names[label] for label in np.flatnonzero((before > 0) & (after == 0))]:
        raise ValueError(
            f"no image of {len(gone)} classes can be read, and --on_bad_image skip would leave them out: {', '.join(gone[:5])}; "
            f"{example}; mend some of them, or take these classes out of the data"
        )
    lost = [label for label in np.argsort(after / np.maximum(before, 1)) if after[label] < before[label]]
    worst = ", ".join(f"{names[label]} {before[label] - after[label]} of {before[label]}" for label in lost[:5])
    logger.warning(f"images that cannot be read are skipped: {worst}{' ...' if len(lost) > 5 else ''}")


class Images(torch.utils.data.Dataset):
    """Rows of a data set as uint8; decoded once and kept where memory allows, else whenever they are asked for.

    Where random parts are cut out, each epoch has others, and nothing is kept. Images that would fit into memory are read once
    all the same, so that those which cannot be read are found before training.

    Args:
        data: columns `image` (undecoded), `label` and `row`, as `prepare` gives them.
        form: what the images are turned into.
        on_bad: "stop" or "skip" at images that cannot be read. What is skipped is in `skipped`, a sentence each.
        fill: whether another image of the batch takes the place of one that is skipped, so that batches stay full.
        seed: decides with an image's id which part is cut out, where the form has a `crop_scale`.

    Raises:
        ValueError: at an image that cannot be read (here, or in `loader`), or if none can.
    """

    def __init__(self, data: Dataset, form: ImageForm, on_bad: str = "stop", fill: bool = False, seed: int = 0):
        self.rows, self.form, self.on_bad, self.fill, self.seed = data, form, on_bad, fill, seed
        self.files = files_of(data)
        self.skipped: dict[str, None] = {}  # in the order they came
        self.cache = None
        fits = min(CACHE_BYTES, CACHE_SHARE * available_memory())  # the next split finds less available
        if form.processor is None and len(data) * form.height * form.width * form.channels <= fits:
            if form.crop_scale is None:
                self.cache = torch.empty(len(data), form.channels, form.height, form.width, dtype=torch.uint8)
            chunks = torch.arange(len(data)).tensor_split(max(1, len(data) // 64))
            decode_chunk = lambda chunk: decode_rows(
                self.rows.__getitems__(chunk.tolist()), form, numbers_of(chunk, form, seed), self.files
            )
            good, unreadable = [], []
            with ThreadPoolExecutor(own_cores()) as pool:  # PIL decodes without the interpreter lock
                for chunk, (images, bad) in zip(chunks, pool.map(decode_chunk, chunks), strict=True):
                    unreadable += bad
                    for index, image in zip(chunk.tolist(), images, strict=True):
                        if image is not None:
                            good.append(index)
                            if self.cache is not None:
                                self.cache[index] = torch.from_numpy(image).permute(2, 0, 1)
            self.skip(unreadable)
            if not good:
                raise ValueError(f"none of the {len(data)} images can be read; {next(iter(self.skipped))}")
            if len(good) < len(data):
                check_classes(data, good, next(iter(self.skipped)))
                self.rows = data.select(good)
                self.cache = None if self.cache is None else self.cache[good]
        self.labels = torch.tensor(np.asarray(self.rows["label"]), dtype=torch.long)  # (n,)

    def __len__(self):
        return len(self.rows)

    def row_numbers(self, index: torch.Tensor) -> list[int]:
        """Ids (b,) -> numbers of the rows in the split as it came."""
        return self.rows.select_columns("row")[(index % len(self)).tolist()]["row"]

    def skip(self, bad: list[str]):
        """Note images that cannot be read, or stop at them."""
        if bad and self.on_bad == "stop":
            more = f" (and {len(bad) - 3} more)" if len(bad) > 3 else ""
            raise ValueError(
                "; ".join(bad[:3]) + f"{more}; mend or remove what cannot be read, or pass --on_bad_image skip"
            )
        self.skipped.update(dict.fromkeys(bad))

    def __getitems__(self, ids: list[int]) -> dict:
        """A whole batch at once: images uint8 (b, C, H, W), labels (b,), index (b,), the ids, and `bad`, a list of str.

        The id of image i is i, or i + n, i + 2 n, ... for its further appearances in one epoch; epoch e adds e * `PASS`, which
        the index leaves out.
        """
        ids = torch.tensor(ids, dtype=torch.long)
        index, bad = ids % PASS, []
        rows = index % len(self)
        if self.cache is not None:
            images = self.cache[rows]
        else:
            numbers = numbers_of(ids, self.form, self.seed)
            decoded, bad = decode_rows(self.rows.__getitems__(rows.tolist()), self.form, numbers, self.files)
            good = [place for place, image in enumerate(decoded) if image is not None]
            if not good:
                return {"bad": bad}
            if bad:
                places = torch.tensor(stand_ins(good, len(ids)) if self.fill else good)
                index, rows, decoded = index[places], rows[places], [decoded[place] for place in places]
            images = as_batch(decoded)
        return {"images": images, "labels": self.labels[rows], "index": index, "bad": bad}


class Features(Images):
    """In the place of `images` what a frozen network made of each: float (b, D) instead of uint8 (b, C, H, W).

    Args:
        features: (n, D).
        rows: (n,), which of `images` they are of.
    """

    def __init__(self, images: Images, features: torch.Tensor, rows: torch.Tensor):
        self.rows, self.form, self.on_bad, self.fill = images.rows.select(rows), images.form, images.on_bad, True
        self.skipped, self.cache, self.labels = images.skipped, features, images.labels[rows]


# ----------------------------------------------------------------------------------------------------------------------
# The order


def balanced(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """As many ids as there are images, each class as often as any other; an image that comes again gets a further id."""
    count, classes = len(labels), np.unique(labels)
    each = np.full(len(classes), count // len(classes))
    each[rng.permutation(len(classes))[: count % len(classes)]] += 1
    ids = []
    for label, wanted in zip(classes, each, strict=True):
        of_class = np.flatnonzero(labels == label)
        rounds = -(-wanted // len(of_class))
        drawn = [rng.permutation(of_class) + number * count for number in range(rounds)]
        ids.append(np.concatenate(drawn)[:wanted])
    return rng.permutation(np.concatenate(ids))


def epoch_batches(
    count: int,
    batch_size: int,
    seed: int,
    epoch: int,
    rank: int = 0,
    world: int = 1,
    labels: np.ndarray | None = None,
    repeats: int = 1,
) -> Iterator[list[int]]:
    """Shuffled ids of one epoch, for the process `rank` of `world`: batches of `batch_size`, all full.

    Together the processes see the batches that one process with `world * batch_size` would see. Rows that do not fill
    the last batch wait for another epoch; where there are fewer rows than one batch holds, rows repeat.

    Args:
        count: of the images.
        labels: (count,) where each class is to be drawn as often as any other.
        repeats: how often each image stands in its batch, augmented anew each time (arXiv 1901.09335); an epoch stays as
            long and shows a part of the images.
    """
    together = batch_size * world
    batches, images_each = max(1, count // together), -(-together // repeats)
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(count) if labels is None else balanced(labels, rng)
    wanted = max(count, batches * images_each)
    further = count * (1 + order.max() // count)  # ids of one pass lie below
    order = np.resize(order, wanted) + further * (np.arange(wanted) // count)
    further = count * (1 + order.max() // count)
    for number in range(batches):
        images = order[number * images_each : (number + 1) * images_each]
        ids = (images + further * np.arange(repeats)[:, None]).ravel()  # copies lie far apart: neighbours are mixed
        ids = ids[:together]
        yield ids[rank * batch_size : (rank + 1) * batch_size].tolist()


def batches_in_order(count: int, batch_size: int, rank: int = 0, world: int = 1) -> list[list[int]]:
    """All row numbers in order, in batches; process `rank` of `world` gets every `world`-th batch."""
    return [list(range(start, min(start + batch_size, count))) for start in range(0, count, batch_size)][rank::world]


def loader(images: Images, batches: Iterable[list[int]], num_workers: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of `images` in the order given, as `Images.__getitems__` makes them; decoded in worker processes unless they
    are already in memory. A worker that dies is replaced, and its work done again.

    Raises:
        ValueError: at an image that cannot be read, unless they are skipped; at a batch without any that can.
        OSError: if workers die again and again.
    """
    workers = 0 if images.cache is not None else num_workers
    pinned = torch.cuda.is_available()  # copies to the device then overlap with its work
    waiting, batches, deaths = deque(), iter(batches), 0  # waiting: handed to workers, and not yet back

    def hand_out(again):
        for ids in itertools.chain(again, batches):
            waiting.append(ids)
            yield ids

    while True:
        again, others = list(waiting), set(multiprocessing.active_children())
        waiting.clear()
        arriving = iter(
            DataLoader(
                images, batch_sampler=hand_out(again), num_workers=workers, collate_fn=_as_it_is, pin_memory=pinned,
                worker_init_fn=_leave_signals,
            )
        )  # fmt: skip
        mine = set(multiprocessing.active_children()) - others
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise in the midst of a step
        try:
            while (batch := next(arriving, None)) is not None:
                waiting.popleft()
                bad = batch.pop("bad")
                images.skip(bad)
                if batch:
                    yield batch
                elif images.fill:
                    raise ValueError(f"no image of a whole batch of {len(bad)} can be read; {bad[0]}")
            return
        except (
            RuntimeError,
            ConnectionError,
            EOFError,
            FileNotFoundError,
        ) as error:  # whatever a cut connection raises
            if not multiprocessing.connection.wait([worker.sentinel for worker in mine], timeout=5):
                raise  # none of them died
            deaths += 1
            if deaths > MOST_DEATHS:
                raise OSError(
                    f"{deaths} processes that decode images died, at last: {error}. Mostly they are killed because memory is "
                    f"short: pass a --num_workers below {num_workers}. In a container it may be shared memory: give it more of it "
                    "(docker run --shm-size 8g)"
                ) from error
            logger.warning(f"a process that decodes images died and is replaced: {error}")
        finally:
            del arriving
            for worker in mine:  # one that hangs in a file does not keep this process
                worker.kill()


def _leave_signals(worker: int):
    """What asks the run to stop goes to the whole process group; workers leave the answer to the training loop."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _as_it_is(batch):
    return batch


# ----------------------------------------------------------------------------------------------------------------------
# Streams


def prepare_stream(
    splits: IterableDatasetDict,
    *,
    train_split: str = "train",
    eval_split: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    label_names: list[str] | None = None,
) -> tuple[IterableDataset, Dataset, list[str], str]:
    """As `prepare`, for a data set that is read while training: the training stream, the split to score (read whole, kept
    on disk), the class names, and what is scored.

    Raises:
        ValueError: as `prepare`; and if nothing says what the classes are, or there is no split to score.
    """
    candidates = [eval_split] if eval_split is not None else TO_SCORE
    known = [name for name in candidates if name in splits and name != train_split]
    if train_split not in splits or not known:
        raise ValueError(
            f"--streaming needs the split {train_split!r} and another one to score ({' or '.join(candidates)}); the data set "
            f"has {', '.join(splits)}: name them with --train_split and --eval_split"
        )
    train, scored = splits[train_split], splits[known[0]]
    if train.features is None:
        train, scored = train._resolve_features(), scored._resolve_features()
    columns = find_columns(train, image_column, label_column)
    kind = train.features[columns[1]]
    if label_names is None and not isinstance(kind, ClassLabel):
        raise ValueError(
            f"the labels ({columns[1]}) are bare {_kind(kind)} and a stream does not say how many there are: pass "
            "--label_names FILE, one name a line"
        )
    names = label_names or kind.names
    fingerprint = fingerprint_of(scored, columns)
    scored = rename(scored, columns)
    held = Dataset.from_generator(lambda: iter(scored), features=scored.features, fingerprint=fingerprint)
    held = held.cast_column("image", scored.features["image"])  # which files it may name is not on disk
    held = held.add_column("row", np.arange(len(held)))
    evaluated, _ = encode_labels(DatasetDict(eval=held), label_names, {"eval": known[0]})
    return rename(train, columns), evaluated["eval"], names, known[0]


def fingerprint_of(rows: IterableDataset, columns: tuple[str, str]) -> str:
    """The same for the same data, in each process: what a stream reads (`datasets` alone would hash objects that differ from
    start to start), the files on this disk with size and time, and the columns that are kept."""

    def leaves(value):
        if isinstance(value, str):
            yield value
            file = value.rpartition("::")[2]
            if os.path.isfile(file):
                yield os.stat(file).st_size
                yield os.stat(file).st_mtime_ns
        elif isinstance(value, Dataset):
            yield value._fingerprint
        elif isinstance(value, (dict, list, tuple)):
            for part in value.items() if isinstance(value, dict) else value:
                yield from leaves(part)
        elif callable(value):
            yield f"{value.__module__}.{value.__qualname__}"
        elif hasattr(value, "__dict__"):
            yield from leaves(vars(value))
        else:
            yield repr(value)

    parts = [*leaves(rows._ex_iterable), repr(rows.features), *columns]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


class Stream:
    """Training images that are read while training, without an end: shards and rows in an order of (seed, pass), decoded by
    threads.

    The shards are dealt out to lanes, as many as divide `lanes`, the number of shards and the images of a step. Each lane
    reads its shards in random order, shuffles blocks of rows, gives the same places of every step, and begins anew when it is
    through. So a process reads only the lanes that its places need, and how many processes there are changes nothing.

    The id of an image is its place in the stream as it lies, plus `PASS` for each pass before.

    Args:
        rows: columns `image` (undecoded) and `label`, a class index or one of `names`.
        buffer: rows that are shuffled at a time, by all lanes together.
    """

    def __init__(
        self,
        rows: IterableDataset,
        names: list[str],
        form: ImageForm,
        seed: int,
        buffer: int,
        on_bad: str = "stop",
        lanes: int = 4,
    ):
        self.rows, self.names, self.form, self.seed, self.on_bad = rows, names, form, seed, on_bad
        self.buffer, self.lanes, self.files = buffer, lanes, files_of(rows)
        self.skipped: dict[str, None] = {}
        # Rows of each shard that was read to its end: a resumed run skips those whole.
        self.lengths: dict[int, int] = {}

    skip = Images.skip

    def row_numbers(self, index: torch.Tensor) -> list[int]:
        """Ids (b,) -> places in the stream as it lies."""
        return (index % PASS).tolist()

    def _read(self, shards: Iterable[int], skip: int) -> Iterator[dict]:
        """Rows of some shards, one after the other, but the first `skip`."""
        count = self.rows.num_shards
        for shard in shards:
            if self.lengths.get(shard, skip + 1) > skip:
                place = -1
                for place, row in enumerate(self.rows.shard(count, shard)):
                    if place >= skip:
                        yield {**row, "row": place * count + shard}
                self.lengths[shard] = place + 1
            skip = max(0, skip - self.lengths[shard])

    def _lane(self, lane: int, lanes: int, start: int) -> Iterator[tuple[int, dict]]:
        """(pass, row) from row number `start` of all that the lane will ever give."""
        size = max(1, self.buffer // lanes)
        own = range(lane, self.rows.num_shards, lanes)
        for number in itertools.count():
            if all(shard in self.lengths for shard in own) and start >= sum(self.lengths[shard] for shard in own):
                start -= sum(self.lengths[shard] for shard in own)  # this pass was over before
                continue
            shards = np.random.default_rng([self.seed, number, lane]).permutation(own).tolist()
            rows = self._read(shards, start // size * size)
            for block_number in itertools.count(start // size):
                block: list[dict | None] = list(itertools.islice(rows, size))
                if not block:
                    break
                order = np.random.default_rng([self.seed, number, lane, block_number]).permutation(len(block))
                for place in order[max(0, start - block_number * size) :].tolist():
                    yield number, block[place]
                    block[place] = None  # its bytes make room for those of the next block
            length = sum(self.lengths[shard] for shard in own)
            if length == 0:
                raise ValueError("there are no rows in some shards of the stream: remove them")
            start = max(0, start - length)

    def batches(
        self, step: int, batch_size: int, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """From step number `step` on (pass, batch), without an end: the pass of the first image, and what `loader` gives.

        Args:
            batch_size: images a process and step.
        """
        together = batch_size * world
        lanes = math.gcd(self.rows.num_shards, together, self.lanes)
        each = together // lanes
        first, last = rank * batch_size, (rank + 1) * batch_size
        mine = range(first // each, -(-last // each))
        index_of = {name: index for index, name in enumerate(self.names)}

        def steps(pool):
            readers = {lane: self._lane(lane, lanes, step * each) for lane in mine}
            while True:
                rows = [row for lane in mine for row in itertools.islice(readers[lane], each)]
                rows = rows[first - mine.start * each :][:batch_size]
                ids = torch.tensor([row["row"] + number * PASS for number, row in rows])
                both = zip(rows, numbers_of(ids, self.form, self.seed), strict=True)
                yield (
                    rows,
                    [pool.submit(decode_rows, [row], self.form, [numbers], self.files) for (_, row), numbers in both],
                )

        if lanes < min(self.lanes, world):
            logger.warning(
                f"{self.rows.num_shards} shards and {together} images a step are split among {lanes} of the {world} processes "
                "and no more: the others read the same shards; numbers with larger common divisors are faster"
            )
        pool, reader = ThreadPoolExecutor(own_cores()), ThreadPoolExecutor(1)
        try:
            coming = steps(pool)
            ahead = deque(reader.submit(next, coming) for _ in range(3))
            while True:
                rows, decoded = ahead.popleft().result()
                ahead.append(reader.submit(next, coming))
                yield rows[0][0], self._finish(rows, [future.result() for future in decoded], index_of)
        finally:  # without waiting: the network may be slow
            reader.shutdown(wait=False, cancel_futures=True)
            pool.shutdown(wait=False, cancel_futures=True)

    def _finish(self, numbered, decoded, index_of):
        self.skip([text for _, bad in decoded for text in bad])
        good = [place for place, (images, _) in enumerate(decoded) if images[0] is not None]
        if not good:
            raise ValueError(f"no image of a whole batch can be read; {decoded[0][1][0]}")
        places = stand_ins(good, len(numbered))
        labels = []
        for place in places:
            row = numbered[place][1]
            label = row["label"] if isinstance(row["label"], int) else index_of.get(row["label"], -1)
            if not 0 <= label < len(self.names):
                raise ValueError(
                    f"row {row['row']} has the label {row['label']!r}, none of the {len(self.names)} classes"
                )
            labels.append(label)
        images = as_batch([decoded[place][0][0] for place in places])
        return {
            "images": images.pin_memory() if torch.cuda.is_available() else images,
            "labels": torch.tensor(labels),
            "index": torch.tensor([numbered[place][1]["row"] + numbered[place][0] * PASS for place in places]),
        }

"""Finds the image and the label column of a data set, and turns labels of any kind into class indices."""

from collections import Counter

import numpy as np
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Image, LargeList, List, Value
from transformers.utils import logging

from hf_vit.data.image_files import RestrictedImage


logger = logging.get_logger(__name__)

LABEL_COLUMNS = ("label", "labels", "class", "cls", "category", "target")  # usual names of label columns


def find_columns(data: Dataset, image_column: str | None, label_column: str | None) -> tuple[str, str]:
    """Names of the image and the label column: those given, else the only Image and the only ClassLabel column.

    If no column is a ClassLabel, the only one with a usual name ("label", "class", WebDataset's "cls") is taken.

    Raises:
        ValueError: if a column is missing, unsuitable or ambiguous; it lists the columns.
    """
    image_column = find_image_column(data, image_column)
    columns = _columns_of(data)
    if label_column is None:
        label_column = _only_column(data, ClassLabel, "--label_column", columns, image_column)
    if label_column not in data.features:
        raise ValueError(f"--label_column {label_column}: there is no such column{columns}")
    if isinstance(data.features[label_column], (list, List, LargeList)):
        raise ValueError(
            f"--label_column {label_column}: it holds a list of labels for each image, and several labels an image are not "
            f"supported; wanted one{columns}"
        )
    if not isinstance(data.features[label_column], (ClassLabel, Value)):
        raise ValueError(f"--label_column {label_column}: it holds neither text nor numbers{columns}")
    return image_column, label_column


def find_image_column(data: Dataset, image_column: str | None) -> str:
    """Name of the image column: the one given, else the only Image column; ValueError as `find_columns`."""
    columns = _columns_of(data)
    if image_column is None:
        image_column = _only_column(data, Image, "--image_column", columns)
    if image_column not in data.features:
        raise ValueError(f"--image_column {image_column}: there is no such column{columns}")
    if not _holds_images(data.features[image_column]):
        raise ValueError(f"--image_column {image_column}: it holds no images{columns}")
    return image_column


def _columns_of(data: Dataset) -> str:
    """The end of an error: names and types of all columns."""
    return "; the columns are " + ", ".join(f"{name} ({feature_name(kind)})" for name, kind in data.features.items())


def _only_column(data: Dataset, wanted: type, flag: str, columns: str, image_column: str | None = None) -> str:
    """The only column of a feature type or, for labels, with a usual name."""
    found = [name for name, feature in data.features.items() if isinstance(feature, wanted)]
    if not found and wanted is ClassLabel:
        found = [name for name in data.features if name != image_column and name.lower() in LABEL_COLUMNS]
    if len(found) != 1:
        number = f"{len(found)} columns ({', '.join(found)})" if found else "no column"
        hint = ""
        if list(data.features) == ["image"]:
            hint = "; in a folder of images, wanted two or more sub-folders, one a class, and no image beside them"
        raise ValueError(f"the data set has {number} of type {wanted.__name__}: name one with {flag}{columns}{hint}")
    return found[0]


def feature_name(feature) -> str:
    """What an error calls the type of a column."""
    if isinstance(feature, Image):
        return "Image"
    return feature.dtype if isinstance(feature, Value) else type(feature).__name__


def _holds_images(feature) -> bool:
    """Whether a column holds images, or the bytes of image files."""
    is_struct = isinstance(feature, dict) and set(feature) == {"bytes", "path"}
    return isinstance(feature, Image) or feature == Value("binary") or is_struct


def select_image_and_label(data, columns: tuple[str, str]):
    """Keeps the image and the label column, called `image` (undecoded) and `label`."""
    if not isinstance(data.features[columns[0]], RestrictedImage):
        data = data.cast_column(columns[0], Image(decode=False))
    data = data.select_columns(list(columns))
    for old, new in zip(columns, ("image", "label"), strict=True):
        if old != new:
            data = data.rename_column(old, new)
    return data


def encode_labels(
    splits: DatasetDict, label_names: list[str] | None, split_names: dict[str, str]
) -> tuple[DatasetDict, list[str]]:
    """Labels of any kind -> class indices, and the class names: `label_names`, else those of a ClassLabel, else the sorted
    values of the first split.

    Args:
        split_names: what errors call each split.

    Raises:
        ValueError: if a label is missing, unknown or outside the classes.
    """
    first = next(iter(splits.values()))
    if isinstance(first.features["label"], ClassLabel):
        names = label_names or first.features["label"].names
    else:
        labels_of = {key: data["label"][:] for key, data in splits.items()}
        for key, labels in labels_of.items():
            empty = [row for row, label in enumerate(labels) if label is None or label != label]  # None or NaN
            if empty:
                raise ValueError(
                    f"{len(empty)} labels of the split {split_names[key]!r} are missing, the first in row {empty[0]}"
                )
        check_label_values(set().union(*labels_of.values()))
        values = sorted(set(next(iter(labels_of.values()))), key=lambda label: (str(type(label)), label))
        if label_names is not None:
            values = label_names if isinstance(values[0], str) else range(len(label_names))
        names = label_names or [str(value) for value in values]
        index_of = {value: index for index, value in enumerate(values)}
        source = "the training split" if label_names is None else "--label_names"
        for key, data in list(splits.items()):
            if unknown := sorted({str(label) for label in labels_of[key] if label not in index_of}):
                raise ValueError(
                    f"labels {', '.join(unknown[:5])} of the split {split_names[key]!r} do not occur in {source}"
                )
            encoded = [index_of[label] for label in labels_of[key]]
            splits[key] = data.remove_columns("label").add_column("label", encoded, feature=ClassLabel(names=names))
    for key, data in splits.items():
        labels = np.asarray(data["label"][:])
        wrong = np.flatnonzero((labels < 0) | (labels >= len(names)))
        if len(wrong):
            raise ValueError(
                f"{len(wrong)} labels of the split {split_names[key]!r} lie outside 0 to {len(names) - 1}, the first is "
                f"{labels[wrong[0]]} in row {wrong[0]}: an unlabelled split cannot be used"
            )
    return splits, names


def check_label_values(values: set):
    """Raises ValueError for numbers or text that name no classes: numbers with decimals, and lists of labels in one text.

    A text is a list if each of its parts between `;`, `|` or `,` occurs in another label as well: red;bag beside red and bag, or
    beside red;shoe and blue;bag. In Felidae|lion and Felidae|tiger, or AC;DC, a part occurs once: these are names.
    """
    if decimals := sorted(value for value in values if isinstance(value, float) and not value.is_integer()):
        raise ValueError(
            f"the labels are numbers with decimals ({', '.join(map(str, decimals[:3]))} ...), and float targets (regression) "
            "are not supported; wanted the names or numbers of classes: name another column with --label_column"
        )
    for separator in ";|,":
        parts_of = {
            text: {part.strip() for part in text.split(separator)} - {""} for text in values if isinstance(text, str)
        }
        counts = Counter(part for parts in parts_of.values() for part in parts)
        several = sorted(text for text, parts in parts_of.items() if len(parts) > 1)
        for text in several:
            if all(counts[part] > 1 for part in parts_of[text]):
                raise ValueError(
                    f"the label {text!r} looks like several labels, as {' and '.join(sorted(parts_of[text]))} occur in others, "
                    f"too: several labels an image are not supported; wanted one label a row (where it is a name, write it "
                    f"without {separator!r})"
                )
        if several and separator != ",":  # which is usual in names
            logger.warning(f"the label {several[0]!r} is taken for the name of one class")


def match_labels(labels: torch.Tensor, names: list[str], id2label: dict[int, str]) -> torch.Tensor:
    """Class indices of a data set (n,) -> those of a model with the classes `id2label`, matched by name.

    Raises:
        ValueError: if the data set names a class that the model does not know, or knows twice.
    """
    model_names = [id2label[index] for index in range(len(id2label))]
    if model_names == names:
        return labels
    index_of = {name: index for index, name in enumerate(model_names)}
    if ambiguous := sorted({name for name in names if model_names.count(name) > 1}):
        raise ValueError(
            f"the model calls several of its labels {', '.join(ambiguous[:5])}: which one is meant cannot be told"
        )
    if unknown := sorted(set(names) - set(index_of)):
        raise ValueError(
            f"the model does not know {len(unknown)} of the data set's {len(names)} labels: {unknown[:5]}; it knows "
            f"{sorted(index_of)[:5]}; score a data set with the model's labels, or fine-tune the model on this one"
        )
    return torch.tensor([index_of[name] for name in names])[labels]

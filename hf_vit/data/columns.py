"""Finds the image and the label column of a data set, and turns labels of any kind into class indices, one or several an image."""

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Image, LargeList, List, Value

from hf_vit.data.image_files import RestrictedImage
from hf_vit.system.errors import UserError
from hf_vit.system.text import listed


COLUMN_FLAGS = ("image_column", "label_column", "label_names", "label_separator", "label_columns")
NUMBER = r"-?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"
LABEL_COLUMNS = ("label", "labels", "class", "category", "cls")  # the last is WebDataset's


def find_columns(data: Dataset, image_column: str | None, label_column: str | None) -> tuple[str, str]:
    """Names of the image and the label column: those given, else the only Image and the only ClassLabel column, or without one the
    only column called as `LABEL_COLUMNS`.

    Raises:
        UserError: if a column is missing, unsuitable or ambiguous; it lists the columns.
    """
    kinds = {name: label_feature(kind) for name, kind in data.features.items()}
    usable = [name for name, kind in kinds.items() if isinstance(kind, (ClassLabel, Value))]
    usual = [name for name, kind in kinds.items() if isinstance(kind, ClassLabel)]
    usual = usual or [name for name in usable if name.lower() in LABEL_COLUMNS]
    image_column = find_image_column(data, image_column)
    return image_column, choose_column(data.features, "--label_column", label_column, usual, usable)


def find_image_column(data: Dataset, image_column: str | None) -> str:
    """Name of the image column: the one given, else the only one of images; UserError as `find_columns`."""
    usable = [name for name, kind in data.features.items() if holds_images(kind)]
    images = [name for name in usable if isinstance(data.features[name], Image)]
    return choose_column(data.features, "--image_column", image_column, images or usable, usable)


def choose_column(columns: Iterable[str], flag: str, given: str | None, usual: list[str], usable: list[str]) -> str:
    """The one of the columns that the user names, else the only usual one."""
    found = usual if given is None else [given]
    if len(found) != 1 or found[0] not in usable:
        what = f"{flag} {', '.join(found)}: wanted the name of one column that can be used"
        raise UserError(f"{what}; the columns are {', '.join(columns)}")
    return found[0]


def holds_images(feature) -> bool:
    """Whether a column holds images, or the bytes of image files."""
    is_struct = isinstance(feature, dict) and set(feature) == {"bytes", "path"}
    return isinstance(feature, Image) or feature == Value("binary") or is_struct


def label_feature(feature):
    """The type of a label: of a list of them, that of its elements."""
    return feature.feature if isinstance(feature, (List, LargeList)) else feature


def has_several_labels(rows: Dataset) -> bool:
    """Whether the column `label` holds a list of labels for each image."""
    return isinstance(rows.features["label"], (List, LargeList))


def label_tensor(rows: Dataset) -> torch.Tensor:
    """The encoded column `label`: class indices (n,) or numbers, float32 (n,); where an image has several labels, 0 and 1 of each,
    float32 (n, L)."""
    if has_several_labels(rows):
        return multi_hot(rows["label"][:], len(class_names_of(rows)))
    dtype = torch.long if isinstance(rows.features["label"], ClassLabel) else torch.float32
    return torch.tensor(np.asarray(rows["label"][:]), dtype=dtype)


def multi_hot(labels: list[list[int]], num_labels: int) -> torch.Tensor:
    """Lists of class indices -> 0 and 1 of each label, float32 (n, L)."""
    hot = torch.zeros(len(labels), num_labels)
    for row, indices in enumerate(labels):
        hot[row, indices] = 1.0
    return hot


def count_labels(labels: torch.Tensor, num_labels: int) -> torch.Tensor:
    """How many images have each label (L,), of labels as `label_tensor` gives them."""
    return torch.bincount(labels, minlength=num_labels) if labels.ndim == 1 else labels.sum(dim=0).long()


def select_image_and_label(data, columns: tuple[str, ...]):
    """Keeps the image and, if there is one, the label column, called `image` (undecoded) and `label`."""
    if not isinstance(data.features[columns[0]], RestrictedImage):
        data = data.cast_column(columns[0], Image(decode=False))
    names = {old: new for old, new in zip(columns, ("image", "label"), strict=False) if old != new}
    return data.select_columns(list(columns)).rename_columns(names)


def join_label_columns(data: Dataset, label_columns: str) -> Dataset:
    """The columns `label_columns`, such as "cat,dog", which say of each image whether it has the label of that name, as one column
    `label` of lists.

    Raises:
        UserError: if one is missing, or holds anything but 0 and 1.
    """
    names = [name.strip() for name in label_columns.split(",") if name.strip()]
    if missing := [name for name in names if name not in data.features]:
        raise UserError(f"--label_columns: there is no column {', '.join(missing)}, only {', '.join(data.features)}")
    number = lambda value: value if np.isscalar(value) else None
    hot = [pd.to_numeric(pd.Series(map(number, data[name][:])), errors="coerce") for name in names]
    hot = np.stack(hot, axis=1)  # (n, L)
    for name, column in zip(names, hot.T, strict=True):
        wrong = np.flatnonzero(~np.isin(column, (0, 1)))
        refuse_rows(f"the column {name} of --label_columns must hold 0 or 1", wrong, data[name])
    lists = [np.flatnonzero(row).tolist() for row in hot]
    data = data.remove_columns([*names, *({"label"} & set(data.features) - set(names))])
    return data.add_column("label", lists, feature=List(ClassLabel(names=names)))


def encode_labels(
    splits: DatasetDict,
    label_names: list[str] | None,
    split_names: dict[str, str],
    label_separator: str | None = None,
    regression: bool = False,
) -> tuple[DatasetDict, list[str]]:
    """Labels of any kind -> class indices, and the class names: `label_names`, else those of a ClassLabel, else the sorted
    values of the first split. Lists of labels, which may be empty, become lists of class indices. All are matched by name.

    Args:
        split_names: what errors call each split.
        label_separator: takes a text apart into a list of labels.
        regression: the labels are numbers to predict: they become float32, and there are no class names.

    Raises:
        UserError: if a label is missing, unknown or twice in a list, some splits have lists of labels and others not, or one is no
            finite number, which `regression` needs.
    """
    if len({has_several_labels(rows) for rows in splits.values()}) > 1:
        raise UserError(
            f"of the splits {', '.join(split_names.values())} some have lists of labels, and some have not"
        )
    labels_of = {key: read_labels(rows, split_names[key], label_separator) for key, rows in splits.items()}
    if regression:
        return DatasetDict({key: set_numbers(rows, labels_of[key]) for key, rows in splits.items()}), []
    first = next(iter(splits))
    known = class_names_of(splits[first]) or text_classes(set(chain(*labels_of[first])), label_names)
    place_of, names = name_classes(known, label_names)
    for key, rows in splits.items():
        if unknown := sorted(set(chain(*labels_of[key])) - place_of.keys()):
            what = f"the split {split_names[key]!r} has labels that are none of the {len(names)} classes"
            raise UserError(f"{what}: {listed(unknown)}")
        if class_names_of(rows) != names:
            places = [[place_of[one] for one in label] for label in labels_of[key]]
            several = label_separator is not None or has_several_labels(rows)
            splits[key] = set_labels(rows, places if several else [*chain(*places)], names)
    return splits, names


def set_labels(rows: Dataset, labels: list, names: list[str]) -> Dataset:
    """Rows with these class indices, or lists of them, as their column `label`."""
    kind = ClassLabel(names=names)
    kind = List(kind) if isinstance(labels[0], list) else kind
    return rows.remove_columns("label").add_column("label", labels, feature=kind)


def set_numbers(rows: Dataset, labels: list[list[str]]) -> Dataset:
    """Rows with the numbers that their labels spell as their column `label`, float32."""
    is_number = lambda label: len(label) == 1 and re.fullmatch(NUMBER, label[0]) is not None
    wrong = [row for row, label in enumerate(labels) if not is_number(label)]
    refuse_rows("--problem_type regression needs labels that are numbers", wrong, labels)
    return rows.remove_columns("label").add_column("label", [*map(float, chain(*labels))], feature=Value("float32"))


def read_labels(rows: Dataset, split_name: str, label_separator: str | None) -> list[list[str]]:
    """The labels of each image of a split as text, those of a ClassLabel by their names. UserError for one that is missing, or
    twice in a list."""
    labels, names = rows["label"][:], dict(enumerate(class_names_of(rows)))
    if label_separator is not None:  # an empty cell of a table is None
        wrong = [row for row, label in enumerate(labels) if not isinstance(label, str | None)]
        refuse_rows("--label_separator needs labels that are text", wrong, labels)
        parts = lambda text: map(str.strip, (text or "").split(label_separator))
        labels = [list(filter(None, parts(text))) for text in labels]
    lists = [label if isinstance(label, list) else [label] for label in labels]
    is_missing = lambda label: label in (None, "") or label != label  # the last is NaN
    missing = [row for row, label in enumerate(lists) if any(map(is_missing, label))]
    refuse_rows(f"each image of the split {split_name!r} must have a label", missing, labels)
    twice = [row for row, label in enumerate(lists) if len(set(label)) < len(label)]
    refuse_rows("lists must name a label once; columns of 0 and 1 are named by --label_columns", twice, labels)
    return [[str(names.get(one, one)) for one in label] for label in lists]  # -1, for no label, is the name of none


def class_names_of(rows: Dataset) -> list[str]:
    """The names of a column `label` of ClassLabels; none of other columns."""
    feature = label_feature(rows.features["label"])
    return feature.names if isinstance(feature, ClassLabel) else []


def text_classes(values: set[str], label_names: list[str] | None) -> list[str]:
    """The classes of labels that are text or numbers, sorted; UserError for none, and for numbers with decimals that no name stands for."""
    decimals = any("." in value for value in values) and all(re.fullmatch(NUMBER, value) for value in values)
    if not values or (decimals and label_names is None):
        raise UserError(
            f"the labels must name classes, got {listed(sorted(values), 3) or 'none'}: name another column with --label_column; to predict "
            "numbers, pass --problem_type regression"
        )
    whole = all(value.removeprefix("-").isdecimal() for value in values)
    return sorted(values, key=lambda value: (int(value) if whole else 0, value))


def refuse_rows(what: str, wrong: Sequence[int], values: list):
    """Raises UserError with the first three rows that are wrong, if there are any."""
    if len(wrong):
        shown = ", ".join(f"row {row} has {values[int(row)]!r:.200}" for row in wrong[:3])
        raise UserError(f"{what}; {len(wrong):,} of {len(values):,} rows do not: {shown}")


def name_classes(known: list[str], label_names: list[str] | None) -> tuple[dict[str, int], list[str]]:
    """The place of each class that the data know, and the names of the classes.

    Numbers, also those that class folders are called by, stand for as many `label_names` in their order.

    Raises:
        UserError: for a class that is none of the names.
    """
    names = classes = label_names or known
    if all(map(str.isdecimal, known)) and not set(known) <= set(names):
        classes = sorted(known, key=int)
    place_of = {name: place for place, name in enumerate(classes)}
    if len(classes) != len(names) or not place_of.keys() >= set(known):
        raise UserError(
            f"--label_names has {listed(names)}: wanted {listed(known)}, or as many names as there are numbers"
        )
    return place_of, names


def match_labels(labels: torch.Tensor, names: list[str], id2label: dict[int, str]) -> torch.Tensor:
    """Labels of a data set, class indices (n,) or 0 and 1 of each (n, L) -> those of a model with the classes `id2label`, matched
    by name.

    Raises:
        UserError: if the data set names a class that the model does not know, or knows twice.
    """
    model_names = [id2label[index] for index in range(len(id2label))]
    if model_names == names:
        return labels
    if unclear := [name for name in names if model_names.count(name) != 1]:
        raise UserError(
            f"the model does not know {len(unclear)} of the data set's {len(names)} labels: {listed(unclear)}, or has them twice; it knows "
            f"{listed(sorted(set(model_names)))}: evaluate on a data set with the model's labels, or fine-tune the model on this one"
        )
    places = torch.tensor([model_names.index(name) for name in names])
    if labels.ndim == 1:
        return places[labels]
    matched = torch.zeros(len(labels), len(model_names))
    matched[:, places] = labels
    return matched


def column_arguments(args) -> dict:
    """The arguments of `prepare_splits` that say where images and labels are in the data, from flags of the same names."""
    return {name: getattr(args, name) for name in COLUMN_FLAGS} | {"label_names": read_label_names(args.label_names)}


def read_label_names(path: str | None) -> list[str] | None:
    """The lines of a text file of class names; None for None.

    Raises:
        UserError: if a name is empty or stands twice.
    """
    if path is None:
        return None
    names = [name.strip() for name in Path(path).read_text(encoding="utf-8-sig").splitlines()]
    if len(names) < 2 or len({*names, ""}) <= len(names):
        raise UserError(f"--label_names {path}: must hold two or more lines, each another name")
    return names

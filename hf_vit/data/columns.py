"""Finds the image and the label column of a data set, and turns labels of any kind into class indices, one or several an image."""

import re
import unicodedata
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Image, LargeList, List, Value

from hf_vit.data.image_files import RestrictedImage
from hf_vit.system.errors import UserError
from hf_vit.system.progress import warn


COLUMN_FLAGS = ("image_column", "label_column", "label_names", "label_separator", "label_columns")
ROW = "row of the list"  # the number of a row in a list of files that is read in another order
LABEL_COLUMNS = ("label", "labels", "class", "cls", "category", "target")  # usual names of label columns


def find_columns(
    data: Dataset, image_column: str | None, label_column: str | None, label_separator: str | None = None
) -> tuple[str, str]:
    """Names of the image and the label column: those given, else the only Image and the only ClassLabel column.

    If no column is a ClassLabel, the only one with a usual name ("label", "class", WebDataset's "cls") is taken, or the only one
    of lists of ClassLabel.

    Raises:
        ValueError: if a column is missing, unsuitable or ambiguous; it lists the columns.
    """
    image_column = find_image_column(data, image_column)
    columns = _columns_of(data)
    if label_column is None:
        label_column = _only_column(data, ClassLabel, "--label_column", columns, image_column)
    if label_column not in data.features:
        raise UserError(f"--label_column {label_column}: there is no such column{columns}")
    feature = data.features[label_column]
    if not isinstance(label_feature(feature), (ClassLabel, Value)):
        raise UserError(f"--label_column {label_column}: it holds neither text nor numbers{columns}")
    is_text = isinstance(feature, Value) and feature.dtype in ("string", "large_string")
    if label_separator is not None and not is_text:
        raise UserError(
            f"--label_separator {label_separator}: the labels ({label_column}) are {feature_name(feature)}; wanted text to take "
            f"apart, such as cat{label_separator}dog"
        )
    return image_column, label_column


def label_feature(feature):
    """The type of a label: of a list of them, that of its elements."""
    return feature.feature if isinstance(feature, (List, LargeList)) else feature


def has_several_labels(rows: Dataset) -> bool:
    """Whether the column `label` holds a list of labels for each image."""
    return isinstance(rows.features["label"], (List, LargeList))


def label_tensor(rows: Dataset) -> torch.Tensor:
    """The encoded column `label`: class indices (n,), or where an image has several labels, 0 and 1 of each, float32 (n, L)."""
    if not has_several_labels(rows):
        return torch.tensor(np.asarray(rows["label"][:]), dtype=torch.long)
    return multi_hot(rows["label"][:], len(label_feature(rows.features["label"]).names))


def multi_hot(labels: list[list[int]], num_labels: int) -> torch.Tensor:
    """Lists of class indices -> 0 and 1 of each label, float32 (n, L)."""
    hot = torch.zeros(len(labels), num_labels)
    for row, indices in enumerate(labels):
        hot[row, indices] = 1.0
    return hot


def count_labels(labels: torch.Tensor, num_labels: int) -> torch.Tensor:
    """How many images have each label (L,), of labels as `label_tensor` gives them."""
    return torch.bincount(labels, minlength=num_labels) if labels.ndim == 1 else labels.sum(dim=0).long()


def find_image_column(data: Dataset, image_column: str | None) -> str:
    """Name of the image column: the one given, else the only Image column; ValueError as `find_columns`."""
    columns = _columns_of(data)
    if image_column is None:
        image_column = _only_column(data, Image, "--image_column", columns)
    if image_column not in data.features:
        raise UserError(f"--image_column {image_column}: there is no such column{columns}")
    if not holds_images(data.features[image_column]):
        raise UserError(f"--image_column {image_column}: it holds no images{columns}")
    return image_column


def _columns_of(data: Dataset) -> str:
    """The end of an error: names and types of all columns."""
    return "; the columns are " + ", ".join(f"{name} ({feature_name(kind)})" for name, kind in data.features.items())


def _only_column(data: Dataset, wanted: type, flag: str, columns: str, image_column: str | None = None) -> str:
    """The only column of a feature type or, for labels, with a usual name."""
    found = [name for name, feature in data.features.items() if isinstance(feature, wanted)]
    if not found and wanted is Image:  # bytes and paths of images, as pandas writes them
        found = [name for name, feature in data.features.items() if holds_images(feature)]
    if not found and wanted is ClassLabel:
        found = [name for name in data.features if name != image_column and name.lower() in LABEL_COLUMNS]
        found = found or [name for name, kind in data.features.items() if isinstance(label_feature(kind), ClassLabel)]
    if len(found) != 1:
        number = f"{len(found)} columns ({', '.join(found)})" if found else "no column"
        hint = ""
        if list(data.features) == ["image"]:
            hint = "; in a folder of images, wanted two or more sub-folders, one a class, and no image beside them"
        raise UserError(f"the data set has {number} of type {wanted.__name__}: name one with {flag}{columns}{hint}")
    return found[0]


def feature_name(feature) -> str:
    """What an error calls the type of a column."""
    if isinstance(feature, Image):
        return "Image"
    return feature.dtype if isinstance(feature, Value) else type(feature).__name__


def holds_images(feature) -> bool:
    """Whether a column holds images, or the bytes of image files."""
    is_struct = isinstance(feature, dict) and set(feature) == {"bytes", "path"}
    return isinstance(feature, Image) or feature == Value("binary") or is_struct


def select_image_and_label(data, columns: tuple[str, str]):
    """Keeps the image and the label column, called `image` (undecoded) and `label`."""
    if not isinstance(data.features[columns[0]], RestrictedImage):
        data = data.cast_column(columns[0], Image(decode=False))
    data = data.select_columns([*columns, *({ROW} & set(data.features))])
    for old, new in zip(columns, ("image", "label"), strict=True):
        if old != new:
            data = data.rename_column(old, new)
    return data


def join_label_columns(data: Dataset, label_columns: str) -> Dataset:
    """The columns `label_columns`, such as "cat,dog", which say of each image whether it has the label of that name, as one column
    `label` of lists.

    Raises:
        ValueError: if one is missing, or holds anything but 0 and 1.
    """
    names = [name.strip() for name in label_columns.split(",") if name.strip()]
    if missing := [name for name in names if name not in data.features]:
        raise UserError(f"--label_columns: there is no column {', '.join(missing)}{_columns_of(data)}")
    hot = np.empty((len(data), len(names)), bool)
    for column, name in enumerate(names):
        values = data[name][:]
        if wrong := [row for row, value in enumerate(values) if value not in (0, 1)]:
            raise UserError(
                f"--label_columns: {len(wrong)} values of {name} are neither 0 nor 1, the first is {values[wrong[0]]!r} in row "
                f"{wrong[0]}; wanted 1 where the image has that label, and 0 where it has not"
            )
        hot[:, column] = values
    lists = [np.flatnonzero(row).tolist() for row in hot]
    data = data.remove_columns([*names, *({"label"} & set(data.features) - set(names))])
    return data.add_column("label", lists, feature=List(ClassLabel(names=names)))


def encode_labels(
    splits: DatasetDict,
    label_names: list[str] | None,
    split_names: dict[str, str],
    label_separator: str | None = None,
    train_names: list[str] | None = None,
    from_one: bool = True,
) -> tuple[DatasetDict, list[str]]:
    """Labels of any kind -> class indices, and the class names: `label_names`, else those of a ClassLabel, else the sorted
    values of the first split. Lists of labels, which may be empty, become lists of class indices. Splits whose ClassLabels differ
    are matched by name.

    Args:
        split_names: what errors call each split.
        label_separator: takes a text apart into a list of labels.
        train_names: the ClassLabel of a training split that is not among `splits`; by default that of the first split.
        from_one: whether numbers may begin at 1; those of a stream begin at 0.

    Raises:
        ValueError: if a label is missing, unknown or outside the classes, or twice in a list.
    """
    if label_separator == "":
        raise UserError("--label_separator is empty: wanted what stands between two labels, such as ';'")
    first = next(iter(splits.values()))
    several = label_separator is not None or has_several_labels(first)
    if any(has_several_labels(data) != has_several_labels(first) for data in splits.values()):
        raise UserError(
            f"of the splits {' and '.join(split_names.values())}, one has lists of labels and the other has one label an image; "
            "wanted the same in both"
        )
    flat = lambda labels: [label for of_image in labels for label in of_image] if several else labels
    if train_names is not None or isinstance(label_feature(first.features["label"]), ClassLabel):
        known = train_names or label_feature(first.features["label"]).names
        names = label_names or known
        place_of = dict(zip(known, places_in_names(known, names), strict=True))
        _match_class_labels(splits, place_of, names, split_names, several)
    else:
        labels_of = {key: data["label"][:] for key, data in splits.items()}
        refuse_lists_as_text({label for labels in labels_of.values() for label in labels if isinstance(label, str)})
        if label_separator is not None:  # an empty cell of a table is None
            take_apart = lambda text: [part.strip() for part in (text or "").split(label_separator) if part.strip()]
            labels_of = {key: list(map(take_apart, labels)) for key, labels in labels_of.items()}
        for key, labels in labels_of.items():
            is_missing = lambda label: label is None or label != label  # None or NaN
            empty = [
                row
                for row, label in enumerate(labels)
                if is_missing(label) or (several and any(map(is_missing, label)))
            ]
            if empty:
                is_text = any(isinstance(label, str) for label in labels)
                raise UserError(missing_labels(empty, split_names[key], is_text))
        check_label_values(set().union(*map(flat, labels_of.values())), several)
        values = sorted(set(flat(next(iter(labels_of.values())))), key=lambda label: (str(type(label)), label))
        if not values:
            raise UserError(f"no image of the split {split_names[next(iter(splits))]!r} has a label")
        if label_names is not None:
            values = label_names if isinstance(values[0], str) else numbers_of_names(values, label_names, from_one)
        names = label_names or [str(value) for value in values]
        index_of = {value: index for index, value in enumerate(values)}
        source = "the training split" if label_names is None else "--label_names"
        for key, data in list(splits.items()):
            if unknown := sorted({str(label) for label in flat(labels_of[key]) if label not in index_of}):
                raise UserError(
                    f"labels {', '.join(unknown[:5])} of the split {split_names[key]!r} do not occur in {source}"
                )
            if several:
                encoded = [[index_of[label] for label in of_image] for of_image in labels_of[key]]
            else:
                encoded = [index_of[label] for label in labels_of[key]]
            kind = ClassLabel(names=names)
            kind = List(kind) if several else kind
            splits[key] = data.remove_columns("label").add_column("label", encoded, feature=kind)
    for key, data in splits.items():
        if several:
            check_label_lists(data["label"][:], names, split_names[key])
            continue
        labels = np.asarray(data["label"][:])
        wrong = np.flatnonzero((labels < 0) | (labels >= len(names)))
        if len(wrong):
            raise UserError(
                f"{len(wrong)} labels of the split {split_names[key]!r} lie outside 0 to {len(names) - 1}, the first is "
                f"{labels[wrong[0]]} in row {wrong[0]}: an unlabelled split cannot be used"
            )
    return splits, names


def numbers_of_names(values: list[int], label_names: list[str], from_one: bool) -> range:
    """The numbers that stand for the names of --label_names, in their order: from 0 on, or if they may begin `from_one` from there
    on where the last one is their count. A warning says which is which unless 0 occurs."""
    start = 1 if from_one and values[0] == 1 and values[-1] == len(label_names) else 0
    if values[0] != 0:
        shown = ", ".join(f"{number} is {name}" for number, name in enumerate(label_names[:3], start))
        warn(f"--label_names: {shown}{' ...' if len(label_names) > 3 else ''}")
    return range(start, start + len(label_names))


def warn_of_similar_names(names: list[str]):
    """One warning on classes whose names differ in capitals, blanks or Unicode form alone, as slips of the hand make them."""
    alike = defaultdict(list)
    for name in names:
        alike[" ".join(unicodedata.normalize("NFC", name).casefold().split())].append(name)
    if pairs := [" and ".join(map(repr, same)) for same in alike.values() if len(same) > 1]:
        warn(f"{', '.join(pairs[:5])} are different classes: rename the labels if they are the same")


def _match_class_labels(
    splits: DatasetDict, place_of: dict[str, int], names: list[str], split_names: dict[str, str], several: bool
):
    """Class indices of each split, or lists of them, -> their places in `names`.

    Args:
        place_of: {class of the training split: its place in `names`}, in the order of its ClassLabel, which bare numbers follow.

    Raises:
        ValueError: for a label that is missing, or of a class that the training split does not know.
    """
    for key, data in list(splits.items()):
        labels, feature = data["label"][:], label_feature(data.features["label"])
        if empty := [row for row, label in enumerate(labels) if label is None or (several and None in label)]:
            raise UserError(missing_labels(empty, split_names[key]))
        own = feature.names if isinstance(feature, ClassLabel) else list(place_of)
        places = [place_of.get(name, -1) for name in own]
        if places == list(range(len(place_of))) and (own == names or not isinstance(feature, ClassLabel)):
            continue
        used = {index for label in labels for index in label} if several else set(labels)
        if unknown := [name for index, name in enumerate(own) if index in used and name not in place_of]:
            raise UserError(
                f"the split {split_names[key]!r} has images of {len(unknown)} classes that the training split does not know: "
                f"{', '.join(unknown[:5])} (it knows {', '.join(list(place_of)[:5])}): give both the same class names, or take "
                "these images out"
            )
        place = dict(enumerate(places))  # other numbers become -1, which is no class
        encoded = [[place.get(each, -1) for each in label] if several else place.get(label, -1) for label in labels]
        kind = ClassLabel(names=names)
        kind = List(kind) if several else kind
        splits[key] = data.remove_columns("label").add_column("label", encoded, feature=kind)


def missing_labels(rows: list[int], split_name: str, is_text: bool = False) -> str:
    """What is said of rows without a label; where labels are text, a row may hold none or several of them."""
    advice = "; where an image may have none or several, pass --label_separator" if is_text else ""
    return f"{len(rows)} labels of the split {split_name!r} are missing, the first in row {rows[0]}{advice}"


def places_in_names(known: list[str], label_names: list[str]) -> list[int]:
    """Where each class of the data set stands in the names of the user: by name, if all occur there, in capitals or not; by
    number, if the classes are called 1, 2 ... 10, which sort as 1, 10, 2; else in the order of the data set, and a line says so.

    Raises:
        ValueError: if only some of the classes occur in the names, or none does and there are more or fewer names than classes.
    """
    ours, theirs = ([name.strip().casefold() for name in names] for names in (known, label_names))
    if len(set(ours)) < len(ours) or len(set(theirs)) < len(theirs):  # Cat and cat are two classes
        ours, theirs = ([name.strip() for name in names] for names in (known, label_names))
    place_of = {name: place for place, name in enumerate(theirs)}
    if set(ours) <= set(theirs):
        return [place_of[name] for name in ours]
    are_numbers = all(name.isdecimal() for name in known)
    if not are_numbers and set(ours) & set(theirs):
        lacking = [name for name, key in zip(known, ours, strict=True) if key not in place_of]
        others = [name for name, key in zip(label_names, theirs, strict=True) if key not in set(ours)]
        raise UserError(
            f"--label_names lacks {len(lacking)} of the {len(known)} classes ({', '.join(map(repr, lacking[:5]))}) and has "
            f"{len(others)} names of no class ({', '.join(map(repr, others[:5]))}): wanted each class, spelled as in the data, or "
            "other names for all of them, in the order of the classes"
        )
    ordered = sorted(known, key=int) if are_numbers else known
    counts_on = are_numbers and [int(name) - int(ordered[0]) for name in ordered] == list(range(len(known)))
    is_obvious = counts_on and int(ordered[0]) <= 1  # 0, 1, 2 or 1, 2, 3
    if len(known) > len(label_names) or (len(known) < len(label_names) and not is_obvious):
        raise UserError(
            f"--label_names has {len(label_names)} names and the data set has {len(known)} classes ({', '.join(known[:5])}"
            f"{' ...' if len(known) > 5 else ''}), none of which is among them: wanted a name for each class, in their order"
        )
    if not (is_obvious and len(known) == len(label_names)):
        pairs = [f"{name} is called {called}" for name, called in zip(ordered[:5], label_names, strict=False)]
        more = " ..." if len(known) > 5 else ""
        warn(f"--label_names has other names than the data set: {', '.join(pairs)}{more}")
    place_of = {name: place for place, name in enumerate(ordered)}
    return [place_of[name] for name in known]


def check_label_lists(labels: list, names: list[str], split_name: str):
    """Raise ValueError for a list of class indices that is missing, or that holds an index outside of `names` or twice."""
    for row, indices in enumerate(labels):
        if indices is None or any(index is None or not 0 <= index < len(names) for index in indices):
            raise UserError(
                f"row {row} of the split {split_name!r} has the labels {indices}; wanted a list of numbers from 0 to "
                f"{len(names) - 1}, empty where the image has no label"
            )
        if len(set(indices)) < len(indices):
            twice = next(index for index in indices if indices.count(index) > 1)
            raise UserError(
                f"row {row} of the split {split_name!r} has the label {names[twice]!r} twice; wanted a list of the labels that the "
                "image has, each once; a list of 0 and 1 for every label belongs into columns (--label_columns)"
            )


def refuse_lists_as_text(labels: set[str]):
    """Raises ValueError for labels such as "['cat', 'dog']", as pandas writes lists into a CSV file."""
    if lists := [text for text in map(str.strip, labels) if re.fullmatch(r"\[(['\"].*|.*,.*)?\]", text)]:
        raise UserError(
            f"the label {min(lists)!r} is a list as text: wanted cat;dog, with --label_separator ';', or a .jsonl file with lists"
        )


def check_label_values(values: set, several: bool = False):
    """Raises ValueError for numbers or text that name no classes: numbers with decimals and, unless an image has `several` labels
    anyway, lists of labels in one text.

    A text is a list if each of its parts between `;`, `|` or `,` occurs in another label as well: red;bag beside red and bag, or
    beside red;shoe and blue;bag. In Felidae|lion and Felidae|tiger, or AC;DC, a part occurs once: these are names.
    """
    if decimals := sorted(value for value in values if isinstance(value, float) and not value.is_integer()):
        raise UserError(
            f"the labels are numbers with decimals ({', '.join(map(str, decimals[:3]))} ...), and float targets (regression) "
            "are not supported; wanted the names or numbers of classes: name another column with --label_column"
        )
    for separator in () if several else ";|,":
        parts_of = {
            text: {part.strip() for part in text.split(separator)} - {""} for text in values if isinstance(text, str)
        }
        counts = Counter(part for parts in parts_of.values() for part in parts)
        several = sorted(text for text, parts in parts_of.items() if len(parts) > 1)
        for text in several:
            if all(counts[part] > 1 for part in parts_of[text]):
                raise UserError(
                    f"the label {text!r} looks like several labels, as {' and '.join(sorted(parts_of[text]))} occur in others, "
                    f"too: pass --label_separator {separator!r} to take it apart (where it is a name, write it without "
                    f"{separator!r})"
                )
        if several and separator != ",":  # which is usual in names
            warn(f"the label {several[0]!r} is taken for the name of one class")


def match_labels(labels: torch.Tensor, names: list[str], id2label: dict[int, str]) -> torch.Tensor:
    """Labels of a data set, class indices (n,) or 0 and 1 of each (n, L) -> those of a model with the classes `id2label`, matched
    by name.

    Raises:
        ValueError: if the data set names a class that the model does not know, or knows twice.
    """
    model_names = [id2label[index] for index in range(len(id2label))]
    if model_names == names:
        return labels
    index_of = {name: index for index, name in enumerate(model_names)}
    if ambiguous := sorted({name for name in names if model_names.count(name) > 1}):
        raise UserError(
            f"the model calls several of its labels {', '.join(ambiguous[:5])}: which one is meant cannot be told"
        )
    if unknown := sorted(set(names) - set(index_of)):
        raise UserError(
            f"the model does not know {len(unknown)} of the data set's {len(names)} labels: {unknown[:5]}; it knows "
            f"{sorted(index_of)[:5]}; score a data set with the model's labels, or fine-tune the model on this one"
        )
    places = torch.tensor([index_of[name] for name in names])
    if labels.ndim == 1:
        return places[labels]
    matched = torch.zeros(len(labels), len(model_names))
    matched[:, places] = labels
    return matched


def column_arguments(args) -> dict:
    """The arguments of `prepare_splits` that say where images and labels are in the data, from flags of the same names."""
    return {name: getattr(args, name) for name in COLUMN_FLAGS} | {"label_names": read_label_names(args.label_names)}


def named_label_columns(args) -> str | None:
    """What --label_column or --label_columns say, for `load_splits`."""
    return args.label_column or args.label_columns


def read_label_names(path: str | None) -> list[str] | None:
    """The lines of a text file of class names; None for None.

    Raises:
        ValueError: if there is no such file, or a name is empty or stands twice.
    """
    if path is None:
        return None
    if not Path(path).is_file():
        raise UserError(f"--label_names {path}: no such file")
    names = [name.strip() for name in Path(path).read_text(encoding="utf-8-sig").splitlines()]
    counts = Counter(names)
    wrong = [name for name in names if not name or counts[name] > 1]
    if wrong or len(names) < 2:
        raise UserError(
            f"--label_names {path}: wanted two or more lines, each another name, but found {wrong[:1] or names}"
        )
    return names

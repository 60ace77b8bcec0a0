"""Chooses the training and the evaluation split: named, held out, or a part of one, stratified by class."""

import numpy as np
import torch
from datasets import Dataset, DatasetDict

from hf_vit.data.columns import (
    count_labels,
    encode_labels,
    find_columns,
    join_label_columns,
    label_tensor,
    select_image_and_label,
)
from hf_vit.data.folders import SPLIT_OF_WORD
from hf_vit.system.errors import UserError
from hf_vit.system.text import counted, listed


EVAL_SPLITS = [word for word, split in SPLIT_OF_WORD.items() if split != "train"]  # the first of these is scored


def prepare_splits(
    splits: DatasetDict,
    *,
    train_split: str | None = "train",
    eval_split: str | None = None,
    eval_fraction: float = 0.1,
    shots: int | None = None,
    seed: int = 0,
    min_classes: int = 2,
    regression: bool = False,
    **columns,
) -> tuple[DatasetDict, list[str], str]:
    """The training and the evaluation split, with the columns `image` (undecoded), `label` (class index, or a list of them where an
    image has several labels) and `row` (its number in the original split).

    Args:
        splits: as `load_splits` gives them.
        train_split: None for evaluation only.
        eval_split: by default "validation", else "test", or another of `EVAL_SPLITS`; else a stratified part of the training split
            is held out.
        eval_fraction: the size of that part.
        shots: the number of images of each class to train on, of what is not held out.
        seed: decides what is held out and left out.
        min_classes: that training images must be of.
        regression: labels are numbers, float32, with no class names; what is held out is drawn from all images alike.
        columns: as of `select_and_encode`.

    Returns:
        The splits "train" and "eval"; the class names; and what "eval" is: the name of a split, or "part of train".

    Raises:
        UserError: for an unknown or empty split, columns that cannot be found, labels that are no class index or that
            training lacks, or more shots than there are images.
    """
    eval_split = eval_split or find_eval_split(splits, train_split)
    split_names = {key: name for key, name in (("train", train_split), ("eval", eval_split)) if name is not None}
    if not split_names:
        raise UserError(f"the data set has no validation or test split; name one with --split: {', '.join(splits)}")
    chosen, names = select_and_encode(splits, split_names, regression=regression, **columns)
    if train_split is None:
        return chosen, names, eval_split

    refuse_contradicting_rows(chosen["train"], names)
    labels = label_tensor(chosen["train"]).numpy()
    if len(np.unique(labels, axis=0)) < min_classes:
        same = listed(describe_label(chosen["train"][0]["label"], names))
        raise UserError(
            f"{counted(len(labels), 'training image')} with a single label ({same}); wanted two or more labels"
        )
    if eval_split is None:
        eval_split = f"part of {train_split}"
        held_out = stratified_holdout(np.zeros(len(labels), int) if regression else labels, eval_fraction, seed)
        kept = np.setdiff1d(np.arange(len(labels)), held_out)
        chosen = DatasetDict(train=chosen["train"].select(kept), eval=chosen["train"].select(held_out))
    if shots is not None:
        kept = stratified_subset(label_tensor(chosen["train"]).numpy(), names, shots, seed)
        chosen["train"] = chosen["train"].select(kept)
    return chosen, names, eval_split


def select_and_encode(
    splits: DatasetDict,
    split_names: dict[str, str],
    image_column: str | None = None,
    label_column: str | None = None,
    label_names: list[str] | None = None,
    label_separator: str | None = None,
    label_columns: str | None = None,
    regression: bool = False,
) -> tuple[DatasetDict, list[str]]:
    """Splits as `load_splits` gives them -> with the columns `image`, `label` and `row`, and the class names: see `prepare_splits`.

    Args:
        split_names: {key of a split that is returned: its name in `splits`}.
        label_names: class names; their order is the order of the classes.
        label_separator: takes the text of the label column apart into several labels, such as ";".
        label_columns: columns that hold 1 where an image has the label of that name, else 0: "cat,dog,bird".
    """
    if lacking := [name for name in split_names.values() if not splits.get(name)]:
        flags = "--train_split, --eval_split, --split or --splits"
        raise UserError(
            f"there are no images in the split {lacking[0]!r} of {', '.join(splits)}: name another one with {flags}"
        )
    chosen = {key: splits[name] for key, name in split_names.items()}
    if label_columns is not None:
        if label_column or label_names or label_separator:
            raise UserError("--label_columns does not go with --label_column, --label_names or --label_separator")
        chosen = {key: join_label_columns(data, label_columns) for key, data in chosen.items()}
        label_column = "label"
    columns = find_columns(next(iter(chosen.values())), image_column, label_column)
    for key, rows in chosen.items():
        if lacking := [column for column in columns if column not in rows.features]:
            raise UserError(f"the split {split_names[key]!r} lacks the column {lacking[0]}")
        chosen[key] = select_image_and_label(rows, columns).add_column("row", np.arange(len(rows)))
    return encode_labels(DatasetDict(chosen), label_names, split_names, label_separator, regression)


def refuse_contradicting_rows(rows: Dataset, names: list[str]):
    """Raises UserError if several rows name one image file, with different labels: a table with a row for each label or box."""
    if rows[0]["image"]["bytes"] is not None:  # a path is then no more than a name
        return
    label_of, paths = {}, [item["path"] for item in rows["image"][:]]
    for path, label in zip(paths, rows["label"][:], strict=True):
        if label_of.setdefault(path, label) != label:
            shown = [listed(describe_label(each, names)) for each in (label_of[path], label)]
            raise UserError(
                f"{path} is in several training rows with different labels, {shown[0]} and {shown[1]}: wanted a row for each image; if "
                "it has several labels, write them as cat;dog and pass --label_separator ';'"
            )


def describe_label(label, names: list[str]) -> list[str]:
    """What a label is called: class indices by their names, numbers as they are."""
    return [names[one] if names else f"{one:g}" for one in np.atleast_1d(label)]


def find_eval_split(splits: dict, train_split: str | None) -> str | None:
    """The split that is scored if none is named: validation images, else test images; None if there are no such."""
    names = {name.lower(): name for name in splits if name != train_split}
    return next((names[word] for word in EVAL_SPLITS if word in names), None)


def is_test_split(scored: str) -> bool:
    """Whether what is scored, as `prepare_splits` names it, is a test split, which selects nothing."""
    return scored.startswith("test") or SPLIT_OF_WORD.get(scored.lower()) == "test"


def default_split(splits: DatasetDict) -> str:
    """The split whose images are shown: the one that is scored, if there is one."""
    return find_eval_split(splits, None) or next(iter(splits))


def describe_scored(scored: str) -> str:
    """What is scored, as `prepare_splits` names it, in words that follow "accuracy on"."""
    return "the held-out validation images" if scored.startswith("part of ") else f"the {scored} images"


def stratified_holdout(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Sorted row numbers of about `fraction` of each class: at least one image, and at least one stays.

    Args:
        labels: (n,) class indices, or where an image has several, 0 and 1 of each (n, L): see `stratified_sample`.

    Raises:
        UserError: if no class has two images.
    """
    wanted = lambda count: min(max(1, round(fraction * count)), count - 1)
    held_out = _sample_per_class(labels, wanted, np.random.default_rng(seed))
    if len(held_out) == 0:
        raise UserError(
            f"no image can be held out to score: no class has more than one of {counted(len(labels), 'training image')}; add images, or name "
            "--eval_split"
        )
    return held_out


def stratified_subset(labels: np.ndarray, names: list[str], shots: int, seed: int) -> np.ndarray:
    """Sorted row numbers of `shots` images of each class; where an image has several labels, of about as many.

    Raises:
        UserError: if a class has fewer than `shots` images.
    """
    counts = count_labels(torch.from_numpy(labels), len(names)).tolist()
    if few := [f"{name} {count}" for name, count in zip(names, counts, strict=True) if 0 < count < shots]:
        raise UserError(f"--shots {shots}: there are fewer training images of {listed(few)}; take fewer shots")
    return _sample_per_class(labels, lambda _: shots, np.random.default_rng([seed, 1]))


def _sample_per_class(labels: np.ndarray, wanted, rng: np.random.Generator) -> np.ndarray:
    """Sorted row numbers of random images, `wanted(count)` of each class of `count` images."""
    if labels.ndim == 2:
        return stratified_sample(
            labels, [count and min(count, wanted(count)) for count in labels.sum(axis=0).astype(int).tolist()], rng
        )
    of_class = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    return np.sort(np.concatenate([rows[: wanted(len(rows))] for rows in of_class]))


def stratified_sample(labels: np.ndarray, wanted: list[int], rng: np.random.Generator) -> np.ndarray:
    """Sorted row numbers of about `wanted` images of each label, and of as many of the images without a label.

    Labels are served in turn, the rarest first, by images whose other labels still lack some. No image is taken that is the last
    one left of a label; so a label may get fewer than wanted.

    Args:
        labels: (n, L), 0 and 1.
        wanted: (L,) images of each.
    """
    unlabelled = labels.max(axis=1) == 0
    wanted = np.append(wanted, round(unlabelled.sum() * sum(wanted) / max(1, labels.sum())))
    labels = np.column_stack([labels, unlabelled]).astype(int)  # (n, L + 1)
    counts = labels.sum(axis=0)
    most, have, taken = (
        np.where(wanted < counts, counts - 1, counts),
        np.zeros_like(counts),
        np.zeros(len(labels), bool),
    )
    for label in np.argsort(counts, kind="stable"):
        rows = rng.permutation(np.flatnonzero(labels[:, label] & ~taken))
        for row in rows[np.argsort(labels[rows] @ (have >= wanted), kind="stable")]:
            if have[label] < wanted[label] and (have + labels[row] <= most).all():
                taken[row] = True
                have += labels[row]
    return np.flatnonzero(taken)


def class_weights(labels: torch.Tensor, num_labels: int) -> torch.Tensor:
    """Loss weights (L,) inversely proportional to class frequency: n / (classes * images of the class), 0 for classes without
    images. Their mean over the images is 1.

    Of several labels an image, (n, L): weights of the images that have a label, images without it / images with it; 1 where all
    or none have it.
    """
    counts = count_labels(labels, num_labels).float()
    if labels.ndim == 2:
        return torch.where((counts > 0) & (counts < len(labels)), (len(labels) - counts) / counts.clamp(min=1), 1.0)
    return torch.where(counts > 0, len(labels) / ((counts > 0).sum() * counts.clamp(min=1)), 0.0)

"""Chooses the training and the evaluation split: named, held out, or a part of one, stratified by class."""

import numpy as np
import torch
from datasets import DatasetDict

from hf_vit.data.columns import encode_labels, find_columns, select_image_and_label


EVAL_SPLITS = ("validation", "val", "test")  # unless one is named, the first of these is scored


def prepare_splits(
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
    """The training and the evaluation split, with the columns `image` (undecoded), `label` (class index) and `row` (its number
    in the original split).

    Args:
        splits: as `load_splits` gives them.
        train_split: None for evaluation only.
        eval_split: by default "validation", else "test", else a stratified part of the training split is held out.
        eval_fraction: the size of that part.
        label_names: class names, for labels that are bare numbers; their order is the order of the classes.
        train_fraction: the part of each class to train on, of what is not held out.
        shots: the number of images of each class to train on.
        seed: decides what is held out and left out.

    Returns:
        The splits "train" and "eval"; the class names; and what "eval" is: the name of a split, or "part of train".

    Raises:
        ValueError: for an unknown or empty split, columns that cannot be found, labels that are no class index or that
            training lacks, or more shots than there are images.
    """
    for name in (train_split, eval_split):
        if name is not None and name not in splits:
            raise ValueError(
                f"the data set has no split {name!r}; it has {', '.join(splits)}: name one of these with "
                + ("--train_split" if name == train_split else "--eval_split (or --split, to score)")
            )
    if eval_split is None:
        eval_split = next((name for name in EVAL_SPLITS if name in splits and name != train_split), None)
    split_names = {"train": train_split, "eval": eval_split}
    chosen = {key: splits[name] for key, name in split_names.items() if name is not None}
    if not chosen:
        raise ValueError(f"the data set has no validation or test split; name one with --split: {', '.join(splits)}")
    for key, data in chosen.items():
        if len(data) == 0:
            raise ValueError(f"the split {split_names[key]!r} is empty")

    columns = find_columns(next(iter(chosen.values())), image_column, label_column)
    chosen = DatasetDict({key: select_image_and_label(data, columns) for key, data in chosen.items()})
    for key, data in chosen.items():  # errors name a broken image by its row number
        chosen[key] = data.add_column("row", np.arange(len(data)))
    chosen, names = encode_labels(chosen, label_names, split_names)
    if train_split is None:
        return chosen, names, eval_split

    labels = np.asarray(chosen["train"]["label"][:])
    if len(np.unique(labels)) < 2:
        raise ValueError(
            f"the {len(labels)} training images are all of one class ({names[labels[0]]}); wanted two or more"
        )
    if eval_split is None:
        eval_split = f"part of {train_split}"
        held_out = stratified_holdout(labels, eval_fraction, seed)
        kept = np.setdiff1d(np.arange(len(labels)), held_out)
        chosen = DatasetDict(train=chosen["train"].select(kept), eval=chosen["train"].select(held_out))
    elif untrained := sorted(set(chosen["eval"]["label"][:]) - set(labels.tolist())):
        raise ValueError(
            f"the split {eval_split!r} has images of {len(untrained)} classes that the split {train_split!r} has none "
            f"of: {', '.join(names[label] for label in untrained[:5])}; take them out, or train on some"
        )
    if train_fraction < 1 or shots is not None:
        kept = stratified_subset(np.asarray(chosen["train"]["label"][:]), names, train_fraction, shots, seed)
        chosen["train"] = chosen["train"].select(kept)
    return chosen, names, eval_split


def describe_scored(scored: str) -> str:
    """What is scored, as `prepare_splits` names it, in words that follow "accuracy on"."""
    return "the held-out validation images" if scored.startswith("part of ") else f"the {scored} images"


def stratified_holdout(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Sorted row numbers of about `fraction` of each class: at least one image, and at least one stays.

    Raises:
        ValueError: if no class has two images.
    """
    classes, counts = np.unique(labels, return_counts=True)
    if counts.max() == 1:
        raise ValueError(
            f"no image can be held out to score: none of the {len(classes)} classes has more than one of the "
            f"{len(labels)} training images; add images, or name --eval_split"
        )
    wanted = [min(max(1, round(fraction * count)), count - 1) for count in counts.tolist()]
    return _sample_per_class(labels, wanted, np.random.default_rng(seed))


def stratified_subset(
    labels: np.ndarray, names: list[str], fraction: float, shots: int | None, seed: int
) -> np.ndarray:
    """Sorted row numbers of `fraction` of each class (at least one image), or of `shots` images of each.

    Raises:
        ValueError: if a class has fewer than `shots` images.
    """
    classes, counts = np.unique(labels, return_counts=True)
    for label, count in zip(classes, counts, strict=True):
        if shots is not None and shots > count:
            raise ValueError(
                f"--shots {shots}: the class {names[label]!r} has only {count} training images; take fewer shots"
            )
    wanted = [shots if shots is not None else max(1, round(fraction * count)) for count in counts.tolist()]
    return _sample_per_class(labels, wanted, np.random.default_rng([seed, 1]))


def _sample_per_class(labels: np.ndarray, wanted: list[int], rng: np.random.Generator) -> np.ndarray:
    """Sorted row numbers of `wanted` random images of each class."""
    rows = [
        rng.permutation(np.flatnonzero(labels == label))[:number]
        for label, number in zip(np.unique(labels), wanted, strict=True)
    ]
    return np.sort(np.concatenate(rows))


def class_weights(labels: torch.Tensor, num_labels: int) -> torch.Tensor:
    """Loss weights (L,) inversely proportional to class frequency: n / (classes * images of the class), 0 for classes without
    images. Their mean over the images is 1."""
    counts = torch.bincount(labels, minlength=num_labels).float()
    return torch.where(counts > 0, len(labels) / ((counts > 0).sum() * counts.clamp(min=1)), 0.0)

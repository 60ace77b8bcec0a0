"""The order of images: pure functions of (seed, epoch) that give batches of sample ids.

The id of image i of n is i, or i + n, i + 2 n, ... for its further appearances in one epoch, plus epoch * `EPOCH_STRIDE`.
Augmentation depends on the id, so each appearance is augmented differently.
"""

from collections.abc import Iterator

import numpy as np


EPOCH_STRIDE = 2**40  # more images than a data set has


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
    """Shuffled ids of one epoch for process `rank` of `world`, in full batches of `batch_size`, without the epoch's offset.

    Together the processes see the batches that a single process would see with `world * batch_size`. Images that do not fill
    the last batch are dropped from this epoch; if there are fewer images than one batch holds, they repeat.

    Args:
        count: number of images.
        labels: (count,), to draw each class equally often.
        repeats: how often each image occurs in its batch, augmented differently (repeated augmentation, arXiv 1901.09335); an
            epoch keeps its length and shows a part of the images.
    """
    total_batch = batch_size * world
    num_batches, images_per_batch = max(1, count // total_batch), -(-total_batch // repeats)
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(count) if labels is None else class_balanced_ids(labels, rng)
    wanted = max(count, num_batches * images_per_batch)
    stride = count * (1 + order.max() // count)  # above every id drawn so far
    order = np.resize(order, wanted) + stride * (np.arange(wanted) // count)
    stride = count * (1 + order.max() // count)
    for number in range(num_batches):
        images = order[number * images_per_batch : (number + 1) * images_per_batch]
        ids = (images + stride * np.arange(repeats)[:, None]).ravel()  # copies lie far apart: mixup pairs neighbours
        yield ids[:total_batch][rank * batch_size : (rank + 1) * batch_size].tolist()


def class_balanced_ids(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """As many ids as there are images, every class equally often; repeated images get further ids."""
    count, classes = len(labels), np.unique(labels)
    per_class = np.full(len(classes), count // len(classes))
    per_class[rng.permutation(len(classes))[: count % len(classes)]] += 1
    ids = []
    for label, wanted in zip(classes, per_class, strict=True):
        of_class = np.flatnonzero(labels == label)
        rounds = -(-wanted // len(of_class))
        shuffled = [rng.permutation(of_class) + number * count for number in range(rounds)]
        ids.append(np.concatenate(shuffled)[:wanted])
    return rng.permutation(np.concatenate(ids))


def sequential_batches(count: int, batch_size: int, rank: int = 0, world: int = 1) -> list[list[int]]:
    """All row numbers in order, in batches; process `rank` of `world` gets every `world`-th batch."""
    return [list(range(start, min(start + batch_size, count))) for start in range(0, count, batch_size)][rank::world]

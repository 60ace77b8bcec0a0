"""The order of images: pure functions of (seed, epoch) that give batches of sample ids.

The id of image i of n is i, or i + n, i + 2 n, ... for its further appearances in one epoch, plus epoch * `EPOCH_STRIDE`.
Augmentation depends on the id, so each appearance is augmented differently.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import BatchSampler


EPOCH_STRIDE = 2**40  # more images than a data set has


def epoch_batches(
    count: int, batch_size: int, seed: int, epoch: int, rank: int = 0, world: int = 1, labels: np.ndarray | None = None
) -> Iterator[list[int]]:
    """Shuffled ids of one epoch for process `rank` of `world`, in full batches of `batch_size`, without the epoch's offset.

    Together the processes see the batches that a single process would see with `world * batch_size`. Images that do not fill
    the last batch are dropped from this epoch; if there are fewer images than one batch holds, they repeat.

    Args:
        count: number of images.
        labels: (count,), to draw each class equally often.
    """
    total_batch = batch_size * world
    num_batches = max(1, count // total_batch)
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(count) if labels is None else class_balanced_ids(labels, rng)
    wanted = max(count, num_batches * total_batch)
    stride = count * (1 + order.max() // count)  # above every id drawn so far
    order = np.resize(order, wanted) + stride * (np.arange(wanted) // count)
    for start in range(rank * batch_size, num_batches * total_batch, total_batch):
        yield order[start : start + batch_size].tolist()


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
    return list(BatchSampler(range(count), batch_size, drop_last=False))[rank::world]


def uniform(index: torch.Tensor, seed: int, epoch: int | torch.Tensor, stream: int | torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1), one for each of `index` (b,): a hash of (seed, epoch, stream, index), the same on every device.

    Tensors are broadcast: (b,) epochs and (s, 1) streams give (s, b).

    The mixing function is that of SplitMix64 (Steele et al., OOPSLA 2014, doi 10.1145/2660193.2660195), in wrapping int64.
    """

    def shift_right(x, bits):  # of the unsigned number; torch copies the sign bit
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    def wrap(x):  # Python's integers as int64: what all of `index` have in common is hashed once, without a kernel
        return (x + 2**63) % 2**64 - 2**63 if isinstance(x, int) else x

    def mix_bits(x):
        x = wrap((x ^ shift_right(x, 30)) * -4658895280553007687)  # 0xBF58476D1CE4E5B9
        x = wrap((x ^ shift_right(x, 27)) * -7723592293110705685)  # 0x94D049BB133111EB
        return x ^ shift_right(x, 31)

    state = 0
    for number in (seed, epoch, stream, index):
        state = mix_bits(wrap(state + number - 7046029254386353131))  # 0x9E3779B97F4A7C15
    return shift_right(state, 40).float() * 2.0**-24  # 24 bits: a float holds them without rounding up to 1

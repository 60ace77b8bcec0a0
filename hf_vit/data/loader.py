"""Batches of an `ImageDataset`, decoded by worker processes."""

import signal
from collections.abc import Iterable, Iterator

import torch
from torch.utils.data import DataLoader

from hf_vit.data.decoding import record_unreadable
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.system.errors import UserError
from hf_vit.system.hardware import own_cores


MAX_WORKERS = 32


def data_loader(
    images: ImageDataset, batches: Iterable[list[int]], num_workers: int | None = None
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of `images` in the given order, as `ImageDataset.__getitems__` makes them, decoded in worker processes unless they
    are in memory.

    Args:
        num_workers: how many; if not given, one a core, up to 32.

    Raises:
        UserError: at an image that cannot be read, unless these are skipped; at a batch without a readable image to train on.
    """
    workers = min(MAX_WORKERS, own_cores()) if num_workers is None else num_workers
    workers = 0 if images.cache is not None else workers
    decoded = DataLoader(
        images,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=dict,  # `__getitems__` has already made the batch
        pin_memory=torch.cuda.is_available(),  # copies to the device then overlap with its work
        worker_init_fn=_ignore_signals,
    )
    for batch in decoded:
        errors = batch["errors"]
        record_unreadable(errors, images.skipped, images.on_bad_image)
        if batch["images"] is None and images.keep_full:
            raise UserError(f"no image of a whole batch of {len(errors)} can be read; {errors[0]}")
        if batch["images"] is not None:
            yield batch


def _ignore_signals(worker: int):
    """A signal that asks the run to stop reaches the whole process group; only the training loop answers it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)

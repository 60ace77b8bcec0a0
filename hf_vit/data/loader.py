"""Batches of an `ImageDataset`, decoded by worker processes."""

import multiprocessing.connection
import signal
import threading
from collections.abc import Iterable, Iterator

import torch
from torch.utils.data import DataLoader

from hf_vit.data.decoding import record_unreadable
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.system.errors import UserError
from hf_vit.system.hardware import own_cores


MAX_WORKERS = 32
WORKER_DIED = (RuntimeError, ConnectionError, EOFError, FileNotFoundError)  # what its broken connection may raise


def data_loader(
    images: ImageDataset, batches: Iterable[list[int]], num_workers: int | None = None, keep_empty: bool = False
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of `images` in the given order, as `ImageDataset.__getitems__` makes them, decoded in worker processes unless they
    are in memory.

    Args:
        num_workers: how many; if not given, one a core, up to 32.
        keep_empty: whether batches without a readable image come, too.

    Raises:
        UserError: at an image that cannot be read, unless these are skipped; at a batch without a readable image to train on.
    """
    workers = min(MAX_WORKERS, own_cores()) if num_workers is None else num_workers
    workers = 0 if images.cache is not None else workers
    others = set(multiprocessing.active_children())
    decoded = iter(
        DataLoader(
            images,
            batch_sampler=batches,
            num_workers=workers,
            collate_fn=dict,  # `__getitems__` has already made the batch
            pin_memory=torch.cuda.is_available(),  # copies to the device then overlap with its work
            worker_init_fn=_ignore_signals,
        )
    )
    own = set(multiprocessing.active_children()) - others
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise in the middle of a step
    try:
        while (batch := next(decoded, None)) is not None:
            errors = batch["errors"]
            record_unreadable(errors, images.skipped, images.on_bad_image)
            if batch["images"] is None and images.keep_full:
                raise UserError(f"no image of a whole batch of {len(errors)} can be read; {errors[0]}")
            if batch["images"] is not None or keep_empty:
                yield batch
    except WORKER_DIED as error:
        if not (own and multiprocessing.connection.wait([worker.sentinel for worker in own], timeout=5)):
            raise  # no worker died
        raise UserError(
            f"a process that decodes images was killed ({error}), mostly because memory is short: pass a --num_workers below "
            f"{workers}, or in a container give it more shared memory (docker run --shm-size 8g); the same command goes on"
        ) from error
    finally:
        del decoded
        for worker in own:  # even one that hangs in reading a file
            worker.kill()


def _ignore_signals(worker: int):
    """A signal that asks the run to stop reaches the whole process group; only the training loop answers it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)

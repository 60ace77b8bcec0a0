"""Batches of an `ImageDataset`, decoded by worker processes; a worker that is killed is replaced."""

import multiprocessing.connection
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch.utils.data import DataLoader
from transformers.utils import logging

from hf_vit.data.decoding import record_unreadable
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.system.errors import UserError
from hf_vit.system.hardware import own_cores


logger = logging.get_logger(__name__)

MAX_WORKERS = 32
MAX_REPLACEMENTS = 3  # of killed workers
WORKER_DIED = (RuntimeError, ConnectionError, EOFError, FileNotFoundError)  # what its broken connection may raise


def data_loader(
    images: ImageDataset, batches: Iterable[list[int]], num_workers: int | None = None
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of `images` in the given order, as `ImageDataset.__getitems__` makes them, decoded in worker processes unless they
    are in memory. A worker that dies is replaced, and its batches are decoded again.

    Args:
        num_workers: how many; if not given, one a core, up to 32.

    Raises:
        ValueError: at an image that cannot be read, unless these are skipped; at a batch without a readable image.
        OSError: if workers die again and again.
    """
    workers = min(MAX_WORKERS, own_cores()) if num_workers is None else num_workers
    workers = 0 if images.cache is not None else workers
    batches, pending, deaths = iter(batches), deque(), 0  # pending: sent to the workers and not yet back

    def send():
        unfinished = list(pending)
        pending.clear()
        for source in (unfinished, batches):
            for ids in source:
                pending.append(ids)
                yield ids

    while True:
        others = set(multiprocessing.active_children())
        decoded = iter(
            DataLoader(
                images,
                batch_sampler=send(),
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
                pending.popleft()
                errors = batch.pop("errors")
                record_unreadable(errors, images.skipped, images.on_bad_image)
                if batch:
                    yield batch
                elif images.keep_full:
                    raise UserError(f"no image of a whole batch of {len(errors)} can be read; {errors[0]}")
            return
        except WORKER_DIED as error:
            if not (own and multiprocessing.connection.wait([worker.sentinel for worker in own], timeout=5)):
                raise  # no worker died
            deaths += 1
            if deaths > MAX_REPLACEMENTS:
                raise UserError(
                    f"{deaths} processes that decode images died, at last: {error}. Mostly they are killed because memory is "
                    f"short: pass a --num_workers below {workers}. In a container it may be shared memory: give it more of it "
                    "(docker run --shm-size 8g)"
                ) from error
            logger.warning(f"a process that decodes images died and is replaced: {error}")
        finally:
            del decoded
            for worker in own:  # even one that hangs in reading a file
                worker.kill()


def _ignore_signals(worker: int):
    """A signal that asks the run to stop reaches the whole process group; only the training loop answers it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)

"""Claims about the processes that decode images."""

import os
import signal
from itertools import islice
from multiprocessing import active_children

import pytest
from datasets import Image
from image_data import dataset

from hf_vit.data import image_dataset
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_spec import ImageSpec
from hf_vit.data.loader import data_loader


@pytest.fixture
def uncached(monkeypatch):
    """Images that workers decode anew each time; and ids of 12 batches."""
    monkeypatch.setattr(image_dataset, "CACHE_BYTES", 0)
    form = ImageSpec(16, 16, 3, 2, (0.5,) * 3, (0.5,) * 3)
    return ImageDataset(dataset([0, 1] * 12).cast_column("image", Image(decode=False)), form), [
        [first, first + 12] for first in range(12)
    ]


def test_a_killed_worker_ends_the_run_with_advice(uncached):
    images, ids = uncached
    batches = data_loader(images, ids, 2)
    next(batches)
    for worker in active_children():
        worker.kill()
    with pytest.raises(ValueError, match="--num_workers"):
        list(batches)
    assert active_children() == []


def test_workers_leave_signals_to_the_training_loop(uncached):
    images, ids = uncached
    batches = data_loader(images, ids, 2)
    got = [next(batches), next(batches)]  # one of each worker
    workers = set(active_children())
    assert len(workers) == 2
    for worker in workers:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(worker.pid, number)
    got += islice(batches, 8)
    assert set(active_children()) == workers
    got += batches
    assert [batch["index"].tolist() for batch in got] == ids

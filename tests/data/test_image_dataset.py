"""Claims about what a run sees of its images: their order, the cache, workers, features, and images that cannot be read."""

import os
import signal
from itertools import chain, islice
from multiprocessing import active_children

import numpy as np
import pytest
import torch
from image_data import assert_own, encoded, good_items, item_of, picture, spec_of, undecoded
from PIL import Image as PILImage

from hf_vit.data import image_dataset
from hf_vit.data.image_dataset import ImageDataset, check_unreadable
from hf_vit.data.loader import data_loader
from hf_vit.data.sampling import epoch_batches, sequential_batches
from hf_vit.system.errors import UserError


@pytest.fixture
def uncached(monkeypatch):
    monkeypatch.setattr(image_dataset, "CACHE_BYTES", 0)


# ----------------------------------------------------------------------------------------------------------------------
# Their order


@pytest.mark.parametrize("labels", [None, np.array([0] * 8 + [1] * 2)])
def test_in_a_batch_larger_than_the_set_images_repeat_under_other_ids(labels):
    (batch,) = epoch_batches(10, 64, 0, 0, labels=labels)
    assert len(set(batch)) == 64
    if labels is not None:
        assert sum(labels[number % 10] for number in batch) == pytest.approx(32, abs=2)


def test_an_epoch_shows_every_image_once_in_an_order_of_seed_and_epoch_alone():
    order = lambda seed, epoch: list(chain(*epoch_batches(12, 4, seed, epoch)))
    assert sorted(order(1, 3)) == list(range(12))
    assert order(1, 3) == order(1, 3)
    assert order(1, 3) not in (order(1, 4), order(2, 3))


@pytest.mark.parametrize("labels", [None, np.repeat([0, 1], (30, 6))])
@pytest.mark.parametrize("count", [36, 5])  # 5 are fewer than a batch
def test_any_number_of_processes_sees_together_what_one_sees(count, labels):
    labels = labels if labels is None else labels[-count:]
    whole = list(epoch_batches(count, 8, 0, 1, labels=labels))
    parts = (epoch_batches(count, 2, 0, 1, rank, 4, labels) for rank in range(4))
    assert [list(chain(*step)) for step in zip(*parts, strict=True)] == whole


@pytest.mark.parametrize("counts", [(30, 6), (11, 5, 4, 3, 2, 2, 1, 1, 1, 1)])
def test_balanced_sampling_draws_each_class_as_often_within_one_and_each_time_as_another_sample(counts):
    labels = np.repeat(np.arange(len(counts)), counts)
    for epoch in range(5):
        ids = list(chain(*epoch_batches(len(labels), 1, 0, epoch, labels=labels)))
        assert len(set(ids)) == len(labels)
        rows, times = np.unique(np.array(ids) % len(labels), return_counts=True)
        assert np.ptp(np.bincount(labels[rows], times, len(counts))) <= 1
        assert all(np.ptp(times[labels[rows] == label]) <= 1 for label in np.unique(labels[rows]) if label > 0)


def test_every_image_is_evaluated_once_also_those_that_fill_no_batch():
    batches = [batch for rank in range(2) for batch in sequential_batches(11, 4, rank, 2)]
    assert sorted(chain(*batches)) == list(range(11))


# ----------------------------------------------------------------------------------------------------------------------
# What a batch holds


def test_cached_images_equal_images_decoded_by_workers_as_many_as_there_are_cores(monkeypatch):
    rows, batches = undecoded(good_items(5)), [[3, 1], [0, 4]]
    cached = list(data_loader(ImageDataset(rows, spec_of()), batches, num_workers=2))
    monkeypatch.setattr(image_dataset, "CACHE_BYTES", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # torch warns of more, and a warning fails a test
    images = ImageDataset(rows, spec_of())
    assert images.cache is None
    for one, other in zip(cached, data_loader(images, batches), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in ("images", "labels", "index"))
        assert other["images"].is_contiguous()


def test_images_are_kept_only_in_a_share_of_the_memory_that_is_available(monkeypatch):
    rows, size = undecoded(good_items(5)), 5 * 8 * 12 * 3
    for available, kept in ((4 * size, True), (4 * size - 1, False)):
        monkeypatch.setattr(image_dataset, "available_memory", lambda available=available: available)
        assert (ImageDataset(rows, spec_of()).cache is not None) == kept


def test_features_stand_in_the_place_of_their_images():
    images = ImageDataset(undecoded(good_items(5), labels=[0, 1, 1, 0, 1]), spec_of(), keep_full=True)
    table = torch.randn(3, 7)
    features = images.with_features(table, torch.tensor([0, 2, 3]))
    (batch,) = data_loader(features, [[2, 1, 0, 3]], num_workers=2)  # 3 is the first one for the second time
    assert torch.equal(batch["images"], table[[2, 1, 0, 0]])
    assert batch["labels"].tolist() == [0, 1, 0, 0]
    assert batch["index"].tolist() == [2, 1, 0, 3]


# ----------------------------------------------------------------------------------------------------------------------
# Workers


@pytest.fixture
def decoded(uncached):
    """Twelve batches that two workers decode, of which two are read, and the ids of all."""
    ids = [[first, first + 12] for first in range(12)]
    batches = data_loader(ImageDataset(undecoded(good_items(2) * 12), spec_of()), ids, 2)
    return batches, [next(batches), next(batches)], ids


def test_workers_leave_signals_to_the_training_loop(decoded):
    batches, got, ids = decoded
    workers = set(active_children())
    assert len(workers) == 2
    for worker in workers:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(worker.pid, number)
    got += islice(batches, 8)
    assert set(active_children()) == workers
    got += batches
    assert [batch["index"].tolist() for batch in got] == ids


# ----------------------------------------------------------------------------------------------------------------------
# Images that cannot be read


BAD = {
    "no bytes": {"bytes": b"", "path": "some.jpg"},
    "half a file": {"bytes": encoded(picture(0, (64, 64)), "JPEG")[:900], "path": "some.jpg"},
    "no such file": {"bytes": None, "path": "/nowhere/some.jpg"},
    "decompression bomb": {**item_of(PILImage.new("L", (160, 60))), "path": "some.jpg"},
    "nothing": None,
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("limit", [2**31, 0])
def test_a_bad_image_is_named_by_row_and_file_or_skipped_and_counted(kind, limit, monkeypatch):
    monkeypatch.setattr(image_dataset, "CACHE_BYTES", limit)
    monkeypatch.setattr(PILImage, "MAX_IMAGE_PIXELS", 4200)
    items = good_items(4)
    items[2] = BAD[kind]
    named = "" if kind == "nothing" else "some.jpg.*"
    with pytest.raises(UserError, match=rf"row 2 .*{named}--on_bad_image skip"):
        list(data_loader(ImageDataset(undecoded(items), spec_of()), [[0, 1], [2, 3]], num_workers=0))
    images = ImageDataset(undecoded(items), spec_of(), on_bad_image="skip")
    if limit:  # it is not even in the cache
        assert (images.rows["row"][:], images.labels.tolist(), len(images.cache)) == ([0, 1, 3], [0, 1, 1], 3)
    list(data_loader(images, [[0, 1, 2]], num_workers=0))
    assert len(images.skipped) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_cache_another_image_takes_the_place_in_training_and_none_in_scoring(workers, uncached):
    items = good_items(4)
    items[2] = BAD["half a file"]
    rows, ids = undecoded(items), [[1, 2, 7, 0], [2, 3]]  # 7 is 3, for the second time
    for keep_full, wanted in ((True, [[1, 7, 7, 0], [3, 3]]), (False, [[1, 7, 0], [3]])):
        images = ImageDataset(rows, spec_of(), on_bad_image="skip", keep_full=keep_full)
        batches = list(data_loader(images, ids, workers))
        assert [batch["index"].tolist() for batch in batches] == wanted
        for batch in batches:
            assert_own(batch, items, rows["label"][:])
        assert len(images.skipped) == 1  # though it came twice


def test_a_batch_of_bad_images_alone_stops_training_and_is_left_out_of_scoring(uncached):
    rows = undecoded([*good_items(2), BAD["half a file"], BAD["half a file"]])
    batches = data_loader(ImageDataset(rows, spec_of(), "skip"), [[0, 1], [2, 3]])
    assert [batch["index"].tolist() for batch in batches] == [[0, 1]]
    with pytest.raises(UserError, match="row 2"):
        list(data_loader(ImageDataset(rows, spec_of(), "skip", keep_full=True), [[2, 3]], num_workers=0))


def parts(*broken):
    """The parts of a data set of cats (0) and dogs (1), without the images of these (part, row)."""
    for part, labels in enumerate([(0, 0, 0, 1, 1), (0, 1, 1)]):
        items = good_items(len(labels))
        items = [BAD["no bytes"] if (part, row) in broken else item for row, item in enumerate(items)]
        yield ImageDataset(undecoded(items, labels), spec_of(), on_bad_image="skip")


def test_a_class_is_judged_by_all_of_its_images():
    check_unreadable(list(parts((1, 1), (1, 2), (0, 0))), ["cat", "dog"], "skip")  # no dog is left to score
    with pytest.raises(UserError, match="dog"):
        check_unreadable(list(parts((0, 3), (0, 4), (1, 1), (1, 2))), ["cat", "dog"], "skip")


def test_stop_names_the_broken_images_of_all_parts_at_once_and_counts_more_than_ten():
    with pytest.raises(UserError, match=r"(?s)row 1 .*row 0 "):
        check_unreadable(list(parts((0, 1), (1, 0))), [], "stop")
    with pytest.raises(UserError, match=r"row 9 .*12"):
        ImageDataset(undecoded([BAD["no bytes"]] * 12 + good_items(1)), spec_of())

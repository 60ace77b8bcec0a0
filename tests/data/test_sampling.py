"""Claims about the order of images."""

import itertools

import numpy as np
import pytest

from hf_vit.data.sampling import epoch_batches, sequential_batches


def ids_of(*how, **more):
    return list(itertools.chain(*epoch_batches(*how, **more)))


def test_an_epoch_shows_every_image_once_and_depends_on_seed_and_epoch_alone():
    epoch = ids_of(12, 4, seed=1, epoch=3)
    assert sorted(epoch) == list(range(12))
    assert epoch == ids_of(12, 4, seed=1, epoch=3)
    assert epoch not in (ids_of(12, 4, seed=1, epoch=4), ids_of(12, 4, seed=2, epoch=3))


@pytest.mark.parametrize("how", [{}, {"labels": np.repeat([0, 1], (30, 6))}])
def test_two_processes_see_the_batches_of_one_however_images_are_drawn(how):
    whole = list(epoch_batches(36, 8, 0, 1, **how))
    halves = [list(epoch_batches(36, 4, 0, 1, rank, 2, **how)) for rank in range(2)]
    assert [a + b for a, b in zip(*halves, strict=True)] == whole


def test_fewer_images_than_a_batch_still_fill_one_each_time_as_another_sample():
    (batch,) = epoch_batches(3, 8, seed=0, epoch=0)
    assert (len(batch), len(set(batch)), {number % 3 for number in batch}) == (8, 8, {0, 1, 2})


@pytest.mark.parametrize("counts", [(30, 6), (2, 1), (11, 5, 4, 3, 2, 2, 1, 1, 1, 1)])
def test_balanced_sampling_draws_each_class_as_often_within_one_and_each_time_as_another_sample(counts):
    labels = np.repeat(np.arange(len(counts)), counts)
    for epoch in range(5):
        ids = ids_of(len(labels), 1, 0, epoch, labels=labels)
        assert len(set(ids)) == len(labels)
        rows, times = np.unique(np.array(ids) % len(labels), return_counts=True)
        assert np.ptp(np.bincount(labels[rows], times, len(counts))) <= 1
        assert all(np.ptp(times[labels[rows] == label]) <= 1 for label in np.unique(labels[rows]) if label > 0)


@pytest.mark.parametrize("world", [1, 2])
def test_every_image_is_evaluated_once_also_those_that_fill_no_batch(world):
    batches = [batch for rank in range(world) for batch in sequential_batches(11, 4, rank, world)]
    assert sorted(itertools.chain(*batches)) == list(range(11))

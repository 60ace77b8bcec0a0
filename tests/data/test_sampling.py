"""Claims about the order of images."""

import itertools

import numpy as np
import pytest

from hf_vit.data.sampling import epoch_batches, sequential_batches


def test_an_epoch_shows_every_image_once_and_depends_on_seed_and_epoch_alone():
    epoch = list(epoch_batches(12, 4, seed=1, epoch=3))
    assert sorted(itertools.chain(*epoch)) == list(range(12))
    assert epoch == list(epoch_batches(12, 4, seed=1, epoch=3))
    assert epoch != list(epoch_batches(12, 4, seed=1, epoch=4))
    assert epoch != list(epoch_batches(12, 4, seed=2, epoch=3))


def test_two_processes_see_the_batches_of_one():
    whole = list(epoch_batches(21, 6, seed=0, epoch=0))
    halves = [list(epoch_batches(21, 3, 0, 0, rank, 2)) for rank in range(2)]
    assert [a + b for a, b in zip(*halves, strict=True)] == whole
    scored = [itertools.chain(*sequential_batches(10, 3, rank, 2)) for rank in range(2)]
    assert sorted(itertools.chain(*scored)) == list(range(10))


def test_fewer_images_than_a_batch_still_fill_one():
    (batch,) = epoch_batches(3, 8, seed=0, epoch=0)
    assert len(batch) == 8
    assert {i % 3 for i in batch} == {0, 1, 2}
    assert len(set(batch)) == 8  # an image that comes again is another sample, augmented anew


def ids_of(*how, **more):
    return list(itertools.chain(*epoch_batches(*how, **more)))


@pytest.mark.parametrize("counts", [(30, 6), (37, 2, 1), (11, 5, 4, 3, 2, 2, 1, 1, 1, 1)])
def test_balanced_sampling_draws_each_class_as_often_within_one(counts):
    labels = np.repeat(np.arange(len(counts)), counts)
    for epoch in range(5):
        ids = ids_of(len(labels), 1, 0, epoch, labels=labels)
        assert len(ids) == len(labels)
        assert np.ptp(np.bincount(labels[np.array(ids) % len(labels)], minlength=len(counts))) <= 1


@pytest.mark.parametrize(("counts", "batch_size"), [((30, 6), 4), ((2, 1), 8)])
def test_an_image_that_is_drawn_again_gets_a_further_id(counts, batch_size):
    labels = np.repeat(np.arange(len(counts)), counts)
    ids = ids_of(len(labels), batch_size, 0, 0, labels=labels)
    assert len(ids) == len(set(ids))
    rows, times = np.unique(np.array(ids) % len(labels), return_counts=True)
    assert (times[labels[rows] == 1] > 1).any()
    assert np.ptp(times[labels[rows] == 1]) <= 1


@pytest.mark.parametrize(("count", "repeats"), [(50, 2), (50, 4), (3, 2)])
def test_repeated_images_stand_in_their_batch_with_other_ids_and_apart(count, repeats):
    batches = list(epoch_batches(count, 8, 0, 0, repeats=repeats))
    assert len(batches) == max(1, count // 8)
    for ids in map(np.array, batches):
        assert len(set(ids.tolist())) == len(ids) == 8
        _, times = np.unique(ids % count, return_counts=True)
        if count >= 8:
            assert times.tolist() == [repeats] * (8 // repeats)
            assert (ids[0::2] % count != ids[1::2] % count).all()
    if count >= 8:
        seen = np.concatenate([np.unique(np.array(ids) % count) for ids in batches])
        assert len(seen) == len(set(seen.tolist()))  # no image stands in two batches of an epoch


@pytest.mark.parametrize("how", [{"repeats": 3}, {"labels": np.repeat([0, 1], (30, 6))}])
def test_two_processes_see_the_batches_of_one_however_images_are_drawn(how):
    whole = list(epoch_batches(36, 8, 0, 1, **how))
    halves = [list(epoch_batches(36, 4, 0, 1, rank, 2, **how)) for rank in range(2)]
    assert [a + b for a, b in zip(*halves, strict=True)] == whole

"""Claims about augmentation."""

import numpy as np
import pytest
import torch

from hf_vit import augment
from hf_vit.data import ImageForm


FORM = ImageForm(16, 16, 3, 2, (0.5,) * 3, (0.25,) * 3)
INDEX = torch.arange(64)


def images(count=64):
    return torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_hashed_numbers_look_uniform_and_independent():
    index = torch.arange(20000)
    first, second = (augment.uniform(index, seed=0, epoch=e, stream=0) for e in (0, 1))
    for numbers in (first, second, augment.uniform(index, 1, 0, 0), augment.uniform(index, 0, 0, 1)):
        assert 0 <= numbers.min() < numbers.max() < 1
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert abs(counts - 1000).max() < 150  # five standard deviations
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.04
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.04


@pytest.mark.parametrize(("crop", "shift"), [("none", 2), ("resized", 0)])
def test_what_an_image_gets_does_not_depend_on_its_batch(crop, shift):
    batch, how = images(), {"crop": crop, "shift": shift, "flip": True, "erase": 0.5}
    whole = augment.augment(batch, INDEX, 1, 2, FORM, **how)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    parts = [augment.augment(batch[i], INDEX[i], 1, 2, FORM, **how) for i in order.split(7)]
    torch.testing.assert_close(torch.cat(parts), whole[order], atol=1e-6, rtol=0)
    assert not torch.equal(whole, augment.augment(batch, INDEX, 1, 3, FORM, **how))
    assert not torch.equal(whole, augment.augment(batch, INDEX, 2, 2, FORM, **how))


def test_flip_mirrors_half_of_the_images_and_leaves_the_rest():
    batch = images(1000)
    flipped = augment.random_flip(batch, torch.arange(1000), 0, 0)
    mirrored = [torch.equal(a, b.flip(2)) for a, b in zip(flipped, batch, strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(flipped, batch, strict=True)]
    assert all(a != b for a, b in zip(mirrored, kept, strict=True))
    assert 440 < sum(mirrored) < 560


def test_shift_equals_moving_each_image_by_itself():
    batch = images()
    shifted = augment.random_shift(batch, INDEX, 0, 0, pixels=2)
    moves = set()
    for one, image in zip(shifted, batch, strict=True):
        padded = np.pad(image.numpy(), ((0, 0), (2, 2), (2, 2)))
        fitting = [
            (y, x) for y in range(5) for x in range(5) if (padded[:, y : y + 16, x : x + 16] == one.numpy()).all()
        ]
        assert len(fitting) == 1
        moves.update(fitting)
    assert len(moves) > 15


def test_resized_crop_of_the_whole_image_is_the_image():
    batch = images().float()
    same = augment.random_resized_crop(batch, INDEX, 0, 0, scale=(1.0, 1.0), ratio=(1.0, 1.0))
    torch.testing.assert_close(same, batch, atol=1e-3, rtol=0)


def test_resized_crop_shows_a_part_of_the_stated_area():
    ramp = torch.linspace(0, 1, 64).expand(64, 3, 64, 64).contiguous()  # a pixel's value is its column
    cropped = augment.random_resized_crop(ramp, INDEX, 0, 0, scale=(0.25, 0.25), ratio=(1.0, 1.0))
    width = cropped[:, 0, 0, -1] - cropped[:, 0, 0, 0]
    torch.testing.assert_close(width, torch.full((64,), 0.5), atol=0.02, rtol=0)


def test_erasing_fills_one_rectangle_with_noise_in_the_stated_share_of_images():
    batch = torch.full((400, 3, 16, 16), 9.0)
    erased = augment.random_erase(batch, torch.arange(400), 0, 0, 0.25)
    changed = (erased != 9).all(1)  # (400, 16, 16)
    touched = changed.flatten(1).any(1)
    assert 70 < touched.sum() < 130
    for mask in changed[touched]:
        rows, columns = mask.any(1), mask.any(0)
        assert mask.sum() == rows.sum() * columns.sum()
    noise = erased[erased != 9]
    assert abs(noise.mean()) < 0.05
    assert abs(noise.std() - 1) < 0.05


def test_mixup_blends_neighbours_and_their_targets_alike():
    batch, targets = torch.rand(6, 3, 4, 4), torch.eye(6)
    mixed, blended = augment.mixup(batch, targets, 0.4, seed=0, epoch=1, batch=2)
    weight = blended[0, 0].item()
    for one, other in ((0, 1), (1, 0), (4, 5)):
        torch.testing.assert_close(mixed[one], weight * batch[one] + (1 - weight) * batch[other])
        torch.testing.assert_close(blended[one], weight * targets[one] + (1 - weight) * targets[other])
    halves = [augment.mixup(batch[rows], targets[rows], 0.4, 0, 1, 2)[0] for rows in (slice(0, 4), slice(4, 6))]
    assert torch.equal(torch.cat(halves), mixed)
    odd, _ = augment.mixup(batch[:3], targets[:3], 0.4, 0, 1, 2)
    torch.testing.assert_close(odd[2], batch[2])
    weights = [augment.mixup(batch, targets, 0.4, 0, 0, n)[1][0, 0].item() for n in range(400)]
    assert abs(np.mean(weights) - 0.5) < 0.06
    assert abs(np.var(weights) - 1 / (4 * 1.8)) < 0.02  # of Beta(a, a): 1 / (4 (2 a + 1))


def test_without_augmentation_a_batch_is_only_normalised():
    batch = images()
    plain = augment.augment(batch, INDEX, 0, 0, FORM, crop="none", shift=0, flip=False, erase=0.0)
    torch.testing.assert_close(plain, (batch.float() / 255 - 0.5) / 0.25)

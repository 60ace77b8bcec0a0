"""Claims about augmentation: each batched function equals a slow reference, one image at a time.

The reference is PIL where PIL defines the operation (on bytes, so within the rounding each test states), else the formula of
the paper in numpy. Where numbers are drawn, the reference reads the same streams of `sampling.uniform`.
"""

import math

import numpy as np
import pytest
import torch
from image_data import augmented
from PIL import Image, ImageEnhance, ImageOps
from scipy.ndimage import affine_transform
from scipy.stats import kstest

from hf_vit.data import augment
from hf_vit.data.image_spec import ImageSpec
from hf_vit.data.normalization import standardize_
from hf_vit.data.sampling import uniform


SPEC = ImageSpec(16, 16, 3, 2, (0.5, 0.4, 0.3), (0.25, 0.2, 0.3))
INDEX = torch.arange(64)
GREY = 1 / 255 + 1e-5  # one grey level
each_number_of_channels = pytest.mark.parametrize("channels", [1, 3])


def images(count=64, channels=3, height=16, width=16, low=0, high=255):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, high + 1, (count, channels, height, width), dtype=torch.uint8, generator=generator)


def draw(stream, index=INDEX, seed=0, epoch=0):
    return uniform(index, seed, epoch, stream).tolist()


def picture(image):
    """Floats (C, H, W) in [0, 1] -> PIL."""
    values = (np.asarray(image) * 255).round().astype(np.uint8)
    return Image.fromarray(values[0] if len(values) == 1 else values.transpose(1, 2, 0))


def floats(picture):
    values = np.asarray(picture, dtype=np.float64) / 255
    return values[None] if values.ndim == 2 else values.transpose(2, 0, 1)


def close(ours, reference, atol):
    np.testing.assert_allclose(np.asarray(ours), np.asarray(reference), atol=atol, rtol=0)


# ----------------------------------------------------------------------------------------------------------------------
# The numbers, and what they depend on


def test_hashed_numbers_look_uniform_and_independent():
    index = torch.arange(20000)
    numbers = [uniform(index, *draw) for draw in ((0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1))]
    assert max(kstest(drawn, "uniform").statistic for drawn in numbers) < 0.02
    together = torch.stack([*numbers, numbers[0].roll(1)])
    assert (torch.corrcoef(together) - torch.eye(5)).abs().max() < 0.04
    assert uniform(torch.tensor([102897]), 0, 2, 1) < 1  # its 53 bits are within 2^-25 of 1; one image in 3e7 is so


EACH = [
    dict(flip=True),
    dict(shift=2),
    dict(crop="simple"),
    dict(crop="resized"),
    dict(color_jitter=0.3),
    dict(erase=0.5),
    dict(auto_augment="trivial"),
    dict(auto_augment="rand"),
]


@pytest.mark.parametrize("how", EACH, ids=str)
def test_what_an_image_gets_is_a_function_of_seed_epoch_and_image_alone(how):
    batch = images()
    whole = augmented(batch, INDEX, 1, 2, SPEC, **how)
    assert torch.equal(batch, images())  # which is not changed in place
    batch[::2] = 255 - batch[::2]  # the other images of the batch
    order = torch.arange(1, 64, 2).flip(0)
    parts = [augmented(batch[i], INDEX[i], 1, 2, SPEC, **how) for i in order.split((1, 31))]
    torch.testing.assert_close(torch.cat(parts), whole[order], atol=1e-5, rtol=0)
    for numbers in ((1, 3), (2, 2)):
        assert not torch.equal(augmented(images(), INDEX, *numbers, SPEC, **how), whole)


def test_noise_erases_what_is_already_normalised():
    ours = augmented(images(), INDEX, 5, 6, SPEC, erase=0.5)
    torch.testing.assert_close(ours, augment.random_erase(standardize_(images() / 255, SPEC), INDEX, 5, 6, 0.5))


# ----------------------------------------------------------------------------------------------------------------------
# Where


def test_flip_mirrors_half_of_the_images_and_leaves_the_rest():
    batch, index = images(1000, 3, 6, 9), torch.arange(1000)
    mirrored = uniform(index, 0, 0, 0) < 0.5
    batch_of = augment.random_flip(batch, index, 0, 0)
    assert torch.equal(batch_of[mirrored], batch[mirrored].flip(3))
    assert torch.equal(batch_of[~mirrored], batch[~mirrored])
    assert 440 < mirrored.sum() < 560


@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_shift_equals_moving_each_image_by_itself(mode):
    batch = images(height=12, width=17)
    shifted = augment.random_shift(batch, INDEX, 0, 0, pixels=2, mode=mode)
    for one, image, u, v in zip(shifted, batch, draw(1), draw(2), strict=True):
        y, x = int(5 * u), int(5 * v)
        padded = np.pad(image.numpy(), ((0, 0), (2, 2), (2, 2)), mode=mode)
        np.testing.assert_array_equal(one, padded[:, y : y + 12, x : x + 17])


@pytest.mark.parametrize(("channels", "size", "scale"), [(3, (20, 28), (0.35, 1)), (1, (11, 40), (0.5, 0.6))])
def test_resized_crop_equals_pil_on_the_same_box(channels, size, scale):
    batch = images(64, channels, 20, 28) / 255
    cropped = augment.random_resized_crop(batch, INDEX, 0, 0, size, scale)
    height, width = size
    for n, (area, ratio, x, y) in enumerate(zip(draw(3), draw(4), draw(5), draw(6), strict=True)):
        area, ratio = scale[0] + (scale[1] - scale[0]) * area, (3 / 4) ** (1 - ratio) * (4 / 3) ** ratio
        w, h = 28 * min(1, (area * ratio) ** 0.5), 20 * min(1, (area / ratio) ** 0.5)
        box = (x * (28 - w), y * (20 - h), x * (28 - w) + w, y * (20 - h) + h)
        theirs = picture(batch[n]).transform((width, height), Image.Transform.EXTENT, box, Image.Resampling.BILINEAR)
        close(cropped[n], floats(theirs), atol=GREY)  # PIL cuts to bytes


def moved(image, kind, amount):
    """One image about its centre by scipy: bilinear, black outside."""
    cos, sin = math.cos(math.radians(amount)), math.sin(math.radians(amount))
    matrix, move = {  # of (y, x)
        "rotate": (((cos, sin), (-sin, cos)), (0, 0)),
        "shear_x": (((1, 0), (amount, 1)), (0, 0)),
        "shear_y": (((1, amount), (0, 1)), (0, 0)),
        "translate_x": (np.eye(2), (0, amount)),
        "translate_y": (np.eye(2), (amount, 0)),
    }[kind]
    centre = (np.array(image.shape[1:]) - 1) / 2
    how = dict(offset=centre + move - np.dot(matrix, centre), order=1, mode="grid-constant")
    return np.stack([affine_transform(channel, matrix, **how) for channel in np.asarray(image, dtype=np.float64)])


# ----------------------------------------------------------------------------------------------------------------------
# What


PIL = {
    "brightness": lambda image, amount: ImageEnhance.Brightness(image).enhance(amount),
    "contrast": lambda image, amount: ImageEnhance.Contrast(image).enhance(amount),
    "saturation": lambda image, amount: ImageEnhance.Color(image).enhance(amount),
    "sharpness": lambda image, amount: ImageEnhance.Sharpness(image).enhance(amount),
    "solarize": lambda image, threshold: ImageOps.solarize(image, round(255 * threshold, 3)),
    "posterize": lambda image, bits: ImageOps.posterize(image, round(bits)),
    "autocontrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
}


def reference(name, image, amount=None):
    return floats(PIL[name](picture(image), amount))


@each_number_of_channels
@pytest.mark.parametrize(("name", "grey_levels"), [("autocontrast", 1), ("equalize", 0)])
def test_stretches_equal_pil(name, grey_levels, channels):
    batch = images(5, channels, 30, 41) / 255
    batch[1] = (batch[1] ** 3 * 30).round() / 255  # few dark values
    batch[2], batch[2, :, 3, 4] = 100 / 255, 200 / 255  # one value but for a pixel
    batch[3] = (batch[3] ** 4 * 255).round() / 255  # values rare and common
    batch[4] = 1
    for one, image in zip(getattr(augment, name)(batch), batch, strict=True):
        close(one, reference(name, image), atol=grey_levels * GREY + 1e-6)


def test_color_jitter_equals_pils_enhancements_one_after_another():
    batch = images(64, 3, 12, 17, low=20) / 255
    ours = augment.color_jitter(batch, INDEX, 0, 0, strength=0.4)
    for n, factors in enumerate(zip(draw(13), draw(14), draw(15), strict=True)):
        theirs = picture(batch[n])
        for name, u in zip(("brightness", "contrast", "saturation"), factors, strict=True):
            theirs = PIL[name](theirs, 0.6 + 0.8 * u)
        close(ours[n], floats(theirs), atol=4 * GREY)  # three roundings to bytes, each stretched by the next factor


WIDE = dict(shear=0.99, translate=32, rotate=135, enhance=0.99, posterize=2)  # arXiv 2103.10158, table 1
RANDAUGMENT = dict(shear=0.3, translate=150 / 331, rotate=30, enhance=0.9, posterize=4)  # torchvision's; of the side


def check_operations(ours, batch, streams, strengths, largest, grey_levels):
    """That each image is that of `batch` after the operation that the streams choose, at its strength in [0, 1]."""
    choices, signs = (draw(stream, torch.arange(len(batch)), 3, 4) for stream in streams)
    assert {int(14 * choice) for choice in choices} == set(range(14))
    for after, image, choice, sign, strength in zip(ours, batch.numpy(), choices, signs, strengths, strict=True):
        name, where, atol = augment.OPERATIONS[int(14 * choice)], np.s_[:], grey_levels * GREY
        amount, kind = (-strength if sign < 0.5 else strength), name.split("_")[0]
        if kind in ("shear", "translate", "rotate"):
            side = image.shape[2 if name.endswith("x") else 1] if largest[kind] < 1 and kind == "translate" else 1
            theirs, atol = moved(image, name, amount * largest[kind] * side), 1e-4
        elif name in ("brightness", "saturation", "contrast", "sharpness"):
            theirs = reference(name, image, 1 + amount * largest["enhance"])
        elif name == "posterize":
            theirs = reference(name, image, 8 - round(strength * (8 - largest["posterize"])))
        elif name == "solarize":  # the paper counts its thresholds down from 256, torchvision from 255
            theirs, where = reference(name, image, 1 - strength), abs(image - (1 - strength)) > GREY
        else:
            theirs = image if name == "identity" else reference(name, image)
        close(after[where], theirs[where], atol)


@each_number_of_channels
def test_trivial_augment_is_one_operation_of_its_paper_an_image_and_rand_augment_two(channels):
    index, batch = torch.arange(200), images(200, channels, 15, 23, low=40, high=215) / 255
    strengths = [int(31 * u) / 30 for u in draw(18, index, 3, 4)]
    check_operations(augment.trivial_augment(batch, index, 3, 4), batch, (19, 20), strengths, WIDE, grey_levels=2)
    once, twice = (augment.rand_augment(batch, index, 3, 4, count, 15) for count in (1, 2))
    check_operations(once, batch, (21, 22), [0.5] * 200, RANDAUGMENT, grey_levels=2)
    # What comes in to the second is no longer whole bytes, and a stretch of contrast widens PIL's rounding of it.
    check_operations(twice, once, (23, 24), [0.5] * 200, RANDAUGMENT, grey_levels=4)


# ----------------------------------------------------------------------------------------------------------------------
# After normalisation


def test_erasing_fills_a_rectangle_of_2_to_33_percent_with_normal_noise_in_the_share_of_images_that_is_asked_for():
    erased = augment.random_erase(torch.zeros(1000, 3, 40, 60), torch.arange(1000), 0, 0, 0.7)
    inside, noise = (erased != 0).any(dim=1), erased[erased != 0]  # (B, H, W)
    areas = inside.sum(dim=(1, 2))
    assert torch.equal(areas, inside.any(dim=2).sum(dim=1) * inside.any(dim=1).sum(dim=1))
    shares = areas[areas > 0] / 2400
    found = [len(shares) / 1000, shares.min(), shares.max(), shares.mean(), noise.mean(), noise.std()]
    assert found == pytest.approx([0.7, 0.02, 1 / 3, 0.176, 0, 1], abs=0.02)


def test_mixup_blends_neighbours_and_their_targets_alike():
    batch, targets = torch.rand(7, 3, 4, 4), torch.eye(7)
    mixed, blended = augment.mix(batch, targets, 0.4, 0, seed=0, epoch=1, batch=2)
    weight, neighbours = blended[0, 0].item(), [1, 0, 3, 2, 5, 4, 6]  # the last of an odd batch is alone
    torch.testing.assert_close(mixed, weight * batch + (1 - weight) * batch[neighbours])
    torch.testing.assert_close(blended, weight * targets + (1 - weight) * targets[neighbours])
    weights = [augment.mix(batch, targets, 0.4, 0, 0, 0, n)[1][0, 0].item() for n in range(400)]
    assert abs(np.var(weights) - 1 / (4 * 1.8)) < 0.02  # of Beta(a, a): 1 / (4 (2 a + 1))


def test_cutmix_pastes_a_rectangle_of_the_neighbour_and_weighs_targets_by_its_exact_area():
    batch, targets, shares = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, 40, 60), torch.eye(4), []
    for number in range(400):
        pasted, blended = augment.mix(batch, targets, 0, 0.7, 3, 4, number)  # a pixel tells its image
        inside = (pasted != batch)[0, 0]
        assert inside.sum() == inside.any(dim=0).sum() * inside.any(dim=1).sum()
        assert torch.equal(pasted, torch.where(inside, batch[[1, 0, 3, 2]], batch))
        shares.append(inside.float().mean().item())
        close(blended, (1 - shares[-1]) * np.eye(4) + shares[-1] * np.eye(4)[[1, 0, 3, 2]], atol=1e-6)
    assert (min(shares), max(shares)) == pytest.approx((0, 1), abs=0.1)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0), (0, 1.0), (0.8, 1.0)])
def test_mixing_depends_on_seed_epoch_and_batch_and_not_on_how_the_batch_is_split(mixup, cutmix):
    batch, targets = torch.rand(12, 3, 8, 9), torch.eye(12)
    mixed = lambda rows, *numbers: augment.mix(batch[rows], targets[rows], mixup, cutmix, *numbers)[0]
    whole, rows = mixed(slice(12), 0, 1, 2), torch.arange(12)
    assert torch.equal(torch.cat([mixed(part, 0, 1, 2) for part in rows.split(4)]), whole)
    assert not any(torch.equal(mixed(rows, *numbers), whole) for numbers in ((1, 1, 2), (0, 2, 2), (0, 1, 3)))

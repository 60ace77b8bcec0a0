"""Claims about augmentation: each batched function equals a slow reference, one image at a time.

The reference is PIL where PIL defines the operation (on bytes, so within the rounding each test states), else the formula of
the paper in numpy. Where numbers are drawn, the reference reads the same streams of `augment.uniform`.
"""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from hf_vit.data import augment
from hf_vit.data.image_spec import ImageSpec
from hf_vit.data.normalization import normalize, standardize_
from hf_vit.training.losses import classification_loss


SPEC = ImageSpec(16, 16, 3, 2, (0.5, 0.4, 0.3), (0.25, 0.2, 0.3))
INDEX = torch.arange(64)
GREY = 1 / 255 + 1e-5  # one grey level
POLICIES = {"three": augment.three_augment, "trivial": augment.trivial_augment, "rand": augment.rand_augment}


def images(count=64, channels=3, height=16, width=16, low=0, high=255):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, high + 1, (count, channels, height, width), dtype=torch.uint8, generator=generator)


def draw(stream, index=INDEX, seed=0, epoch=0):
    return augment.uniform(index, seed, epoch, stream).tolist()


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
# The numbers


def test_hashed_numbers_look_uniform_and_independent():
    index = torch.arange(20000)
    first, second = (augment.uniform(index, seed=0, epoch=e, stream=0) for e in (0, 1))
    for numbers in (first, second, augment.uniform(index, 1, 0, 0), augment.uniform(index, 0, 0, 1)):
        assert 0 <= numbers.min() < numbers.max() < 1
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert abs(counts - 1000).max() < 150  # five standard deviations
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.04
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.04


def test_the_largest_hash_is_below_one_and_still_a_shift():
    index = torch.tensor([102897])  # its 53 bits are within 2^-25 of 1; one image in 3e7 is so
    assert augment.uniform(index, seed=0, epoch=2, stream=1) < 1
    augment.random_shift(torch.zeros(1, 3, 8, 8), index, seed=0, epoch=2, pixels=4)


def modes(policies=("none", *POLICIES), crops=("none", "simple", "resized")):
    return pytest.mark.parametrize(("auto_augment", "crop"), [(a, c) for a in policies for c in crops])


@modes()
def test_what_an_image_gets_does_not_depend_on_its_batch(auto_augment, crop):
    batch = images()
    how = dict(crop=crop, shift=2, flip=True, auto_augment=auto_augment, jitter=0.3, erase=0.5)
    whole = augment.augment(batch, INDEX, 1, 2, SPEC, **how)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    parts = [augment.augment(batch[i], INDEX[i], 1, 2, SPEC, **how) for i in order.split(13)]
    torch.testing.assert_close(torch.cat(parts), whole[order], atol=1e-5, rtol=0)
    assert torch.equal(batch, images())  # and it is not changed in place


@modes(crops=("none",))
def test_an_image_alone_is_augmented_as_in_a_batch(auto_augment, crop):
    batch, how = images(8), dict(auto_augment=auto_augment, crop=crop)
    whole = augment.augment(batch, INDEX[:8], 0, 0, SPEC, **how)
    alone = [augment.augment(batch[i : i + 1], INDEX[i : i + 1], 0, 0, SPEC, **how) for i in range(8)]
    torch.testing.assert_close(torch.cat(alone), whole, atol=1e-5, rtol=0)


@modes()
def test_another_image_in_the_batch_changes_nothing_else(auto_augment, crop):
    batch = images()
    how = dict(crop=crop, flip=True, auto_augment=auto_augment, jitter=0.3, erase=0.5)
    before = augment.augment(batch, INDEX, 1, 2, SPEC, **how)
    batch[::2] = 255 - batch[::2]
    after = augment.augment(batch, INDEX, 1, 2, SPEC, **how)
    torch.testing.assert_close(before[1::2], after[1::2], atol=1e-5, rtol=0)
    assert not torch.equal(before[::2], after[::2])


@pytest.mark.parametrize(
    "how",
    [dict(flip=True), dict(shift=2), dict(crop="simple"), dict(crop="resized"), dict(jitter=0.3), dict(erase=0.5)]
    + [dict(auto_augment=name) for name in POLICIES],
)
def test_what_an_image_gets_depends_on_seed_and_epoch_and_on_nothing_else(how):
    one, same, epoch, seed = (
        augment.augment(images(), INDEX, *numbers, SPEC, **how) for numbers in ((1, 2), (1, 2), (1, 3), (2, 2))
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, epoch)
    assert not torch.equal(one, seed)


def test_without_augmentation_a_batch_is_only_normalised():
    batch = images()
    plain = augment.augment(batch, INDEX, 0, 0, SPEC)
    by_hand = [(batch[:, c] / 255 - SPEC.mean[c]) / SPEC.std[c] for c in range(3)]
    torch.testing.assert_close(plain, torch.stack(by_hand, 1))
    torch.testing.assert_close(normalize(batch, SPEC), plain)
    assert torch.equal(batch, images())  # which stays as it is


@pytest.mark.parametrize("name", POLICIES)
def test_a_batch_goes_through_its_augmentations_in_the_stated_order(name):
    batch = images(64, height=20, width=24)
    ours = augment.augment(
        batch, INDEX, 5, 6, SPEC, crop="resized", crop_scale=0.2, shift=2, flip=True, auto_augment=name, jitter=0.3, erase=0.5
    )  # fmt: skip
    ids = (INDEX, 5, 6)
    batch = augment.random_flip(augment.random_shift(batch, *ids, pixels=2), *ids) / 255
    batch = POLICIES[name](augment.random_resized_crop(batch, *ids, size=(16, 16), scale=(0.2, 1)), *ids)
    batch = standardize_(augment.color_jitter(batch, *ids, strength=0.3), SPEC)
    torch.testing.assert_close(ours, augment.random_erase(batch, *ids, probability=0.5))


# ----------------------------------------------------------------------------------------------------------------------
# Where


@pytest.mark.parametrize("channels", [1, 3])
def test_flip_mirrors_half_of_the_images_and_leaves_the_rest(channels):
    batch = images(1000, channels, 6, 9)
    flipped = augment.random_flip(batch, torch.arange(1000), 0, 0)
    mirrored = [np.array_equal(a, b[:, :, ::-1]) for a, b in zip(flipped.numpy(), batch.numpy(), strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(flipped, batch, strict=True)]
    assert mirrored == [u < 0.5 for u in draw(0, torch.arange(1000))] == [not k for k in kept]
    assert 440 < sum(mirrored) < 560


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_shift_equals_moving_each_image_by_itself(channels, mode):
    batch = images(64, channels, 12, 17)
    shifted = augment.random_shift(batch, INDEX, 0, 0, pixels=2, mode=mode)
    assert shifted.dtype == batch.dtype
    assert torch.equal(augment.random_shift(batch.float(), INDEX, 0, 0, pixels=2, mode=mode), shifted.float())
    moves = set()
    for one, image in zip(shifted, batch, strict=True):
        padded = np.pad(image.numpy(), ((0, 0), (2, 2), (2, 2)), mode=mode)
        every = [(y, x) for y in range(5) for x in range(5)]
        fitting = [(y, x) for y, x in every if (padded[:, y : y + 12, x : x + 17] == one.numpy()).all()]
        assert len(fitting) == 1
        moves.update(fitting)
    assert len(moves) > 15


@pytest.mark.parametrize(
    ("channels", "size", "scale"), [(3, None, (0.35, 1)), (1, (11, 40), (0.08, 1)), (3, (40, 23), (0.5, 0.6))]
)
def test_resized_crop_equals_pil_on_the_same_box(channels, size, scale):
    batch = images(64, channels, 20, 28) / 255
    cropped = augment.random_resized_crop(batch, INDEX, 0, 0, size, scale)
    height, width = size or (20, 28)
    assert cropped.shape == (64, channels, height, width)
    for n, (area, ratio, x, y) in enumerate(zip(draw(3), draw(4), draw(5), draw(6), strict=True)):
        area, ratio = scale[0] + (scale[1] - scale[0]) * area, (3 / 4) ** (1 - ratio) * (4 / 3) ** ratio
        w, h = 28 * min(1, (area * ratio) ** 0.5), 20 * min(1, (area / ratio) ** 0.5)
        box = (x * (28 - w), y * (20 - h), x * (28 - w) + w, y * (20 - h) + h)
        theirs = picture(batch[n]).transform((width, height), Image.Transform.EXTENT, box, Image.Resampling.BILINEAR)
        close(cropped[n], floats(theirs), atol=GREY)  # PIL cuts to bytes


def test_resized_crop_of_the_whole_image_is_the_image():
    batch = images(height=12, width=17) / 255
    same = augment.random_resized_crop(batch, INDEX, 0, 0, scale=(1.0, 1.0), ratio=(1.0, 1.0))
    torch.testing.assert_close(same, batch, atol=1e-5, rtol=0)


def test_resized_crop_shows_a_part_of_the_stated_area():
    ramp = torch.linspace(0, 1, 64).expand(64, 3, 64, 64).contiguous()  # a pixel's value is its column
    cropped = augment.random_resized_crop(ramp, INDEX, 0, 0, scale=(0.25, 0.25), ratio=(1.0, 1.0))
    width = cropped[:, 0, 0, -1] - cropped[:, 0, 0, 0]
    torch.testing.assert_close(width, torch.full((64,), 0.5), atol=0.02, rtol=0)


def matrix(kind, amount):
    """Pixels of the output to pixels of the input, about the centre."""
    angle = math.radians(amount)
    return np.array({
        "rotate": ((math.cos(angle), -math.sin(angle), 0), (math.sin(angle), math.cos(angle), 0)),
        "shear_x": ((1, amount, 0), (0, 1, 0)),
        "shear_y": ((1, 0, 0), (amount, 1, 0)),
        "translate_x": ((1, 0, amount), (0, 1, 0)),
        "translate_y": ((1, 0, 0), (0, 1, amount)),
    }[kind])  # fmt: skip


def moved(image, kind, amount):
    """One image, pixel by pixel: bilinear, black outside."""
    image = np.pad(np.asarray(image, dtype=np.float64), ((0, 0), (1, 1), (1, 1)))
    result = np.zeros_like(image)[:, 1:-1, 1:-1]
    _, H, W = result.shape
    centre_y, centre_x = (H - 1) / 2, (W - 1) / 2
    for y, x in np.ndindex(H, W):
        u, v = matrix(kind, amount) @ (x - centre_x, y - centre_y, 1) + (centre_x + 1, centre_y + 1)
        left, top = math.floor(u), math.floor(v)
        if 0 <= left <= W and 0 <= top <= H:
            part, rest = image[:, top : top + 2, left : left + 2], (u - left, v - top)
            result[:, y, x] = part @ (1 - rest[0], rest[0]) @ (1 - rest[1], rest[1])
    return result


MOVES = {"rotate": 40, "shear_x": 0.4, "shear_y": 0.4, "translate_x": 5.3, "translate_y": 5.3}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", MOVES)
def test_moves_equal_a_loop_over_pixels_and_pil_off_the_border(kind, channels):
    batch = images(4, channels, 14, 19) / 255
    amounts = torch.tensor([1, -1, 0.3, 0]) * MOVES[kind]
    ours = augment.geometric_operation(batch, kind, amounts)
    whole = augment.geometric_operation(
        torch.ones_like(batch), kind, amounts
    )  # 1 inside, 0 outside; PIL repeats the border instead
    for n, amount in enumerate(amounts.tolist()):
        close(ours[n], moved(batch[n], kind, amount), atol=1e-4)
        M = matrix(kind, amount)
        corner = M @ (-9.5, -7, 1) + (9.5, 7)  # PIL's matrix is about the upper left corner
        data = (*M[0, :2], corner[0], *M[1, :2], corner[1])
        theirs = picture(batch[n]).transform((19, 14), Image.Transform.AFFINE, data, Image.Resampling.BILINEAR)
        off_border = (whole[n] < 1e-6) | (whole[n] > 1 - 1e-6)
        close(ours[n][off_border], floats(theirs)[off_border.numpy()], atol=GREY)
    close(ours[3], batch[3], atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# What

PIL = {
    "grayscale": lambda image, _: image.convert("L").convert(image.mode),
    "brightness": lambda image, amount: ImageEnhance.Brightness(image).enhance(amount),
    "contrast": lambda image, amount: ImageEnhance.Contrast(image).enhance(amount),
    "saturation": lambda image, amount: ImageEnhance.Color(image).enhance(amount),
    "sharpness": lambda image, amount: ImageEnhance.Sharpness(image).enhance(amount),
    "solarize": lambda image, threshold: ImageOps.solarize(image, 255 * threshold),
    "posterize": lambda image, bits: ImageOps.posterize(image, round(bits)),
    "autocontrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
}


def reference(name, image, amount=None):
    return floats(PIL[name](picture(image), amount))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation", "sharpness"])
def test_enhancements_equal_pil(name, channels):
    batch = images(40, channels, 12, 17, low=20) / 255
    amounts = torch.linspace(0, 2, 40)
    ours = getattr(augment, name)(batch, amounts)
    for n, amount in enumerate(amounts.tolist()):  # PIL rounds the other image, and cuts the blend to bytes
        close(ours[n], reference(name, batch[n], amount), atol=2 * GREY)


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation", "sharpness"])
def test_enhancements_by_one_change_nothing(name):
    batch = images() / 255
    torch.testing.assert_close(getattr(augment, name)(batch, torch.ones(64)), batch)


@pytest.mark.parametrize("channels", [1, 3])
def test_grayscale_equals_pil(channels):
    batch = images(8, channels, 12, 17) / 255
    grey = augment.grayscale(batch)
    assert grey.shape == batch.shape
    for one, image in zip(grey, batch, strict=True):
        close(one, reference("grayscale", image), atol=0.51 / 255)  # PIL rounds to bytes


@pytest.mark.parametrize("channels", [1, 3])
def test_solarize_equals_pil_at_every_threshold(channels):
    batch = images(256, channels, 12, 17) / 255
    for n, one in enumerate(augment.solarize(batch, torch.arange(256) / 255)):
        close(one, floats(ImageOps.solarize(picture(batch[n]), n)), atol=1e-6)


@pytest.mark.parametrize("channels", [1, 3])
def test_posterize_equals_pil_at_every_number_of_bits(channels):
    batch = images(8, channels, 12, 17) / 255
    for bits, one in enumerate(augment.posterize(batch, torch.arange(1, 9)), start=1):
        close(one, reference("posterize", batch[bits - 1], bits), atol=1e-6)


def uneven(channels):
    """Six images: all values, few dark ones, one value but for a pixel, values rare and common, only black, only white."""
    batch = images(6, channels, 30, 41) / 255
    batch[1] = (batch[1] ** 3 * 30).round() / 255
    batch[2] = 100 / 255
    batch[2, :, 3, 4] = 200 / 255
    batch[3] = (batch[3] ** 4 * 255).round() / 255
    batch[4], batch[5] = 0, 1
    return batch


@pytest.mark.parametrize("channels", [1, 3])
def test_autocontrast_equals_pil(channels):
    batch = torch.cat([uneven(channels), images(6, channels, 30, 41, low=90, high=160) / 255])
    for one, image in zip(augment.autocontrast(batch), batch, strict=True):
        close(one, reference("autocontrast", image), atol=GREY)  # PIL cuts to bytes


@pytest.mark.parametrize("channels", [1, 3])
def test_equalize_gives_pils_bytes(channels):
    batch = torch.cat([uneven(channels), images(6, channels, 30, 41, low=90, high=160) / 255])
    for one, image in zip(augment.equalize(batch), batch, strict=True):
        assert np.array_equal((one * 255).round(), reference("equalize", image) * 255)


@pytest.mark.parametrize("crop", [False, True])
@pytest.mark.parametrize("value", [0, 80, 255])
@pytest.mark.parametrize("name", ["autocontrast", "equalize"])
def test_an_image_of_one_colour_has_nothing_to_stretch(name, value, crop):
    plain = torch.full((64, 3, 20, 20), value) / 255
    shown = augment.random_resized_crop(plain, INDEX, 0, 0) if crop else plain  # of one colour, but for rounding
    close(getattr(augment, name)(shown), plain, atol=GREY)


def blurred(image, sigma):
    """One image: columns, then rows, convolved with a Gaussian cut off behind six pixels, mirrored at the border."""
    kernel = np.array([math.exp(-(x**2) / (2 * sigma**2)) for x in range(-6, 7)])
    convolve = lambda line: np.convolve(np.pad(line, 6, mode="reflect"), kernel / kernel.sum(), mode="valid")
    return np.apply_along_axis(convolve, 2, np.apply_along_axis(convolve, 1, np.asarray(image, dtype=np.float64)))


@pytest.mark.parametrize("channels", [1, 3])
def test_gaussian_blur_equals_a_convolution_of_each_image(channels):
    batch = images(12, channels, 15, 22) / 255
    sigmas = torch.linspace(0.1, 2, 12)
    ours = augment.gaussian_blur(batch, sigmas)
    for n, sigma in enumerate(sigmas.tolist()):
        close(ours[n], blurred(batch[n], sigma), atol=1e-5)


def test_gaussian_blur_comes_near_pils_three_boxes():
    batch = images(6, 3, 24, 30) / 255
    sigmas = torch.linspace(1, 2, 6)
    for one, image, sigma in zip(augment.gaussian_blur(batch, sigmas), batch, sigmas.tolist(), strict=True):
        theirs = floats(picture(image).filter(ImageFilter.GaussianBlur(sigma)))
        middle = np.s_[:, 6:-6, 6:-6]  # PIL repeats the border
        close(one[middle], theirs[middle], atol=0.03)


@pytest.mark.parametrize("channels", [1, 3])
def test_color_jitter_equals_pils_enhancements_one_after_another(channels):
    batch = images(64, channels, 12, 17, low=20) / 255
    ours = augment.color_jitter(batch, INDEX, 0, 0, strength=0.4)
    for n, factors in enumerate(zip(draw(13), draw(14), draw(15), strict=True)):
        theirs = picture(batch[n])
        for name, u in zip(("brightness", "contrast", "saturation"), factors, strict=True):
            theirs = PIL[name](theirs, 0.6 + 0.8 * u)
        close(ours[n], floats(theirs), atol=4 * GREY)  # three roundings to bytes, each stretched by the next factor


@pytest.mark.parametrize("channels", [1, 3])
def test_three_augment_turns_each_image_grey_solarised_or_blurred(channels):
    batch = images(64, channels, 14, 17) / 255
    ours = augment.three_augment(batch, INDEX, 0, 0)
    seen = set()
    for n, (choice, sigma) in enumerate(zip(draw(16), draw(17), strict=True)):
        seen.add(int(3 * choice))
        if choice < 1 / 3:
            close(ours[n], reference("grayscale", batch[n]), atol=0.51 / 255)
        elif choice < 2 / 3:
            close(ours[n], floats(ImageOps.solarize(picture(batch[n]), 128)), atol=1e-6)
        else:
            close(ours[n], blurred(batch[n], 0.1 + 1.9 * sigma), atol=1e-5)
    assert seen == {0, 1, 2}


WIDE = dict(shear=0.99, translate=32, rotate=135, enhance=0.99, posterize=2)  # arXiv 2103.10158, table 1
RANDAUGMENT = dict(shear=0.3, translate=150 / 331, rotate=30, enhance=0.9, posterize=4)  # torchvision's; of the side


def check_operation(ours, image, name, strength, sign, largest, grey_levels):
    """That `ours` is `image` after the operation `name` at `strength` in [0, 1], by PIL or pixel by pixel."""
    image, where = np.asarray(image), np.s_[:]
    name, kind = name.replace("color", "saturation"), name.split("_")[0]
    if kind in ("shear", "translate", "rotate"):
        part = largest[kind] < 1 and kind == "translate"
        side = image.shape[2 if name.endswith("x") else 1] if part else 1
        theirs, grey_levels = moved(image, name, sign * strength * largest[kind] * side), 0.03
    elif name in ("brightness", "saturation", "contrast", "sharpness"):
        theirs = reference(name, image, 1 + sign * strength * largest["enhance"])
    elif name == "posterize":
        theirs = reference(name, image, 8 - round(strength * (8 - largest["posterize"])))
    elif name == "solarize":  # the paper counts its thresholds down from 256, torchvision from 255
        theirs, where = reference(name, image, 1 - strength), abs(image - (1 - strength)) > GREY
    else:
        theirs = image if name == "identity" else reference(name, image)
    close(ours[where], theirs[where], atol=grey_levels * GREY)
    return name


OPERATIONS = {
    "identity", "autocontrast", "equalize", "rotate", "solarize", "saturation", "posterize", "contrast", "brightness",
    "sharpness", "shear_x", "shear_y", "translate_x", "translate_y",
}  # fmt: skip


@pytest.mark.parametrize("channels", [1, 3])
def test_trivial_augment_is_one_operation_of_the_paper_an_image(channels):
    index = torch.arange(200)
    batch = images(200, channels, 15, 23, low=40, high=215) / 255
    ours = augment.trivial_augment(batch, index, 3, 4).numpy()
    seen = set()
    for n, (u, choice, sign) in enumerate(zip(*(draw(stream, index, 3, 4) for stream in (18, 19, 20)), strict=True)):
        name, sign = list(augment.TRIVIAL_AUGMENT_SPACE)[int(14 * choice)], -1 if sign < 0.5 else 1
        seen.add(check_operation(ours[n], batch[n], name, int(31 * u) / 30, sign, WIDE, grey_levels=2))
    assert seen == OPERATIONS


@pytest.mark.parametrize(("channels", "magnitude"), [(1, 9), (3, 9), (3, 15)])
def test_rand_augment_is_two_operations_of_the_paper_an_image(channels, magnitude):
    index = torch.arange(100)
    batch = images(100, channels, 15, 23, low=40, high=215) / 255
    once, twice = (augment.rand_augment(batch, index, 3, 4, count, magnitude).numpy() for count in (1, 2))
    torch.testing.assert_close(augment.rand_augment(batch, index, 3, 4, magnitude=magnitude).numpy(), twice)
    # What comes in to the second is no longer whole bytes, and a stretch of contrast widens PIL's rounding of it.
    for before, after, stream, grey_levels in ((batch, once, 21, 2), (once, twice, 23, 4)):
        seen = set()
        for n, (choice, sign) in enumerate(zip(*(draw(s, index, 3, 4) for s in (stream, stream + 1)), strict=True)):
            name, sign = list(augment.RAND_AUGMENT_SPACE)[int(14 * choice)], -1 if sign < 0.5 else 1
            seen.add(check_operation(after[n], before[n], name, magnitude / 30, sign, RANDAUGMENT, grey_levels))
        assert seen == OPERATIONS


def test_every_operation_but_the_parameterless_ones_does_nothing_at_strength_zero():
    stretching = ("autocontrast", "equalize")
    space = {name: largest for name, largest in augment.TRIVIAL_AUGMENT_SPACE.items() if name not in stretching}
    batch = images(200, low=200) / 255
    batch[:, :, 0, 0] = 1
    ours = augment.random_operation(space, batch, torch.arange(200), 0, 0, 19, torch.zeros(200))
    torch.testing.assert_close(ours, batch, atol=1e-5, rtol=0)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "change",
    [
        *POLICIES.values(),
        lambda *given: augment.color_jitter(*given, strength=1.0),
        lambda *given: augment.rand_augment(*given, operations=4, magnitude=30),
        lambda *given: augment.random_resized_crop(*given, scale=(0.08, 1)),
    ],
    ids=[*POLICIES, "jitter", "strongest rand", "crop"],
)
def test_images_stay_floats_from_zero_to_one(change, channels):
    batch = images(240, channels, 12, 17) / 255
    batch[200:220], batch[220:230], batch[230:] = (batch[200:220] > 0.5).float(), 0, 1
    index = torch.arange(240)
    result = change(batch, index, 0, 0)
    assert result.shape == batch.shape
    assert result.dtype == torch.float32
    assert result.isfinite().all()
    assert result.min() >= -1e-6
    assert result.max() <= 1 + 1e-6  # the sum of a bilinear or Gaussian kernel in floats


# ----------------------------------------------------------------------------------------------------------------------
# After normalisation


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


@pytest.mark.parametrize("channels", [1, 3])
def test_erasing_equals_a_loop_over_pixels(channels):
    H, W = 12, 17
    batch = torch.randn(64, channels, H, W)
    erased, by_hand = augment.random_erase(batch, INDEX, 0, 0, 0.7), batch.clone()
    for n, (happens, area, ratio, y, x) in enumerate(zip(*(draw(stream) for stream in range(7, 12)), strict=True)):
        area, ratio = 0.02 + (1 / 3 - 0.02) * area, 0.3 ** (1 - 2 * ratio)  # height to width, from 0.3 to 1 / 0.3
        height, width = H * min(1, (area * ratio) ** 0.5), W * min(1, (area / ratio) ** 0.5)
        top, left = y * (H - height), x * (W - width)
        noise = draw(12, n * channels * H * W + torch.arange(channels * H * W))
        for number, (c, row, column) in enumerate(np.ndindex(channels, H, W)):
            if happens < 0.7 and top <= row < top + height and left <= column < left + width:
                by_hand[n, c, row, column] = NormalDist().inv_cdf(noise[number])
    torch.testing.assert_close(erased, by_hand, atol=1e-3, rtol=0)


def test_mixup_blends_neighbours_and_their_targets_alike():
    batch, targets = torch.rand(6, 3, 4, 4), torch.eye(6)
    mixed, blended = augment.mix(batch, targets, 0.4, 0, seed=0, epoch=1, batch=2)
    weight = blended[0, 0].item()
    for one, other in ((0, 1), (1, 0), (2, 3), (3, 2), (4, 5), (5, 4)):
        torch.testing.assert_close(mixed[one], weight * batch[one] + (1 - weight) * batch[other])
        torch.testing.assert_close(blended[one], weight * targets[one] + (1 - weight) * targets[other])
    weights = [augment.mix(batch, targets, 0.4, 0, 0, 0, n)[1][0, 0].item() for n in range(400)]
    assert abs(np.mean(weights) - 0.5) < 0.06
    assert abs(np.var(weights) - 1 / (4 * 1.8)) < 0.02  # of Beta(a, a): 1 / (4 (2 a + 1))


def test_cutmix_pastes_one_rectangle_and_weighs_targets_by_its_exact_area():
    H, W = 12, 17
    batch, targets = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 3, H, W), torch.eye(6)  # a pixel tells its image
    shares = set()
    for number in range(60):
        pasted, blended = augment.mix(batch, targets, 0, 1.0, 0, 0, number)
        rectangle = pasted[0, 0] == 1
        assert rectangle.sum() == rectangle.any(1).sum() * rectangle.any(0).sum()
        assert torch.equal(pasted, torch.where(rectangle, batch[[1, 0, 3, 2, 5, 4]], batch))
        share = rectangle.float().mean().item()
        close(blended, (1 - share) * np.eye(6) + share * np.eye(6)[[1, 0, 3, 2, 5, 4]], atol=1e-6)
        shares.add(share)
    assert len(shares) > 20


def test_cutmix_cuts_the_rectangle_of_the_paper():
    H, W = 40, 60
    for number in range(40):
        pasted, _ = augment.mix(
            torch.arange(2.0).view(2, 1, 1, 1).expand(2, 1, H, W), torch.eye(2), 0, 0.7, 3, 4, number
        )
        rng = np.random.default_rng([3, 4, number])
        side = (1 - rng.beta(0.7, 0.7)) ** 0.5  # arXiv 1905.04899, equation 2
        y, x = rng.integers(H), rng.integers(W)
        for line, centre, length in ((pasted[0, 0].amax(1), y, H), (pasted[0, 0].amax(0), x, W)):
            inside = [k for k in range(length) if abs(k + 0.5 - centre) < round(side * length / 2)]
            assert line.nonzero().flatten().tolist() == (inside if pasted[0].any() else [])


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0), (0, 1.0), (0.8, 1.0)])
@pytest.mark.parametrize("split", [2, 4, 6])
def test_pairs_are_the_same_however_the_batch_is_split(mixup, cutmix, split):
    batch, targets = torch.rand(12, 3, 8, 9), torch.eye(12)
    for number in range(4):
        whole = augment.mix(batch, targets, mixup, cutmix, 0, 1, number)
        parts = [
            augment.mix(*part, mixup, cutmix, 0, 1, number)
            for part in zip(batch.split(split), targets.split(split), strict=True)
        ]
        for one, other in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(one, torch.cat(other))


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0), (0, 1.0), (0, 0)])
def test_the_last_image_of_an_odd_batch_stays_as_it_is(mixup, cutmix):
    batch, targets = torch.rand(5, 3, 8, 9), torch.eye(5)
    for number in range(10):
        mixed, blended = augment.mix(batch, targets, mixup, cutmix, 0, 0, number)
        torch.testing.assert_close(mixed[4], batch[4])
        torch.testing.assert_close(blended[4], targets[4])


def test_without_mixup_and_cutmix_nothing_is_mixed():
    batch, targets = torch.rand(4, 3, 8, 9), torch.eye(4)
    mixed, blended = augment.mix(batch, targets, 0, 0, 0, 0, 0)
    assert torch.equal(mixed, batch)
    assert torch.equal(blended, targets)


def test_half_of_the_batches_get_mixup_and_half_cutmix_where_both_are_on():
    batch = torch.arange(2.0).view(2, 1, 1, 1).expand(2, 1, 16, 16)
    kinds = []
    for number in range(400):
        mixed, blended = augment.mix(batch, torch.eye(2), 0.8, 1.0, 0, 0, number)
        kinds.append("mixup" if 0 < mixed[0, 0, 0, 0] < 1 else "cutmix")
        assert kinds[-1] == "mixup" or set(mixed.unique().tolist()) <= {0, 1}
        assert abs(mixed[0].mean() - blended[0, 1]) < 1e-5  # the share of the neighbour, in either
    assert 160 < kinds.count("mixup") < 240


def test_mixing_depends_on_seed_epoch_and_batch():
    given = torch.rand(4, 3, 8, 9), torch.eye(4), 0.8, 0
    mixed = [augment.mix(*given, *numbers)[0] for numbers in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert all(not torch.equal(mixed[i], mixed[j]) for i in range(4) for j in range(i))
    assert torch.equal(mixed[0], augment.mix(*given, 0, 0, 0)[0])


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0), (0, 1.0)])
def test_the_loss_of_a_mixture_is_the_weighted_loss_of_its_two_labels(mixup, cutmix):
    logits, labels = torch.randn(8, 10), torch.randint(0, 10, (8,))
    targets = torch.nn.functional.one_hot(labels, 10).float()
    batch = torch.arange(8.0).view(8, 1, 1, 1).expand(8, 1, 8, 8)
    mixed, blended = augment.mix(batch, targets, mixup, cutmix, 0, 0, 1)
    weight = 1 - mixed[0].mean().item()  # image 0 is all 0, its neighbour all 1
    assert 0.01 < weight < 0.99
    loss = 0
    for row, label, other in zip(logits.double().numpy(), labels, labels[[1, 0, 3, 2, 5, 4, 7, 6]], strict=True):
        surprise = np.log(np.exp(row).sum()) - row
        loss += (weight * surprise[label] + (1 - weight) * surprise[other]) / 8
    assert classification_loss(logits, blended).item() == pytest.approx(loss, abs=1e-5)

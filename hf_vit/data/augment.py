"""Augmentation of a whole batch on its device. What happens to image i in epoch e depends on (seed, e, i) alone.

No library draws its random numbers that way: each function takes them from `uniform`, which every process, worker or resumed
run computes alike. Images are float (B, C, H, W) in [0, 1], C 1 or 3, unless a function says otherwise. Numbers that belong to
an image (`index`, amounts) stay on the CPU, where drawing them and selecting rows by them costs nothing; what is made of them
follows the images to their device without waiting for it.
"""

import functools
import math

import numpy as np
import torch
from torch import nn

from hf_vit.data.normalization import constant_tensor, standardize_
from hf_vit.data.sampling import uniform


def per_image(numbers, images):
    """(B,) on any device -> (B, 1, 1, 1) on the device of the images."""
    return numbers.to(images.device, non_blocking=True).view(-1, 1, 1, 1)


def random_flip(images, index, seed, epoch):
    """Mirrors half of the images left to right; any dtype."""
    flipped = uniform(index, seed, epoch, stream=0) < 0.5
    return torch.where(per_image(flipped, images), images.flip(3), images)


def random_shift(images, index, seed, epoch, pixels, mode="constant"):
    """Moves each image by whole pixels, up to `pixels` in each direction; any dtype.

    The uncovered border is black (mode "constant") or mirrored ("reflect"): DeiT III's simple random crop (arXiv 2204.07118,
    section 3.2).
    """
    B, _, H, W = images.shape
    padded = images.float() if mode == "reflect" else images  # torch does not mirror bytes
    padded = nn.functional.pad(padded, (pixels,) * 4, mode=mode).to(images.dtype)
    place = lambda stream: (uniform(index, seed, epoch, stream) * (2 * pixels + 1)).long()  # (B,)
    top, left = (place(stream).to(images.device, non_blocking=True) for stream in (1, 2))
    windows = padded.unfold(2, H, 1).unfold(3, W, 1)  # (B, C, 2 pixels + 1, 2 pixels + 1, H, W), a view
    return windows[torch.arange(B, device=images.device), :, top, left]


def resample(images, matrix, size, padding_mode):
    """Images of `size` (height, width) whose places `matrix` (B, 2, 3) finds in the given ones, in units of half a side; bilinear."""
    matrix = matrix.to(images.device, non_blocking=True)
    grid = nn.functional.affine_grid(matrix, [*images.shape[:2], *size], align_corners=False)
    return nn.functional.grid_sample(images, grid, mode="bilinear", padding_mode=padding_mode, align_corners=False)


def random_resized_crop(images, index, seed, epoch, size, scale):
    """Stretches a random part of each image to `size` (height, width), bilinear: `scale` of its area, with an aspect ratio of 3/4 to
    4/3 of that of the image; parts outside are clipped. Inception crop (arXiv 1409.4842, section 6).
    """
    area, aspect, x, y = (uniform(index, seed, epoch, stream) for stream in range(3, 7))  # (B,)
    area = scale[0] + (scale[1] - scale[0]) * area
    low, high = torch.log(torch.tensor((3 / 4, 4 / 3)))
    aspect = torch.exp(low + (high - low) * aspect)
    width, height = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)  # shares of the sides
    x, y = (2 * x - 1) * (1 - width), (2 * y - 1) * (1 - height)  # centre, in [-1, 1]
    zero = torch.zeros_like(x)
    matrix = torch.stack([width, zero, x, zero, height, y], 1).view(-1, 2, 3)
    return resample(images, matrix, size, "reflection")


def move(images, name, amount):
    """Shears by a share of the side, translates by pixels or rotates by degrees: each image by its `amount` (B,), about its centre;
    black outside."""
    H, W = images.shape[2:]
    matrix = torch.eye(2, 3).repeat(len(amount), 1, 1)  # output pixels to input pixels
    if name == "rotate":
        cos, sin = torch.cos(amount * math.pi / 180), torch.sin(amount * math.pi / 180)
        matrix[:, :, :2] = torch.stack([cos, -sin, sin, cos], 1).view(-1, 2, 2)
    else:
        row, column = dict(shear_x=(0, 1), shear_y=(1, 0), translate_x=(0, 2), translate_y=(1, 2))[name]
        matrix[:, row, column] = amount
    scale = torch.tensor([[1, H / W, 2 / W], [W / H, 1, 2 / H]])  # to units of half a side
    return resample(images, matrix * scale, (H, W), "zeros")


# Colour operations: the definitions are those of PIL's ImageEnhance and ImageOps.


def grayscale(images):
    """Luma of ITU-R 601 in every channel."""
    if images.shape[1] == 1:
        return images
    weights = constant_tensor((0.299, 0.587, 0.114), images.device).view(1, 3, 1, 1)
    return (images * weights).sum(dim=1, keepdim=True).expand_as(images)


def smooth(images):
    """PIL's kernel, which leaves the border."""
    C = images.shape[1]
    kernel = constant_tensor((1.0, 1, 1, 1, 5, 1, 1, 1, 1), images.device).view(3, 3).div(13).expand(C, 1, 3, 3)
    result = images.clone()
    result[:, :, 1:-1, 1:-1] = nn.functional.conv2d(images, kernel, groups=C)
    return result


# What each enhancement blends an image with.
BLENDED_WITH = dict(
    brightness=torch.zeros_like,
    contrast=lambda images: grayscale(images).mean(dim=(1, 2, 3), keepdim=True),
    saturation=grayscale,
    sharpness=smooth,
)


def enhance(images, name, amount):
    """`BLENDED_WITH` at amount (B,) 0, the images at 1, extrapolated beyond."""
    other = BLENDED_WITH[name](images)
    return (other + per_image(amount, images) * (images - other)).clamp(0, 1)


def solarize(images, threshold):
    """Inverts values at or above `threshold` (B,) in [0, 1]."""
    return torch.where(images >= per_image(threshold, images), 1 - images, images)


def posterize(images, bits):
    """Keeps the first `bits` (B,), rounded, of the eight."""
    step = per_image(2.0 ** (8 - bits.round()), images)
    return (images * 255).round().div(step).floor() * step / 255


def autocontrast(images):
    """Stretches each channel from its darkest and brightest value to 0 and 1."""
    low, high = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
    stretched = (images - low) / (high - low).clamp(min=1 / 255)
    return torch.where(high - low > 0.5 / 255, stretched, images)  # a smaller range is the rounding of a resized crop


def equalize(images):
    """Spreads each channel's values to a flat histogram, counting as PIL's ImageOps.equalize does."""
    B, C, H, W = images.shape
    values = (images * 255).round().long().view(B * C, H * W)
    histogram = torch.zeros(B * C, 256, device=images.device, dtype=torch.long)
    histogram.scatter_add_(1, values, torch.ones_like(values))
    last = (histogram > 0).long().mul(torch.arange(256, device=images.device)).argmax(1)  # the brightest value
    step = (H * W - histogram.gather(1, last.view(-1, 1)).squeeze(1)) // 255  # (B * C,)
    before = histogram.cumsum(1) - histogram  # pixels darker than each value
    table = ((before + (step // 2).view(-1, 1)) // step.clamp(min=1).view(-1, 1)).clamp(max=255)
    spread = table.gather(1, values).float().view(B, C, H, W) / 255
    return torch.where((step > 0).view(B, C, 1, 1), spread, images)


def color_jitter(images, index, seed, epoch, strength):
    """Brightness, contrast and saturation, in this order, each by a factor in [1 - strength, 1 + strength]."""
    for stream, name in ((13, "brightness"), (14, "contrast"), (15, "saturation")):
        images = enhance(images, name, 1 + strength * (2 * uniform(index, seed, epoch, stream) - 1))
    return images


def change_rows_(images, chosen, function):
    """Changes the `chosen` (B,) images in place by a function of their row numbers and of themselves."""
    rows = chosen.nonzero().flatten()  # on the CPU, where this waits for nothing
    if len(rows):
        places = rows.to(images.device, non_blocking=True)
        images[places] = function(rows, images[places])
    return images


# The operations of TrivialAugment and RandAugment, in the order that they are drawn in.
OPERATIONS = (
    "identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "saturation", "contrast", "sharpness",
    "posterize", "solarize", "autocontrast", "equalize",
)  # fmt: skip
# Their largest amounts: TrivialAugment's "wide" space (arXiv 2103.10158, table 1) and RandAugment's (arXiv 1909.13719, as in
# torchvision), where images are translated by a share of the side.
TRIVIAL_AUGMENT_SPACE = dict(shear=0.99, translate=32, rotate=135, enhance=0.99, posterize=2)
RAND_AUGMENT_SPACE = dict(shear=0.3, translate=150 / 331, rotate=30, enhance=0.9, posterize=4)


def random_operation(space, images, index, seed, epoch, stream, strength):
    """One random operation for each image, at `strength` (B,) in [0, 1] of the largest amount, or of its opposite."""
    choice = (len(OPERATIONS) * uniform(index, seed, epoch, stream)).long()
    sign = torch.where(uniform(index, seed, epoch, stream + 1) < 0.5, -1.0, 1.0)

    def operation(name, rows, some):
        amount, kind = strength[rows], name.partition("_")[0]
        if name == "identity":
            return some
        if name in ("autocontrast", "equalize"):
            return (autocontrast if name == "autocontrast" else equalize)(some)
        if name == "posterize":
            return posterize(some, 8 + amount * (space["posterize"] - 8))
        if name == "solarize":
            return solarize(some, (1 - amount) * 256 / 255)
        if name in BLENDED_WITH:
            return enhance(some, name, 1 + amount * space["enhance"] * sign[rows])
        amount = amount * space[kind] * sign[rows]
        if kind == "translate" and space[kind] < 1:
            amount = amount * images.shape[3 if name == "translate_x" else 2]
        return move(some, name, amount)

    images = images.clone()
    for number, name in enumerate(OPERATIONS):
        change_rows_(images, choice == number, functools.partial(operation, name))
    return images


def trivial_augment(images, index, seed, epoch):
    """One operation an image, at one of 31 random strengths: TrivialAugment Wide (arXiv 2103.10158, section 3)."""
    strength = (31 * uniform(index, seed, epoch, stream=18)).long() / 30
    return random_operation(TRIVIAL_AUGMENT_SPACE, images, index, seed, epoch, 19, strength)


def rand_augment(images, index, seed, epoch, operations=2, magnitude=9):
    """`operations` an image, each at `magnitude` of 30: RandAugment (arXiv 1909.13719, section 3)."""
    strength = torch.full((len(images),), magnitude / 30)
    for number in range(operations):
        images = random_operation(RAND_AUGMENT_SPACE, images, index, seed, epoch, 21 + 2 * number, strength)
    return images


def random_erase(images, index, seed, epoch, probability):
    """Fills a random rectangle, 2% to a third of the image, with standard normal noise (arXiv 1708.04896, algorithm 1), after the
    normalisation."""
    C, H, W = images.shape[1:]

    def erase(rows, some):
        ids, device = index[rows], images.device
        size, ratio, y, x = (uniform(ids, seed, epoch, stream) for stream in range(8, 12))  # (b,)
        size = 0.02 + (1 / 3 - 0.02) * size
        aspect = torch.exp((2 * ratio - 1) * torch.log(torch.tensor(10 / 3)))
        height, width = (size * aspect).sqrt().clamp(max=1) * H, (size / aspect).sqrt().clamp(max=1) * W  # in pixels
        sides = y * (H - height), x * (W - width), height, width
        top, left, height, width = (per_image(side, images) for side in sides)  # (b, 1, 1, 1)
        y, x = torch.arange(H, device=device).view(H, 1), torch.arange(W, device=device)
        inside = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)  # (b, 1, H, W)
        pixel = torch.arange(C * H * W, device=device).view(C, H, W)
        u = uniform(per_image(ids, images) * (C * H * W) + pixel, seed, epoch, stream=12)  # (b, C, H, W)
        noise = torch.erfinv((2 * u - 1).clamp(-0.999999, 0.999999)) * 2**0.5  # inverse of the normal distribution
        return torch.where(inside, noise.to(some.dtype), some)

    return change_rows_(images.clone(), uniform(index, seed, epoch, stream=7) < probability, erase)


def mix(images, targets, mixup, cutmix, seed, epoch, batch):
    """Blends each image and its target with its neighbour's (mixup), or pastes a rectangle of the neighbour (cutmix).

    Mixup (arXiv 1710.09412, section 2) and cutmix (arXiv 1905.04899, section 3.1) draw one weight from Beta(a, a) for the
    batch; if both are above 0, half of the batches get the one and half the other. Neighbours are the rows 0 and 1, 2
    and 3, ...: the same pairs however the batch is split among processes.

    Args:
        images: (B, C, H, W); in an odd batch the last image is unchanged.
        targets: (B, L) probabilities.
        mixup, cutmix: the parameter a of each; 0 turns it off.
        batch: number of the batch in its epoch.
    """
    rng = np.random.default_rng([seed, epoch, batch])
    neighbour = (torch.arange(len(images), device=images.device) ^ 1).clamp(max=len(images) - 1)

    def interpolate(values, weight):
        return weight * values + (1 - weight) * values[neighbour]

    if mixup > 0 and (cutmix == 0 or rng.random() < 0.5):
        weight = float(rng.beta(mixup, mixup))
        return interpolate(images, weight), interpolate(targets, weight)
    if cutmix == 0:
        return images, targets
    H, W = images.shape[2:]
    side = math.sqrt(1 - float(rng.beta(cutmix, cutmix)))
    y, x = int(rng.integers(H)), int(rng.integers(W))  # centre
    top, bottom = max(0, y - round(side * H / 2)), min(H, y + round(side * H / 2))
    left, right = max(0, x - round(side * W / 2)), min(W, x + round(side * W / 2))
    pasted = images.clone()
    pasted[:, :, top:bottom, left:right] = images[neighbour, :, top:bottom, left:right]
    return pasted, interpolate(targets, 1 - (bottom - top) * (right - left) / (H * W))


def augment(images, index, epoch, spec, args, crop):
    """A training batch: uint8 (B, C, H', W') -> normalised float32 (B, C, H, W).

    Args:
        args: of the run: its seed, `crop_scale`, `shift` (pixels), `flip` (whether half of the images are mirrored), `auto_augment`,
            `rand_magnitude` (0 to 30), `color_jitter` (its strength) and `erase` (its probability).
        crop: "resized" (`random_resized_crop` with at least `crop_scale` of the area), "simple" (resized to the model's
            size, then shifted by up to four pixels, mirrored at the border) or "none".
    """
    numbers = index, args.seed, epoch
    if args.shift > 0:  # while the images are bytes, a quarter of the floats' size
        images = random_shift(images, *numbers, args.shift)
    if crop == "simple":
        images = random_shift(images, *numbers, 4, mode="reflect")
    if args.flip:
        images = random_flip(images, *numbers)
    images = images.float() / 255
    if crop == "resized":
        images = random_resized_crop(images, *numbers, (spec.height, spec.width), scale=(args.crop_scale, 1.0))
    if args.auto_augment == "trivial":
        images = trivial_augment(images, *numbers)
    elif args.auto_augment == "rand":
        images = rand_augment(images, *numbers, magnitude=args.rand_magnitude)
    if args.color_jitter > 0:
        images = color_jitter(images, *numbers, args.color_jitter)
    images = standardize_(images, spec)
    if args.erase > 0:
        images = random_erase(images, *numbers, args.erase)
    return images

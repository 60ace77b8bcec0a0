"""Augmentation of a whole batch on its device. What image i gets in epoch e depends on (seed, e, i) alone.

No library draws its numbers so: each of these functions takes them from `uniform`, which any process, worker or resumed
run computes alike. Images are float (B, C, H, W) in [0, 1], C 1 or 3, unless a function says otherwise. Numbers that belong to
an image (`index`, amounts) stay on the CPU, where it costs nothing to draw them and to choose rows by them; what is
made of them follows the images to their device without waiting for it.
"""

import functools
import math

import numpy as np
import torch
from torch import nn


def uniform(index: torch.Tensor, seed: int, epoch: int | torch.Tensor, stream: int | torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1), one for each of `index` (b,): a hash of (seed, epoch, stream, index), the same on every device.

    Tensors are broadcast: (b,) epochs and (s, 1) streams give (s, b).

    The mixing function is that of SplitMix64 (Steele et al., OOPSLA 2014, doi 10.1145/2660193.2660195), in wrapping int64.
    """

    def shift_right(x, bits):  # of the unsigned number; torch shifts the sign along
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    def wrap(
        x,
    ):  # Python's integers as torch's, so that what all of `index` have in common is hashed once, and by no kernel
        return (x + 2**63) % 2**64 - 2**63 if isinstance(x, int) else x

    def mix(x):
        x = wrap((x ^ shift_right(x, 30)) * -4658895280553007687)  # 0xBF58476D1CE4E5B9
        x = wrap((x ^ shift_right(x, 27)) * -7723592293110705685)  # 0x94D049BB133111EB
        return x ^ shift_right(x, 31)

    state = 0
    for number in (seed, epoch, stream, index):
        state = mix(wrap(state + number - 7046029254386353131))  # 0x9E3779B97F4A7C15
    return shift_right(state, 40).float() * 2.0**-24  # 24 bits: what a float holds without rounding up to 1


@functools.lru_cache(maxsize=64)
def constants(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Numbers (n,) on a device, which are copied there once: each copy would wait for it."""
    with torch.inference_mode(False):
        return torch.tensor(values, device=device)


def a_number_each(numbers, images):
    """(B,) on any device -> (B, 1, 1, 1) on that of the images."""
    return numbers.to(images.device, non_blocking=True).view(-1, 1, 1, 1)


def normalize(images, form):
    """uint8 (B, C, H, W) -> float32, as the image processor does it: (x / 255 - mean) / std for each channel.

    Floats are what an image processor has normalised already."""
    return images if images.is_floating_point() else standardize_(images.float().div_(255), form)


def standardize_(images, form):
    """(x - mean) / std for each channel, in place."""
    mean, std = (constants(tuple(values), images.device).view(1, -1, 1, 1) for values in (form.mean, form.std))
    return images.sub_(mean).div_(std)


def as_bytes(pixel_values, form):
    """Normalised (B, C, H, W) -> uint8, for people to look at: `normalize` undone, and what lies outside of black and white cut
    off. Where the form does not say how that was done, each image fills the range."""
    if form.processor is not None:
        low, high = (pixel_values.amin(dim=(1, 2, 3), keepdim=True), pixel_values.amax(dim=(1, 2, 3), keepdim=True))
        return (255 * (pixel_values - low) / (high - low).clamp(min=1e-12)).round().byte()
    mean = torch.tensor(form.mean, device=pixel_values.device).view(1, -1, 1, 1)
    std = torch.tensor(form.std, device=pixel_values.device).view(1, -1, 1, 1)
    return (255 * (pixel_values * std + mean)).round().clamp(0, 255).byte()


# ----------------------------------------------------------------------------------------------------------------------
# Where: flips, shifts, crops


def random_flip(images, index, seed, epoch):
    """Mirror half of the images left to right; any dtype."""
    flipped = uniform(index, seed, epoch, stream=0) < 0.5
    return torch.where(a_number_each(flipped, images), images.flip(3), images)


def random_shift(images, index, seed, epoch, pixels, mode="constant"):
    """Move each image by whole pixels, up to `pixels` in each direction; any dtype.

    What comes in is black (mode "constant"), or mirrored at the border ("reflect"): the simple random crop of DeiT III
    (arXiv 2204.07118, section 3.2).
    """
    B, _, H, W = images.shape
    if mode == "reflect":
        padded = nn.functional.pad(images.float(), (pixels,) * 4, mode="reflect").to(images.dtype)
    else:
        padded = nn.functional.pad(images, (pixels,) * 4)
    top = (uniform(index, seed, epoch, stream=1) * (2 * pixels + 1)).long()  # (B,)
    left = (uniform(index, seed, epoch, stream=2) * (2 * pixels + 1)).long()
    top, left = (place.to(images.device, non_blocking=True) for place in (top, left))
    windows = padded.unfold(2, H, 1).unfold(3, W, 1)  # (B, C, 2 pixels + 1, 2 pixels + 1, H, W), a view
    return windows[torch.arange(B, device=images.device), :, top, left]


def random_resized_crop(images, index, seed, epoch, size=None, scale=(0.35, 1.0), ratio=(3 / 4, 4 / 3)):
    """A random part of the image, `scale` of its area and `ratio` wide to high, stretched to `size`, bilinear.

    `size` is (height, width); None keeps the images' own.
    Inception crop (arXiv 1409.4842, section 6), `ratio` in parts of the sides; what would stick out is clipped.
    """
    area = scale[0] + (scale[1] - scale[0]) * uniform(index, seed, epoch, stream=3)  # (B,)
    log_ratio = torch.log(torch.tensor(ratio))
    aspect = torch.exp(log_ratio[0] + (log_ratio[1] - log_ratio[0]) * uniform(index, seed, epoch, stream=4))
    width, height = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)  # parts of the side
    x = (2 * uniform(index, seed, epoch, stream=5) - 1) * (1 - width)  # centre, in [-1, 1]
    y = (2 * uniform(index, seed, epoch, stream=6) - 1) * (1 - height)
    zero = torch.zeros_like(x)
    affine = torch.stack([torch.stack([width, zero, x], 1), torch.stack([zero, height, y], 1)], 1)  # (B, 2, 3)
    affine = affine.to(images.device, non_blocking=True)
    grid = nn.functional.affine_grid(affine, [*images.shape[:2], *(size or images.shape[2:])], align_corners=False)
    return nn.functional.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def affine(images, matrix):
    """Move each image by its `matrix` (B, 2, 3), pixels of the output to pixels of the input about the centre; bilinear.

    What comes in is black.
    """
    H, W = images.shape[2:]
    scale = torch.tensor([[1, H / W, 2 / W], [W / H, 1, 2 / H]])  # to units of half a side
    matrix = (matrix * scale).to(images.device, non_blocking=True)
    grid = nn.functional.affine_grid(matrix, list(images.shape), align_corners=False)
    return nn.functional.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


# ----------------------------------------------------------------------------------------------------------------------
# What: colours, sharpness. `amount` is (B,), one number an image; the definitions are those of PIL's ImageEnhance, ImageOps.


def _blend(images, other, amount):
    return (other + a_number_each(amount, images) * (images - other)).clamp(0, 1)


def grayscale(images):
    """Luma of ITU-R 601 in every channel."""
    if images.shape[1] == 1:
        return images
    weights = constants((0.299, 0.587, 0.114), images.device).view(1, 3, 1, 1)
    return (images * weights).sum(dim=1, keepdim=True).expand_as(images)


def brightness(images, amount):
    return _blend(images, torch.zeros_like(images), amount)


def contrast(images, amount):
    return _blend(images, grayscale(images).mean(dim=(1, 2, 3), keepdim=True), amount)


def saturation(images, amount):
    return _blend(images, grayscale(images), amount)


def sharpness(images, amount):
    """0 smooths with PIL's kernel (the border stays), 1 leaves the image, more sharpens."""
    C = images.shape[1]
    kernel = constants((1.0, 1, 1, 1, 5, 1, 1, 1, 1), images.device).view(3, 3).div(13).expand(C, 1, 3, 3)
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = nn.functional.conv2d(images, kernel, groups=C)
    return _blend(images, smooth, amount)


def solarize(images, threshold):
    """Invert what is as bright as `threshold` (B,) in [0, 1], or brighter."""
    return torch.where(images >= a_number_each(threshold, images), 1 - images, images)


def posterize(images, bits):
    """Keep the first `bits` (B,) of the eight."""
    step = a_number_each(2.0 ** (8 - bits), images)
    return (images * 255).round().div(step).floor() * step / 255


def autocontrast(images, amount=None):
    """Stretch each channel from its darkest and brightest value to 0 and 1."""
    low, high = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
    stretched = (images - low) / (high - low).clamp(min=1 / 255)
    return torch.where(high - low > 0.5 / 255, stretched, images)  # less is a resized crop's rounding


def equalize(images, amount=None):
    """Spread each channel's values so that its histogram is flat, as PIL's ImageOps.equalize counts."""
    B, C, H, W = images.shape
    values = (images * 255).round().long().view(B * C, H * W)
    histogram = torch.zeros(B * C, 256, device=images.device, dtype=torch.long)
    histogram.scatter_add_(1, values, torch.ones_like(values))
    last = (histogram > 0).long().mul(torch.arange(256, device=images.device)).argmax(1)  # brightest value there is
    step = (H * W - histogram.gather(1, last.view(-1, 1)).squeeze(1)) // 255  # (B * C,)
    before = histogram.cumsum(1) - histogram  # pixels darker than each value
    table = ((before + (step // 2).view(-1, 1)) // step.clamp(min=1).view(-1, 1)).clamp(max=255)
    spread = table.gather(1, values).float().view(B, C, H, W) / 255
    return torch.where((step > 0).view(B, C, 1, 1), spread, images)


def gaussian_blur(images, sigma):
    """Blur by a Gaussian of `sigma` (B,) pixels, cut off behind six, mirrored at the border."""
    B, C, H, W = images.shape
    if B == 0:
        return images
    reach = min(6, H - 1, W - 1)
    offsets = torch.arange(-reach, reach + 1)
    kernel = torch.exp(-0.5 * (offsets / sigma.view(-1, 1)) ** 2)  # (B, 2 * reach + 1)
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(C, 0)  # one for each channel of each image
    kernel = kernel.to(images.device, non_blocking=True)
    flat = nn.functional.pad(images, (reach,) * 4, mode="reflect").reshape(1, B * C, H + 2 * reach, W + 2 * reach)
    flat = nn.functional.conv2d(flat, kernel.view(B * C, 1, -1, 1), groups=B * C)
    return nn.functional.conv2d(flat, kernel.view(B * C, 1, 1, -1), groups=B * C).view(B, C, H, W)


def color_jitter(images, index, seed, epoch, strength):
    """Brightness, contrast and saturation, each by a factor from [1 - strength, 1 + strength], in this order."""
    for stream, change in ((13, brightness), (14, contrast), (15, saturation)):
        images = change(images, 1 + strength * (2 * uniform(index, seed, epoch, stream) - 1))
    return images


def _of_each_choice(images, choice, functions):
    """The images, each changed by the function of its choice (B,); a function takes the rows of an image, and the images of those
    rows, and None leaves them."""
    result = images.clone()
    for number, function in enumerate(functions):
        rows = (choice == number).nonzero().flatten()  # on the CPU, where it waits for nothing
        if function is not None and len(rows):
            places = rows.to(images.device, non_blocking=True)
            result[places] = function(rows, images[places])
    return result


def three_augment(images, index, seed, epoch):
    """Each image is turned grey, solarised or blurred, one of the three (DeiT III, arXiv 2204.07118, section 3.2)."""
    choice = (3 * uniform(index, seed, epoch, stream=16)).long()
    sigma = 0.1 + 1.9 * uniform(index, seed, epoch, stream=17)
    return _of_each_choice(
        images,
        choice,
        [
            lambda rows, some: grayscale(some),
            lambda rows, some: solarize(some, torch.full((len(rows),), 128 / 255)),
            lambda rows, some: gaussian_blur(some, sigma[rows]),
        ],
    )


def _moves(images, kind, amount):
    """Rotate by `amount` (b,) degrees, shear by a part of the side, or translate by pixels."""
    one, zero = torch.ones_like(amount), torch.zeros_like(amount)
    if kind == "rotate":
        angle = amount * math.pi / 180
        rows = (angle.cos(), -angle.sin(), zero), (angle.sin(), angle.cos(), zero)
    else:
        rows = {
            "shear_x": ((one, amount, zero), (zero, one, zero)),
            "shear_y": ((one, zero, zero), (amount, one, zero)),
            "translate_x": ((one, zero, amount), (zero, one, zero)),
            "translate_y": ((one, zero, zero), (zero, one, amount)),
        }[kind]
    return affine(images, torch.stack([torch.stack(row, 1) for row in rows], 1))


def _operation(name, images, amount):
    colours = dict(brightness=brightness, color=saturation, contrast=contrast, sharpness=sharpness)
    if name in colours:
        return colours[name](images, 1 + amount)
    others = dict(posterize=posterize, solarize=solarize, autocontrast=autocontrast, equalize=equalize)
    return others[name](images, amount) if name in others else _moves(images, name, amount)


# Largest amounts, and whether half of the images get the opposite one. TrivialAugment's "wide" space (arXiv 2103.10158, table
# 1), and RandAugment's (arXiv 1909.13719, as torchvision has it). Posterize and solarize run from nothing down to this.
TRIVIAL = dict(
    identity=(0, False), shear_x=(0.99, True), shear_y=(0.99, True), translate_x=(32, True), translate_y=(32, True),
    rotate=(135, True), brightness=(0.99, True), color=(0.99, True), contrast=(0.99, True), sharpness=(0.99, True),
    posterize=(2, False), solarize=(0, False), autocontrast=(0, False), equalize=(0, False),
)  # fmt: skip
RAND = TRIVIAL | dict(
    shear_x=(0.3, True), shear_y=(0.3, True), translate_x=(150 / 331, True), translate_y=(150 / 331, True), rotate=(30, True),
    brightness=(0.9, True), color=(0.9, True), contrast=(0.9, True), sharpness=(0.9, True), posterize=(4, False),
)  # fmt: skip


def _one_of(space, images, index, seed, epoch, stream, strength):
    """One operation of `space` to each image, at `strength` (B,) in [0, 1] of its largest amount."""
    choice = (len(space) * uniform(index, seed, epoch, stream)).long()
    sign = torch.where(uniform(index, seed, epoch, stream + 1) < 0.5, -1.0, 1.0)

    def operation(name, rows, some):
        largest, both_ways = space[name]
        if name in ("posterize", "solarize"):
            nothing = 8 if name == "posterize" else 256 / 255
            amount = nothing + strength[rows] * (largest - nothing)
            amount = amount.round() if name == "posterize" else amount
        else:
            amount = strength[rows] * largest * (sign[rows] if both_ways else 1)
            if name.startswith("translate") and largest < 1:  # a part of the side
                amount = amount * images.shape[3 if name.endswith("x") else 2]
        return _operation(name, some, amount)

    functions = [None if name == "identity" else functools.partial(operation, name) for name in space]
    return _of_each_choice(images, choice, functions)


def trivial_augment(images, index, seed, epoch):
    """One operation an image, its strength drawn from 31 steps: TrivialAugment Wide (arXiv 2103.10158, section 3)."""
    strength = (31 * uniform(index, seed, epoch, stream=18)).long() / 30
    return _one_of(TRIVIAL, images, index, seed, epoch, 19, strength)


def rand_augment(images, index, seed, epoch, operations=2, magnitude=9):
    """`operations` an image, each at `magnitude` of 30: RandAugment (arXiv 1909.13719, section 3)."""
    strength = torch.full((len(images),), magnitude / 30)
    for number in range(operations):
        images = _one_of(RAND, images, index, seed, epoch, 21 + 2 * number, strength)
    return images


# ----------------------------------------------------------------------------------------------------------------------
# After normalisation: erasing, and mixtures of two images


def random_erase(images, index, seed, epoch, probability, area=(0.02, 1 / 3)):
    """Fill a random rectangle of `area` of the image with standard normal noise (arXiv 1708.04896, algorithm 1)."""
    C, H, W = images.shape[1:]
    draw = [uniform(index, seed, epoch, stream=stream) for stream in range(7, 12)]
    rows = (draw[0] < probability).nonzero().flatten()
    size = area[0] + (area[1] - area[0]) * draw[1]
    aspect = torch.exp((2 * draw[2] - 1) * torch.log(torch.tensor(10 / 3)))
    height, width = (size * aspect).sqrt().clamp(max=1) * H, (size / aspect).sqrt().clamp(max=1) * W  # (B,) pixels
    top, left = draw[3] * (H - height), draw[4] * (W - width)
    y, x = torch.arange(H).view(1, H), torch.arange(W).view(1, W)
    inside_y = (y >= top.view(-1, 1)) & (y < (top + height).view(-1, 1))  # (B, H)
    inside_x = (x >= left.view(-1, 1)) & (x < (left + width).view(-1, 1))  # (B, W)
    here = lambda values: values[rows].to(images.device, non_blocking=True)
    erased = here(inside_y).unsqueeze(2) & here(inside_x).unsqueeze(
        1
    )  # (b, H, W), of the images that are erased at all
    pixel = torch.arange(C * H * W, device=images.device)
    u = uniform((here(index).view(-1, 1) * (C * H * W) + pixel).flatten(), seed, epoch, stream=12)
    noise = torch.erfinv((2 * u - 1).clamp(-0.999999, 0.999999)) * 2**0.5  # inverse of the normal distribution
    places = rows.to(images.device, non_blocking=True)
    changed = torch.where(erased.unsqueeze(1), noise.view(-1, C, H, W).to(images.dtype), images[places])
    return images.index_copy(0, places, changed)


def mix(images, targets, mixup, cutmix, seed, epoch, batch):
    """Blend each image and its target with its neighbour's, or paste a rectangle of the neighbour in.

    mixup (arXiv 1710.09412, section 2) and cutmix (arXiv 1905.04899, section 3.1) draw one weight from Beta(a, a) for the
    batch; where both are above 0, half of the batches get the one and half the other. Neighbours are the rows 0 and 1, 2
    and 3, ...: the same pairs however the batch is split among processes.

    Args:
        images: (B, C, H, W), B even (in an odd batch the last image stays as it is).
        targets: (B, L) probabilities.
        mixup, cutmix: the parameter a of each; 0 leaves it out.
        batch: number of the batch in its epoch.
    """
    rng = np.random.default_rng([seed, epoch, batch])
    neighbour = (torch.arange(len(images), device=images.device) ^ 1).clamp(max=len(images) - 1)
    blend = lambda values, weight: weight * values + (1 - weight) * values[neighbour]
    if mixup > 0 and (cutmix == 0 or rng.random() < 0.5):
        weight = float(rng.beta(mixup, mixup))
        return blend(images, weight), blend(targets, weight)
    if cutmix == 0:
        return images, targets
    H, W = images.shape[2:]
    side = math.sqrt(1 - float(rng.beta(cutmix, cutmix)))
    y, x = int(rng.integers(H)), int(rng.integers(W))  # centre
    top, bottom = max(0, y - round(side * H / 2)), min(H, y + round(side * H / 2))
    left, right = max(0, x - round(side * W / 2)), min(W, x + round(side * W / 2))
    pasted = images.clone()
    pasted[:, :, top:bottom, left:right] = images[neighbour, :, top:bottom, left:right]
    return pasted, blend(targets, 1 - (bottom - top) * (right - left) / (H * W))


def augment(
    images, index, seed, epoch, form, *,
    crop="none", crop_scale=0.35, shift=0, flip=False, auto_augment="none", magnitude=9, jitter=0.0, erase=0.0,
):  # fmt: skip
    """A training batch: uint8 (B, C, H', W') -> normalised float32 (B, C, H, W), augmented as the run's arguments say.

    Args:
        crop: "resized" (`random_resized_crop` with at least `crop_scale` of the area), "simple" (resized to the model's
            size, then shifted by up to four pixels, mirrored at the border) or "none".
        shift: pixels of `random_shift`.
        flip: whether half of the images are mirrored.
        auto_augment: "none", "three", "trivial" or "rand", the last of `magnitude`, 0 to 30.
        jitter: strength of `color_jitter`; 0 leaves it out.
        erase: probability of `random_erase`.
    """
    size = (form.height, form.width)
    if shift > 0:  # whole pixels move before the numbers grow from one byte to four
        images = random_shift(images, index, seed, epoch, shift)
    if crop == "simple":
        images = random_shift(images, index, seed, epoch, 4, mode="reflect")
    if flip:
        images = random_flip(images, index, seed, epoch)
    images = images.float() / 255
    if crop == "resized":
        images = random_resized_crop(images, index, seed, epoch, size, scale=(crop_scale, 1.0))
    if auto_augment == "three":
        images = three_augment(images, index, seed, epoch)
    elif auto_augment == "trivial":
        images = trivial_augment(images, index, seed, epoch)
    elif auto_augment == "rand":
        images = rand_augment(images, index, seed, epoch, magnitude=magnitude)
    if jitter > 0:
        images = color_jitter(images, index, seed, epoch, jitter)
    images = standardize_(images, form)
    if erase > 0:
        images = random_erase(images, index, seed, epoch, erase)
    return images

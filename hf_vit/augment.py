"""Augmentation of a whole batch on its device. What image i gets in epoch e depends on (seed, e, i) alone."""

import numpy as np
import torch
from torch import nn


def uniform(index: torch.Tensor, seed: int, epoch: int, stream: int) -> torch.Tensor:
    """Numbers in [0, 1), one for each of `index` (b,): a hash of (seed, epoch, stream, index), the same on every device.

    The mixing function is that of SplitMix64 (Steele et al., OOPSLA 2014, doi 10.1145/2660193.2660195), in wrapping int64.
    """

    def shift_right(x, bits):  # of the unsigned number; torch shifts the sign along
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    def mix(x):
        x = (x ^ shift_right(x, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
        x = (x ^ shift_right(x, 27)) * -7723592293110705685  # 0x94D049BB133111EB
        return x ^ shift_right(x, 31)

    state = torch.zeros_like(index)
    for number in (seed, epoch, stream, index):
        state = mix(state + number - 7046029254386353131)  # 0x9E3779B97F4A7C15
    return shift_right(state, 11).to(torch.float64).mul(2.0**-53).float()


def normalize(images, form):
    """uint8 (B, C, H, W) -> float32, as the image processor does it: (x / 255 - mean) / std for each channel."""
    mean = torch.tensor(form.mean, device=images.device).view(1, -1, 1, 1)
    std = torch.tensor(form.std, device=images.device).view(1, -1, 1, 1)
    return (images.float() / 255 - mean) / std


def random_flip(images, index, seed, epoch):
    """Mirror half of the images (B, C, H, W) left to right."""
    flipped = uniform(index, seed, epoch, stream=0) < 0.5
    return torch.where(flipped.view(-1, 1, 1, 1), images.flip(3), images)


def random_shift(images, index, seed, epoch, pixels):
    """Move each image by whole pixels, up to `pixels` in each direction; what comes in is black (0)."""
    B, C, H, W = images.shape
    padded = nn.functional.pad(images, (pixels,) * 4)
    top = (uniform(index, seed, epoch, stream=1) * (2 * pixels + 1)).long()  # (B,)
    left = (uniform(index, seed, epoch, stream=2) * (2 * pixels + 1)).long()
    rows = (top.view(-1, 1) + torch.arange(H, device=images.device)).view(B, 1, H, 1)
    columns = (left.view(-1, 1) + torch.arange(W, device=images.device)).view(B, 1, 1, W)
    batch = torch.arange(B, device=images.device).view(B, 1, 1, 1)
    return padded[batch, torch.arange(C, device=images.device).view(1, C, 1, 1), rows, columns]


def random_resized_crop(images, index, seed, epoch, scale=(0.35, 1.0), ratio=(3 / 4, 4 / 3)):
    """A random part of the image, `scale` of its area and `ratio` wide to high, stretched over the whole (bilinear).

    Inception crop (arXiv 1409.4842, section 6), float (B, C, H, W) in and out.
    """
    area = scale[0] + (scale[1] - scale[0]) * uniform(index, seed, epoch, stream=3)  # (B,)
    log_ratio = torch.log(torch.tensor(ratio, device=images.device))
    aspect = torch.exp(log_ratio[0] + (log_ratio[1] - log_ratio[0]) * uniform(index, seed, epoch, stream=4))
    width, height = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)  # parts of the side
    x = (2 * uniform(index, seed, epoch, stream=5) - 1) * (1 - width)  # centre, in [-1, 1]
    y = (2 * uniform(index, seed, epoch, stream=6) - 1) * (1 - height)
    zero = torch.zeros_like(x)
    affine = torch.stack([torch.stack([width, zero, x], 1), torch.stack([zero, height, y], 1)], 1)  # (B, 2, 3)
    grid = nn.functional.affine_grid(affine, list(images.shape), align_corners=False)
    return nn.functional.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def random_erase(images, index, seed, epoch, probability, area=(0.02, 1 / 3)):
    """Fill a random rectangle of `area` of the image with standard normal noise (arXiv 1708.04896, algorithm 1)."""
    B, C, H, W = images.shape
    draw = [uniform(index, seed, epoch, stream=stream) for stream in range(7, 12)]
    size = area[0] + (area[1] - area[0]) * draw[1]
    aspect = torch.exp((2 * draw[2] - 1) * torch.log(torch.tensor(10 / 3, device=images.device)))
    height, width = (size * aspect).sqrt().clamp(max=1) * H, (size / aspect).sqrt().clamp(max=1) * W  # (B,) pixels
    top, left = draw[3] * (H - height), draw[4] * (W - width)
    y, x = torch.arange(H, device=images.device).view(1, H), torch.arange(W, device=images.device).view(1, W)
    inside_y = (y >= top.view(-1, 1)) & (y < (top + height).view(-1, 1))  # (B, H)
    inside_x = (x >= left.view(-1, 1)) & (x < (left + width).view(-1, 1))  # (B, W)
    erased = inside_y.unsqueeze(2) & inside_x.unsqueeze(1) & (draw[0] < probability).view(-1, 1, 1)  # (B, H, W)
    pixel = torch.arange(C * H * W, device=images.device).view(1, C, H, W)
    u = uniform((index.view(-1, 1, 1, 1) * (C * H * W) + pixel).flatten(), seed, epoch, stream=12).view(B, C, H, W)
    noise = torch.erfinv((2 * u - 1).clamp(-0.999999, 0.999999)) * 2**0.5  # inverse of the normal distribution
    return torch.where(erased.unsqueeze(1), noise.to(images.dtype), images)


def mixup(images, targets, alpha, seed, epoch, batch):
    """Blend each image and its target with its neighbour's (arXiv 1710.09412, section 2); one Beta(alpha, alpha) a batch.

    Neighbours are the rows 0 and 1, 2 and 3, ...: the same pairs however the batch is split among processes.

    Args:
        images: (B, C, H, W), B even (in an odd batch the last image stays as it is).
        targets: (B, L) probabilities.
        batch: number of the batch in its epoch.
    """
    weight = float(np.random.default_rng([seed, epoch, batch]).beta(alpha, alpha))
    neighbour = torch.arange(len(images), device=images.device) ^ 1
    neighbour[neighbour == len(images)] = len(images) - 1
    blend = lambda values: weight * values + (1 - weight) * values[neighbour]
    return blend(images), blend(targets)


def augment(images, index, seed, epoch, form, *, crop, shift, flip, erase):
    """A training batch: uint8 (B, C, H, W) -> normalised float32 (B, C, H, W), augmented as the run's arguments say."""
    if shift > 0:  # whole pixels move before the numbers grow from one byte to four
        images = random_shift(images, index, seed, epoch, shift)
    if flip:
        images = random_flip(images, index, seed, epoch)
    images = normalize(images, form)
    if crop == "resized":
        images = random_resized_crop(images, index, seed, epoch)
    if erase > 0:
        images = random_erase(images, index, seed, epoch, erase)
    return images

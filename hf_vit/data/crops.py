"""Crops and resizes single images: a random part of a photo to train on, its centre to evaluate.

A random resized crop is chosen in the photo's own pixels and cropped before resizing, as by torchvision's RandomResizedCrop
("Going Deeper with Convolutions", arXiv 1409.4842, section 6). Which part it is depends on (seed, epoch, image) alone.
`spec` is an `ImageSpec`.
"""

import math

import numpy as np
import torch
from PIL import Image

from hf_vit.data.sampling import EPOCH_STRIDE, uniform


MAX_TRIES = 10  # boxes that are tried until one fits into the photo
NUM_PARAMS = 2 * MAX_TRIES + 2
FIRST_STREAM = 32  # of `uniform`; the augmentation of batches uses lower ones
TORCH_MODES = {Image.Resampling.BILINEAR: "bilinear", Image.Resampling.BICUBIC: "bicubic"}


def crop_params(ids: torch.Tensor, spec, seed: int) -> list[list[float] | None]:
    """For each sample id (b,) the 22 random numbers of its `crop_box`; None if the spec has no random crop."""
    if spec.crop_scale is None:
        return [None] * len(ids)
    streams = torch.arange(FIRST_STREAM, FIRST_STREAM + NUM_PARAMS).view(-1, 1)
    return uniform(ids % EPOCH_STRIDE, seed, ids // EPOCH_STRIDE, streams).T.tolist()  # (b, 22)


def crop_box(width: int, height: int, params: list[float], scale: float) -> tuple[int, int, int, int]:
    """A random part of a photo in whole pixels: left, top, right, bottom.

    It is the first of ten boxes that fits, each with `scale` to 1 of the area and an aspect ratio of 3/4 to 4/3; if none does,
    the largest centred box with such a ratio.

    Args:
        params: (22,) in [0, 1): area and aspect ratio of each box, and the position.
    """
    *shapes, x, y = params
    low, high = math.log(3 / 4), math.log(4 / 3)
    for area, aspect in zip(shapes[::2], shapes[1::2], strict=True):
        area = width * height * (scale + (1 - scale) * area)
        aspect = math.exp(low + (high - low) * aspect)
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(x * (width - w + 1)), int(y * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def downscale_factor(box: tuple[int, int, int, int], height: int, width: int) -> int:
    """How many times smaller, 1, 2, 4 or 8, a JPEG file can be decoded while the box keeps height x width pixels.

    The eighths between are no choice: libjpeg-turbo has vector code for these four. For 500x375 pixels 7/8 take 1.9 times as
    long as all of them, and 4/8 0.8 times.
    """
    left, top, right, bottom = box
    ratio = min((right - left) / width, (bottom - top) / height)
    return max((factor for factor in (2, 4, 8) if factor <= ratio), default=1)


def to_array(image: Image.Image) -> np.ndarray:
    """uint8 (h, w, C), also of a grey image."""
    return np.array(image).reshape(image.height, image.width, -1)


def to_pillow(pixels: np.ndarray) -> Image.Image:
    """The inverse of `to_array`."""
    return Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)


def resize(pixels: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """uint8 (h, w, C) -> (height, width, C), antialiased.

    Bilinear and bicubic are done by torch: three times faster than Pillow, with a difference of 1 in a few hundred pixels.
    Other filters are left to Pillow, and so is RGBA, whose colours it weights by their transparency.
    """
    if resample not in TORCH_MODES or pixels.shape[2] == 4:
        return to_array(to_pillow(pixels).resize((width, height), resample))
    batch = torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)  # (1, C, h, w)
    batch = torch.nn.functional.interpolate(batch, size=(height, width), mode=TORCH_MODES[resample], antialias=True)
    return batch.squeeze(0).permute(1, 2, 0).numpy()  # (1, C, height, width) -> (height, width, C)


def resize_as_processor(image: Image.Image, spec) -> np.ndarray:
    """An image as image processors resize it, uint8 (H, W, C): stretched or, if the spec has a `resize`, resized to that, and
    its centre, black where the resized image is smaller."""
    size = spec.width, spec.height
    if isinstance(spec.resize, int):
        size = tuple(
            int(spec.resize * side / min(image.size)) for side in image.size
        )  # rounded down, as by processors
    elif spec.resize is not None:
        size = spec.resize[::-1]
    image = image.resize(size, spec.resample)
    left, top = (image.width - spec.width) // 2, (image.height - spec.height) // 2  # below 0, Pillow adds black
    return to_array(image.crop((left, top, left + spec.width, top + spec.height)))

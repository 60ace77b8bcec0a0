"""Crops and resizes single images: a random part of a photo to train on, its centre to evaluate.

A random resized crop is chosen in the photo's own pixels and cropped before resizing, as by torchvision's RandomResizedCrop
("Going Deeper with Convolutions", arXiv 1409.4842, section 6). Which part it is depends on (seed, epoch, image) alone.
"""

import math

import numpy as np
import torch
from PIL import Image

from hf_vit.data.augment import uniform
from hf_vit.data.image_spec import ImageSpec
from hf_vit.data.sampling import EPOCH_STRIDE
from hf_vit.system.errors import UserError


MAX_TRIES = 10  # boxes that are tried until one fits into the photo
NUM_PARAMS = 2 * MAX_TRIES + 2
FIRST_STREAM = 32  # of `uniform`; the augmentation of batches uses lower ones
MAX_PIXELS = 2**25  # that one image is resized to: 0.1 GB as bytes, 0.4 GB as float32
TORCH_MODES = {Image.Resampling.BILINEAR: "bilinear", Image.Resampling.BICUBIC: "bicubic"}


def crop_params(ids: torch.Tensor, spec: ImageSpec, seed: int) -> list[list[float] | None]:
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


def resize(pixels: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """uint8 (h, w, C) -> (height, width, C), antialiased.

    Bilinear and bicubic are done by torch: three times faster than Pillow, with a difference of 1 in a few hundred pixels.
    Other filters are left to Pillow, and so is RGBA, whose colours it weights by their transparency.
    """
    if resample not in TORCH_MODES or pixels.shape[2] == 4:
        image = Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)
        return np.array(image.resize((width, height), resample)).reshape(height, width, -1)
    batch = torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)  # (1, C, h, w)
    batch = torch.nn.functional.interpolate(batch, size=(height, width), mode=TORCH_MODES[resample], antialias=True)
    return batch.squeeze(0).permute(1, 2, 0).numpy()  # (1, C, height, width) -> (height, width, C)


def resize_center_crop(image: Image.Image, spec: ImageSpec) -> np.ndarray:
    """An image resized to `spec.resize`, and its centre: uint8 (H, W, C), black where the resized image is smaller.

    If an image is so long that it would be resized to more than `MAX_PIXELS`, it is cropped before it is resized. The result
    differs by rounding from an image processor's, which would fill the memory.
    """
    height, width = spec.height, spec.width
    if isinstance(spec.resize, int):  # the longer side is rounded down, as by image processors
        full_width, full_height = (int(spec.resize * side / min(image.size)) for side in image.size)
    else:
        full_height, full_width = spec.resize
    if full_width * full_height > MAX_PIXELS:
        kept_width, kept_height = min(width, full_width), min(height, full_height)
        scale_x, scale_y = image.width / full_width, image.height / full_height
        left, top = (full_width - kept_width) // 2 * scale_x, (full_height - kept_height) // 2 * scale_y
        box = (left, top, left + kept_width * scale_x, top + kept_height * scale_y)
        image = image.resize((kept_width, kept_height), spec.resample, box=box)
    elif image.size != (full_width, full_height):
        image = image.resize((full_width, full_height), spec.resample)
    pixels = np.array(image).reshape(*image.size[::-1], -1)  # (h, w, C)
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    if min(top, left) < 0:
        pixels = np.pad(pixels, [*((max(0, -side), max(0, -side) + 1) for side in (top, left)), (0, 0)])
        top, left = max(0, top), max(0, left)
    return pixels[top : top + height, left : left + width]


def check_resized_size(size: tuple[int, int], processor):
    """Raises ValueError if an image processor, which resizes the shorter side and only then crops, would make more than
    `MAX_PIXELS` of an image of this width and height."""
    settings = processor.to_dict()
    sides = settings.get("size") or {}
    if (shorter := sides.get("shortest_edge")) and not sides.get("longest_edge"):
        pixels = (shorter / (settings.get("crop_pct") or 1)) ** 2 * max(size) / min(size)
        if pixels > MAX_PIXELS:
            raise UserError(
                f"its {size[0]} x {size[1]} pixels would be resized to {pixels:,.0f}; at most {MAX_PIXELS:,} are: crop it"
            )

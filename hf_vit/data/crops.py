"""How photos are cut: a random part, resized, to train on; the centre to score.

A random resized crop is drawn in the photo's own pixels and cut before it is resized, as torchvision's RandomResizedCrop does
it ("Going Deeper with Convolutions", arXiv 1409.4842, section 6). Which part depends on (seed, epoch, image) alone.
"""

import math
import numbers as kinds

import numpy as np
import torch
from PIL import Image

from hf_vit.data.augment import uniform


TRIES = 10  # boxes that are drawn until one fits into the photo
STREAMS = torch.arange(32, 34 + 2 * TRIES)  # of `uniform`, which augmentation of batches leaves alone
LARGEST_SIDE = 2**12  # pixels that an image processor may ask for
MOST_PIXELS = 2**25  # that one image is resized to: 0.1 GB as bytes, 0.4 GB as float32
INTERPOLATE = {Image.Resampling.BILINEAR: "bilinear", Image.Resampling.BICUBIC: "bicubic"}  # what torch calls them


def crop_numbers(index: torch.Tensor, seed: int, epoch: int | torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1) for `crop_box`, (b, 22): those of each image of `index` (b,) in its epoch, one for all or (b,)."""
    return uniform(index, seed, epoch, STREAMS.view(-1, 1)).T


def crop_box(width: int, height: int, numbers: list[float], scale: float) -> tuple[int, int, int, int]:
    """A random part of a photo, in whole pixels: left, top, right, bottom.

    The first of ten boxes that fits, each of `scale` to 1 of the area and 3/4 to 4/3 as wide as high; else the largest centred
    part of such a shape.

    Args:
        numbers: (22,) in [0, 1): area and ratio of each box, and where it lies.
    """
    *shapes, x, y = numbers
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


def shrink_factor(box: tuple[int, int, int, int], height: int, width: int) -> int:
    """How many times smaller a JPEG file may be decoded, 1, 2, 4 or 8, so that the box keeps `height` x `width` pixels.

    The eighths between are no choice: libjpeg-turbo has vector code for these four. Of 500x375 pixels 7/8 take 1.9 times as
    long as all of them, and 4/8 0.8 times.
    """
    left, top, right, bottom = box
    room = min((right - left) / width, (bottom - top) / height)
    return max((factor for factor in (2, 4, 8) if factor <= room), default=1)


def resize(pixels: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """uint8 (h, w, C) -> (height, width, C), antialiased: bilinear and bicubic by torch, three times faster than Pillow, a pixel
    in a few hundred differs by 1; other resamplings by Pillow, and so RGBA, whose colours Pillow weighs by transparency."""
    if resample not in INTERPOLATE or pixels.shape[2] == 4:
        image = Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)
        return np.array(image.resize((width, height), resample)).reshape(height, width, -1)
    batch = torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)  # (1, C, h, w)
    batch = torch.nn.functional.interpolate(batch, size=(height, width), mode=INTERPOLATE[resample], antialias=True)
    return batch.squeeze(0).permute(1, 2, 0).numpy()  # (1, C, height, width) -> (height, width, C)


def resize_center(
    image: Image.Image, resize: int | tuple[int, int], height: int, width: int, resample: int
) -> np.ndarray:
    """An image resized, and its centre cut out: uint8 (height, width, C), black where the resized image is smaller.

    An image so long that more than `MOST_PIXELS` would come of it is cut before it is resized: that differs from what an image
    processor makes by rounding, and so is left to images that a processor would fill the memory with.

    Args:
        resize: the shorter side that the whole image is resized to, or its height and width.
    """
    if isinstance(resize, int):  # the longer side is rounded down, as image processors do
        whole_width, whole_height = (int(resize * side / min(image.size)) for side in image.size)
    else:
        whole_height, whole_width = resize
    if whole_width * whole_height > MOST_PIXELS:
        kept_width, kept_height = min(width, whole_width), min(height, whole_height)
        across, down = image.width / whole_width, image.height / whole_height
        left, top = (whole_width - kept_width) // 2 * across, (whole_height - kept_height) // 2 * down
        box = (left, top, left + kept_width * across, top + kept_height * down)
        image = image.resize((kept_width, kept_height), resample, box=box)
    elif image.size != (whole_width, whole_height):
        image = image.resize((whole_width, whole_height), resample)
    pixels = np.array(image).reshape(*image.size[::-1], -1)
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    if min(top, left) < 0:
        pixels = np.pad(pixels, [*((max(0, -side), max(0, -side) + 1) for side in (top, left)), (0, 0)])
        top, left = max(0, top), max(0, left)
    return pixels[top : top + height, left : left + width]


def check_processor(asked: dict):
    """Raise ValueError where an image processor asks for a size or a number that no model has.

    Args:
        asked: what its `to_dict` gives.
    """

    def check(name, value, is_good, wanted):
        if value is not None and not is_good(value):
            raise ValueError(
                f"the image processor's {name} is {value!r}; wanted {wanted}: is its preprocessor_config.json whole, and to be "
                "trusted?"
            )

    is_side = lambda side: isinstance(side, int) and 0 < side <= LARGEST_SIDE
    is_number = lambda number: isinstance(number, kinds.Real) and math.isfinite(number)
    for name in ("size", "crop_size", "pad_size"):
        sides = asked.get(name) or {}
        check(name, sides, lambda sides: isinstance(sides, dict), "sides by their names")
        for side in sides.values():
            check(name, side, is_side, f"sides of 1 to {LARGEST_SIDE:,} pixels")
    for name, least in (("image_mean", -math.inf), ("image_std", 0)):
        are_numbers = lambda them, least=least: (
            isinstance(them, (list, tuple)) and them and all(is_number(one) and one > least for one in them)
        )
        check(name, asked.get(name), are_numbers, "a number a channel" + (", above 0" if least == 0 else ""))
    check("crop_pct", asked.get("crop_pct"), lambda part: is_number(part) and 0.1 <= part <= 1, "0.1 to 1")
    check("rescale_factor", asked.get("rescale_factor"), is_number, "a number")
    check("resample", asked.get("resample"), lambda kind: kind in list(Image.Resampling), "0 to 5")


def check_shape(size: tuple[int, int], processor):
    """Raise ValueError where an image processor, which crops after it has resized, would make more than `MOST_PIXELS` of an
    image of this width and height: its shorter side alone says how large it becomes."""
    asked = processor.to_dict()
    sides = asked.get("size") or {}
    if (shorter := sides.get("shortest_edge")) and not sides.get("longest_edge"):
        pixels = (shorter / (asked.get("crop_pct") or 1)) ** 2 * max(size) / min(size)
        if pixels > MOST_PIXELS:
            raise ValueError(
                f"its {size[0]} x {size[1]} pixels would be resized to {pixels:,.0f}; at most {MOST_PIXELS:,} are: crop it"
            )


def eval_resize(form, height: int, width: int, eval_crop: float | None) -> int | tuple[int, int] | None:
    """What an image is resized to before its centre of `height` x `width` pixels is cut out: its shorter side, or both
    sides; None where it is stretched to this size at once.

    Args:
        form: the `data.ImageForm` of the checkpoint's own image processor. What it does is done in this size too.
        eval_crop: the part of the shorter side that is kept, timm's `crop_pct`: 0.875 resizes to 256 for 224. None leaves it
            to `form`. Of a model that is not square the longer side counts, so that the crop is always full.

    Raises:
        ValueError: if the image processor cuts out another part.
    """
    own = form.resize
    if eval_crop is not None:
        side, resized = max(form.height, form.width), own if isinstance(own, int) else max(own or (0,))
        if own is not None and int(side / eval_crop) != resized:
            raise ValueError(
                f"--eval_crop {eval_crop} contradicts the checkpoint's image processor, which keeps {side} of {resized} pixels "
                f"({side / resized:.4g}): leave it out to score as that does"
            )
        return int(max(height, width) / eval_crop)
    if isinstance(own, int):
        return int(own * max(height, width) / max(form.height, form.width))
    return own and (int(own[0] * height / form.height), int(own[1] * width / form.width))

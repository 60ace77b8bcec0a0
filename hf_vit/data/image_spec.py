"""What images a model wants: size, channels, resizing and normalisation, read off its image processor."""

import contextlib
import numbers
from dataclasses import dataclass, replace
from typing import Any

import torch
from datasets import Dataset
from PIL import Image

from hf_vit.data.image_files import allowed_files, open_pillow, read_image_bytes
from hf_vit.data.normalization import normalize
from hf_vit.system.errors import UserError


MAX_SIDE = 2**12  # pixels that an image processor may ask for


@dataclass(frozen=True)
class ImageSpec:
    """Size in pixels, channels, PIL resampling filter, and mean and std of the normalisation.

    `resize` is None if images are stretched to height x width. Otherwise it is the length of the shorter side, or the height
    and width, to which an image is resized before its centre is cropped. `processor` is an image processor that these numbers
    cannot describe; it then makes the normalised pixels itself, and only `channels` is used besides.

    Two fields are for training only. `fast_resize` resizes with torch: faster, but not to the pixel what the image processor
    gives. `crop_scale` crops a random part with at least this share of the photo's area, before it is resized.
    """

    height: int
    width: int
    channels: int
    resample: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: int | tuple[int, int] | None = None
    fast_resize: bool = False
    crop_scale: float | None = None
    processor: Any = None

    def normalize(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 (B, C, H, W) -> float32, see `normalization.normalize`."""
        return normalize(images, self)


def image_spec_of(processor, config) -> ImageSpec:
    """The spec of a model's images, from its image processor and its config.

    A processor that does anything but resize (and crop the centre), divide by 255 and normalise is kept in the spec and called
    on each image.

    Raises:
        ValueError: if the processor asks for sizes or numbers that no model has.
    """
    settings = processor.to_dict()
    check_processor(settings)
    size = settings.get("size") or {}
    final_size, resize = size, None
    if settings.get("do_center_crop"):
        final_size = settings.get("crop_size") or {}
        resize = size.get("shortest_edge") or (size.get("height"), size.get("width"))
    channels = getattr(config, "num_channels", 3)
    is_plain = (
        all(settings.get(name) in (True, None) for name in ("do_resize", "do_rescale", "do_normalize"))
        and abs((settings.get("rescale_factor") or 1 / 255) - 1 / 255) < 1e-9
        and all(settings.get(name) is not None for name in ("image_mean", "image_std", "resample"))
        and not any(settings.get(name) for name in ("do_flip_channel_order", "crop_pct", "include_top", "do_pad"))
        and {"height", "width"} <= set(final_size)
        and resize != (None, None)
    )
    if not is_plain:
        return ImageSpec(0, 0, channels, 0, (), (), processor=processor)
    mean, std = tuple(settings["image_mean"]), tuple(settings["image_std"])
    return ImageSpec(final_size["height"], final_size["width"], channels, int(settings["resample"]), mean, std, resize)


def training_image_spec(spec: ImageSpec, images: Dataset | None, crop: str, crop_scale: float = 0.35) -> ImageSpec:
    """How training images are decoded: as the model wants them or, with `crop` "resized", as random crops of the photos.

    If most of 32 images are no larger than the model's and have its aspect ratio, images are decoded whole instead (once, if
    memory allows), and `augment` crops each batch. A stream, `images` None, is assumed to hold photos.
    """
    if crop != "resized":
        return spec
    is_small = []
    for item in [] if images is None else images[:: max(1, len(images) // 32)]["image"]:
        with contextlib.suppress(Exception):  # unreadable images are reported when they are decoded
            with open_pillow(read_image_bytes(item, allowed_files(images))) as image:
                width, height = image.size
            same_ratio = width * spec.height == height * spec.width
            is_small.append(width <= spec.width and height <= spec.height and same_ratio)
    if 2 * sum(is_small) > len(is_small):
        return replace(spec, resize=None, fast_resize=True)
    return replace(spec, resize=None, crop_scale=crop_scale)


def eval_resize(spec: ImageSpec, height: int, width: int, eval_crop: float | None) -> int | tuple[int, int] | None:
    """The `resize` of a spec with another height and width: images are resized to it, and height x width pixels cropped.

    Args:
        spec: of the checkpoint's own image processor. What it does is done in the new size, too.
        eval_crop: the share of the shorter side that is kept, timm's `crop_pct`: 0.875 resizes to 256 for 224. None follows
            `spec`. For a model that is not square the longer side counts, so that the crop never leaves the image.

    Raises:
        ValueError: if the image processor keeps another share.
    """
    own = spec.resize
    if eval_crop is not None:
        side, resized = max(spec.height, spec.width), own if isinstance(own, int) else max(own or (0,))
        if own is not None and int(side / eval_crop) != resized:
            raise UserError(
                f"--eval_crop {eval_crop} contradicts the checkpoint's image processor, which keeps {side} of {resized} pixels "
                f"({side / resized:.4g}): leave it out to score as that does"
            )
        return int(max(height, width) / eval_crop)
    if isinstance(own, int):
        return int(own * max(height, width) / max(spec.height, spec.width))
    return own and (int(own[0] * height / spec.height), int(own[1] * width / spec.width))


def check_processor(settings: dict):
    """Raises ValueError if an image processor's settings, its `to_dict()`, hold a size or a number that no model has."""

    def check(name, value, is_valid, wanted):
        if value is not None and not is_valid:
            raise UserError(
                f"the image processor's {name} is {value!r}; wanted {wanted}: is its preprocessor_config.json whole, and to be "
                "trusted?"
            )

    def is_finite(value):
        return isinstance(value, numbers.Real) and abs(value) <= torch.finfo().max

    for name in ("size", "crop_size", "pad_size"):
        sides = settings.get(name) or {}
        check(name, sides, isinstance(sides, dict), "sides by their names")
        for side in sides.values():
            is_side = isinstance(side, int) and 0 < side <= MAX_SIDE
            check(name, side, is_side, f"sides of 1 to {MAX_SIDE:,} pixels")
    for name in ("image_mean", "image_std"):
        values = settings.get(name)
        are_finite = isinstance(values, (list, tuple)) and len(values) > 0 and all(map(is_finite, values))
        check(name, values, are_finite, "a number a channel")
    std = settings.get("image_std")
    check("image_std", std, std and min(std) > 0, "a number a channel, above 0")
    part, factor, resample = (settings.get(name) for name in ("crop_pct", "rescale_factor", "resample"))
    check("crop_pct", part, is_finite(part) and 0.1 <= part <= 1, "0.1 to 1")
    check("rescale_factor", factor, is_finite(factor), "a number")
    check("resample", resample, resample in list(Image.Resampling), "0 to 5")

"""What images a model wants: size, channels, resizing and normalisation, read off its image processor."""

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from PIL import Image

from hf_vit.data.crops import resize_as_processor, to_pillow
from hf_vit.data.image_files import allowed_files, open_pillow, read_image_bytes
from hf_vit.data.normalization import normalize
from hf_vit.system.errors import UserError


MAX_SIDE = 2**12  # pixels that an image processor may ask for
MAX_LEVELS = (
    5  # of 255: torchvision's resizing differs from Pillow's by at most 2, another filter or crop by 16 or more
)


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

    The processor is shown two made images. If it makes the pixels that its settings describe, our faster decoding stands in for
    it; otherwise it is kept in the spec and called on each image.

    Raises:
        UserError: if it asks for sizes or numbers that no model has, or does not make one image of a fixed size.
    """
    channels, made = getattr(config, "num_channels", 3), []
    try:
        spec = read_settings(processor, channels)
        images = made_images(spec.height or 224, spec.width or 224, channels)
        made = [np.asarray(processor(image, return_tensors="np")["pixel_values"]) for image in images]
        shapes = sorted({pixels.shape for pixels in made})
    except UserError:
        raise
    except Exception as error:  # processors of pairs, of boxes, of text, of other channels, or with wrong numbers
        shapes = [f"an error ({error})"]
    is_finite = all(np.isfinite(pixels).all() for pixels in made)
    if len(shapes) > 1 or len(shapes[0]) != 4 or shapes[0][:2] != (1, channels) or not is_finite:
        raise UserError(
            f"{type(processor).__name__} does not fit the model: it made {' and '.join(map(str, shapes))} of an image; wanted finite "
            f"numbers (1, {channels}, height, width), the same for every image: use the image processor of the checkpoint"
        )
    if pixels_agree(made, images, spec):
        return spec
    return ImageSpec(0, 0, channels, 0, (), (), processor=processor)


def read_settings(processor, channels: int) -> ImageSpec:
    """The spec that the settings of an image processor describe, whether or not it obeys them; of height and width 0 if they
    name no fixed size. What is not obeyed shows in the pixels."""
    settings = processor.to_dict()
    sizes = [settings.get(name) or {} for name in ("size", "crop_size", "pad_size")]
    sides = [side for size in sizes for side in size.values() if side]
    crop_pct = settings.get("crop_pct") or 1
    if any(not 0 < side <= MAX_SIDE for side in sides) or not 0.1 <= crop_pct <= 1:  # or memory fills up
        raise UserError(
            f"the image processor's sizes are {sides} and its crop_pct {crop_pct}; wanted 1 to {MAX_SIDE} and 0.1 to 1: is it to be "
            "trusted?"
        )
    final, resize = settings.get("size") or {}, None
    if settings.get("do_center_crop"):
        resize = final.get("shortest_edge") or (final.get("height"), final.get("width"))
        final = settings.get("crop_size") or {}
    if not {"height", "width"} <= set(final) or resize == (None, None):
        final, resize = {"height": 0, "width": 0}, None
    factor = 255 * settings.get("rescale_factor", 1)  # 1.0 exactly where it divides by 255
    values = (np.array(settings.get(name), float, ndmin=1) / factor for name in ("image_mean", "image_std"))
    mean, std = (tuple(each.tolist()) for each in values)  # of NaN if there are none
    resample = int(settings.get("resample") or 0)
    return ImageSpec(final["height"], final["width"], channels, resample, mean, std, resize)


def made_images(height: int, width: int, channels: int) -> list[Image.Image]:
    """Two images of noise around a size: any other crop, filter or order of channels shows. Of a large size they are smaller, or it
    would take a second."""
    height, width, rng = min(height, 1024), min(width, 1024), np.random.default_rng(0)
    sizes = (height * 7 // 4, width * 5 // 4 + 1), (height * 3 // 4 + 1, width + 3)
    return [to_pillow(rng.integers(0, 256, (*size, channels), dtype=np.uint8)) for size in sizes]


def pixels_agree(made: list[np.ndarray], images: list[Image.Image], spec: ImageSpec) -> bool:
    """Whether an image processor made of these images, (1, C, H, W) each, the pixels that the spec describes."""
    if made[0].shape[2:] != (spec.height, spec.width):
        return False
    ours = torch.stack([torch.from_numpy(resize_as_processor(image, spec)).permute(2, 0, 1) for image in images])
    difference = np.abs(np.concatenate(made) - normalize(ours, spec).numpy()).max(axis=(0, 2, 3))  # (C,)
    return (difference * spec.std * 255).max() <= MAX_LEVELS


def training_image_spec(spec: ImageSpec, images: Dataset | None, crop: str, crop_scale: float = 0.35) -> ImageSpec:
    """How training images are decoded: as the model wants them or, with `crop` "resized", as random crops of the photos.

    If the first image is no larger than the model's and has its aspect ratio, images are decoded whole instead (once, if memory
    allows), and `augment` crops each batch. A stream, `images` None, is assumed to hold photos.
    """
    if crop != "resized":
        return spec
    if images is not None:
        with contextlib.suppress(Exception):  # unreadable images are reported when they are decoded
            with open_pillow(read_image_bytes(images[0]["image"], allowed_files(images))) as image:
                width, height = image.size
            if width <= spec.width and width * spec.height == height * spec.width:
                return replace(spec, resize=None, fast_resize=True)
    return replace(spec, resize=None, crop_scale=crop_scale)


def eval_resize(spec: ImageSpec, height: int, width: int, eval_crop: float | None) -> int | tuple[int, int] | None:
    """The `resize` of a spec with another height and width: images are resized to it, and height x width pixels cropped.

    Args:
        spec: of the checkpoint's own image processor. What it does is done in the new size, too.
        eval_crop: the share of the shorter side that is kept, timm's `crop_pct`: 0.875 resizes to 256 for 224. None follows
            `spec`. For a model that is not square the longer side counts, so that the crop never leaves the image.
    """
    own = spec.resize
    if eval_crop is not None:
        return int(max(height, width) / eval_crop)
    if isinstance(own, int):
        return int(own * max(height, width) / max(spec.height, spec.width))
    return own and (int(own[0] * height / spec.height), int(own[1] * width / spec.width))

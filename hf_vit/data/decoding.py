"""Decodes image files to the uint8 pixels that an `ImageSpec` describes."""

import contextlib

import numpy as np
import simplejpeg
import torch
from PIL import ExifTags, Image, ImageOps

from hf_vit.data.crops import (
    crop_box,
    downscale_factor,
    resize,
    resize_as_processor,
    to_array,
    to_pillow,
)
from hf_vit.data.image_files import NO_FILES, AllowedFiles, open_pillow, read_image_bytes
from hf_vit.data.image_spec import ImageSpec
from hf_vit.system.errors import UserError
from hf_vit.system.text import counted


MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's, by the number of channels
JPEG = ("JPEG", "MPO")  # Pillow's formats that JPEG decoders read
MAX_RATIO = 100  # of the sides: resized by the shorter one, a file of 200 bytes could fill the memory
SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap width and height


def open_image(item: dict, channels: int) -> Image.Image:
    """Decodes an image, `{"bytes": ..., "path": ...}`, upright and with 8 bits a channel. Its content says what it is, not its
    name.

    Args:
        item: with its bytes; a path alone is refused.
        channels: 1 (grey), 3 or 4.

    Raises:
        Exception: of any kind, if it cannot be read as an image with 8 or 16 bits a channel.
    """
    content = read_image_bytes(item)
    with open_pillow(content) as image:
        return _decode_upright(content, image, channels)


def decode_image(item: dict, spec: ImageSpec, crop_params: list[float] | None = None) -> np.ndarray:
    """Decodes an image, as `open_image` does -> uint8 (H, W, C), resized as by the model's image processor; or normalised
    float (H, W, C), made by `spec.processor`.

    Args:
        crop_params: (22,), from `crops.crop_params`; needed if the spec has a `crop_scale`.

    Raises:
        Exception: as `open_image`.
    """
    if spec.crop_scale is not None:
        return _decode_random_crop(item, spec, crop_params)
    image = open_image(item, spec.channels)
    width, height = image.size
    if max(width, height) > MAX_RATIO * min(width, height):
        raise UserError(f"its {width} x {height} pixels are longer than {MAX_RATIO} times their width: crop it")
    if spec.processor is not None:
        return spec.processor(image, return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)  # (H, W, C)
    if spec.fast_resize:
        return resize(to_array(image), spec.height, spec.width, spec.resample)
    return resize_as_processor(image, spec)


def decode_rows(
    rows: list[dict],
    spec: ImageSpec,
    crop_params: list[list[float] | None] | None = None,
    files: AllowedFiles = NO_FILES,
) -> tuple[list[np.ndarray | None], list[str]]:
    """Decodes rows with `image`, `row` and maybe `split`: the images, None where one cannot be read, and an error message for each of those.

    Args:
        crop_params: as `decode_image` takes them, of each row.
        files: those that the rows may name.
    """
    images, errors = [], []
    for row, params in zip(rows, crop_params or [None] * len(rows), strict=True):
        try:
            content = read_image_bytes(row["image"], files)
            images.append(decode_image({"bytes": content, "path": None}, spec, params))
        except Exception as error:  # file systems, Pillow's plugins and image processors raise anything
            images.append(None)
            split = f"{row['split']}: " if "split" in row else ""
            path = f" ({row['image']['path']})" if row["image"] and row["image"]["path"] else ""
            errors.append(f"{split}row {row['row']}{path} cannot be read as an image: {error}")
    return images, errors


def stack_images(images: list[np.ndarray]) -> torch.Tensor:
    """Images (H, W, C) -> a contiguous batch (b, C, H, W)."""
    return torch.stack([torch.from_numpy(image).permute(2, 0, 1) for image in images]).contiguous()


def record_unreadable(errors: list[str], skipped: dict[str, None], on_bad_image: str):
    """Stops at images that cannot be read, or, if they are to be skipped, adds their error messages to `skipped`."""
    if errors and on_bad_image == "stop":
        raise UserError(
            f"{'; '.join(errors[:10])}; fix or remove {counted(len(errors), 'image')}, or pass --on_bad_image skip"
        )
    skipped.update(dict.fromkeys(errors))


def replacement_places(readable: list[int], count: int) -> list[int]:
    """For each of the `count` places of a batch: itself if it is `readable`, else the next one that is, cyclically."""
    return [min(readable, key=lambda place: (place - wanted) % count) for wanted in range(count)]


def _decode_random_crop(item: dict, spec: ImageSpec, params: list[float]) -> np.ndarray:
    """A random part of a photo, resized to uint8 (H, W, C); a JPEG file is decoded as small as that allows."""
    content = read_image_bytes(item)
    with open_pillow(content) as image:
        box, factor, orientation = None, 1, image.getexif().get(ExifTags.Base.Orientation, 1)
        if image.format in JPEG:  # Pillow gives the size of a TIFF file as it is turned
            width, height = reversed(image.size) if orientation in SIDEWAYS else image.size
            box = crop_box(width, height, params, spec.crop_scale)
            factor = downscale_factor(box, spec.height, spec.width)
        is_ready = orientation == 1 and image.mode == MODES[spec.channels]  # saves two copies by Pillow
        pixels = _decode_jpeg(content, image, factor) if is_ready else None
        if pixels is None:
            pixels = to_array(_decode_upright(content, image, spec.channels, factor))
        box = box or crop_box(pixels.shape[1], pixels.shape[0], params, spec.crop_scale)
    left, top, right, bottom = (side // factor for side in box)  # whole pixels of the smaller photo
    return resize(pixels[top:bottom, left:right], spec.height, spec.width, spec.resample)


def _decode_upright(content: bytes, image: Image.Image, channels: int, factor: int = 1) -> Image.Image:
    """Decodes a file that Pillow has opened: upright, with 8 bits a channel; a JPEG file `factor` times smaller."""
    pixels = _decode_jpeg(content, image, factor)
    if pixels is not None:
        decoded = to_pillow(pixels)
        decoded.info, image = image.info, decoded  # with the EXIF data
    elif factor > 1:
        image.draft(None, tuple(side // factor for side in image.size))
    ImageOps.exif_transpose(image, in_place=True)  # otherwise every photo is copied
    if image.mode.startswith("I"):  # Pillow would clip 16 bits at 255; mode "I" may hold 8 or 16 bits
        values = np.asarray(image)
        sixteen_bits = image.mode != "I" or values.max() > 255
        image = Image.fromarray((values // 257 if sixteen_bits else values).clip(0, 255).astype(np.uint8))
    elif image.mode == "F":
        raise UserError("its pixels are floating-point numbers of no stated range; save it with 8 or 16 bits")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    image.load()
    return image if image.mode == MODES[channels] else image.convert(MODES[channels])


def _decode_jpeg(content: bytes, image: Image.Image, factor: int) -> np.ndarray | None:
    """Decodes a JPEG file that Pillow has opened, to Pillow's pixels in half the time, or `factor` times smaller: (h, w, C).
    None for other files, and for those only Pillow can read: four inks, or damage."""
    colours = {"RGB": "RGB", "L": "GRAY"}.get(image.mode)
    if image.format not in JPEG or colours is None:
        return None
    width, height = (-(-side // factor) for side in image.size)
    with contextlib.suppress(ValueError):  # Pillow reads what it can of a damaged file, or says what is wrong
        return simplejpeg.decode_jpeg(content, colours, min_height=height, min_width=width, min_factor=1)
    return None

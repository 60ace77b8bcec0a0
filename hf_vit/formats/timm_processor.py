"""What `pretrained_cfg` in the config.json of a timm repo says of images: their size, and what timm does to them before it evaluates."""

import math

from PIL import Image
from transformers import ViTImageProcessorPil
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD


def timm_input_size(cfg: dict):
    """The (C, H, W) that `pretrained_cfg` states for images, or None; ValueError if it is no size."""
    size = cfg.get("input_size")
    if size is not None and not (
        isinstance(size, list) and len(size) == 3 and all(side in range(1, 2**16) for side in size)
    ):
        raise ValueError(
            f"input_size in config.json is {size!r}; it must be [channels, height, width], each below 65,536"
        )
    return size


def timm_processor(cfg: dict, source: str) -> ViTImageProcessorPil:
    """The image processor that `pretrained_cfg` describes.

    Defaults and rules are those of timm 1.0 (`data/config.py`, `transforms_imagenet_eval` in `data/transforms_factory.py`).
    crop_mode "center" resizes the shorter side to floor(size / crop_pct), "squash" both sides; then the middle is cut out.
    timm always writes a crop_pct; without one the whole image is stretched. When it centres the crop, timm rounds half a
    pixel to even, image processors round it down: the crop of timm may lie one pixel further.

    Raises:
        ValueError: for values that timm does not have, "border", which pads, and "center" for a model that is not square.
    """
    _, height, width = timm_input_size(cfg) or (3, 224, 224)
    part, mode = cfg.get("crop_pct"), cfg.get("crop_mode") or "center"
    if part is None:
        part, mode = 1, "squash"
    resample = str(cfg.get("interpolation") or "bicubic").upper()
    for name, value, holds in (
        ("crop_pct", part, isinstance(part, (int, float)) and 0 < part <= 1),
        ("crop_mode", mode, mode == "squash" or (mode == "center" and height == width)),
        ("interpolation", cfg.get("interpolation"), resample in Image.Resampling.__members__),
    ):
        if not holds:
            raise ValueError(
                f"pretrained_cfg of {source} asks for {name} {value!r} at {height}x{width} pixels, which no image processor of "
                "transformers follows as timm does: change it in the config.json of a copy of the repo; crop_mode squash with "
                "crop_pct 1 stretches the whole image"
            )
    size, center = {"height": height, "width": width}, {}
    if (mode, part) != ("squash", 1):
        center = {"do_center_crop": True, "crop_size": size}
        size = {side: math.floor(length / part) for side, length in size.items()}
    return ViTImageProcessorPil(
        size={"shortest_edge": size["height"]} if mode == "center" else size,
        **center,
        resample=Image.Resampling[resample],
        image_mean=list(cfg.get("mean") or IMAGENET_DEFAULT_MEAN),
        image_std=list(cfg.get("std") or IMAGENET_DEFAULT_STD),
    )

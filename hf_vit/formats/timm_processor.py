"""What `pretrained_cfg` in the config.json of a timm repo says of images: their size, and what timm does to them before it evaluates."""

import math

from PIL import Image
from transformers import ViTImageProcessorPil
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD


def timm_input_size(repo_config: dict) -> list[int] | None:
    """The (C, H, W) that the config.json of a timm repo states for its images, or None; ValueError if it is no size."""
    size = (repo_config.get("pretrained_cfg") or {}).get("input_size")
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
    _, height, width = timm_input_size({"pretrained_cfg": cfg}) or (3, 224, 224)
    crop_pct, mode = cfg.get("crop_pct"), cfg.get("crop_mode") or "center"
    resample = str(cfg.get("interpolation") or "bicubic").upper()
    wrong = None
    if crop_pct is not None and not (isinstance(crop_pct, (int, float)) and 0 < crop_pct <= 1):
        wrong = f"crop_pct {crop_pct!r}, which must be above 0 and at most 1"
    elif mode not in ("center", "squash") or (crop_pct is not None and mode == "center" and height != width):
        wrong = f"crop_mode {mode!r} for {height}x{width} pixels, which no image processor of transformers cuts as timm does"
    elif resample not in Image.Resampling.__members__:
        wrong = (
            f"interpolation {cfg['interpolation']!r}, which must be one of {', '.join(Image.Resampling.__members__)}"
        )
    if wrong:
        raise ValueError(
            f"pretrained_cfg of {source} asks for {wrong}: change it in the config.json of a copy of the repo; crop_mode squash "
            "with crop_pct 1 stretches the whole image"
        )
    size, center = {"height": height, "width": width}, {}
    if crop_pct is not None and (mode, crop_pct) != ("squash", 1):
        center = {"do_center_crop": True, "crop_size": size}
        resized = math.floor(height / crop_pct), math.floor(width / crop_pct)
        size = {"shortest_edge": resized[0]} if mode == "center" else dict(zip(size, resized, strict=True))
    return ViTImageProcessorPil(
        size=size,
        **center,
        resample=Image.Resampling[resample],
        image_mean=list(cfg.get("mean") or IMAGENET_DEFAULT_MEAN),
        image_std=list(cfg.get("std") or IMAGENET_DEFAULT_STD),
    )

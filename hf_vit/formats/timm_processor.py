"""The image processor that timm's `pretrained_cfg` describes: what timm does to an image before it scores it."""

import math

from PIL import Image
from transformers import ViTImageProcessorPil
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD


def timm_processor(cfg: dict, source: str) -> ViTImageProcessorPil:
    """`pretrained_cfg` of a timm repo's config.json -> image processor; defaults and rules are those of timm 1.0
    (`data/config.py`, `transforms_imagenet_eval` in `data/transforms_factory.py`).

    crop_mode "center" resizes the shorter side to floor(size / crop_pct), "squash" both sides, and cuts out the middle. timm
    always writes a crop_pct; a config without one says nothing of crops, and its images are stretched as a whole. timm rounds
    half a pixel to even where the middle is cut out, image processors down: its part may lie one pixel further.

    Raises:
        ValueError: for values that timm does not have, "border", which pads, and "center" for a model that is not square.
    """
    sizes = cfg.get("input_size") or (3, 224, 224)
    height, width = sizes[-2:] if isinstance(sizes, (list, tuple)) else (sizes, sizes)
    part, mode = cfg.get("crop_pct"), cfg.get("crop_mode") or "center"
    wrong = None
    if not (isinstance(height, int) and isinstance(width, int) and min(height, width) > 0):
        wrong = f"input_size {sizes!r}; channels, height and width were wanted"
    elif part is not None and not (isinstance(part, (int, float)) and 0 < part <= 1):
        wrong = f"crop_pct {part!r}; a number above 0 and at most 1 was wanted"
    elif mode not in ("center", "squash"):
        wrong = f"crop_mode {mode!r}; center and squash are known here"
    elif part is not None and mode == "center" and height != width:
        wrong = (
            f"crop_mode center for {height}x{width} pixels, which no image processor of transformers cuts as timm does"
        )
    resample = str(cfg.get("interpolation") or "bicubic").upper()
    if resample not in Image.Resampling.__members__:
        wrong = f"interpolation {cfg['interpolation']!r}; {', '.join(Image.Resampling.__members__).lower()} are known"
    if wrong:
        raise ValueError(
            f"pretrained_cfg of {source} asks for {wrong}: change it in the config.json of a copy of the repo; crop_mode squash "
            "with crop_pct 1 stretches the whole image"
        )
    size, center = {"height": height, "width": width}, {}
    if part is not None and (mode, part) != ("squash", 1):
        center = {"do_center_crop": True, "crop_size": size}
        resized = math.floor(height / part), math.floor(width / part)
        size = {"shortest_edge": resized[0]} if mode == "center" else dict(zip(size, resized, strict=True))
    return ViTImageProcessorPil(
        size=size,
        **center,
        resample=Image.Resampling[resample],
        image_mean=list(cfg.get("mean") or IMAGENET_DEFAULT_MEAN),
        image_std=list(cfg.get("std") or IMAGENET_DEFAULT_STD),
    )

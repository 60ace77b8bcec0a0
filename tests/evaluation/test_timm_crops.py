"""Images of timm's repositories are evaluated as timm shows them."""

import json
import math

import numpy as np
import pytest
from image_data import item_of, picture
from PIL import Image

from hf_vit import HFViTConfig
from hf_vit.data.decoding import decode_image
from hf_vit.data.image_spec import image_spec_of
from hf_vit.evaluation.classifiers import load_processor
from hf_vit.formats.timm_processor import timm_processor


def scored_by_timm(image, side, part, mode, resample):
    """What `transforms_imagenet_eval` of timm 1.0.31 (data/transforms_factory.py) makes of an image, by Pillow: torchvision's
    `Resize` on an int gives the longer side as int(size * long / short), its `CenterCrop` starts at round((rest) / 2)."""
    resized = math.floor(side / part)
    width, height = image.size
    if mode == "squash":
        image = image.resize((resized, resized), resample)
    else:
        short = min(width, height)
        image = image.resize((int(resized * width / short), int(resized * height / short)), resample)
    left, top = (round((rest - side) / 2) for rest in image.size)
    return np.asarray(image.crop((left, top, left + side, top + side)))


CASES = [
    (224, 0.875, "center", "bicubic"),
    (224, 1.0, "center", "bilinear"),
    (384, 1.0, "squash", "bicubic"),
    (224, 0.9, "squash", "bicubic"),
]
SIZES = [
    (375, 500),
    (300, 300),
    (120, 90),
]  # torchvision rounds half a pixel to even, image processors down: none here


@pytest.mark.parametrize(("side", "part", "mode", "interpolation"), CASES)
@pytest.mark.parametrize("size", SIZES)
def test_a_timm_repo_is_scored_on_what_timm_shows_it(side, part, mode, interpolation, size, tmp_path):
    cfg = {"input_size": [3, side, side], "crop_pct": part, "crop_mode": mode, "interpolation": interpolation}
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224", "pretrained_cfg": cfg}))
    form = image_spec_of(load_processor(str(tmp_path)), HFViTConfig())
    assert form.processor is None
    image = picture(size=size)
    wanted = scored_by_timm(image, side, part, mode, Image.Resampling[interpolation.upper()])
    np.testing.assert_array_equal(decode_image(item_of(image), form), wanted)


def test_what_a_timm_repo_leaves_out_is_timms_own_default():
    processor = timm_processor({"crop_pct": 0.875}, "repo")
    assert (dict(processor.size), dict(processor.crop_size)) == ({"shortest_edge": 256}, {"height": 224, "width": 224})
    assert list(processor.image_mean) == [0.485, 0.456, 0.406]
    assert int(processor.resample) == Image.Resampling.BICUBIC


@pytest.mark.parametrize(
    ("cfg", "named"),
    [
        ({"crop_mode": "border", "crop_pct": 1.0}, "crop_mode 'border'"),
        ({"crop_mode": "center", "crop_pct": 0.9, "input_size": [3, 32, 48]}, "crop_mode 'center'"),
        ({"crop_pct": 0}, "crop_pct 0"),
        ({"interpolation": "random"}, "interpolation 'random'"),
    ],
)
def test_a_timm_repo_that_cannot_be_followed_is_refused(cfg, named):
    with pytest.raises(ValueError, match=named):
        timm_processor(cfg, "timm/some_model")

"""Claims about crops: random parts to train on, the centre to score, beside Pillow on one image at a time.

Stated tolerance: where a file is decoded whole, each value is within 2 of Pillow's; where the JPEG decoder shrinks it on the way,
values are within 2 of Pillow's in the mean.
"""

import numpy as np
import pytest
import torch
from image_data import grainy, item_of, smooth, undecoded
from PIL import Image as PILImage
from test_decoding import MODES, by_pillow, turned
from transformers import (
    AutoImageProcessor,
    BitImageProcessorPil,
    DeiTImageProcessorPil,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from hf_vit import HFViTConfig
from hf_vit.data.crops import MAX_TRIES, crop_box, crop_params
from hf_vit.data.decoding import decode_image
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_spec import ImageSpec, eval_resize, image_spec_of
from hf_vit.data.normalization import normalize
from hf_vit.data.sampling import EPOCH_STRIDE
from hf_vit.training.model import build_model


HEIGHT, WIDTH = 32, 48


def spec_of(channels=3, resample=PILImage.Resampling.BILINEAR, scale=0.08, **how):
    mean = (0.5,) * channels
    return ImageSpec(HEIGHT, WIDTH, channels, int(resample), mean, mean, crop_scale=scale, **how)


def differences(item, spec, count=12, factor=1):
    """Of each crop by us, and by Pillow from the whole upright photo. Where the decoder shrinks by `factor`, a box begins and
    ends with whole pixels of what that gives."""
    image = by_pillow(item["bytes"], spec.channels)
    for params in crop_params(torch.arange(count), spec, seed=0):
        box = (side // factor * factor for side in crop_box(*image.size, params, spec.crop_scale))
        theirs = np.asarray(image.crop(tuple(box)).resize((WIDTH, HEIGHT), spec.resample)).reshape(HEIGHT, WIDTH, -1)
        yield np.abs(decode_image(item, spec, params).astype(int) - theirs)


# ----------------------------------------------------------------------------------------------------------------------
# Where the box lies


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (300, 300)])
def test_boxes_have_the_scale_to_1_of_the_area_and_a_shape_of_3_4_to_4_3_and_lie_anywhere(width, height):
    boxes = [crop_box(width, height, params, 0.08) for params in crop_params(torch.arange(400), spec_of(), 0)]
    left, top, right, bottom = np.array(boxes).T
    assert (left.min(), top.min(), right.max(), bottom.max()) == (0, 0, width, height)
    w, h = right - left, bottom - top
    shares, shapes = w * h / (width * height), w / h
    found = [shares.min(), shares.mean(), shapes.min(), np.log(shapes).mean(), shapes.max()]
    assert found == pytest.approx([0.08, 0.45, 3 / 4, 0, 4 / 3], abs=0.05)


@pytest.mark.parametrize(
    ("width", "height", "box"),
    [(900, 30, (430, 0, 470, 30)), (30, 900, (0, 430, 30, 470)), (35, 30, (0, 0, 35, 30)), (1, 1, (0, 0, 1, 1))],
)
def test_where_no_box_fits_it_is_the_largest_in_the_middle_of_an_allowed_shape(width, height, box):
    upright = [0.9, 0.0]  # nearly all of the area, and higher than wide
    assert crop_box(width, height, [*upright * MAX_TRIES, 0.0, 0.0], scale=0.9) == box


def test_which_part_is_cut_depends_on_seed_epoch_and_image_alone():
    rows = undecoded([item_of(grainy((80, 100)))] * 3)
    images = ImageDataset(rows, spec_of(), seed=5)
    first = images.__getitems__([0, 1, 2])["images"]
    assert torch.equal(images.__getitems__([2, 0])["images"], first[[2, 0]])
    later = images.__getitems__([number + EPOCH_STRIDE for number in range(3)])
    again = images.__getitems__([3, 4, 5])  # the same photos for the second time in an epoch
    assert (later["index"].tolist(), again["index"].tolist()) == ([0, 1, 2], [3, 4, 5])
    other_seed = ImageDataset(rows, spec_of(), seed=6).__getitems__([0, 1, 2])["images"]
    parts = [*first, *later["images"], *again["images"], *other_seed]  # all of the same photo
    assert len({part.numpy().tobytes() for part in parts}) == 12


# ----------------------------------------------------------------------------------------------------------------------
# Its pixels, beside Pillow's


WAYS = range(1, 9)  # in which a photo may be turned
FILES = {  # made of an image
    **{f"JPEG {mode}": lambda image, mode=mode: item_of(image.convert(mode), "JPEG") for mode in ("RGB", "L", "CMYK")},
    **{f"JPEG {way}": lambda image, way=way: item_of(image, "JPEG", **turned(way)) for way in WAYS},
    "PNG RGBA": lambda image: item_of(image.convert("RGBA")),
    "palette": lambda image: item_of(image.convert("P"), transparency=bytes([0, 128, 255])),
    "TIFF 6": lambda image: item_of(image, "TIFF", **turned(6)),
}


@pytest.mark.parametrize("resample", PILImage.Resampling, ids=str)
@pytest.mark.parametrize("kind", FILES)
def test_a_crop_is_pillows_of_the_same_box_of_the_upright_photo(kind, resample):
    is_png = kind == "PNG RGBA"
    for size in [(50, 75), (31, 20), (3, 2), *[(401, 300)] * is_png]:  # a JPEG is shrunk by its decoder
        for channels in MODES if is_png else (1, 3):
            by_torch = resample.name in ("BILINEAR", "BICUBIC") and channels < 4
            for difference in differences(FILES[kind](grainy(size)), spec_of(channels, resample), count=4):
                assert difference.max() <= 2 * by_torch


@pytest.mark.parametrize(
    ("kind", "size", "factor"),
    [(f"JPEG {mode}", (150, 113), 2) for mode in ("RGB", "L", "CMYK")]
    + [("JPEG RGB", (601, 447), 8)]
    + [(f"JPEG {way}", (304, 232), 4) for way in WAYS],
)
def test_a_crop_of_a_shrunk_jpeg_is_pillows_within_two_in_the_mean(kind, size, factor, shrunk_to):
    for difference in differences(FILES[kind](smooth(*size)), spec_of(scale=0.9), 6, factor):
        assert difference.mean() <= 2
    shrunk = (-(-size[1] // factor), -(-size[0] // factor))
    assert set(shrunk_to) == (set() if kind == "JPEG CMYK" else {shrunk})  # four inks are shrunk by Pillow


# ----------------------------------------------------------------------------------------------------------------------
# The centre, to score


STRETCHED = ViTImageProcessorPil(size={"height": 16, "width": 16})
DINO = BitImageProcessorPil(size={"shortest_edge": 256}, crop_size={"height": 224, "width": 224})
DEIT = DeiTImageProcessorPil(size={"height": 256, "width": 256}, crop_size={"height": 224, "width": 224})


@pytest.mark.parametrize(
    ("processor", "height", "width", "eval_crop", "resized"),
    [
        (STRETCHED, 224, 224, 0.875, 256),
        (STRETCHED, 384, 384, 0.9, 426),
        (STRETCHED, 24, 24, None, None),
        (STRETCHED, 16, 24, 0.8, 30),  # of a model that is not square the longer side counts
        (DINO, 224, 224, None, 256),
        (DINO, 384, 384, None, 438),
        (DEIT, 112, 224, None, (128, 256)),
    ],
)
def test_the_centre_is_that_of_eval_crop_or_else_of_the_checkpoint(processor, height, width, eval_crop, resized):
    assert eval_resize(image_spec_of(processor, HFViTConfig()), height, width, eval_crop) == resized


@pytest.mark.parametrize("size", [(80, 60), (20, 33)])
@pytest.mark.parametrize("checkpoint", ["stretched", "centre", "scratch"])
def test_the_saved_image_processor_gives_the_pixels_that_were_scored(checkpoint, size, tmp_path):
    """And both give those of Pillow."""
    small = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, patch_size=8)
    base, eval_crop, resample = None, 0.875, PILImage.Resampling.BILINEAR
    if checkpoint != "scratch":
        base, resample = str(tmp_path / "base"), PILImage.Resampling.BICUBIC
        ViTForImageClassification(ViTConfig(**small, image_size=16, num_labels=2)).save_pretrained(base)
        processor = ViTImageProcessorPil(size={"height": 16, "width": 16}, resample=resample)
        if checkpoint == "centre":
            eval_crop = None
            processor = BitImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 14, "width": 14})
        processor.save_pretrained(base)
    preset, overrides = ("tiny-patch16-224", small) if base is None else (None, {})
    model, processor = build_model(["cat", "dog"], base, preset, {**overrides, "image_size": 16}, eval_crop)
    processor.save_pretrained(tmp_path / "model")
    restored = AutoImageProcessor.from_pretrained(tmp_path / "model")
    spec = image_spec_of(restored, model.config)
    image = grainy(size)
    scored = ImageDataset(undecoded([item_of(image)]), spec).__getitems__([0])["images"]
    height, width = (18 * side // min(size) for side in size)
    left, top = (width - 16) // 2, (height - 16) // 2
    wanted = image.resize((width, height), resample).crop((left, top, left + 16, top + 16))
    np.testing.assert_array_equal(scored[0].permute(1, 2, 0), np.asarray(wanted))
    torch.testing.assert_close(normalize(scored, spec), restored(image, return_tensors="pt")["pixel_values"])

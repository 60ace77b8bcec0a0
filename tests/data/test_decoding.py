"""Claims about decoding one image: modes, bits, JPEG files, orientation, damage, and what image processors do."""

import dataclasses
from io import BytesIO

import numpy as np
import pytest
import torch
from image_data import encoded, grainy, item_of, picture, spec_of, undecoded
from PIL import Image as PILImage
from PIL import ImageOps
from transformers import (
    BitImageProcessorPil,
    CLIPImageProcessorPil,
    ConvNextImageProcessorPil,
    DeiTImageProcessorPil,
    DetrImageProcessorPil,
    LevitImageProcessorPil,
    LlavaNextImageProcessorPil,
    MobileViTImageProcessorPil,
    PerceiverImageProcessorPil,
    ViTImageProcessorPil,
)

from hf_vit import HFViTConfig
from hf_vit.data.decoding import decode_image, open_image
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_spec import image_spec_of
from hf_vit.data.loader import data_loader
from hf_vit.data.normalization import normalize
from hf_vit.system.errors import UserError


MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def by_pillow(content, channels=3):
    """The reference: decoded by Pillow, turned upright, converted."""
    image = ImageOps.exif_transpose(PILImage.open(BytesIO(content)))
    image = image.convert("RGBA") if "transparency" in image.info else image
    return image.convert(MODES[channels])


def turned(orientation):
    exif = PILImage.Exif()
    exif[0x0112] = orientation
    return {"exif": exif}


FILES = {
    **{mode: encoded(picture(3).convert(mode)) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")},
    "palette with alpha": encoded(picture(3).convert("P"), transparency=bytes([0, 128, 255])),
    "GIF": encoded(picture(3).convert("P"), "GIF", transparency=3),
    "turned PNG": encoded(picture(3), **turned(6)),
    **{f"JPEG {mode}": encoded(grainy(mode=mode), "JPEG") for mode in ("L", "RGB", "CMYK", "YCbCr")},
    **{f"JPEG 4:{at}": encoded(grainy(), "JPEG", subsampling=at, progressive=at > 1) for at in range(3)},
    **{f"JPEG {way}": encoded(grainy(), "JPEG", **turned(way)) for way in range(1, 9)},
    "grey JPEG, turned": encoded(grainy(mode="L"), "JPEG", **turned(5)),
    "JPEG stored as RGB": encoded(grainy(), "JPEG", keep_rgb=True),
    "two pictures": encoded(grainy(), "MPO", save_all=True, append_images=[picture(1, (37, 53))]),
    "more behind the end": encoded(grainy(), "JPEG") + b"more",
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_an_image_has_the_very_pixels_that_pillow_reads(content, channels):
    wanted = np.asarray(by_pillow(content, channels))
    for path in (None, "photo.HEIC"):  # its content says what it is
        np.testing.assert_array_equal(open_image({"bytes": content, "path": path}, channels), wanted)
    spec = dataclasses.replace(spec_of(channels=channels), height=wanted.shape[0], width=wanted.shape[1])
    np.testing.assert_array_equal(decode_image({"bytes": content, "path": None}, spec).squeeze(), wanted)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("dtype", "kind"), [(np.uint16, "PNG"), (np.uint16, "TIFF"), (np.int32, "TIFF")])
def test_sixteen_bits_become_eight_in_every_channel(dtype, kind, channels):
    deep = np.random.default_rng(0).integers(0, 65536, (8, 12)).astype(dtype)
    decoded = decode_image(item_of(PILImage.fromarray(deep), kind), spec_of(channels=channels))
    np.testing.assert_array_equal(decoded, np.repeat(deep[..., None] // 257, channels, axis=2))


def test_a_damaged_jpeg_is_read_where_pillow_reads_it_and_to_its_pixels():
    marks = bytearray(encoded(grainy((64, 64)), "JPEG"))
    marks[len(marks) // 2 : len(marks) // 2 + 40 : 2] = bytes(20)
    np.testing.assert_array_equal(open_image({"bytes": bytes(marks), "path": None}, 3), by_pillow(marks))


# ----------------------------------------------------------------------------------------------------------------------
# Image processors


SMALL, CROP = {"shortest_edge": 16}, {"height": 14, "width": 12}
OURS = {
    "ViT": ViTImageProcessorPil(size=CROP),
    "DeiT": DeiTImageProcessorPil(size={"height": 14, "width": 14}, crop_size=CROP),
    "CLIP": CLIPImageProcessorPil(size={"shortest_edge": 12}, crop_size={"height": 12, "width": 12}),
    "DINOv2": BitImageProcessorPil(size=SMALL, crop_size=CROP, resample=0),
    "crop larger than the image": BitImageProcessorPil(size={"shortest_edge": 9}, crop_size=CROP),
    "rescaled otherwise": ViTImageProcessorPil(size=CROP, rescale_factor=1 / 127.5),
    "of 224 pixels": ViTImageProcessorPil(image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4], resample=3),
}
THEIRS = {
    "Levit": LevitImageProcessorPil(size=SMALL, crop_size=CROP),  # resizes to 256/224 of the size
    "Perceiver": PerceiverImageProcessorPil(size=CROP, crop_size={"height": 16, "width": 16}),  # crops, then resizes
    "MobileViT": MobileViTImageProcessorPil(size=SMALL, crop_size=CROP),  # blue first
    "ConvNeXt": ConvNextImageProcessorPil(size=SMALL),
    "not normalised": ViTImageProcessorPil(size=CROP, do_normalize=False),
    "not rescaled": ViTImageProcessorPil(size=CROP, do_rescale=False),
}


@pytest.mark.parametrize("name", [*OURS, *THEIRS])
def test_images_are_those_of_the_image_processor_whoever_makes_them(name):
    processor = {**OURS, **THEIRS}[name]
    spec = image_spec_of(processor, HFViTConfig())
    assert spec.processor is (processor if name in THEIRS else None)
    images = [picture(number, size) for number, size in enumerate([(37, 53), (53, 36), (12, 12), (10, 91), (14, 12)])]
    rows = ImageDataset(undecoded([item_of(image) for image in images]), spec)
    assert (rows.cache is None) == (name in THEIRS)
    got = torch.cat([normalize(batch["images"], spec) for batch in data_loader(rows, [[0, 1], [2, 3, 4]], 0)])
    wanted = torch.cat([processor(image, return_tensors="pt")["pixel_values"] for image in images])
    torch.testing.assert_close(got, wanted, atol=2e-6 * max(1, wanted.abs().max()), rtol=0)


NO_MODEL = {  # tiles, as large as the image, not resized, of another number of channels
    LlavaNextImageProcessorPil(): 3, DetrImageProcessorPil(): 3, ViTImageProcessorPil(do_resize=False): 3, ViTImageProcessorPil(): 1,
}  # fmt: skip


@pytest.mark.parametrize(("processor", "channels"), NO_MODEL.items())
def test_a_processor_whose_images_the_model_does_not_take_is_named_with_the_shape_that_it_does(processor, channels):
    with pytest.raises(UserError, match=rf"{type(processor).__name__}.*\(1, {channels}, height, width\)"):
        image_spec_of(processor, HFViTConfig(num_channels=channels))


# ----------------------------------------------------------------------------------------------------------------------
# Resizing training images by torch


@pytest.mark.parametrize("resample", [PILImage.Resampling.BILINEAR, PILImage.Resampling.LANCZOS], ids=str)
def test_torch_resizes_a_training_image_within_two_of_pillow_and_pillow_where_torch_cannot(resample):
    spec = dataclasses.replace(spec_of(), resample=int(resample))
    item = item_of(picture(2, (37, 53)))
    exact = decode_image(item, spec).astype(int)
    fast = decode_image(item, dataclasses.replace(spec, fast_resize=True)).astype(int)
    assert np.abs(fast - exact).max() <= 2 * (resample == PILImage.Resampling.BILINEAR)

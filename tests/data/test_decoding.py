"""Claims about decoding one image: modes, bits, JPEG files, orientation, and what image processors do."""

import dataclasses
import re
import zipfile
from io import BytesIO

import numpy as np
import PIL
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image
from image_data import encoded, grainy, item_of, picture, pictures, smooth, spec_of, undecoded
from PIL import Image as PILImage
from PIL import ImageOps
from transformers import (
    BitImageProcessorPil,
    CLIPImageProcessorPil,
    ConvNextImageProcessorPil,
    DeiTImageProcessorPil,
    MobileViTImageProcessorPil,
    ViTImageProcessorPil,
)

from hf_vit import HFViTConfig
from hf_vit.data.crops import crop_params
from hf_vit.data.decoding import decode_image, decode_rows, open_image, stack_images
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_files import AllowedFiles
from hf_vit.data.image_spec import ImageSpec, image_spec_of
from hf_vit.data.loader import data_loader
from hf_vit.data.normalization import denormalize, normalize


@pytest.mark.parametrize("change", [normalize, denormalize])
def test_a_processor_of_another_number_of_channels_is_one_sentence(change):
    spec = ImageSpec(8, 8, 3, 2, (0.5, 0.5), (0.5,))
    with pytest.raises(ValueError, match=r"image_mean \[0.5, 0.5\] and image_std \[0.5\], wanted 3 numbers each"):
        change(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), spec)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_decoded_and_normalised_images_equal_the_image_processor(mode):
    processor = ViTImageProcessorPil(
        size={"height": 8, "width": 12}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4], do_convert_rgb=True
    )
    spec = spec_of(processor=processor)
    image = picture(1, mode=mode)
    rows = Dataset.from_dict({"image": [image], "label": [0]}, Features(image=Image(), label=ClassLabel(names=["x"])))
    batch = ImageDataset(rows.cast_column("image", Image(decode=False)), spec).__getitems__([0])
    wanted = processor([image.convert("RGB")], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(normalize(batch["images"], spec), wanted, atol=1e-6, rtol=0)


def test_a_rotated_photo_is_turned_upright(tmp_path):
    image = picture(size=(8, 12))
    exif = PILImage.Exif()
    exif[0x0112] = 6  # the camera was turned by a quarter
    image.save(tmp_path / "turned.png", exif=exif)
    decoded = decode_image({"bytes": (tmp_path / "turned.png").read_bytes(), "path": None}, spec_of((12, 8)))
    np.testing.assert_array_equal(decoded, np.asarray(image.rotate(-90, expand=True)))


def test_sixteen_bits_are_scaled_not_clipped(tmp_path):
    PILImage.fromarray(np.full((8, 12), 32768, dtype=np.uint16)).save(tmp_path / "deep.png")
    item = {"bytes": (tmp_path / "deep.png").read_bytes(), "path": None}
    assert decode_image(item, spec_of()).mean() == 127


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("mode", "kind", "how"),
    [
        *[(mode, "PNG", {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")],
        ("P", "PNG", {"transparency": bytes([0, 128, 255])}),
        ("P", "GIF", {"transparency": 3}),
        *[(mode, "JPEG", {}) for mode in ("L", "RGB", "CMYK", "YCbCr")],
    ],
)
def test_every_mode_of_image_decodes_as_pil_converts_it(mode, kind, how, channels):
    item = item_of(picture(3, (8, 12)).convert(mode), kind, **how)
    image = PILImage.open(BytesIO(item["bytes"]))
    if how:
        image = image.convert("RGBA")
    wanted = np.asarray(image.convert({1: "L", 3: "RGB"}[channels])).reshape(8, 12, channels)
    np.testing.assert_array_equal(decode_image(item, spec_of(channels=channels)), wanted)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("dtype", "kind"), [(np.uint16, "PNG"), (np.uint16, "TIFF"), (np.int32, "TIFF")])
def test_sixteen_bits_become_eight_in_every_channel(dtype, kind, channels):
    deep = np.random.default_rng(0).integers(0, 65536, (8, 12)).astype(dtype)
    decoded = decode_image(item_of(PILImage.fromarray(deep), kind), spec_of(channels=channels))
    np.testing.assert_array_equal(decoded, np.repeat(deep[..., None] // 257, channels, axis=2))


def test_floating_point_pixels_are_refused():
    with pytest.raises(ValueError, match="floating-point numbers of no stated range"):
        decode_image(item_of(PILImage.fromarray(np.ones((8, 12), np.float32)), "TIFF"), spec_of())


PROCESSORS = {
    "ViT": lambda: ViTImageProcessorPil(size={"height": 14, "width": 12}),
    "DeiT": lambda: DeiTImageProcessorPil(size={"height": 14, "width": 14}, crop_size={"height": 13, "width": 12}),
    "CLIP": lambda: CLIPImageProcessorPil(size={"shortest_edge": 12}, crop_size={"height": 12, "width": 12}),
    "DINOv2": lambda: BitImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 14, "width": 14}),
    "ViT, the middle": lambda: ViTImageProcessorPil(
        size={"shortest_edge": 16}, do_center_crop=True, crop_size={"height": 14, "width": 12}
    ),
    "crop larger than the image": lambda: BitImageProcessorPil(
        size={"shortest_edge": 9}, crop_size={"height": 14, "width": 12}
    ),
}


@pytest.mark.parametrize("size", [(37, 53), (53, 36), (12, 12), (10, 91), (16, 17)])
@pytest.mark.parametrize("name", PROCESSORS)
def test_each_kind_of_image_processor_is_followed_to_the_pixel(name, size):
    processor, image = PROCESSORS[name](), picture(1, size)
    spec = image_spec_of(processor, HFViTConfig())
    wanted = processor(image, do_rescale=False, do_normalize=False, return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(decode_image(item_of(image), spec).transpose(2, 0, 1), wanted)


@pytest.mark.parametrize(
    "processor",
    [
        ConvNextImageProcessorPil(size={"shortest_edge": 16}),
        MobileViTImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 12, "width": 12}),
        ViTImageProcessorPil(size={"height": 14, "width": 12}, do_normalize=False),
        ViTImageProcessorPil(size={"height": 14, "width": 12}, rescale_factor=1 / 127.5),
    ],
    ids=["ConvNeXt", "MobileViT", "not normalised", "rescaled otherwise"],
)
def test_an_image_processor_that_does_more_makes_the_pixels_itself(processor):
    spec = image_spec_of(processor, HFViTConfig())
    assert spec.processor is processor
    images = [picture(number, (37, 53)) for number in range(3)]
    wanted = processor(images, return_tensors="pt")["pixel_values"]
    rows = ImageDataset(undecoded([item_of(image) for image in images]), spec)
    assert rows.cache is None
    got = torch.cat([normalize(batch["images"], spec) for batch in data_loader(rows, [[0, 1], [2]], 0)])
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)


def test_a_large_jpeg_is_scored_as_pillow_decodes_and_resizes_it():
    photo, spec = item_of(smooth(480, 320), "JPEG"), spec_of((16, 24))
    opened = PILImage.open(BytesIO(photo["bytes"]))
    np.testing.assert_array_equal(decode_image(photo, spec), np.asarray(opened.resize((24, 16), spec.resample)))


JPEGS = {
    **{
        f"4:{name}{', progressive' if progressive else ''}": ("RGB", dict(subsampling=at, progressive=progressive))
        for at, name in enumerate(("4:4", "2:2", "2:0"))
        for progressive in (False, True)
    },
    "grey": ("L", {}),
    "grey, progressive": ("L", dict(progressive=True)),
    "coarse": ("RGB", dict(quality=5)),
    "stored as RGB": ("RGB", dict(keep_rgb=True)),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("mode", "how"), JPEGS.values(), ids=JPEGS)
def test_a_jpeg_has_the_very_pixels_that_pillow_reads(mode, how, channels, shrunk_to):
    item = item_of(grainy(mode=mode), "JPEG", **how)
    wanted = PILImage.open(BytesIO(item["bytes"])).convert({1: "L", 3: "RGB"}[channels])
    opened = open_image(item, channels)
    assert opened.mode == wanted.mode
    np.testing.assert_array_equal(np.asarray(opened), np.asarray(wanted))
    assert shrunk_to == [(37, 53)]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_jpeg_is_turned_as_its_camera_was_held(mode, orientation, shrunk_to):
    exif = PILImage.Exif()
    exif[0x0112] = orientation
    item = item_of(grainy(mode=mode), "JPEG", exif=exif)
    wanted = ImageOps.exif_transpose(PILImage.open(BytesIO(item["bytes"])))
    assert wanted.size == ((53, 37) if orientation < 5 else (37, 53))
    np.testing.assert_array_equal(np.asarray(open_image(item, 3)), np.asarray(wanted.convert("RGB")))
    assert len(shrunk_to) == 1
    height, width = decode_image(item, dataclasses.replace(spec_of((12, 8)), fast_resize=True)).shape[:2]
    assert (height, width) == (12, 8)


def test_a_jpeg_of_four_inks_is_read_by_pillow(shrunk_to):
    item = item_of(grainy(mode="CMYK"), "JPEG")
    wanted = PILImage.open(BytesIO(item["bytes"])).convert("RGB")
    np.testing.assert_array_equal(np.asarray(open_image(item, 3)), np.asarray(wanted))
    assert shrunk_to == []


def test_of_several_pictures_in_one_jpeg_the_first_is_taken(shrunk_to):
    item = item_of(grainy(), "MPO", save_all=True, append_images=[picture(1, (37, 53))])
    with PILImage.open(BytesIO(item["bytes"])) as several:
        assert (several.format, several.n_frames) == ("MPO", 2)
        np.testing.assert_array_equal(np.asarray(open_image(item, 3)), np.asarray(several))
    assert shrunk_to == [(37, 53)]


def test_a_jpeg_on_disk_is_decoded_as_one_in_memory(tmp_path, shrunk_to):
    item = item_of(grainy(), "JPEG")
    (tmp_path / "photo.jpg").write_bytes(item["bytes"])
    rows = [{"row": 0, "image": {"bytes": None, "path": "photo.jpg"}}]
    (beside,), _ = decode_rows(rows, spec_of(), files=AllowedFiles(str(tmp_path)))
    np.testing.assert_array_equal(beside, decode_image(item, spec_of()))
    assert len(shrunk_to) == 2


def damaged():
    whole = encoded(grainy((64, 64)), "JPEG")
    marks = bytearray(whole)
    marks[len(whole) // 2 : len(whole) // 2 + 40 : 2] = bytes(20)
    cuts = {f"{name} lacking": whole[:-cut] for name, cut in (("1 byte", 1), ("2 bytes", 2), ("100 bytes", 100))}
    halves = {f"{part:.0%} of it": whole[: int(part * len(whole))] for part in (0.1, 0.3, 0.5, 0.9)}
    return {**cuts, **halves, "zeros in the midst": bytes(marks), "more behind the end": whole + b"more"}


@pytest.mark.parametrize("content", damaged().values(), ids=damaged())
def test_a_damaged_jpeg_is_read_where_pillow_reads_it_and_to_its_pixels(content):
    item = {"bytes": content, "path": None}
    try:
        wanted = np.asarray(PILImage.open(BytesIO(content)).convert("RGB"))
    except OSError as error:
        unknown = isinstance(error, PIL.UnidentifiedImageError)
        wanted = "no known format" if unknown else re.escape(str(error).partition("(")[0])
        with pytest.raises((OSError, ValueError), match=wanted):
            open_image(item, 3)
    else:
        np.testing.assert_array_equal(np.asarray(open_image(item, 3)), wanted)


@pytest.mark.parametrize("how", [{}, {"fast_resize": True}, {"crop_scale": 0.9}])
@pytest.mark.parametrize("part", [0.2, 0.6, 0.95])
def test_a_jpeg_that_was_cut_off_is_an_error_that_names_its_row_and_file(part, how):
    whole = encoded(grainy((64, 64)), "JPEG")
    good, bad = ({"bytes": one, "path": "some.jpg"} for one in (whole, whole[: int(part * len(whole))]))
    spec = dataclasses.replace(spec_of(), **how)
    params = crop_params(torch.arange(2), spec, seed=0)
    images, sentences = decode_rows([{"image": good, "row": 4}, {"image": bad, "row": 7}], spec, params)
    assert [image is None for image in images] == [False, True]
    (sentence,) = sentences
    assert sentence.startswith("row 7 (some.jpg) cannot be read as an image: ")


SAME_AS_PILLOW = [getattr(PILImage.Resampling, name) for name in ("NEAREST", "BOX", "HAMMING", "LANCZOS")]


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("size", [(37, 53), (5, 7), (8, 12), (200, 13)])
@pytest.mark.parametrize("resample", [PILImage.Resampling.BILINEAR, PILImage.Resampling.BICUBIC])
def test_torch_resizes_a_training_image_within_two_of_pillow(resample, size, channels):
    spec = dataclasses.replace(spec_of(channels=channels), resample=int(resample))
    item = item_of(picture(2, size))
    exact = decode_image(item, spec).astype(int)
    fast = decode_image(item, dataclasses.replace(spec, fast_resize=True)).astype(int)
    assert exact.shape == fast.shape == (8, 12, channels)
    assert np.abs(fast - exact).max() <= (0 if size == (8, 12) else 2)


def test_torch_and_not_pillow_resizes_training_images_and_pillow_the_others(monkeypatch):
    calls, interpolate = [], torch.nn.functional.interpolate
    monkeypatch.setattr(
        torch.nn.functional, "interpolate", lambda *args, **how: calls.append(how["mode"]) or interpolate(*args, **how)
    )
    spec = spec_of()
    assert spec.resample == PILImage.Resampling.BILINEAR
    decode_image(item_of(picture(2, (37, 53))), spec)
    assert calls == []
    for resample in (PILImage.Resampling.BILINEAR, PILImage.Resampling.BICUBIC):
        decode_image(
            item_of(picture(2, (37, 53))), dataclasses.replace(spec, fast_resize=True, resample=int(resample))
        )
    assert calls == ["bilinear", "bicubic"]


@pytest.mark.parametrize("size", [(37, 53), (5, 7)])
@pytest.mark.parametrize("resample", SAME_AS_PILLOW, ids=lambda resample: resample.name)
def test_other_resamplings_of_a_training_image_are_pillows_to_the_pixel(resample, size):
    spec = dataclasses.replace(spec_of(), resample=int(resample), fast_resize=True)
    wanted = picture(2, size).resize((12, 8), resample)
    np.testing.assert_array_equal(decode_image(item_of(picture(2, size)), spec), np.asarray(wanted))


@pytest.mark.parametrize("fast_resize", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "size", [(14, 12), (13, 11), (12, 10), (9, 20), (21, 9), (10, 15), (30, 21), (31, 20), (1, 1), (13, 12), (14, 13)]
)
def test_the_middle_is_cut_out_as_pillow_does_with_black_where_the_image_ends(size, channels, fast_resize):
    image, (height, width) = picture(1, size), size
    top, left = (height - 14) // 2, (width - 12) // 2
    wanted = np.asarray(image.convert({1: "L", 3: "RGB"}[channels]).crop((left, top, left + 12, top + 14)))
    spec = ImageSpec(14, 12, channels, 2, (0.5,) * channels, (0.5,) * channels, resize=size, fast_resize=fast_resize)
    np.testing.assert_array_equal(decode_image(item_of(image), spec), wanted.reshape(14, 12, channels))


def test_a_batch_is_one_piece_of_memory_however_its_images_lie():
    images = [np.asarray(picture(number, (8, 12))).copy() for number in range(4)]
    laid = [images[0], images[1].copy(order="F"), np.tile(images[2], (2, 2, 1))[:8, :12], images[3]]
    laid[3] = np.ascontiguousarray(images[3].transpose(2, 0, 1)).transpose(1, 2, 0)
    assert sum(image.flags.c_contiguous for image in laid) == 1
    batch = stack_images(laid)
    assert (batch.shape, batch.dtype, batch.is_contiguous()) == ((4, 3, 8, 12), torch.uint8, True)
    assert torch.equal(batch, torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2))


def test_an_image_inside_an_archive_is_read_where_it_lies(tmp_path):
    """A streamed folder of images names its files so: zip://FILE::ARCHIVE."""
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        archive.writestr("cat/0.png", pictures([0])[0])
    rows = [{"row": 0, "image": {"bytes": None, "path": f"zip://cat/0.png::{tmp_path / 'photos.zip'}"}}]
    (inside,), _ = decode_rows(rows, spec_of(), files=AllowedFiles(str(tmp_path)))
    np.testing.assert_array_equal(inside, np.asarray(picture(0, (8, 12))))

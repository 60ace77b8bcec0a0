"""Claims about crops: random parts to train on, the centre to score, beside Pillow on one image at a time.

Stated tolerance: where a file is decoded whole, each value is within 2 of Pillow's; where the JPEG decoder shrinks it on the way,
values are within 2 of Pillow's in the mean.
"""

import contextlib
import itertools
import json
import math
from io import BytesIO

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as PILImage
from PIL import ImageOps
from transformers import (
    AutoImageProcessor,
    BitImageProcessorPil,
    DeiTImageProcessorPil,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
    pipeline,
)

from hf_vit import HFViTConfig
from hf_vit.data import image_dataset
from hf_vit.data.crops import MAX_TRIES, crop_box, crop_params
from hf_vit.data.decoding import decode_image
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_spec import ImageSpec, eval_resize, image_spec_of, training_image_spec
from hf_vit.data.loader import data_loader
from hf_vit.data.normalization import normalize
from hf_vit.data.sampling import EPOCH_STRIDE
from hf_vit.data.sources import load_splits
from hf_vit.data.streaming import ImageStream, prepare_stream
from hf_vit.training.model import build_model


HEIGHT, WIDTH = 32, 48
IDS = torch.arange(400)
SIDES = [(500, 375), (375, 500), (64, 64), (97, 40), (3, 5), (1, 1), (200, 20)]


def spec_of(channels=3, resample=PILImage.Resampling.BILINEAR, scale=0.08):
    mean = (0.5,) * channels
    return ImageSpec(HEIGHT, WIDTH, channels, int(resample), mean, mean, crop_scale=scale)


def scene(width, height, mode="RGB"):
    """Soft spots under a little grain, as in a photo."""
    rng = np.random.default_rng(width * height)
    spots = PILImage.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
    spots = np.asarray(spots.resize((width, height), PILImage.Resampling.BICUBIC), dtype=float)
    grain = rng.normal(0, 6, (height, width, 1))
    return PILImage.fromarray((spots + grain).clip(0, 255).astype(np.uint8)).convert(mode)


def item_of(image, kind="PNG", **how):
    file = BytesIO()
    image.save(file, kind, **how)
    return {"bytes": file.getvalue(), "path": None}


def rows_of(items):
    kinds = Features(image=Image(decode=False), label=ClassLabel(names=["cat", "dog"]), row=Value("int64"))
    rows = {"image": items, "label": [number % 2 for number in range(len(items))], "row": list(range(len(items)))}
    return Dataset.from_dict(rows, kinds)


def by_pillow(item, spec, params, factor=1):
    """The reference: one image, decoded whole by Pillow, turned upright, converted, cut, resized. Where the decoder
    shrinks by `factor`, a box begins and ends with whole pixels of what that gives."""
    image = ImageOps.exif_transpose(PILImage.open(BytesIO(item["bytes"])))
    if image.mode == "I;16":
        image = PILImage.fromarray((np.asarray(image) // 257).astype(np.uint8))
    if image.mode == "P":
        image = image.convert("RGBA")
    image = image.convert({1: "L", 3: "RGB"}[spec.channels])
    left, top, right, bottom = (side // factor * factor for side in crop_box(*image.size, params, spec.crop_scale))
    part = image.crop((left, top, right, bottom))
    return np.asarray(part.resize((spec.width, spec.height), spec.resample)).reshape(spec.height, spec.width, -1)


def differences(item, spec, ids=range(12), factor=1):
    """Of each crop by us and by Pillow, which it must be near to."""
    for params in crop_params(torch.tensor(ids), spec, seed=0):
        yield np.abs(decode_image(item, spec, params).astype(int) - by_pillow(item, spec, params, factor))


# ----------------------------------------------------------------------------------------------------------------------
# Where the box lies


@pytest.mark.parametrize("scale", [0.08, 0.35, 0.9])
@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (300, 300)])
def test_a_box_has_the_drawn_area_and_shape_of_the_first_that_fits_and_lies_inside(width, height, scale):
    boxes, tries = [], []
    for params in crop_params(IDS, spec_of(), 0):
        areas = [scale + (1 - scale) * number for number in params[0:-2:2]]
        shapes = [(3 / 4) ** (1 - number) * (4 / 3) ** number for number in params[1:-2:2]]
        sides = [((area * shape) ** 0.5, (area / shape) ** 0.5) for area, shape in zip(areas, shapes, strict=True)]
        sides = [((width * height) ** 0.5 * w, (width * height) ** 0.5 * h) for w, h in sides]
        fitting = [number for number, (w, h) in enumerate(sides) if round(w) <= width and round(h) <= height]
        if fitting:
            left, top, right, bottom = crop_box(width, height, params, scale)
            assert (right - left, bottom - top) == pytest.approx(sides[fitting[0]], abs=0.51)
            boxes.append((left, top, right, bottom))
            tries.append(fitting[0])
    left, top, right, bottom = np.array(boxes).T
    assert left.min() == top.min() == 0
    assert (right.max(), bottom.max()) == (width, height)
    assert max(tries) > 0
    assert len(boxes) > 0.5 * len(IDS)


def test_boxes_lie_anywhere_with_the_same_chance():
    places = []
    for params in crop_params(torch.arange(4000), spec_of(), 0):
        left, top, right, bottom = crop_box(500, 375, params, 0.08)
        if right - left < 500 and bottom - top < 375:
            places.append((left / (500 - right + left), top / (375 - bottom + top)))
    for counts in (np.histogram(place, bins=5, range=(0, 1))[0] for place in zip(*places, strict=True)):
        assert counts.min() > 0.85 * len(places) / 5


def test_the_first_box_that_fits_is_taken():
    whole = [1 - 2**-24, 0.5]  # the whole area, square
    quarter = [0.0, 0.5]
    rest = [*whole] * (MAX_TRIES - 2)
    assert crop_box(400, 300, [*whole, *quarter, *rest, 0.0, 0.999], 0.25) == (0, 127, 173, 300)
    assert crop_box(400, 400, [*whole, *quarter, *rest, 0.0, 0.999], 0.25) == (0, 0, 400, 400)


@pytest.mark.parametrize(
    ("width", "height", "box"),
    [(900, 30, (430, 0, 470, 30)), (30, 900, (0, 430, 30, 470)), (35, 30, (0, 0, 35, 30))],
)
def test_where_no_box_fits_it_is_the_largest_in_the_middle_of_an_allowed_shape(width, height, box):
    upright = [0.9, 0.0]  # nearly all of the area, and higher than wide
    assert crop_box(width, height, [*upright * MAX_TRIES, 0.0, 0.0], scale=0.9) == box


@pytest.mark.parametrize(("width", "height"), SIDES)
def test_every_photo_has_a_box(width, height):
    for scale, params in itertools.product((0.01, 0.35, 1.0), crop_params(IDS + EPOCH_STRIDE, spec_of(), 3)):
        left, top, right, bottom = crop_box(width, height, params, scale)
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height


def test_which_part_is_cut_depends_on_seed_epoch_and_image_alone():
    items = [item_of(scene(100, 80))] * 3
    images = ImageDataset(rows_of(items), spec_of(), seed=5)
    assert images.cache is None
    first = images.__getitems__([0, 1, 2])
    again = images.__getitems__([2, 0])
    assert torch.equal(again["images"], first["images"][[2, 0]])
    assert not torch.equal(first["images"][0], first["images"][1])  # of the same photo
    later = images.__getitems__([EPOCH_STRIDE, EPOCH_STRIDE + 1])
    assert later["index"].tolist() == [0, 1]
    others = [later, ImageDataset(rows_of(items), spec_of(), seed=6).__getitems__([0, 1]), images.__getitems__([3, 4])]
    assert others[2]["index"].tolist() == [3, 4]  # the same photos for the second time in an epoch
    for other in others:
        assert not torch.equal(other["images"][0], first["images"][0])
        assert not torch.equal(other["images"][1], first["images"][1])


# ----------------------------------------------------------------------------------------------------------------------
# Its pixels, beside Pillow's


WHOLE = {
    "JPEG": lambda size: item_of(scene(*size), "JPEG", quality=90),
    "JPEG, grey": lambda size: item_of(scene(*size, "L"), "JPEG", quality=90),
    "JPEG, four inks": lambda size: item_of(scene(*size, "CMYK"), "JPEG", quality=90),
    "PNG": lambda size: item_of(scene(*size)),
    "PNG, grey": lambda size: item_of(scene(*size, "L")),
    "PNG, RGBA": lambda size: item_of(scene(*size, "RGBA")),
    "PNG, palette": lambda size: item_of(scene(*size, "P"), transparency=bytes([0, 128, 255])),
    "PNG, 16 bits": lambda size: item_of(
        PILImage.fromarray(
            (np.asarray(scene(*size, "L")).astype(np.uint16) * 257 + 13).clip(0, 65535).astype(np.uint16)
        )
    ),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("resample", [PILImage.Resampling.BILINEAR, PILImage.Resampling.BICUBIC])
@pytest.mark.parametrize("size", [(75, 50), (50, 75), (20, 31), (2, 3)])
@pytest.mark.parametrize("kind", WHOLE)
def test_a_crop_is_pillows_of_the_same_box(kind, size, resample, channels):
    for difference in differences(WHOLE[kind](size), spec_of(channels, resample)):
        assert difference.max() <= 2
        assert difference.mean() <= 0.1


@pytest.mark.parametrize("resample", [PILImage.Resampling.BILINEAR, PILImage.Resampling.BICUBIC])
@pytest.mark.parametrize("size", [(1000, 750), (750, 1001)])
def test_a_crop_that_shrinks_much_is_pillows_with_its_antialiasing(size, resample):
    item = item_of(scene(*size))
    for difference in differences(item, spec_of(resample=resample), range(6)):
        assert difference.max() <= 2
    spec, params = spec_of(scale=1.0), crop_params(torch.tensor([0]), spec_of(), 0)[0]
    part = PILImage.open(BytesIO(item["bytes"])).crop(crop_box(*size, params, 1.0))
    aliased = np.asarray(part.resize((WIDTH, HEIGHT), PILImage.Resampling.NEAREST)).astype(int)
    assert np.abs(decode_image(item, spec, params) - aliased).mean() > 2


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("resample", [PILImage.Resampling.BILINEAR, PILImage.Resampling.BICUBIC])
@pytest.mark.parametrize(("size", "factor"), [((150, 113), 2), ((230, 300), 4), ((601, 447), 8)])
def test_a_crop_of_a_shrunk_jpeg_is_pillows_within_two_in_the_mean(size, factor, resample, mode, shrunk_to):
    spec, item = spec_of(resample=resample, scale=0.9), item_of(scene(*size, mode), "JPEG", quality=90)
    for difference in differences(item, spec, range(6), factor):
        assert difference.mean() <= 2
    if mode == "CMYK":  # Pillow alone reads it, and shrinks it too
        assert shrunk_to == []
    else:
        assert set(shrunk_to) == {(-(-size[1] // factor), -(-size[0] // factor))}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("size", "factor"), [((75, 50), 1), ((304, 232), 4)])
def test_the_box_lies_in_the_upright_photo(size, factor, orientation):
    exif = PILImage.Exif()
    exif[0x0112] = orientation
    item = item_of(scene(*size), "JPEG", exif=exif, quality=90)
    for difference in differences(item, spec_of(scale=0.85), range(6), factor):
        assert difference.max() <= 2 if factor == 1 else difference.mean() <= 2


@pytest.mark.parametrize("scale", [0.08, 0.5, 1.0])
@pytest.mark.parametrize(("width", "height"), [(400, 300), (301, 407), (1000, 90), (40, 40), (20, 11)])
def test_a_jpeg_is_shrunk_as_far_as_the_crop_keeps_the_models_size(width, height, scale, shrunk_to):
    item, spec = item_of(scene(width, height), "JPEG"), spec_of(scale=scale)
    for params in crop_params(torch.arange(20), spec, seed=0):
        decode_image(item, spec, params)
        left, top, right, bottom = crop_box(width, height, params, scale)
        room = [
            factor for factor in (8, 4, 2, 1) if right - left >= factor * WIDTH and bottom - top >= factor * HEIGHT
        ]
        factor = (room or [1])[0]
        assert shrunk_to.pop() == (-(-height // factor), -(-width // factor))


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("resample", [PILImage.Resampling.LANCZOS, PILImage.Resampling.BOX])
def test_resamplings_that_torch_lacks_are_pillows_to_the_pixel(resample, channels):
    spec, item = spec_of(channels, resample), item_of(scene(75, 50, {1: "L", 3: "RGB", 4: "RGBA"}[channels]))
    for params in crop_params(torch.arange(6), spec, seed=0):
        part = PILImage.open(BytesIO(item["bytes"])).crop(crop_box(75, 50, params, spec.crop_scale))
        wanted = np.asarray(part.resize((WIDTH, HEIGHT), resample)).reshape(HEIGHT, WIDTH, channels)
        np.testing.assert_array_equal(decode_image(item, spec, params), wanted)


# ----------------------------------------------------------------------------------------------------------------------
# Which images are cut so, and when they are read


@pytest.mark.parametrize(
    ("width", "height", "cut"),
    [
        (WIDTH, HEIGHT, False),
        (24, 16, False),
        (30, 30, True),
        (WIDTH + 3, HEIGHT + 2, True),
        (480, 320, True),
        (20, 48, True),
    ],
)
def test_photos_are_cut_as_they_are_and_small_images_of_the_models_shape_as_a_batch(width, height, cut):
    images = rows_of([item_of(scene(width, height))] * 3 + [{"bytes": b"bad", "path": None}, None])
    spec = ImageSpec(HEIGHT, WIDTH, 3, 2, (0.5,) * 3, (0.5,) * 3, resize=40)
    found = training_image_spec(spec, images, "resized", 0.2)
    assert (found.crop_scale, found.fast_resize) == ((0.2, False) if cut else (None, True))
    assert (found.height, found.width, found.resize) == (HEIGHT, WIDTH, None)
    for crop in ("none", "simple"):
        assert training_image_spec(spec, images, crop, 0.2) is spec
    assert training_image_spec(spec, None, "resized", 0.2).crop_scale == 0.2  # a stream


def test_a_random_part_is_full_of_picture():
    for width, height in SIDES:
        white = item_of(PILImage.new("RGB", (width, height), "white"))
        assert all(decode_image(white, spec_of(), some).min() == 255 for some in crop_params(IDS[:20], spec_of(), 0))


@pytest.mark.parametrize("few", [True, False])
def test_a_few_bad_photos_are_found_before_training_and_many_on_the_way(few, monkeypatch):
    items = [item_of(scene(60, 50)) for _ in range(4)]
    items[2] = {"bytes": items[2]["bytes"][:300], "path": "some.png"}
    if not few:
        monkeypatch.setattr(image_dataset, "CACHE_BYTES", 0)
    found = (
        contextlib.nullcontext() if not few else pytest.raises(ValueError, match=r"row 2 \(some.png\) cannot be read")
    )
    with found:
        ImageDataset(rows_of(items), spec_of())
    images = ImageDataset(rows_of(items), spec_of(), on_bad_image="skip", keep_full=True)
    assert len(images.skipped) == few
    assert images.rows["row"][:] == ([0, 1, 3] if few else [0, 1, 2, 3])
    (batch,) = data_loader(images, [[3, 2, 1]], num_workers=0)
    assert (len(batch["images"]), len(images.skipped)) == (3, 1)


def test_a_streams_parts_are_those_of_its_ids(tmp_path):
    rows = rows_of([item_of(scene(60, 50 + number), "JPEG") for number in range(6)]).remove_columns("row")
    for name in ("train", "validation"):
        rows.to_parquet(tmp_path / f"{name}.parquet")
    splits = load_splits(str(tmp_path), streaming=True)
    stream, _, names, _ = prepare_stream(splits)
    batches = ImageStream(stream, names, spec_of(), 7, buffer=3).batches(0, 4)
    with contextlib.closing(batches):
        seen = [batch for _, batch in itertools.islice(batches, 3)]
    assert sum((batch["index"] // EPOCH_STRIDE).sum() for batch in seen) > 0  # the second pass too
    for batch in seen:
        for index, image in zip(batch["index"], batch["images"], strict=True):
            (params,) = crop_params(index.view(1), spec_of(), 7)
            wanted = decode_image(rows[int(index % EPOCH_STRIDE)]["image"], spec_of(), params)
            np.testing.assert_array_equal(image.permute(1, 2, 0), wanted)


# ----------------------------------------------------------------------------------------------------------------------
# The centre, to score


def eval_form(height, width, eval_crop, processor=None):
    own = image_spec_of(processor or ViTImageProcessorPil(size={"height": 16, "width": 16}), HFViTConfig())
    return eval_resize(own, height, width, eval_crop)


def processor_that_keeps(crop, **size):
    return BitImageProcessorPil(size=size, crop_size={"height": crop, "width": crop})


@pytest.mark.parametrize(
    ("side", "part", "resized"),
    [(224, 0.875, 256), (384, 0.875, 438), (224, 0.9, 248), (224, 1.0, 224), (518, 0.95, 545)],
)
def test_eval_crop_is_timms_crop_pct(side, part, resized):
    assert eval_form(side, side, part) == resized == math.floor(side / part)


def test_without_eval_crop_the_checkpoints_image_processor_says_how_to_score():
    assert eval_form(24, 24, None) is None
    dino = processor_that_keeps(224, shortest_edge=256)
    assert eval_form(224, 224, None, dino) == 256
    assert eval_form(384, 384, None, dino) == 438
    deit = DeiTImageProcessorPil(size={"height": 256, "width": 256}, crop_size={"height": 224, "width": 224})
    assert eval_form(224, 224, None, deit) == (256, 256)
    assert eval_form(112, 224, None, deit) == (128, 256)


@pytest.mark.parametrize(
    "processor",
    [
        processor_that_keeps(224, shortest_edge=256),
        DeiTImageProcessorPil(size={"height": 256, "width": 256}, crop_size={"height": 224, "width": 224}),
    ],
    ids=["shorter side", "both sides"],
)
def test_an_eval_crop_that_the_image_processor_contradicts_is_refused(processor):
    assert eval_form(384, 384, 0.875, processor) == 438
    with pytest.raises(
        ValueError, match=r"--eval_crop 0.9 contradicts .* keeps 224 of 256 pixels \(0.875\): leave it out"
    ):
        eval_form(224, 224, 0.9, processor)


def test_the_crop_of_a_model_that_is_not_square_is_full_of_picture():
    resize = eval_form(16, 24, 0.8)
    spec = ImageSpec(16, 24, 3, 2, (0.5,) * 3, (0.5,) * 3, resize=resize)
    for size in ((40, 60), (60, 40), (31, 31)):
        assert decode_image(item_of(PILImage.new("RGB", size, "white")), spec).min() == 255


@pytest.mark.parametrize("size", [(80, 60), (60, 81), (20, 13)])
@pytest.mark.parametrize("checkpoint", ["stretched", "centre", "scratch"])
def test_a_pipeline_sees_what_was_scored(checkpoint, size, tmp_path, randomize):
    """The saved image processor gives the pixels of the loader, and both give those of Pillow."""
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8, num_labels=2
    )  # fmt: skip
    base, eval_crop, resample = None, 0.875, PILImage.Resampling.BILINEAR
    if checkpoint != "scratch":
        base = tmp_path / "base"
        ViTForImageClassification(config).save_pretrained(base)
        resample = PILImage.Resampling.BICUBIC
        processor = ViTImageProcessorPil(size={"height": 16, "width": 16}, resample=resample)
        if checkpoint == "centre":
            eval_crop, processor = None, processor_that_keeps(14, shortest_edge=16)
        processor.save_pretrained(base)
    small = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, patch_size=8)
    model, processor = build_model(
        ["cat", "dog"], base and str(base), None if base else "tiny-patch16-224", 16, {} if base else small, eval_crop
    )
    randomize(model).save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    saved = json.loads((tmp_path / "model" / "preprocessor_config.json").read_text())
    assert (saved["size"], saved["crop_size"]) == ({"shortest_edge": 18}, {"height": 16, "width": 16})
    restored = AutoImageProcessor.from_pretrained(tmp_path / "model")
    spec = image_spec_of(restored, model.config)
    assert (spec.resize, spec.processor) == (18, None)

    image = scene(*size)
    scored = ImageDataset(rows_of([item_of(image)]), spec).__getitems__([0])["images"]
    shorter = min(size)
    width, height = (18 * side // shorter for side in size)
    left, top = (width - 16) // 2, (height - 16) // 2
    wanted = image.resize((width, height), resample).crop((left, top, left + 16, top + 16))
    np.testing.assert_array_equal(scored[0].permute(1, 2, 0), np.asarray(wanted))
    torch.testing.assert_close(normalize(scored, spec), restored(image, return_tensors="pt")["pixel_values"])
    with torch.no_grad():
        chances = model(normalize(scored, spec)).logits.softmax(1)[0]
    classify = pipeline("image-classification", model=str(tmp_path / "model"), trust_remote_code=False)
    answers = {answer["label"]: answer["score"] for answer in classify(image)}
    assert answers == pytest.approx(dict(zip(["cat", "dog"], chances.tolist(), strict=True)), abs=1e-6)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_rotated_tiff_is_cut_as_the_upright_photo_is(orientation):
    exif = PILImage.Exif()
    exif[0x0112] = orientation
    item = item_of(scene(100, 400), "TIFF", exif=exif)
    upright = item_of(ImageOps.exif_transpose(PILImage.open(BytesIO(item["bytes"]))))
    for params in crop_params(IDS, spec_of(), 0):
        assert np.array_equal(decode_image(item, spec_of(), params), decode_image(upright, spec_of(), params))

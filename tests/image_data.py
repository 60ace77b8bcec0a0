"""Small data sets, image files, tables and archives for tests. Even numbers are cats; 0 to 3 are for training, 4 and 5 for evaluation."""

import tarfile
from io import BytesIO
from types import SimpleNamespace

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from PIL import Image as PILImage
from transformers import ViTImageProcessorPil

from hf_vit import HFViTConfig
from hf_vit.data.augment import augment
from hf_vit.data.decoding import decode_image
from hf_vit.data.image_spec import image_spec_of
from hf_vit.data.splits import prepare_splits


def picture(seed=0, size=(20, 14)):
    return PILImage.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def dataset(labels, names=("cat", "dog"), **columns):
    rows = {"image": [picture(i) for i in range(len(labels))], "label": labels, **columns}
    kinds = {name: Value("string") for name in columns}
    return Dataset.from_dict(rows, Features(image=Image(), label=ClassLabel(names=list(names)), **kinds))


def prepare(splits, fraction=0.25, **how):
    return prepare_splits(DatasetDict(splits), train_split="train", eval_fraction=fraction, **how)


def spec_of(channels=3):
    half = [0.5] * channels
    plain = dict(image_mean=half, image_std=half, do_convert_rgb=channels == 3)
    processor = ViTImageProcessorPil(size={"height": 8, "width": 12}, **plain)
    return image_spec_of(processor, HFViTConfig(image_size=(8, 12), patch_size=4, num_channels=channels))


def augmented(images, index, seed, epoch, spec, crop="none", **how):
    """`augment` as by the flags `how` of a run, without all others."""
    off = dict(
        crop_scale=0.35, shift=0, flip=False, auto_augment="none", rand_magnitude=9, color_jitter=0.0, erase=0.0
    )
    return augment(images, index, epoch, spec, SimpleNamespace(seed=seed, **off | how), crop)


ANIMALS = ("cat", "dog")


def animal(number):
    return ANIMALS[number % 2]


def encoded(image, kind="PNG", **how):
    file = BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def pictures(numbers):
    return [encoded(picture(number, (8, 12))) for number in numbers]


def write_tar(path, images, labels, start=0):
    with tarfile.open(path, "w") as tar:
        for number, (image, label) in enumerate(zip(images, labels, strict=True), start):
            for suffix, content in (("png", image), ("cls", str(label).encode())):
                entry = tarfile.TarInfo(f"{number:04}.{suffix}")
                entry.size = len(content)
                tar.addfile(entry, BytesIO(content))
    return str(path)


def table_of(numbers, column="image"):
    images = [{"bytes": image, "path": None} for image in pictures(numbers)]
    rows = {column: images, "label": [number % 2 for number in numbers]}
    return Dataset.from_dict(rows, Features({column: Image(), "label": ClassLabel(names=list(ANIMALS))}))


def item_of(image, kind="PNG", **how):
    return {"bytes": encoded(image, kind, **how), "path": None}


def smooth(width, height):
    """A picture that any good resizing treats alike, and that shows how it is turned."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return PILImage.fromarray(np.stack([x, y, 255 - x], axis=2).astype(np.uint8))


def undecoded(items, labels=None):
    """Rows as `prepare` gives them."""
    labels = [number % 2 for number in range(len(items))] if labels is None else labels
    kinds = Features(image=Image(decode=False), label=ClassLabel(names=list(ANIMALS)), row=Value("int64"))
    return Dataset.from_dict({"image": items, "label": labels, "row": list(range(len(items)))}, kinds)


def grainy(size=(37, 53), mode="RGB"):
    """Slopes under noise, of odd sides: where colours are stored at half the size, all rules of how they grow again count."""
    height, width = size
    noise = np.asarray(picture(0, size)).astype(int) // 4
    return PILImage.fromarray((np.asarray(smooth(width, height)) * 3 // 4 + noise).astype(np.uint8)).convert(mode)


def good_items(count):
    return [{"bytes": image, "path": None} for image in pictures(range(count))]


def assert_own(batch, items, labels):
    """Each place of a batch holds the image and the label that its index says."""
    for image, label, index in zip(batch["images"], batch["labels"], (batch["index"] % len(items)), strict=True):
        np.testing.assert_array_equal(image.permute(1, 2, 0), decode_image(items[index], spec_of()))
        assert label == labels[index]

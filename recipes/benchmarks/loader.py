"""Images a second from files to batches of tensors: hf_vit.data beside rows that are transformed one
by one.

python recipes/benchmarks/loader.py
python recipes/benchmarks/loader.py --repeats 3 --output_file model_cards/benchmark.json
"""

import itertools
import json
import statistics
import tempfile
from pathlib import Path

import datasets
import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features
from measuring import median_ratio, run_benchmark, square_spec, time_in_turns
from PIL import Image
from torch.utils.data import DataLoader

from hf_vit.data import crops, image_dataset
from hf_vit.data.columns import select_image_and_label
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_files import AllowedFiles, restrict_files
from hf_vit.data.image_spec import ImageSpec, training_image_spec
from hf_vit.data.loader import data_loader
from hf_vit.data.normalization import normalize
from hf_vit.data.sampling import EPOCH_STRIDE, epoch_batches
from hf_vit.data.sources import load_splits


WORKERS, BATCH = 2, 64


def photos(folder: Path, width: int, height: int, count: int) -> Dataset:
    """`count` rows of JPEG files: smooth noise with grain, two classes."""
    rng = np.random.default_rng(0)
    files = []
    for index in range(min(count, 64)):  # further rows name these files again
        coarse = Image.fromarray(rng.integers(0, 256, (height // 25, width // 25, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
        grain = rng.normal(0, 6, (height, width, 1)).astype(np.float32)
        files.append(str(folder / f"{width}-{index}.jpg"))
        Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(files[-1], quality=90)
    rows = {"image": [files[index % len(files)] for index in range(count)], "label": [0, 1] * (count // 2)}
    rows = Dataset.from_dict(rows, Features(image=datasets.Image(), label=ClassLabel(names=["a", "b"])))
    return restrict_files({"train": rows}, AllowedFiles(str(folder)))["train"]


def reference_rows(rows: Dataset, spec: ImageSpec) -> Dataset:
    """Rows whose images are decoded, converted, cropped where `spec` asks for it, resized and normalised one by one, on access."""
    mean, std = (np.array(values, dtype=np.float32) for values in (spec.mean, spec.std))

    def transform(batch):
        images = [image.convert("RGB") for image in batch["image"]]
        if spec.crop_scale is not None:
            numbers = torch.rand(len(images), crops.NUM_PARAMS).tolist()
            boxes = [
                crops.crop_box(*image.size, some, spec.crop_scale) for image, some in zip(images, numbers, strict=True)
            ]
            images = [image.crop(box) for image, box in zip(images, boxes, strict=True)]
        images = [image.resize((spec.width, spec.height), spec.resample) for image in images]
        arrays = [(np.asarray(image, dtype=np.float32) / 255 - mean) / std for image in images]
        batch["pixel_values"] = [torch.from_numpy(array).permute(2, 0, 1) for array in arrays]
        return batch

    return rows.cast_column("image", datasets.Image()).with_transform(transform)


def collate(rows):
    labels = torch.tensor([row["label"] for row in rows])
    return {"pixel_values": torch.stack([row["pixel_values"] for row in rows]), "labels": labels}


def reference_loader(rows: Dataset) -> DataLoader:
    return DataLoader(rows, batch_size=BATCH, shuffle=True, num_workers=WORKERS, collate_fn=collate)


def exhaust(batches):
    for _ in batches:
        pass


def compare(rows: Dataset, spec: ImageSpec, repeats: int) -> dict:
    """Images a second of the reference, of ours normalised on the CPU, and of ours as bytes."""
    numbered = select_image_and_label(rows, ("image", "label")).add_column("row", np.arange(len(rows)))
    train_spec = training_image_spec(spec, numbered, "resized")
    images = ImageDataset(numbered, train_spec)
    by_row = reference_rows(rows, train_spec)
    epochs = itertools.count()

    def batches():
        epoch = next(epochs)
        ids = epoch_batches(len(images), BATCH, 0, epoch)
        numbers = ([epoch * EPOCH_STRIDE + number for number in batch] for batch in ids)
        return (batch["images"] for batch in data_loader(images, numbers, WORKERS))

    contenders = {
        "reference": lambda: exhaust(reference_loader(by_row)),
        "hf_vit": lambda: exhaust(normalize(batch, spec) for batch in batches()),
        "hf_vit_bytes": lambda: exhaust(batches()),
    }
    seconds = time_in_turns(contenders, repeats)
    return {
        **{name: round(len(rows) / statistics.median(each), 1) for name, each in seconds.items()},
        "ratio": median_ratio(seconds["reference"], seconds["hf_vit"]),
        "ratio_of_bytes": median_ratio(seconds["reference"], seconds["hf_vit_bytes"]),
    }


def measure(repeats: int) -> dict:
    kinds, cache_bytes = [], image_dataset.CACHE_BYTES
    with tempfile.TemporaryDirectory() as folder:
        for name, rows, side in (
            ("photos of 4000x3000, JPEG", photos(Path(folder), 4000, 3000, 2 * BATCH), 224),
            ("photos of 500x375, JPEG", photos(Path(folder), 500, 375, 1024), 224),
            ("the embedded 10,000 of 28x28, kept in memory", load_splits("fashion-mnist-mini")["train"], 28),
        ):
            image_dataset.CACHE_BYTES = 2**40 if side == 28 else 0  # photos as if they were too many to keep
            kinds.append({"data": name, **compare(rows, square_spec(side), repeats)})
            print(json.dumps(kinds[-1]), flush=True)
    image_dataset.CACHE_BYTES = cache_bytes
    return {"kinds": kinds, "workers": WORKERS}


if __name__ == "__main__":
    run_benchmark("loader", measure, __doc__)

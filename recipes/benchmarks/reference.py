"""The usual training loop, which hf_vit is compared with: what people copy from the examples of transformers.

A native ViT with its default initial weights, PIL transforms of each sample through `with_transform`, AdamW, a linear
schedule, batches of 64.
"""

import time

import numpy as np
import torch
from benchmarks.measuring import BATCH, DEVICE
from datasets import Dataset, Image
from torch.utils.data import DataLoader
from transformers import get_scheduler

from hf_vit.data import crops
from hf_vit.data.image_spec import ImageSpec


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

    return rows.cast_column("image", Image()).with_transform(transform)


def collate(rows):
    labels = torch.tensor([row["label"] for row in rows])
    return {"pixel_values": torch.stack([row["pixel_values"] for row in rows]), "labels": labels}


def reference_loader(rows: Dataset, workers: int, shuffle: bool = True) -> DataLoader:
    return DataLoader(rows, batch_size=BATCH, shuffle=shuffle, num_workers=workers, collate_fn=collate)


def reference_loop(model, train_rows, test_rows, spec, learning_rate: float, seed: int, epochs: int) -> dict:
    """Train as the examples do: the seconds of all epochs, without evaluation, and the accuracy of the last weights."""
    torch.manual_seed(seed)
    model.to(DEVICE)
    loader = reference_loader(reference_rows(train_rows, spec), workers=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = get_scheduler("linear", optimizer, 0, epochs * len(loader))
    model.train()
    began = time.perf_counter()
    for _ in range(epochs):
        for batch in loader:
            batch = {key: value.to(DEVICE) for key, value in batch.items()}
            model(**batch).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    seconds = time.perf_counter() - began
    model.eval()
    right = 0
    with torch.no_grad():
        for batch in reference_loader(reference_rows(test_rows, spec), workers=0, shuffle=False):
            predictions = model(batch["pixel_values"].to(DEVICE)).logits.argmax(1).cpu()
            right += (predictions == batch["labels"]).sum().item()
    return {"seconds": seconds, "accuracy": right / len(test_rows), "epochs": epochs}

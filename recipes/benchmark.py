"""How fast images come from a data set on this machine: our loader beside rows of the `Image` feature, as most loops read them.

python recipes/benchmark.py [--output_file model_cards/benchmark.json]

Each kind of data is read by both in turns (A B A B ...), by as many worker processes, to uint8 batches of the same size;
the medians and their ratio are printed. The photos are made here: smooth noise, as JPEG files of a photo's size.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path


# This folder holds evaluate.py, which would hide the library of that name.
sys.path = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

import datasets
import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features
from PIL import Image
from torch.utils.data import DataLoader

from hf_vit import data, sharing


BATCH, WORKERS = 64, 2
BICUBIC = int(Image.Resampling.BICUBIC)


def photos(folder: Path, width: int, height: int, count: int) -> Dataset:
    """`count` rows of JPEG files: smooth noise with grain, two classes."""
    rng = np.random.default_rng(0)
    files = []
    for index in range(min(count, 64)):  # more would not be read otherwise than these again
        coarse = Image.fromarray(rng.integers(0, 256, (height // 25, width // 25, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), BICUBIC), dtype=np.float32)
        grain = rng.normal(0, 6, (height, width, 1)).astype(np.float32)
        files.append(str(folder / f"{width}-{index}.jpg"))
        Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(files[-1], quality=90)
    rows = {"image": [files[index % len(files)] for index in range(count)], "label": [0, 1] * (count // 2)}
    return Dataset.from_dict(rows, Features(image=datasets.Image(), label=ClassLabel(names=["a", "b"])))


class Rows(torch.utils.data.Dataset):
    """Rows of the `Image` feature, each decoded, converted and resized by itself."""

    def __init__(self, rows: Dataset, form: data.ImageForm):
        self.rows, self.form = rows, form

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        image = row["image"].convert("RGB").resize((self.form.width, self.form.height), self.form.resample)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), row["label"]


def through_rows(rows: Dataset, form: data.ImageForm) -> float:
    """Images a second."""
    began, seen = time.perf_counter(), 0
    for images, _ in DataLoader(Rows(rows, form), batch_size=BATCH, shuffle=True, num_workers=WORKERS):
        seen += len(images)
    return seen / (time.perf_counter() - began)


def through_ours(images: data.Images, epoch: int) -> float:
    """Images a second."""
    order = list(data.epoch_batches(len(images), BATCH, 0, epoch))
    began, seen = time.perf_counter(), 0
    for batch in data.loader(images, order, WORKERS):
        seen += len(batch["images"])
    return seen / (time.perf_counter() - began)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output_file", help="JSON file for the figures")
    args = parser.parse_args()
    datasets.disable_progress_bars()
    form = data.ImageForm(224, 224, 3, int(Image.Resampling.BILINEAR), (0.5,) * 3, (0.5,) * 3)
    small = data.ImageForm(28, 28, 3, form.resample, form.mean, form.std)
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        embedded = data.load("fashion-mnist-mini")["train"]
        kinds = [
            ("photos of 4000x3000, JPEG", photos(Path(folder), 4000, 3000, 64), form, False),
            ("photos of 500x375, JPEG", photos(Path(folder), 500, 375, 1024), form, False),
            ("the embedded 10,000 of 28x28, kept in memory", embedded, small, True),
        ]
        for name, rows, wanted, cached in kinds:
            data.CACHE_BYTES = 2**40 if cached else 0  # photos as if they were too many to keep
            numbered = data.rename(rows, ("image", "label")).add_column("row", np.arange(len(rows)))
            began = time.perf_counter()
            images = data.Images(numbered, dataclasses.replace(wanted, draft=True))
            once = time.perf_counter() - began
            figures = [(through_rows(rows, wanted), through_ours(images, turn)) for turn in range(args.repeats + 1)][
                1:
            ]
            theirs, ours = (statistics.median(column) for column in zip(*figures, strict=True))
            measured.append(
                {
                    "data": name,
                    "rows": round(theirs, 1),
                    "ours": round(ours, 1),
                    "seconds_to_fill_memory": round(once, 1) if cached else None,
                    "ratio": round(ours / theirs, 2),
                }
            )
            print(f"{name}: {theirs:,.0f} images/s through rows, {ours:,.0f} through ours, ratio {ours / theirs:.1f}")
    results = {
        "loader": measured,
        "workers": WORKERS,
        "repeats": args.repeats,
        **sharing.circumstances("cuda" if torch.cuda.is_available() else "cpu", 1, "no"),
    }
    if args.output_file:
        Path(args.output_file).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

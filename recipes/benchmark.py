"""What reading images, checkpoints and long streams cost on this machine.

python recipes/benchmark.py [--output_file model_cards/benchmark.json]

Images: our loader beside rows of the `Image` feature, as most loops read them. Each kind of data is read by both in turns
(A B A B ...), by as many worker processes, to uint8 batches of the same size; the medians and their ratio are printed. The
photos are made here: smooth noise, as JPEG files of a photo's size. Checkpoints: one of the tiny preset beside 100 of its
training steps, in turns. Streams: the peak memory of a run of one epoch over some shards and over ten times as many.
"""

import argparse
import contextlib
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
import psutil
import torch
from accelerate import Accelerator
from datasets import ClassLabel, Dataset, Features
from PIL import Image
from torch.utils.data import DataLoader

from hf_vit import HFViTConfig, HFViTForImageClassification, data, resume, sharing, training


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


def checkpoints(repeats: int) -> dict:
    """Seconds of a training step of the tiny preset and of a checkpoint of it."""
    accelerator = Accelerator(
        mixed_precision=training.pick_precision("auto", "cuda" if torch.cuda.is_available() else "cpu")
    )
    model = HFViTForImageClassification(HFViTConfig.from_preset("tiny-patch16-224", num_labels=1000))
    optimizers = training.build_optimizers(model, "adamw", 1e-3, 0.05, (0.9, 0.999))
    model, *optimizers = accelerator.prepare(model, *optimizers)
    pixel_values = torch.randn(BATCH, 3, 224, 224, device=accelerator.device)
    labels = torch.randint(0, 1000, (BATCH,), device=accelerator.device)

    def train():
        accelerator.backward(training.classification_loss(model(pixel_values).logits, labels))
        training.clip_gradients(accelerator, model, 1.0).item()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def seconds_of(what) -> float:
        began = time.perf_counter()
        what()
        return time.perf_counter() - began

    with tempfile.TemporaryDirectory(dir=".") as folder:  # on this disk, and not in memory
        save = lambda: resume.save_checkpoint(Path(folder), resume.collect(model, optimizers), {"step": 1}, keep=2)
        turns = [(seconds_of(train), seconds_of(save)) for _ in range(repeats + 1)][1:]
        size = sum(file.stat().st_size for file in Path(folder).rglob("*.*") if file.is_file())
    step, checkpoint = (statistics.median(column) for column in zip(*turns, strict=True))
    return {
        "step_seconds": round(step, 3),
        "checkpoint_seconds": round(checkpoint, 3),
        "checkpoint_megabytes": round(size / 1e6, 1),
        "cost_every_100_steps": round(checkpoint / (100 * step), 5),
    }


def stream_memory(folder: Path, shards: int) -> float:
    """Peak memory, in MB, of a run of one epoch over `shards` Parquet files of 128 photos each."""
    place = folder / f"{shards}-shards"
    place.mkdir()
    rows = photos(folder, 500, 375, 128).cast_column("image", datasets.Image(decode=False))
    held = [
        {"image": {"bytes": Path(row["image"]["path"]).read_bytes(), "path": None}, "label": row["label"]}
        for row in rows
    ]
    rows = Dataset.from_list(held, Features(image=datasets.Image(), label=ClassLabel(names=["a", "b"])))
    for number in range(shards):
        rows.to_parquet(place / f"train-{number}.parquet")
    rows.select(range(16)).to_parquet(place / "validation.parquet")
    fields = (
        "image_size=64,patch_size=16,hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64"
    )
    flags = dict(
        dataset_name=place, output_dir=place / "run", preset="tiny-patch16-224", config_overrides=fields, streaming="true",
        shuffle_buffer=256, max_train_steps=shards * 128 // BATCH, per_device_train_batch_size=BATCH, checkpointing_steps=10,
    )  # fmt: skip
    train = Path(__file__).resolve().parent / "train.py"
    with open(place / "log", "w") as log:
        run = psutil.Popen(
            [sys.executable, str(train), *(f"--{name}={value}" for name, value in flags.items())],
            stdout=log,
            stderr=log,
        )
        peak = 0
        while run.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                peak = max(peak, run.memory_info().rss)
            time.sleep(0.02)
    if run.returncode != 0:
        raise RuntimeError((place / "log").read_text())
    return peak / 1e6


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
        checkpoint = checkpoints(args.repeats)
        print(f"checkpoint: {checkpoint}")
        some, many = (stream_memory(Path(folder), shards) for shards in (8, 80))
        stream = {"images": 8 * 128, "megabytes": round(some, 1), "megabytes_of_ten_times_as_many": round(many, 1)}
        print(f"stream: {stream}")
    results = {
        "checkpoint": checkpoint,
        "stream": stream,
        "loader": measured,
        "workers": WORKERS,
        "repeats": args.repeats,
        **sharing.circumstances("cuda" if torch.cuda.is_available() else "cpu", 1, "no"),
    }
    if args.output_file:
        Path(args.output_file).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

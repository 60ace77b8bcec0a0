"""Make a data set of several labels an image: pairs of the embedded Fashion-MNIST images side by
side, 28x56, with the labels of both.

    python recipes/data/make_fashion_pairs.py fashion-pairs
    python recipes/data/make_fashion_pairs.py ~/data/fashion-pairs

Each image occurs in two pairs, once at the left and once at the right. It writes a Parquet file
for each split: pairs of training images, of which one in ten is for validation, and pairs of test
images. The column `labels` is a list of one or two of the ten classes.
"""

import argparse
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, Image, List
from PIL import Image as PILImage

from hf_vit.data.sources import load_splits
from hf_vit.system.errors import run_script


SEED = 0


def make_pairs(rows: Dataset, rng: np.random.Generator) -> Dataset:
    """As many pairs as there are images: each with the next one of a random order."""
    order = rng.permutation(len(rows))
    images, labels = rows.cast_column("image", Image())["image"][:], rows["label"][:]
    pairs = {"image": [], "labels": []}
    for left, right in zip(order.tolist(), np.roll(order, -1).tolist(), strict=True):
        pairs["image"].append(PILImage.fromarray(np.hstack([images[left], images[right]])))
        pairs["labels"].append(sorted({labels[left], labels[right]}))
    return Dataset.from_dict(pairs, Features(image=Image(), labels=List(rows.features["label"])))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to make")
    folder, splits, rng = parser.parse_args().folder, load_splits("fashion-mnist-mini"), np.random.default_rng(SEED)
    folder.mkdir(parents=True)
    train = splits["train"]  # no image is in both of its parts
    parts = {"train": train.skip(1000), "validation": train.take(1000), "test": splits["test"]}
    for name, rows in parts.items():
        make_pairs(rows, rng).to_parquet(folder / f"{name}.parquet")
        print(f"{name}: {len(rows):,} pairs")


if __name__ == "__main__":
    run_script(main)

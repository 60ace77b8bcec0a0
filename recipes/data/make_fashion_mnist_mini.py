"""Make the embedded data set: a class-balanced part of Fashion-MNIST, 10,000 training and 2,000 test images, as Parquet.

    python recipes/data/make_fashion_mnist_mini.py zalando-datasets/fashion_mnist
    python recipes/data/make_fashion_mnist_mini.py folder_of_parquet

It writes recipes/data/fashion-mnist-mini. SOURCE is anything `load_dataset` reads as the whole of Fashion-MNIST with the columns `image` and `label`: the Hub id
zalando-datasets/fashion_mnist, or a local folder of Parquet. Training images come from its training set and test images
from its test set, chosen at random with a fixed seed; the image bytes are copied as they are.
"""

import argparse
from pathlib import Path

import numpy as np
from datasets import load_dataset


IMAGES_A_CLASS = {"train": 1000, "test": 200}
SEED = 0
TARGET = Path(__file__).parent / "fashion-mnist-mini"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="the whole of Fashion-MNIST: Hub id, or folder of Parquet")
    source = parser.parse_args().source
    for split, count in IMAGES_A_CLASS.items():
        data = load_dataset(source, split=split)
        labels = np.array(data["label"])
        rng = np.random.default_rng(SEED)
        chosen = [rng.choice(np.flatnonzero(labels == label), count, replace=False) for label in np.unique(labels)]
        mini = data.select(np.sort(np.concatenate(chosen)))
        TARGET.mkdir(exist_ok=True)
        mini.to_parquet(TARGET / f"{split}-00000-of-00001.parquet")
        print(f"{split}: {len(mini)} images, {len(chosen)} classes")


if __name__ == "__main__":
    main()

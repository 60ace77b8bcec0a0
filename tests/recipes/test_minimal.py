"""Claims about the plain loop for readers, recipes/minimal.py."""

import re
import sys
from pathlib import Path

import forked
import numpy as np
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image
from transformers import AutoImageProcessor

from hf_vit import HFViTForImageClassification


MINIMAL = Path(__file__).parents[2] / "recipes" / "minimal.py"
COLOURS = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200)}


def test_the_plain_loop_learns_evaluates_and_saves_what_loads(tmp_path):
    rng, names = np.random.default_rng(0), list(COLOURS)
    features = Features({"picture": ImageFeature(), "kind": ClassLabel(names=names)})
    noisy = lambda name: Image.fromarray((COLOURS[name] + rng.integers(-30, 30, (28, 28, 3))).astype(np.uint8))
    for split, count in (("train", 60), ("test", 12)):
        rows = {"picture": [noisy(names[i % 3]) for i in range(count)], "kind": [i % 3 for i in range(count)]}
        Dataset.from_dict(rows, features).to_parquet(tmp_path / "data" / f"{split}.parquet")
    flags = ["--dataset_name", "data", "--image_column", "picture", "--label_column", "kind"]
    command = [sys.executable, "-W", "ignore", MINIMAL, *flags, "--batch_size", "12", "--output_dir", "model"]
    done = forked.run(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"accuracy ([\d.]+)%", done.stdout)[-1] == "100.00"
    model, processor = (
        kind.from_pretrained(tmp_path / "model") for kind in (HFViTForImageClassification, AutoImageProcessor)
    )
    logits = model(**processor([noisy(name) for name in names], return_tensors="pt")).logits
    assert [model.config.id2label[place] for place in logits.argmax(1).tolist()] == names

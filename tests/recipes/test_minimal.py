"""Claims about the plain loop for readers, recipes/minimal.py."""

import re

import numpy as np
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image
from runs import recipe
from transformers import AutoImageProcessor

from hf_vit import HFViTForImageClassification


COLOURS = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200)}


def test_the_plain_loop_learns_evaluates_and_saves_what_loads(tmp_path):
    rng, names = np.random.default_rng(0), list(COLOURS)
    features = Features({"picture": ImageFeature(), "kind": ClassLabel(names=names)})
    noisy = lambda name: Image.fromarray((COLOURS[name] + rng.integers(-30, 30, (28, 28, 3))).astype(np.uint8))
    for split, count in (("train", 20), ("test", 4)):
        rows = {"picture": list(map(noisy, names * count)), "kind": names * count}
        Dataset.from_dict(rows, features).to_parquet(tmp_path / "data" / f"{split}.parquet")
    flags = "--dataset_name data --image_column picture --label_column kind --batch_size 12 --output_dir model"
    printed = recipe("minimal.py", flags, cwd=tmp_path)
    assert re.findall(r"accuracy ([\d.]+)%", printed)[-1] == "100.00"
    model = HFViTForImageClassification.from_pretrained(tmp_path / "model")
    processor = AutoImageProcessor.from_pretrained(tmp_path / "model")
    logits = model(**processor(list(map(noisy, names)), return_tensors="pt")).logits
    assert [model.config.id2label[place] for place in logits.argmax(1).tolist()] == names

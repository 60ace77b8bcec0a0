"""Each preset of recipes/configs trains: three real steps by the real command, on a small stand-in where its data are on the Hub."""

import json
import sys
from pathlib import Path

import forked
import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as PILImage
from transformers import ViTConfig, ViTImageProcessorPil, ViTModel

from hf_vit.training.arguments import TrainArguments, parse_args
from hf_vit.training.pretrain_arguments import PretrainArguments


HOUSE = Path(__file__).parents[2]
CONFIGS = sorted((HOUSE / "recipes" / "configs").glob("*.yaml"))
PRETRAINED = [f"runs/{path.stem}/model" for path in CONFIGS if path.stem.startswith("pretrain-")]
# What the data of each preset look like: columns of images and labels, PIL mode, side, classes, splits.
FORMS = {
    "ylecun/mnist": ("image", "label", "L", 28, 10, ("train", "test")),
    "zalando-datasets/fashion_mnist": ("image", "label", "L", 28, 10, ("train", "test")),
    "uoft-cs/cifar10": ("img", "label", "RGB", 32, 10, ("train", "test")),
    "ILSVRC/imagenet-1k": ("image", "label", "RGB", 250, 1000, ("train", "validation", "test")),
    "data/pizza_steak_sushi": ("image", "label", "RGB", 250, 3, ("train", "test")),
}


def stand_in(name, folder):
    """A data set of the same form on disk."""
    if name == "fashion-mnist-mini":
        return name
    images, labels, mode, side, classes, splits = FORMS[name]
    rng, count = np.random.default_rng(0), 12
    features = Features({images: Image(), labels: ClassLabel(names=[f"class {index}" for index in range(classes)])})
    folder.mkdir()
    for split in splits:
        pixels = rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
        columns = {images: [PILImage.fromarray(one).convert(mode) for one in pixels]}
        columns[labels] = [index % classes for index in range(count)]
        Dataset.from_dict(columns, features).to_parquet(folder / f"{split}.parquet")
    return str(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model of the same form as google/vit-base-patch16-224-in21k, a few thousand weights large."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=224, patch_size=32
    )
    ViTModel(config, add_pooling_layer=True).save_pretrained(folder)
    ViTImageProcessorPil().save_pretrained(folder)
    return folder


ALIKE = ("imagenet", "food3", "mnist")  # presets that take long, or are of the kind of another that runs by default


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * path.stem.startswith(ALIKE)) for path in CONFIGS],
)
def test_a_preset_trains(path, checkpoint, tmp_path):
    script = "pretrain" if path.stem.startswith("pretrain-") else "train"
    kind = PretrainArguments if script == "pretrain" else TrainArguments
    args = parse_args(["--config", str(path)], kind=kind)
    flags = [
        "--config", path, "--dataset_name", stand_in(args.dataset_name, tmp_path / "data"), "--output_dir", tmp_path / "run",
        "--max_train_steps", 3, "--per_device_train_batch_size", 2, "--log_steps", 1, "--eval_epochs", 1000,
    ]  # fmt: skip
    if args.model_name_or_path is not None:
        assert args.model_name_or_path in ("google/vit-base-patch16-224-in21k", *PRETRAINED)
        flags += ["--model_name_or_path", checkpoint]
        if args.config_overrides:
            flags += ["--config_overrides", args.config_overrides]
    line = [sys.executable, "-W", "ignore", "-c", forked.THEN_THE_SCRIPT, HOUSE / "recipes" / f"{script}.py"]
    done = forked.run([*line, *flags], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["steps"] == 3
    assert np.isfinite(results["metrics"]["loss"])
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()

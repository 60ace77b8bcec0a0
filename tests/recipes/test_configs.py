"""Each preset of recipes/configs trains: three real steps by the real command, on a small stand-in where its data are on the Hub."""

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image
from image_data import picture
from runs import HOUSE, UNDRAWN, logged, recipe, results_of, save_with_processor
from transformers import ViTConfig, ViTModel

from hf_vit.training.arguments import TrainArguments, parse_args
from hf_vit.training.pretrain_arguments import PretrainArguments


CONFIGS = sorted((HOUSE / "recipes" / "configs").glob("*.yaml"))
PRETRAINED = [f"runs/{path.stem}/model" for path in CONFIGS if path.stem.startswith("pretrain-")]
# What the data of each preset look like: columns of images and labels, classes, splits.
FORMS = {
    "ylecun/mnist": ("image", "label", 10, ("train", "test")),
    "zalando-datasets/fashion_mnist": ("image", "label", 10, ("train", "test")),
    "uoft-cs/cifar10": ("img", "label", 10, ("train", "test")),
    "ILSVRC/imagenet-1k": ("image", "label", 1000, ("train", "validation", "test")),
    "data/pizza_steak_sushi": ("image", "label", 3, ("train", "test")),
}


def stand_in(name, folder):
    """A data set of the same form on disk."""
    if name == "fashion-mnist-mini":
        return name
    images, labels, classes, splits = FORMS[name]
    features = Features({images: Image(), labels: ClassLabel(num_classes=classes)})
    columns = {images: [picture(seed, (40, 40)) for seed in range(12)], labels: [seed % classes for seed in range(12)]}
    for split in splits:
        Dataset.from_dict(columns, features).to_parquet(folder / f"{split}.parquet")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model of the same form as google/vit-base-patch16-224-in21k, a few thousand weights large."""
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, patch_size=32)
    return save_with_processor(ViTModel(ViTConfig(**sizes)), tmp_path_factory.mktemp("checkpoint"))


ALIKE = ("imagenet", "food3", "mnist")  # presets that take long, or are of the kind of another that runs by default


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * path.stem.startswith(ALIKE)) for path in CONFIGS],
)
def test_a_preset_trains(path, checkpoint, tmp_path):
    script = "pretrain" if path.stem.startswith("pretrain-") else "train"
    kind = PretrainArguments if script == "pretrain" else TrainArguments
    args = parse_args(["--config", str(path)], kind=kind)
    flags = f"--config {path} --dataset_name {stand_in(args.dataset_name, tmp_path / 'data')} --output_dir run --max_train_steps 3 "
    flags += "--per_device_train_batch_size 2 --log_steps 1 --eval_epochs 1000"
    if args.model_name_or_path is not None:
        assert args.model_name_or_path in ("google/vit-base-patch16-224-in21k", *PRETRAINED)
        flags += f" --model_name_or_path {checkpoint}"
        if args.config_overrides:
            flags += f" --config_overrides {args.config_overrides}"
    recipe(f"{script}.py", flags, cwd=tmp_path, launcher=UNDRAWN)
    run, losses = tmp_path / "run", logged(tmp_path / "run", "loss")
    assert list(losses) == [1, 2, 3]
    assert np.isfinite([*losses.values(), results_of(run)["metrics"]["loss"]]).all()
    assert (run / "model" / "model.safetensors").exists()

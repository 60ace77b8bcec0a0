"""Runs to publish, the folders that are pushed of them, and a Hub on loopback to push them to."""

import shutil
import sys

import forked
import pytest
import torch
from loopback_hub import Hub
from publishing import HOUSE, content, publish, talking_to
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor

from hf_vit import HFViTConfig, HFViTForImageClassification
from hf_vit.hub.package import build_package


@pytest.fixture(scope="session")
def runs(tmp_path_factory, randomize, demo_run):
    """native: of recipes/train.py; code: with a model that no native architecture expresses; unlabelled: of recipes/pretrain.py.

    Whatever is done with them, their folders stay as they are.
    """
    home = tmp_path_factory.mktemp("runs")
    shutil.copytree(demo_run, home / "native")
    shutil.copytree(demo_run, home / "code")
    torch.manual_seed(0)
    config = HFViTConfig.from_pretrained(demo_run / "model", qk_norm=True)
    model = randomize(HFViTForImageClassification(config))
    model.save_pretrained(home / "code" / "model")
    samples = load_file(demo_run / "samples.safetensors")
    inputs = AutoImageProcessor.from_pretrained(demo_run / "model")(list(samples["images"]), return_tensors="pt")
    with torch.no_grad():
        samples["logits"] = model(**inputs).logits
    save_file(samples, home / "code" / "samples.safetensors")
    tiny = "image_size=28,patch_size=7,hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=64"
    flags = ["--dataset_name", "fashion-mnist-mini", "--preset", "tiny-patch16-224", "--config_overrides", tiny]
    flags += ["--output_dir", home / "unlabelled", "--max_train_steps=2"]
    forked.run([sys.executable, "-W", "ignore", HOUSE / "recipes" / "pretrain.py", *flags], check=True)
    before = content(home)
    yield {name: home / name for name in ("native", "code", "unlabelled")}
    assert content(home) == before


@pytest.fixture(scope="session")
def assembled(runs, tmp_path_factory):
    """The folders to push of the two classifiers, by their names."""
    home = tmp_path_factory.mktemp("assembled")
    for name in ("native", "code"):
        build_package(runs[name], home / name, publish.RECIPES, "alice/model")
    return {name: home / name for name in ("native", "code")}


@pytest.fixture
def folder(assembled, tmp_path):
    """A folder to push."""
    return shutil.copytree(assembled["native"], tmp_path / "repository")


@pytest.fixture
def run(demo_run, tmp_path):
    """A run to change."""
    return shutil.copytree(demo_run, tmp_path / "run")


@pytest.fixture
def hub(tmp_path):
    """A Hub that this process talks to; `waits` are the seconds that the client would have waited."""
    with Hub() as hub, talking_to(hub.url, tmp_path / "home") as hub.waits:
        yield hub

"""Runs to publish, the folders that are pushed of them, and a Hub on loopback to push them to."""

import shutil

import pytest
from loopback_hub import Hub
from publishing import content, publish, talking_to
from runs import TINY, train

from hf_vit.hub.package import build_package
from hf_vit.training.classification import Classification
from hf_vit.training.pretrain_arguments import PretrainArguments
from hf_vit.training.pretraining import PreTraining


@pytest.fixture(scope="session")
def runs(tmp_path_factory, demo_run):
    """native: of recipes/train.py; code: of a model that no native architecture expresses; unlabelled: of pre-training.

    Whatever is done with them, their folders stay as they are.
    """
    home = tmp_path_factory.mktemp("runs")
    shutil.copytree(demo_run, home / "native")
    code = f"{TINY},image_size=28,qk_norm=true"
    how = dict(max_train_steps=2, per_device_train_batch_size=32)
    train("fashion-mnist-mini", home / "code", draw=Classification.draw, config_overrides=code, shots=50, **how)
    train("fashion-mnist-mini", home / "unlabelled", PreTraining, PretrainArguments, PreTraining.draw, **how)
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

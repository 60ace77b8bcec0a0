"""What a repository that nobody should trust may not do to who opens it."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageClassification, ViTForImageClassification

from hf_vit import HFViTConfig, HFViTForImageClassification, HFViTModel
from hf_vit.evaluation.classifiers import load_classifier
from hf_vit.hub.verification import CHECKSUMMED_FILES, verify
from hf_vit.system.files import checksum


class Evil:
    """What pickle makes of it: a file called `opened` in the working directory."""

    def __reduce__(self):
        return open, ("opened", "w")


@pytest.fixture
def repo(tiny_model, tmp_path, monkeypatch):
    """A good repository, and a working directory to look for traces in."""
    (tmp_path / "desk").mkdir()
    monkeypatch.chdir(tmp_path / "desk")
    tiny_model().save_pretrained(tmp_path / "repo")
    return tmp_path / "repo"


def change_config(repo, **fields):
    config = json.loads((repo / "config.json").read_text())
    (repo / "config.json").write_text(json.dumps({**config, **fields}))


LOADERS = (HFViTForImageClassification, HFViTModel, AutoModelForImageClassification)


@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.__name__)
@pytest.mark.parametrize("form", ["pickle", "torch.save", "old torch.save"])
def test_pickled_weights_are_refused_and_not_run(loader, form, repo):
    """weights that are a pickle with code in it | refused; the code is not run"""
    (repo / "model.safetensors").unlink()
    content = {"vit.layernorm.weight": Evil()}
    if form == "pickle":
        (repo / "pytorch_model.bin").write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, repo / "pytorch_model.bin", _use_new_zipfile_serialization=form == "torch.save")
    with pytest.raises(ValueError, match="cannot be read"):
        loader.from_pretrained(repo)
    assert os.listdir() == []


def test_code_in_a_repository_of_our_type_is_not_run(repo, pixels):
    """a repository of our type with other code in it | the package's own code is run; the other never, unless `trust_remote_code` asks for it"""
    images = pixels()
    expected = HFViTForImageClassification.from_pretrained(repo)(images).logits
    for file in repo.glob("*.py"):
        file.write_text("open('opened', 'w')\n")
    model = AutoModelForImageClassification.from_pretrained(repo)
    assert type(model) is HFViTForImageClassification
    assert torch.equal(model(images).logits, expected)
    assert type(AutoConfig.from_pretrained(repo)) is HFViTConfig
    assert os.listdir() == []


def test_code_in_a_repository_of_a_native_type_is_not_run(repo, tiny_model):
    """a native model with code in it that its config names | transformers' own code is run"""
    tiny_model().to_transformers().save_pretrained(repo.parent / "native")
    (repo.parent / "native" / "evil.py").write_text("open('opened', 'w')\n")
    change_config(repo.parent / "native", auto_map={"AutoModelForImageClassification": "evil.Evil"})
    assert type(load_classifier(str(repo.parent / "native"))) is ViTForImageClassification
    assert os.listdir() == []


def test_code_of_an_unknown_type_is_refused_without_trust(repo):
    """a repository of another type with code in it | refused, unless `trust_remote_code` asks for it"""
    for file in repo.glob("*.py"):
        file.write_text("open('opened', 'w')\n")
    change_config(repo, model_type="evil")
    for load in (AutoConfig.from_pretrained, AutoModelForImageClassification.from_pretrained):
        with pytest.raises(ValueError, match="trust_remote_code"):
            load(repo)
    with pytest.raises(ValueError, match="evil"):
        HFViTForImageClassification.from_pretrained(repo)
    assert os.listdir() == []


@pytest.mark.parametrize("place", ["../outside.safetensors", "ABSOLUTE"])
def test_an_index_that_points_outside_is_refused(place, repo):
    """an index of weights that names files outside of the repository | refused"""
    outside = repo.parent / "outside.safetensors"
    (repo / "model.safetensors").rename(outside)
    place = str(outside) if place == "ABSOLUTE" else place
    names = load_file(outside)
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, place)}
    (repo / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="outside"):
        HFViTForImageClassification.from_pretrained(repo)


HUGE = [
    dict(num_hidden_layers=10**7), dict(hidden_size=10**9), dict(hidden_size=2**15, intermediate_size=2**17), dict(intermediate_size=10**12),
    dict(num_labels=10**10, id2label=None, label2id=None), dict(image_size=[10**7, 10**7]),
    dict(num_channels=10**8), dict(num_register_tokens=10**9), dict(representation_size=10**10), dict(patch_size=10**5, image_size=10**5),
]  # fmt: skip


LOAD_EACH = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
from hf_vit import HFViTForImageClassification
for folder in sys.argv[1:]:
    try:
        HFViTForImageClassification.from_pretrained(folder)
    except Exception as error:  # of a field, or of two that do not fit each other
        print(str(error).replace("\\n", " "))
"""


def test_a_huge_config_is_refused_before_it_fills_the_memory(repo):
    """a config.json that asks for a model too large for any memory | refused before it is built"""
    folders = []
    for number, fields in enumerate(HUGE):
        folders.append(shutil.copytree(repo, repo.parent / str(number)))
        change_config(folders[-1], **fields)
    command = [sys.executable, "-c", LOAD_EACH, *folders]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    refused = result.stdout.splitlines()
    assert len(refused) == len(HUGE), result.stdout
    for line, fields in zip(refused, HUGE, strict=True):
        assert any(name in line for name in fields) or "do not belong together" in line


@pytest.mark.parametrize("kind", ["vit", "clip_vision_model", "dinov2"])
@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "image_size", "num_labels"])
def test_a_huge_config_of_another_family_is_refused(kind, field, repo):
    (repo / "config.json").write_text(json.dumps({"model_type": kind, field: 10**9}))
    with pytest.raises((ValueError, StrictDataclassError), match=field.replace("_", ".")):
        HFViTForImageClassification.from_pretrained(repo)


def test_verify_runs_no_code_of_a_repository(repo):
    model = HFViTForImageClassification.from_pretrained(repo)
    probe = torch.randn(1, 3, 16, 16)
    logits = model(probe).logits.detach()
    (repo / "preprocessor_config.json").write_text("{}")
    sums = {name: checksum(repo / name) for name in CHECKSUMMED_FILES}
    save_file(
        {"pixel_values": probe, "logits": logits}, repo / "probes.safetensors", metadata={"sha256": json.dumps(sums)}
    )
    for file in repo.glob("*.py"):
        file.write_text("open('opened', 'w')\n")
    assert verify(repo) <= 1e-6
    assert os.listdir() == []
    assert not Path("opened").exists()

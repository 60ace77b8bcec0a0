"""What a repository that nobody should trust may not do to who opens it."""

import json
import os
import pickle
import shutil
import sys

import forked
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from runs import read_json
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification, ViTForImageClassification

from hf_vit import HFViTForImageClassification, HFViTModel
from hf_vit.evaluation.classifiers import load_classifier
from hf_vit.hub.package import load_merged_model
from hf_vit.hub.verification import verify, write_probes


class Evil:
    """What pickle makes of it: a file called `opened` in the working directory."""

    def __reduce__(self):
        return open, ("opened", "w")


@pytest.fixture
def repo(tiny_model, tmp_path, monkeypatch):
    """A good repository; whatever is loaded, no code of a repository runs, and nobody is asked whether to run it."""
    (tmp_path / "desk").mkdir()
    monkeypatch.chdir(tmp_path / "desk")
    monkeypatch.setattr("builtins.input", lambda text: pytest.fail(text))
    tiny_model().save_pretrained(tmp_path / "repo")
    (tmp_path / "repo" / "preprocessor_config.json").write_text("{}")
    yield tmp_path / "repo"
    assert os.listdir() == []


def change_config(repo, **fields):
    (repo / "config.json").write_text(json.dumps(read_json(repo / "config.json") | fields))


def make_evil(repo):
    for file in repo.glob("*.py"):
        file.write_text("open('opened', 'w')\n")


@pytest.mark.parametrize("loader", [HFViTForImageClassification, HFViTModel, AutoModelForImageClassification])
@pytest.mark.parametrize("form", ["pickle", "torch.save"])
def test_pickled_weights_are_refused_and_not_run(loader, form, repo):
    (repo / "model.safetensors").unlink()
    content = {"vit.layernorm.weight": Evil()}
    if form == "pickle":
        (repo / "pytorch_model.bin").write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, repo / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be read"):
        loader.from_pretrained(repo)


def test_of_a_repository_of_our_type_the_packages_own_code_is_run(repo, pixels):
    images = pixels()
    model = HFViTForImageClassification.from_pretrained(repo)
    write_probes(repo, images, model(images).logits.detach())
    make_evil(repo)
    found = AutoModelForImageClassification.from_pretrained(repo)
    assert type(found) is HFViTForImageClassification
    assert torch.equal(found(images).logits, model(images).logits)
    assert verify(repo) <= 1e-6


def test_code_in_a_repository_of_a_native_type_is_not_run(repo, tiny_model):
    native = repo.parent / "native"
    tiny_model().to_transformers().save_pretrained(native)
    (native / "evil.py").write_text("open('opened', 'w')\n")
    change_config(native, auto_map={"AutoModelForImageClassification": "evil.Evil"})
    assert type(load_classifier(str(native))) is ViTForImageClassification


@pytest.mark.parametrize(
    "load",
    [
        HFViTForImageClassification.from_pretrained, lambda repo: load_classifier(str(repo)), load_merged_model,
    ],
)  # fmt: skip
def test_code_of_an_unknown_type_is_refused(load, repo):
    make_evil(repo)
    change_config(repo, model_type="evil")
    with pytest.raises(ValueError, match="evil"):
        load(repo)


@pytest.mark.parametrize("place", ["../outside.safetensors", "ABSOLUTE"])
def test_an_index_that_points_outside_is_refused(place, repo):
    outside = repo.parent / "outside.safetensors"
    (repo / "model.safetensors").rename(outside)
    place = str(outside) if place == "ABSOLUTE" else place
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(load_file(outside), place)}
    (repo / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="outside"):
        HFViTForImageClassification.from_pretrained(repo)


HUGE = [
    dict(num_hidden_layers=10**7), dict(hidden_size=10**9), dict(hidden_size=2**15, intermediate_size=2**17),
    dict(num_labels=10**10, id2label=None, label2id=None), dict(image_size=[10**7, 10**7]), dict(patch_size=10**5, image_size=10**5),
]  # fmt: skip
LOAD_EACH = """
import resource, sys
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + 2**32, taken + 2**32))
from hf_vit import HFViTForImageClassification
for folder in sys.argv[1:]:
    try:
        HFViTForImageClassification.from_pretrained(folder)
    except Exception as error:  # of a field, or of two that do not fit each other
        print(str(error).replace("\\n", " "))
"""


def test_a_huge_config_is_refused_before_it_fills_the_memory(repo):
    folders = [repo.parent / str(number) for number in range(len(HUGE))]
    for folder, fields in zip(folders, HUGE, strict=True):
        change_config(shutil.copytree(repo, folder), **fields)
    result = forked.run([sys.executable, "-W", "ignore", "-c", LOAD_EACH, *folders], check=True)
    for line, fields in zip(result.stdout.splitlines(), HUGE, strict=True):
        assert any(name in line for name in fields) or "do not belong together" in line


@pytest.mark.parametrize("kind", ["vit", "clip_vision_model", "dinov2"])
@pytest.mark.parametrize("field", ["num_hidden_layers", "image_size"])
def test_a_huge_config_of_another_family_is_refused(kind, field, repo):
    (repo / "config.json").write_text(json.dumps({"model_type": kind, field: 10**9}))
    with pytest.raises((ValueError, StrictDataclassError), match=field.replace("_", ".")):
        HFViTForImageClassification.from_pretrained(repo)

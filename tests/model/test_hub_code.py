"""A saved folder carries its own code: it loads on a machine that has never heard of this package."""

import ast
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.dynamic_module_utils import get_imports, get_relative_imports
from without_package import BLOCK_OUR_PACKAGE

import hf_vit


PACKAGE = Path(hf_vit.__file__).parent
HUB_FILES = sorted(path.name for path in (PACKAGE / "model").glob("*.py") if path.name != "__init__.py")
CLASSIFIER_FILES = [name for name in HUB_FILES if name != "masked_autoencoder.py"]
LOAD_AND_SAVE = """from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageClassification

images = load_file("images.safetensors")["images"]
load = AutoModelForImageClassification.from_pretrained
model = load("saved", trust_remote_code=True)
model.save_pretrained("saved-again")
again = load("saved-again", trust_remote_code=True)
assert "hf_vit" not in sys.modules
save_file({"once": model(images).logits.detach(), "twice": again(images).logits.detach()}, "logits.safetensors")
"""


def test_a_saved_folder_loads_saves_and_loads_again_without_our_package(tiny_model, pixels, tmp_path):
    model, images = tiny_model(position_embedding="sincos2d", num_register_tokens=2, layerscale_value=0.1), pixels()
    model.save_pretrained(tmp_path / "saved")
    save_file({"images": images}, tmp_path / "images.safetensors")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", BLOCK_OUR_PACKAGE + LOAD_AND_SAVE]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    for logits in load_file(tmp_path / "logits.safetensors").values():
        torch.testing.assert_close(logits, model(images).logits, rtol=0, atol=1e-6)
    for folder in ("saved", "saved-again"):
        code = {path.name: path.read_text() for path in (tmp_path / folder).glob("**/*.py")}
        assert code == {name: (PACKAGE / "model" / name).read_text() for name in CLASSIFIER_FILES}


@pytest.mark.parametrize("name", HUB_FILES)
def test_a_hub_file_needs_only_torch_transformers_and_its_flat_siblings(name):
    file, siblings = PACKAGE / "model" / name, {name.removesuffix(".py") for name in HUB_FILES}
    needed = set(get_imports(file))  # as transformers reads them, docstrings included
    assert needed <= set(sys.stdlib_module_names) | {"torch", "transformers", "huggingface_hub", "safetensors"}
    found = set(get_relative_imports(file))
    assert found <= siblings
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    assert {(node.level, node.module) for node in nodes if node.level} == {(1, sibling) for sibling in found}


def test_the_modeling_file_imports_every_other_file_of_a_classifier_itself():
    """Earlier versions of transformers copy only what is imported directly."""
    found = {f"{name}.py" for name in get_relative_imports(PACKAGE / "model" / "modeling_hf_vit.py")}
    assert found == {*CLASSIFIER_FILES} - {"modeling_hf_vit.py"}


def test_no_test_reaches_the_network():
    with socket.socket() as connection, pytest.raises(pytest.fail.Exception, match="opened a connection"):
        connection.connect(("192.0.2.1", 443))

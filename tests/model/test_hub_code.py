"""A saved folder carries its own code: it loads on a machine that has never heard of this package."""

import ast
import socket
import sys
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports, get_relative_imports

import hf_vit


PACKAGE = Path(hf_vit.__file__).parent
HUB_FILES = sorted(path.name for path in (PACKAGE / "model").glob("*.py") if path.name != "__init__.py")
CLASSIFIER_FILES = [name for name in HUB_FILES if name != "masked_autoencoder.py"]


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

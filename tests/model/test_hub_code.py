"""A saved folder carries its own code: it loads on a machine that has never heard of this package."""

import socket
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_relative_imports

import hf_vit


PACKAGE = Path(hf_vit.__file__).parent
HUB_FILES = sorted(path.name for path in (PACKAGE / "model").glob("*.py") if path.name != "__init__.py")
CLASSIFIER_FILES = [name for name in HUB_FILES if name != "masked_autoencoder.py"]


def test_the_modeling_file_imports_every_other_file_of_a_classifier_itself():
    """Earlier versions of transformers copy only what is imported directly."""
    found = {f"{name}.py" for name in get_relative_imports(PACKAGE / "model" / "modeling_hf_vit.py")}
    assert found == {*CLASSIFIER_FILES} - {"modeling_hf_vit.py"}


def test_no_test_reaches_the_network():
    with socket.socket() as connection, pytest.raises(pytest.fail.Exception, match="opened a connection"):
        connection.connect(("192.0.2.1", 443))

"""`import hf_vit` is light, and the Auto classes know its models whatever is imported first."""

import subprocess
import sys

import pytest


ASK = """
from transformers import AutoConfig, AutoModelForImageClassification

config = AutoConfig.for_model("hf_vit", hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
print(type(AutoModelForImageClassification.from_config(config)).__name__)
"""


@pytest.mark.parametrize("first", ["transformers", "hf_vit.model.configuration_hf_vit"])
def test_the_auto_classes_know_the_models_whatever_is_imported_first(first):
    code = f"import {first}\nimport hf_vit\n{ASK}"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["HFViTForImageClassification"], done.stderr


def test_the_package_imports_neither_torch_nor_transformers():
    code = "import sys, hf_vit; sys.exit(not {'torch', 'transformers'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

"""Load trained models with 8-bit weights by each quantiser that is installed, save them, and load them again.

    make upstream        (or python tests/upstream/quantizers.py)

The logits must be within 3% of those in float32, and those of the reloaded model the same.
"""

import importlib.util
import tempfile
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoImageProcessor, BitsAndBytesConfig, QuantoConfig, TorchAoConfig

from hf_vit import HFViTForImageClassification


HOUSE = Path(__file__).parents[2]


def quantizers() -> dict:
    """Names and transformers configs of 8-bit quantisers that this machine has, and whether they can be saved."""
    found = {}
    if importlib.util.find_spec("torchao"):
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

        found["torchao, int8 weights"] = TorchAoConfig(Int8WeightOnlyConfig()), True
        found["torchao, int8 weights and activations"] = TorchAoConfig(Int8DynamicActivationInt8WeightConfig()), True
    if importlib.util.find_spec("optimum") and importlib.util.find_spec("optimum.quanto"):
        found["quanto, int8 weights"] = QuantoConfig(weights="int8"), False  # transformers 5.23 does not write these
    if importlib.util.find_spec("bitsandbytes"):
        found["bitsandbytes, int8"] = BitsAndBytesConfig(load_in_8bit=True), True
    return found


@torch.no_grad()
def check(checkpoint: Path, images, config, can_be_saved: bool) -> float:
    """The distance of the quantised logits from the float ones, relative to their norm; AssertionError where it is above 3%."""
    load = HFViTForImageClassification.from_pretrained
    pixel_values = AutoImageProcessor.from_pretrained(checkpoint)(images, return_tensors="pt")["pixel_values"]
    expected = load(checkpoint)(pixel_values).logits
    quantized = load(checkpoint, quantization_config=config)
    logits = quantized(pixel_values).logits
    distance = ((logits - expected).norm() / expected.norm()).item()
    assert 0 < distance < 0.03, f"the logits are {distance:.2%} from those in float32"
    if can_be_saved:
        with tempfile.TemporaryDirectory() as folder:
            quantized.save_pretrained(folder)
            assert torch.equal(load(folder)(pixel_values).logits, logits)
    return distance


if __name__ == "__main__":
    images = load_dataset(str(HOUSE / "recipes" / "data" / "fashion-mnist-mini"), split="test[:256]")["image"]
    images = [image.convert("RGB") for image in images]
    for name, (config, can_be_saved) in quantizers().items():
        for checkpoint in (HOUSE / "model_cards" / "demo", HOUSE / "model_cards" / "fashion-mnist"):
            distance = check(checkpoint, images, config, can_be_saved)
            print(f"{name}, {checkpoint.name}: logits within {distance:.2%}{', saved and reloaded' * can_be_saved}")

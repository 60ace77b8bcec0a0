"""Load trained models with 8-bit weights by torchao, save them, and load them again.

    make upstream

The logits must be within 3% of those in float32, and those of the reloaded model the same.
"""

import tempfile
from pathlib import Path

import torch
from datasets import load_dataset
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
from transformers import AutoImageProcessor, TorchAoConfig

from hf_vit import HFViTForImageClassification


HOUSE = Path(__file__).parents[2]


KINDS = {
    "int8 weights": Int8WeightOnlyConfig(),
    "int8 weights and activations": Int8DynamicActivationInt8WeightConfig(),
}


@torch.no_grad()
def check(checkpoint: Path, images, config: TorchAoConfig) -> float:
    """The distance of the quantised logits from the float ones, relative to their norm; AssertionError where it is above 3%."""
    load = HFViTForImageClassification.from_pretrained
    pixel_values = AutoImageProcessor.from_pretrained(checkpoint)(images, return_tensors="pt")["pixel_values"]
    expected = load(checkpoint)(pixel_values).logits
    quantized = load(checkpoint, quantization_config=config)
    logits = quantized(pixel_values).logits
    distance = ((logits - expected).norm() / expected.norm()).item()
    assert 0 < distance < 0.03, f"the logits are {distance:.2%} from those in float32"
    with tempfile.TemporaryDirectory() as folder:
        quantized.save_pretrained(folder)
        assert torch.equal(load(folder)(pixel_values).logits, logits)
    return distance


if __name__ == "__main__":
    images = load_dataset(str(HOUSE / "recipes" / "data" / "fashion-mnist-mini"), split="test[:256]")["image"]
    images = [image.convert("RGB") for image in images]
    for name, kind in KINDS.items():
        for checkpoint in (HOUSE / "model_cards" / "demo", HOUSE / "model_cards" / "fashion-mnist"):
            distance = check(checkpoint, images, TorchAoConfig(kind))
            print(f"{name}, {checkpoint.name}: logits within {distance:.2%}, saved and reloaded")

"""Tiny models as a commit saved them, and what it computed with them; today's code must still read the one and say the other.

    python tests/goldens/saved_models.py COMMIT     (adds tests/goldens/saved/COMMIT)

The code that `save_pretrained` writes beside the weights is left out: whoever has hf_vit does not run it. The classifier of ba8e6ca
has a processor and a head that tells colors apart, for observed.py.
"""

import json
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
from commits import environment, extract


SAVED = Path(__file__).parent / "saved"
TINY = dict(patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
COLORS = {
    "red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200), "cyan": (40, 200, 200), "pink": (200, 40, 200),
    "yellow": (200, 200, 40),
}  # fmt: skip
CLASSES = dict(id2label=dict(enumerate(COLORS)))
# {folder: (the class that saves it, its config, the classes that read it)}
MODELS = {
    "classifier": (
        "HFViTForImageClassification",
        dict(image_size=16, pooling="mean", **CLASSES),
        ("HFViTForImageClassification", "HFViTModel"),
    ),
    "backbone": (
        "HFViTBackbone",
        dict(image_size=[8, 16], position_embedding="sincos2d", out_indices=[0, 1]),
        ("HFViTBackbone",),
    ),
    "autoencoder": (
        "HFViTForPreTraining",
        dict(
            image_size=16, num_channels=1, position_embedding="sincos2d", decoder_hidden_size=16, decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2, decoder_intermediate_size=16,
        ),
        ("HFViTForPreTraining", "HFViTModel"),
    ),
    "unusual": (
        "HFViTForImageClassification",
        dict(
            image_size=16, num_channels=1, position_embedding="rotary", gated_mlp=True, hidden_act="silu", num_register_tokens=2,
            qk_norm=True, layerscale_value=0.1, pooling="cls_mean", representation_size=8, **CLASSES,
        ),
        ("HFViTForImageClassification",),
    ),
}  # fmt: skip


def wave(*shape: int):
    """Numbers in [-1, 1], the same everywhere."""
    import torch

    return torch.from_numpy(np.sin(np.arange(np.prod(shape)) ** 2 / 100).reshape(shape).astype(np.float32))


def digest(tensor) -> list[list[float]]:
    """Four numbers an image that depend on every number of an output (B, ...), or on a scalar."""
    rows = tensor.detach().double().numpy().reshape(len(tensor) if tensor.ndim else 1, -1)
    return (rows @ np.cos(np.arange(rows.shape[1] * 4)).reshape(-1, 4)).round(9).tolist()


def outputs(folder: Path, class_name: str) -> dict:
    """What the model in a folder says of two images, by the names of its outputs."""
    import torch

    import hf_vit

    model = getattr(hf_vit, class_name).from_pretrained(folder)
    config = model.config
    height, width = (config.image_size,) * 2 if isinstance(config.image_size, int) else config.image_size
    patches = height * width // config.patch_size**2
    inputs = {"noise": wave(2, patches)} if class_name == "HFViTForPreTraining" else {}
    with torch.no_grad():
        found = model(wave(2, config.num_channels, height, width), **inputs)
    named = {name: (value,) if torch.is_tensor(value) else value for name, value in found.items()}
    return {name: [digest(value) for value in values] for name, values in named.items()}


def save(home: Path):
    """Save each model that this version of hf_vit has, with weights by their names, and what it says."""
    import torch

    import hf_vit

    for folder, (class_name, fields, readers) in MODELS.items():
        if not hasattr(hf_vit, class_name):
            continue
        model = getattr(hf_vit, class_name)(hf_vit.HFViTConfig(**{**TINY, **fields})).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                rng = np.random.default_rng(zlib.crc32(name.encode()))
                scale = 0.3 if parameter.ndim > 1 else 0.1
                value = rng.normal(float("norm" in name and name.endswith("weight")), scale, parameter.shape)
                parameter.copy_(torch.from_numpy(value))
        model.save_pretrained(home / folder)
        for code in (home / folder).glob("*.py"):
            code.unlink()
        expected = {reader: outputs(home / folder, reader) for reader in readers}
        (home / folder / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--here":
        save(Path(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as tree:
            line = [sys.executable, __file__, "--here", str(SAVED / sys.argv[1])]
            subprocess.run(line, env=environment(extract(sys.argv[1], Path(tree) / "tree")), check=True)

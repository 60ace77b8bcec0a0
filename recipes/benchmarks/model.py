"""Milliseconds of a forward pass and a training step, beside native transformers and, where
installed, timm.

    python recipes/benchmarks/model.py
    python recipes/benchmarks/model.py --repeats 3 --output_file model_cards/benchmark.json

Contenders run in turns (A B A B ...). Figures are medians of the rounds, and a ratio is the
median of the ratios of each round. It takes half an hour on two cores.
"""

import importlib
import importlib.util
import json
import statistics
from functools import partial

import torch
import yaml
from measuring import DEVICE, RECIPES, median_ratio, run_benchmark, time_in_turns
from transformers import ViTConfig, ViTForImageClassification

from hf_vit import HFViTConfig, HFViTForImageClassification
from hf_vit.training.arguments import parse_overrides


def native_vit(config: HFViTConfig) -> ViTForImageClassification:
    """transformers' ViT of the same sizes; it always has a class token."""
    names = ["image_size", "patch_size", "num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads"]
    fields = {name: getattr(config, name) for name in [*names, "intermediate_size", "num_labels"]}
    return ViTForImageClassification(ViTConfig(**fields))


def timm_vit(config: HFViTConfig):
    timm = importlib.import_module("timm.models.vision_transformer")
    return timm.VisionTransformer(
        img_size=config.image_size,
        patch_size=config.patch_size,
        in_chans=config.num_channels,
        embed_dim=config.hidden_size,
        depth=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        mlp_ratio=config.intermediate_size / config.hidden_size,
        num_classes=config.num_labels,
    )


def run_model(model, pixel_values):
    with torch.autocast("cuda", torch.bfloat16, enabled=DEVICE.type == "cuda"):
        return model(pixel_values)


@torch.no_grad()
def forward(model, pixel_values):
    run_model(model.eval(), pixel_values)


def step(model, optimizer, pixel_values, labels):
    outputs = run_model(model.train(), pixel_values)
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    torch.nn.functional.cross_entropy(logits.float(), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def compare(config: HFViTConfig, batch: int, repeats: int, times: int) -> dict:
    """What one size gives: milliseconds of each contender and ratios to each peer, for both kinds of pass."""
    models = {"hf_vit": HFViTForImageClassification(config), "transformers": native_vit(config)}
    if importlib.util.find_spec("timm") is not None:
        models["timm"] = timm_vit(config)
    pixel_values = torch.randn(batch, config.num_channels, config.image_size, config.image_size, device=DEVICE)
    labels = torch.randint(0, config.num_labels, (batch,), device=DEVICE)
    for model in models.values():
        model.to(DEVICE)
        if DEVICE.type == "cuda":
            model.compile()
    row = {}
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) for name, model in models.items()}
    passes = {
        "forward": {name: partial(forward, model, pixel_values) for name, model in models.items()},
        "step": {name: partial(step, model, optimizers[name], pixel_values, labels) for name, model in models.items()},
    }
    for kind, contenders in passes.items():
        seconds = time_in_turns(contenders, repeats, times)
        ratios = {peer: median_ratio(seconds[peer], seconds["hf_vit"]) for peer in models if peer != "hf_vit"}
        row[kind] = {
            **{f"{name}_ms": round(1e3 * statistics.median(seconds[name]), 2) for name in models},
            "ratios": ratios,
            "against_best_peer": min(ratios.values()),
        }
    return row


def measure(repeats: int) -> dict:
    demo = parse_overrides(yaml.safe_load((RECIPES / "configs" / "demo.yaml").read_text())["config_overrides"])
    with_class_token = {**demo, "position_embedding": "learned", "pooling": "cls", "use_class_token": True}
    sizes = [
        ("the demo's", HFViTConfig(**demo, num_labels=10), 128, 10),
        ("the demo's, with a class token", HFViTConfig(**with_class_token, num_labels=10), 128, 10),
        ("ViT-Ti/16, 224", HFViTConfig.from_preset("tiny-patch16-224", num_labels=1000), 32, 1),
        ("ViT-S/16, 224", HFViTConfig.from_preset("small-patch16-224", num_labels=1000), 16, 1),
        ("ViT-B/16, 224", HFViTConfig.from_preset("base-patch16-224", num_labels=1000), 8, 1),
    ]
    rows = []
    for name, config, batch, times in sizes:
        batch *= 16 if DEVICE.type == "cuda" else 1
        rows.append({"model": name, "batch": batch, **compare(config, batch, repeats, times)})
        print(json.dumps(rows[-1]), flush=True)
    peers = {name: importlib.import_module(name).__version__ for name in rows[0]["step"]["ratios"]}
    return {"sizes": rows, "peers": peers}


if __name__ == "__main__":
    run_benchmark("model", measure, __doc__)

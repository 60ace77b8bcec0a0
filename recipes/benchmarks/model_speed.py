"""Forward pass and training step beside native transformers and timm, and their share of what the hardware reaches."""

import importlib
import importlib.util
import json
import statistics

import torch
import yaml
from benchmarks.measuring import DEMO, DEVICE, median_ratio, time_in_turns
from transformers import ViTConfig, ViTForImageClassification

from hf_vit import HFViTConfig, HFViTForImageClassification
from hf_vit.training import arguments as presets


def matrix_products(config: HFViTConfig, batch: int) -> list[tuple[int, int, int, int]]:
    """The products of dense layers in one forward pass of a classifier, as (count, rows, inner, columns).

    With a pooled class token the last layer computes queries, outputs and MLP for that token alone.
    """
    D, F, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    patches = config.grid_size[0] * config.grid_size[1]
    T = config.num_prefix_tokens + patches
    flat = config.num_channels * config.patch_size**2
    layer = [(1, batch * T, D, 3 * D), (1, batch * T, D, D), (1, batch * T, D, F), (1, batch * T, F, D)]
    last = layer
    if config.pooling == "cls":
        last = [(1, batch * T, D, 2 * D), (2, batch, D, D), (1, batch, D, F), (1, batch, F, D)]
    products = [(1, batch * patches, flat, D), *last, (1, batch, D, config.num_labels)]
    return products + [(layers - 1, *shape) for _, *shape in layer]


def count_flops(config: HFViTConfig, batch: int) -> float:
    """Multiplications and additions of one forward pass: dense layers and attention."""
    dense = sum(2 * count * rows * inner * columns for count, rows, inner, columns in matrix_products(config, batch))
    T = config.num_prefix_tokens + config.grid_size[0] * config.grid_size[1]
    queries = (config.num_hidden_layers - 1) * T + (1 if config.pooling == "cls" else T)
    return dense + 4 * batch * queries * T * config.hidden_size


def bare_products(config: HFViTConfig, batch: int, backward: bool):
    """A function that computes these products and nothing else, with those of the backward pass if asked; and its FLOPs."""
    calls, flops = [], 0
    for count, rows, inner, columns in matrix_products(config, batch):
        x, weight, grad = (torch.randn(*s, device=DEVICE) for s in ((rows, inner), (columns, inner), (rows, columns)))
        output, x_grad, weight_grad = torch.empty_like(grad), torch.empty_like(x), torch.empty_like(weight)
        for _ in range(count):
            calls.append((x, weight.T, output))
            if backward:
                calls += [(grad, weight, x_grad), (grad.T, x, weight_grad)]
        flops += 2 * count * rows * inner * columns * (3 if backward else 1)

    def compute():
        for left, right, out in calls:
            torch.mm(left, right, out=out)

    return compute, flops


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


def make_forward(model, pixel_values):
    def forward():
        model.eval()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=DEVICE.type == "cuda"):
            model(pixel_values)

    return forward


def make_step(model, pixel_values, labels):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        model.train()
        with torch.autocast("cuda", torch.bfloat16, enabled=DEVICE.type == "cuda"):
            outputs = model(pixel_values)
        logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
        torch.nn.functional.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(config: HFViTConfig, batch: int, repeats: int, times: int) -> dict:
    """What one size gives: milliseconds, ratios to each peer and the share of the bare products, for both kinds of pass."""
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
    for kind in ("forward", "step"):
        products, product_flops = bare_products(config, batch, kind == "step")
        contenders = {
            name: make_forward(model, pixel_values) if kind == "forward" else make_step(model, pixel_values, labels)
            for name, model in models.items()
        }
        seconds = time_in_turns({**contenders, "products": products}, repeats, times)
        flops = count_flops(config, batch) * (3 if kind == "step" else 1)
        ratios = {peer: median_ratio(seconds[peer], seconds["hf_vit"]) for peer in models if peer != "hf_vit"}
        row[kind] = {
            **{f"{name}_ms": round(1e3 * statistics.median(seconds[name]), 2) for name in models},
            "ratios": ratios,
            "against_best_peer": min(ratios.values()),
            "gflops_a_second": round(flops / statistics.median(seconds["hf_vit"]) / 1e9, 1),
            "ceiling_gflops_a_second": round(product_flops / statistics.median(seconds["products"]) / 1e9, 1),
            "share_of_ceiling": round(median_ratio(seconds["products"], seconds["hf_vit"]) * flops / product_flops, 3),
        }
    return row


def measure(repeats: int) -> dict:
    demo = presets.overrides(yaml.safe_load(DEMO.read_text())["config_overrides"])
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

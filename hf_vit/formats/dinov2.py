"""DINOv2 of transformers, with and without registers (arXiv 2304.07193, 2309.16588).

Positions are resampled bicubically, with registers with antialiasing (`interpolate_pos_encoding` in
transformers/models/dinov2*/modeling_*.py).
"""

from functools import partial

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from hf_vit.formats.conversions import renamings
from hf_vit.formats.family import ANTIALIASED, ANY, BICUBIC, NativeFamily


def rules(config, native_class: str) -> list:
    return [
        *get_checkpoint_conversion_mapping(native_class),
        *renamings(
            {
                r"encoder\.layer\.": "layers.",
                "norm1": "layernorm_before",
                "norm2": "layernorm_after",
            }
        ),
    ]


def mlp_width(hidden_size: int, mlp_ratio: float, gated: bool) -> int:
    """F of DINOv2's MLP; with a gate two thirds of it, to a multiple of 8 (arXiv 2002.05202, section 3)."""
    width = int(hidden_size * mlp_ratio)
    return (int(width * 2 / 3) + 7) // 8 * 8 if gated else width


def find_mlp_ratio(config) -> int | None:
    """DINOv2's mlp_ratio, an int, that gives config.intermediate_size."""
    for ratio in range(1, 17):
        if mlp_width(config.hidden_size, ratio, config.gated_mlp) == config.intermediate_size:
            return ratio
    return None


def read_fields(native, classifier: str) -> dict:
    gated = native.use_swiglu_ffn
    width = mlp_width(native.hidden_size, native.mlp_ratio, gated)
    fields = dict(intermediate_size=width, pooling="cls_mean" if classifier else "cls")
    return fields | dict(hidden_act="silu") if gated else fields


def native_fields(config) -> dict:
    return dict(mlp_ratio=find_mlp_ratio(config))


def unsupported(config) -> list[str]:
    if (config.gated_mlp and config.hidden_act != "silu") or find_mlp_ratio(config) is None:
        return [f"intermediate_size={config.intermediate_size} with hidden_act={config.hidden_act!r}"]
    return []


def native_head(weight: torch.Tensor, config) -> torch.Tensor:
    """The head (L, 2 D) over class token and mean of the patches, for a model that may pool only one of them."""
    if config.pooling == "cls_mean":
        return weight
    both = [weight, torch.zeros_like(weight)]  # (L, D) each
    return torch.cat(both if config.pooling == "cls" else both[::-1], dim=1)


def dinov2(name: str, native_class: str, resampling: dict, registers: bool = False, classifier: bool = True, **more):
    """A family of DINOv2's shape; `native_class` without its Model or ForImageClassification."""
    supports = dict(gated_mlp=(True, False), layerscale_value=ANY)
    fields = dict(layerscale_value="layerscale_value", use_swiglu_ffn="gated_mlp")
    if registers:
        supports["num_register_tokens"], fields["num_register_tokens"] = ANY, "num_register_tokens"
    pooled = dict(supports, pooling=("cls", "mean", "cls_mean"))
    return NativeFamily(
        name=name,
        rules=partial(rules, native_class=f"{native_class}Model"),
        resampling=resampling,
        fields=fields,
        read_fields=read_fields,
        native_fields=native_fields,
        base=(f"{native_class}Model", supports),
        classifier=(f"{native_class}ForImageClassification", pooled) if classifier else None,
        square_only=True,
        unsupported=unsupported,
        native_head=native_head,
        **dict(prefix=name) | more,
    )


FAMILIES = [
    dinov2("dinov2", "Dinov2", BICUBIC),
    dinov2("dinov2_with_registers", "Dinov2WithRegisters", ANTIALIASED, registers=True),
]

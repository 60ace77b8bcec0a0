"""DINOv2 of transformers, with and without registers (arXiv 2304.07193, 2309.16588)."""

from dataclasses import replace

import torch
from transformers.core_model_loading import WeightRenaming

from hf_vit.formats.conversions import split_fused
from hf_vit.formats.family import ANY, VIT_IGNORED, Family, NativeClass
from hf_vit.formats.vit import ATTENTION_RULES


RULES = [
    *ATTENTION_RULES,
    WeightRenaming("norm1", "layernorm_before"),
    WeightRenaming("norm2", "layernorm_after"),
    *split_fused(r"mlp\.weights_in", "mlp.gate_proj", "mlp.up_proj"),
    WeightRenaming(r"mlp\.weights_out", "mlp.down_proj"),
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


def read_dinov2(native, classifier: str) -> dict:
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


SUPPORTS = dict(gated_mlp=(True, False), layerscale_value=ANY)
REGISTERS = dict(num_register_tokens=ANY)
WITH_HEAD = dict(pooling=("cls", "mean", "cls_mean"))
DINOV2 = Family(
    RULES,
    ignored=VIT_IGNORED,
    prefix="dinov2",
    fields=dict(layerscale_value="layerscale_value", use_swiglu_ffn="gated_mlp"),
    read_fields=read_dinov2,
    native_fields=native_fields,
    base=NativeClass("Dinov2Model", **SUPPORTS),
    classifier=NativeClass("Dinov2ForImageClassification", **SUPPORTS, **WITH_HEAD),
    square_only=True,
    unsupported=unsupported,
    native_head=native_head,
)
DINOV2_WITH_REGISTERS = replace(
    DINOV2,
    prefix="dinov2_with_registers",
    fields=DINOV2.fields | dict(num_register_tokens="num_register_tokens"),
    base=NativeClass("Dinov2WithRegistersModel", **SUPPORTS, **REGISTERS),
    classifier=NativeClass("Dinov2WithRegistersForImageClassification", **SUPPORTS, **REGISTERS, **WITH_HEAD),
)

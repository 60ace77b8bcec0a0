"""DINOv2 of transformers, with and without registers (arXiv 2304.07193, 2309.16588).

Positions are resampled bicubically, with registers with antialiasing (`interpolate_pos_encoding` in
transformers/models/dinov2*/modeling_*.py).
"""

from functools import partial

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from hf_vit.formats.conversions import renamings
from hf_vit.formats.family import ANTIALIASED, BICUBIC, NativeFamily


def rules(config, native_class: str) -> list:
    names = {r"encoder\.layer\.": "layers.", "norm1": "layernorm_before", "norm2": "layernorm_after"}
    return [*get_checkpoint_conversion_mapping(native_class), *renamings(names)]


def read_fields(native, classifier: str) -> dict:
    """The MLP has `mlp_ratio` times the width; with a gate two thirds of it, to a multiple of 8 (arXiv 2002.05202, section 3)."""
    width, gate = int(native.hidden_size * native.mlp_ratio), {}
    if native.use_swiglu_ffn:
        width, gate = (int(width * 2 / 3) + 7) // 8 * 8, dict(hidden_act="silu")
    return dict(intermediate_size=width, pooling="cls_mean" if classifier else "cls") | gate


def native_fields(config) -> dict:
    ungated = config.intermediate_size * (3 / 2 if config.gated_mlp else 1)
    return dict(mlp_ratio=round(ungated / config.hidden_size))  # an int


def dinov2(name: str, native_class: str, resampling: dict, kinds=("Model", "ForImageClassification"), **more):
    """A family of DINOv2's shape; `native_class` without what `kinds` add."""
    return NativeFamily(
        name=name,
        rules=partial(rules, native_class=f"{native_class}Model"),
        resampling=resampling,
        fields=dict(use_swiglu_ffn="gated_mlp"),
        read_fields=read_fields,
        native_fields=native_fields,
        classes=tuple(native_class + kind for kind in kinds),
        square_only=True,
        **dict(prefix=name) | more,
    )


FAMILIES = [
    dinov2("dinov2", "Dinov2", BICUBIC),
    dinov2("dinov2_with_registers", "Dinov2WithRegisters", ANTIALIASED),
]

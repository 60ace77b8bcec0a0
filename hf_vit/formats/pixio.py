"""Pixio of transformers: a plain ViT with several class tokens, whose mean is its pooled vector."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from hf_vit.formats.dinov2 import find_mlp_ratio, native_fields
from hf_vit.formats.family import ANY, NativeFamily


def rules(config) -> list:
    return get_checkpoint_conversion_mapping("pixio")[:-1]  # the last is of PixioBackbone


def read_fields(native, classifier: str) -> dict:
    return dict(intermediate_size=int(native.hidden_size * native.mlp_ratio))


def unsupported(config) -> list[str]:
    return [] if find_mlp_ratio(config) else [f"intermediate_size={config.intermediate_size}"]


FAMILIES = [
    NativeFamily(
        name="pixio",
        rules=rules,
        fields=dict(n_cls_tokens="n_cls_tokens"),
        read_fields=read_fields,
        native_fields=native_fields,
        base=("PixioModel", dict(n_cls_tokens=ANY)),
        square_only=True,
        unsupported=unsupported,
    )
]

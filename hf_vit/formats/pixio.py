"""Pixio of transformers: a plain ViT with several class tokens, whose mean is its pooled vector."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from hf_vit.formats.dinov2 import native_fields
from hf_vit.formats.family import NativeFamily


def rules(config) -> list:
    return get_checkpoint_conversion_mapping("pixio")[:-1]  # the last is of PixioBackbone


def read_fields(native, classifier: str) -> dict:
    return dict(intermediate_size=int(native.hidden_size * native.mlp_ratio))


FAMILIES = [
    NativeFamily(
        name="pixio",
        rules=rules,
        read_fields=read_fields,
        native_fields=native_fields,
        classes=("PixioModel",),
        square_only=True,
    )
]

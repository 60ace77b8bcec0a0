"""The image tower of SigLIP (arXiv 2303.15343) of transformers."""

from hf_vit.formats import clip
from hf_vit.formats.conversions import POOLING_QKV, renamings, split_fused
from hf_vit.formats.family import NativeFamily


def rules(config) -> list:
    return [
        *clip.rules(config),
        *renamings(
            {
                r"^head\.": "attention_pooling.",
                r"attention_pooling\.attention\.out_proj": "attention_pooling.o_proj",
            }
        ),
        *split_fused(r"attention_pooling\.attention\.in_proj", *POOLING_QKV),
    ]


def read_fields(native, classifier: str) -> dict:
    has_probe = native.vision_use_head and classifier != "SiglipForImageClassification"
    return dict(use_class_token=False, pooling="map" if has_probe else "mean")


def native_fields(config) -> dict:
    return dict(vision_use_head=config.pooling == "map")


FAMILIES = [  # its classifier computes what that of I-JEPA computes, and is given back as one
    NativeFamily(
        name="siglip",
        aliases=("siglip_vision_model",),
        rules=rules,
        ignored=clip.IGNORED,
        prefix="vision_model",
        fields=clip.DROPOUT,
        read_fields=read_fields,
        native_fields=native_fields,
        classes=("SiglipVisionModel",),
        square_only=True,
    )
]

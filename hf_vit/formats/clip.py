"""The image towers of CLIP (arXiv 2103.00020) and MetaCLIP 2 of transformers."""

from hf_vit.formats.conversions import add_leading, renamings
from hf_vit.formats.family import NativeFamily


IGNORED = (
    r"(text_model|text_projection|visual_projection|logit_scale|logit_bias|embeddings\.position_ids|layernorm)(\.|$)"
)
DROPOUT = dict(attention_dropout="attention_probs_dropout_prob")


def rules(config) -> list:
    return [
        *renamings(
            {
                r"encoder\.layers\.": "layers.",
                "layer_norm1": "layernorm_before",
                "layer_norm2": "layernorm_after",
                r"self_attn\.([qkv])_proj": r"attention.\1_proj",
                r"self_attn\.out_proj": "attention.o_proj",
                r"^pre_layrnorm\.": "embeddings.layernorm.",
                r"^post_layernorm\.": "layernorm.",
                r"patch_embedding\.": "patch_embeddings.projection.",
            }
        ),
        add_leading(r"embeddings\.class_embedding", "embeddings.cls_token", 2),
        add_leading(r"embeddings\.position_embedding\.weight", "embeddings.position_embeddings", 1),
    ]


def read_fields(native, classifier: str) -> dict:
    is_classifier = classifier.endswith("ForImageClassification")
    pooling = dict(final_norm="none", pooling="mean") if is_classifier else dict(final_norm="pooled")
    return dict(patch_bias=False, embedding_norm=True) | pooling


def clip(name: str, native_class: str) -> NativeFamily:
    """A model of image and text, and its image tower alone."""
    return NativeFamily(
        name=name,
        aliases=(f"{name}_vision_model",),
        rules=rules,
        ignored=IGNORED,
        prefix="vision_model",
        fields=DROPOUT,
        read_fields=read_fields,
        classes=(f"{native_class}VisionModel", f"{native_class}ForImageClassification"),
        square_only=True,
    )


FAMILIES = [clip("clip", "CLIP"), clip("metaclip_2", "MetaClip2")]

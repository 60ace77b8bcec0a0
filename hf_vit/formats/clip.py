"""The image towers of CLIP (arXiv 2103.00020) and SigLIP (arXiv 2303.15343) of transformers."""

from transformers.core_model_loading import WeightConverter, WeightRenaming

from hf_vit.formats.conversions import POOLING_QKV, Apply, split_fused
from hf_vit.formats.family import Family, NativeClass


IGNORED = (
    r"(text_model|text_projection|visual_projection|logit_scale|logit_bias|embeddings\.position_ids|layernorm)(\.|$)"
)
CLIP_RULES = [
    WeightRenaming(r"encoder\.layers\.", "layers."),
    WeightRenaming("layer_norm1", "layernorm_before"),
    WeightRenaming("layer_norm2", "layernorm_after"),
    WeightRenaming(r"self_attn\.([qkv])_proj", r"attention.\1_proj"),
    WeightRenaming(r"self_attn\.out_proj", "attention.o_proj"),
    WeightRenaming(r"^pre_layrnorm\.", "embeddings.layernorm."),
    WeightRenaming(r"^post_layernorm\.", "layernorm."),
    WeightRenaming(r"patch_embedding\.", "patch_embeddings.projection."),
    WeightConverter(
        r"embeddings\.class_embedding", "embeddings.cls_token", [Apply(lambda t: t[None, None], lambda t: t[0, 0])]
    ),
    WeightConverter(
        r"embeddings\.position_embedding\.weight",
        "embeddings.position_embeddings",
        [Apply(lambda t: t[None], lambda t: t[0])],
    ),
]
SIGLIP_RULES = [
    *CLIP_RULES,
    WeightRenaming(r"^head\.", "attention_pooling."),
    WeightRenaming(r"attention_pooling\.attention\.out_proj", "attention_pooling.o_proj"),
    *split_fused(r"attention_pooling\.attention\.in_proj", *POOLING_QKV),
]


def read_clip(native, classifier: str) -> dict:
    is_classifier = classifier == "CLIPForImageClassification"
    pooling = dict(final_norm="none", pooling="mean") if is_classifier else dict(final_norm="pooled")
    return dict(patch_bias=False, embedding_norm=True) | pooling


def read_siglip(native, classifier: str) -> dict:
    has_probe = native.vision_use_head and classifier != "SiglipForImageClassification"
    return dict(use_class_token=False, pooling="map" if has_probe else "mean")


def native_siglip(config) -> dict:
    return dict(vision_use_head=config.pooling == "map")


TOWER = dict(qkv_bias=(True,), patch_bias=(False,), embedding_norm=(True,))
CLIP = Family(
    CLIP_RULES,
    ignored=IGNORED,
    prefix="vision_model",
    fields=dict(attention_dropout="attention_probs_dropout_prob"),
    read_fields=read_clip,
    base=NativeClass("CLIPVisionModel", **TOWER, final_norm=("pooled",)),
    classifier=NativeClass("CLIPForImageClassification", **TOWER, final_norm=("none",), pooling=("mean",)),
    square_only=True,
)
SIGLIP = Family(  # its classifier computes what that of I-JEPA computes, and is given back as one
    SIGLIP_RULES,
    ignored=IGNORED,
    prefix="vision_model",
    fields=CLIP.fields,
    read_fields=read_siglip,
    native_fields=native_siglip,
    base=NativeClass("SiglipVisionModel", qkv_bias=(True,), use_class_token=(False,), pooling=("map",)),
    square_only=True,
)

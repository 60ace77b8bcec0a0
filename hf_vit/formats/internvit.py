"""InternViT (arXiv 2312.14238), the image encoder of transformers' InternVL; that of OpenGVLab's own repositories has other names."""

from hf_vit.formats.conversions import renamings
from hf_vit.formats.family import ANY, NativeFamily


def rules(config) -> list:
    names = {
        r"encoder\.layer\.": "layers.",
        "projection_layer": "o_proj",
        "lambda_([12])": r"layer_scale\1.lambda1",
    }
    return renamings(names)


def read_fields(native, classifier: str) -> dict:
    if native.norm_type != "layer_norm" or native.use_qk_norm or not native.use_absolute_position_embeddings:
        raise ValueError(
            "an InternViT with RMSNorm, norms of queries and keys, or without positions has no counterpart"
        )
    return (
        dict(final_norm="none", pooling="mean") if native.use_mean_pooling else {}
    )  # the mean takes the norm's place


def native_fields(config) -> dict:
    return dict(use_mean_pooling=config.pooling == "mean")


def unsupported(config) -> list[str]:
    norm = dict(cls="tokens", mean="none").get(config.pooling)
    return [] if config.final_norm == norm else [f"final_norm={config.final_norm!r} with pooling={config.pooling!r}"]


FAMILIES = [
    NativeFamily(
        name=name,
        rules=rules,
        prefix=r"(?:model\.)?vision_tower",
        ignored=r"(model\.)?(language_model|multi_modal_projector|lm_head|embeddings\.mask_token)(\.|$)",
        fields=dict(
            attention_bias="qkv_bias",
            attention_dropout="attention_probs_dropout_prob",
            layer_scale_init_value="layerscale_value",
        ),
        read_fields=read_fields,
        native_fields=native_fields,
        base=(
            "InternVLVisionModel",
            dict(layerscale_value=ANY, final_norm=("tokens", "none"), pooling=("cls", "mean")),
        ),
        square_only=True,
        unsupported=unsupported,
    )
    for name in ("internvl_vision", "internvl")
]

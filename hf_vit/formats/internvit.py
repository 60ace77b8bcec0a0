"""InternViT (arXiv 2312.14238), the image encoder of transformers' InternVL; that of OpenGVLab's own repositories has other names."""

from hf_vit.formats.conversions import renamings
from hf_vit.formats.family import NativeFamily


FIELDS = dict(
    attention_bias="qkv_bias", attention_dropout="attention_probs_dropout_prob", layer_scale_init_value="layerscale_value"
)  # fmt: skip


def rules(config) -> list:
    return renamings(
        {
            r"encoder\.layer\.": "layers.",
            "projection_layer": "o_proj",
            "lambda_([12])": r"layer_scale\1.lambda1",
        }
    )


def read_fields(native, classifier: str) -> dict:
    if native.norm_type != "layer_norm":
        raise ValueError("an InternViT with RMSNorm in place of LayerNorm has no counterpart")
    return (
        dict(final_norm="none", pooling="mean") if native.use_mean_pooling else {}
    )  # the mean takes the norm's place


def native_fields(config) -> dict:
    return dict(use_mean_pooling=config.pooling == "mean")


FAMILIES = [
    NativeFamily(
        name="internvl",
        aliases=("internvl_vision",),
        rules=rules,
        prefix=r"(?:model\.)?vision_tower",
        ignored=r"(model\.)?(language_model|multi_modal_projector|lm_head|embeddings\.mask_token)(\.|$)",
        fields=FIELDS,
        read_fields=read_fields,
        native_fields=native_fields,
        classes=("InternVLVisionModel",),
        square_only=True,
    )
]

"""DINOv3 of transformers (arXiv 2508.10104)."""

from transformers.core_model_loading import WeightRenaming

from hf_vit.formats.family import ANY, VIT_IGNORED, Family, NativeClass


RULES = [
    WeightRenaming(r"^layer\.", "layers."),
    WeightRenaming(r"^norm\.", "layernorm."),
    WeightRenaming("norm1", "layernorm_before"),
    WeightRenaming("norm2", "layernorm_after"),
    WeightRenaming(r"patch_embeddings\.(weight|bias)", r"patch_embeddings.projection.\1"),
]
FIELDS = dict(
    rope_theta="rope_theta", query_bias="qkv_bias", key_bias="key_bias", use_gated_mlp="gated_mlp",
    layerscale_value="layerscale_value", num_register_tokens="num_register_tokens",
    attention_dropout="attention_probs_dropout_prob",
)  # fmt: skip


def mlp_rules(config) -> list:
    if config.gated_mlp:
        return []
    return [WeightRenaming(r"mlp\.up_proj", "mlp.fc1"), WeightRenaming(r"mlp\.down_proj", "mlp.fc2")]


def read_dinov3(native, classifier: str) -> dict:
    if not (native.proj_bias and native.mlp_bias and native.query_bias == native.value_bias):
        raise ValueError(
            "hf_vit has no dinov3_vit without proj_bias or mlp_bias, or with only one of query_bias and value_bias"
        )
    # DINOv3ViTBackbone always drops the prefix tokens, and always norms the last stage.
    bare_last_stage = not native.apply_layernorm and native.num_hidden_layers in native.out_indices
    if not native.reshape_hidden_states or bare_last_stage:
        raise ValueError(
            "hf_vit has no dinov3_vit backbone with reshape_hidden_states=False, or with apply_layernorm=False and the last stage: "
            "leave these fields of its config at True"
        )
    return dict(position_embedding="rotary")


def native_fields(config) -> dict:
    key_bias = config.qkv_bias and config.key_bias
    return dict(rope_theta=float(config.rope_theta), key_bias=key_bias, value_bias=config.qkv_bias)


SUPPORTS = dict(key_bias=(True, False), gated_mlp=(True, False), layerscale_value=ANY, num_register_tokens=ANY)
DINOV3 = Family(
    RULES,
    extra_rules=mlp_rules,
    ignored=VIT_IGNORED,
    prefix="model",
    fields=FIELDS,
    read_fields=read_dinov3,
    native_fields=native_fields,
    base=NativeClass("DINOv3ViTModel", position_embedding=("rotary",), **SUPPORTS),
)

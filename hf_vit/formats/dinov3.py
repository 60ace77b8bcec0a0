"""DINOv3 (arXiv 2508.10104) of transformers, and as Meta publishes it (facebookresearch/dinov3, models/vision_transformer.py)."""

import torch

from hf_vit.formats import timm
from hf_vit.formats.conversions import renamings
from hf_vit.formats.family import NativeFamily, RawFamily
from hf_vit.formats.source import Source


FIELDS = dict(
    query_bias="qkv_bias", use_gated_mlp="gated_mlp", attention_dropout="attention_probs_dropout_prob"
)  # fmt: skip
# Augmentations of the rotary positions while training, which ours lacks: kept for the way back.
AUGMENTATIONS = ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")


def rules(config) -> list:
    plain_mlp = {} if config.gated_mlp else {r"mlp\.up_proj": "mlp.fc1", r"mlp\.down_proj": "mlp.fc2"}
    names = {
        r"^layer\.": "layers.",
        r"^norm\.": "layernorm.",
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        r"patch_embeddings\.(weight|bias)": r"patch_embeddings.projection.\1",
    }
    return renamings(names | plain_mlp)


def read_fields(native, classifier: str) -> dict:
    # DINOv3ViTBackbone always drops the prefix tokens, and always norms the last stage.
    bare_last_stage = not native.apply_layernorm and native.num_hidden_layers in native.out_indices
    if not native.reshape_hidden_states or bare_last_stage:
        raise ValueError("reshape_hidden_states must be True, and apply_layernorm where the last stage is given")
    return dict(position_embedding="rotary") | {name: getattr(native, name) for name in AUGMENTATIONS}


def native_fields(config) -> dict:
    kept = {name: getattr(config, name, None) for name in AUGMENTATIONS}
    return kept | dict(
        value_bias=config.qkv_bias, key_bias=config.qkv_bias and config.key_bias, rope_theta=float(config.rope_theta)
    )


def raw_rules(config) -> list:
    names = {
        "^storage_tokens": "register_tokens",
        r"mlp\.w1\.": "mlp.gate_proj.",
        r"mlp\.w2\.": "mlp.up_proj.",
    }
    return [*renamings(names), *timm.rules(config)]


def infer_fields(source: Source) -> dict:
    tensors, fields = source.tensors, source.plain_fields(raw_rules)
    mask, periods = tensors.get("blocks.0.attn.qkv.bias_mask"), tensors["rope_embed.periods"].float()  # (K / 4,)
    theta = source.asked.get("rope_theta", 100.0)  # that of all published
    if not torch.allclose(
        periods, theta ** (torch.arange(len(periods)) / len(periods)), rtol=1e-2
    ):  # they may be bfloat16
        raise ValueError(f"rope_embed.periods are not those of rope_theta {theta}: pass rope_theta=")
    return fields | dict(
        image_size=[
            224 // side * side for side in fields["patch_size"]
        ],  # of all published; rotary positions take any
        num_attention_heads=source.num_heads(fields["hidden_size"], timm.DINOV3_HEADS),
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
        key_bias=mask is None or bool(mask.chunk(3)[1].nan_to_num().any()),  # a mask of zeros takes it out
        layer_norm_eps=1e-5,
        position_embedding="rotary",
        rope_theta=theta,
    )


FAMILIES = [
    NativeFamily(
        name="dinov3_vit",
        rules=rules,
        prefix="model",
        fields=FIELDS,
        read_fields=read_fields,
        native_fields=native_fields,
        classes=("DINOv3ViTModel",),
    ),
    RawFamily(
        name="dinov3",
        rules=raw_rules,
        # The mask of pre-training, a norm that is never used in evaluation, and what became fields of the config.
        ignored=r"(mask_token|local_cls_norm\..*|rope_embed\.periods|.*bias_mask|layers\.\d+\.attention\.k_proj\.bias)$",
        title="DINOv3",
        signature=("patch_embed.proj.weight", "rope_embed.periods"),
        infer_fields=infer_fields,
    ),
]

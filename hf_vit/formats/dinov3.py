"""DINOv3 (arXiv 2508.10104) of transformers, and as Meta publishes it (facebookresearch/dinov3, models/vision_transformer.py)."""

import torch

from hf_vit.formats import timm
from hf_vit.formats.conversions import renamings
from hf_vit.formats.family import ANY, NativeFamily, RawFamily, Source
from hf_vit.formats.shapes import infer_num_heads, plain_fields


FIELDS = dict(
    rope_theta="rope_theta", query_bias="qkv_bias", key_bias="key_bias", use_gated_mlp="gated_mlp",
    layerscale_value="layerscale_value", num_register_tokens="num_register_tokens",
    attention_dropout="attention_probs_dropout_prob",
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
    if not (native.proj_bias and native.mlp_bias and native.query_bias == native.value_bias):
        raise ValueError("proj_bias and mlp_bias must be True, and query_bias and value_bias alike")
    # DINOv3ViTBackbone always drops the prefix tokens, and always norms the last stage.
    bare_last_stage = not native.apply_layernorm and native.num_hidden_layers in native.out_indices
    if not native.reshape_hidden_states or bare_last_stage:
        raise ValueError("reshape_hidden_states must be True, and apply_layernorm where the last stage is given")
    return dict(position_embedding="rotary") | {name: getattr(native, name) for name in AUGMENTATIONS}


def native_fields(config) -> dict:
    return dict(
        rope_theta=float(config.rope_theta), key_bias=config.qkv_bias and config.key_bias, value_bias=config.qkv_bias
    ) | {name: getattr(config, name, None) for name in AUGMENTATIONS}


def raw_rules(config) -> list:
    names = {
        "^storage_tokens": "register_tokens",
        r"mlp\.w1\.": "mlp.gate_proj.",
        r"mlp\.w2\.": "mlp.up_proj.",
    }
    return [*renamings(names), *timm.rules(config)]


def infer_fields(source: Source) -> dict:
    shapes, tensors = source.shapes, source.tensors
    fields = plain_fields(source, "patch_embed.proj.weight", r"blocks\.(\d+)\.")
    gated = "blocks.0.mlp.w1.weight" in shapes
    bias, mask = "blocks.0.attn.qkv.bias" in shapes, tensors.get("blocks.0.attn.qkv.bias_mask")
    patch = fields["patch_size"]
    return fields | dict(
        image_size=[224 // side * side for side in patch],  # of all published; rotary positions take any
        num_attention_heads=infer_num_heads(source, fields["hidden_size"], published={4096: 32}),
        intermediate_size=shapes["blocks.0.mlp.w1.weight" if gated else "blocks.0.mlp.fc1.weight"][0],
        gated_mlp=gated,
        hidden_act="silu" if gated else "gelu",
        qkv_bias=bias,
        key_bias=mask is None or bool(mask[...].chunk(3)[1].nan_to_num().any()),  # a mask of zeros takes it out
        num_register_tokens=shapes.get("storage_tokens", (1, 0))[1],
        layerscale_value=1.0 if "blocks.0.ls1.gamma" in shapes else None,
        layer_norm_eps=1e-5,
        position_embedding="rotary",
        rope_theta=rope_theta(tensors["rope_embed.periods"][...].float()),
    )


def rope_theta(periods: torch.Tensor) -> float:
    """The base of periods (K / 4,) that are theta ** (4 i / K); 100 where it is within the rounding of bfloat16."""
    steps = torch.arange(len(periods)) / len(periods)
    theta = periods[-1].item() ** (1 / steps[-1].item()) if len(periods) > 1 else 100.0
    theta = 100.0 if abs(theta - 100) < 1 else theta
    if not torch.allclose(periods, theta**steps, rtol=1e-2):
        raise ValueError("rope_embed.periods are not those of one rope_theta")
    return theta


SUPPORTS = dict(key_bias=(True, False), gated_mlp=(True, False), layerscale_value=ANY, num_register_tokens=ANY)
FAMILIES = [
    NativeFamily(
        name="dinov3_vit",
        rules=rules,
        prefix="model",
        fields=FIELDS,
        read_fields=read_fields,
        native_fields=native_fields,
        base=("DINOv3ViTModel", dict(SUPPORTS, position_embedding=("rotary",))),
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

"""timm's VisionTransformer and DINOv3, and the code that shares their tensor names: DeiT, DINO, DINOv2, DeiT III, MAE, MoCo v3.

Neither a file nor a timm repo states the architecture in full: it is read off the shapes of the tensors.
"""

import re

from transformers.core_model_loading import WeightConverter, WeightRenaming

from hf_vit.formats.conversions import POOLING_QKV, QKV, AlignPositions, join_heads, renamings, split_fused
from hf_vit.formats.family import ANTIALIASED, BICUBIC, RawFamily, Source
from hf_vit.formats.shapes import PUBLISHED_HEADS, infer_image_size, infer_num_heads, plain_fields
from hf_vit.formats.timm_networks import check_network, is_dinov3, names_dinov3
from hf_vit.formats.timm_processor import timm_input_size


DINOV3_HEADS = {4096: 32}
REGISTERS = "embeddings.register_tokens"
# timm's names of activations, and transformers'.
ACT_LAYERS = dict(
    gelu="gelu", gelu_tanh="gelu_pytorch_tanh", quick_gelu="quick_gelu", relu="relu", silu="silu", swish="silu", mish="mish"
)  # fmt: skip


def rules(config) -> list:
    gated_mlp = [  # fc1 holds both halves in timm, but for DINOv3, and w12 in DINOv2's own code
        *renamings(
            {
                r"mlp\.fc1_g\.": "mlp.gate_proj.",
                r"mlp\.fc1_x\.": "mlp.up_proj.",
                r"mlp\.w12\.": "mlp.fc1.",
                r"mlp\.(?:w3|fc2)\.": "mlp.down_proj.",
            }
        ),
        *split_fused(r"mlp\.fc1", "mlp.gate_proj", "mlp.up_proj"),
    ]
    positions = WeightRenaming("^(?:reg_token|register_tokens)", REGISTERS)
    if config.position_embedding == "learned":
        ours = ["embeddings.position_embeddings", REGISTERS]
        positions = WeightConverter(["^pos_embed", "^reg_token", "^register_tokens"], ours, [AlignPositions()])
    return [
        *renamings(
            {
                r"^blocks\.": "layers.",
                r"^patch_embed\.proj\.": "embeddings.patch_embeddings.projection.",
                "^cls_token": "embeddings.cls_token",
                "^dist_token": "embeddings.distillation_token",
                r"^norm_pre\.": "embeddings.layernorm.",
                "norm1": "layernorm_before",
                "norm2": "layernorm_after",
                r"attn\.proj": "attention.o_proj",
                r"attn\.([qk])_norm": r"attention.\1_norm",
                # timm's Eva, which its DINOv3 is, keeps these biases apart from attn.qkv and has none for the keys.
                r"attn\.([qv])_bias": r"attention.\1_proj.bias",
                r"(?:ls|gamma_)([12])(?:\.gamma)?": r"layer_scale\1.lambda1",
                r"^(?:fc_)?norm\.": "layernorm.",
                r"^attn_pool\.latent": "attention_pooling.probe",
                r"^attn_pool\.q\.": "attention_pooling.q_proj.",
                r"^attn_pool\.proj\.": "attention_pooling.o_proj.",
                r"^attn_pool\.norm\.": "attention_pooling.layernorm.",
                r"^attn_pool\.mlp\.": "attention_pooling.mlp.",
            }
        ),
        *split_fused(r"attn\.qkv", *QKV),
        *split_fused(r"attn_pool\.kv", *POOLING_QKV[1:]),
        *join_heads(config, r"^head\.", r"^head_dist\."),
        *(gated_mlp if config.gated_mlp else []),
        positions,
    ]


def infer_fields(source: Source) -> dict:
    """Fields from shapes, from what was asked for, and from the config.json of a timm repo, if there is one."""
    shapes, said = source.shapes, source.said
    architecture, model_args = said.get("architecture", ""), said.get("model_args") or {}
    dinov3 = is_dinov3(shapes, source.asked, architecture)
    check_network(shapes, source.asked, architecture, model_args, dinov3)
    fields = plain_fields(source, "patch_embed.proj.weight", r"blocks\.(\d+)\.")
    clip_norm = "norm_pre.weight" in shapes
    global_pool = said.get("global_pool") or model_args.get("global_pool")
    fields |= mlp_fields(shapes, architecture, model_args.get("act_layer")) | resampling(source)
    fields |= dict(
        patch_bias="patch_embed.proj.bias" in shapes,
        qkv_bias=bool({"blocks.0.attn.qkv.bias", "blocks.0.attn.q_bias"} & set(shapes)),
        key_bias="blocks.0.attn.q_bias" not in shapes,
        qk_norm="blocks.0.attn.q_norm.weight" in shapes,
        use_class_token="cls_token" in shapes,
        use_distillation_token="dist_token" in shapes,
        num_register_tokens=shapes.get("reg_token", shapes.get("register_tokens", (0, 0)))[1],
        embedding_norm=clip_norm,
        layer_norm_eps=1e-5 if clip_norm else 1e-6,  # CLIP's, against timm's default
        layerscale_value=1.0 if {"blocks.0.ls1.gamma", "blocks.0.gamma_1"} & set(shapes) else None,
        pooling=infer_pooling(set(shapes), global_pool, source.is_classifier),
        final_norm="pooled" if "fc_norm.weight" in shapes else "tokens" if "norm.weight" in shapes else "none",
        position_embedding="learned" if "pos_embed" in shapes else "none",
    )
    heads = model_args.get("num_heads") or infer_heads(source, fields["hidden_size"], architecture, dinov3)
    fields["num_attention_heads"] = heads
    if dinov3:
        fields |= dinov3_fields(source, fields["patch_size"], global_pool)
    elif "pos_embed" in shapes:
        # DeiT III's own code writes the tensors of timm's rope_ape.
        if not architecture and "blocks.0.gamma_1" in shapes:
            source.notes.append("no rotary positions assumed")
        tokens = int(fields["use_class_token"]) + int(fields["use_distillation_token"])
        prefixes, stated = (tokens, 0, tokens + fields["num_register_tokens"]), timm_input_size(said)
        size = infer_image_size(source, shapes["pos_embed"][1], prefixes, fields["patch_size"], stated and stated[1:])
        fields["image_size"] = size
    if "head.weight" in shapes:
        fields["num_labels"] = shapes["head.weight"][0]
        labels = said.get("label_names") or ()
        if len(labels) == fields["num_labels"]:
            fields["id2label"] = dict(enumerate(labels))
    if not architecture and not fields["gated_mlp"] and "hidden_act" not in source.asked:
        source.notes.append(f"hidden_act {fields['hidden_act']} assumed")
    return fields


def resampling(source: Source) -> dict:
    """How the code that wrote it resamples positions; a plain pickle without a head is taken for DINO's.

    timm: bicubic with antialiasing (timm/layers/pos_embed.py, resample_abs_pos_embed). DINO and DINOv2: bicubic by the factor
    (side + 0.1) / old side (facebookresearch/dino, vision_transformer.py; facebookresearch/dinov2, models/vision_transformer.py,
    interpolate_pos_encoding); DINOv2 with registers: with antialiasing, without the 0.1 (dinov2/hub/backbones.py). DeiT, MAE and
    I-JEPA: bicubic to the size (facebookresearch/deit, main.py; facebookresearch/mae, util/pos_embed.py).
    """
    container, names = source.container, source.shapes
    if container is None or {"state_dict", "state_dict_ema"} & set(container) or "register_tokens" in names:
        return ANTIALIASED
    if {"model", "model_ema", "target_encoder"} & set(container):
        return BICUBIC
    if "head.weight" in names and "mask_token" not in names:
        return ANTIALIASED
    if not container and "mask_token" not in names:
        source.notes.append("positions of DINO assumed (position_interpolation bicubic_offset)")
    return BICUBIC | dict(position_interpolation="bicubic_offset")


def infer_heads(source: Source, hidden_size: int, architecture: str, dinov3: bool) -> int:
    """The number of heads; only the name of the architecture tells some."""
    if re.search("giantopt|vit_base_patch16_gap_", architecture):
        return source.asked.get("num_attention_heads", 16)
    return infer_num_heads(source, hidden_size, DINOV3_HEADS if dinov3 else PUBLISHED_HEADS)


def mlp_fields(shapes: dict, architecture: str, act_layer: str | None) -> dict:
    """Width and kind of the MLP, whose activation only `act_layer` of a repo or the name of an architecture can tell."""
    first, gate = (shapes.get(f"blocks.0.mlp.{part}.weight") for part in ("fc1", "fc1_g"))
    first = first or gate or shapes.get("blocks.0.mlp.w12.weight")
    second = shapes.get("blocks.0.mlp.fc2.weight") or shapes.get("blocks.0.mlp.w3.weight")
    if first is None or second is None:
        raise ValueError("its MLP is neither fc1 (or fc1_g and fc1_x) and fc2 nor w12 and w3, and no other is known")
    gated = gate is not None or first[0] == 2 * second[1]
    hidden_act = "silu" if gated else "gelu"
    siglip = r"_(patch32|large_patch16|so400m_patch16|giantopt_patch16)_siglip\w*_(256|384|512)"
    if act_layer is not None and act_layer not in ACT_LAYERS:
        raise ValueError(f"act_layer {act_layer!r} of timm has no counterpart: {', '.join(ACT_LAYERS)} have")
    if act_layer is not None:
        hidden_act = ACT_LAYERS[act_layer]
    elif "quickgelu" in architecture:
        hidden_act = "quick_gelu"
    elif re.search(siglip, "_" + architecture):
        exact = re.search(r"large_patch16_siglip\w*_(256|384)", architecture)
        hidden_act = "gelu" if exact else "gelu_pytorch_tanh"
    return dict(intermediate_size=second[1], gated_mlp=gated, hidden_act=hidden_act)


def infer_pooling(names: set, global_pool: str | None, is_classifier: bool | None) -> str:
    has_probe = any(name.startswith("attn_pool.") for name in names)
    if global_pool not in (None, "token", "avg", "map") or (global_pool == "map" and not has_probe):
        raise ValueError(f"global_pool {global_pool!r} of timm has no counterpart: token, avg and map have")
    if has_probe:
        return "map"
    if "fc_norm.weight" in names or "cls_token" not in names or global_pool == "avg":
        return "mean"
    return "cls_distillation" if is_classifier and {"head_dist.weight", "head_dist.bias"} & names else "cls"


def dinov3_fields(source: Source, patch: list, global_pool: str | None) -> dict:
    """Fields of timm's DINOv3 that its tensors do not tell: what its config.json says, else as timm builds it."""
    said, size = source.said, timm_input_size(source.said)
    sides = zip(size[1:] if size else [16 * side for side in patch], patch, strict=True)
    fields = dict(
        position_embedding="rotary",
        rope_theta=(said.get("model_args") or {}).get("rope_temperature", 100.0),
        layer_norm_eps=1e-5,
    )
    assumed = {} if names_dinov3(said.get("architecture", "")) else dict(fields)
    fields["image_size"] = [side // length * length for side, length in sides]  # rotary positions take any
    if global_pool is None:
        fields["pooling"] = assumed["pooling"] = "mean"
    if assumed := [f"{field} {value}" for field, value in assumed.items() if field not in source.asked]:
        source.notes.append(f"{', '.join(assumed)} assumed")
    return fields


FAMILIES = [
    RawFamily(
        name="timm",
        rules=rules,
        ignored="mask_token|decoder_|head_dist",
        resampling=ANTIALIASED,
        title="timm (also DeiT, DINO, DINOv2, MAE)",
        signature=("patch_embed.proj.weight",),
        infer_fields=infer_fields,
        claims=lambda said: "architecture" in said and said.get("model_type", "timm_wrapper") == "timm_wrapper",
    )
]

"""timm's VisionTransformer and DINOv3, and the code that shares their tensor names: DeiT, DINO, DINOv2, DeiT III, MAE, MoCo v3.

Neither a file nor a timm repo states the architecture in full: it is read off the shapes of the tensors.
"""

import re

from transformers.core_model_loading import WeightConverter, WeightRenaming

from hf_vit.formats.conversions import POOLING_QKV, QKV, AlignPositions, join_heads, split_fused
from hf_vit.formats.family import Family
from hf_vit.formats.shapes import PUBLISHED_HEADS, count_layers, infer_image_size, infer_num_heads
from hf_vit.formats.timm_networks import check_network, is_dinov3, names_dinov3
from hf_vit.formats.timm_processor import timm_input_size


DINOV3_HEADS = {4096: 32}
RULES = [
    WeightRenaming(r"^timm_model\.", ""),
    WeightRenaming(r"^blocks\.", "layers."),
    WeightRenaming(r"^patch_embed\.proj\.", "embeddings.patch_embeddings.projection."),
    WeightRenaming("^cls_token", "embeddings.cls_token"),
    WeightRenaming("^dist_token", "embeddings.distillation_token"),
    WeightRenaming(r"^norm_pre\.", "embeddings.layernorm."),
    WeightRenaming("norm1", "layernorm_before"),
    WeightRenaming("norm2", "layernorm_after"),
    WeightRenaming(r"attn\.proj", "attention.o_proj"),
    WeightRenaming(r"attn\.([qk])_norm", r"attention.\1_norm"),
    # timm's Eva, which its DINOv3 is, keeps these biases apart from attn.qkv and has none for the keys.
    WeightRenaming(r"attn\.([qv])_bias", r"attention.\1_proj.bias"),
    WeightRenaming(r"ls([12])\.gamma", r"layer_scale\1.lambda1"),
    WeightRenaming("gamma_([12])", r"layer_scale\1.lambda1"),
    WeightRenaming(r"^(?:fc_)?norm\.", "layernorm."),
    WeightRenaming(r"^attn_pool\.latent", "attention_pooling.probe"),
    WeightRenaming(r"^attn_pool\.q\.", "attention_pooling.q_proj."),
    WeightRenaming(r"^attn_pool\.proj\.", "attention_pooling.o_proj."),
    WeightRenaming(r"^attn_pool\.norm\.", "attention_pooling.layernorm."),
    WeightRenaming(r"^attn_pool\.mlp\.", "attention_pooling.mlp."),
    *split_fused(r"attn\.qkv", *QKV),
    *split_fused(r"attn_pool\.kv", *POOLING_QKV[1:]),
    *join_heads(r"^head\.", r"^head_dist\."),
]
GATED_MLP_RULES = [  # fc1 holds both halves in timm, but for DINOv3, and w12 in DINOv2's own code
    WeightRenaming(r"mlp\.fc1_g\.", "mlp.gate_proj."),
    WeightRenaming(r"mlp\.fc1_x\.", "mlp.up_proj."),
    WeightRenaming(r"mlp\.w12\.", "mlp.fc1."),
    WeightRenaming(r"mlp\.(?:w3|fc2)\.", "mlp.down_proj."),
    *split_fused(r"mlp\.fc1", "mlp.gate_proj", "mlp.up_proj"),
]
POSITIONS, REGISTERS = "embeddings.position_embeddings", "embeddings.register_tokens"
LEARNED_POSITION_RULE = WeightConverter(
    ["^pos_embed", "^reg_token", "^register_tokens"], [POSITIONS, REGISTERS], [AlignPositions()]
)
REGISTER_RULE = WeightRenaming("^(?:reg_token|register_tokens)", REGISTERS)


def extra_rules(config) -> list:
    of_mlp = GATED_MLP_RULES if config.gated_mlp else []
    return [*of_mlp, LEARNED_POSITION_RULE if config.position_embedding == "learned" else REGISTER_RULE]


def infer_timm(shapes: dict, asked: dict, is_classifier: bool, notes: list, repo_config: dict | None = None) -> dict:
    """Fields of HFViTConfig from shapes, from what was asked for, and from the config.json of a timm repo, if there is one.

    What had to be assumed is added to `notes`. ValueError for what no field expresses, or what has to be passed.
    """
    repo_config = repo_config or {}
    architecture, model_args = repo_config.get("architecture", ""), repo_config.get("model_args") or {}
    dinov3 = is_dinov3(shapes, asked, architecture)
    check_network(shapes, asked, architecture, model_args, dinov3)
    names = set(shapes)
    hidden_size, num_channels, *patch = shapes["patch_embed.proj.weight"]
    class_token, distillation_token = "cls_token" in names, "dist_token" in names
    num_registers = shapes.get("reg_token", shapes.get("register_tokens", (0, 0)))[1]
    clip_norm = "norm_pre.weight" in names
    depth = count_layers(shapes, r"blocks\.(\d+)\.")
    fields = dict(num_channels=num_channels, patch_size=patch, hidden_size=hidden_size, num_hidden_layers=depth)
    fields |= mlp_fields(shapes, architecture, model_args.get("act_layer"))
    global_pool = repo_config.get("global_pool") or model_args.get("global_pool")
    fields |= dict(
        patch_bias="patch_embed.proj.bias" in names,
        qkv_bias=bool({"blocks.0.attn.qkv.bias", "blocks.0.attn.q_bias"} & names),
        key_bias="blocks.0.attn.q_bias" not in names,
        qk_norm="blocks.0.attn.q_norm.weight" in names,
        use_class_token=class_token,
        use_distillation_token=distillation_token,
        num_register_tokens=num_registers,
        embedding_norm=clip_norm,
        layer_norm_eps=1e-5 if clip_norm else 1e-6,  # CLIP's, against timm's default
        layerscale_value=1.0 if {"blocks.0.ls1.gamma", "blocks.0.gamma_1"} & names else None,
        pooling=infer_pooling(names, global_pool, is_classifier),
        final_norm="pooled" if "fc_norm.weight" in names else "tokens" if "norm.weight" in names else "none",
        position_embedding="learned" if "pos_embed" in names else "none",
    )
    published = DINOV3_HEADS if dinov3 else PUBLISHED_HEADS
    fields["num_attention_heads"] = model_args.get("num_heads") or infer_num_heads(
        hidden_size, asked, notes, architecture, published
    )
    if dinov3:
        fields |= dinov3_fields(patch, asked, repo_config, global_pool, notes)
    elif "pos_embed" in names:
        # DeiT III's own code writes the tensors of timm's rope_ape.
        if not architecture and "blocks.0.gamma_1" in names:
            notes.append("no rotary positions assumed")
        num_positioned = int(class_token) + int(distillation_token)
        num_prefixes = (num_positioned, 0, num_positioned + num_registers)
        stated = timm_input_size(repo_config)
        fields["image_size"] = infer_image_size(
            shapes["pos_embed"][1], num_prefixes, patch, notes, stated and stated[1:], asked.get("image_size")
        )
    if "head.weight" in names:
        fields["num_labels"] = shapes["head.weight"][0]
        labels = repo_config.get("label_names") or ()
        if len(labels) == fields["num_labels"]:
            fields["id2label"] = dict(enumerate(labels))
    if not architecture and not fields["gated_mlp"] and "hidden_act" not in asked:
        notes.append(f"hidden_act {fields['hidden_act']} assumed")
    return fields


# timm's names of activations, and transformers'.
ACT_LAYERS = dict(
    gelu="gelu", gelu_tanh="gelu_pytorch_tanh", quick_gelu="quick_gelu", relu="relu", silu="silu", swish="silu", mish="mish"
)  # fmt: skip


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


def infer_pooling(names: set, global_pool: str | None, is_classifier: bool) -> str:
    has_probe = any(name.startswith("attn_pool.") for name in names)
    if global_pool not in (None, "token", "avg", "map") or (global_pool == "map" and not has_probe):
        raise ValueError(f"global_pool {global_pool!r} of timm has no counterpart: token, avg and map have")
    if has_probe:
        return "map"
    if "fc_norm.weight" in names or "cls_token" not in names or global_pool == "avg":
        return "mean"
    return "cls_distillation" if is_classifier and {"head_dist.weight", "head_dist.bias"} & names else "cls"


def dinov3_fields(patch: list, asked: dict, repo_config: dict, global_pool: str | None, notes: list) -> dict:
    """Fields of timm's DINOv3 that its tensors do not tell: what its config.json says, else as timm builds it."""
    theta = (repo_config.get("model_args") or {}).get("rope_temperature", 100.0)
    fields = dict(position_embedding="rotary", rope_theta=theta, layer_norm_eps=1e-5)
    assumed = [] if names_dinov3(repo_config.get("architecture", "")) else list(fields)
    if global_pool is None:
        fields["pooling"] = "mean"
        assumed.append("pooling")
    size = timm_input_size(repo_config)
    if size is None:  # any other is as good to rotary positions
        assumed.append("image_size")
    sides = zip(size[1:] if size else [16 * side for side in patch], patch, strict=True)
    fields["image_size"] = [side // length * length for side, length in sides]
    assumed = [f"{field} {fields[field]}" for field in assumed if field not in asked]
    if assumed:
        notes.append(f"{', '.join(assumed)} assumed")
    return fields


TIMM = Family(
    RULES,
    extra_rules=extra_rules,
    ignored="mask_token|decoder_",
    title="timm (also DeiT, DINO, DINOv2, MAE)",
    signature="patch_embed.proj.weight",
    infer_fields=infer_timm,
)

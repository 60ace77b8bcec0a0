"""timm's VisionTransformer and DINOv3, and the code that shares their tensor names: DeiT, DINO, DINOv2, DeiT III, MAE, MoCo v3.

Neither a file nor a timm repo states the architecture in full: it is read off the shapes of the tensors.
"""

import re
from functools import partial

from transformers.core_model_loading import WeightConverter

from hf_vit.formats.conversions import POOLING_QKV, QKV, Apply, align_positions, join_heads, renamings, split_fused
from hf_vit.formats.family import ANTIALIASED, BICUBIC, RawFamily
from hf_vit.formats.source import PATCHES, PUBLISHED_HEADS, REGISTERS, Source
from hf_vit.formats.timm_networks import check_network, is_dinov3, names_dinov3
from hf_vit.formats.timm_processor import timm_input_size


DINOV3_HEADS = {4096: 32}
ACT_LAYERS = dict(gelu_tanh="gelu_pytorch_tanh", swish="silu")  # the others are called alike in transformers
# What the name of an architecture says of its activation, the first that is found in it.
ACTIVATIONS = {
    "quickgelu": "quick_gelu",
    r"large_patch16_siglip\w*_(256|384)": "gelu",
    r"_(patch32|large_patch16|so400m_patch16|giantopt_patch16)_siglip\w*_(256|384|512)": "gelu_pytorch_tanh",
}


def rules(config) -> list:
    gated_mlp = [  # fc1 holds both halves in timm, but for DINOv3
        *renamings(
            {r"mlp\.fc1_g\.": "mlp.gate_proj.", r"mlp\.fc1_x\.": "mlp.up_proj.", r"mlp\.fc2\.": "mlp.down_proj."}
        ),
        *split_fused(r"mlp\.fc1", "mlp.gate_proj", "mlp.up_proj"),
    ]
    one_head, two_heads = renamings({r"^head\.": "classifier."}), join_heads(r"^head\.", r"^head_dist\.")
    positions, align = ["embeddings.position_embeddings", REGISTERS], [Apply(partial(align_positions, config))]
    learned = [WeightConverter(["^pos_embed", f"^{REGISTERS}"], positions, align)]
    return [
        *renamings(
            {
                r"^blocks\.": "layers.",
                r"^patch_embed\.proj\.": f"{PATCHES}.",
                "^cls_token": "embeddings.cls_token",
                "^dist_token": "embeddings.distillation_token",
                "^(?:reg_token|register_tokens)": REGISTERS,
                r"^norm_pre\.": "embeddings.layernorm.",
                "norm1": "layernorm_before",
                "norm2": "layernorm_after",
                r"attn\.proj": "attention.o_proj",
                r"attn\.([qk])_norm": r"attention.\1_norm",
                # timm's Eva, which its DINOv3 is, keeps these biases apart from attn.qkv and has none for the keys.
                r"attn\.([qv])_bias": r"attention.\1_proj.bias",
                r"(?:ls|gamma_)([12])(?:\.gamma)?": r"layer_scale\1.lambda1",
                r"mlp\.w12\.": "mlp.fc1.",  # in DINOv2's own code
                r"mlp\.w3\.": "mlp.fc2.",
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
        *(two_heads if config.pooling == "cls_distillation" else one_head),
        *(gated_mlp if config.gated_mlp else []),
        *(learned if config.position_embedding == "learned" else []),
    ]


def infer_fields(source: Source) -> dict:
    """Fields from shapes, from what was asked for, and from the config.json of a timm repo, if there is one."""
    names, said, args = set(source.tensors), source.said, source.said.get("model_args") or {}
    architecture, size = said.get("architecture", ""), timm_input_size(said.get("pretrained_cfg") or {})
    dinov3 = is_dinov3(names, source.asked, architecture)
    check_network(names, source.asked, architecture, args, dinov3)
    fields = source.plain_fields(rules) | resampling(source)
    width, patch, global_pool = (
        fields["hidden_size"],
        fields["patch_size"],
        said.get("global_pool") or args.get("global_pool"),
    )
    published = {width: 16} if re.search("giantopt|vit_base_patch16_gap_", architecture) else PUBLISHED_HEADS
    named = (act for pattern, act in ACTIVATIONS.items() if re.search(pattern, architecture))
    act_layer = args.get("act_layer") or next(named, fields["hidden_act"])
    fields |= dict(
        num_attention_heads=args.get("num_heads") or source.num_heads(width, DINOV3_HEADS if dinov3 else published),
        hidden_act=ACT_LAYERS.get(act_layer, act_layer),
        qkv_bias=bool({"blocks.0.attn.qkv.bias", "blocks.0.attn.q_bias"} & names),
        key_bias="blocks.0.attn.q_bias" not in names,
        # CLIP's and DINOv3's, against timm's default
        layer_norm_eps=1e-5 if fields["embedding_norm"] or dinov3 else 1e-6,
        pooling=infer_pooling(names, global_pool or ("avg" if dinov3 else "token"), source.is_classifier),
        final_norm="pooled" if "fc_norm.weight" in names else "tokens" if "norm.weight" in names else "none",
        position_embedding="rotary" if dinov3 else "learned" if "pos_embed" in names else "none",
    )
    if not architecture and not fields["gated_mlp"]:
        source.assume(hidden_act=fields["hidden_act"])
    if dinov3:
        sides = zip(size[1:] if size else [16 * side for side in patch], patch, strict=True)
        fields["image_size"] = [side // length * length for side, length in sides]  # rotary positions take any
        fields["rope_theta"] = args.get("rope_temperature", 100.0)
        unknown = () if names_dinov3(architecture) else ("position_embedding", "rope_theta", "layer_norm_eps")
        source.assume(**{name: fields[name] for name in (*unknown, *(() if global_pool else ("pooling",)))})
    elif "pos_embed" in names:
        # DeiT III's own code writes the tensors of timm's rope_ape.
        if not architecture and "blocks.0.gamma_1" in names:
            source.notes.append("no rotary positions assumed")
        tokens = int(fields["use_class_token"]) + int(fields["use_distillation_token"])
        prefixes, positions = (tokens, 0, tokens + fields["num_register_tokens"]), source.tensors["pos_embed"].shape[1]
        fields["image_size"] = source.image_size(positions, prefixes, patch, size and size[1:])
    labels = said.get("label_names") or ()
    if len(labels) == fields.get("num_labels"):
        fields["id2label"] = dict(enumerate(labels))
    return fields


def resampling(source: Source) -> dict:
    """How the code that wrote it resamples positions; a plain pickle without a head is taken for DINO's.

    timm: bicubic with antialiasing (timm/layers/pos_embed.py, resample_abs_pos_embed). DINO and DINOv2: bicubic by the factor
    (side + 0.1) / old side (facebookresearch/dino, vision_transformer.py; facebookresearch/dinov2, models/vision_transformer.py,
    interpolate_pos_encoding); DINOv2 with registers: with antialiasing, without the 0.1 (dinov2/hub/backbones.py). DeiT, MAE and
    I-JEPA: bicubic to the size (facebookresearch/deit, main.py; facebookresearch/mae, util/pos_embed.py).
    """
    containers, names = source.containers, source.tensors
    if not source.is_pickle or {"state_dict", "state_dict_ema"} & containers or "register_tokens" in names:
        return ANTIALIASED
    if {"model", "model_ema", "target_encoder"} & containers:
        return BICUBIC
    if "head.weight" in names and "mask_token" not in names:
        return ANTIALIASED
    if not containers and "mask_token" not in names:
        source.notes.append("positions of DINO assumed (position_interpolation bicubic_offset)")
    return BICUBIC | dict(position_interpolation="bicubic_offset")


def infer_pooling(names: set, global_pool: str, is_classifier: bool | None) -> str:
    has_probe = "attn_pool.latent" in names
    if global_pool not in ("token", "avg", "map") or (global_pool == "map" and not has_probe):
        raise ValueError(f"global_pool {global_pool!r} of timm has no counterpart: token, avg and map have")
    if has_probe:
        return "map"
    if "fc_norm.weight" in names or "cls_token" not in names or global_pool == "avg":
        return "mean"
    return "cls_distillation" if is_classifier and {"head_dist.weight", "head_dist.bias"} & names else "cls"


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

"""Networks of timm with tensors like a plain ViT's that compute something else: told apart, and refused.

A repo tells them by the name of its architecture, a file by a tensor that they alone have.
"""

# Part of an architecture's name: what no field expresses.
OTHER_NAMES = {
    "test_vit": "a number of heads that nothing tells",
    "_rpn_": "norms in its residual branches",
    "_pe_": "rotary positions on top of learned ones",
    "eva02": "rotary positions on top of learned ones, or norms behind its branches",
    "sapiens2": "RMSNorm in place of LayerNorm",
    "rope_mixed": "rotary positions with learned frequencies",
    "rope": "rotary positions that count patches, where those of DINOv3 span the image",
}
# What timm builds DINOv3 with: another value makes another network of the same tensors.
DINOV3_ARGUMENTS = dict(
    rope_type="dinov3", rope_rotate_half=True, rope_grid_offset=0.0, rope_grid_indexing="ij", use_post_norm=False
)
# What tensors or fields tell, and what matters in training alone. Of all others only a value that is off leaves the network as it is.
READ_ARGUMENTS = {
    "img_size", "patch_size", "in_chans", "num_classes", "global_pool", "embed_dim", "depth", "num_heads", "mlp_ratio", "qkv_bias",
    "qk_norm", "proj_bias", "init_values", "class_token", "pos_embed", "no_embed_class", "reg_tokens", "pre_norm", "final_norm",
    "fc_norm", "act_layer", "dynamic_img_size", "drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate",
    "drop_path_rate", "weight_init", "fix_init", "rope_temperature", "use_rot_pos_emb", "num_reg_tokens", "swiglu_mlp",
}  # fmt: skip


def names_dinov3(architecture: str) -> bool:
    """Whether the name is of a DINOv3; LingBot-Vision (arXiv 2607.05247) is the same network."""
    return "dinov3" in architecture or "lingbot" in architecture


def is_dinov3(names: set, asked: dict, architecture: str) -> bool:
    """Whether it is DINOv3: by the positions asked for, else by the name of its architecture or by its tensors.

    Of timm's networks only those of its Eva class call LayerScale gamma_1 and have no attn.qkv.bias, and of those without
    pos_embed only DINOv3 has a class token and registers.
    """
    if "position_embedding" in asked:
        return asked["position_embedding"] == "rotary"
    has, lacks = {"cls_token", "reg_token", "blocks.0.gamma_1"}, {"pos_embed", "blocks.0.attn.qkv.bias"}
    return names_dinov3(architecture) or (has <= names and not lacks & names)


def check_network(names: set, asked: dict, architecture: str, model_args: dict, dinov3: bool):
    """Raise ValueError for a network of timm that no field expresses, naming what is not expressed."""
    known = {key: value for key, value in model_args.items() if key in READ_ARGUMENTS or not value} | DINOV3_ARGUMENTS
    found = [what for part, what in OTHER_NAMES.items() if part in architecture]
    found += [f"{key}={value!r} in its model_args" for key, value in model_args.items() if value != known.get(key)]
    if "norm_pre.weight" in names and ("attn_pool.latent" in names or not names & {"norm.weight", "fc_norm.weight"}):
        found.append("rotary positions on top of learned ones, as timm's Perception Encoder has")
    if not architecture and {"pos_embed", "blocks.0.attn.q_bias"} <= names:
        found.append("q_bias beside pos_embed, the sign of EVA-02's rotary positions on top of learned ones")
    if dinov3 and "attn_pool.latent" in names:
        found.append("attention pooling over class token and registers too")
    if not {"patch_embed.proj.weight", "blocks.0.attn.qkv.weight"} <= names:
        found.append("no patch_embed.proj or blocks.N.attn.qkv, and is no VisionTransformer of timm")
    if not ("pos_embed" in names or "position_embedding" in asked or dinov3):
        found.append(
            'no pos_embed, and not the tensors of timm\'s DINOv3 (pass position_embedding="none", "sincos2d" or "rotary", that '
            "of DINOv3, if the model has no more than that)"
        )
    if found:
        raise ValueError(f"{architecture or 'it'} has {found[0]}, which no field expresses")

"""Writers of public checkpoint formats that transformers has no model for: timm, torchvision, JAX, original repositories.

Each takes a reference model of transformers that computes the same, and a folder, and returns the file it wrote there.
"""

import argparse
import json
import re
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file


def rename(name: str, patterns: dict[str, str]) -> str:
    for pattern, replacement in patterns.items():
        name = re.sub(pattern, replacement, name)
    return name


def save_safetensors(tensors: dict[str, torch.Tensor], file: Path) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return file


def save_pickle(content: dict, file: Path) -> Path:
    torch.save(content, file)
    return file


def short_names(reference) -> dict[str, torch.Tensor]:
    """The tensors of any native ViT under one set of short names: blocks.N.q.weight, cls, pos, head.weight, ..."""
    patterns = {
        r"^(vit|deit|ijepa|dinov2|dinov2_with_registers|vision_model|model)\.": "",
        r"^(encoder\.)?layers?\.": "blocks.",
        r"layernorm_before|layer_norm1": "norm1",
        r"layernorm_after|layer_norm2": "norm2",
        r"(attention|self_attn)\.(q|k|v)_proj": r"\2",
        r"(attention|self_attn)\.(o|out)_proj": "o",
        r"mlp\.": "",
        r"layer_scale(\d)\.lambda1": r"gamma\1",
        r"embeddings\.(cls_token|class_embedding)": "cls",
        r"embeddings\.distillation_token": "dist",
        r"embeddings\.register_tokens": "registers",
        r"embeddings\.position_embeddings?(\.weight)?$": "pos",
        r"embeddings\.patch_embeddings?(\.projection)?": "patch",
        r"pre_layrnorm": "norm_pre",
        r"^(post_)?layernorm": "norm",
        r"^(cls_)?classifier": "head",
        r"^distillation_classifier": "head_dist",
    }
    tensors = {rename(name, patterns): tensor.clone() for name, tensor in reference.state_dict().items()}
    for name in ("cls", "dist"):
        if name in tensors:
            tensors[name] = tensors[name].reshape(1, 1, -1)
    if "pos" in tensors:
        tensors["pos"] = tensors["pos"].reshape(1, -1, tensors["pos"].shape[-1])
    return tensors


def to_timm(reference) -> dict[str, torch.Tensor]:
    """Names of timm's VisionTransformer: q, k and v in one tensor, and so gate and up of SwiGLU."""
    patterns = {
        r"\.o\.": ".attn.proj.",
        r"\.(fc1|fc2)\.": r".mlp.\1.",
        r"\.gamma(\d)": r".ls\1.gamma",
        "^cls$": "cls_token",
        "^dist$": "dist_token",
        "^registers$": "reg_token",
        "^pos$": "pos_embed",
        r"^patch\.": "patch_embed.proj.",
        r"^head\.probe": "attn_pool.latent",
        "down_proj": "mlp.fc2",
    }
    tensors, timm = short_names(reference), {}
    for name, tensor in tensors.items():
        if ".q." in name:
            fused = [tensors[name.replace(".q.", f".{part}.")] for part in "qkv"]
            timm[name.replace(".q.", ".attn.qkv.")] = torch.cat(fused)
        elif "gate_proj" in name:
            fused = [tensor, tensors[name.replace("gate_proj", "up_proj")]]
            timm[name.replace("gate_proj", "mlp.fc1")] = torch.cat(fused)
        elif not re.search(r"\.[kv]\.|up_proj|mask_token", name):
            timm[rename(name, patterns)] = tensor
    return timm


def to_siglip_timm(reference):
    timm, D = {}, reference.config.hidden_size
    for name, tensor in to_timm(reference).items():
        if name.startswith("head.attention.in_proj_"):
            kind = name.rpartition("_")[2]
            timm[f"attn_pool.q.{kind}"], timm[f"attn_pool.kv.{kind}"] = tensor.split([D, 2 * D])
        else:
            for ours, theirs in (("head.attn.proj", "proj"), ("head.layernorm", "norm"), ("head.mlp", "mlp")):
                name = name.replace(ours, f"attn_pool.{theirs}")
            timm[name] = tensor
    return timm


def to_eva(reference) -> dict[str, torch.Tensor]:
    """Names of timm's Eva, which its DINOv3 is: q, k and v in one weight, separate biases, and none for the keys."""
    patterns = {
        r"\.q\.weight": ".attn.qkv.weight",
        r"\.([qv])\.bias": r".attn.\1_bias",
        r"\.o\.": ".attn.proj.",
        r"\.gamma": ".gamma_",
        "gate_proj": "mlp.fc1_g",
        "up_proj": "mlp.fc1_x" if reference.config.use_gated_mlp else "mlp.fc1",
        "down_proj": "mlp.fc2",
        "^cls$": "cls_token",
        "^registers$": "reg_token",
        r"^patch\.": "patch_embed.proj.",
    }
    tensors, timm = short_names(reference), {}
    for name, tensor in tensors.items():
        if name.endswith(".q.weight"):
            tensor = torch.cat([tensors[name.replace(".q.", f".{part}.")] for part in "qkv"])
        elif re.search(r"\.[kv]\.weight|mask_token", name):
            continue
        timm[rename(name, patterns)] = tensor
    return timm


def timm_file(reference, folder, names=to_timm):
    return save_safetensors(names(reference), folder / "timm.safetensors")


def timm_repo(names=to_timm, **fields):
    """A repo as timm pushes it: model.safetensors and a config.json that names the architecture."""

    def write(reference, folder):
        save_safetensors(names(reference), folder / "model.safetensors")
        config = {"architecture": "vit_base_patch16_224", "num_classes": 1000, "pretrained_cfg": {}, **fields}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


def deit3_file(reference, folder):
    """DeiT III has positions for the patches alone (timm's no_embed_class)."""
    tensors = to_timm(reference)
    return save_safetensors({**tensors, "pos_embed": tensors["pos_embed"][:, 1:]}, folder / "deit3.safetensors")


def dino_file(reference, folder):
    """DINO's full checkpoint: teacher and student in one pickle, each behind module.backbone., with their heads and arguments."""
    teacher = {f"module.backbone.{name}": tensor for name, tensor in to_timm(reference).items()}
    teacher["module.head.mlp.0.weight"] = torch.randn(8, 8)
    content = {"student": {}, "teacher": teacher, "epoch": 100, "args": argparse.Namespace(arch="vit_small")}
    return save_pickle(content, folder / "dino.pth")


def dinov2_file(reference, folder):
    """The original DINOv2 names: register_tokens, mask_token, and w12 and w3 for SwiGLU."""
    patterns = {"reg_token": "register_tokens"}
    if reference.config.use_swiglu_ffn:
        patterns |= {r"mlp\.fc1": "mlp.w12", r"mlp\.fc2": "mlp.w3"}
    tensors = {rename(name, patterns): tensor for name, tensor in to_timm(reference).items()}
    tensors["mask_token"] = torch.randn(1, reference.config.hidden_size)
    return save_pickle(tensors, folder / "dinov2.pth")


def deit_file(reference, folder):
    return save_pickle({"model": to_timm(reference)}, folder / "deit.pth")


def mae_file(reference, folder):
    tensors = {**to_timm(reference), "mask_token": torch.randn(1, 1, 8), "decoder_embed.weight": torch.randn(8, 8)}
    return save_pickle({"model": tensors}, folder / "mae.pth")


def torchvision_file(reference, folder):
    """torchvision's VisionTransformer, such as vit_b_16."""
    patterns = {
        r"^blocks\.(\d+)\.": r"encoder.layers.encoder_layer_\1.",
        r"\.norm([12])": r".ln_\1",
        r"\.q\.": ".self_attention.in_proj_",
        r"\.o\.": ".self_attention.out_proj.",
        r"\.fc1": ".mlp.0",
        r"\.fc2": ".mlp.3",
        "^cls$": "class_token",
        "^pos$": "encoder.pos_embedding",
        r"^patch\.": "conv_proj.",
        r"^norm\.": "encoder.ln.",
        r"^head\.": "heads.head.",
    }
    short, tensors = short_names(reference), {}
    for name, tensor in short.items():
        if ".q." in name:
            tensor = torch.cat([short[name.replace(".q.", f".{part}.")] for part in "qkv"])
        elif re.search(r"\.[kv]\.", name):
            continue
        tensors[rename(name, patterns)] = tensor
    return save_pickle(tensors, folder / "vit_b_16.pth")


def jax_file(big_vision: bool = False, prefix: str = ""):
    """Google's Flax names, numbered as in vision_transformer (original, augreg) or as in big_vision."""
    mlp, attention, second = "MlpBlock_3", "MultiHeadDotProductAttention_1", "LayerNorm_2"
    if big_vision:
        mlp, attention, second = "MlpBlock_0", "MultiHeadDotProductAttention_0", "LayerNorm_1"

    def write(reference, folder):
        D, heads = reference.config.hidden_size, reference.config.num_attention_heads
        arrays = {}
        for name, tensor in short_names(reference).items():
            name = re.sub(r"^blocks\.(\d+)\.", r"Transformer/encoderblock_\1/", name)
            *path, part, kind = name.replace("/", ".").split(".") if "." in name else [name, ""]
            path = "/".join(path)
            if part in "qkv" and kind:
                head = tensor.T.reshape(D, heads, -1) if kind == "weight" else tensor.reshape(heads, -1)
                part, tensor = f"{attention}/{dict(q='query', k='key', v='value')[part]}", head
            elif part == "o":
                part, tensor = f"{attention}/out", tensor.T.reshape(heads, -1, D) if kind == "weight" else tensor
            elif part in ("fc1", "fc2"):
                part, tensor = f"{mlp}/Dense_{int(part[2]) - 1}", tensor.T if kind == "weight" else tensor
            elif part in ("norm1", "norm2"):
                part, kind = ("LayerNorm_0" if part == "norm1" else second), kind.replace("weight", "scale")
            elif part == "norm":
                part, kind = "Transformer/encoder_norm", kind.replace("weight", "scale")
            elif part == "patch":
                part, tensor = "embedding", tensor.permute(2, 3, 1, 0) if kind == "weight" else tensor
            elif part == "head":
                tensor = tensor.T if kind == "weight" else tensor
            elif (path, part) == ("pooler", "dense"):
                path, part, tensor = "", "pre_logits", tensor.T if kind == "weight" else tensor
            elif part == "pos":
                part = "pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding"
            key = "/".join(filter(None, (path, part, kind.replace("weight", "kernel"))))
            arrays[prefix + key] = tensor.numpy()
        np.savez(folder / "vit.npz", **arrays)
        return folder / "vit.npz"

    return write

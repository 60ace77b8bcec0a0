"""The public formats: CASES, each a reference model of transformers and how its weights are written.

A writer takes a reference that computes what its library computes, and a folder, and returns the file it wrote there. Those of timm,
torchvision, JAX and original repositories stand in for the libraries, which `make peers` asks.
"""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file


def rename(tensors: dict[str, torch.Tensor], patterns: dict[str, str]) -> dict[str, torch.Tensor]:
    """Tensors by their new names: each pattern that is found in a name is replaced, one after the other."""
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, replacement in patterns.items():
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return renamed


def fuse(tensors: dict[str, torch.Tensor], first: str, *others: str) -> dict[str, torch.Tensor]:
    """Tensors whose names differ in `first` and `others` alone are stacked, under the name with `first`."""
    fused = {name: tensor for name, tensor in tensors.items() if not any(other in name for other in others)}
    for name in fused:
        if first in name:
            fused[name] = torch.cat([tensors[name.replace(first, part)] for part in (first, *others)])
    return fused


def save(content: dict, file: Path) -> Path:
    """As its suffix says; "old..." as torch saved before version 1.6."""
    file.parent.mkdir(exist_ok=True)
    if file.suffix == ".npz":
        np.savez(file, **content)
    elif file.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in content.items()}, file, metadata={"format": "pt"})
    else:
        torch.save(content, file, _use_new_zipfile_serialization=not file.name.startswith("old"))
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
    tensors = {name: tensor.clone() for name, tensor in reference.state_dict().items() if "mask_token" not in name}
    tensors = rename(tensors, patterns)
    for name in ("cls", "dist"):
        if name in tensors:
            tensors[name] = tensors[name].reshape(1, 1, -1)
    if "pos" in tensors:
        tensors["pos"] = tensors["pos"].reshape(1, -1, tensors["pos"].shape[-1])
    return tensors


def to_timm(reference) -> dict[str, torch.Tensor]:
    """Names of timm's VisionTransformer: q, k and v in one tensor, and so gate and up of SwiGLU."""
    patterns = {
        r"\.q\.": ".attn.qkv.",
        r"\.o\.": ".attn.proj.",
        r"\.(fc1|fc2)\.": r".mlp.\1.",
        r"\.gamma(\d)": r".ls\1.gamma",
        "^cls$": "cls_token",
        "^dist$": "dist_token",
        "^registers$": "reg_token",
        "^pos$": "pos_embed",
        r"^patch\.": "patch_embed.proj.",
        r"^head\.probe": "attn_pool.latent",
        "gate_proj": "mlp.fc1",
        "down_proj": "mlp.fc2",
    }
    tensors = fuse(short_names(reference), ".q.", ".k.", ".v.")
    return rename(fuse(tensors, "gate_proj", "up_proj"), patterns)


def to_siglip_timm(reference) -> dict[str, torch.Tensor]:
    """As `to_timm`, with the query of the attention pooling apart from its keys and values."""
    patterns = {r"^head\.attn\.": "attn_pool.", r"^head\.layernorm": "attn_pool.norm", r"^head\.mlp": "attn_pool.mlp"}
    tensors, D = rename(to_timm(reference), patterns), reference.config.hidden_size
    for kind in ("weight", "bias"):
        query, key_and_value = tensors.pop(f"head.attention.in_proj_{kind}").split([D, 2 * D])
        tensors |= {f"attn_pool.q.{kind}": query, f"attn_pool.kv.{kind}": key_and_value}
    return tensors


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
    return rename(fuse(short_names(reference), ".q.weight", ".k.weight", ".v.weight"), patterns)


def timm_file(reference, folder, names=to_timm):
    return save(names(reference), folder / "timm.safetensors")


def timm_repo(names=to_timm, file="model.safetensors", **fields):
    """A repo as timm pushes it: its weights and a config.json that names the architecture."""

    def write(reference, folder):
        save(names(reference), folder / file)
        config = {"architecture": "vit_base_patch16_224", "num_classes": 1000, "pretrained_cfg": {}, **fields}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


def deit3_file(reference, folder):
    """DeiT III has positions for the patches alone (timm's no_embed_class); the reference loses that of its class token."""
    reference.base_model.embeddings.position_embeddings[:, 0] = 0
    tensors = to_timm(reference)
    return save({**tensors, "pos_embed": tensors["pos_embed"][:, 1:]}, folder / "deit3.safetensors")


def dino_file(reference, folder):
    """DINO's full checkpoint: teacher and student in one pickle, each behind module.backbone., with their heads and arguments; the
    reference loses its pooler."""
    reference.pooler = None
    teacher = {f"module.backbone.{name}": tensor for name, tensor in to_timm(reference).items()}
    teacher["module.head.mlp.0.weight"] = torch.randn(8, 8)
    content = {"student": {}, "teacher": teacher, "epoch": 100, "args": argparse.Namespace(arch="vit_small")}
    return save(content, folder / "dino.pth")


def dinov2_file(reference, folder):
    """The original DINOv2 names: register_tokens, mask_token, and w12 and w3 for SwiGLU."""
    patterns = {"reg_token": "register_tokens"}
    if reference.config.use_swiglu_ffn:
        patterns |= {r"mlp\.fc1": "mlp.w12", r"mlp\.fc2": "mlp.w3"}
    tensors = rename(to_timm(reference), patterns)
    tensors["mask_token"] = torch.randn(1, reference.config.hidden_size)
    return save(tensors, folder / "dinov2.pth")


def dinov3_file(reference, folder):
    """Meta's DINOv3: storage_tokens, w1 to w3 for SwiGLU, a bias of the keys that a mask takes out, and the rotary periods."""
    config = reference.config
    patterns = {
        r"\.q\.": ".attn.qkv.",
        r"\.o\.": ".attn.proj.",
        r"\.gamma(\d)": r".ls\1.gamma",
        "gate_proj": "mlp.w1",
        "up_proj": "mlp.w2" if config.use_gated_mlp else "mlp.fc1",
        "down_proj": "mlp.w3" if config.use_gated_mlp else "mlp.fc2",
        "^cls$": "cls_token",
        "^registers$": "storage_tokens",
        r"^patch\.": "patch_embed.proj.",
    }
    tensors, D = short_names(reference), config.hidden_size
    for index in range(config.num_hidden_layers if config.query_bias else 0):
        tensors[f"blocks.{index}.k.bias"] = torch.randn(D)  # which the mask takes out
        tensors[f"blocks.{index}.attn.qkv.bias_mask"] = torch.ones(3, D).index_fill(0, torch.tensor(1), 0).flatten()
    tensors = rename(fuse(tensors, ".q.", ".k.", ".v."), patterns)
    quarter = D // config.num_attention_heads // 4
    tensors["rope_embed.periods"] = config.rope_theta ** (torch.arange(quarter) / quarter)
    return save(tensors | {"mask_token": torch.randn(1, D)}, folder / "dinov3.pth")


def to_open_clip(reference) -> dict[str, torch.Tensor]:
    """OpenCLIP's names of a CLIPVisionModel, with the projection and a text tower."""
    patterns = {
        r"^blocks\.": "transformer.resblocks.",
        r"\.q\.": ".attn.in_proj_",
        r"\.o\.": ".attn.out_proj.",
        r"\.norm": ".ln_",
        r"\.fc1": ".mlp.c_fc",
        r"\.fc2": ".mlp.c_proj",
        "^cls$": "class_embedding",
        "^pos$": "positional_embedding",
        r"^patch\.": "conv1.",
        r"^norm_pre\.": "ln_pre.",
        r"^norm\.": "ln_post.",
        "^": "visual.",
    }
    tensors = rename(fuse(short_names(reference), ".q.", ".k.", ".v."), patterns)
    for name in ("visual.class_embedding", "visual.positional_embedding"):
        tensors[name] = tensors[name].squeeze()
    text = {"token_embedding.weight": torch.randn(9, 8), "transformer.resblocks.0.ln_1.weight": torch.randn(8)}
    return tensors | {"visual.proj": torch.randn(len(tensors["visual.class_embedding"]), 8), **text}


def open_clip_repo(reference, folder):
    save(to_open_clip(reference), folder / "open_clip_model.safetensors")
    vision = dict(image_size=reference.config.image_size, patch_size=reference.config.patch_size)
    model = dict(embed_dim=8, quick_gelu=True, vision_cfg=vision, text_cfg={})
    (folder / "open_clip_config.json").write_text(json.dumps(dict(model_cfg=model, preprocess_cfg={})))
    return folder


def deit_file(reference, folder):
    return save({"model": to_timm(reference)}, folder / "deit.pth")


def mae_file(reference, folder):
    tensors = {**to_timm(reference), "mask_token": torch.randn(1, 1, 8), "decoder_embed.weight": torch.randn(8, 8)}
    return save({"model": tensors}, folder / "mae.pth")


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
    tensors = rename(fuse(short_names(reference), ".q.", ".k.", ".v."), patterns)
    return save(tensors, folder / "vit_b_16.pth")


def jax_file(big_vision: bool = False, prefix: str = ""):
    """Google's Flax names, numbered as in vision_transformer (original, augreg) or as in big_vision."""
    mlp, attention, second = ("0", "0", "1") if big_vision else ("3", "1", "2")
    attention = f"MultiHeadDotProductAttention_{attention}"
    patterns = {
        r"norm(\d?)\.weight": r"norm\1.scale",
        "weight$": "kernel",
        r"\.": "/",
        "^blocks/": "Transformer/encoderblock_",
        "/norm1/": "/LayerNorm_0/",
        "/norm2/": f"/LayerNorm_{second}/",
        "/q/": f"/{attention}/query/",
        "/k/": f"/{attention}/key/",
        "/v/": f"/{attention}/value/",
        "/o/": f"/{attention}/out/",
        "/fc1/": f"/MlpBlock_{mlp}/Dense_0/",
        "/fc2/": f"/MlpBlock_{mlp}/Dense_1/",
        "^norm/": "Transformer/encoder_norm/",
        r"^head/layernorm": "head/LayerNorm_0",
        r"^head/(?=probe|[A-Z])": "MAPHead_0/",
        "^patch/": "embedding/",
        "^pooler/dense/": "pre_logits/",
        "^pos$": "pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding",
        "^": prefix,
    }

    def write(reference, folder):
        heads, arrays, tensors = reference.config.num_attention_heads, {}, short_names(reference)
        for name in [name for name in tensors if "in_proj" in name]:  # of SigLIP's probe
            parts = zip("qkv", tensors.pop(name).chunk(3), strict=True)
            tensors |= {name.replace("attention.in_proj_", f"{m}."): tensor for m, tensor in parts}
        for name, tensor in tensors.items():
            if tensor.ndim == 4:
                tensor = tensor.permute(2, 3, 1, 0)  # (D, C, P, P) -> (P, P, C, D)
            elif tensor.ndim == 2:
                tensor = tensor.T  # (out, in) -> (in, out)
            if re.search(r"\.[qkv]\.", name):
                tensor = tensor.unflatten(-1, (heads, -1))  # (..., D) -> (..., A, K)
            elif name.endswith(".o.weight"):
                tensor = tensor.unflatten(0, (heads, -1))  # (D, D) -> (A, K, D)
            arrays[name] = tensor
        return save({name: tensor.numpy() for name, tensor in rename(arrays, patterns).items()}, folder / "vit.npz")

    return write


def native_folder(reference, folder):
    reference.save_pretrained(folder)
    return folder


@dataclass
class Case:
    """A reference and how its family stores it.

    Args:
        model: name of the reference class in transformers.
        config: what its config gets beside the size.
        family: for the table; of transformers if not given.
        write: (reference, folder) -> the file or repository that was written.
        resample: how its library interpolates positions, if not as the reference class: arguments of torch's `interpolate`, and
            `offset`, which DINO adds to the new side.
        load: arguments of our loading, for what the file does not say.
    """

    model: str
    config: dict = field(default_factory=dict)
    family: str = ""
    write: Callable = native_folder
    resample: dict = field(default_factory=dict)
    load: dict = field(default_factory=dict)


TIMM, DINO = dict(antialias=True), dict(offset=0.1)
CORNERS, LINEAR = dict(align_corners=True), dict(mode="bilinear", align_corners=True)
EPS, REGISTERS, ALL_PATCHES = dict(layer_norm_eps=1e-6), dict(num_register_tokens=4), dict(mask_ratio=0.0)
SWIGLU, GATED = dict(use_swiglu_ffn=True), dict(REGISTERS, use_gated_mlp=True, hidden_act="silu")
CLASSIFIER, CLS = "ViTForImageClassification", dict(pooling="cls")
CLIP, CLIP_FILE = dict(final_norm="pooled"), dict(final_norm="pooled", hidden_act="quick_gelu")
eva_file = partial(timm_file, names=to_eva)
CASES = [
    *map(
        Case,
        (
            "ViTModel", CLASSIFIER, "DeiTModel", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher",
            "ViTMSNModel", "ViTMSNForImageClassification", "Dinov2Model", "Dinov2ForImageClassification",
            "Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification", "DINOv3ViTModel", "CLIPModel",
            "CLIPVisionModel", "CLIPForImageClassification", "MetaClip2Model", "MetaClip2VisionModel",
            "MetaClip2ForImageClassification", "Tipsv2VisionModel", "PixioModel", "InternVLVisionModel", "SiglipModel",
            "SiglipVisionModel", "SiglipForImageClassification", "IJepaModel", "IJepaForImageClassification",
        ),
    ),
    Case("ViTMAEModel", ALL_PATCHES),
    Case("ViTMAEForPreTraining", ALL_PATCHES),
    Case("Dinov2Model", SWIGLU),
    Case("DINOv3ViTModel", GATED),
    Case("Tipsv2Model", SWIGLU),
    Case(CLASSIFIER, EPS, "timm repo, augreg", timm_repo(to_timm, global_pool="token"), TIMM),
    Case(CLASSIFIER, EPS, "timm file, augreg", timm_file, TIMM),
    Case("IJepaForImageClassification", EPS, "timm file, no class token", timm_file, TIMM),
    Case("Dinov2WithRegistersModel", {}, "timm file, registers", timm_file, TIMM),
    Case("Dinov2Model", {}, "timm file, DeiT III", deit3_file, TIMM),
    Case("CLIPVisionModel", {}, "timm file, CLIP", timm_file, TIMM, CLIP_FILE),
    Case("CLIPVisionModel", {}, "OpenCLIP repo", open_clip_repo, TIMM, CLIP),
    Case("CLIPVisionModel", {}, "OpenCLIP file", partial(timm_file, names=to_open_clip), TIMM, CLIP_FILE),
    Case(
        "SiglipVisionModel",
        {},
        "timm file, SigLIP",
        partial(timm_file, names=to_siglip_timm),
        TIMM,
        dict(hidden_act="gelu_pytorch_tanh"),
    ),
    Case(
        "DINOv3ViTModel",
        REGISTERS,
        "timm repo, DINOv3",
        timm_repo(to_eva, architecture="vit_small_patch16_dinov3_qkvb", global_pool="token"),
    ),
    Case("DINOv3ViTModel", dict(REGISTERS, query_bias=False, value_bias=False), "timm file, DINOv3", eva_file, load=CLS),
    Case("DINOv3ViTModel", GATED, "timm file, DINOv3", eva_file, load=CLS),
    Case("ViTModel", EPS, "DINO .pth, full checkpoint", dino_file, DINO),
    Case("Dinov2WithRegistersModel", {}, "DINOv2 .pth", dinov2_file),
    Case("Dinov2Model", SWIGLU, "DINOv2 .pth", dinov2_file, DINO),
    Case("DINOv3ViTModel", REGISTERS, "DINOv3 .pth", dinov3_file),
    Case("DINOv3ViTModel", GATED, "DINOv3 .pth", dinov3_file),
    Case("DeiTForImageClassificationWithTeacher", EPS, "DeiT .pth, distilled", deit_file),
    Case("ViTMAEModel", EPS | ALL_PATCHES, "MAE .pth", mae_file),
    Case(CLASSIFIER, EPS, "torchvision .pth", torchvision_file, CORNERS),
    Case("ViTModel", EPS, "JAX .npz, original, pre_logits", jax_file(), LINEAR),
    Case(CLASSIFIER, EPS, "JAX .npz, augreg", jax_file(), LINEAR),
    Case(CLASSIFIER, EPS, "JAX .npz, training state", jax_file(prefix="opt/target/"), LINEAR),
    Case(CLASSIFIER, EPS, "JAX .npz, big_vision", jax_file(True, "params/"), LINEAR),
]  # fmt: skip

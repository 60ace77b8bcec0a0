"""Measure how far our models are from the ones whose weights they load, family by family.

python recipes/parity.py     (ViT-B sizes, several minutes: writes model_cards/parity.json; recipes/tables.py puts it in README.md)

Each case builds a reference model with random weights in every tensor, writes it as its family writes it, loads the file
with hf_vit, compares the outputs, hands the model back and compares again. Where a format has no model in transformers
(timm, torchvision, JAX, original repositories), a small writer of its tensor names, below, stands on a reference of
transformers that computes the same.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from hf_vit import HFViTForImageClassification, HFViTModel
from hf_vit.system.errors import run_script


HOUSE = Path(__file__).parents[1]
SMALL = dict(hidden_size=192, num_attention_heads=3, num_hidden_layers=12, intermediate_size=768, image_size=64)


@dataclass(frozen=True)
class Case:
    """A reference and how its family stores it.

    Args:
        family: for the table.
        model: name of the reference class in transformers.
        config: what its config gets beside the size.
        write: None for a folder by save_pretrained, or (reference, folder) -> the file that was written.
        load: what our loading gets, where the file does not say all.
        back: name of the class that `to_transformers` gives, or None where there is none.
        prepare: changes the reference first, where the format cannot hold all that its class can.
    """

    family: str
    model: str
    config: dict = field(default_factory=dict)
    write: Callable | None = None
    load: dict = field(default_factory=dict)
    back: str | None = None
    prepare: Callable | None = None


# ----------------------------------------------------------------------------------------------------------------------
# Writers of other formats


def parts(reference) -> dict[str, torch.Tensor]:
    """The tensors of any native ViT under one set of short names: blocks.N.q.weight, cls, pos, head.weight, ..."""
    names = {
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
    tensors = {}
    for name, tensor in reference.state_dict().items():
        for pattern, short in names.items():
            name = re.sub(pattern, short, name)
        tensors[name] = tensor.clone()
    for name in ("cls", "dist"):
        if name in tensors:
            tensors[name] = tensors[name].reshape(1, 1, -1)
    if "pos" in tensors:
        tensors["pos"] = tensors["pos"].reshape(1, -1, tensors["pos"].shape[-1])
    return tensors


def to_timm(reference) -> dict[str, torch.Tensor]:
    """Names of timm's VisionTransformer: q, k and v in one tensor."""
    names = {
        r"\.o\.": ".attn.proj.", r"\.(fc1|fc2)\.": r".mlp.\1.", r"\.gamma(\d)": r".ls\1.gamma", "^cls$": "cls_token", "^dist$": "dist_token",
        "^registers$": "reg_token", "^pos$": "pos_embed", r"^patch\.": "patch_embed.proj.", r"^head\.probe": "attn_pool.latent",
    }  # fmt: skip
    tensors, timm = parts(reference), {}
    for name, tensor in tensors.items():
        if re.search(r"\.q\.|gate_proj", name):
            fused = [name.replace(".q.", f".{part}.").replace("gate_proj", part) for part in ("q", "k", "v")]
            fused = [name, name.replace("gate_proj", "up_proj")] if "gate_proj" in name else fused
            new = name.replace(".q.", ".attn.qkv.").replace("gate_proj", "mlp.fc1")
            timm[new] = torch.cat([tensors[part] for part in fused])
        elif not re.search(r"\.[kv]\.|up_proj|mask_token", name):
            for pattern, short in names.items():
                name = re.sub(pattern, short, name)
            timm[name.replace("down_proj", "mlp.fc2")] = tensor
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
    """Names of timm's Eva, which its DINOv3 is: q, k and v in one tensor, but their biases apart, and none of the keys."""
    names = {
        r"\.q\.weight": ".attn.qkv.weight", r"\.([qv])\.bias": r".attn.\1_bias", r"\.o\.": ".attn.proj.", r"\.gamma": ".gamma_",
        "gate_proj": "mlp.fc1_g", "up_proj": "mlp.fc1_x" if reference.config.use_gated_mlp else "mlp.fc1", "down_proj": "mlp.fc2",
        "^cls$": "cls_token", "^registers$": "reg_token", r"^patch\.": "patch_embed.proj.",
    }  # fmt: skip
    tensors, timm = parts(reference), {}
    for name, tensor in tensors.items():
        if name.endswith(".q.weight"):
            tensor = torch.cat([tensors[name.replace(".q.", f".{part}.")] for part in "qkv"])
        elif re.search(r"\.[kv]\.weight|mask_token", name):
            continue
        for pattern, new in names.items():
            name = re.sub(pattern, new, name)
        timm[name] = tensor
    return timm


def timm_file(reference, folder, names=to_timm):
    save_file({name: tensor.contiguous() for name, tensor in names(reference).items()}, folder / "timm.safetensors")
    return folder / "timm.safetensors"


def timm_repo(names=to_timm, **said):
    """A repo as timm pushes it: model.safetensors and a config.json that names the architecture."""

    def write(reference, folder):
        save_file({name: t.contiguous() for name, t in names(reference).items()}, folder / "model.safetensors")
        config = {"architecture": "vit_base_patch16_224", "num_classes": 1000, "pretrained_cfg": {}, **said}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


def without_class_position(tensors):
    """The no_embed_class of DeiT III: positions for the patches alone."""
    return {**tensors, "pos_embed": tensors["pos_embed"][:, 1:]}


def deit3_file(reference, folder):
    save_file(
        {n: t.contiguous() for n, t in without_class_position(to_timm(reference)).items()},
        folder / "deit3.safetensors",
    )
    return folder / "deit3.safetensors"


def dino_file(reference, folder):
    """DINO's full checkpoint: teacher and student in one pickle, each behind module.backbone., with their heads and arguments."""
    import argparse

    teacher = {f"module.backbone.{name}": tensor for name, tensor in to_timm(reference).items()}
    teacher["module.head.mlp.0.weight"] = torch.randn(8, 8)
    content = {"student": {}, "teacher": teacher, "epoch": 100, "args": argparse.Namespace(arch="vit_small")}
    torch.save(content, folder / "dino.pth")
    return folder / "dino.pth"


def dinov2_file(reference, folder):
    """The original DINOv2 names: register_tokens, mask_token, and w12 and w3 for SwiGLU."""
    names = {"reg_token": "register_tokens"}
    if reference.config.use_swiglu_ffn:
        names |= {"mlp.fc1": "mlp.w12", "mlp.fc2": "mlp.w3"}
    tensors = {"mask_token": torch.randn(1, reference.config.hidden_size)}
    for name, tensor in to_timm(reference).items():
        for old, new in names.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    torch.save(tensors, folder / "dinov2.pth")
    return folder / "dinov2.pth"


def deit_file(reference, folder):
    torch.save({"model": to_timm(reference)}, folder / "deit.pth")
    return folder / "deit.pth"


def mae_file(reference, folder):
    tensors = {**to_timm(reference), "mask_token": torch.randn(1, 1, 8), "decoder_embed.weight": torch.randn(8, 8)}
    torch.save({"model": tensors}, folder / "mae.pth")
    return folder / "mae.pth"


def torchvision_file(reference, folder):
    """vit_b_16 and its kin."""
    tensors, names = {}, {
        r"^blocks\.(\d+)\.": r"encoder.layers.encoder_layer_\1.", r"\.norm([12])": r".ln_\1", r"\.o\.": ".self_attention.out_proj.",
        r"\.fc1": ".mlp.0", r"\.fc2": ".mlp.3", "^cls$": "class_token", "^pos$": "encoder.pos_embedding", r"^patch\.": "conv_proj.",
        r"^norm\.": "encoder.ln.", r"^head\.": "heads.head.",
    }  # fmt: skip
    short = parts(reference)
    for name, tensor in short.items():
        if ".q." in name:
            fused = [short[name.replace(".q.", f".{part}.")] for part in "qkv"]
            name, tensor = name.replace(".q.", ".self_attention.in_proj_").replace("_.", "_"), torch.cat(fused)
        elif re.search(r"\.[kv]\.", name):
            continue
        for pattern, new in names.items():
            name = re.sub(pattern, new, name)
        tensors[name] = tensor
    torch.save(tensors, folder / "vit_b_16.pth")
    return folder / "vit_b_16.pth"


def jax_file(big_vision: bool = False, prefix: str = ""):
    """Google's Flax names, numbered as in vision_transformer (original, augreg) or as in big_vision."""
    mlp, attention, second = ("MlpBlock_0", "MultiHeadDotProductAttention_0", "LayerNorm_1") if big_vision else (
        "MlpBlock_3", "MultiHeadDotProductAttention_1", "LayerNorm_2"
    )  # fmt: skip

    def write(reference, folder):
        D, heads = reference.config.hidden_size, reference.config.num_attention_heads
        arrays = {}
        for name, tensor in parts(reference).items():
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


# ----------------------------------------------------------------------------------------------------------------------
# The cases


def zero_class_position(reference):
    reference.base_model.embeddings.position_embeddings[:, 0] = 0


def without_pooler(reference):
    reference.pooler = None


def no_masking(reference):
    reference.config.mask_ratio = 0.0


IMAGES_14 = dict(patch_size=14, image_size=224)
CASES = [
    Case("transformers vit", "ViTModel", back="ViTModel"),
    Case("transformers vit", "ViTForImageClassification", back="ViTForImageClassification"),
    Case("transformers deit", "DeiTModel", back="DeiTModel"),
    Case("transformers deit", "DeiTForImageClassification", back="DeiTForImageClassification"),
    Case("transformers deit", "DeiTForImageClassificationWithTeacher", back="DeiTForImageClassificationWithTeacher"),
    Case("transformers vit_mae", "ViTMAEModel", back="ViTModel", prepare=no_masking),
    Case("transformers vit_mae", "ViTMAEForPreTraining", back="ViTModel", prepare=no_masking),
    Case("transformers vit_msn", "ViTMSNModel", back="ViTModel"),
    Case("transformers vit_msn", "ViTMSNForImageClassification", back="ViTForImageClassification"),
    Case("transformers dinov2", "Dinov2Model", IMAGES_14, back="Dinov2Model"),
    Case("transformers dinov2", "Dinov2Model", IMAGES_14 | dict(use_swiglu_ffn=True), back="Dinov2Model"),
    Case("transformers dinov2", "Dinov2ForImageClassification", IMAGES_14, back="Dinov2ForImageClassification"),
    Case("transformers dinov2_with_registers", "Dinov2WithRegistersModel", IMAGES_14, back="Dinov2WithRegistersModel"),
    Case("transformers dinov2_with_registers", "Dinov2WithRegistersForImageClassification", IMAGES_14,
         back="Dinov2WithRegistersForImageClassification"),
    Case("transformers dinov3_vit", "DINOv3ViTModel", dict(num_register_tokens=4), back="DINOv3ViTModel"),
    Case("transformers dinov3_vit", "DINOv3ViTModel", dict(num_register_tokens=4, use_gated_mlp=True, hidden_act="silu"),
         back="DINOv3ViTModel"),
    Case("transformers clip", "CLIPModel", back="CLIPVisionModel"),
    Case("transformers clip_vision_model", "CLIPVisionModel", back="CLIPVisionModel"),
    Case("transformers clip", "CLIPForImageClassification", back="CLIPForImageClassification"),
    Case("transformers siglip", "SiglipModel", back="SiglipVisionModel"),
    Case("transformers siglip_vision_model", "SiglipVisionModel", back="SiglipVisionModel"),
    Case("transformers siglip", "SiglipForImageClassification", back="IJepaForImageClassification"),  # the same network
    Case("transformers ijepa", "IJepaModel", back="IJepaModel"),
    Case("transformers ijepa", "IJepaForImageClassification", back="IJepaForImageClassification"),
    Case("timm repo, augreg", "ViTForImageClassification", dict(layer_norm_eps=1e-6),timm_repo(global_pool="token"), back="ViTForImageClassification"),
    Case("timm file, augreg", "ViTForImageClassification", dict(layer_norm_eps=1e-6), timm_file, back="ViTForImageClassification"),
    Case("timm file, no class token", "IJepaForImageClassification", dict(layer_norm_eps=1e-6), timm_file,
         back="IJepaForImageClassification"),
    Case("timm file, registers", "Dinov2WithRegistersModel", IMAGES_14, timm_file, back="Dinov2WithRegistersModel"),
    Case("timm file, DeiT III", "Dinov2Model", IMAGES_14, deit3_file, back="Dinov2Model", prepare=zero_class_position),
    Case("timm file, CLIP", "CLIPVisionModel", dict(patch_size=16), timm_file,
         dict(hidden_act="quick_gelu", final_norm="pooled"), "CLIPVisionModel"),
    Case("timm file, SigLIP", "SiglipVisionModel", write=partial(timm_file, names=to_siglip_timm),
         load=dict(hidden_act="gelu_pytorch_tanh"), back="SiglipVisionModel"),
    Case("timm repo, DINOv3", "DINOv3ViTModel", dict(num_register_tokens=4),
         timm_repo(to_eva, architecture="vit_small_patch16_dinov3_qkvb", global_pool="token"), back="DINOv3ViTModel"),
    Case("timm file, DINOv3", "DINOv3ViTModel", dict(num_register_tokens=4, query_bias=False, value_bias=False),
         partial(timm_file, names=to_eva), dict(pooling="cls"), "DINOv3ViTModel"),
    Case("timm file, DINOv3", "DINOv3ViTModel", dict(num_register_tokens=4, use_gated_mlp=True, hidden_act="silu"),
         partial(timm_file, names=to_eva), dict(pooling="cls"), "DINOv3ViTModel"),
    Case("DINO .pth, full checkpoint", "ViTModel", dict(layer_norm_eps=1e-6), dino_file, back="ViTModel",
         prepare=without_pooler),
    Case("DINOv2 .pth", "Dinov2WithRegistersModel", IMAGES_14, dinov2_file, back="Dinov2WithRegistersModel"),
    Case("DINOv2 .pth", "Dinov2Model", IMAGES_14 | dict(use_swiglu_ffn=True), dinov2_file, back="Dinov2Model"),
    Case("DeiT .pth, distilled", "DeiTForImageClassificationWithTeacher", dict(layer_norm_eps=1e-6), deit_file,
         back="DeiTForImageClassificationWithTeacher"),
    Case("MAE .pth", "ViTMAEModel", dict(layer_norm_eps=1e-6), mae_file, back="ViTModel", prepare=no_masking),
    Case("torchvision .pth", "ViTForImageClassification", dict(layer_norm_eps=1e-6), torchvision_file, back="ViTForImageClassification"),
    Case("JAX .npz, original, pre_logits", "ViTModel", dict(layer_norm_eps=1e-6), jax_file(), back="ViTModel"),
    Case("JAX .npz, augreg", "ViTForImageClassification", dict(layer_norm_eps=1e-6), jax_file(), back="ViTForImageClassification"),
    Case("JAX .npz, training state", "ViTForImageClassification", dict(layer_norm_eps=1e-6), jax_file(prefix="opt/target/"),
         back="ViTForImageClassification"),
    Case("JAX .npz, big_vision", "ViTForImageClassification", dict(layer_norm_eps=1e-6), jax_file(True, "params/"),
         back="ViTForImageClassification"),
]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Measuring


@torch.no_grad()
def randomize(model):
    """No parameter of the model (zero tokens, unit norms) left at a special value; in eval mode."""
    for name, parameter in model.named_parameters():
        if parameter.ndim <= 1:
            parameter.normal_(float("norm" in name and name.endswith("weight")), 0.1)
        else:  # tokens and positions have one row; the rest are matrices, scaled to their inputs
            parameter.normal_(0, 0.5 if len(parameter) == 1 else parameter[0].numel() ** -0.5)
    return model.eval()


def build(case: Case, size: dict):
    """The reference with random weights."""
    config_class = getattr(transformers, case.model).config_class
    fields = {**size, **case.config}
    if "Dinov2" in case.model:  # its width is a multiple of D
        fields.pop("intermediate_size", None)
    if config_class.sub_configs and "VisionModel" not in case.model:
        text = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
        config = config_class(vision_config=fields, text_config=text, num_labels=10)
    else:
        config = config_class(**fields, num_labels=10)
    model = randomize(getattr(transformers, case.model)(config))
    with torch.no_grad():
        if case.prepare is not None:
            case.prepare(model)
    return model


def outputs(model, images) -> dict[str, torch.Tensor]:
    """Tokens, pooled vector and logits, as far as a model has them."""
    if type(model).__name__ in ("CLIPModel", "SiglipModel"):
        model = model.vision_model
    if type(model).__name__ == "ViTMAEForPreTraining":
        model = model.vit
    order = {}
    if "MAE" in type(model).__name__:  # it shuffles the patches by this noise, even where it masks none
        grid = images.shape[2] // model.config.patch_size * (images.shape[3] // model.config.patch_size)
        order = {"noise": torch.arange(grid).float().expand(len(images), -1)}
    found = model(images, **order)
    names = ("last_hidden_state", "pooler_output", "logits")
    return {name: found[name] for name in names if found.get(name) is not None}


def difference(found: dict, wanted: dict) -> float:
    """The largest difference of any output, relative to the largest value of that output."""
    shared = set(found) & set(wanted)
    assert shared, (set(found), set(wanted))
    return max(((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()).item() for name in shared)


@torch.no_grad()
def measure(case: Case, size: dict, folder: Path) -> dict:
    """What the table says of a case: the largest difference when loaded, with both backends, and when given back."""
    torch.manual_seed(0)
    reference = build(case, size)
    vision = getattr(reference.config, "vision_config", reference.config)
    images = torch.randn(2, 3, vision.image_size, vision.image_size)
    wanted = outputs(reference, images)
    ours = HFViTForImageClassification if "Classification" in case.model else HFViTModel
    if case.write is None:
        reference.save_pretrained(folder)
        model = ours.from_pretrained(folder, **case.load)
    else:
        file = case.write(reference, folder)
        model = ours.from_pretrained(file) if file.is_dir() else ours.from_checkpoint(file, **case.load)
    found = []
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        found.append(difference(outputs(model, images), wanted))
    given_back = model.to_transformers()
    back = difference(outputs(given_back, images), wanted)
    name = type(given_back).__name__
    return {
        "family": case.family,
        "reference": case.model,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "loaded": max(found),
        "native": name,
        "given_back": back,
    }


def main():
    argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False).parse_args()
    transformers.logging.disable_progress_bar()
    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(case, {}, Path(folder)))
        print(json.dumps(rows[-1]), flush=True)
    (HOUSE / "model_cards" / "parity.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    run_script(main)

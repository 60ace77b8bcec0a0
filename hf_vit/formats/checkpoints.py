"""Public ViT formats to ours and back: for each family how its config translates, and one table of renaming rules.

The tables are written in transformers' own terms (`WeightRenaming`, `WeightConverter`), so that its loader applies them,
shard by shard and onto any device, and so that they run backwards.
"""

import argparse
import copy
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.backbone_utils import BackboneConfigMixin
from transformers.core_model_loading import (
    Chunk,
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    revert_weight_conversion,
)
from transformers.utils import cached_file

from hf_vit.model.configuration_hf_vit import LARGEST, HFViTConfig, as_pair
from hf_vit.model.loading import CheckpointSource, silence_load_report
from hf_vit.model.resizing import INPUT_FIELDS


# ----------------------------------------------------------------------------------------------------------------------
# What transformers' conversions lack


class Each(ConversionOps):
    """One tensor through a function, and back through its inverse."""

    def __init__(self, forward: Callable, backward: Callable | None = None):
        self.forward, self.backward = forward, backward

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        [tensors] = input_dict.values()
        return {target_patterns[0]: self.forward(tensors[0] if isinstance(tensors, list) else tensors).contiguous()}

    @property
    def reverse_op(self):
        return Each(self.backward, self.forward)


class JoinHeads(ConversionOps):
    """The heads of class and distillation token, whose logits DeiT averages, to one head over both tokens.

    "Training data-efficient image transformers & distillation through attention" (arXiv 2012.12877, section 4).
    """

    def convert(self, input_dict, source_patterns, target_patterns, config, **kwargs):
        heads = [input_dict[name][0] for name in source_patterns if name in input_dict]
        if config.pooling != "cls_distillation":
            return {target_patterns[0]: heads[0]}
        if len(heads) != 2:
            raise ValueError("one of the two heads, of class and distillation token, is missing")
        joined = torch.cat(heads, dim=1) / 2 if heads[0].ndim == 2 else (heads[0] + heads[1]) / 2  # (L, 2 D), (L,)
        return {target_patterns[0]: joined}

    @property
    def reverse_op(self):
        return SplitHeads()


class SplitHeads(ConversionOps):
    """One head over class and distillation token to two whose logits are averaged."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        [[head]] = input_dict.values()
        heads = (2 * head).chunk(2, dim=1) if head.ndim == 2 else (head, head.clone())  # no file holds shared tensors
        return {name: part.contiguous() for name, part in zip(target_patterns, heads, strict=True)}


class PlaceTokens(ConversionOps):
    """timm's positions, with or without rows for the class token and the registers, to ours.

    Ours have a row for class and distillation token and none for registers: a missing row is zero, and a register takes
    its row in, since both are only ever added.
    """

    supports_many_to_many = True

    def convert(self, input_dict, source_patterns, target_patterns, config, **kwargs):
        tensors = {pattern.lstrip("^"): found[0] for pattern, found in input_dict.items()}
        positions = tensors.get("pos_embed", tensors.get("pos_embedding"))
        registers = tensors.get("reg_token", tensors.get("register_tokens"))
        placed = int(config.use_class_token) + int(config.use_distillation_token)
        extra = positions.shape[1] - config.grid_size[0] * config.grid_size[1]
        if extra == placed + config.num_register_tokens and registers is not None and "reg_token" in tensors:
            registers = registers + positions[:, placed:extra]
            positions = torch.cat([positions[:, :placed], positions[:, extra:]], dim=1)
        elif extra == 0:
            positions = torch.cat([positions.new_zeros(1, placed, positions.shape[2]), positions], dim=1)
        placed_tokens = {"embeddings.position_embeddings": positions}
        return placed_tokens if registers is None else placed_tokens | {"embeddings.register_tokens": registers}


# ----------------------------------------------------------------------------------------------------------------------
# Rules: names on disk to names in memory


def chunked(fused: str, *parts: str) -> list:
    """A weight and its bias that hold several projections on top of each other."""
    dot = "_" if fused.endswith("in_proj") else r"\."  # nn.MultiheadAttention writes in_proj_weight
    return [
        WeightConverter(f"{fused}{dot}{kind}", [f"{part}.{kind}" for part in parts], [Chunk(dim=0)])
        for kind in ("weight", "bias")
    ]


def heads_joined(of_class: str, of_distillation: str) -> list:
    return [
        WeightConverter([f"{of_class}{kind}", f"{of_distillation}{kind}"], f"classifier.{kind}", [JoinHeads()])
        for kind in ("weight", "bias")
    ]


QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
POOLING_QKV = ("attention_pooling.q_proj", "attention_pooling.k_proj", "attention_pooling.v_proj")

# transformers 4 named a ViT so, and files keep it, also when transformers 5 writes them.
VIT_RULES = [
    WeightRenaming(r"encoder\.layer\.", "layers."),
    WeightRenaming(r"attention\.attention\.query", "attention.q_proj"),
    WeightRenaming(r"attention\.attention\.key", "attention.k_proj"),
    WeightRenaming(r"attention\.attention\.value", "attention.v_proj"),
    WeightRenaming(r"attention\.output\.dense", "attention.o_proj"),
    WeightRenaming(r"intermediate\.dense", "mlp.fc1"),
    WeightRenaming(r"(?<!attention\.)output\.dense", "mlp.fc2"),
]
DINOV2_RULES = [
    *VIT_RULES[:5],
    WeightRenaming("norm1", "layernorm_before"),
    WeightRenaming("norm2", "layernorm_after"),
    *chunked(r"mlp\.weights_in", "mlp.gate_proj", "mlp.up_proj"),
    WeightRenaming(r"mlp\.weights_out", "mlp.down_proj"),
]
DINOV3_RULES = [
    WeightRenaming(r"^layer\.", "layers."),
    WeightRenaming(r"^norm\.", "layernorm."),
    WeightRenaming("norm1", "layernorm_before"),
    WeightRenaming("norm2", "layernorm_after"),
    WeightRenaming(r"patch_embeddings\.weight", "patch_embeddings.projection.weight"),
    WeightRenaming(r"patch_embeddings\.bias", "patch_embeddings.projection.bias"),
]
DINOV3_PLAIN_MLP = [WeightRenaming(r"mlp\.up_proj", "mlp.fc1"), WeightRenaming(r"mlp\.down_proj", "mlp.fc2")]
CLIP_RULES = [
    WeightRenaming(r"encoder\.layers\.", "layers."),
    WeightRenaming("layer_norm1", "layernorm_before"),
    WeightRenaming("layer_norm2", "layernorm_after"),
    WeightRenaming(r"self_attn\.q_proj", "attention.q_proj"),
    WeightRenaming(r"self_attn\.k_proj", "attention.k_proj"),
    WeightRenaming(r"self_attn\.v_proj", "attention.v_proj"),
    WeightRenaming(r"self_attn\.out_proj", "attention.o_proj"),
    WeightRenaming(r"^pre_layrnorm\.", "embeddings.layernorm."),
    WeightRenaming(r"^post_layernorm\.", "layernorm."),
    WeightRenaming(r"patch_embedding\.", "patch_embeddings.projection."),
    WeightConverter(r"embeddings\.class_embedding", "embeddings.cls_token", [Each(lambda t: t[None, None], lambda t: t[0, 0])]),
    WeightConverter(
        r"embeddings\.position_embedding\.weight", "embeddings.position_embeddings", [Each(lambda t: t[None], lambda t: t[0])]
    ),
]  # fmt: skip
SIGLIP_RULES = [
    *CLIP_RULES,
    WeightRenaming(r"^head\.", "attention_pooling."),
    WeightRenaming(r"attention_pooling\.attention\.out_proj", "attention_pooling.o_proj"),
    *chunked(r"attention_pooling\.attention\.in_proj", *POOLING_QKV),
]

# timm's VisionTransformer, and the code it shares its names with: DeiT, DINO, DINOv2, DeiT III, MAE, MoCo v3. timm's Eva,
# which its DINOv3 is, keeps the biases of queries and values apart from attn.qkv and has none for the keys.
TIMM_RULES = [
    WeightRenaming(r"^timm_model\.", ""),
    WeightRenaming(r"^blocks\.", "layers."),
    WeightRenaming(r"^patch_embed\.proj\.", "embeddings.patch_embeddings.projection."),
    WeightRenaming("^cls_token", "embeddings.cls_token"),
    WeightRenaming("^dist_token", "embeddings.distillation_token"),
    WeightRenaming(r"^norm_pre\.", "embeddings.layernorm."),
    WeightRenaming("norm1", "layernorm_before"),
    WeightRenaming("norm2", "layernorm_after"),
    WeightRenaming(r"attn\.proj", "attention.o_proj"),
    WeightRenaming(r"attn\.q_norm", "attention.q_norm"),
    WeightRenaming(r"attn\.k_norm", "attention.k_norm"),
    WeightRenaming(r"attn\.q_bias", "attention.q_proj.bias"),
    WeightRenaming(r"attn\.v_bias", "attention.v_proj.bias"),
    WeightRenaming(r"ls1\.gamma", "layer_scale1.lambda1"),
    WeightRenaming(r"ls2\.gamma", "layer_scale2.lambda1"),
    WeightRenaming("gamma_1", "layer_scale1.lambda1"),
    WeightRenaming("gamma_2", "layer_scale2.lambda1"),
    WeightRenaming(r"^norm\.", "layernorm."),
    WeightRenaming(r"^fc_norm\.", "layernorm."),
    WeightRenaming(r"^attn_pool\.latent", "attention_pooling.probe"),
    WeightRenaming(r"^attn_pool\.q\.", "attention_pooling.q_proj."),
    WeightRenaming(r"^attn_pool\.proj\.", "attention_pooling.o_proj."),
    WeightRenaming(r"^attn_pool\.norm\.", "attention_pooling.layernorm."),
    WeightRenaming(r"^attn_pool\.mlp\.", "attention_pooling.mlp."),
    *chunked(r"attn\.qkv", *QKV),
    *chunked(r"attn_pool\.kv", *POOLING_QKV[1:]),
    *heads_joined(r"^head\.", r"^head_dist\."),
]
TIMM_LEARNED_POSITIONS = [
    WeightConverter(
        ["^pos_embed", "^reg_token", "^register_tokens"],
        ["embeddings.position_embeddings", "embeddings.register_tokens"],
        [PlaceTokens()],
    ),
]
TIMM_OTHER_POSITIONS = [WeightRenaming("^(?:reg_token|register_tokens)", "embeddings.register_tokens")]
TIMM_GATED_MLP = [  # fc1 holds both halves in timm, but for DINOv3, and w12 in DINOv2's own code
    WeightRenaming(r"mlp\.fc1_g\.", "mlp.gate_proj."),
    WeightRenaming(r"mlp\.fc1_x\.", "mlp.up_proj."),
    WeightRenaming(r"mlp\.w12\.", "mlp.fc1."),
    WeightRenaming(r"mlp\.(?:w3|fc2)\.", "mlp.down_proj."),
    *chunked(r"mlp\.fc1", "mlp.gate_proj", "mlp.up_proj"),
]
TORCHVISION_RULES = [
    WeightRenaming(r"encoder\.layers\.encoder_layer_", "layers."),
    WeightRenaming("ln_1", "layernorm_before"),
    WeightRenaming("ln_2", "layernorm_after"),
    WeightRenaming(r"self_attention\.out_proj", "attention.o_proj"),
    WeightRenaming(r"mlp\.linear_1", "mlp.fc1"),
    WeightRenaming(r"mlp\.linear_2", "mlp.fc2"),
    WeightRenaming(r"mlp\.0\.", "mlp.fc1."),
    WeightRenaming(r"mlp\.3\.", "mlp.fc2."),
    WeightRenaming("class_token", "embeddings.cls_token"),
    WeightRenaming("conv_proj", "embeddings.patch_embeddings.projection"),
    WeightRenaming(r"encoder\.pos_embedding", "embeddings.position_embeddings"),
    WeightRenaming(r"encoder\.ln\.", "layernorm."),
    WeightRenaming(r"heads\.head", "classifier"),
    WeightRenaming(r"heads\.pre_logits", "pre_logits"),
    *chunked(r"self_attention\.in_proj", *QKV),
]

# Flax names with dots for slashes. A dense kernel is (in, out); those of attention keep the heads apart, (D, A, K) and
# (A, K, D). The layers of the ViT repository count their parts on (LayerNorm_2, MlpBlock_3), those of big_vision do not.
JAX_RULES = [
    WeightRenaming(r"^MAPHead_0\.", "attention_pooling."),
    WeightRenaming(r"attention_pooling\.LayerNorm_0\.scale", "attention_pooling.layernorm.weight"),
    WeightRenaming(r"attention_pooling\.LayerNorm_0\.bias", "attention_pooling.layernorm.bias"),
    WeightRenaming(r"attention_pooling\.MultiHeadDotProductAttention_0\.", "attention_pooling."),
    WeightRenaming(r"^Transformer\.encoderblock_", "layers."),
    WeightRenaming(r"LayerNorm_0\.scale", "layernorm_before.weight"),
    WeightRenaming(r"LayerNorm_0\.bias", "layernorm_before.bias"),
    WeightRenaming(r"LayerNorm_[12]\.scale", "layernorm_after.weight"),
    WeightRenaming(r"LayerNorm_[12]\.bias", "layernorm_after.bias"),
    WeightRenaming(r"MultiHeadDotProductAttention_[01]\.", "attention."),
    WeightRenaming(r"out\.bias", "o_proj.bias"),
    WeightRenaming(r"MlpBlock_[03]\.Dense_0\.", "mlp.fc1."),
    WeightRenaming(r"MlpBlock_[03]\.Dense_1\.", "mlp.fc2."),
    WeightRenaming(r"^Transformer\.encoder_norm\.scale", "layernorm.weight"),
    WeightRenaming(r"^Transformer\.encoder_norm\.bias", "layernorm.bias"),
    WeightRenaming(r"^Transformer\.posembed_input\.pos_embedding", "pos_embedding"),
    WeightRenaming("^cls", "embeddings.cls_token"),
    WeightRenaming(r"^embedding\.bias", "embeddings.patch_embeddings.projection.bias"),
    WeightRenaming(r"^head\.", "classifier."),
    WeightConverter("^pos_embedding", "embeddings.position_embeddings", [PlaceTokens()]),
    WeightConverter(
        r"^embedding\.kernel", "embeddings.patch_embeddings.projection.weight", [Each(lambda t: t.permute(3, 2, 0, 1))]
    ),
    *(
        WeightConverter(rf"{name}\.kernel", f"{part}.weight", [Each(lambda t: t.flatten(1).T)])
        for name, part in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))
    ),
    *(
        WeightConverter(rf"{name}\.bias", f"{part}.bias", [Each(lambda t: t.flatten())])
        for name, part in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))
    ),
    WeightConverter(r"out\.kernel", "o_proj.weight", [Each(lambda t: t.flatten(0, 1).T)]),
    *(
        WeightConverter(rf"{name}\.kernel", f"{name}.weight", [Each(lambda t: t.T)])
        for name in ("mlp.fc1", "mlp.fc2", "classifier", "pre_logits", "pooler.dense")
    ),
]


# ----------------------------------------------------------------------------------------------------------------------
# Configs: native fields to ours


COMMON_FIELDS = (
    "image_size", "patch_size", "num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "intermediate_size", "hidden_act", "qkv_bias", "hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate",
    "layer_norm_eps", "initializer_range",
)  # fmt: skip
BACKBONE_FIELDS = ("out_indices", "apply_layernorm", "reshape_hidden_states")
LABEL_FIELDS = ("id2label", "label2id", "problem_type", "dtype", "torch_dtype")


def of_vit(native, task: str) -> dict:
    if native.pooler_output_size not in (None, native.hidden_size):
        raise ValueError(
            f"pooler_output_size {native.pooler_output_size} differs from hidden_size {native.hidden_size}; "
            "hf_vit has no such pooler"
        )
    return dict(pooler_act=native.pooler_act)


def of_plain(native, task):
    return {}


def of_deit(native, task):
    both = dict(pooling="cls_distillation", pooler_act=None) if task == "DeiTForImageClassificationWithTeacher" else {}
    return of_vit(native, task) | dict(use_distillation_token=True) | both


def of_ijepa(native, task):
    return dict(use_class_token=False, pooling="mean")


def dinov2_width(hidden_size: int, mlp_ratio: float, gated: bool) -> int:
    """F of DINOv2's MLP; with a gate two thirds of it, to a multiple of 8 (arXiv 2002.05202, section 3)."""
    width = int(hidden_size * mlp_ratio)
    return (int(width * 2 / 3) + 7) // 8 * 8 if gated else width


def of_dinov2(native, task):
    gated = native.use_swiglu_ffn
    fields = dict(
        intermediate_size=dinov2_width(native.hidden_size, native.mlp_ratio, gated),
        layerscale_value=native.layerscale_value,
    )
    if gated:
        fields |= dict(gated_mlp=True, hidden_act="silu")
    return fields | dict(
        pooling="cls_mean" if task else "cls", num_register_tokens=getattr(native, "num_register_tokens", 0)
    )


def of_dinov3(native, task):
    if not (native.proj_bias and native.mlp_bias and native.query_bias == native.value_bias):
        raise ValueError(
            "hf_vit has no dinov3_vit without proj_bias or mlp_bias, or with only one of query_bias and value_bias"
        )
    bare_last = not native.apply_layernorm and native.num_hidden_layers in native.out_indices
    if (
        not native.reshape_hidden_states or bare_last
    ):  # DINOv3ViTBackbone drops the prefix, and norms the last stage always
        raise ValueError(
            "hf_vit has no dinov3_vit backbone with reshape_hidden_states=False, or with apply_layernorm=False and the last stage: "
            "leave these fields of its config at True"
        )
    return dict(
        position_embedding="rotary", rope_theta=native.rope_theta, qkv_bias=native.query_bias, key_bias=native.key_bias,
        gated_mlp=native.use_gated_mlp, layerscale_value=native.layerscale_value,
        num_register_tokens=native.num_register_tokens, attention_probs_dropout_prob=native.attention_dropout,
    )  # fmt: skip


def of_clip(native, task):
    pooled = (
        dict(final_norm="none", pooling="mean") if task == "CLIPForImageClassification" else dict(final_norm="pooled")
    )
    return dict(patch_bias=False, embedding_norm=True, attention_probs_dropout_prob=native.attention_dropout) | pooled


def of_siglip(native, task):
    by_probe = native.vision_use_head and task != "SiglipForImageClassification"
    return dict(
        use_class_token=False,
        pooling="map" if by_probe else "mean",
        attention_probs_dropout_prob=native.attention_dropout,
    )


@dataclass(frozen=True)
class Family:
    """A public format.

    Args:
        rules: how its tensors are named, on disk to in memory.
        translate: (native config, name of the native classifier or "") -> the fields of HFViTConfig that native ones do
            not name alike. None for formats without a transformers config.
        prefix: what a native classifier calls its base model.
        ignored: a regular expression for tensors that a ViT has no use for, such as a decoder or a text tower.
        base, classifier: names of the native classes, or "".
        base_allows, classifier_allows: values of HFViTConfig's fields that they can express, beside those of PLAIN.
        square: whether they take square images and patches only.
        plain_mlp, gated_mlp: rules that hold for one kind of MLP only.
        learned_positions, other_positions: rules that hold for one kind of positions only.
    """

    rules: list
    translate: Callable | None = None
    prefix: str = ""
    ignored: str | None = None
    base: str = ""
    classifier: str = ""
    base_allows: dict = field(default_factory=dict)
    classifier_allows: dict = field(default_factory=dict)
    square: bool = False
    plain_mlp: list = field(default_factory=list)
    gated_mlp: list = field(default_factory=list)
    learned_positions: list = field(default_factory=list)
    other_positions: list = field(default_factory=list)

    def rules_for(self, config: HFViTConfig) -> list:
        """The table for a model of this config, as new objects: while they work, rules hold tensors."""
        of_mlp = self.gated_mlp if config.gated_mlp else self.plain_mlp
        of_positions = self.learned_positions if config.position_embedding == "learned" else self.other_positions
        return copy.deepcopy([*self.rules, *of_mlp, *of_positions])


ANY = object()
PLAIN = dict(
    patch_projection="conv", patch_bias=True, gated_mlp=False, qkv_bias=True, key_bias=True, qk_norm=False,
    position_embedding="learned", use_class_token=True, use_distillation_token=False, num_register_tokens=0,
    embedding_norm=False, norm_first=True, final_norm="tokens", pooling="cls", pooler_act=None, representation_size=None,
)  # fmt: skip


VIT_LIKE = r"(vit\.)?(embeddings\.mask_token|decoder\.)"
DINOV2_POOLING = ("cls", "mean", "cls_mean")
CLIP_LEAVES_OUT = (
    r"(text_model|text_projection|visual_projection|logit_scale|logit_bias|embeddings\.position_ids|layernorm)(\.|$)"
)
BIAS_OR_NOT = dict(qkv_bias=(True, False))
NO_CLASS_TOKEN = BIAS_OR_NOT | dict(use_class_token=(False,), pooling=("mean",))
DINOV2 = BIAS_OR_NOT | dict(gated_mlp=(True, False), layerscale_value=ANY)
CLIP_TOWER = dict(patch_bias=(False,), embedding_norm=(True,))
CLIP = Family(
    CLIP_RULES, of_clip, prefix="vision_model", ignored=CLIP_LEAVES_OUT, square=True,
    base="CLIPVisionModel", base_allows=CLIP_TOWER | dict(final_norm=("pooled",)),
    classifier="CLIPForImageClassification", classifier_allows=CLIP_TOWER | dict(final_norm=("none",), pooling=("mean",)),
)  # fmt: skip
SIGLIP = Family(  # its classifier is the network of I-JEPA's
    SIGLIP_RULES, of_siglip, prefix="vision_model", ignored=CLIP_LEAVES_OUT, square=True,
    base="SiglipVisionModel", base_allows=dict(use_class_token=(False,), pooling=("map",)),
)  # fmt: skip
FAMILIES = {  # `to_transformers` takes the first that can express a model
    "vit": Family(
        VIT_RULES, of_vit, prefix="vit", ignored=VIT_LIKE,
        base="ViTModel", base_allows=BIAS_OR_NOT | dict(pooler_act=ANY),
        classifier="ViTForImageClassification", classifier_allows=BIAS_OR_NOT | dict(final_norm=("tokens", "pooled")),
    ),
    "deit": Family(
        [*VIT_RULES, *heads_joined(r"cls_classifier\.", r"distillation_classifier\.")],
        of_deit, prefix="deit", ignored=VIT_LIKE,
        base="DeiTModel", base_allows=BIAS_OR_NOT | dict(use_distillation_token=(True,), pooler_act=ANY),
        classifier="DeiTForImageClassification",
        classifier_allows=BIAS_OR_NOT | dict(use_distillation_token=(True,), pooling=("cls", "cls_distillation")),
    ),
    "ijepa": Family(
        VIT_RULES, of_ijepa, prefix="ijepa", ignored=VIT_LIKE, base="IJepaModel", base_allows=NO_CLASS_TOKEN,
        classifier="IJepaForImageClassification", classifier_allows=NO_CLASS_TOKEN,
    ),
    "dinov2": Family(
        DINOV2_RULES, of_dinov2, prefix="dinov2", ignored=VIT_LIKE, square=True, base="Dinov2Model", base_allows=DINOV2,
        classifier="Dinov2ForImageClassification", classifier_allows=DINOV2 | dict(pooling=DINOV2_POOLING),
    ),
    "dinov2_with_registers": Family(
        DINOV2_RULES, of_dinov2, prefix="dinov2_with_registers", ignored=VIT_LIKE, square=True,
        base="Dinov2WithRegistersModel", base_allows=DINOV2 | dict(num_register_tokens=ANY),
        classifier="Dinov2WithRegistersForImageClassification",
        classifier_allows=DINOV2 | dict(num_register_tokens=ANY, pooling=DINOV2_POOLING),
    ),
    "dinov3_vit": Family(
        DINOV3_RULES, of_dinov3, prefix="model", ignored=VIT_LIKE, plain_mlp=DINOV3_PLAIN_MLP, base="DINOv3ViTModel",
        base_allows=BIAS_OR_NOT | dict(
            position_embedding=("rotary",), key_bias=(True, False), gated_mlp=(True, False), layerscale_value=ANY,
            num_register_tokens=ANY,
        ),
    ),
    "clip_vision_model": CLIP,
    "siglip_vision_model": SIGLIP,
    "vit_mae": Family(VIT_RULES, of_plain, prefix="vit", ignored=VIT_LIKE),
    "vit_msn": Family(VIT_RULES, of_plain, prefix="vit", ignored=VIT_LIKE),
    "clip": CLIP,
    "siglip": SIGLIP,
    "timm": Family(
        TIMM_RULES, gated_mlp=TIMM_GATED_MLP, learned_positions=TIMM_LEARNED_POSITIONS,
        other_positions=TIMM_OTHER_POSITIONS, ignored="mask_token|decoder_",
    ),
    "torchvision": Family(TORCHVISION_RULES),
    "jax": Family(JAX_RULES),
}  # fmt: skip


def translate_config(
    config: dict, path, arguments: dict, task: str = "", source: CheckpointSource | None = None
) -> dict:
    """A public config.json in the terms of HFViTConfig.

    Args:
        config: what config.json holds.
        path: the folder or repo.
        arguments: the other ones of from_pretrained; some say where the repo is, some what was asked of the config.
        task: "model" or "classifier", what is being loaded, or "" for a config alone.
        source: of the model that is being loaded; its family and notes are filled in.

    Raises:
        ValueError: for a family that is not known, or a choice within it that no field expresses.
    """
    name, notes = config.get("model_type", "timm"), []
    if name in ("timm", "timm_wrapper"):
        name, shapes = "timm", read_shapes(path, arguments)
        shapes = {key.removeprefix("timm_model."): shape for key, shape in shapes.items()}
        fields = infer_timm(shapes, arguments, task == "classifier", notes, config)
    elif name in FAMILIES and FAMILIES[name].translate is not None:
        native = AutoConfig.for_model(name, **{key: value for key, value in config.items() if key != "model_type"})
        native = getattr(native, "vision_config", native)
        # A native classifier may pool otherwise than its base model: the class asked for decides, else the one saved.
        saved = (config.get("architectures") or [""])[0]
        is_saved = "ForImageClassification" in saved
        is_classifier = task == "classifier" or (not task and is_saved)
        native_class = (saved if is_saved else "a new classifier") if is_classifier else ""
        fields = {field: getattr(native, field) for field in COMMON_FIELDS if hasattr(native, field)}
        fields |= FAMILIES[name].translate(native, native_class)
        fields |= {field: config[field] for field in LABEL_FIELDS if config.get(field) is not None}
        if isinstance(native, BackboneConfigMixin):
            fields |= {field: getattr(native, field) for field in BACKBONE_FIELDS}
        size, patch = as_pair(fields["image_size"]), as_pair(fields["patch_size"])
        covered = [size[0] // patch[0] * patch[0], size[1] // patch[1] * patch[1]]
        if tuple(covered) != size:  # native convolutions drop the rest, as in google/siglip-so400m-patch14-384
            fields["image_size"] = covered
            notes.append(
                f"image_size {size} cut to {tuple(covered)}, which the patches cover: crop or resize the images to that"
            )
    else:
        known = [key for key, family in FAMILIES.items() if family.translate is not None]
        raise ValueError(f"{path} holds a {name!r} model; hf_vit loads hf_vit, {', '.join(known)}, timm, timm_wrapper")
    if source is not None:
        source.family = name
        source.notes += notes
    return fields


# ----------------------------------------------------------------------------------------------------------------------
# Configs: from the shapes of the tensors


def read_shapes(source, arguments: dict) -> dict:
    """Names and shapes in the weights file of a repo, which is then in the cache."""
    names = ("cache_dir", "force_download", "token", "revision", "local_files_only", "subfolder")
    arguments = {key: arguments[key] for key in names if key in arguments}
    for name in ("model.safetensors", "pytorch_model.bin"):
        file = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **arguments)
        if file is not None and name.endswith(".safetensors"):
            with safe_open(file, "pt") as tensors:
                return {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
        if file is not None:
            tensors = torch.load(file, map_location="cpu", weights_only=True)
            return {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    raise ValueError(f"{source} has neither model.safetensors nor pytorch_model.bin")


def grid_of(positions: int, prefixes: tuple, patch, notes: list, stated=None, asked=None) -> list[int]:
    """The image size [height, width] of a model with so many positions, some of which may belong to prefix tokens.

    For each reading of the prefix, the size that the checkpoint states comes first, then a square, then what was asked for.
    """
    for prefix in prefixes:
        count = positions - prefix
        square = (math.isqrt(max(0, count)) * patch[0], math.isqrt(max(0, count)) * patch[1])
        for size in (stated, square, asked):
            if size is not None:
                rows, columns = as_pair(size)[0] // patch[0], as_pair(size)[1] // patch[1]
                if rows * columns == count > 0:
                    if size is not stated:
                        notes.append(f"a grid of {rows}x{columns} positions assumed")
                    return [rows * patch[0], columns * patch[1]]
    raise ValueError(
        f"{positions} positions make no square grid: pass image_size=(height, width), that of the checkpoint"
    )


HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16}  # of widths that are published with other heads than of 64 channels
DINOV3_HEADS = {4096: 32}


def heads_of(hidden_size: int, asked: dict, notes: list, name: str = "", published: dict = HEADS) -> int:
    """The number of heads, which shapes do not tell: 64 channels each, but for the models published otherwise."""
    if "num_attention_heads" in asked:
        return asked["num_attention_heads"]
    heads = published.get(hidden_size, hidden_size // 64)
    if re.search("giantopt|vit_base_patch16_gap_", name):
        heads = 16
    if hidden_size % 64 or name.startswith("test_vit"):
        raise ValueError(
            f"the file does not say how many heads share its {hidden_size} channels: pass num_attention_heads="
        )
    notes.append(f"num_attention_heads {heads} assumed")
    return heads


def count_layers(shapes: dict, pattern: str) -> int:
    return 1 + max(int(found.group(1)) for found in (re.match(pattern, name) for name in shapes) if found)


# Networks of timm with tensors like a plain ViT's that compute something else. A repo tells them by the name of its
# architecture, a file without one by a tensor that they alone have; then follows what no field expresses.
OTHER_NAMES = {
    "_rpn_": "norms in its residual branches",
    "_pe_": "rotary positions on top of learned ones",
    "eva02": "rotary positions on top of learned ones, or norms behind its branches",
    "sapiens2": "RMSNorm in place of LayerNorm",
    "rope_mixed": "rotary positions with learned frequencies",
    "rope": "rotary positions that count patches, where those of DINOv3 span the image",
}
OTHER_TENSORS = {
    r"rope\.freqs": "rotary positions with learned frequencies",
    r"blocks\.0\.(attn|mlp)\.norm\.": "norms inside its attention or MLP, as EVA-02 has",
}
DINOV3_NAMES = "dinov3|lingbot"  # LingBot-Vision (arXiv 2607.05247) is the same network
# What timm builds DINOv3 with: another value makes another network of the same tensors.
DINOV3_ARGUMENTS = dict(
    rope_type="dinov3", rope_rotate_half=True, rope_grid_offset=0.0, rope_grid_indexing="ij", use_post_norm=False
)


def is_timm_dinov3(shapes: dict, asked: dict, name: str) -> bool:
    """Whether it is DINOv3: by the positions asked for, else by the name of its architecture or by its tensors.

    Of timm's networks only those of its Eva class call LayerScale gamma_1 and have no attn.qkv.bias, and of those without
    pos_embed only DINOv3 has a class token and registers.
    """
    if "position_embedding" in asked:
        return asked["position_embedding"] == "rotary"
    has, lacks = {"cls_token", "reg_token", "blocks.0.gamma_1"}, {"pos_embed", "blocks.0.attn.qkv.bias"}
    return re.search(DINOV3_NAMES, name) is not None or (has <= set(shapes) and not lacks & set(shapes))


def check_timm(shapes: dict, asked: dict, name: str, model_args: dict, is_dinov3: bool):
    """Raise ValueError for a network of timm that no field expresses, naming what is not expressed."""
    names = set(shapes)
    found = [what for sign, what in OTHER_NAMES.items() if re.search(sign, name)]
    found += [what for sign, what in OTHER_TENSORS.items() if any(re.match(sign, key) for key in shapes)]
    if "norm_pre.weight" in names and ("attn_pool.latent" in names or not names & {"norm.weight", "fc_norm.weight"}):
        found.append("rotary positions on top of learned ones, as timm's Perception Encoder has")
    if not name and {"pos_embed", "blocks.0.attn.q_bias"} <= names:
        found.append("q_bias beside pos_embed, the sign of EVA-02's rotary positions on top of learned ones")
    if is_dinov3:
        other = {key: value for key, value in model_args.items() if value != DINOV3_ARGUMENTS.get(key, value)}
        found += [f"{key}={value!r} in its model_args" for key, value in other.items()]
        if "attn_pool.latent" in names:
            found.append("attention pooling over class token and registers too")
    if found:
        raise ValueError(f"{name or 'it'} has {found[0]}, which no field expresses")
    if not {"patch_embed.proj.weight", "blocks.0.attn.qkv.weight"} <= names:
        raise ValueError(
            f"{name or 'this file'} is no VisionTransformer of timm: it has no patch_embed.proj and blocks.N.attn.qkv"
        )
    if not ("pos_embed" in names or "position_embedding" in asked or is_dinov3):
        raise ValueError(
            "there is no pos_embed, and the other tensors are not those of timm's DINOv3: pass position_embedding="
            '"none", "sincos2d" or "rotary" (that of DINOv3) if the model has no more than that'
        )


def timm_dinov3(patch: list, asked: dict, stated: dict, global_pool: str | None, notes: list) -> dict:
    """Fields of timm's DINOv3 that its tensors do not tell: what its config.json says, else as timm builds it."""
    theta = (stated.get("model_args") or {}).get("rope_temperature", 100.0)
    fields = dict(position_embedding="rotary", rope_theta=theta, layer_norm_eps=1e-5)
    assumed = [] if re.search(DINOV3_NAMES, stated.get("architecture", "")) else list(fields)
    if global_pool is None:
        fields["pooling"] = "mean"
        assumed.append("pooling")
    size = timm_input_size(stated)
    if size is None:  # any other is as good to rotary positions
        assumed.append("image_size")
    sides = zip(size[1:] if size else [16 * side for side in patch], patch, strict=True)
    fields["image_size"] = [side // length * length for side, length in sides]
    assumed = [f"{field} {fields[field]}" for field in assumed if field not in asked]
    if assumed:
        notes.append(f"{', '.join(assumed)} assumed")
    return fields


def timm_input_size(stated: dict) -> list[int] | None:
    """The (C, H, W) that the config.json of a timm repo states for its images; None where it states none.

    Raises:
        ValueError: if it is no size of an image.
    """
    size = (stated.get("pretrained_cfg") or {}).get("input_size")
    is_size = isinstance(size, list) and len(size) == 3 and all(isinstance(side, int) and side > 0 for side in size)
    if size is not None and not (is_size and max(size) <= LARGEST["image_size"]):
        raise ValueError(
            f"input_size in config.json is {size!r}; wanted three numbers, channels, height and width, of 1 to "
            f"{LARGEST['image_size']:,}: is this config.json whole, and to be trusted?"
        )
    return size


def infer_timm(shapes: dict, asked: dict, is_classifier: bool, notes: list, stated: dict | None = None) -> dict:
    """Fields of a timm VisionTransformer or DINOv3 from its shapes, from what was asked for, and from its config.json, if it has one.

    What had to be assumed is added to `notes`.
    """
    stated = stated or {}
    name, model_args = stated.get("architecture", ""), stated.get("model_args") or {}
    is_dinov3 = is_timm_dinov3(shapes, asked, name)
    check_timm(shapes, asked, name, model_args, is_dinov3)
    hidden_size, num_channels, *patch = shapes["patch_embed.proj.weight"]
    class_token, distillation = "cls_token" in shapes, "dist_token" in shapes
    registers = shapes.get("reg_token", shapes.get("register_tokens", (0, 0)))[1]
    first, gate = (shapes.get(f"blocks.0.mlp.{part}.weight") for part in ("fc1", "fc1_g"))
    first = first or gate or shapes.get("blocks.0.mlp.w12.weight")
    second = shapes.get("blocks.0.mlp.fc2.weight") or shapes.get("blocks.0.mlp.w3.weight")
    if first is None or second is None:
        raise ValueError("its MLP is neither fc1 (or fc1_g and fc1_x) and fc2 nor w12 and w3, and no other is known")
    narrow, gated = second[1], gate is not None or first[0] == 2 * second[1]
    by_map, after = any(key.startswith("attn_pool.") for key in shapes), "fc_norm.weight" in shapes
    global_pool = stated.get("global_pool") or model_args.get("global_pool")
    if global_pool not in (None, "token", "avg", "map") or (global_pool == "map" and not by_map):
        raise ValueError(f"global_pool {global_pool!r} of timm has no counterpart: token, avg and map have")
    if by_map:
        pooling = "map"
    elif after or not class_token or global_pool == "avg":
        pooling = "mean"
    else:
        pooling = (
            "cls_distillation" if is_classifier and {"head_dist.weight", "head_dist.bias"} & set(shapes) else "cls"
        )
    hidden_act = "silu" if gated else "gelu"
    if "quickgelu" in name:
        hidden_act = "quick_gelu"
    elif re.search(r"_(patch32|large_patch16|so400m_patch16|giantopt_patch16)_siglip\w*_(256|384|512)", "_" + name):
        plain = re.search(r"large_patch16_siglip\w*_(256|384)", name)  # timm gives these the exact one
        hidden_act = "gelu" if plain else "gelu_pytorch_tanh"
    fields = dict(
        num_channels=num_channels, patch_size=patch, hidden_size=hidden_size, intermediate_size=narrow, gated_mlp=gated,
        num_hidden_layers=count_layers(shapes, r"blocks\.(\d+)\."), hidden_act=hidden_act,
        patch_bias="patch_embed.proj.bias" in shapes, key_bias="blocks.0.attn.q_bias" not in shapes,
        qkv_bias=bool({"blocks.0.attn.qkv.bias", "blocks.0.attn.q_bias"} & set(shapes)),
        qk_norm="blocks.0.attn.q_norm.weight" in shapes, use_class_token=class_token,
        use_distillation_token=distillation, num_register_tokens=registers, embedding_norm="norm_pre.weight" in shapes,
        layerscale_value=1.0 if {"blocks.0.ls1.gamma", "blocks.0.gamma_1"} & set(shapes) else None, pooling=pooling,
        final_norm="pooled" if after else "tokens" if "norm.weight" in shapes else "none",
        layer_norm_eps=1e-5 if "norm_pre.weight" in shapes else 1e-6,  # CLIP's, against timm's default
        position_embedding="learned" if "pos_embed" in shapes else "none",
    )  # fmt: skip
    published = DINOV3_HEADS if is_dinov3 else HEADS
    fields["num_attention_heads"] = model_args.get("num_heads") or heads_of(hidden_size, asked, notes, name, published)
    if is_dinov3:
        fields |= timm_dinov3(patch, asked, stated, global_pool, notes)
    elif "pos_embed" in shapes:
        if not name and "blocks.0.gamma_1" in shapes:  # DeiT III's own code writes the tensors of timm's rope_ape
            notes.append("no rotary positions assumed")
        placed = int(class_token) + int(distillation)
        size = timm_input_size(stated)
        fields["image_size"] = grid_of(
            shapes["pos_embed"][1],
            (placed, 0, placed + registers),
            patch,
            notes,
            size and size[1:],
            asked.get("image_size"),
        )
    if "head.weight" in shapes:
        fields["num_labels"] = shapes["head.weight"][0]
        labels = stated.get("label_names") or ()
        if len(labels) == fields["num_labels"]:
            fields["id2label"] = dict(enumerate(labels))
    if not name and not gated and "hidden_act" not in asked:
        notes.append(f"hidden_act {hidden_act} assumed")
    return fields


def infer_torchvision(shapes: dict, asked: dict, is_classifier: bool, notes: list) -> dict:
    hidden_size, num_channels, *patch = shapes["conv_proj.weight"]
    first = "encoder.layers.encoder_layer_0.mlp."
    width = shapes[f"{first}0.weight" if f"{first}0.weight" in shapes else f"{first}linear_1.weight"][0]
    fields = dict(
        num_channels=num_channels, patch_size=patch, hidden_size=hidden_size, intermediate_size=width,
        num_hidden_layers=count_layers(shapes, r"encoder\.layers\.encoder_layer_(\d+)\."),
        image_size=grid_of(shapes["encoder.pos_embedding"][1], (1,), patch, notes, asked=asked.get("image_size")),
        num_attention_heads=heads_of(hidden_size, asked, notes),
    )  # fmt: skip
    if "heads.pre_logits.weight" in shapes:
        fields["representation_size"] = shapes["heads.pre_logits.weight"][0]
    if "heads.head.weight" in shapes:
        fields["num_labels"] = shapes["heads.head.weight"][0]
    return fields


def infer_jax(shapes: dict, asked: dict, is_classifier: bool, notes: list) -> dict:
    if "conv_root.kernel" in shapes:
        raise ValueError(
            "this is a hybrid of ResNet and ViT, which hf_vit does not express: take a plain ViT checkpoint"
        )
    *patch, num_channels, hidden_size = shapes["embedding.kernel"]
    first = "Transformer.encoderblock_0"
    heads = next(shape[1] for name, shape in shapes.items() if re.match(rf"{first}\.Multi\w+\.query\.kernel", name))
    width = next(shape[1] for name, shape in shapes.items() if re.match(rf"{first}\.Mlp\w+\.Dense_0\.kernel", name))
    by_map, class_token = "MAPHead_0.probe" in shapes, "cls" in shapes
    positions = [
        shapes[name] for name in ("pos_embedding", "Transformer.posembed_input.pos_embedding") if name in shapes
    ]
    fields = dict(
        num_channels=num_channels, patch_size=patch, hidden_size=hidden_size, intermediate_size=width,
        num_hidden_layers=count_layers(shapes, r"Transformer\.encoderblock_(\d+)\."), num_attention_heads=heads,
        use_class_token=class_token, pooling="map" if by_map else "cls" if class_token else "mean",
        position_embedding="learned" if positions else "sincos2d",
    )  # fmt: skip
    if positions:
        fields["image_size"] = grid_of(
            positions[0][1], (int(class_token), 0), patch, notes, asked=asked.get("image_size")
        )
    if "pre_logits.kernel" in shapes:
        fields |= dict(representation_size=shapes["pre_logits.kernel"][1])
    if "pooler.dense.kernel" in shapes:
        fields |= dict(pooler_act="tanh")
    if "head.kernel" in shapes:
        fields["num_labels"] = shapes["head.kernel"][1]
    return fields


# ----------------------------------------------------------------------------------------------------------------------
# Raw files

# A tensor that each format has, its family, its name for people, and what reads the architecture off the shapes.
RAW_FORMATS = (
    ("patch_embed.proj.weight", "timm", "timm (also DeiT, DINO, DINOv2, MAE)", infer_timm),
    ("conv_proj.weight", "torchvision", "torchvision", infer_torchvision),
    ("embedding.kernel", "jax", "Google's JAX .npz", infer_jax),
)
# Where training scripts put the weights in what they save, the averaged ones first.
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "teacher", "target_encoder")


def read_file(file) -> dict[str, torch.Tensor]:
    """All tensors of a file, whatever it is called, and nothing that could run.

    safetensors, npz without pickled objects, and torch.load with weights_only.
    """
    with open(file, "rb") as opened:
        start = opened.read(9)
    if start[8:] == b"{":
        return load_file(file)
    if start[:2] == b"PK":
        with ZipFile(file) as archive:
            is_npz = all(name.endswith(".npy") for name in archive.namelist())
    if start[:2] == b"PK" and is_npz:
        tensors = {}
        with np.load(file, allow_pickle=False) as archive:
            for name in archive.files:
                try:
                    array = archive[name]
                except ValueError as error:
                    raise ValueError(f"{file} cannot be read: {name} holds more than numbers ({error})") from error
                is_bfloat16 = array.dtype.kind == "V"  # numpy has no such type and saves its bytes
                if array.dtype.kind in "USO":
                    raise ValueError(f"{file} cannot be read: {name} holds text, where numbers were wanted")
                tensor = torch.from_numpy(array.view(np.int16) if is_bfloat16 else array)
                tensors[name.replace("/", ".")] = tensor.view(torch.bfloat16) if is_bfloat16 else tensor
        return tensors
    arguments = [argparse.Namespace]  # which DINO and MAE save beside the weights
    with torch.serialization.safe_globals(arguments):
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except (KeyError, IndexError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is no checkpoint: neither safetensors, npz nor a file of torch.save") from error
    while isinstance(content, dict):
        inner = [content[key] for key in WRAPPERS if isinstance(content.get(key), dict) and content[key]]
        if not inner:
            break
        content = inner[0]
    if not isinstance(content, dict):
        raise ValueError(
            f"{file} holds a {type(content).__name__}; wanted a dict of tensors, such as model.state_dict()"
        )
    return {name: tensor for name, tensor in content.items() if isinstance(tensor, torch.Tensor)}


def read_raw(file, is_classifier: bool, overrides: dict) -> tuple[HFViTConfig, dict, dict, CheckpointSource]:
    """What `from_checkpoint` needs: the config as the file has it, its tensors, the sizes to adapt them to, and their source."""
    if not Path(file).is_file():
        raise ValueError(f"there is no file {file}; from_checkpoint takes a file, from_pretrained a folder or a repo")
    tensors = read_file(file)
    found = [
        (name.removesuffix(sign), family, infer)
        for sign, family, _, infer in RAW_FORMATS
        for name in tensors
        if name.endswith(sign)
    ]
    if not found:
        raise ValueError(
            f"{file} holds no ViT that hf_vit knows: its tensors are {', '.join(list(tensors)[:3]) or 'none'}, ...; it reads "
            f"{', '.join(title for _, _, title, _ in RAW_FORMATS)}. A file of transformers needs its config.json beside it: "
            "give the folder to from_pretrained"
        )
    prefix, family, infer = found[0]
    outside = sorted({name.split(".")[0] for name in tensors if not name.startswith(prefix)})
    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    notes = []
    if not is_classifier:  # the tanh layer of JAX heads is what transformers calls the pooler
        tensors = {re.sub(r"^pre_logits\.(?=kernel|bias)", "pooler.dense.", name): t for name, t in tensors.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    try:
        fields = infer(shapes, overrides, is_classifier, notes)
    except (KeyError, IndexError, StopIteration) as error:
        raise ValueError(f"{file} begins like a {family} checkpoint but lacks {str(error) or 'a layer'}") from error
    except ValueError as error:
        raise ValueError(f"{file}, read as {family}: {error}") from error
    if outside:
        notes.append(f"left out {', '.join(outside)}, outside {prefix.rstrip('.')}")
    if "num_labels" in overrides:
        fields.pop("num_labels", None)
    config = HFViTConfig(**fields | {name: value for name, value in overrides.items() if name not in INPUT_FIELDS})
    sizes = {name: overrides[name] for name in INPUT_FIELDS if name in overrides}
    return config, tensors, sizes, CheckpointSource(str(file), family, notes)


# ----------------------------------------------------------------------------------------------------------------------
# Back to transformers


def to_transformers(model):
    """See `HFViTPreTrainedModel.to_transformers`."""
    config, is_classifier = model.config, model.is_classifier
    candidates = {
        name: family for name, family in FAMILIES.items() if (family.classifier if is_classifier else family.base)
    }
    for fold in (False, True):  # LayerScale is kept where a family has it, else multiplied into the layer before it
        obstacles = {name: unlike(config, name, is_classifier, fold) for name in candidates}
        for name, family in candidates.items():
            if not obstacles[name]:
                return build_native(model, name, family, is_classifier)
    of_size = lambda name: sum(what.startswith(("image_size", "patch_size")) for what in obstacles[name])
    closest = min(obstacles, key=lambda name: (len(obstacles[name]), -of_size(name)))
    raise ValueError(
        f"no native transformers {'classifier' if is_classifier else 'model'} has {' and '.join(obstacles[closest])} "
        f"(the closest is {closest}); save_pretrained keeps the model as it is"
    )


def unlike(config, name: str, is_classifier: bool, fold: bool) -> list[str]:
    """What of the config the family `name` cannot express, as "field=value"."""
    family = FAMILIES[name]
    allows = {**{name: (value,) for name, value in PLAIN.items()}, "layerscale_value": ANY if fold else (None,)}
    allows |= family.classifier_allows if is_classifier else family.base_allows
    fields = {name: getattr(config, name) for name in allows}
    if fields["position_embedding"].startswith("sincos"):
        fields["position_embedding"] = "learned"  # a fixed table is a learned one with those values
    for bias in ("patch_bias", "key_bias"):
        if allows[bias] == (True,):
            fields[bias] = True  # a bias of zero
    if is_classifier:
        fields["pooler_act"] = None  # not part of a classifier
    wrong = [
        f"{field}={value!r}"
        for field, value in fields.items()
        if allows[field] is not ANY and value not in allows[field]
    ]
    if family.square:
        sizes = {name: as_pair(getattr(config, name)) for name in ("image_size", "patch_size")}
        wrong += [f"{name}={size}" for name, size in sizes.items() if size[0] != size[1]]
    if name.startswith("dinov2") and ((config.gated_mlp and config.hidden_act != "silu") or mlp_ratio(config) is None):
        wrong.append(f"intermediate_size={config.intermediate_size} with hidden_act={config.hidden_act!r}")
    return wrong


def mlp_ratio(config) -> int | None:
    """DINOv2's mlp_ratio, an int, that gives config.intermediate_size."""
    fits = lambda ratio: config.intermediate_size == dinov2_width(config.hidden_size, ratio, config.gated_mlp)
    return next(filter(fits, range(1, 17)), None)


def in_terms_of(model, name: str, is_classifier: bool) -> dict[str, torch.Tensor]:
    """Copies of the model's weights, with what the family `name` says in another way said so."""
    family = FAMILIES[name]
    config, allows = model.config, family.classifier_allows if is_classifier else family.base_allows
    weights = {key.removeprefix("vit."): tensor.detach().clone() for key, tensor in model.state_dict().items()}
    zeros = torch.zeros_like(weights["layers.0.layernorm_before.bias"])  # (D,)
    if config.position_embedding.startswith("sincos"):
        embeddings = model.base_model.embeddings
        placed, patches = embeddings.interpolate_pos_encoding(config.grid_size)  # (1, 0 to 2, D), (1, N, D)
        unplaced = zeros.expand(1, embeddings.num_positioned - placed.shape[1], -1)
        weights["embeddings.position_embeddings"] = torch.cat([unplaced, placed, patches], dim=1)
    if "num_register_tokens" in allows:  # native models without registers hold an empty tensor
        weights.setdefault("embeddings.register_tokens", zeros.new_zeros(1, 0, config.hidden_size))
    if not config.patch_bias and "patch_bias" not in allows:
        weights["embeddings.patch_embeddings.projection.bias"] = zeros
    for index in range(config.num_hidden_layers):
        layer = f"layers.{index}"
        if config.qkv_bias and not config.key_bias and "key_bias" not in allows:
            weights[f"{layer}.attention.k_proj.bias"] = zeros
        for scale, dense in (
            ("layer_scale1", "attention.o_proj"),
            ("layer_scale2", "mlp.down_proj" if config.gated_mlp else "mlp.fc2"),
        ):
            if "layerscale_value" in allows:
                weights.setdefault(f"{layer}.{scale}.lambda1", torch.ones_like(zeros))
            elif config.layerscale_value is not None:
                factor = weights.pop(f"{layer}.{scale}.lambda1")  # (D,)
                weights[f"{layer}.{dense}.weight"] *= factor.unsqueeze(1)  # (D, in)
                weights[f"{layer}.{dense}.bias"] *= factor
    if is_classifier and name.startswith("dinov2") and config.pooling != "cls_mean":
        head = weights["classifier.weight"]  # (L, D) -> (L, 2 D), over class token and mean
        both = [head, torch.zeros_like(head)]
        weights["classifier.weight"] = torch.cat(both if config.pooling == "cls" else both[::-1], dim=1)
    return weights


def build_native(model, name: str, family: Family, is_classifier: bool):
    """The native model of this family with copies of the model's weights."""
    config = model.config
    both_heads = is_classifier and config.pooling == "cls_distillation"
    native_class = getattr(transformers, family.classifier if is_classifier else family.base)
    native_class = transformers.DeiTForImageClassificationWithTeacher if both_heads else native_class

    fields = {field: getattr(config, field) for field in COMMON_FIELDS}
    fields |= dict(
        pooler_act=config.pooler_act or "tanh", attention_dropout=config.attention_probs_dropout_prob,
        layerscale_value=1.0 if config.layerscale_value is None else float(config.layerscale_value),
        use_swiglu_ffn=config.gated_mlp, use_gated_mlp=config.gated_mlp, mlp_ratio=mlp_ratio(config),
        num_register_tokens=config.num_register_tokens, rope_theta=float(config.rope_theta), vision_use_head=config.pooling == "map",
        query_bias=config.qkv_bias, key_bias=config.qkv_bias and config.key_bias, value_bias=config.qkv_bias,
    )  # fmt: skip
    if family.square:
        fields |= {field: as_pair(fields[field])[0] for field in ("image_size", "patch_size")}
    known = AutoConfig.for_model(name)
    fields = {field: value for field, value in fields.items() if hasattr(known, field)}
    labels = dict(id2label=config.id2label, label2id=config.label2id, problem_type=config.problem_type)
    if native_class.config_class.sub_configs:  # a CLIP or SigLIP classifier has the config of image and text
        native_config = native_class.config_class(vision_config=fields, **labels)
    else:
        native_config = AutoConfig.for_model(name, **fields, **labels)

    rules = family.rules_for(config)
    if not both_heads:
        rules = [
            rule for rule in rules if not any(isinstance(op, JoinHeads) for op in getattr(rule, "operations", ()))
        ]
    stored = revert_weight_conversion(
        SimpleNamespace(_weight_conversions=rules, config=config), in_terms_of(model, name, is_classifier)
    )
    if is_classifier:
        stored = {
            name if "classifier." in name else f"{family.prefix}.{name}": tensor for name, tensor in stored.items()
        }
    without_pooler = not is_classifier and model.pooler is None and name in ("vit", "deit")
    with silence_load_report():
        native, info = native_class.from_pretrained(
            None, config=native_config, state_dict=stored, output_loading_info=True, dtype=model.dtype,
            attn_implementation=config._attn_implementation, **({"add_pooling_layer": False} if without_pooler else {}),
        )  # fmt: skip
    # Never read: the mask of pre-training, and the norm behind which a CLIP classifier takes its tokens.
    unused = r"(.*\.)?(mask_token|post_layernorm\.(weight|bias))"
    info["missing_keys"] = {name for name in info["missing_keys"] if not re.fullmatch(unused, name)}
    if any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise RuntimeError(f"{native_class.__name__} does not take the weights of this model: {info}")
    return native.train(model.training).to(model.device)

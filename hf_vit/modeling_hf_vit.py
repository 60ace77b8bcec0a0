"""A plain Vision Transformer, from pixels to logits, top to bottom. This file is copied to the Hub with the weights.

The letters of every shape below:
    B batch, C channels, H W image height and width, P patch side, h w rows and columns of patches, N = h * w patches,
    R tokens before the patches (class, distillation, registers), T = R + N tokens, D hidden size, A heads,
    K = D / A head size, F width of the MLP, L labels.

The network is that of "An Image is Worth 16x16 Words" (arXiv 2010.11929, figure 1 and section 3.1).
"""

import copy
import dataclasses
import json
import logging as python_logging
import math
import os
import re
from collections import defaultdict
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from numbers import Integral
from pathlib import Path
from typing import Unpack

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutput,
    BaseModelOutputWithPooling,
    ImageClassifierOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, load_state_dict
from transformers.utils import TransformersKwargs, logging
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs
from transformers.utils.peft_utils import find_adapter_config_file

from .configuration_hf_vit import AUTO_MAP, HFViTConfig, as_pair, no_such_field


logger = logging.get_logger(__name__)

INPUT_FIELDS = ("image_size", "patch_size", "num_channels")  # what `resize_input` adapts


def as_text(pair) -> str:
    return f"{pair[0]}x{pair[1]}"


# ----------------------------------------------------------------------------------------------------------------------
# Pixels to tokens


def sincos_1d(length: int, hidden_size: int) -> torch.Tensor:
    """Fixed positions (1, length, D) in [-1, 1] of a sequence: sine on even channels, cosine on odd ones.

    "Attention Is All You Need" (arXiv 1706.03762, section 3.5).
    """
    cpu = dict(dtype=torch.float64, device="cpu")  # whatever device is the default
    frequencies = 10000.0 ** -(torch.arange(0, hidden_size, 2, **cpu) / hidden_size)  # (D / 2,)
    angles = torch.arange(length, **cpu).unsqueeze(1) * frequencies  # (length, D / 2)
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1).float().unsqueeze(0)  # (1, length, D)


def sincos_2d(grid: tuple[int, int], hidden_size: int) -> torch.Tensor:
    """Fixed positions (1, N, D) in [-1, 1]: a quarter of the channels each for sin x, cos x, sin y, cos y.

    The variant of "Better plain ViT baselines for ImageNet-1k" (arXiv 2205.01580, section 3; MoCo v3, arXiv 2104.02057).
    """
    cpu = dict(dtype=torch.float64, device="cpu")  # whatever device is the default
    rows, columns = torch.meshgrid(torch.arange(grid[0], **cpu), torch.arange(grid[1], **cpu), indexing="ij")  # (h, w)
    steps = hidden_size // 4
    frequencies = 10000.0 ** -(torch.arange(steps, **cpu) / max(1, steps - 1))  # (D / 4,)
    x, y = columns.reshape(-1, 1) * frequencies, rows.reshape(-1, 1) * frequencies  # (N, D / 4) each
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).float().unsqueeze(0)  # (1, N, D)


FIXED_POSITIONS: dict[tuple, torch.Tensor] = {}


@torch.compiler.assume_constant_result
def fixed_positions(
    kind: str, num_placed: int, grid: tuple[int, int], hidden_size: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """The table of "sincos1d", (1, num_placed + N, D), or "sincos2d", (1, N, D), for this grid.

    It is computed where it is used: a buffer would be uninitialised memory after every way of loading that skips
    `_init_weights` (the meta device, `no_init_weights`). Tables are kept, so that a forward pass neither computes nor copies.
    """
    key = (kind, num_placed, grid, hidden_size, device, dtype)
    if key in FIXED_POSITIONS:
        return FIXED_POSITIONS[key]
    with torch.inference_mode(False):
        if kind == "sincos2d":
            table = sincos_2d(grid, hidden_size)
        else:
            table = sincos_1d(num_placed + grid[0] * grid[1], hidden_size)
        table = table.to(device, dtype)
    if type(table) is torch.Tensor:  # and not one of a tracer's
        if len(FIXED_POSITIONS) == 32:  # images of many sizes
            FIXED_POSITIONS.clear()
        FIXED_POSITIONS[key] = table
    return table


def rotary_2d(
    grid: tuple[int, int], head_dim: int, theta: float, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, (N, K) each, of the angles by which `rotate` turns the queries and keys of patches.

    As in DINOv3 (arXiv 2508.10104, section 3.2): patch centres run from -1 to 1 along each side of the image, so that the
    angles depend on the place in the image and not on its resolution. A quarter of the channels for the row, a quarter
    for the column, twice.
    """
    float32 = dict(dtype=torch.float32, device=like.device)
    y, x = (2 * torch.arange(0.5, side, **float32) / side - 1 for side in grid)  # (h,), (w,)
    centres = torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=2).flatten(0, 1)  # (h, w, 2) -> (N, 2)
    frequencies = theta ** -(torch.arange(head_dim // 4, **float32) * (4 / head_dim))  # (K / 4,)
    angles = (2 * math.pi * centres.unsqueeze(2) * frequencies).flatten(1).repeat(1, 2)  # (N, 2, K / 4) -> (N, K)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the patches of queries or keys (B, A, T, K), channel c against channel c + K / 2; other tokens stay."""
    N = cos.shape[-2]
    others, patches = heads.split([heads.shape[2] - N, N], dim=2)  # (B, A, R, K), (B, A, N, K)
    left, right = patches.chunk(2, dim=3)  # (B, A, N, K / 2) each
    return torch.cat([others, patches * cos + torch.cat([-right, left], dim=3) * sin], dim=2)  # (B, A, T, K)


def resample_positions(positions: torch.Tensor, old: tuple[int, int], new: tuple[int, int]) -> torch.Tensor:
    """Patch positions (1, N, D) of grid `old` -> grid `new`, by antialiased bicubic interpolation in float32."""
    if old == new:
        return positions
    image = positions.float().reshape(1, *old, -1).permute(0, 3, 1, 2)  # (1, N, D) -> (1, D, h, w)
    if image.device.type == "mps":  # has no backward pass of it
        image = image.cpu()
    image = nn.functional.interpolate(image, size=new, mode="bicubic", antialias=True, align_corners=False)
    return image.flatten(2).transpose(1, 2).to(positions)  # (1, D, h, w) -> (1, N, D)


def drop_patches(tokens: torch.Tensor, num_prefix: int, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (B, R + N, D) -> (B, R + M, D) with M = (1 - rate) N patches of each image, one at least, and which, (B, M).

    PatchDropout (arXiv 2208.07220, section 3.2): the layers then work on fewer tokens.
    """
    others, patches = tokens.split([num_prefix, tokens.shape[1] - num_prefix], dim=1)  # (B, R, D), (B, N, D)
    B, N, D = patches.shape
    kept = torch.rand(B, N, device=tokens.device).argsort(dim=1)[:, : max(1, round((1 - rate) * N))]  # (B, M)
    patches = patches.gather(1, kept.unsqueeze(2).expand(-1, -1, D))  # (B, N, D) -> (B, M, D)
    return torch.cat([others, patches], dim=1), kept


class HFViTPatchEmbeddings(nn.Module):
    """Cut the image into patches and project each: a convolution whose stride is its kernel, or a dense layer between norms."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.num_channels = config.num_channels
        self.patch_size = as_pair(config.patch_size)
        self.by_convolution = config.patch_projection == "conv"
        if self.by_convolution:
            self.projection = nn.Conv2d(
                config.num_channels,
                config.hidden_size,
                self.patch_size,
                stride=self.patch_size,
                bias=config.patch_bias,
            )
        else:
            flat = config.num_channels * self.patch_size[0] * self.patch_size[1]
            self.layernorm_before = nn.LayerNorm(flat, eps=config.layer_norm_eps)
            self.projection = nn.Linear(flat, config.hidden_size)
            self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the pixels it takes; a quantised dense layer does not tell."""
        return (self.projection if self.by_convolution else self.layernorm_after).weight.dtype

    def forward(self, pixel_values):
        if self.by_convolution:
            return (
                self.projection(pixel_values).flatten(2).transpose(1, 2)
            )  # (B, C, H, W) -> (B, D, h, w) -> (B, N, D)
        B, C, H, W = pixel_values.shape
        height, width = self.patch_size
        patches = pixel_values.view(B, C, H // height, height, W // width, width)  # (B, C, h, P, w, P)
        patches = patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # (B, h, w, P, P, C) -> (B, N, P * P * C)
        return self.layernorm_after(self.projection(self.layernorm_before(patches)))  # (B, N, D)


class HFViTEmbeddings(nn.Module):
    """Patch tokens with their positions, behind class token, distillation token and registers."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.config = config
        self.patch_embeddings = HFViTPatchEmbeddings(config)
        hidden_size, (rows, columns) = config.hidden_size, config.grid_size
        learned = lambda count: nn.Parameter(torch.empty(1, count, hidden_size)) if count else None
        self.cls_token = learned(int(config.use_class_token))
        self.distillation_token = learned(int(config.use_distillation_token))
        self.register_tokens = learned(config.num_register_tokens)
        self.num_placed = int(config.use_class_token) + int(config.use_distillation_token)  # tokens with a position
        if config.position_embedding == "learned":
            self.position_embeddings = learned(self.num_placed + rows * columns)
        self.layernorm = (
            nn.LayerNorm(hidden_size, eps=config.layer_norm_eps) if config.embedding_norm else nn.Identity()
        )
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def check(self, pixel_values, interpolate_pos_encoding):
        """Raise ValueError unless pixel_values is a float (B, C, H, W) this model can read."""
        config, patch_size = self.config, self.patch_embeddings.patch_size
        if pixel_values.ndim != 4 or pixel_values.shape[1] != config.num_channels:
            raise ValueError(
                f"pixel_values has shape {tuple(pixel_values.shape)}; wanted (batch, {config.num_channels}, height, width): "
                "prepare the images with the model's image processor"
            )
        if not pixel_values.is_floating_point():
            raise ValueError(
                f"pixel_values has dtype {pixel_values.dtype}; wanted floats that the model's image processor normalised"
            )
        size = tuple(pixel_values.shape[2:])
        any_size = interpolate_pos_encoding or config.position_embedding in ("rotary", "none")
        if not any_size and size != as_pair(config.image_size):
            raise ValueError(
                f"pixel_values is {as_text(size)} pixels but the model takes {as_text(as_pair(config.image_size))}: "
                "resize or crop the images, pass interpolate_pos_encoding=True, or load the model with image_size="
            )
        if size[0] % patch_size[0] or size[1] % patch_size[1]:
            raise ValueError(
                f"pixel_values is {as_text(size)} pixels, which patches of {as_text(patch_size)} do not divide: resize or crop them"
            )

    def positions(self, grid):
        """Positions of the placed tokens (1, 0 to 2, D) and of the patches (1, N, D) on this grid."""
        config = self.config
        if config.position_embedding == "learned":
            placed, patches = self.position_embeddings.split(
                [self.num_placed, self.position_embeddings.shape[1] - self.num_placed], dim=1
            )
            return placed, resample_positions(patches, config.grid_size, grid)
        device, dtype = self.patch_embeddings.projection.weight.device, self.patch_embeddings.dtype
        table = fixed_positions(config.position_embedding, self.num_placed, grid, config.hidden_size, device, dtype)
        return table.split([table.shape[1] - grid[0] * grid[1], grid[0] * grid[1]], dim=1)

    def forward(self, pixel_values, interpolate_pos_encoding=False):
        self.check(pixel_values, interpolate_pos_encoding)
        patch_height, patch_width = self.patch_embeddings.patch_size
        grid = (pixel_values.shape[2] // patch_height, pixel_values.shape[3] // patch_width)  # (h, w)
        patches = self.patch_embeddings(pixel_values)  # (B, N, D)
        placed = [token for token in (self.cls_token, self.distillation_token) if token is not None]  # (1, 1, D) each
        if self.config.position_embedding not in ("rotary", "none"):
            of_placed, of_patches = self.positions(grid)
            patches = patches + of_patches
            if of_placed.shape[1]:
                placed = [torch.cat(placed, dim=1) + of_placed]  # (1, 1 or 2, D)
        prefix = [*placed, self.register_tokens] if self.register_tokens is not None else placed
        prefix = [token.expand(patches.shape[0], -1, -1) for token in prefix]
        return self.dropout(self.layernorm(torch.cat([*prefix, patches], dim=1)))  # (B, T, D)


# ----------------------------------------------------------------------------------------------------------------------
# Token merging: fewer patches from layer to layer, in evaluation (arXiv 2210.09461, section 3)


def match(keys: torch.Tensor, num_prefix: int, r: int) -> torch.Tensor:
    """Which of the T - r tokens that are left each of the T tokens (B, T, K) goes into, (B, T).

    "Bipartite Soft Matching": every other patch may be merged into one of the patches between, the r of them that are
    most like theirs. The tokens that are left stay in their order.
    """
    keys = nn.functional.normalize(keys, dim=2)
    likeness = keys[:, num_prefix::2] @ keys[:, num_prefix + 1 :: 2].transpose(1, 2)  # (B, N - N / 2, N / 2) cosines
    nearest = likeness.max(dim=2)  # (B, N - N / 2)
    merged = nearest.values.topk(r, dim=1, sorted=False).indices  # (B, r)
    sources, partners = num_prefix + 2 * merged, num_prefix + 1 + 2 * nearest.indices.gather(1, merged)  # (B, r) each
    left = torch.ones(keys.shape[:2], dtype=torch.long, device=keys.device).scatter(1, sources, 0)  # (B, T)
    target = left.cumsum(dim=1) - 1  # (B, T)
    return target.scatter(1, sources, target.gather(1, partners))


def merge(hidden_states: torch.Tensor, sizes: torch.Tensor, target: torch.Tensor, count: int):
    """Tokens (B, T, D) and their sizes (B, T, 1) -> `count` tokens, weighted averages of those with one target, and sizes."""
    B = target.shape[0]
    offsets = torch.arange(B, device=target.device).unsqueeze(1) * count  # (B, 1)
    rows = (target + offsets).flatten()  # (B, T) -> (B * T,)

    def total(values):  # several times as fast as a product with a one-hot matrix
        sums = values.new_zeros(B * count, values.shape[2]).index_add(0, rows, values.flatten(0, 1))
        return sums.unflatten(0, (B, count))  # (B * count, D) -> (B, count, D)

    merged = total(sizes)  # (B, count, 1)
    return (total(hidden_states * sizes) / merged).to(hidden_states.dtype), merged


def as_mask(sizes: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """What is added to the logits of attention, log(size), so that a token counts as often as patches are in it.

    (B, T, 1) -> (B, 1, 1, T); "Tracking Token Size", equation 1.
    """
    return None if sizes is None else sizes.log().to(like.dtype).transpose(1, 2).unsqueeze(1)


def mean_patch(patches: torch.Tensor, sizes: torch.Tensor | None) -> torch.Tensor:
    """The mean (B, D) of patches (B, N, D), each counted as often as its size (B, N, 1) says; once where that is None."""
    if sizes is None:
        return patches.mean(dim=1)
    return ((patches * sizes).sum(dim=1) / sizes.sum(dim=1)).to(patches.dtype)


class Merging:
    """What one pass with token merging knows of its tokens: how many patches are in each, and their latest keys."""

    def __init__(self, num_prefix: int):
        self.num_prefix = num_prefix
        self.sizes = None  # (B, T, 1) in float32, None as long as every token is one patch
        self.key = None  # (B, A, T, K) of the attention just computed

    def __call__(self, hidden_states, r):
        """Tokens (B, T, D) -> (B, T - r, D), r at most half of the patches."""
        T = hidden_states.shape[1]
        r = min(r, (T - self.num_prefix) // 2)
        if r == 0:
            return hidden_states
        if self.sizes is None:
            self.sizes = hidden_states.new_ones(*hidden_states.shape[:2], 1, dtype=torch.float32)
        with torch.autocast(hidden_states.device.type, enabled=False):  # bfloat16 would make many cosines equal
            target = match(self.key.mean(dim=1, dtype=torch.float32), self.num_prefix, r)  # (B, T)
        hidden_states, self.sizes = merge(hidden_states, self.sizes, target, T - r)
        return hidden_states  # (B, T - r, D)


# ----------------------------------------------------------------------------------------------------------------------
# The transformer layer


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """softmax(q k^T / sqrt(K)) v, written out: (B, A, T, K) -> (B, T, A, K), and the weights (B, A, T, T)."""
    weights = query @ key.transpose(2, 3) * scaling  # (B, A, T, T)
    if attention_mask is not None:
        weights = weights + attention_mask  # (B, 1, 1, T)
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    dropped = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (dropped @ value).transpose(1, 2).contiguous(), weights


def is_plain(layer) -> bool:
    """Whether a dense layer does nothing but its product: nobody wrapped, quantised, split or hooked it."""
    itself = type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and "forward" not in vars(layer)
    return itself and not is_watched(layer)


def is_watched(module) -> bool:
    """Whether somebody has hooks on a module, to look at what goes through it.

    Those that transformers leaves there once hidden states were asked for do nothing, and those of FSDP only gather weights.
    """
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    blind = ("transformers.utils.output_capturing", "torch.distributed.fsdp")
    return any(
        not (getattr(hook, "__module__", None) or "").startswith(blind) for hooks in kinds for hook in hooks.values()
    )


def together(layers, hidden_states):
    """What each of these dense layers makes of the same tokens (..., D).

    One product instead of several where that is faster: where the weights, which are laid together for it, are few beside
    the tokens. Not for ONNX, which wants weights to be constants.
    """
    D = hidden_states.shape[-1]
    if torch.compiler.is_exporting() or hidden_states.numel() < 8 * D * D or not all(map(is_plain, layers)):
        return [layer(hidden_states) for layer in layers]
    weight, bias = torch.cat([layer.weight for layer in layers]), None  # (sum of widths, D)
    if any(layer.bias is not None for layer in layers):
        bias_of = lambda layer: layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias
        bias = torch.cat([bias_of(layer) for layer in layers])  # (sum of widths,)
    return nn.functional.linear(hidden_states, weight, bias).split([layer.out_features for layer in layers], dim=-1)


class HFViTAttention(nn.Module):
    """Multi-head self-attention, computed by the backend that `attn_implementation` names."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.config = config
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = False  # without it sdpa hides every later patch
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias and config.key_bias)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.q_norm = nn.LayerNorm(self.head_dim, eps=config.layer_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim, eps=config.layer_norm_eps) if config.qk_norm else nn.Identity()

    def project(self, hidden_states, num_queries=None, rotary=None):
        """Tokens (B, T, D) -> queries (B, A, Q, K) of the first `num_queries` of them (None: all), keys and values (B, A, T, K)."""
        if num_queries is None:
            projected = together([self.q_proj, self.k_proj, self.v_proj], hidden_states)  # (B, T, D) each
        else:
            projected = [self.q_proj(hidden_states[:, :num_queries])]  # (B, Q, D)
            projected += together([self.k_proj, self.v_proj], hidden_states)  # (B, T, D) each
        split = lambda tokens: tokens.view(*tokens.shape[:2], -1, self.head_dim).transpose(1, 2)  # (B, A, T, K)
        query, key, value = map(split, projected)
        query, key = self.q_norm(query), self.k_norm(key)
        if rotary is not None:
            query = rotate(query, *rotary) if num_queries is None else query
            key = rotate(key, *rotary)
        return query, key, value

    def forward(self, hidden_states, num_queries=None, rotary=None, merging=None, **kwargs):
        """Tokens (B, T, D) -> what the first `num_queries` of them (None: all) attend to, (B, Q, D), and the weights."""
        query, key, value = self.project(hidden_states, num_queries, rotary)
        # Only the eager backend has the weights to give.
        wanted = kwargs.get("output_attentions", self.config.output_attentions)
        backend, mask = "eager" if wanted else self.config._attn_implementation, None
        if merging is not None:
            merging.key, mask = key, as_mask(merging.sizes, query)  # (B, 1, 1, T)
            if mask is not None and backend != "eager":
                backend = "sdpa"  # not every backend takes a mask of floats
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention_forward)
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        attended, weights = attend(self, query, key, value, mask, scaling=self.scaling, dropout=dropout, **kwargs)
        return self.o_proj(attended.flatten(2)), weights  # (B, Q, A, K) -> (B, Q, D), (B, A, Q, T)


class HFViTMLP(nn.Module):
    """Two dense layers with an activation between them, applied to each token."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states):
        return self.fc2(self.activation(self.fc1(hidden_states)))  # (B, T, D) -> (B, T, F) -> (B, T, D)


class HFViTGatedMLP(nn.Module):
    """Two dense layers with a gate between them; SwiGLU where the activation is "silu" (arXiv 2002.05202, equation 6)."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states):
        gate, up = together([self.gate_proj, self.up_proj], hidden_states)  # (B, T, D) -> (B, T, F) each
        return self.down_proj(self.activation(gate) * up)  # (B, T, F) -> (B, T, D)


class HFViTLayerScale(nn.Module):
    """A learned factor for each channel of a residual branch (arXiv 2103.17239, section 2)."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.lambda1 = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, hidden_states):
        return hidden_states * self.lambda1  # (B, T, D)


class HFViTDropPath(nn.Module):
    """Drop the residual branch of whole samples while training (stochastic depth, arXiv 1603.09382, section 3)."""

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability

    def forward(self, hidden_states):
        if not self.training or self.probability == 0:
            return hidden_states
        keep = hidden_states.new_empty(hidden_states.shape[0], 1, 1).bernoulli_(1 - self.probability)  # (B, 1, 1)
        return hidden_states * keep / (1 - self.probability)

    def extra_repr(self):
        return f"probability={self.probability:.3f}"


class HFViTLayer(GradientCheckpointingLayer):
    """Transformer layer: attention, then MLP, each with a residual.

    The norm stands before each of them (arXiv 2010.11929, equations 2 and 3), or with norm_first=False after each sum
    (arXiv 1706.03762, section 3.1).
    """

    def __init__(self, config: HFViTConfig, index: int):
        super().__init__()
        self.norm_first = config.norm_first
        self.num_merged = 0  # patches merged here in evaluation, see `set_token_merging`
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = HFViTAttention(config)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = HFViTGatedMLP(config) if config.gated_mlp else HFViTMLP(config)
        scaled = config.layerscale_value is not None
        self.layer_scale1 = HFViTLayerScale(config) if scaled else nn.Identity()
        self.layer_scale2 = HFViTLayerScale(config) if scaled else nn.Identity()
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.drop_path = HFViTDropPath(config.drop_path_rate * index / max(1, config.num_hidden_layers - 1))

    def forward(self, hidden_states, num_queries=None, merging=None, **kwargs):
        """Tokens (B, T, D) -> (B, Q, D): the first `num_queries` of them, or all, fewer by those merged on the way."""
        attention = lambda tokens: self.drop_path(
            self.layer_scale1(self.dropout(self.attention(tokens, num_queries, merging=merging, **kwargs)[0]))
        )
        merges = merging is not None and num_queries is None
        fewer = lambda tokens: merging(tokens, self.num_merged) if merges else tokens
        mlp = lambda tokens: self.drop_path(self.layer_scale2(self.dropout(self.mlp(tokens))))
        queries = hidden_states if num_queries is None else hidden_states[:, :num_queries]  # (B, Q, D)
        if self.norm_first:
            hidden_states = fewer(queries + attention(self.layernorm_before(hidden_states)))  # (B, Q, D)
            return hidden_states + mlp(self.layernorm_after(hidden_states))
        hidden_states = fewer(self.layernorm_before(queries + attention(hidden_states)))  # (B, Q, D)
        return self.layernorm_after(hidden_states + mlp(hidden_states))


# ----------------------------------------------------------------------------------------------------------------------
# Tokens to one vector


class HFViTPooler(nn.Module):
    """The dense layer of checkpoints such as google/vit-base-patch16-224-in21k: activation(W x + b)."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.pooler_act]

    def forward(self, pooled):
        return self.activation(self.dense(pooled))  # (B, D)


class HFViTAttentionPooling(nn.Module):
    """A learned probe attends to the patches, then an MLP with a residual: "MAP" (arXiv 2106.04560, section 2.1)."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.probe = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = HFViTGatedMLP(config) if config.gated_mlp else HFViTMLP(config)

    def project(self, patches):
        """Patches (B, N, D) -> the probe's query (B, A, 1, K), keys and values (B, A, N, K)."""
        split = lambda tokens: tokens.view(*tokens.shape[:2], -1, self.head_dim).transpose(1, 2)  # (B, A, N, K)
        query = split(self.q_proj(self.probe)).expand(patches.shape[0], -1, -1, -1)  # (1, A, 1, K) -> (B, A, 1, K)
        return query, split(self.k_proj(patches)), split(self.v_proj(patches))

    def forward(self, patches, sizes=None):
        query, key, value = self.project(patches)
        mask = as_mask(sizes, query)  # (B, 1, 1, N)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)  # (B, A, 1, K)
        pooled = self.o_proj(attended.reshape(patches.shape[0], -1))  # (B, D)
        return pooled + self.mlp(self.layernorm(pooled))


# ----------------------------------------------------------------------------------------------------------------------
# What the model looks at, under any attention backend: the weights are computed anew from what each attention layer reads

GRADIENT_METHODS = ("gradient_rollout", "grad_cam")
MAP_METHODS = ("raw", "mean", "rollout", *GRADIENT_METHODS)


class Reading:
    """What one attention has read and answered: tokens (B, T, D), and the heads' answers side by side, (B, Q, D)."""

    def __init__(self, attention):
        self.attention = attention
        self.tokens = self.rotary = self.answers = None
        self.handles = [
            attention.register_forward_pre_hook(self.read, with_kwargs=True),
            attention.o_proj.register_forward_pre_hook(self.answer),
        ]

    def read(self, _, args, kwargs):
        self.tokens, self.rotary = args[0], kwargs.get("rotary")

    def answer(self, _, args):
        self.answers = args[0]

    @torch.no_grad()
    def weights(self, gradient=None, **kwargs):
        """softmax(q k^T / sqrt(K)), (B, A, Q, T) in float32; where the gradient of the answers is given, times the positive part
        of its own. `kwargs` are those of the attention's `project`."""
        if self.rotary is not None:
            kwargs["rotary"] = self.rotary
        tokens = self.tokens.to(self.attention.q_proj.weight.dtype)  # autocast makes others
        query, key, value = (heads.float() for heads in self.attention.project(tokens, **kwargs))
        weights = (query @ key.transpose(2, 3) * self.attention.head_dim**-0.5).softmax(dim=3)  # (B, A, Q, T)
        if gradient is None:
            return weights
        B, A, Q, K = query.shape
        gradient = gradient.float().view(B, Q, A, K).transpose(1, 2)  # (B, Q, D) -> (B, A, Q, K)
        return weights * (gradient @ value.transpose(2, 3)).clamp(min=0)  # the answers are weights @ value


@contextmanager
def readings(model, attentions):
    """A `Reading` of each of these attentions, which the next forward pass fills. That pass is one of evaluation, of every patch
    (no token merging) and uncompiled, where hooks are heard; afterwards all is as it was."""
    modes = {module: module.training for module in model.modules()}
    merged = {layer: layer.num_merged for layer in model.base_model.layers}
    made = []
    try:
        model.eval()
        for layer in merged:
            layer.num_merged = 0
        for attention in attentions:
            made.append(Reading(attention))
        with torch.compiler.set_stance("force_eager"):
            yield made
    finally:
        for handle in (handle for reading in made for handle in reading.handles):
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
        for layer, count in merged.items():
            layer.num_merged = count


def chosen_layers(layers, count: int, method: str) -> tuple[list[int], bool]:
    """Numbers of layers in 0 .. count - 1, and whether one alone was asked for."""
    several = isinstance(layers, (list, tuple, range)) or (layers is None and method in ("raw", "mean"))
    if layers is None:
        layers = range(count) if several else count - 1
    asked = list(layers) if several else [layers]
    if not asked or not all(
        isinstance(layer, Integral) and layer is not True and -count <= layer < count for layer in asked
    ):
        raise ValueError(
            f"layers is {layers!r}; wanted None, a number from {-count} to {count - 1}, or a list of them"
        )
    return [layer % count for layer in asked], not several


def class_scores(logits: torch.Tensor, labels) -> torch.Tensor:
    """The logit of each image's class, (B,); of the model's own answer where `labels` is None."""
    B, L = logits.shape
    given = logits.argmax(dim=1) if labels is None else labels
    given = given.tolist() if hasattr(given, "tolist") else given  # of torch or numpy
    classes = list(given) if isinstance(given, (list, tuple)) else [given] * B
    if len(classes) != B or not all(type(label) is int and 0 <= label < L for label in classes):
        raise ValueError(f"labels is {given!r}; wanted one class from 0 to {L - 1}, or one for each of {B} images")
    return logits.gather(1, torch.tensor(classes, device=logits.device).view(B, 1)).squeeze(1)


def maps_of(asked, read, made, gradients, method, config, with_probe):
    """The maps (B, layers, N), of heads (B, layers, A, N), of the layers asked for, from the `Reading` and gradient of each layer
    in `read`; a probe's comes last."""
    R = config.num_prefix_tokens
    if method == "grad_cam":
        maps = {}
        for layer, reading, gradient in zip(read, made, gradients, strict=True):
            channels = gradient[:, R:].float().mean(dim=1, keepdim=True)  # (B, 1, D), what each does for the class
            maps[layer] = (reading.tokens.detach()[:, R:].float() * channels).sum(dim=2).relu()  # (B, N)
        return torch.stack([maps[layer] for layer in asked], dim=1)

    by_class = config.pooling.startswith("cls")
    B, T = made[0].tokens.shape[:2]
    query = torch.zeros(B, 1, T, device=made[0].tokens.device)  # how much of each token is in it
    if by_class:
        query[:, :, 0] = 1
    else:
        query[:, :, R:] = made[-1].weights(gradients[-1]).mean(dim=1) if with_probe else 1 / (T - R)

    if not method.endswith("rollout"):
        count, maps = 1 if by_class else None, {}  # queries
        for layer, reading in zip(read, made, strict=False):
            weights = query[:, None, :, :count] @ reading.weights(num_queries=count)  # (B, A, 1, T)
            maps[layer] = weights.squeeze(2)[..., R:]  # (B, A, N)
        maps = torch.stack([maps[layer] for layer in asked], dim=1)  # (B, layers, A, N)
        return maps.mean(dim=2) if method == "mean" else maps

    # From the top down: where each query comes from, one layer below the last
    rows, begun = query.repeat(1, len(asked), 1), torch.tensor(asked, device=query.device)  # (B, layers, T)
    for layer, reading, gradient in reversed(list(zip(read, made, gradients, strict=False))):
        weights, through = reading.weights(gradient).mean(dim=1), begun >= layer  # (B, T, T)
        passed = rows[:, through] + rows[:, through] @ weights
        rows[:, through] = passed / 2 if method == "rollout" else passed
    if method == "gradient_rollout" and not with_probe:
        rows = rows - query  # a patch's own share is the same in all of a mean, and nothing in that of a class token
    return rows[..., R:]


def attention_maps(model, pixel_values, layers, method, labels, interpolate_pos_encoding):
    """See `HFViTPreTrainedModel.attention_maps`."""
    vit, config, by_gradient = model.base_model, model.config, method in GRADIENT_METHODS
    if method not in MAP_METHODS:
        raise ValueError(f"method is {method!r}; wanted one of {', '.join(MAP_METHODS)}")
    if by_gradient and not model.is_classifier:
        raise ValueError(f"{method} follows the gradient of a class: wanted an HFViTForImageClassification")
    if labels is not None and not by_gradient:
        raise ValueError(f"{method} knows no class: leave labels out, or use {' or '.join(GRADIENT_METHODS)}")
    asked, alone = chosen_layers(layers, len(vit.layers), method)
    read = list(range(max(asked) + 1)) if method.endswith("rollout") else sorted(set(asked))
    probe = vit.attention_pooling if method != "grad_cam" else None
    attentions = [vit.layers[layer].attention for layer in read] + ([] if probe is None else [probe])
    with readings(model, attentions) as made, torch.inference_mode(False), torch.set_grad_enabled(by_gradient):
        pixel_values = pixel_values.clone() if pixel_values.is_inference() else pixel_values.detach()
        if by_gradient and pixel_values.is_floating_point():
            pixel_values.requires_grad_()  # a graph also where all weights are frozen
        outputs = model(pixel_values, interpolate_pos_encoding=interpolate_pos_encoding)
        gradients = [None] * len(made)
        if by_gradient:
            ends = [reading.tokens if method == "grad_cam" else reading.answers for reading in made]
            gradients = torch.autograd.grad(class_scores(outputs.logits, labels).sum(), ends)
    with torch.autocast(pixel_values.device.type, enabled=False):
        maps = maps_of(asked, read, made, gradients, method, config, probe is not None)
    height, width = vit.embeddings.patch_embeddings.patch_size
    grid = (pixel_values.shape[2] // height, pixel_values.shape[3] // width)  # (h, w)
    maps = maps.unflatten(-1, grid)  # (B, layers, ..., N) -> (B, layers, ..., h, w)
    return maps[:, 0] if alone else maps


# ----------------------------------------------------------------------------------------------------------------------
# Models


class HFViTPreTrainedModel(PreTrainedModel):
    """What every model here shares: the config class, the initial weights, and loading that never guesses."""

    config_class = HFViTConfig
    base_model_prefix = "vit"
    is_classifier = False
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # Trainer then divides the loss by the accumulation steps itself
    _no_split_modules = ["HFViTEmbeddings", "HFViTLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": HFViTLayer, "attentions": HFViTAttention}
    _input_embed_layer = "patch_embeddings"

    def __init__(self, config: HFViTConfig, *args, **kwargs):
        config.validate_architecture()
        super().__init__(config, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module):
        # LeCun normal for patches and Xavier uniform for dense layers, as in the ViT paper's code; a small normal for tokens.
        # Only functions of `transformers.initialization`: they leave alone what from_pretrained has already loaded.
        std = self.config.initializer_range
        if isinstance(module, nn.Conv2d):
            init.trunc_normal_(module.weight, std=module.weight[0].numel() ** -0.5)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, HFViTLayerScale):
            init.constant_(module.lambda1, self.config.layerscale_value)
        elif isinstance(module, HFViTEmbeddings):
            for token in (module.cls_token, module.distillation_token, module.register_tokens):
                if token is not None:
                    init.normal_(token, std=std)
            if self.config.position_embedding == "learned":
                init.normal_(module.position_embeddings, std=std)
        elif isinstance(module, HFViTAttentionPooling):
            init.normal_(module.probe, std=std)
        else:  # of a head that a subclass has
            super()._init_weights(module)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, output_loading_info=False, **kwargs):
        """Load our own repos and every public format that hf_vit/checkpoints.py lists; arguments as in transformers.

        `image_size=`, `patch_size=` and `num_channels=` may differ from the checkpoint: its weights are then adapted, see
        `resize_input`. So may `num_labels=`: the head alone is then reset. `ignore_mismatched_sizes=True` resets every tensor of
        another shape, and a subclass with a head of its own starts from any base checkpoint. One log line says what was done.

        Raises:
            ValueError: when any other tensor is missing, unexpected, doubled, not finite (see `not_finite`) or of another shape, with its
                name; or when a file is not whole, or holds more than tensors.
        """
        if pretrained_model_name_or_path is not None and os.path.isfile(pretrained_model_name_or_path):
            raise ValueError(
                f"{pretrained_model_name_or_path} is a file: from_pretrained takes a folder or a repo, from_checkpoint a file"
            )
        kwargs.pop("trust_remote_code", None)  # this class is the code: transformers would warn of it
        reset_mismatched = kwargs.pop(
            "ignore_mismatched_sizes", False
        )  # to be told from a head, which needs no permission
        config = kwargs.get("config")
        if config is None and (base := base_of_adapter(pretrained_model_name_or_path, kwargs)) is not None:
            with suppress(OSError):  # its config.json, where there is one, says what the base is made into
                kwargs["config"] = config = cls.config_class.from_pretrained(pretrained_model_name_or_path)
                if "num_labels" in kwargs:
                    raise ValueError("an adapter comes with a head for its own labels: leave num_labels= out")
                for name in [name for name in kwargs if name in config.__dataclass_fields__ and name != "dtype"]:
                    setattr(config, name, kwargs.pop(name))
                kwargs["adapter_kwargs"] = {"_adapter_model_path": pretrained_model_name_or_path}
                pretrained_model_name_or_path = base
        if not isinstance(config, PreTrainedConfig):
            kwargs["_loading"] = "classifier" if cls.is_classifier else "model"  # HFViTConfig.get_config_dict takes it
            sizes = {name: kwargs.pop(name) for name in INPUT_FIELDS if name in kwargs}
        elif config.model_type != cls.config_class.model_type:
            raise ValueError(f"config is a {type(config).__name__}; leave it out, or pass an HFViTConfig")
        elif asked := [name for name in kwargs if name in config.__dataclass_fields__ and name != "dtype"]:
            raise ValueError(f"config= and {asked[0]}= are both given: set {asked[0]} in the config")
        else:  # the config says what is wanted, the checkpoint's own one what is there
            sizes = {name: getattr(config, name) for name in INPUT_FIELDS}
            with suppress(OSError):  # a folder without config.json holds what the given config says
                if pretrained_model_name_or_path is not None:
                    arguments = {**kwargs, "_loading": "classifier" if cls.is_classifier else "model"}
                    found, _ = cls.config_class.get_config_dict(pretrained_model_name_or_path, **arguments)
                    stored = cls.config_class.from_dict(found)
                    kwargs["config"] = config = copy.deepcopy(config)
                    config._origin = stored.__dict__.get("_origin")
                    for name in INPUT_FIELDS:
                        setattr(config, name, getattr(stored, name))
        with own_report(), readable_errors(pretrained_model_name_or_path), resetting_mismatched(reset_mismatched):
            model, info = super().from_pretrained(
                pretrained_model_name_or_path,
                *model_args,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **kwargs,
            )
        if getattr(model, "_hf_peft_config_loaded", False):  # info is then about the adapter, not its base
            wrong = {*info["missing_keys"], *info["unexpected_keys"], *(name for name, *_ in info["mismatched_keys"])}
            if wrong:
                raise ValueError(
                    f"the adapter {pretrained_model_name_or_path} does not fit its base model: {', '.join(sorted(wrong)[:5])}"
                )
        finish_loading(model, sizes)
        return (model, info) if output_loading_info else model

    @classmethod
    def from_checkpoint(cls, file, **overrides):
        """Load one raw file without a config: Google's JAX `.npz`, timm, torchvision, original DINO, DINOv2, DeiT, MAE.

        Args:
            file: path of an `.npz`, `.safetensors`, `.pth`, `.pt` or `.bin` file.
            overrides: fields of HFViTConfig. The shapes of the tensors give most of them; what they cannot give is
                assumed as the format has it, said in the log line, and may be overridden (`num_attention_heads=`,
                `hidden_act=`, `pooling=`, `dtype=`). `image_size=`, `patch_size=` and `num_channels=` adapt the weights;
                where the positions make no square grid, `image_size=` says what grid they make.

        Raises:
            ValueError: for a format that is not known, and as `from_pretrained`.
        """
        cls.config_class.prepare()
        if cls.config_class.checkpoints is None:
            raise ValueError(
                "this copy of the model's code stands alone: install the package hf_vit to read raw files"
            )
        with readable_errors(file):
            config, state_dict, sizes = cls.config_class.checkpoints.read_raw(file, cls.is_classifier, overrides)
        with own_report():
            model, _ = super().from_pretrained(
                None, config=config, state_dict=state_dict, output_loading_info=True, ignore_mismatched_sizes=True
            )
        model.config.name_or_path = str(file)
        finish_loading(model, sizes)
        return model

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As in transformers; the folder's config.json then names every class of this file for the Auto classes."""
        if self._auto_class is not None and type(self).__module__ == __name__:
            self.config.auto_map = {**(getattr(self.config, "auto_map", None) or {}), **AUTO_MAP}
        super().save_pretrained(save_directory, *args, **kwargs)

    def to_transformers(self):
        """The native transformers model with the same tokens and logits, such as a ViTForImageClassification.

        Weights are copied. The pooled vector is the same too where the native model has one. What matters in training
        alone (dropout, stochastic depth) goes along as far as the native config has a field for it.

        Raises:
            ValueError: naming the fields for which no native architecture has a counterpart.
        """
        if self.config_class.checkpoints is None:
            raise ValueError(
                "this copy of the model's code stands alone: install the package hf_vit to convert models"
            )
        return self.config_class.checkpoints.to_transformers(self)

    @torch.no_grad()
    def resize_input(self, image_size=None, patch_size=None, num_channels=None) -> list[str]:
        """Adapt the model in place to other images, weights and config; None leaves a size as it is.

        Learned positions are resampled to the new grid (`resample_positions`), patch kernels to the new patch
        (`resample_patches`) and the new channels (`resample_channels`). An optimizer made before holds the old weights.

        Args:
            image_size, patch_size: in pixels, one int or a pair (height, width).
            num_channels: channels of the input.

        Returns:
            What was done, a phrase for each change.

        Raises:
            ValueError: if the patch does not divide the image, or the patch projection cannot be adapted.
        """
        return adapt_input(self, dict(image_size=image_size, patch_size=patch_size, num_channels=num_channels))

    def set_token_merging(self, r: int | list[int]):
        """Merge r patches into others that are like them in each layer: faster, a little less accurate, no training.

        "Token Merging: Your ViT But Faster" (arXiv 2210.09461, section 3). Between attention and MLP the patches with the
        most similar keys become their average; class, distillation and register tokens stay as they are. From then on
        a token counts for the patches that are in it, in attention and in pooling. It acts in evaluation alone, and is
        not saved. The tokens of layer i, in `last_hidden_state` and `hidden_states`, are then (B, T - r_1 - ... - r_i, D).

        Args:
            r: patches merged in each layer, or a list with a number for each layer; at most half of the patches that are
                left are merged at once. 0 turns it off.

        Raises:
            ValueError: if r is anything else, or the model needs the place of each patch (rotary positions, a backbone).
        """
        layers = [module for module in self.modules() if isinstance(module, HFViTLayer)]
        counts = list(r) if isinstance(r, (list, tuple)) else [r] * len(layers)
        if len(counts) != len(layers) or any(type(count) is not int or count < 0 for count in counts):
            raise ValueError(
                f"r is {r!r}; wanted a number of patches, 0 or more, or a list of {len(layers)} of them, one for each layer"
            )
        if self.config.position_embedding == "rotary":
            raise ValueError(
                'position_embedding is "rotary", which turns each patch by its place, and merged patches have none: '
                "merge tokens in a model with other positions"
            )
        for layer, count in zip(layers, counts, strict=True):
            layer.num_merged = count

    def attention_maps(
        self, pixel_values, layers=None, method: str = "raw", labels=None, interpolate_pos_encoding: bool = False
    ) -> torch.Tensor:
        """What the model looks at in each image, a number for each patch, whatever attention backend it runs on.

        The query, which `attention_query` names, is the class token where the model pools it, else the mean over all patches, or
        the probe of attention pooling, whose weights the rows of the patches then have. Other tokens are left out of the maps. It is
        computed as in evaluation, with every patch, and nothing of the model is changed; but hooks hear the pass, so that
        threads which share a model must take turns.

        Args:
            pixel_values: (B, C, H, W) floats as the model's image processor makes them.
            layers: a number, negative from the end, or a list of numbers, which adds a dimension; None: all layers of "raw" and
                "mean", the last one of the others.
            method: what the numbers are,
                "raw", attention weights of each head, in [0, 1]; with class, distillation and register tokens their sum is 1;
                "mean", their mean over the heads;
                "rollout", weights multiplied up to the layer, half of each being its residual (arXiv 2005.00928, section 3);
                "gradient_rollout", the same of weights times the positive part of their gradient, for a class (arXiv
                2103.15679, equations 5 and 6, without the query's own share that they begin with), 0 or more;
                "grad_cam", the patches that the layer's attention reads, their channels weighted by the mean gradient of
                a class, 0 or more (arXiv 1610.02391, equations 1 and 2).
            labels: for the last two, one class or (B,) classes; None: what the model answers.
            interpolate_pos_encoding: accept any H and W that the patch divides, with resampled positions.

        Returns:
            Maps in float32, (B, h, w) of one layer, (B, layers, h, w) of several; with "raw" (B, A, h, w) and
            (B, layers, A, h, w). Only the layers that are asked for (and with rollouts those below) take memory for it.

        Raises:
            ValueError: for another method or layer, for a class that is none, or where a class is asked of a model without a head.
        """
        return attention_maps(self, pixel_values, layers, method, labels, interpolate_pos_encoding)

    @property
    def attention_query(self) -> str:
        """Whose attention `attention_maps` shows, in words."""
        if self.config.pooling.startswith("cls"):
            return "the class token"
        probed = self.base_model.attention_pooling is not None  # a backbone never has one
        return "the probe of the attention pooling" if probed else "the mean over all patches"

    @torch.no_grad()
    def attention_distances(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """How far each head looks, (layers, A) in pixels: the mean distance of a patch to the patches it attends to.

        Weighted by the attention weights, which are scaled to a sum of 1 over the patches; the mean over all patches and images.
        Figure 7, right, and appendix D.7 of arXiv 2010.11929.

        Args:
            pixel_values: (B, C, H, W) floats as the model's image processor makes them.
        """
        vit, R = self.base_model, self.config.num_prefix_tokens
        with readings(self, [layer.attention for layer in vit.layers]) as made:
            self(pixel_values, interpolate_pos_encoding=True)
        height, width = vit.embeddings.patch_embeddings.patch_size
        sides = (torch.arange(0, pixel_values.shape[2], height), torch.arange(0, pixel_values.shape[3], width))
        centres = torch.cartesian_prod(*sides).float().to(pixel_values.device)  # (N, 2)
        between = torch.cdist(centres, centres)  # (N, N)
        found = []
        with torch.autocast(pixel_values.device.type, enabled=False):
            for reading in made:
                weights = reading.weights()[:, :, R:, R:]  # (B, A, N, N)
                weights = weights / weights.sum(dim=3, keepdim=True)
                found.append((weights * between).sum(dim=3).mean(dim=(0, 2)))  # (A,)
        return torch.stack(found)

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        """As in transformers, with the renaming rules of the checkpoint's family, and no tensor from two sources."""
        load_config = with_rules(model, state_dict, checkpoint_files, load_config)
        return PreTrainedModel._load_pretrained_model(
            model, state_dict, checkpoint_files, load_config, *args, **kwargs
        )

    @staticmethod
    def _finalize_model_loading(model, load_config, loading_info):
        if loading_info.conversion_errors:
            name, error = next(iter(loading_info.conversion_errors.items()))  # a traceback, what was raised, and where
            raise ValueError(f"{model._origin.source} cannot be read: {name} cannot be made: {error.splitlines()[-2]}")
        loading_info = PreTrainedModel._finalize_model_loading(model, load_config, loading_info)
        model._weight_conversions = []  # whatever was read, our own names are written
        account_for(model, loading_info.to_dict())
        return loading_info


class HFViTModel(HFViTPreTrainedModel):
    """Pixels to tokens: embeddings, layers, final norm, and one pooled vector an image.

    Args:
        config: the architecture.
        add_pooling_layer: whether the dense layer of `config.pooler_act` is built, where there is one.
    """

    def __init__(self, config: HFViTConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        self.embeddings = HFViTEmbeddings(config)
        self.layers = nn.ModuleList([HFViTLayer(config, index) for index in range(config.num_hidden_layers)])
        has_norm = config.final_norm != "none"
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if has_norm else nn.Identity()
        self.attention_pooling = HFViTAttentionPooling(config) if config.pooling == "map" else None
        self.pooler = HFViTPooler(config) if add_pooling_layer and config.pooler_act is not None else None
        if self.pooler is not None and config.pooled_size != config.hidden_size:
            raise ValueError(
                f'pooler_act takes {config.hidden_size} channels, not the two vectors of pooling "{config.pooling}"'
            )
        self.post_init()

    def encode(self, pixel_values, interpolate_pos_encoding=False, num_tokens=None, **kwargs):
        """Pixels (B, C, H, W) -> tokens (B, T, D) behind the last layer, before the final norm; or its first `num_tokens`."""
        config, patch_embeddings = self.config, self.embeddings.patch_embeddings
        if pixel_values.is_floating_point():
            pixel_values = pixel_values.to(patch_embeddings.dtype)
        hidden_states = self.embeddings(pixel_values, interpolate_pos_encoding)  # (B, C, H, W) -> (B, T, D)
        if config.position_embedding == "rotary":
            (H, W), (height, width) = pixel_values.shape[2:], patch_embeddings.patch_size
            head_dim = config.hidden_size // config.num_attention_heads
            kwargs["rotary"] = rotary_2d((H // height, W // width), head_dim, config.rope_theta, hidden_states)
        if self.training and config.patch_dropout_rate > 0:
            hidden_states, kept = drop_patches(hidden_states, config.num_prefix_tokens, config.patch_dropout_rate)
            if "rotary" in kwargs:
                kwargs["rotary"] = tuple(
                    table[kept].unsqueeze(1) for table in kwargs["rotary"]
                )  # (N, K) -> (B, 1, M, K)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states, num_tokens if layer is self.layers[-1] else None, **kwargs
            )  # (B, T, D)
        return hidden_states

    def pool(self, hidden_states, sizes=None):
        """Tokens (B, T, D) -> the vector that `config.pooling` names, (B, D), or (B, 2 D) where it names two.

        `sizes` (B, T, 1): how many patches are in each token; None where all are one.
        """
        patches = hidden_states[:, self.config.num_prefix_tokens :]  # (B, T, D) -> (B, N, D)
        sizes = None if sizes is None else sizes[:, self.config.num_prefix_tokens :]  # (B, T, 1) -> (B, N, 1)
        if self.config.pooling == "cls":
            return hidden_states[:, 0]  # (B, D)
        if self.config.pooling == "mean":
            return mean_patch(patches, sizes)  # (B, D)
        if self.config.pooling == "cls_mean":
            return torch.cat([hidden_states[:, 0], mean_patch(patches, sizes)], dim=1)  # (B, 2 D)
        if self.config.pooling == "cls_distillation":
            return hidden_states[:, :2].flatten(1)  # (B, 2, D) -> (B, 2 D)
        return self.attention_pooling(patches, sizes)  # (B, N, D) -> (B, D)

    def pooled_tokens(self, **kwargs) -> int | None:
        """How many of the first tokens the pooled vector is made of; None where that is all, or where somebody looks at them."""
        count = {"cls": 1, "cls_distillation": 2}.get(self.config.pooling)
        if count is None:
            return None
        asked = (
            kwargs.get(name, getattr(self.config, name)) for name in ("output_hidden_states", "output_attentions")
        )
        if any(asked) or any(map(is_watched, (self, self.layernorm, *self.layers[-1].modules()))):
            return None
        return count

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        interpolate_pos_encoding: bool = False,
        pooled_only: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """
        Args:
            pixel_values: (B, C, H, W) floats as the model's image processor makes them.
            interpolate_pos_encoding: accept any H and W that the patch divides, with resampled positions.
            pooled_only: compute what `pooler_output` needs and no more: where a class token is pooled, the last layer is
                that token's alone, and `last_hidden_state` (B, 1, D). Hooks on that layer, `hidden_states` and
                `attentions` are of all tokens: with them nothing is left out.

        Returns:
            `last_hidden_state` (B, T, D), after the final norm where `config.final_norm` is "tokens"; `pooler_output`
            (B, D), or (B, 2 D) where two vectors are pooled; and when asked for `hidden_states`, the input of the first
            layer and the output of each, (B, T, D) before the final norm, and `attentions`, (B, A, T, T) a layer.

        Raises:
            ValueError: if pixel_values has other channels, another size or another kind of numbers than the model.
        """
        num_tokens = self.pooled_tokens(**kwargs) if pooled_only else None
        merging = None
        if not self.training and any(layer.num_merged for layer in self.layers):
            merging = kwargs["merging"] = Merging(self.config.num_prefix_tokens)
        hidden_states = self.encode(pixel_values, interpolate_pos_encoding, num_tokens, **kwargs)  # (B, T, D)
        if self.config.final_norm == "tokens":
            hidden_states = self.layernorm(hidden_states)
        pooled = self.pool(hidden_states, None if merging is None else merging.sizes)  # (B, T, D) -> (B, D)
        if self.config.final_norm == "pooled":
            pooled = self.layernorm(pooled)
        if self.pooler is not None:
            pooled = self.pooler(pooled)  # (B, D)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)


class HFViTForImageClassification(HFViTPreTrainedModel):
    """The pooled vector and one dense layer, after a tanh layer where `config.representation_size` asks: pixels to logits."""

    is_classifier = True

    def __init__(self, config: HFViTConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.vit = HFViTModel(config, add_pooling_layer=False)
        hidden, width = config.representation_size, config.representation_size or config.pooled_size
        self.pre_logits = nn.Linear(config.pooled_size, hidden) if hidden is not None else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(width, config.num_labels)
        self.post_init()

    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self.classifier:  # zero head: the first loss is exactly log(L) (arXiv 2010.11929, appendix B.1.1)
            init.zeros_(module.weight)

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """
        Args:
            pixel_values: (B, C, H, W) floats as the model's image processor makes them.
            labels: as transformers takes them, by `config.problem_type` or, where that is None, by what they look like: (B,) or
                (B, 1) class indices, of which -100 do not count; (B, L) floats in [0, 1], a binary cross-entropy a label; with one
                label, floats, a squared error. `model.loss_function = f` takes another loss.
            interpolate_pos_encoding: accept any H and W that the patch divides, with resampled positions.

        Returns:
            `logits` (B, L), `loss` where labels are given, `hidden_states` and `attentions` when asked for.

        Raises:
            ValueError: for class indices that the model does not have.
        """
        outputs = self.vit(pixel_values, interpolate_pos_encoding, pooled_only=True, **kwargs)
        pooled = outputs.pooler_output  # (B, D) or (B, 2 D)
        if self.pre_logits is not None:
            pooled = self.dropout(self.pre_logits(pooled).tanh())
        logits = self.classifier(pooled)  # (B, L)
        return ImageClassifierOutput(
            loss=None if labels is None else self.compute_loss(logits, labels, **kwargs),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def compute_loss(self, logits, labels, **kwargs):
        """`self.loss_function`; the problem type that it guesses from one batch is not kept, nor written to config.json."""
        problem_type = self.config.problem_type
        if problem_type == "multi_label_classification":
            labels = labels.float()
        try:
            return self.loss_function(labels, logits.float(), self.config, **kwargs)
        except IndexError as error:
            raise ValueError(
                f"labels run from {int(labels.min())} to {int(labels.max())} but the model has {self.num_labels} labels "
                f"(0 to {self.num_labels - 1}): load it with the data's num_labels, or mend the labels"
            ) from error
        finally:
            self.config.problem_type = problem_type


class HFViTBackbone(BackboneMixin, HFViTModel):
    """Pixels to feature maps, for detectors, segmenters and any head of your own.

    `config.out_indices` (0 the embeddings, i the output of layer i) or `config.out_features` ("stem", "stage1", ...) name
    the layers; both may be given to `from_pretrained`.
    """

    def __init__(self, config: HFViTConfig):
        config.set_output_features_output_indices(config.out_features, config.out_indices)
        if config.patch_dropout_rate > 0:
            raise ValueError("a backbone gives maps of all patches: patch_dropout_rate must be 0")
        super().__init__(config, add_pooling_layer=False)
        self.attention_pooling = None
        self.num_features = [config.hidden_size] * (config.num_hidden_layers + 1)

    def set_token_merging(self, r):
        raise ValueError("a backbone gives maps of all patches: merge tokens in an HFViTModel or a classifier")

    @capture_outputs(tie_last_hidden_states=False)
    def features(self, pixel_values, interpolate_pos_encoding, **kwargs):
        return BaseModelOutput(last_hidden_state=self.encode(pixel_values, interpolate_pos_encoding, **kwargs))

    @can_return_tuple
    @filter_output_hidden_states
    def forward(
        self, pixel_values: torch.Tensor, interpolate_pos_encoding: bool = True, **kwargs: Unpack[TransformersKwargs]
    ) -> BackboneOutput:
        """
        Args:
            pixel_values: (B, C, H, W) floats as the model's image processor makes them.
            interpolate_pos_encoding: accept any H and W that the patch divides, with resampled positions, as the
                detectors and segmenters of transformers expect.

        Returns:
            `feature_maps`, (B, D, h, w) for each layer asked for, or (B, T, D) where `config.reshape_hidden_states` is False,
            through the final norm where `config.final_norm` is "tokens" and `config.apply_layernorm`; `hidden_states` and
            `attentions` when asked for.
        """
        outputs = self.features(pixel_values, interpolate_pos_encoding, **kwargs)
        height, width = self.embeddings.patch_embeddings.patch_size
        grid = (pixel_values.shape[2] // height, pixel_values.shape[3] // width)  # (h, w)
        maps = []
        for index in self.out_indices:
            tokens = outputs.hidden_states[index]  # (B, T, D)
            if self.config.final_norm == "tokens" and self.config.apply_layernorm:
                tokens = self.layernorm(tokens)
            if self.config.reshape_hidden_states:
                patches = tokens[:, self.config.num_prefix_tokens :]  # (B, N, D)
                tokens = patches.transpose(1, 2).unflatten(2, grid)  # (B, N, D) -> (B, D, h, w)
            maps.append(tokens)
        return BackboneOutput(
            feature_maps=tuple(maps), hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


# ----------------------------------------------------------------------------------------------------------------------
# Loading


def base_of_adapter(source, kwargs) -> str | None:
    """The checkpoint that a PEFT adapter goes on top of; None where `source` is no adapter, or a whole model beside one.

    Raises:
        ValueError: if the adapter does not name it.
    """
    if source is None or os.path.isfile(os.path.join(source, "model.safetensors")):
        return None
    names = ("cache_dir", "revision", "token", "local_files_only")
    file = find_adapter_config_file(source, **{name: kwargs[name] for name in names if name in kwargs})
    if file is None:
        return None
    try:
        base = json.loads(Path(file).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError, RecursionError):  # no JSON, no such key, no dict
        base = None
    if not isinstance(base, str) or not base:
        raise ValueError(
            f"adapter_config.json of {source} does not say which model the adapter goes on top of: wanted a Hub id or folder as "
            "base_model_name_or_path"
        )
    return base


RESET_MISMATCHED = ContextVar(
    "reset_mismatched", default=False
)  # whether `ignore_mismatched_sizes=True` was asked for


@contextmanager
def resetting_mismatched(asked: bool):
    """Reset tensors of another shape while a model is loaded, instead of raising."""
    token = RESET_MISMATCHED.set(asked)
    try:
        yield
    finally:
        RESET_MISMATCHED.reset(token)


@contextmanager
def own_report():
    """Silence transformers' loading table: ours says what happened, or raises."""
    table = python_logging.getLogger("transformers.modeling_utils")
    keep = lambda record: "LOAD REPORT" not in record.getMessage()
    table.addFilter(keep)
    try:
        yield
    finally:
        table.removeFilter(keep)


@contextmanager
def readable_errors(source):
    """What others say about broken files and misspelt arguments, as one ValueError that says what to do."""
    try:
        yield
    except Exception as error:  # told by name, because this file imports neither safetensors nor zipfile
        kind, said = type(error).__name__, str(error)
        misspelt = (
            re.search(r"__init__\(\) got an unexpected keyword argument '(\w+)'", said)
            if kind == "TypeError"
            else None
        )
        if misspelt is not None:
            raise ValueError(no_such_field(misspelt.group(1))) from error
        if kind == "EOFError":
            reason = "the file is empty"
        elif kind == "UnpicklingError":
            what = re.search(r"GLOBAL (\S+)", said)
            what = f" ({what.group(1)})" if what is not None else ", or is no checkpoint"
            reason = f"it holds more than tensors{what}, and none of that was run"
        elif kind in ("SafetensorError", "BadZipFile") or "PytorchStreamReader" in said:
            reason = f"the file is not whole, or no checkpoint ({kind}: {said.partition('. ')[0]})"
        else:
            raise
        raise ValueError(
            f"{source} cannot be read: {reason}. Fetch it again, or save its tensors as safetensors"
        ) from error


@dataclasses.dataclass
class Origin:
    """Where weights come from: a file, folder or repo, its family unless it is ours, and what is to be said of it."""

    source: str
    family: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    leaves_out: str = "$^"  # a regular expression for tensors that a ViT has no use for; this one matches none


def with_rules(model, state_dict, checkpoint_files, load_config):
    """The load_config with the renaming rules of the checkpoint's family in it; no tensor may come from two sources."""
    origin = model.config.__dict__.pop("_origin", None)
    origin = origin or Origin(str(load_config.pretrained_model_name_or_path or "the given state_dict"))
    model._origin = origin
    if origin.family is not None:
        family = HFViTConfig.checkpoints.FAMILIES[origin.family]
        rules = [*family.rules_for(model.config), *load_config.weight_mapping]
        if family.prefix not in ("", model.base_model_prefix):
            rules.insert(0, WeightRenaming(rf"^{family.prefix}\.", ""))
        load_config = dataclasses.replace(load_config, weight_mapping=rules)
        origin.leaves_out = family.leaves_out or origin.leaves_out
    tensors = list((state_dict or {}).items())
    for file in checkpoint_files if state_dict is None else ():
        folder = os.path.abspath(
            origin.source
        )  # of "." too; links are not resolved, for those of the Hub's cache lead out
        if os.path.isdir(folder) and not os.path.abspath(file).startswith(os.path.join(folder, "")):
            raise ValueError(
                f"the index of {origin.source} names {file}, which lies outside: the repository is not to be trusted"
            )
        try:
            tensors += load_state_dict(file, map_location="meta").items()  # names and shapes alone
        except (KeyError, IndexError, TypeError, AttributeError, UnicodeDecodeError) as error:  # of the unpickler
            raise ValueError(f"{file} is no checkpoint: wanted a dict of tensors as torch.save writes it") from error
    held = sum(tensor.numel() for _, tensor in tensors)
    wanted = sum(tensor.numel() for name, tensor in model.named_parameters() if not name.startswith("classifier."))
    if wanted > 4 * held + 2**24:  # memory for what is missing would be taken before anybody could say so
        raise ValueError(
            f"the config of {origin.source} describes a model of {wanted:,} numbers, its files hold {held:,}: they do not belong "
            "together"
        )
    renamings = [rule for rule in load_config.weight_mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in load_config.weight_mapping if isinstance(rule, WeightConverter)]
    known, renamed = model.state_dict(), 0
    sources = defaultdict(list)  # target name -> [(converter's pattern or None, name in the file), ...]
    for name, tensor in tensors:
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if target not in known and name in known:  # as transformers: an own name that a rule mistook
            target, pattern = name, None
        if tensor.numel() == 0:  # what a native model without registers holds
            origin.leaves_out += f"|{re.escape(target)}$"
        if target in known:
            sources[target].append((pattern, name))
            renamed += target.removeprefix("vit.") != name.removeprefix("vit.")
    for target, found in sources.items():
        patterns = [pattern for pattern, _ in found]
        if len(found) > 1 and (None in patterns or len(set(patterns)) < len(patterns)):
            raise ValueError(
                f"{origin.source} holds {target} {len(found)} times, as {' and '.join(sorted(name for _, name in found))}: "
                "leave one of them in the file"
            )
    if origin.family is not None:
        origin.notes.insert(0, f"read as {origin.family}, {renamed} of {len(tensors)} tensors renamed")
    return load_config


def not_finite(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors with a NaN or infinity; of more than 2^14 numbers only the first and last 2^13 are looked at, because
    files are mapped into memory, and to read all of them takes longer than to load. A run that diverged has them everywhere."""

    def ends(tensor):
        numbers = tensor.flatten()
        return torch.cat([numbers[: 2**13], numbers[-(2**13) :]]) if numbers.numel() > 2**14 else numbers

    looked_at = {name: ends(tensor).float() for name, tensor in tensors.items()}
    devices = {numbers.device for numbers in looked_at.values()}
    together = [torch.cat([each for each in looked_at.values() if each.device == device]) for device in devices]
    if all(numbers.isfinite().all() for numbers in together):  # one answer to wait for
        return []
    return [name for name, numbers in looked_at.items() if not numbers.isfinite().all()]


def in_base_model(model, name: str) -> bool:
    """Whether a tensor belongs to the base model, and not to a head."""
    parts = r"(embeddings|layers|layernorm|attention_pooling|pooler)\."
    return bool(re.match(parts if model.base_model is model else rf"{model.base_model_prefix}\.", name))


def counted(parts: set[str], tensors: set[str]) -> str:
    """Modules, and how many tensors of them are meant."""
    return f"{', '.join(sorted(parts))} ({len(tensors)} tensor{'s' * (len(tensors) > 1)})"


def account_for(model, info):
    """Explain every difference between checkpoint and model in a note for the log line, or raise ValueError."""
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    mismatched = {name: (tuple(found), tuple(wanted)) for name, found, wanted in info["mismatched_keys"]}
    origin, notes = model._origin, model._origin.notes

    # The head and the pooler are reset or left out as a whole; half a head is a broken file.
    head = {name for name in missing | set(mismatched) if name.startswith(("classifier.", "pre_logits."))}
    whole = [{f"{part}.weight", f"{part}.bias"} for part in ("classifier", "pre_logits")]
    if head in (whole[0], whole[0] | whole[1]):
        found = mismatched["classifier.weight"][0][0] if "classifier.weight" in mismatched else "none"
        part = "classifier" if head == whole[0] else "classifier and pre_logits"
        notes.append(f"{part} reset to {model.config.num_labels} labels (the checkpoint has {found})")
        missing, mismatched = missing - head, {name: mismatched[name] for name in set(mismatched) - head}
    without_pooler = origin.family is not None or any(name.startswith("classifier.") for name in unexpected)
    if missing == {"pooler.dense.weight", "pooler.dense.bias"} and without_pooler:
        model.pooler = model.config.pooler_act = None
        notes.append("no pooler in the checkpoint: pooler_output is the pooled token itself")
        missing = set()
    unused = r"classifier\.(weight|bias)|pre_logits\.(weight|bias)|(vit\.)?pooler\.dense\.(weight|bias)"
    if getattr(model.base_model, "attention_pooling", None) is None:
        unused += r"|(vit\.)?attention_pooling\..+"
    left_out = {name for name in unexpected if re.fullmatch(unused, name)}
    if type(model) not in (HFViTModel, HFViTForImageClassification, HFViTBackbone):  # it has a head of its own
        left_out |= {name for name in unexpected if not in_base_model(model, name)}
        new = {name for name in missing if not in_base_model(model, name)}
        if new:
            notes.append(f"newly initialised {counted({name.partition('.')[0] for name in new}, new)}")
        missing -= new
    if mismatched and RESET_MISMATCHED.get():
        notes.append(f"{', '.join(sorted(mismatched))} of another shape reset, as ignore_mismatched_sizes=True asks")
        mismatched = {}
    foreign = {name for name in unexpected - left_out if re.match(origin.leaves_out, name)}
    if left_out | foreign:
        parts = {name.removeprefix("vit.").partition(".")[0] for name in left_out}
        parts |= {re.match(origin.leaves_out, name).group().strip("./") for name in foreign}
        notes.append(f"left out {counted(parts, left_out | foreign)}")

    wrong = [f"{name} is missing" for name in sorted(missing)]
    wrong += [f"{name} is not known to the model" for name in sorted(unexpected - left_out - foreign)]
    wrong += [f"{name} has shape {found}, the model {wanted}" for name, (found, wanted) in sorted(mismatched.items())]
    advice = (
        "Only the classifier may differ, and image_size, patch_size and num_channels are adapted: check that the other "
        "sizes asked for are those of the checkpoint, and that config.json and file are whole. ignore_mismatched_sizes=True "
        "resets what has another shape"
    )
    if not wrong:
        advice = "Save it again from a run that did not diverge"
        plain = {
            name: tensor for name, tensor in model.state_dict().items() if type(tensor) is torch.Tensor
        }  # not quantised
        found = not_finite({name: t for name, t in plain.items() if t.is_floating_point() and not t.is_meta})
        wrong = [f"{name} holds NaN or infinity" for name in found]
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(
            f"the weights of {origin.source} do not fit {type(model).__name__}: {'; '.join(wrong[:5])}{more}. {advice}"
        )


def finish_loading(model, sizes: dict):
    """Adapt the loaded model to the sizes asked for, and say in one log line what was done."""
    origin = model.__dict__.pop("_origin")
    notes = origin.notes + model.resize_input(**sizes)
    if notes:
        logger.warning(f"{type(model).__name__} from {origin.source}: {'; '.join(notes)}.")


def resample_patches(kernel: torch.Tensor, new: tuple[int, int]) -> torch.Tensor:
    """Patch kernel (D, C, P, P) -> (D, C, *new), such that resized patches give the tokens they gave before.

    The pseudo-inverse resize of FlexiViT (arXiv 2212.08013, section 3.4): where `B x` resizes a patch x bilinearly, the new
    kernel minimises |(B x)^T w_new - x^T w|; to zero where the patch grows.
    """
    old = tuple(kernel.shape[2:])
    if old == tuple(new):
        return kernel
    pixels = torch.eye(old[0] * old[1], dtype=torch.float64).reshape(-1, 1, *old)  # one image for each pixel
    resize = nn.functional.interpolate(pixels, size=new, mode="bilinear", align_corners=False).flatten(1)  # (old, new)
    flat = kernel.detach().double().cpu().flatten(2)  # (D, C, P, P) -> (D, C, old)
    return (flat @ torch.linalg.pinv(resize).T).reshape(*kernel.shape[:2], *new).to(kernel)  # (D, C, *new)


def resample_channels(kernel: torch.Tensor, new: int) -> torch.Tensor:
    """Patch kernel (D, C, P, P) -> (D, new, P, P), as timm does it.

    One channel is the sum of the old ones, so that a grey image gives the tokens its RGB copy gave; other numbers are the
    old ones in turn, scaled by C / new so that the tokens keep their size.
    """
    old = kernel.shape[1]
    if new == 1:
        return kernel.sum(dim=1, keepdim=True)
    return kernel[:, torch.arange(new) % old] * (old / new)  # (D, new, P, P)


def adapt_input(model, sizes: dict) -> list[str]:
    """See `HFViTPreTrainedModel.resize_input`."""
    sizes = {name: size for name, size in sizes.items() if size is not None}
    if not sizes:
        return []
    config, wanted = model.config, copy.deepcopy(model.config)
    for name, size in sizes.items():
        setattr(wanted, name, size)
    wanted.validate_architecture()
    embeddings, notes = model.base_model.embeddings, []
    patches = embeddings.patch_embeddings
    old_patch, new_patch = as_pair(config.patch_size), as_pair(wanted.patch_size)
    if (config.num_channels, old_patch) != (wanted.num_channels, new_patch):
        if not patches.by_convolution:
            raise ValueError(
                f"a {config.patch_projection} projection cannot be adapted: keep patch_size {config.patch_size} and "
                f"num_channels {config.num_channels}"
            )
        weight = patches.projection.weight
        kernel = resample_patches(
            weight.cpu().double(), new_patch
        )  # (D, C, P, P), rounded once at the end; not on MPS
        if old_patch != new_patch:
            notes.append(f"patch kernel resampled from {as_text(old_patch)} to {as_text(new_patch)} pixels")
        if config.num_channels != wanted.num_channels:
            kernel = resample_channels(kernel, wanted.num_channels)
            notes.append(f"patch kernel turned from {config.num_channels} to {wanted.num_channels} channels")
        patches.projection.weight = nn.Parameter(kernel.to(weight).contiguous(), weight.requires_grad)
        patches.projection.in_channels = patches.num_channels = wanted.num_channels
        patches.projection.kernel_size = patches.projection.stride = patches.patch_size = new_patch
    old, new = config.grid_size, wanted.grid_size
    if old != new and config.position_embedding == "learned":
        positions = torch.cat(embeddings.positions(new), dim=1)
        embeddings.position_embeddings = nn.Parameter(positions, embeddings.position_embeddings.requires_grad)
        notes.append(f"positions resampled from a grid of {as_text(old)} to {as_text(new)}")
    for name in INPUT_FIELDS:
        setattr(config, name, getattr(wanted, name))
    return notes


__all__ = ["HFViTPreTrainedModel", "HFViTModel", "HFViTForImageClassification", "HFViTBackbone"]

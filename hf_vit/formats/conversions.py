"""Conversions of tensors that transformers lacks, and the rules that several families share."""

from collections.abc import Callable

import torch
from transformers.core_model_loading import Chunk, ConversionOps, WeightConverter, WeightRenaming


QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
POOLING_QKV = ("attention_pooling.q_proj", "attention_pooling.k_proj", "attention_pooling.v_proj")


class Apply(ConversionOps):
    """Tensors through a function, None for one that is not there, and back through its inverse."""

    supports_many_to_many = True

    def __init__(self, forward: Callable, backward: Callable | None = None):
        self.forward, self.backward = forward, backward

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        made = self.forward(*(input_dict.get(pattern, [None])[0] for pattern in source_patterns))
        made = made if isinstance(made, tuple) else (made,)
        named = zip(target_patterns, made, strict=False)
        return {name: tensor.contiguous() for name, tensor in named if tensor is not None}

    @property
    def reverse_op(self):
        return Apply(self.backward, self.forward)


def average_heads(of_class, of_distillation):
    """The heads of class and distillation token, whose logits DeiT averages, as one head over both tokens.

    "Training data-efficient image transformers & distillation through attention" (arXiv 2012.12877, section 4).
    """
    if of_class is None or of_distillation is None:
        raise ValueError("a classifier over class and distillation token wants two heads: one is missing")
    if of_class.ndim == 1:
        return (of_class + of_distillation) / 2  # (L,)
    return torch.cat([of_class, of_distillation], dim=1) / 2  # (L, 2 D)


def split_heads(head):
    """One head over class and distillation token as two whose logits are averaged."""
    return (head, head.clone()) if head.ndim == 1 else (2 * head).chunk(2, dim=1)  # no file holds shared tensors


def align_positions(config, positions, registers=None):
    """Positions (1, N or more, D) with or without rows for the class token and the registers -> ours, and the registers.

    Ours have a row for class and distillation token and none for registers: a missing row is zero, and a register absorbs
    its row, since both are only ever added.
    """
    num_positioned = config.num_class_tokens + int(config.use_distillation_token)
    extra = positions.shape[1] - config.grid_size[0] * config.grid_size[1]
    if extra == 0:
        positions = torch.cat([positions.new_zeros(1, num_positioned, positions.shape[2]), positions], dim=1)
    elif registers is not None and extra > num_positioned:
        registers = registers + positions[:, num_positioned:extra]
        positions = torch.cat([positions[:, :num_positioned], positions[:, extra:]], dim=1)
    return positions, registers


def renamings(table: dict[str, str]) -> list[WeightRenaming]:
    """A rule for each pattern and what takes its place."""
    return [WeightRenaming(pattern, name) for pattern, name in table.items()]


def split_fused(fused: str, *parts: str) -> list[WeightConverter]:
    """Rules for a weight and its bias that hold several projections on top of each other."""
    dot = "_" if fused.endswith("in_proj") else r"\."  # nn.MultiheadAttention writes in_proj_weight
    return [
        WeightConverter(f"{fused}{dot}{kind}", [f"{part}.{kind}" for part in parts], [Chunk(dim=0)])
        for kind in ("weight", "bias")
    ]


def add_leading(source: str, target: str, ndim: int) -> WeightConverter:
    """A rule for a tensor (D,) or (N, D) that has `ndim` dimensions of size 1 in front of it here."""
    return WeightConverter(source, target, [Apply(lambda t: t[(None,) * ndim], lambda t: t[(0,) * ndim])])


def join_heads(of_class: str, of_distillation: str) -> list[WeightConverter]:
    """Rules for the two heads of a model that pools two tokens."""
    return [
        WeightConverter(
            [f"{of_class}{kind}", f"{of_distillation}{kind}"],
            f"classifier.{kind}",
            [Apply(average_heads, split_heads)],
        )
        for kind in ("weight", "bias")
    ]

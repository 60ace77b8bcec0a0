"""Conversions of tensors that transformers lacks, and the rules that several families share."""

from collections.abc import Callable

import torch
from transformers.core_model_loading import Chunk, ConversionOps, WeightConverter, WeightRenaming


QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
POOLING_QKV = ("attention_pooling.q_proj", "attention_pooling.k_proj", "attention_pooling.v_proj")


class Apply(ConversionOps):
    """One tensor through a function, and back through its inverse."""

    def __init__(self, forward: Callable, backward: Callable | None = None):
        self.forward, self.backward = forward, backward

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        [tensors] = input_dict.values()
        return {target_patterns[0]: self.forward(tensors[0] if isinstance(tensors, list) else tensors).contiguous()}

    @property
    def reverse_op(self):
        return Apply(self.backward, self.forward)


class JoinHeads(ConversionOps):
    """Join the heads of class and distillation token, whose logits DeiT averages, to one head over both tokens.

    "Training data-efficient image transformers & distillation through attention" (arXiv 2012.12877, section 4).
    """

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        heads = [found[0] for found in input_dict.values()]
        if len(heads) != 2:
            raise ValueError(f"{target_patterns[0]} wants two heads, of class and distillation token: one is missing")
        joined = torch.cat(heads, dim=1) / 2 if heads[0].ndim == 2 else (heads[0] + heads[1]) / 2  # (L, 2 D), (L,)
        return {target_patterns[0]: joined}

    @property
    def reverse_op(self):
        return SplitHeads()


class SplitHeads(ConversionOps):
    """Split one head over class and distillation token into two whose logits are averaged."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        [[head]] = input_dict.values()
        heads = (2 * head).chunk(2, dim=1) if head.ndim == 2 else (head, head.clone())  # no file holds shared tensors
        return {name: part.contiguous() for name, part in zip(target_patterns, heads, strict=True)}


class AlignPositions(ConversionOps):
    """Positions with or without rows for the class token and the registers -> ours.

    Ours have a row for class and distillation token and none for registers: a missing row is zero, and a register absorbs
    its row, since both are only ever added.
    """

    supports_many_to_many = True

    def convert(self, input_dict, source_patterns, target_patterns, config, **kwargs):
        tensors = {pattern.lstrip("^"): found[0] for pattern, found in input_dict.items()}
        positions = tensors.get("pos_embed", tensors.get("pos_embedding"))  # (1, extra + N, D)
        registers = tensors.get("reg_token", tensors.get("register_tokens"))
        num_positioned = config.num_class_tokens + int(config.use_distillation_token)
        extra = positions.shape[1] - config.grid_size[0] * config.grid_size[1]
        if extra == num_positioned + config.num_register_tokens and "reg_token" in tensors:
            registers = registers + positions[:, num_positioned:extra]
            positions = torch.cat([positions[:, :num_positioned], positions[:, extra:]], dim=1)
        elif extra == 0:
            positions = torch.cat([positions.new_zeros(1, num_positioned, positions.shape[2]), positions], dim=1)
        aligned = {"embeddings.position_embeddings": positions}
        return aligned if registers is None else aligned | {"embeddings.register_tokens": registers}


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


def join_heads(config, of_class: str, of_distillation: str) -> list:
    """Rules for a head, and for the second one of a model that pools two tokens."""
    if config.pooling != "cls_distillation":
        return renamings({of_class: "classifier."})
    return [
        WeightConverter([f"{of_class}{kind}", f"{of_distillation}{kind}"], f"classifier.{kind}", [JoinHeads()])
        for kind in ("weight", "bias")
    ]

"""A checkpoint while its config is read: its tensors, and the fields that their shapes tell, or nearly tell.

What had to be assumed is added to the notes, for the log line.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from transformers.core_model_loading import WeightRenaming, apply_renamings

from hf_vit.model.configuration_hf_vit import HFViTConfig, as_pair


PUBLISHED_HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16}  # of widths published with other heads than of 64 channels
PATCHES = "embeddings.patch_embeddings.projection"
REGISTERS = "embeddings.register_tokens"


@dataclass
class Source:
    """A file, folder or repository while its config is read.

    Args:
        name: for messages.
        open: () -> its tensors by their names.
        is_classifier: whether a classifier is loaded; None for a config alone.
        asked: fields of HFViTConfig, and arguments of `from_pretrained`, that were passed.
        said: its config.json, or what stands in for one.
        is_pickle: whether it is a raw file of torch.save.
        containers: keys of the dicts around its tensors in such a file.
        notes: phrases of the log line, to be extended.
    """

    name: str
    open: Callable[[], dict[str, torch.Tensor]]
    is_classifier: bool | None
    asked: dict
    said: dict = field(default_factory=dict)
    is_pickle: bool = False
    containers: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return self.open()

    def select(self, prefix: str):
        """Keep the network whose names have this prefix, without it."""
        inside = {name.removeprefix(prefix): self.tensors[name] for name in self.tensors if name.startswith(prefix)}
        if len(inside) < len(self.tensors):
            self.notes.append(f"left out what is not in {prefix}")
        self.tensors, self.containers = inside, set(prefix.split("/")[:-1])

    def assume(self, **fields):
        """Note what nothing tells, but for what was asked for."""
        if assumed := [f"{name} {value}" for name, value in fields.items() if name not in self.asked]:
            self.notes.append(f"{', '.join(assumed)} assumed")

    def renamed_shapes(self, rules: Callable) -> dict[str, tuple]:
        """Shapes by the names that the renamings among the family's rules give."""
        renamings = [rule for rule in rules(HFViTConfig()) if isinstance(rule, WeightRenaming)]
        return {apply_renamings(name, renamings): tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def plain_fields(self, rules: Callable) -> dict:
        """Fields that tensors tell by their names and shapes, once the rules have renamed them."""
        shapes = self.renamed_shapes(rules)
        hidden_size, num_channels, *patch = shapes[f"{PATCHES}.weight"]
        width = shapes["layers.0.mlp.fc2.weight"][1]
        gated = shapes.get("layers.0.mlp.fc1.weight", (0, 0))[0] != width  # fc1 is apart, or twice as wide
        rows = dict(num_labels="classifier.weight", representation_size="pre_logits.weight")
        return {field: shapes[name][0] for field, name in rows.items() if name in shapes} | dict(
            num_channels=num_channels,
            patch_size=patch,
            patch_bias=f"{PATCHES}.bias" in shapes,
            hidden_size=hidden_size,
            num_hidden_layers=count_layers(shapes),
            intermediate_size=width,
            gated_mlp=gated,
            hidden_act="silu" if gated else "gelu",
            use_class_token="embeddings.cls_token" in shapes,
            use_distillation_token="embeddings.distillation_token" in shapes,
            num_register_tokens=shapes.get(REGISTERS, (1, 0))[1],
            embedding_norm="embeddings.layernorm.weight" in shapes,
            qk_norm="layers.0.attention.q_norm.weight" in shapes,
            layerscale_value=1.0 if "layers.0.layer_scale1.lambda1" in shapes else None,
        )

    def image_size(self, num_positions: int, num_prefixes: tuple, patch, stated=None) -> list[int]:
        """[height, width] of the images of a model with so many positions, the first of which may belong to prefix tokens.

        For each number of prefix tokens, the size that the checkpoint states comes first, then a square, then what was asked for.
        """
        for num_prefix in num_prefixes:
            num_patches = num_positions - num_prefix
            square = [math.isqrt(max(0, num_patches)) * side for side in patch]
            for size in filter(None, (stated, square, self.asked.get("image_size"))):
                rows, columns = (length // side for length, side in zip(as_pair(size), patch, strict=True))
                if rows * columns == num_patches > 0:
                    if size is not stated:
                        self.notes.append(f"a grid of {rows}x{columns} positions assumed")
                    return [rows * patch[0], columns * patch[1]]
        raise ValueError(
            f"{num_positions} positions make no square grid: pass image_size=(height, width), that of the checkpoint"
        )

    def num_heads(self, hidden_size: int, published: dict = PUBLISHED_HEADS) -> int:
        """The number of heads, which shapes do not tell: 64 channels each, but for the models published otherwise."""
        if "num_attention_heads" in self.asked:
            return self.asked["num_attention_heads"]
        if hidden_size % 64:
            raise ValueError(
                f"the file does not say how many heads share its {hidden_size} channels: pass num_attention_heads="
            )
        heads = published.get(hidden_size, hidden_size // 64)
        self.assume(num_attention_heads=heads)
        return heads


def count_layers(names) -> int:
    """One more than the largest index of a layer."""
    return 1 + max(int(found[1]) for found in (re.match(r"layers\.(\d+)\.", name) for name in names) if found)

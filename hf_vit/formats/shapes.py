"""Fields that the shapes of tensors tell, or nearly tell: image size, heads, layers.

What had to be assumed is added to `notes`, for the log line.
"""

import math
import re

from hf_vit.model.configuration_hf_vit import as_pair


PUBLISHED_HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16}  # of widths published with other heads than of 64 channels


def infer_image_size(
    num_positions: int, num_prefixes: tuple, patch, notes: list, stated=None, asked=None
) -> list[int]:
    """[height, width] of the images of a model with so many positions, the first of which may belong to prefix tokens.

    For each number of prefix tokens, the size that the checkpoint states comes first, then a square, then what was asked for.
    """
    for num_prefix in num_prefixes:
        num_patches = num_positions - num_prefix
        side = math.isqrt(max(0, num_patches))
        for size in (stated, (side * patch[0], side * patch[1]), asked):
            if size is not None:
                rows, columns = as_pair(size)[0] // patch[0], as_pair(size)[1] // patch[1]
                if rows * columns == num_patches > 0:
                    if size is not stated:
                        notes.append(f"a grid of {rows}x{columns} positions assumed")
                    return [rows * patch[0], columns * patch[1]]
    raise ValueError(
        f"{num_positions} positions make no square grid: pass image_size=(height, width), that of the checkpoint"
    )


def infer_num_heads(
    hidden_size: int, asked: dict, notes: list, architecture: str = "", published: dict = PUBLISHED_HEADS
) -> int:
    """The number of heads, which shapes do not tell: 64 channels each, but for the models published otherwise."""
    if "num_attention_heads" in asked:
        return asked["num_attention_heads"]
    heads = published.get(hidden_size, hidden_size // 64)
    if re.search("giantopt|vit_base_patch16_gap_", architecture):
        heads = 16
    if hidden_size % 64 or architecture.startswith("test_vit"):
        raise ValueError(
            f"the file does not say how many heads share its {hidden_size} channels: pass num_attention_heads="
        )
    notes.append(f"num_attention_heads {heads} assumed")
    return heads


def count_layers(shapes: dict, pattern: str) -> int:
    """One more than the largest index that `pattern` captures."""
    return 1 + max(int(found.group(1)) for found in (re.match(pattern, name) for name in shapes) if found)

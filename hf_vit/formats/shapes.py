"""Fields that the shapes of tensors tell, or nearly tell: image size, heads, layers.

What had to be assumed is added to the notes of the source, for the log line.
"""

import math
import re

from hf_vit.formats.family import Source
from hf_vit.model.configuration_hf_vit import as_pair


PUBLISHED_HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16}  # of widths published with other heads than of 64 channels


def infer_image_size(source: Source, num_positions: int, num_prefixes: tuple, patch, stated=None) -> list[int]:
    """[height, width] of the images of a model with so many positions, the first of which may belong to prefix tokens.

    For each number of prefix tokens, the size that the checkpoint states comes first, then a square, then what was asked for.
    """
    for num_prefix in num_prefixes:
        num_patches = num_positions - num_prefix
        side = math.isqrt(max(0, num_patches))
        for size in (stated, (side * patch[0], side * patch[1]), source.asked.get("image_size")):
            if size is not None:
                rows, columns = as_pair(size)[0] // patch[0], as_pair(size)[1] // patch[1]
                if rows * columns == num_patches > 0:
                    if size is not stated:
                        source.notes.append(f"a grid of {rows}x{columns} positions assumed")
                    return [rows * patch[0], columns * patch[1]]
    raise ValueError(
        f"{num_positions} positions make no square grid: pass image_size=(height, width), that of the checkpoint"
    )


def infer_num_heads(source: Source, hidden_size: int, published: dict = PUBLISHED_HEADS) -> int:
    """The number of heads, which shapes do not tell: 64 channels each, but for the models published otherwise."""
    if "num_attention_heads" in source.asked:
        return source.asked["num_attention_heads"]
    if hidden_size % 64:
        raise ValueError(
            f"the file does not say how many heads share its {hidden_size} channels: pass num_attention_heads="
        )
    heads = published.get(hidden_size, hidden_size // 64)
    source.notes.append(f"num_attention_heads {heads} assumed")
    return heads


def count_layers(shapes: dict, pattern: str) -> int:
    """One more than the largest index that `pattern` captures."""
    return 1 + max(int(found.group(1)) for found in (re.match(pattern, name) for name in shapes) if found)


def plain_fields(source: Source, kernel: str, layer: str) -> dict:
    """Fields that the patch kernel (D, C, P, P) and the numbers of the layers, which `layer` captures, tell."""
    hidden_size, num_channels, *patch = source.shapes[kernel]
    depth = count_layers(source.shapes, layer)
    return dict(num_channels=num_channels, patch_size=patch, hidden_size=hidden_size, num_hidden_layers=depth)

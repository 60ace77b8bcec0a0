"""Where a patch is: fixed sine-cosine tables, rotary angles, and learned positions resampled to another grid.

`HFViTEmbeddings.positions_on_grid` gives the positions of a forward pass. Images of another size than the config's have another
grid, for which `resample_position_embeddings` resamples learned ones; tables and angles are computed for the grid. `resize_input`
(resizing.py), which loading.py calls for `from_pretrained(image_size=...)`, resamples them once and for all.

Letters of the shapes: h w rows and columns of patches, N = h * w, T all tokens, D hidden size, A heads, K head size, B batch.
"""

import math

import torch
from torch import nn


def sincos_1d(length: int, hidden_size: int):
    """Fixed positions (1, length, D) in [-1, 1] of a sequence: sine on even channels, cosine on odd ones.

    "Attention Is All You Need" (arXiv 1706.03762, section 3.5).
    """
    cpu = dict(dtype=torch.float64, device="cpu")  # even under another default device
    frequencies = 10000.0 ** -(torch.arange(0, hidden_size, 2, **cpu) / hidden_size)  # (D / 2,)
    angles = torch.arange(length, **cpu).unsqueeze(1) * frequencies  # (length, D / 2)
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1).float().unsqueeze(0)  # (1, length, D)


def sincos_2d(grid: tuple[int, int], hidden_size: int):
    """Fixed positions (1, N, D) in [-1, 1]: a quarter of the channels each for sin x, cos x, sin y, cos y.

    The variant of "Better plain ViT baselines for ImageNet-1k" (arXiv 2205.01580, section 3; MoCo v3, arXiv 2104.02057).
    """
    cpu = dict(dtype=torch.float64, device="cpu")  # even under another default device
    rows, columns = torch.meshgrid(torch.arange(grid[0], **cpu), torch.arange(grid[1], **cpu), indexing="ij")  # (h, w)
    steps = hidden_size // 4
    frequencies = 10000.0 ** -(torch.arange(steps, **cpu) / max(1, steps - 1))  # (D / 4,)
    x, y = columns.reshape(-1, 1) * frequencies, rows.reshape(-1, 1) * frequencies  # (N, D / 4) each
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).float().unsqueeze(0)  # (1, N, D)


# A forward pass neither computes nor copies its table: 0.1 to 1.8 ms, 8% of the forward of a small model on one image.
FIXED_POSITION_EMBEDDINGS: dict[tuple, torch.Tensor] = {}


@torch.compiler.assume_constant_result
def fixed_position_embeddings(
    kind: str, num_prefix: int, grid: tuple[int, int], hidden_size: int, device: torch.device, dtype: torch.dtype
):
    """The table of "sincos1d", (1, num_prefix + N, D), or of "sincos2d", (1, N, D), for this grid.

    It is computed where it is used. A buffer would hold uninitialised memory after every way of loading that skips
    `_init_weights`, such as the meta device and `no_init_weights`.
    """
    key = (kind, num_prefix, grid, hidden_size, device, dtype)
    if key not in FIXED_POSITION_EMBEDDINGS:
        with torch.inference_mode(False):
            is_2d = kind == "sincos2d"
            table = sincos_2d(grid, hidden_size) if is_2d else sincos_1d(num_prefix + grid[0] * grid[1], hidden_size)
            table = table.to(device, dtype)
        if type(table) is not torch.Tensor:  # the fake tensor of a tracer
            return table
        if len(FIXED_POSITION_EMBEDDINGS) == 32:  # images of many sizes
            FIXED_POSITION_EMBEDDINGS.clear()
        FIXED_POSITION_EMBEDDINGS[key] = table
    return FIXED_POSITION_EMBEDDINGS[key]


def resample_position_embeddings(positions, old: tuple[int, int], new: tuple[int, int], config):
    """Learned patch positions (1, N, D) of grid `old` -> grid `new`, in float32, as the config's `position_*` fields say."""
    if old == new:
        return positions
    image = positions.float().reshape(1, *old, -1).permute(0, 3, 1, 2)  # (1, N, D) -> (1, D, h, w)
    if image.device.type == "mps":  # where this interpolation has no backward pass
        image = image.cpu()
    mode, _, variant = config.position_interpolation.partition("_")
    scale = dict(size=new)
    if variant == "offset":
        scale = dict(scale_factor=tuple((side + 0.1) / before for side, before in zip(new, old, strict=True)))
    how = dict(mode=mode, antialias=config.position_antialias, align_corners=variant == "corners")
    image = nn.functional.interpolate(image, **scale, **how)
    return image.flatten(2).transpose(1, 2).to(positions)  # (1, D, h, w) -> (1, N, D)


def rotary_2d(grid: tuple[int, int], head_dim: int, theta: float, like, kept=None):
    """Cosine and sine, (N, K) each, of the angles by which `apply_rotary` turns the queries and keys of patches.

    Of the patches `kept` (B, M) alone, where they are given: (B, 1, M, K) each.

    As in DINOv3 (arXiv 2508.10104, section 3.2): patch centres run from -1 to 1 along each side of the image, so the
    angles depend on the place in the image and not on its resolution. A quarter of the channels for the row, a quarter
    for the column, twice.
    """
    float32 = dict(dtype=torch.float32, device=like.device)
    y, x = (2 * torch.arange(0.5, side, **float32) / side - 1 for side in grid)  # (h,), (w,)
    centres = torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=2).flatten(0, 1)  # (h, w, 2) -> (N, 2)
    frequencies = theta ** -(torch.arange(head_dim // 4, **float32) * (4 / head_dim))  # (K / 4,)
    angles = (2 * math.pi * centres.unsqueeze(2) * frequencies).flatten(1).repeat(1, 2)  # (N, 2, K / 4) -> (N, K)
    tables = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
    return tables if kept is None else tuple(table[kept].unsqueeze(1) for table in tables)  # (N, K) -> (B, 1, M, K)


def apply_rotary(heads, cos, sin):
    """Turn the patches of queries or keys (B, A, T, K), channel c against channel c + K / 2; prefix tokens stay."""
    N = cos.shape[-2]
    prefix, patches = heads.split([heads.shape[2] - N, N], dim=2)  # (B, A, T - N, K), (B, A, N, K)
    left, right = patches.chunk(2, dim=3)  # (B, A, N, K / 2) each
    return torch.cat([prefix, patches * cos + torch.cat([-right, left], dim=3) * sin], dim=2)  # (B, A, T, K)

"""Images to flat patches and back, and tokens without some of their patches.

Letters of the shapes: B batch, C channels, H W image height and width, P patch side, h w rows and columns of patches, N = h * w,
R prefix tokens, M patches that are kept, D hidden size.
"""

import torch


def patchify(pixel_values, patch_size: tuple[int, int]):
    """Images (B, C, H, W) -> their patches (B, N, P * P * C), the numbers of each in the order row, column, channel."""
    B, C, H, W = pixel_values.shape
    height, width = patch_size
    patches = pixel_values.reshape(B, C, H // height, height, W // width, width)  # (B, C, h, P, w, P)
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # (B, h, w, P, P, C) -> (B, N, P * P * C)


def unpatchify(patches, patch_size: tuple[int, int], grid: tuple[int, int]):
    """Patches (B, N, P * P * C) of a grid (h, w) -> images (B, C, H, W): what `patchify` took apart."""
    pixels = patches.unflatten(2, (*patch_size, -1)).unflatten(1, grid)  # (B, h, w, P, P, C)
    return pixels.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)  # (B, C, h, P, w, P) -> (B, C, H, W)


def random_patches(tokens, num_prefix: int, rate: float):
    """A random M = (1 - rate) N patches of each image, at least one: tokens (B, R + N, D) -> which are kept, (B, M).

    PatchDropout (arXiv 2208.07220, section 3.2): the layers then work on fewer tokens.
    """
    B, N = tokens.shape[0], tokens.shape[1] - num_prefix
    return torch.rand(B, N, device=tokens.device).argsort(dim=1)[:, : max(1, round((1 - rate) * N))]  # (B, M)


def keep_patches(tokens, num_prefix: int, kept):
    """The prefix tokens and the patches `kept` (B, M) of each image, in that order: (B, R + N, D) -> (B, R + M, D)."""
    prefix, patches = tokens.split([num_prefix, tokens.shape[1] - num_prefix], dim=1)  # (B, R, D), (B, N, D)
    patches = patches.gather(1, kept.unsqueeze(2).expand(-1, -1, patches.shape[2]))  # (B, N, D) -> (B, M, D)
    return torch.cat([prefix, patches], dim=1)

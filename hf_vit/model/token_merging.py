"""Fewer tokens for the layers in evaluation: token merging, layer by layer.

Letters of the shapes: B batch, T tokens, R prefix tokens, N = T - R patches, D hidden size, A heads, K head size.
The method is that of "Token Merging: Your ViT But Faster" (arXiv 2210.09461, section 3).
"""

import torch
from torch import nn


def bipartite_soft_matching(keys: torch.Tensor, num_prefix: int, r: int) -> torch.Tensor:
    """Assign each of the T tokens, by its key (B, T, K), to one of the T - r that are left: indices (B, T).

    Every other patch may be merged into one of the patches between; the r most similar pairs are. The tokens that are left
    keep their order.
    """
    keys = nn.functional.normalize(keys, dim=2)
    similarity = keys[:, num_prefix::2] @ keys[:, num_prefix + 1 :: 2].transpose(1, 2)  # (B, N - N / 2, N / 2) cosines
    nearest = similarity.max(dim=2)  # (B, N - N / 2)
    merged = nearest.values.topk(r, dim=1, sorted=False).indices  # (B, r)
    sources, partners = num_prefix + 2 * merged, num_prefix + 1 + 2 * nearest.indices.gather(1, merged)  # (B, r) each
    left = torch.ones(keys.shape[:2], dtype=torch.long, device=keys.device).scatter(1, sources, 0)  # (B, T)
    target = left.cumsum(dim=1) - 1  # (B, T)
    return target.scatter(1, sources, target.gather(1, partners))


def merge_tokens(hidden_states: torch.Tensor, sizes: torch.Tensor, target: torch.Tensor, count: int):
    """Average the tokens (B, T, D) that have one target, weighted by their sizes (B, T, 1): `count` tokens and their sizes."""
    B = target.shape[0]
    offsets = torch.arange(B, device=target.device).unsqueeze(1) * count  # (B, 1)
    rows = (target + offsets).flatten()  # (B, T) -> (B * T,)

    def total(values):  # several times as fast as a product with a one-hot matrix
        sums = values.new_zeros(B * count, values.shape[2]).index_add(0, rows, values.flatten(0, 1))
        return sums.unflatten(0, (B, count))  # (B * count, D) -> (B, count, D)

    merged = total(sizes)  # (B, count, 1)
    return (total(hidden_states * sizes) / merged).to(hidden_states.dtype), merged


def proportional_attention_bias(sizes: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """log(size), added to the logits of attention so that a token counts as often as patches are in it (equation 1).

    (B, T, 1) -> (B, 1, 1, T)
    """
    return None if sizes is None else sizes.log().to(like.dtype).transpose(1, 2).unsqueeze(1)


def mean_patch(patches: torch.Tensor, sizes: torch.Tensor | None) -> torch.Tensor:
    """Mean (B, D) of patches (B, N, D), weighted by their sizes (B, N, 1) where tokens were merged."""
    if sizes is None:
        return patches.mean(dim=1)
    return ((patches * sizes).sum(dim=1) / sizes.sum(dim=1)).to(patches.dtype)


class TokenMerging:
    """The state of token merging in one forward pass: the size of each token and the latest keys."""

    def __init__(self, num_prefix: int):
        self.num_prefix = num_prefix
        self.sizes = None  # (B, T, 1) in float32: how many patches are in a token; None while each is one
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
            target = bipartite_soft_matching(self.key.mean(dim=1, dtype=torch.float32), self.num_prefix, r)  # (B, T)
        hidden_states, self.sizes = merge_tokens(hidden_states, self.sizes, target, T - r)
        return hidden_states  # (B, T - r, D)


class TokenMergingMixin:
    """`set_token_merging` of every model."""

    def set_token_merging(self, r: int | list[int]):
        """Merge r similar patches in each layer: faster, slightly less accurate, no training needed.

        Between attention and MLP, the patches with the most similar keys are averaged; class, distillation and register
        tokens stay as they are. From then on a token counts for the patches in it, in attention and in pooling. Merging
        acts in evaluation only and is not saved. The tokens of layer i, in `last_hidden_state` and `hidden_states`, are
        then (B, T - r_1 - ... - r_i, D).

        Args:
            r: patches merged in each layer, or a list with one number per layer; at most half of the remaining patches are
                merged at once. 0 turns merging off.

        Raises:
            ValueError: if r is anything else, or the model needs the place of each patch (rotary positions, a backbone).
        """
        layers = self.base_model.layers
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

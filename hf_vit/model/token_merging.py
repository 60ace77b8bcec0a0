"""Fewer tokens for the layers in evaluation: token merging, put around the layers of a model from outside.

A pass carries its own `TokenMerging` in the keyword arguments of the layers: `begin` makes it, `attend_and_merge` takes the place of
each layer's `attend`, `attend_by_size` that of its attention's, and `spread` gives every patch its token back after the last layer.

Letters of the shapes: B batch, T tokens, R prefix tokens, N = T - R patches, D hidden size, A heads, K head size.
The method is that of "Token Merging: Your ViT But Faster" (arXiv 2210.09461, section 3).
"""

from functools import partial

import torch
from torch import nn


def bipartite_soft_matching(keys, num_prefix: int, r: int):
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


def merge_tokens(hidden_states, sizes, target, count: int):
    """Average the tokens (B, T, D) that have one target, weighted by their sizes (B, T, 1): `count` tokens and their sizes."""
    B = target.shape[0]
    offsets = torch.arange(B, device=target.device).unsqueeze(1) * count  # (B, 1)
    rows = (target + offsets).flatten()  # (B, T) -> (B * T,)

    def total(values):  # several times as fast as a product with a one-hot matrix
        sums = values.new_zeros(B * count, values.shape[2]).index_add(0, rows, values.flatten(0, 1))
        return sums.unflatten(0, (B, count))  # (B * count, D) -> (B, count, D)

    merged = total(sizes)  # (B, count, 1)
    return (total(hidden_states * sizes) / merged).to(hidden_states.dtype), merged


class TokenMerging:
    """The state of token merging in one forward pass."""

    def __init__(self):
        self.key = None  # (B, A, T, K) of the attention just computed
        self.sizes = None  # (B, T, 1) in float32: how many patches are in a token; None while each is one
        self.target = None  # (B, T of the embeddings): the token in which each of them is now


def begin(model, args, kwargs):
    """A pre-hook of the model: a state for this pass, unless the caller gives one, or None, which merges nothing."""
    return None if model.training else (args, {"token_merging": TokenMerging(), **kwargs})


def attend_by_size(attention, query, key, value, token_merging=None, **kwargs):
    """The attention's `attend`, in which a token counts as often as patches are in it."""
    if token_merging is not None:
        token_merging.key = key
        if token_merging.sizes is not None:  # the logarithm is added to the logits (equation 1)
            kwargs["attention_mask"] = (
                token_merging.sizes.log().to(query.dtype).transpose(1, 2).unsqueeze(1)
            )  # (B, 1, 1, T)
    return type(attention).attend(attention, query, key, value, **kwargs)


def attend_and_merge(layer, r, num_prefix, hidden_states, num_queries=None, token_merging=None, **kwargs):
    """The layer's `attend`; r of the patches, at most half of them, are then merged: (B, T, D) -> (B, T - r, D)."""
    hidden_states = type(layer).attend(layer, hidden_states, num_queries, token_merging=token_merging, **kwargs)
    B, T = hidden_states.shape[:2]
    r = min(r, (T - num_prefix) // 2)
    if token_merging is None or num_queries is not None or r == 0:
        return hidden_states
    state = token_merging
    with torch.autocast(hidden_states.device.type, enabled=False):  # bfloat16 would make many cosines equal
        target = bipartite_soft_matching(state.key.mean(dim=1, dtype=torch.float32), num_prefix, r)  # (B, T)
    if state.sizes is None:
        state.sizes = hidden_states.new_ones(B, T, 1, dtype=torch.float32)
    state.target = target if state.target is None else target.gather(1, state.target)
    hidden_states, state.sizes = merge_tokens(hidden_states, state.sizes, target, T - r)
    return hidden_states


def spread(layer, args, kwargs, hidden_states):
    """A hook of the last layer, (B, T - r, D) -> (B, T, D): each patch gets its token, and is pooled as if it were alone."""
    state = kwargs.get("token_merging")
    if state is None or state.target is None or hidden_states.shape[1] != state.sizes.shape[1]:
        return hidden_states
    return hidden_states.gather(1, state.target.unsqueeze(2).expand(-1, -1, hidden_states.shape[2]))


def set_token_merging(model, r: int | list[int]):
    """Merge r similar patches in each layer: faster, slightly less accurate, no training needed.

    Between attention and MLP, the patches with the most similar keys are averaged; class, distillation and register
    tokens stay as they are. From then on a token counts for the patches in it, in attention and in pooling. Merging
    acts in evaluation only and is not saved. The tokens between the layers are fewer, `hidden_states[i]` (B, T - r_1 - ... -
    r_i, D); after the last layer every patch has the token that it is in, `last_hidden_state` (B, T, D).

    Args:
        r: patches merged in each layer, or a list with one number per layer; at most half of the remaining patches are
            merged at once. 0 turns merging off.

    Raises:
        ValueError: if r is anything else, or the model needs the place of each patch (rotary positions, a backbone).
    """
    base, layers = model.base_model, model.base_model.layers
    counts = list(r) if isinstance(r, (list, tuple)) else [r] * len(layers)
    if len(counts) != len(layers) or min(counts) < 0:
        raise ValueError(f"r must be >= 0, or a list of {len(layers)} such numbers, one for each layer, got {r}")
    if not model.can_merge_tokens or model.config.position_embedding == "rotary":
        raise ValueError(
            f"{type(model).__name__} with {model.config.position_embedding} positions needs the place of each patch: merge "
            "tokens in an HFViTModel or a classifier whose positions are not rotary"
        )
    for hook in vars(base).pop("token_merging_hooks", ()):
        hook.remove()
    for layer, count in zip(layers, counts, strict=True):
        for module in (layer, layer.attention):
            vars(module).pop("attend", None)
        if any(counts):
            layer.attend = partial(attend_and_merge, layer, count, model.config.num_prefix_tokens)
            layer.attention.attend = partial(attend_by_size, layer.attention)
    if any(counts):
        base.token_merging_hooks = [
            base.register_forward_pre_hook(begin, with_kwargs=True),
            layers[-1].register_forward_hook(spread, prepend=True, with_kwargs=True),
        ]

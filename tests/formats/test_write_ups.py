"""The architectures of five from-scratch ViT write-ups are values of HFViTConfig: the same counts and the same numbers.

Each is stated here once more in plain torch, without a line of hf_vit, and its weights are loaded under our names. Letters
as in hf_vit/model/modeling_hf_vit.py. What of them no field can say: a mean pool that counts the class token among the patches, and
heads whose size is not D / A.
"""

import re
from collections import OrderedDict

import pytest
import torch
from torch import nn

from hf_vit import HFViTConfig, HFViTForImageClassification


# The tiny size of every forward below; sides differ, so that rows and columns cannot be exchanged unseen.
SIZES = dict(D=32, A=4, F=64, depth=2, P=(4, 2), grid=(2, 3), L=5)
TINY = dict(
    image_size=(8, 6), patch_size=(4, 2), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    num_labels=5, layer_norm_eps=1e-5,
)  # fmt: skip
# The published sizes at 224 pixels and 1,000 labels, arXiv 2010.11929, table 1.
BASE = dict(D=768, A=12, F=3072, depth=12, P=(16, 16), grid=(14, 14), L=1000)
LARGE = dict(D=1024, A=16, F=4096, depth=24, P=(16, 16), grid=(14, 14), L=1000)
HUGE = dict(D=1280, A=16, F=5120, depth=32, P=(14, 14), grid=(16, 16), L=1000)


# ----------------------------------------------------------------------------------------------------------------------
# The write-ups in plain torch


class FlatPatches(nn.Module):
    """Patches flattened in the order (row, column, channel), then a dense layer, between two norms where asked."""

    def __init__(self, P, C, D, norms):
        super().__init__()
        self.P, flat = P, P[0] * P[1] * C
        self.norm_before = nn.LayerNorm(flat) if norms else nn.Identity()
        self.linear = nn.Linear(flat, D)
        self.norm_after = nn.LayerNorm(D) if norms else nn.Identity()

    def forward(self, images):  # einops: b c (h p1) (w p2) -> b (h w) (p1 p2 c)
        (B, C, H, W), (p1, p2) = images.shape, self.P
        patches = images.reshape(B, C, H // p1, p1, W // p2, p2).permute(0, 2, 4, 3, 5, 1)  # (B, h, w, p1, p2, C)
        return self.norm_after(self.linear(self.norm_before(patches.reshape(B, -1, p1 * p2 * C))))  # (B, N, D)


def attend(q, k, v):  # (..., T, K) each
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v


class FusedAttention(nn.Module):
    """Queries, keys and values of all heads from one dense layer."""

    def __init__(self, D, A, bias):
        super().__init__()
        self.A, self.qkv, self.out = A, nn.Linear(D, 3 * D, bias=bias), nn.Linear(D, D)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.A, -1).permute(2, 0, 3, 1, 4)  # (B, A, T, K) each
        return self.out(attend(q, k, v).transpose(1, 2).reshape(B, T, D))


class HeadList(nn.Module):
    """A small q, k and v for each head, over all channels, or over its own D / A channels without an output projection."""

    def __init__(self, D, A, own_slice):
        super().__init__()
        width = D // A if own_slice else D
        self.own_slice, self.out = own_slice, nn.Identity() if own_slice else nn.Linear(D, D)
        self.heads = nn.ModuleList([nn.ModuleDict({m: nn.Linear(width, D // A) for m in "qkv"}) for _ in range(A)])

    def forward(self, x):
        inputs = x.chunk(len(self.heads), dim=-1) if self.own_slice else [x] * len(self.heads)
        heads = [attend(*(head[m](part) for m in "qkv")) for head, part in zip(self.heads, inputs, strict=True)]
        return self.out(torch.cat(heads, dim=-1))  # (B, T, K) each -> (B, T, D)


class PreNormLayer(nn.Module):
    def __init__(self, attention, D, F):
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(D), attention, nn.LayerNorm(D)
        self.mlp = nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, D))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Network(nn.Module):
    """Patches, class token, positions (a fixed table where given, else learned), layers, norm, pooling, head."""

    def __init__(self, patches, grid, layers, norm, head, D, table=None, pool="cls"):
        super().__init__()
        self.patches, self.layers, self.norm, self.head, self.pool = patches, nn.ModuleList(layers), norm, head, pool
        self.cls_token = nn.Parameter(torch.zeros(1, 1, D))
        self.positions = nn.Parameter(torch.zeros(1, 1 + grid[0] * grid[1], D)) if table is None else table

    def forward(self, images):
        """Logits, tokens behind the norm, and the input of the first layer with the output of each."""
        patches = self.patches(images)  # (B, N, D), or (B, D, h, w) from a convolution
        patches = patches.flatten(2).transpose(1, 2) if patches.ndim == 4 else patches
        x = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], dim=1) + self.positions  # (B, T, D)
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]))
        x = self.norm(states[-1])  # (B, T, D)
        return self.head(x[:, 0] if self.pool == "cls" else x[:, 1:].mean(dim=1)), x, tuple(states)


def sincos(length, D):
    """PE(pos, 2i) = sin(pos / 10000^(2i / D)), PE(pos, 2i + 1) = cos(the same), as (1, length, D)."""
    position, channel = torch.arange(length).double().unsqueeze(1), torch.arange(D)
    angle = position / 10000 ** ((channel - channel % 2) / D)
    return torch.where(channel % 2 == 0, angle.sin(), angle.cos()).float().unsqueeze(0)


def norm_linear_norm(D, A, F, depth, P, grid, L, qkv_bias, pool="cls"):  # (a)
    layers = [PreNormLayer(FusedAttention(D, A, qkv_bias), D, F) for _ in range(depth)]
    return Network(FlatPatches(P, 3, D, norms=True), grid, layers, nn.LayerNorm(D), nn.Linear(D, L), D, pool=pool)


def fused_qkv(D, A, F, depth, P, grid, L):  # (b)
    layers = [PreNormLayer(FusedAttention(D, A, bias=True), D, F) for _ in range(depth)]
    return Network(nn.Conv2d(3, D, P, stride=P), grid, layers, nn.LayerNorm(D), nn.Linear(D, L), D)


def post_norm(D, A, F, depth, P, grid, L):  # (c)
    fields = dict(activation="gelu", batch_first=True, norm_first=False)
    layers = [nn.TransformerEncoderLayer(D, A, F, **fields) for _ in range(depth)]
    table = sincos(1 + grid[0] * grid[1], D)
    return Network(nn.Conv2d(3, D, P, stride=P), grid, layers, nn.Identity(), nn.Linear(D, L), D, table)


def tanh_head(D, A, F, depth, P, grid, L):  # (d)
    layers = [PreNormLayer(HeadList(D, A, own_slice=False), D, F) for _ in range(depth)]
    parts = dict(norm=nn.LayerNorm(D), hidden=nn.Linear(D, D // 4), tanh=nn.Tanh(), dropout=nn.Dropout(0.1))
    head = nn.Sequential(OrderedDict(**parts, labels=nn.Linear(D // 4, L)))
    return Network(nn.Conv2d(3, D, P, stride=P), grid, layers, nn.Identity(), head, D)


def sliced_heads(D, A, F, depth, P, grid, L):  # (e); its softmax behind the logits is left to the loss
    layers = [PreNormLayer(HeadList(D, A, own_slice=True), D, F) for _ in range(depth)]
    patches, table = FlatPatches(P, 1, D, norms=False), sincos(1 + grid[0] * grid[1], D)
    return Network(patches, grid, layers, nn.Identity(), nn.Linear(D, L), D, table)


# ----------------------------------------------------------------------------------------------------------------------
# Their weights under our names

NAMES = [
    (r"^(cls_token)", r"vit.embeddings.\1"),
    (r"^positions", "vit.embeddings.position_embeddings"),
    (r"^patches\.norm_", "vit.embeddings.patch_embeddings.layernorm_"),
    (r"^patches(\.linear)?\.", "vit.embeddings.patch_embeddings.projection."),
    (r"^layers\.", "vit.layers."),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
    (r"\.self_attn\.in_proj_", ".attention.qkv."),  # the names of nn.TransformerEncoderLayer
    (r"\.(attention\.out|self_attn\.out_proj)\.", ".attention.o_proj."),
    (r"\.(mlp\.0|linear1)\.", ".mlp.fc1."),
    (r"\.(mlp\.2|linear2)\.", ".mlp.fc2."),
    (r"^(head\.)?norm\.", "vit.layernorm."),
    (r"^head\.hidden\.", "pre_logits."),
    (r"^head\.(labels\.)?", "classifier."),
]


def renamed(theirs):
    """Their tensors under our names; a fused q/k/v is cut in three, heads of a list are left to `joined`."""
    weights = {}
    for name, tensor in theirs.state_dict().items():
        for pattern, ours in NAMES:
            name = re.sub(pattern, ours, name)
        if ".qkv." in name:
            weights |= {name.replace("qkv", f"{m}_proj"): t for m, t in zip("qkv", tensor.chunk(3), strict=True)}
        elif ".heads." not in name:
            weights[name] = tensor
    return weights


def joined(theirs, join):
    """The heads' own q, k and v as one matrix each, joined by torch.cat or torch.block_diag, and one bias."""
    weights = {}
    for index, layer in enumerate(theirs.layers):
        for m in "qkv":
            name, maps = f"vit.layers.{index}.attention.{m}_proj", [head[m] for head in layer.attention.heads]
            weights[f"{name}.weight"] = join([part.weight.detach() for part in maps])
            weights[f"{name}.bias"] = torch.cat([part.bias.detach() for part in maps])
    return weights


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def published(preset, **fields):
    """Parameters of a preset with 1,000 labels, of which only the shapes are made."""
    with torch.device("meta"):
        return count(HFViTForImageClassification(HFViTConfig.from_preset(preset, num_labels=1000, **fields)))


def assert_same_outputs(theirs, images, weights, fixed=0, **fields):
    """That a tiny model of these fields takes the weights and computes the same; `fixed` numbers of it are none of theirs.

    Loading names every tensor that is missing, unknown or of another shape.
    """
    config = HFViTConfig(**TINY | fields)
    ours = HFViTForImageClassification.from_pretrained(None, config=config, state_dict=weights).eval()
    assert count(ours) == count(theirs) + fixed
    logits, tokens, states = theirs(images)
    out, close = ours(images, output_hidden_states=True), dict(rtol=1e-5, atol=1e-5)
    assert logits.std(dim=0).min() > 0.01  # no label is a constant: neither zeros nor the bias alone are compared
    torch.testing.assert_close(out.hidden_states, states, **close)
    torch.testing.assert_close(ours.vit(images).last_hidden_state, tokens, **close)
    torch.testing.assert_close(out.logits, logits, **close)


# ----------------------------------------------------------------------------------------------------------------------
# The proofs


def test_vit_large_of_304_330_216_parameters_has_norm_linear_norm_patches_and_qkv_biases():
    # The two norms around the patches add 2 * 768 + 2 * 1024 to the 304,326,632 of the preset. Queries, keys and values have
    # 24 * 3 * 1024 biases: the better known network, which has none (and epsilon 1e-5), has 73,728 parameters less. Both
    # have heads of 64 channels, 1024 / 16.
    counts = {("conv", True): 304_326_632, ("norm_linear_norm", True): 304_330_216}
    counts |= {(patches, False): parameters - 73_728 for (patches, _), parameters in counts.items()}
    for (patches, bias), parameters in counts.items():
        assert published("large-patch16-224", patch_projection=patches, qkv_bias=bias) == parameters
    with torch.device("meta"):
        for bias in (True, False):
            assert count(norm_linear_norm(**LARGE, qkv_bias=bias)) == counts["norm_linear_norm", bias]


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_norm_linear_norm_patches_give_the_same_outputs(randomize, pixels, pooling, qkv_bias):
    theirs, images = randomize(norm_linear_norm(**SIZES, qkv_bias=qkv_bias, pool=pooling)), 0.01 * pixels(8, 8, 6)
    fields = dict(patch_projection="norm_linear_norm", qkv_bias=qkv_bias, pooling=pooling)
    assert_same_outputs(theirs, images, renamed(theirs), **fields)  # dim images, so that epsilon counts


def test_convolution_patches_with_fused_qkv_are_the_base_preset(randomize, pixels):
    with torch.device("meta"):
        assert published("base-patch16-224") == count(fused_qkv(**BASE)) == 86_567_656
    theirs = randomize(fused_qkv(**SIZES))
    assert_same_outputs(theirs, pixels(8, 8, 6), renamed(theirs))


def test_sincos_1d_positions_and_post_norm_layers_are_those_of_torch(randomize, pixels):
    theirs = randomize(post_norm(**SIZES))
    fields = dict(position_embedding="sincos1d", norm_first=False, final_norm="none")
    assert_same_outputs(theirs, pixels(8, 8, 6), renamed(theirs), **fields)


@pytest.mark.parametrize(
    ("preset", "sizes"), [("base-patch16-224", BASE), ("large-patch16-224", LARGE), ("huge-patch14-224", HUGE)]
)
def test_presets_with_a_tanh_head_have_as_many_parameters(preset, sizes):
    with torch.device("meta"):
        assert published(preset, representation_size=sizes["D"] // 4) == count(tanh_head(**sizes))


@pytest.mark.parametrize("final_norm", ["tokens", "pooled"])
def test_a_list_of_heads_and_a_tanh_head_give_the_same_outputs(randomize, pixels, final_norm):
    theirs = randomize(tanh_head(**SIZES))
    weights = renamed(theirs) | joined(theirs, torch.cat)
    if final_norm == "tokens":  # the norm stands in their head, so that their tokens have not seen it
        theirs.norm, theirs.head.norm = theirs.head.norm, nn.Identity()
    assert_same_outputs(theirs, pixels(8, 8, 6), weights, representation_size=8, final_norm=final_norm)


@pytest.mark.parametrize(("P", "grid"), [((4, 4), (7, 7)), ((7, 7), (4, 4))])  # "7x7 patches": in number, or in pixels
def test_heads_that_see_their_own_channels_are_block_diagonal_maps(randomize, pixels, P, grid):
    D, A, depth = 8, 2, 2
    theirs = randomize(sliced_heads(D, A, 4 * D, depth, P, grid, L=10))
    weights = renamed(theirs) | joined(theirs, lambda maps: torch.block_diag(*maps))
    weights["vit.embeddings.patch_embeddings.projection.weight"] = theirs.patches.linear.weight.unflatten(1, (1, *P))
    for index in range(depth):
        weights[f"vit.layers.{index}.attention.o_proj.weight"] = torch.eye(D)
        weights[f"vit.layers.{index}.attention.o_proj.bias"] = torch.zeros(D)
    fields = dict(
        image_size=28, patch_size=P, num_channels=1, hidden_size=D, num_attention_heads=A, intermediate_size=4 * D, num_labels=10,
        position_embedding="sincos1d", final_norm="none",
    )  # fmt: skip
    fixed = 336  # zeros beside the blocks of q, k and v, and identities in o_proj
    assert_same_outputs(theirs, pixels(8, 28, 28, channels=1), weights, fixed, **fields)

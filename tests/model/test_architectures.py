"""Each field of HFViTConfig computes what a few lines of plain torch say, alone and together; and the backbone.

Letters as in hf_vit/model/modeling_hf_vit.py.
"""

import itertools
import json
import math
import random
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from hf_vit import HFViTBackbone, HFViTConfig, HFViTForImageClassification, HFViTModel
from hf_vit.model.configuration_hf_vit import as_pair
from hf_vit.model.patches import random_patches


# ----------------------------------------------------------------------------------------------------------------------
# The network in plain torch and float64


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": torch.relu,
    "tanh": torch.tanh,
}


def sincos1d(length, D):
    """PE(pos, 2i) = sin(pos / 10000^(2i / D)), PE(pos, 2i + 1) = cos(the same)."""
    angle = [[place / 10000 ** (channel // 2 * 2 / D) for channel in range(D)] for place in range(length)]
    waves = [[(math.cos if c % 2 else math.sin)(a) for c, a in enumerate(row)] for row in angle]
    return torch.tensor(waves, dtype=torch.float64)  # (length, D)


def sincos2d(grid, D):
    frequencies = [10000 ** -(k / max(1, D // 4 - 1)) for k in range(D // 4)]
    row_of = lambda r, c: [wave(at * f) for at in (c, r) for wave in (math.sin, math.cos) for f in frequencies]
    return torch.tensor([row_of(r, c) for r in range(grid[0]) for c in range(grid[1])], dtype=torch.float64)  # (N, D)


def turned(x, grid, theta):
    """Patches (B, A, N, K): channels c and c + K / 2 are one complex number, times e^(i angle); arXiv 2508.10104."""
    K = x.shape[3]
    frequencies = [theta ** -(k / (K // 4)) for k in range(K // 4)]
    centre = lambda index, side: (2 * index + 1) / side - 1
    places = [(centre(r, grid[0]), centre(c, grid[1])) for r in range(grid[0]) for c in range(grid[1])]
    angles = torch.tensor([[2 * math.pi * at * f for at in place for f in frequencies] for place in places])
    z = torch.complex(*x.chunk(2, dim=3)) * torch.exp(1j * angles.double())  # (B, A, N, K / 2)
    return torch.cat([z.real, z.imag], dim=3)


class Plain:
    """The network of a classifier's config and weights, without a line of hf_vit."""

    def __init__(self, model):
        self.c, self.w = model.config, {n.removeprefix("vit."): v.double() for n, v in model.state_dict().items()}
        self.act = ACTIVATIONS[self.c.hidden_act]
        self.unseen = None  # (B, T), True for tokens that no other attends to

    def dense(self, x, name):
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def norm(self, x, name):
        return F.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"], self.c.layer_norm_eps)

    def patches(self, images):
        P, name = self.c.patch_size, "embeddings.patch_embeddings"
        columns = F.unfold(images, P, stride=P).transpose(1, 2)  # (B, N, C * P * P)
        if self.c.patch_projection == "conv":
            bias = self.w.get(f"{name}.projection.bias", 0)
            return columns @ self.w[f"{name}.projection.weight"].flatten(1).T + bias  # (B, N, D)
        columns = columns.unflatten(2, (self.c.num_channels, -1)).transpose(2, 3).flatten(2)  # (B, N, P * P * C)
        projected = self.dense(self.norm(columns, f"{name}.layernorm_before"), f"{name}.projection")
        return self.norm(projected, f"{name}.layernorm_after")

    def embed(self, images):
        c, x = self.c, self.patches(images)
        names = ("cls_token", "distillation_token", "register_tokens")
        *tokens, registers = (self.w.get(f"embeddings.{name}", x[:1, :0]).expand(len(x), -1, -1) for name in names)
        placed = torch.cat(tokens, dim=1)
        if c.position_embedding == "sincos2d":
            x = x + sincos2d(self.grid, c.hidden_size)
        x = torch.cat([placed, x], dim=1)
        if c.position_embedding == "learned":
            x = x + self.w["embeddings.position_embeddings"]
        if c.position_embedding == "sincos1d":
            x = x + sincos1d(x.shape[1], c.hidden_size)
        x = torch.cat([x[:, : placed.shape[1]], registers, x[:, placed.shape[1] :]], dim=1)  # (B, T, D)
        return self.norm(x, "embeddings.layernorm") if c.embedding_norm else x

    def heads(self, x, name):
        return self.dense(x, name).unflatten(2, (self.c.num_attention_heads, -1)).transpose(1, 2)  # (B, A, T, K)

    def attend(self, q, k, v, name):
        mask = None if self.unseen is None else ~self.unseen[:, None, None]
        attended = F.scaled_dot_product_attention(q, k, v, mask)
        return self.dense(attended.transpose(1, 2).flatten(2), f"{name}.o_proj")

    def attention(self, x, name):
        c, R = self.c, self.c.num_prefix_tokens
        q, k, v = (self.heads(x, f"{name}.{m}_proj") for m in "qkv")
        if c.qk_norm:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        if c.position_embedding == "rotary":
            turn = lambda one: torch.cat([one[:, :, :R], turned(one[:, :, R:], self.grid, c.rope_theta)], dim=2)
            q, k = turn(q), turn(k)
        return self.attend(q, k, v, name)

    def mlp(self, x, name):
        if self.c.gated_mlp:
            gate, up = self.dense(x, f"{name}.gate_proj"), self.dense(x, f"{name}.up_proj")
            return self.dense(self.act(gate) * up, f"{name}.down_proj")
        return self.dense(self.act(self.dense(x, f"{name}.fc1")), f"{name}.fc2")

    def layer(self, x, name):
        scale = lambda index: 1 if self.c.layerscale_value is None else self.w[f"{name}.layer_scale{index}.lambda1"]
        attention = lambda x: scale(1) * self.attention(x, f"{name}.attention")
        mlp = lambda x: scale(2) * self.mlp(x, f"{name}.mlp")
        first = lambda x: self.norm(x, f"{name}.layernorm_before")
        second = lambda x: self.norm(x, f"{name}.layernorm_after")
        if self.c.norm_first:
            x = x + attention(first(x))
            return x + mlp(second(x))
        x = first(x + attention(x))
        return second(x + mlp(x))

    def map(self, patches):
        """A probe attends to the patches; an MLP with a residual follows."""
        name, self.unseen = "attention_pooling", None
        probe = self.w[f"{name}.probe"].expand(len(patches), -1, -1)
        q, k, v = (self.heads(x, f"{name}.{m}_proj") for m, x in zip("qkv", (probe, patches, patches), strict=True))
        x = self.attend(q, k, v, name)[:, 0]  # (B, D)
        return x + self.mlp(self.norm(x, f"{name}.layernorm"), f"{name}.mlp")

    def see(self, images, kept):
        """The tokens of the images, of which only the patches `kept` (B, M) are attended to; None: all."""
        height, width = as_pair(self.c.patch_size)
        self.grid = (images.shape[2] // height, images.shape[3] // width)
        tokens = self.embed(images.double())
        if kept is not None:
            unseen = torch.ones(len(images), math.prod(self.grid), dtype=torch.bool).scatter(1, kept, False)
            self.unseen = torch.cat([unseen.new_zeros(len(images), self.c.num_prefix_tokens), unseen], dim=1)
        return tokens

    def __call__(self, images, kept=None):
        """Hidden states, last hidden state, pooled vector and logits."""
        c, states = self.c, [self.see(images, kept)]
        for index in range(c.num_hidden_layers):
            states.append(self.layer(states[-1], f"layers.{index}"))
        x = self.norm(states[-1], "layernorm") if c.final_norm == "tokens" else states[-1]
        patches, class_token = x[:, c.num_prefix_tokens :], x[:, : c.n_cls_tokens].mean(dim=1)
        if kept is not None:
            patches = patches.gather(1, kept.unsqueeze(2).expand(-1, -1, patches.shape[2]))
        pooled = {
            "cls": lambda: class_token,
            "mean": lambda: patches.mean(dim=1),
            "cls_mean": lambda: torch.cat([class_token, patches.mean(dim=1)], dim=1),
            "cls_distillation": lambda: torch.cat([class_token, x[:, c.n_cls_tokens]], dim=1),
            "map": lambda: self.map(patches),
        }[c.pooling]()
        pooled = self.norm(pooled, "layernorm") if c.final_norm == "pooled" else pooled
        hidden = pooled if c.representation_size is None else torch.tanh(self.dense(pooled, "pre_logits"))
        return tuple(states), x, pooled, self.dense(hidden, "classifier")


def gradients(model, **inputs):
    """The gradient of every trained parameter by name, with the same dropout at each call."""
    model.zero_grad()
    torch.manual_seed(1)
    model(**inputs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_is_plain(model, images):
    states, tokens, pooled, logits = Plain(model)(images)
    base, close = model.vit(images, output_hidden_states=True), dict(rtol=1e-4, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(base.hidden_states, states, **close)
    torch.testing.assert_close(base.last_hidden_state, tokens, **close)
    torch.testing.assert_close(base.pooler_output, pooled, **close)
    torch.testing.assert_close(model(images).logits, logits, **close)
    assert logits.std(dim=0).max() > 1e-2  # more than biases was compared


def assert_comes_back(model, folder, images):
    """Saved and loaded: the same config, every tensor to the bit, the same logits."""
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    before, after = (json.loads(one.config.to_json_string()) for one in (model, loaded))
    assert {**after, "_name_or_path": "", "dtype": ""} == {**before, "_name_or_path": "", "dtype": ""}
    torch.testing.assert_close(loaded(images).logits, model(images).logits)  # places in memory may round differently


def test_a_pooler_is_built_by_the_base_model_alone(tiny_config):
    config = tiny_config(pooler_act="tanh")
    assert HFViTForImageClassification(config).vit.pooler is HFViTBackbone(config).pooler is None


def test_a_new_model_starts_with_tokens_of_the_initializer_range_unit_norms_and_no_bias(tiny_config):
    everything = dict(
        hidden_size=512, initializer_range=0.5, use_distillation_token=True, num_register_tokens=2, qk_norm=True,
        embedding_norm=True, patch_projection="norm_linear_norm", gated_mlp=True, pooling="map", representation_size=8,
    )  # fmt: skip
    tokens = ("cls_token", "distillation_token", "register_tokens", "position_embeddings", "probe")
    seen = set()
    for name, parameter in HFViTForImageClassification(tiny_config(**everything)).named_parameters():
        module, _, kind = name.rpartition(".")
        if kind in tokens:
            seen.add(kind)
            assert parameter.std().item() == pytest.approx(0.5, rel=0.15), name
        elif kind == "bias" or name == "classifier.weight":
            assert (parameter == 0).all(), name
        elif "norm" in module.rpartition(".")[2]:
            assert (parameter == 1).all(), name
        else:  # Xavier uniform
            assert parameter.std().item() == pytest.approx((2 / sum(parameter.shape)) ** 0.5, rel=0.1), name
    assert seen == set(tokens)


# ----------------------------------------------------------------------------------------------------------------------
# Fields together


ARCHITECTURES = [  # whose attention is looked at, and whose tokens are merged
    {},
    dict(pooling="mean", num_register_tokens=2),
    dict(pooling="cls_mean", qk_norm=True, gated_mlp=True, hidden_act="silu"),
    dict(pooling="map", use_class_token=False, layerscale_value=0.5, position_embedding="sincos2d"),
    dict(norm_first=False, final_norm="none", use_distillation_token=True, pooling="cls_distillation"),
    dict(final_norm="pooled", pooling="mean", n_cls_tokens=2),
]


BOTH = [False, True]
FIELDS = dict(
    num_channels=[1, 2, 3, 4], num_hidden_layers=[1, 2, 3], intermediate_size=range(12, 41), hidden_act=sorted(ACTIVATIONS),
    patch_projection=["conv", "conv", "norm_linear_norm"], gated_mlp=BOTH, qkv_bias=BOTH, key_bias=BOTH, qk_norm=BOTH,
    position_embedding=["learned", "sincos1d", "sincos2d", "rotary", "rotary", "none"], rope_theta=[100.0, 10, 10000.0],
    use_class_token=BOTH, n_cls_tokens=[1, 1, 3], num_register_tokens=[0, 0, 1, 3], embedding_norm=BOTH, norm_first=BOTH,
    pooler_act=[None, "tanh"], representation_size=[None, 7], layerscale_value=[None, 0.5], drop_path_rate=[0, 0.5],
    hidden_dropout_prob=[0.0, 0.2], attention_probs_dropout_prob=[0.0, 0.1], layer_norm_eps=[1e-6, 0.1], num_labels=[2, 3, 4, 5],
)  # fmt: skip


def random_fields(seed):
    """Fields of HFViTConfig, drawn so that they fit each other."""
    one_of = random.Random(seed).choice
    fields = {name: one_of(values) for name, values in FIELDS.items()}
    patch, grid, heads = one_of([4, [4, 2], [2, 5], 3]), one_of([(2, 3), (3, 2), (1, 4), (4, 4)]), one_of([1, 2, 4])
    class_token = fields["use_class_token"]
    distillation_token = class_token and one_of(BOTH)
    pooling = one_of(
        ["mean", "map", *["cls", "cls_mean"] * class_token, *["cls_distillation"] * (2 * distillation_token)]
    )
    final_norms = [
        "none",
        *["pooled"] * (pooling not in ("cls_mean", "cls_distillation")),
        *["tokens"] * fields["norm_first"],
    ]
    return fields | dict(
        image_size=[patches * side for patches, side in zip(grid, as_pair(patch), strict=True)], patch_size=patch,
        patch_bias=fields["patch_projection"] != "conv" or one_of(BOTH), hidden_size=heads * one_of([4, 8, 12]),
        num_attention_heads=heads, use_distillation_token=distillation_token, final_norm=one_of(final_norms), pooling=pooling,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["rotary", "sincos1d", "sincos2d"])
def test_positions_of_another_grid_are_what_plain_torch_says(tiny_model, pixels, name):
    model, images = tiny_model(position_embedding=name, num_register_tokens=2), pixels(4, 8, 28)
    logits = model(images, interpolate_pos_encoding=True).logits
    torch.testing.assert_close(logits, Plain(model)(images)[3], rtol=1e-4, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("seed", range(60))
def test_random_architectures_run_train_and_come_back(randomize, pixels, tmp_path, seed):
    fields = random_fields(seed)
    config = HFViTConfig(**fields)
    model = randomize(HFViTForImageClassification(config))
    images = pixels(3, *fields["image_size"], channels=fields["num_channels"])
    for backend in ("sdpa", "eager"):
        model.set_attn_implementation(backend)
        assert_is_plain(model, images)
    T, A = config.num_prefix_tokens + math.prod(config.grid_size), config.num_attention_heads
    attentions = model(images, output_attentions=True).attentions
    assert [weights.shape for weights in attentions] == [(3, A, T, T)] * config.num_hidden_layers
    assert_comes_back(model, tmp_path, images)

    model.set_attn_implementation("sdpa")
    found = gradients(model.train(), pixel_values=images, labels=torch.arange(3) % config.num_labels)  # with dropout
    assert all(gradient.isfinite().all() for gradient in found.values())
    logits = model.eval()(images).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = model(images).logits
    half = model.bfloat16()(images).logits
    assert half.dtype == torch.bfloat16
    for rounded in (cast, half):
        torch.testing.assert_close(rounded.float(), logits, rtol=0, atol=0.15)


# ----------------------------------------------------------------------------------------------------------------------
# Patch dropout: 16 patches, of which the layers see a part while training


def test_patch_dropout_keeps_every_patch_equally_often_and_at_least_one():
    kept = torch.cat([random_patches(torch.zeros(500, 11, 1), 1, 0.6) for _ in range(4)])
    counts = torch.bincount(kept.flatten(), minlength=10)
    assert counts.sum() == 2000 * 4
    assert (counts - 800).abs().max() < 5 * math.sqrt(2000 * 0.4 * 0.6)
    assert random_patches(torch.zeros(2, 11, 1), 1, 0.99).shape == (2, 1)


@pytest.mark.parametrize("pooling", ["cls", "mean", "map"])
@pytest.mark.parametrize("positions", ["learned", "rotary", "sincos2d"])
def test_patch_dropout_computes_what_plain_torch_says_of_the_kept_patches(tiny_model, pixels, positions, pooling):
    """Each at its own place in its own image."""
    fields = dict(use_distillation_token=True, num_register_tokens=1, position_embedding=positions)
    model, images = tiny_model(patch_dropout_rate=0.6, pooling=pooling, **fields).train(), pixels(3, 16, 16)
    torch.manual_seed(1)
    logits = model(images).logits
    torch.manual_seed(1)
    kept = random_patches(torch.zeros(3, 3 + 16, 1), 3, 0.6)  # (B, M)
    assert kept.shape == (3, 6)
    torch.testing.assert_close(logits, Plain(model)(images, kept)[3], rtol=1e-4, atol=1e-5, check_dtype=False)


def test_patch_dropout_is_refused_by_a_backbone(tiny_config):
    with pytest.raises(ValueError, match="patch_dropout_rate"):
        HFViTBackbone(tiny_config(patch_dropout_rate=0.1))


# ----------------------------------------------------------------------------------------------------------------------
# Backbone: feature maps of a 3 x 5 grid


@pytest.fixture
def backbone(tiny_config, randomize):
    """backbone(**overrides) -> HFViTBackbone of a 3 x 5 grid with random weights, in eval mode."""
    return lambda **overrides: randomize(HFViTBackbone(tiny_config(image_size=(12, 20), **overrides)))


@pytest.mark.parametrize("final_norm", ["tokens", "pooled", "none"])
def test_feature_maps_are_the_patch_tokens_in_their_rows_and_columns(backbone, pixels, final_norm):
    network, images = backbone(out_indices=[0, 1, 2], final_norm=final_norm, num_register_tokens=2), pixels(2, 12, 20)
    model = HFViTModel(network.config).eval()
    model.load_state_dict(network.state_dict())
    states = model(images, output_hidden_states=True).hidden_states
    for one, state in zip(network(images).feature_maps, states, strict=True):
        assert one.shape == (2, 32, 3, 5)
        state = model.layernorm(state) if final_norm == "tokens" else state
        for row, column in itertools.product(range(3), range(5)):
            assert torch.equal(one[:, :, row, column], state[:, 3 + 5 * row + column])


@pytest.mark.parametrize(
    ("asked", "indices", "names"),
    [
        ({}, [2], ["stage2"]),
        (dict(out_indices=(0, -1)), [0, -1], ["stem", "stage2"]),
        (dict(out_features=["stage1", "stage2"]), [1, 2], ["stage1", "stage2"]),
    ],
)
def test_layers_are_asked_for_by_number_or_name_and_saved(backbone, pixels, tmp_path, asked, indices, names):
    network, images = backbone(**asked), pixels(2, 12, 20)
    network.save_pretrained(tmp_path)
    loaded = HFViTBackbone.from_pretrained(tmp_path)
    assert (loaded.out_indices, loaded.out_features, loaded.channels) == (indices, names, [32] * len(indices))
    torch.testing.assert_close(loaded(images).feature_maps, network(images).feature_maps)

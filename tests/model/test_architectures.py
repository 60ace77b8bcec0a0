"""Each field of HFViTConfig computes what a few lines of plain torch say, alone and together; and the backbone.

Letters as in hf_vit/model/modeling_hf_vit.py.
"""

import json
import math
import random
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from transformers import AutoBackbone, AutoModel, ViTConfig, ViTForImageClassification
from transformers.activations import ACT2FN

from hf_vit import HFViTBackbone, HFViTConfig, HFViTForImageClassification, HFViTModel
from hf_vit.model.patches import drop_patches
from hf_vit.model.positions import rotary_2d, sincos_1d
from hf_vit.training.optimizers import split_decay


# ----------------------------------------------------------------------------------------------------------------------
# The network in plain torch and float64


ACTIVATIONS = {
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_new": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": lambda x: x * torch.sigmoid(x),
    "relu": lambda x: x.clamp(min=0),
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

    def dense(self, x, name):
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0)

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
        wanted = {
            "cls_token": c.use_class_token,
            "distillation_token": c.use_distillation_token,
            "register_tokens": c.num_register_tokens > 0,
        }
        tokens = {name: self.w[f"embeddings.{name}"].expand(len(x), -1, -1) for name, there in wanted.items() if there}
        registers = tokens.pop("register_tokens", x[:, :0])
        placed = torch.cat([x[:, :0], *tokens.values()], dim=1)
        if c.position_embedding == "sincos2d":
            x = x + sincos2d(self.grid, c.hidden_size)
        x = torch.cat([placed, x], dim=1)
        if c.position_embedding == "learned":
            x = x + self.w["embeddings.position_embeddings"]
        if c.position_embedding == "sincos1d":
            x = x + sincos1d(x.shape[1], c.hidden_size)
        x = torch.cat([x[:, : placed.shape[1]], registers, x[:, placed.shape[1] :]], dim=1)  # (B, T, D)
        return self.norm(x, "embeddings.layernorm") if c.embedding_norm else x

    def attention(self, x, name):
        c, R = self.c, self.c.num_prefix_tokens
        heads = lambda m: self.dense(x, f"{name}.{m}_proj").unflatten(2, (c.num_attention_heads, -1)).transpose(1, 2)
        q, k, v = heads("q"), heads("k"), heads("v")  # (B, A, T, K)
        if c.qk_norm:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        if c.position_embedding == "rotary":
            turn = lambda one: torch.cat([one[:, :, :R], turned(one[:, :, R:], self.grid, c.rope_theta)], dim=2)
            q, k = turn(q), turn(k)
        weights = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(q.shape[3]), dim=3)
        return self.dense((weights @ v).transpose(1, 2).flatten(2), f"{name}.o_proj")

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
        """A probe attends to the patches by torch's own multi-head attention; an MLP with a residual follows."""
        name, D = "attention_pooling", self.c.hidden_size
        attention = nn.MultiheadAttention(D, self.c.num_attention_heads, batch_first=True, dtype=torch.float64)
        stacked = lambda kind: torch.cat([self.w[f"{name}.{m}_proj.{kind}"] for m in "qkv"])
        weights = {f"in_proj_{kind}": stacked(kind) for kind in ("weight", "bias")}
        weights |= {f"out_proj.{kind}": self.w[f"{name}.o_proj.{kind}"] for kind in ("weight", "bias")}
        attention.load_state_dict(weights)
        x = attention(self.w[f"{name}.probe"].expand(len(patches), -1, -1), patches, patches)[0][:, 0]  # (B, D)
        return x + self.mlp(self.norm(x, f"{name}.layernorm"), f"{name}.mlp")

    def __call__(self, images):
        """Hidden states, last hidden state, pooled vector and logits."""
        c, images = self.c, images.double()
        height, width = (c.patch_size, c.patch_size) if isinstance(c.patch_size, int) else c.patch_size
        self.grid = (images.shape[2] // height, images.shape[3] // width)
        states = [self.embed(images)]
        for index in range(c.num_hidden_layers):
            states.append(self.layer(states[-1], f"layers.{index}"))
        x = self.norm(states[-1], "layernorm") if c.final_norm == "tokens" else states[-1]
        patches, class_token = x[:, c.num_prefix_tokens :], x[:, : c.n_cls_tokens].mean(dim=1)
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
    names = lambda one: {**one.state_dict(), **dict(one.named_buffers())}  # buffers: tables that no file holds
    before, after = names(model), names(loaded)
    assert set(before) == set(after)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    written = json.loads(loaded.config.to_json_string(use_diff=False))  # as JSON, where a pair is a list
    expected = json.loads(model.config.to_json_string(use_diff=False))
    assert {**written, "_name_or_path": "", "dtype": ""} == {**expected, "_name_or_path": "", "dtype": ""}
    torch.testing.assert_close(loaded(images).logits, model(images).logits)  # places in memory may round differently


# ----------------------------------------------------------------------------------------------------------------------
# One field at a time


FIELDS = {
    "plain": {},
    "qk_norm": dict(qk_norm=True),
    "swiglu": dict(gated_mlp=True, hidden_act="silu"),
    "geglu": dict(gated_mlp=True),
    **{act: dict(hidden_act=act) for act in ACTIVATIONS if act != "gelu"},
    "no qkv bias": dict(qkv_bias=False),
    "no key bias": dict(key_bias=False),
    "no patch bias": dict(patch_bias=False),
    "norm_linear_norm": dict(patch_projection="norm_linear_norm", num_channels=2),
    "embedding_norm": dict(embedding_norm=True, num_register_tokens=1),
    "post-norm": dict(norm_first=False, final_norm="none"),
    "post-norm and LayerScale": dict(norm_first=False, layerscale_value=0.1, final_norm="pooled"),
    "large epsilon": dict(layer_norm_eps=0.1, qk_norm=True, embedding_norm=True, pooling="map"),
    "large epsilon in patches": dict(layer_norm_eps=0.1, patch_projection="norm_linear_norm"),
    "pooled norm": dict(final_norm="pooled"),
    "pooled norm of a mean": dict(final_norm="pooled", pooling="mean"),
    "pooled norm of map": dict(final_norm="pooled", pooling="map"),
    "no norm": dict(final_norm="none"),
    "no norm before map": dict(final_norm="none", pooling="map"),
    "mean": dict(pooling="mean", num_register_tokens=2),
    "several class tokens": dict(n_cls_tokens=3, num_register_tokens=1),
    "several class tokens and patches": dict(n_cls_tokens=2, pooling="cls_mean", position_embedding="rotary"),
    "several class tokens and a distillation token": dict(
        n_cls_tokens=2, pooling="cls_distillation", use_distillation_token=True, position_embedding="sincos1d"
    ),
    "cls_mean": dict(pooling="cls_mean", num_register_tokens=2),
    "cls_distillation": dict(pooling="cls_distillation", use_distillation_token=True, num_register_tokens=2),
    "map": dict(pooling="map", num_register_tokens=2),
    "map with a gate": dict(pooling="map", gated_mlp=True, use_class_token=False),
    "representation": dict(representation_size=12),
    "representation of two": dict(representation_size=12, pooling="cls_mean"),
    "distillation token": dict(use_distillation_token=True, num_register_tokens=2),
    "sincos1d": dict(position_embedding="sincos1d", num_register_tokens=2),
    "sincos1d, two placed": dict(position_embedding="sincos1d", use_distillation_token=True),
    "sincos2d": dict(position_embedding="sincos2d"),
    "rotary": dict(position_embedding="rotary", num_register_tokens=2, use_distillation_token=True),
    "rotary, period 7": dict(position_embedding="rotary", rope_theta=7),
    "rotary behind qk_norm": dict(position_embedding="rotary", qk_norm=True),
    "no positions": dict(position_embedding="none"),
    "patches 2 x 5": dict(patch_size=[2, 5]),
}


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_a_field_computes_what_plain_torch_says(tiny_model, pixels, fields, backend):
    model = tiny_model(image_size=(12, 20), attn_implementation=backend, **fields)
    assert_is_plain(model, pixels(4, 12, 20, channels=model.config.num_channels))


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_a_field_works_in_bfloat16_and_under_autocast(tiny_model, pixels, fields):
    model = tiny_model(image_size=(12, 20), **fields)
    images, labels = pixels(2, 12, 20, channels=model.config.num_channels), torch.tensor([0, 2])
    expected = model(images).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = model(images, labels=labels)
    cast.loss.backward()
    half = model.to(torch.bfloat16)(images)
    assert half.logits.dtype == torch.bfloat16
    for logits in (cast.logits, half.logits):
        torch.testing.assert_close(logits.float(), expected, rtol=0, atol=0.1)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["rotary", "sincos1d", "sincos2d"])
def test_positions_of_another_grid_are_what_plain_torch_says(tiny_model, pixels, name):
    model, images = tiny_model(image_size=(12, 20), **FIELDS[name]), pixels(4, 8, 28)
    logits = model(images, interpolate_pos_encoding=True).logits
    torch.testing.assert_close(logits, Plain(model)(images)[3], rtol=1e-4, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("name", ["pooled norm", "map", "pooled norm of map"])
def test_the_pooler_comes_last(tiny_config, tiny_model, randomize, pixels, name):
    fields = FIELDS[name]
    model, images = randomize(HFViTModel(tiny_config(pooler_act="tanh", **fields))), pixels()
    classifier = tiny_model(**fields)
    weights = {f"vit.{name}": value for name, value in model.state_dict().items() if "pooler.dense" not in name}
    classifier.load_state_dict({**classifier.state_dict(), **weights})
    expected = torch.tanh(model.pooler.dense(Plain(classifier)(images)[2].float()))
    torch.testing.assert_close(model(images).pooler_output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pooling", ["cls_mean", "cls_distillation"])
def test_a_pooler_over_two_vectors_is_an_error_where_it_would_be_built_and_nowhere_else(tiny_config, pooling):
    config = tiny_config(pooling=pooling, pooler_act="tanh", use_distillation_token=True)
    with pytest.raises(ValueError, match=f'pooler_act takes 32 channels, .* pooling "{pooling}"'):
        HFViTModel(config)
    for model in (HFViTForImageClassification(config).vit, HFViTBackbone(config)):
        assert model.pooler is None


@pytest.mark.parametrize("act", sorted(ACT2FN))
def test_every_activation_that_a_config_accepts_runs_and_comes_back(tiny_model, pixels, tmp_path, act):
    model = tiny_model(hidden_act=act, gated_mlp=True, pooling="map")
    assert model(pixels()).logits.isfinite().all()
    assert_comes_back(model, tmp_path, pixels())


def missing_names(tiny_config, **fields):
    """The parameters that a model with these fields lacks, beside the default one."""
    default, other = (HFViTForImageClassification(tiny_config(**some)) for some in ({}, fields))
    names = [{name for name, _ in model.named_parameters()} for model in (default, other)]
    assert names[1] < names[0]
    return {name.removeprefix("vit.") for name in names[0] - names[1]}


def test_a_bias_that_is_switched_off_is_no_parameter(tiny_config):
    biases = lambda kinds: {f"layers.{index}.attention.{m}_proj.bias" for index in range(2) for m in kinds}
    assert missing_names(tiny_config, key_bias=False) == biases("k")
    assert missing_names(tiny_config, qkv_bias=False) == biases("qkv")
    assert missing_names(tiny_config, qkv_bias=False, key_bias=False) == biases("qkv")
    assert missing_names(tiny_config, patch_bias=False) == {"embeddings.patch_embeddings.projection.bias"}
    assert missing_names(tiny_config, final_norm="none") == {"layernorm.weight", "layernorm.bias"}


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


def test_map_pooling_reads_all_patches_in_any_order_and_no_other_token(tiny_model):
    model, tokens = tiny_model(pooling="map", num_register_tokens=2).vit, torch.randn(2, 3 + 16, 32)
    pooled = model.pool(tokens)
    other = torch.cat([torch.randn(2, 3, 32), tokens[:, 3:][:, torch.randperm(16)]], dim=1)
    torch.testing.assert_close(model.pool(other), pooled)
    for patch in range(16):
        changed = tokens.clone()
        changed[:, 3 + patch] += 1
        assert (model.pool(changed) - pooled).abs().max() > 1e-4


def test_dropout_acts_on_the_tanh_layer_of_the_head(tiny_model, pixels):
    model, seen = tiny_model(representation_size=200, hidden_dropout_prob=0.25).train(), []
    model.classifier.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(pixels())
    assert (seen[0] == 0).float().mean().item() == pytest.approx(0.25, abs=0.1)


# ----------------------------------------------------------------------------------------------------------------------
# Positions


def test_sincos_1d_at_points_computed_by_hand():
    table = sincos_1d(101, 4)
    assert table.shape == (1, 101, 4)
    sin_1, cos_1 = 0.8414709848, 0.5403023059
    for place, values in {
        0: [0.0, 1.0, 0.0, 1.0],
        1: [sin_1, cos_1, 0.0099998333, 0.9999500004],  # the second wave is 100 times slower
        100: [-0.5063656411, 0.8623188723, sin_1, cos_1],
    }.items():
        torch.testing.assert_close(table[0, place], torch.tensor(values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_class", [HFViTModel, HFViTForImageClassification, HFViTBackbone])
def test_the_sincos_1d_table_is_right_after_loading_and_not_in_the_file(tiny_model, tmp_path, model_class, dtype):
    """A table that no file holds comes back as whatever lay in memory."""
    fields = dict(image_size=(12, 20), use_distillation_token=True, num_register_tokens=1)
    tiny_model(position_embedding="sincos1d", **fields).save_pretrained(tmp_path)
    assert not any("position" in name for name in load_file(tmp_path / "model.safetensors"))
    loaded = model_class.from_pretrained(tmp_path, dtype=dtype)
    table = torch.cat(loaded.base_model.embeddings.positions_on_grid((3, 5)), dim=1)
    torch.testing.assert_close(table[0], sincos1d(2 + 15, 32).to(dtype))


def rotary_scores(model, tokens, grid):
    """log of the attention weights of the first layer, (A, T, T): its scores up to a constant for each query."""
    attention = model.vit.layers[0].attention
    rotary = None if grid is None else rotary_2d(grid, attention.head_dim, model.config.rope_theta, tokens)
    return attention(tokens, rotary=rotary, output_attentions=True)[1][0].log()


def test_rotary_scores_of_equal_patches_depend_on_their_relative_place_alone(tiny_model):
    h, w = 4, 5
    model, tokens = tiny_model(image_size=(16, 20), position_embedding="rotary"), torch.randn(1, 1 + h * w, 32)
    tokens[:, 1:] = tokens[:, 1:2]
    scores = rotary_scores(model, tokens, (h, w))[:, 1:, 1:]  # (A, N, N)
    scores = scores - scores.diagonal(dim1=1, dim2=2).unsqueeze(2)  # against the score of a patch with itself
    found = {}
    for i in range(h * w):
        for j in range(h * w):
            found.setdefault((j // w - i // w, j % w - i % w), []).append(scores[:, i, j])
    assert len(found) == (2 * h - 1) * (2 * w - 1)
    for place, several in found.items():
        torch.testing.assert_close(torch.stack(several), several[0].expand(len(several), -1), rtol=0, atol=1e-4)
        assert place == (0, 0) or several[0].abs().max() > 1e-3, place
    assert (found[1, 0][0] - found[0, 1][0]).abs().max() > 1e-3  # rows and columns are told apart
    assert (found[1, 1][0] - found[1, -1][0]).abs().max() > 1e-3


def test_rotary_leaves_class_token_and_registers_unturned(tiny_model):
    fields = dict(use_distillation_token=True, num_register_tokens=2, position_embedding="rotary")
    model, tokens, R = tiny_model(**fields), torch.randn(1, 4 + 16, 32), 4
    plain, turned_scores = (rotary_scores(model, tokens, grid) for grid in (None, (4, 4)))
    relative = lambda scores: scores[:, :R] - scores[:, :R, :1]  # of the prefix tokens' queries
    torch.testing.assert_close(relative(turned_scores)[:, :, :R], relative(plain)[:, :, :R], rtol=0, atol=1e-4)
    assert ((relative(turned_scores) - relative(plain))[:, :, R:].abs().amax(dim=(0, 1)) > 1e-3).all()


def test_rotary_angles_belong_to_places_in_the_image_and_not_to_its_resolution():
    coarse, fine = (rotary_2d(grid, 8, 100.0, torch.zeros(1)) for grid in ((2, 3), (6, 9)))
    for of_coarse, of_fine in zip(coarse, fine, strict=True):
        centres = of_fine.reshape(6, 9, 8)[1::3, 1::3]  # the middle one of each 3 x 3 has the same centre
        torch.testing.assert_close(of_coarse.reshape(2, 3, 8), centres, rtol=0, atol=1e-5)


@pytest.mark.parametrize("head_dim", [4, 12, 64, 88, 196, 392, 428])  # 1 / (4 / 196) is a little more than 49
def test_rotary_has_an_angle_for_each_channel_of_any_head(head_dim):
    cos, sin = rotary_2d((2, 3), head_dim, 100.0, torch.zeros(1))
    assert cos.shape == sin.shape == (6, head_dim)


def test_rotary_angles_computed_by_hand():
    cos, sin = rotary_2d((1, 4), 8, 100.0, torch.zeros(1))  # columns at -3/4, -1/4, 1/4, 3/4; the row at 0
    assert cos.shape == sin.shape == (4, 8)
    one_row, turns = [0, 0], [-3 / 4, -1 / 4, 1 / 4, 3 / 4]  # of a full turn; the second frequency is 10 times lower
    angles = torch.tensor([[*one_row, turn, turn / 10] * 2 for turn in turns]) * 2 * math.pi
    torch.testing.assert_close((cos, sin), (angles.cos(), angles.sin()))


# ----------------------------------------------------------------------------------------------------------------------
# Fields together


def test_all_new_fields_together_compute_what_plain_torch_says_and_come_back(tiny_model, pixels, tmp_path):
    model = tiny_model(
        image_size=[12, 20], patch_size=[4, 2], num_channels=2, patch_bias=False, hidden_act="silu", gated_mlp=True,
        key_bias=False, qk_norm=True, position_embedding="rotary", rope_theta=50.0, use_distillation_token=True,
        num_register_tokens=2, embedding_norm=True, norm_first=False, final_norm="pooled", pooling="map",
        representation_size=20, layerscale_value=0.1, pooler_act=None, out_indices=[0, 1],
    )  # fmt: skip
    images = pixels(4, 12, 20, channels=2)
    assert_is_plain(model, images)
    assert_comes_back(model, tmp_path, images)


def random_fields(seed):
    """Fields of HFViTConfig, drawn so that they fit each other."""
    draw = random.Random(seed)
    one_of, maybe = draw.choice, lambda: draw.random() < 0.5
    patch, grid, heads = one_of([4, [4, 2], [2, 5], 3]), one_of([(2, 3), (3, 2), (1, 4), (4, 4)]), one_of([1, 2, 4])
    height, width = (patch, patch) if isinstance(patch, int) else patch
    class_token = maybe()
    distillation_token = class_token and maybe()
    pooling = one_of(
        ["mean", "map", *["cls", "cls_mean"] * class_token, *["cls_distillation"] * (2 * distillation_token)]
    )
    two = pooling in ("cls_mean", "cls_distillation")
    norm_first, projection = maybe(), one_of(["conv", "conv", "norm_linear_norm"])
    final_norm = one_of(["tokens", "pooled", "none"] if norm_first else ["pooled", "none"])
    return dict(
        image_size=[grid[0] * height, grid[1] * width], patch_size=patch, num_channels=draw.randint(1, 4),
        patch_projection=projection, patch_bias=projection != "conv" or maybe(),
        hidden_size=heads * one_of([4, 8, 12]),
        num_hidden_layers=draw.randint(1, 3), num_attention_heads=heads, intermediate_size=draw.randint(12, 40),
        hidden_act=one_of(sorted(ACTIVATIONS)), gated_mlp=maybe(), qkv_bias=maybe(), key_bias=maybe(), qk_norm=maybe(),
        position_embedding=one_of(["learned", "sincos1d", "sincos2d", "rotary", "rotary", "none"]),
        rope_theta=one_of([100.0, 10, 10000.0]),
        use_class_token=class_token, n_cls_tokens=one_of([1, 1, 3]), use_distillation_token=distillation_token,
        num_register_tokens=one_of([0, 0, 1, 3]), embedding_norm=maybe(), norm_first=norm_first,
        final_norm="none" if two and final_norm == "pooled" else final_norm, pooling=pooling,
        pooler_act=one_of([None, "tanh"]), representation_size=one_of([None, 7]),
        layerscale_value=one_of([None, 0.5]), drop_path_rate=one_of([0, 0.5]), hidden_dropout_prob=one_of([0.0, 0.2]),
        attention_probs_dropout_prob=one_of([0.0, 0.1]), layer_norm_eps=one_of([1e-6, 1e-5]),
        num_labels=draw.randint(2, 5),
    )  # fmt: skip


def without_gradient(config):
    """Ends of the names that get none: a softmax does not see what all its scores share, such as the product of the
    query with a bias of the keys. Where the keys are normed or turned behind the bias, it differs from key to key.
    """
    turned_keys = config.position_embedding == "rotary"
    layers = [] if turned_keys else [".attention.k_norm.bias"] if config.qk_norm else [".attention.k_proj.bias"]
    return ("attention_pooling.k_proj.bias", *layers)


@pytest.mark.parametrize("seed", range(60))
def test_random_architectures_run_train_and_come_back(randomize, pixels, tmp_path, seed):
    fields = random_fields(seed)
    config = HFViTConfig(**fields)
    model, (height, width) = randomize(HFViTForImageClassification(config)), fields["image_size"]
    images = pixels(3, height, width, channels=fields["num_channels"])
    assert_is_plain(model, images)
    assert_comes_back(model, tmp_path, images)

    T, D, A = config.num_prefix_tokens + math.prod(config.grid_size), fields["hidden_size"], config.num_attention_heads
    outputs = {}
    for backend in ("sdpa", "eager"):
        model.set_attn_implementation(backend)
        base = model.vit(images, output_hidden_states=True, output_attentions=backend == "eager")
        outputs[backend] = (base.last_hidden_state, base.pooler_output, model(images).logits, base.hidden_states)
        pooled = D * (1 + (fields["pooling"] in ("cls_mean", "cls_distillation")))
        shapes = [(3, T, D), (3, pooled), (3, fields["num_labels"])]
        assert [tuple(one.shape) for one in outputs[backend][:3]] == shapes
        assert [tuple(one.shape) for one in base.hidden_states] == [(3, T, D)] * (1 + config.num_hidden_layers)
    assert [tuple(one.shape) for one in base.attentions] == [(3, A, T, T)] * config.num_hidden_layers
    torch.testing.assert_close(outputs["eager"], outputs["sdpa"], rtol=1e-5, atol=1e-5)

    model.set_attn_implementation("sdpa")
    for network in (model.train(), model.double().eval()):  # with dropout; then exactly enough to see which are zero
        network.zero_grad()
        labels = torch.arange(3) % config.num_labels
        network(images.to(network.dtype), labels=labels).loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in network.parameters())
    sizes = {name: parameter.grad.abs().max().item() for name, parameter in model.named_parameters()}
    assert {name for name, size in sizes.items() if size < 1e-12} == {
        name for name in sizes if name.endswith(without_gradient(config))
    }


@pytest.mark.parametrize(
    "fields",
    [
        dict(norm_first=False, final_norm="none"),
        dict(position_embedding="rotary", num_register_tokens=1),
        dict(norm_first=False, final_norm="pooled", position_embedding="rotary", qk_norm=True, pooling="map"),
    ],
)
def test_gradient_checkpointing_gives_the_same_gradients_for_post_norm_and_rotary(tiny_model, pixels, fields):
    model = tiny_model(hidden_dropout_prob=0.1, drop_path_rate=0.3, **fields).train()
    images, found, calls = pixels(), [], []
    model.vit.layers[1].mlp.register_forward_hook(lambda *_: calls.append(1))
    for checkpointed in (False, True):
        if checkpointed:
            model.activation_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(1)
        model(images, labels=torch.tensor([0, 2])).loss.backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert len(calls) == 1 + 2
    torch.testing.assert_close(found[1], found[0])


# ----------------------------------------------------------------------------------------------------------------------
# What cannot be built, and what does not decay


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(position_embedding="sincos1d", hidden_size=33, num_attention_heads=3), "sincos1d .* even hidden_size"),
        (dict(position_embedding="rotary", hidden_size=24), r"rotary .* not 6 \(hidden_size 24 over 4 heads\)"),
        (dict(use_class_token=False, pooling="cls_mean"), 'pooling "cls_mean" needs use_class_token=True'),
        (dict(use_class_token=False, pooling="cls_distillation"), '"cls_distillation" needs use_class_token=True'),
        (dict(pooling="cls_distillation"), 'pooling "cls_distillation" needs use_distillation_token=True'),
        (dict(use_class_token=False, use_distillation_token=True, pooling="map"), "distillation_token needs use_"),
        (dict(pooling="cls_mean", final_norm="pooled"), r'"cls_mean" gives 64 .* final_norm "pooled" takes 32'),
        (dict(pooling="cls_distillation", use_distillation_token=True, final_norm="pooled"), 'final_norm "pooled"'),
        (dict(patch_projection="norm_linear_norm", patch_bias=False), 'patch_bias=False needs patch_projection'),
        (dict(representation_size=0), "representation_size is 0; it must be at least 1, or None"),
        (dict(rope_theta=0), "rope_theta is 0; it must be above 0"),
        (dict(rope_theta=-1.0), "rope_theta is -1.0; it must be above 0"),
        (dict(num_labels=0), "num_labels is 0; it must be at least 1"),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit_each_other_are_an_error_that_names_them(tiny_config, fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**fields)


def test_only_matrices_decay_whatever_the_fields(tiny_config):
    """The probe and the distillation token have three dimensions and are no matrices."""
    everything = dict(
        patch_projection="norm_linear_norm", gated_mlp=True, qk_norm=True, use_distillation_token=True,
        num_register_tokens=2, embedding_norm=True, pooling="map", representation_size=8, layerscale_value=0.1,
        num_hidden_layers=1,
    )  # fmt: skip
    decayed, undecayed = split_decay(HFViTForImageClassification(tiny_config(**everything)))
    projections = [f"{m}_proj" for m in "qkvo"]
    dense = [
        "vit.embeddings.patch_embeddings.projection",
        *(f"vit.layers.0.attention.{name}" for name in projections),
        *(f"vit.attention_pooling.{name}" for name in projections),
        *(f"{at}.mlp.{m}_proj" for at in ("vit.layers.0", "vit.attention_pooling") for m in ("gate", "up", "down")),
        "pre_logits",
        "classifier",
    ]
    norms = [
        *(f"vit.embeddings.patch_embeddings.layernorm_{at}" for at in ("before", "after")),
        *(f"vit.layers.0.layernorm_{at}" for at in ("before", "after")),
        *(f"vit.layers.0.attention.{m}_norm" for m in "qk"),
        *("vit.embeddings.layernorm", "vit.attention_pooling.layernorm", "vit.layernorm"),
    ]
    tokens = ["cls_token", "distillation_token", "register_tokens", "position_embeddings"]
    assert sorted(decayed) == sorted(f"{name}.weight" for name in dense)
    assert sorted(undecayed) == sorted(
        [f"{name}.bias" for name in dense + norms]
        + [f"{name}.weight" for name in norms]
        + [f"vit.embeddings.{name}" for name in tokens]
        + ["vit.attention_pooling.probe", *(f"vit.layers.0.layer_scale{index}.lambda1" for index in (1, 2))]
    )


# ----------------------------------------------------------------------------------------------------------------------
# Patch dropout: 16 patches, of which the layers see a part while training


def seen_by(layer):
    """A list that the hidden states which go into `layer` are appended to."""
    seen = []
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    return seen


PREFIXES = {
    "class token": ({}, 1),
    "class, distillation and registers": (dict(use_distillation_token=True, num_register_tokens=3), 5),
    "none": (dict(use_class_token=False, pooling="mean"), 0),
}


@pytest.mark.parametrize(("rate", "left"), [(0.25, 12), (0.5, 8), (0.9, 2), (0.99, 1), (0.0, 16)])
@pytest.mark.parametrize(("fields", "prefix"), PREFIXES.values(), ids=PREFIXES)
def test_patch_dropout_leaves_all_layers_that_part_of_the_patches(tiny_model, pixels, fields, prefix, rate, left):
    model = tiny_model(patch_dropout_rate=rate, **fields).train()
    seen = [seen_by(layer) for layer in model.vit.layers]
    model(pixels())
    assert [tuple(states.shape) for (states,) in seen] == [(2, prefix + left, 32)] * 2


@pytest.mark.parametrize("positions", ["learned", "sincos1d", "sincos2d"])
@pytest.mark.parametrize(("fields", "prefix"), PREFIXES.values(), ids=PREFIXES)
def test_patch_dropout_keeps_positions_and_every_token_that_is_no_patch(tiny_model, pixels, fields, prefix, positions):
    model, images = tiny_model(patch_dropout_rate=0.5, position_embedding=positions, **fields), pixels(4)
    every, seen = model.vit.embeddings(images), seen_by(model.vit.layers[0])
    model.train()(images)
    torch.testing.assert_close(seen[0][:, :prefix], every[:, :prefix])
    same = torch.cdist(seen[0][:, prefix:], every[:, prefix:]) < 1e-4  # (B, M, N)
    assert (same.sum(dim=2) == 1).all()  # each is one of the patches of its image, at its place
    assert (same.sum(dim=1) <= 1).all()  # and no patch is there twice
    assert len({tuple(row) for row in same.any(dim=1).tolist()}) == 4  # another draw for each image


def test_patch_dropout_names_the_patches_that_it_keeps():
    tokens = torch.randn(3, 2 + 10, 4)
    left, kept = drop_patches(tokens, 2, 0.3)
    assert left.shape == (3, 2 + 7, 4)
    for row in range(3):
        assert len(set(kept[row].tolist())) == 7
        torch.testing.assert_close(left[row, :2], tokens[row, :2])
        torch.testing.assert_close(left[row, 2:], tokens[row, 2:][kept[row]])


def test_patch_dropout_keeps_every_patch_equally_often():
    kept = torch.cat([drop_patches(torch.zeros(500, 11, 1), 1, 0.6)[1] for _ in range(4)])
    counts = torch.bincount(kept.flatten(), minlength=10)
    assert counts.sum() == 2000 * 4
    assert (counts - 800).abs().max() < 5 * math.sqrt(2000 * 0.4 * 0.6)


def test_patch_dropout_acts_while_training_alone(tiny_model, pixels):
    dropping, images = tiny_model(patch_dropout_rate=0.5), pixels()
    whole = HFViTForImageClassification(HFViTConfig(**{**dropping.config.to_dict(), "patch_dropout_rate": 0.0})).eval()
    whole.load_state_dict(dropping.state_dict())
    torch.testing.assert_close(dropping(images).logits, whole(images).logits)
    assert dropping.vit(images).last_hidden_state.shape == (2, 17, 32)
    dropping.train()
    assert not torch.allclose(dropping(images).logits, dropping(images).logits)


@pytest.mark.parametrize("pooling", ["cls", "mean", "cls_mean", "map"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_patch_dropout_computes_what_plain_torch_says_of_the_kept_patches(
    tiny_model, pixels, monkeypatch, positions, backend, pooling
):
    """Under rotary positions, each kept patch is turned by the angle of its own place in its own image."""
    R, fields = 3, dict(use_distillation_token=True, num_register_tokens=1, position_embedding=positions)
    model = tiny_model(patch_dropout_rate=0.6, pooling=pooling, **fields).train()
    model.set_attn_implementation(backend)
    images = pixels(3, 16, 16)
    torch.manual_seed(1)
    logits = model(images).logits
    torch.manual_seed(1)
    _, kept = drop_patches(torch.zeros(3, R + 16, 1), R, 0.6)  # (B, M)
    assert kept.shape == (3, 6)

    class Kept(Plain):
        def embed(self, images):
            tokens = super().embed(images)
            return torch.cat([tokens[:, :R], tokens[:, R:][:, self.places]], dim=1)

    plain, turn_all = Kept(model), turned

    def turn_kept(x, grid, theta):
        everywhere = x.new_zeros(*x.shape[:2], 16, x.shape[3])
        everywhere[:, :, plain.places] = x
        return turn_all(everywhere, grid, theta)[:, :, plain.places]

    monkeypatch.setitem(globals(), "turned", turn_kept)
    for row, plain.places in enumerate(kept):
        wanted = plain(images[row : row + 1])[3]
        torch.testing.assert_close(logits[row : row + 1], wanted, rtol=1e-4, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_patch_dropout_gives_the_same_gradients_under_gradient_checkpointing(tiny_model, pixels, positions):
    model = tiny_model(patch_dropout_rate=0.5, hidden_dropout_prob=0.1, position_embedding=positions).train()
    images, found, calls = pixels(), [], []
    model.vit.layers[1].mlp.register_forward_hook(lambda _, inputs, __: calls.append(inputs[0].shape[1]))
    for checkpointed in (False, True):
        if checkpointed:
            model.activation_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(1)
        model(images, labels=torch.tensor([0, 2])).loss.backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert calls == [9] * 3
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("positions", ["learned", "sincos1d", "sincos2d", "rotary", "none"])
def test_patch_dropout_takes_its_part_of_images_of_another_size(tiny_model, pixels, positions):
    model = tiny_model(patch_dropout_rate=0.5, position_embedding=positions).train()
    seen = seen_by(model.vit.layers[1])
    model(pixels(2, 24, 8), interpolate_pos_encoding=True, labels=torch.tensor([0, 1])).loss.backward()
    assert seen[0].shape == (2, 1 + 6, 32)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_patch_dropout_shows_in_hidden_states_and_attentions(tiny_model, pixels):
    outputs = tiny_model(patch_dropout_rate=0.5).train()(pixels(), output_hidden_states=True, output_attentions=True)
    assert [state.shape[1] for state in outputs.hidden_states] == [9, 9, 9]
    assert [weights.shape[2:] for weights in outputs.attentions] == [(9, 9)] * 2


def test_patch_dropout_works_in_bfloat16_and_under_autocast(tiny_model, pixels):
    model = tiny_model(patch_dropout_rate=0.5, position_embedding="rotary").train()
    with torch.autocast("cpu", torch.bfloat16):
        model(pixels(), labels=torch.tensor([0, 1])).loss.backward()
    assert model.bfloat16()(pixels()).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("rate", [-0.1, 1, 1.5])
def test_patch_dropout_at_a_rate_that_is_none_is_an_error(tiny_config, rate):
    with pytest.raises(ValueError, match=f"patch_dropout_rate is {rate}; a probability in"):
        tiny_config(patch_dropout_rate=rate)


def test_patch_dropout_is_refused_by_a_backbone_until_it_is_switched_off(tiny_config, tiny_model, pixels, tmp_path):
    with pytest.raises(ValueError, match="patch_dropout_rate must be 0"):
        HFViTBackbone(tiny_config(patch_dropout_rate=0.1))
    model, images = tiny_model(patch_dropout_rate=0.5), pixels()
    model.save_pretrained(tmp_path)
    assert HFViTConfig.from_pretrained(tmp_path).patch_dropout_rate == 0.5
    network = HFViTBackbone.from_pretrained(tmp_path, patch_dropout_rate=0.0).train()
    tokens = model.vit(images).last_hidden_state[:, 1:]
    torch.testing.assert_close(network(images).feature_maps[0], tokens.transpose(1, 2).unflatten(2, (4, 4)))


# ----------------------------------------------------------------------------------------------------------------------
# Backbone: feature maps of a 3 x 5 grid


@pytest.fixture
def backbone(tiny_config, randomize):
    """backbone(**overrides) -> HFViTBackbone of a 3 x 5 grid with random weights, in eval mode."""
    return lambda **overrides: randomize(HFViTBackbone(tiny_config(image_size=(12, 20), **overrides)))


@pytest.fixture
def hub_has_everything(monkeypatch):
    """AutoBackbone asks the Hub whether a repository exists, also for a folder: the Hub says yes."""
    hub = SimpleNamespace(repo_exists=lambda name: True)
    monkeypatch.setattr("transformers.models.auto.auto_factory.hf_api", lambda: hub)


@pytest.mark.parametrize(
    "tokens",
    [{}, dict(use_distillation_token=True, num_register_tokens=2), dict(use_class_token=False, pooling="mean")],
)
@pytest.mark.parametrize("final_norm", ["tokens", "pooled", "none"])
def test_feature_maps_are_the_patch_tokens_in_their_rows_and_columns(
    backbone, tiny_config, pixels, tokens, final_norm
):
    network, images = backbone(out_indices=[0, 1, 2], final_norm=final_norm, **tokens), pixels(2, 12, 20)
    model = HFViTModel(network.config).eval()
    model.load_state_dict(network.state_dict())
    states = model(images, output_hidden_states=True).hidden_states
    maps = network(images).feature_maps
    assert len(maps) == len(states) == 3
    for one, state in zip(maps, states, strict=True):
        assert one.shape == (2, 32, 3, 5)
        state = model.layernorm(state) if final_norm == "tokens" else state
        for row in range(3):
            for column in range(5):
                assert torch.equal(
                    one[:, :, row, column], state[:, network.config.num_prefix_tokens + 5 * row + column]
                )


def test_a_change_in_the_image_shows_at_its_place_in_the_map(backbone, pixels):
    network, images = backbone(out_features=["stem"]), pixels(1, 12, 20)
    changed = images.clone()
    changed[:, :, 4:8, 12:16] += 1  # row 1, column 3
    difference = (network(changed).feature_maps[0] - network(images).feature_maps[0]).abs().amax(dim=(0, 1))
    assert difference.nonzero().tolist() == [[1, 3]]


@pytest.mark.parametrize("positions", ["learned", "sincos1d", "sincos2d", "rotary", "none"])
def test_maps_have_the_grid_of_the_image_that_came(backbone, pixels, positions):
    network, images = backbone(position_embedding=positions, patch_size=[4, 2]), pixels(2, 8, 6)
    maps = network(images, interpolate_pos_encoding=True).feature_maps
    assert [tuple(one.shape) for one in maps] == [(2, 32, 2, 3)]


@pytest.mark.parametrize(
    ("asked", "indices", "names"),
    [
        ({}, [2], ["stage2"]),
        (dict(out_indices=[0]), [0], ["stem"]),
        (dict(out_indices=(0, 2)), [0, 2], ["stem", "stage2"]),
        (dict(out_indices=[-1]), [2], ["stage2"]),
        (dict(out_indices=[-3, -2]), [0, 1], ["stem", "stage1"]),
        (dict(out_indices=[0, -1]), [0, 2], ["stem", "stage2"]),
        (dict(out_features=["stage1", "stage2"]), [1, 2], ["stage1", "stage2"]),
        (dict(out_features=["stem", "stage2"], out_indices=[0, 2]), [0, 2], ["stem", "stage2"]),
    ],
)
def test_layers_are_asked_for_by_number_or_name(
    backbone, tiny_model, pixels, tmp_path, hub_has_everything, asked, indices, names
):
    images = pixels(2, 12, 20)
    tiny_model(image_size=(12, 20)).save_pretrained(tmp_path)
    every = HFViTBackbone.from_pretrained(tmp_path, out_indices=[0, 1, 2])
    assert every.stage_names == ["stem", "stage1", "stage2"]
    assert every.out_feature_channels == dict(stem=32, stage1=32, stage2=32)
    expected = [every(images).feature_maps[index] for index in indices]
    for network in (
        HFViTBackbone.from_pretrained(tmp_path, **asked),
        AutoBackbone.from_pretrained(str(tmp_path), **asked),
    ):
        assert type(network) is HFViTBackbone
        assert [index % 3 for index in network.out_indices] == indices
        assert network.out_features == names
        assert network.channels == [32] * len(indices)
        torch.testing.assert_close(network(images).feature_maps, tuple(expected))
    by_config = AutoBackbone.from_config(HFViTConfig.from_pretrained(tmp_path, **asked))
    assert type(by_config) is HFViTBackbone
    assert by_config.out_features == names


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (dict(out_indices=[3]), "out_indices must be valid indices"),
        (dict(out_indices=[1, 0]), "out_indices must be in the same order"),
        (dict(out_indices=[2, -1]), "out_indices must not contain any duplicates"),
        (dict(out_features=["stage3"]), "out_features must be a subset"),
        (dict(out_features=["layer1"]), "out_features must be a subset"),
        (dict(out_features=["stage2", "stem"]), "out_features must be in the same order"),
        (dict(out_features=["stem", "stem"]), "out_features must not contain any duplicates"),
        (dict(out_features=["stem"], out_indices=[2]), "should correspond to the same stages"),
    ],
)
def test_layers_that_there_are_not_are_an_error(tiny_config, tiny_model, tmp_path, asked, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**asked)
    tiny_model().save_pretrained(tmp_path)
    if len(asked) == 1:  # given one after the other, the second decides
        with pytest.raises(ValueError, match=message):
            HFViTBackbone.from_pretrained(tmp_path, **asked)


def test_the_backbone_gives_hidden_states_and_attentions_only_when_asked(backbone, pixels):
    network, images = backbone(), pixels(2, 12, 20)
    assert list(network(images)) == ["feature_maps"]
    model = HFViTModel(network.config).eval()
    model.load_state_dict(network.state_dict())
    asked = dict(output_hidden_states=True, output_attentions=True)
    outputs, expected = network(images, **asked), model(images, **asked)
    torch.testing.assert_close(outputs.hidden_states, expected.hidden_states)
    torch.testing.assert_close(outputs.attentions, expected.attentions)
    as_tuple = network(images, return_dict=False)
    assert len(as_tuple) == 1
    assert torch.equal(as_tuple[0][0], network(images).feature_maps[0])


def test_config_json_holds_the_layers_only_where_they_are_not_the_default(backbone, tiny_model, tmp_path):
    for number, asked in enumerate(({}, dict(out_indices=[2]), dict(out_features=["stage2"]))):
        backbone(**asked).save_pretrained(tmp_path / str(number))
        written = json.loads((tmp_path / str(number) / "config.json").read_text())
        assert not {"out_indices", "out_features", "_out_indices", "_out_features", "stage_names"} & set(written)
        assert HFViTBackbone.from_pretrained(tmp_path / str(number)).out_indices == [2]
    backbone(out_indices=[0, 1]).save_pretrained(tmp_path / "two")
    written = json.loads((tmp_path / "two" / "config.json").read_text())
    assert (written["out_indices"], written["out_features"]) == ([0, 1], ["stem", "stage1"])
    assert HFViTBackbone.from_pretrained(tmp_path / "two").out_indices == [0, 1]
    assert HFViTBackbone.from_pretrained(tmp_path / "two", out_features=["stage2"]).out_indices == [2]
    tiny_model(out_indices=[1]).save_pretrained(tmp_path / "classifier")
    assert HFViTBackbone.from_pretrained(tmp_path / "classifier").out_features == ["stage1"]


@pytest.mark.parametrize(
    ("fields", "left_out"),
    [
        ({}, "classifier (2 tensors)"),
        (dict(pooling="map"), "attention_pooling, classifier (17 tensors)"),
        (dict(pooling="map", representation_size=8), "attention_pooling, classifier, pre_logits (19 tensors)"),
        (dict(pooling="mean", use_class_token=False, pooler_act="tanh"), "classifier (2 tensors)"),
    ],
)
def test_a_classifiers_folder_opens_as_a_backbone_without_its_head(
    tiny_model, pixels, tmp_path, caplog, fields, left_out
):
    model, images = tiny_model(**fields), pixels()
    model.save_pretrained(tmp_path / "classifier")
    network = HFViTBackbone.from_pretrained(tmp_path / "classifier")
    assert caplog.messages == [f"HFViTBackbone from {tmp_path / 'classifier'}: left out {left_out}."]
    tokens = model.vit(images).last_hidden_state[:, model.config.num_prefix_tokens :]
    torch.testing.assert_close(network(images).feature_maps[0], tokens.transpose(1, 2).unflatten(2, (4, 4)))
    assert {name for name, _ in network.named_parameters()} == {
        name.removeprefix("vit.")
        for name, _ in model.named_parameters()
        if name.startswith(("vit.embeddings.", "vit.layers.", "vit.layernorm."))
    }

    caplog.clear()
    network.save_pretrained(tmp_path / "backbone")
    again = HFViTBackbone.from_pretrained(tmp_path / "backbone")
    torch.testing.assert_close(again(images).feature_maps, network(images).feature_maps, rtol=0, atol=0)
    assert caplog.messages == []


def test_a_native_folder_opens_as_a_backbone(tiny_fields, randomize, pixels, tmp_path):
    native, images = randomize(ViTForImageClassification(ViTConfig(**tiny_fields))), pixels()
    native.save_pretrained(tmp_path)
    network = HFViTBackbone.from_pretrained(tmp_path, out_indices=[1, 2])
    states = native.vit(images, output_hidden_states=True).hidden_states
    expected = [native.vit.layernorm(state)[:, 1:].transpose(1, 2).unflatten(2, (4, 4)) for state in states[1:]]
    torch.testing.assert_close(network(images).feature_maps, tuple(expected))


def test_a_backbones_folder_opens_as_a_model(backbone, pixels, tmp_path):
    network, images = backbone(out_indices=[0, 2]), pixels(2, 12, 20)
    network.save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path)
    assert type(model) is HFViTModel
    patches = model(images).last_hidden_state[:, 1:].transpose(1, 2).unflatten(2, (3, 5))
    torch.testing.assert_close(network(images).feature_maps[1], patches)


def test_checkpointing_a_backbone_gives_the_same_maps_and_gradients(backbone, pixels):
    network, images, found = (
        backbone(out_indices=[0, 1, 2], position_embedding="rotary").train(),
        pixels(2, 12, 20),
        [],
    )
    for checkpointed in (False, True):
        if checkpointed:
            network.activation_checkpointing_enable()
        network.zero_grad()
        maps = network(images).feature_maps
        torch.cat(maps).square().sum().backward()
        found.append((maps, {name: parameter.grad.clone() for name, parameter in network.named_parameters()}))
    torch.testing.assert_close(found[1], found[0])


def test_the_readmes_keypoint_head_learns_to_find_two_spots_in_each_of_8_images():
    """A red and a green spot an image, each as wide as a patch: a 1 x 1 convolution on the maps has no finer peaks."""
    config = HFViTConfig(
        image_size=(12, 20), patch_size=4, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, out_indices=[1, 2],
    )  # fmt: skip
    places = torch.stack([torch.randperm(15)[:2] for _ in range(8)])
    spots = F.one_hot(places, 15).float().reshape(8, 2, 3, 5)
    spots = spots.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)  # (8, 2, 12, 20)
    pixel_values = torch.randn(8, 3, 12, 20)
    pixel_values[:, :2] += spots

    backbone = HFViTBackbone(config)
    head = nn.Conv2d(sum(backbone.channels), 2, kernel_size=1)  # 2 keypoints
    optimizer = torch.optim.AdamW([*backbone.parameters(), *head.parameters()], lr=3e-3)
    found = []
    for _ in range(100):
        maps = torch.cat(backbone(pixel_values).feature_maps, dim=1)  # (8, 64, 3, 5)
        heat = F.interpolate(head(maps), scale_factor=4, mode="bilinear")  # (8, 2, 12, 20)
        keypoints = heat.flatten(2).argmax(dim=2)  # (8, 2), row * 20 + column
        found.append(int(spots.flatten(2).gather(2, keypoints.unsqueeze(2)).sum()))
        if found[-1] == 8 * 2:
            break
        optimizer.zero_grad()
        F.cross_entropy(heat.flatten(0, 1).flatten(1), spots.flatten(0, 1).flatten(1) / 16).backward()
        optimizer.step()
    assert found[0] < 8
    assert found[-1] == 8 * 2

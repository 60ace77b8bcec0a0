"""A masked autoencoder of any encoder: what it computes, what it reads and gives back, and what it refuses."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_architectures import Plain, random_fields, turned
from transformers import (
    AutoModelForPreTraining,
    ViTConfig,
    ViTForImageClassification,
    ViTMAEConfig,
    ViTMAEForPreTraining,
    ViTMAEModel,
)
from without_package import BLOCK_OUR_PACKAGE

from hf_vit import HFViTBackbone, HFViTConfig, HFViTForImageClassification, HFViTForPreTraining, HFViTModel
from hf_vit.model.configuration_hf_vit import AUTOENCODER_FIELDS, as_pair
from hf_vit.model.masked_autoencoder import random_masking
from hf_vit.model.patches import patchify, unpatchify


DECODER = dict(
    decoder_hidden_size=24, decoder_num_hidden_layers=2, decoder_num_attention_heads=3, decoder_intermediate_size=40
)


@pytest.fixture
def autoencoder(tiny_config, randomize):
    """autoencoder(**overrides) -> HFViTForPreTraining of 16 patches with random weights everywhere, in eval mode."""
    return lambda **overrides: randomize(HFViTForPreTraining(tiny_config(**DECODER | overrides)))


def gradients(model, **inputs):
    """The gradient of every trained parameter by name."""
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


# ----------------------------------------------------------------------------------------------------------------------
# The method


class SlowAutoencoder(Plain):
    """arXiv 2111.06377 without a line of hf_vit: masked patches are there, and no token attends to them."""

    def __init__(self, model):
        super().__init__(model)
        c = self.c
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.w = {name.removeprefix("vit."): tensor.double() for name, tensor in tensors}
        self.decoder = Plain(model)
        self.decoder.w = {name.removeprefix("decoder.decoder_"): value for name, value in self.w.items()}
        self.decoder.c = HFViTConfig(
            hidden_size=c.decoder_hidden_size, num_attention_heads=c.decoder_num_attention_heads, hidden_act=c.hidden_act,
            qkv_bias=c.qkv_bias, layer_norm_eps=c.layer_norm_eps,
        )  # fmt: skip

    def attention(self, x, name):
        c, R = self.c, self.c.num_prefix_tokens
        heads = lambda m: self.dense(x, f"{name}.{m}_proj").unflatten(2, (c.num_attention_heads, -1)).transpose(1, 2)
        q, k, v = heads("q"), heads("k"), heads("v")  # (B, A, T, K)
        if c.qk_norm:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        if c.position_embedding == "rotary":
            turn = lambda one: torch.cat([one[:, :, :R], turned(one[:, :, R:], self.grid, c.rope_theta)], dim=2)
            q, k = turn(q), turn(k)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
        for row, visible in enumerate(self.visible):
            masked = [R + patch for patch in range(x.shape[1] - R) if patch not in visible]
            scores[row, :, :, masked] = -math.inf
        return self.dense((scores.softmax(dim=3) @ v).transpose(1, 2).flatten(2), f"{name}.o_proj")

    def __call__(self, images, noise):
        """The loss (), the answers (B, N, P * P * C), and the visible patches of each image."""
        c, images, R = self.c, images.double(), self.c.num_prefix_tokens
        height, width = as_pair(c.patch_size)
        self.grid = h, w = images.shape[2] // height, images.shape[3] // width
        count = int(h * w * (1 - c.mask_ratio))
        self.visible = [sorted(range(h * w), key=row.tolist().__getitem__)[:count] for row in noise]

        x = self.embed(images)
        for index in range(c.num_hidden_layers):
            x = self.layer(x, f"layers.{index}")
        x = x if c.final_norm == "none" else self.norm(x, "layernorm")

        known = self.dense(x, "decoder.decoder_embed")
        rows = []
        for row, visible in enumerate(self.visible):
            there = [known[row, R + p] if p in visible else self.w["decoder.mask_token"][0, 0] for p in range(h * w)]
            rows.append(torch.stack([*known[row, :R], *there]))
        x = torch.stack(rows) + self.w["decoder.decoder_pos_embed"]
        for index in range(c.decoder_num_hidden_layers):
            x = self.decoder.layer(x, f"layers.{index}")
        answers = self.decoder.dense(self.decoder.norm(x[:, R:], "norm"), "pred")

        errors = []
        for row, visible in enumerate(self.visible):
            for patch in set(range(h * w)) - set(visible):
                top, left = patch // w * height, patch % w * width
                true = images[row, :, top : top + height, left : left + width].permute(1, 2, 0).flatten()
                if c.norm_pix_loss:
                    true = (true - true.mean()) / (true.var() + 1e-6).sqrt()
                errors.append((answers[row, patch] - true).square().mean())
        return sum(errors) / len(errors), answers, self.visible


def assert_is_slow_autoencoder(model, images):
    noise = torch.rand(len(images), math.prod(model.config.grid_size))
    loss, answers, visible = SlowAutoencoder(model)(images, noise)
    outputs = model(images, noise=noise)
    assert [(row == 0).nonzero().flatten().tolist() for row in outputs.mask] == [sorted(row) for row in visible]
    torch.testing.assert_close(outputs.logits, answers, rtol=1e-4, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(outputs.loss, loss, rtol=1e-5, atol=1e-6, check_dtype=False)
    found = gradients(model, pixel_values=images, noise=noise)
    model.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            scale = max(1e-3, parameter.grad.abs().max().item())
            assert (found[name] - parameter.grad).abs().max() <= 1e-4 * scale, name


ENCODERS = {
    "plain": {},
    "pixels as they are": dict(norm_pix_loss=False),
    "sincos1d": dict(position_embedding="sincos1d"),
    "sincos2d": dict(position_embedding="sincos2d"),
    "rotary": dict(position_embedding="rotary", num_register_tokens=2),
    "no positions": dict(position_embedding="none"),
    "no class token, mean": dict(use_class_token=False, pooling="mean"),
    "norm of the mean": dict(use_class_token=False, pooling="mean", final_norm="pooled"),
    "map": dict(use_class_token=False, pooling="map", num_register_tokens=1),
    "distillation token": dict(use_distillation_token=True, pooling="cls_distillation", layerscale_value=0.1),
    "post-norm": dict(norm_first=False, final_norm="none"),
    "gated, no qkv bias": dict(gated_mlp=True, hidden_act="silu", qkv_bias=False),
    "other head": dict(pooler_act="tanh", representation_size=8),
}


@pytest.mark.parametrize("fields", ENCODERS.values(), ids=ENCODERS)
@pytest.mark.parametrize("mask_ratio", [0.75, 0.4])
def test_loss_gradients_and_patches_are_those_of_a_slow_restatement(autoencoder, pixels, fields, mask_ratio):
    model = autoencoder(image_size=(12, 20), mask_ratio=mask_ratio, **fields)
    assert_is_slow_autoencoder(model, pixels(3, 12, 20))


@pytest.mark.parametrize("seed", range(20))
def test_random_architectures_are_autoencoders_too_and_come_back(randomize, pixels, tmp_path, seed):
    fields = random_fields(seed)
    model = randomize(HFViTForPreTraining(HFViTConfig(**fields, **DECODER, mask_ratio=0.6)))
    images = pixels(3, *fields["image_size"], channels=fields["num_channels"])
    assert_is_slow_autoencoder(model, images)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForPreTraining.from_pretrained(tmp_path)
    assert type(loaded) is HFViTForPreTraining
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    frozen = lambda one: {name for name, parameter in one.named_parameters() if not parameter.requires_grad}
    assert frozen(loaded) == frozen(model)
    fields = lambda one: {name: getattr(one.config, name) for name in AUTOENCODER_FIELDS}
    assert fields(loaded) == fields(model)


def test_every_trained_parameter_gets_a_gradient(autoencoder, pixels):
    """Otherwise DistributedDataParallel would wait for it for ever."""
    for fields in ENCODERS.values():
        model = autoencoder(**fields).train()
        model(pixels()).loss.backward()
        without = {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}
        assert without == set()
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        assert all(name.startswith("vit.attention_pooling.") for name in frozen)


def test_the_layers_of_the_encoder_see_the_visible_patches_alone(autoencoder, pixels):
    model, seen = autoencoder(num_register_tokens=2), []
    for layer in [*model.vit.layers, *model.decoder.decoder_layers]:
        layer.register_forward_hook(lambda _, inputs, __: seen.append(tuple(inputs[0].shape)))
    outputs = model(pixels(), output_hidden_states=True, output_attentions=True)
    assert seen == [(2, 3 + 4, 32)] * 2 + [(2, 3 + 16, 24)] * 2
    assert [state.shape for state in outputs.hidden_states] == [(2, 7, 32)] * 3
    assert [weights.shape for weights in outputs.attentions] == [(2, 4, 7, 7)] * 2


def test_the_answer_does_not_depend_on_masked_pixels_and_the_loss_on_no_visible_answer(autoencoder, pixels):
    model, images, noise = autoencoder(), pixels(), torch.rand(2, 16)
    outputs = model(images, noise=noise)
    masked = unpatchify(outputs.mask.unsqueeze(2).expand(-1, -1, 48), (4, 4), (4, 4))  # (2, 3, 16, 16)
    changed = model(images + masked * torch.randn_like(images), noise=noise)
    torch.testing.assert_close(changed.logits, outputs.logits)
    assert changed.loss != outputs.loss
    outputs.logits.retain_grad()
    outputs.loss.backward()
    assert torch.equal(outputs.logits.grad.abs().amax(dim=2) > 0, outputs.mask.bool())


def test_masking_draws_each_patch_equally_often_and_anew_for_each_image(autoencoder, pixels):
    kept, mask, ids_restore = random_masking(torch.rand(2000, 16), 0.75)
    assert kept.shape == (2000, 4)
    assert torch.equal(mask.sum(dim=1), torch.full((2000,), 12.0))
    assert (mask.gather(1, kept) == 0).all()
    assert torch.equal(ids_restore.gather(1, kept), torch.arange(4).expand(2000, -1))
    assert (mask.sum(dim=0) - 1500).abs().max() < 5 * math.sqrt(2000 * 0.75 * 0.25)
    model, images = autoencoder(), pixels()
    assert not torch.equal(model(images).mask, model(images).mask)
    noise = torch.rand(2, 16)
    assert torch.equal(model(images, noise=noise).mask, model(images, noise=noise).mask)


def test_equal_noise_keeps_the_first_patches():
    assert random_masking(torch.zeros(1, 600), 0.5)[0].tolist() == [list(range(300))]


def test_an_autoencoder_learns(tiny_config, pixels):
    model = HFViTForPreTraining(tiny_config(**DECODER)).train()
    images, noise = pixels(1, 4, 4).repeat(8, 1, 4, 4), torch.rand(8, 16)  # each patch is the same
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    for _ in range(60):
        losses.append(model(images, noise=noise).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.1 < 0.9 < losses[0]


# ----------------------------------------------------------------------------------------------------------------------
# What a model of transformers has to be able to do


def test_sdpa_matches_eager_and_the_decoder_follows(autoencoder, pixels):
    model, inputs = autoencoder(), dict(pixel_values=pixels(), noise=torch.rand(2, 16))
    found = {}
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        assert {m.config._attn_implementation for m in model.modules() if type(m).__name__ == "HFViTAttention"} == {
            backend
        }
        found[backend] = gradients(model, **inputs)
    torch.testing.assert_close(found["sdpa"], found["eager"], rtol=1e-4, atol=1e-6)


def test_gradient_checkpointing_gives_the_same_gradients(autoencoder, pixels):
    model, inputs, calls = autoencoder(hidden_dropout_prob=0.1).train(), dict(pixel_values=pixels()), []
    for layer in (model.vit.layers[1], model.decoder.decoder_layers[1]):
        layer.mlp.register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(1)
    plain = gradients(model, **inputs)
    model.activation_checkpointing_enable()
    torch.manual_seed(1)
    torch.testing.assert_close(gradients(model, **inputs), plain)
    assert len(calls) == 2 + 4


def test_bfloat16_is_close_to_float32_by_autocast_and_by_weights(autoencoder, pixels):
    model, inputs = autoencoder(), dict(pixel_values=pixels(), noise=torch.rand(2, 16))
    wanted = model(**inputs).loss
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(**inputs).loss
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, wanted, rtol=0.05, atol=0)
    torch.testing.assert_close(model.bfloat16()(**inputs).loss, wanted, rtol=0.05, atol=0)


def test_patch_dropout_and_token_merging_do_not_act_in_an_autoencoder(autoencoder, pixels):
    model, seen = autoencoder(patch_dropout_rate=0.5).train(), []
    model.vit.layers[1].register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[1]))
    model(pixels())
    assert seen == [1 + 4]
    with pytest.raises(ValueError, match="answers for every patch: merge tokens in an HFViTModel"):
        model.set_token_merging(2)


def test_attention_maps_are_those_of_the_encoder_on_all_patches(autoencoder, pixels):
    model, images = autoencoder(), pixels()
    assert model.attention_maps(images).shape == (2, 2, 4, 4, 4)
    torch.testing.assert_close(model.attention_maps(images), model.vit.attention_maps(images))
    torch.testing.assert_close(model.attention_distances(images), model.vit.attention_distances(images))


def test_patches_come_back_as_the_image(pixels):
    images = pixels(2, 12, 10)
    patches = patchify(images, (4, 5))
    assert torch.equal(patches[1, 3], images[1, :, 4:8, 5:10].permute(1, 2, 0).flatten())
    assert torch.equal(unpatchify(patches, (4, 5), (3, 2)), images)


@pytest.mark.parametrize("norm_pix_loss", [True, False])
def test_a_perfect_answer_is_the_image_and_visible_patches_are_as_they_were(autoencoder, pixels, norm_pix_loss):
    model, images = autoencoder(norm_pix_loss=norm_pix_loss), pixels()
    outputs = model(images)
    masked, answer = model.reconstruct(images, outputs)
    hidden = unpatchify(outputs.mask.unsqueeze(2).expand(-1, -1, 48), (4, 4), (4, 4)).bool()
    assert torch.equal(masked[~hidden], images[~hidden])
    assert (masked[hidden] == 0).all()
    assert torch.equal(answer[~hidden], images[~hidden])
    assert not torch.isclose(answer[hidden], images[hidden]).all()
    outputs.logits = patchify(images, (4, 4))
    if norm_pix_loss:
        deviation = (outputs.logits.var(dim=2, keepdim=True) + 1e-6).sqrt()
        outputs.logits = (outputs.logits - outputs.logits.mean(dim=2, keepdim=True)) / deviation
    torch.testing.assert_close(model.reconstruct(images, outputs)[1], images)


# ----------------------------------------------------------------------------------------------------------------------
# ViTMAEForPreTraining, in and out


@pytest.fixture
def native_folder(randomize, tiny_fields, tmp_path):
    """native_folder(class, **fields) -> (native model with random weights, the folder it is saved in)."""

    def make(native_class=ViTMAEForPreTraining, **fields):
        sizes = {name: value for name, value in tiny_fields.items() if name != "num_labels"}
        native = randomize(native_class(ViTMAEConfig(**sizes | DECODER | fields)))
        native.save_pretrained(tmp_path / "native")
        return native, tmp_path / "native"

    return make


@pytest.mark.parametrize("fields", [{}, dict(norm_pix_loss=True, mask_ratio=0.4, qkv_bias=False, hidden_act="relu")])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_vit_mae_computes_what_it_did_with_the_same_noise(native_folder, pixels, caplog, fields, backend):
    native, folder = native_folder(**fields)
    model = HFViTForPreTraining.from_pretrained(folder, attn_implementation=backend)
    biases = 0 if "qkv_bias" in fields else 12
    line = f"read as vit_mae, {52 + biases} of {66 + biases} tensors renamed"
    assert caplog.messages == [f"HFViTForPreTraining from {folder}: {line}."]
    inputs = dict(pixel_values=pixels(), noise=torch.rand(2, 16))
    wanted, found = native(**inputs), model.eval()(**inputs)
    assert torch.equal(found.mask, wanted.mask)
    assert torch.equal(found.ids_restore, wanted.ids_restore)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=0)
    theirs, ours = gradients(native, **inputs), gradients(model, **inputs)
    assert set(ours) - set(theirs) == {"vit.embeddings.position_embeddings"}  # frozen there
    for name in theirs:
        scale = (
            theirs[name.replace("k_proj.bias", "q_proj.bias")].abs().max()
        )  # a softmax does not see that of the keys
        assert (ours[name] - theirs[name]).abs().max() <= 1e-5 * scale, name


def test_a_vit_mae_is_given_back_as_it_was(native_folder, tmp_path):
    _, folder = native_folder(mask_ratio=0.6)
    back = HFViTForPreTraining.from_pretrained(folder).to_transformers()
    assert type(back) is ViTMAEForPreTraining
    back.save_pretrained(tmp_path / "back")
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "back"))
    assert set(before) == set(after)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    configs = [json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "back")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    "fields",
    [dict(position_embedding="sincos2d"), dict(pooling="mean", final_norm="pooled"), dict(layerscale_value=0.1)],
)
def test_an_autoencoder_of_ours_is_given_to_transformers(autoencoder, pixels, fields):
    model, inputs = autoencoder(**fields), dict(pixel_values=pixels(), noise=torch.rand(2, 16))
    native = model.to_transformers()
    assert type(native) is ViTMAEForPreTraining
    torch.testing.assert_close(native(**inputs).logits, model(**inputs).logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(native(**inputs).loss, model(**inputs).loss)


def test_an_autoencoder_that_transformers_does_not_have_is_refused_by_field(autoencoder):
    with pytest.raises(ValueError, match=r"no native transformers autoencoder has .*position_embedding='rotary'"):
        autoencoder(position_embedding="rotary").to_transformers()
    with pytest.raises(ValueError, match=r"autoencoder has image_size=\(12, 20\)"):
        autoencoder(image_size=(12, 20)).to_transformers()


def test_the_encoder_of_a_vit_mae_gets_a_new_decoder(native_folder, pixels, caplog):
    native, folder = native_folder(ViTMAEModel)
    model, inputs = HFViTForPreTraining.from_pretrained(folder), dict(pixel_values=pixels(), noise=torch.rand(2, 16))
    assert "newly initialised decoder (40 tensors)" in caplog.text
    state = model.eval()(**inputs, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(model.vit.layernorm(state), native(**inputs).last_hidden_state)


# ----------------------------------------------------------------------------------------------------------------------
# From pre-training to the other models, and back


@pytest.mark.parametrize(
    "fields", [{}, dict(pooling="map", pooler_act="tanh"), dict(norm_pix_loss=False, mask_ratio=0.5)]
)
def test_its_folder_opens_as_every_other_model_with_one_log_line(autoencoder, pixels, tmp_path, caplog, fields):
    model, images = autoencoder(**fields), pixels()
    model.save_pretrained(tmp_path / "pretrained")
    tokens = model.vit(images).last_hidden_state
    decoder = "decoder (40 tensors)"
    pooler = "no pooler in the checkpoint: pooler_output is the pooled token itself; " * ("pooler_act" in fields)
    probe = "attention_pooling, decoder (55 tensors)" if "pooling" in fields else decoder
    lines = {
        HFViTModel: f"{pooler}left out {decoder}",
        HFViTForImageClassification: f"classifier reset to 3 labels (the checkpoint has none); left out {decoder}",
        HFViTBackbone: f"left out {probe}",
    }
    for model_class, line in lines.items():
        caplog.clear()
        loaded = model_class.from_pretrained(tmp_path / "pretrained").eval()
        assert caplog.messages == [f"{model_class.__name__} from {tmp_path / 'pretrained'}: {line}."]
        assert torch.equal(loaded.base_model.layers[1].mlp.fc1.weight, model.vit.layers[1].mlp.fc1.weight)
        if model_class is not HFViTBackbone:
            torch.testing.assert_close(loaded.base_model(images).last_hidden_state, tokens)
        assert all(parameter.requires_grad for parameter in loaded.parameters())
        loaded.save_pretrained(tmp_path / model_class.__name__)
        config = json.loads((tmp_path / model_class.__name__ / "config.json").read_text())
        assert [name for name in config if name in AUTOENCODER_FIELDS] == []
        assert "AutoModelForPreTraining" not in config["auto_map"]


@pytest.mark.parametrize("fields", [{}, dict(pooling="map", use_class_token=False), dict(representation_size=8)])
def test_a_classifiers_folder_opens_as_its_encoder_with_a_new_decoder(tiny_model, pixels, tmp_path, caplog, fields):
    classifier, images = tiny_model(**fields), pixels()
    classifier.save_pretrained(tmp_path)
    assert not set(AUTOENCODER_FIELDS) & set(json.loads((tmp_path / "config.json").read_text()))
    model = HFViTForPreTraining.from_pretrained(tmp_path, **DECODER)
    head = "classifier, pre_logits (4 tensors)" if "representation_size" in fields else "classifier (2 tensors)"
    assert caplog.messages == [
        f"HFViTForPreTraining from {tmp_path}: newly initialised decoder (40 tensors); left out {head}."
    ]
    assert all(torch.equal(v, model.vit.state_dict()[name]) for name, v in classifier.vit.state_dict().items())
    R, fresh = model.config.num_prefix_tokens, HFViTForPreTraining(model.config)
    assert torch.equal(model.decoder.decoder_pos_embed, fresh.decoder.decoder_pos_embed)
    assert (model.decoder.decoder_pos_embed[:, :R] == 0).all()
    assert 0.01 < model.decoder.mask_token.std() < 0.04
    assert model(images).loss.isfinite()


def test_a_decoder_of_the_default_size_fits_beside_a_small_encoder(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    assert HFViTForPreTraining.from_pretrained(tmp_path).decoder.decoder_pred.weight.shape == (48, 512)


def test_a_native_vit_gets_a_new_decoder_and_gives_up_its_head(tiny_fields, randomize, tmp_path, caplog):
    randomize(ViTForImageClassification(ViTConfig(**tiny_fields))).save_pretrained(tmp_path)
    HFViTForPreTraining.from_pretrained(tmp_path, **DECODER)
    assert "newly initialised decoder (40 tensors); left out classifier (2 tensors)" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("decoder.mask_token"), "decoder.mask_token is missing"),
        (lambda w: w.update({"decoder.decoder_layers.2.mlp.fc1.bias": torch.ones(40)}), "is not known to the model"),
        (lambda w: w.pop("vit.layers.0.mlp.fc1.bias"), "vit.layers.0.mlp.fc1.bias is missing"),
        (lambda w: w["decoder.decoder_norm.bias"].fill_(math.nan), "decoder.decoder_norm.bias holds NaN"),
    ],
)
def test_half_a_decoder_is_a_broken_file(autoencoder, tmp_path, change, message):
    autoencoder().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        HFViTForPreTraining.from_pretrained(tmp_path)


def test_half_a_decoder_of_a_vit_mae_is_a_broken_file_too(native_folder):
    _, folder = native_folder()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | dict(decoder_num_hidden_layers=1)))
    with pytest.raises(ValueError, match=r"decoder.decoder_layers.1.* is not known to the model"):
        HFViTForPreTraining.from_pretrained(folder)


LOAD_AND_SAVE = """from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForImageClassification, AutoModelForPreTraining

inputs = load_file("inputs.safetensors")
model = AutoModelForPreTraining.from_pretrained("saved", trust_remote_code=True)
model.save_pretrained("saved-again")
again = AutoModelForPreTraining.from_pretrained("saved-again", trust_remote_code=True)
classifier = AutoModelForImageClassification.from_pretrained("saved-again", trust_remote_code=True)
classifier.save_pretrained("classifier")
encoder = AutoModel.from_pretrained("classifier", trust_remote_code=True)
assert "hf_vit" not in sys.modules
save_file({
    "once": model(**inputs).logits.detach(), "twice": again(**inputs).logits.detach(),
    "tokens": encoder(inputs["pixel_values"]).last_hidden_state.detach(),
}, "outputs.safetensors")
"""


def test_a_saved_folder_loads_saves_and_fine_tunes_without_our_package(autoencoder, pixels, tmp_path):
    model, inputs = autoencoder(position_embedding="rotary"), dict(pixel_values=pixels(), noise=torch.rand(2, 16))
    model.save_pretrained(tmp_path / "saved")
    save_file(inputs, tmp_path / "inputs.safetensors")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", BLOCK_OUR_PACKAGE + LOAD_AND_SAVE]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    found = load_file(tmp_path / "outputs.safetensors")
    assert (found["once"] - model(**inputs).logits).abs().max() <= 1e-5
    assert (found["twice"] - model(**inputs).logits).abs().max() <= 1e-5
    assert (found["tokens"] - model.vit(inputs["pixel_values"]).last_hidden_state).abs().max() <= 1e-5
    named = json.loads((tmp_path / "saved-again" / "config.json").read_text())["auto_map"]
    assert named["AutoModelForPreTraining"] == "masked_autoencoder.HFViTForPreTraining"
    assert not (tmp_path / "classifier" / "masked_autoencoder.py").exists()


# ----------------------------------------------------------------------------------------------------------------------
# Other sizes, and bad input


def test_other_sizes_are_answered_and_learned(autoencoder, pixels):
    for positions in ("learned", "sincos2d", "rotary"):
        outputs = autoencoder(position_embedding=positions)(pixels(2, 24, 8), interpolate_pos_encoding=True)
        assert outputs.logits.shape == (2, 12, 48)
        assert outputs.mask.sum() == 2 * 9


def test_a_resized_autoencoder_answers_as_with_resampled_positions(autoencoder, pixels, caplog, tmp_path):
    model, images, noise = autoencoder(), pixels(2, 24, 8), torch.rand(2, 12)
    wanted = model(images, noise=noise, interpolate_pos_encoding=True).logits
    model.save_pretrained(tmp_path)
    model.resize_input(image_size=(24, 8))
    torch.testing.assert_close(model(images, noise=noise).logits, wanted)
    loaded = HFViTForPreTraining.from_pretrained(tmp_path, image_size=(24, 8))
    torch.testing.assert_close(loaded.eval()(images, noise=noise).logits, wanted)
    assert "the decoder's positions resampled to a grid of 6x2" in caplog.text


@pytest.mark.parametrize("sizes", [dict(patch_size=8), dict(num_channels=1), dict(patch_size=(2, 8))])
def test_another_patch_gets_a_new_last_layer_and_it_is_said(autoencoder, pixels, caplog, tmp_path, sizes):
    model = autoencoder()
    model.save_pretrained(tmp_path)
    loaded = HFViTForPreTraining.from_pretrained(tmp_path, mask_ratio=0.5, **sizes)
    assert "decoder_pred reset" in caplog.text
    images = pixels(channels=sizes.get("num_channels", 3))
    height, width = loaded.vit.embeddings.patch_embeddings.patch_size
    assert loaded(images).logits.shape[2] == height * width * images.shape[1]
    assert torch.equal(loaded.decoder.decoder_norm.weight, model.decoder.decoder_norm.weight)
    assert not torch.equal(loaded.decoder.decoder_pred.weight, model.decoder.decoder_pred.weight)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(mask_ratio=0.95), "mask_ratio 0.95 leaves 0 of 16 patches visible; wanted at least one visible and one"),
        (dict(mask_ratio=1e-20), "mask_ratio 1e-20 leaves 16 of 16 patches visible"),
        (dict(mask_ratio=0.0), "mask_ratio 0.0 leaves 16 of 16 patches visible"),
        (dict(mask_ratio=1.0), r"mask_ratio is 1.0; a number in \[0, 1\) was wanted"),
        (dict(image_size=4), "mask_ratio 0.75 leaves 0 of 1 patches visible"),
        (dict(image_size=18), "patch_size 4 does not divide image_size 18"),
        (dict(decoder_hidden_size=0), "decoder_hidden_size is 0; it must be at least 1"),
        (dict(decoder_num_hidden_layers=0), "decoder_num_hidden_layers is 0; it must be at least 1"),
        (dict(decoder_num_attention_heads=5), "decoder_num_attention_heads 5 does not divide decoder_hidden_size 24"),
        (dict(decoder_hidden_size=18), "positions need a decoder_hidden_size that 4 divides, not 18"),
    ],
)
def test_an_autoencoder_that_cannot_be_is_one_sentence(tiny_config, fields, message):
    with pytest.raises(ValueError, match=message):
        HFViTForPreTraining(tiny_config(**DECODER | fields))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (dict(noise=torch.rand(2, 15)), r"noise has shape \(2, 15\); wanted \(2, 16\), one number for each patch"),
        (dict(noise=torch.rand(16)), r"noise has shape \(16,\); wanted \(2, 16\)"),
        (dict(pixel_values=torch.rand(3, 16, 16)), r"pixel_values has shape \(3, 16, 16\); wanted \(batch, 3,"),
        (dict(pixel_values=torch.rand(2, 3, 24, 16)), "pixel_values is 24x16 pixels but the model takes 16x16"),
        (dict(pixel_values=torch.rand(2, 3, 4, 4), interpolate_pos_encoding=True), "leaves 0 of 1 patches visible"),
        (dict(pixel_values=torch.rand(2, 3, 18, 16), interpolate_pos_encoding=True), "which patches of 4x4 do not"),
    ],
)
def test_images_and_noise_that_do_not_fit_are_one_sentence(autoencoder, pixels, inputs, message):
    with pytest.raises(ValueError, match=message):
        autoencoder()(**dict(pixel_values=pixels()) | inputs)


def test_a_classifier_of_one_patch_needs_no_mask(tiny_model, pixels):
    assert tiny_model(image_size=4)(pixels(2, 4, 4)).logits.shape == (2, 3)

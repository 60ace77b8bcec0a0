"""A masked autoencoder of any encoder: what it computes, what it reads and gives back, and what it refuses."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_architectures import Plain, gradients, random_fields
from torch.nn import functional as F
from transformers import AutoModelForPreTraining, ViTMAEConfig, ViTMAEForPreTraining

from hf_vit import HFViTBackbone, HFViTConfig, HFViTForImageClassification, HFViTForPreTraining, HFViTModel
from hf_vit.model.masked_autoencoder import random_masking
from hf_vit.model.patches import patchify, unpatchify


DECODER = dict(
    decoder_hidden_size=24, decoder_num_hidden_layers=2, decoder_num_attention_heads=3, decoder_intermediate_size=40
)


@pytest.fixture
def autoencoder(tiny_config, randomize):
    """autoencoder(**overrides) -> HFViTForPreTraining of 16 patches with random weights everywhere, in eval mode."""
    return lambda **overrides: randomize(HFViTForPreTraining(tiny_config(**DECODER | overrides)))


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

    def __call__(self, images, noise):
        """The loss (), the answers (B, N, P * P * C), and the mask (B, N), True for patches that are not seen."""
        c, R = self.c, self.c.num_prefix_tokens
        order = noise.argsort(dim=1)
        count = int(noise.shape[1] * (1 - c.mask_ratio))
        mask = order.argsort(dim=1) >= count  # (B, N)

        x, images = self.see(images, order[:, :count]), images.double()
        for index in range(c.num_hidden_layers):
            x = self.layer(x, f"layers.{index}")
        x = x if c.final_norm == "none" else self.norm(x, "layernorm")

        x = self.dense(x, "decoder.decoder_embed")
        patches = torch.where(mask.unsqueeze(2), self.w["decoder.mask_token"], x[:, R:])
        x = torch.cat([x[:, :R], patches], dim=1) + self.w["decoder.decoder_pos_embed"]
        for index in range(c.decoder_num_hidden_layers):
            x = self.decoder.layer(x, f"layers.{index}")
        answers = self.decoder.dense(self.decoder.norm(x[:, R:], "norm"), "pred")

        true = F.unfold(images, c.patch_size, stride=c.patch_size).unflatten(
            1, (c.num_channels, -1)
        )  # (B, C, P * P, N)
        true = true.permute(0, 3, 2, 1).flatten(2)  # (B, N, P * P * C)
        if c.norm_pix_loss:
            true = (true - true.mean(dim=2, keepdim=True)) / (true.var(dim=2, keepdim=True) + 1e-6).sqrt()
        return (answers - true).square().mean(dim=2)[mask].mean(), answers, mask


@pytest.mark.parametrize("seed", range(20))
def test_random_architectures_are_autoencoders_too_and_come_back(randomize, pixels, tmp_path, seed):
    fields, mask_ratio, norm_pix_loss = random_fields(seed), (0.75, 0.4)[seed % 2], seed % 3 > 0
    config = HFViTConfig(**fields, **DECODER, mask_ratio=mask_ratio, norm_pix_loss=norm_pix_loss)
    model = randomize(HFViTForPreTraining(config))
    images, noise = (
        pixels(3, *fields["image_size"], channels=fields["num_channels"]),
        torch.rand(3, math.prod(config.grid_size)),
    )
    loss, answers, mask = SlowAutoencoder(model)(images, noise)
    outputs, close = model(images, noise=noise), dict(rtol=1e-4, atol=1e-5, check_dtype=False)
    torch.testing.assert_close((outputs.loss, outputs.logits, outputs.mask), (loss, answers, mask), **close)
    found = gradients(model, pixel_values=images, noise=noise)
    wanted = torch.autograd.grad(loss, [model.get_parameter(name) for name in found])
    for (name, gradient), plain in zip(found.items(), wanted, strict=True):
        assert (gradient - plain).abs().max() <= 1e-4 * max(1e-3, plain.abs().max()), name
    model.save_pretrained(tmp_path)
    loaded = AutoModelForPreTraining.from_pretrained(tmp_path)
    assert type(loaded) is HFViTForPreTraining
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert (loaded.config.mask_ratio, loaded.config.norm_pix_loss) == (mask_ratio, norm_pix_loss)


def test_masking_draws_each_patch_equally_often_and_anew_for_each_image(autoencoder, pixels):
    _, mask, _ = random_masking(torch.rand(2000, 16), 0.75)
    assert (mask.sum(dim=0) - 1500).abs().max() < 5 * math.sqrt(2000 * 0.75 * 0.25)
    assert random_masking(torch.zeros(1, 600), 0.5)[0].tolist() == [list(range(300))]  # on any device
    model, images = autoencoder(), pixels()
    assert not torch.equal(model(images).mask, model(images).mask)


# ----------------------------------------------------------------------------------------------------------------------
# What a model of transformers has to be able to do


def test_patch_dropout_and_token_merging_do_not_act_in_an_autoencoder(autoencoder, pixels):
    model, seen = autoencoder(patch_dropout_rate=0.5).train(), []
    model.vit.layers[1].register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[1]))
    model(pixels())
    assert seen == [1 + 4]
    with pytest.raises(ValueError, match="HFViTForPreTraining"):
        model.set_token_merging(2)


@pytest.mark.parametrize("norm_pix_loss", [True, False])
def test_a_perfect_answer_is_the_image_and_visible_patches_are_as_they_were(autoencoder, pixels, norm_pix_loss):
    model, images = autoencoder(norm_pix_loss=norm_pix_loss), pixels()
    outputs = model(images)
    masked, answer = model.reconstruct(images, outputs)
    hidden = unpatchify(outputs.mask.unsqueeze(2).expand(-1, -1, 48), (4, 4), (4, 4)).bool()
    assert torch.equal(masked, images.masked_fill(hidden, 0))
    assert torch.equal(answer[~hidden], images[~hidden])
    outputs.logits = patchify(images, (4, 4))
    if norm_pix_loss:
        deviation = (outputs.logits.var(dim=2, keepdim=True) + 1e-6).sqrt()
        outputs.logits = (outputs.logits - outputs.logits.mean(dim=2, keepdim=True)) / deviation
    torch.testing.assert_close(model.reconstruct(images, outputs)[1], images)


# ----------------------------------------------------------------------------------------------------------------------
# ViTMAEForPreTraining, in and out


def test_a_vit_mae_computes_what_it_did_with_the_same_noise_and_is_given_back(
    randomize, tiny_fields, pixels, tmp_path
):
    fields = dict(norm_pix_loss=True, mask_ratio=0.4, qkv_bias=False, hidden_act="relu")
    sizes = {name: value for name, value in tiny_fields.items() if name != "num_labels"}
    native = randomize(ViTMAEForPreTraining(ViTMAEConfig(**sizes | DECODER | fields)))
    native.save_pretrained(tmp_path)
    model, inputs = HFViTForPreTraining.from_pretrained(tmp_path), dict(pixel_values=pixels(), noise=torch.rand(2, 16))
    wanted, found, back = native(**inputs), model(**inputs), model.to_transformers()
    torch.testing.assert_close((found.logits, found.loss), (wanted.logits, wanted.loss), rtol=1e-5, atol=1e-5)
    assert type(back) is ViTMAEForPreTraining
    torch.testing.assert_close(back.state_dict(), native.state_dict(), rtol=0, atol=0)
    assert all(getattr(back.config, name) == value for name, value in fields.items())


# ----------------------------------------------------------------------------------------------------------------------
# From pre-training to the other models, and back


@pytest.mark.parametrize("model_class", [HFViTModel, HFViTForImageClassification, HFViTBackbone])
def test_its_folder_opens_as_every_other_model_and_says_what_was_left_out(
    autoencoder, pixels, tmp_path, caplog, model_class
):
    model, images = autoencoder(pooling="map"), pixels()
    model.save_pretrained(tmp_path / "pretrained")
    loaded = model_class.from_pretrained(tmp_path / "pretrained").eval()
    (message,) = caplog.messages
    assert "left out decoder" in message
    assert ("attention_pooling" in message) == (model_class is not HFViTBackbone)
    tokens = [HFViTModel.forward(one.base_model, images).last_hidden_state for one in (model, loaded)]
    torch.testing.assert_close(*tokens)
    loaded.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "AutoModelForPreTraining" not in config["auto_map"]


def test_a_classifiers_folder_opens_as_its_encoder_with_a_new_decoder(tiny_model, tmp_path, caplog):
    classifier = tiny_model(representation_size=8)
    classifier.save_pretrained(tmp_path)
    model = HFViTForPreTraining.from_pretrained(tmp_path, **DECODER)
    (message,) = caplog.messages
    assert all(part in message for part in ("decoder", "classifier", "pre_logits"))
    torch.testing.assert_close(model.vit.state_dict(), classifier.vit.state_dict(), rtol=0, atol=0)
    fresh = HFViTForPreTraining(model.config).decoder.decoder_pos_embed
    assert torch.equal(model.decoder.decoder_pos_embed, fresh)
    assert 0.01 < model.decoder.mask_token.std() < 0.04


@pytest.mark.parametrize("name", ["decoder.mask_token", "decoder.decoder_norm.bias", "vit.layers.0.mlp.fc1.bias"])
@pytest.mark.parametrize("fault", ["missing", "NaN"])
def test_half_a_decoder_is_a_broken_file(autoencoder, tmp_path, name, fault):
    autoencoder().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(name) if fault == "missing" else tensors[name].fill_(math.nan)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{name} .*{fault}"):
        HFViTForPreTraining.from_pretrained(tmp_path)


# ----------------------------------------------------------------------------------------------------------------------
# Other sizes, and bad input


def test_a_resized_autoencoder_answers_as_with_resampled_positions(autoencoder, pixels, caplog, tmp_path):
    model, images, noise = autoencoder(), pixels(2, 24, 8), torch.rand(2, 12)
    wanted = model(images, noise=noise, interpolate_pos_encoding=True).logits
    model.save_pretrained(tmp_path)
    model.resize_input(image_size=(24, 8))
    torch.testing.assert_close(model(images, noise=noise).logits, wanted)
    loaded = HFViTForPreTraining.from_pretrained(tmp_path, image_size=(24, 8))
    torch.testing.assert_close(loaded.eval()(images, noise=noise).logits, wanted)
    assert "image_size 16 -> (24, 8)" in caplog.text


@pytest.mark.parametrize("sizes", [dict(num_channels=1), dict(patch_size=(2, 8))])
def test_another_patch_gets_a_new_last_layer_and_it_is_said(autoencoder, pixels, caplog, tmp_path, sizes):
    model = autoencoder()
    model.save_pretrained(tmp_path)
    loaded = HFViTForPreTraining.from_pretrained(tmp_path, **sizes)
    assert "decoder_pred reset" in caplog.text
    channels = loaded.config.num_channels
    assert loaded(pixels(channels=channels)).logits.shape[2] == 16 * channels
    assert not torch.equal(loaded.decoder.decoder_pred.weight, model.decoder.decoder_pred.weight)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (dict(mask_ratio=0.95), "mask_ratio"),
        (dict(mask_ratio=0.0), "mask_ratio"),
        (dict(decoder_hidden_size=18, decoder_num_attention_heads=1), "18"),
    ],
)
def test_no_patch_visible_none_masked_or_a_decoder_without_positions_is_an_error(tiny_config, fields, named):
    with pytest.raises(ValueError, match=named):
        HFViTForPreTraining(tiny_config(**DECODER | fields))


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        (dict(noise=torch.rand(2, 15)), "noise"),
        (dict(pixel_values=torch.rand(2, 3, 4, 4), interpolate_pos_encoding=True), "mask_ratio"),
    ],
)
def test_images_and_noise_that_do_not_fit_are_an_error_that_names_them(autoencoder, pixels, inputs, named):
    with pytest.raises(ValueError, match=named):
        autoencoder()(**dict(pixel_values=pixels()) | inputs)

"""Masks are a function of (seed, epoch, image id) alone, an answer can be looked at, and the decoder is trained as the encoder."""

import torch

from hf_vit import HFViTForPreTraining
from hf_vit.data.image_spec import ImageSpec
from hf_vit.data.normalization import normalize
from hf_vit.model.masked_autoencoder import random_masking
from hf_vit.training.muon import Muon
from hf_vit.training.optimizers import build_optimizers, layer_id, parameter_groups
from hf_vit.training.pretraining import masking_noise, reconstruction_pictures


DECODER = dict(decoder_hidden_size=24, decoder_num_hidden_layers=1, decoder_num_attention_heads=2)


def test_masks_are_a_function_of_seed_epoch_and_image_id():
    index = torch.arange(64)
    noise = masking_noise(index, seed=1, epoch=2, num_patches=49)
    assert noise.shape == (64, 49)
    assert torch.equal(noise[40:50], masking_noise(index[40:50], 1, 2, 49))  # whatever the batch
    order = torch.randperm(64)
    assert torch.equal(noise[order], masking_noise(index[order], 1, 2, 49))  # and its order
    masks = [
        random_masking(each, 0.75)[1]
        for each in (noise, masking_noise(index, 2, 2, 49), masking_noise(index, 1, 3, 49))
    ]
    for mask in masks[1:]:
        assert 0.2 < (mask == 0)[masks[0] == 0].float().mean() < 0.3  # as often as by chance
    assert len({tuple(row) for row in masks[0].tolist()}) == 64


def test_masks_show_each_patch_equally_often():
    visible, count = 0, 2000
    for epoch in range(4):
        visible += (random_masking(masking_noise(torch.arange(count), 0, epoch, 16), 0.75)[1] == 0).sum(dim=0)
    assert visible.sum() == 4 * count * 4
    assert (visible - count).abs().max() < 5 * (4 * count * 0.25 * 0.75) ** 0.5


def test_pictures_show_the_image_what_is_visible_and_an_answer(tiny_config, randomize):
    model = randomize(HFViTForPreTraining(tiny_config(**DECODER))).train()
    spec = ImageSpec(16, 16, 3, 2, (0.5, 0.25, 0.5), (0.5, 0.5, 0.5))
    images, noise = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8), torch.rand(3, 16)
    image, masked, answer = reconstruction_pictures(model, normalize(images, spec), noise, spec)
    assert model.training
    assert torch.equal(image, images)
    hidden = random_masking(noise, 0.75)[1].bool()  # (3, 16)
    hidden = hidden.view(3, 1, 4, 4).repeat_interleave(4, 2).repeat_interleave(4, 3).expand(-1, 3, -1, -1)
    mean = torch.tensor([128, 64, 128], dtype=torch.uint8).view(1, 3, 1, 1).expand_as(images)
    assert torch.equal(masked, torch.where(hidden, mean, images))
    assert torch.equal(answer[~hidden], images[~hidden])
    assert (answer[hidden] != images[hidden]).float().mean() > 0.5


def test_muon_trains_the_matrices_of_the_decoders_layers_and_the_mask_token_does_not_decay(tiny_config):
    model = HFViTForPreTraining(tiny_config(**DECODER))
    of_muon = {
        name
        for one in build_optimizers(model, "muon", 1e-3, 0.1, 0.95)
        if isinstance(one, Muon)
        for group in one.param_groups
        for name in group["names"]
    }
    layer = "decoder.decoder_layers.0"
    wanted = {f"{layer}.attention.{m}_proj.weight" for m in "qkvo"} | {f"{layer}.mlp.fc{m}.weight" for m in "12"}
    assert {name for name in of_muon if name.startswith("decoder.")} == wanted
    assert len(of_muon) == 6 * 3
    assert all(
        group["weight_decay"] == 0 for group in parameter_groups(model, 0.1) if "decoder.mask_token" in group["names"]
    )
    assert all(layer_id(name, 2) == 3 for name, _ in model.named_parameters() if name.startswith("decoder."))

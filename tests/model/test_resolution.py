"""One set of weights at every size: positions and patch kernels follow image_size, patch_size and num_channels.

transformers randomises the positions of another image_size, and takes square grids and patches only.
"""

import copy
import os
import subprocess
import sys

import numpy
import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification

from hf_vit import HFViTBackbone, HFViTConfig, HFViTForImageClassification, HFViTModel


POSITIONS = "vit.embeddings.position_embeddings"
KERNEL, BIAS = (f"vit.embeddings.patch_embeddings.projection.{kind}" for kind in ("weight", "bias"))
TOKENS = {
    "class": {},
    "class and distillation": dict(use_distillation_token=True),
    "class, distillation and registers": dict(use_distillation_token=True, num_register_tokens=3),
    "registers": dict(use_class_token=False, pooling="mean", num_register_tokens=2),
    "none": dict(use_class_token=False, pooling="mean"),
}
load = HFViTForImageClassification.from_pretrained


@pytest.fixture
def saved(tiny_model, tmp_path):
    """saved(**overrides) -> (classifier with random weights, the folder it is saved in)."""

    def make(dtype=torch.float32, **overrides):
        model = tiny_model(**overrides).to(dtype)
        model.save_pretrained(tmp_path / "saved")
        return model, tmp_path / "saved"

    return make


@pytest.fixture
def native(tiny_fields, randomize, tmp_path):
    """(ViTForImageClassification of transformers with random weights, the folder it is saved in)."""
    model = randomize(ViTForImageClassification(ViTConfig(**tiny_fields)))
    model.save_pretrained(tmp_path / "native")
    return model, tmp_path / "native"


def bicubic(positions, old, new, antialias=True):
    """Positions (1, placed tokens + N, D) in float32, whose last N rows lie on grid `old`, on grid `new`."""
    placed, patches = positions.float().split([positions.shape[1] - old[0] * old[1], old[0] * old[1]], dim=1)
    image = patches.unflatten(1, old).permute(0, 3, 1, 2)  # (1, D, h, w)
    image = nn.functional.interpolate(image, size=new, mode="bicubic", antialias=antialias, align_corners=False)
    return torch.cat([placed, image.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


def bilinear(old, new):
    """(new, old): how much of each of `old` pixels in a line goes into each of `new`; centres, no antialiasing."""
    weights = numpy.zeros((new, old))
    for pixel in range(new):
        place = min(max((pixel + 0.5) * old / new - 0.5, 0), old - 1)
        left = int(place)
        weights[pixel, left] += 1 - (place - left)
        weights[pixel, min(left + 1, old - 1)] += place - left
    return weights


def pseudo_inverse(kernel, new):
    """FlexiViT (arXiv 2212.08013, section 3.4): kernel (D, C, *old) -> pinv(B^T) kernel, (D, C, *new)."""
    old = kernel.shape[2:]
    resize = numpy.kron(bilinear(old[0], new[0]), bilinear(old[1], new[1]))  # B, (new pixels, old pixels)
    columns = kernel.detach().double().numpy().reshape(-1, old[0] * old[1]).T
    return torch.from_numpy(numpy.linalg.pinv(resize.T) @ columns).T.reshape(*kernel.shape[:2], *new).float()


def enlarged(images, old, new):
    """Each patch of images (B, C, H, W) enlarged bilinearly by itself."""
    B, C, H, W = images.shape
    h, w = H // old[0], W // old[1]
    patches = images.reshape(B, C, h, old[0], w, old[1]).permute(0, 2, 4, 1, 3, 5)  # (B, h, w, C, P, P)
    patches = nn.functional.interpolate(patches.flatten(0, 2), size=new, mode="bilinear")  # (B * h * w, C, *new)
    return patches.reshape(B, h, w, C, *new).permute(0, 3, 1, 4, 2, 5).reshape(B, C, h * new[0], w * new[1])


def changed_tensors(model, before):
    """Names of the tensors that are not those of the state_dict `before`."""
    now = model.state_dict()
    assert set(now) == set(before)
    return {name for name, value in now.items() if not torch.equal(value, before[name])}


# ----------------------------------------------------------------------------------------------------------------------
# image_size: positions


@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize(
    ("image_size", "patch_size", "wanted", "old", "new"),
    [
        (16, 4, 24, (4, 4), (6, 6)),
        (16, 4, 8, (4, 4), (2, 2)),
        (16, 4, (12, 20), (4, 4), (3, 5)),
        ((12, 20), 4, (20, 8), (3, 5), (5, 2)),
        ([8, 20], [4, 2], [12, 6], (2, 10), (3, 3)),
        ((8, 32), 4, 16, (2, 8), (4, 4)),  # as many patches in another grid
    ],
)
def test_another_image_size_resamples_the_learned_positions_and_nothing_else(
    saved, caplog, tokens, image_size, patch_size, wanted, old, new
):
    model, folder = saved(image_size=image_size, patch_size=patch_size, **tokens)
    loaded = load(folder, image_size=wanted)
    positions, found = (network.vit.embeddings.position_embeddings for network in (model, loaded))
    torch.testing.assert_close(found, bicubic(positions, old, new), rtol=0, atol=1e-6)
    placed = positions.shape[1] - old[0] * old[1]
    assert torch.equal(found[:, :placed], positions[:, :placed])
    assert changed_tensors(loaded, model.state_dict()) == {POSITIONS}
    assert loaded.config.image_size == wanted
    sentence = f"positions resampled from a grid of {old[0]}x{old[1]} to {new[0]}x{new[1]}."
    assert caplog.messages == [f"HFViTForImageClassification from {folder}: {sentence}"]


@pytest.mark.parametrize("ignore_mismatched_sizes", [False, True])
def test_a_native_folder_is_resampled_like_our_own(native, tmp_path, caplog, ignore_mismatched_sizes):
    """What transformers makes of these arguments is a random tensor."""
    theirs, folder = native
    ours = tmp_path / "ours"
    load(folder).save_pretrained(ours)
    expected = bicubic(theirs.vit.embeddings.position_embeddings, (4, 4), (3, 5), antialias=False)
    for source in (folder, ours):
        loaded = load(source, image_size=(12, 20), ignore_mismatched_sizes=ignore_mismatched_sizes)
        torch.testing.assert_close(loaded.vit.embeddings.position_embeddings, expected, rtol=0, atol=1e-6)
        assert caplog.messages[-1].startswith(f"HFViTForImageClassification from {source}: ")
        assert caplog.messages[-1].endswith(" positions resampled from a grid of 4x4 to 3x5.")


def test_a_resampled_model_is_saved_and_loaded_as_it_is(saved, pixels, tmp_path, caplog):
    loaded = load(saved()[1], image_size=(12, 20), patch_size=(4, 2), num_channels=1)
    loaded.save_pretrained(tmp_path / "again")
    caplog.clear()
    again, images = load(tmp_path / "again"), pixels(2, 12, 20, channels=1)
    assert changed_tensors(again, loaded.state_dict()) == set()
    assert torch.equal(again(images).logits, loaded(images).logits)
    fields = [list(size) for size in (again.config.image_size, again.config.patch_size)]
    assert [*fields, again.config.num_channels] == [[12, 20], [4, 2], 1]
    assert caplog.messages == []


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_bfloat16_positions_are_resampled_in_float32_and_rounded_once(saved, stored):
    model, folder = saved(dtype=stored)
    loaded = load(folder, image_size=(20, 28), dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in loaded.state_dict().values()} == {torch.bfloat16}
    exact = bicubic(model.vit.embeddings.position_embeddings.bfloat16(), (4, 4), (5, 7))
    found = loaded.vit.embeddings.position_embeddings.float()
    torch.testing.assert_close(found, exact, rtol=2**-8, atol=1e-7)  # one rounding to 8 bits


# ----------------------------------------------------------------------------------------------------------------------
# Loading at a size equals running at that size


@pytest.mark.parametrize(
    "tokens", [TOKENS["class, distillation and registers"], TOKENS["none"]], ids=["tokens", "none"]
)
@pytest.mark.parametrize("positions", ["learned", "sincos1d", "sincos2d", "rotary", "none"])
@pytest.mark.parametrize("size", [(12, 20), (12, 8), (24, 10), (4, 40)])
def test_running_at_a_size_equals_loading_at_that_size(saved, pixels, positions, tokens, size):
    """The model is rectangular and its patch a list."""
    model, folder = saved(image_size=[12, 20], patch_size=[4, 2], position_embedding=positions, **tokens)
    loaded, images = load(folder, image_size=size), pixels(2, *size)
    outputs = model(images, interpolate_pos_encoding=True, output_hidden_states=True)
    expected = loaded(images, output_hidden_states=True)
    assert outputs.hidden_states[0].shape[1] == model.config.num_prefix_tokens + size[0] // 4 * (size[1] // 2)
    torch.testing.assert_close(outputs.hidden_states, expected.hidden_states)
    torch.testing.assert_close(outputs.logits, expected.logits)
    if positions in ("rotary", "none"):
        torch.testing.assert_close(model(images).logits, outputs.logits)
    elif size != (12, 20):
        with pytest.raises(ValueError, match=f"{size[0]}x{size[1]} pixels but the model takes 12x20"):
            model(images)
    assert changed_tensors(loaded, model.state_dict()) <= {POSITIONS}


# ----------------------------------------------------------------------------------------------------------------------
# patch_size: kernels


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((4, 4), (8, 8)),
        ((16, 16), (8, 8)),
        ((4, 4), (6, 2)),
        ((4, 2), (6, 8)),
        ((6, 4), (3, 8)),
        ((3, 8), (4, 4)),
        ((6, 2), (2, 2)),
    ],
)
def test_another_patch_size_resizes_the_kernel_by_the_pseudo_inverse(saved, caplog, old, new):
    model, folder = saved(image_size=48, patch_size=old)
    loaded = load(folder, patch_size=new)
    kernel = model.get_parameter(KERNEL)
    torch.testing.assert_close(loaded.get_parameter(KERNEL), pseudo_inverse(kernel, new), rtol=1e-5, atol=1e-5)
    assert changed_tensors(loaded, model.state_dict()) == {KERNEL, POSITIONS}  # the bias stays
    grids = [(48 // patch[0], 48 // patch[1]) for patch in (old, new)]
    expected = bicubic(model.get_parameter(POSITIONS), *grids)
    torch.testing.assert_close(loaded.get_parameter(POSITIONS), expected, rtol=0, atol=1e-6)
    assert loaded.config.patch_size == new
    assert loaded.config.grid_size == grids[1]
    assert f"patch kernel resampled from {old[0]}x{old[1]} to {new[0]}x{new[1]} pixels; positions" in caplog.text


@pytest.mark.parametrize(("old", "new"), [((4, 4), (8, 8)), ((4, 4), (5, 12)), ((4, 2), (16, 3)), ((1, 3), (2, 4))])
def test_larger_patches_of_an_enlarged_image_give_the_same_tokens(saved, pixels, caplog, old, new):
    """Image and patch grow alike, so that the grid, and with it every position, stays."""
    model, folder = saved(image_size=(3 * old[0], 5 * old[1]), patch_size=old)
    loaded = load(folder, image_size=(3 * new[0], 5 * new[1]), patch_size=new)
    images = pixels(2, 3 * old[0], 5 * old[1])
    large = enlarged(images, old, new)
    small, grown = model.vit.embeddings.patch_embeddings(images), loaded.vit.embeddings.patch_embeddings(large)
    torch.testing.assert_close(grown, small, rtol=0, atol=1e-4)
    torch.testing.assert_close(loaded(large).logits, model(images).logits, rtol=0, atol=1e-4)
    assert changed_tensors(loaded, model.state_dict()) == {KERNEL}
    assert "positions" not in caplog.text


def test_a_kernel_in_bfloat16_is_resized_in_higher_precision(saved):
    model, folder = saved(dtype=torch.bfloat16, image_size=48)
    found = load(folder, patch_size=6, dtype=torch.bfloat16).get_parameter(KERNEL)
    assert found.dtype == torch.bfloat16
    exact = pseudo_inverse(model.get_parameter(KERNEL), (6, 6))
    torch.testing.assert_close(found.float(), exact, rtol=2**-8, atol=1e-7)


def test_the_same_image_in_smaller_patches_keeps_its_tables_right(saved, pixels):
    for positions in ("sincos1d", "sincos2d"):
        loaded = load(saved(image_size=(16, 24), position_embedding=positions)[1], patch_size=2)
        plain = HFViTForImageClassification(loaded.config)
        tables = [torch.cat(network.vit.embeddings.positions_on_grid((8, 12)), dim=1) for network in (loaded, plain)]
        assert torch.equal(*tables)
        assert tables[0].shape[1] == 8 * 12 + (positions == "sincos1d")


# ----------------------------------------------------------------------------------------------------------------------
# num_channels


def test_from_three_channels_to_one_a_grey_image_gives_the_logits_of_its_rgb_copy(saved, pixels, caplog):
    model, folder = saved()
    grey = pixels(channels=1)
    loaded = load(folder, num_channels=1)
    torch.testing.assert_close(loaded(grey).logits, model(grey.repeat(1, 3, 1, 1)).logits)
    assert changed_tensors(loaded, model.state_dict()) == {KERNEL}
    assert "from 3 to 1 channels" in caplog.text
    with pytest.raises(ValueError, match=r"wanted \(batch, 1, height, width\)"):
        loaded(pixels())


def test_from_one_channel_to_three_an_image_gives_the_logits_of_its_mean_over_channels(saved, pixels):
    model, folder = saved(num_channels=1)
    images = pixels()
    torch.testing.assert_close(
        load(folder, num_channels=3)(images).logits, model(images.mean(dim=1, keepdim=True)).logits
    )


@pytest.mark.parametrize(
    ("old", "new", "taken"),
    [(3, 4, [0, 1, 2, 0]), (3, 7, [0, 1, 2, 0, 1, 2, 0]), (3, 2, [0, 1]), (2, 5, [0, 1, 0, 1, 0])],
)
def test_other_numbers_of_channels_repeat_the_old_ones_in_turn_at_the_same_strength(saved, old, new, taken):
    model, folder = saved(num_channels=old)
    kernel = model.get_parameter(KERNEL)
    expected = torch.stack([kernel[:, channel] for channel in taken], dim=1) * old / new
    torch.testing.assert_close(load(folder, num_channels=new).get_parameter(KERNEL), expected)


def test_all_three_sizes_change_at_once_and_one_line_says_so(saved, pixels, caplog):
    model, folder = saved(use_distillation_token=True, num_register_tokens=2)
    loaded = load(folder, image_size=(24, 40), patch_size=(6, 8), num_channels=1)
    kernel = pseudo_inverse(model.get_parameter(KERNEL), (6, 8)).sum(dim=1, keepdim=True)
    torch.testing.assert_close(loaded.get_parameter(KERNEL), kernel, rtol=1e-5, atol=1e-5)
    positions = bicubic(model.get_parameter(POSITIONS), (4, 4), (4, 5))
    torch.testing.assert_close(loaded.get_parameter(POSITIONS), positions, rtol=0, atol=1e-6)
    assert changed_tensors(loaded, model.state_dict()) == {KERNEL, POSITIONS}
    assert loaded(pixels(2, 24, 40, channels=1)).logits.shape == (2, 3)
    assert caplog.messages == [
        f"HFViTForImageClassification from {folder}: patch kernel resampled from 4x4 to 6x8 pixels; "
        "patch kernel turned from 3 to 1 channels; positions resampled from a grid of 4x4 to 4x5."
    ]


# ----------------------------------------------------------------------------------------------------------------------
# What cannot be


@pytest.mark.parametrize("sizes", [dict(patch_size=8), dict(num_channels=1), dict(patch_size=8, num_channels=1)])
def test_a_projection_between_norms_keeps_its_patch_and_channels(saved, sizes):
    model, folder = saved(patch_projection="norm_linear_norm")
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    for attempt in (lambda: load(folder, **sizes), lambda: model.resize_input(**sizes)):
        with pytest.raises(ValueError, match=r"norm_linear_norm .* keep patch_size 4 and num_channels 3"):
            attempt()
    assert changed_tensors(model, before) == set()
    assert model.config.to_dict() == config


def test_a_projection_between_norms_reads_other_image_sizes(saved, pixels):
    model, folder = saved(patch_projection="norm_linear_norm")
    images = pixels(2, 12, 20)
    loaded = load(folder, image_size=(12, 20), patch_size=[4, 4], num_channels=3)
    torch.testing.assert_close(loaded(images).logits, model(images, interpolate_pos_encoding=True).logits)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(image_size=18), "patch_size 4 does not divide image_size 18"),
        (dict(image_size=(16, 18)), "patch_size 4 does not divide image_size"),
        (dict(image_size=0), "image_size"),
        (dict(image_size=(16, -16)), "image_size"),
        (dict(patch_size=5), "patch_size 5 does not divide image_size 16"),
        (dict(patch_size=32), "patch_size 32 does not divide image_size 16"),
        (dict(patch_size=0), "patch_size"),
        (dict(patch_size=-4), "patch_size"),
        (dict(num_channels=0), "num_channels"),
        (dict(num_channels=-1), "num_channels"),
        (dict(image_size=24, patch_size=16), "patch_size 16 does not divide image_size 24"),
    ],
)
def test_sizes_that_do_not_fit_are_an_error_and_leave_a_live_model_alone(saved, sizes, message):
    model, folder = saved()
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    for attempt in (
        lambda: load(folder, **sizes),
        lambda: AutoModelForImageClassification.from_pretrained(folder, **sizes),
        lambda: model.resize_input(**sizes),
    ):
        with pytest.raises((ValueError, StrictDataclassFieldValidationError), match=message):
            attempt()
    assert changed_tensors(model, before) == set()
    assert model.config.to_dict() == config


@pytest.mark.parametrize(
    ("name", "shape", "sizes"),
    [
        ("vit.layers.0.mlp.fc1.weight", (48, 32), dict(image_size=32)),
        ("vit.embeddings.cls_token", (1, 1, 16), dict(image_size=32, patch_size=8)),
        (POSITIONS, (1, 10, 32), dict(image_size=32)),
        (POSITIONS, (1, 65, 32), dict(image_size=32)),  # what was asked for is not what config.json says lies there
        (KERNEL, (32, 3, 8, 8), dict(patch_size=8)),
        (KERNEL, (32, 1, 4, 4), dict(num_channels=1)),
        (BIAS, (16,), dict(image_size=32, patch_size=8, num_channels=1)),
    ],
)
@pytest.mark.parametrize("as_config", [False, True])
def test_a_tensor_that_is_not_what_its_config_says_stays_an_error(saved, name, shape, sizes, as_config):
    _, folder = saved()
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: torch.ones(shape)}, folder / "model.safetensors", metadata={"format": "pt"})
    arguments = dict(config=HFViTConfig.from_pretrained(folder, **sizes)) if as_config else sizes
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        load(folder, **arguments)


@pytest.mark.parametrize("override", [dict(intermediate_size=48), dict(num_register_tokens=2), dict(qkv_bias=False)])
def test_an_override_that_the_weights_do_not_fit_is_not_excused_by_another_image_size(saved, override):
    with pytest.raises(ValueError, match="do not fit HFViTForImageClassification"):
        load(saved()[1], image_size=32, **override)


# ----------------------------------------------------------------------------------------------------------------------
# The ways in


def test_the_auto_class_resamples_as_ours_does(saved):
    folder = saved()[1]
    sizes = dict(image_size=(12, 20), patch_size=(4, 2), num_channels=1)
    by_auto = AutoModelForImageClassification.from_pretrained(folder, **sizes)
    assert type(by_auto) is HFViTForImageClassification
    assert changed_tensors(by_auto, load(folder, **sizes).state_dict()) == set()
    assert by_auto.config.grid_size == (3, 10)


@pytest.mark.parametrize("kind", ["ours", "native"])
def test_a_config_object_of_another_size_says_what_is_wanted_and_is_not_changed(saved, native, tiny_config, kind):
    folder = saved()[1] if kind == "ours" else native[1]
    sizes = dict(image_size=[24, 16], patch_size=8, num_channels=1)
    config = tiny_config(**sizes, layer_norm_eps=1e-12, position_antialias=kind == "ours")
    before = config.to_dict()
    loaded = load(folder, config=config)
    assert changed_tensors(loaded, load(folder, **sizes).state_dict()) == set()
    assert loaded.config.grid_size == (3, 2)
    assert config.to_dict() == before
    assert loaded.config is not config


def test_a_folder_without_config_holds_what_the_given_config_says(saved, tiny_config):
    model, folder = saved()
    (folder / "config.json").unlink()
    assert changed_tensors(load(folder, config=tiny_config()), model.state_dict()) == set()
    with pytest.raises(ValueError, match="position_embeddings"):
        load(folder, config=tiny_config(image_size=32))


def test_none_asks_for_no_change(saved, caplog):
    model, folder = saved()
    loaded = load(folder, image_size=None, patch_size=None, num_channels=None)
    assert changed_tensors(loaded, model.state_dict()) == set()
    assert caplog.messages == []


def test_resize_input_on_a_live_model_says_what_it_did(tiny_model, pixels):
    model = tiny_model()
    plain = copy.deepcopy(model)
    assert model.resize_input() == []
    assert model.resize_input(image_size=16, patch_size=[4, 4], num_channels=3) == []
    assert changed_tensors(model, plain.state_dict()) == set()
    assert model.resize_input(image_size=(12, 20)) == ["positions resampled from a grid of 4x4 to 3x5"]
    assert model.resize_input(num_channels=1) == ["patch kernel turned from 3 to 1 channels"]
    assert model.resize_input(patch_size=2) == [
        "patch kernel resampled from 4x4 to 2x2 pixels",
        "positions resampled from a grid of 3x5 to 6x10",
    ]
    assert model(pixels(2, 12, 20, channels=1)).logits.shape == (2, 3)


def test_resize_input_equals_loading_at_the_size_and_reaches_every_config(saved, pixels):
    sizes = dict(image_size=(12, 20), patch_size=(6, 4), num_channels=2)
    model, folder = saved(image_size=24, num_register_tokens=1)
    model.resize_input(**sizes)
    loaded, images = load(folder, **sizes), pixels(2, 12, 20, channels=2)
    assert changed_tensors(model, loaded.state_dict()) == set()
    assert torch.equal(model(images).logits, loaded(images).logits)
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    assert len(configs) > 4
    assert all((config.grid_size, config.num_channels) == ((2, 5), 2) for config in configs)


@pytest.mark.parametrize("make", [HFViTModel, HFViTBackbone])
def test_resize_input_works_on_a_model_without_a_head(tiny_config, randomize, pixels, make):
    model, images = randomize(make(tiny_config())), pixels(2, 12, 20)
    before = model(images, interpolate_pos_encoding=True)
    model.resize_input(image_size=(12, 20))
    torch.testing.assert_close(model(images).to_tuple(), before.to_tuple())


def test_a_resized_model_trains_in_every_tensor_and_what_was_frozen_stays_frozen(tiny_model, pixels):
    sizes = dict(image_size=(24, 16), patch_size=8, num_channels=1)
    images, labels = pixels(2, 24, 16, channels=1), torch.tensor([0, 2])
    model = tiny_model()
    model.resize_input(**sizes)
    model(images, labels=labels).loss.backward()
    for name in (KERNEL, POSITIONS):
        parameter = model.get_parameter(name)
        assert parameter.is_leaf
        assert parameter.grad.abs().max() > 0, name

    model = tiny_model()
    for name in (KERNEL, POSITIONS):
        model.get_parameter(name).requires_grad_(False)
    model.resize_input(**sizes)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {KERNEL, POSITIONS}


def test_a_backbone_of_another_size_gives_the_maps_of_a_resized_one(saved, pixels, caplog):
    _, folder = saved(num_register_tokens=2)
    images = pixels(2, 12, 20)
    backbone = HFViTBackbone.from_pretrained(folder, image_size=(12, 20), out_indices=[1, 2])
    assert "positions resampled from a grid of 4x4 to 3x5" in caplog.text
    expected = HFViTBackbone.from_pretrained(folder, out_indices=[1, 2])(images, interpolate_pos_encoding=True)
    maps = backbone(images).feature_maps
    assert [tuple(one.shape) for one in maps] == [(2, 32, 3, 5)] * 2
    torch.testing.assert_close(maps, expected.feature_maps)


def test_labels_and_image_size_change_together_and_one_line_says_so(saved, caplog):
    model, folder = saved()
    loaded = load(folder, num_labels=5, image_size=(12, 20))
    head = {"classifier.weight", "classifier.bias"}
    now, before = loaded.state_dict(), model.state_dict()
    assert {name for name in now if name not in head and not torch.equal(now[name], before[name])} == {POSITIONS}
    assert now["classifier.weight"].shape == (5, 32)
    torch.testing.assert_close(now[POSITIONS], bicubic(before[POSITIONS], (4, 4), (3, 5)), rtol=0, atol=1e-6)
    assert caplog.messages == [
        f"HFViTForImageClassification from {folder}: classifier reset to 5 labels (the checkpoint has 3); "
        "positions resampled from a grid of 4x4 to 3x5."
    ]


WITHOUT_OUR_PACKAGE = """
import sys

class NoPackage:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_vit":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, NoPackage())
from types import SimpleNamespace

from safetensors.torch import load_file, save_file
from transformers import AutoBackbone, AutoModelForImageClassification
from transformers.models.auto import auto_factory

# AutoBackbone asks the Hub whether a repository exists, also for a folder.
auto_factory.hf_api = lambda: SimpleNamespace(repo_exists=lambda name: True)
images, sizes = load_file("images.safetensors"), dict(image_size=[12, 20], patch_size=[4, 2], trust_remote_code=True)
classifier = AutoModelForImageClassification.from_pretrained("saved", num_channels=1, **sizes)
backbone = AutoBackbone.from_pretrained("backbone", out_indices=[0, 2], **sizes)
assert "hf_vit" not in sys.modules
first, last = backbone(images["rgb"]).feature_maps
outputs = {"logits": classifier(images["grey"]).logits, "first": first, "last": last}
save_file({name: value.detach().contiguous() for name, value in outputs.items()}, "outputs.safetensors")
"""


def test_the_code_beside_the_weights_resamples_without_our_package(saved, pixels, tmp_path):
    _, folder = saved()
    HFViTBackbone.from_pretrained(folder).save_pretrained(tmp_path / "backbone")
    images = {"rgb": pixels(2, 12, 20), "grey": pixels(2, 12, 20, channels=1)}
    save_file(images, tmp_path / "images.safetensors")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    subprocess.run([sys.executable, "-c", WITHOUT_OUR_PACKAGE], cwd=tmp_path, env=environment, check=True)
    outputs = load_file(tmp_path / "outputs.safetensors")
    sizes = dict(image_size=(12, 20), patch_size=(4, 2))
    torch.testing.assert_close(outputs["logits"], load(folder, num_channels=1, **sizes)(images["grey"]).logits)
    expected = HFViTBackbone.from_pretrained(folder, out_indices=[0, 2], **sizes)(images["rgb"]).feature_maps
    torch.testing.assert_close((outputs["first"], outputs["last"]), expected)

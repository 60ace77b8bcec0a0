"""One set of weights at every size: positions and patch kernels follow image_size, patch_size and num_channels.

transformers randomises the positions of another image_size, and takes square grids and patches only.
"""

import copy

import numpy
import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import ViTConfig, ViTForImageClassification

from hf_vit import HFViTBackbone, HFViTConfig, HFViTForImageClassification, HFViTModel
from hf_vit.model.positions import fixed_position_embeddings, sincos_2d


POSITIONS = "vit.embeddings.position_embeddings"
KERNEL, BIAS = (f"vit.embeddings.patch_embeddings.projection.{kind}" for kind in ("weight", "bias"))
TOKENS = {
    "class, distillation and registers": dict(use_distillation_token=True, num_register_tokens=3),
    "none": dict(use_class_token=False, pooling="mean"),
}
load = HFViTForImageClassification.from_pretrained


@pytest.fixture
def saved(tiny_model, tmp_path):
    """saved(**overrides) -> (classifier with random weights, the folder it is saved in)."""

    def make(**overrides):
        model = tiny_model(**overrides)
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
        (16, 4, (12, 20), (4, 4), (3, 5)),
        ([8, 20], [4, 2], [12, 6], (2, 10), (3, 3)),
        ((8, 32), 4, 16, (2, 8), (4, 4)),  # as many patches in another grid
    ],
)
def test_another_image_size_resamples_the_learned_positions_and_nothing_else(
    saved, caplog, tokens, image_size, patch_size, wanted, old, new
):
    model, folder = saved(image_size=image_size, patch_size=patch_size, **tokens)
    loaded = load(folder, image_size=wanted)
    found = loaded.vit.embeddings.position_embeddings
    torch.testing.assert_close(found, bicubic(model.get_parameter(POSITIONS), old, new), rtol=0, atol=1e-6)
    assert changed_tensors(loaded, model.state_dict()) == {POSITIONS}
    assert loaded.config.image_size == wanted
    assert f"-> {wanted}" in caplog.messages[0]


@pytest.mark.parametrize("ignore_mismatched_sizes", [False, True])
def test_a_native_folder_is_resampled_like_our_own(native, tmp_path, ignore_mismatched_sizes):
    """What transformers makes of these arguments is a random tensor."""
    theirs, folder = native
    ours = tmp_path / "ours"
    load(folder).save_pretrained(ours)
    expected = bicubic(theirs.vit.embeddings.position_embeddings, (4, 4), (3, 5), antialias=False)
    for source in (folder, ours):
        loaded = load(source, image_size=(12, 20), ignore_mismatched_sizes=ignore_mismatched_sizes)
        torch.testing.assert_close(loaded.vit.embeddings.position_embeddings, expected, rtol=0, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Loading at a size equals running at that size


@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize("positions", ["learned", "sincos1d", "sincos2d", "rotary", "none"])
@pytest.mark.parametrize("size", [(12, 20), (24, 10)])
def test_running_at_a_size_equals_loading_at_that_size(saved, pixels, positions, tokens, size):
    """The model is rectangular and its patch a list."""
    model, folder = saved(image_size=[12, 20], patch_size=[4, 2], position_embedding=positions, **tokens)
    loaded, images = load(folder, image_size=size), pixels(2, *size)
    logits = loaded(images).logits
    torch.testing.assert_close(model(images, interpolate_pos_encoding=True).logits, logits)
    if positions in ("rotary", "none"):
        torch.testing.assert_close(model(images).logits, logits)
    elif size != (12, 20):
        with pytest.raises(ValueError, match=r"\(24, 10\) .*\(12, 20\)"):
            model(images)
    assert changed_tensors(loaded, model.state_dict()) <= {POSITIONS}


# ----------------------------------------------------------------------------------------------------------------------
# patch_size: kernels


@pytest.mark.parametrize(("old", "new"), [((4, 4), (8, 8)), ((16, 16), (8, 8)), ((4, 2), (6, 8)), ((6, 4), (3, 8))])
def test_another_patch_size_resizes_the_kernel_by_the_pseudo_inverse(saved, old, new):
    model, folder = saved(image_size=48, patch_size=old)
    loaded = load(folder, patch_size=new)
    kernel = pseudo_inverse(model.get_parameter(KERNEL), new)
    torch.testing.assert_close(loaded.get_parameter(KERNEL), kernel, rtol=1e-5, atol=1e-5)
    assert changed_tensors(loaded, model.state_dict()) == {KERNEL, POSITIONS}  # the bias stays
    assert loaded.config.grid_size == (48 // new[0], 48 // new[1])


# ----------------------------------------------------------------------------------------------------------------------
# num_channels


@pytest.mark.parametrize(
    ("old", "new", "taken"),
    [(3, 4, [0, 1, 2, 0]), (3, 7, [0, 1, 2, 0, 1, 2, 0]), (3, 2, [0, 1]), (2, 5, [0, 1, 0, 1, 0])],
)
def test_other_numbers_of_channels_repeat_the_old_ones_in_turn_at_the_same_strength(saved, old, new, taken):
    model, folder = saved(num_channels=old)
    kernel = model.get_parameter(KERNEL)
    expected = torch.stack([kernel[:, channel] for channel in taken], dim=1) * old / new
    torch.testing.assert_close(load(folder, num_channels=new).get_parameter(KERNEL), expected)


def test_all_three_sizes_and_the_labels_change_at_once_and_one_line_says_so(saved, pixels, caplog):
    model, folder = saved(use_distillation_token=True, num_register_tokens=2)
    loaded = load(folder, image_size=(24, 40), patch_size=(6, 8), num_channels=1, num_labels=5)
    kernel = pseudo_inverse(model.get_parameter(KERNEL), (6, 8)).sum(dim=1, keepdim=True)
    torch.testing.assert_close(loaded.get_parameter(KERNEL), kernel, rtol=1e-5, atol=1e-5)
    assert loaded(pixels(2, 24, 40, channels=1)).logits.shape == (2, 5)
    said = ("classifier reset", "image_size 16 -> (24, 40)", "patch_size 4 -> (6, 8)", "num_channels 3 -> 1")
    assert all(part in caplog.messages[0] for part in said)


# ----------------------------------------------------------------------------------------------------------------------
# What cannot be


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(image_size=(16, -16)), "image_size"),
        (dict(num_channels=0), "num_channels"),
        (dict(image_size=24, patch_size=16), "patch_size 16 .* image_size 24"),
        (dict(patch_size=8), "norm_linear_norm .* patch_size 4 and num_channels 3"),
        (dict(num_channels=1), "norm_linear_norm .* patch_size 4 and num_channels 3"),
    ],
)
def test_sizes_that_do_not_fit_are_an_error_and_leave_a_live_model_alone(saved, sizes, message):
    model, folder = saved(patch_projection="norm_linear_norm" if "norm_linear" in message else "conv")
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    for attempt in (lambda: load(folder, **sizes), lambda: model.resize_input(**sizes)):
        with pytest.raises((ValueError, StrictDataclassFieldValidationError), match=message):
            attempt()
    assert changed_tensors(model, before) == set()
    assert model.config.to_dict() == config


@pytest.mark.parametrize(
    ("name", "shape", "sizes"),
    [
        (POSITIONS, (1, 65, 32), dict(image_size=32)),  # what was asked for is not what config.json says lies there
        (KERNEL, (32, 3, 8, 8), dict(patch_size=8)),
    ],
)
def test_a_tensor_that_is_not_what_its_config_says_stays_an_error(saved, name, shape, sizes):
    _, folder = saved()
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: torch.ones(shape)}, folder / "model.safetensors", metadata={"format": "pt"})
    for how in (sizes, dict(config=HFViTConfig.from_pretrained(folder, **sizes))):
        with pytest.raises(ValueError, match=name):
            load(folder, **how)


# ----------------------------------------------------------------------------------------------------------------------
# The ways in


@pytest.mark.parametrize("kind", ["ours", "native"])
def test_a_config_object_of_another_size_says_what_is_wanted_and_is_not_changed(saved, native, tiny_config, kind):
    folder, sizes = (
        saved()[1] if kind == "ours" else native[1],
        dict(image_size=[24, 16], patch_size=8, num_channels=1),
    )
    config = tiny_config(**sizes, position_antialias=kind == "ours")
    before = config.to_dict()
    assert changed_tensors(load(folder, config=config), load(folder, **sizes).state_dict()) == set()
    assert config.to_dict() == before


def test_a_folder_without_config_holds_what_the_given_config_says(saved, tiny_config):
    model, folder = saved()
    (folder / "config.json").unlink()
    assert changed_tensors(load(folder, config=tiny_config()), model.state_dict()) == set()
    with pytest.raises(ValueError, match="position_embeddings"):
        load(folder, config=tiny_config(image_size=32))


def test_resize_input_to_the_size_that_it_has_changes_nothing(tiny_model):
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    assert model.resize_input() == model.resize_input(image_size=16, patch_size=[4, 4], num_channels=3) == []
    assert changed_tensors(model, before) == set()


@pytest.mark.parametrize("make", [HFViTForImageClassification, HFViTBackbone, HFViTModel])
def test_resize_input_equals_loading_at_the_size_and_reaches_every_config(saved, make):
    sizes = dict(image_size=(12, 20), patch_size=(6, 4), num_channels=2)
    folder = saved(image_size=24, num_register_tokens=1)[1]
    model, loaded = make.from_pretrained(folder), make.from_pretrained(folder, **sizes)
    model.resize_input(**sizes)
    assert changed_tensors(model, loaded.state_dict()) == set()
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    assert len(configs) >= 4
    assert all((config.grid_size, config.num_channels) == ((2, 5), 2) for config in configs)


@pytest.mark.parametrize("trainable", [True, False])
def test_a_resized_model_trains_in_every_tensor_and_what_was_frozen_stays_frozen(tiny_model, pixels, trainable):
    model = tiny_model().requires_grad_(trainable)
    model.classifier.requires_grad_(True)
    model.resize_input(image_size=(24, 16), patch_size=8, num_channels=1)
    model(pixels(2, 24, 16, channels=1), labels=torch.tensor([0, 2])).loss.backward()
    for name in (KERNEL, POSITIONS):
        assert (model.get_parameter(name).grad is not None) == trainable, name


def test_the_kept_tables_of_fixed_positions_are_of_their_grid_and_precision_and_no_tracer_leaves_its_own():
    table = lambda grid, dtype: fixed_position_embeddings("sincos2d", 0, grid, 16, torch.device("cpu"), dtype)
    with FakeTensorMode():
        table((4, 8), torch.float32)
    for grid, dtype in (((4, 8), torch.float32), ((2, 16), torch.float32), ((2, 16), torch.bfloat16)):
        assert torch.equal(table(grid, dtype), sincos_2d(grid, 16).to(dtype))
        assert table(grid, dtype) is table(grid, dtype)

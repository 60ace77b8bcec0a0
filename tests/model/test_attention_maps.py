"""What the model looks at: the numbers are the real weights and gradients, the place is right, and the model stays as it was."""

import copy

import pytest
import torch
from test_architectures import ARCHITECTURES

from hf_vit import HFViTBackbone, HFViTModel


METHODS = ["raw", "mean", "rollout", "gradient_rollout", "grad_cam"]
OF_CLASSES = METHODS[3:]


def slow_maps(model, images, layer, method, labels=None):
    """(B, [A,] h, w) of one layer by loops, in float64, from the attention weights that the eager backend gives out."""
    twin, probes, tokens = copy.deepcopy(model).double(), [], []
    twin.set_attn_implementation("eager")
    vit, R = twin.base_model, model.config.num_prefix_tokens
    if vit.attention_pooling is not None:
        vit.attention_pooling.register_forward_hook(lambda _, __, output: probes.append(output[1]))
    vit.layers[layer].attention.register_forward_pre_hook(lambda _, args: tokens.append(args[1]))
    outputs = twin(images.double(), output_attentions=True, interpolate_pos_encoding=True)
    seen = [*outputs.attentions, *probes]  # (B, A, T, T) each, and (B, A, 1, N)
    useful = seen
    if method in OF_CLASSES:
        classes = outputs.logits.argmax(dim=1) if labels is None else labels
        score = sum(logits[classes[image]] for image, logits in enumerate(outputs.logits))
        *slopes, slope = torch.autograd.grad(score, [*seen, tokens[0]])
        useful = [(weights * gradient).relu() for weights, gradient in zip(seen, slopes, strict=True)]
    grid = (images.shape[2] // 4, images.shape[3] // 4)
    if method == "grad_cam":
        channels = slope[:, R:].mean(dim=1, keepdim=True)  # (B, 1, D)
        return (tokens[0][:, R:] * channels).sum(dim=2).relu().detach().unflatten(1, grid)
    mean = [weights.mean(dim=1) for weights in useful[: len(vit.layers)]]  # (B, T, T) each
    identity = torch.eye(mean[0].shape[1]).double()
    rollout = flow = identity
    for below in mean[: layer + 1]:
        rollout, flow = (below + identity) / 2 @ rollout, (below + identity) @ flow
    looks = dict(
        raw=useful[layer], mean=mean[layer], rollout=rollout, gradient_rollout=flow - (0 if probes else identity)
    )
    patches = looks[method][..., R:]  # (B, [A,] T, N)
    if model.config.pooling.startswith("cls"):
        maps = patches[..., 0, :]
    elif probes:
        maps = torch.einsum("bn,b...nm->b...m", useful[-1].mean(dim=1)[:, 0], patches[..., R:, :])
    else:
        maps = patches[..., R:, :].mean(dim=-2)
    return maps.detach().unflatten(-1, grid)


def same(maps, expected):
    assert maps.dtype == torch.float32
    assert not maps.requires_grad
    torch.testing.assert_close(maps, expected.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "fields", [*ARCHITECTURES, dict(position_embedding="rotary", num_register_tokens=2, pooling="map")]
)
def test_maps_equal_a_slow_computation_for_images_of_the_size_of_the_model_and_of_another(tiny_model, fields, backend):
    model = tiny_model(num_hidden_layers=3, **fields)
    model.set_attn_implementation(backend)
    for size in ((16, 16), (8, 24)):
        images = torch.randn(2, 3, *size)
        for method in METHODS:
            for layer in range(3):
                expected = slow_maps(model, images, layer, method)
                assert expected.std() > 0
                same(model.attention_maps(images, layer, method, interpolate_pos_encoding=True), expected)
    assert model.config._attn_implementation == backend


@pytest.mark.parametrize("method", METHODS)
def test_layers_are_chosen_by_number_from_either_end_or_by_list(tiny_model, pixels, method):
    model, images = tiny_model(num_hidden_layers=3), pixels()
    each = torch.stack([model.attention_maps(images, layer, method) for layer in range(3)], dim=1)
    last = each if method in ("raw", "mean") else each[:, -1]
    for layers, expected in (([-1, 0, 0], each[:, [-1, 0, 0]]), (-2, each[:, 1]), (None, last)):
        same(model.attention_maps(images, layers, method), expected)


@pytest.mark.parametrize("method", OF_CLASSES)
def test_maps_of_a_class_are_of_the_class_that_is_asked_or_of_the_answer(tiny_model, pixels, method):
    model, images = tiny_model(), pixels(batch=4)
    answers = model(images).logits.argmax(dim=1)
    others = (answers + 1) % 3
    for labels, classes in ((others, others), (None, answers), (2, [2] * 4)):
        same(model.attention_maps(images, 1, method, labels), slow_maps(model, images, 1, method, classes))


@pytest.mark.parametrize("method", METHODS)
def test_maps_need_no_gradients_and_are_in_float32_in_half_precision_and_under_autocast(tiny_model, pixels, method):
    model, images = tiny_model(position_embedding="rotary").requires_grad_(False), pixels()
    expected = model.attention_maps(images, method=method)
    with torch.inference_mode():
        same(model.attention_maps(images.clone(), method=method), expected)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = model.attention_maps(images, method=method)
    for maps in (model.bfloat16().attention_maps(images.bfloat16(), method=method), under_autocast):
        assert maps.dtype == torch.float32
        assert (maps - expected).abs().max() < 0.1 * expected.max()


@pytest.mark.parametrize("make", [HFViTModel, HFViTBackbone])
def test_models_without_a_head_have_the_maps_that_know_no_class(tiny_config, randomize, pixels, make):
    model, images = randomize(make(tiny_config())), pixels()
    for method in METHODS[:3]:
        same(model.attention_maps(images, -1, method), slow_maps(model, images, 1, method))
    for method in OF_CLASSES:
        with pytest.raises(ValueError, match=method):
            model.attention_maps(images, method=method)


# ----------------------------------------------------------------------------------------------------------------------
# The place, and the distance


def test_distances_are_the_mean_over_the_weights_of_patches(tiny_model, pixels):
    model, images = tiny_model(num_register_tokens=2, pooling="map"), pixels(1, height=12, width=20)
    attentions = model(images, output_attentions=True, interpolate_pos_encoding=True).attentions
    places = torch.tensor([divmod(patch, 5) for patch in range(15)]).float()
    weights = torch.cat(attentions)[:, :, 3:, 3:]  # (layers, A, N, N)
    distances = 4 * (weights * torch.cdist(places, places)).sum(dim=3) / weights.sum(dim=3)
    torch.testing.assert_close(model.attention_distances(images), distances.mean(dim=2), rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# The model stays as it was


def state_of(model):
    """Everything of a model that a look at it could change."""
    of_module = lambda module: [module.training, list(module._forward_pre_hooks), list(module._forward_hooks)]
    of_weight = lambda weight: [weight.requires_grad, weight._version, weight.grad is None or weight.grad.sum().item()]
    return [*map(of_module, model.modules()), *map(of_weight, model.parameters())]


@pytest.mark.parametrize("method", [*METHODS, "distances"])
def test_the_model_and_the_images_stay_as_they_were(tiny_model, pixels, method):
    model, images = tiny_model(hidden_dropout_prob=0.5, pooling="map"), pixels().requires_grad_()
    looks = lambda: model.attention_distances(images) if method == "distances" else model.attention_maps(images, method=method)  # fmt: skip
    expected = looks()
    model.set_token_merging([3, 1])
    before = model(images).logits
    assert torch.equal(looks(), expected)  # every patch has its place
    assert torch.equal(model(images).logits, before)
    model.vit.layers[1].train()
    model.classifier.weight.grad = torch.ones_like(model.classifier.weight)
    model.classifier.bias.requires_grad_(False)
    model.register_forward_hook(lambda *_: None)  # somebody else's
    state = state_of(model)
    assert torch.equal(looks(), expected)
    assert state_of(model) == state
    assert (images.grad, images.requires_grad) == (None, True)
    images = pixels(channels=4)
    with pytest.raises(ValueError, match="pixel_values"):
        looks()
    assert state_of(model) == state

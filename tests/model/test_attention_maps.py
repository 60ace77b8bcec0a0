"""What the model looks at: the numbers are the real weights and gradients, the place is right, and the model stays as it was."""

import copy

import numpy
import pytest
import torch
from torch import nn

from hf_vit import HFViTBackbone, HFViTForImageClassification, HFViTModel


METHODS = ["raw", "mean", "rollout", "gradient_rollout", "grad_cam"]
OF_CLASSES = METHODS[3:]
WIDE = dict(image_size=(12, 20))  # a grid of 3 x 5
ARCHITECTURES = [
    {},
    dict(pooling="mean", num_register_tokens=2),
    dict(pooling="mean", use_class_token=False, position_embedding="rotary", layerscale_value=0.5, **WIDE),
    dict(pooling="cls_mean", qk_norm=True, num_register_tokens=1, **WIDE),
    dict(pooling="map", use_class_token=False, final_norm="none", **WIDE),
    dict(pooling="map", num_register_tokens=2, gated_mlp=True, hidden_act="silu"),
    dict(pooling="cls_distillation", use_distillation_token=True, norm_first=False, final_norm="none", **WIDE),
    dict(position_embedding="rotary", qk_norm=True, final_norm="pooled", pooling="mean", **WIDE),
]


def slow_pooling(pooling, patches, seen):
    """`HFViTAttentionPooling` of patches (B, N, D) written out; its weights (B, A, 1, N) are added to `seen`."""
    split = lambda layer, tokens: layer(tokens).unflatten(2, (-1, pooling.head_dim)).transpose(1, 2)
    query, key = split(pooling.q_proj, pooling.probe.expand(len(patches), -1, -1)), split(pooling.k_proj, patches)
    seen.append((query @ key.transpose(2, 3) / pooling.head_dim**0.5).softmax(dim=3))
    pooled = pooling.o_proj((seen[-1] @ split(pooling.v_proj, patches)).transpose(1, 2).flatten(1))
    return pooled + pooling.mlp(pooling.layernorm(pooled))


def slow_maps(model, images, layer, method, labels=None):
    """(B, [A,] h, w) of one layer by loops, in float64, from the attention weights that the eager backend gives out."""
    twin, probes, tokens = copy.deepcopy(model).double(), [], []
    twin.set_attn_implementation("eager")
    vit, R = twin.base_model, model.config.num_prefix_tokens
    if vit.attention_pooling is not None:
        vit.attention_pooling.forward = lambda patches, _: slow_pooling(vit.attention_pooling, patches, probes)
    vit.layers[layer].attention.register_forward_pre_hook(lambda _, args: tokens.append(args[0]))
    outputs = twin(images.double(), output_attentions=True, interpolate_pos_encoding=True)
    seen = [*outputs.attentions, *probes]
    useful = [weights.detach() for weights in seen]  # (B, A, T, T)
    if method in OF_CLASSES:
        classes = outputs.logits.argmax(dim=1) if labels is None else labels
        score = sum(logits[classes[image]] for image, logits in enumerate(outputs.logits))
        *slopes, slope = torch.autograd.grad(score, [*seen, tokens[0]])
        useful = [(weights * gradient).relu().detach() for weights, gradient in zip(seen, slopes, strict=True)]
    maps = []
    for image in range(len(images)):
        heads = [weights[image] for weights in useful[: len(vit.layers)]]  # (A, T, T) each
        T, A = heads[0].shape[1], len(heads[0])
        patches = useful[-1][image].mean(dim=0)[0].tolist() if probes else [1 / (T - R)] * (T - R)
        rows = [1] if model.config.pooling.startswith("cls") else [0] * R + patches  # what is looked from
        mean = [sum(weights[head] for head in range(A)) / A for weights in heads]
        rollout = flow = torch.eye(T).double()
        for below in mean[: layer + 1]:
            rollout, flow = (below + torch.eye(T)) / 2 @ rollout, (below + torch.eye(T)) @ flow
        looks = dict(
            raw=heads[layer],
            mean=mean[layer],
            rollout=rollout,
            gradient_rollout=flow - (0 if probes else torch.eye(T)),
        )
        if method == "grad_cam":
            channels = slope[image, R:].mean(dim=0)
            maps.append(torch.stack([(token @ channels).relu() for token in tokens[0][image, R:]]).detach())
        else:
            maps.append(sum(share * looks[method][..., query, R:] for query, share in enumerate(rows)))
    return torch.stack(maps).unflatten(-1, (images.shape[2] // 4, images.shape[3] // 4))


def same(maps, expected):
    assert maps.dtype == torch.float32
    assert not maps.requires_grad
    torch.testing.assert_close(maps, expected.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("fields", ARCHITECTURES)
def test_maps_equal_a_slow_computation_for_images_of_the_size_of_the_model_and_of_another(tiny_model, fields, backend):
    model = tiny_model(num_hidden_layers=3, **fields)
    model.set_attn_implementation(backend)
    for size in (fields.get("image_size", (16, 16)), (8, 24)):
        images = torch.randn(2, 3, *size)
        for method in METHODS:
            for layer in range(3):
                expected = slow_maps(model, images, layer, method)
                assert expected.std() > 0
                same(model.attention_maps(images, layer, method, interpolate_pos_encoding=True), expected)
    assert model.config._attn_implementation == backend


def test_weights_of_the_first_layer_are_the_softmax_of_queries_and_keys_from_the_state_dict(tiny_model, pixels):
    model, images = tiny_model(), pixels()
    state = {name: value.double().numpy() for name, value in model.vit.layers[0].state_dict().items()}
    embedded, maps = model.vit.embeddings(images).detach().double().numpy(), model.attention_maps(images, 0)
    for image in range(2):
        tokens = [(token - token.mean()) / (token.var() + 1e-12) ** 0.5 for token in embedded[image]]
        tokens = [token * state["layernorm_before.weight"] + state["layernorm_before.bias"] for token in tokens]
        query, *keys = (
            (state[f"attention.{name}_proj.weight"] @ token + state[f"attention.{name}_proj.bias"]).reshape(4, 8)
            for name, token in [("q", tokens[0]), *(("k", token) for token in tokens)]
        )
        for head in range(4):
            weights = numpy.exp([query[head] @ key[head] / 8**0.5 for key in keys])
            numpy.testing.assert_allclose(maps[image, head].flatten(), weights[1:] / weights.sum(), rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_layers_are_chosen_by_number_from_either_end_or_by_list(tiny_model, pixels, method):
    model, images = tiny_model(num_hidden_layers=3), pixels()
    each = torch.stack([model.attention_maps(images, layer, method) for layer in range(3)], dim=1)
    assert each.shape == ((2, 3, 4, 4, 4) if method == "raw" else (2, 3, 4, 4))
    last = each if method in ("raw", "mean") else each[:, -1]
    chosen = [(layers, each[:, list(layers)]) for layers in ([0, 1, 2], [-1, 0], [1, 1, -2], (2,), range(2))]
    for layers, expected in [*chosen, (-2, each[:, 1]), (None, last)]:
        same(model.attention_maps(images, layers, method), expected)


@pytest.mark.parametrize("method", OF_CLASSES)
def test_maps_of_a_class_are_of_the_class_that_is_asked_or_of_the_answer(tiny_model, pixels, method):
    model, images = tiny_model(), pixels(batch=4)
    answers = model(images).logits.argmax(dim=1)
    others = (answers + 1) % 3
    same(model.attention_maps(images, 1, method, others), slow_maps(model, images, 1, method, others))
    for last in (2, [2] * 4, torch.tensor(2)):
        same(model.attention_maps(images, 1, method, last), slow_maps(model, images, 1, method, [2] * 4))
    same(model.attention_maps(images, 1, method), slow_maps(model, images, 1, method, answers))


def test_compiled_models_give_the_maps_of_uncompiled_ones(tiny_model, pixels):
    torch.compiler.reset()
    model, images = tiny_model(pooling="map"), pixels()
    expected = {method: model.attention_maps(images, method=method) for method in METHODS}
    inside = copy.deepcopy(model)
    inside.compile(backend="aot_eager")
    for compiled in (inside, torch.compile(model, backend="aot_eager")):
        before = compiled(images).logits
        for method in METHODS:
            same(compiled.attention_maps(images, method=method), expected[method])
        assert torch.equal(compiled(images).logits, before)


@pytest.mark.parametrize("method", METHODS)
def test_maps_need_no_gradient_mode_and_no_trainable_weight(tiny_model, pixels, method):
    model, images = tiny_model(position_embedding="rotary"), pixels()
    expected = model.attention_maps(images, method=method)
    model.requires_grad_(False)
    same(model.attention_maps(images, method=method), expected)
    with torch.no_grad():
        same(model.attention_maps(images, method=method), expected)
    with torch.inference_mode():
        same(model.attention_maps(images, method=method), expected)
        labels = model(images).logits.argmax(dim=1) if method in OF_CLASSES else None
        same(model.attention_maps(images.clone(), method=method, labels=labels), expected)


@pytest.mark.parametrize("method", METHODS)
def test_maps_are_in_float32_in_half_precision_and_under_autocast(tiny_model, pixels, method):
    model, images = tiny_model(), pixels()
    expected = model.attention_maps(images, method=method)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = model.attention_maps(images, method=method)
    for maps in (model.bfloat16().attention_maps(images.bfloat16(), method=method), under_autocast):
        assert maps.dtype == torch.float32
        assert (maps - expected).abs().max() < 0.1 * expected.max()


@pytest.mark.parametrize("make", [HFViTModel, HFViTBackbone])
@pytest.mark.parametrize("pooling", ["cls", "map"])
def test_models_without_a_head_have_the_maps_that_know_no_class(tiny_config, randomize, pixels, make, pooling):
    model, images = randomize(make(tiny_config(pooling=pooling))), pixels()
    for method in METHODS[:3]:
        same(model.attention_maps(images, -1, method), slow_maps(model, images, 1, method))
    for method in OF_CLASSES:
        with pytest.raises(ValueError, match=f"{method} .*wanted an HFViTForImageClassification"):
            model.attention_maps(images, method=method)


def test_the_query_is_named_for_what_is_pooled(tiny_model, tiny_config):
    for fields in ({}, dict(pooling="cls_mean"), dict(pooling="cls_distillation", use_distillation_token=True)):
        assert tiny_model(**fields).attention_query == "the class token"
    assert HFViTModel(tiny_config(pooling="map")).attention_query == "the probe of the attention pooling"
    for model in (tiny_model(pooling="mean"), HFViTBackbone(tiny_config(pooling="map"))):  # a backbone has no probe
        assert model.attention_query == "the mean over all patches"


# ----------------------------------------------------------------------------------------------------------------------
# The place, and the distance


def planted(count, num_bright, dim):
    """Noise images (B, 3, 12, 20), each patch dimly red, green or blue, some bright; their colours and places (B, num_bright)."""
    places = torch.rand(count, 15).argsort(dim=1)[:, :num_bright]
    colours = torch.rand(count, 3).argsort(dim=1)[:, :num_bright]  # the bright ones differ
    patches = dim * nn.functional.one_hot(torch.randint(3, (count, 15)), 3).float()  # (B, N, C)
    bright = 2 * nn.functional.one_hot(colours, 3).float()
    patches = patches.scatter(1, places.unsqueeze(2).expand(-1, -1, 3), bright).unflatten(1, (3, 5))  # (B, h, w, C)
    images = patches.permute(0, 3, 1, 2).repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    return images + 0.3 * torch.randn_like(images), colours, places


def train(config, num_bright, dim):
    """A model that says which colours are bright in an image, in 250 steps."""
    model = HFViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(250):
        images, colours, _ = planted(64, num_bright, dim)
        model(images, labels=nn.functional.one_hot(colours, 3).sum(dim=1).float()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    images, colours, places = planted(200, num_bright, dim)
    with torch.no_grad():
        answers = model.eval()(images).logits.topk(num_bright).indices.sort(dim=1).values
    assert (answers == colours.sort(dim=1).values).all(dim=1).float().mean() > 0.95
    return model, images, colours, places


def hits(maps, places):
    """The share of maps (B, h, w) that are highest at these places (B,), counted along the rows."""
    return (maps.flatten(1).argmax(dim=1) == places).float().mean()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_map_of_a_trained_model_peaks_at_the_row_and_column_of_the_bright_patch(tiny_config, seed):
    torch.manual_seed(seed)
    config = tiny_config(problem_type="multi_label_classification", **WIDE)
    model, images, _, places = train(config, num_bright=1, dim=0.5)
    for method in ("mean", "rollout", "gradient_rollout"):
        assert hits(model.attention_maps(images, -1, method), places[:, 0]) >= 0.95


@pytest.mark.parametrize("seed", [0, 1])
def test_of_two_bright_patches_the_map_of_a_class_shows_the_one_that_speaks_for_it(tiny_config, seed):
    torch.manual_seed(seed)
    fields = dict(problem_type="multi_label_classification", pooling="mean", num_hidden_layers=1)
    model, images, colours, places = train(tiny_config(**fields, **WIDE), num_bright=2, dim=0)
    for bright in range(2):
        mine, place = colours[:, bright], places[:, bright]
        assert hits(model.attention_maps(images, -1, "mean"), place) < 0.6  # it shows both
        assert hits(model.attention_maps(images, -1, "gradient_rollout", mine), place) > 0.85
        assert hits(model.attention_maps(images, -1, "grad_cam", mine), place) > 0.6


def slow_distances(model, images):
    """(layers, A) in pixels by loops, in float64."""
    twin, R, columns = copy.deepcopy(model).double(), model.config.num_prefix_tokens, images.shape[3] // 4
    twin.set_attn_implementation("eager")
    attentions = twin(images.double(), output_attentions=True, interpolate_pos_encoding=True).attentions
    found = torch.zeros(len(attentions), attentions[0].shape[1]).double()
    for layer, weights in enumerate(attentions):
        for image, head, query in numpy.ndindex(len(images), found.shape[1], weights.shape[2] - R):
            row = weights[image, head, R + query, R:].tolist()
            steps = [numpy.subtract(divmod(query, columns), divmod(key, columns)) for key in range(len(row))]
            mean = numpy.average([4 * numpy.hypot(*step) for step in steps], weights=row)
            found[layer, head] += mean / len(row) / len(images)
    return found


@pytest.mark.parametrize("fields", [{}, dict(position_embedding="rotary", num_register_tokens=2, pooling="map")])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_distances_equal_a_slow_computation(tiny_model, pixels, fields, backend):
    model, images = tiny_model(**fields), pixels(height=12, width=20)
    model.set_attn_implementation(backend)
    expected = slow_distances(model, images).float()
    torch.testing.assert_close(model.attention_distances(images), expected, rtol=1e-5, atol=1e-5)


def test_a_head_that_looks_at_itself_has_distance_0_and_one_that_looks_everywhere_the_mean_of_all(tiny_model, pixels):
    model = tiny_model(use_class_token=False, pooling="mean", **WIDE)
    first, last = model.vit.layers
    with torch.no_grad():
        model.vit.embeddings.patch_embeddings.projection.weight.zero_()
        model.vit.embeddings.position_embeddings.copy_(torch.randn(15, 8).repeat(1, 4))  # all heads see the same
        nn.init.ones_(first.layernorm_before.weight)  # tokens of the same length
        for layer, times in ((first.attention.k_proj, 1), (first.attention.q_proj, 100), (last.attention.q_proj, 0)):
            layer.weight.copy_(times * torch.eye(32))
            layer.bias.zero_()
    distances = model.attention_distances(pixels(height=12, width=20))
    centres = torch.cartesian_prod(torch.arange(3.0), torch.arange(5.0)) * 4
    everywhere = torch.cdist(centres, centres).mean().expand(4)
    torch.testing.assert_close(distances, torch.stack([torch.zeros(4), everywhere]))


# ----------------------------------------------------------------------------------------------------------------------
# The model stays as it was


def state_of(model):
    """Everything of a model that a look at it could change."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    of_module = lambda module: [module.training, vars(module).get("num_merged"), *(list(vars(module)[kind]) for kind in kinds)]  # fmt: skip
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
    with pytest.raises(ValueError, match="wanted \\(batch, 3, height, width\\)"):
        looks()
    assert state_of(model) == state


@pytest.mark.parametrize(("method", "expected"), [("raw", [False, True, False]), ("rollout", [True, True, False])])
def test_only_the_layers_that_are_needed_are_read(tiny_model, pixels, method, expected):
    model, read = tiny_model(num_hidden_layers=3), []
    look = lambda *_: read.extend(bool(layer.attention._forward_pre_hooks) for layer in model.vit.layers)
    model.vit.register_forward_hook(look)
    model.attention_maps(pixels(), 1, method)
    assert read == expected


NO_LAYERS, NO_LABELS = [2, -3, [], [0, 2], "last", 1.0, True], [3, -1, [0, 1, 2], [], [[0], [1]], 0.5, "cat"]
ERRORS = [
    *((dict(layers=layers), "wanted None, a number from -2 to 1, or a list of them") for layers in NO_LAYERS),
    *((dict(method="grad_cam", labels=labels), "one class from 0 to 2, or one for each of 2") for labels in NO_LABELS),
    *((dict(method=method, labels=1), f"{method} knows no class: leave labels out") for method in METHODS[:3]),
    *(
        (dict(method=method, pixel_values=torch.ones(2, 3, 16, 16).byte()), r"torch\.uint8; wanted floats")
        for method in METHODS
    ),
    (dict(method="gradcam"), "method is 'gradcam'; wanted one of raw, mean, rollout, gradient_rollout, grad_cam"),
]


@pytest.mark.parametrize(("asked", "message"), ERRORS)
def test_what_has_no_answer_is_a_clear_error(tiny_model, pixels, asked, message):
    with pytest.raises(ValueError, match=message):
        tiny_model().attention_maps(**{"pixel_values": pixels(), **asked})

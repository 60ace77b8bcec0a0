"""What the model leaves out where nobody sees it, counted: dense products of a layer, tokens of the last one, graphs of a compiled
model. The values stay those of the full computation; nothing is timed here."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

from hf_vit import modeling_hf_vit


MANY = 16  # images; with 17 tokens each, q, k and v are one product
FEW = 2
CHANNELS, MLP = 32, 64  # of the tiny model


@pytest.fixture
def products(monkeypatch):
    """The width of each dense product, in the order they come."""
    widths, linear = [], F.linear

    def counted(hidden_states, weight, bias=None):
        widths.append(len(weight))
        return linear(hidden_states, weight, bias)

    monkeypatch.setattr(F, "linear", counted)
    return widths


@pytest.fixture
def mlp_tokens(monkeypatch):
    """How many tokens of an image each MLP sees. By the class: a hook on the module would be seen."""
    seen, forward = [], modeling_hf_vit.HFViTMLP.forward

    def counted(self, hidden_states):
        seen.append(hidden_states.shape[1])
        return forward(self, hidden_states)

    monkeypatch.setattr(modeling_hf_vit.HFViTMLP, "forward", counted)
    return seen


def taken(products):
    """What has been counted since this was last asked."""
    found = list(products)
    products.clear()
    return found


def gradients(loss, model):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def watch(module, kind="forward_hook"):
    """A list that grows when a hook, which changes nothing, is called."""
    calls = []
    getattr(module, f"register_{kind}")(lambda *_: calls.append(kind))
    return calls


# ----------------------------------------------------------------------------------------------------------------------
# q, k and v in one product


@pytest.mark.parametrize(
    ("fields", "fused", "apart"),
    [
        ({}, [3 * CHANNELS, CHANNELS, MLP, CHANNELS], [CHANNELS] * 4 + [MLP, CHANNELS]),
        (
            dict(gated_mlp=True),
            [3 * CHANNELS, CHANNELS, 2 * MLP, CHANNELS],
            [CHANNELS] * 4 + [MLP, MLP, CHANNELS],
        ),
    ],
    ids=["MLP", "gated MLP"],
)
def test_a_layer_of_many_tokens_is_four_products_and_one_of_few_is_not(
    tiny_model, pixels, products, fields, fused, apart
):
    model = tiny_model(**fields).vit
    model(pixels(MANY))
    assert taken(products) == fused * 2
    model(pixels(FEW))
    assert taken(products) == apart * 2


def test_products_are_laid_together_from_eight_times_as_many_numbers_as_a_weight_has(tiny_model, pixels, products):
    model = tiny_model(use_class_token=False, pooling="mean", num_hidden_layers=1).vit  # 16 tokens of 32 numbers
    for batch, count in ((15, 6), (16, 4)):
        model(pixels(batch))
        assert len(taken(products)) == count


@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict(gated_mlp=True, hidden_act="silu"),
        dict(key_bias=False),
        dict(key_bias=False, gated_mlp=True, norm_first=False, final_norm="none"),
        dict(qkv_bias=False),
        dict(qk_norm=True, position_embedding="rotary", num_register_tokens=2),
    ],
    ids=lambda fields: ", ".join(fields) or "plain",
)
def test_one_product_gives_the_values_and_gradients_of_three(tiny_model, pixels, products, fields):
    model, images = tiny_model(**fields).double().vit, pixels(MANY).double()
    apart = copy.deepcopy(model)
    calls = [watch(layer.attention.q_proj) for layer in apart.layers]
    if "gated_mlp" in fields:
        calls += [watch(layer.mlp.gate_proj) for layer in apart.layers]
    direction = torch.randn(CHANNELS, dtype=torch.double)
    found = []
    for network in (model, apart):
        tokens = network(images).last_hidden_state
        found.append((tokens, len(taken(products)), gradients((tokens @ direction).square().mean(), network)))
    assert found[0][1] == 2 * 4
    assert found[1][1] == 2 * (7 if "gated_mlp" in fields else 6)
    assert [len(one) for one in calls] == [1] * len(calls)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[0][2], found[1][2], rtol=1e-8, atol=1e-10)


def test_one_product_under_autocast_is_as_near_as_three(tiny_model, pixels, products):
    model, images = tiny_model().vit, pixels(MANY)
    exact = model(images).last_hidden_state
    watched = copy.deepcopy(model)
    for layer in watched.layers:
        watch(layer.attention.v_proj)
    taken(products)
    with torch.autocast("cpu", torch.bfloat16):
        together, count = model(images).last_hidden_state, len(taken(products))
        torch.testing.assert_close(together, watched(images).last_hidden_state, rtol=0, atol=0.1)
    assert (count, len(taken(products))) == (2 * 4, 2 * 6)
    torch.testing.assert_close(together.float(), exact, rtol=0, atol=0.1)


def replace_forward(attention, name):
    layer = getattr(attention, name)
    layer.forward = lambda hidden_states: 2 * F.linear(hidden_states, layer.weight, layer.bias)


def wrap(attention, name):
    class Doubled(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, hidden_states):
            return 2 * self.layer(hidden_states)

    setattr(attention, name, Doubled(getattr(attention, name)))


def derive(attention, name):
    class Doubled(nn.Linear):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    getattr(attention, name).__class__ = Doubled


def parametrized(attention, name):
    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    parametrize.register_parametrization(getattr(attention, name), "weight", Twice())


CHANGES = {
    "hook": lambda attention, name: getattr(attention, name).register_forward_hook(lambda _, __, output: 2 * output),
    "pre-hook": lambda attention, name: getattr(attention, name).register_forward_pre_hook(
        lambda _, inputs: (2 * inputs[0],)
    ),
    "forward of the instance": replace_forward,
    "wrapped": wrap,
    "subclass": derive,
    "parametrized": parametrized,
    "pruned": lambda attention, name: prune.l1_unstructured(getattr(attention, name), "weight", 0.5),
}


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_projection_that_somebody_changed_is_called(tiny_model, pixels, products, change, name):
    model, images = tiny_model(), pixels(MANY)
    before = model(images).logits
    change(model.vit.layers[0].attention, name)
    one_by_one = torch.cat([model(image.unsqueeze(0)).logits for image in images])  # few tokens: separate products
    assert not torch.allclose(one_by_one, before, atol=1e-3)
    taken(products)
    torch.testing.assert_close(model(images).logits, one_by_one, rtol=1e-4, atol=1e-5)
    assert len(taken(products)) == 6 + 5 + 1  # the other layer's k and v, and the head


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_every_kind_of_hook_on_a_projection_is_called(tiny_model, pixels, kind):
    model = tiny_model()
    calls = [
        watch(getattr(layer.attention, f"{one}_proj"), kind) for layer, one in zip(model.vit.layers, "qv", strict=True)
    ]
    model(pixels(MANY), labels=torch.arange(MANY) % 3).loss.backward()
    assert calls == [[kind]] * 2


def test_a_pruned_projection_is_one_product_with_the_others_once_pruning_is_over(tiny_model, pixels, products):
    model, images = tiny_model().vit, pixels(MANY)
    pruned = [getattr(layer.attention, f"{one}_proj") for layer in model.layers for one in "qk"]
    for layer in pruned:
        prune.l1_unstructured(layer, "weight", 0.5)
    with_masks = model(images).last_hidden_state
    assert len(taken(products)) == 2 * 6
    with_masks.square().mean().backward()
    assert all(layer.weight_orig.grad.any() for layer in pruned)
    for layer in pruned:
        prune.remove(layer, "weight")
    torch.testing.assert_close(model(images).last_hidden_state, with_masks, rtol=1e-4, atol=1e-5)
    assert len(taken(products)) == 2 * 4


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_low_rank_updates_act_and_learn_also_where_tokens_are_many(tiny_model, pixels, products):
    from peft import LoraConfig, get_peft_model

    model, images = tiny_model(), pixels(MANY)
    before = model(images).logits
    updates = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    lora = get_peft_model(model, updates).eval()
    outputs = lora(pixel_values=images, labels=torch.arange(MANY) % 3)
    assert not torch.allclose(outputs.logits, before, atol=1e-3)
    outputs.loss.backward()
    found = {name: parameter.grad for name, parameter in lora.named_parameters() if "lora_" in name}
    assert len(found) == 2 * 2 * 2
    assert all(gradient is not None and gradient.any() for gradient in found.values())
    merged = lora.merge_and_unload()
    taken(products)
    torch.testing.assert_close(merged(images).logits, outputs.logits, rtol=1e-4, atol=1e-5)
    assert len(taken(products)) == 4 + 5 + 1


def test_an_exported_model_keeps_its_weights_apart(tiny_model, pixels):
    """ONNX wants them to be constants."""
    exported = torch.export.export(tiny_model(), (), {"pixel_values": pixels(MANY)})
    products = [node for node in exported.graph.nodes if node.target is torch.ops.aten.linear.default]
    assert len(products) == 2 * 6 + 1


# ----------------------------------------------------------------------------------------------------------------------
# The last layer of the pooled tokens alone


TWO = dict(pooling="cls_distillation", use_distillation_token=True)
POOLED = [
    {},
    dict(num_register_tokens=3),
    dict(norm_first=False, final_norm="none"),
    dict(norm_first=False, final_norm="pooled", layerscale_value=0.5),
    dict(position_embedding="rotary", num_register_tokens=2, qk_norm=True),
    dict(num_hidden_layers=1, position_embedding="sincos2d"),
    dict(use_distillation_token=True, final_norm="pooled", representation_size=8),
    TWO,
    dict(TWO, norm_first=False, final_norm="none", position_embedding="rotary"),
    dict(TWO, num_register_tokens=2, key_bias=False),
]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("batch", [FEW, MANY])
@pytest.mark.parametrize("fields", POOLED, ids=lambda fields: ", ".join(map(str, fields.values())) or "plain")
def test_the_last_layer_of_the_pooled_tokens_alone_gives_the_same_logits_and_gradients(
    tiny_model, pixels, mlp_tokens, fields, batch, checkpointed
):
    model, images = tiny_model(**fields).double(), pixels(batch).double()
    full, seen = copy.deepcopy(model), []
    full.vit.layers[-1].register_forward_hook(lambda _, __, output: seen.append(output.shape[1]))
    T, layers = model.config.num_prefix_tokens + 16, model.config.num_hidden_layers
    found = []
    for network in (model, full):
        if checkpointed:
            network.train().activation_checkpointing_enable()  # these models have no dropout
        outputs = network(images, labels=torch.arange(batch) % 3)
        found.append((outputs.logits, taken(mlp_tokens), gradients(outputs.loss, network)))
        taken(mlp_tokens)
    assert found[0][1] == [T] * (layers - 1) + [2 if fields.get("pooling") else 1]
    assert found[1][1] == [T] * layers
    assert set(seen) == {T}
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[0][2], found[1][2], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_the_last_layer_of_the_class_token_alone_is_the_same_under_every_backend(
    tiny_model, pixels, mlp_tokens, backend
):
    model, images = tiny_model(attn_implementation=backend), pixels(MANY)
    logits = model(images).logits
    assert taken(mlp_tokens) == [17, 1]
    watch(model.vit.layers[-1])
    torch.testing.assert_close(model(images).logits, logits, rtol=1e-4, atol=1e-5)
    assert taken(mlp_tokens) == [17, 17]


@pytest.mark.parametrize(
    "where", ["vit", "vit.layernorm", "vit.layers.1", "vit.layers.1.mlp", "vit.layers.1.attention.o_proj"]
)
def test_whoever_looks_at_the_last_layer_or_behind_it_sees_all_tokens(tiny_model, pixels, mlp_tokens, where):
    model, images, seen = tiny_model(), pixels(), []
    handle = model.get_submodule(where).register_forward_hook(
        lambda _, __, output: seen.append((output if torch.is_tensor(output) else output.last_hidden_state).shape[1])
    )
    model(images)
    assert (seen, taken(mlp_tokens)) == ([17], [17, 17])
    handle.remove()
    model(images)
    assert taken(mlp_tokens) == [17, 1]


def test_who_looks_at_an_earlier_layer_or_the_head_keeps_nobody_from_it(tiny_model, pixels, mlp_tokens):
    model = tiny_model()
    calls = [watch(model.vit.layers[0]), watch(model.classifier), watch(model.vit.embeddings)]
    model(pixels())
    assert (calls, taken(mlp_tokens)) == ([["forward_hook"]] * 3, [17, 1])


@pytest.mark.parametrize("fields", [{}, TWO])
@pytest.mark.parametrize("by_config", [False, True])
def test_hidden_states_and_attentions_are_of_all_tokens(tiny_model, pixels, fields, by_config):
    asked = dict(output_hidden_states=True, output_attentions=True)
    model, images = tiny_model(**fields, **(asked if by_config else {})), pixels()
    logits, T = model(images, **dict.fromkeys(asked, False)).logits, model.config.num_prefix_tokens + 16
    outputs = model(images, **({} if by_config else asked))
    assert [state.shape for state in outputs.hidden_states] == [(FEW, T, CHANNELS)] * 3
    assert [weights.shape for weights in outputs.attentions] == [(FEW, 4, T, T)] * 2
    torch.testing.assert_close(outputs.logits, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [dict(pooling="mean"), dict(pooling="cls_mean"), dict(pooling="map"), dict(pooling="mean", use_class_token=False)],
)
def test_pooling_that_reads_patches_computes_all_of_them(tiny_model, pixels, mlp_tokens, fields):
    model = tiny_model(**fields)
    model(pixels())
    T = model.config.num_prefix_tokens + 16
    assert taken(mlp_tokens)[:2] == [T, T]  # the pooling by attention has an MLP of its own


@pytest.mark.parametrize("fields", [*POOLED[:3], TWO])
def test_the_base_model_gives_all_tokens_unless_the_pooled_ones_alone_are_asked_for(tiny_model, pixels, fields):
    model, images = tiny_model(**fields).vit, pixels()
    whole, pooled = model(images), model(images, pooled_only=True)
    count = 2 if fields is TWO else 1
    assert whole.last_hidden_state.shape == (FEW, model.config.num_prefix_tokens + 16, CHANNELS)
    assert pooled.last_hidden_state.shape == (FEW, count, CHANNELS)
    torch.testing.assert_close(pooled.last_hidden_state, whole.last_hidden_state[:, :count], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pooled.pooler_output, whole.pooler_output, rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# Compiled


@pytest.mark.parametrize(
    ("fields", "last"),
    [
        ({}, 5),
        (dict(pooling="mean"), 4),
        (dict(position_embedding="rotary", num_register_tokens=2, drop_path_rate=0.3), 5),
    ],
)
def test_a_training_step_is_one_graph_of_few_products_and_another_batch_reuses_it(tiny_model, pixels, fields, last):
    torch.compiler.reset()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = tiny_model(**fields).train()
    compiled = torch.compile(model, fullgraph=True, backend=keep)
    for shift in range(3):
        labels = (torch.arange(MANY) + shift) % 3
        model.zero_grad()
        compiled(pixels(MANY), labels=labels).loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert len(graphs) == 1
    products = [node for node in graphs[0].graph.nodes if node.target is F.linear]
    assert len(products) == 4 + last + 1


def test_a_compiled_training_step_gives_the_gradients_of_an_eager_one(tiny_model, pixels):
    torch.compiler.reset()
    model, inputs = tiny_model().train(), dict(pixel_values=pixels(MANY), labels=torch.arange(MANY) % 3)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    plain = gradients(model(**inputs).loss, model)
    torch.testing.assert_close(gradients(compiled(**inputs).loss, model), plain, rtol=1e-4, atol=1e-6)

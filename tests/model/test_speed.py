"""What the model leaves out where nobody sees it, counted: tokens of the last layer, graphs of a compiled model.

The values stay those of the full computation; nothing is timed here.
"""

import copy

import pytest
import torch
from test_architectures import gradients

from hf_vit.model import modeling_hf_vit


@pytest.fixture
def mlp_tokens(monkeypatch):
    """How many tokens of an image each MLP sees. By the class: a hook on the module would be seen."""
    seen, forward = [], modeling_hf_vit.HFViTMLP.forward

    def counted(self, hidden_states):
        seen.append(hidden_states.shape[1])
        return forward(self, hidden_states)

    monkeypatch.setattr(modeling_hf_vit.HFViTMLP, "forward", counted)
    return seen


def taken(counts):
    """What has been counted since this was last asked."""
    found = list(counts)
    counts.clear()
    return found


# ----------------------------------------------------------------------------------------------------------------------
# The last layer of the pooled tokens alone


TWO = dict(pooling="cls_distillation", use_distillation_token=True)
POOLED = [
    {},
    dict(norm_first=False, final_norm="none"),
    dict(norm_first=False, final_norm="pooled", layerscale_value=0.5),
    dict(position_embedding="rotary", num_register_tokens=2, qk_norm=True),
    dict(num_hidden_layers=1, position_embedding="sincos2d"),
    dict(use_distillation_token=True, final_norm="pooled", representation_size=8),
    TWO,
    dict(TWO, norm_first=False, final_norm="none", position_embedding="rotary", num_register_tokens=2),
]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("batch", [2, 16])
@pytest.mark.parametrize("fields", POOLED, ids=str)
def test_the_last_layer_of_the_pooled_tokens_alone_gives_the_same_logits_and_gradients(
    tiny_model, pixels, mlp_tokens, fields, batch, checkpointed
):
    model, inputs = (
        tiny_model(**fields).double(),
        dict(pixel_values=pixels(batch).double(), labels=torch.arange(batch) % 3),
    )
    full = copy.deepcopy(model)
    full.vit.layers[-1].register_forward_hook(lambda *_: None)  # so that it computes all tokens
    T, layers = model.config.num_prefix_tokens + 16, model.config.num_hidden_layers
    for network, last in ((model, 2 if fields.get("pooling") else 1), (full, T)):
        network(**inputs)
        assert taken(mlp_tokens) == [T] * (layers - 1) + [last]
        if checkpointed:
            network.train().activation_checkpointing_enable()  # these models have no dropout
    torch.testing.assert_close(model(**inputs).logits, full(**inputs).logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients(model, **inputs), gradients(full, **inputs), rtol=1e-8, atol=1e-10)


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


@pytest.mark.parametrize("by_config", [False, True])
def test_hidden_states_and_attentions_are_of_all_tokens(tiny_model, pixels, by_config):
    asked = dict(output_hidden_states=True, output_attentions=True)
    outputs = tiny_model(**asked)(pixels()) if by_config else tiny_model()(pixels(), **asked)
    assert [state.shape for state in outputs.hidden_states] == [(2, 17, 32)] * 3
    assert [weights.shape for weights in outputs.attentions] == [(2, 4, 17, 17)] * 2


# ----------------------------------------------------------------------------------------------------------------------
# Compiled


@pytest.mark.parametrize(
    "fields",
    [{}, dict(pooling="mean", position_embedding="rotary", num_register_tokens=2, drop_path_rate=0.3)],
    ids=str,
)
def test_a_training_step_is_one_graph_and_another_batch_reuses_it(tiny_model, pixels, fields):
    torch.compiler.reset()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = tiny_model(**fields).train()
    compiled = torch.compile(model, fullgraph=True, backend=keep)
    for shift in range(3):
        compiled(pixels(16), labels=(torch.arange(16) + shift) % 3).loss.backward()
    assert len(graphs) == 1

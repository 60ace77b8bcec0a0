"""Token merging in evaluation: what is merged into what, and that the rest of the model takes it into account."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_architectures import ARCHITECTURES

from hf_vit import HFViTBackbone, HFViTForPreTraining


def slow_merge(tokens, sizes, key, num_prefix, r):
    """One image by loops: tokens (T, D), sizes a list of T numbers, key (A, T, K) -> T - r tokens and sizes."""
    likes = [key[:, token].mean(dim=0) for token in range(len(tokens))]
    best = {}  # of each patch of the first set: how like its partner of the second set it is, and who that is
    for source in range(num_prefix, len(tokens), 2):
        for partner in range(num_prefix + 1, len(tokens), 2):
            a, b = likes[source], likes[partner]
            cosine = (a @ b / (a.norm() * b.norm())).item()
            if source not in best or cosine > best[source][0]:
                best[source] = (cosine, partner)
    groups = {token: [token] for token in range(len(tokens))}
    for source in sorted(best, key=lambda source: -best[source][0])[:r]:
        groups[best[source][1]] += groups.pop(source)
    totals = [sum(sizes[member] for member in groups[token]) for token in sorted(groups)]
    means = [
        sum(sizes[member] * tokens[member] for member in groups[token]) / total
        for token, total in zip(sorted(groups), totals, strict=True)
    ]
    return torch.stack(means), totals


def slow_attention(attention, tokens, sizes):
    """Tokens (T, D) of one image -> what each attends to (T, D), every token taken as often as its size says, and the keys."""
    split = lambda layer: layer(tokens).unflatten(1, (-1, attention.head_dim)).transpose(0, 1)  # (A, T, K)
    query, key, value = split(attention.q_proj), split(attention.k_proj), split(attention.v_proj)
    query, key = attention.q_norm(query), attention.k_norm(key)
    members = torch.repeat_interleave(torch.arange(len(tokens)), torch.tensor(sizes))
    weights = (query @ key[:, members].transpose(1, 2) / attention.head_dim**0.5).softmax(dim=2)
    return attention.o_proj((weights @ value[:, members]).transpose(0, 1).flatten(1)), key


def slow_logits(model, image, counts):
    """Logits (L,) of one image (C, H, W), tokens of size s written out as s tokens wherever something looks at them."""
    vit, num_prefix = model.vit, model.config.num_prefix_tokens
    tokens = vit.embeddings(image.unsqueeze(0))[0]
    sizes = [1] * len(tokens)
    for layer, r in zip(vit.layers, counts, strict=True):
        r = min(r, (len(tokens) - num_prefix) // 2)
        if model.config.norm_first:
            attended, key = slow_attention(layer.attention, layer.layernorm_before(tokens), sizes)
            tokens, sizes = slow_merge(tokens + layer.layer_scale1(attended), sizes, key, num_prefix, r)
            tokens = tokens + layer.layer_scale2(layer.mlp(layer.layernorm_after(tokens)))
        else:
            attended, key = slow_attention(layer.attention, tokens, sizes)
            tokens, sizes = slow_merge(layer.layernorm_before(tokens + attended), sizes, key, num_prefix, r)
            tokens = layer.layernorm_after(tokens + layer.mlp(tokens))
    tokens = tokens[torch.repeat_interleave(torch.arange(len(tokens)), torch.tensor(sizes))]
    tokens = vit.layernorm(tokens) if model.config.final_norm == "tokens" else tokens
    return model.classifier(vit.pool(tokens.unsqueeze(0)))[0]


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("r", [3, [5, 2], [0, 4], 100])
@pytest.mark.parametrize("fields", ARCHITECTURES)
def test_logits_equal_a_slow_computation(tiny_model, pixels, fields, r, backend):
    model, images = tiny_model(num_labels=5, **fields), pixels(batch=3)
    model.set_attn_implementation(backend)
    model.set_token_merging(r)
    with torch.no_grad():
        expected = torch.stack([slow_logits(model, image, r if isinstance(r, list) else [r] * 2) for image in images])
        torch.testing.assert_close(model(images).logits, expected, rtol=1e-5, atol=1e-5)


def test_zero_gives_the_logits_of_a_model_that_never_merged_bit_for_bit(tiny_model, pixels):
    model, images = tiny_model(), pixels()
    before = model(images).logits
    model.set_token_merging(4)
    assert not torch.equal(model(images).logits, before)
    assert torch.equal(model.train()(images).logits, before)  # merging acts in evaluation alone
    model.eval().set_token_merging(0)
    assert torch.equal(model(images).logits, before)


@pytest.mark.parametrize(("r", "lengths"), [([0, 3, 1], [17, 14, 13]), (99, [9, 5, 3])])
def test_each_layer_has_r_tokens_fewer_and_in_the_end_every_patch_has_a_token(tiny_model, pixels, r, lengths):
    vit, asked = tiny_model(num_hidden_layers=3).vit, dict(output_hidden_states=True, output_attentions=True)
    vit(pixels(), **asked)  # transformers' hooks are then there first
    vit.set_token_merging(r)
    outputs = vit(pixels(), **asked)
    assert [tokens.shape[1] for tokens in outputs.hidden_states] == [17, *lengths[:-1], 17]
    assert [weights.shape[2] for weights in outputs.attentions] == [17, *lengths[:-1]]
    assert len(outputs.last_hidden_state[0].unique(dim=0)) == lengths[-1]


def test_threads_that_share_a_model_merge_each_their_own_images(tiny_model, pixels):
    model, images = tiny_model(pooling="mean"), [pixels(batch=2), pixels(batch=3)]
    model.set_token_merging(4)
    alone = [model(each).logits for each in images]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda number: model(images[number % 2]).logits, range(100))
    assert all(torch.equal(logits, alone[number % 2]) for number, logits in enumerate(found))


def test_compiled_as_one_graph_equals_eager_and_sees_a_later_change(tiny_model, pixels):
    torch.compiler.reset()
    model, images = tiny_model(pooling="mean", num_register_tokens=2), pixels()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for r in (0, 4, 0):
        model.set_token_merging(r)
        with torch.no_grad():
            torch.testing.assert_close(compiled(images).logits, model(images).logits, rtol=1e-5, atol=1e-5)


def test_a_copy_merges_too_pickled_as_well_and_a_saved_model_does_not(tiny_model, pixels, tmp_path):
    model, images = tiny_model(pooling="mean"), pixels()
    before = model(images).logits
    model.set_token_merging(4)
    merged = model(images).logits
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(one(images).logits, merged)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(type(model).from_pretrained(tmp_path / "saved")(images).logits, before)


@pytest.mark.parametrize("r", [-1, [1], [1, 2, 3], [1, -1]])
def test_what_is_no_number_of_patches_for_each_layer_is_an_error_and_changes_nothing(tiny_model, pixels, r):
    model, images = tiny_model(), pixels()
    model.set_token_merging(3)
    before = model(images).logits
    with pytest.raises(ValueError, match="r must"):
        model.set_token_merging(r)
    assert torch.equal(model(images).logits, before)


def test_models_that_need_the_place_of_each_patch_are_an_error(tiny_model, tiny_config):
    for model in (
        tiny_model(position_embedding="rotary"), HFViTBackbone(tiny_config()), HFViTForPreTraining(tiny_config()),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=type(model).__name__):
            model.set_token_merging(2)

"""The network from pixels to loss, and everything that a transformers model has to be able to do."""

import copy
import json
import math
import subprocess
import sys

import accelerate
import numpy
import pytest
import torch
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForImageClassification,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTModel,
)

from hf_vit import HFViTForImageClassification, HFViTModel
from hf_vit.model.modeling_hf_vit import HFViTDropPath


# ----------------------------------------------------------------------------------------------------------------------
# The package


def test_import_pulls_in_neither_data_nor_training_nor_plotting_and_all_exists():
    code = """
import sys, hf_vit
assert not {"datasets", "accelerate", "matplotlib"} & set(sys.modules)
from hf_vit import *
assert set(hf_vit.__all__) <= set(globals())
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


# ----------------------------------------------------------------------------------------------------------------------
# Attention


def gradients(model, **inputs):
    """The gradient of every parameter by name, with the same dropout at each call."""
    model.zero_grad()
    torch.manual_seed(1)
    model(**inputs).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_sdpa_matches_eager(tiny_model, pixels):
    model, inputs = tiny_model(drop_path_rate=0.3).train(), dict(pixel_values=pixels(), labels=torch.tensor([0, 2]))
    model.set_attn_implementation("eager")
    eager = gradients(model, **inputs)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(gradients(model, **inputs), eager, rtol=1e-4, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Outputs


def test_names_and_hidden_states_are_those_of_the_native_vit(tiny_model, tiny_fields, pixels):
    model, images = tiny_model().vit, pixels()
    native = ViTModel(
        ViTConfig(**tiny_fields, layer_norm_eps=model.config.layer_norm_eps), add_pooling_layer=False
    ).eval()
    native.load_state_dict(model.state_dict(), strict=True)
    ours, theirs = model(images, output_hidden_states=True), native(images, output_hidden_states=True)
    torch.testing.assert_close(ours.hidden_states, theirs.hidden_states)
    torch.testing.assert_close(ours.last_hidden_state, theirs.last_hidden_state)


# ----------------------------------------------------------------------------------------------------------------------
# Tokens and positions


@pytest.mark.parametrize("positions", ["sincos1d", "sincos2d"])
def test_fixed_positions_are_right_when_initial_weights_are_skipped(tiny_model, pixels, tmp_path, positions):
    """A table that `_init_weights` fills would be uninitialised memory."""
    model, images = tiny_model(position_embedding=positions), pixels()
    model.save_pretrained(tmp_path)
    torch.full((2**20,), float("nan"))  # what freed memory may hold
    with torch.device("meta"):
        bare = HFViTForImageClassification(model.config)
    with accelerate.init_empty_weights(include_buffers=True):
        empty = HFViTForImageClassification(model.config)
    bare.to_empty(device="cpu").load_state_dict(model.state_dict())
    dispatched = accelerate.load_checkpoint_and_dispatch(empty, str(tmp_path), device_map={"": "cpu"})
    for loaded in (bare, dispatched):
        assert torch.equal(loaded.eval()(images).logits, model(images).logits)


def test_fixed_positions_are_kept_between_passes_and_no_tracer_leaves_its_own(tiny_model, pixels):
    model = tiny_model(position_embedding="sincos2d", image_size=(8, 24))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(pixels(height=8, width=24))
    once, again = (model.vit.embeddings.positions_on_grid((2, 6))[1] for _ in range(2))
    assert type(once) is torch.Tensor
    assert once.data_ptr() == again.data_ptr()
    assert model.bfloat16().vit.embeddings.positions_on_grid((2, 6))[1].dtype is torch.bfloat16


def test_positions_are_resampled_to_any_grid_as_pillow_resamples_an_image(tiny_model, pixels):
    model, images = tiny_model(num_register_tokens=1), pixels(height=12, width=20)
    positions = model.vit.embeddings.position_embeddings.detach()
    channels = positions[0, 1:].reshape(4, 4, 32).unbind(dim=-1)
    resized = [numpy.asarray(Image.fromarray(channel.numpy()).resize((5, 3), Image.BICUBIC)) for channel in channels]
    patches = torch.from_numpy(numpy.stack(resized, axis=-1)).reshape(1, 15, 32)

    other = tiny_model(num_register_tokens=1, image_size=(12, 20))
    weights = {
        **model.state_dict(),
        "vit.embeddings.position_embeddings": torch.cat([positions[:, :1], patches], dim=1),
    }
    other.load_state_dict(weights)
    torch.testing.assert_close(model(images, interpolate_pos_encoding=True).logits, other(images).logits)


# ----------------------------------------------------------------------------------------------------------------------
# Pooling, drop path, LayerScale, head


def test_drop_path_keeps_the_expectation_and_drops_whole_samples():
    dropped = HFViTDropPath(0.25).train()(torch.ones(20_000, 3, 2))
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert (dropped == dropped[:, :1, :1]).all()
    assert dropped.mean().item() == pytest.approx(1, abs=0.02)


def test_drop_path_does_nothing_in_evaluation():
    states = torch.randn(20, 3, 2)
    assert torch.equal(HFViTDropPath(0.5).eval()(states), states)


def test_drop_path_rises_linearly_from_zero_to_the_rate(tiny_config):
    model = HFViTModel(tiny_config(num_hidden_layers=5, drop_path_rate=0.2))
    rates = [layer.drop_path.probability for layer in model.layers]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])


def test_zero_head_makes_the_first_loss_exactly_log_of_the_labels(tiny_config, pixels):
    outputs = HFViTForImageClassification(tiny_config())(pixels(), labels=torch.tensor([0, 2]))
    assert torch.equal(outputs.logits, torch.zeros(2, 3))
    assert outputs.loss.item() == pytest.approx(math.log(3), rel=1e-7)


# ----------------------------------------------------------------------------------------------------------------------
# Labels and loss


LABELS = {  # num_labels, problem_type, labels of four images
    "class indices": (3, None, torch.tensor([0, 2, 1, 1])),
    "class indices in a column": (3, None, torch.tensor([[0], [2], [1], [1]])),
    "some images without a label": (3, None, torch.tensor([0, -100, 1, -100])),
    "several labels an image": (3, None, torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 1], [0, 0, 0]])),
    "a number an image": (1, None, torch.tensor([0.3, -2.0, 1.0, 5.0])),
    "three numbers an image": (3, "regression", torch.randn(4, 3, generator=torch.Generator().manual_seed(0))),
}


@pytest.mark.parametrize(("num_labels", "problem_type", "labels"), LABELS.values(), ids=LABELS)
def test_the_loss_of_each_kind_of_labels_is_that_of_native_vit(tiny_model, pixels, num_labels, problem_type, labels):
    model, images = tiny_model(num_labels=num_labels, problem_type=problem_type), pixels(batch=4)
    native = model.to_transformers()
    ours, theirs = (network(images, labels=labels).loss for network in (model, native))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(model.classifier.weight.grad, native.classifier.weight.grad)


def test_a_loss_function_that_is_set_is_used_and_gets_the_arguments_of_the_call(tiny_model, pixels):
    model, seen = tiny_model(), {}

    def first_logit(labels, logits, config, **kwargs):
        seen.update(kwargs)
        return logits[labels, 0].sum()

    model.loss_function = first_logit
    outputs = model(pixels(), labels=torch.tensor([0, 1]), num_items_in_batch=7)
    assert torch.equal(outputs.loss, outputs.logits[:, 0].sum())
    assert seen == {"num_items_in_batch": 7}


@pytest.mark.parametrize("first", ["indices", "floats"])
def test_labels_of_two_kinds_mix_in_any_order_and_leave_no_trace(tiny_model, pixels, tmp_path, first):
    model, images = tiny_model(), pixels()
    indices, floats = torch.tensor([0, 2]), torch.tensor([[0.5, 0.5, 0], [0, 0.1, 0.9]])
    before = model(images, labels=indices).loss
    for labels in (floats, indices) if first == "floats" else (indices, floats):
        model(images, labels=labels)
    assert torch.equal(model(images, labels=indices).loss, before)
    model.save_pretrained(tmp_path)
    assert model.config.problem_type is None
    assert json.loads((tmp_path / "config.json").read_text()).get("problem_type") is None


# ----------------------------------------------------------------------------------------------------------------------
# Bad pixels


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 1, 16, 16), torch.float32, r"\(2, 1, 16, 16\); wanted .*3, height, width.*image processor"),
        ((3, 16, 16), torch.float32, r"\(3, 16, 16\); wanted"),
        ((2, 3, 20, 16), torch.float32, r"\(20, 16\) .*\(16, 16\).*interpolate_pos_encoding=True"),
        ((2, 3, 16, 16), torch.uint8, "uint8.* wanted floats"),
    ],
)
def test_pixels_the_model_cannot_read_are_an_error_that_says_what_to_do(tiny_model, shape, dtype, message):
    with pytest.raises(ValueError, match=message):
        tiny_model()(torch.zeros(shape, dtype=dtype))


# ----------------------------------------------------------------------------------------------------------------------
# Training and running it everywhere


@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict(norm_first=False, final_norm="none"),
        dict(position_embedding="rotary", num_register_tokens=1, patch_dropout_rate=0.5),
    ],
)
def test_gradient_checkpointing_recomputes_and_gives_the_same_gradients(tiny_model, pixels, fields):
    model = tiny_model(hidden_dropout_prob=0.1, drop_path_rate=0.3, **fields).train()
    inputs, calls = dict(pixel_values=pixels(), labels=torch.tensor([0, 2])), []
    model.vit.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    plain = gradients(model, **inputs)
    model.activation_checkpointing_enable()
    checkpointed = gradients(model, **inputs)
    assert len(calls) == 1 + 2
    torch.testing.assert_close(checkpointed, plain)


# ----------------------------------------------------------------------------------------------------------------------
# Saving, Auto classes, pipeline


def test_a_base_model_opens_as_a_classifier_with_a_zero_head(tiny_model, pixels, tmp_path, caplog):
    model, images = tiny_model(), pixels()
    model.vit.save_pretrained(tmp_path)
    classifier = HFViTForImageClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(classifier.vit(images).last_hidden_state, model.vit(images).last_hidden_state)
    assert torch.equal(classifier(images).logits, torch.zeros(2, 3))
    assert "classifier reset" in caplog.text


# ----------------------------------------------------------------------------------------------------------------------
# Trainer and PEFT


def one_trainer_step(model, examples, batch_size, accumulate, folder):
    """The logged loss of one optimizer step of transformers' Trainer over the first batch_size * accumulate examples."""
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulate, max_steps=1, logging_steps=1,
        optim="sgd", learning_rate=0.1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=examples)
    trainer.train()
    return trainer.state.log_history[0]["loss"]


@pytest.mark.parametrize("labels", ["hard", "soft"])
def test_trainer_with_batch_2_and_4_accumulation_steps_equals_batch_8(tiny_model, pixels, tmp_path, labels):
    large = tiny_model()
    small, before = copy.deepcopy(large), copy.deepcopy(large.state_dict())
    targets = torch.randint(3, (8,)) if labels == "hard" else torch.rand(8, 3)  # one class, or several labels
    examples = [
        {"pixel_values": image, "labels": target} for image, target in zip(pixels(batch=8), targets, strict=True)
    ]
    loss = one_trainer_step(large, examples, 8, 1, tmp_path)
    assert one_trainer_step(small, examples, 2, 4, tmp_path) == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(small.state_dict(), large.state_dict())
    assert not torch.equal(large.state_dict()["classifier.weight"], before["classifier.weight"])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_lora_adapter_trains_saves_and_loads_both_ways(tiny_model, pixels, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    images, folder, adapter = pixels(), tmp_path / "base", tmp_path / "adapter"
    tiny_model().save_pretrained(folder)
    load = HFViTForImageClassification.from_pretrained
    lora = LoraConfig(
        target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"], r=4, init_lora_weights=False
    )
    model = get_peft_model(load(folder), lora)
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    model(pixel_values=images, labels=torch.tensor([0, 2])).loss.backward()
    optimizer.step()
    model.save_pretrained(adapter)
    trained = model.eval()(pixel_values=images).logits
    assert not torch.allclose(trained, load(folder)(images).logits, atol=1e-2)
    base = load(folder)
    base.load_adapter(str(adapter))
    loaded = [base.eval(), load(adapter), PeftModel.from_pretrained(load(folder), adapter).eval()]
    base.config.save_pretrained(adapter)  # as the recipes leave it
    loaded.append(AutoModelForImageClassification.from_pretrained(adapter))
    for one in loaded:
        torch.testing.assert_close(one(pixel_values=images).logits, trained)
    small = load(adapter, image_size=(8, 12), dtype=torch.float64)
    assert small(pixels(2, 8, 12).double()).logits.shape == (2, 3)


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # of PEFT, about every LayerNorm
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lntuning_trains_the_norms_that_are_called_layernorm(tiny_model, pixels):
    from peft import LNTuningConfig, get_peft_model

    tuned = get_peft_model(tiny_model(), LNTuningConfig(target_modules=["layernorm"]))
    tuned(pixel_values=pixels(), labels=torch.tensor([0, 2])).loss.backward()
    trained = [name for name, parameter in tuned.named_parameters() if parameter.grad is not None]
    assert [".vit.layernorm." in name for name in trained] == [True, True]

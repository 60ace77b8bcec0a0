"""The network from pixels to loss, and everything that a transformers model has to be able to do."""

import copy
import math

import accelerate
import pytest
import torch
from test_architectures import gradients
from transformers import (
    AutoModelForImageClassification,
    Trainer,
    TrainingArguments,
)

import hf_vit
from hf_vit import HFViTForImageClassification, HFViTModel
from hf_vit.model.modeling_hf_vit import HFViTDropPath


# ----------------------------------------------------------------------------------------------------------------------
# The package


def test_every_public_name_is_there():
    assert [name for name in hf_vit.__all__ if not hasattr(hf_vit, name)] == []


# ----------------------------------------------------------------------------------------------------------------------
# Attention


def test_sdpa_matches_eager(tiny_model, pixels):
    model, inputs = tiny_model(drop_path_rate=0.3).train(), dict(pixel_values=pixels(), labels=torch.tensor([0, 2]))
    model.set_attn_implementation("eager")
    eager = gradients(model, **inputs)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(gradients(model, **inputs), eager, rtol=1e-4, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Outputs


# ----------------------------------------------------------------------------------------------------------------------
# Tokens and positions


@pytest.mark.parametrize("positions", ["sincos1d", "sincos2d"])
def test_fixed_positions_are_right_when_initial_weights_are_skipped(tiny_model, pixels, tmp_path, positions):
    """A table that `_init_weights` fills would be uninitialised memory."""
    model, images = tiny_model(position_embedding=positions), pixels()
    model.save_pretrained(tmp_path)
    torch.full((2**20,), float("nan"))  # what freed memory may hold
    with accelerate.init_empty_weights(include_buffers=True):
        empty = HFViTForImageClassification(model.config)
    loaded = accelerate.load_checkpoint_and_dispatch(empty, str(tmp_path), device_map={"": "cpu"})
    assert torch.equal(loaded.eval()(images).logits, model(images).logits)


# ----------------------------------------------------------------------------------------------------------------------
# Pooling, drop path, LayerScale, head


def test_drop_path_keeps_the_expectation_and_drops_whole_samples():
    dropped = HFViTDropPath(0.25).train()(torch.ones(20_000, 3, 2))
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert (dropped == dropped[:, :1, :1]).all()
    assert dropped.mean().item() == pytest.approx(1, abs=0.02)


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


def test_labels_of_two_kinds_mix_in_any_order_and_leave_no_trace(tiny_model, pixels):
    model, images = tiny_model(), pixels()
    kinds = (torch.tensor([0, 2]), torch.tensor([[0.5, 0.5, 0], [0, 0.1, 0.9]])) * 2
    first, second, *again = [model(images, labels=labels).loss for labels in kinds]
    assert again == [first, second]
    assert model.config.problem_type is None


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


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_precision_is_that_of_the_files_or_the_one_asked_for(name, tiny_model, tmp_path):
    tiny_model().bfloat16().save_pretrained(tmp_path)
    for asked, given in (("auto", torch.bfloat16), (torch.float16, torch.float16), ("float32", torch.float32)):
        assert HFViTForImageClassification.from_pretrained(tmp_path, **{name: asked}).dtype == given


# ----------------------------------------------------------------------------------------------------------------------
# Trainer and PEFT


def one_trainer_step(model, examples, batch_size, accumulate, folder):
    """The logged loss of one optimizer step of transformers' Trainer over the first batch_size * accumulate examples; saved."""
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulate, max_steps=1, logging_steps=1,
        optim="sgd", learning_rate=0.1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=examples)
    trainer.train()
    trainer.save_model(folder)
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
    saved = HFViTForImageClassification.from_pretrained(tmp_path).state_dict()
    torch.testing.assert_close(saved, small.state_dict(), rtol=0, atol=0)
    assert not torch.equal(saved["classifier.weight"], before["classifier.weight"])


def test_a_lora_adapter_trains_saves_and_loads_both_ways(tiny_model, pixels, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    images, adapter, load = pixels(), tmp_path / "adapter", HFViTForImageClassification.from_pretrained
    tiny_model().save_pretrained(tmp_path)
    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["classifier"], init_lora_weights=False)
    model = get_peft_model(load(tmp_path), lora)
    model(pixel_values=images, labels=torch.tensor([0, 2])).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(adapter)
    trained = model.eval()(pixel_values=images).logits
    loaded = [load(adapter), PeftModel.from_pretrained(load(tmp_path), adapter).eval()]
    loaded[0].config.save_pretrained(adapter)  # as the recipes leave it
    loaded.append(AutoModelForImageClassification.from_pretrained(adapter))
    for one in loaded:
        torch.testing.assert_close(one(pixel_values=images).logits, trained)
    small = load(adapter, image_size=(8, 12), dtype=torch.float64)
    assert small(pixels(2, 8, 12).double()).logits.shape == (2, 3)


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # of PEFT, about every LayerNorm
def test_lntuning_trains_the_norms_that_are_called_layernorm(tiny_model, pixels):
    from peft import LNTuningConfig, get_peft_model

    tuned = get_peft_model(tiny_model(), LNTuningConfig(target_modules=["layernorm"]))
    tuned(pixel_values=pixels(), labels=torch.tensor([0, 2])).loss.backward()
    trained = [name for name, parameter in tuned.named_parameters() if parameter.grad is not None]
    assert [".vit.layernorm." in name for name in trained] == [True, True]

"""Claims about the model of a run: its head, precision, what is frozen, low-rank updates, and the images that fit into memory."""

import json
import math
import os
import re

import pytest
import runs
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from hf_vit import HFViTForImageClassification
from hf_vit.data.image_spec import ImageSpec
from hf_vit.evaluation.classifiers import load_classifier
from hf_vit.system import hardware
from hf_vit.system.errors import UserError
from hf_vit.training import loop
from hf_vit.training.classification import Classification
from hf_vit.training.model import add_lora, build_model, find_batch_size, freeze, save_model
from hf_vit.training.optimizers import is_finite


NAMES = ["eel", "cat", "dog"]


def renamed(folder, id2label):
    """The folder of a model, its labels having these names."""
    config = json.loads((folder / "config.json").read_text()) | {"id2label": id2label}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("labels", "stored", "kept"),
    [
        (NAMES, {"0": "eel", "1": "cat", "2": "dog"}, True),
        (NAMES, {"2": "dog", "0": "eel", "1": "cat"}, True),  # the ids count, and not their order in the file
        (NAMES, {"1": "eel", "0": "cat", "2": "dog"}, False),
        ([*NAMES, "owl"], {"0": "eel", "1": "cat", "2": "dog"}, False),
    ],
)
def test_a_checkpoints_head_is_kept_only_for_the_same_labels(saved, labels, stored, kept):
    folder = saved()
    config = json.loads((folder / "config.json").read_text()) | {"id2label": stored}
    (folder / "config.json").write_text(json.dumps(config))
    model, _ = build_model(labels, str(folder), None, {})
    head = load_file(folder / "model.safetensors")["classifier.weight"]
    assert torch.equal(model.classifier.weight, head) if kept else not model.classifier.weight.any()
    assert list(model.config.id2label.values()) == labels


def test_a_model_from_scratch_has_the_datas_labels_and_a_fitting_processor():
    small = {"num_channels": 1, "hidden_size": 12, "num_hidden_layers": 1}
    model, processor = build_model(["a", "b", "c"], None, "tiny-patch16-224", {**small, "image_size": 32})
    assert model.config.label2id == {"a": 0, "b": 1, "c": 2}
    assert dict(processor.size) == {"height": 32, "width": 32}
    assert len(processor.image_mean) == 1


def test_a_checkpoint_of_half_precision_is_trained_in_float32(saved):
    model, _ = build_model(NAMES, str(saved(torch.bfloat16)), None, {})
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("flags", "still", "in_eval_mode"),
    [
        ((False, 0), "", 0),
        ((False, 1), "layers.1|vit.layernorm|classifier", 1),
        ((False, 2), "vit.layernorm|classifier", 2),
        ((True, 0), "classifier", 2),
    ],
)
def test_what_is_frozen_has_no_gradient_and_drops_nothing(tiny_config, flags, still, in_eval_mode):
    model = HFViTForImageClassification(tiny_config(num_register_tokens=2, drop_path_rate=0.5))
    nn.init.normal_(model.classifier.weight)
    modules = freeze(model, *flags)
    model.train()(torch.randn(2, 3, 16, 16), labels=torch.tensor([0, 1])).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == bool(re.search(still, name)), name
    for module in modules:
        module.eval()
        assert not any(parameter.requires_grad for parameter in module.parameters())
    assert [not layer.training for layer in model.vit.layers] == [index < in_eval_mode for index in (0, 1)]


def test_more_frozen_layers_than_there_are_is_an_error(tiny_model):
    with pytest.raises(ValueError, match="--freeze_layers 3"):
        freeze(tiny_model(), backbone=False, layers=3)


def test_low_rank_updates_of_every_dense_layer_and_the_head_are_trained(tiny_model, pixels):
    model, images = tiny_model(pooling="map", gated_mlp=True), pixels()
    before = model(images).logits
    dense = [name for name, module in model.vit.layers.named_modules() if isinstance(module, nn.Linear)]
    lora = add_lora(model, 2).eval()
    trained = [
        name for name, parameter in lora.named_parameters() if parameter.requires_grad and "classifier" not in name
    ]
    assert sorted(trained) == sorted(
        f"base_model.model.vit.layers.{name}.lora_{part}.default.weight" for name in dense for part in "AB"
    )
    assert lora.base_model.model.classifier.modules_to_save["default"].weight.requires_grad
    assert {module.scaling["default"] for module in lora.modules() if hasattr(module, "lora_A")} == {16 / 2}
    torch.testing.assert_close(lora(images).logits, before)  # new ones change nothing yet


@pytest.mark.parametrize("lora_save", ["merged", "adapter"])
@pytest.mark.parametrize("base", ["ours", "native", "in bfloat16"])
def test_a_saved_lora_run_loads_with_its_logits_labels_and_size(
    base, lora_save, saved, tiny_fields, randomize, tmp_path
):
    """Its base has other labels, smaller images, and perhaps half the precision."""
    folder = saved(torch.bfloat16 if base == "in bfloat16" else torch.float32)
    if base == "native":
        randomize(ViTForImageClassification(ViTConfig(**tiny_fields))).save_pretrained(folder)
    model, _ = build_model(["a", "b", "c"], str(folder), None, {"image_size": 24})
    lora, pixels = add_lora(model, 2).eval(), torch.randn(2, 3, 24, 24)
    for parameter in lora.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, 0, 0.1)
    wanted = lora(pixels).logits
    save_model(lora, tmp_path / "model", lora_save)
    files = {"model.safetensors", "adapter_config.json"} & {*os.listdir(tmp_path / "model")}
    assert files == {"model.safetensors" if lora_save == "merged" else "adapter_config.json"}
    loaded = load_classifier(str(tmp_path / "model"), dtype=torch.float32)
    torch.testing.assert_close(loaded(pixels).logits, wanted, rtol=1e-4, atol=1e-4)
    assert loaded.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert loaded.config.image_size == 24
    torch.testing.assert_close(lora(pixels).logits, wanted)  # the run goes on


# ----------------------------------------------------------------------------------------------------------------------
# In a run


@pytest.mark.parametrize("lora_rank", [0, 8])
@pytest.mark.parametrize("is_new", [True, False])
def test_only_a_new_head_is_fitted_first_and_nothing_else_is(photos, tmp_path, saved, lora_rank, is_new, capsys):
    base, run = renamed(saved(), dict(enumerate("xyz" if is_new else ("blue", "green", "red")))), tmp_path / "run"
    flags = dict(model_name_or_path=str(base), lora_rank=lora_rank, learning_rate=1e-12, ema_decay=0.0)
    flags |= dict(max_train_steps=2, checkpointing_steps=1)
    runs.train(photos, run, **flags)
    assert ("fitting the head" in capsys.readouterr().out) == is_new
    weights, found = load_file(base / "model.safetensors"), load_classifier(str(run / "model")).state_dict()
    assert found["classifier.weight"].any()
    for name in weights.keys() - {"classifier.weight", "classifier.bias"}:
        torch.testing.assert_close(found[name], weights[name], rtol=0, atol=1e-6)
    runs.train(photos, runs.cut_back(run, 1), **flags)  # which goes on from its first step
    assert "fitting the head" not in capsys.readouterr().out


class Changed(Classification):
    """Its saved model is another than the one that was evaluated."""

    def artifacts(self, model, evaluation):
        kept = super().artifacts(model, evaluation)
        with torch.no_grad():
            model.classifier.bias[0] += 0.01
        return kept


def test_a_run_warns_if_its_saved_model_does_not_give_the_logits_that_were_evaluated(photos, tmp_path):
    results = runs.train(photos, tmp_path, Changed, max_train_steps=2)
    assert results.saved_logits_apart > 1e-3
    assert "saved model" in results.warnings[-1]


class Spoiled(Classification):
    """The loss is finite and its gradient is not."""

    def loss(self, model, batch):
        loss, outputs = super().loss(model, batch)
        return loss + (0 * outputs.sum()).square().sqrt(), outputs  # whose gradient is 0 / 0


def test_gradients_that_stay_nan_in_fp16_are_no_matter_of_scale_and_stop_the_run(photos, tmp_path, monkeypatch):
    init = Accelerator.__init__

    def with_scaler(self, *args, **how):
        init(self, *args, **how)
        self.scaler, self.native_amp = torch.amp.GradScaler("cpu", init_scale=8.0), True  # 8, 4, 2 to come down from

    monkeypatch.setattr(Accelerator, "__init__", with_scaler)
    monkeypatch.setattr(hardware, "pick_precision", lambda *_: "fp16")  # also on a CPU
    monkeypatch.setattr(loop, "MOST_SKIPPED", 1)
    with pytest.raises(UserError, match="steps 4, 5,"):
        runs.train(photos, tmp_path, Spoiled, max_train_steps=6)


def test_an_overflow_in_fp16_is_excused_only_while_the_loss_is_scaled_up():
    for loss, norm, scale, wanted in (
        (1.0, 1.0, 1.0, True), (1.0, math.inf, 2.0, True), (1.0, math.nan, 1.0, False), (1.0, math.inf, 0.5, False),
        (math.nan, 1.0, 65536.0, False),
    ):  # fmt: skip
        assert bool(is_finite(torch.tensor(loss), torch.tensor(norm), scale)) is wanted


# ----------------------------------------------------------------------------------------------------------------------
# What fits into memory

SPEC = ImageSpec(16, 16, 3, 2, (0.5, 0.45, 0.4), (0.25, 0.2, 0.3))
OUT_OF_MEMORY = [
    "CUDA out of memory. Tried to allocate 2.00 GiB.",
    "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.",
]


class Short(torch.autograd.Function):
    """Memory ends in the backward pass of more than `most` images."""

    @staticmethod
    def forward(ctx, values, most, error):
        ctx.most, ctx.error = most, error
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        if len(gradient) > ctx.most:
            raise ctx.error
        return gradient, None, None


@pytest.mark.parametrize(
    ("batch", "most", "tried"),
    [(8, 8, [8]), (8, 1, [8, 4, 2, 1]), (12, 5, [12, 6, 4]), (7, 6, [7, 1])],
)
def test_the_batch_size_found_is_the_first_divisor_that_fits(tiny_model, batch, most, tried):
    model, asked = tiny_model(), []

    def loss(pixel_values):
        asked.append(len(pixel_values))
        error = RuntimeError(OUT_OF_MEMORY[len(asked) % 2])
        return Short.apply(model(pixel_values).logits, most, error).sum()

    assert find_batch_size(model, loss, SPEC, batch, torch.device("cpu")) == tried[-1]
    assert asked == tried
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), ValueError(OUT_OF_MEMORY[0])])
def test_an_error_that_is_not_about_memory_is_raised_at_once(tiny_model, error):
    model = tiny_model()
    loss = lambda pixel_values: Short.apply(model(pixel_values).logits, 1, error).sum()
    with pytest.raises(type(error)):
        find_batch_size(model, loss, SPEC, 4, torch.device("cpu"))

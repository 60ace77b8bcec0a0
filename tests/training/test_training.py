"""Claims about parameter groups, schedule, losses, teachers, freezing, adapters, batch sizes, averages, scores and the building of
a model."""

import importlib.util
import json
import math
import os
import platform
import re
import subprocess
import sys
from types import SimpleNamespace

import forked
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from image_data import picture
from PIL import Image
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DeiTForImageClassification,
    Dinov2ForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
    ViTModel,
)

from hf_vit import HFViTConfig, HFViTForImageClassification
from hf_vit.data.augment import mix
from hf_vit.data.image_spec import ImageSpec
from hf_vit.data.normalization import normalize
from hf_vit.evaluation import classifiers
from hf_vit.evaluation.classifiers import load_classifier, load_processor, model_folder
from hf_vit.evaluation.prediction import classification_head, predict
from hf_vit.evaluation.probes import few_shot_accuracy, knn_accuracy, probe
from hf_vit.evaluation.scores import classification_report, compute_metrics
from hf_vit.system import hardware
from hf_vit.training import setup
from hf_vit.training.arguments import TrainArguments, parse_args
from hf_vit.training.classification import Classification
from hf_vit.training.ema import ModelEMA
from hf_vit.training.inputs import resize
from hf_vit.training.losses import (
    Teacher,
    choose_loss,
    classification_loss,
    count_correct,
    distillation_loss,
    multi_label_loss,
    soft_targets,
)
from hf_vit.training.model import add_lora, build_model, check_first_image_size, find_batch_size, freeze, save_model
from hf_vit.training.optimizers import build_optimizers, learning_rate, parameter_groups, split_decay
from hf_vit.training.run import build_run, predict_images
from hf_vit.training.setup import known_trackers, set_up_accelerator


@pytest.fixture
def model(tiny_config):
    return HFViTForImageClassification(tiny_config(layerscale_value=0.1, num_register_tokens=2))


def test_only_matrices_decay(model):
    decayed, undecayed = split_decay(model)
    assert sorted(decayed + undecayed) == sorted(name for name, _ in model.named_parameters())
    kinds = {name.rpartition("layers.")[2].partition(".")[2] if "layers." in name else name for name in decayed}
    assert kinds == {
        "vit.embeddings.patch_embeddings.projection.weight",
        *(f"attention.{part}_proj.weight" for part in "qkvo"),
        "mlp.fc1.weight",
        "mlp.fc2.weight",
        "classifier.weight",
    }
    for name in ("cls_token", "register_tokens", "position_embeddings"):
        assert f"vit.embeddings.{name}" in undecayed
    assert {"vit.layers.0.layer_scale1.lambda1", "vit.layernorm.weight", "classifier.bias"} <= set(undecayed)


def test_frozen_parameters_are_in_no_group(model):
    model.vit.requires_grad_(False)
    assert [len(group["params"]) for group in parameter_groups(model, 0.1)] == [1, 1]


def test_muon_takes_the_matrices_of_the_layers_and_adamw_all_else(model):
    (whole,) = build_optimizers(model, "adamw", 1e-3, 0.1, (0.9, 0.95))
    adamw, muon = build_optimizers(model, "muon", 1e-3, 0.1, (0.9, 0.95))
    of = lambda optimizer: {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert of(whole) == set(names)
    assert of(adamw) | of(muon) == set(names)
    assert not of(adamw) & of(muon)
    assert {names[i].split(".", 3)[3] for i in of(muon)} == {
        *(f"attention.{part}_proj.weight" for part in "qkvo"),
        "mlp.fc1.weight",
        "mlp.fc2.weight",
    }


def test_learning_rate_rises_linearly_then_follows_a_cosine():
    rates = [learning_rate(step, 110, 10, 2.0) for step in range(110)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == pytest.approx(2.0)
    assert rates[60] == pytest.approx(1.0)
    assert rates[85] == pytest.approx(1 + math.cos(0.75 * math.pi))
    assert 0 < rates[-1] < 0.001


def test_soft_targets_smooth_over_all_classes():
    targets = soft_targets(torch.tensor([2, 0]), 4, 0.2)
    torch.testing.assert_close(targets, torch.tensor([[0.05, 0.05, 0.85, 0.05], [0.85, 0.05, 0.05, 0.05]]))


def test_smoothed_loss_equals_torchs_own(model):
    pixel_values, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 1])
    torch.nn.init.normal_(model.classifier.weight)
    logits = model(pixel_values).logits
    wanted = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    torch.testing.assert_close(classification_loss(logits, soft_targets(labels, 3, 0.1)), wanted)


def test_average_equals_the_plain_formula(model):
    average = ModelEMA(model, decay=0.9)
    name, wanted = "vit.layernorm.weight", model.vit.layernorm.weight.detach().clone()
    for step in range(30):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        average.update(model)
        decay = min(0.9, (1 + step) / (10 + step))
        wanted = decay * wanted + (1 - decay) * model.vit.layernorm.weight
    last = model.get_parameter(name).detach().clone()
    with average.applied(model):
        torch.testing.assert_close(model.get_parameter(name).detach(), wanted.detach())
    assert torch.equal(model.get_parameter(name), last)


def test_scores_are_those_of_a_hand_count():
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [1.0, 0.0]])
    metrics = compute_metrics(logits, torch.tensor([0, 1, 1, 0]))
    assert metrics["accuracy"] == 0.75
    assert metrics["loss"] == pytest.approx(
        sum(math.log(1 + math.exp(margin)) for margin in (-2, -1, 3, -1)) / 4, abs=1e-6
    )


def test_predictions_keep_their_rows_and_the_model_its_mode(model):
    torch.nn.init.normal_(model.classifier.weight)
    model.vit.layers[0].dropout.p = 0.5
    model.train()
    pixels = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    form = ImageSpec(16, 16, 3, 2, (0.5,) * 3, (0.5,) * 3)
    batches = [{"images": pixels[rows], "index": torch.tensor(rows)} for rows in ([4, 0], [2], [1, 3])]
    logits, seen = predict(model, batches, form, Accelerator(cpu=True), 5)
    assert seen.tolist() == [0, 1, 2, 3, 4]
    assert model.training
    with torch.no_grad():
        torch.testing.assert_close(logits, model.eval()((pixels.float() / 255 - 0.5) / 0.5).logits)


def test_a_checkpoints_head_is_kept_only_for_the_same_labels_and_a_line_says_so(tmp_path, caplog):
    native = ViTForImageClassification(
        ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8,
            id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1},
        )
    )  # fmt: skip
    native.save_pretrained(tmp_path)
    ViTImageProcessorPil(size={"height": 16, "width": 16}, image_mean=[0.1, 0.2, 0.3]).save_pretrained(tmp_path)
    kept, processor = build_model(["cat", "dog"], str(tmp_path), None, None, {})
    torch.testing.assert_close(kept.classifier.weight, native.classifier.weight)
    assert list(processor.image_mean) == [0.1, 0.2, 0.3]
    assert "is kept: its classes are those of the data" in caplog.text
    for labels in (["dog", "cat"], ["cat", "dog", "eel"]):
        reset, _ = build_model(labels, str(tmp_path), None, None, {})
        assert not reset.classifier.weight.any()
        assert list(reset.config.id2label.values()) == labels
    assert (
        caplog.text.count("is reset: its classes, or their order, are not those of") == 1
    )  # the loader tells the other


def test_the_processor_of_a_timm_repo_is_what_its_config_says(tmp_path):
    cfg = {"input_size": [3, 32, 48], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "interpolation": "bilinear"}
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224", "pretrained_cfg": cfg}))
    processor = load_processor(str(tmp_path))
    assert dict(processor.size) == {"height": 32, "width": 48}
    assert list(processor.image_mean) == [0.1, 0.2, 0.3]
    assert list(processor.image_std) == [0.4, 0.5, 0.6]
    assert int(processor.resample) == 2  # PIL's bilinear


def test_a_checkpoint_without_a_processor_is_warned_about(tiny_config, tmp_path, caplog, monkeypatch):
    HFViTForImageClassification(tiny_config()).save_pretrained(tmp_path)
    monkeypatch.setattr(classifiers.logger, "propagate", True)
    processor = load_processor(str(tmp_path))
    assert dict(processor.size) == {"height": 16, "width": 16}
    assert "no preprocessor_config.json" in caplog.text


def test_a_model_from_scratch_has_the_datas_labels_and_a_fitting_processor():
    model, processor = build_model(
        ["a", "b", "c"], None, "tiny-patch16-224", 32, {"num_channels": 1, "hidden_size": 12, "num_hidden_layers": 1}
    )
    assert model.config.label2id == {"a": 0, "b": 1, "c": 2}
    assert dict(processor.size) == {"height": 32, "width": 32}
    assert len(processor.image_mean) == 1


def test_metrics_load_offline(tmp_path):
    code = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise OSError('the network was asked')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from hf_vit.evaluation.scores import compute_metrics\nimport torch\n"
        "print(compute_metrics(torch.eye(3), torch.arange(3))['accuracy'])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout.strip() == "1.0", result.stderr


# PEFT reads a name that transformers calls deprecated.
peft_warns = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


# ----------------------------------------------------------------------------------------------------------------------
# What is optimised, and how fast


# Layer decay 0.5 in a model of two layers: the head learns at 1, each layer below it at half of the one above.
IN_A_LAYER = {
    **{f"{name}.weight": True for name in (*(f"attention.{m}_proj" for m in "qkvo"), "mlp.fc1", "mlp.fc2")},
    **{f"{name}.bias": False for name in (*(f"attention.{m}_proj" for m in "qkvo"), "mlp.fc1", "mlp.fc2")},
    **{f"layernorm_{at}.{kind}": False for at in ("before", "after") for kind in ("weight", "bias")},
    "layer_scale1.lambda1": False,
    "layer_scale2.lambda1": False,
}  # name: whether it decays
TABLE = {
    "vit.embeddings.cls_token": (0.125, False),
    "vit.embeddings.register_tokens": (0.125, False),
    "vit.embeddings.position_embeddings": (0.125, False),
    "vit.embeddings.patch_embeddings.projection.weight": (0.125, True),
    "vit.embeddings.patch_embeddings.projection.bias": (0.125, False),
    **{f"vit.layers.0.{name}": (0.25, decays) for name, decays in IN_A_LAYER.items()},
    **{f"vit.layers.1.{name}": (0.5, decays) for name, decays in IN_A_LAYER.items()},
    "vit.layernorm.weight": (1.0, False),
    "vit.layernorm.bias": (1.0, False),
    "classifier.weight": (1.0, True),
    "classifier.bias": (1.0, False),
}  # name: its part of the rate, and whether it decays


def test_layer_decay_halves_the_rate_of_every_parameter_a_layer_down(model):
    groups = parameter_groups(model, 0.3, layer_decay=0.5)
    found = {name: (group["lr_scale"], group["weight_decay"]) for group in groups for name in group["names"]}
    assert found == {name: (scale, 0.3 if decays else 0.0) for name, (scale, decays) in TABLE.items()}
    assert len(groups) == 8  # four depths, each with and without decay
    for group in groups:
        assert [id(p) for p in group["params"]] == [id(model.get_parameter(name)) for name in group["names"]]


def test_without_layer_decay_all_learn_at_the_same_rate(model):
    assert [group["lr_scale"] for group in parameter_groups(model, 0.1)] == [1.0, 1.0]


@peft_warns
@pytest.mark.parametrize("lora", [False, True])
def test_the_head_alone_learns_at_a_rate_of_its_own(model, lora):
    model = add_lora(model, 2, 4.0, 0.0) if lora else model
    groups = parameter_groups(model, 0.1, layer_decay=0.5, head_scale=10.0)
    head = {name for group in groups if group["lr_scale"] == 10.0 for name in group["names"]}
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad and "classifier" in name}
    assert head == names
    assert len(head) == 2
    assert max(group["lr_scale"] for group in groups if not head & {*group["names"]}) <= 1.0


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_optimizers_hold_every_parameter_once_at_its_rate_and_decay(model, kind):
    found = {}
    for optimizer in build_optimizers(model, kind, 1e-3, 0.3, (0.9, 0.95), layer_decay=0.5):
        for group in optimizer.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                assert name not in found
                assert parameter is model.get_parameter(name)
                found[name] = (type(optimizer).__name__, group["lr_scale"], group["weight_decay"])
    of_muon = lambda name, decays: kind == "muon" and ".layers." in name and decays
    assert found == {
        name: ("Muon" if of_muon(name, decays) else "AdamW", scale, 0.3 if decays else 0.0)
        for name, (scale, decays) in TABLE.items()
    }


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_without_weight_decay_the_optimizers_still_hold_every_parameter_once(model, kind):
    optimizers = build_optimizers(model, kind, 1e-3, 0.0, (0.9, 0.95), layer_decay=0.5)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    assert sorted(name for group in groups for name in group["names"]) == sorted(TABLE)
    assert {group["weight_decay"] for group in groups} == {0.0}


@peft_warns
def test_low_rank_updates_learn_at_the_rate_of_their_layer_and_all_decay(model):
    lora = add_lora(model, 2, 4.0, 0.0)
    found, layer = {}, r"base_model.model.vit.layers."
    for optimizer in build_optimizers(lora, "muon", 1e-3, 0.3, (0.9, 0.95), layer_decay=0.5):
        for group in optimizer.param_groups:
            for name in group["names"]:
                found[name] = (type(optimizer).__name__, group["lr_scale"], group["weight_decay"])
    head = "base_model.model.classifier.modules_to_save.default"
    assert found == {
        **{
            f"{layer}{index}.{name}.lora_{part}.default.weight": ("Muon", scale, 0.3)
            for index, scale in ((0, 0.25), (1, 0.5))
            for name in DENSE
            for part in "AB"
        },
        f"{head}.weight": ("AdamW", 1.0, 0.3),
        f"{head}.bias": ("AdamW", 1.0, 0.0),
    }


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        ("cosine", {0: 0.2, 9: 2.0, 10: 2.0, 55: 1.0, 100: 0.0}),
        ("linear", {0: 0.2, 9: 2.0, 10: 2.0, 55: 1.0, 99: 2 / 90}),
        ("constant", {0: 0.2, 9: 2.0, 10: 2.0, 55: 2.0, 99: 2.0}),
        ("wsd", {0: 0.2, 9: 2.0, 10: 2.0, 60: 2.0, 70: 1.5, 99: 0.05}),  # decays over the last 40
        ("step", {0: 0.2, 9: 2.0, 10: 2.0, 24: 2.0, 25: 0.2, 50: 0.02, 75: 0.002, 99: 0.002}),  # four stages
    ],
)
def test_a_schedule_at_points_computed_by_hand(schedule, points):
    rates = {step: learning_rate(step, 100, 10, 2.0, schedule, decay=0.4, stages=4) for step in points}
    assert rates == pytest.approx(points, abs=1e-9)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd", "step"])
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (2, 1), (7, 7), (50, 0), (50, 49), (1000, 30)])
def test_no_step_of_a_schedule_is_at_a_rate_of_zero_or_above_the_peak(schedule, total, warmup):
    rates = [learning_rate(step, total, warmup, 3.0, schedule) for step in range(total)]
    assert all(0 < rate <= 3.0 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert max(rates) == pytest.approx(3.0)


@pytest.fixture
def accelerator():
    """accelerator(**arguments) -> Accelerator on CPU; the state that all Accelerators of a process share is new, and given back."""

    def reset():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    yield lambda **arguments: Accelerator(cpu=True, **arguments)
    reset()


@pytest.mark.parametrize("weights", [None, [0.5, 1.0, 2.0]], ids=["even", "weighted"])
@pytest.mark.parametrize("kind", ["cross_entropy", "binary_cross_entropy"])
@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_gradients_of_8_images_equal_those_of_two_times_4(accelerator, tiny_model, mixup, cutmix, kind, weights):
    model, seed, steps = tiny_model().train(), 5, 3
    weights = None if weights is None else torch.tensor(weights)
    images, labels = torch.randn(steps * 8, 3, 16, 16), torch.randint(0, 3, (steps * 8,))
    targets = soft_targets(labels, 3, 0.1)

    def gradients(batch, accumulation):
        """As recipes/train.py goes through an epoch."""
        ours = accelerator(mixed_precision="no")
        ours.gradient_accumulation_steps = accumulation
        network, *optimizers = ours.prepare(model, *build_optimizers(model, "adamw", 0, 0, (0.9, 0.95)))
        found = []
        for number, start in enumerate(range(0, len(images), batch)):
            rows = slice(start, start + batch)
            mixed, blended = mix(images[rows], targets[rows], mixup, cutmix, seed, 0, number // accumulation)
            with ours.accumulate(network):
                ours.backward(classification_loss(network(mixed).logits, blended, kind, weights))
                if ours.sync_gradients:
                    found.append({name: p.grad.clone() for name, p in model.named_parameters()})
                for optimizer in optimizers:
                    optimizer.param_groups[0]["lr"] = 0.0
                    optimizer.step()
                    optimizer.zero_grad()
        return found

    whole, parts = gradients(8, 1), gradients(4, 2)
    assert len(whole) == len(parts) == steps
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)
    assert not torch.equal(whole[0]["classifier.bias"], whole[1]["classifier.bias"])


# ----------------------------------------------------------------------------------------------------------------------
# Losses


LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]])
TARGETS = torch.tensor([[0.9, 0.1, 0.0], [0.25, 0.0, 0.75]])


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("weights", [None, (0.5, 1.0, 4.0)])
def test_cross_entropy_is_that_of_a_hand_computation(weights):
    """An image counts as much as its label does, 0.9 x 0.5 + 0.1 x 1 and 0.25 x 0.5 + 0.75 x 4."""
    parts = []
    for logits, targets in zip(LOGITS.tolist(), TARGETS.tolist(), strict=True):
        log_sum = math.log(sum(math.exp(x) for x in logits))
        parts.append(sum(t * (log_sum - x) for t, x in zip(targets, logits, strict=True)))
    counts = (1, 1) if weights is None else (0.55, 3.125)
    loss = classification_loss(LOGITS, TARGETS, "cross_entropy", None if weights is None else torch.tensor(weights))
    assert loss.item() == pytest.approx((counts[0] * parts[0] + counts[1] * parts[1]) / 2, abs=1e-6)


@pytest.mark.parametrize("weights", [None, (0.5, 1.0, 4.0)])
def test_binary_cross_entropy_is_that_of_a_hand_computation(weights):
    """Mean of the three labels; an image counts as much as its label does, 0.9 x 0.5 + 0.1 x 1 and 0.25 x 0.5 + 0.75 x 4."""
    parts = []
    for logits, targets in zip(LOGITS.tolist(), TARGETS.tolist(), strict=True):
        pairs = zip(logits, targets, strict=True)
        parts.append(-sum(t * math.log(sigmoid(x)) + (1 - t) * math.log(sigmoid(-x)) for x, t in pairs))
    counts = (1, 1) if weights is None else (0.55, 3.125)
    loss = classification_loss(
        LOGITS, TARGETS, "binary_cross_entropy", None if weights is None else torch.tensor(weights)
    )
    assert loss.item() == pytest.approx((counts[0] * parts[0] + counts[1] * parts[1]) / 2 / 3, abs=1e-6)


SEVERAL = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.3]])  # labels of an image, the last of them mixed


@pytest.mark.parametrize("weights", [None, (0.5, 1.0, 4.0)])
def test_the_loss_of_several_labels_is_that_of_a_hand_computation(weights):
    """The mean of all labels' yes or no; the weights count for the yes alone, and for 0.3 of a mixed one by 0.3."""
    parts = {"binary_cross_entropy": [], "asymmetric": []}
    for logits, targets in zip(LOGITS.tolist(), SEVERAL.tolist(), strict=True):
        for weight, t, x in zip(weights or (1, 1, 1), targets, logits, strict=True):
            p, yes, counts = sigmoid(x), -t * math.log(sigmoid(x)), t * weight + 1 - t
            shifted = max(p - 0.05, 0)
            parts["binary_cross_entropy"].append(counts * (yes - (1 - t) * math.log(1 - p)))
            parts["asymmetric"].append(counts * (yes - (1 - t) * shifted**4 * math.log(1 - shifted)))
    for kind, of_labels in parts.items():
        loss = multi_label_loss(LOGITS, SEVERAL, kind, None if weights is None else torch.tensor(weights))
        assert loss.item() == pytest.approx(sum(of_labels) / 6, abs=1e-6)


def test_the_loss_of_several_labels_is_finite_for_sure_answers():
    logits = torch.tensor([[200.0, -200.0]], requires_grad=True)
    for kind in ("binary_cross_entropy", "asymmetric"):
        for targets in (torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])):
            (gradient,) = torch.autograd.grad(multi_label_loss(logits, targets, kind), logits)
            assert gradient.isfinite().all()


def test_several_labels_are_smoothed_towards_a_half_and_each_right_one_counts():
    labels = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(soft_targets(labels, 2, 0.2), torch.tensor([[0.9, 0.1], [0.1, 0.1]]))
    assert count_correct(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), labels) == 1.5
    assert count_correct(torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.tensor([1, 1])) == 1


@pytest.mark.parametrize(
    ("several", "flags", "message"),
    [
        (True, {"loss": "cross_entropy"}, "--loss cross_entropy does not go with several labels"),
        (True, {"balance": "sampling"}, "--balance sampling does not go with several labels .* take weights"),
        (True, {"teacher_name_or_path": "x"}, "--teacher_name_or_path does not go with several labels"),
        (False, {"loss": "asymmetric"}, "--loss asymmetric is for several labels an image"),
    ],
)
def test_what_does_not_go_with_the_number_of_labels_is_refused(several, flags, message):
    with pytest.raises(ValueError, match=message):
        choose_loss(TrainArguments(**flags), several)


def test_the_loss_is_chosen_by_the_number_of_labels():
    for several, loss in ((False, "cross_entropy"), (True, "binary_cross_entropy")):
        args = TrainArguments()
        choose_loss(args, several)
        assert args.loss == loss


@pytest.mark.parametrize("kind", ["cross_entropy", "binary_cross_entropy"])
def test_a_class_of_weight_zero_teaches_nothing(kind):
    logits = LOGITS.clone().requires_grad_()
    targets = nn.functional.one_hot(torch.tensor([0, 2]), 3).float()
    classification_loss(logits, targets, kind, torch.tensor([1.0, 1.0, 0.0])).backward()
    assert logits.grad[0].any()
    assert not logits.grad[1].any()


@pytest.mark.parametrize("kind", ["cross_entropy", "binary_cross_entropy"])
def test_the_loss_is_computed_in_float32(kind):
    loss = classification_loss(LOGITS.bfloat16(), TARGETS, kind)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, classification_loss(LOGITS.bfloat16().float(), TARGETS, kind))


def test_the_loss_of_a_mixup_is_that_of_a_hand_computation():
    """-w log p - (1 - w) log q of the two labels of each of two neighbours that mixup blended."""
    weight = float(np.random.default_rng([3, 1, 2]).beta(0.4, 0.4))
    targets = soft_targets(torch.tensor([0, 2]), 3, 0.0)
    _, blended = mix(torch.randn(2, 3, 8, 8), targets, 0.4, 0.0, 3, 1, 2)
    log = LOGITS.log_softmax(dim=1)
    by_hand = -(weight * log[0, 0] + (1 - weight) * log[0, 2] + weight * log[1, 2] + (1 - weight) * log[1, 0]) / 2
    torch.testing.assert_close(classification_loss(LOGITS, blended), by_hand)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_distillation_loss_is_that_of_a_hand_computation(temperature):
    teacher = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    softened = lambda logits: [
        math.exp(x / temperature) / sum(math.exp(y / temperature) for y in logits) for x in logits
    ]
    total = 0.0
    for student, taught in zip(LOGITS.tolist(), teacher.tolist(), strict=True):
        total += sum(p * math.log(p / q) for p, q in zip(softened(taught), softened(student), strict=True))
    loss = distillation_loss(LOGITS, teacher, temperature)
    assert loss.item() == pytest.approx(temperature**2 * total / 2, abs=1e-5)


def test_distillation_loss_of_equal_logits_is_zero_and_its_gradient_too():
    logits = LOGITS.clone().requires_grad_()
    loss = distillation_loss(logits, LOGITS + 7.0, 2.0)  # a constant changes no probability
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    torch.testing.assert_close(logits.grad, torch.zeros(2, 3), rtol=0, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Teacher


@pytest.fixture
def teacher(tmp_path, tiny_fields, randomize):
    """teacher(id2label, size, **fields) -> a native ViT in eval mode, its image processor, and the folder that holds both."""

    def make(names=("a", "b", "c"), size=16, **fields):
        id2label = dict(enumerate(names))
        labels = dict(id2label=id2label, label2id={name: index for index, name in id2label.items()})
        sizes = {key: value for key, value in tiny_fields.items() if key != "num_labels"}
        native = randomize(ViTForImageClassification(ViTConfig(**{**sizes, "image_size": size, **labels, **fields})))
        channels = native.config.num_channels
        processor = ViTImageProcessorPil(
            size={"height": size, "width": size}, image_mean=[0.1, 0.4, 0.3][:channels], resample=Image.Resampling.BILINEAR,
            image_std=[0.3, 0.2, 0.4][:channels],
        )  # fmt: skip
        native.save_pretrained(tmp_path)
        processor.save_pretrained(tmp_path)
        return native, processor, str(tmp_path)

    return make


FORM = ImageSpec(16, 16, 3, 2, (0.5, 0.45, 0.4), (0.25, 0.2, 0.3))


@pytest.mark.parametrize(("size", "tolerance"), [(16, 1e-5), (32, 0.01), (8, 0.01)])
def test_a_teacher_sees_the_students_pixels_as_its_own_processor_makes_them(teacher, size, tolerance):
    """At another size the processor rounds to whole bytes, which the teacher does not."""
    native, processor, folder = teacher(size=size)
    images = (256 * torch.rand(4, 3, 1, 1) * torch.rand(4, 3, 16, 16)).byte()
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    with torch.no_grad():
        wanted = native(processor(pictures, return_tensors="pt")["pixel_values"]).logits
    found = Teacher(folder, ["a", "b", "c"], FORM, torch.device("cpu"))(normalize(images, FORM))
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)
    assert wanted.std(dim=0).min() > 3 * tolerance


def test_a_teachers_labels_are_matched_by_name_and_others_left_out(teacher):
    native, _, folder = teacher(names=("c", "x", "a", "b"))
    pixels = torch.randn(3, 3, 16, 16)
    same = ImageSpec(16, 16, 3, 2, (0.1, 0.4, 0.3), (0.3, 0.2, 0.4))
    found = Teacher(folder, ["a", "b", "c"], same, torch.device("cpu"))(pixels)
    torch.testing.assert_close(found, native(pixels).logits[:, [2, 3, 0]], check_stride=False)


def test_a_teacher_is_not_trained(teacher):
    asked = Teacher(teacher()[2], ["a", "b", "c"], FORM, torch.device("cpu"))
    assert not asked.model.training
    assert not any(parameter.requires_grad for parameter in asked.model.parameters())
    assert not asked(torch.randn(1, 3, 16, 16, requires_grad=True)).requires_grad


def test_a_teacher_may_be_a_saved_run(tiny_model, tmp_path):
    ours = tiny_model(id2label={0: "a", 1: "b", 2: "c"})
    ours.save_pretrained(tmp_path)
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    form, pixels = ImageSpec(16, 16, 3, 2, (0.5,) * 3, (0.5,) * 3), torch.randn(2, 3, 16, 16)
    asked = Teacher(str(tmp_path), ["b", "a"], form, torch.device("cpu"))
    torch.testing.assert_close(asked(pixels), ours(pixels).logits[:, [1, 0]], check_stride=False)


def test_a_teacher_that_does_not_know_a_label_is_an_error(teacher):
    with pytest.raises(ValueError, match=r"--teacher_name_or_path .* does not know 1 of .* labels: \['eel'\]"):
        Teacher(teacher()[2], ["a", "eel"], FORM, torch.device("cpu"))


def test_a_teacher_of_other_channels_is_an_error(teacher):
    folder = teacher(num_channels=1)[2]
    with pytest.raises(ValueError, match="looks at 1 channels, the student at 3"):
        Teacher(folder, ["a", "b", "c"], FORM, torch.device("cpu"))


# ----------------------------------------------------------------------------------------------------------------------
# Frozen, and with low-rank updates


DENSE = [*(f"attention.{m}_proj" for m in "qkvo"), "mlp.fc1", "mlp.fc2"]


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("layers", "still"),
    [
        (0, TABLE),
        (1, {name for name, (scale, _) in TABLE.items() if scale >= 0.5}),
        (2, {name for name, (scale, _) in TABLE.items() if scale == 1.0}),
    ],
)
def test_frozen_layers_take_the_embeddings_with_them_and_no_gradient_flows_there(model, layers, still):
    nn.init.normal_(model.classifier.weight)
    freeze(model, backbone=False, layers=layers)
    assert trained(model) == set(still)
    model(torch.randn(2, 3, 16, 16), labels=torch.tensor([0, 1])).loss.backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == set(still)


def test_with_a_frozen_backbone_the_classifier_alone_is_trained(tiny_model):
    model = tiny_model(pooling="map", use_distillation_token=True, position_embedding="sincos2d")
    freeze(model, backbone=True, layers=0)
    assert trained(model) == {"classifier.weight", "classifier.bias"}
    pixel_values = torch.randn(2, 3, 16, 16, requires_grad=False)
    assert not model.vit(pixel_values).pooler_output.requires_grad  # no graph is kept
    model(pixel_values, labels=torch.tensor([0, 1])).loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {
        "classifier.weight",
        "classifier.bias",
    }


def test_more_frozen_layers_than_there_are_is_an_error(model):
    with pytest.raises(ValueError, match=r"--freeze_layers 3: the model has 2 layers.*--freeze_backbone true"):
        freeze(model, backbone=False, layers=3)
    assert trained(model) == set(TABLE)


@peft_warns
@pytest.mark.parametrize(
    ("fields", "dense"),
    [({}, DENSE), (dict(gated_mlp=True), [*DENSE[:4], "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"])],
)
def test_low_rank_updates_of_every_dense_layer_and_the_head_are_trained(tiny_config, fields, dense):
    model = HFViTForImageClassification(tiny_config(pooling="map", **fields))
    lora = add_lora(model, 2, 4.0, 0.0)
    assert trained(lora) == {
        *(
            f"base_model.model.vit.layers.{index}.{name}.lora_{part}.default.weight"
            for index in (0, 1)
            for name in dense
            for part in "AB"
        ),
        *(f"base_model.model.classifier.modules_to_save.default.{kind}" for kind in ("weight", "bias")),
    }
    scales = {module.scaling["default"] for module in lora.modules() if hasattr(module, "lora_A")}
    assert scales == {4.0 / 2}  # alpha / rank


@peft_warns
def test_a_new_low_rank_update_changes_nothing_yet(tiny_model):
    model, pixels = tiny_model(), torch.randn(2, 3, 16, 16)
    before = model(pixels).logits
    torch.testing.assert_close(add_lora(model, 2, 4.0, 0.0).eval()(pixels).logits, before)


def test_low_rank_updates_without_peft_are_an_error(model, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "peft" else find(name, *rest))
    with pytest.raises(ValueError, match=r"--lora_rank needs the library peft.*pip install peft"):
        add_lora(model, 2, 4.0, 0.0)


@pytest.fixture
def lora_run(tmp_path, tiny_model, teacher):
    """lora_run(native) -> a LoRA run's model for three other labels and larger images than its base folder has."""

    def make(native):
        if native:
            folder = teacher(names=("x", "y", "z", "a", "b"))[2]
        else:
            folder = str(tmp_path / "base")
            tiny_model(num_labels=5, id2label=dict(enumerate("xyzab"))).save_pretrained(folder)
            ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
        model, _ = build_model(["a", "b", "c"], folder, None, 24, {})
        lora = add_lora(model, 2, 4.0, 0.1)
        with torch.no_grad():
            for parameter in lora.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0, 0.3)
        return lora.eval()

    return make


@peft_warns
@pytest.mark.parametrize("native", [False, True], ids=["ours", "native"])
def test_a_merged_model_loads_with_the_runs_logits(lora_run, tmp_path, native):
    lora, pixels = lora_run(native), torch.randn(2, 3, 24, 24)
    wanted, before = lora(pixels).logits, trained(lora)
    save_model(lora, tmp_path / "model", "merged")
    loaded = HFViTForImageClassification.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(loaded(pixels).logits, wanted, rtol=1e-4, atol=1e-4)
    assert [name for name in loaded.state_dict() if "lora" in name] == []
    assert loaded.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert trained(lora) == before  # the run goes on
    torch.testing.assert_close(lora(pixels).logits, wanted)
    assert not (tmp_path / "model" / "adapter_config.json").exists()


def test_a_model_of_another_task_is_no_classifier_of_images(tmp_path):
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20)
    BertForSequenceClassification(BertConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a 'bert' model; hf_vit loads hf_vit, "):
        load_classifier(str(tmp_path))
    with pytest.raises(
        ValueError, match=r"config.json is a file: wanted a run, a model folder, or USER/NAME on the Hub"
    ):
        model_folder(str(tmp_path / "config.json"))
    with pytest.raises(ValueError, match="holds a 'bert' model; hf_vit loads hf_vit, "):
        build_model(["cat", "dog"], str(tmp_path), None, None, {})


@pytest.mark.parametrize(
    ("fields", "with_processor", "sentence"),
    [
        (
            dict(num_labels=3, problem_type="regression"),
            True,
            "gives numbers and no classes (regression): wanted an image classifier",
        ),
        (dict(num_labels=1), True, "gives numbers and no classes (regression)"),
        (dict(num_labels=3), False, "has no preprocessor_config.json: save its image processor beside the model"),
    ],
)
def test_a_model_of_numbers_or_without_its_processor_is_one_sentence(tmp_path, fields, with_processor, sentence):
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", **fields)
    ResNetForImageClassification(config).save_pretrained(tmp_path)
    if with_processor:
        ViTImageProcessorPil().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        load_classifier(str(tmp_path)), load_processor(str(tmp_path))


def test_a_run_is_a_model_too_and_one_that_is_not_finished_says_so(tiny_model, tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(ValueError, match="is a run that is not finished: the command that began it goes on with it"):
        model_folder(str(tmp_path))
    tiny_model().save_pretrained(tmp_path / "model")
    assert model_folder(str(tmp_path)) == str(tmp_path / "model")
    (tmp_path / "model" / "config.yaml").write_text("seed: 0\n")  # as model_cards keeps them
    assert model_folder(str(tmp_path / "model")) == str(tmp_path / "model")


@peft_warns
@pytest.mark.parametrize("native", [False, True], ids=["ours", "native"])
def test_an_adapter_loads_with_the_runs_logits_labels_and_size(lora_run, tmp_path, native):
    lora, pixels = lora_run(native), torch.randn(2, 3, 24, 24)
    save_model(lora, tmp_path / "model", "adapter")
    assert not (tmp_path / "model" / "model.safetensors").exists()
    loaded = load_classifier(str(tmp_path / "model"))
    torch.testing.assert_close(loaded(pixels).logits, lora(pixels).logits, rtol=1e-5, atol=1e-5)
    assert loaded.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert loaded.config.image_size == 24


def test_a_model_without_low_rank_updates_is_saved_as_it_is(tiny_model, tmp_path):
    model, pixels = tiny_model(), torch.randn(2, 3, 16, 16)
    for lora_save in ("merged", "adapter"):
        save_model(model, tmp_path / lora_save, lora_save)
        torch.testing.assert_close(load_classifier(str(tmp_path / lora_save))(pixels).logits, model(pixels).logits)


# ----------------------------------------------------------------------------------------------------------------------
# What a run begins with


OUT_OF_MEMORY = [
    "CUDA out of memory. Tried to allocate 2.00 GiB.",
    "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.",
]


def short_of_memory(model, most, message=OUT_OF_MEMORY[0], kind=RuntimeError):
    """A loss that more than `most` images at once are too many for, and the numbers that it was asked about."""
    asked = []

    def loss(pixel_values):
        asked.append(len(pixel_values))
        if len(pixel_values) > most:
            raise kind(message)
        return model(pixel_values).logits.square().sum()

    return loss, asked


@pytest.mark.parametrize("message", OUT_OF_MEMORY)
@pytest.mark.parametrize(
    ("batch", "most", "tried"),
    [(8, 8, [8]), (8, 5, [8, 4]), (8, 1, [8, 4, 2, 1]), (12, 5, [12, 6, 2]), (15, 14, [15, 5]), (7, 6, [7, 1])],
)
def test_the_batch_size_found_is_the_first_divisor_that_fits(tiny_model, batch, most, tried, message):
    model = tiny_model()
    loss, asked = short_of_memory(model, most, message)
    assert find_batch_size(model, loss, FORM, batch, torch.device("cpu")) == tried[-1]
    assert asked == tried
    assert all(parameter.grad is None for parameter in model.parameters())


def test_memory_that_ends_in_the_backward_pass_counts_too(tiny_model):
    class Short(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values.clone()

        @staticmethod
        def backward(ctx, gradient):
            if len(gradient) > 2:
                raise RuntimeError(OUT_OF_MEMORY[0])
            return gradient

    model = tiny_model()
    loss = lambda pixel_values: Short.apply(model(pixel_values).logits).sum()
    assert find_batch_size(model, loss, FORM, 8, torch.device("cpu")) == 2
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_image_too_many_is_an_error(tiny_model):
    model = tiny_model()
    loss, asked = short_of_memory(model, 0)
    with pytest.raises(RuntimeError, match="out of memory"):
        find_batch_size(model, loss, FORM, 4, torch.device("cpu"))
    assert asked == [4, 2, 1]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("kind", "message"), [(RuntimeError, "shapes do not fit"), (ValueError, OUT_OF_MEMORY[0])])
def test_an_error_that_is_not_about_memory_is_raised_at_once(tiny_model, kind, message):
    model = tiny_model()
    loss, asked = short_of_memory(model, 1, message, kind)
    with pytest.raises(kind, match=message.partition(".")[0]):
        find_batch_size(model, loss, FORM, 4, torch.device("cpu"))
    assert asked == [4]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_run_begins_at_no_size_or_at_a_smaller_multiple_of_the_patch(tiny_config):
    for side in (None, 4, 8, 12):
        check_first_image_size(side, tiny_config())


@pytest.mark.parametrize(
    ("side", "fields"),
    [(16, {}), (20, {}), (10, {}), (8, dict(patch_size=(4, 16))), (8, dict(image_size=(16, 32))), (8, dict(image_size=(16, 8)))],
)  # fmt: skip
def test_a_first_size_that_cannot_be_is_an_error(tiny_config, side, fields):
    with pytest.raises(ValueError, match=f"--first_image_size {side}: wanted a multiple of the patch size"):
        check_first_image_size(side, tiny_config(**fields))


def test_shrunk_images_are_those_of_pil():
    images = torch.rand(2, 3, 20, 20)
    small = resize(images, 8)
    assert small.shape == (2, 3, 8, 8)
    for shrunk, channel in zip(small.flatten(0, 1), images.flatten(0, 1), strict=True):
        picture = Image.fromarray(channel.numpy()).resize((8, 8), Image.Resampling.BILINEAR)
        torch.testing.assert_close(shrunk, torch.from_numpy(np.array(picture)), rtol=0, atol=1e-5)


def test_trackers_are_those_of_accelerate_that_are_installed(monkeypatch):
    monkeypatch.setattr(setup, "get_available_trackers", lambda: ["tensorboard", "wandb"])
    assert known_trackers("none") == known_trackers("") == []
    assert known_trackers("wandb, tensorboard") == ["wandb", "tensorboard"]
    assert known_trackers("none,wandb") == ["wandb"]
    with pytest.raises(ValueError, match=r"--report_to chalk: wanted none, or some of .*tensorboard"):
        known_trackers("wandb,chalk")
    with pytest.raises(ValueError, match=r"--report_to mlflow: its library is not installed: pip install mlflow"):
        known_trackers("mlflow")
    with pytest.raises(ValueError, match="--report_to all: wanted none"):
        known_trackers("all")


def test_a_tracker_of_this_machine_passes_or_is_named():
    """With the names that Accelerate gives, and not those of the test above."""
    installed = [str(name) for name in setup.get_available_trackers()]
    for name in ("tensorboard", "wandb"):
        if name in installed:
            assert known_trackers(name) == [name]
        else:
            with pytest.raises(ValueError, match=f"pip install {name}"):
                known_trackers(name)


# ----------------------------------------------------------------------------------------------------------------------
# Predictions and features


FEATURES = {
    "ours": (HFViTForImageClassification, {}, lambda model, x: model.vit(x).pooler_output),
    "ours, mean": (HFViTForImageClassification, dict(pooling="mean"), lambda model, x: model.vit(x).pooler_output),
    "ours, two vectors": (
        HFViTForImageClassification,
        dict(pooling="cls_mean"),
        lambda model, x: torch.cat([(t := model.vit(x).last_hidden_state)[:, 0], t[:, 1:].mean(dim=1)], dim=1),
    ),
    "ours, tanh layer": (
        HFViTForImageClassification,
        dict(representation_size=12, hidden_dropout_prob=0.5),
        lambda model, x: torch.tanh(model.pre_logits(model.vit(x).pooler_output)),
    ),
    "ViT": (ViTForImageClassification, {}, lambda model, x: model.vit(x).last_hidden_state[:, 0]),
    "DeiT": (DeiTForImageClassification, {}, lambda model, x: model.deit(x).last_hidden_state[:, 0]),
    "DINOv2": (
        Dinov2ForImageClassification,
        {},
        lambda model, x: torch.cat([(t := model.dinov2(x).last_hidden_state)[:, 0], t[:, 1:].mean(dim=1)], dim=1),
    ),
}


def in_batches(images, *rows):
    return [{"images": images[places], "index": torch.tensor(places)} for places in rows]


@pytest.mark.parametrize(("model_class", "fields", "by_hand"), FEATURES.values(), ids=FEATURES)
def test_features_are_what_the_head_sees(accelerator, tiny_fields, randomize, model_class, fields, by_hand):
    fields = {**tiny_fields, **fields}
    if model_class is Dinov2ForImageClassification:
        fields["mlp_ratio"] = fields.pop("intermediate_size") // fields["hidden_size"]
    model = randomize(model_class(model_class.config_class(**fields))).train()
    images = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    batches = in_batches(images, [4, 0], [2], [1, 3])
    features, rows = predict(model, batches, FORM, accelerator(), 5, features=True)
    assert rows.tolist() == [0, 1, 2, 3, 4]
    assert model.training
    assert not model.classifier._forward_pre_hooks
    with torch.no_grad():
        wanted = by_hand(model.eval(), normalize(images, FORM))
        logits = model(normalize(images, FORM)).logits
    torch.testing.assert_close(features, wanted, check_stride=False, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.classifier(features), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("features", [False, True])
def test_rows_of_skipped_images_are_left_out(accelerator, tiny_model, features):
    model, images = tiny_model(), torch.randint(0, 256, (6, 3, 16, 16), dtype=torch.uint8)
    every, _ = predict(model, in_batches(images, [0, 1, 2, 3, 4, 5]), FORM, accelerator(), 6, features)
    values, rows = predict(model, in_batches(images, [5, 1], [2]), FORM, accelerator(), 6, features)
    assert rows.tolist() == [1, 2, 5]
    torch.testing.assert_close(values, every[[1, 2, 5]])


def test_no_image_to_score_is_an_error(accelerator, tiny_model):
    with pytest.raises(ValueError, match="none of the 4 images to score can be read"):
        predict(tiny_model(), [], FORM, accelerator(), 4)


def test_a_model_without_a_head_has_no_features(accelerator, tiny_fields):
    model = ViTModel(ViTConfig(**{**tiny_fields, "num_labels": 7}), add_pooling_layer=False)
    with pytest.raises(ValueError, match="ViTModel has no dense layer of 7 labels"):
        predict(model, in_batches(torch.zeros(1, 3, 16, 16), [0]), FORM, accelerator(), 1, features=True)


@peft_warns
def test_the_head_is_the_last_layer_of_as_many_outputs(tiny_config):
    """Layers inside may be as wide as there are labels."""
    model = HFViTForImageClassification(tiny_config(num_labels=32, pooling="map", representation_size=32))
    assert classification_head(model) is model.classifier
    model = HFViTForImageClassification(tiny_config(num_labels=32))
    assert classification_head(add_lora(model, 2, 4.0, 0.0)) is model.classifier.modules_to_save["default"]


def test_two_processes_get_every_row_once_and_the_same(accelerator, tmp_path, tiny_fields):
    """In the second part one process has nothing to do."""
    script = tmp_path / "two.py"
    script.write_text(
        "import sys\n"
        "import torch\n"
        "from accelerate import Accelerator\n"
        "from hf_vit import HFViTConfig, HFViTForImageClassification\n"
        "from hf_vit.evaluation.prediction import predict\n"
        "accelerator = Accelerator(cpu=True)\n"
        "rank = accelerator.process_index\n"
        "assert accelerator.num_processes == 2\n"
        "model, images, form, shares, file = torch.load(sys.argv[1], weights_only=False)\n"
        "found = []\n"
        "for share in shares:\n"
        "    batches = [{'images': images[rows], 'index': torch.tensor(rows)} for rows in share[rank]]\n"
        "    for features in (False, True):\n"
        "        found.append(predict(model, batches, form, accelerator, len(images), features))\n"
        "torch.save(found, f'{file}.{rank}')\n"
        "accelerator.end_training()\n"
    )
    model = HFViTForImageClassification(HFViTConfig(**tiny_fields)).eval()
    nn.init.normal_(model.classifier.weight)
    images = torch.randint(0, 256, (7, 3, 16, 16), dtype=torch.uint8)
    shares = [([[0, 3], [5]], [[1], [6, 2]]), ([[6, 4, 3, 2, 1]], [])]
    torch.save((model, images, FORM, shares, str(tmp_path / "found")), tmp_path / "given")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "given")],
            env={**os.environ, **rank, "ACCELERATE_USE_CPU": "true"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in forked.group_of_two()
    ]  # fmt: skip
    printed = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    first, second = (torch.load(f"{tmp_path / 'found'}.{rank}") for rank in (0, 1))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    for number, (values, rows) in enumerate(first):
        wanted = [[0, 1, 2, 3, 5, 6], [1, 2, 3, 4, 6]][number // 2]
        assert rows.tolist() == wanted
        alone, _ = predict(model, in_batches(images, wanted), FORM, accelerator(), 7, features=number % 2 == 1)
        torch.testing.assert_close(values, alone)


# ----------------------------------------------------------------------------------------------------------------------
# Scores


def test_every_score_is_that_of_a_hand_count():
    """True classes 0 0 1 1, answers 0 1 1 1: recalls 1/2 and 1, F1 2/3 and 4/5; a third class never occurs."""
    share = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.1, 0.9, 0.0001], [0.3, 0.6, 0.1]])
    share = share / share.sum(dim=1, keepdim=True)
    scores = compute_metrics(share.log(), torch.tensor([0, 0, 1, 1]))
    assert scores == {
        "accuracy": 0.75,
        "balanced_accuracy": 0.75,
        "macro_f1": pytest.approx((2 / 3 + 4 / 5) / 2),
        # each in a bin of its own: 0.8, 0.7 (wrong), 0.8999 and 0.6
        "calibration_error": pytest.approx((0.2 + 0.7 + (1 - share[2, 1].item()) + 0.4) / 4, abs=1e-6),
        "loss": pytest.approx(-(math.log(0.8) + math.log(0.2) + math.log(share[2, 1]) + math.log(0.6)) / 4, abs=1e-6),
    }


def test_the_more_accurate_weights_are_the_better_and_of_equal_ones_those_with_the_smaller_loss(accelerator):
    merit = Classification(TrainArguments("d", "o"), accelerator).merit
    rising = [(0.5, 2.0), (0.5, 1.0), (0.6, 3.0)]
    scores = [merit({"accuracy": accuracy, "loss": loss}) for accuracy, loss in rising]
    assert scores == sorted(set(scores))


@pytest.mark.parametrize("classes", [2, 5, 6, 9])
def test_top5_accuracy_is_given_of_more_than_five_classes(classes):
    logits = torch.arange(classes).float().repeat(3, 1)  # the last class is the likeliest, class 0 the least
    labels = torch.tensor([classes - 1, max(0, classes - 5), 0])
    scores = compute_metrics(logits, labels)
    report = classification_report(logits, labels, [f"class {index}" for index in range(classes)])
    assert ("top5_accuracy" in scores) is ("top5_accuracy" in report["intervals"]) is (classes > 5)
    if classes > 5:
        assert scores["top5_accuracy"] == pytest.approx(2 / 3)
    assert set(report["intervals"]) == set(scores) - {"loss"}


def test_a_report_has_a_row_for_each_class_and_the_true_class_in_the_rows():
    answers, labels = torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1])
    report = classification_report(10 * nn.functional.one_hot(answers, 3).float(), labels, ["cat", "dog", "eel"])
    assert report["confusion_matrix"] == [[1, 1, 0], [0, 2, 0], [0, 0, 0]]
    assert report["per_class"] == [
        {"label": "cat", "images": 2, "precision": 1.0, "recall": 0.5, "f1": pytest.approx(2 / 3)},
        {"label": "dog", "images": 2, "precision": pytest.approx(2 / 3), "recall": 1.0, "f1": pytest.approx(0.8)},
        {"label": "eel", "images": 0, "precision": None, "recall": None, "f1": None},
    ]
    low, high = report["intervals"]["accuracy"]
    assert 0 <= low < 0.75 < high <= 1


def clusters(seed, counts, spread, size=6):
    """Features (n, D) around one centre a class, and their classes, in random order."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(len(counts), size, generator=torch.Generator().manual_seed(9))
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=generator)]
    return centres[labels] + spread * torch.randn(len(labels), size, generator=generator), labels


@pytest.mark.parametrize(("neighbours", "temperature"), [(1, 0.07), (20, 0.07), (5, 1.0), (1000, 0.5)])
def test_knn_accuracy_equals_a_slow_loop(neighbours, temperature):
    (train, train_labels), (features, labels) = clusters(0, [30, 9, 20, 15], 1.2), clusters(1, [20, 20, 20, 20], 1.2)
    right = 0
    for feature, label in zip(features.double(), labels.tolist(), strict=True):
        near = sorted(
            (-float(feature @ other / feature.norm() / other.norm()), int(of))
            for other, of in zip(train.double(), train_labels, strict=True)
        )[:neighbours]
        votes = [0.0] * 4
        for distance, of in near:
            votes[of] += math.exp(-distance / temperature)
        right += votes.index(max(votes)) == label
    assert 20 < right < 80
    assert knn_accuracy(train, train_labels, features, labels, neighbours, temperature) == right / 80


def test_knn_accuracy_is_the_same_over_more_than_one_piece_of_1024():
    (train, train_labels), (features, labels) = clusters(0, [9, 9], 1.5), clusters(1, [700, 800], 1.5)
    each = [knn_accuracy(train, train_labels, features[r], labels[r]) for r in (slice(700), slice(700, 1500))]
    whole = knn_accuracy(train, train_labels, features, labels)
    assert whole == pytest.approx((700 * each[0] + 800 * each[1]) / 1500)


@pytest.mark.parametrize(("l2", "bias"), [(2.0**10, 100.0), (1.0, 100.0), (10.0, 1.0)])
def test_few_shot_accuracy_equals_ridge_regression_solved_directly(l2, bias):
    """(X^T X + l2 I)^-1 X^T Y, of classes with as many images as shots, so that the draw takes them all."""
    (train, train_labels), (features, labels) = clusters(0, [5, 5, 5], 1.5), clusters(1, [40, 40, 40], 1.5)
    x, y = train.double().numpy(), -np.ones((15, 3))
    y[np.arange(15), train_labels.numpy()] = 1
    mean, std = x.mean(axis=0), x.std(axis=0)
    whiten = lambda values: np.column_stack([(values - mean) / std, np.full(len(values), bias)])
    X = whiten(x)
    weights = np.linalg.solve(X.T @ X + l2 * np.eye(7), X.T @ y)
    wanted = np.mean((whiten(features.double().numpy()) @ weights).argmax(axis=1) == labels.numpy())
    assert 0.4 < wanted < 1
    assert few_shot_accuracy(train, train_labels, features, labels, 5, 0, l2, bias) == pytest.approx(wanted)


def test_few_shots_are_drawn_by_the_seed():
    (train, train_labels), (features, labels) = clusters(0, [50, 50, 50], 1.5), clusters(1, [40, 40, 40], 1.5)
    of = lambda seed: few_shot_accuracy(train, train_labels, features, labels, 1, seed)
    assert [of(seed) for seed in range(5)] == [of(seed) for seed in range(5)]
    assert len({of(seed) for seed in range(5)}) > 1


def test_fewer_images_than_shots_are_an_error():
    train, train_labels = clusters(0, [5, 3], 1.0)
    with pytest.raises(ValueError, match="a class has only 3 training images, fewer than the 4 shots"):
        few_shot_accuracy(train, train_labels, train, train_labels, 4, 0)


@pytest.mark.parametrize(("fewest", "wanted"), [(1, [1]), (4, [1]), (5, [1, 5]), (10, [1, 5, 10])])
def test_a_probe_leaves_out_shots_that_a_class_lacks(fewest, wanted):
    (train, train_labels), (features, labels) = clusters(0, [12, fewest, 12], 1.0), clusters(1, [9, 9, 9], 1.0)
    scores = probe(train, train_labels, features, labels)
    assert list(scores) == ["knn_accuracy", *(f"{shots}_shot_accuracy" for shots in wanted)]
    assert scores["knn_accuracy"] == knn_accuracy(train, train_labels, features, labels)
    each = [few_shot_accuracy(train, train_labels, features, labels, 1, seed) for seed in range(3)]
    assert scores["1_shot_accuracy"] == pytest.approx(sum(each) / 3)


def test_a_probe_takes_no_notice_of_classes_that_have_no_training_images():
    (train, train_labels), (features, labels) = clusters(0, [12, 0, 12], 0.1), clusters(1, [9, 0, 9], 0.1)
    scores = probe(train, train_labels, features, labels, shots=(1, 10))
    assert scores == {"knn_accuracy": 1.0, "1_shot_accuracy": 1.0, "10_shot_accuracy": 1.0}


# ----------------------------------------------------------------------------------------------------------------------
# Memory that is kept


KEPT = """
import resource, torch
from torch import nn
from hf_vit.system import hardware

def step():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 8))
    network(torch.randn(256, 512)).square().mean().backward()
    return [parameter.grad for parameter in network.parameters()]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(2**24)  # 64 MiB: 2^14 pages
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 2**14

before = step()
print(hardware.keep_memory())
print(all(map(torch.equal, before, step())))
print(faults() < 4)  # not once for each of the 8: the heap has grown, once or twice
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")
def test_memory_that_is_kept_is_not_filled_anew_and_changes_no_number():
    """In a process of its own: it cannot be undone."""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", KEPT], capture_output=True, text=True)
    assert result.stdout.split() == ["True"] * 3, result.stdout + result.stderr


def test_memory_is_not_kept_where_the_c_library_has_no_way_to(monkeypatch):
    monkeypatch.setattr(hardware.ctypes, "CDLL", lambda name: SimpleNamespace())
    assert hardware.keep_memory() is False
    monkeypatch.setattr(hardware.ctypes, "CDLL", lambda name: pytest.fail("no other system was asked for"))
    monkeypatch.setattr(hardware, "sys", SimpleNamespace(platform="darwin"))
    assert hardware.keep_memory() is False


# ----------------------------------------------------------------------------------------------------------------------
# The head before its first step


@pytest.mark.parametrize("several", [False, True])
def test_a_head_that_is_fitted_first_separates_what_can_be_separated(accelerator, several):
    labels = torch.arange(30) % 3
    features = nn.functional.one_hot(labels, 8) + 0.3 * torch.randn(30, 8)
    if several:
        labels = nn.functional.one_hot(labels, 3).float()
    task = Classification(TrainArguments("d", "o", label_smoothing=0.1), accelerator)
    task.args.loss = "binary_cross_entropy" if several else "cross_entropy"
    task.data = SimpleNamespace(labels=list("abc"), several_labels=several)
    head = nn.Linear(8, 3)
    nn.init.zeros_(head.weight)
    before = task.loss_of_logits(head(features), soft_targets(labels, 3, 0.1))
    task.fit_head(head, features, labels)
    assert head.weight.grad is None
    assert task.loss_of_logits(head(features), soft_targets(labels, 3, 0.1)) < 0.8 * before
    assert count_correct(head(features), labels) >= 29


@pytest.mark.parametrize("kind", ["cross_entropy", "binary_cross_entropy", "several labels", "asymmetric"])
def test_weights_of_rare_classes_and_smoothing_do_not_lose_the_frequent_one(accelerator, kind):
    """In losses that weigh each label's term, the smoothed targets of 30 images outweigh the labels of 950."""
    labels = (torch.arange(980) >= 950).long()
    features = 4.0 * nn.functional.one_hot(labels, 8)
    task = Classification(TrainArguments("d", "o", label_smoothing=0.1), accelerator)
    task.weights = torch.tensor([980 / 2 / 950, 980 / 2 / 30])
    if several := kind in ("several labels", "asymmetric"):
        labels = nn.functional.one_hot(labels, 2).float()
    task.args.loss = "binary_cross_entropy" if kind == "several labels" else kind
    task.data = SimpleNamespace(labels=list("ab"), several_labels=several)
    head = nn.Linear(8, 2)
    nn.init.zeros_(head.weight)
    task.fit_head(head, features, labels)
    assert count_correct(head(features), labels) == 980


def test_a_head_is_fitted_on_as_many_images_of_each_class_if_that_is_asked_for(accelerator):
    labels = (torch.arange(940) >= 900).long()
    task = Classification(TrainArguments("d", "o", label_smoothing=0.0, balance="sampling"), accelerator)
    task.args.loss = "cross_entropy"
    task.data = SimpleNamespace(labels=list("ab"), several_labels=False)
    head = nn.Linear(8, 2)
    nn.init.zeros_(head.weight)
    task.fit_head(head, torch.ones(940, 8), labels)  # which says nothing of the class
    assert head(torch.ones(8)).softmax(0)[0].item() == pytest.approx(0.5, abs=0.01)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("lora", [False, True])
def test_only_a_new_head_is_fitted_on_whole_images_and_nothing_else_is(
    tmp_path, tiny_model, lora, capsys, monkeypatch
):
    seen = []
    note = lambda *given: seen.append(given[3]) or predict_images(*given)
    monkeypatch.setattr("hf_vit.training.run.predict_images", note)
    rows = {"image": [picture(number, (40, 24)) for number in range(12)], "label": [0, 1, 2] * 4}
    Dataset.from_dict(rows, Features(image=ImageFeature(), label=ClassLabel(names=list("abc")))).to_parquet(
        tmp_path / "train.parquet"
    )
    checkpoint = tiny_model()
    for labels in (("x", "y", "z"), ("a", "b", "c")):
        checkpoint.config.id2label = dict(enumerate(labels))
        checkpoint.save_pretrained(tmp_path / "checkpoint")
        ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "checkpoint")
        flags = {
            "dataset_name": tmp_path / "train.parquet",
            "model_name_or_path": tmp_path / "checkpoint",
            "num_workers": 0,
        }
        flags |= {"output_dir": tmp_path / "out", "auto_find_batch_size": "false", "lora_rank": 8 * lora}
        args = parse_args([f"--{name}={value}" for name, value in flags.items()])
        accelerator = set_up_accelerator(args)
        run = build_run(args, Classification(args, accelerator), accelerator, None, 0.0)
        head = classification_head(run.network)
        is_new = labels == ("x", "y", "z")
        assert ("fitting the head on the features of" in capsys.readouterr().out) == is_new
        assert head.weight.any()
        assert torch.equal(head.weight, checkpoint.classifier.weight) != is_new
        resumed = build_run(args, Classification(args, accelerator), accelerator, None, 0.0, resumes=True)
        assert classification_head(resumed.network).weight.any() != is_new
        assert [images.spec.crop_scale for images in seen] == [None]  # a crop is of 0.64 of the area or more
        assert run.data.train_images.spec.crop_scale == 0.64
        weights = {
            name.removeprefix("base_model.model.").replace(".base_layer", ""): w
            for name, w in run.network.state_dict().items()
        }
        for name, weight in checkpoint.vit.state_dict().items():
            assert torch.equal(weights[f"vit.{name}"], weight)

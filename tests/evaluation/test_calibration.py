"""Claims about temperatures: what is fitted, when nothing is, and how the head takes it in."""

import math

import pytest
import torch
from runs import logged, train
from safetensors.torch import load_file
from transformers import ViTConfig, ViTForImageClassification

from hf_vit.evaluation.calibration import FEWEST_IMAGES, fit_temperature, folded_head


def draw(count, temperature):
    """Logits (n, 4) whose probabilities are right, times `temperature`; and labels drawn from these probabilities."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(count, 4, generator=generator)
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=generator).flatten()
    return logits * temperature, labels


@pytest.mark.parametrize("temperature", [0.3, 3.0])
def test_the_temperature_that_spoilt_the_probabilities_is_found(temperature):
    assert fit_temperature(*draw(20_000, temperature)) == pytest.approx(temperature, rel=0.03)


def test_of_several_labels_an_image_the_temperature_of_the_yes_and_no_is_found():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(20_000, 4, generator=generator)
    labels = torch.bernoulli(logits.sigmoid(), generator=generator)
    assert fit_temperature(logits * 3, labels) == pytest.approx(3, rel=0.03)


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (draw(FEWEST_IMAGES - 1, 3.0)),
        (10 * torch.eye(4).repeat(50, 1), torch.arange(4).repeat(50)),  # all right
        (torch.zeros(200, 4), torch.arange(4).repeat(50)),
    ],
)
def test_what_says_nothing_about_the_temperature_leaves_it_at_1(logits, labels):
    assert fit_temperature(logits, labels) == 1.0


def test_the_head_is_divided_while_it_is_saved_and_then_is_what_it_was(tiny_model, tiny_fields, pixels):
    for model in (tiny_model(), ViTForImageClassification(ViTConfig(**tiny_fields)).eval()):
        inputs = pixels()
        before = model(inputs).logits
        with folded_head(model, math.pi):
            torch.testing.assert_close(model(inputs).logits, before / math.pi)
        assert torch.equal(model(inputs).logits, before)


def test_a_run_with_validation_images_is_saved_calibrated(tmp_path):
    """`--train_split test` leaves no split to evaluate on: 200 of its 2,000 images are held out for validation."""
    how = dict(max_train_steps=20, eval_steps=10, learning_rate=0.02, ema_decay=0.9, checkpointing_steps=20)
    how |= dict(train_split="test", per_device_train_batch_size=64)
    results = train("fashion-mnist-mini", tmp_path / "run", **how)
    temperature, step = results.temperature, results.metrics["step"]
    assert temperature != 1
    assert results.metrics["accuracy"] == logged(tmp_path / "run", "eval_accuracy")[step]
    assert results.metrics["loss"] < logged(tmp_path / "run", "eval_loss")[step]  # which is of uncalibrated weights
    if step == 20:
        last = load_file(tmp_path / "run" / "checkpoints" / "step-000020" / "average.safetensors")
        saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
        torch.testing.assert_close(saved["classifier.weight"] * temperature, last["classifier.weight"])

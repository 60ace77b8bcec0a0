"""Claims about temperatures: what is fitted, when nothing is, and how the head takes it in."""

import json
import math
import sys
from pathlib import Path

import forked
import pytest
import torch
from safetensors.torch import load_file
from transformers import ViTConfig, ViTForImageClassification

from hf_vit.evaluation.calibration import FEWEST_IMAGES, fit_temperature, folded_head
from hf_vit.evaluation.scores import compute_metrics


TRAIN = Path(__file__).parents[2] / "recipes" / "train.py"


def draw(count, temperature, seed=0):
    """Logits (n, 4) whose probabilities are right, times `temperature`; and labels drawn from these probabilities."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, 4, generator=generator)
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=generator).flatten()
    return logits * temperature, labels


@pytest.mark.parametrize("temperature", [0.3, 3.0])
def test_the_temperature_that_spoilt_the_probabilities_is_found(temperature):
    assert fit_temperature(*draw(20_000, temperature)) == pytest.approx(temperature, rel=0.03)


def test_accuracy_stays_and_the_calibration_error_falls():
    unseen, labels = draw(5_000, 3.0, seed=1)
    before, after = (compute_metrics(unseen / by, labels) for by in (1, fit_temperature(*draw(5_000, 3.0))))
    assert after["accuracy"] == before["accuracy"]
    assert after["calibration_error"] < 0.02 < before["calibration_error"]


def test_of_several_labels_an_image_the_temperature_of_the_yes_and_no_is_found():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(20_000, 4, generator=generator)
    assert fit_temperature(logits * 3, torch.bernoulli(logits.sigmoid(), generator=generator)) == pytest.approx(
        3, rel=0.03
    )


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
    run = tmp_path / "run"
    flags = ["--max_train_steps=20", "--eval_steps=10", "--learning_rate=0.02", "--train_split=test"]
    tiny = "image_size=28,patch_size=7,hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64"
    line = [sys.executable, "-W", "ignore", TRAIN, "--config=demo", *flags, f"--config_overrides={tiny}"]
    forked.run([*line, f"--output_dir={run}"], check=True)
    results = json.loads((run / "results.json").read_text())
    temperature, metrics = results["temperature"], results["metrics"]
    assert temperature != 1
    evaluated = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before = next(line for line in evaluated if line["step"] == metrics["step"] and "eval_loss" in line)
    assert metrics["accuracy"] == before["eval_accuracy"]
    assert metrics["loss"] < before["eval_loss"]  # the lines of the run are of uncalibrated weights
    last = load_file(run / "checkpoints" / "step-000020" / "average.safetensors")
    if metrics["step"] == 20:
        saved = load_file(run / "model" / "model.safetensors")
        torch.testing.assert_close(saved["classifier.weight"] * temperature, last["classifier.weight"])

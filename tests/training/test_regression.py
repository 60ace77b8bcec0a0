"""Claims about `--problem_type regression`: the angle of a drawn line is learned, saved, resumed and predicted."""

import csv
import json
import math
import shutil
import sys
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from runs import recipe, results_of
from safetensors.torch import load_file
from torch import nn
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_vit import HFViTConfig, HFViTForImageClassification
from hf_vit.data.sampling import epoch_batches
from hf_vit.evaluation.regression import regression_intervals, regression_metrics


RECIPES = Path(__file__).parents[2] / "recipes"
FIELDS = dict(
    image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
)
FLAGS = [
    "--dataset_name", "lines/lines.csv", "--label_column", "angle", "--problem_type", "regression", "--crop", "none",
    "--flip", "false", "--mixed_precision", "no", "--per_device_train_batch_size", "40", "--log_steps", "5", "--eval_steps", "100",
]  # fmt: skip
SCRATCH = ["--preset", "tiny-patch16-224", "--config_overrides", ",".join(f"{k}={v}" for k, v in FIELDS.items())]
RATE = ["--learning_rate", "5e-3", "--weight_decay", "0"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """lines/lines.csv: 400 images of a line to train on and 100 to test, with its angle, which is from 1,000 to 1,090 degrees."""
    home, rng, rows = tmp_path_factory.mktemp("regression"), np.random.default_rng(0), ["file_name,angle,split"]
    (home / "lines").mkdir()
    for number in range(500):
        angle, picture = rng.uniform(0, 90), Image.new("L", (64, 64))
        x, y = (32 * math.cos(math.radians(angle)), 32 * math.sin(math.radians(angle)))
        ImageDraw.Draw(picture).line([32 - x, 32 - y, 32 + x, 32 + y], fill=255, width=9)
        picture.resize((16, 16)).convert("RGB").save(home / "lines" / f"{number}.png")
        rows.append(f"{number}.png,{1000 + angle:.3f},{'train' if number < 400 else 'test'}")
    (home / "lines" / "lines.csv").write_text("\n".join(rows))
    return home


def train(home, folder, *flags, code=0):
    line = [sys.executable, "-W", "ignore", "-c", forked.THEN_THE_SCRIPT, RECIPES / "train.py", *FLAGS]
    done = forked.run([*line, "--output_dir", folder, *flags], cwd=home)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def run(home):
    """A finished run of 100 steps with an average of the weights, and with its pictures."""
    flags = ("--max_train_steps", "100", "--ema_decay", "0.9", "--checkpointing_steps", "50", "--output_dir", "run")
    recipe("train.py", *FLAGS, *SCRATCH, *RATE, *flags, cwd=home)
    return home / "run"


def test_it_explains_as_much_of_held_out_angles_as_a_plain_loop(home, run):
    """The loop: the same network, images, order and AdamW, with labels that are standardised by hand."""
    images = torch.stack([torch.tensor(np.array(Image.open(home / "lines" / f"{n}.png"))) for n in range(500)])
    pixels = (images.permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    with open(home / "lines" / "lines.csv") as file:
        labels = torch.tensor([float(row["angle"]) for row in csv.DictReader(file)])
    mean, std = labels[:400].mean(), labels[:400].std()
    torch.manual_seed(0)
    model = HFViTForImageClassification(HFViTConfig(**FIELDS, num_labels=1))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3, weight_decay=0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for epoch in range(10):
        for ids in epoch_batches(400, 40, 0, epoch):
            nn.functional.mse_loss(model(pixels[ids]).logits[:, 0], (labels[ids] - mean) / std).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    with torch.no_grad():
        plain = regression_metrics(model.eval()(pixels[400:]).logits[:, 0] * std + mean, labels[400:])
    found = results_of(run)
    assert plain["r2"] > 0.9
    assert found["metrics"]["r2"] > 0.9 * plain["r2"]
    low, high = found["intervals"]["r2"]
    assert low < found["metrics"]["r2"] < high
    assert found.get("warnings") == []


def test_the_saved_model_gives_angles_to_transformers_and_predict_writes_them(home, run):
    model = AutoModelForImageClassification.from_pretrained(run / "model")
    processor, picture = AutoImageProcessor.from_pretrained(run / "model"), Image.open(home / "lines" / "450.png")
    number = model(**processor(picture, return_tensors="pt")).logits.item()
    with open(run / "predictions.csv") as file:
        row = next(row for row in csv.DictReader(file) if row["file"] == "450.png")
    assert number == pytest.approx(float(row["predicted"]), abs=0.01)
    assert float(row["error"]) == pytest.approx(number - float(row["label"]), abs=0.01)
    assert 1000 < number < 1090
    recipe(
        "predict.py",
        *["--model_name_or_path", "run", "--output_file", "out.csv", "--dataset_name", "lines/450.png"],
        cwd=home,
    )
    assert float((home / "out.csv").read_text().split()[1].split(",")[1]) == pytest.approx(number, abs=0.01)
    flags = ("--dataset_name", "lines/lines.csv", "--label_column", "angle", "--output_file", "scores.json")
    recipe("eval.py", "--model_name_or_path", "run", *flags, cwd=home)
    assert json.loads((home / "scores.json").read_text())["r2"] == pytest.approx(
        results_of(run)["metrics"]["r2"], abs=1e-4
    )


def test_the_card_tells_scores_with_intervals_and_shows_the_predictions(run):
    card = (run / "model" / "README.md").read_text()
    assert f"**{results_of(run)['metrics']['mae']:.4g}**, 95% interval" in card
    assert (run / "model" / "figures" / "scatter.png").is_file()
    assert "figures/scatter.png" in card
    assert not (run / "model" / "figures" / "confusion.png").exists()


def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_bits(home, run):
    again = [*SCRATCH, *RATE, "--max_train_steps", "100", "--ema_decay", "0.9", "--checkpointing_steps", "50"]
    shutil.copytree(run, home / "halves")
    for name in ("model", "checkpoints/step-000100", "checkpoints/best-000100"):
        shutil.rmtree(home / "halves" / name, ignore_errors=True)
    (home / "halves" / "results.json").unlink()
    train(home, "halves", *again)
    assert results_of(home / "halves")["resumed_at_steps"] == [50]
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (run, home / "halves")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    "flags",
    [["--lora_rank", "2"], ["--freeze_backbone", "--cache_features"], []],
    ids=["LoRA", "cached probe", "fine-tuning"],
)
def test_a_checkpoint_is_fine_tuned_in_every_way_and_starts_from_a_new_head(home, run, flags, request):
    folder = request.node.callspec.id.replace(" ", "-")
    train(home, folder, "--model_name_or_path", "run/model", "--max_train_steps", "60", *RATE[:2], *flags)
    assert results_of(home / folder)["metrics"]["r2"] > 0.5
    assert HFViTForImageClassification.from_pretrained(home / folder / "model").config.problem_type == "regression"


@pytest.mark.parametrize(
    ("change", "flags", "named"),
    [
        (lambda text: text, (), "--problem_type regression"),
        (lambda text: text.replace("1.png,1", "1.png,x1", 1), ("--problem_type", "regression"), "x1"),
        (lambda text: "\n".join(["file_name,angle,split", "2.png,nan,train", "3.png,5,train"]), ("--problem_type", "regression"), "nan"),
        (lambda text: text, ("--problem_type", "regression", "--shots", "3"), "--shots"),
    ],
    ids=["decimals without the flag", "text with it", "not a number", "shots"],
)  # fmt: skip
def test_labels_that_are_no_numbers_to_learn_end_in_one_line(home, change, flags, named):
    (home / "lines" / "other.csv").write_text(change((home / "lines" / "lines.csv").read_text()))
    where = ("--dataset_name", "lines/other.csv", "--label_column", "angle", "--output_dir", "refused")
    printed = recipe("train.py", *where, *SCRATCH, *flags, cwd=home, fails=True)
    assert named in printed.splitlines()[-1]
    assert not (home / "refused").exists()


def test_metrics_are_those_of_scikit_learn_and_intervals_hold_the_truth():
    from sklearn.metrics import mean_absolute_error, r2_score

    labels = torch.randn(200)
    predicted = labels + 0.5 * torch.randn(200)
    metrics = regression_metrics(predicted, labels)
    assert metrics["mae"] == pytest.approx(mean_absolute_error(labels, predicted), rel=1e-6)
    assert metrics["r2"] == pytest.approx(r2_score(labels, predicted), rel=1e-6)
    for name, (low, high) in regression_intervals(predicted, labels).items():
        assert low < metrics[name] < high
        assert high - low < 0.2

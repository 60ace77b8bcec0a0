"""Claims about `--problem_type regression`: the brightness of an image is learned, saved, resumed and predicted."""

import shutil

import numpy as np
import pandas as pd
import pytest
import runs
import torch
from PIL import Image
from runs import cut_back, read_json, recipe, results_of
from sklearn import metrics as sklearn
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_vit import HFViTForImageClassification
from hf_vit.evaluation.regression import regression_intervals, regression_metrics
from hf_vit.system.errors import UserError
from hf_vit.training.classification import Classification
from hf_vit.training.regression import Regression


FLAGS = dict(
    label_column="light", problem_type="regression", crop="none", flip=False, mixed_precision="no", per_device_train_batch_size=40,
    max_train_steps=100, learning_rate=5e-3, weight_decay=0.0, ema_decay=0.9, eval_steps=100, checkpointing_steps=50,
)  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """photos/photos.csv: 400 images of noise to train on and 100 to test, with their brightness, which is from 1,000 to 1,090."""
    home, rng, rows = tmp_path_factory.mktemp("regression"), np.random.default_rng(0), ["file_name,light,split"]
    (home / "photos").mkdir()
    for number in range(500):
        light = rng.uniform(0, 90)
        pixels = 2 * light + rng.uniform(0, 75, (16, 16, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(home / "photos" / f"{number}.png")
        rows.append(f"{number}.png,{1000 + light:.3f},{'train' if number < 400 else 'test'}")
    (home / "photos" / "photos.csv").write_text("\n".join(rows))
    return home


@pytest.fixture(scope="module")
def train(home):
    """train(run, **flags) -> the folder of a finished run."""

    def train(run, **flags):
        runs.train(home / "photos" / "photos.csv", run, Regression, **FLAGS | flags)
        return run

    return train


@pytest.fixture(scope="module")
def run(home, train):
    """A finished run with its pictures."""
    return train(home / "run", draw=Regression.draw)


def test_held_out_labels_are_explained(run):
    """Which are far from 0: a network would need many more steps to come to them, were they not standardised."""
    found = results_of(run)
    low, high = found["intervals"]["r2"]
    assert 0.9 < found["metrics"]["r2"] < high
    assert low < found["metrics"]["r2"]
    assert found["warnings"] == []


def test_the_saved_model_gives_numbers_to_transformers_and_predict_and_eval_write_them(home, run):
    model = AutoModelForImageClassification.from_pretrained(run / "model")
    processor, picture = AutoImageProcessor.from_pretrained(run / "model"), Image.open(home / "photos" / "450.png")
    number = pytest.approx(model(**processor(picture, return_tensors="pt")).logits.item(), abs=0.01)
    row = pd.read_csv(run / "predictions.csv").set_index("file").loc["450.png"]
    assert row["predicted"] == number
    assert row["error"] == pytest.approx(row["predicted"] - row["label"], abs=0.01)
    recipe("predict.py --model_name_or_path run --dataset_name photos/450.png --output_file out.csv", cwd=home)
    assert pd.read_csv(home / "out.csv").iloc[0, 1] == number
    flags = "--dataset_name photos/photos.csv --label_column light --output_file scores.json"
    recipe("eval.py --model_name_or_path run", flags, cwd=home)
    scores = read_json(home / "scores.json")
    assert scores["r2"] == pytest.approx(results_of(run)["metrics"]["r2"], abs=1e-4)


def test_the_card_tells_scores_with_intervals_and_shows_the_predictions(run):
    card = (run / "model" / "README.md").read_text()
    assert f"**{results_of(run)['metrics']['mae']:.4g}**, 95% interval" in card
    assert (run / "model" / "figures" / "scatter.png").is_file()
    assert "figures/scatter.png" in card
    assert not (run / "model" / "figures" / "confusion.png").exists()


def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_bits(train, run, tmp_path):
    halves = cut_back(shutil.copytree(run, tmp_path / "halves"), 50)
    train(halves)
    found, wanted = results_of(halves), results_of(run)
    assert found["resumed_at_steps"] == [50]
    assert found["weights_sha256"] == wanted["weights_sha256"]


@pytest.mark.parametrize("flags", [dict(lora_rank=2), dict(freeze_backbone=True, cache_features=True), {}])
def test_a_checkpoint_is_fine_tuned_in_every_way_and_starts_from_a_new_head(train, run, flags, tmp_path):
    tuned = train(tmp_path / "tuned", model_name_or_path=str(run / "model"), max_train_steps=60, **flags)
    assert results_of(tuned)["metrics"]["r2"] > 0.5
    assert HFViTForImageClassification.from_pretrained(tuned / "model").config.problem_type == "regression"


@pytest.mark.parametrize(
    ("change", "flags", "named"),
    [
        (("", ""), {}, "--problem_type regression"),
        (("1.png,1", "1.png,x1"), dict(problem_type="regression"), "x1"),
        (("1.png,1", "1.png,nan,train\n1.png,1"), dict(problem_type="regression"), "nan"),
        (("", ""), dict(problem_type="regression", shots=3), "--shots"),
    ],
    ids=["decimals without the flag", "text with it", "not a number", "shots"],
)
def test_labels_that_are_no_numbers_to_learn_are_refused(home, change, flags, named):
    (home / "photos" / "other.csv").write_text((home / "photos" / "photos.csv").read_text().replace(*change, 1))
    task = Regression if flags else Classification
    with pytest.raises(UserError, match=named):
        runs.train(home / "photos" / "other.csv", home / "refused", task, label_column="light", **flags)
    assert not (home / "refused").exists()


def test_metrics_are_those_of_scikit_learn_and_intervals_hold_the_truth():
    labels = torch.randn(200)
    predicted = labels + 0.5 * torch.randn(200)
    metrics = regression_metrics(predicted, labels)
    assert metrics["mae"] == pytest.approx(sklearn.mean_absolute_error(labels, predicted), rel=1e-6)
    assert metrics["r2"] == pytest.approx(sklearn.r2_score(labels, predicted), rel=1e-6)
    for name, (low, high) in regression_intervals(predicted, labels).items():
        assert low < metrics[name] < high
        assert high - low < 0.2

"""Claims about the recipes, tested by running the real commands."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from image_data import picture
from PIL import Image
from runs import TINY, logged, read_json, recipe, results_of, save_with_processor, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoImageProcessor, ViTConfig, ViTForImageClassification

from hf_vit import HFViTForImageClassification, HFViTModel


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three classes of colour, 20 PNG or JPEG files each, of several sizes and modes."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    rng = np.random.default_rng(0)
    for label, color in {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}.items():
        (folder / label).mkdir(parents=True)
        for index in range(20):
            pixels = rng.normal(color, 25, (*rng.integers(12, 40, 2), 3))
            image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
            name = f"{index}.png" if index % 2 == 0 else f"{index}.jpg"
            image.convert("RGBA" if index == 0 else "RGB").save(folder / label / name)
    return folder


@pytest.fixture(scope="module")
def run(photos):
    """A finished run on `photos`."""
    folder = photos.parent / "runs" / "colours"
    flags = f"--preset tiny-patch16-224 --config_overrides {TINY} --num_train_epochs 8 --per_device_train_batch_size 8 --eval_fraction 0.2 "
    flags += "--gradient_accumulation_steps 2 --ema_decay 0.9 --erase 0.2 --log_steps 3 --eval_crop 0.875"
    recipe("train.py --dataset_name", photos, "--output_dir", folder, flags, cwd=photos.parent)
    return folder


@pytest.mark.parametrize("script", ["train.py", "pretrain.py"])
def test_a_dry_run_prints_what_is_read_and_leaves_nothing(script, photos, tmp_path):
    flags = f"--dataset_name {photos} --preset tiny-patch16-224 --output_dir runs/x --dry_run true"
    assert "train: 54 images, 3 classes (blue 18, green 18, red 18)" in recipe(script, flags, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_results_and_log_tell_the_course_of_a_run(run):
    """tests/goldens has the names of files and keys."""
    results, losses, accuracies = results_of(run), logged(run, "loss"), logged(run, "eval_accuracy")
    assert (results["data"]["train_images"], results["steps"]) == (48, 24)
    assert list(losses) == list(range(3, 25, 3))
    assert losses[3] > losses[24]
    assert len(accuracies) == 8
    assert results["metrics"]["accuracy"] == max(accuracies.values()) >= 0.9
    parts = (results["seconds"][name] for name in ("input", "model", "scoring"))
    assert sum(parts) <= results["train_seconds"] + 1  # rounded, each
    assert results["train_seconds"] <= results["total_seconds"]


def test_every_scored_image_is_in_the_table_of_predictions_with_its_file(run, photos):
    table, results = pd.read_csv(run / "predictions.csv"), results_of(run)
    assert list(table) == ["row", "file", "label", "predicted", "confidence", "correct"]
    assert table["row"].nunique() == len(table) == results["data"]["scored_images"] == 12
    assert all((photos / file).is_file() for file in table["file"])
    assert table["label"].tolist() == [file.partition("/")[0] for file in table["file"]]
    assert table["correct"].equals(table["label"] == table["predicted"])
    assert table["correct"].mean() == results["metrics"]["accuracy"]
    assert table["confidence"].between(1 / 3, 1).all()


def test_the_saved_model_classifies_and_scores_as_the_run_said(run, photos):
    processor = AutoImageProcessor.from_pretrained(run / "model")
    assert dict(processor.size) == {"shortest_edge": 18}  # --eval_crop 0.875
    flags = f"--model_name_or_path {run}/model --dataset_name {photos} --split train --output_file scores.json"
    recipe("eval.py", flags, cwd=photos.parent)
    scores = read_json(photos.parent / "scores.json")
    assert scores["images"] == 60
    assert scores["accuracy"] >= 0.9
    answers, of_run = (
        pd.read_csv(file).set_index("file")["predicted"]
        for file in (photos.parent / "scores.predictions.csv", run / "predictions.csv")
    )
    assert {*answers.index} == {str(file.relative_to(photos)) for file in photos.rglob("*.*")}
    assert answers[of_run.index].equals(of_run)


def test_classify_says_what_it_sees_and_reads_what_training_reads(run, photos, tmp_path):
    pixels = np.asarray(Image.open(photos / "red" / "4.png").convert("L"))
    Image.fromarray(pixels.astype(np.uint16) * 257).save(tmp_path / "deep.png")
    Image.fromarray(pixels).save(tmp_path / "grey.png")
    Image.fromarray(np.full((10, 1000, 3), (200, 40, 40), np.uint8)).save(tmp_path / "flat.png")
    (tmp_path / "broken.png").write_text("no image")
    files = ("broken.png", "flat.png", photos / "blue" / "5.jpg", "deep.png", "grey.png")
    flat, blue, deep, grey, *_, error = recipe("classify.py", run, *files, cwd=tmp_path, fails=True).splitlines()
    assert "broken.png" in error
    assert re.match(r"flat\.png: red \d+%, ", flat)
    assert re.match(r"5\.jpg: blue \d+%, ", blue)
    assert deep.replace("deep", "grey") == grey


def test_the_command_that_a_run_prints_runs_as_it_is_printed_with_spaces_in_every_path(tmp_path):
    """train.py names classify.py; nothing better than chance comes of noise, and the run and its card say so."""
    for number in range(60):
        file = tmp_path / "my photos" / "abc"[number % 3] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        picture(number, (16, 16)).save(file)
    places = ("--dataset_name", Path("my photos"), "--output_dir", Path("my runs/a b"))
    flags = f"--preset tiny-patch16-224 --config_overrides {TINY} --max_train_steps 1"
    printed = recipe("train.py", *places, flags, cwd=tmp_path)
    (warning,) = results_of(tmp_path / "my runs" / "a b")["warnings"]
    assert warning in printed
    assert warning in (tmp_path / "my runs" / "a b" / "model" / "README.md").read_text()
    line = re.search("next: (.*)", printed)[1]
    activated = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    done = subprocess.run(line, shell=True, capture_output=True, text=True, cwd=tmp_path, env=activated)
    assert done.stdout.startswith("example.png: "), done.stderr


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A native checkpoint of five labels that know nothing of colours."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=8, patch_size=4, num_labels=5
    )  # fmt: skip
    return save_with_processor(ViTForImageClassification(config), folder)


def weights_of(run):
    return HFViTForImageClassification.from_pretrained(run / "model").state_dict()


def test_cached_features_give_the_same_head_also_after_a_stop_and_the_backbone_sees_each_image_once(
    base, photos, tmp_path, monkeypatch
):
    """The base drops nothing while its head is trained, with dropout, for 4 epochs."""
    seen, forward = {}, HFViTModel.forward

    def head(name, **flags):
        def counted(self, pixel_values, *args, **kwargs):
            seen[name] = seen.get(name, 0) + len(pixel_values)
            return forward(self, pixel_values, *args, **kwargs)

        monkeypatch.setattr(HFViTModel, "forward", counted)
        how = dict(
            model_name_or_path=str(base), image_size=16, freeze_backbone=True, crop="none", flip=False, num_train_epochs=4.0,
            eval_epochs=4, per_device_train_batch_size=16, eval_fraction=0.2, log_steps=3, ema_decay=0.9, checkpointing_steps=5,
            learning_rate=0.01, mixed_precision="no", config_overrides="hidden_dropout_prob=0.2",
        )  # fmt: skip
        return train(photos, tmp_path / name, **how, **flags), weights_of(tmp_path / name)

    plain, wanted = head("plain")
    cached, found = head("cached", cache_features=True)
    # 12 are scored at the end, and again by the saved model
    assert seen["plain"] == 4 * 48 + 12 + 12
    assert seen["cached"] == 48 + 12 + 12
    assert found["classifier.weight"].abs().max() > 0.01
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted if not name.startswith("classifier."))
    assert plain.trained_parameters == cached.trained_parameters == 32 * 3 + 3
    assert logged(tmp_path / "cached", "loss") == pytest.approx(logged(tmp_path / "plain", "loss"), abs=1e-5)
    resume = str(tmp_path / "cached" / "checkpoints" / "step-000010")
    again, _ = head("again", cache_features=True, resume=resume)
    assert (again.resumed_at_steps, again.weights_sha256) == ([10], cached.weights_sha256)


def test_any_image_classifier_is_scored_and_its_features_are_probed(run, photos, tmp_path):
    HFViTForImageClassification.from_pretrained(run / "model").to_transformers().save_pretrained(tmp_path / "native")
    shutil.copy(run / "model" / "preprocessor_config.json", tmp_path / "native")
    for split in ("--split", "--probe_split"):
        scores, flags = [], f"--dataset_name {photos} {split} train --output_file scores.json --overwrite true"
        for model in (run / "model", "native"):
            recipe("eval.py --model_name_or_path", model, flags, cwd=tmp_path)
            scores.append(read_json(tmp_path / "scores.json"))
        numbers = [{key: value for key, value in found.items() if isinstance(value, int | float)} for found in scores]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-5)
        if split == "--split":
            assert scores[0]["confusion_matrix"] == scores[1]["confusion_matrix"]
    assert scores[0]["images"] == 6  # the part that is set aside
    assert scores[0]["knn_accuracy"] >= 0.8
    assert {"1_shot_accuracy", "5_shot_accuracy", "10_shot_accuracy"} <= {*scores[0]}


def test_labels_are_matched_by_name_and_a_probe_knows_those_of_its_split_alone(run, photos, tmp_path):
    model = HFViTForImageClassification.from_pretrained(run / "model")
    for parameter in model.classifier.parameters():
        parameter.data = parameter.data.roll(1, 0)
    model.config.id2label = dict(enumerate(["red", "blue", "green"]))
    model.save_pretrained(tmp_path / "rolled")
    shutil.copy(run / "model" / "preprocessor_config.json", tmp_path / "rolled")
    for name, other in (("red", "green"), ("green", "blue"), ("blue", "red")):
        shutil.copytree(photos / name, tmp_path / "data" / "test" / name)
        shutil.copytree(photos / name, tmp_path / "data" / "train" / other)  # where all labels are wrong
    scores, line = {}, "eval.py --model_name_or_path rolled --dataset_name data --split test --output_file"
    for name, probe in (("head", ""), ("probe", "--probe_split train")):
        recipe(line, f"{name}.json", probe, cwd=tmp_path)
        scores |= read_json(tmp_path / f"{name}.json")
    assert scores["accuracy"] >= 0.9
    assert max(scores[name] for name in ("knn_accuracy", "5_shot_accuracy", "10_shot_accuracy")) <= 0.2


def test_features_are_probed_where_the_head_knows_other_labels(base, photos, tmp_path):
    line = f"eval.py --model_name_or_path {base} --dataset_name {photos}"
    printed = recipe(line, "--probe_split train", cwd=tmp_path)
    assert "knn_accuracy" in printed
    line += " --split train"
    assert "does not know 3 of the data set's 3 labels" in recipe(line, cwd=tmp_path, fails=True)
    assert "both train" in recipe(line, "--probe_split train", cwd=tmp_path, fails=True)


def test_a_run_learns_from_a_teacher_and_is_logged_to_a_tracker(run, photos, tmp_path):
    flags = dict(max_train_steps=40, per_device_train_batch_size=8, eval_fraction=0.2, report_to="tensorboard")
    results = train(photos, tmp_path / "run", teacher_name_or_path=str(run / "model"), **flags)
    assert results.metrics["accuracy"] >= 0.8
    (events,) = (tmp_path / "run").rglob("events.out.tfevents.*.0")
    reader = EventAccumulator(str(events.parent))
    reader.Reload()
    found = {event.step: event.value for event in reader.Scalars("loss")}
    assert found == pytest.approx(logged(tmp_path / "run", "loss"), rel=1e-6)


def test_an_unknown_or_missing_tracker_is_refused(photos, tmp_path):
    for name in ("tensorbord", "clearml"):
        with pytest.raises(ValueError, match=name):
            train(photos, tmp_path / "run", report_to=name)


@pytest.mark.slow
def test_the_demo_reaches_86_percent(tmp_path):
    recipe("train.py --config demo", cwd=tmp_path)
    assert results_of(tmp_path / "runs" / "demo")["metrics"]["accuracy"] >= 0.86

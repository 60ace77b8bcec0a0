"""Claims about the recipes, tested by running the real commands."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from io import BytesIO

import forked
import numpy as np
import pytest
import torch
from PIL import Image
from runs import HOUSE, TINY, log_of, logged, recipe, results_of, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import (
    AutoImageProcessor,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

import hf_vit


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three classes of colour, 20 PNG or JPEG files each, of several sizes and modes."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    rng = np.random.default_rng(0)
    for label, color in {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}.items():
        (folder / label).mkdir(parents=True)
        for index in range(20):
            size = (int(rng.integers(12, 40)), int(rng.integers(12, 40)), 3)
            image = Image.fromarray(np.clip(np.array(color) + rng.normal(0, 25, size), 0, 255).astype(np.uint8))
            image.convert("RGBA" if index == 0 else "RGB").save(
                folder / label / f"{index}.{'png' if index % 2 == 0 else 'jpg'}"
            )
    return folder


@pytest.fixture(scope="module")
def run(photos):
    """A finished run on `photos`."""
    folder = photos.parent / "runs" / "colours"
    recipe(
        "train.py", "--dataset_name", photos, "--preset", "tiny-patch16-224", "--config_overrides", TINY,
        "--output_dir", folder, "--num_train_epochs", 8, "--per_device_train_batch_size", 8, "--eval_fraction", 0.2,
        "--gradient_accumulation_steps", 2, "--ema_decay", 0.9, "--erase", 0.2, "--log_steps", 3, "--eval_crop", 0.875,
        cwd=photos.parent,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("script", ["train.py", "pretrain.py"])
def test_a_dry_run_prints_what_is_read_and_leaves_nothing(script, photos, tmp_path):
    flags = ("--dataset_name", photos, "--preset", "tiny-patch16-224", "--output_dir", "runs/x", "--dry_run", "true")
    assert "train: 54 images, 3 classes (blue 18, green 18, red 18)" in recipe(script, *flags, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_leaves_what_its_documentation_lists(run):
    listed = {"config.yaml", "metrics.jsonl", "model", "results.json", "samples.safetensors", "predictions.csv"}
    assert listed <= set(os.listdir(run))
    code = {file.name for file in HOUSE.glob("hf_vit/model/*.py")} - {"__init__.py", "masked_autoencoder.py"}
    saved = {"README.md", "config.json", "model.safetensors", "preprocessor_config.json", "example.png", "figures"}
    assert set(os.listdir(run / "model")) == code | saved
    results, lines = results_of(run), log_of(run)
    assert {"train_seconds", "images_per_second", "seed", "commit", "command", "hardware", "versions"} <= set(results)
    assert results["metrics"]["accuracy"] >= 0.9
    assert (results["data"]["train_images"], results["steps"]) == (48, 24)
    parts = (results["seconds"][name] for name in ("input", "model", "scoring"))
    assert sum(parts) <= results["train_seconds"] + 1  # rounded, each
    assert results["train_seconds"] <= results["total_seconds"]
    assert list(logged(run, "loss")) == list(range(3, 25, 3))
    assert lines[0]["loss"] > [line for line in lines if "loss" in line][-1]["loss"]
    scores = logged(run, "eval_accuracy").values()
    assert len(scores) == 8
    assert results["metrics"]["accuracy"] == max(scores)


def table(file):
    """The lines of a table of predictions."""
    with open(file, newline="", encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


def test_every_scored_image_is_in_the_table_of_predictions_with_its_file(run, photos):
    lines = table(run / "predictions.csv")
    assert list(lines[0]) == ["row", "file", "label", "predicted", "confidence", "correct"]
    assert len({line["row"] for line in lines}) == results_of(run)["data"]["scored_images"] == 12
    assert all(line["file"].startswith(f"{line['label']}/") and (photos / line["file"]).is_file() for line in lines)
    assert [line["correct"] == "true" for line in lines] == [line["label"] == line["predicted"] for line in lines]
    assert sum(line["correct"] == "true" for line in lines) / 12 == results_of(run)["metrics"]["accuracy"]
    assert all(1 / 3 <= float(line["confidence"]) <= 1 for line in lines)


def test_the_saved_model_classifies_and_scores_as_the_run_said(run, photos):
    processor = AutoImageProcessor.from_pretrained(run / "model")
    assert dict(processor.size) == {"shortest_edge": 18}  # --eval_crop 0.875
    flags = ["--dataset_name", photos, "--split", "train", "--output_file", run.parent / "scores.json"]
    recipe("eval.py", "--model_name_or_path", run / "model", *flags, cwd=photos.parent)
    scores = json.loads((run.parent / "scores.json").read_text())
    assert scores["images"] == 60
    assert scores["accuracy"] >= 0.9
    lines = table(run.parent / "scores.predictions.csv")
    assert {line["file"] for line in lines} == {str(file.relative_to(photos)) for file in photos.rglob("*.*")}
    of_run = {line["file"]: line["predicted"] for line in table(run / "predictions.csv")}
    assert {line["file"]: line["predicted"] for line in lines if line["file"] in of_run} == of_run


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
    rng = np.random.default_rng(0)
    for number in range(60):
        file = tmp_path / "my photos" / "abc"[number % 3] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(file)
    flags = ["--dataset_name", "my photos", "--preset", "tiny-patch16-224", "--config_overrides", TINY]
    printed = recipe("train.py", *flags, "--output_dir", "my runs/a b", "--max_train_steps", 1, cwd=tmp_path)
    (warning,) = results_of(tmp_path / "my runs" / "a b")["warnings"]
    assert warning in printed
    assert warning in (tmp_path / "my runs" / "a b" / "model" / "README.md").read_text()
    line = re.search("next: (.*)", printed)[1]
    activated = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    done = subprocess.run(line, shell=True, capture_output=True, text=True, cwd=tmp_path, env=activated)
    assert done.stdout.startswith("example.png: "), done.stderr


def test_fine_tuning_starts_from_the_checkpoint_and_config_yaml_repeats_a_run(run, photos):
    flags = ["--dataset_name", photos, "--model_name_or_path", run / "model", "--max_train_steps", 2]
    recipe("train.py", *flags, "--eval_fraction", 0.2, "--output_dir", "runs/tuned", cwd=photos.parent)
    tuned = photos.parent / "runs" / "tuned"
    assert results_of(tuned)["metrics"]["accuracy"] >= 0.9  # two steps from random weights would not
    recipe("train.py", "--config", tuned / "config.yaml", "--output_dir", "runs/again", cwd=photos.parent)
    assert results_of(photos.parent / "runs" / "again")["weights_sha256"] == results_of(tuned)["weights_sha256"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A native checkpoint of five labels that know nothing of colours."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=8, patch_size=4, num_labels=5
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder)
    return folder


COUNTED = """
import json, os, runpy, sys
import torch
from hf_vit import HFViTModel

seen, forward = {"with gradients": 0, "without": 0}, HFViTModel.forward

def counted(self, pixel_values, *args, **kwargs):
    seen["with gradients" if torch.is_grad_enabled() else "without"] += len(pixel_values)
    return forward(self, pixel_values, *args, **kwargs)

HFViTModel.forward = counted
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))  # as Python does for a script
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("images seen by the backbone:", json.dumps(seen))
"""


@pytest.fixture(scope="module")
def head(base, photos, tmp_path_factory):
    """head(name, *flags) -> a run that trains a head on the frozen base, which drops nothing, for 4 epochs, and what its backbone
    saw."""
    home = tmp_path_factory.mktemp("heads")

    def head(name, *flags):
        command = [
            sys.executable, "-W", "ignore", "-c", COUNTED, HOUSE / "recipes" / "train.py", "--dataset_name", photos,
            "--model_name_or_path", base, "--image_size", 16, "--freeze_backbone", "true", "--crop", "none", "--flip", "false",
            "--output_dir", name, "--num_train_epochs", 4, "--eval_epochs", 4, "--per_device_train_batch_size", 16,
            "--eval_fraction", 0.2, "--log_steps", 3, "--ema_decay", 0.9, "--checkpointing_steps", 5, "--learning_rate", 0.01,
            "--mixed_precision", "no", "--config_overrides", "hidden_dropout_prob=0.2",
            *flags,
        ]  # fmt: skip
        result = forked.run(command, cwd=home)
        assert result.returncode == 0, result.stdout + result.stderr
        (line,) = [line for line in result.stdout.splitlines() if line.startswith("images seen by the backbone:")]
        return home / name, json.loads(line.partition(":")[2])

    return head


@pytest.fixture(scope="module")
def cached(head):
    return head("cached", "--cache_features", "true")


def weights_of(run):
    return hf_vit.HFViTForImageClassification.from_pretrained(run / "model").state_dict()


def test_cached_features_give_the_same_head_and_the_backbone_sees_each_image_once(head, cached):
    plain, seen = head("plain")
    folder, seen_cached = cached
    # A trial of one batch; 12 are scored at the end, and again by the saved model; the pictures look at 4 of them.
    pictures = [seen_cached["with gradients"], seen_cached["without"] - 48 - 12 - 12]
    assert seen == {"with gradients": 16 + 4 * 48 + pictures[0], "without": 12 + 12 + pictures[1]}
    assert max(pictures) <= 4 * 4
    wanted, found = weights_of(plain), weights_of(folder)
    assert found["classifier.weight"].abs().max() > 0.01
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted if not name.startswith("classifier."))
    assert results_of(plain)["trained_parameters"] == results_of(folder)["trained_parameters"] == 32 * 3 + 3
    assert logged(folder, "loss") == pytest.approx(logged(plain, "loss"), abs=1e-5)


def test_a_head_on_cached_features_goes_on_after_a_stop_as_if_there_had_been_none(head, cached):
    folder, _ = cached
    again, _ = head("again", "--cache_features", "true", "--resume", folder / "checkpoints" / "step-000010")
    assert results_of(again)["resumed_at_steps"] == [10]
    wanted, found = weights_of(folder), weights_of(again)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_any_image_classifier_is_scored_and_its_features_are_probed(run, photos, tmp_path):
    hf_vit.HFViTForImageClassification.from_pretrained(run / "model").to_transformers().save_pretrained(
        tmp_path / "native"
    )
    AutoImageProcessor.from_pretrained(run / "model").save_pretrained(tmp_path / "native")
    for flags in ([], ["--probe_split", "train"]):
        scores = []
        for model in (run / "model", tmp_path / "native"):
            flags += ["--output_file", "scores.json", "--overwrite"]
            recipe("eval.py", "--model_name_or_path", model, "--dataset_name", photos, *flags, cwd=tmp_path)
            scores.append(json.loads((tmp_path / "scores.json").read_text()))
        ours, native = (
            {key: value for key, value in found.items() if isinstance(value, int | float)} for found in scores
        )
        assert native == pytest.approx(ours, abs=1e-5)
        if flags[0] == "--probe_split":
            assert ours["knn_accuracy"] >= 0.8
            assert {"1_shot_accuracy", "5_shot_accuracy", "10_shot_accuracy"} <= set(ours)
        else:
            assert scores[0]["confusion_matrix"] == scores[1]["confusion_matrix"]
            assert [row["images"] for row in scores[0]["per_class"]] == [2, 2, 2]  # the part that is set aside


def test_labels_are_matched_by_name_and_a_probe_knows_those_of_its_split_alone(run, photos, tmp_path):
    model = hf_vit.HFViTForImageClassification.from_pretrained(run / "model")
    for parameter in model.classifier.parameters():
        parameter.data = parameter.data.roll(1, 0)
    model.config.id2label = dict(enumerate(["red", "blue", "green"]))
    model.save_pretrained(tmp_path / "rolled")
    shutil.copy(run / "model" / "preprocessor_config.json", tmp_path / "rolled")
    for name, other in (("red", "green"), ("green", "blue"), ("blue", "red")):
        shutil.copytree(photos / name, tmp_path / "data" / "test" / name)
        shutil.copytree(photos / name, tmp_path / "data" / "train" / other)  # where all labels are wrong
    scores, flags = {}, ["--dataset_name", "data", "--split", "test", "--output_file"]
    for name, probe in (("head", ()), ("probe", ("--probe_split", "train"))):
        recipe("eval.py", "--model_name_or_path", "rolled", *flags, f"{name}.json", *probe, cwd=tmp_path)
        scores |= json.loads((tmp_path / f"{name}.json").read_text())
    assert scores["accuracy"] >= 0.9
    assert max(scores[name] for name in ("knn_accuracy", "5_shot_accuracy", "10_shot_accuracy")) <= 0.2


def test_features_are_probed_where_the_head_knows_other_labels(base, photos, tmp_path):
    flags = ["--model_name_or_path", base, "--dataset_name", photos]
    printed = recipe("eval.py", *flags, "--probe_split", "train", cwd=tmp_path)
    assert "knn_accuracy" in printed
    flags += ["--split", "train"]
    assert "does not know 3 of the data set's 3 labels" in recipe("eval.py", *flags, cwd=tmp_path, fails=True)
    assert "both train" in recipe("eval.py", *flags, "--probe_split", "train", cwd=tmp_path, fails=True)


@pytest.fixture(scope="module")
def shards(photos, tmp_path_factory):
    """The photos as three WebDataset shards to train on and one to score; labels are bare numbers."""
    folder = tmp_path_factory.mktemp("shards")
    files = [
        (file, label)
        for label, name in enumerate(("red", "green", "blue"))
        for file in sorted((photos / name).glob("*.jpg"))
    ]
    for number, name in enumerate(("train-0", "train-1", "train-2", "val-0")):
        with tarfile.open(folder / f"{name}.tar", "w") as tar:
            for index, (file, label) in enumerate(files[number::4]):
                for suffix, content in (("jpg", file.read_bytes()), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{name}_{index}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, BytesIO(content))
    (folder / "names.txt").write_text("red\ngreen\nblue\n")
    return folder


def test_a_stream_is_trained_on_learns_from_a_teacher_and_is_logged_to_a_tracker(run, shards, tmp_path):
    flags = dict(
        streaming=True, max_train_steps=40, per_device_train_batch_size=8, teacher_name_or_path=str(run / "model")
    )
    flags |= dict(label_names=str(shards / "names.txt"), report_to="tensorboard")
    results = train(shards, tmp_path / "run", **flags)
    assert results.metrics["accuracy"] >= 0.8
    lines = table(tmp_path / "run" / "predictions.csv")
    assert [int(line["row"]) for line in lines] == list(range(len(lines)))
    assert all(line["file"].endswith(f"val-0_{line['row']}.jpg") for line in lines)
    (events,) = (tmp_path / "run").rglob("events.out.tfevents.*.0")
    reader = EventAccumulator(str(events.parent))
    reader.Reload()
    found = {event.step: event.value for event in reader.Scalars("loss")}
    assert found == pytest.approx(logged(tmp_path / "run", "loss"), rel=1e-6)


def test_an_error_late_in_a_run_loses_no_step(shards, tmp_path):
    shutil.copytree(shards, tmp_path / "shards")
    with tarfile.open(tmp_path / "shards" / "train-2.tar", "a") as tar:
        for suffix, content in (("jpg", b"no picture"), ("cls", b"1")):
            member = tarfile.TarInfo(f"last.{suffix}")
            member.size = len(content)
            tar.addfile(member, BytesIO(content))
    printed = recipe(
        "train.py", "--dataset_name", "shards", "--label_names", shards / "names.txt", "--streaming", "true", "--shuffle_buffer", 1,
        "--max_train_steps", 100, "--preset", "tiny-patch16-224", "--config_overrides", TINY, "--per_device_train_batch_size", 2,
        "--output_dir", "run", cwd=tmp_path, fails=True,
    )  # fmt: skip
    assert "cannot be read as an image" in printed
    (said,) = [line for line in printed.splitlines() if "the last checkpoint is of step" in line]
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert int(checkpoint.name.removeprefix("step-")) == int(said.rpartition(" ")[2]) > 0


def test_an_unknown_or_missing_tracker_is_refused(photos, tmp_path):
    for name in ("tensorbord", "clearml"):
        with pytest.raises(ValueError, match=name):
            train(photos, tmp_path / "run", report_to=name)


@pytest.mark.slow
def test_the_demo_reaches_86_percent(tmp_path):
    recipe("train.py", "--config", HOUSE / "recipes" / "configs" / "demo.yaml", cwd=tmp_path)
    assert results_of(tmp_path / "runs" / "demo")["metrics"]["accuracy"] >= 0.86

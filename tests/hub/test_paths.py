"""What leaves this machine names no place of it: not the card, not its configuration, not a byte of what is pushed."""

import json
import shlex
import shutil
import sys
from dataclasses import fields, replace
from pathlib import Path

import forked
import pytest
import yaml
from loopback_hub import Hub
from publishing import HOUSE, recipe, talking_to
from safetensors.torch import load_file

from hf_vit import figures
from hf_vit.card import without_paths
from hf_vit.data.image_spec import image_spec_of
from hf_vit.evaluation.classifiers import load_classifier, load_processor
from hf_vit.evaluation.results import Results
from hf_vit.hub.finished_run import read_redacted
from hf_vit.run_figures import image_figure
from hf_vit.system.hub_names import name_of_path


@pytest.fixture(scope="module")
def private(tmp_path_factory, demo_run):
    """A folder that is nobody's business, and in it a run whose every flag gives a path in it: the folder and the run."""
    home = tmp_path_factory.mktemp("al's secret home")
    shutil.copytree(HOUSE / "recipes" / "data" / "fashion-mnist-mini", home / "photos")
    shutil.copytree(demo_run / "model", home / "base" / "model")
    names = list(json.loads((demo_run / "model" / "config.json").read_text())["id2label"].values())
    (home / "names.txt").write_text("\n".join(names))
    (home / "short.yaml").write_text("max_train_steps: 2\nshots: 50\n")
    flags = {
        "--config": home / "short.yaml", "--dataset_name": home / "photos", "--model_name_or_path": home / "base" / "model",
        "--teacher_name_or_path": home / "base" / "model", "--label_names": home / "names.txt", "--output_dir": home / "run",
    }  # fmt: skip
    line = [sys.executable, "-W", "ignore", HOUSE / "recipes" / "train.py", *(f"{k}={v}" for k, v in flags.items())]
    forked.run(line, cwd=home, check=True)
    return home, home / "run"


@pytest.fixture(scope="module")
def pushed(private, tmp_path_factory):
    """{name: bytes} of all that a push of that run, its ONNX files and its Space brought to a Hub."""
    pytest.importorskip("onnxscript", reason="export needs the extra `export`")
    home, run = private
    shutil.copytree(run, home / "exported")
    line = [sys.executable, "-W", "ignore", HOUSE / "recipes" / "export.py", "exported"]
    forked.run(line, cwd=home, check=True)
    cache = tmp_path_factory.mktemp("cache")
    with Hub() as hub, talking_to(hub.url, cache):
        recipe(home / "exported", "--repo", "alice/model", "--push")
        recipe(home / "exported", "--repo", "alice/page", "--space", "--push")
        files = {f"model/{name}": data for name, data in hub.files("alice/model").items()}
        return files | {f"page/{name}": data for name, data in hub.files("spaces/alice/page").items()}


def test_no_byte_that_is_pushed_holds_a_path_of_the_owner(private, pushed):
    home, _ = private
    assert {"model/README.md", "model/training/config.yaml", "model/onnx/model.onnx", "page/app.py"} <= {*pushed}
    for secret in (str(home), home.name, str(home.parent), str(Path.home())):
        assert [name for name, data in pushed.items() if secret.encode() in data] == [], secret


def test_the_run_folder_keeps_the_paths_and_repeats_the_run(private):
    home, run = private
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["dataset_name"] == str(home / "photos")
    words = shlex.split(json.loads((run / "results.json").read_text())["command"])
    assert f"--model_name_or_path={home / 'base' / 'model'}" in words


def test_the_predictions_for_the_owners_files_stay_in_the_run_folder(private, pushed):
    """The table is not pushed, and the picture of mistakes is drawn again without names of files or rows."""
    _, run = private
    assert (run / "predictions.csv").is_file()
    assert [name for name in pushed if "predictions.csv" in name] == []
    samples, folder = load_file(run / "samples.safetensors"), str(run / "model")
    spec = image_spec_of(load_processor(folder), load_classifier(folder).config)
    results = json.loads((run / "results.json").read_text())
    assert "mistakes" not in results
    figures.save(image_figure(samples, "mistaken_", results["data"]["labels"], spec), run.parent / "without.png")
    assert pushed["model/figures/mistakes.png"] == (run.parent / "without.png").read_bytes()
    assert pushed["model/figures/mistakes.png"] != (run / "model" / "figures" / "mistakes.png").read_bytes()


WRITTEN = {field.name: None for field in fields(Results)}
DATA = {"name": "photos", "skipped_first": ["row 3 (/home/al/photos/3.png)"]}
RESULTS = Results(**WRITTEN | {"command": "", "data": DATA, "preset": "x"})


@pytest.mark.parametrize(
    ("word", "public"),
    [
        ("--dataset_name=/home/al/photos/", "--dataset_name=photos"),
        ("~/photos", "photos"),
        ("../../al/photos", "photos"),
        ("/home/al/runs/mine/model", "mine"),
        ("--resume=/home/al/runs/mine/checkpoints/step-000100", "--resume=step-000100"),
        ("/home/al/Bilder & Fotos", "'Bilder & Fotos'"),
        ("google/vit-base-patch16-224", "google/vit-base-patch16-224"),
        ("runs/mine", "runs/mine"),
        ("--learning_rate=1e-3", "--learning_rate=1e-3"),
    ],
)
def test_a_path_becomes_a_name_and_all_else_stays(word, public):
    command = shlex.join(["python", "/home/al/hf_vit/recipes/train.py", word])
    results, _ = without_paths(replace(RESULTS, command=command), "seed: 0\n")
    assert results.command == f"python train.py {public}"
    assert results.data == {"name": "photos", "skipped_first": []}


def test_the_home_directory_is_not_told(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/al"))
    (tmp_path / "config.yaml").write_text("a: /home/al/photos, b: /home/alice/photos, c: x/home/al, d: /home/al\n")
    assert read_redacted(tmp_path / "config.yaml") == "a: ~/photos, b: /home/alice/photos, c: x/home/al, d: ~\n"


def test_a_models_folder_is_called_as_its_run():
    given = ("/a/runs/mine/model", "/a/runs/mine", "/a/photos.parquet", "model", "/model")
    assert [name_of_path(path) for path in given] == ["mine", "mine", "photos.parquet", "model", "model"]

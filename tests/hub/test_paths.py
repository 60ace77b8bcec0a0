"""What leaves this machine names no place of it: not the card, not its configuration, not a byte of what is pushed."""

import shlex
import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from loopback_hub import Hub
from publishing import HOUSE, talking_to
from publishing import recipe as publish
from runs import as_flags, read_json, recipe, results_of
from safetensors.torch import load_file

from hf_vit import figures
from hf_vit.card import without_paths
from hf_vit.data.image_spec import image_spec_of
from hf_vit.evaluation.classifiers import load_classifier, load_processor
from hf_vit.evaluation.results import Results
from hf_vit.hub.finished_run import read_redacted
from hf_vit.run_figures import image_figure


@pytest.fixture(scope="module")
def private(tmp_path_factory, demo_run):
    """A folder that is nobody's business, and in it a run whose every flag gives a path in it."""
    home = tmp_path_factory.mktemp("al's secret home")
    shutil.copytree(HOUSE / "recipes" / "data" / "fashion-mnist-mini", home / "photos")
    shutil.copytree(demo_run / "model", home / "base" / "model")
    names = read_json(demo_run / "model" / "config.json")["id2label"].values()
    (home / "names.txt").write_text("\n".join(names))
    (home / "short.yaml").write_text("max_train_steps: 2\nshots: 50\n")
    flags = {
        "config": home / "short.yaml", "dataset_name": home / "photos", "model_name_or_path": home / "base" / "model",
        "teacher_name_or_path": home / "base" / "model", "label_names": home / "names.txt", "output_dir": home / "run",
    }  # fmt: skip
    recipe("train.py", *map(Path, as_flags(flags)), cwd=home)
    return home


@pytest.fixture(scope="module")
def pushed(private, tmp_path_factory):
    """{name: bytes} of all that a push of that run, its ONNX files and its Space brought to a Hub."""
    pytest.importorskip("onnxscript", reason="export needs the extra `export`")
    exported = shutil.copytree(private / "run", private / "exported")
    recipe("export.py exported", cwd=private)
    with Hub() as hub, talking_to(hub.url, tmp_path_factory.mktemp("cache")):
        publish(exported, "--repo alice/model --push")
        publish(exported, "--repo alice/page --space --push")
        files = {f"model/{name}": data for name, data in hub.files("alice/model").items()}
        return files | {f"page/{name}": data for name, data in hub.files("spaces/alice/page").items()}


def test_no_byte_that_is_pushed_holds_a_path_of_the_owner(private, pushed):
    assert {"model/README.md", "model/training/config.yaml", "model/onnx/model.onnx", "page/app.py"} <= {*pushed}
    for secret in (private.name, str(private.parent), str(Path.home())):
        assert [name for name, data in pushed.items() if secret.encode() in data] == [], secret


def test_the_run_folder_keeps_the_paths_and_repeats_the_run(private):
    config = yaml.safe_load((private / "run" / "config.yaml").read_text())
    assert config["dataset_name"] == str(private / "photos")
    words = shlex.split(results_of(private / "run")["command"])
    assert f"--model_name_or_path={private / 'base' / 'model'}" in words


def test_the_predictions_for_the_owners_files_stay_in_the_run_folder(private, pushed):
    """The table is not pushed, and the picture of mistakes is drawn again without names of files or rows."""
    run = private / "run"
    assert (run / "predictions.csv").is_file()
    assert [name for name in pushed if "predictions.csv" in name] == []
    samples, folder = load_file(run / "samples.safetensors"), str(run / "model")
    spec, labels = (
        image_spec_of(load_processor(folder), load_classifier(folder).config),
        results_of(run)["data"]["labels"],
    )
    figures.save(image_figure(samples, "mistaken_", labels, spec), private / "without.png")
    assert pushed["model/figures/mistakes.png"] == (private / "without.png").read_bytes()
    assert pushed["model/figures/mistakes.png"] != (run / "model" / "figures" / "mistakes.png").read_bytes()


DATA = {"name": "photos", "skipped_first": ["row 3 (/home/al/photos/3.png)"]}
RESULTS = Results(**dict.fromkeys(field.name for field in fields(Results)) | {"data": DATA, "preset": "x"})


@pytest.mark.parametrize(
    ("word", "public"),
    [
        ("--dataset_name=/home/al/photos/", "--dataset_name=photos"),
        ("~/photos", "photos"),
        ("/home/al/runs/mine/model", "mine"),
        ("--resume=/home/al/runs/mine/checkpoints/step-000100", "--resume=step-000100"),
        ("/home/al/Bilder & Fotos", "'Bilder & Fotos'"),
        ("google/vit-base-patch16-224", "google/vit-base-patch16-224"),
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

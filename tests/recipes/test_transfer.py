"""Claims about recipes/transfer.py: what the halves hold, and that all methods run from a model that was on the Hub."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import transfer
from benchmarks import run_tables
from class_halves import split_classes
from datasets import ClassLabel, Dataset, Features, Image
from image_data import spec_of
from loopback_hub import Hub
from PIL import Image as PILImage

from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.sources import dataset_license, load_splits


HOUSE = Path(__file__).parents[2]
NAMES = ["ant", "bee", "cat", "dog", "eel"]
TINY = """
preset: tiny-patch16-224
config_overrides: image_size=8,patch_size=4,hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=32,position_embedding=sincos2d,pooling=mean,use_class_token=false,patch_dropout_rate=0.5
num_train_epochs: 2
per_device_train_batch_size: 8
learning_rate: 1e-3
crop: none
shift: 1
mixed_precision: "no"
"""


def saved(folder, classes, license=None):
    """8x8 images as Parquet, 6 a class to train on and 3 to test; the first pixel of each is its number."""
    folder.mkdir()
    for split, each in (("train", 6), ("test", 3)):
        labels = np.tile(np.arange(classes), each).tolist()
        pictures = [PILImage.fromarray(np.full((8, 8, 3), index, dtype=np.uint8)) for index in range(len(labels))]
        features = Features({"picture": Image(), "kind": ClassLabel(names=NAMES[:classes])})
        Dataset.from_dict({"picture": pictures, "kind": labels}, features).to_parquet(folder / f"{split}.parquet")
    if license:
        (folder / "README.md").write_text(f"---\nlicense: {license}\n---\n")
    return str(folder)


def content(folder):
    """By split: the class names, and (number of the image, its class name) of each row."""
    found = {}
    for split, rows in load_splits(str(folder)).items():
        names = rows.features["label"].names
        numbers = [np.asarray(image)[0, 0, 0].item() for image in rows.cast_column("image", Image())["image"]]
        found[split] = (names, list(zip(numbers, [names[label] for label in rows["label"]], strict=True)))
    return found


def test_the_halves_share_no_class_and_keep_every_test_image(tmp_path):
    name = saved(tmp_path / "data", 5, license="mit")
    folders = split_classes(tmp_path / "halves", name, shots=2)
    first, second = map(content, folders)
    for half, names, images in ((first, ["ant", "cat", "eel"], 18), (second, ["bee", "dog"], 4)):
        assert {split: classes for split, (classes, _) in half.items()} == {"train": names, "test": names}
        assert len(half["train"][1]) == images
        for _, rows in half.values():
            assert all(NAMES[number % 5] == label for number, label in rows)
    assert sorted(number for half in (first, second) for number, _ in half["test"][1]) == list(range(15))
    assert sorted(label for _, label in second["train"][1]) == ["bee", "bee", "dog", "dog"]
    assert {dataset_license(str(folder)) for folder in folders} == {"mit"}
    assert [folder.name for folder in folders] == ["data-even", "data-odd"]
    assert f"bee, dog of {name}" in (folders[1] / "README.md").read_text()


def test_the_halves_are_drawn_alike_and_written_once(tmp_path):
    name = saved(tmp_path / "data", 4)
    one, other = (split_classes(tmp_path / place, name, shots=3) for place in ("one", "other"))
    assert [content(folder) for folder in one] == [content(folder) for folder in other]
    assert {dataset_license(str(folder)) for folder in one} == {None}
    times = lambda: {file: file.stat().st_mtime_ns for file in (tmp_path / "one").rglob("*")}
    before = times()
    assert split_classes(tmp_path / "one", name, shots=3) == one
    assert times() == before
    with pytest.raises(ValueError, match=r"'shots': 3.*'shots': 2.*name another --output_dir"):
        split_classes(tmp_path / "one", name, shots=2)


@pytest.mark.parametrize(
    ("classes", "shots", "said"),
    [(3, 2, r"has 3 classes \(ant, bee, cat\); wanted 4 or more"), (4, 7, "--shots 7.*bee 6")],
)
def test_too_few_classes_or_images_are_refused_before_anything_is_written(classes, shots, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        split_classes(tmp_path / "halves", saved(tmp_path / "data", classes), shots)
    assert not (tmp_path / "halves").exists()


def test_halves_of_a_folder_of_images_hold_their_images(tmp_path):
    for split, count in (("train", 3), ("test", 2)):
        for place, name in enumerate(NAMES[:4]):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for number in range(count):
                PILImage.new("RGB", (8, 8), (40 * place, number, 0)).save(
                    tmp_path / "photos" / split / name / f"{number}.png"
                )
    even, odd = split_classes(tmp_path / "halves", str(tmp_path / "photos"), 2)
    shutil.rmtree(tmp_path / "photos")
    for half, first in ((even, 0), (odd, 40)):
        rows = ImageDataset(load_splits(str(half))["test"], spec_of((8, 8)))
        assert sorted({int(image[0, 0, 0]) for image in rows.cache}) == [first, first + 80]


def line(folder, *flags):
    """recipes/transfer.py as a user would type it, in the repository's root."""
    (folder / "tiny.yaml").write_text(TINY)
    where = ["--config", folder / "tiny.yaml", "--output_dir", folder / "runs", "--dataset_name", folder / "data"]
    return [sys.executable, "-W", "ignore", "recipes/transfer.py", *map(str, [*where, *flags])]


def command(folder, *flags, **environment):
    return subprocess.run(
        line(folder, *flags), capture_output=True, text=True, cwd=HOUSE, timeout=900, env={**os.environ, **environment}
    )


def test_an_error_is_one_sentence(tmp_path):
    saved(tmp_path / "data", 4)
    done = command(tmp_path, "--shots", 7)
    assert done.returncode == 1
    assert re.fullmatch("error: --shots 7.*bee 6.*\n", done.stderr)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_a_signal_to_it_alone_stops_the_run_of_the_moment_after_it_has_saved(number, tmp_path):
    saved(tmp_path / "data", 4)
    log = tmp_path / "runs" / "pretrained" / "metrics.jsonl"
    started = line(tmp_path, "--shots", 2, "--pretrain_epochs", 100_000)
    with subprocess.Popen(started, cwd=HOUSE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as whole:
        until = time.monotonic() + 200
        while not (log.is_file() and log.read_text()) and whole.poll() is None and time.monotonic() < until:
            time.sleep(0.2)
        children = psutil.Process(whole.pid).children()
        whole.send_signal(number)
        said = whole.communicate(timeout=200)
    assert whole.returncode == 75, said
    assert len(children) == 1
    assert not children[0].is_running()
    assert list((tmp_path / "runs" / "pretrained" / "checkpoints").iterdir())
    assert f"{number.name}: saving after this step" in said[1]


def test_public_without_a_repository_is_refused(capsys):
    with pytest.raises(SystemExit):
        transfer.parse_args(["--dataset_name", "photos", "--public"])
    assert "--repo USER/NAME names it" in capsys.readouterr().err


def test_data_without_a_test_split_are_refused(tmp_path):
    name = saved(tmp_path / "data", 4)
    (tmp_path / "data" / "test.parquet").unlink()
    with pytest.raises(ValueError, match="has the splits train; wanted one called test"):
        split_classes(tmp_path / "halves", name, shots=2)


def test_the_seeds_of_a_method_are_runs_of_their_own(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(transfer, "train", lambda folder, **flags: asked.append((folder.name, flags.get("seed"))))
    monkeypatch.setattr(transfer, "probe_features", lambda *_: 1 / 0)
    monkeypatch.setattr(transfer.signal, "signal", lambda *_: None)
    (tmp_path / "tiny.yaml").write_text(TINY)
    data = ["--dataset_name", saved(tmp_path / "data", 4), "--image_column", "picture", "--shots", "2"]
    words = [*data, "--config", tmp_path / "tiny.yaml", "--output_dir", tmp_path / "runs", "--seeds", "2"]
    with pytest.raises(ZeroDivisionError):  # after the last run
        transfer.main(transfer.parse_args([*map(str, words)]))
    assert asked == [("pretrained", None), *((str(seed), seed) for seed in (0, 1) for _ in transfer.METHODS)]


def run_of(name, seed, accuracy):
    """As much of a results.json as the table reads."""
    return dict(
        metrics={"accuracy": accuracy}, trained_parameters=1000, steps=9, train_seconds=5.0, seconds={"scoring": 1.0}, seed=seed,
        base_model_hub_id=None if name in ("scratch", "pretrained") else "alice/half", hardware="a machine", commit="0123456789",
        data={"labels": ["bee", "dog"], "train_images": 8, "scored_images": 6, "scored": "test"},
    )  # fmt: skip


def test_the_table_has_means_spreads_and_points_against_scratch():
    assert list(run_tables.TRANSFER) == list(transfer.METHODS)
    runs = {name: [run_of(name, seed, 0.5 + 0.02 * seed) for seed in (0, 1)] for name in transfer.METHODS}
    runs["lora"] = [run_of("lora", seed, 0.7) for seed in (0, 1)]
    runs["pretrained"] = [run_of("pretrained", 0, 0.9)]
    knn = {"knn_accuracy": 0.41, "seconds": 3.0, "halves_of": "animals"}
    table = run_tables.transfer_table(runs, knn)
    assert "| from scratch | 1,000 | 9 | 4.0 s | 51.00% ± 1.41 | - |" in table
    assert "| LoRA | 1,000 | 9 | 4.0 s | 70.00% ± 0.00 | +19.00 |" in table
    assert "| k-NN | 0 | 0 | 3.0 s | 41.00% | -10.00 |" in table
    assert "`alice/half`" in table
    runs["probe"].pop()
    with pytest.raises(ValueError, match="not every method has 2 seeds"):
        run_tables.transfer_table(runs, knn)


@pytest.mark.slow
def test_every_method_starts_from_the_model_that_was_shared(tmp_path):
    saved(tmp_path / "data", 4)
    flags = ["--shots", 4, "--seeds", 1, "--scratch_epochs", 2, "--finetune_epochs", 1, "--repo", "alice/half"]
    with Hub() as hub:
        at_hub = dict(
            HF_ENDPOINT=hub.url, HF_TOKEN=hub.token, HF_HOME=str(tmp_path / "home"), HF_HUB_DISABLE_XET="1", HF_HUB_OFFLINE="0",
            TRANSFORMERS_OFFLINE="0",
        )  # fmt: skip
        done = command(tmp_path, *flags, **at_hub)
        assert done.returncode == 0, done.stdout + done.stderr
        again = command(tmp_path, *flags, **at_hub)
    assert any(
        method == "GET" and "/alice/half/" in path and "model.safetensors" in path for method, path in hub.requests
    )
    assert hub.repos["alice/half"].private

    runs = {
        name: json.loads((tmp_path / "runs" / name / "0" / "results.json").read_text()) for name in transfer.METHODS
    }
    bases = {name: run["base_model_hub_id"] for name, run in runs.items()}
    assert bases == {name: None if name == "scratch" else "alice/half" for name in transfer.METHODS}
    assert {tuple(run["data"]["labels"]) for run in runs.values()} == {("bee", "dog")}
    assert {run["data"]["train_images"] for run in runs.values()} == {8}
    trained = {name: run["trained_parameters"] for name, run in runs.items()}
    assert trained["probe"] < trained["lora"] < trained["full"] == trained["layer-decay"] == trained["scratch"]
    saved_at = [tmp_path / "runs" / name / "0" / "model" / "config.json" for name in transfer.METHODS]
    assert {json.loads(file.read_text())["patch_dropout_rate"] for file in saved_at} == {0.5}
    knn = json.loads((tmp_path / "runs" / "knn" / "results.json").read_text())
    assert knn["model"] == "alice/half"
    assert knn["images"] == 6
    assert knn["seconds"] > 0

    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines] == [
        f"| {title}" for title in ("method", *run_tables.TRANSFER.values(), "k-NN")
    ]
    assert "pushed to the Hub as `alice/half` and loaded from there" in done.stdout
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("is finished: its results.json and model/ are there") == 1 + len(runs)
    lines_again = [line for line in again.stdout.splitlines() if line.startswith("| ")]
    assert lines_again[:-1] == lines[:-1]  # of the k-NN the seconds differ

"""Claims about runs that are killed, stopped or hindered: each goes on to the result it would have had, or says what is wrong."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from itertools import chain, islice
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace

import forked
import numpy as np
import psutil
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from hf_vit.data import augment, image_dataset
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_spec import ImageSpec
from hf_vit.data.loader import data_loader
from hf_vit.data.sampling import epoch_batches
from hf_vit.data.sources import load_splits
from hf_vit.data.splits import prepare_splits
from hf_vit.system import files
from hf_vit.system.files import atomic_dir, checksummed_dir, verify_checksums, write_text
from hf_vit.training import checkpoints, run_folder
from hf_vit.training.arguments import changed_arguments, parse_args, to_yaml
from hf_vit.training.checkpoints import (
    list_checkpoints,
    load_best,
    newest_checkpoint,
    save_best,
    save_checkpoint,
    step_of,
)
from hf_vit.training.run_folder import continue_run, lock, publish_best
from hf_vit.training.signals import STOPPED


HOUSE = Path(__file__).parents[2]
TINY = "image_size=16,patch_size=4,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
FLAGS = (
    "--dataset_name", "photos", "--preset", "tiny-patch16-224",
    "--config_overrides", TINY + ",drop_path_rate=0.2,hidden_dropout_prob=0.1", "--erase", "0.3", "--ema_decay", "0.9",
    "--per_device_train_batch_size", "4", "--max_train_steps", "12", "--log_steps", "2", "--eval_steps", "4",
    "--checkpointing_steps", "3", "--checkpoints_total_limit", "4",
)  # fmt: skip

SLOW = """
import sys, time
import importlib
module = importlib.import_module("hf_vit.data.augment")
augment = module.augment
def slow(*args, **kwargs):
    print("a step", flush=True)
    time.sleep({seconds})
    return augment(*args, **kwargs)
module.augment = slow
"""
NOT_A_NUMBER = """
import sys, time
import importlib
module = importlib.import_module("hf_vit.data.augment")
augment, clock, steps = module.augment, time.time, []
def spoiled(*args, **kwargs):
    steps.append(None)
    if len(steps) == 5:
        time.time = lambda: clock() - 86400
    return augment(*args, **kwargs) * (float("nan") if len(steps) == 5 else 1)
module.augment = spoiled
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three classes of colour: 8 PNG files each to train on, 4 to score."""
    folder = tmp_path_factory.mktemp("resume") / "photos"
    rng = np.random.default_rng(0)
    for split, count in {"train": 8, "validation": 4}.items():
        for name, color in {"red": (150, 90, 90), "green": (90, 150, 90), "blue": (90, 90, 150)}.items():
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = np.clip(np.array(color) + rng.normal(0, 60, (16, 16, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{index}.png")
    return folder


def start(before="", argv=(), cwd=".", code=0, then=None):
    """What a process printed that runs some code, and then the script that `argv` names; `then(process)` is called while it runs."""
    line = [sys.executable, "-W", "ignore", "-c", before + forked.THEN_THE_SCRIPT, *argv]
    process = forked.Forked(line, cwd, together=True)
    try:
        if then is not None:
            then(process)
        process.wait(120)
    finally:
        process.kill()
    assert process.returncode == code, f"exit code {process.returncode}: {process.printed()}"
    return process.printed()


@pytest.fixture(scope="module")
def train(photos):
    """train(run, *flags) -> what the run of FLAGS in that folder printed, in the folder of the photos."""

    def train(run, *flags, cwd=photos.parent, **how):
        argv = [HOUSE / "recipes" / "train.py", *FLAGS, "--output_dir", run, *flags]
        return start(argv=argv, cwd=cwd, **how)

    return train


def until(condition, process=None, seconds=60):
    """Wait for something that a process does."""
    end = time.monotonic() + seconds
    while not condition():
        assert process is None or psutil.pid_exists(process.pid), f"it left before: {process.printed()}"
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(photos):
    """A run that nothing interrupted, by the real command: 12 steps, checkpoints at 3, 6, 9, 12, scorings at 4, 8, 12."""
    run = photos.parent / "whole"
    line = [sys.executable, "-W", "ignore", HOUSE / "recipes" / "train.py", *FLAGS, "--output_dir", run]
    forked.run(line, cwd=photos.parent, check=True)
    return run


@pytest.fixture
def killed(whole, tmp_path):
    """killed(step) -> a copy of the run as a kill after step 11, and the loss of all checkpoints after `step`, leave it."""

    def killed(step, name="run"):
        run = tmp_path / name
        shutil.copytree(whole, run)
        for folder in ("model", "last"):
            shutil.rmtree(run / folder, ignore_errors=True)
        for file in ("results.json", "confusion_matrix.csv", "predictions.csv"):
            (run / file).unlink()
        for folder in run.glob("checkpoints/*-*"):  # the best weights of a later step too
            if int(folder.name.partition("-")[2]) > step:
                shutil.rmtree(folder)
        return run

    return killed


def log_of(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key not in ("images_per_second", "seconds")} for line in lines
    ]


def results_of(run):
    return json.loads((run / "results.json").read_text())


def files_of(run):
    """Every byte of a folder but its lock."""
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}


def assert_same(run, whole):
    for folder in ("model", "last"):
        assert (run / folder).exists() == (whole / folder).exists()
        if (run / folder).exists():
            weights = [(one / folder / "model.safetensors").read_bytes() for one in (run, whole)]
            assert weights[0] == weights[1]
    assert log_of(run) == log_of(whole)
    assert results_of(run)["metrics"] == results_of(whole)["metrics"]
    assert not list(run.rglob("*.part"))


def flip(path, place=-1):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.fixture
def said(monkeypatch):
    """The warnings of resuming and of the data."""
    warnings = []
    for module in (checkpoints, run_folder):
        monkeypatch.setattr(module.logger, "warning", warnings.append)
    return warnings


# ----------------------------------------------------------------------------------------------------------------------
# To the bit


def test_the_whole_run_learns_logs_and_keeps_what_was_asked_for(whole):
    log = log_of(whole)
    assert [line["step"] for line in log if "loss" in line] == [2, 4, 6, 8, 10, 12]
    assert [line["step"] for line in log if "eval_loss" in line] == [4, 8, 12]
    assert len({line["loss"] for line in log if "loss" in line}) == 6
    assert [folder.name for folder in list_checkpoints(whole)] == [
        "step-000003", "step-000006", "step-000009", "step-000012"
    ]  # fmt: skip
    assert results_of(whole)["resumed_at_steps"] == []
    assert results_of(whole)["skipped_steps"] == []
    for folder in whole.glob("checkpoints/*-*"):
        verify_checksums(folder)


def test_a_run_killed_in_the_midst_of_an_epoch_ends_as_if_nothing_had_happened(killed, train, whole):
    """killed after a checkpoint, in the midst of an epoch, other --num_workers and --checkpointing_steps later | the same command goes on from there: same weights, losses and scores to the bit."""
    run = killed(9)
    printed = train(run, "--num_workers", 0, "--checkpointing_steps", 2)
    assert f"going on after step 9, from {run}/checkpoints/step-000009" in printed
    assert_same(run, whole)
    assert results_of(run)["resumed_at_steps"] == [9]
    assert [folder.name for folder in list_checkpoints(run)][-2:] == ["step-000010", "step-000012"]


def test_lines_after_the_checkpoint_and_half_a_line_are_written_anew(killed, train, whole):
    """killed while it wrote a line of metrics.jsonl, later than the last checkpoint | these lines are dropped and written again, each once."""
    run = killed(3)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 12, "epo')
    train(run)
    assert_same(run, whole)
    assert results_of(run)["resumed_at_steps"] == [3]


def test_a_checkpoint_goes_on_in_another_folder_and_leaves_its_own_as_it_was(killed, train, whole, tmp_path):
    origin, other = killed(9), tmp_path / "other"
    before = files_of(origin)
    train(other, "--resume", origin / "checkpoints" / "step-000006")
    assert_same(other, whole)
    assert results_of(other)["resumed_at_steps"] == [6]
    (
        other / "results.json"
    ).unlink()  # as if killed at the very end: the same command goes on with the folder's own run
    train(other, "--resume", origin / "checkpoints" / "step-000006")
    assert_same(other, whole)
    assert results_of(other)["resumed_at_steps"] == [6, 12]
    assert files_of(origin) == before


def test_a_finished_run_without_its_model_writes_it_again(train, whole, tmp_path):
    """model/ of a finished run deleted | the same command writes it again, without training."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "model")
    train(run)
    assert_same(run, whole)


def test_a_folder_that_holds_other_things_is_left_alone(train, tmp_path):
    """--output_dir where model/ is something else | refused; nothing in it is touched."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.py").touch()
    printed = train(tmp_path, code=1)
    assert "holds model and no run" in printed
    assert (tmp_path / "model" / "mine.py").exists()


def test_predictions_that_lie_where_a_run_would_are_left_alone(train, tmp_path):
    """--output_dir beside results of another command | refused."""
    (tmp_path / "predictions.csv").write_text("mine")
    assert "holds predictions.csv and no run" in train(tmp_path, code=1)
    assert (tmp_path / "predictions.csv").read_text() == "mine"


def test_what_lies_beyond_the_step_that_a_run_goes_on_from_goes(tmp_path):
    for step in (3, 6, 9):
        save(tmp_path, step, keep=3)
    (tmp_path / "checkpoints" / ".step-000008.part").mkdir()
    (tmp_path / "results.json").touch()
    lines = ['{"step": 3}\n', '{"step": 6}\n', '{"step": 7}\n', '{"st']
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    continue_run(tmp_path, tmp_path, 6, 6)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000003", "step-000006"]
    assert not (tmp_path / "results.json").exists()
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:2])


def test_order_and_augmentation_differ_between_epochs_and_not_between_lives():
    """resumed in the middle of an epoch, and of the next one | order and augmentation are functions of seed, epoch and image: none comes twice, none is left out."""
    epochs = [list(epoch_batches(24, 4, 0, epoch)) for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]
    assert sorted(chain(*epochs[0])) == sorted(chain(*epochs[1])) == list(range(24))
    assert list(islice(epoch_batches(24, 4, 0, 1), 3, None)) == epochs[1][3:]
    form = ImageSpec(16, 16, 3, 2, (0.5,) * 3, (0.5,) * 3)
    pixels, index = torch.randint(256, (4, 3, 16, 16), dtype=torch.uint8), torch.tensor(epochs[1][3])
    how = dict(crop="resized", shift=2, flip=True, auto_augment="rand", jitter=0.3, erase=0.5)
    first, second, again = (augment.augment(pixels, index, 0, epoch, form, **how) for epoch in (0, 1, 0))
    assert torch.equal(first, again)
    assert not any(torch.equal(one, other) for one, other in zip(first, second, strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# What may be gone on with


def test_a_finished_run_says_so_and_is_left_alone(train, whole, tmp_path):
    """the command of a finished run again | it says that the run is finished and leaves with 0; nothing is trained or written."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    before = files_of(run)
    assert f"{run} is finished" in train(run)
    assert files_of(run) == before


@pytest.mark.parametrize(
    ("flags", "sentences"),
    [
        (("--learning_rate", 5e-4), ["learning_rate was 0.001 and is 0.0005", "choose another --output_dir"]),
        (("--erase", 0.2, "--seed", 1), ["erase was 0.3 and is 0.2", "seed was 0 and is 1"]),
        (("--resume", "never"), ["already holds an unfinished run", "--overwrite true"]),
        (
            ("--per_device_train_batch_size", 8),
            ["images_per_step was 4 and is 8", "step-000009 does not fit", "--per_device_train_batch_size 4"],
        ),
        (("--resume", "photos"), ["--resume photos: wanted auto, never, a checkpoint or a run folder"]),
    ],
)
def test_another_configuration_is_refused_by_what_differs_and_the_run_is_untouched(killed, train, flags, sentences):
    """a flag changed that decides the result | refused, with its name, the old and the new value; the run is untouched."""
    run = killed(9)
    before = files_of(run)
    printed = train(run, *flags, code=1)
    assert all(sentence in printed for sentence in sentences), printed
    assert "Traceback" not in printed
    assert files_of(run) == before


@pytest.mark.parametrize(
    ("change", "named"), [(shutil.copy, "training_images was 24 and is 25"), (shutil.move, "checksum_of_labels was")]
)
def test_one_image_more_or_under_another_label_is_refused(killed, train, photos, tmp_path, change, named):
    """an image added to the training data, or moved to another class, between two lives | refused, with what was and what is."""
    run = killed(9)
    before = files_of(run)
    shutil.copytree(photos, tmp_path / "photos")
    change(tmp_path / "photos" / "train" / "red" / "0.png", tmp_path / "photos" / "train" / "green" / "new.png")
    printed = train(run, cwd=tmp_path, code=1)
    assert named in printed
    assert "else choose another --output_dir, or pass --overwrite true to begin anew" in printed
    assert files_of(run) == before


def test_a_resumed_run_keeps_the_rate_that_it_chose_under_an_earlier_version(killed, train):
    run = killed(9)
    folder = newest_checkpoint(run)
    state, manifest = (json.loads((folder / name).read_text()) for name in ("state.json", "manifest.json"))
    state["config"]["learning_rate"] = 5e-4
    (folder / "state.json").write_text(json.dumps(state))
    size, digest = (folder / "state.json").stat().st_size, files.checksum(folder / "state.json")
    manifest["files"]["state.json"] = {"bytes": size, "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    train(run)
    assert yaml.safe_load((run / "config.yaml").read_text())["learning_rate"] == 5e-4


def test_only_what_does_not_decide_the_result_may_change():
    args = parse_args([*FLAGS, "--output_dir", "runs/x"])
    saved = yaml.safe_load(to_yaml(args))
    args.num_workers, args.checkpointing_steps, args.output_dir, args.log_steps = 7, 100, "runs/y", None
    args.on_bad_image = "skip"
    assert changed_arguments(saved, args) == []
    args.label_smoothing, args.shots = 0.2, 3
    assert sorted(changed_arguments(saved, args)) == [
        "label_smoothing was 0.1 and is 0.2",
        "shots was None and is 3",
    ]


# ----------------------------------------------------------------------------------------------------------------------
# Broken checkpoints, by small ones


def save(run, step, keep=2):
    tensors = {"model": {"weight": torch.full((64,), float(step))}, "optimizer": {"weight.exp_avg": torch.ones(8)}}
    save_checkpoint(run, tensors, {"step": step}, keep)
    return run / "checkpoints" / f"step-{step:06d}"


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


FAULTS = {
    "holds 319 of 328 bytes": truncated,
    "does not hold the bytes that were written": lambda folder: flip(folder / "model.safetensors"),
    "its optimizer.safetensors is missing": lambda folder: (folder / "optimizer.safetensors").unlink(),
    "its state.json does not hold": lambda folder: flip(folder / "state.json"),
    "its manifest.json cannot be read (Expecting": lambda folder: (folder / "manifest.json").write_text("{"),
    "its manifest.json cannot be read ([Errno 2]": lambda folder: (folder / "manifest.json").unlink(),
    "its manifest.json cannot be read ('files'": lambda folder: (folder / "manifest.json").write_text("{}"),
    "its manifest.json cannot be read (list": lambda folder: (folder / "manifest.json").write_text("[]"),
    "its manifest.json cannot be read ('utf-8'": lambda folder: (folder / "manifest.json").write_bytes(b"\xff\x00"),
}


@pytest.mark.parametrize("sentence", FAULTS)
def test_a_broken_checkpoint_is_named_and_the_one_before_is_used(sentence, tmp_path, said):
    """a file of the newest checkpoint truncated, changed or missing, or its manifest missing or garbled | named with what is wrong, and the checkpoint before it is used."""
    before, last = save(tmp_path, 3), save(tmp_path, 6)
    assert newest_checkpoint(tmp_path) == last
    assert said == []
    FAULTS[sentence](last)
    assert newest_checkpoint(tmp_path) == before
    assert len(said) == 1
    assert str(last) in said[0]
    assert sentence in said[0]
    assert last.is_dir()


def test_where_all_checkpoints_are_broken_each_is_named_and_none_deleted(tmp_path, said):
    """all checkpoints of a run broken | an error that names each and what is wrong with it; nothing is deleted."""
    folders = [save(tmp_path, step) for step in (3, 6)]
    flip(folders[0] / "model.safetensors")
    truncated(folders[1])
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match=r"no checkpoint of .* can be read .*--overwrite true") as raised:
        newest_checkpoint(tmp_path)
    assert all(str(folder) in str(raised.value) for folder in folders)
    assert files_of(tmp_path) == before


def test_a_flipped_byte_in_the_newest_checkpoint_is_named_and_the_one_before_is_used(killed, train, whole):
    """a byte of the newest checkpoint flipped | named, and the checkpoint before it is used: same weights as without."""
    run = killed(9)
    flip(run / "checkpoints" / "step-000009" / "optimizer.safetensors", 500)
    printed = train(run)
    assert f"{run}/checkpoints/step-000009: its optimizer.safetensors does not hold the bytes" in printed
    assert f"going on after step 6, from {run}/checkpoints/step-000006" in printed
    assert_same(run, whole)


def test_a_checkpoint_asked_for_by_name_must_be_whole(killed, train, tmp_path):
    """--resume with a broken checkpoint | an error that says what is wrong with it; no other is taken in its place."""
    origin = killed(9)
    flip(origin / "checkpoints" / "step-000009" / "model.safetensors", 500)
    printed = train(tmp_path / "other", "--resume", origin / "checkpoints" / "step-000009", code=1)
    assert "step-000009: its model.safetensors does not hold the bytes that were written" in printed


def test_best_weights_that_are_broken_are_named_and_not_kept(tmp_path, said):
    """the best weights so far broken | named; the best of the scorings that follow is kept."""
    save_best(tmp_path, 4, {"accuracy": 0.5}, 0, lambda folder: (folder / "weights").write_text("4"))
    folder, scores = load_best(tmp_path)
    assert scores == {"accuracy": 0.5}
    flip(folder / "weights")
    assert load_best(tmp_path) is None
    assert len(said) == 1
    assert str(folder) in said[0]


# ----------------------------------------------------------------------------------------------------------------------
# Whole or absent


@pytest.mark.parametrize("kind", ["whole", "sealed"])
def test_an_error_while_a_folder_is_written_leaves_the_one_before(kind, tmp_path):
    folder = tmp_path / "model"
    write = atomic_dir if kind == "whole" else lambda folder: checksummed_dir(folder, 100)
    with write(folder) as aside:
        (aside / "weights").write_text("old")
        assert not folder.exists()
    before = files_of(tmp_path)
    for error in (RuntimeError, KeyboardInterrupt):

        def fail(error=error):
            with write(folder) as aside:
                (aside / "weights").write_text("new")
                raise error

        with pytest.raises(error):
            fail()
        assert files_of(tmp_path) == before
        assert os.listdir(tmp_path) == ["model"]
    with write(folder) as aside:
        (aside / "weights").write_text("new")
    assert (folder / "weights").read_text() == "new"
    assert os.listdir(tmp_path) == ["model"]


def test_what_a_killed_run_left_of_a_checkpoint_is_none(tmp_path, said):
    """killed while a checkpoint was written | what there is of it is not taken for one, and makes room for the next."""
    before = save(tmp_path, 6)
    aside = tmp_path / "checkpoints" / ".step-000009.part"
    shutil.copytree(before, aside)
    (aside / "other").write_text("of a killed run")
    assert newest_checkpoint(tmp_path) == before
    assert said == []
    after = save(tmp_path, 9)
    assert sorted(os.listdir(after)) == ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-000006", "step-000009"]
    verify_checksums(after)


def test_a_text_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_text(path, "old")
    monkeypatch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(RuntimeError("killed here")))
    with pytest.raises(RuntimeError, match="killed here"):
        write_text(path, "new")
    assert path.read_text() == "old"


def test_as_many_checkpoints_stay_as_were_asked_for(tmp_path):
    for step in (999_998, 999_999, 1_000_000, 1_000_001):  # which names sort otherwise
        save(tmp_path, step, keep=3)
    assert [step_of(folder) for folder in list_checkpoints(tmp_path)] == [999_999, 1_000_000, 1_000_001]
    assert newest_checkpoint(tmp_path).name == "step-1000001"
    last = save(tmp_path, 1_000_002, keep=1)
    assert list_checkpoints(tmp_path) == [last]
    assert load_file(last / "model.safetensors")["weight"][0] == 1_000_002


def test_of_the_best_weights_only_the_newest_stay(tmp_path):
    for step in (4, 8):
        scores = {"step": step}
        save_best(tmp_path, step, scores, 0, lambda folder: (folder / "weights").write_text("some"))
    assert os.listdir(tmp_path / "checkpoints") == ["best-000008"]
    assert load_best(tmp_path) == (tmp_path / "checkpoints" / "best-000008", {"step": 8})
    publish_best(tmp_path / "checkpoints" / "best-000008", tmp_path / "model", leave_out=("scores.json",))
    assert os.listdir(tmp_path / "model") == ["weights"]


# ----------------------------------------------------------------------------------------------------------------------
# No room


def test_a_disk_that_is_too_full_for_a_checkpoint_is_known_before_it_is_written(tmp_path, monkeypatch):
    before = save(tmp_path, 3)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda place: SimpleNamespace(free=280))
    monkeypatch.setattr(checkpoints, "save_file", lambda *_: pytest.fail("it was written"))
    with pytest.raises(ValueError, match=r"step-000006 needs 0.0 MB and 0.0 MB are free .*make room"):
        save(tmp_path, 6)
    assert newest_checkpoint(tmp_path) == before
    assert os.listdir(tmp_path / "checkpoints") == ["step-000003"]


def test_a_limit_met_while_a_checkpoint_is_written_says_what_it_needs(tmp_path):
    """a quota or a file size limit met while a checkpoint is written | an error that says how much is needed and free; the checkpoint before is good."""
    before = save(tmp_path, 3)
    large = {"model": {"weight": torch.zeros(3_000_000)}}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, hard))
    try:
        with pytest.raises(
            ValueError, match=r"step-000006 needs 12\.0 MB and [\d,.]+ MB are free \(or left of a quota\)"
        ):
            save_checkpoint(tmp_path, large, {"step": 6}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert newest_checkpoint(tmp_path) == before
    assert os.listdir(tmp_path / "checkpoints") == ["step-000003"]


def test_an_error_that_is_not_of_room_keeps_its_own_words(tmp_path):
    with pytest.raises(OSError, match="a bad disk") as raised, checksummed_dir(tmp_path / "x", 0):
        raise OSError(errno.EIO, "a bad disk")
    assert raised.value.errno == errno.EIO


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_run_on_a_full_disk_says_so_and_goes_on_after_room_is_made(train, whole, tmp_path):
    """the disk full at a checkpoint | the run stops and says how much is needed and free; the checkpoint before is good, and with room made the same command ends with the same weights."""
    disk = tmp_path / "disk"
    disk.mkdir()
    sizes = [sum(file.stat().st_size for file in folder.rglob("*")) for folder in list_checkpoints(whole)]
    small, large = (int(factor * sizes[0]) // 1024 for factor in (2.6, 9))
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={small}k", "none", disk], capture_output=True).returncode:
        pytest.skip("this machine does not mount")
    try:
        printed = train(disk / "run", code=1)
        assert "MB are free (or left of a quota): make room, and the same command goes on" in printed
        assert "Traceback" not in printed
        last = newest_checkpoint(disk / "run")
        assert last is not None
        assert f"goes on from step {step_of(last)}" in printed
        subprocess.run(["mount", "-o", f"remount,size={large}k", disk], check=True)
        train(disk / "run")
        assert_same(disk / "run", whole)
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("below", ["file/run", "/proc/run"])
def test_a_folder_that_cannot_be_written_to_is_named_in_one_line(below, train, tmp_path):
    """--output_dir where nothing can be written | one line that names it, before anything is read."""
    (tmp_path / "file").write_text("")
    printed = train(tmp_path / below, code=1)
    errors = [line for line in printed.splitlines() if line.strip()]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {tmp_path / below} cannot be written to (")
    assert errors[0].endswith("choose another --output_dir")


# ----------------------------------------------------------------------------------------------------------------------
# Signals


def test_the_real_command_leaves_with_75_at_sigterm_and_its_checkpoint_is_good(photos, tmp_path):
    """SIGTERM (a scheduler, `docker stop`) | a checkpoint of this very step is written and the exit code is 75."""
    run = tmp_path / "run"
    command = [sys.executable, "-W", "ignore", HOUSE / "recipes" / "train.py", *FLAGS, "--output_dir", run]
    command += ["--max_train_steps", 100_000, "--checkpointing_steps", 20, "--eval_steps", 100_000]
    with subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=photos.parent,
    ) as process:
        try:
            until(lambda: list_checkpoints(run) or process.poll() is not None)
            process.terminate()
            printed = process.communicate(timeout=60)[0]
        finally:
            process.kill()
    assert process.returncode == STOPPED == 75, printed
    last = newest_checkpoint(run)
    assert f"stopped by SIGTERM after step {step_of(last):,}: the same command goes on from there" in printed
    assert json.loads((last / "state.json").read_text())["step"] == step_of(last)


def test_a_run_stopped_by_each_signal_in_turn_ends_as_if_nothing_had_happened(train, whole, tmp_path):
    """SIGTERM, SIGINT (Ctrl-C), then SIGUSR1, each in another life of one run | exit code 75 each time; the same command at last gives the weights of an undisturbed run."""
    run, lives = tmp_path / "run", []
    for number, step in ((signal.SIGTERM, 2), (signal.SIGINT, 6), (signal.SIGUSR1, 8)):

        def stop(process, number=number, step=step):
            until(lambda: (run / "metrics.jsonl").exists() and log_of(run)[-1:] != [], process)
            until(lambda: log_of(run)[-1]["step"] >= step, process)
            process.send_signal(number)

        printed = train(run, before=SLOW.format(seconds=0.1), code=STOPPED, then=stop)
        lives.append(step_of(newest_checkpoint(run)))
        assert f"stopped by {number.name} after step {lives[-1]}:" in printed
    train(run)
    assert results_of(run)["resumed_at_steps"] == lives
    assert_same(run, whole)


def test_sigterm_before_the_first_step_leaves_at_once_and_saves_nothing(train, tmp_path):
    """SIGTERM while the data are read | exit code 75 at once; there is nothing to save, and nothing is."""
    reading = """
import time
from hf_vit.data import sources
def read_source(*args):
    print("reads", flush=True)
    time.sleep(600)
sources.read_source = read_source
"""

    def stop(process):
        until(lambda: "reads" in process.printed(), process)
        process.send_signal(signal.SIGTERM)

    printed = train(tmp_path / "run", before=reading, code=STOPPED, then=stop)
    assert "stopped by SIGTERM before the first step" in printed
    assert os.listdir(tmp_path / "run") == [".lock"]


def test_sigterm_while_the_report_is_written_lets_it_be_finished(train, whole, tmp_path):
    """SIGTERM after the last step | the report is finished, exit code 0; the message promises nothing else."""
    reporting = """
import os, signal
from hf_vit.training import report
publish = report.publish_model
def slow(*args):
    os.kill(os.getpid(), signal.SIGTERM)
    return publish(*args)
report.publish_model = slow
"""
    printed = train(tmp_path / "run", before=reporting)
    assert "SIGTERM: training is over, and the report is finished first" in printed
    assert "saving after this step" not in printed
    assert_same(tmp_path / "run", whole)


def test_sigterm_while_scoring_is_answered_before_the_next_batch_and_the_scoring_done_later(train, whole, tmp_path):
    """SIGTERM while a validation set is scored | the scoring is broken off, exit code 75; the next life scores first."""
    scoring = """
import time
from hf_vit.data.image_spec import ImageSpec
normalize = ImageSpec.normalize
def slow(*args):
    print("scores", flush=True)
    time.sleep(1)
    return normalize(*args)
ImageSpec.normalize = slow
"""
    run = tmp_path / "run"

    def stop(process):
        until(lambda: "scores" in process.printed(), process)
        process.send_signal(signal.SIGTERM)

    printed = train(run, "--per_device_eval_batch_size", 1, before=scoring, code=STOPPED, then=stop)
    assert printed.count("scores") == 1
    assert "after step 4:" in printed
    assert [line["step"] for line in log_of(run)] == [2, 4]
    assert not list(run.glob("checkpoints/best-*"))
    train(run)
    assert_same(run, whole)


def test_sigterm_while_a_checkpoint_is_written_leaves_it_whole(train, whole, tmp_path):
    """SIGTERM while a checkpoint is written | it is written to its end; exit code 75."""
    writing = """
import os, signal
from hf_vit.training import checkpoints
save_file = checkpoints.save_file
def interrupted(*args):
    checkpoints.save_file = save_file
    os.kill(os.getpid(), signal.SIGTERM)
    save_file(*args)
checkpoints.save_file = interrupted
"""
    run = tmp_path / "run"
    train(run, before=writing, code=STOPPED)
    for folder in list_checkpoints(run):
        verify_checksums(folder)
    assert [folder.name for folder in list_checkpoints(run)] == ["step-000003", "step-000004"]
    train(run)
    assert_same(run, whole)


def test_a_second_ctrl_c_leaves_at_once(train, tmp_path):
    """Ctrl-C twice, in a step that does not end | the process ends at the second one."""

    def stop(process):
        until(lambda: "a step" in process.printed(), process)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert psutil.pid_exists(process.pid)
        process.send_signal(signal.SIGINT)

    train(tmp_path / "run", before=SLOW.format(seconds=600), code=-signal.SIGINT, then=stop)


# ----------------------------------------------------------------------------------------------------------------------
# A loss that is no number; a clock that jumps


def test_a_step_without_a_finite_loss_is_skipped_counted_and_noted(train, tmp_path):
    """NaN in one step, and the clock set back by a day | the step is skipped and noted with its rows and counted; weights stay finite and the run ends; times do not follow the clock."""
    run = tmp_path / "run"
    printed = train(run, before=NOT_A_NUMBER)
    assert "step 5 is skipped" in printed
    results = results_of(run)
    assert results["skipped_steps"] == [5]
    assert results["steps"] == 12
    assert 0 < results["train_seconds"] <= results["total_seconds"] < 3600
    noted = [line for line in log_of(run) if line.get("skipped")]
    assert [line["step"] for line in noted] == [5]
    assert noted[0]["rows"] == list(epoch_batches(24, 4, 0, 0))[4]
    losses = [line["loss"] for line in log_of(run) if "loss" in line]
    assert len(losses) == 6
    assert np.isfinite(losses).all()
    weights = load_file(run / "model" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_one_bad_step_too_many_stops_the_run_and_says_where_to_look(train, tmp_path):
    """NaN in more steps than --max_skipped_steps | the run stops; the error says step, learning rate and rows, and the last checkpoint is good."""
    run = tmp_path / "run"
    printed = train(run, "--max_skipped_steps", 0, before=NOT_A_NUMBER, code=1)
    assert "error: the loss or its gradient was not finite in step 5: learning rate 0.000" in printed
    rows = list(epoch_batches(24, 4, 0, 0))[4]
    assert f"rows {', '.join(map(str, rows))} of the training images" in printed
    assert "the same command goes on from step 4" in printed
    last = newest_checkpoint(run)
    assert last.name == "step-000004"
    assert all(tensor.isfinite().all() for tensor in load_file(last / "model.safetensors").values())


# ----------------------------------------------------------------------------------------------------------------------
# One run a folder


def test_a_second_run_is_refused_until_the_first_ends_however_it_ends(tmp_path, monkeypatch):
    """a second run in the folder of one that is at work | refused, with the number of its process; after a SIGKILL the folder is free at once, even while a worker of the dead run lives on."""
    holding = f"""
import os, time
from pathlib import Path
from hf_vit.training.run_folder import lock
lock(Path({str(tmp_path / "run")!r}))
worker = os.fork()
if worker == 0:
    time.sleep(600)
    os._exit(0)
print("holds it beside", worker, flush=True)
time.sleep(600)
"""
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.2)
    monkeypatch.setattr(run_folder, "_locked", held := [])

    def second(process):
        until(lambda: process.printed().endswith("\n"), process)
        worker = int(process.printed().split()[-1])
        with pytest.raises(ValueError, match=rf"another run is at work in .*\(process {process.pid} on .*wait for"):
            lock(tmp_path / "run")
        try:
            process.send_signal(signal.SIGKILL)
            lock(tmp_path / "run")
            assert psutil.Process(worker).status() != psutil.STATUS_ZOMBIE
        finally:
            os.kill(worker, signal.SIGKILL)

    start(before=holding, code=-signal.SIGKILL, then=second)
    assert f"process {os.getpid()} " in (tmp_path / "run" / ".lock").read_text()
    for file in held:
        file.close()


# ----------------------------------------------------------------------------------------------------------------------
# Decoding workers


@pytest.fixture
def uncached(photos, monkeypatch):
    """The training images, which workers decode anew each time; and ids of 12 batches."""
    monkeypatch.setattr(image_dataset, "CACHE_BYTES", 0)
    splits, _, _ = prepare_splits(load_splits(str(photos)))
    form = ImageSpec(16, 16, 3, 2, (0.5,) * 3, (0.5,) * 3)
    return ImageDataset(splits["train"], form), [[first, first + 12] for first in range(12)]


def test_a_killed_worker_ends_the_run_with_advice(uncached):
    """a decoding worker killed (out of memory) | one error that advises a smaller --num_workers, or more shared memory"""
    images, ids = uncached
    batches = data_loader(images, ids, 2)
    next(batches)
    for worker in active_children():
        worker.kill()
    with pytest.raises(ValueError, match=r"--num_workers below 2.*--shm-size"):
        list(batches)
    assert active_children() == []


def test_workers_leave_signals_to_the_training_loop(uncached, said):
    """Ctrl-C, or a signal to all processes of the run | decoding workers go on until the training loop has answered."""
    images, ids = uncached
    batches = data_loader(images, ids, 2)
    got = [next(batches), next(batches)]  # one of each worker
    workers = set(active_children())
    assert len(workers) == 2
    for worker in workers:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(worker.pid, number)
    got += islice(batches, 8)
    assert set(active_children()) == workers
    got += batches
    assert [batch["index"].tolist() for batch in got] == ids
    assert said == []

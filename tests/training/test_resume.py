"""Claims about runs that are killed, stopped or hindered: each goes on to the result it would have had, or says what is wrong."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import forked
import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from hf_vit.data.sampling import epoch_batches
from hf_vit.system import files
from hf_vit.system.files import atomic_dir, checksummed_dir, verify_checksums, write_text
from hf_vit.training import checkpoints, run_folder
from hf_vit.training.arguments import TrainArguments, to_yaml
from hf_vit.training.checkpoints import (
    list_checkpoints,
    load_best,
    newest_checkpoint,
    save_best,
    save_checkpoint,
    step_of,
)
from hf_vit.training.run_folder import continue_run, find_checkpoint, locked
from hf_vit.training.signals import STOPPED


HOUSE = Path(__file__).parents[2]
TINY = "image_size=16,patch_size=4,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
FLAGS = (
    "--dataset_name", "photos", "--preset", "tiny-patch16-224",
    "--config_overrides", TINY + ",drop_path_rate=0.2,hidden_dropout_prob=0.1", "--erase", "0.3", "--ema_decay", "0.9",
    "--per_device_train_batch_size", "4", "--max_train_steps", "12", "--log_steps", "2", "--eval_steps", "4",
    "--checkpointing_steps", "3",
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
NONE_SKIPPED = "from hf_vit.training import loop\nloop.MOST_SKIPPED = 0\n"
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
    """A run that nothing interrupted: 12 steps, checkpoints at 3, 6, 9, 12, evaluations at 4, 8, 12."""
    run, code = photos.parent / "whole", forked.THEN_THE_SCRIPT
    code = code.replace("pictures.draw_run = lambda *_: None", "")  # with its pictures
    line = [sys.executable, "-W", "ignore", "-c", code, HOUSE / "recipes" / "train.py", *FLAGS, "--output_dir", run]
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
    assert [step_of(folder) for folder in list_checkpoints(whole)] == [3, 6, 9, 12]
    assert (results_of(whole)["resumed_at_steps"], results_of(whole)["skipped_steps"]) == ([], [])
    for folder in whole.glob("checkpoints/*-*"):
        verify_checksums(folder)


def half_a_line(run):
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 12, "epo')


@pytest.mark.parametrize(
    ("step", "harm", "flags", "resumed"),
    [
        (9, None, ("--num_workers", 0, "--checkpointing_steps", 2), 9),
        (3, half_a_line, (), 3),
        (9, lambda run: flip(run / "checkpoints" / "step-000009" / "optimizer.safetensors", 500), (), 6),
    ],
    ids=["in the midst of an epoch", "while a line was written", "and its last checkpoint is broken"],
)
def test_a_killed_run_ends_as_if_nothing_had_happened(killed, train, whole, step, harm, flags, resumed):
    run = killed(step)
    if harm is not None:
        harm(run)
    printed = train(run, *flags)
    assert f"{run}/checkpoints/step-{resumed:06d}" in printed
    assert_same(run, whole)
    assert results_of(run)["resumed_at_steps"] == [resumed]


def test_a_checkpoint_goes_on_in_another_folder_and_leaves_its_own_as_it_was(killed, train, whole, tmp_path):
    origin, other = killed(9), tmp_path / "other"
    before = files_of(origin)
    train(other, "--resume", origin / "checkpoints" / "step-000006")
    assert_same(other, whole)
    (other / "results.json").unlink()  # as if killed at the very end: the folder's own run goes on
    train(other, "--resume", origin / "checkpoints" / "step-000006")
    assert_same(other, whole)
    assert results_of(other)["resumed_at_steps"] == [6, 12]
    assert files_of(origin) == before


def test_a_finished_run_is_left_alone_and_writes_a_model_that_was_deleted_again(train, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    before = files_of(run)
    train(run)
    assert files_of(run) == before
    shutil.rmtree(run / "model")
    train(run)
    assert_same(run, whole)


def test_a_run_that_was_killed_before_its_first_checkpoint_says_that_it_begins_anew(killed, train, whole):
    run = killed(0)
    assert "begins anew" in train(run)
    assert_same(run, whole)
    assert results_of(run)["resumed_at_steps"] == []


def test_what_lies_beyond_the_step_that_a_run_goes_on_from_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "KEPT", 3)
    for step in (3, 6, 9):
        save(tmp_path, step)
    (tmp_path / "checkpoints" / ".step-000008.part").mkdir()
    (tmp_path / "results.json").touch()
    lines = ['{"step": 3}\n', '{"step": 6}\n', '{"step": 7}\n', '{"st']
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    continue_run(tmp_path, tmp_path, 6, 6)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000003", "step-000006"]
    assert not (tmp_path / "results.json").exists()
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:2])


def test_lora_checkpoints_leave_the_base_out_and_another_base_is_refused(train, whole, tmp_path):
    base, run, broken = tmp_path / "base", tmp_path / "run", tmp_path / "broken"
    shutil.copytree(whole / "model", base)
    line = [HOUSE / "recipes" / "train.py", *FLAGS[:2], *FLAGS[6:], "--model_name_or_path", base, "--lora_rank", 2]
    start(argv=[*line, "--output_dir", run], cwd=whole.parent)
    names = set(load_file(run / "checkpoints" / "step-000009" / "model.safetensors"))
    assert names
    assert all("lora_" in name or "classifier" in name for name in names)
    shutil.copytree(run, broken)
    for name in ("step-000012", "best-000012"):
        shutil.rmtree(broken / "checkpoints" / name, ignore_errors=True)
    (broken / "results.json").unlink()
    start(argv=[*line, "--output_dir", broken], cwd=whole.parent)
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (run, broken)]
    assert weights[0] == weights[1]
    (broken / "results.json").unlink()
    other = load_file(base / "model.safetensors")
    other = {name: weight * 1.5 for name, weight in other.items()}
    save_file(other, base / "model.safetensors", {"format": "pt"})
    assert "frozen_sha256" in start(argv=[*line, "--output_dir", broken], cwd=whole.parent, code=1)


# ----------------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--learning_rate", 5e-4), ["learning_rate was 0.001 and is 0.0005", "--output_dir"]),
        (("--erase", 0.2, "--seed", 1), ["erase was 0.3 and is 0.2", "seed was 0 and is 1"]),
        (("--resume", "never"), ["--overwrite"]),
        (("--per_device_train_batch_size", 8), ["images_per_step was 4 and is 8", "step-000009"]),
        (("--resume", "photos"), ["--resume photos"]),
        (("--max_train_steps", 13), ["max_train_steps was 12 and is 13"]),
    ],
)
def test_another_run_is_refused_by_what_differs_and_the_folder_is_untouched(killed, train, flags, named):
    run = killed(9)
    before = files_of(run)
    printed = train(run, *flags, code=1)
    assert all(name in printed for name in named), printed
    assert "Traceback" not in printed
    assert files_of(run) == before


@pytest.mark.parametrize(
    ("change", "named"), [(shutil.copy, "training_images was 24 and is 25"), (shutil.move, "labels_crc32 was")]
)
def test_one_image_more_or_under_another_label_is_refused(killed, train, photos, tmp_path, change, named):
    run = killed(9)
    before = files_of(run)
    shutil.copytree(photos, tmp_path / "photos")
    change(tmp_path / "photos" / "train" / "red" / "0.png", tmp_path / "photos" / "train" / "green" / "new.png")
    assert named in train(run, cwd=tmp_path, code=1)
    assert files_of(run) == before


@pytest.mark.parametrize("name", ["model/mine.py", "predictions.csv"])
def test_a_folder_that_holds_other_things_is_left_alone(train, tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    assert Path(name).parts[0] in train(tmp_path, code=1)
    assert (tmp_path / name).read_text() == "mine"


def test_a_refused_run_leaves_no_folder_behind(train, tmp_path):
    assert "nothing" in train(tmp_path / "new" / "run", "--train_split", "nothing", code=1)
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_asked_for_by_name_must_be_whole(killed, train, tmp_path):
    origin = killed(9)
    flip(origin / "checkpoints" / "step-000009" / "model.safetensors", 500)
    printed = train(tmp_path / "other", "--resume", origin / "checkpoints" / "step-000009", code=1)
    assert "step-000009: its model.safetensors" in printed


# ----------------------------------------------------------------------------------------------------------------------
# Broken checkpoints, by small ones


def save(run, step):
    tensors = {"model": {"weight": torch.full((64,), float(step))}, "optimizer": {"weight.exp_avg": torch.ones(8)}}
    save_checkpoint(run, {"step": step}, tensors)
    return run / "checkpoints" / f"step-{step:06d}"


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


FAULTS = [
    truncated,
    lambda folder: flip(folder / "model.safetensors"),
    lambda folder: (folder / "state.json").unlink(),
    lambda folder: (folder / "manifest.json").write_text("{"),
    lambda folder: (folder / "manifest.json").unlink(),
    lambda folder: (folder / "manifest.json").write_text("[]"),
]


@pytest.mark.parametrize("harm", FAULTS)
def test_a_broken_checkpoint_is_named_and_the_one_before_is_used(harm, tmp_path, said):
    before, last = save(tmp_path, 3), save(tmp_path, 6)
    assert newest_checkpoint(tmp_path) == last
    assert said == []
    harm(last)
    assert newest_checkpoint(tmp_path) == before
    assert len(said) == 1
    assert str(last) in said[0]


def test_where_all_checkpoints_are_broken_each_is_named_and_none_deleted(tmp_path, said):
    args = TrainArguments("photos", preset="tiny-patch16-224", output_dir=str(tmp_path))
    (tmp_path / "config.yaml").write_text(to_yaml(args))
    folders = [save(tmp_path, step) for step in (3, 6)]
    flip(folders[0] / "model.safetensors")
    truncated(folders[1])
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match="--overwrite"):
        find_checkpoint(tmp_path, args)
    assert all(str(folder) in " ".join(said) for folder in folders)
    assert files_of(tmp_path) == before


def test_best_weights_that_are_broken_are_named_and_not_kept(tmp_path, said):
    save_best(tmp_path, 4, {"accuracy": 0.5}, 0, lambda folder: (folder / "weights").write_text("4"))
    folder, scores = load_best(tmp_path)
    assert scores == {"accuracy": 0.5}
    flip(folder / "weights")
    assert load_best(tmp_path) is None
    assert str(folder) in said[0]


@pytest.mark.parametrize("write", [atomic_dir, lambda folder: checksummed_dir(folder, 100)])
def test_an_error_while_a_folder_is_written_leaves_the_one_before(write, tmp_path):
    folder = tmp_path / "model"
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
    with write(folder) as aside:
        (aside / "weights").write_text("new")
    assert (folder / "weights").read_text() == "new"
    assert os.listdir(tmp_path) == ["model"]


def test_what_a_killed_run_left_of_a_checkpoint_is_none(tmp_path, said):
    before = save(tmp_path, 6)
    aside = tmp_path / "checkpoints" / ".step-000009.part"
    shutil.copytree(before, aside)
    (aside / "other").write_text("of a killed run")
    assert newest_checkpoint(tmp_path) == before
    assert said == []
    after = save(tmp_path, 9)
    assert not (after / "other").exists()
    verify_checksums(after)


def test_a_text_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_text(path, "old")
    monkeypatch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(RuntimeError("killed here")))
    with pytest.raises(RuntimeError, match="killed here"):
        write_text(path, "new")
    assert path.read_text() == "old"


def test_the_last_two_checkpoints_stay(tmp_path):
    for step in (999_998, 999_999, 1_000_000, 1_000_001):  # which names sort otherwise
        save(tmp_path, step)
    assert [step_of(folder) for folder in list_checkpoints(tmp_path)] == [1_000_000, 1_000_001]


def test_of_the_best_weights_only_the_newest_stay(tmp_path):
    for step in (4, 8):
        save_best(tmp_path, step, {"step": step}, 0, lambda folder: (folder / "weights").write_text("some"))
    assert os.listdir(tmp_path / "checkpoints") == ["best-000008"]


# ----------------------------------------------------------------------------------------------------------------------
# No room


def test_a_disk_that_is_too_full_for_a_checkpoint_is_known_before_it_is_written(tmp_path, monkeypatch):
    before = save(tmp_path, 3)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda place: SimpleNamespace(free=280))
    monkeypatch.setattr(checkpoints, "save_file", lambda *_: pytest.fail("it was written"))
    with pytest.raises(ValueError, match="step-000006 needs"):
        save(tmp_path, 6)
    assert newest_checkpoint(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_run_on_a_full_disk_says_so_and_goes_on_after_room_is_made(train, whole, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    sizes = [sum(file.stat().st_size for file in folder.rglob("*")) for folder in list_checkpoints(whole)]
    small, large = (int(factor * sizes[0]) // 1024 for factor in (2.6, 9))
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={small}k", "none", disk], capture_output=True).returncode:
        pytest.skip("this machine does not mount")
    try:
        printed = train(disk / "run", code=1)
        assert "make room" in printed
        assert "Traceback" not in printed
        assert f"goes on from step {step_of(newest_checkpoint(disk / 'run'))}" in printed
        subprocess.run(["mount", "-o", f"remount,size={large}k", disk], check=True)
        train(disk / "run")
        assert_same(disk / "run", whole)
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("below", ["file/run", "/proc/run"])
def test_a_folder_that_cannot_be_written_to_is_named_in_one_line(below, train, tmp_path):
    (tmp_path / "file").write_text("")
    errors = [line for line in train(tmp_path / below, code=1).splitlines() if line.strip()]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {tmp_path / below} cannot be written to")


# ----------------------------------------------------------------------------------------------------------------------
# Signals


def test_the_real_command_leaves_with_75_at_sigterm_and_its_checkpoint_is_good(photos, tmp_path):
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
    assert "SIGTERM" in printed
    assert os.listdir(tmp_path / "run") == [".lock"]


def test_sigterm_while_the_report_is_written_lets_it_be_finished(train, whole, tmp_path):
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
    assert "the report is finished first" in printed
    assert_same(tmp_path / "run", whole)


def test_sigterm_while_scoring_is_answered_before_the_next_batch_and_the_scoring_done_later(train, whole, tmp_path):
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
    run = tmp_path / "run"
    printed = train(run, before=NOT_A_NUMBER + NONE_SKIPPED, code=1)
    rows = list(epoch_batches(24, 4, 0, 0))[4]
    assert "in step 5: learning rate 0.000" in printed
    assert f"images {', '.join(map(str, rows))}." in printed
    assert "goes on from step 4" in printed
    last = newest_checkpoint(run)
    assert last.name == "step-000004"
    assert all(tensor.isfinite().all() for tensor in load_file(last / "model.safetensors").values())


# ----------------------------------------------------------------------------------------------------------------------
# One run a folder


def test_a_second_run_is_refused_until_the_first_ends_however_it_ends(tmp_path, monkeypatch):
    holding = f"""
import os, time
from pathlib import Path
from hf_vit.training.run_folder import locked
held = locked(Path({str(tmp_path / "run")!r}))
held.__enter__()
worker = os.fork()
if worker == 0:
    time.sleep(600)
    os._exit(0)
print("holds it beside", worker, flush=True)
time.sleep(600)
"""
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.2)

    def second(process):
        until(lambda: process.printed().endswith("\n"), process)
        worker = int(process.printed().split()[-1])
        with pytest.raises(ValueError, match=f"process {process.pid} on"), locked(tmp_path / "run"):
            pass
        try:
            process.send_signal(signal.SIGKILL)
            with locked(tmp_path / "run"):
                assert psutil.Process(worker).status() != psutil.STATUS_ZOMBIE
        finally:
            os.kill(worker, signal.SIGKILL)

    start(before=holding, code=-signal.SIGKILL, then=second)

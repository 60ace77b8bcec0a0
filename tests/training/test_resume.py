"""Claims about runs that are killed, stopped or hindered: each goes on to the result it would have had, or says what is wrong."""

import errno
import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import runs
from runs import TINY, as_flags, cut_back, ended, files_of, log_of, logged, results_of, start
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hf_vit.system.errors import UserError
from hf_vit.system.files import atomic_dir, checksummed_dir
from hf_vit.training import checkpoints, loop, run_folder
from hf_vit.training.checkpoints import list_checkpoints, newest_checkpoint, step_of
from hf_vit.training.classification import Classification
from hf_vit.training.run_folder import locked
from hf_vit.training.signals import STOPPED


FLAGS = dict(
    preset="tiny-patch16-224", config_overrides=TINY + ",drop_path_rate=0.2,hidden_dropout_prob=0.1", erase=0.3, ema_decay=0.9,
    per_device_train_batch_size=4, max_train_steps=12, log_steps=2, eval_steps=4, checkpointing_steps=3, num_workers=0,
    auto_find_batch_size=False,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def kept():
    """Checkpoints that a test goes on from stay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "KEPT", 4)
        yield


@pytest.fixture(scope="module")
def train(photos):
    """train(run, **flags) -> its `Results`, trained or continued in this process."""
    return lambda run, task=Classification, **flags: runs.train(photos, run, task, **FLAGS | flags)


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory):
    """A run that nothing interrupted: 12 steps, checkpoints at 3, 6, 9, 12, evaluations at 4, 8, 12."""
    run = tmp_path_factory.mktemp("resume") / "whole"
    train(run)
    return run


@pytest.fixture
def killed(whole, tmp_path):
    """killed(step) -> a copy of the run as a kill after step 11, and the loss of all checkpoints after `step`, leave it."""

    def killed(step):
        run = cut_back(shutil.copytree(whole, tmp_path / "run"), step)
        (run / "checkpoints" / ".step-000011.part").mkdir()
        return run

    return killed


def assert_same(run, whole):
    weights = [
        {file.parent.name: file.read_bytes() for file in one.glob("*/model.safetensors")} for one in (run, whole)
    ]
    assert weights[0] == weights[1]
    assert log_of(run) == log_of(whole)
    assert results_of(run)["metrics"] == results_of(whole)["metrics"]
    assert not list(run.rglob("*.part"))


def flip(path):
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)


def until(condition, process, seconds=60):
    """Wait for something that a process does."""
    end = time.monotonic() + seconds
    while not condition():
        assert psutil.pid_exists(process.pid), f"it left before: {process.printed()}"
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


# ----------------------------------------------------------------------------------------------------------------------
# To the bit


def half_a_line(run):
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 12, "epo')


BROKEN = {  # its last checkpoint
    "cut": lambda folder: os.truncate(folder / "model.safetensors", 900),
    "changed": lambda folder: flip(folder / "optimizer.safetensors"),
    "without a file": lambda folder: (folder / "state.json").unlink(),
    "of no JSON": lambda folder: (folder / "manifest.json").write_text("{"),
}


@pytest.mark.parametrize(
    ("step", "harm", "flags", "resumed"),
    [
        (9, None, dict(num_workers=2, checkpointing_steps=2), [9]),
        (3, half_a_line, {}, [3]),
        (0, None, {}, []),
        *((9, lambda run, harm=harm: harm(run / "checkpoints" / "step-000009"), {}, [6]) for harm in BROKEN.values()),
    ],
    ids=["in the midst of an epoch", "while a line was written", "before its first checkpoint", *BROKEN],
)
def test_a_killed_run_ends_as_if_nothing_had_happened(killed, train, whole, step, harm, flags, resumed, caplog):
    run = killed(step)
    if harm is not None:
        harm(run)
    train(run, **flags)
    assert_same(run, whole)
    assert results_of(run)["resumed_at_steps"] == resumed
    assert ("step-000009" in caplog.text) == (resumed == [6])  # a broken checkpoint is named


def test_where_all_checkpoints_are_broken_each_is_named_and_none_deleted(killed, train, caplog):
    run = killed(6)
    for folder in list_checkpoints(run):
        BROKEN["cut"](folder)
    before = files_of(run)
    with pytest.raises(UserError, match="--overwrite"):
        train(run)
    assert all(f"step-00000{step}" in caplog.text for step in (3, 6))
    assert files_of(run) == before


def test_a_checkpoint_goes_on_in_another_folder_and_leaves_its_own_as_it_was(killed, train, whole, tmp_path):
    origin, other = killed(9), tmp_path / "other"
    before, resume = files_of(origin), str(origin / "checkpoints" / "step-000006")
    train(other, resume=resume)
    assert_same(other, whole)
    (other / "results.json").unlink()  # as if killed at the very end: the folder's own run goes on
    train(other, resume=resume)
    assert_same(other, whole)
    assert results_of(other)["resumed_at_steps"] == [6, 12]
    assert files_of(origin) == before
    flip(Path(resume) / "model.safetensors")
    with pytest.raises(UserError, match=r"step-000006: .*model.safetensors"):
        train(tmp_path / "third", resume=resume)


def test_a_finished_run_is_left_alone_and_writes_a_model_that_was_deleted_again(train, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    before = files_of(run)
    assert train(run).metrics == results_of(whole)["metrics"]
    assert files_of(run) == before
    shutil.rmtree(run / "model")
    train(run)
    assert_same(run, whole)


def test_an_evaluation_that_a_resumed_run_makes_again_is_logged_once(tmp_path):
    lines = [{"step": 2, "eval_loss": 1.0}, {"step": 4, "loss": 1.0}, {"step": 4, "eval_loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run_folder.continue_run(tmp_path, tmp_path, step=4, evaluated_step=2)
    assert log_of(tmp_path) == lines[:2]


def test_lora_checkpoints_leave_the_base_out_and_another_base_is_refused(train, whole, tmp_path):
    base, run = shutil.copytree(whole / "model", tmp_path / "base"), tmp_path / "run"
    how = dict(preset=None, config_overrides=None, model_name_or_path=str(base), lora_rank=2)
    train(run, **how)
    names = load_file(run / "checkpoints" / "step-000009" / "model.safetensors").keys()
    assert names
    assert all("lora_" in name or "classifier" in name for name in names)
    weights = results_of(run)["weights_sha256"]
    train(cut_back(run, 9), **how)
    assert results_of(run)["weights_sha256"] == weights
    (run / "results.json").unlink()
    other = {name: weight * 1.5 for name, weight in load_file(base / "model.safetensors").items()}
    save_file(other, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="frozen_sha256"):
        train(run, **how)


@pytest.mark.parametrize(("first", "between", "steps"), [(0, 300, [1, 12]), (0, 0, [10, 11, 12])])
def test_checkpoints_are_written_after_some_time_and_then_every_so_often(
    train, tmp_path, monkeypatch, first, between, steps
):
    monkeypatch.setattr(loop, "FIRST_CHECKPOINT", first)
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_CHECKPOINTS", between)
    monkeypatch.setattr(checkpoints, "KEPT", 3)
    train(tmp_path, checkpointing_steps=None)
    assert [step_of(folder) for folder in list_checkpoints(tmp_path)] == steps


# ----------------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (dict(erase=0.2, seed=1), "(?=.*erase was 0.3 and is 0.2).*seed was 0 and is 1"),
        (dict(per_device_train_batch_size=8), "images_per_step was 4 and is 8"),
        (dict(resume="photos"), "--resume .*photos"),
    ],
)
def test_another_run_is_refused_by_what_differs_and_the_folder_is_untouched(killed, train, flags, named):
    run = killed(9)
    before = files_of(run)
    with pytest.raises(UserError, match=named):
        train(run, **flags)
    assert files_of(run) == before


@pytest.mark.parametrize(("change", "named"), [(shutil.copy, "training_images"), (shutil.move, "labels_crc32")])
def test_one_image_more_or_under_another_label_is_refused(killed, train, photos, change, named):
    run = killed(9)
    before, image, other = files_of(run), photos / "train" / "red" / "0.png", photos / "train" / "green" / "new.png"
    try:
        change(image, other)
        with pytest.raises(UserError, match=named):
            train(run)
    finally:
        shutil.move(other, image)
    assert files_of(run) == before


def test_a_folder_that_holds_other_things_is_left_alone(train, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.py").write_text("mine")
    with pytest.raises(UserError, match="model"):
        train(tmp_path)
    assert (tmp_path / "model" / "mine.py").read_text() == "mine"


def test_a_refused_run_leaves_no_folder_behind(train, tmp_path):
    with pytest.raises(UserError, match="nothing"):
        train(tmp_path / "new" / "run", train_split="nothing")
    assert not (tmp_path / "new").exists()


def quota_is_reached(*_):
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def disk_is_full(*_):
    raise SafetensorError("I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("shutil.disk_usage", lambda _: SimpleNamespace(free=9)),
        ("hf_vit.training.checkpoints.save_file", quota_is_reached),
        ("hf_vit.training.checkpoints.save_file", disk_is_full),
    ],
)
def test_a_run_on_a_full_disk_says_so_and_goes_on_after_room_is_made(killed, train, whole, monkeypatch, name, act):
    run = killed(6)
    with monkeypatch.context() as patch:
        patch.setattr(name, act)
        with pytest.raises(UserError, match="room"):
            train(run)
    assert step_of(newest_checkpoint(run)) == 6
    train(run)
    assert_same(run, whole)


@pytest.mark.parametrize("write", [atomic_dir, lambda folder: checksummed_dir(folder, 100)])
def test_an_error_while_a_folder_is_written_leaves_the_one_before(write, tmp_path):
    def written(text, error=None):
        with write(tmp_path / "model") as aside:
            (aside / "weights").write_text(text)
            if error is not None:
                raise error
        return files_of(tmp_path)

    before = written("old")
    with pytest.raises(KeyboardInterrupt):
        written("new", KeyboardInterrupt)
    assert files_of(tmp_path) == before
    assert b"new" in written("new").values()
    assert os.listdir(tmp_path) == ["model"]


# ----------------------------------------------------------------------------------------------------------------------
# Signals


def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)


class StoppedInAStep(Classification):
    def loss(self, model, batch):
        interrupt()
        return super().loss(model, batch)


class StoppedInAnEvaluation(Classification):
    def evaluate(self, model, predictor):
        interrupt()
        return super().evaluate(model, predictor)


class StoppedWhileBestWeightsAreWritten(Classification):
    def artifacts(self, model, evaluation):
        interrupt()
        return super().artifacts(model, evaluation)


@pytest.mark.parametrize(
    ("task", "step"),
    [(StoppedInAStep, 1), (StoppedInAnEvaluation, 4), (StoppedWhileBestWeightsAreWritten, 5)],
)
def test_a_run_that_is_stopped_at_any_moment_ends_as_if_nothing_had_happened(train, whole, tmp_path, task, step):
    with pytest.raises(KeyboardInterrupt, match=f"after step {step}:"):
        train(tmp_path / "run", task)
    assert step_of(newest_checkpoint(tmp_path / "run")) == step
    train(tmp_path / "run")
    assert_same(tmp_path / "run", whole)
    assert results_of(tmp_path / "run")["resumed_at_steps"] == [step]


def test_a_signal_while_the_report_is_written_lets_it_be_finished(train, whole, tmp_path):
    train(tmp_path / "run", draw=interrupt)
    assert_same(tmp_path / "run", whole)


BY_ITSELF = """
import os, signal
from hf_vit.training.classification import Classification
loss, steps = Classification.loss, []
def signalled(*args):
    steps.append(None)
    if len(steps) == 2:
        os.kill(os.getpid(), signal.{})
    return loss(*args)
Classification.loss = signalled
"""


def test_the_command_leaves_with_75_at_each_signal_and_ends_as_if_nothing_had_happened(train, whole, photos, tmp_path):
    run = tmp_path / "run"
    flags = as_flags({"dataset_name": photos, **FLAGS, "output_dir": run})
    for number, name in enumerate(("SIGTERM", "SIGINT", "SIGUSR1"), 1):
        (printed,) = ended(start(*flags, before=BY_ITSELF.format(name)), code=STOPPED)
        assert step_of(newest_checkpoint(run)) == 2 * number
        assert f"{name} after step {2 * number}:" in printed
    train(run)
    assert STOPPED == 75
    assert results_of(run)["resumed_at_steps"] == [2, 4, 6]
    assert_same(run, whole)


HANGING = """
import time
from hf_vit.training.classification import Classification
def hang(*args, **how):
    print("hangs", flush=True)
    time.sleep(600)
Classification.{} = hang
"""


@pytest.mark.parametrize(
    ("method", "numbers", "code"),
    [("load_rows", [signal.SIGTERM], STOPPED), ("loss", [signal.SIGINT] * 2, -signal.SIGINT)],
    ids=["a signal before the first step", "a second Ctrl-C"],
)
def test_what_has_nothing_to_save_or_is_asked_twice_leaves_at_once(photos, tmp_path, method, numbers, code):
    flags = as_flags({"dataset_name": photos, **FLAGS, "output_dir": tmp_path / "run"})
    process = start(*flags, before=HANGING.format(method))
    until(lambda: "hangs" in process.printed(), process)
    for number in numbers:
        assert psutil.pid_exists(process.pid)
        process.send_signal(number)
        time.sleep(0.3)
    ended(process, code=code, timeout=20)
    assert list_checkpoints(tmp_path / "run") == []


# ----------------------------------------------------------------------------------------------------------------------
# A loss that is no number


class NotANumber(Classification):
    """In step 5."""

    steps = 0

    def loss(self, model, batch):
        self.steps += len(batch.rows) > 0 and model.training
        loss, outputs = super().loss(model, batch)
        return loss * (float("nan") if self.steps == 5 else 1), outputs


def test_a_step_without_a_finite_loss_is_skipped_counted_and_noted(train, tmp_path):
    results = train(tmp_path, NotANumber)
    assert (results.skipped_steps, results.steps) == ([5], 12)
    (skipped,) = [line for line in log_of(tmp_path) if line.get("skipped")]
    assert skipped["step"] == 5
    losses = logged(tmp_path, "loss")
    assert len(losses) == 6
    assert np.isfinite(list(losses.values())).all()
    for file in tmp_path.rglob("*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(file).values()), file


def test_one_bad_step_too_many_stops_the_run_and_says_where_to_look(train, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loop, "MOST_SKIPPED", 0)
    with pytest.raises(UserError, match=r"steps 5, .*0\.000.*--learning_rate"):
        train(tmp_path, NotANumber)
    assert "of step 4" in capsys.readouterr().out
    last = newest_checkpoint(tmp_path)
    assert step_of(last) == 4
    assert all(tensor.isfinite().all() for tensor in load_file(last / "model.safetensors").values())


# ----------------------------------------------------------------------------------------------------------------------
# One run a folder


HOLDING = """
import os, time
from pathlib import Path
from hf_vit.training.run_folder import locked
held = locked(Path({!r}))
held.__enter__()
worker = os.fork()
if worker == 0:
    time.sleep(600)
    os._exit(0)
print("holds it beside", worker, flush=True)
time.sleep(600)
"""


def test_a_second_run_is_refused_until_the_first_ends_however_it_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.2)
    process = start(before=HOLDING.format(str(tmp_path / "run")))
    until(lambda: process.printed().endswith("\n"), process)
    worker = int(process.printed().split()[-1])
    with pytest.raises(UserError, match=f"process {process.pid} on"), locked(tmp_path / "run"):
        pass
    try:
        process.kill()
        process.wait()
        with locked(tmp_path / "run"):
            assert psutil.Process(worker).status() != psutil.STATUS_ZOMBIE
    finally:
        os.kill(worker, signal.SIGKILL)

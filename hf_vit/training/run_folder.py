"""The folder of a run: its lock, what is found in it, and how a run starts anew or continues there."""

import contextlib
import json
import os
import shutil
import socket
import time
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.utils import logging

from hf_vit.system import run_files
from hf_vit.system.errors import UserError
from hf_vit.system.escapes import printable
from hf_vit.system.files import atomic_dir, verify_checksums, write_text
from hf_vit.training.arguments import TrainArguments, changed_arguments
from hf_vit.training.checkpoints import LARGEST_LOG, list_checkpoints, load_best, newest_checkpoint, step_of
from hf_vit.training.distributed import run_on_main
from hf_vit.training.state import STATE_SHAPE


logger = logging.get_logger(__name__)

LOCK_SECONDS = 10  # a run that was told to stop may still be saving
FOLDERS = ("checkpoints", "model", "last")
STARTED = "config.yaml"  # written before the first step
FINISHED = "results.json"  # written last
FILES = (FINISHED, "metrics.jsonl", "confusion_matrix.csv", run_files.SAMPLES, run_files.PREDICTIONS)
NEW_RUN = "choose another --output_dir, or pass --overwrite true to begin anew"

_locked = []  # open files: a lock lasts as long as its file is open


def lock(run: Path):
    """Keep other runs out of a folder until `unlock`, or until this process ends, however it ends.

    The lock is the process's own (POSIX), so that decoding workers that outlive a killed run do not hold it.

    Raises:
        ValueError: if it is a file, if another run is at work there, also after some seconds, or if `.lock` is not a file of its own.
        OSError: if the folder cannot be written to.
    """
    import fcntl  # not on Windows

    if run.exists() and not run.is_dir():
        raise UserError(f"--output_dir {run} is a file: name a new folder, or that of a run")
    try:
        run.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(run_files.open_regular(run / ".lock", os.O_RDWR | os.O_CREAT), "r+")
    except OSError as error:
        raise UserError(f"{run} cannot be written to ({error.strerror}): choose another --output_dir") from error
    waited_until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError) as error:  # which of them depends on the system
            if time.monotonic() > waited_until:
                file.seek(0)
                holder = printable(file.read(200).strip())
                file.close()
                raise UserError(
                    f"another run is at work in {run} ({holder}): wait for its end, or choose another --output_dir"
                ) from error
            time.sleep(0.1)
        except OSError as error:
            logger.warning(
                f"{run} lies on a disk without locks ({error.strerror}): see to it that no other run is there"
            )
            break
    if os.fstat(file.fileno()).st_nlink > 1:
        file.close()
        raise UserError(f"{run / '.lock'} is a second name (a hard link) of another file: delete it")
    file.truncate(0)
    file.seek(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    _locked.append(file)


def unlock():
    """Let other runs into the folders that this process locked."""
    while _locked:
        _locked.pop().close()


def find_checkpoint(run: Path, args: TrainArguments, accelerator) -> tuple[bool, dict | None, dict | None]:
    """Lock the folder and find where to go on: (whether the run is finished, state, tensors).

    `state` is that of the checkpoint, with its `folder`, or None for a new run; `tensors` are on the main process only.

    Raises:
        ValueError: if the folder holds another run, or one that must not be continued, or no readable checkpoint.
        OSError: if it cannot be written to.
    """

    def find():
        lock(run)
        return _find(run, args)

    finished, state = run_on_main(accelerator, find)
    if state is None or not accelerator.is_main_process:
        return finished, state, None
    folder = Path(state["folder"])
    try:
        tensors = {name: load_file(folder / f"{name}.safetensors") for name in checkpoint_tensors(folder)}
    except SafetensorError as error:
        raise UserError(f"{folder} holds weights that cannot be read ({error})") from error
    return finished, state, tensors


def checkpoint_tensors(folder: Path) -> list[str]:
    """Which of "average", "model" and "optimizer" the manifest of a checkpoint lists."""
    listed = run_files.listed_files(folder, "state.json", "model.safetensors", "optimizer.safetensors")
    return [name for name in ("average", "model", "optimizer") if f"{name}.safetensors" in listed]


def _find(run: Path, args: TrainArguments) -> tuple[bool, dict | None]:
    """(whether the run is finished, the state to continue from)."""
    for name in FOLDERS:
        if (run / name).is_symlink():
            raise UserError(
                f"{run / name} is a link, which a run does not follow: make --output_dir itself a link instead"
            )
    started = (run / STARTED).is_file()
    others = [name for name in (*FOLDERS, *FILES) if (run / name).exists()]
    if others and not started and not args.overwrite:
        raise UserError(f"{run} holds {', '.join(others)} and no run: {NEW_RUN}")
    if args.overwrite or (not started and args.resume in ("auto", "never")):
        return False, None
    already = f"{run} already holds {'a finished' if (run / FINISHED).exists() else 'an unfinished'} run"
    if args.resume == "never":
        raise UserError(f"{already}: {NEW_RUN}")
    named = named_checkpoint(args.resume)
    if named is not None and (not started or named.parents[1] == run.resolve()):
        folder = named
        try:
            verify_checksums(folder)
        except ValueError as error:
            raise UserError(f"--resume {folder}: {error}") from error
    else:  # also if the run that began with another run's checkpoint is already here
        try:
            saved = run_files.read_flat_yaml(run / STARTED)
        except ValueError as error:
            raise UserError(f"{run / STARTED} cannot be read: {NEW_RUN}") from error
        if changes := changed_arguments(saved, args):
            raise UserError(f"{already} of another configuration ({'; '.join(changes)}): {NEW_RUN}")
        folder = newest_checkpoint(run) or named  # a run that was stopped before its first own checkpoint
        if (run / FINISHED).exists() and (folder is None or (run / "model" / "config.json").is_file()):
            return True, None
        if folder is None:
            return False, None
    state = read_state(folder)
    if changes := changed_arguments(state["config"], args):
        raise UserError(
            f"--resume {folder}: its run has another configuration ({'; '.join(changes)}): keep it, or begin a new run"
        )
    return False, {**state, "folder": str(folder)}


def named_checkpoint(resume: str) -> Path | None:
    """The checkpoint that `--resume PATH` names, or the newest one of a run folder; None for "auto"."""
    if resume == "auto":
        return None
    named = Path(resume).resolve()
    if (named / "manifest.json").is_file():
        return named
    if not list_checkpoints(named):
        raise UserError(f"--resume {resume}: wanted auto, never, a checkpoint or a run folder that has some")
    return newest_checkpoint(named)


def read_state(folder: Path) -> dict:
    """state.json of a checkpoint; ValueError if it is none."""
    try:
        averaged = "average" in checkpoint_tensors(folder)
        state = run_files.read_json(folder / "state.json", STATE_SHAPE)
        if state["step"] < 1 or averaged != (state["average_step"] is not None):
            raise UserError("its state.json does not fit its other files")
    except ValueError as error:
        raise UserError(f"{folder} is no checkpoint of a run: {error}") from error
    return state


def clear(run: Path):
    """Delete an earlier run; killed in between, what is left counts as an unfinished run."""
    for name in FILES:
        (run / name).unlink(missing_ok=True)
    for name in FOLDERS:
        if (run / name).exists():
            shutil.rmtree(run / name)
    (run / STARTED).unlink(missing_ok=True)


def continue_run(origin: Path, run: Path, step: int, scored_step: int) -> tuple[Path, dict] | None:
    """Continue in `run` from step `step` of `origin`, usually the same folder; return its best weights as `load_best` does.

    The log is cut at that step, and of evaluations at `scored_step`. What the folder holds beyond it, broken or given up, is deleted.
    """
    (run / FINISHED).unlink(missing_ok=True)
    for part in run.glob("checkpoints/.*.part"):
        shutil.rmtree(part, ignore_errors=True)
    for later in list_checkpoints(run):
        if step_of(later) > step:
            shutil.rmtree(later)
    lines = []
    if (origin / "metrics.jsonl").is_file():
        for line in run_files.read_text(origin / "metrics.jsonl", LARGEST_LOG).splitlines():
            with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):  # half a line, at a kill
                values = json.loads(line)
                if values["step"] <= (scored_step if "eval_loss" in values else step):
                    lines.append(line + "\n")
    write_text(run / "metrics.jsonl", "".join(lines))
    best = load_best(origin)
    if best is not None and origin.resolve() != run.resolve():
        with atomic_dir(run / "checkpoints" / best[0].name) as aside:
            run_files.copy_listed(best[0], aside)
            run_files.copy_file(best[0] / run_files.MANIFEST, aside / run_files.MANIFEST)
        best = load_best(run)
    return best


def publish_best(best: Path, folder: Path, leave_out: tuple[str, ...]):
    """Copy the files that the manifest of `checkpoints/best-N` lists, except those in `leave_out`, to `folder`."""
    with atomic_dir(folder) as aside:
        run_files.copy_listed(best, aside, leave_out)

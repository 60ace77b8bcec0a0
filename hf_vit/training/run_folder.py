"""The folder of a run: its lock, what is found in it, and how a run starts anew or continues there."""

import contextlib
import json
import os
import shutil
import socket
import time
from pathlib import Path

import yaml
from safetensors.torch import load_file
from transformers.utils import logging

from hf_vit.system import run_files
from hf_vit.system.errors import UserError
from hf_vit.system.files import atomic_dir, verify_checksums, write_text
from hf_vit.training.arguments import TrainArguments
from hf_vit.training.checkpoints import TENSORS, list_checkpoints, load_best, newest_checkpoint, step_of
from hf_vit.training.plan import check_identity, fixed_arguments


logger = logging.get_logger(__name__)

LOCK_SECONDS = 10  # a run that was told to stop may still be saving
FOLDERS = ("checkpoints", "model", "last")
STARTED = "config.yaml"  # written before the first step
FINISHED = "results.json"  # written last
LOG = "metrics.jsonl"
FILES = (FINISHED, LOG, "confusion_matrix.csv", run_files.SAMPLES, run_files.PREDICTIONS)


@contextlib.contextmanager
def locked(run: Path):
    """Keep other runs out of a folder meanwhile, or until this process ends, however it ends. A folder that was made for a run
    which then left nothing in it goes again.

    The lock is the process's own (POSIX), so that decoding workers that outlive a killed run do not hold it.

    Raises:
        ValueError: if it is a file, cannot be written to, or another run is at work there, also after some seconds.
    """
    import fcntl  # not on Windows

    if run.exists() and not run.is_dir():
        raise UserError(f"--output_dir {run} is a file: name a new folder, or that of a run")
    made = [folder for folder in (run, *run.parents) if not folder.exists()]
    try:
        run.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(run / ".lock", os.O_RDWR | os.O_CREAT), "r+")
    except OSError as error:
        raise UserError(f"{run} cannot be written to ({error.strerror}): choose another --output_dir") from error
    with file:
        waited_until = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError) as error:  # which of them depends on the system
                if time.monotonic() > waited_until:
                    holder = file.read(200).strip()
                    raise UserError(
                        f"another run is at work in {run} ({holder}): wait for its end, or choose another --output_dir"
                    ) from error
                time.sleep(0.1)
            except OSError as error:
                logger.warning(f"{run} is on a disk without locks ({error.strerror}): start no other run there")
                break
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            if made and os.listdir(run) == [".lock"]:
                (run / ".lock").unlink()
                with contextlib.suppress(OSError):  # somebody else uses it
                    for folder in made:
                        folder.rmdir()


def find_checkpoint(run: Path, args: TrainArguments) -> tuple[bool, Path | None]:
    """(whether the run is finished, the checkpoint to continue from) in a locked folder.

    Raises:
        ValueError: if the folder holds another run, or one that must not be continued, or no readable checkpoint.
    """
    started = (run / STARTED).is_file()
    others = [name for name in (*FOLDERS, *FILES) if (run / name).exists()]
    if others and not started and not args.overwrite:
        raise UserError(
            f"{run} holds {', '.join(others)} and no run: choose another --output_dir, or pass --overwrite"
        )
    if args.overwrite or (not started and args.resume in ("auto", "never")):
        return False, None
    if args.resume == "never":
        raise UserError(f"{run} already holds a run: choose another --output_dir, or pass --overwrite to begin anew")
    named = named_checkpoint(args.resume)
    if named is not None and (not started or named.parents[1] == run.resolve()):
        try:
            verify_checksums(named)
        except ValueError as error:
            raise UserError(f"--resume {named}: {error}") from error
        return False, named
    given = {name: value for name, value in fixed_arguments(args).items() if value is not None}
    check_identity(yaml.safe_load((run / STARTED).read_text()), given, f"{run} holds")
    folder = newest_checkpoint(run) or named  # a run that was stopped before its first own checkpoint
    if (run / FINISHED).exists() and (folder is None or (run / "model" / "config.json").is_file()):
        return True, None
    if folder is None:
        logger.warning(f"the run in {run} was stopped before its first checkpoint: it begins anew")
    return False, folder


def named_checkpoint(resume: str) -> Path | None:
    """The checkpoint that `--resume PATH` names, or the newest one of a run folder; None for "auto"."""
    if resume == "auto":
        return None
    named = Path(resume).resolve()
    if (named / run_files.MANIFEST).is_file():
        return named
    if not list_checkpoints(named):
        raise UserError(f"--resume {resume}: must be auto, never, a checkpoint, or a run folder that has some")
    return newest_checkpoint(named)


def read_checkpoint(folder: Path) -> dict:
    """What `TrainState.state_dict` returned, and the identity of the run.

    Raises:
        ValueError: if it is no checkpoint of a run.
    """
    listed = run_files.listed_files(folder, "state.json", "model.safetensors", "optimizer.safetensors")
    tensors = {name: load_file(folder / f"{name}.safetensors") for name in TENSORS if f"{name}.safetensors" in listed}
    return {**json.loads((folder / "state.json").read_text()), **tensors}


def clear(run: Path):
    """Delete an earlier run; killed in between, what is left counts as an unfinished run."""
    for name in FILES:
        (run / name).unlink(missing_ok=True)
    for name in FOLDERS:
        if (run / name).exists():
            shutil.rmtree(run / name)
    (run / STARTED).unlink(missing_ok=True)


def continue_run(origin: Path, run: Path, step: int, evaluated_step: int) -> dict | None:
    """Continue in `run` from step `step` of `origin`, usually the same folder; return the scores of its best weights.

    The log is cut at that step, and of evaluations at `evaluated_step`. What the folder holds beyond it, broken or given up, is deleted.
    """
    (run / FINISHED).unlink(missing_ok=True)
    for part in run.glob("checkpoints/.*.part"):
        shutil.rmtree(part, ignore_errors=True)
    for later in list_checkpoints(run):
        if step_of(later) > step:
            shutil.rmtree(later)
    lines = (origin / LOG).read_text().splitlines(keepends=True) if (origin / LOG).is_file() else []
    kept = []
    for line in lines:
        with contextlib.suppress(ValueError):  # half a line, at a kill
            values = json.loads(line)
            if values["step"] <= (evaluated_step if "eval_loss" in values else step):
                kept.append(line)
    write_text(run / LOG, "".join(kept))
    best = load_best(origin)
    if best is not None and origin.resolve() != run.resolve():
        with atomic_dir(run / "checkpoints" / best[0].name) as aside:
            run_files.copy_listed(best[0], aside)
            shutil.copy(best[0] / run_files.MANIFEST, aside)
    return best and best[1]


def publish_best(best: Path, folder: Path, leave_out: tuple[str, ...]):
    """Copy the files that the manifest of `checkpoints/best-N` lists, except those in `leave_out`, to `folder`."""
    with atomic_dir(folder) as aside:
        run_files.copy_listed(best, aside, leave_out)

"""The folder of a run: its lock, what is found in it, and how a run starts anew or continues there."""

import contextlib
import json
import os
import shutil
import socket
import time
from pathlib import Path

import yaml
from transformers.utils import logging

from hf_vit.system.errors import UserError
from hf_vit.system.files import verify_checksums, write_text
from hf_vit.system.run_files import MANIFEST, PREDICTIONS, SAMPLES
from hf_vit.training.arguments import TrainArguments
from hf_vit.training.checkpoints import list_checkpoints, load_best, newest_checkpoint, step_of
from hf_vit.training.plan import check_identity, fixed_arguments


logger = logging.get_logger(__name__)

LOCK_SECONDS = 10  # a run that was told to stop may still be saving
FOLDERS = ("checkpoints", "model", "last")
STARTED = "config.yaml"  # written before the first step
FINISHED = "results.json"  # written last
LOG = "metrics.jsonl"
FILES = (FINISHED, LOG, "confusion_matrix.csv", SAMPLES, PREDICTIONS)


@contextlib.contextmanager
def locked(run: Path):
    """Keep other runs out of a folder meanwhile, or until this process ends, however it ends. A folder that was made for a run
    which then left nothing in it goes again.

    The lock is the process's own (POSIX), so that decoding workers that outlive a killed run do not hold it.

    Raises:
        ValueError: if it cannot be written to, or another run is at work there, also after some seconds.
    """
    import fcntl  # not on Windows

    made, latest = [folder for folder in (run, *run.parents) if not folder.exists()], time.monotonic() + LOCK_SECONDS
    try:
        run.mkdir(parents=True, exist_ok=True)
        (run / ".lock").touch()
    except OSError as error:
        raise UserError(f"{run} cannot be written to ({error.strerror}): choose another --output_dir") from error
    with open(run / ".lock", "r+") as file:
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError) as error:  # which of them depends on the system
                if time.monotonic() > latest:
                    raise UserError(
                        f"another run is at work in {run} ({file.read()}): wait for its end, or choose another --output_dir"
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
    named = None if args.resume == "auto" else named_checkpoint(Path(args.resume).resolve())
    if named is not None and (not started or named.parents[1] == run.resolve()):
        return False, named
    given = {name: value for name, value in fixed_arguments(args).items() if value is not None}
    check_identity(yaml.safe_load((run / STARTED).read_text()), given, f"{run} holds")
    folder = newest_checkpoint(run)
    if folder is None and list_checkpoints(run):
        raise UserError(f"no checkpoint of {run} can be read: pass --overwrite true to begin anew")
    folder = folder or named  # a run that was stopped before its first own checkpoint
    if (run / FINISHED).exists() and (folder is None or (run / "model" / "config.json").is_file()):
        return True, None
    if folder is None:
        logger.warning(f"the run in {run} was stopped before its first checkpoint: it begins anew")
    return False, folder


def named_checkpoint(named: Path) -> Path:
    """The intact checkpoint that `--resume PATH` names, or the newest one of a run folder."""
    try:
        if (named / MANIFEST).is_file():
            verify_checksums(named)
            return named
        if (newest := newest_checkpoint(named)) is None:
            raise UserError("must be auto, never, a checkpoint, or a run folder that has some")
        return newest
    except ValueError as error:
        raise UserError(f"--resume {named}: {error}") from error


def clear(run: Path):
    """Delete an earlier run; killed in between, what is left counts as an unfinished run."""
    for path in (run / name for name in (*FILES, *FOLDERS, STARTED)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def continue_run(origin: Path, run: Path, step: int, evaluated_step: int) -> dict | None:
    """Continue in `run` from step `step` of `origin`, usually the same folder; return the scores of its best weights.

    The log is cut at that step, and of evaluations at `evaluated_step`. What the folder holds beyond it, broken or given up, is deleted.
    """
    (run / FINISHED).unlink(missing_ok=True)
    later = [folder for folder in list_checkpoints(run) if step_of(folder) > step]
    for folder in (*run.glob("checkpoints/.*.part"), *later):
        shutil.rmtree(folder)
    kept = []
    for line in (origin / LOG).read_text().splitlines(keepends=True) if (origin / LOG).is_file() else ():
        with contextlib.suppress(ValueError):  # half a line, at a kill
            values = json.loads(line)
            if values["step"] <= (evaluated_step if "eval_loss" in values else step):
                kept.append(line)
    write_text(run / LOG, "".join(kept))
    folder, scores = load_best(origin) or (None, None)
    if folder is not None and origin.resolve() != run.resolve():
        shutil.copytree(folder, run / "checkpoints" / folder.name, dirs_exist_ok=True)
    return scores

"""A run that may be killed at any instant and goes on: one run a folder, files that are whole or absent, checkpoints, signals.

What decides the rest of a run is its weights, their average, the optimizers' state and a few counters. Order, augmentation and
the random numbers of a step are functions of (seed, step) and need no saving.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from accelerate.utils import broadcast, broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.utils import logging

from hf_vit.system import run_files
from hf_vit.system.escapes import printable
from hf_vit.system.files import atomic_dir, checksummed_dir, sync, verify_checksums, write_text
from hf_vit.system.hardware import launched
from hf_vit.training import arguments as presets


logger = logging.get_logger(__name__)

STOPPED = 75  # exit code after a signal: EX_TEMPFAIL of sysexits.h, "try again later"
LOCK_SECONDS = 10  # a run that was told to stop may still be saving
FOLDERS = ("checkpoints", "model", "last")  # of a run
STARTED = "config.yaml"  # is in a run's folder from its first step on
FINISHED = "results.json"  # is written last
LARGEST_LOG = 2**30  # bytes of metrics.jsonl, and of scores.json with its confusion matrix
SCALAR = (str, int, float, bool, type(None))
SCORES = {"metrics": {"accuracy": (int, float), "loss": (int, float)}, "images": int, "confusion_matrix": list}
STATE = {  # what state.json of a checkpoint holds
    "step": int, "epoch": int, "scored_step": int, "resumed_at": [int], "skipped_steps": [int], "skipped_images": [str],
    "average_step": (run_files.OPTIONAL, int), "scaler": (run_files.OPTIONAL, {str: (int, float)}), "lengths": {str: int},
    "sums": [[(int, float), 3]], "seconds": dict.fromkeys(("training", "scoring", "input", "model", "total"), (int, float)),
    "facts": {str: SCALAR}, "config": {str: SCALAR},
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# One run a folder

_locked = []  # open files; a lock lasts as long as its file is open


def lock(run: Path):
    """Keep other runs out of a folder until this process ends, however it ends.

    The lock is the process's own (POSIX), so that decoding workers that outlive a killed run do not hold it.

    Raises:
        ValueError: if another run is at work there, and still is after some seconds; or if `.lock` is no file of its own.
        OSError: if the folder cannot be written to.
    """
    import fcntl  # not on Windows

    try:
        run.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(run_files.open_regular(run / ".lock", os.O_RDWR | os.O_CREAT), "r+")
    except OSError as error:
        raise OSError(f"{run} cannot be written to ({error.strerror}): choose another --output_dir") from error
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
                raise ValueError(
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
        raise ValueError(f"{run / '.lock'} is a second name (a hard link) of another file: delete it")
    file.truncate(0)
    file.seek(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    _locked.append(file)


# ----------------------------------------------------------------------------------------------------------------------
# Where to go on


def on_main(accelerator, act):
    """What `act()` gives on the main process, to all; where it fails, all processes end.

    Raises:
        ValueError, OSError: on the main process, as `act` does; the others leave at once and without a word.
    """
    result = [None]
    if accelerator.is_main_process:
        try:
            result = [act()]
        except (ValueError, OSError) as error:
            result = [error]
    broadcast_object_list(result)
    if isinstance(result[0], Exception):
        if not accelerator.is_main_process:
            os._exit(1)
        raise result[0]
    return result[0]


def begin(run: Path, args: presets.TrainArguments, accelerator) -> tuple[bool, dict | None, dict | None]:
    """Take the folder, and find what is to be done in it: (whether the run is finished, state, tensors).

    `state` is what `save_checkpoint` was given, None for a run from its beginning; `tensors` lie on the main process only.

    Raises:
        ValueError: if the folder holds another run, or one that may not be gone on with, or no readable checkpoint.
        OSError: if it cannot be written to.
    """

    def find():
        lock(run)
        return _find(run, args)

    finished, state = on_main(accelerator, find)
    if state is None or not accelerator.is_main_process:
        return finished, state, None
    folder = Path(state["folder"])
    try:
        return finished, state, {name: load_file(folder / f"{name}.safetensors") for name in tensors_of(folder)}
    except SafetensorError as error:
        raise ValueError(f"{folder} holds weights that cannot be read ({error})") from error


def tensors_of(folder: Path) -> list[str]:
    """Which of "average", "model" and "optimizer" the manifest of a checkpoint lists."""
    listed = run_files.listed_files(folder, "state.json", "model.safetensors", "optimizer.safetensors")
    return [name for name in ("average", "model", "optimizer") if f"{name}.safetensors" in listed]


def _find(run: Path, args: presets.TrainArguments) -> tuple[bool, dict | None]:
    for name in FOLDERS:
        if (run / name).is_symlink():
            raise ValueError(
                f"{run / name} is a link, which a run does not follow: make --output_dir itself a link instead"
            )
    there = (run / STARTED).is_file()
    new = "choose another --output_dir, or pass --overwrite true to begin anew"
    if not there and not args.overwrite and (others := [name for name in FOLDERS if (run / name).exists()]):
        raise ValueError(f"{run} holds {', '.join(others)} and no run: {new}")
    if args.overwrite or (not there and args.resume in ("auto", "never")):
        return False, None
    state = f"{run} already holds {'a finished' if (run / FINISHED).exists() else 'an unfinished'} run"
    if args.resume == "never":
        raise ValueError(f"{state}: {new}")
    named = None if args.resume == "auto" else Path(args.resume).resolve()
    if named is not None and not (named / "manifest.json").is_file():
        if not checkpoints_of(named):
            raise ValueError(f"--resume {args.resume}: wanted auto, never, a checkpoint or a run folder that has some")
        named = newest(named)
    if named is not None and (not there or named.parents[1] == run.resolve()):
        folder = named
        try:
            verify_checksums(folder)
        except ValueError as error:
            raise ValueError(f"--resume {folder}: {error}") from error
    else:  # also where the run that began with another run's checkpoint is already there
        try:
            saved = run_files.read_flat_yaml(run / STARTED)
        except ValueError as error:
            raise ValueError(f"{run / STARTED} cannot be read: {new}") from error
        if changes := presets.changes(saved, args):
            raise ValueError(f"{state} of another configuration ({'; '.join(changes)}): {new}")
        folder = newest(run)
        if (run / FINISHED).exists() and (folder is None or (run / "model" / "config.json").is_file()):
            return True, None
        if folder is None:
            return False, None
    try:
        averaged = "average" in tensors_of(folder)
        state = run_files.read_json(folder / "state.json", STATE)
        if state["step"] < 1 or averaged != (state["average_step"] is not None):
            raise ValueError("its state.json does not fit its other files")
    except ValueError as error:
        raise ValueError(f"{folder} is no checkpoint of a run: {error}") from error
    if changes := presets.changes(state["config"], args):
        raise ValueError(
            f"--resume {folder}: its run has another configuration ({'; '.join(changes)}): keep it, or begin a new run"
        )
    return False, {**state, "folder": str(folder)}


def checkpoints_of(run: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    return _numbered(run, "step")


def _numbered(run: Path, kind: str) -> list[Path]:
    folders = [folder for folder in run.glob(f"checkpoints/{kind}-*") if folder.name.partition("-")[2].isdigit()]
    return sorted(folders, key=_step_of)


def _step_of(folder: Path) -> int:
    return int(folder.name.partition("-")[2])


def newest(run: Path) -> Path | None:
    """The newest checkpoint that is whole; None where there is none at all. Broken ones are named in a warning.

    Raises:
        ValueError: if all are broken.
    """
    broken = []
    for folder in reversed(checkpoints_of(run)):
        try:
            verify_checksums(folder)
            for one in broken:
                logger.warning(f"a broken checkpoint is left out, {one}")
            return folder
        except ValueError as error:
            broken.append(f"{folder}: {error}")
    if broken:
        raise ValueError(
            f"no checkpoint of {run} can be read ({'; '.join(broken)}): pass --overwrite true to begin anew"
        )
    return None


def clear(run: Path):
    """Take an earlier run out of a folder; killed in between, what is left is an unfinished run."""
    for name in (FINISHED, "metrics.jsonl", "confusion_matrix.csv", "samples.safetensors"):
        (run / name).unlink(missing_ok=True)
    for name in FOLDERS:
        if (run / name).exists():
            shutil.rmtree(run / name)
    (run / STARTED).unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints


def _whole(tensors: Iterable[tuple[str, torch.Tensor]], wanted: bool) -> dict[str, torch.Tensor]:
    """Named tensors as one piece each, in this machine's memory, where they are `wanted`: sharded ones every process must
    help to put together."""
    whole = {}
    for name, tensor in tensors:
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if wanted:
            whole[name] = tensor.detach().cpu().contiguous()
    return whole


def weights_of(model, wanted: bool = True) -> dict[str, torch.Tensor]:
    """All weights of a model by their names, whole, on CPU; every process must ask, whether it wants them or not."""
    return _whole(model.state_dict().items(), wanted)


def collect(model, optimizers, average=None, wanted: bool = True) -> dict[str, dict[str, torch.Tensor]]:
    """{"model": ..., "optimizer": ..., "average": ...}: tensors by name, whole, on CPU; every process must ask.

    The optimizers' state is named `parameter.key`, such as `classifier.weight.exp_avg`: it does not depend on how many
    processes there are.
    """
    tensors = {"model": weights_of(model, wanted)}
    states = (
        (f"{name}.{key}", value)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
        for key, value in optimizer.state[parameter].items()
    )
    tensors["optimizer"] = _whole(states, wanted)
    if average is not None:
        with average.applied(model):
            # Copies: on CPU these tensors are the model's own, which go back to what they were.
            tensors["average"] = {name: value.clone() for name, value in weights_of(model, wanted).items()}
    return tensors


def restore(tensors: dict | None, model, optimizers, average, accelerator):
    """Put back what `collect` gave, from the main process to all, cut as the model is cut now.

    Raises:
        ValueError: on the main process, if the tensors are not those of this model.
    """
    if tensors is not None:
        _check_tensors(tensors, model, average is not None, optimizers)
    shapes = [
        tensors
        and {
            file: {name: (value.shape, value.dtype) for name, value in part.items()} for file, part in tensors.items()
        }
    ]
    broadcast_object_list(shapes)
    if tensors is None:  # not the main process: what is received has the shape and type of this
        tensors = {
            file: {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in part.items()}
            for file, part in shapes[0].items()
        }

    def received(value, like):
        value = value.to(like.device, copy=True)  # not the memory-mapped file, which will be deleted
        if isinstance(like, DTensor) and value.shape == like.shape:
            return distribute_tensor(value, like.device_mesh, like.placements)
        return broadcast(value) if accelerator.num_processes > 1 else value

    @torch.no_grad()
    def fill(part):
        for name, like in model.state_dict().items():
            like.copy_(received(part[name], like))

    if average is not None:
        fill(tensors["average"])
        average.take(model)
    fill(tensors["model"])
    for optimizer in optimizers:
        parameters = [
            pair for group in optimizer.param_groups for pair in zip(group["names"], group["params"], strict=True)
        ]
        states = {}
        for index, (name, parameter) in enumerate(parameters):
            own = {key: value for key, value in tensors["optimizer"].items() if key.rpartition(".")[0] == name}
            states[index] = {key.rpartition(".")[2]: received(value, parameter) for key, value in own.items()}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": states})


def _check_tensors(tensors: dict, model, averaged: bool, optimizers):
    own = {name: (tuple(value.shape), value.dtype) for name, value in model.state_dict().items()}
    for part in ("model", "average") if averaged else ("model",):
        found = {name: (tuple(value.shape), value.dtype) for name, value in tensors.get(part, {}).items()}
        if found != own:
            other = next(iter(sorted(name for name in {*found, *own} if found.get(name) != own.get(name))))
            raise ValueError(
                f"{part}.safetensors of the checkpoint is not of this model: {printable(other)} is {found.get(other)} there, and "
                f"{own.get(other)} here"
            )
    shapes = {name: shape for name, (shape, _) in own.items()}
    keys = defaultdict(set)
    for name, value in tensors["optimizer"].items():
        parameter, _, key = name.rpartition(".")
        keys[parameter].add(key)
        if parameter not in shapes or tuple(value.shape) not in ((), shapes[parameter]):
            raise ValueError(f"optimizer.safetensors of the checkpoint is not of this model: {printable(name)}")
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        wanted = set().union(*(keys[name] for name in group["names"]))
        for name in group["names"]:
            if keys[name] and keys[name] != wanted:  # one without a gradient has none
                lacking = ", ".join(sorted(wanted - keys[name]))
                raise ValueError(f"optimizer.safetensors of the checkpoint lacks {printable(lacking)} of {name}")


def save_checkpoint(run: Path, tensors: dict, state: dict, keep: int):
    """Write `checkpoints/step-N`, N being `state["step"]`, and take away all but the last `keep`.

    Raises:
        OSError: if there is no room; the checkpoints before it are as they were.
    """
    folder = run / "checkpoints" / f"step-{state['step']:06d}"
    needed = sum(value.nbytes for part in tensors.values() for value in part.values())
    if (run / "metrics.jsonl").exists():
        sync(run / "metrics.jsonl")  # a run that goes on from here will not write its lines again
    with checksummed_dir(folder, needed) as aside:
        for name, part in tensors.items():
            save_file(part, aside / f"{name}.safetensors")
        (aside / "state.json").write_text(json.dumps(state))
    earlier = [other for other in checkpoints_of(run) if _step_of(other) < state["step"]]
    for old in earlier[: max(0, len(earlier) - keep + 1)]:
        shutil.rmtree(old, ignore_errors=True)


def save_best(run: Path, step: int, scores: dict, needed: int, write_model):
    """Write `checkpoints/best-N`, a model folder with its scores, and take away the best one before.

    Args:
        scores: goes to scores.json.
        needed: bytes of the model.
        write_model: is called with the folder to write the model to.
    """
    folder = run / "checkpoints" / f"best-{step:06d}"
    with checksummed_dir(folder, needed) as aside:
        write_model(aside)
        (aside / "scores.json").write_text(json.dumps(scores))
    for old in _numbered(run, "best"):
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)


def load_best(run: Path) -> tuple[Path, dict] | None:
    """The folder and the scores that `save_best` wrote last; None if there are none. A broken one is named in a warning."""
    for folder in reversed(_numbered(run, "best")):
        try:
            verify_checksums(folder)
            return folder, run_files.read_json(folder / "scores.json", {}, LARGEST_LOG)
        except ValueError as error:
            logger.warning(f"the best weights so far are lost, {folder}: {error}")
    return None


def take_over(origin: Path, run: Path, step: int) -> tuple[Path, dict] | None:
    """Go on in `run` from step number `step` of `origin` (mostly the same folder): its log up to there, and its best weights,
    which are returned as `load_best` does. What the folder holds beyond that step, broken or given up, goes."""
    (run / FINISHED).unlink(missing_ok=True)
    for part in run.glob("checkpoints/.*.part"):
        shutil.rmtree(part, ignore_errors=True)
    for later in checkpoints_of(run):
        if _step_of(later) > step:
            shutil.rmtree(later)
    lines = []
    if (origin / "metrics.jsonl").is_file():
        for line in run_files.read_text(origin / "metrics.jsonl", LARGEST_LOG).splitlines():
            with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):  # half a line, at a kill
                if json.loads(line)["step"] <= step:
                    lines.append(line + "\n")
    write_text(run / "metrics.jsonl", "".join(lines))
    best = load_best(origin)
    if best is not None and origin.resolve() != run.resolve():
        with atomic_dir(run / "checkpoints" / best[0].name) as aside:
            run_files.copy_listed(best[0], aside)
            run_files.copy_file(best[0] / run_files.MANIFEST, aside / run_files.MANIFEST)
        best = load_best(run)
    return best


def publish(best: Path, folder: Path, leave_out: tuple[str, ...]):
    """Copy the files that the manifest of `checkpoints/best-N` lists, but for those in `leave_out`."""
    with atomic_dir(folder) as aside:
        run_files.copy_listed(best, aside, leave_out)


# ----------------------------------------------------------------------------------------------------------------------
# Signals


class Signals:
    """SIGTERM, SIGINT and SIGUSR1 as questions to the training loop: `asked` is the name of the first that came, or None.

    Before `training` is True nothing is worth saving, and the process leaves at once with the exit code `STOPPED`. A SIGINT
    after any of them kills it at once. Where a launcher started the process, the launcher's end counts as a SIGTERM:
    `accelerate launch` does not pass signals on.
    """

    def __init__(self):
        self.asked, self.training = None, False
        self.answer(self._ask)
        if launched() and sys.platform == "linux":
            PR_SET_PDEATHSIG = 1
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    @staticmethod
    def answer(handler):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, handler)

    def _ask(self, number, frame):
        if number == signal.SIGINT and self.asked is not None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        self.asked = self.asked or signal.Signals(number).name
        if self.training:
            self._say(f"{self.asked}: saving after this step; Ctrl-C leaves at once")
        else:
            self._say(f"stopped by {self.asked} before the first step")
            os._exit(STOPPED)

    @staticmethod
    def _say(text: str):
        if os.environ.get("RANK", "0") == "0":
            os.write(2, f"\n{text}\n".encode())  # print might be at work just now

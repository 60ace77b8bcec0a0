"""A training run by a Python call, for notebooks.

    from hf_vit_recipes.notebooks import train

    results = train(dataset_name="photos", preset="tiny-patch16-224", output_dir="runs/photos")
    print(results["metrics"]["accuracy"])

It is the run of `hf-vit train`, in this process: flags, run folder and bits are the same.
"""

import contextlib
import io
import json
import os
import re
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils.memory import clear_device_cache

from hf_vit.system import command_line
from hf_vit.system.errors import UserError
from hf_vit.system.hardware import launched
from hf_vit.system.hub_names import refuse_mistyped_path
from hf_vit.training.arguments import TrainArguments, parse_args
from hf_vit.training.classification import Classification
from hf_vit.training.distributed import exit_with_error
from hf_vit.training.run_folder import FINISHED, unlock
from hf_vit.training.signals import Signals

from .train import main, report


def train(**flags) -> dict:
    """Train, and return what results.json holds; a finished run returns it at once, and a dry run nothing.

    An interrupt saves the run after the step it is in and raises KeyboardInterrupt, and the same call goes on from there to
    the same bits. A second interrupt leaves at once.

    Args:
        flags: those of `hf-vit train`, without their dashes: `train(config="demo", learning_rate=1e-3, overwrite=True)`.

    Raises:
        ValueError: for a flag that does not exist or a value that it does not take, for data or a checkpoint that cannot be
            used, and if another run is at work in the folder.
        OSError: for a file that cannot be read or written.
        KeyboardInterrupt: after a signal; one that is not an interrupt is then sent again, for the kernel to answer.
    """
    as_word = lambda value: ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
    words = [f"--{name}={as_word(value)}" for name, value in flags.items() if value is not None]
    with _as_command(words):
        args = _parse(words)
        for name in ("dataset_name", "model_name_or_path", "teacher_name_or_path"):
            refuse_mistyped_path(getattr(args, name), name)
        if launched() and not torch.cuda.is_available():  # by notebook_launcher, which does not say so itself
            os.environ.setdefault("ACCELERATE_USE_CPU", "true")
        signals = Signals(in_notebook=True)
        try:
            main(args, Classification, report, signals)
        except Exception as error:
            if dist.is_initialized():
                exit_with_error(error)
            raise
        finally:
            signals.restore()
            unlock()
            AcceleratorState._reset_state(reset_partial_state=True)  # the next run may have another precision
            GradientState._reset_state()
            clear_device_cache(garbage_collection=True)
            if signals.asked not in (None, "SIGINT"):
                signal.raise_signal(signal.Signals[signals.asked])
    if signals.asked is not None:
        raise KeyboardInterrupt(f"stopped by {signals.asked}: the same call goes on from there")
    return {} if args.dry_run else json.loads((Path(args.output_dir) / FINISHED).read_text())


def _parse(words: list[str]) -> TrainArguments:
    """The arguments; ValueError where the command prints its usage and ends."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return parse_args(words)
    except SystemExit:
        message = printed.getvalue().partition("error: ")[2].strip()
        raise UserError(re.sub(r"--(\w+)", r"\1", message)) from None


@contextlib.contextmanager
def _as_command(words: list[str]):
    """Name this run, in results.json and in what it prints, by the command that repeats it."""
    before = sys.argv, command_line.command
    sys.argv, command_line.command = ["train.py", *words], "hf-vit"
    try:
        yield
    finally:
        sys.argv, command_line.command = before

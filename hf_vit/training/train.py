"""A training run by one call, which scripts and notebooks make.

from hf_vit.training.train import train

results = train(TrainArguments(dataset_name="photos", preset="tiny-patch16-224", output_dir="runs/photos"))
"""

import contextlib
import json
import os
import shlex
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils.memory import clear_device_cache

from hf_vit.data.sources import refuse_nested_folders
from hf_vit.evaluation.results import Results
from hf_vit.system.command_line import own_line
from hf_vit.system.files import write_text
from hf_vit.system.hardware import launched
from hf_vit.system.hub_names import refuse_mistyped_path
from hf_vit.training.arguments import TrainArguments
from hf_vit.training.classification import Classification
from hf_vit.training.distributed import (
    REPORT_TIMEOUT,
    STEP_TIMEOUT,
    exit_with_error,
    leave,
    run_on_main,
    set_timeout,
)
from hf_vit.training.log import RunLog, print_main, start_trackers
from hf_vit.training.loop import fit
from hf_vit.training.model import load_config
from hf_vit.training.plan import DataSize, check_identity, resolve
from hf_vit.training.regression import Regression
from hf_vit.training.report import report
from hf_vit.training.run import Run
from hf_vit.training.run_folder import FINISHED, STARTED, clear, continue_run, find_checkpoint, locked
from hf_vit.training.setup import set_up_accelerator
from hf_vit.training.signals import STOPPED, Signals
from hf_vit.training.task import Task


def train(
    args: TrainArguments,
    task_class: type[Task] | None = None,
    command: str | None = None,
    in_notebook: bool = True,
) -> Results | None:
    """Train, from the start or the last checkpoint, and return what results.json holds; a finished run returns it at once.

    A signal saves the run after the step it is in, and the same call goes on from there to the same bits.

    Args:
        task_class: what is learned; default: `Regression` or `Classification`, by the arguments.
        command: that repeats the run, for its card.
        in_notebook: whether this process outlives the run.

    Returns None for a dry run and, after training, on all but the main process.

    Raises:
        ValueError: for data or a checkpoint that cannot be used, and if another run is at work in the folder.
        OSError: for a file that cannot be read or written.
        KeyboardInterrupt: after a signal.
    """
    began = time.monotonic()
    of_labels = Regression if args.problem_type == "regression" else Classification
    task = (task_class or of_labels)(args)
    for name in ("dataset_name", "model_name_or_path", "teacher_name_or_path"):
        refuse_mistyped_path(getattr(args, name), f"--{name}")
    refuse_nested_folders(args.dataset_name, args.output_dir)
    if args.dry_run:
        return print_plan(args, task)
    if in_notebook and launched() and not torch.cuda.is_available():  # notebook_launcher does not say so itself
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    signals, folder = Signals(in_notebook), Path(args.output_dir)
    with contextlib.ExitStack() as stack:
        if in_notebook:
            stack.callback(restore_process, signals)
        accelerator = set_up_accelerator(args)

        def find():
            stack.enter_context(locked(folder))
            return find_checkpoint(folder, args)

        finished, checkpoint = run_on_main(accelerator, find)
        if finished:
            print_main(f"{folder} holds the finished run: --overwrite trains anew")
            return Results.from_json((folder / FINISHED).read_text())
        run = start(args, task, accelerator, signals, began, checkpoint)
        is_finished = train_and_save(run)
        if is_finished:
            signals.says = "training is over, and the report is finished first"
            set_timeout(REPORT_TIMEOUT)
            results = report(run, command or f"hf-vit train --config {shlex.quote(f'{folder}/{STARTED}')}")
        accelerator.wait_for_everyone()  # the first to leave takes connections and store with it
        for tracker in accelerator.trackers:
            tracker.finish()
        if not is_finished:
            again = "the same command, without --overwrite," if args.overwrite else "the same command"
            by = signals.received or "a signal"
            raise KeyboardInterrupt(f"stopped by {by} after step {run.state.step:,}: {again} continues from there")
    return results


def print_plan(args: TrainArguments, task: Task):
    """What a dry run prints: what is read, and the plan for it in one process of this machine."""
    splits, _stream, _labels, _split = task.load_rows(print_main)
    trained = None if args.streaming else len(splits["train"])
    size = DataSize(trained, task.evaluation_images(len(splits["eval"])))
    checkpoint, preset, fields, _ = task.source()
    config = load_config(checkpoint, preset, fields)
    print_main(resolve(args, size, config.hidden_size, int(os.environ.get("WORLD_SIZE", "1"))).describe())


def start(args, task, accelerator, signals, began: float, checkpoint: Path | None) -> Run:
    """A new run in a cleared folder, or that of a checkpoint, whose folder is cut back to it."""
    identity = checkpoint and json.loads((checkpoint / "state.json").read_text())["identity"]
    run = Run(args, task, accelerator, signals, began, identity)
    state, folder = run.state, run.folder
    if checkpoint is not None:
        check_identity(identity, run.plan.identity(), f"{checkpoint} is of")
        state.load(checkpoint)
        accelerator.wait_for_everyone()  # its files may be deleted from here on
        print_main(f"continuing after step {state.step:,}, from {checkpoint}")
    print_main(run.summary())

    def open_folder() -> dict | None:
        if checkpoint is None:
            clear(folder)
        best = checkpoint and continue_run(checkpoint.parents[1], folder, state.step, state.evaluated_step)
        write_text(folder / STARTED, run.plan.to_yaml())
        return best and best["metrics"]

    run.best = run_on_main(accelerator, open_folder)
    if run.best is None and state.step == run.plan.total_steps:
        state.evaluated_step = 0  # its best weights are lost: evaluate the last ones again
    start_trackers(run)
    run.log = RunLog(run)
    return run


def train_and_save(run: Run) -> bool:
    """`fit`; an error in one process alone leaves a checkpoint of the last whole step."""
    state = run.state
    set_timeout(STEP_TIMEOUT)
    try:
        return fit(run)
    except Exception:
        if state.is_consistent and state.saved_step < state.step and run.accelerator.num_processes == 1:
            with contextlib.suppress(Exception):  # it must not hide what went wrong
                run.save()
        if state.saved_step > 0:
            print_main(f"stopped after step {state.step:,}; the last checkpoint is of step {state.saved_step:,}")
        raise


def restore_process(signals: Signals):
    """Leave a notebook's process as it was before the run."""
    signals.restore()
    if dist.is_initialized():  # a script leaves it: its threads may abort a process that ends
        dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)  # the next run may have another precision
    GradientState._reset_state()
    clear_device_cache(garbage_collection=True)
    if signals.received not in (None, "SIGINT"):
        signal.raise_signal(signal.Signals[signals.received])


def train_as_script(args: TrainArguments, task_class: type[Task] | None = None):
    """`train`, and the end of this process: exit code 0, 75 after a signal, 1 after an error."""
    code = 0
    try:
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        launch_file = "fsdp2" if "ACCELERATE_USE_FSDP" in os.environ else "ddp"
        train(args, task_class, own_line(processes, launch_file), in_notebook=False)
    except KeyboardInterrupt as stopped:
        code = STOPPED
        print_main(str(stopped))
    except Exception as error:
        exit_with_error(error)
    Signals.answer(signal.SIG_IGN)
    if dist.is_initialized() or code:
        leave(code)

"""A training run by one call, which scripts and notebooks make.

from hf_vit.training.train import train

results = train(TrainArguments(dataset_name="photos", preset="tiny-patch16-224", output_dir="runs/photos"))
"""

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils.memory import clear_device_cache

from hf_vit.data.sources import refuse_nested_folders
from hf_vit.evaluation.classifiers import model_folder
from hf_vit.evaluation.results import Results
from hf_vit.system.command_line import own_line
from hf_vit.system.files import write_text
from hf_vit.system.hardware import launched
from hf_vit.system.hub_names import refuse_mistyped_path
from hf_vit.system.progress import is_main_process
from hf_vit.training.arguments import TrainArguments, parse_overrides
from hf_vit.training.checkpoints import TENSORS
from hf_vit.training.classification import Classification
from hf_vit.training.distributed import REPORT_TIMEOUT, STEP_TIMEOUT, exit_with_error, run_on_main, set_timeout
from hf_vit.training.log import RunLog, print_main, start_trackers
from hf_vit.training.loop import fit
from hf_vit.training.model import load_config
from hf_vit.training.plan import DataSize, check_identity, resolve
from hf_vit.training.regression import Regression
from hf_vit.training.report import report
from hf_vit.training.run import Run, build_run
from hf_vit.training.run_folder import FINISHED, STARTED, clear, continue_run, find_checkpoint, locked, read_checkpoint
from hf_vit.training.setup import set_up_accelerator
from hf_vit.training.signals import STOPPED, Signals
from hf_vit.training.task import Task


def train(
    args: TrainArguments,
    task_class: type[Task] | None = None,
    draw: Callable | None = None,
    command: str | None = None,
    in_notebook: bool = True,
) -> Results | None:
    """Train, from the start or the last checkpoint, and return what results.json holds; a finished run returns it at once.

    A signal saves the run after the step it is in, and the same call goes on from there to the same bits.

    Args:
        task_class: what is learned; default: `Regression` or `Classification`, by the arguments.
        draw: see `report`.
        command: that repeats the run, for its card.
        in_notebook: whether this process outlives the run.

    Returns None for a dry run, and on all but the main process.

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
            print_main(accelerator, f"{folder} holds the finished run: --overwrite trains anew")
            return Results.from_json((folder / FINISHED).read_text())
        run = start(args, task, accelerator, signals, began, checkpoint)
        is_finished = train_and_save(run)
        if is_finished:
            signals.reporting = True
            set_timeout(REPORT_TIMEOUT)
            results = report(run, draw, command or f"hf-vit train --config {shlex.quote(f'{folder}/{STARTED}')}")
        accelerator.wait_for_everyone()  # the first to leave takes connections and store with it
        accelerator.end_training()
        if not is_finished:
            again = "the same command, without --overwrite," if args.overwrite else "the same command"
            by = signals.received or "a signal"
            raise KeyboardInterrupt(f"stopped by {by} after step {run.state.step:,}: {again} goes on from there")
    return results


def print_plan(args: TrainArguments, task: Task):
    """What a dry run prints: what is read, and the plan for it in one process of this machine."""
    say = print if is_main_process() else lambda _: None
    splits, _stream, _labels, _split = task.load_rows(say)
    size = DataSize(None if args.streaming else len(splits["train"]), len(splits["eval"]))
    checkpoint = args.model_name_or_path and model_folder(args.model_name_or_path)
    config = load_config(checkpoint, args.preset, parse_overrides(args.config_overrides))
    say(resolve(args, size, config.hidden_size, int(os.environ.get("WORLD_SIZE", "1"))).describe())


def start(args, task, accelerator, signals, began: float, checkpoint: Path | None) -> Run:
    """A new run in a cleared folder, or that of a checkpoint, whose folder is cut back to it."""
    saved = None
    if checkpoint is not None:
        saved = read_checkpoint(checkpoint) if accelerator.is_main_process else {}
        tensors = {name: saved.pop(name) for name in TENSORS if name in saved}
        saved = run_on_main(accelerator, lambda: saved)
    run = build_run(args, task, accelerator, signals, began, saved)
    state = run.state
    if saved is not None:
        check_identity(saved["identity"], run.plan.identity(), f"{checkpoint} is of")
        state.load_state_dict({**saved, **tensors})
        del tensors  # as large as the model and its optimizers
        print_main(accelerator, f"going on after step {state.step:,}, from {checkpoint}")
    print_main(accelerator, summary(run))
    run.best = run_on_main(accelerator, lambda: open_folder(run, checkpoint))
    if run.best is None and state.step == run.plan.total_steps:
        state.evaluated_step = 0  # its best weights are lost: evaluate the last ones again
    start_trackers(accelerator, run.plan, state)
    state.training_began = time.monotonic()
    run.log = RunLog(accelerator, run.folder, run.plan, state, task.has_accuracy, signals.in_notebook)
    return run


def open_folder(run: Run, checkpoint: Path | None) -> dict | None:
    """Clear the folder for a new run, or cut it back to the checkpoint; the metrics of the best weights so far."""
    best = None
    if checkpoint is None:
        clear(run.folder)
    else:
        best = continue_run(checkpoint.parents[1], run.folder, run.state.step, run.state.evaluated_step)
    write_text(run.folder / STARTED, run.plan.to_yaml())
    return best and best["metrics"]


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
            run.log.print(
                f"stopped in step {min(state.step + 1, run.plan.total_steps):,}: the same command goes on from step "
                f"{state.saved_step:,}"
            )
        raise


def summary(run: Run) -> str:
    """Model and plan of the run, in some lines; those of the data were printed when these were read."""
    spec, (parameters, trained) = run.data.spec, run.parameters
    trainable = f" ({trained:,} trained)" if trained < parameters else ""
    kept = "" if run.data.selects_best else "test images select nothing: the last weights are kept\n"
    return (
        f"{kept}{parameters:,} parameters{trainable}, {spec.height}x{spec.width} pixels, on {run.accelerator.device} x "
        f"{run.plan.processes}{', sharded' * run.is_sharded} (mixed precision: {run.accelerator.mixed_precision})\n"
        + run.plan.describe()
    )


def restore_process(signals: Signals):
    """Leave a notebook's process as it was before the run."""
    signals.restore()
    AcceleratorState._reset_state(reset_partial_state=True)  # the next run may have another precision
    GradientState._reset_state()
    clear_device_cache(garbage_collection=True)
    if signals.received not in (None, "SIGINT"):
        signal.raise_signal(signal.Signals[signals.received])


def train_as_script(args: TrainArguments, task_class: type[Task] | None, draw: Callable):
    """`train`, and the end of this process: exit code 0, 75 after a signal, 1 after an error."""
    code = 0
    try:
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        launch_file = "fsdp2" if "ACCELERATE_USE_FSDP" in os.environ else "ddp"
        train(args, task_class, draw, own_line(processes, launch_file), in_notebook=False)
    except KeyboardInterrupt as stopped:
        code = STOPPED
        if is_main_process():
            print(stopped)
    except Exception as error:
        exit_with_error(error)
    Signals.answer(signal.SIG_IGN)
    if dist.is_initialized() or code:  # threads of gloo or of a stream may hang at exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

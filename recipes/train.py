# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_vit[recipes]"]
# tool.uv.sources.hf_vit = { path = "..", editable = true }
# ///
"""Train or fine-tune a Vision Transformer on any image data set: one run, top to bottom.

    python recipes/train.py --config demo
    python recipes/train.py --dataset_name photos --model_name_or_path google/vit-base-patch16-224-in21k --output_dir runs/photos
    python recipes/train.py --dataset_name photos --preset tiny-patch16-224 --output_dir runs/scratch
    accelerate launch --config_file recipes/accelerate/ddp.yaml --num_processes 2 recipes/train.py --config cifar10

--config names a preset of recipes/configs or a YAML file of flags (`hf_vit.training.arguments.TrainArguments`); flags override it.
--dry_run prints what would be read, and ends. A run that was killed continues by the same command, as if nothing had happened. The run folder then holds

    config.yaml     the resolved arguments; `--config` on it repeats the run
    metrics.jsonl   a line per log step and per evaluation
    checkpoints/    step-N: all that decides the rest of the run; best-N: the best weights so far
    model/          config, weights, image processor, code and card: ready for `from_pretrained` and for the Hub
    last/           the last weights, if model/ holds those of an earlier, better evaluation
    results.json    metrics with their intervals, scores of each class, times, seed, commit, command, hardware, versions, data
    confusion_matrix.csv   a row per true class, a column per predicted class; of several labels an image, counts of each
    predictions.csv   a row per scored image: row, file, label, predicted class, confidence, correct
    samples.safetensors    a few of the scored images, drawn at random, and the most confident mistakes, with label and logits

Exit codes: 0 when the run is finished, 75 when SIGTERM, SIGINT or SIGUSR1 stopped it and it can continue, 1 after an error, 2 for a
wrong flag. `accelerate launch` turns all but 0 into 1.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path


if __name__ == "__main__":  # the imports take seconds
    from command_line import Parser, answer_signals, import_light

    answer_signals()
    ARGUMENTS = import_light("hf_vit.training.arguments").parse_args(sys.argv[1:], __doc__)
    paths = ("dataset_name", "model_name_or_path", "teacher_name_or_path")
    Parser.refuse_mistyped_paths(**{flag: getattr(ARGUMENTS, flag) for flag in paths})

import torch
from accelerate.utils import gather_object
from safetensors.torch import load_file

from hf_vit.card import write_card
from hf_vit.data.sources import refuse_nested_folders
from hf_vit.hub import pictures
from hf_vit.system.errors import UserError
from hf_vit.system.files import write_text
from hf_vit.system.run_files import SAMPLES
from hf_vit.training import report as reports
from hf_vit.training.arguments import TrainArguments, to_yaml
from hf_vit.training.classification import Classification
from hf_vit.training.conclusion import closing_lines, find_faults
from hf_vit.training.defaults import keep_defaults
from hf_vit.training.distributed import (
    REPORT_TIMEOUT,
    STEP_TIMEOUT,
    exit_with_error,
    leave_together,
    set_timeout,
    watch_for_failures,
)
from hf_vit.training.inputs import Prefetcher, read_while, seed_micro_batch
from hf_vit.training.optimizers import clip_gradients, is_finite, learning_rate, set_learning_rate
from hf_vit.training.progress import ProgressBar
from hf_vit.training.run import Run, build_run, print_main, start_or_resume
from hf_vit.training.run_folder import FINISHED, find_checkpoint
from hf_vit.training.setup import set_up_accelerator
from hf_vit.training.signals import STOPPED, Signals
from hf_vit.training.state import TrainState
from hf_vit.training.validation import evaluate


TEMPLATE = Path(__file__).resolve().with_name("model_card.md")
SECONDS_BETWEEN_CHECKPOINTS = 300


def main(args: TrainArguments, task_class, report, signals: Signals | None = None):
    """A run, from its start or its last checkpoint to its report; of pretrain.py and of notebooks too.

    Args:
        task_class: what is learned, `Classification` or another `Task`.
        report: called with the trained run and its state.
        signals: those of a notebook; if not given, the process ends where a signal stops the run.
    """
    signals, began = signals or Signals(), time.monotonic()
    refuse_nested_folders(args.dataset_name, args.output_dir)
    if args.dry_run:
        task_class(args, None).load_rows(print if os.environ.get("RANK", "0") == "0" else lambda _: None)
        return None
    accelerator = set_up_accelerator(args)
    stop_watching = watch_for_failures()
    finished, saved, tensors = find_checkpoint(Path(args.output_dir), args, accelerator)
    if finished:
        done = "is finished: its results.json and model/ are there; --overwrite true trains anew"
        print_main(accelerator, f"{args.output_dir} {done}")
        leave_together(accelerator, stop_watching)
        return accelerator.end_training()

    if saved is not None:
        keep_defaults(args, saved["config"])
    run = build_run(args, task_class(args, accelerator), accelerator, signals, began, resumes=saved is not None)
    state = start_or_resume(run, saved, tensors)
    del tensors  # as large as the model and its optimizers
    if not run.data.selects_best:
        run.print(
            "test images select nothing: the last weights are kept (a split called validation would keep the best)"
        )
    if train(run, state):
        run.signals.reporting = True
        set_timeout(REPORT_TIMEOUT)
        report(run, state)
        leave(run, stop_watching, 0)
    else:
        again = "the same command, without --overwrite," if args.overwrite else "the same command"
        run.print(f"stopped by {signals.asked or 'a signal'} after step {state.step:,}: {again} goes on from there")
        leave(run, stop_watching, STOPPED)


def train(run: Run, state: TrainState) -> bool:
    """Train to the last step: True; False if a signal stopped the run and its state is saved."""
    args, total_steps = run.args, run.batches.total_steps
    batches, progress = Prefetcher(run.batches.prepared(state.step)), ProgressBar(run, state)
    checkpoint_due = stopped = False
    is_consistent = True  # weights, optimizers and counters are all of one step
    saved_at = time.monotonic()
    set_timeout(STEP_TIMEOUT)
    run.signals.training = True
    try:
        while True:
            if state.scored_step < state.step and run.is_evaluation_step(state.step) and not stopped:
                paused = time.monotonic()
                stopped = not evaluate(run, state)
                if not stopped:
                    state.scored_step = state.step
                state.seconds["scoring"] += time.monotonic() - paused
                progress.logged_at += time.monotonic() - paused
            is_last = state.step == total_steps and args.checkpointing_steps != 0
            if run.saved_step < state.step and (checkpoint_due or stopped or is_last):
                run.save(state)
                saved_at = time.monotonic()
            if stopped or state.step == total_steps:
                break

            began, input_before = time.monotonic(), state.seconds["input"]
            schedule = args.lr_scheduler_type, args.lr_decay_ratio, args.lr_stages
            rate = learning_rate(state.step, total_steps, run.warmup_steps, args.learning_rate, *schedule)
            set_learning_rate(run.optimizers, rate)
            sums, norm, ids = forward_backward(run, state, batches)
            finite, stopped, checkpoint_due = agree(run, state, sums, norm, saved_at, batches)
            if not finite:
                note_skipped_step(run, state, rate, ids)
            is_consistent = False
            optimizer_step(run, sums, finite)
            state.step += 1
            is_consistent = True
            state.seconds["model"] += time.monotonic() - began - (state.seconds["input"] - input_before)
            progress.update(run, state, rate, norm)
    except Exception:
        if is_consistent and run.saved_step < state.step and run.accelerator.num_processes == 1:
            with contextlib.suppress(Exception):  # it must not hide what went wrong
                run.save(state)
        if run.saved_step > 0:
            step = min(state.step + 1, total_steps)
            run.print(
                f"stopped in step {step:,}: when that is mended, the same command goes on from step {run.saved_step:,}"
            )
        raise
    finally:
        if not stopped or run.signals.in_notebook:  # a process that leaves need not wait for its workers: they end too
            batches.close()
        progress.bar.close()
    state.seconds["training"] += time.monotonic() - run.training_began
    return not stopped


def forward_backward(run: Run, state: TrainState, batches: Prefetcher):
    """The micro-batches of one step: (loss, correct images and images, (3,), gradient norm, (), ids of the images)."""
    args, device = run.args, run.accelerator.device
    run.model.train()
    if args.freeze_backbone:
        run.backbone.eval()  # no dropout in what is frozen
    sums, ids = torch.zeros(3, device=device), []
    for number in range(run.batches.accumulation):
        batch = state.timed("input", batches.__next__)
        state.epoch = batch.epoch
        ids.append(batch.rows["index"])
        other_size = {"interpolate_pos_encoding": True} if state.step < run.batches.first_stage_steps else {}
        seed_micro_batch(args.seed, state.step, number, run.accelerator.process_index)
        with run.accelerator.accumulate(run.model):
            loss, outputs = run.task.loss(run.model, batch, **other_size)
            run.accelerator.backward(loss)
        if device.type == "cuda" and number + 1 < run.batches.accumulation:  # read and augment while the device works
            state.timed("input", batches.prefetch)
        with torch.no_grad():
            correct = run.task.count_correct(outputs, batch)
            count = torch.full_like(correct, len(batch.inputs))
            sums += torch.stack([loss.detach().float() * len(batch.inputs), correct, count])
    return sums, clip_gradients(run.accelerator, run.model, args.max_grad_norm), torch.cat(ids)


def agree(run: Run, state: TrainState, sums, norm, saved_at: float, batches: Prefetcher) -> tuple[bool, bool, bool]:
    """What all processes decide together: (the step is finite, a signal came, a checkpoint is due)."""
    accelerator, every = run.accelerator, run.args.checkpointing_steps
    if every is None:
        due = time.monotonic() - saved_at > SECONDS_BETWEEN_CHECKPOINTS
    else:
        due = every > 0 and (state.step + 1) % every == 0
    scale = 1.0 if accelerator.scaler is None else accelerator.scaler.get_scale()
    finite = is_finite(sums[0], norm, scale)
    flags = torch.tensor([run.signals.asked is not None, due and accelerator.is_main_process])
    flags = torch.cat([~finite.view(1), flags.to(finite.device, non_blocking=True)])
    counts = read_while(accelerator.reduce(flags.float(), "sum"), lambda: state.timed("input", batches.prefetch))
    return counts[0] == 0, counts[1] > 0, counts[2] > 0


def note_skipped_step(run: Run, state: TrainState, rate: float, ids: torch.Tensor):
    """Log a step that is not finite; UserError after too many."""
    rows = gather_object(run.data.train_images.row_numbers(ids))
    if len(state.skipped_steps) >= run.args.max_skipped_steps:
        before = f", and before in {', '.join(map(str, state.skipped_steps))}" if state.skipped_steps else ""
        more = " ..." if len(rows) > 64 else ""
        raise UserError(
            f"the loss or its gradient was not finite in step {state.step + 1:,}{before}: learning rate {rate:.3g}, rows "
            f"{', '.join(map(str, rows[:64]))}{more} of the training images. Look at these images, or begin a new run with a "
            "smaller --learning_rate; --max_skipped_steps allows more of such steps"
        )
    state.skipped_steps.append(state.step + 1)
    run.print(f"step {state.step + 1:,} is skipped: its loss or gradient is not finite")
    run.log_jsonl(step=state.step + 1, epoch=state.epoch + 1, skipped=True, learning_rate=rate, rows=rows)


def optimizer_step(run: Run, sums: torch.Tensor, finite: bool):
    """Update the weights and their average; a step that is not finite leaves them alone.

    An overflow in float16 counts as finite: the scaler skips it, and average and rate go on.
    """
    if finite:
        for optimizer in run.optimizers:
            optimizer.step()
        if run.ema is not None:
            run.ema.update(run.network)
        run.sums += sums
    elif run.accelerator.scaler is not None:
        run.accelerator.scaler.update()  # which the optimizer's step would have done
    for optimizer in run.optimizers:
        optimizer.zero_grad()


def report(run: Run, state: TrainState):
    """Publish the best model with its card and pictures, and write results.json."""
    began = time.monotonic()
    skipped = reports.skipped_images(run)
    reports.save_last_weights(run)
    if not run.accelerator.is_main_process:
        return
    scores, folder, data = reports.publish_model(run), run.folder / "model", run.data
    reports.write_confusion_matrix(run, scores)
    model, difference = reports.check_saved_model(run)
    samples, log = load_file(run.folder / SAMPLES), reports.read_log(run.folder)
    has_examples = not (data.is_stream or run.args.cache_features or data.spec.processor is not None)
    try:
        examples = run.batches.examples if has_examples else None
        pictures.draw_run(folder / "figures", log, scores, samples, data.labels, data.spec, model, examples)
    except Exception as error:  # hours of training are worth more than their pictures
        run.print(f"not all pictures could be drawn ({type(error).__name__}: {error})")
    reports.save_example(samples, data.spec, folder)
    answers = reports.describe_answers(run, scores, difference)
    results = reports.collect_results(run, state, scores, answers, skipped)
    results.seconds["report"] = round(time.monotonic() - began, 1)
    results.warnings = find_faults(run.args, log, results)
    write_card(folder, TEMPLATE, results, to_yaml(run.args))
    write_text(run.folder / FINISHED, results.to_json())
    if skipped:
        run.print(f"{len(skipped)} images could not be read and were skipped; {skipped[0]}")
    run.print(closing_lines(run, results, __file__))


def leave(run: Run, stop_watching, code: int):
    run.signals.answer(signal.SIG_IGN)
    leave_together(run.accelerator, stop_watching)
    run.accelerator.end_training()
    # Threads of gloo or of a stream may hang at exit.
    if (run.accelerator.num_processes > 1 or code) and not run.signals.in_notebook:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    try:
        main(ARGUMENTS, Classification, report)
    except Exception as error:
        exit_with_error(error)

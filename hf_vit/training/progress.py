"""The progress of a run: the bar on the screen, and the lines of metrics.jsonl."""

import sys
import time

import torch
from tqdm.auto import tqdm

from hf_vit.system.hardware import cpu_seconds_of_others, fewer_threads, peak_memory
from hf_vit.training.run import Run
from hf_vit.training.state import TrainState


SECONDS_TO_MEET_OTHERS = 10


class ProgressBar:
    """The bar of the main process, and a log line every `--log_steps`: by default 10, but 20 lines a run or more."""

    def __init__(self, run: Run, state: TrainState):
        self.log_steps = run.args.log_steps or max(1, min(10, run.batches.total_steps // 20))
        self.logged_step, self.logged_at = state.step, time.monotonic()
        watched = sys.stderr.isatty() or run.signals.in_notebook  # in a log file, a line now and then
        self.bar = tqdm(
            total=run.batches.total_steps,
            initial=state.step,
            unit="step",
            mininterval=1 if watched else 20,
            disable=not run.accelerator.is_main_process,
        )
        self.began = time.monotonic()
        shares_no_cores = run.accelerator.device.type != "cpu" or run.accelerator.num_processes > 1
        self.spent_by_others = None if shares_no_cores else cpu_seconds_of_others()

    def update(self, run: Run, state: TrainState, rate: float, norm: torch.Tensor):
        self.bar.update()
        if state.step % self.log_steps and state.step != run.batches.total_steps:
            return
        total_loss, correct, seen = run.accelerator.reduce(run.sums, reduction="sum").tolist()
        now = time.monotonic()
        speed = (state.step - self.logged_step) * run.images_per_step / (now - self.logged_at)
        mean = {} if seen == 0 else {"loss": total_loss / seen}
        if mean and run.task.has_accuracy:
            mean["accuracy"] = correct / seen
        self.bar.set_postfix(
            **{f"train_{name}": f"{value:.3f}" for name, value in mean.items()},
            images_per_second=f"{speed:,.0f}",
            **peak_memory(run.accelerator.device),
            refresh=False,
        )
        norm = norm.item() if norm.isfinite() else None
        numbers = dict(learning_rate=rate, gradient_norm=norm, images_per_second=speed)
        run.log(state.step, state.epoch + 1, **mean, **numbers, seconds=run.seconds_of_training(state))
        run.sums.zero_()
        self.logged_step, self.logged_at = state.step, now
        if self.spent_by_others is not None and now > self.began + SECONDS_TO_MEET_OTHERS:
            self.tell_of_others(run, now)

    def tell_of_others(self, run: Run, now: float):
        busy = (cpu_seconds_of_others() - self.spent_by_others) / (now - self.began)
        self.spent_by_others, threads = None, fewer_threads(busy)
        if threads is not None:
            run.print(
                f"other programs keep {busy:.1f} cores busy, and the threads of this run wait for each other: stop it, and go on "
                f"with OMP_NUM_THREADS={threads} before the same command, which may be several times as fast"
            )

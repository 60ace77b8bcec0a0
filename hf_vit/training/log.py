"""What a run says while it trains: a progress bar, the lines of metrics.jsonl, and trackers."""

import json
import secrets
import sys

import torch
from tqdm.auto import tqdm

from hf_vit.system.hardware import peak_memory
from hf_vit.system.progress import is_main_process
from hf_vit.system.text import printable_lines
from hf_vit.training.run_folder import LOG


def print_main(text: str):
    """Print on the main process, above a progress bar."""
    if is_main_process():
        tqdm.write(printable_lines(text))


class RunLog:
    """The bar of the main process, and a line of metrics.jsonl every `--log_steps` and evaluation."""

    def __init__(self, run):
        self.run, state = run, run.state
        self.logged_step, self.logged_seconds = state.step, state.seconds["step"]
        watched = sys.stderr.isatty() or run.signals.in_notebook  # in a log file, a line now and then
        self.bar = tqdm(
            total=run.plan.total_steps,
            initial=state.step,
            unit="step",
            mininterval=1 if watched else 20,
            disable=not is_main_process(),
        )

    def write(self, **line):
        """Append a line to metrics.jsonl."""
        if is_main_process():
            with open(self.run.folder / LOG, "a") as file:
                file.write(json.dumps(line) + "\n")

    def log(self, **values):
        """Log values to metrics.jsonl and to the trackers."""
        state = self.run.state
        self.write(step=state.step, epoch=state.epoch + 1, **values)
        known = {key: value for key, value in values.items() if value is not None}
        self.run.accelerator.log(known, step=state.step)

    def update(self, rate: float, norm: torch.Tensor):
        """After a step: all processes must call it, because their sums are added up."""
        run, state, plan = self.run, self.run.state, self.run.plan
        self.bar.update()
        if state.step % plan.log_every and state.step != plan.total_steps:
            return
        total_loss, correct, seen = run.accelerator.reduce(state.sums, reduction="sum").tolist()
        seconds = state.seconds["step"] - self.logged_seconds
        speed = (state.step - self.logged_step) * plan.images_per_step / seconds
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
        self.log(**mean, **numbers, seconds=state.clock())
        state.sums.zero_()
        self.logged_step, self.logged_seconds = state.step, state.seconds["step"]


def start_trackers(run):
    """Start the trackers of `--report_to`; those of a resumed run go on with its record, and keep their ids in the state."""
    accelerator, step, ids = run.accelerator, run.state.step, run.state.tracker_ids
    ids.setdefault("wandb", secrets.token_hex(4))
    options = {
        # Lines of a run that was replaced, or that was stopped before it saved them, go.
        "tensorboard": {"purge_step": step + 1},
        "wandb": {"id": ids["wandb"], "resume": "allow"},
        "mlflow": {"run_id": ids.get("mlflow")},
    }
    config = {key: value for key, value in vars(run.plan.args).items() if value is not None}
    accelerator.init_trackers("hf_vit", config if step == 0 else None, options)
    for tracker in accelerator.trackers:
        if tracker.name == "mlflow" and accelerator.is_main_process:
            ids["mlflow"] = tracker.tracker.info.run_id

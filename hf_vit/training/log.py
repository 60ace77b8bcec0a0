"""What a run says while it trains: a progress bar, the lines of metrics.jsonl, and trackers."""

import json
import secrets
import sys
import time

import torch
from tqdm.auto import tqdm

from hf_vit.system.escapes import printable_lines
from hf_vit.system.hardware import peak_memory
from hf_vit.training.plan import Plan
from hf_vit.training.run_folder import LOG
from hf_vit.training.state import TrainState


def print_main(accelerator, text: str):
    """Print on the main process, above a progress bar."""
    if accelerator.is_main_process:
        tqdm.write(printable_lines(text))


class RunLog:
    """The bar of the main process, and a line of metrics.jsonl every `--log_steps` and evaluation."""

    def __init__(self, accelerator, folder, plan: Plan, state: TrainState, has_accuracy: bool, in_notebook: bool):
        self.accelerator, self.folder, self.plan, self.has_accuracy = accelerator, folder, plan, has_accuracy
        self.logged_step, self.logged_at = state.step, time.monotonic()
        watched = sys.stderr.isatty() or in_notebook  # in a log file, a line now and then
        self.bar = tqdm(
            total=plan.total_steps,
            initial=state.step,
            unit="step",
            mininterval=1 if watched else 20,
            disable=not accelerator.is_main_process,
        )

    def print(self, text: str):
        print_main(self.accelerator, text)

    def write(self, **line):
        """Append a line to metrics.jsonl."""
        if self.accelerator.is_main_process:
            with open(self.folder / LOG, "a") as file:
                file.write(json.dumps(line) + "\n")

    def log(self, state: TrainState, **values):
        """Log values to metrics.jsonl and to the trackers."""
        self.write(step=state.step, epoch=state.epoch + 1, **values)
        self.accelerator.log({key: value for key, value in values.items() if value is not None}, step=state.step)

    def pause(self, seconds: float):
        """Take time that was not spent on training out of the images per second."""
        self.logged_at += seconds

    def update(self, state: TrainState, rate: float, norm: torch.Tensor):
        """After a step: all processes must call it, because their sums are added up."""
        self.bar.update()
        if state.step % self.plan.log_every and state.step != self.plan.total_steps:
            return
        total_loss, correct, seen = self.accelerator.reduce(state.sums, reduction="sum").tolist()
        now = time.monotonic()
        speed = (state.step - self.logged_step) * self.plan.images_per_step / (now - self.logged_at)
        mean = {} if seen == 0 else {"loss": total_loss / seen}
        if mean and self.has_accuracy:
            mean["accuracy"] = correct / seen
        self.bar.set_postfix(
            **{f"train_{name}": f"{value:.3f}" for name, value in mean.items()},
            images_per_second=f"{speed:,.0f}",
            **peak_memory(self.accelerator.device),
            refresh=False,
        )
        norm = norm.item() if norm.isfinite() else None
        numbers = dict(learning_rate=rate, gradient_norm=norm, images_per_second=speed)
        self.log(state, **mean, **numbers, seconds=state.training_seconds)
        state.sums.zero_()
        self.logged_step, self.logged_at = state.step, now


def start_trackers(accelerator, plan: Plan, state: TrainState):
    """Start the trackers of `--report_to`; those of a resumed run go on with its record, and keep their ids in the state."""
    if plan.args.report_to == "none":
        return
    ids = state.tracker_ids
    ids.setdefault("wandb", secrets.token_hex(4))
    options = {
        # Lines of a run that was replaced, or that was stopped before it saved them, go.
        "tensorboard": {"purge_step": state.step + 1},
        "wandb": {"id": ids["wandb"], "resume": "allow"},
        "mlflow": {"run_id": ids.get("mlflow")},
    }
    config = {key: value for key, value in vars(plan.args).items() if value is not None}
    accelerator.init_trackers("hf_vit", config if state.step == 0 else None, options)
    for tracker in accelerator.trackers:
        if tracker.name == "mlflow" and accelerator.is_main_process:
            ids["mlflow"] = tracker.tracker.info.run_id

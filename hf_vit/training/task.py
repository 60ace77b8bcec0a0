"""What a training script adds to the loop of recipes/train.py: its data, model and loss, and how it is evaluated."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from hf_vit.training.inputs import Batch, RunData


@dataclass
class Scored:
    """An evaluation: metrics by name, among them the `loss`, and the rows (n,) of the images."""

    metrics: dict
    rows: torch.Tensor


class Task(Protocol):
    """What `recipes/train.py` needs of a task: `Classification`, `PreTraining`, or one of your own.

    It is made as `task(args, accelerator)`. Then `load_rows`, `build_model` and `set_up` are called once, in this order, and the
    others at each step or evaluation.

    Attributes:
        teacher: a network that is learned from, as its `model`; None without one.
        has_accuracy: whether `count_correct` counts, so that the progress line says how many are right.
        scores_shape: the shape, as `run_files.check_shape` takes it, of the scores.json that `keep_best` writes.
    """

    teacher: object | None
    has_accuracy: bool
    scores_shape: dict

    def load_rows(self, print_main) -> tuple[dict, object | None, list[str], str]:
        """({"train": rows, "eval": rows}, the stream to train on or None, names of the classes, the name of what is scored)."""

    def build_model(self, labels: list[str], eval_rows) -> tuple[nn.Module, object]:
        """(model, image processor); the model has its backbone as `vit`."""

    def set_up(self, data: RunData, backbone: nn.Module):
        """Keep what the methods below need of data and backbone."""

    def fit_head(self, head: nn.Linear, features: torch.Tensor, labels: torch.Tensor):
        """Train a new head alone on features (n, D) of the training images; only where there are labels and a checkpoint."""

    def with_targets(self, inputs, labels, epoch: int, batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Inputs (B, C, H, W) and targets of a batch."""

    def loss(self, model, batch: Batch, **kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The loss (), and what `count_correct` counts in; `kwargs` go to the model."""

    def count_correct(self, outputs, batch: Batch) -> torch.Tensor:
        """How many images of the batch the model is right about, ()."""

    def trial_batch(self, pixel_values) -> Batch:
        """A batch of these images, to measure memory with."""

    def score(self, run, model) -> Scored | None:
        """An evaluation; None if a signal interrupted it."""

    def merit(self, metrics: dict):
        """What is larger of better weights."""

    def describe(self, metrics: dict, scored: str) -> str:
        """The evaluation in a line; `scored` says of which images."""

    def keep_best(self, run, model, metrics: dict, scored: Scored):
        """Write checkpoints/best-N by `save_best`: model, scores with `metrics` and `images`, and samples (`SAMPLES`)."""

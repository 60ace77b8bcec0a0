"""What a run learns: its data, model and loss, how it is evaluated and what it leaves."""

import contextlib
from dataclasses import dataclass

import torch

from hf_vit.evaluation.classifiers import model_folder
from hf_vit.training.arguments import parse_overrides
from hf_vit.training.inputs import Batch, RunData, load_rows


@dataclass
class Evaluation:
    """Metrics by name, among them the `loss`, and the rows (n,) of the images; of a classifier logits (n, L), and labels (n,) or
    (n, L)."""

    metrics: dict
    rows: torch.Tensor
    logits: torch.Tensor | None = None
    labels: torch.Tensor | None = None


class Task:
    """What is learned; a new kind of learning is a subclass, in a file of its own.

    It is made as `task(args)`, of arguments whose open numbers the plan chooses later, and called with values, never with the run.
    A subclass has

    build_model(labels, eval_rows) -> (model, image processor); the model has its backbone as `vit`
    loss(model, batch) -> (the loss (), what `count_correct` counts in)
    evaluate(model, predictor) -> an `Evaluation`; None if a signal interrupted it
    selection_score(metrics) -> what is larger of better weights
    describe(metrics, split) -> the evaluation in a line; `split` says of which images
    artifacts(model, evaluation) -> what is kept beside the best weights: scores.json, the tensors of samples.safetensors, and tables
        by the name of their file
    intervals(logits, labels, scores) -> 95% intervals of the metrics, where there are labels
    faults(results, log) -> a sentence for each reason not to trust the model; none for a good one
    draw(folder, log, scores, samples): pictures into `folder`, which lies in that of the saved model, from the lines of metrics.jsonl
        and what `artifacts` gave
    next_command(run_folder) -> the command to go on with
    fit_head(head, features, labels), where there are labels: train a new head alone on features (n, D) of the training images

    Attributes:
        card: template of the saved model's README.md, in recipes/.
        teacher: a network that is learned from, as its `model`; None without one.
        has_accuracy: whether `count_correct` counts, so that the progress line says how many are right.
    """

    has_accuracy = False

    card = "model_card.md"

    def __init__(self, args):
        self.args, self.teacher = args, None

    def source(self, **fields) -> tuple:
        """What `build_model` and `build_encoder` make a model of: (checkpoint, preset, config fields, eval crop); `fields` are defaults
        of the config fields."""
        args = self.args
        checkpoint = args.model_name_or_path and model_folder(args.model_name_or_path)
        fields |= parse_overrides(args.config_overrides)
        if args.image_size is not None:
            fields["image_size"] = args.image_size
        return checkpoint, args.preset, fields, args.eval_crop

    def load_rows(self, print_main) -> tuple[dict, object | None, list[str], str]:
        """({"train": rows, "eval": rows}, the stream to train on or None, names of the classes, the name of what is evaluated)."""
        return load_rows(self.args, print_main)

    def as_saved(self, model):
        """A context in which the model is as it is saved: what it gives is in units of the labels."""
        return contextlib.nullcontext()

    def set_up(self, data: RunData, backbone, accelerator):
        """Keep what the methods need; called once, after `load_rows` and `build_model`."""
        self.data, self.backbone, self.device, self.autocast = data, backbone, accelerator.device, accelerator.autocast
        if self.teacher is not None:
            self.teacher.to(self.device)

    def evaluation_images(self, scored: int) -> int:
        """How many images an evaluation looks at, of so many that are scored."""
        return scored

    def with_targets(self, inputs, labels, epoch: int, batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Inputs (B, C, H, W) and targets of a batch."""
        return inputs, None

    def count_correct(self, outputs, batch: Batch) -> torch.Tensor:
        """How many images of the batch the model is right about, ()."""
        return torch.zeros((), device=batch.inputs.device)

    def report(self, folder, scores: dict, samples: dict, accelerator) -> dict:
        """Check the saved model, and write what goes beside it: fields of `Results`."""
        return {}

"""The task of train.py: data, model, targets and loss of a classifier, and how it is evaluated."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from hf_vit.data.augment import mix
from hf_vit.data.columns import has_several_labels
from hf_vit.data.sampling import class_balanced_ids
from hf_vit.data.splits import class_weights
from hf_vit.evaluation.calibration import fit_temperature, folded_temperature
from hf_vit.evaluation.classifiers import model_folder
from hf_vit.evaluation.intervals import intervals
from hf_vit.evaluation.multi_label import DEFAULT_THRESHOLD, choose_thresholds
from hf_vit.evaluation.prediction_table import image_names, prediction_table
from hf_vit.evaluation.scores import classification_report, compute_metrics, headline, surest_mistakes
from hf_vit.system.run_files import NUM_SAMPLES, NUMBER, PREDICTIONS, SAMPLES
from hf_vit.training.arguments import TrainArguments, parse_overrides
from hf_vit.training.checkpoints import save_best
from hf_vit.training.defaults import HEAD_STEPS, default_rates
from hf_vit.training.inputs import Batch, RunData, load_rows
from hf_vit.training.losses import (
    Teacher,
    choose_loss,
    classification_loss,
    count_correct,
    distillation_loss,
    multi_label_loss,
    soft_targets,
)
from hf_vit.training.model import build_model
from hf_vit.training.task import Scored


SCORES_SHAPE = {"metrics": {"accuracy": NUMBER, "loss": NUMBER}, "images": int, "confusion_matrix": list}
MULTI_LABEL_SHAPE = {
    **SCORES_SHAPE,
    "metrics": {"mean_average_precision": NUMBER, "loss": NUMBER},
    "thresholds": [NUMBER],
}


@dataclass
class ScoredLogits(Scored):
    """With logits (n, L), and labels (n,) or (n, L)."""

    logits: torch.Tensor
    labels: torch.Tensor


class Classification:
    """A `Task`: one label an image, or several; with a teacher, distillation of its answers."""

    has_accuracy = True

    def __init__(self, args: TrainArguments, accelerator):
        self.args, self.accelerator = args, accelerator
        self.teacher = self.weights = self.data = None

    def load_rows(self, print_main):
        return load_rows(self.args, print_main)

    def build_model(self, labels: list[str], eval_rows):
        """(model, image processor)."""
        args, several = self.args, has_several_labels(eval_rows)
        overrides = parse_overrides(args.config_overrides)
        choose_loss(args, several)
        checkpoint, preset = args.model_name_or_path and model_folder(args.model_name_or_path), args.preset
        return build_model(labels, checkpoint, preset, args.image_size, overrides, args.eval_crop, several)

    def set_up(self, data: RunData, _backbone):
        """The class weights (L,) and the teacher, if they are asked for."""
        args, device = self.args, self.accelerator.device
        self.data = data
        if args.teacher_name_or_path is not None:
            self.teacher = Teacher(args.teacher_name_or_path, data.labels, data.spec, device)
        if args.balance == "weights":
            self.weights = class_weights(data.train_images.labels, len(data.labels)).to(device)

    def fit_head(self, head, features, labels):
        """Train the head alone, in place, at the rate of a probe, which falls to zero; each step is on all images, or on as many
        of each class if that is asked for.

        Args:
            head: a dense layer.
            features: of the training images (n, D).
            labels: their labels, (n,) or (n, L).
        """
        if self.args.balance == "sampling":
            ids = class_balanced_ids(labels.cpu().numpy(), np.random.default_rng(self.args.seed)) % len(labels)
            features, labels = features[ids], labels[ids]
        targets = soft_targets(labels, len(self.data.labels), self.args.label_smoothing)
        highest = default_rates("probe", None, features.shape[1])[0]
        optimizer = torch.optim.AdamW(head.parameters(), highest, weight_decay=self.args.weight_decay)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, HEAD_STEPS)
        for _ in range(HEAD_STEPS):
            self.loss_of_logits(head(features), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    def loss_of_logits(self, logits, targets) -> torch.Tensor:
        """The loss () of logits and targets (B, L), without a teacher."""
        kind = multi_label_loss if self.data.several_labels else classification_loss
        return kind(logits, targets, self.args.loss, self.weights)

    def with_targets(self, inputs, labels, epoch: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (B, L), mixed if that is asked for: all micro-batches of a step alike, as one large batch would be."""
        args = self.args
        targets = soft_targets(labels, len(self.data.labels), args.label_smoothing)
        return mix(inputs, targets, args.mixup, args.cutmix, args.seed, epoch, batch)

    def loss(self, model, batch: Batch, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss (), and the logits (B, L)."""
        args, outputs = self.args, model(batch.inputs, **kwargs)
        logits = outputs if args.cache_features else outputs.logits
        loss = self.loss_of_logits(logits, batch.targets)
        if self.teacher is not None:
            with self.accelerator.autocast():
                teacher_logits = self.teacher(batch.inputs)
            distillation = distillation_loss(logits, teacher_logits, args.distillation_temperature)
            loss = (1 - args.distillation_alpha) * loss + args.distillation_alpha * distillation
        return loss, logits

    def count_correct(self, logits, batch: Batch) -> torch.Tensor:
        return count_correct(logits, batch.rows["labels"])

    def trial_batch(self, pixel_values) -> Batch:
        """A batch to measure memory with."""
        num_labels = len(self.data.labels)
        targets = torch.full((len(pixel_values), num_labels), 1 / num_labels, device=pixel_values.device)
        return Batch(0, pixel_values, targets, {})

    @property
    def scores_shape(self) -> dict:
        """Of the scores.json that `keep_best` writes."""
        return MULTI_LABEL_SHAPE if self.data.several_labels else SCORES_SHAPE

    def score(self, run, model) -> ScoredLogits | None:
        """An evaluation; None if a signal interrupted it."""
        images = self.data.eval_images
        stopped = lambda: run.signals.asked is not None
        predictions = run.predict(model, images, self.data.scored, stopped=stopped)
        if predictions is None:
            return None
        logits, rows = predictions  # (n, L), (n,)
        labels = images.labels[rows]
        metrics = compute_metrics(logits, labels, self.choose_thresholds(logits, labels))
        return ScoredLogits(metrics, rows, logits, labels)

    def merit(self, metrics: dict) -> tuple[float, float]:
        """By accuracy, or mean average precision; if equal by loss."""
        return headline(metrics)[1], -metrics["loss"]

    def describe(self, metrics: dict, scored: str) -> str:
        name, value = headline(metrics)
        return f"{name.replace('_', ' ')} on {scored} {value:.2%}, loss {metrics['loss']:.4f}"

    def choose_thresholds(self, logits, labels) -> torch.Tensor | None:
        """The thresholds (L,) of several labels an image; a test split chooses none."""
        if not self.data.several_labels:
            return None
        if self.data.selects_best:
            return choose_thresholds(logits, labels)
        return torch.full((labels.shape[1],), DEFAULT_THRESHOLD)

    def keep_best(self, run, model, metrics: dict, scored: ScoredLogits):
        """Write `checkpoints/best-N`: the model, its scores, all predictions, and samples of the images with labels and logits.

        The model that is written is calibrated on these images, unless they are for testing; which weights are the best is
        decided without that.
        """
        data, labels, rows = self.data, scored.labels, scored.rows
        calibrates = self.args.calibrate and data.selects_best
        temperature = fit_temperature(scored.logits, labels) if calibrates else 1.0
        logits = scored.logits / temperature
        thresholds = self.choose_thresholds(logits, labels)
        images, mistakes = data.eval_images, surest_mistakes(labels, logits, thresholds=thresholds)
        scores = {
            "metrics": metrics,
            "calibrated_metrics": {**metrics, **compute_metrics(logits, labels, thresholds)},
            "temperature": temperature,
            "images": len(labels),
            "mistakes": image_names(*images.sources(rows[mistakes])),
            "intervals": intervals(logits, labels, thresholds),
            **classification_report(logits, labels, data.labels, thresholds),
        }
        if thresholds is not None:
            model.config.thresholds = dict(zip(data.labels, scores["thresholds"], strict=True))
        samples = {}
        for prefix, indices in (("", draw_samples(len(labels), self.args.seed)), ("mistaken_", mistakes)):
            if len(indices):
                samples[f"{prefix}images"] = images.__getitems__(rows[indices].tolist())["images"]
                samples |= {f"{prefix}labels": labels[indices], f"{prefix}logits": logits[indices]}

        def write(folder: Path):
            with folded_temperature(model, temperature):
                run.write_model(model, folder)
            save_file(samples, folder / SAMPLES)
            table = prediction_table(*images.sources(rows), labels, logits, data.labels, thresholds)
            (folder / PREDICTIONS).write_text(table, encoding="utf-8", newline="")

        save_best(run.folder, metrics["step"], scores, sum(p.nbytes for p in model.parameters()), write)


def draw_samples(count: int, seed: int) -> torch.Tensor:
    """Which of the scored images are kept to look at, at random."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:NUM_SAMPLES]

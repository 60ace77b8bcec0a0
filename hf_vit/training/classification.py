"""The task of train.py: data, model, targets and loss of a classifier, how it is evaluated, and what it leaves."""

import math
import statistics
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image

from hf_vit import run_figures
from hf_vit.data.augment import mix
from hf_vit.data.columns import has_several_labels
from hf_vit.data.sampling import class_balanced_ids
from hf_vit.data.splits import class_weights
from hf_vit.evaluation.calibration import fit_temperature
from hf_vit.evaluation.classifiers import load_classifier
from hf_vit.evaluation.intervals import intervals
from hf_vit.evaluation.multi_label import DEFAULT_THRESHOLD, MULTI_LABEL, choose_thresholds
from hf_vit.evaluation.prediction import LOGITS_TOLERANCE, logits_difference
from hf_vit.evaluation.results import Results
from hf_vit.evaluation.scores import (
    classification_report,
    compute_metrics,
    format_prediction,
    headline,
    surest_mistakes,
)
from hf_vit.evaluation.tables import image_names, prediction_table
from hf_vit.system.command_line import shell_line
from hf_vit.system.errors import UserError
from hf_vit.system.files import write_text
from hf_vit.system.recipes_folder import RECIPES
from hf_vit.system.run_files import NUM_SAMPLES, PREDICTIONS
from hf_vit.system.text import counted, csv_text
from hf_vit.training.inputs import Batch, RunData
from hf_vit.training.losses import (
    Teacher,
    classification_loss,
    count_correct,
    distillation_loss,
    multi_label_loss,
    soft_targets,
)
from hf_vit.training.model import build_model
from hf_vit.training.plan import default_rates
from hf_vit.training.predictor import SplitPredictor
from hf_vit.training.task import Evaluation, Task


HEAD_STEPS = 150  # of a new head that is fitted first
COUNTS = ("true positives", "false positives", "false negatives", "true negatives")
# A run that learns nothing stays within a few percent of the loss of equal probabilities; a rate that is too large by ten gives
# many times as much. It is the median of the last lines of the log: a single bad batch is no divergence.
DIVERGED, LAST_LINES = 1.5, 5


class Classification(Task):
    """One label an image, or several; with a teacher, distillation of its answers."""

    has_accuracy = True

    weights = None  # of the classes
    std = None  # of labels that are numbers

    def build_model(self, labels: list[str], eval_rows):
        """(model, image processor)."""
        args, multi_label = self.args, has_several_labels(eval_rows)
        if multi_label and (args.balance == "sampling" or args.teacher_name_or_path is not None):
            raise UserError(
                "several labels an image do not go with --balance sampling or --teacher_name_or_path: leave it out"
            )
        return build_model(labels, *self.source(problem_type=MULTI_LABEL if multi_label else None))

    def set_up(self, data: RunData, backbone, accelerator):
        """The class weights (L,) and the teacher, if they are asked for."""
        if self.args.teacher_name_or_path is not None:
            self.teacher = Teacher(self.args.teacher_name_or_path, data.labels, data.spec)
        super().set_up(data, backbone, accelerator)
        if self.args.balance == "weights":
            self.weights = class_weights(data.train_images.labels, len(data.labels)).to(self.device)

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
        targets = self.targets_of(labels)
        highest = default_rates("probe", None, features.shape[1])[0]
        optimizer = torch.optim.AdamW(head.parameters(), highest, weight_decay=self.args.weight_decay)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, HEAD_STEPS)
        for _ in range(HEAD_STEPS):
            self.loss_of_logits(head(features), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    def targets_of(self, labels) -> torch.Tensor:
        """Probabilities (B, L) that the model is to give."""
        return soft_targets(labels, len(self.data.labels), self.args.label_smoothing)

    def loss_of_logits(self, logits, targets) -> torch.Tensor:
        """The loss () of logits and targets (B, L), without a teacher."""
        if self.data.multi_label:
            return multi_label_loss(logits, targets, self.weights)
        return classification_loss(logits, targets, self.weights)

    def with_targets(self, inputs, labels, epoch: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (B, L), mixed if that is asked for: all micro-batches of a step alike, as one large batch would be."""
        args, targets = self.args, self.targets_of(labels)
        return mix(inputs, targets, args.mixup, args.cutmix, args.seed, epoch, batch)

    def loss(self, model, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss (), and the logits (B, L)."""
        args, outputs = self.args, model(batch.inputs)
        logits = outputs if args.cache_features else outputs.logits
        loss = self.loss_of_logits(logits, batch.targets)
        if self.teacher is not None:
            with self.autocast():
                teacher_logits = self.teacher(batch.inputs)
            loss = (loss + distillation_loss(logits, teacher_logits)) / 2
        return loss, logits

    def count_correct(self, logits, batch: Batch) -> torch.Tensor:
        return count_correct(logits, batch.rows["labels"])

    def evaluate(self, model, predictor: SplitPredictor) -> Evaluation | None:
        """An evaluation; None if a signal interrupted it."""
        images = self.data.eval_images
        predictions = predictor.predict(model, images, self.data.spec, self.data.scored)
        if predictions is None:
            return None
        rows = predictions[1]  # (n,)
        logits, labels = self.in_units(predictions[0]), images.labels[rows]  # (n, L), and (n,) or (n, L)
        return Evaluation(self.metrics(logits, labels), rows, logits, labels)

    def in_units(self, logits) -> torch.Tensor:
        """What the network gives, (n, L), in units of the labels."""
        return logits

    def metrics(self, logits, labels) -> dict[str, float]:
        return compute_metrics(logits, labels, self.choose_thresholds(logits, labels))

    def selection_score(self, metrics: dict) -> tuple[float, float]:
        """By accuracy, or mean average precision; if equal by loss."""
        return headline(metrics)[1], -metrics["loss"]

    def describe(self, metrics: dict, split: str) -> str:
        name, value = headline(metrics)
        return f"{name.replace('_', ' ')} on {split} {value:.2%}, loss {metrics['loss']:.4f}"

    def choose_thresholds(self, logits, labels) -> torch.Tensor | None:
        """The thresholds (L,) of several labels an image; a test split chooses none."""
        if not self.data.multi_label:
            return None
        if self.data.selects_best:
            return choose_thresholds(logits, labels)
        return torch.full((labels.shape[1],), DEFAULT_THRESHOLD)

    def artifacts(self, model, evaluation: Evaluation) -> tuple[dict, dict, dict]:
        """Scores, samples of the images with labels and logits, and all predictions.

        The model that is written is calibrated on these images, unless they are for testing; which weights are the best is
        decided without that.
        """
        data, labels, rows = self.data, evaluation.labels, evaluation.rows
        temperature = fit_temperature(evaluation.logits, labels) if data.selects_best else 1.0
        logits = evaluation.logits / temperature
        thresholds = self.choose_thresholds(logits, labels)
        images, mistakes = data.eval_images, surest_mistakes(labels, logits, thresholds=thresholds)
        scores = {
            "calibrated_metrics": compute_metrics(logits, labels, thresholds),
            "temperature": temperature,
            "images": len(labels),
            "mistakes": image_names(*images.sources(rows[mistakes])),
            **classification_report(logits, labels, data.labels, thresholds),
        }
        if thresholds is not None:
            model.config.thresholds = dict(zip(data.labels, scores["thresholds"], strict=True))
        samples = self.samples(rows, labels, logits, mistakes)
        table = prediction_table(*images.sources(rows), labels, logits, data.labels, thresholds)
        return scores, samples, {PREDICTIONS: table}

    def intervals(self, logits, labels, scores: dict) -> dict[str, list[float]]:
        """95% intervals of the metrics of the weights that are kept."""
        thresholds = torch.tensor(scores["thresholds"]) if self.data.multi_label else None
        return intervals(logits / scores["temperature"], labels, thresholds)

    def samples(self, rows, labels, logits, mistakes) -> dict[str, torch.Tensor]:
        """Images drawn at random, and the worst mistakes, with labels and logits."""
        found = {}
        for prefix, indices in (("", draw_samples(len(labels), self.args.seed)), ("mistaken_", mistakes)):
            if len(indices):
                found[f"{prefix}images"] = self.data.eval_images.__getitems__(rows[indices].tolist())["images"]
                found |= {f"{prefix}labels": labels[indices], f"{prefix}logits": logits[indices]}
        return found

    def report(self, folder: Path, scores: dict, samples: dict, accelerator) -> dict:
        """Write the confusion matrix and example.png, and compare the model as a stranger would load it with the evaluated one."""
        labels, multi_label = self.data.labels, self.data.multi_label
        table = pd.DataFrame(scores["confusion_matrix"], columns=COUNTS if multi_label else labels)
        table.insert(0, "label" if multi_label else "true class", labels, allow_duplicates=True)
        write_text(folder.parent / "confusion_matrix.csv", csv_text(table))
        thresholds = torch.tensor(scores["thresholds"]) if multi_label else None
        answer = format_prediction(samples["logits"][0], labels, thresholds)
        return {"answer": answer, **self.check_saved(folder, samples, accelerator)}

    def check_saved(self, folder: Path, samples: dict, accelerator) -> dict:
        """Write example.png, and compare the saved model's logits with those that were evaluated."""
        spec, model, scale = self.data.spec, load_classifier(str(folder), regression=True), self.std
        if spec.channels in (1, 3):
            example = samples["images"][0].permute(1, 2, 0).squeeze(2)  # (C, H, W) -> (H, W, 3) or (H, W)
            Image.fromarray(example.numpy()).save(folder / "example.png")
        return {
            "attention_query": self.backbone.attention_query,
            "saved_logits_apart": logits_difference(
                model, samples["images"], samples["logits"], spec, accelerator, scale
            ),
        }

    def faults(self, results: Results, log: list[dict]) -> list[str]:
        """A sentence for each reason not to trust the model: it diverged, or is no better than chance."""
        # Equal probabilities for all labels, or for yes and no of each, whatever is smoothed or mixed; a teacher and weights change it.
        uninformed = math.log(2 if self.data.multi_label else len(self.data.labels))
        largest = DIVERGED * uninformed if self.teacher is None and self.weights is None else math.inf
        found, (name, value) = diverged(log, uninformed, largest), headline(results.metrics)
        evaluated, low = results.data["scored_images"], results.intervals[name][0]
        if self.data.multi_label:
            images = statistics.mean(row["images"] for row in results.per_class if row["images"])
            rival = "chance"
        else:
            most = max(results.per_class, key=lambda row: row["images"])
            images, rival = most["images"], f"always answering {most['label']!r}"
        chance, scored = images / evaluated, f"{counted(evaluated, 'image')} of {self.data.scored}"
        more = "Hold out more with --eval_fraction." if "part of" in self.data.scored else "Evaluate on more images."
        if low <= chance < value:
            found.append(
                f"Only {scored} were scored, too few to tell this model ({value:.2%}) from {rival} ({chance:.2%}). {more}"
            )
        elif low <= chance:
            found.append(
                f"No better than {rival} ({chance:.2%}): {name.replace('_', ' ')} {value:.2%} on {scored}, at least {low:.2%} with 95% "
                "confidence. Train for longer, on more images, or evaluate on more (--eval_fraction)."
            )
        return found + differing_logits(results)

    def draw(self, folder: Path, log: list[dict], scores: dict, samples: dict):
        model = load_classifier(str(folder.parent)).to(self.device)
        run_figures.draw_run(folder, log, scores, samples, self.data.labels, self.data.spec, model)

    def next_command(self, run_folder: Path) -> str:
        """Classify an image of the data; evaluate, where there is no image file to classify."""
        model = run_folder / "model"
        if (model / "example.png").is_file():
            return shell_line(RECIPES / "classify.py", model, model / "example.png")
        words = ["--model_name_or_path", model, "--dataset_name", self.args.dataset_name]
        return shell_line(RECIPES / "eval.py", *words)


def diverged(log: list[dict], uninformed: float, largest: float) -> list[str]:
    """A sentence if the training loss at the end is above `largest`, or not finite; `uninformed` is that of a model that knows nothing."""
    losses = [line["loss"] for line in log if line.get("loss") is not None][-LAST_LINES:]
    if not losses or (last := statistics.median(losses)) <= min(largest, sys.float_info.max):
        return []
    return [
        f"The run diverged: its training loss is {last:.3g} at the end, and {uninformed:.3g} for a model that knows nothing. "
        "Train again with a smaller --learning_rate."
    ]


def differing_logits(results: Results) -> list[str]:
    """A sentence if the saved model does not give what was evaluated."""
    if results.saved_logits_apart <= (tolerance := LOGITS_TOLERANCE[results.mixed_precision]):
        return []
    return [
        f"The saved model does not give the logits that were evaluated: they differ by {results.saved_logits_apart:.2g} of the "
        f"largest, at most {tolerance:g} was expected. Do not trust these scores, and report it."
    ]


def draw_samples(count: int, seed: int) -> torch.Tensor:
    """Which of the evaluated images are kept to look at, at random."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:NUM_SAMPLES]

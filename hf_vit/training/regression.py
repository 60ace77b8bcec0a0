"""The task of train.py with `--problem_type regression`: a number for each image, such as an age or an angle."""

from pathlib import Path

import pandas as pd
import torch
from torch import nn

from hf_vit import run_figures
from hf_vit.evaluation.calibration import folded_head
from hf_vit.evaluation.classifiers import load_classifier
from hf_vit.evaluation.regression import regression_intervals, regression_metrics
from hf_vit.evaluation.results import Results
from hf_vit.evaluation.tables import image_names
from hf_vit.system.command_line import shell_line
from hf_vit.system.recipes_folder import RECIPES
from hf_vit.system.run_files import PREDICTIONS
from hf_vit.system.text import csv_text
from hf_vit.training.classification import DIVERGED, Classification, differing_logits, diverged
from hf_vit.training.inputs import RunData
from hf_vit.training.model import build_model
from hf_vit.training.task import Evaluation, Task


MISTAKES = 12  # images with the largest errors, whose names are kept


class Regression(Classification):
    """Squared error, as `transformers` has it for `problem_type="regression"`, of labels in units of their standard deviation.

    The network learns (label - mean) / std, mean and std being those of the training labels, so that learning rates need not follow
    the labels' unit. The evaluated and the saved model predict labels: std and mean are folded into the head.
    """

    has_accuracy = False
    card = "regression_card.md"

    count_correct = Task.count_correct

    def build_model(self, _labels: list[str], _eval_rows):
        """(model with one output, image processor)."""
        return build_model([self.args.label_column or "label"], *self.source(problem_type="regression"))

    def set_up(self, data: RunData, backbone, accelerator):
        super().set_up(data, backbone, accelerator)
        labels = data.train_images.labels.double()
        self.mean, self.std = labels.mean().item(), labels.std(correction=0).item() or 1.0

    def targets_of(self, labels) -> torch.Tensor:
        """Labels (B,) -> (B, 1), of mean 0 and standard deviation 1 over the training images."""
        return ((labels - self.mean) / self.std).unsqueeze(1)

    def loss_of_logits(self, logits, targets) -> torch.Tensor:
        return nn.functional.mse_loss(logits.float(), targets)

    def as_saved(self, model):
        return folded_head(model, 1 / self.std, self.mean)

    def in_units(self, logits) -> torch.Tensor:
        return logits * self.std + self.mean

    def metrics(self, logits, labels) -> dict[str, float]:
        """With the loss of the network's own answers."""
        loss = self.loss_of_logits((logits - self.mean) / self.std, self.targets_of(labels)).item()
        return {**regression_metrics(logits[:, 0], labels), "loss": loss}

    def selection_score(self, metrics: dict) -> float:
        return -metrics["loss"]

    def describe(self, metrics: dict, split: str) -> str:
        return f"R2 {metrics['r2']:.4f}, mean absolute error on {split} {metrics['mae']:.4g}"

    def artifacts(self, _model, evaluation: Evaluation) -> tuple[dict, dict, dict]:
        """Scores, samples of the images with labels and predictions, and all predictions."""
        labels, rows, images = evaluation.labels, evaluation.rows, self.data.eval_images
        predicted = evaluation.logits[:, 0]
        errors = predicted - labels
        worst = errors.abs().argsort(descending=True, stable=True)[:MISTAKES]
        scores = {
            "images": len(labels),
            "mistakes": image_names(*images.sources(rows[worst])),
        }
        numbers, files = images.sources(rows)
        columns = {"label": labels, "predicted": predicted, "error": errors}
        table = pd.DataFrame({"row": numbers, "file": files, **columns})
        return (
            scores,
            self.samples(rows, labels, evaluation.logits, worst),
            {PREDICTIONS: csv_text(table, float_format="%.6g")},
        )

    def intervals(self, logits, labels, scores: dict) -> dict[str, list[float]]:
        return regression_intervals(logits[:, 0], labels)

    def report(self, folder: Path, _scores: dict, samples: dict, accelerator) -> dict:
        answer = f"{samples['logits'][0].item():.4g}"
        return {"answer": answer, **self.check_saved(folder, samples, accelerator)}

    def faults(self, results: Results, log: list[dict]) -> list[str]:
        """A sentence for each reason not to trust the model: it diverged, or is no better than the mean."""
        found, (low, _high) = diverged(log, 1.0, DIVERGED), results.intervals["r2"]
        if not low > 0:
            found.append(
                f"No better than always predicting the mean: R2 {results.metrics['r2']:.3f}, at least {low:.3f} with 95% confidence. "
                "Train for longer, on more images, or evaluate more (--eval_fraction)."
            )
        return found + differing_logits(results)

    def draw(self, folder: Path, log: list[dict], scores: dict, samples: dict):
        model = load_classifier(str(folder.parent), regression=True).to(self.device)
        table = pd.read_csv(folder.parents[1] / PREDICTIONS)
        run_figures.draw_regression(folder, log, table, samples, self.data.spec, model)

    def next_command(self, run_folder: Path) -> str:
        """Predict the number of an image."""
        if not (image := run_folder / "model" / "example.png").is_file():
            return super().next_command(run_folder)
        words = ["--model_name_or_path", run_folder, "--dataset_name", image]
        return shell_line(RECIPES / "predict.py", *words, "--output_file", "prediction.csv")

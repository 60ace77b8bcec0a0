"""Confusion matrix as an `evaluate` module: `evaluate.load("path/to/confusion_matrix.py")` works offline."""

import datasets
import evaluate

from hf_vit.evaluation.metrics import confusion_matrix


class ConfusionMatrix(evaluate.Metric):
    __doc__ = confusion_matrix.__doc__

    def _info(self):
        return evaluate.MetricInfo(
            description=confusion_matrix.__doc__,
            citation="",
            inputs_description="predictions and references: class indices; num_labels: of the classes",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references, num_labels):
        return {"confusion_matrix": confusion_matrix(predictions, references, num_labels)}

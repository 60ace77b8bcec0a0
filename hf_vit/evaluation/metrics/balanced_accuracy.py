"""Balanced accuracy as an `evaluate` module: `evaluate.load("path/to/balanced_accuracy.py")` works offline."""

import datasets
import evaluate

from hf_vit.evaluation.metrics import balanced_accuracy


class BalancedAccuracy(evaluate.Metric):
    __doc__ = balanced_accuracy.__doc__

    def _info(self):
        return evaluate.MetricInfo(
            description=balanced_accuracy.__doc__,
            citation="",
            inputs_description="predictions and references: class indices, as many of the one as of the other",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references):
        return {"balanced_accuracy": balanced_accuracy(predictions, references)}

"""Top-1 accuracy as an `evaluate` module: `evaluate.load("path/to/accuracy.py")` works offline."""

import datasets
import evaluate

from hf_vit.evaluation.metrics import accuracy


class Accuracy(evaluate.Metric):
    __doc__ = accuracy.__doc__

    def _info(self):
        return evaluate.MetricInfo(
            description=accuracy.__doc__,
            citation="",
            inputs_description="predictions and references: class indices, as many of the one as of the other",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references):
        return {"accuracy": accuracy(predictions, references)}

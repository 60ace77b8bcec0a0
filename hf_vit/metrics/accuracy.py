"""Top-1 accuracy as an `evaluate` module: `evaluate.load("path/to/accuracy.py")` works offline."""

import datasets
import evaluate
import numpy as np


class Accuracy(evaluate.Metric):
    """Share of samples whose predicted class index equals the true one, in [0, 1]."""

    def _info(self):
        return evaluate.MetricInfo(
            description="Share of samples whose predicted class index equals the true one, in [0, 1].",
            citation="",
            inputs_description="predictions and references: class indices, as many of the one as of the other",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references):
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}

"""Top-k accuracy as an `evaluate` module: `evaluate.load("path/to/top_k_accuracy.py")` works offline."""

import datasets
import evaluate

from hf_vit.evaluation.metrics import top_k_accuracy


class TopKAccuracy(evaluate.Metric):
    __doc__ = top_k_accuracy.__doc__

    def _info(self):
        return evaluate.MetricInfo(
            description=top_k_accuracy.__doc__,
            citation="",
            inputs_description="predictions: k class indices an image, the likeliest first; references: class indices",
            features=datasets.Features(
                {"predictions": datasets.List(datasets.Value("int64")), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references):
        return {"top_k_accuracy": top_k_accuracy(predictions, references)}

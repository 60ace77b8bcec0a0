"""The scores as `evaluate` modules, which load by the path of this file without a network.

module = evaluate.load("hf_vit/evaluation/metrics.py", "macro_f1")
module.compute(predictions=[0, 2], references=[0, 1])
"""

import datasets
import evaluate
import numpy as np

from hf_vit.evaluation import scores


CLASS = datasets.Value("int64")
NUMBER = datasets.Value("float64")


def _confusion(predictions, references) -> np.ndarray:
    return scores.confusion_matrix(predictions, references, max(*predictions, *references) + 1)


# By their names: what is computed, and the features of an image beside the index of its class, `references`.
METRICS = {
    "accuracy": (lambda predictions, references: np.equal(predictions, references).mean(), {"predictions": CLASS}),
    "top_k_accuracy": (
        lambda predictions, references: np.equal(predictions, np.array(references)[:, None]).any(axis=1).mean(),
        {"predictions": datasets.List(CLASS)},
    ),
    "balanced_accuracy": (
        lambda **pair: scores.class_means(_confusion(**pair))["balanced_accuracy"],
        {"predictions": CLASS},
    ),
    "macro_f1": (lambda **pair: scores.class_means(_confusion(**pair))["macro_f1"], {"predictions": CLASS}),
    "calibration_error": (
        lambda predictions, references, confidences: scores.calibration_error(
            confidences, np.equal(predictions, references)
        ),
        {"predictions": CLASS, "confidences": NUMBER},
    ),
}


class HFViTMetric(evaluate.Metric):
    """One of `METRICS`, by the name of the configuration; accuracy if none is given."""

    @property
    def chosen(self) -> str:
        return "accuracy" if self.config_name == "default" else self.config_name

    def _info(self):
        if self.chosen not in METRICS:
            raise ValueError(f"{self.chosen} is no metric, choose from {', '.join(METRICS)}")
        return evaluate.MetricInfo(
            description=f"{self.chosen} of an image classifier, as hf_vit/evaluation/scores.py defines it",
            citation="",
            inputs_description="predictions and references: class indices",
            features=datasets.Features({"references": CLASS, **METRICS[self.chosen][1]}),
        )

    def _compute(self, **arguments):
        return {self.chosen: float(METRICS[self.chosen][0](**arguments))}

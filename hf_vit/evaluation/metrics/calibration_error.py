"""Expected calibration error as an `evaluate` module: `evaluate.load("path/to/calibration_error.py")` works offline."""

import datasets
import evaluate

from hf_vit.evaluation.metrics import calibration_error


class CalibrationError(evaluate.Metric):
    __doc__ = calibration_error.__doc__

    def _info(self):
        return evaluate.MetricInfo(
            description=calibration_error.__doc__,
            citation="",
            inputs_description="predictions and references: class indices; confidences: the predictions' probabilities; bins: how many",
            features=datasets.Features(
                {
                    "predictions": datasets.Value("int64"),
                    "references": datasets.Value("int64"),
                    "confidences": datasets.Value("float64"),
                }
            ),
        )

    def _compute(self, predictions, references, confidences, bins=15):
        return {"calibration_error": calibration_error(predictions, references, confidences, bins)}

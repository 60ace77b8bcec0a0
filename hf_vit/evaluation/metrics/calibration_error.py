"""Expected calibration error as an `evaluate` module: `evaluate.load("path/to/calibration_error.py")` works offline."""

import datasets

from hf_vit.evaluation.metrics import calibration_error
from hf_vit.evaluation.metrics.frame import evaluate_module


CalibrationError = evaluate_module(
    calibration_error,
    inputs="predictions and references: class indices; confidences: the predictions' probabilities; bins: how many",
    confidences=datasets.Value("float64"),
)

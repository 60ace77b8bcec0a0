"""Confusion matrix as an `evaluate` module: `evaluate.load("path/to/confusion_matrix.py")` works offline."""

from hf_vit.evaluation.metrics import confusion_matrix
from hf_vit.evaluation.metrics.frame import evaluate_module


ConfusionMatrix = evaluate_module(
    confusion_matrix, inputs="predictions and references: class indices; num_labels: of the classes"
)

"""Balanced accuracy as an `evaluate` module: `evaluate.load("path/to/balanced_accuracy.py")` works offline."""

from hf_vit.evaluation.metrics import balanced_accuracy
from hf_vit.evaluation.metrics.frame import evaluate_module


BalancedAccuracy = evaluate_module(balanced_accuracy)

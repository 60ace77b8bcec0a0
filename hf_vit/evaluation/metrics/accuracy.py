"""Top-1 accuracy as an `evaluate` module: `evaluate.load("path/to/accuracy.py")` works offline."""

from hf_vit.evaluation.metrics import accuracy
from hf_vit.evaluation.metrics.frame import evaluate_module


Accuracy = evaluate_module(accuracy)

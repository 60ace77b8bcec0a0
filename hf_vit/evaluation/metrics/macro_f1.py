"""Macro F1 as an `evaluate` module: `evaluate.load("path/to/macro_f1.py")` works offline."""

from hf_vit.evaluation.metrics import macro_f1
from hf_vit.evaluation.metrics.frame import evaluate_module


MacroF1 = evaluate_module(macro_f1)

"""Top-k accuracy as an `evaluate` module: `evaluate.load("path/to/top_k_accuracy.py")` works offline."""

import datasets

from hf_vit.evaluation.metrics import top_k_accuracy
from hf_vit.evaluation.metrics.frame import evaluate_module


TopKAccuracy = evaluate_module(
    top_k_accuracy,
    inputs="predictions: k class indices an image, the likeliest first; references: class indices",
    predictions=datasets.List(datasets.Value("int64")),
)

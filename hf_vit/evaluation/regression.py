"""Scores of a model that predicts a number for each image."""

import numpy as np
import torch


RESAMPLES = 1000


def regression_metrics(predicted: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """{"mae": mean absolute error, in units of the labels, "r2": coefficient of determination, at most 1, NaN where all labels are the same}.

    Args:
        predicted, labels: (n,).
    """
    return {name: float(values[0]) for name, values in _scores(predicted.numpy()[None], labels.numpy()[None]).items()}


def regression_intervals(predicted: torch.Tensor, labels: torch.Tensor, seed: int = 0) -> dict[str, list[float]]:
    """{metric: [low, high]}, 95% intervals by the percentile bootstrap over the images (Efron, Annals of Statistics 7, 1979)."""
    rows = np.random.default_rng(seed).integers(len(labels), size=(RESAMPLES, len(labels)))
    scores = _scores(predicted.numpy()[rows], labels.numpy()[rows])
    return {name: np.nanpercentile(drawn, [2.5, 97.5]).tolist() for name, drawn in scores.items()}


def _scores(predicted: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Both metrics of each row of (draws, n)."""
    labels = labels.astype(np.float64)
    errors, spread = predicted - labels, labels - labels.mean(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        r2 = 1 - (errors**2).sum(axis=1) / (spread**2).sum(axis=1)
    return {"mae": np.abs(errors).mean(axis=1), "r2": np.where((spread**2).sum(axis=1) > 0, r2, np.nan)}

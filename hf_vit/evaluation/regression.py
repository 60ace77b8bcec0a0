"""Scores of a model that predicts a number for each image."""

import numpy as np
import pandas as pd
import torch


RESAMPLES = 1000


def regression_metrics(predicted: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """{"mae": mean absolute error, in units of the labels, "r2": coefficient of determination, at most 1, NaN where all labels are the same}.

    Args:
        predicted, labels: (n,).
    """
    predicted, labels = predicted.double().numpy(), labels.double().numpy()
    errors, variance = predicted - labels, labels.var()
    r2 = 1 - np.square(errors).mean() / variance if variance > 0 else np.nan
    return {"mae": float(np.abs(errors).mean()), "r2": float(r2)}


def regression_intervals(predicted: torch.Tensor, labels: torch.Tensor) -> dict[str, list[float]]:
    """{metric: [low, high]}, 95% intervals by the percentile bootstrap over the images (Efron, Annals of Statistics 7, 1979)."""
    rng, count = np.random.default_rng(0), len(labels)
    draws = (rng.integers(count, size=count) for _ in range(RESAMPLES))
    scores = pd.DataFrame([regression_metrics(predicted[rows], labels[rows]) for rows in draws])
    return {name: np.nanpercentile(drawn, [2.5, 97.5]).tolist() for name, drawn in scores.items()}

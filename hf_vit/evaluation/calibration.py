"""Probabilities that mean something: a temperature that is fitted on validation images and folded into the head."""

import contextlib
from functools import partial

import torch
from torch import nn

from hf_vit.evaluation.prediction import classification_head


FEWEST_IMAGES = 100  # to fit one number on; the authors fit it on 5,000 and more
COLDEST, HOTTEST = 0.05, 20.0


def fit_temperature(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The temperature T for which logits / T have the least cross-entropy (arXiv 1706.04599, section 4.2), or, of several labels
    an image, binary cross-entropy.

    It is 1 for fewer than `FEWEST_IMAGES`, and where the least loss lies outside `COLDEST` to `HOTTEST`: that is where all
    predictions are right, or no better than chance.

    Args:
        logits: (n, L), of images that were not trained on.
        labels: (n,) class indices, or (n, L) of 0 and 1.
    """
    from scipy.optimize import brentq

    if len(labels) < FEWEST_IMAGES:
        return 1.0
    logits = logits.double()
    probabilities = torch.sigmoid if labels.ndim == 2 else partial(torch.softmax, dim=1)
    truth = labels if labels.ndim == 2 else nn.functional.one_hot(labels, logits.shape[1])
    of_labels = (logits * truth).sum(dim=1).mean()
    slope = lambda scale: float((probabilities(logits * scale) * logits).sum(dim=1).mean() - of_labels)
    if slope(1 / HOTTEST) >= 0 or slope(1 / COLDEST) <= 0:
        return 1.0
    return 1 / brentq(slope, 1 / HOTTEST, 1 / COLDEST)  # the loss is convex in 1 / T


@contextlib.contextmanager
def folded_head(model, divisor: float, shift: float = 0.0):
    """Within the block, the head gives logits / divisor + shift, in whatever form the model is saved or exported."""
    head = classification_head(model)
    before = [parameter.data.clone() for parameter in head.parameters()]
    try:
        for parameter in head.parameters():
            parameter.data.div_(divisor)
        if shift:
            head.bias.data.add_(shift)
        yield
    finally:
        for parameter, values in zip(head.parameters(), before, strict=True):
            parameter.data.copy_(values)

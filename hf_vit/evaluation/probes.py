"""How good frozen features are: k nearest neighbours, and few-shot linear classifiers."""

import numpy as np
import torch
from torch import nn

from hf_vit.system.errors import UserError
from hf_vit.system.text import counted


def knn_accuracy(train, train_labels, features, labels, neighbours: int = 20, temperature: float = 0.07) -> float:
    """Accuracy in [0, 1] of a vote of the `neighbours` most similar training images, each weighted by
    exp(cosine similarity / temperature): "Unsupervised Feature Learning via Non-Parametric Instance Discrimination"
    (arXiv 1805.01978, section 3.4), with DINO's neighbours and temperature.

    Args:
        train, features: (n, D) and (m, D) of the training images and of those that are scored.
        train_labels, labels: (n,) and (m,) class indices.
    """
    train, features = nn.functional.normalize(train, dim=1), nn.functional.normalize(features, dim=1)
    right = 0
    for some, truth in zip(features.split(1024), labels.split(1024), strict=True):
        nearest = (some @ train.T).topk(min(neighbours, len(train)), dim=1)  # (b, k)
        votes = torch.zeros(len(some), int(train_labels.max()) + 1)
        votes.scatter_add_(1, train_labels[nearest.indices], (nearest.values / temperature).exp())
        right += int((votes.argmax(dim=1) == truth).sum())
    return right / len(labels)


def few_shot_accuracy(
    train, train_labels, features, labels, shots: int, seed: int, l2: float = 2.0**10, bias: float = 100.0
) -> float:
    """Accuracy in [0, 1] of a linear classifier on frozen features, in closed form: least squares with L2 decay to targets in
    {-1, 1}, from `shots` random images of each class. As big_vision does (evaluators/fewshot_lsr.py): each feature
    whitened, a constant feature for the bias so large that it hardly decays, one fixed decay.

    Args: as `knn_accuracy`; `seed` draws the images.

    Raises:
        ValueError: if a class has fewer images.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for label in train_labels.unique().tolist():
        of_class = rng.permutation((train_labels == label).nonzero().flatten().numpy())
        if len(of_class) < shots:
            raise UserError(
                f"a class has only {counted(len(of_class), 'training image')}, fewer than the {shots} shots"
            )
        rows.append(of_class[:shots])
    x, y = train[np.concatenate(rows)].double(), train_labels[np.concatenate(rows)]
    mean, std = x.mean(dim=0), x.std(dim=0, correction=0) + 1e-5
    whiten = lambda values: nn.functional.pad((values.double() - mean) / std, (0, 1), value=bias)  # (n, D + 1)
    x, targets = whiten(x), 2 * nn.functional.one_hot(y, int(train_labels.max()) + 1).double() - 1
    dual = torch.linalg.solve(x @ x.T + l2 * torch.eye(len(x), dtype=x.dtype), targets)  # (n, L)
    return float((whiten(features) @ (x.T @ dual)).argmax(dim=1).eq(labels).double().mean())


def probe(train, train_labels, features, labels, shots=(1, 5, 10), seeds: int = 3) -> dict[str, float]:
    """{"knn_accuracy", "1_shot_accuracy", ...}: the mean over `seeds` draws of what `few_shot_accuracy` gives. A number of
    shots that a class does not have is left out."""
    scores = {"knn_accuracy": knn_accuracy(train, train_labels, features, labels)}
    fewest = int(torch.bincount(train_labels)[train_labels.unique()].min())
    for count in [count for count in shots if count <= fewest]:
        each = [few_shot_accuracy(train, train_labels, features, labels, count, seed) for seed in range(seeds)]
        scores[f"{count}_shot_accuracy"] = sum(each) / seeds
    return scores

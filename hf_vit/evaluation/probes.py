"""How good frozen features are: k nearest neighbours, and few-shot linear classifiers."""

import numpy as np
import torch


L2 = 2.0**10  # decay of the few-shot classifiers


def knn_accuracy(train, train_labels, features, labels, neighbours: int = 20, temperature: float = 0.07) -> float:
    """Accuracy in [0, 1] of a vote of the `neighbours` most similar training images, each weighted by
    exp(cosine similarity / temperature): "Unsupervised Feature Learning via Non-Parametric Instance Discrimination"
    (arXiv 1805.01978, section 3.4), with DINO's neighbours and temperature.

    Args:
        train, features: (n, D) and (m, D) of the training images and of those that are scored.
        train_labels, labels: (n,) and (m,) class indices.
    """
    from sklearn.neighbors import KNeighborsClassifier  # takes a second to import

    votes = lambda distances: np.exp((1 - distances) / temperature)
    classifier = KNeighborsClassifier(min(neighbours, len(train)), weights=votes, metric="cosine")
    return classifier.fit(train.numpy(), train_labels.numpy()).score(features.numpy(), labels.numpy())


def few_shot_accuracy(train, train_labels, features, labels, shots: int, seed: int) -> float:
    """Accuracy in [0, 1] of a linear classifier on frozen features: least squares with L2 decay to targets in {-1, 1}, from
    `shots` random images of each class, with whitened features and big_vision's fixed decay (evaluators/fewshot_lsr.py).

    Args: as `knn_accuracy`; `seed` draws the images.
    """
    from sklearn.linear_model import RidgeClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng(seed)
    of_classes = [rng.permutation((train_labels == label).nonzero().flatten()) for label in train_labels.unique()]
    rows = np.concatenate([of_class[:shots] for of_class in of_classes])
    classifier = make_pipeline(StandardScaler(), RidgeClassifier(alpha=L2))
    classifier.fit(train[rows].double().numpy(), train_labels[rows].numpy())
    return classifier.score(features.double().numpy(), labels.numpy())


def probe(train, train_labels, features, labels, shots=(1, 5, 10), seeds: int = 3) -> dict[str, float]:
    """{"knn_accuracy", "1_shot_accuracy", ...}: the mean over `seeds` draws of what `few_shot_accuracy` gives. A number of
    shots that a class does not have is left out."""
    scores = {"knn_accuracy": knn_accuracy(train, train_labels, features, labels)}
    fewest = int(torch.bincount(train_labels)[train_labels.unique()].min())
    for count in [count for count in shots if count <= fewest]:
        each = [few_shot_accuracy(train, train_labels, features, labels, count, seed) for seed in range(seeds)]
        scores[f"{count}_shot_accuracy"] = sum(each) / seeds
    return scores

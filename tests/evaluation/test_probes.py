"""Claims about probes of frozen features."""

import math

import numpy as np
import pytest
import torch

from hf_vit.evaluation.probes import L2, few_shot_accuracy, knn_accuracy, probe


def clusters(seed, counts, spread, size=6):
    """Features (n, D) around one centre a class, and their classes, in random order."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(len(counts), size, generator=torch.Generator().manual_seed(9))
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=generator)]
    return centres[labels] + spread * torch.randn(len(labels), size, generator=generator), labels


@pytest.mark.parametrize(("neighbours", "temperature"), [(20, 0.07), (1000, 0.5)])
def test_knn_accuracy_equals_a_slow_loop(neighbours, temperature):
    (train, train_labels), (features, labels) = clusters(0, [30, 9, 20, 15], 1.2), clusters(1, [20, 20, 20, 20], 1.2)
    right = 0
    for feature, label in zip(features.double(), labels.tolist(), strict=True):
        near = sorted(
            (-float(feature @ other / feature.norm() / other.norm()), int(of))
            for other, of in zip(train.double(), train_labels, strict=True)
        )[:neighbours]
        votes = [0.0] * 4
        for distance, of in near:
            votes[of] += math.exp(-distance / temperature)
        right += votes.index(max(votes)) == label
    assert 20 < right < 80
    assert knn_accuracy(train, train_labels, features, labels, neighbours, temperature) == right / 80


def test_few_shot_accuracy_equals_ridge_regression_solved_directly():
    """(X^T X + L2 I)^-1 X^T (Y - mean), of classes with as many images as shots, so that the draw takes them all."""
    (train, train_labels), (features, labels) = clusters(0, [5, 5, 5], 1.5), clusters(1, [40, 40, 40], 1.5)
    x, y = train.double().numpy(), -np.ones((15, 3))
    y[np.arange(15), train_labels.numpy()] = 1
    whiten = lambda values: (values - x.mean(axis=0)) / x.std(axis=0)
    X = whiten(x)
    weights = np.linalg.solve(X.T @ X + L2 * np.eye(6), X.T @ (y - y.mean(axis=0)))
    predicted = (whiten(features.double().numpy()) @ weights + y.mean(axis=0)).argmax(axis=1)
    wanted = np.mean(predicted == labels.numpy())
    assert 0.4 < wanted < 1
    assert few_shot_accuracy(train, train_labels, features, labels, 5, 0) == pytest.approx(wanted)


def test_few_shots_are_drawn_by_the_seed():
    (train, train_labels), (features, labels) = clusters(0, [50, 50, 50], 1.5), clusters(1, [40, 40, 40], 1.5)
    of = lambda seed: few_shot_accuracy(train, train_labels, features, labels, 1, seed)
    assert [of(seed) for seed in range(5)] == [of(seed) for seed in range(5)]
    assert len({of(seed) for seed in range(5)}) > 1


@pytest.mark.parametrize(("fewest", "wanted"), [(1, [1]), (4, [1]), (5, [1, 5]), (10, [1, 5, 10])])
def test_a_probe_leaves_out_shots_that_a_class_lacks(fewest, wanted):
    (train, train_labels), (features, labels) = clusters(0, [12, fewest, 12], 1.0), clusters(1, [9, 9, 9], 1.0)
    scores = probe(train, train_labels, features, labels)
    assert list(scores) == ["knn_accuracy", *(f"{shots}_shot_accuracy" for shots in wanted)]
    assert scores["knn_accuracy"] == knn_accuracy(train, train_labels, features, labels)
    each = [few_shot_accuracy(train, train_labels, features, labels, 1, seed) for seed in range(3)]
    assert scores["1_shot_accuracy"] == pytest.approx(sum(each) / 3)

"""Claims about probes of frozen features."""

import pytest
import torch
from torch import nn

from hf_vit.evaluation.probes import L2, few_shot_accuracy, knn_accuracy, probe


def clusters(seed, counts, spread, size=6):
    """Features (n, D) around one centre a class, and their classes, in random order."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(len(counts), size, generator=torch.Generator().manual_seed(9))
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=generator)]
    return centres[labels] + spread * torch.randn(len(labels), size, generator=generator), labels


@pytest.mark.parametrize(("neighbours", "temperature"), [(20, 0.07), (1000, 0.5)])
def test_knn_accuracy_equals_a_plain_formula(neighbours, temperature):
    (train, train_labels), (features, labels) = clusters(0, [30, 9, 20, 15], 1.2), clusters(1, [20, 20, 20, 20], 1.2)
    similarities = torch.cosine_similarity(features[:, None], train, dim=2).double()  # (80, 74)
    bound = similarities.sort(dim=1, descending=True).values[:, :neighbours].amin(dim=1, keepdim=True)
    weights = (similarities / temperature).exp() * (similarities >= bound)
    answers = (weights @ nn.functional.one_hot(train_labels).double()).argmax(dim=1)
    right = (answers == labels).sum().item()
    assert 20 < right < 80
    assert knn_accuracy(train, train_labels, features, labels, neighbours, temperature) == right / 80


def test_few_shot_accuracy_equals_ridge_regression_solved_directly():
    """(X^T X + L2 I)^-1 X^T (Y - mean), of classes with as many images as shots, so that the draw takes them all."""
    (train, train_labels), (features, labels) = clusters(0, [5, 5, 5], 1.5), clusters(1, [40, 40, 40], 1.5)
    whiten = lambda values: (values - train.mean(0)) / train.std(0, correction=0)
    x, y = whiten(train).double(), 2.0 * nn.functional.one_hot(train_labels).double() - 1
    weights = torch.linalg.solve(x.T @ x + L2 * torch.eye(6), x.T @ (y - y.mean(0)))
    wanted = ((whiten(features).double() @ weights + y.mean(0)).argmax(dim=1) == labels).float().mean().item()
    assert 0.4 < wanted < 1
    assert few_shot_accuracy(train, train_labels, features, labels, 5, 0) == pytest.approx(wanted)


def test_few_shots_are_drawn_by_the_seed():
    sets = *clusters(0, [50, 50, 50], 1.5), *clusters(1, [40, 40, 40], 1.5)
    first, again = ([few_shot_accuracy(*sets, 1, seed) for seed in range(5)] for _ in range(2))
    assert first == again
    assert len({*first}) > 1


@pytest.mark.parametrize(("fewest", "wanted"), [(4, [1]), (5, [1, 5]), (10, [1, 5, 10])])
def test_a_probe_leaves_out_shots_that_a_class_lacks(fewest, wanted):
    sets = *clusters(0, [12, fewest, 12], 1.0), *clusters(1, [9, 9, 9], 1.0)
    scores = probe(*sets)
    assert list(scores) == ["knn_accuracy", *(f"{shots}_shot_accuracy" for shots in wanted)]
    assert scores["knn_accuracy"] == knn_accuracy(*sets)
    assert scores["1_shot_accuracy"] == pytest.approx(sum(few_shot_accuracy(*sets, 1, seed) for seed in range(3)) / 3)

"""Labels that are probably wrong: predictions that were made without them say something else.

"Confident Learning: Estimating Uncertainty in Dataset Labels" (arXiv 1911.00068) ranks labels by out-of-fold probabilities.
"""

import numpy as np
import torch


FOLDS = 5
DECAY = 0.01  # scikit-learn's C, the inverse of the weight decay


def out_of_fold_probabilities(features: torch.Tensor, labels: torch.Tensor, num_labels: int, seed: int = 0):
    """Probabilities (n, L) of logistic regression on `features` (n, D), for each fifth of the images from a fit on the others.

    A class that a fit has no image of gets 0.
    """
    from sklearn.linear_model import LogisticRegression  # takes a second to import

    values = ((features - features.mean(dim=0)) / features.std(dim=0).clamp(min=1e-5)).numpy()
    folds = np.random.default_rng(seed).permutation(len(labels)) % FOLDS
    probabilities = torch.zeros(len(labels), num_labels)
    for fold in range(FOLDS):
        fit, rest = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        model = LogisticRegression(C=DECAY, max_iter=1000).fit(values[fit], labels[fit].numpy())
        found = torch.from_numpy(model.predict_proba(values[rest])).float()
        probabilities[rest[:, None], model.classes_] = found
    return probabilities


def contradicted_labels(
    probabilities: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images whose most likely class is not their label, the most contradicted first: their places, these classes, and by how
    much they are more likely than the label, in (0, 1].

    Args:
        probabilities: (n, L), of predictions that were made without the label of the image.
        labels: (n,) class indices.
    """
    given = probabilities.gather(1, labels[:, None]).squeeze(1)
    best, classes = probabilities.max(dim=1)
    margins = best - given
    places = margins.argsort(descending=True, stable=True)[: int((margins > 0).sum())]
    return places, classes[places], margins[places]

"""Labels that are probably wrong: predictions that were made without them say something else.

"Confident Learning: Estimating Uncertainty in Dataset Labels" (arXiv 1911.00068) finds them by out-of-fold probabilities.
"""

import warnings

import numpy as np
import torch

from hf_vit.system.errors import UserError
from hf_vit.system.text import counted


FOLDS = 5
INVERSE_DECAY = 0.1  # scikit-learn's C


def out_of_fold_probabilities(features: torch.Tensor, labels: torch.Tensor, num_labels: int) -> torch.Tensor:
    """Probabilities (n, L) of logistic regression on `features` (n, D): those of each fifth of the images, stratified, come from a fit
    on the others. The only image of a class gets its own label.

    Args:
        labels: (n,) class indices.

    Raises:
        ValueError: if fewer than two classes have two images.
    """
    from sklearn.linear_model import LogisticRegression  # takes a second to import
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.preprocessing import scale

    counts = torch.bincount(labels, minlength=num_labels).numpy()
    if int((counts > 1).sum()) < 2:
        raise UserError(
            f"{counted(len(labels), 'image')} cannot tell wrong labels: need two classes with two images each"
        )
    values = scale(features.double().numpy())
    folds = StratifiedKFold(min(FOLDS, counts.max()), shuffle=True, random_state=0)
    model = LogisticRegression(C=INVERSE_DECAY, max_iter=1000)
    probabilities = np.zeros((len(labels), num_labels), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes with fewer images than folds
        found = cross_val_predict(model, values, labels.numpy(), cv=folds, method="predict_proba")
    probabilities[:, np.flatnonzero(counts)] = found
    alone = np.flatnonzero(counts[labels] == 1)
    probabilities[alone] = np.eye(num_labels)[labels[alone]]
    return torch.from_numpy(probabilities)


def contradicted_labels(probabilities: torch.Tensor, labels: torch.Tensor):
    """Images whose most likely class is not their label: places, these classes, and the probabilities of the labels, which rise.

    The least likely label comes first ("self-confidence" in the paper's library): on Fashion-MNIST that finds more wrong labels than
    the distance to the most likely class, which is small where a wrong label looks like several others.

    Args:
        probabilities: (n, L), of predictions that were made without the label of the image.
        labels: (n,) class indices.
    """
    given, classes = probabilities.gather(1, labels[:, None]).squeeze(1), probabilities.argmax(dim=1)
    order = given.argsort(stable=True)
    places = order[(classes != labels)[order]]
    return places, classes[places], given[places]

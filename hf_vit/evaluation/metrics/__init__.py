"""How good a classifier is, as functions of numpy arrays; the files beside this one offer each as an `evaluate` module, which
is loaded by its local path, so that no metric needs the network.

`references` (n,) are the true class indices and `predictions` (n,) the predicted ones, `confidences` (n,) their probabilities.
"""

import math

import numpy as np


def accuracy(predictions, references) -> float:
    """Share of images whose predicted class is right, in [0, 1]."""
    return float(np.mean(np.asarray(predictions) == np.asarray(references)))


def top_k_accuracy(predictions, references) -> float:
    """Share of images whose true class is among the k predicted ones; predictions (n, k)."""
    return float(np.mean(np.any(np.asarray(predictions) == np.asarray(references)[:, None], axis=1)))


def _counts(predictions, references):
    """Of each class: images that are it and were called it, images that are it, images that were called it."""
    predictions, references = np.asarray(predictions), np.asarray(references)
    classes = int(max(predictions.max(), references.max())) + 1
    count = lambda values: np.bincount(values, minlength=classes)
    return count(references[predictions == references]), count(references), count(predictions)


def balanced_accuracy(predictions, references) -> float:
    """Mean over the classes that occur of the share that is recognised: each class counts alike, in [0, 1]."""
    right, there, _ = _counts(predictions, references)
    return float(np.mean(right[there > 0] / there[there > 0]))


def macro_f1(predictions, references) -> float:
    """Mean over the classes (those that occur or were predicted) of 2 * right / (there + called), in [0, 1]."""
    right, there, called = _counts(predictions, references)
    known = there + called > 0
    return float(np.mean(2 * right[known] / (there + called)[known]))


def calibration_bins(predictions, references, confidences, bins: int = 15) -> list[dict]:
    """Of each of `bins` equally wide ranges of confidence, (a, b] as in arXiv 1706.04599: its upper end, how many images it
    holds, and their mean confidence and accuracy in [0, 1], None where it holds none."""
    right, confidences = np.asarray(predictions) == np.asarray(references), np.asarray(confidences)
    bin_of = np.clip(np.ceil(confidences * bins).astype(int) - 1, 0, bins - 1)
    count = lambda weights=None: np.bincount(bin_of, weights=weights, minlength=bins).tolist()
    mean = lambda total, images: total / images if images else None
    return [
        {
            "up_to": (number + 1) / bins,
            "images": images,
            "confidence": mean(said, images),
            "accuracy": mean(true, images),
        }
        for number, (images, said, true) in enumerate(zip(count(), count(confidences), count(right), strict=True))
    ]


def calibration_error(predictions, references, confidences, bins: int = 15) -> float:
    """Expected calibration error in [0, 1]: |accuracy - mean confidence| of the images in each of `bins` equally wide ranges
    of confidence, weighted by their number ("On Calibration of Modern Neural Networks", arXiv 1706.04599, equation 3)."""
    filled = [row for row in calibration_bins(predictions, references, confidences, bins) if row["images"]]
    gaps = [row["images"] * abs(row["accuracy"] - row["confidence"]) for row in filled]
    return float(sum(gaps) / len(np.asarray(references)))


def confusion_matrix(predictions, references, num_labels: int) -> np.ndarray:
    """(L, L) counts: row the true class, column the predicted one."""
    pairs = np.asarray(references) * num_labels + np.asarray(predictions)
    return np.bincount(pairs, minlength=num_labels**2).reshape(num_labels, num_labels)


def per_class(confusion: np.ndarray, names: list[str]) -> list[dict]:
    """One row a class: its name, images, precision, recall and F1 in [0, 1], None where nothing was there to divide by."""
    rows = []
    for index, name in enumerate(names):
        right, there, called = (
            int(confusion[index, index]),
            int(confusion[index].sum()),
            int(confusion[:, index].sum()),
        )
        ratio = lambda part, whole: part / whole if whole else None
        rows.append(
            {
                "label": name, "images": there, "precision": ratio(right, called), "recall": ratio(right, there),
                "f1": ratio(2 * right, there + called),
            }
        )  # fmt: skip
    return rows


def wilson_interval(right: int, count: int) -> list[float]:
    """95% interval of a share, `right` of `count` (Wilson, Journal of the American Statistical Association 22, 1927): it holds
    for few images, and has a width at none and at all of them."""
    z = 1.959964  # 97.5% of a normal distribution lie below it
    middle, scale = (right + z**2 / 2) / count, 1 + z**2 / count
    half = z * math.sqrt(right * (count - right) / count + z**2 / 4) / count
    return [(middle - half) / scale if right else 0.0, (middle + half) / scale if right < count else 1.0]


def intervals(
    predictions, references, top5, confidences, resamples: int = 1000, seed: int = 0
) -> dict[str, list[float]]:
    """95% intervals, {metric: [low, high]} for the metrics that `scores.compute_metrics` gives of the same arrays.

    Accuracies are shares of images and have Wilson's (`wilson_interval`). The others have the percentile bootstrap (Efron,
    Annals of Statistics 7, 1979): the images are drawn anew, with replacement, `resamples` times, and the draws shifted by
    their bias, which is large for the calibration error. Where no draw can differ it is not used: at 0 and 1 the exact bound
    for that many images is given (Clopper and Pearson, Biometrika 26, 1934), and the calibration error of one image is unknown.
    """
    rng = np.random.default_rng(seed)
    predictions, references, top5, confidences = map(np.asarray, (predictions, references, top5, confidences))
    among = np.any(top5 == references[:, None], axis=1)

    def values(rows):
        predicted, truth = predictions[rows], references[rows]
        return {
            "balanced_accuracy": balanced_accuracy(predicted, truth),
            "macro_f1": macro_f1(predicted, truth),
            "calibration_error": calibration_error(predicted, truth, confidences[rows]),
        }

    count = len(references)
    draws = [values(rng.integers(count, size=count)) for _ in range(resamples)]
    result = {
        "accuracy": wilson_interval(int(np.sum(predictions == references)), count),
        "top5_accuracy": wilson_interval(int(np.sum(among)), count),
    }
    for name, value in values(np.arange(count)).items():
        drawn = np.array([draw[name] for draw in draws])
        result[name] = np.percentile(np.clip(drawn - drawn.mean() + value, 0, 1), [2.5, 97.5]).tolist()
        if name != "calibration_error" and value in (0.0, 1.0):
            widest = 0.025 ** (1 / count)
            result[name] = [0.0, 1 - widest] if value == 0 else [widest, 1.0]
        elif count == 1:
            result[name] = [0.0, 1.0]
    return result

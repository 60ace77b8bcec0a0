"""95% intervals of the scores."""

import numpy as np
import torch

from hf_vit.evaluation.multi_label import average_precisions, given_labels
from hf_vit.evaluation.scores import calibration_error, class_means, judge, top5_correct


RESAMPLES, MULTI_LABEL_RESAMPLES = 1000, 100


def intervals(
    logits: torch.Tensor, labels: torch.Tensor, thresholds: torch.Tensor | None = None
) -> dict[str, list[float]]:
    """{metric: [low, high]} of the metrics of `compute_metrics` but the loss; with thresholds, of two of them.

    Accuracies are shares of images and have Wilson's interval (Journal of the American Statistical Association 22, 1927), which holds
    for few images. The others have the percentile bootstrap (Efron, Annals of Statistics 7, 1979): the images are drawn anew, with
    replacement, `RESAMPLES` times, and the draws shifted by their bias, which is large for the calibration error. Where no draw can
    differ, at 0 and 1, the exact bound for that many images is given.
    """
    if thresholds is not None:
        return multi_label_intervals(logits, labels, thresholds)
    answers, confidences, correct = (values.numpy() for values in judge(logits, labels))
    count, num_labels, rng = len(labels), logits.shape[1], np.random.default_rng(0)
    pairs = labels.numpy() * num_labels + answers

    def values(rows):
        confusion = np.bincount(pairs[rows], minlength=num_labels**2).reshape(num_labels, num_labels)
        return {**class_means(confusion), "calibration_error": calibration_error(confidences[rows], correct[rows])}

    draws = [values(rng.integers(count, size=count)) for _ in range(RESAMPLES)]
    result = {"accuracy": share_interval(int(correct.sum()), count)}
    if num_labels > 5:
        result["top5_accuracy"] = share_interval(int(top5_correct(logits, labels).sum()), count)
    for name, value in values(np.arange(count)).items():
        drawn = np.array([draw[name] for draw in draws])
        result[name] = np.percentile(np.clip(drawn - drawn.mean() + value, 0, 1), [2.5, 97.5]).tolist()
        if name != "calibration_error" and value in (0.0, 1.0):
            result[name] = share_interval(int(value) * count, count, "exact")
        elif count == 1:
            result[name] = [0.0, 1.0]
    return result


def multi_label_intervals(logits, labels, thresholds) -> dict[str, list[float]]:
    """Of the mean average precision, 1.96 standard deviations of the bootstrap to each side; of the exact match, Wilson's."""
    probabilities, truth = logits.sigmoid().numpy(), labels.numpy().astype(int)
    count, rng = len(labels), np.random.default_rng(0)
    draws = [rng.multinomial(count, np.full(count, 1 / count)) for _ in range(MULTI_LABEL_RESAMPLES)]
    means = [average_precisions(probabilities, truth, draw.astype(float)) for draw in draws]
    half = 1.96 * float(np.std([np.nanmean(mean) for mean in means if not np.isnan(mean).all()]))
    middle = float(np.nanmean(average_precisions(probabilities, truth)))
    exact = int((given_labels(logits, thresholds).numpy() == truth).all(axis=1).sum())
    return {
        "mean_average_precision": [max(0.0, middle - half), min(1.0, middle + half)],
        "exact_match": share_interval(exact, count),
    }


def share_interval(successes: int, count: int, method: str = "wilson") -> list[float]:
    """Of `successes` among `count`, as scipy computes it."""
    from scipy.stats import binomtest

    return [float(bound) for bound in binomtest(successes, count).proportion_ci(method=method)]

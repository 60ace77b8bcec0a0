"""The pictures of a run's card: how it went, where it errs, what it predicts for single images and what it looks at."""

from pathlib import Path

import torch
from matplotlib.figure import Figure

from hf_vit import figures
from hf_vit.data.normalization import denormalize, normalize
from hf_vit.evaluation.scores import format_prediction
from hf_vit.model.attention_maps import GRADIENT_METHODS


SHOWN = 4  # images in the pictures of attention


def draw_run(folder: Path, log: list[dict], scores: dict, samples: dict, labels: list[str], spec, model):
    """Write `folder`/NAME.png for each picture of the run.

    Args:
        log: lines of metrics.jsonl.
        scores: what was saved with the best weights.
        samples: tensors of samples.safetensors.
        spec: the `ImageSpec` of the model's images.
        model: an `HFViTForImageClassification`.
    """
    thresholds = torch.tensor(scores["thresholds"]) if "thresholds" in scores else None  # of several labels an image
    drawn = {"curves": figures.curves(log), **report_figures(scores, labels)}
    if spec.channels in (1, 3):
        drawn["predictions"] = image_figure(samples, "", labels, spec, thresholds=thresholds)
        if "mistaken_images" in samples:
            sources = scores.get("mistakes", ())
            drawn["mistakes"] = image_figure(samples, "mistaken_", labels, spec, sources, thresholds)
        captions = [format_prediction(row, labels, thresholds) for row in samples["logits"][:SHOWN]]
        drawn |= model_figures(model, samples["images"][:SHOWN], spec, captions)
    save_figures(folder, drawn)


def draw_regression(folder: Path, log: list[dict], table, samples: dict, spec, model):
    """The pictures of a model that predicts a number: curves, predictions against labels, and what it looks at.

    Args:
        table: a pandas table of all evaluated images, with the columns `label` and `predicted`.
    """
    scatter = figures.scatter(table["label"], table["predicted"])
    drawn = {"curves": figures.curves(log, "squared error, standardised"), "scatter": scatter}
    if spec.channels in (1, 3):
        numbers = zip(samples["logits"][:SHOWN, 0].tolist(), samples["labels"].tolist(), strict=False)
        captions = [f"{predicted:.4g} is {label:.4g}" for predicted, label in numbers]
        drawn |= model_figures(model, samples["images"][:SHOWN], spec, captions)
    save_figures(folder, drawn)


def save_figures(folder: Path, drawn: dict[str, Figure]):
    """Write `folder`/NAME.png for each figure."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        figures.save(figure, folder / f"{name}.png")


def report_figures(report: dict, labels: list[str]) -> dict[str, Figure]:
    """The confusion matrix and calibration of what `classification_report` makes, or of several labels their average precisions."""
    if "thresholds" in report:
        return {"average_precision": figures.average_precision(report["per_class"])}
    confusion = figures.confusion(report["confusion_matrix"], labels)
    return {"confusion": confusion, "calibration": figures.calibration(report["calibration"])}


def image_figure(
    samples: dict, kind: str, labels: list[str], spec, sources=(), thresholds: torch.Tensor | None = None
) -> Figure:
    """Predictions for the images of samples.safetensors: those drawn at random, or the most confident mistakes ("mistaken_"); with
    `sources`, under the names of their files, which do not leave this machine."""
    images, truth, logits = (samples[f"{kind}{name}"] for name in ("images", "labels", "logits"))
    images = denormalize(normalize(images, spec), spec)
    return figures.predictions(images, truth, logits, labels, sources, thresholds)


def model_figures(model, images: torch.Tensor, spec, captions: list[str]) -> dict[str, Figure]:
    """`figures.attention` of a few images, by every method that gives one map, and `figures.distances`, by their names.

    A head that is all zero, as before training, has no gradient: its methods are then left out.

    Args:
        model: an `HFViTForImageClassification`.
        images: uint8 (n, C, H, W), C 1 or 3.
        captions: n texts.
    """
    pixel_values = torch.as_tensor(normalize(images, spec))
    shown, pixel_values = denormalize(pixel_values, spec), pixel_values.to(model.device)
    left_out = () if model.classifier.weight.any() else GRADIENT_METHODS
    titles = {method: title for method, title in figures.METHODS.items() if method not in left_out}
    maps = [model.attention_maps(pixel_values, -1, method).cpu() for method in titles]  # each (n, h, w)
    attention = figures.attention(shown, torch.stack(maps, dim=1), [*titles.values()], captions)
    return {"attention": attention, "distances": figures.distances(model.attention_distances(pixel_values))}

"""The pictures of a run's card: how it went, where it errs, what it predicts for single images and what it looks at."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure

from hf_vit import figures
from hf_vit.data.normalization import denormalize, normalize
from hf_vit.evaluation.prediction_table import join_labels
from hf_vit.model.attention_maps import GRADIENT_METHODS


def draw_run(
    folder: Path, log: list[dict], scores: dict, samples: dict, labels: list[str], spec, model, examples=None
):
    """Write `folder`/NAME.png for each picture of the run.

    Args:
        log: lines of metrics.jsonl.
        scores: what was saved with the best weights.
        samples: tensors of samples.safetensors.
        spec: the `ImageSpec` of the model's images.
        model: an `HFViTForImageClassification`.
        examples: gives augmented training images, such as `TrainBatches.examples`, or None.
    """
    folder.mkdir()
    for name, figure in run_pictures(log, scores, samples, labels, spec, model, examples):
        figures.save(figure, folder / f"{name}.png")


def draw_regression(folder: Path, log: list[dict], table: pd.DataFrame, samples: dict, spec, model):
    """The pictures of a model that predicts a number: curves, predictions against labels, and what it looks at.

    Args:
        table: columns `label` and `predicted` of all evaluated images.
    """
    folder.mkdir()
    figures.save(figures.curves(log, "squared error, standardised"), folder / "curves.png")
    figures.save(draw_scatter(table["label"], table["predicted"]), folder / "scatter.png")
    if spec.channels in (1, 3):
        pixel_values = normalize(samples["images"][:4], spec)
        numbers = zip(samples["labels"].tolist(), samples["logits"][:, 0].tolist(), strict=True)
        captions = [f"{predicted:.4g}\nis {label:.4g}" for label, predicted in numbers][:4]
        images, inputs = denormalize(pixel_values, spec), pixel_values.to(next(model.parameters()).device)
        for name, figure in model_figures(model, images, inputs, captions).items():
            figures.save(figure, folder / f"{name}.png")


def draw_scatter(labels, predicted) -> Figure:
    """A point an image: its label, and the number that was predicted; on the line, both are the same."""
    figure = Figure(figsize=(4.5, 4.5), layout="constrained")
    panel = figure.subplots()
    panel.scatter(labels, predicted, s=6, alpha=min(1.0, 30 / len(labels) ** 0.5), color=figures.BLUE, linewidth=0)
    ends = [min(*labels, *predicted), max(*labels, *predicted)]
    panel.plot(ends, ends, color=figures.GREY, linewidth=1)
    panel.set(xlabel="label", ylabel="predicted", aspect="equal")
    panel.tick_params(labelsize=7)
    return figure


def draw_mistakes(
    samples: dict, labels: list[str], spec, sources: list[str] = (), thresholds: torch.Tensor | None = None
) -> Figure:
    """The most confident wrong predictions, under the names of their files; without these it may leave this machine."""
    mistakes = {name: samples[f"mistaken_{name}"] for name in ("images", "labels", "logits")}
    mistakes["images"] = denormalize(normalize(mistakes["images"], spec), spec)
    return figures.predictions(**mistakes, names=labels, sources=sources, thresholds=thresholds)


def draw_average_precision(per_class: list[dict], most: int = 40) -> Figure:
    """Of several labels an image, the average precision of each as bars, the lowest first; of more than `most` the lowest.

    Args:
        per_class: as `hf_vit.evaluation.multi_label.multi_label_report` makes it.
    """
    rows = sorted((row for row in per_class if row["images"]), key=lambda row: row["average_precision"])[:most]
    figure = Figure(figsize=(figures.WIDTH, 1.0 + 0.2 * len(rows)), layout="constrained")
    panel = figure.subplots()
    panel.barh(range(len(rows)), [row["average_precision"] for row in rows], color=figures.BLUE)
    said = [f"{figures.shorten(row['label'])} ({row['images']:,})" for row in rows]
    panel.set_yticks(range(len(rows)), said, fontsize=7)
    panel.set(xlim=(0, 1), ylim=(len(rows) - 0.4, -0.6))
    panel.tick_params(axis="x", labelsize=7)
    panel.set_xlabel("average precision of each label (and its images)", fontsize=8)
    return figure


def run_pictures(log, scores, samples, labels, spec, model, examples) -> Iterator[tuple[str, Figure]]:
    """(name, picture) of all that can be drawn of a run."""
    yield "curves", figures.curves(log)
    thresholds = torch.tensor(scores["thresholds"]) if "thresholds" in scores else None  # of several labels an image
    if thresholds is None:
        yield "confusion", figures.confusion(scores["confusion_matrix"], labels)
        yield "calibration", figures.calibration(scores["calibration"])
    else:
        yield "average_precision", draw_average_precision(scores["per_class"])
    if spec.channels not in (1, 3):
        return
    drawn = {name: samples[name] for name in ("images", "labels", "logits")}
    pixel_values = normalize(drawn["images"], spec)
    drawn["images"] = denormalize(pixel_values, spec)
    yield "predictions", figures.predictions(**drawn, names=labels, thresholds=thresholds)
    if "mistaken_images" in samples:
        yield "mistakes", draw_mistakes(samples, labels, spec, scores.get("mistakes", ()), thresholds)
    if examples is not None:
        images, classes, versions = examples()
        name_of = lambda label: labels[label] if thresholds is None else join_labels(label, labels)
        titles = [[figures.shorten(name_of(label), 14) for label in classes]]
        titles += [figures.target_captions(targets, labels) for _, targets in versions]
        yield (
            "augmentations",
            figures.augmentations(images, [denormalize(inputs, spec) for inputs, _ in versions], titles),
        )
    captions = figures.prediction_captions(drawn["logits"][:4], labels, thresholds is not None)
    device = next(model.parameters()).device
    few = torch.as_tensor(pixel_values[:4]).to(device)
    yield from model_figures(model, drawn["images"][:4], few, captions).items()


def model_figures(model, images: torch.Tensor, pixel_values: torch.Tensor, captions: list[str]) -> dict[str, Figure]:
    """`figures.attention` of a few images, by every method that gives one map, and the `figures.inside` of a model, by their names.

    A head that is all zero, as before training, has no gradient: its methods are then left out.

    Args:
        model: an `HFViTForImageClassification`.
        images: uint8 (n, C, H, W), C 1 or 3.
        pixel_values: (n, C, H, W), the same as the model takes them.
        captions: n texts.
    """
    has_gradient = bool(model.classifier.weight.any())
    methods = [method for method in figures.METHODS if has_gradient or method not in GRADIENT_METHODS]
    maps = [model.attention_maps(pixel_values, -1, method).cpu() for method in methods]  # each (n, h, w)
    embeddings, config = model.vit.embeddings, model.config
    patches = embeddings.patch_embeddings
    with_table = config.position_embedding not in ("rotary", "none")
    return {
        "attention": figures.attention(
            images, torch.stack(maps, dim=1), [figures.METHODS[method] for method in methods], captions
        ),
        "inside": figures.inside(
            patches.projection.weight if config.patch_projection == "conv" else None,
            embeddings.positions_on_grid(config.grid_size)[1][0] if with_table else None,
            config.grid_size,
            model.attention_distances(pixel_values),
        ),
    }

"""The pictures of a run's card: how it went, where it errs, what it predicts for single images and what it looks at."""

from collections.abc import Iterator
from pathlib import Path

import torch
from matplotlib.figure import Figure

from hf_vit import figures
from hf_vit.data.normalization import denormalize, normalize
from hf_vit.system.fonts import legible_names


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


def draw_mistakes(samples: dict, labels: list[str], spec, sources: list[str] = ()) -> Figure:
    """The most confident wrong predictions, under the names of their files; without these it may leave this machine."""
    mistakes = {name: samples[f"mistaken_{name}"] for name in ("images", "labels", "logits")}
    mistakes["images"] = denormalize(normalize(mistakes["images"], spec), spec)
    return figures.predictions(**mistakes, names=labels, sources=sources)


def run_pictures(log, scores, samples, labels, spec, model, examples) -> Iterator[tuple[str, Figure]]:
    """(name, picture) of all that can be drawn of a run."""
    yield "curves", figures.curves(log)
    yield "confusion", figures.confusion(scores["confusion_matrix"], labels)
    yield "calibration", figures.calibration(scores["calibration"])
    if spec.channels not in (1, 3):
        return
    drawn = {name: samples[name] for name in ("images", "labels", "logits")}
    pixel_values = normalize(drawn["images"], spec)
    drawn["images"] = denormalize(pixel_values, spec)
    yield "predictions", figures.predictions(**drawn, names=labels)
    if "mistaken_images" in samples:
        yield "mistakes", draw_mistakes(samples, labels, spec, scores.get("mistakes", ()))
    if examples is not None:
        images, classes, versions = examples()
        legible = legible_names(labels)
        titles = [[figures.shorten(legible[label], 14) for label in classes]]
        titles += [figures.target_captions(targets, labels) for _, targets in versions]
        yield (
            "augmentations",
            figures.augmentations(images, [denormalize(inputs, spec) for inputs, _ in versions], titles),
        )
    captions = figures.prediction_captions(drawn["logits"][:4], labels)
    device = next(model.parameters()).device
    few = torch.as_tensor(pixel_values[:4]).to(device)
    yield from figures.model_figures(model, drawn["images"][:4], few, captions).items()

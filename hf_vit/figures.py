"""Values to pictures: how a run went, where the model errs, what it says of single images, and what it looks at.

Each function takes values and returns a `matplotlib.figure.Figure`; `save` writes it. Colours are those of Okabe and Ito,
which colour-blind readers tell apart ("Color Universal Design", 2008); pictures are readable at the 700 pixels of a model card.
"""

import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib import rc_context, rcParams
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.ticker import PercentFormatter

from hf_vit.evaluation.scores import format_prediction, judge
from hf_vit.evaluation.tables import label_texts
from hf_vit.system.text import printable


BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999"
WIDTH = 7.0  # inches
# Class names of any script: matplotlib falls back along this list.
FALLBACKS = (
    "Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "Hiragino Sans", "Noto Sans", "Noto Sans Arabic",
    "Noto Sans Devanagari",
)  # fmt: skip
INSTALLED = {font.name for font in fontManager.ttflist}
STYLE = {
    "font.family": [*rcParams["font.family"], *(name for name in FALLBACKS if name in INSTALLED)],
    "text.parse_math": False,  # a $ in a class name is one
    "figure.constrained_layout.use": True,
    "font.size": 7,
    "axes.titlesize": 7.5,
    "axes.titley": 1.0,  # to look for the place of a title takes as long as to draw all
    "axes.labelsize": 7,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "image.interpolation": "nearest",
}
styled = rc_context(STYLE)
PERCENT = PercentFormatter(1.0, decimals=0)
SMOOTHED, DOTTED = 100, 20  # points of a curve: above, its running mean is drawn; up to which, each has a dot
NAMED, COUNTED, MOST_BARS = 40, 12, 30  # classes up to which a confusion matrix is drawn, and has counts in its cells
FLAT = 0.01  # a map whose numbers differ by less, relative to the largest, says nothing
BESIDE = 7  # pictures in a line
METHODS = {  # those of `attention_maps` with one map an image
    "mean": "attention, last layer",
    "rollout": "rollout",
    "gradient_rollout": "rollout, predicted class",
    "grad_cam": "Grad-CAM, predicted class",
}
CURVES = (  # keys of metrics.jsonl; those of an evaluation begin with eval_
    "loss", "accuracy", "knn_accuracy", "mean_average_precision", "learning_rate", "gradient_norm", "images_per_second",
)  # fmt: skip
IMAGES = {"training images, augmented": ("", BLUE), "evaluated images": ("eval_", ORANGE)}


@styled  # some of the texts are made while it is drawn
def save(figure: Figure, file: Path):
    """Write a figure as PNG, the same bytes for the same values. A character that no font has is a box."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(file, dpi=150, metadata={"Software": None})


def shorten(text: str, longest: int = 18) -> str:
    """A text that fits beside a picture, cut in its middle: class names often differ at their ends."""
    text, end = printable(text), longest // 3
    return text if len(text) <= longest else f"{text[: longest - end - 1]}…{text[-end:]}"


@styled
def curves(lines: list[dict], unit: str = "nats") -> Figure:
    """Loss in `unit`, accuracy, learning rate, gradient norm and speed over the steps of a run, a panel for each that was logged.

    Args:
        lines: of metrics.jsonl: `step` and any of `loss`, `accuracy`, `learning_rate`, `gradient_norm`, `images_per_second`, and
            in the lines of an evaluation `eval_loss`, `eval_accuracy`. Accuracies in [0, 1].
    """
    table = pd.DataFrame(lines).set_index("step").replace([np.inf, -np.inf], np.nan).dropna(axis=1, how="all")
    shown = [name for name in CURVES if {name, f"eval_{name}"} & {*table}]
    rows, handles = -(-len(shown) // 2), {}
    figure = Figure(figsize=(WIDTH, 0.5 + 2 * rows))
    panels = figure.subplots(max(rows, 1), 2, squeeze=False).ravel()
    for panel in panels[len(shown) :]:
        panel.axis("off")
    for panel, name in zip(panels, shown, strict=False):
        for images, (prefix, colour) in IMAGES.items():
            if prefix + name not in table:
                continue
            values = table[prefix + name].dropna()
            dot = "o" if len(values) <= DOTTED else ""
            if len(values) > SMOOTHED:  # the values themselves behind their running mean
                panel.plot(values, color=colour, linewidth=0.5, alpha=0.25)
                values = values.rolling(len(values) // 50, center=True).mean()
            (handles[images],) = panel.plot(values, color=colour, marker=dot, markersize=4, linewidth=1.3)
        panel.set(title=name.replace("_", " "), xlabel="optimizer step", ylabel=unit if name == "loss" else None)
        panel.grid()
        panel.set_xlim(left=0)
        panel.locator_params(axis="x", nbins=5, integer=True, min_n_ticks=1)
        if "accuracy" in name or "precision" in name:
            panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=2)
    return figure


@styled
def confusion(matrix: np.ndarray, names: list[str]) -> Figure:
    """Rows are true classes, columns predicted ones, shades the share of a row. Up to 12 classes have the counts in their cells;
    above 40 classes there is no room for names, and the most frequent mistakes are drawn instead.

    Args:
        matrix: (L, L) counts.
        names: L class names.
    """
    counts, classes, texts = np.asarray(matrix, dtype=float), len(names), [shorten(name) for name in names]
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))  # (L, L)
    if classes > NAMED:
        wrong = shares * (1 - np.eye(classes))
        worst = [divmod(place, classes) for place in np.argsort(-wrong, axis=None, kind="stable")[:MOST_BARS]]
        said = {f"{texts[row]} as {texts[column]}": wrong[row, column] for row, column in worst if wrong[row, column]}
        return bars(said or {"none": 0.0}, "most frequent mistakes: share of the true class")
    figure = Figure(figsize=(WIDTH, min(6.0, 2.4 + 0.36 * classes)))
    panel, size = figure.subplots(), float(np.clip(240 / classes, 5, 8))
    # Cells need not be square: with equal sides, the layout leaves no room for the labels.
    image = panel.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    panel.set(xlabel="predicted class", ylabel="true class")
    panel.set_xticks(range(classes), texts, rotation=90 if classes > 5 else 0, fontsize=size)
    panel.set_yticks(range(classes), texts, fontsize=size)
    for row, column in np.argwhere(counts > 0) if classes <= COUNTED else ():
        colour = "white" if shares[row, column] > 0.55 else "black"
        panel.text(column, row, f"{counts[row, column]:.0f}", ha="center", va="center", fontsize=size, color=colour)
    figure.colorbar(image, shrink=0.7, format=PERCENT, label="share of the true class")
    return figure


@styled
def bars(values: dict[str, float], label: str) -> Figure:
    """Named shares in [0, 1], from above to below."""
    figure = Figure(figsize=(WIDTH, 1.0 + 0.18 * max(1, len(values))))
    panel = figure.subplots()
    panel.barh(list(values), list(values.values()), color=BLUE)
    panel.set(xlabel=label, ylim=(len(values) - 0.4, -0.6), xlim=(0, 1))
    panel.xaxis.set_major_formatter(PERCENT)
    return figure


def average_precision(per_class: list[dict]) -> Figure:
    """Of several labels an image, the average precision of each, the lowest first.

    Args:
        per_class: as `hf_vit.evaluation.multi_label.multi_label_report` makes it.
    """
    rows = sorted((row for row in per_class if row["images"]), key=lambda row: row["average_precision"])[:MOST_BARS]
    values = {f"{shorten(row['label'])} ({row['images']:,})": row["average_precision"] for row in rows}
    return bars(values, "average precision of each label (and its images)")


@styled
def scatter(labels: pd.Series, predicted: pd.Series) -> Figure:
    """A point an image: its label, and the number that was predicted; on the line, both are the same."""
    figure = Figure(figsize=(4.5, 4.5))
    panel = figure.subplots()
    panel.scatter(labels, predicted, s=6, alpha=min(1.0, 30 / len(labels) ** 0.5), color=BLUE, linewidth=0)
    panel.axline((labels.mean(), labels.mean()), slope=1, color=GREY, linewidth=1)
    panel.set(xlabel="label", ylabel="predicted", aspect="equal")
    return figure


@styled
def calibration(bins: list[dict]) -> Figure:
    """How often the model is right when it is so sure, and how often it is.

    Args:
        bins: as `hf_vit.evaluation.scores.calibration_bins` makes them.
    """
    table = pd.DataFrame(bins).query("images > 0")
    figure = Figure(figsize=(WIDTH * 0.6, 4.6))
    panel, counts = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    width = 1 / len(bins)
    middles, claimed = table["up_to"] - width / 2, table["confidence"]
    panel.bar(middles, table["accuracy"], width * 0.92, color=BLUE, label="share that is right")
    panel.plot(claimed, claimed, color=ORANGE, marker="o", markersize=3.5, label="what the model claims")
    counts.bar(middles, table["images"] / table["images"].sum(), width * 0.92, color=GREY)
    panel.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    counts.set(ylabel="images", xlabel="confidence: probability of the predicted class")
    figure.legend(loc="outside upper center", ncols=2)
    for axes in (panel, counts):
        axes.grid()
        axes.xaxis.set_major_formatter(PERCENT)
        axes.yaxis.set_major_formatter(PERCENT)
    return figure


@styled
def grid(pictures: list[np.ndarray], captions: list[str], columns: int, colours: list[str] | None = None) -> Figure:
    """Pictures (H, W, 3), row by row, each under its caption."""
    rows, lines = -(-len(pictures) // columns), 1 + max(caption.count("\n") for caption in captions)
    ratio = max(picture.shape[0] / picture.shape[1] for picture in pictures)
    figure = Figure(figsize=(WIDTH, rows * (ratio * WIDTH / columns + 0.12 * lines + 0.08) + 0.1))
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel in panels:
        panel.axis("off")
    colours = colours or ["black"] * len(pictures)
    for panel, picture, caption, colour in zip(panels, pictures, captions, colours, strict=False):
        panel.imshow(picture)
        panel.set_anchor("S")  # what is left of its height is the caption's
        panel.set_title(caption, color=colour)
    return figure


def predictions(
    images: torch.Tensor, labels: torch.Tensor, logits: torch.Tensor, names: list[str], sources=(), thresholds=None
) -> Figure:
    """What the model predicts for single images, with its probability; red where it is wrong, with the true class.

    Args:
        images: uint8 (n, C, H, W), C 1 or 3.
        labels, logits: (n,) true classes, and (n, L); labels (n, L) where an image has several.
        names: L class names.
        sources: n names of the images, such as "cat/1.jpg".
        thresholds: (L,) where an image has several labels, else None.
    """
    captions, correct = [], judge(logits, labels, thresholds)[2].tolist()
    for number, truth in enumerate(label_texts(labels, names)):
        said = [format_prediction(logits[number], names, thresholds)]
        said += [] if correct[number] else [f"is {truth or 'none'}"]
        captions.append("\n".join(shorten(line, 26) for line in [*said, *sources[number : number + 1]]))
    return grid([as_picture(image) for image in images], captions, 4, [GREEN if right else RED for right in correct])


def attention(images: torch.Tensor, maps: torch.Tensor, columns: list[str], rows: list[str]) -> Figure:
    """Images, and beside each its maps, each in colours of its own range; a flat one says so.

    Args:
        images: uint8 (n, C, H, W), C 1 or 3.
        maps: (n, k, h, w) as `attention_maps` gives them.
        columns: k titles.
        rows: n captions of the images.
    """
    count = 1 + len(columns)
    lines = -(-count // BESIDE)  # an image
    beside, pictures, captions = -(-count // lines), [], []
    for image, of_image, caption in zip(images, maps, rows, strict=True):
        picture, free = as_picture(image), lines * beside - count  # places at the end of the last line
        pictures += [picture, *(overlay(image, heat) for heat in of_image), *[np.full_like(picture, 255)] * free]
        titles = [title + "\nflat" * is_flat(heat) for title, heat in zip(columns, of_image, strict=True)]
        captions += [shorten(caption, 105 // beside), *titles, *[""] * free]
    return grid(pictures, captions, beside)


def as_picture(image: torch.Tensor) -> np.ndarray:
    """uint8 (C, H, W), C 1 or 3 -> (H, W, 3)."""
    return image.expand(3, -1, -1).permute(1, 2, 0).numpy()


def overlay(image: torch.Tensor, heat: torch.Tensor, smallest: int = 224) -> np.ndarray:
    """The image in grey, the more orange the larger the map's number: none at its smallest, most at its largest; none at all
    where the map is flat.

    Args:
        image: uint8 (C, H, W), C 1 or 3.
        heat: (h, w), a number for each patch, resampled smoothly (bicubic).
        smallest: pixels that the shorter side is enlarged to, by whole factors.

    Returns:
        uint8 (H', W', 3).
    """
    heat = torch.zeros_like(heat) if is_flat(heat) else (heat - heat.min()) / (heat.max() - heat.min())
    factor = max(1, -(-smallest // min(image.shape[1:])))
    size = (image.shape[1] * factor, image.shape[2] * factor)
    enlarge = partial(torch.nn.functional.interpolate, size=size)
    grey = enlarge(image.float().mean(dim=0)[None, None], mode="nearest-exact")[0, 0].unsqueeze(2)  # (H', W', 1)
    share = 0.85 * enlarge(heat[None, None].float(), mode="bicubic")[0, 0].clamp(0, 1).unsqueeze(2)  # (H', W', 1)
    orange = torch.tensor(to_rgb(ORANGE)) * 255
    return ((1 - share) * grey + share * orange).round().byte().numpy()  # (H', W', 3)


def is_flat(heat: torch.Tensor) -> bool:
    """Whether all patches count alike, but for `FLAT` of the largest number: what is left would be drawn as noise."""
    return bool(heat.max() - heat.min() <= FLAT * heat.abs().max())


@styled
def distances(values: torch.Tensor) -> Figure:
    """How far each head looks, by layer: figure 7, right, of the ViT paper (arXiv 2010.11929).

    Args:
        values: (layers, A) in pixels, as `attention_distances` gives them.
    """
    layers, heads = values.shape
    figure = Figure(figsize=(WIDTH, 2.9))
    panel = figure.subplots()
    panel.plot(range(1, layers + 1), values.cpu(), "o", color=BLUE, alpha=0.7, markersize=3.5, markeredgewidth=0)
    panel.set(xlabel="layer", ylabel="mean attention distance (pixels)", xlim=(0.5, layers + 0.5), ylim=(0, None))
    panel.set_title(f"how far heads look, {heads} in each layer")
    panel.locator_params(axis="x", integer=True, min_n_ticks=1)
    panel.grid()
    return figure

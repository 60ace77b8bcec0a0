"""Values to pictures: how a run went, what is taken for what, what the model says of single images.

Each function takes values and returns a `matplotlib.figure.Figure`; `save` writes it. Colours are those of Okabe and Ito,
which colour-blind readers tell apart ("Color Universal Design", 2008); pictures are readable at the 700 pixels of a model card.
"""

from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter


BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999"
WIDTH = 7.0  # inches
SMOOTHED = 100  # points of a curve, above which its running mean is drawn
NAMED, COUNTED = 40, 12  # classes up to which a confusion matrix names them all, and counts in its cells
LONGEST = 18  # characters of a class name


def save(figure: Figure, file: Path):
    """Write a figure as PNG, the same bytes for the same values."""
    figure.savefig(file, dpi=150, metadata={"Software": None})


def shorten(name: str) -> str:
    """A class name that fits beside a picture; as text, whatever signs of TeX are in it."""
    name = name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
    return name.replace("$", r"\$")


def curves(lines: list[dict]) -> Figure:
    """Loss, accuracy, learning rate and gradient norm over the steps of a run.

    Args:
        lines: of metrics.jsonl: `step` and any of `loss`, `accuracy`, `learning_rate`, `gradient_norm`, and in the lines of a
            scoring `eval_loss`, `eval_accuracy`. Accuracies in [0, 1].
    """
    figure = Figure(figsize=(WIDTH, 4.8), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True)
    shown = (
        ("loss", "loss (nats)", "loss", "eval_loss"),
        ("accuracy", "accuracy", "accuracy", "eval_accuracy"),
        ("learning rate", "learning rate", "learning_rate", None),
        ("gradient norm", "norm before clipping", "gradient_norm", None),
    )
    for panel, (title, unit, training, scoring) in zip(panels.flat, shown, strict=True):
        for name, colour, marker, label in (
            (training, BLUE, "", "training images, augmented"),
            (scoring, ORANGE, "o", "scored images"),
        ):
            points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            if not points:
                continue
            steps, values = np.array(points).T
            if len(values) > SMOOTHED and name != "learning_rate":  # the values themselves behind their running mean
                panel.plot(steps, values, color=colour, linewidth=0.5, alpha=0.25)
                width = len(values) // 50
                values = np.convolve(values, np.full(width, 1 / width), mode="valid")
                steps = steps[(width - 1) // 2 :][: len(values)]
            dot = marker or ("." if len(points) == 1 else "")
            panel.plot(steps, values, color=colour, marker=dot, markersize=4, linewidth=1.3, label=label)
        panel.set_title(title, fontsize=9)
        panel.set_ylabel(unit, fontsize=8)
        panel.tick_params(labelsize=7)
        panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        panel.grid(color=GREY, alpha=0.25, linewidth=0.5)
    if panels[0, 0].lines:
        panels[0, 0].legend(fontsize=7, frameon=False)
    panels[0, 1].yaxis.set_major_formatter(PercentFormatter(1.0))
    for panel in panels[1]:
        panel.set_xlabel("optimizer step", fontsize=8)
    return figure


def confusion(matrix: np.ndarray, names: list[str]) -> Figure:
    """What is taken for what: rows are true classes, columns answers, shades the share of a row.

    Up to 12 classes have the counts in their cells; above 40 classes there is no room for names, and the most frequent
    mistakes are listed instead.

    Args:
        matrix: (L, L) counts.
        names: L class names.
    """
    counts = np.asarray(matrix, dtype=float)
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))  # (L, L)
    classes = len(names)
    named, listed = classes <= NAMED, classes > NAMED
    side = WIDTH if not listed else WIDTH / 2 + 0.4
    figure = Figure(figsize=(WIDTH, side * 0.86), layout="constrained")
    panels = figure.subplots(1, 2, width_ratios=(5, 4)) if listed else [figure.subplots()]
    panel = panels[0]
    image = panel.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    panel.set_xlabel("answer", fontsize=8)
    panel.set_ylabel("true class", fontsize=8)
    size = float(np.clip(140 / max(classes, 1), 4.5, 8))
    if named:
        texts = [shorten(name) for name in names]
        panel.set_xticks(range(classes), texts, rotation=90 if classes > 8 else 45, fontsize=size, ha="center" if classes > 8 else "right", rotation_mode="default" if classes > 8 else "anchor")  # fmt: skip
        panel.set_yticks(range(classes), texts, fontsize=size)
    else:
        panel.tick_params(labelsize=7)
    if classes <= COUNTED:
        for row in range(classes):
            for column in range(classes):
                if counts[row, column] > 0:
                    colour = "white" if shares[row, column] > 0.55 else "black"
                    panel.text(
                        column,
                        row,
                        f"{counts[row, column]:.0f}",
                        ha="center",
                        va="center",
                        fontsize=size,
                        color=colour,
                    )
    bar = figure.colorbar(image, ax=panel, shrink=0.7, format=PercentFormatter(1.0))
    bar.set_label("share of the true class", fontsize=7)
    bar.ax.tick_params(labelsize=7)
    if listed:
        wrong = shares - np.diag(shares.diagonal())
        worst = [divmod(int(place), classes) for place in np.argsort(-wrong, axis=None, kind="stable")[:15]]
        worst = [(row, column) for row, column in worst if wrong[row, column] > 0]
        panels[1].barh(range(len(worst)), [wrong[place] for place in worst], color=RED)
        panels[1].set_yticks(
            range(len(worst)),
            [f"{shorten(names[row])} as {shorten(names[column])}" for row, column in worst],
            fontsize=5.5,
        )
        panels[1].invert_yaxis()
        panels[1].xaxis.set_major_locator(MaxNLocator(4))
        panels[1].xaxis.set_major_formatter(PercentFormatter(1.0))
        panels[1].tick_params(axis="x", labelsize=7)
        panels[1].set_xlabel("share of the true class", fontsize=7)
        panels[1].set_title("most frequent mistakes", fontsize=8)
    return figure


def predictions(images: torch.Tensor, labels: torch.Tensor, logits: torch.Tensor, names: list[str]) -> Figure:
    """What the model says of single images, with the truth where it errs.

    Args:
        images: uint8 (n, C, H, W), C 1 or 3.
        labels: (n,) true classes.
        logits: (n, L).
        names: L class names.
    """
    columns = 4
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(WIDTH, rows * (WIDTH / columns + 0.15)), layout="constrained")
    for panel in figure.subplots(rows, columns, squeeze=False).flat:
        panel.axis("off")
    chances, answers = logits.softmax(dim=1).max(dim=1)
    for panel, image, truth, answer, chance in zip(
        figure.axes, images, labels.tolist(), answers.tolist(), chances.tolist(), strict=False
    ):
        panel.imshow(image.expand(3, -1, -1).permute(1, 2, 0).numpy(), interpolation="nearest")
        said = f"{shorten(names[answer])} {chance:.0%}"
        right = truth == answer
        panel.set_title(
            said if right else f"{said}\nis {shorten(names[truth])}", fontsize=8, color=GREEN if right else RED
        )
    return figure

"""Values to pictures: how a run went, the confusion matrix, what the model says of single images, and what it looks at.

Each function takes values and returns a `matplotlib.figure.Figure`; `save` writes it. Colours are those of Okabe and Ito,
which colour-blind readers tell apart ("Color Universal Design", 2008); pictures are readable at the 700 pixels of a model card.
"""

import unicodedata
import warnings
from pathlib import Path

import numpy as np
import torch
from matplotlib import rcParams
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from hf_vit.evaluation.prediction_table import answers_and_truths
from hf_vit.system.escapes import printable


# Class names of any script: matplotlib falls back along this list.
INSTALLED = {font.name for font in fontManager.ttflist}
FALLBACKS = (
    "Noto Sans CJK JP",
    "Noto Sans CJK SC",
    "WenQuanYi Zen Hei",
    "Hiragino Sans",
    "Noto Sans",
    "Noto Sans Arabic",
    "Noto Sans Devanagari",
)
rcParams["font.family"] = [*rcParams["font.family"], *(name for name in FALLBACKS if name in INSTALLED)]

BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999"
WIDTH = 7.0  # inches
SMOOTHED, DOTTED = 100, 20  # points of a curve: above, its running mean is drawn; up to which, each has a dot
NAMED, COUNTED = 40, 12  # classes up to which a confusion matrix names them all, and counts in its cells
LONGEST = 18  # characters of a class name; those of Chinese, Japanese and Korean count twice
FLAT = 0.01  # a map whose numbers differ by less, relative to the largest, says nothing
BESIDE = 6  # maps beside an image; more go into further lines
SHARES = ("accuracy", "k-NN accuracy", "mean average precision")  # panels of the curves whose values lie in [0, 1]
METHODS = {  # those of `attention_maps` with one map an image
    "mean": "attention, last layer",
    "rollout": "rollout",
    "gradient_rollout": "rollout, predicted class",
    "grad_cam": "Grad-CAM, predicted class",
}


def save(figure: Figure, file: Path):
    """Write a figure as PNG, the same bytes for the same values. A character that no font has is a box."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(file, dpi=150, metadata={"Software": None})


def shorten(name: str, longest: int = LONGEST) -> str:
    """A class name that fits beside a picture, cut in its middle: names often differ at their ends. As text, whatever signs of
    TeX are in it."""
    name = printable(name)
    if _width(name) > longest:
        end = len(name) - next(cut for cut in range(len(name)) if _width(name[cut:]) <= longest // 3)
        start = next(cut for cut in range(len(name), -1, -1) if _width(name[:cut]) < longest - _width(name[-end:]))
        name = f"{name[:start]}…{name[-end:]}"
    return name.replace("$", r"\$")


def _width(text: str) -> int:
    """Characters that a text is wide."""
    return sum(1 + (unicodedata.east_asian_width(sign) in "WF") for sign in text)


def _picture_panels(figure: Figure, rows: int, columns: int) -> np.ndarray:
    """Panels (rows, columns) without axes. The title of each must say its height (y=1): to find it takes as long as to draw all."""
    panels = figure.subplots(rows, columns, squeeze=False, subplot_kw={"xticks": (), "yticks": ()})
    for panel in panels.flat:
        panel.axis("off")
    return panels


def curves(lines: list[dict], unit: str = "nats") -> Figure:
    """Loss in `unit`, accuracy, learning rate, gradient norm and speed over the steps of a run, a panel for each that was logged.

    Args:
        lines: of metrics.jsonl: `step` and any of `loss`, `accuracy`, `learning_rate`, `gradient_norm`, `images_per_second`, and
            in the lines of a scoring `eval_loss`, `eval_accuracy`. Accuracies in [0, 1].
    """
    known = (
        ("loss", f"loss ({unit})", "loss", "eval_loss"),
        ("accuracy", "accuracy", "accuracy", "eval_accuracy"),
        ("k-NN accuracy", "accuracy", None, "eval_knn_accuracy"),
        ("mean average precision", "mAP", None, "eval_mean_average_precision"),
        ("learning rate", "learning rate", "learning_rate", None),
        ("gradient norm", "norm before clipping", "gradient_norm", None),
        ("speed", "images / s", "images_per_second", None),
    )
    drawable = lambda value: value is not None and np.isfinite(value)
    points = {
        key: [(line["step"], line[key]) for line in lines if drawable(line.get(key))]
        for *_, training, scoring in known
        for key in (training, scoring)
    }
    shown = [panel for panel in known if points[panel[2]] or points[panel[3]]]
    rows = -(-(len(shown) + 1) // 2)  # one place for the legend
    figure = Figure(figsize=(WIDTH, 0.4 + 2 * rows), layout="constrained")
    *panels, place = figure.subplots(rows, 2, squeeze=False).flat
    handles = {}
    for panel in (*panels[len(shown) :], place):
        panel.axis("off")
    for panel, (title, unit, training, scoring) in zip(panels, shown, strict=False):
        for name, colour, label in (
            (training, BLUE, "training images, augmented"),
            (scoring, ORANGE, "scored images"),
        ):
            if not points[name]:
                continue
            steps, values = np.array(points[name]).T
            if len(values) > SMOOTHED and name != "learning_rate":  # the values themselves behind their running mean
                panel.plot(steps, values, color=colour, linewidth=0.5, alpha=0.25)
                width = len(values) // 50
                values = np.convolve(values, np.full(width, 1 / width), mode="valid")
                steps = steps[(width - 1) // 2 :][: len(values)]
            dot = "o" if len(values) <= DOTTED else ""
            (handles[label],) = panel.plot(steps, values, color=colour, marker=dot, markersize=4, linewidth=1.3, label=label)  # fmt: skip
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("optimizer step", fontsize=8)
        panel.set_ylabel(unit, fontsize=8)
        panel.tick_params(labelsize=7)
        panel.grid(color=GREY, alpha=0.25, linewidth=0.5)
        _set_limits(panel, title)
        panel.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        plain = FuncFormatter(lambda value, _: f"{value:.6g}")  # no offset beside the axis
        panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0) if title in SHARES else plain)
    place.legend(handles.values(), handles, fontsize=8, frameon=False, loc="center")
    return figure


def _set_limits(panel, title: str):
    """Steps from 0 on, and a range of values of at least 1% of the largest, of accuracies 5%: what hardly changes looks flat."""
    panel.set_xlim(0, 1.04 * panel.dataLim.x1)
    low, high = panel.dataLim.y0, panel.dataLim.y1
    middle, half = (low + high) / 2, max(high - low, 0.01 * max(abs(low), abs(high)), 0.05 * (title in SHARES)) / 2
    limits = middle - 1.1 * (half or 0.5), middle + 1.1 * (half or 0.5)
    if title in ("learning rate", "speed"):
        limits = 0, 1.1 * high or 1.0
    elif title in SHARES:
        limits = max(limits[0], -0.008), min(limits[1], 1.008)
    panel.set_ylim(limits)


def confusion(matrix: np.ndarray, names: list[str]) -> Figure:
    """What is taken for what: rows are true classes, columns predicted ones, shades the share of a row.

    Up to 12 classes have the counts in their cells; above 40 classes there is no room for names, and the most frequent
    mistakes are listed instead.

    Args:
        matrix: (L, L) counts.
        names: L class names.
    """
    counts = np.asarray(matrix, dtype=float)
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))  # (L, L)
    classes = len(names)
    listed = classes > NAMED
    height = 3.6 if listed else min(6.0, 2.4 + 0.36 * classes)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    panels = figure.subplots(1, 2, width_ratios=(4, 3)) if listed else [figure.subplots()]
    panel = panels[0]
    # Cells need not be square: with equal sides, the layout leaves no room for the labels.
    image = panel.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    panel.set_xlabel("predicted class", fontsize=8)
    panel.set_ylabel("true class", fontsize=8)
    size = float(np.clip(240 / max(classes, 1), 5, 8))
    if listed:
        panel.tick_params(labelsize=7)
    else:
        texts, upright = [shorten(name) for name in names], classes > 5
        panel.set_xticks(range(classes), texts, rotation=90 if upright else 0, fontsize=size)
        panel.set_yticks(range(classes), texts, fontsize=size)
    if classes <= COUNTED:
        for row, column in np.argwhere(counts > 0):
            colour = "white" if shares[row, column] > 0.55 else "black"
            panel.text(
                column, row, f"{counts[row, column]:.0f}", ha="center", va="center", fontsize=size, color=colour
            )
    bar = figure.colorbar(image, ax=panel, shrink=0.7, format=PercentFormatter(1.0))
    bar.set_label("share of the true class", fontsize=7)
    bar.ax.tick_params(labelsize=7)
    if listed:
        _list_mistakes(panels[1], shares, names)
    return figure


def _list_mistakes(panel, shares: np.ndarray, names: list[str], most: int = 15):
    """The most frequent mistakes as bars; shares (L, L), a row a true class."""
    wrong, classes = shares - np.diag(shares.diagonal()), len(names)
    worst = [divmod(int(place), classes) for place in np.argsort(-wrong, axis=None, kind="stable")[:most]]
    worst = [(row, column) for row, column in worst if wrong[row, column] > 0]
    panel.barh(range(len(worst)), [wrong[place] for place in worst], color=RED)
    said = [f"{shorten(names[row], 16)} as {shorten(names[column], 16)}" for row, column in worst]
    panel.set_yticks(range(len(worst)), said, fontsize=5.5)
    panel.set_ylim(most - 0.4, -0.6)  # bars of one width, however few
    panel.xaxis.set_major_locator(MaxNLocator(3))
    panel.xaxis.set_major_formatter(PercentFormatter(1.0))
    panel.tick_params(axis="x", labelsize=7)
    panel.set_xlabel("share of the true class", fontsize=7)
    panel.set_title("most frequent mistakes" if worst else "no mistakes", fontsize=8)
    panel.axis("on" if worst else "off")


def predictions(
    images: torch.Tensor, labels: torch.Tensor, logits: torch.Tensor, names: list[str], sources=(), thresholds=None
) -> Figure:
    """What the model predicts for single images, with the truth where it errs.

    Args:
        images: uint8 (n, C, H, W), C 1 or 3.
        labels, logits: (n,) true classes, and (n, L); labels (n, L) where an image has several.
        names: L class names.
        sources: n names of the images, such as "cat/1.jpg".
        thresholds: (L,) where an image has several labels, else None.
    """
    columns = 4
    rows = -(-len(images) // columns)
    figure = Figure(
        figsize=(WIDTH, rows * (WIDTH / columns + 0.32 + 0.18 * bool(sources)) + 0.2), layout="constrained"
    )
    said = "class and its probability; red where it is wrong, with the true class" if thresholds is None else "labels"
    figure.supxlabel(f"predicted {said}", fontsize=7)
    _picture_panels(figure, rows, columns)
    if thresholds is None:
        chances, predicted = logits.softmax(dim=1).max(dim=1)
        chosen = zip(predicted.tolist(), chances.tolist(), strict=True)
        answers = [f"{shorten(names[index])} {chance:.0%}" for index, chance in chosen]
        truths, correct = [shorten(names[index]) for index in labels.tolist()], (predicted == labels).tolist()
    else:
        answers, truths, correct = answers_and_truths(labels, logits, names, thresholds)
        answers, truths = ([shorten(text, 27) for text in texts] for texts in (answers, truths))
    shown = zip(figure.axes, images, answers, truths, correct, strict=False)
    for number, (panel, image, answer, truth, right) in enumerate(shown):
        panel.imshow(as_picture(image), interpolation="nearest")
        panel.set_anchor("S")  # what is left of its height is the caption's
        said = answer if right else f"{answer}\nis {truth}"
        panel.set_title(said, fontsize=7.5, color=GREEN if right else RED, y=1)
        if sources:
            panel.text(0.5, -0.04, shorten(sources[number], 20), fontsize=6, ha="center", va="top", transform=panel.transAxes)  # fmt: skip
    return figure


def calibration(bins: list[dict]) -> Figure:
    """How often the model is right when it is so sure, and how often it is.

    Args:
        bins: as `hf_vit.evaluation.scores.calibration_bins` makes them.
    """
    figure = Figure(figsize=(WIDTH * 0.6, 4.6), layout="constrained")
    panel, counts = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    width = 1 / len(bins)
    filled = [row for row in bins if row["images"]]
    panel.bar(
        [row["up_to"] - width / 2 for row in filled], [row["accuracy"] for row in filled],
        width * 0.92, color=BLUE, label="share that is right",
    )  # fmt: skip
    panel.plot(
        [row["confidence"] for row in filled], [row["confidence"] for row in filled],
        color=ORANGE, marker="o", markersize=3.5, linewidth=1.2, label="what the model claims",
    )  # fmt: skip
    total = sum(row["images"] for row in bins)
    counts.bar(
        [row["up_to"] - width / 2 for row in bins], [row["images"] / total for row in bins], width * 0.92, color=GREY
    )
    panel.set(xlim=(0, 1), ylim=(0, 1))
    panel.set_ylabel("accuracy", fontsize=8)
    counts.set_ylabel("images", fontsize=8)
    counts.set_xlabel("confidence: probability of the predicted class", fontsize=8)
    figure.legend(fontsize=7, frameon=False, loc="outside upper center", ncols=2)
    for axes in (panel, counts):
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.tick_params(labelsize=7)
        axes.grid(color=GREY, alpha=0.25, linewidth=0.5)
        axes.set_axisbelow(True)
    return figure


def as_picture(image: torch.Tensor) -> np.ndarray:
    """uint8 (C, H, W), C 1 or 3 -> (H, W, 3)."""
    return image.expand(3, -1, -1).permute(1, 2, 0).numpy()


def overlay(image: torch.Tensor, heat: torch.Tensor, smallest: int = 224) -> np.ndarray:
    """The image in grey, the more orange the larger the map's number: none at its smallest, most at its largest; none at all
    where the map is flat.

    Args:
        image: uint8 (C, H, W), C 1 or 3.
        heat: (h, w); each number covers its patch.
        smallest: pixels that the shorter side is enlarged to, by whole factors.

    Returns:
        uint8 (H', W', 3).
    """
    heat = torch.zeros_like(heat) if is_flat(heat) else (heat - heat.min()) / (heat.max() - heat.min())
    factor = max(1, -(-smallest // min(image.shape[1:])))
    size = (image.shape[1] * factor, image.shape[2] * factor)
    enlarge = lambda values: torch.nn.functional.interpolate(  # "nearest" errs by a pixel
        values[None, None].float(), size=size, mode="nearest-exact"
    )[0, 0].unsqueeze(2)
    grey, share = enlarge(image.float().mean(dim=0)), 0.85 * enlarge(heat)  # (H', W', 1) each
    orange = torch.tensor(to_rgb(ORANGE)) * 255
    return ((1 - share) * grey + share * orange).round().byte().numpy()  # (H', W', 3)


def is_flat(heat: torch.Tensor) -> bool:
    """Whether all patches count alike, but for `FLAT` of the largest number: what is left would be drawn as noise."""
    return bool(heat.max() - heat.min() <= FLAT * heat.abs().max())


def attention(images: torch.Tensor, maps: torch.Tensor, columns: list[str], rows: list[str]) -> Figure:
    """Images, and beside each its maps, each in colours of its own range; a flat one says so.

    Args:
        images: uint8 (n, C, H, W), C 1 or 3.
        maps: (n, k, h, w) as `attention_maps` gives them.
        columns: k titles.
        rows: n captions of the images, drawn as they are.
    """
    count, kinds = maps.shape[:2]
    lines = -(-kinds // BESIDE)  # an image
    beside = -(-kinds // lines)
    side = WIDTH / (beside + 1)
    height = count * lines * (side * images.shape[2] / images.shape[3] + 0.22) + 0.2
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    panels = _picture_panels(figure, count * lines, beside + 1)
    for number, (image, of_image, caption) in enumerate(zip(images, maps, rows, strict=True)):
        first = panels[number * lines, 0]
        first.imshow(as_picture(image), interpolation="nearest")
        first.set_title(caption, fontsize=7, loc="left", y=1)
        for kind, (heat, title) in enumerate(zip(of_image, columns, strict=True)):
            panel = panels[number * lines + kind // beside, 1 + kind % beside]
            panel.imshow(overlay(image, heat), interpolation="nearest")
            if is_flat(heat):
                panel.text(0.5, 0.5, "flat", fontsize=7, ha="center", va="center", transform=panel.transAxes, bbox={"facecolor": "white", "pad": 1.5})  # fmt: skip
            if number == 0 or lines > 1:
                panel.set_title(title, fontsize=7, y=1)
    return figure


def prediction_captions(logits: torch.Tensor, names: list[str], several: bool = False) -> list[str]:
    """The likeliest class of each image, logits (n, L), such as "Coat 98%"; empty if all classes are equal."""
    best = (logits.sigmoid() if several else logits.softmax(dim=1)).max(dim=1)
    return [
        f"{shorten(names[index], 14)} {chance:.0%}" if row.std() > 0 else ""
        for row, chance, index in zip(logits, best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def _tiles(pictures: np.ndarray, columns: int) -> np.ndarray:
    """Pictures (n, h, w, ...) in rows of `columns`, a pixel or more of NaN between them."""
    count, height, width = pictures.shape[:3]
    gap = max(1, min(height, width) // 8)
    rows = -(-count // columns)
    laid = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, *pictures.shape[3:]), np.nan)
    for number, picture in enumerate(pictures):
        top, left = number // columns * (height + gap), number % columns * (width + gap)
        laid[top : top + height, left : left + width] = picture
    return laid


def filters(kernel: torch.Tensor, count: int = 28) -> np.ndarray:
    """The first principal components of patch filters (D, C, P, P), each scaled to [0, 1]: (count, P, P, 3)."""
    flat = kernel.detach().float().cpu().flatten(1)  # (D, C * P * P)
    components = torch.linalg.svd(flat - flat.mean(dim=0), full_matrices=False).Vh[:count]
    pictures = components.unflatten(1, kernel.shape[1:]).permute(0, 2, 3, 1)  # (count, P, P, C)
    if pictures.shape[3] != 3:  # one channel in grey; of others, their mean
        pictures = pictures.mean(dim=3, keepdim=True).expand(-1, -1, -1, 3)
    low, high = pictures.amin(dim=(1, 2, 3), keepdim=True), pictures.amax(dim=(1, 2, 3), keepdim=True)
    return ((pictures - low) / (high - low).clamp(min=1e-12)).numpy()


def inside(
    kernel: torch.Tensor | None, positions: torch.Tensor | None, grid: tuple[int, int], distances: torch.Tensor
) -> Figure:
    """Figure 7 of the ViT paper (arXiv 2010.11929): what patches are projected on, which positions are alike, how far heads look.

    Args:
        kernel: (D, C, P, P) of the patch projection; None where it is no convolution.
        positions: (N, D) of the patches, learned or fixed; None for a model without.
        grid: rows and columns of patches.
        distances: (layers, A) in pixels, as `attention_distances` gives them.
    """
    shown = [name for name, value in (("filters", kernel), ("positions", positions)) if value is not None] + [
        "distances"
    ]
    figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
    for panel, name in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        panel.tick_params(labelsize=6)
        if name == "filters":
            pictures = filters(kernel)
            panel.imshow(
                np.nan_to_num(_tiles(pictures, 4 if len(pictures) < 20 else 7), nan=1.0), interpolation="nearest"
            )
            panel.set_title(f"patch filters: the first {len(pictures)}\nprincipal components", fontsize=8)
            panel.axis("off")
        elif name == "positions":
            rows, columns = (np.unique(np.linspace(0, side - 1, min(side, 7)).round().astype(int)) for side in grid)
            unit = torch.nn.functional.normalize(positions.detach().float().cpu(), dim=1)
            alike = (unit @ unit.T).view(*grid, *grid)[rows][:, columns].flatten(0, 1).numpy()  # (chosen, h, w)
            image = panel.imshow(_tiles(alike, len(columns)), vmax=1, cmap="cividis", interpolation="nearest")
            height, width = (side + max(1, min(grid) // 8) for side in grid)
            panel.set_xticks([width * place + (grid[1] - 1) / 2 for place in range(len(columns))], columns + 1)
            panel.set_yticks([height * place + (grid[0] - 1) / 2 for place in range(len(rows))], rows + 1)
            panel.set_xlabel("column of the patch", fontsize=7)
            panel.set_ylabel("row of the patch", fontsize=7)
            panel.set_title("position embeddings:\nsimilarity to all others", fontsize=8)
            bar = figure.colorbar(image, ax=panel, shrink=0.8, location="bottom")
            bar.set_label("cosine similarity", fontsize=7)
            bar.ax.tick_params(labelsize=6)
        else:
            layers, heads = distances.shape
            depths = torch.arange(1, layers + 1).unsqueeze(1).expand(-1, heads)
            panel.scatter(depths, distances.cpu(), s=14, color=BLUE, alpha=0.7, linewidths=0)
            panel.set_xlabel("layer", fontsize=7)
            panel.set_ylabel("mean attention distance (pixels)", fontsize=7)
            panel.set_title(f"how far heads look,\n{heads} in each layer", fontsize=8)
            panel.set(xlim=(0.5, layers + 0.5), ylim=(0, 1.05 * panel.get_ylim()[1]))
            panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            panel.grid(color=GREY, alpha=0.25, linewidth=0.5)
    return figure


def positions(table: torch.Tensor, name: str) -> Figure:
    """The numbers of position embeddings: a row a patch, a column a channel.

    Args:
        table: (N, D), patches row by row.
        name: what they are, such as "sincos2d".
    """
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    panel = figure.subplots()
    largest = table.detach().abs().max().item()
    image = panel.imshow(
        table.detach().float().cpu().numpy(),
        cmap="PuOr",
        vmin=-largest,
        vmax=largest,
        aspect="auto",
        interpolation="nearest",
    )
    panel.set_title(f"position embeddings ({name})", fontsize=9)
    panel.set_xlabel("channel", fontsize=8)
    panel.set_ylabel("patch, row by row", fontsize=8)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    panel.tick_params(labelsize=7)
    bar = figure.colorbar(image, ax=panel)
    bar.set_label("value", fontsize=7)
    bar.ax.tick_params(labelsize=7)
    return figure


def target_captions(targets: torch.Tensor, names: list[str]) -> list[str]:
    """The target of each image, (n, L), such as "Coat", or "70% Coat" and "30% Bag" in two lines."""
    texts = []
    for target in targets:
        best = target.topk(min(2, len(target)))
        first, second = best.values[0].item(), best.values[1].item() if len(target) > 1 else 0.0
        shorter = [shorten(names[index], 14) for index in best.indices.tolist()]
        mixed = second > 0.05 * first  # more than label smoothing leaves
        texts.append(f"{first:.0%} {shorter[0]}\n{second:.0%} {shorter[1]}" if mixed else shorter[0])
    return texts


def augmentations(images: torch.Tensor, versions: list[torch.Tensor], titles: list[list[str]]) -> Figure:
    """What the model is shown of some training images: each image, and in its row what became of it in one epoch after another.

    Args:
        images: uint8 (n, C, H', W'), C 1 or 3.
        versions: uint8 (n, C, H, W) of each epoch.
        titles: n texts for the images, and for each epoch: what the model was asked to say; drawn as they are.
    """
    figure = Figure(
        figsize=(WIDTH, len(images) * (WIDTH / (len(versions) + 1) * images.shape[2] / images.shape[3] + 0.25) + 0.3),
        layout="constrained",
    )
    panels = _picture_panels(figure, len(images), len(versions) + 1)
    for column, (pictures, texts) in enumerate(zip([images, *versions], titles, strict=True)):
        for panel, picture, text in zip(panels[:, column], pictures, texts, strict=True):
            panel.imshow(as_picture(picture), interpolation="nearest")
            panel.set_title(text, fontsize=6.5, y=1)
    return figure

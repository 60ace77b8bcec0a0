"""Draw the picture of the README: attention over two photos, and the demo's accuracy beside that of recipes/minimal.py.

    python recipes/minimal.py --epochs 20 > model_cards/minimal.txt
    python recipes/benchmarks/picture.py DINOV2_CHECKPOINT

The photos are scikit-learn's sample images (CC BY 2.0, danielbuechele and vultilion). The checkpoint may be any that hf_vit
reads, with a patch size that divides 420; the committed picture shows a ViT-S/14 of DINOv2's architecture. The curves are
those of model_cards/demo/metrics.jsonl and model_cards/minimal.txt.
"""

import json
import re
import sys
from pathlib import Path

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from sklearn.datasets import load_sample_images

from hf_vit import HFViTModel, figures


CARDS = Path(__file__).resolve().parents[2] / "model_cards"
HEIGHT, WIDTH = 420, 630
MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def read_curves() -> dict[str, tuple[list[int], list[float]]]:
    """{how it was trained: (epochs, test accuracies)}."""
    rows = [json.loads(line) for line in (CARDS / "demo" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "eval_accuracy" in row]
    plain = re.findall(r"epoch (\d+): .* accuracy ([\d.]+)%", (CARDS / "minimal.txt").read_text())
    return {
        "make demo": ([row["epoch"] for row in rows], [row["eval_accuracy"] for row in rows]),
        "minimal.py": ([int(epoch) for epoch, _ in plain], [float(value) / 100 for _, value in plain]),
    }


def draw(model: HFViTModel) -> Figure:
    figure = Figure(figsize=(figures.WIDTH, 3.1), layout=None)
    photos = torch.stack([torch.tensor(photo).permute(2, 0, 1) for photo in load_sample_images().images])
    resize = torch.nn.functional.interpolate
    photos = resize(photos.float(), (HEIGHT, WIDTH), mode="bicubic", antialias=True).clamp(0, 255).round().byte()
    maps = model.attention_maps((photos / 255 - MEAN) / STD, layers=-1, method="mean")  # (2, h, w)
    for row, (photo, heat) in enumerate(zip(photos, maps, strict=True)):
        for column, picture in enumerate((figures.as_picture(photo), figures.overlay(photo, heat))):
            panel = figure.add_axes((0.305 * column, 0.465 * (1 - row), 0.3, 0.452))  # left, bottom, width, height
            panel.imshow(picture)
            panel.axis("off")
            if row == 0:
                panel.set_title(("photo", "attention, last layer")[column])
    panel = figure.add_axes((0.69, 0.135, 0.3, 0.78))
    styles = ((figures.ORANGE, 0.012), (figures.BLUE, -0.105))
    for (label, (epochs, accuracies)), (colour, below) in zip(read_curves().items(), styles, strict=True):
        panel.plot(epochs, accuracies, color=colour, marker="o", markersize=3)
        panel.text(
            20, accuracies[-1] + below, f"{label}: {accuracies[-1]:.2%}", color=colour, ha="right", weight="bold"
        )
    panel.set(title="test accuracy", xlabel="epoch", ylim=(0.65, 0.92), xticks=range(0, 21, 5))
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panel.grid()
    return figure


if __name__ == "__main__":
    model = HFViTModel.from_pretrained(sys.argv[1], image_size=(HEIGHT, WIDTH)).eval()
    with rc_context(
        figures.STYLE
        | {"figure.constrained_layout.use": False, "font.size": 10, "axes.titlesize": 11, "axes.labelsize": 10}
    ):
        figures.save(draw(model), CARDS / "attention.png")

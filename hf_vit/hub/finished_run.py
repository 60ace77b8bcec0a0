"""A finished run: its record, without what is private, and its samples."""

import re
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file

from hf_vit.evaluation.results import Results
from hf_vit.system.errors import UserError
from hf_vit.system.run_files import SAMPLES


TRAINING_FILES = ("results.json", "config.yaml", "metrics.jsonl", "confusion_matrix.csv")
FIGURES_WITH_IMAGES = ("predictions", "mistakes", "attention", "reconstructions")  # of the data set


def read_redacted(file: Path) -> str:
    """The text of a run's file, with ~ for the home directory, whose path may hold a person's name."""
    text, home = file.read_text(encoding="utf-8"), Path.home()
    return text if len(home.parts) < 2 else re.sub(rf"(?<![\w.-]){re.escape(str(home))}(?![\w.-])", "~", text)


def read_run(run: Path) -> tuple[Results, str]:
    """results.json and the text of config.yaml of a finished run, without the name of the home directory; ValueError if it is none."""
    needed = ("results.json", "config.yaml", "metrics.jsonl", "model/config.json")
    if missing := [name for name in needed if not (run / name).is_file()]:
        raise UserError(f"{run} is no finished run: it has no {' and no '.join(missing)}")
    return Results.from_json(read_redacted(run / "results.json")), read_redacted(run / "config.yaml")


def read_samples(run: Path) -> dict[str, torch.Tensor]:
    """What the run kept of evaluated images: "images", uint8 (n, C, H, W), and of a classifier their "logits" (n, L)."""
    if not (run / SAMPLES).is_file():
        raise UserError(f"{run} holds no {SAMPLES}: pass --without_images")
    return load_file(run / SAMPLES)


def write_examples(run: Path, folder: Path, count: int = 6) -> list[Path]:
    """Write the first sample images of a run as PNG files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, image in enumerate(read_samples(run)["images"][:count], 1):
        files.append(folder / f"{number}.png")
        Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy()).save(files[-1])  # (C, H, W) -> (H, W, 3) or (H, W)
    return files

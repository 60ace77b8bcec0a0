"""Timing in turns, and runs of train.py in processes of their own: what all parts of the benchmark share."""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from PIL import Image

from hf_vit.data.image_spec import ImageSpec
from hf_vit.training.report import read_log


RECIPES = Path(__file__).resolve().parents[1]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH = 64  # images of a batch, in the loaders and in the reference loop
DEMO = RECIPES / "configs" / "demo.yaml"


def seconds_of(function, times: int = 1) -> float:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        function()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def time_in_turns(contenders: dict, repeats: int, times: int = 1) -> dict[str, list[float]]:
    """Seconds of each contender in each round. Every other round runs in reverse; the first round is warm-up."""
    rounds = []
    for turn in range(repeats + 1):
        order = list(contenders)[:: 1 if turn % 2 else -1]
        rounds.append({name: seconds_of(contenders[name], times) for name in order})
    return {name: [each[name] for each in rounds[1:]] for name in contenders}


def median_ratio(one: list[float], other: list[float]) -> float:
    """How many times longer `one` took than `other`: the median of the ratios of each round."""
    return round(statistics.median(a / b for a, b in zip(one, other, strict=True)), 3)


def run_training(folder: Path, **flags) -> dict:
    """Run train.py in a process of its own; its results.json, and the lines of metrics.jsonl under "lines"."""
    flags = {"output_dir": folder, **flags}
    command = [sys.executable, str(RECIPES / "train.py"), *(f"--{name}={value}" for name, value in flags.items())]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return {**json.loads((folder / "results.json").read_text()), "lines": read_log(folder)}


def training_seconds(run: dict) -> float:
    """Seconds of a whole run of train.py, without its evaluations."""
    return [line["seconds"] for line in run["lines"] if "loss" in line][-1]


def square_spec(side: int) -> ImageSpec:
    """Square RGB images of `side` pixels, normalised as most examples do."""
    return ImageSpec(side, side, 3, int(Image.Resampling.BILINEAR), (0.5,) * 3, (0.5,) * 3)


def to_overrides(fields: dict) -> str:
    """Config fields as the value of --config_overrides."""
    return ",".join(f"{name}={value}".lower() for name, value in fields.items())

"""What the benchmarks share: timing in turns, and a command line that writes JSON."""

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import datasets
import torch
import transformers
from PIL import Image

from hf_vit.data.image_spec import ImageSpec
from hf_vit.system import hardware
from hf_vit.system.environment import environment_info


RECIPES = Path(__file__).resolve().parents[1]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seconds_of(function: Callable, times: int = 1) -> float:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        function()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def time_in_turns(contenders: dict[str, Callable], repeats: int, times: int = 1) -> dict[str, list[float]]:
    """Seconds of each contender in each round. Every other round runs in reverse; the first round is warm-up."""
    rounds = []
    for turn in range(repeats + 1):
        order = list(contenders)[:: 1 if turn % 2 else -1]
        rounds.append({name: seconds_of(contenders[name], times) for name in order})
    return {name: [each[name] for each in rounds[1:]] for name in contenders}


def median_ratio(one: list[float], other: list[float]) -> float:
    """How many times longer `one` took than `other`: the median of the ratios of each round."""
    return round(statistics.median(a / b for a, b in zip(one, other, strict=True)), 3)


def square_spec(side: int) -> ImageSpec:
    """Square RGB images of `side` pixels, normalised as most examples do."""
    return ImageSpec(side, side, 3, int(Image.Resampling.BILINEAR), (0.5,) * 3, (0.5,) * 3)


def prepare_device():
    """Quiet libraries, and on a CPU all of its cores."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    if DEVICE.type == "cpu":
        hardware.use_all_cores()
        hardware.keep_memory()


def run_benchmark(name: str, measure: Callable[[int], dict], description: str):
    """Read the command line, measure, and write the result to --output_file under `name`; its other parts are kept."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count; default: 5")
    parser.add_argument("--output_file", type=Path, help="JSON file to add the result to; default: print only")
    args = parser.parse_args()
    prepare_device()
    measured = measure(args.repeats)
    environment = environment_info(DEVICE.type, 1, "bf16" if DEVICE.type == "cuda" else "no")
    measured |= {"rounds": args.repeats, "date": datetime.date.today().isoformat(), **environment}
    print(json.dumps(measured, indent=2))
    if args.output_file is not None:
        results = json.loads(args.output_file.read_text()) if args.output_file.is_file() else {}
        args.output_file.write_text(json.dumps(results | {name: measured}, indent=2) + "\n")

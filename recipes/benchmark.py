"""How fast this machine trains, reads and loads with hf_vit, beside native transformers, timm and the usual training loop.

    python recipes/benchmark.py --parts loader
    python recipes/benchmark.py --parts model loading --repeats 3
    python recipes/benchmark.py --output_file model_cards/benchmark.json

It prints what it measures, and writes nothing but --output_file. It takes most of an hour on two cores; `--parts loading`, a minute.
Contenders run in turns (A B A B ...), in one process where possible. The first round is warm-up; figures are medians of the
others, and a ratio is the median of the ratios of each round. timm takes part where it is installed. Each part is a file of
recipes/benchmarks:

    model       forward pass and training step at five sizes (model_speed.py)
    loading     import, from_pretrained of ViT-B and its peak memory (loading.py)
    loader      images a second to batches of tensors (loader.py)
    budget      the demo beside the usual loop with as many images, or as many seconds: the accuracy of each (budget.py)
    savings     what saves work (patch dropout, a smaller first stage, frozen layers, cached features), and its accuracy
    merging     images a second and accuracy of a trained model whose tokens are merged (both in savings.py)
    memory      memory and work by model size and batch, computed from shapes (memory.py)
"""

import argparse
import datetime
import json
from pathlib import Path

from command_line import Parser, refuse_less


PARTS = ("model", "loading", "loader", "budget", "savings", "merging", "memory")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, "[--parts PART [PART ...]] [--repeats N] [--output_file FILE]")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count")
    parser.add_argument(
        "--output_file", type=Path, help="JSON file for the figures; its other parts are kept; by default none"
    )
    args = parser.parse_args(argv)
    refuse_less(parser, args, repeats=1)
    parser.check_output_file(args.output_file)
    return args


if __name__ == "__main__":  # a wrong flag is answered before the imports, which take seconds
    ARGUMENTS = parse_args()

import datasets
import transformers
from benchmarks import budget, loader, loading, memory, model_speed, savings
from benchmarks.measuring import DEVICE

from hf_vit.system import environment, hardware
from hf_vit.system.errors import run_script


MEASURES = {
    "model": model_speed.measure,
    "loading": loading.measure,
    "loader": loader.measure,
    "budget": budget.measure,
    "savings": savings.measure,
    "merging": savings.measure_merging,
    "memory": memory.measure,
}


def main(args: argparse.Namespace):
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    file = args.output_file
    results = json.loads(file.read_text()) if file is not None and file.is_file() else {}
    if DEVICE.type == "cpu":
        hardware.use_all_cores()
        hardware.keep_memory()
    for name in args.parts:
        print(f"{name}:", flush=True)
        measured = MEASURES[name](args.repeats)
        environment_info = environment.environment_info(DEVICE.type, 1, "bf16" if DEVICE.type == "cuda" else "no")
        date = datetime.date.today().isoformat()
        results[name] = {**measured, "rounds": args.repeats, "date": date, **environment_info}
        print(json.dumps(measured, indent=2), flush=True)
        if file is not None:  # after each part, for the next one may take long
            file.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))

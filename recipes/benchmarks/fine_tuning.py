"""Accuracy of fine-tuning with the default length, batch size and rates, beside the linear probe of the same checkpoint.

    python recipes/benchmarks/fine_tuning.py --checkpoints runs/photos/model --datasets beans --output_file fine_tuning.json
    python recipes/benchmarks/fine_tuning.py --checkpoints runs/photos/model --datasets beans --sizes 30 --output_file few.json

Each data set has a split called test, all of which is evaluated, once, after the last step. Of its training images, --sizes are drawn
evenly by class, others with each seed. The runs are those of `train.py`, without its folder, one after another in this process; a run
that the output file already holds is left alone, so that the same command goes on.
"""

import argparse
import datetime
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # train.py

from command_line import Parser


METHODS = {  # flags of train.py
    "cached probe": {"freeze_backbone": "true", "cache_features": "true"},
    "probe": {"freeze_backbone": "true"},
    "lora": {"lora_rank": 8},
    "full": {},
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        __doc__, "--checkpoints PATH ... --datasets PATH ... --output_file FILE [--flag value ...]", accelerated=True
    )
    flag = parser.add_argument
    flag("--checkpoints", nargs="+", required=True, help="folders or Hub ids of models to fine-tune")
    flag("--datasets", nargs="+", required=True, help="folders or Hub ids, with a split called test")
    flag("--sizes", nargs="+", type=int, default=[30, 100, 1000, 10_000], help="training images")
    flag("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="ways to fine-tune")
    flag("--seeds", type=int, default=3, help="runs of each")
    flag("--output_file", type=Path, required=True, help="JSON file of the runs; those in it are kept")
    return parser.parse_args(argv)


if __name__ == "__main__":  # a wrong flag is answered before the imports, which take seconds
    ARGUMENTS = parse_args()

import datasets
import train
import transformers
from benchmarks.measuring import DEVICE

from hf_vit.data.sources import load_splits
from hf_vit.data.splits import prepare_splits
from hf_vit.evaluation.scores import compute_metrics
from hf_vit.system.environment import environment_info
from hf_vit.system.errors import run_script
from hf_vit.system.files import write_text
from hf_vit.training import arguments
from hf_vit.training.classification import Classification
from hf_vit.training.inputs import Prefetcher
from hf_vit.training.optimizers import learning_rate, set_learning_rate
from hf_vit.training.run import build_run
from hf_vit.training.setup import set_up_accelerator
from hf_vit.training.state import TrainState


def fine_tune(**flags) -> dict:
    """Train by `flags` of train.py, evaluate the last weights, and say what was chosen."""
    flags |= {"output_dir": "unused", "num_workers": 0, "auto_find_batch_size": "false"}
    args = arguments.parse_args([f"--{name}={value}" for name, value in flags.items()])
    accelerator = set_up_accelerator(args)
    run = build_run(args, Classification(args, accelerator), accelerator, None, time.monotonic())
    state, total = TrainState(), run.batches.total_steps
    batches = Prefetcher(run.batches.prepared(0))
    trained_from = time.monotonic()
    while state.step < total:
        set_learning_rate(run.optimizers, learning_rate(state.step, total, run.warmup_steps, args.learning_rate))
        sums, _, _ = train.forward_backward(run, state, batches)
        train.optimizer_step(run, sums, finite=True)
        state.step += 1
    batches.close()
    seconds = time.monotonic() - trained_from
    with run.whole_model() as model:
        logits, rows = run.predict(model, run.data.eval_images, run.data.scored)
    return {
        **compute_metrics(logits, run.data.eval_images.labels[rows]),
        "train_images": len(run.data.train_images),
        "scored_images": len(rows),
        "classes": len(run.data.labels),
        "parameters": run.parameters,
        "steps": total,
        "images_per_step": run.images_per_step,
        "learning_rate": args.learning_rate,
        "head_learning_rate": args.head_learning_rate,
        "mixed_precision": run.accelerator.mixed_precision,
        "seconds": round(seconds, 1),
    }


def run_missing(file: Path, plan: Iterable[tuple[dict, dict]]):
    """Fine-tune for each entry of `plan` that the file does not hold yet, and add its line at once.

    Args:
        plan: pairs of what names a run in the file, and its flags for `fine_tune`.
    """
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    runs = json.loads(file.read_text()) if file.is_file() else []
    for what, flags in plan:
        if any(what.items() <= run.items() for run in runs):
            continue
        result = fine_tune(**flags)
        date = datetime.date.today().isoformat()
        runs.append({**what, **result, "date": date, **environment_info(DEVICE.type, 1, result["mixed_precision"])})
        print(json.dumps(runs[-1]), flush=True)
        write_text(file, json.dumps(runs, indent=1) + "\n")


def planned_runs(args: argparse.Namespace) -> Iterator[tuple[dict, dict]]:
    """What `run_missing` takes, the runs of one seed after those of another."""
    name_of = lambda path: Path(path).parent.name if Path(path).name == "model" else Path(path).name
    classes = {dataset: len(prepare_splits(load_splits(dataset))[1]) for dataset in args.datasets}
    plan = itertools.product(range(args.seeds), args.sizes, args.datasets, args.checkpoints, args.methods)
    for seed, size, dataset, checkpoint, method in plan:
        what = {"checkpoint": name_of(checkpoint), "dataset": name_of(dataset), "size": size, "method": method}
        what["seed"] = seed
        flags = {"dataset_name": dataset, "model_name_or_path": checkpoint, "seed": seed, **METHODS[method]}
        yield what, {**flags, "shots": size // classes[dataset]}


if __name__ == "__main__":
    run_script(lambda: run_missing(ARGUMENTS.output_file, planned_runs(ARGUMENTS)))

"""Accuracy of fine-tuning on few labels after pre-training on all images, beside the same network from scratch.

    python recipes/pretrain.py --config pretrain-cifar10
    python recipes/benchmarks/pretraining.py --run runs/pretrain-cifar10 --output_file pretraining.json
    python recipes/benchmarks/pretraining.py --run runs/pretrain-cifar10 --sizes 1000 --epochs 100 --output_file short.json

The data set is that of the run, with a split called test, which is evaluated once, after the last step. Every rate and length is
tried from both starts, so that each has its best. A run that the output file already holds is left alone, so that the same command
goes on.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # train.py

from command_line import Parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, "--run PATH --output_file FILE [--flag value ...]", accelerated=True)
    flag = parser.add_argument
    flag("--run", type=Path, required=True, help="folder of a finished run of pretrain.py, from scratch")
    flag("--sizes", nargs="+", type=int, default=[250, 1000, 5000], help="labelled images, as many of each class")
    flag("--epochs", nargs="+", type=int, default=[50, 200], help="passes over them")
    flag("--batch_size", type=int, default=50, help="images a step")
    flag("--learning_rates", nargs="+", type=float, default=[5e-4, 1e-3, 2e-3], help="of AdamW")
    flag("--seeds", type=int, default=3, help="runs of each")
    flag("--output_file", type=Path, required=True, help="JSON file of the runs; those in it are kept")
    return parser.parse_args(argv)


if __name__ == "__main__":  # a wrong flag is answered before the imports, which take seconds
    ARGUMENTS = parse_args()

import yaml
from benchmarks.fine_tuning import run_missing

from hf_vit.data.sources import load_splits
from hf_vit.data.splits import prepare_splits
from hf_vit.system.errors import run_script


def planned_runs(args: argparse.Namespace) -> Iterator[tuple[dict, dict]]:
    """What `run_missing` takes, the runs of one seed after those of another."""
    of_run = yaml.safe_load((args.run / "config.yaml").read_text())
    data = {name: of_run[name] for name in ("dataset_name", "dataset_config", "image_column") if name in of_run}
    starts = {
        "pre-trained": {"model_name_or_path": args.run / "model", "layer_decay": 0.75},
        "from scratch": {name: of_run[name] for name in ("preset", "config_overrides") if name in of_run},
    }
    columns = {"image_column": of_run.get("image_column")}
    classes = len(prepare_splits(load_splits(data["dataset_name"], of_run.get("dataset_config")), **columns)[1])
    plan = itertools.product(range(args.seeds), args.sizes, args.epochs, args.learning_rates, starts)
    for seed, size, epochs, rate, start in plan:
        what = {"start": start, "size": size, "num_train_epochs": epochs, "learning_rate": rate, "seed": seed}
        how = {"learning_rate": rate, "num_train_epochs": epochs, "per_device_train_batch_size": args.batch_size}
        yield what, {**data, **starts[start], **how, "seed": seed, "shots": size // classes}


if __name__ == "__main__":
    run_script(lambda: run_missing(ARGUMENTS.output_file, planned_runs(ARGUMENTS)))

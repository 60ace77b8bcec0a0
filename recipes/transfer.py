"""Compare ways to fine-tune: pre-train on half of the classes of a data set, then learn the other half in every way.

    python recipes/transfer.py --dataset_name fashion-mnist-mini --pretrain_epochs 2 --seeds 1
    python recipes/transfer.py --dataset_name uoft-cs/cifar10
    python recipes/transfer.py --dataset_name uoft-cs/cifar10 --repo USER/NAME --output_dir runs/transfer-hub

All images of the classes with an even index pre-train the model of --config. Of each class with an odd index, --shots images
are then learnt from scratch, by full fine-tuning with and without layer decay, by LoRA, by a linear probe and by k-NN, with --seeds
seeds each (k-NN: one). All test images are evaluated. With --repo the pre-trained model is pushed to the Hub and every method
loads it from there; otherwise they load its folder.

    data/NAME-even, data/NAME-odd   the two halves, as Parquet
    pretrained/                     a run of train.py
    scratch/0, full/0, ...          runs of train.py, a folder per method and in it one per seed
    knn/results.json                what recipes/eval.py says of the frozen features, and how long it took

At the end it prints the table that recipes/tables.py makes of all results.json. If it is stopped, the same command goes on.
Exit codes: 0, 75 if a signal stopped it (the current run saves its state), 1 after an error, 2 for a wrong flag.
"""

import argparse
import json
import math
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from command_line import Parser, refuse_less


RECIPES = Path(__file__).resolve().parent


def script_path(name: str) -> str:
    """The path of a file in this folder as one would type it: `recipes/NAME` from the root of the repository."""
    return f"recipes/{name}" if Path.cwd() == RECIPES.parent else str(RECIPES / name)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, "--dataset_name DATA [--flag value ...]", accelerated=True)
    flag = parser.add_argument_group("data").add_argument
    data = "Hub id, local folder or file with a split called test, or fashion-mnist-mini"
    flag("--dataset_name", required=True, help=data)
    flag("--image_column", help="column of images; by default found by its feature type")
    flag("--label_column", help="column of labels; by default found by its feature type")
    flag("--shots", type=int, default=50, help="training images per class of the second half")
    flag = parser.add_argument_group("runs").add_argument
    config = "preset of train.py that trains from scratch, a YAML file"
    flag("--config", default=script_path("configs/cifar10-cpu.yaml"), help=config)
    flag("--output_dir", type=Path, default=Path("runs/transfer"), help="folder of all runs")
    flag("--seeds", type=int, default=3, help="runs of each method")
    flag("--pretrain_epochs", type=float, help="by default those of --config")
    flag("--scratch_epochs", type=float, default=100, help="on the second half, from scratch")
    flag("--finetune_epochs", type=float, default=30, help="on the second half, for all other methods")
    flag = parser.add_argument_group("Hub").add_argument
    flag(
        "--repo", help="USER/NAME on the Hub: push the pre-trained model there and load it from there; by default not"
    )
    flag("--public", action="store_true", help="make a new repository public")
    args = parser.parse_args(argv)
    refuse_less(parser, args, shots=1, seeds=1, pretrain_epochs=1, scratch_epochs=1, finetune_epochs=1)
    if args.public and args.repo is None:
        parser.error("argument --public: wanted the repository as well: --repo USER/NAME names it")
    if not Path(args.config).is_file():
        parser.error(
            f"--config {args.config}: no such file; wanted one such as {script_path('configs/cifar10-cpu.yaml')}"
        )
    parser.refuse_mistyped_paths(dataset_name=args.dataset_name)
    return args


if __name__ == "__main__":  # a wrong flag is answered before the imports, which take seconds
    ARGUMENTS = parse_args()

import datasets
import torch
import yaml
from benchmarks import run_tables
from class_halves import split_classes

from hf_vit.system import environment
from hf_vit.system.command_line import shell_line
from hf_vit.system.errors import UserError, run_script
from hf_vit.system.files import write_text
from hf_vit.training.run_folder import FINISHED
from hf_vit.training.signals import STOPPED


# Flags of train.py. From scratch, all other flags are those of --config; fine-tuning takes AUGMENTATION from it. The learning
# rates were not tuned: full fine-tuning has that of layer decay, so that they differ in nothing else; 3e-4 was less accurate.
METHODS = {
    "scratch": {},
    "full": {"learning_rate": "1e-3"},
    "layer-decay": {"learning_rate": "1e-3", "layer_decay": "0.75"},
    "lora": {"learning_rate": "2e-3", "lora_rank": "8"},
    "probe": {"learning_rate": "3e-3", "freeze_backbone": "true"},
}
AUGMENTATION = ("crop", "crop_scale", "shift", "flip", "color_jitter")
# Images per step of every method; with so few images, larger batches would leave one or two steps per epoch.
BATCH = 32


def run(script: str, *flags):
    """Run a script of this folder in a process of its own, which gets the SIGTERM and SIGUSR1 sent to this one.

    Raises:
        ValueError: if it fails.
        SystemExit: with its exit code, if a signal stopped it.
    """
    command = [script_path(script), *map(str, flags)]
    print(f"\n{shell_line(RECIPES / script, *flags)}", flush=True)
    with subprocess.Popen([sys.executable, *command]) as child:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, _: child.send_signal(number))
        code = child.wait()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    if code == STOPPED:
        sys.exit(code)
    if code != 0:
        raise UserError(f"`{shlex.join(command)}` ended with exit code {code}; what it did before is kept")


def train(folder: Path, **flags):
    """A run of train.py; one that is finished is left alone."""
    run("train.py", *(f"--{name}={value}" for name, value in flags.items()), f"--output_dir={folder}")


def probe_features(folder: Path, source, second: Path, precision: str, dataset_name: str):
    """Classify the second half by nearest neighbours of its frozen features, and write the results and the time it took."""
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    run(
        "eval.py",
        *("--model_name_or_path", source, "--dataset_name", second, "--split", "test", "--probe_split", "train"),
        *("--mixed_precision", precision, "--output_file", folder / "metrics.json"),
    )
    seconds = round(time.monotonic() - began, 1)
    environment_info = environment.environment_info("cuda" if torch.cuda.is_available() else "cpu", 1, precision)
    results = {**read_json(folder / "metrics.json"), "seconds": seconds, "halves_of": dataset_name, **environment_info}
    write_text(folder / FINISHED, json.dumps(results, indent=2) + "\n")


def read_json(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8"))


def main(args: argparse.Namespace):
    config, out = yaml.safe_load(Path(args.config).read_text(encoding="utf-8")), args.output_dir
    if "preset" not in config:
        raise UserError(f"--config {args.config} names no preset: wanted one that trains from scratch")
    datasets.disable_progress_bars()
    first, second = split_classes(out / "data", args.dataset_name, args.shots, args.image_column, args.label_column)
    # Ctrl-C reaches the running command as well: it saves its state and ends, and then this one does.
    signal.signal(signal.SIGINT, lambda *_: None)

    columns = {"image_column": "image", "label_column": "label"}  # whatever --config says of the whole data set
    from_scratch = {"config": args.config, **columns}
    epochs = {} if args.pretrain_epochs is None else {"num_train_epochs": args.pretrain_epochs}
    train(out / "pretrained", **from_scratch, dataset_name=first, **epochs)
    source = out / "pretrained" / "model"
    if args.repo is not None:
        public = ["--public"] if args.public else []
        # As code: native layouts know no patch dropout, which the model from scratch is trained with.
        run("publish.py", out / "pretrained", "--repo", args.repo, "--push", "--layout", "code", *public)
        source = args.repo

    kept = {key: config[key] for key in (*AUGMENTATION, "mixed_precision") if key in config}
    finetuned = {**columns, "model_name_or_path": source, **kept}
    for seed in range(args.seeds):  # every method in turn, so that other load on this machine affects them alike
        for name, flags in METHODS.items():
            scratch = name == "scratch"
            shared, epochs = (from_scratch, args.scratch_epochs) if scratch else (finetuned, args.finetune_epochs)
            length = dict(num_train_epochs=epochs, eval_epochs=math.ceil(epochs), per_device_train_batch_size=BATCH)
            train(out / name / str(seed), **shared, dataset_name=second, **length, **flags, seed=seed)
    probe_features(out / "knn", source, second, config.get("mixed_precision", "auto"), args.dataset_name)

    runs = {name: [read_json(out / name / str(seed) / FINISHED) for seed in range(args.seeds)] for name in METHODS}
    runs["pretrained"] = [read_json(out / "pretrained" / FINISHED)]
    print(f"\n{run_tables.transfer_table(runs, read_json(out / 'knn' / FINISHED))}")


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))

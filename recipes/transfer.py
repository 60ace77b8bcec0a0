"""Pre-train on half of the classes of a data set, share that, and fine-tune it on the other half, every method beside each other.

    python recipes/transfer.py --dataset_name uoft-cs/cifar10 [--repo USER/NAME] [--output_dir runs/transfer]

Classes of even index are the first half: all of their images pre-train the model of --config. Of those of odd index --shots images
each are learnt from scratch, by full fine-tuning with and without layer decay, by LoRA, by a linear probe and by k-NN, each but the
last with --seeds seeds, and all test images are scored. With --repo the pre-trained model is pushed to the Hub, and each method
loads it from there; without, from its folder.

    data/NAME-even, data/NAME-odd   the two halves, as Parquet
    pretrained/                     a run of train.py, as are
    scratch/0, full/0, ...          a folder a method, and in it one a seed
    knn/results.json                what recipes/evaluate.py says of the frozen features, and the seconds it took

At the end comes a table made of the results.json of them all (benchmarks/run_tables.py). What was stopped goes on by the same
command. Exit codes: 0, 75 when a signal stopped it (the run of the moment saves its state), 1 after an error, 2 for a flag that is
wrong.
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

from benchmarks import run_tables


# This folder holds evaluate.py, which would hide the library of that name.
RECIPES = Path(__file__).resolve().parent
sys.path = [path for path in sys.path if Path(path).resolve() != RECIPES]

import datasets
import numpy as np
import torch
import yaml
from datasets import ClassLabel, Image

from hf_vit.data import datasets as data
from hf_vit.system import environment
from hf_vit.system.files import atomic_dir, write_text
from hf_vit.training import resume


# Flags of train.py. From scratch all the others are those of --config; fine-tuning shares AUGMENTATION with it. The rates
# were not searched for: full fine-tuning has that of layer decay, so that they differ in nothing else; with 3e-4 it had scored less.
METHODS = {
    "scratch": {},
    "full": {"learning_rate": "1e-3"},
    "layer-decay": {"learning_rate": "1e-3", "layer_decay": "0.75"},
    "lora": {"learning_rate": "2e-3", "lora_rank": "8"},
    "probe": {"learning_rate": "3e-3", "freeze_backbone": "true"},
}
AUGMENTATION = ("crop", "crop_scale", "shift", "flip", "color_jitter")
BATCH = 32  # images a step of every method: a larger part of so few images would leave a step or two an epoch


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )  # fmt: skip
    parser.add_argument(
        "--dataset_name",
        required=True,
        help="Hub id, local folder or file with a split called test, or fashion-mnist-mini",
    )
    parser.add_argument("--image_column", help="column of images; found by its feature type if not given")
    parser.add_argument("--label_column", help="column of labels; found by its feature type if not given")
    parser.add_argument(
        "--config", default=as_typed("configs/cifar10-cpu.yaml"), help="preset of train.py, from scratch"
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/transfer"), help="folder of all runs")
    parser.add_argument("--shots", type=int, default=50, help="training images a class of the second half")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method")
    parser.add_argument("--pretrain_epochs", type=float, help="if not given, those of --config")
    parser.add_argument("--scratch_epochs", type=float, default=100, help="on the second half, without pre-training")
    parser.add_argument("--finetune_epochs", type=float, default=30, help="on the second half, of all other methods")
    parser.add_argument("--repo", help="USER/NAME on the Hub, to push the pre-trained model to and load it from")
    parser.add_argument("--public", action="store_true", help="a new repository may be seen by everybody")
    args = parser.parse_args(argv)
    for name in ("shots", "seeds", "pretrain_epochs", "scratch_epochs", "finetune_epochs"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"argument --{name}: {value} was given, 1 or more was wanted")
    if args.public and args.repo is None:
        parser.error("argument --public: of what? --repo USER/NAME names it")
    return args


def as_typed(name: str) -> str:
    """A file of this folder, as one would type it here: from the repository's root, `recipes/NAME`."""
    return f"recipes/{name}" if Path.cwd() == RECIPES.parent else str(RECIPES / name)


def halves(
    folder: Path, name: str, shots: int, image_column: str | None = None, label_column: str | None = None
) -> tuple[Path, Path]:
    """Folders of Parquet files: NAME-even has the classes of even index and all of their images; NAME-odd those of odd index,
    `shots` training images of each, drawn with seed 0, and all of their test images.

    The images are in the column `image`, the labels, numbered anew, in `label`. Images that are files elsewhere are named, not
    copied.

    Raises:
        ValueError: for fewer than 4 classes, fewer than `shots` images of one, no test split, or other halves in `folder`.
    """
    asked = {"dataset_name": name, "shots": shots, "image_column": image_column, "label_column": label_column}
    first, second = (folder / f"{Path(name).name}-{which}" for which in ("even", "odd"))
    record = folder / "halves.json"
    if record.is_file():
        if (there := json.loads(record.read_text())) != asked:
            raise ValueError(f"{folder} holds halves of {there}, and {asked} was asked for: name another --output_dir")
        return first, second
    splits = data.load(name)
    if "test" not in splits:
        raise ValueError(f"{name} has the splits {', '.join(splits)}; wanted one called test, to score both halves on")
    splits, names, _ = data.prepare(splits, eval_split="test", image_column=image_column, label_column=label_column)
    if len(names) < 4:
        raise ValueError(f"{name} has {len(names)} classes ({', '.join(names)}); wanted 4 or more, two for each half")

    def part(split: str, odd: int):
        rows = splits[split]
        labels = np.asarray(rows["label"])
        kept = np.flatnonzero(labels % 2 == odd)
        if split == "train" and odd:
            kept = kept[data.subset(labels[kept], names, 1.0, shots, seed=0)]
        rows = rows.select(kept).select_columns("image").cast_column("image", Image())
        return rows.add_column("label", (labels[kept] // 2).tolist(), feature=ClassLabel(names=names[odd::2]))

    found = {(split, odd): part(split, odd) for split in ("train", "eval") for odd in (0, 1)}
    license = data.license_of(name)
    with atomic_dir(folder) as aside:
        for odd, half in enumerate((first, second)):
            (aside / half.name).mkdir()
            found["train", odd].to_parquet(aside / half.name / "train.parquet")
            found["eval", odd].to_parquet(aside / half.name / "test.parquet")
            card = {
                "pretty_name": f"{', '.join(names[odd::2])} of {name}",
                **({"license": license} if license else {}),
            }
            text = f"---\n{yaml.safe_dump(card)}---\nMade by recipes/transfer.py.\n"
            (aside / half.name / "README.md").write_text(text, encoding="utf-8")
        (aside / record.name).write_text(json.dumps(asked) + "\n")
    return first, second


def run(script: str, *flags):
    """A script of this folder, in a process of its own that writes to the same terminal and gets the signals that come here.

    Raises:
        ValueError: if it fails.
        SystemExit: if a signal stopped it.
    """
    command = [as_typed(script), *map(str, flags)]
    print(f"\n{shlex.join(command)}", flush=True)
    with subprocess.Popen([sys.executable, *command]) as child:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, _: child.send_signal(number))
        code = child.wait()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    if code == resume.STOPPED:
        sys.exit(code)
    if code != 0:
        raise ValueError(f"`{shlex.join(command)}` ended with exit code {code}; what it did before is kept")


def train(folder: Path, **flags):
    """A run of train.py, which leaves alone what is finished."""
    run("train.py", *(f"--{name}={value}" for name, value in flags.items()), f"--output_dir={folder}")


def score_features(folder: Path, start, second: Path, precision: str, of: str):
    """Classify the second half by its nearest neighbours among the frozen features, and write down the seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    run(
        "evaluate.py", "--model_name_or_path", start, "--dataset_name", second, "--split", "test", "--probe_split", "train",
        "--mixed_precision", precision, "--output_file", folder / "metrics.json",
    )  # fmt: skip
    seconds = round(time.monotonic() - began, 1)
    circumstances = environment.environment_info("cuda" if torch.cuda.is_available() else "cpu", 1, precision)
    found = {**read(folder / "metrics.json"), "seconds": seconds, "halves_of": of, **circumstances}
    write_text(folder / resume.FINISHED, json.dumps(found, indent=2) + "\n")


def read(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8"))


def main(args: argparse.Namespace):
    config, out = yaml.safe_load(Path(args.config).read_text(encoding="utf-8")), args.output_dir
    if "preset" not in config:
        raise ValueError(f"--config {args.config} names no preset: wanted one that trains from scratch")
    datasets.disable_progress_bars()
    first, second = halves(out / "data", args.dataset_name, args.shots, args.image_column, args.label_column)
    # Ctrl-C reaches the command that runs as well: that one saves its state and ends, and with it this one.
    signal.signal(signal.SIGINT, lambda *_: None)

    columns = {"image_column": "image", "label_column": "label"}  # whatever --config says of the whole data set
    from_scratch = {"config": args.config, **columns}
    epochs = {} if args.pretrain_epochs is None else {"num_train_epochs": args.pretrain_epochs}
    train(out / "pretrained", **from_scratch, dataset_name=first, **epochs)
    start = out / "pretrained" / "model"
    if args.repo is not None:
        public = ["--public"] if args.public else []
        # As code, for a native layout knows no patch dropout, which the model from scratch is trained with.
        run("publish.py", out / "pretrained", "--repo", args.repo, "--push", "--layout", "code", *public)
        start = args.repo

    kept = {key: config[key] for key in (*AUGMENTATION, "mixed_precision") if key in config}
    kinds = {
        "scratch": (from_scratch, args.scratch_epochs),
        "tuned": ({**columns, "model_name_or_path": start, **kept}, args.finetune_epochs),
    }
    for seed in range(args.seeds):  # in turns, so that other work on this machine meets every method alike
        for name, flags in METHODS.items():
            common, epochs = kinds["scratch" if name == "scratch" else "tuned"]
            few = {"per_device_train_batch_size": BATCH, "num_train_epochs": epochs, "eval_epochs": math.ceil(epochs)}
            train(out / name / str(seed), **common, dataset_name=second, **few, **flags, seed=seed)
    score_features(out / "knn", start, second, config.get("mixed_precision", "auto"), args.dataset_name)

    runs = {name: [read(out / name / str(seed) / resume.FINISHED) for seed in range(args.seeds)] for name in METHODS}
    runs["pretrained"] = [read(out / "pretrained" / resume.FINISHED)]
    print(f"\n{run_tables.transfer_table(runs, read(out / 'knn' / resume.FINISHED))}")


if __name__ == "__main__":
    try:
        main(parse())
    except (ValueError, OSError) as error:  # one sentence; a traceback would hide it
        sys.exit(f"error: {error}")

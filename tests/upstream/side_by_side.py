"""Fine-tune one checkpoint on the same images by recipes/train.py and by transformers' run_image_classification.py.

    python tests/upstream/side_by_side.py run_image_classification.py [--shots 30] [--epochs 10] [--seeds 0 1 2]

The argument is examples/pytorch/image-classification/run_image_classification.py of transformers, which needs torchvision; it
runs unmodified. The checkpoint is model_cards/transfer/pretrained (five classes of CIFAR-10), as a native ViT folder; the
images are class folders of the embedded Fashion-MNIST. Epochs and batch size are the same, and both evaluate the last weights
on the test images; other flags are at their defaults, and transformers also gets two higher learning rates. Before that, each
resumes a run of 12 steps from its checkpoint of step 8, and the weights are compared with those of the run that went through.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

from datasets import load_dataset
from safetensors.torch import load_file
from transformers import AutoImageProcessor

from hf_vit import HFViTForImageClassification


HOUSE = Path(__file__).parents[2]
RATES = (5e-5, 2e-4, 1e-3)  # the first is the default of TrainingArguments


def write_images(folder: Path, shots: int) -> None:
    """Class folders of the embedded images: the first `shots` of each class to train on, and all that are for tests."""
    for split, most in (("train", shots), ("test", None)):
        rows = load_dataset(str(HOUSE / "recipes" / "data" / "fashion-mnist-mini"), split=split)
        labels = rows["label"]
        for label, name in enumerate(rows.features["label"].names):
            target = folder / split / name.replace("/", " or ")
            target.mkdir(parents=True)
            for index in [index for index, value in enumerate(labels) if value == label][:most]:
                rows[index]["image"].convert("RGB").save(target / f"{index}.png")


def measure(command: list, cwd: Path) -> float:
    """Seconds of a command, from its start to its end."""
    began = time.perf_counter()
    result = subprocess.run([sys.executable, *map(str, command)], cwd=cwd, capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stderr)
    return time.perf_counter() - began


def command(args, folder: Path, rate: float | None, target: Path, *more) -> list:
    """A run of recipes/train.py (no rate), or of transformers' script, into a folder."""
    flags = [
        "--model_name_or_path",
        folder / "checkpoint",
        "--output_dir",
        target,
        "--per_device_train_batch_size",
        16,
    ]
    if rate is None:
        return [HOUSE / "recipes" / "train.py", "--dataset_name", folder / "images", *flags, *more]
    flags += ["--train_dir", folder / "images" / "train", "--validation_dir", folder / "images" / "test", "--do_train"]
    flags += ["--do_eval", "--remove_unused_columns", "false", "--ignore_mismatched_sizes", "--learning_rate", rate]
    return [args.script, *flags, *more]


def compare_accuracy(args, folder: Path) -> None:
    rows = {"recipes/train.py": []} | {f"transformers, --learning_rate {rate}": [] for rate in RATES}
    for seed in args.seeds:
        for name, rate in zip(rows, (None, *RATES), strict=True):
            target = folder / f"{rate}-{seed}"
            length = ["--num_train_epochs", args.epochs, "--seed", seed]
            seconds = measure(command(args, folder, rate, target, *length), folder)
            if rate is None:
                accuracy = json.loads((target / "results.json").read_text())["metrics"]["accuracy"]
            else:
                accuracy = json.loads((target / "eval_results.json").read_text())["eval_accuracy"]
            rows[name].append((accuracy, seconds))
            print(f"{name}, seed {seed}: {accuracy:.2%} in {seconds:.1f} s", flush=True)
    for name, found in rows.items():
        print(f"{name:36} {mean(row[0] for row in found):.2%}  {mean(row[1] for row in found):.1f} s")


def compare_resuming(args, folder: Path) -> None:
    """12 steps at once, and the last 4 of them from the checkpoint of step 8, which is within an epoch."""
    for name, rate in (("recipes/train.py", None), ("transformers", RATES[0])):
        whole, resumed = folder / f"whole-{rate}", folder / f"resumed-{rate}"
        every, checkpoint, flag, model = (
            ("--checkpointing_steps", "checkpoints/step-000008", "--resume", "model/")
            if rate is None
            else ("--save_steps", "checkpoint-8", "--resume_from_checkpoint", "")
        )
        length = ["--max_steps" if rate else "--max_train_steps", 12, every, 8]
        measure(command(args, folder, rate, whole, *length), folder)
        measure(command(args, folder, rate, resumed, *length, flag, whole / checkpoint), folder)
        one, other = (load_file(run / f"{model}model.safetensors") for run in (whole, resumed))
        largest = max((one[key] - other[key]).abs().max().item() for key in one)
        print(
            f"{name}: the largest difference of a weight after resuming within an epoch is {largest:.1e}", flush=True
        )


def main(args: argparse.Namespace, folder: Path) -> None:
    write_images(folder / "images", args.shots)
    checkpoint = HOUSE / "model_cards" / "transfer" / "pretrained"
    HFViTForImageClassification.from_pretrained(checkpoint).to_transformers().save_pretrained(folder / "checkpoint")
    AutoImageProcessor.from_pretrained(checkpoint).save_pretrained(folder / "checkpoint")
    (folder / "accuracy").mkdir()
    # what `evaluate.load("accuracy")` finds here, and would else download
    shutil.copy(HOUSE / "hf_vit" / "evaluation" / "metrics.py", folder / "accuracy" / "accuracy.py")
    compare_resuming(args, folder)
    if args.seeds:
        compare_accuracy(args, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=lambda name: Path(name).resolve(), help="run_image_classification.py")
    parser.add_argument("--shots", type=int, default=30, help="training images per class")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as name:
        main(parser.parse_args(), Path(name))

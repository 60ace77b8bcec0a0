"""YAML preset + flags -> one flat dataclass of run numbers, and back to YAML, as resolved."""

import argparse
import dataclasses
import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml
from transformers import HfArgumentParser


def _(default, help):
    return field(default=default, metadata={"help": help})


@dataclass
class TrainArguments:
    """Every number of a run. The architecture has its own home, HFViTConfig; `preset` and `config_overrides` reach it."""

    dataset_name: str | None = _(
        None, "Hub id, local folder or file, or `fashion-mnist-mini`, which lies in recipes/data"
    )
    dataset_config: str | None = _(None, "configuration of the data set, where it has several")
    image_column: str | None = _(None, "column of images; found by its feature type if not given")
    label_column: str | None = _(None, "column of labels; found by its feature type if not given")
    train_split: str = _("train", "split to train on")
    eval_split: str | None = _(None, "split to score; if not given: validation, else test, else a part of train")
    eval_fraction: float = _(0.1, "part of train that is set aside, by class, where there is no split to score")

    model_name_or_path: str | None = _(None, "checkpoint to fine-tune; without it training starts from scratch")
    preset: str | None = _(None, "architecture to train from scratch, such as tiny-patch16-224")
    config_overrides: str | None = _(None, "fields of HFViTConfig, as `hidden_size=64,pooling=mean`")
    image_size: int | None = _(None, "side of the (square) input in pixels; if not given, the model's own")

    output_dir: str | None = _(None, "run folder, such as runs/demo")
    overwrite: bool = _(False, "replace a finished run in output_dir")
    seed: int = _(0, "decides initial weights, order and augmentation")

    num_train_epochs: float = _(10.0, "passes over the training set")
    max_train_steps: int | None = _(None, "optimizer steps; overrides num_train_epochs")
    per_device_train_batch_size: int = _(64, "images a process and a forward pass")
    per_device_eval_batch_size: int = _(256, "the same while scoring")
    gradient_accumulation_steps: int = _(1, "forward passes an optimizer step")

    optimizer: Literal["adamw", "muon"] = _("adamw", "muon: Muon for the matrices of the layers, AdamW for the rest")
    learning_rate: float | None = _(None, "peak; if not given, 1e-3 from scratch and 5e-5 to fine-tune")
    weight_decay: float = _(0.05, "decoupled weight decay of matrices; biases, norms, tokens and positions have none")
    adam_beta1: float = _(0.9, "AdamW")
    adam_beta2: float = _(0.999, "AdamW")
    warmup_ratio: float = _(0.05, "part of the steps over which the learning rate rises; a half cosine to 0 follows")
    max_grad_norm: float = _(1.0, "gradients are clipped to this norm; 0 leaves them alone")
    label_smoothing: float = _(0.1, "probability mass spread over all classes")
    ema_decay: float = _(0.0, "above 0: score and save an exponential moving average of the weights")

    crop: Literal["none", "resized"] = _("resized", "resized: a random part of the image, stretched over the whole")
    shift: int = _(0, "move the image by up to this many pixels in each direction")
    flip: bool = _(True, "mirror half of the images")
    erase: float = _(0.0, "probability to fill a random rectangle with noise")
    mixup: float = _(0.0, "above 0: blend pairs of images, by a weight from Beta(mixup, mixup)")

    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = _("auto", "auto: bf16 where the hardware is fast at it")
    compile: Literal["auto", "yes", "no"] = _("auto", "torch.compile; auto: on CUDA only")
    num_workers: int | None = _(None, "processes that decode images; if not given, one a core up to 8")
    log_steps: int = _(10, "optimizer steps a line of metrics.jsonl")
    eval_epochs: int = _(1, "epochs between scorings")


RANGES = (
    (
        (
            "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "max_train_steps",
            "log_steps", "eval_epochs", "image_size",
        ),
        lambda value: value >= 1, "1 or more",
    ),
    (("num_train_epochs", "learning_rate"), lambda value: value > 0, "more than 0"),
    (
        ("weight_decay", "max_grad_norm", "mixup", "shift", "num_workers", "seed"),
        lambda value: value >= 0, "0 or more",
    ),
    (
        ("eval_fraction", "adam_beta1", "adam_beta2", "label_smoothing", "ema_decay"),
        lambda value: 0 <= value < 1, "0 or more and less than 1",
    ),
    (("warmup_ratio", "erase"), lambda value: 0 <= value <= 1, "0 to 1"),
)  # fmt: skip


def parse(argv: list[str]) -> TrainArguments:
    """Flags of `recipes/train.py` -> TrainArguments. `--config FILE` is read first, so that a flag overrides its line.

    The YAML goes through the same parser as the flags, so `3e-4` is a float in both and a choice is checked in both.

    Raises:
        SystemExit: with a message that names the key, for an unknown or ill-typed one.
    """
    parser = HfArgumentParser(
        TrainArguments, allow_abbrev=False, usage="%(prog)s [--config FILE] [--key value ...]; --help lists the keys"
    )
    parser.add_argument("--config", help="YAML file of the same keys; flags override it")
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    config, flags = first.parse_known_args(argv)
    args, _, unknown = parser.parse_args_into_dataclasses(
        [*read_yaml(config.config, parser), *flags], return_remaining_strings=True
    )
    if unknown:
        name = unknown[0].lstrip("-").partition("=")[0]
        close = difflib.get_close_matches(name, [f.name for f in dataclasses.fields(TrainArguments)], n=1)
        parser.error(f"unknown key {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    if args.dataset_name is None or args.output_dir is None:
        missing = [f"--{name}" for name in ("dataset_name", "output_dir") if getattr(args, name) is None]
        parser.error(f"{' and '.join(missing)} must be given, as a flag or in --config")
    given = [flag.partition("=")[0] for flag in flags]
    if "--model_name_or_path" in given and "--preset" not in given:
        args.preset = args.config_overrides = None  # a flag goes before the file
    if "--preset" in given and "--model_name_or_path" not in given:
        args.model_name_or_path = None
    if (args.model_name_or_path is None) == (args.preset is None):
        parser.error("give either --model_name_or_path (fine-tune) or --preset (from scratch)")
    for names, holds, wanted in RANGES:
        for name in names:
            value = getattr(args, name)
            if value is not None and not holds(value):
                parser.error(f"argument --{name}: {value} was given, {wanted} was wanted")
    if args.learning_rate is None:
        args.learning_rate = 1e-3 if args.model_name_or_path is None else 5e-5
    return args


def read_yaml(path: str | None, parser: argparse.ArgumentParser) -> list[str]:
    """A flat YAML mapping -> the same as flags, `["--seed=1", ...]`; null leaves the default."""
    if path is None:
        return []
    if not Path(path).is_file():
        parser.error(f"--config {path}: no such file")
    try:
        preset = yaml.safe_load(Path(path).read_text()) or {}
    except yaml.YAMLError as error:
        parser.error(f"--config {path} is not YAML: {error}")
    nested = not isinstance(preset, dict) or [key for key, value in preset.items() if isinstance(value, dict | list)]
    if nested:
        parser.error(
            f"--config {path}: wanted flat `key: value` lines, but found {nested if nested is not True else preset!r}"
        )
    return [f"--{key}={value}" for key, value in preset.items() if value is not None]


def as_yaml(args: TrainArguments) -> str:
    """Every key that decides the run, as a preset file holds it; `--config` on it gives the same run."""
    resolved = {key: value for key, value in dataclasses.asdict(args).items() if value is not None}
    del resolved["overwrite"]  # consent to replace one folder, once
    return yaml.safe_dump(resolved, sort_keys=False)


def overrides(text: str | None) -> dict:
    """`"hidden_size=64,pooling=mean"` -> `{"hidden_size": 64, "pooling": "mean"}`."""
    pairs = [pair.partition("=") for pair in (text or "").split(",") if pair.strip()]
    for name, equals, _value in pairs:
        if not equals:
            raise ValueError(f"config_overrides: {name!r} has no value; wanted `field=value,field=value`")
    return {name.strip(): yaml.safe_load(value) for name, _equals, value in pairs}

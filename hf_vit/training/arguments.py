"""YAML preset + flags -> one flat dataclass of run numbers, and back to YAML, as resolved.

It imports the standard library and PyYAML alone: flags are answered before the imports that take seconds.
"""

import argparse
import contextlib
import dataclasses
import difflib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args, get_origin

import yaml

from hf_vit.system.command_line import Parser, RefusedFlag
from hf_vit.system.errors import UserError
from hf_vit.system.recipes_folder import RECIPES


CONFIGS = RECIPES / "configs"  # the presets
GROUPS = {  # of --help: the field that begins each of them
    "dataset_name": "data",
    "model_name_or_path": "model",
    "output_dir": "run folder",
    "num_train_epochs": "length and batch size",
    "optimizer": "optimizer and loss",
    "crop": "augmentation",
    "mixed_precision": "hardware",
    "log_steps": "logging and evaluation",
}


def argument(default, help):
    return field(default=default, metadata={"help": help})


@dataclass
class TrainArguments:
    """Every number of a run. The architecture has its own home, HFViTConfig; `preset` and `config_overrides` reach it."""

    groups = GROUPS
    refused = {}  # fields that are no flags of a script, and why

    dataset_name: str | None = argument(
        None, "Hub id, local folder or file, or `fashion-mnist-mini`, which lies in recipes/data"
    )
    dataset_config: str | None = argument(None, "configuration of the data set, where it has several")
    image_column: str | None = argument(None, "column of images; found by its feature type if not given")
    label_column: str | None = argument(None, "column of labels; found by its feature type if not given")
    label_separator: str | None = argument(
        None, 'several labels an image, as one text: what stands between them, such as ";"'
    )
    label_columns: str | None = argument(
        None, "several labels an image, as columns of 0 and 1: the names of these, such as cat,dog,bird"
    )
    label_names: str | None = argument(None, "text file of class names, a line each, where labels are bare numbers")
    class_level: int | None = argument(
        None, "folder below the split that is the class, 2 for animals/dogs/1.jpg; default: 1"
    )
    train_split: str = argument("train", "split to train on")
    eval_split: str | None = argument(
        None, "split to score; if not given: validation, else test, else a part of train"
    )
    eval_fraction: float = argument(0.1, "part of train that is set aside, by class, where there is no split to score")
    train_fraction: float = argument(1.0, "part of each class to train on")
    shots: int | None = argument(None, "images of each class to train on; if not given, all")
    balance: Literal["none", "sampling", "weights"] = argument(
        "none", "rare classes: sampling shows each class as often as any other, weights makes its loss count as much"
    )
    dry_run: bool = argument(False, "print what is read, and end before anything is trained or written")
    on_bad_image: Literal["stop", "skip"] = argument(
        "stop", "images that cannot be read; results.json counts the skipped"
    )
    streaming: bool = argument(
        False, "read the data while training, without a copy on this disk; needs max_train_steps"
    )
    shuffle_buffer: int = argument(2048, "rows of a stream that are shuffled at a time")

    model_name_or_path: str | None = argument(None, "checkpoint to fine-tune; without it training starts from scratch")
    preset: str | None = argument(None, "architecture to train from scratch, such as tiny-patch16-224")
    config_overrides: str | None = argument(None, "fields of HFViTConfig, as `hidden_size=64,pooling=mean`")
    image_size: int | None = argument(None, "side of the (square) input in pixels; if not given, the model's own")
    first_image_size: int | None = argument(
        None, "smaller side to begin with, faster; the rest is trained at image_size; if not given, all of it is"
    )
    first_stage: float = argument(0.8, "part of the steps that are trained at first_image_size")
    freeze_backbone: bool = argument(False, "train the head alone (linear probe)")
    freeze_layers: int = argument(0, "do not train the embeddings and this many layers")
    cache_features: bool = argument(
        False,
        "with freeze_backbone: compute what the head sees once, of images that are not augmented, and train on that",
    )
    lora_rank: int = argument(0, "above 0: train low-rank updates of the layers, and the head, through PEFT")
    lora_alpha: float = argument(16.0, "the updates are scaled by lora_alpha / lora_rank")
    lora_dropout: float = argument(0.0, "dropout before the updates")
    lora_save: Literal["merged", "adapter"] = argument(
        "merged", "merged: a whole model; adapter: what goes on top of the base"
    )
    teacher_name_or_path: str | None = argument(
        None, "image classifier whose answers are learned too (distillation); if not given, none"
    )
    distillation_alpha: float = argument(0.5, "weight of the teacher's part of the loss")
    distillation_temperature: float = argument(1.0, "softens both answers")

    output_dir: str | None = argument(None, "run folder, such as runs/demo")
    overwrite: bool = argument(False, "replace the run in output_dir")
    resume: str = argument(
        "auto",
        "auto: go on with the run of this configuration in output_dir; never; or a checkpoint, or a run folder, to go on from",
    )
    checkpointing_steps: int | None = argument(
        None, "steps between checkpoints; if not given, 5 minutes; 0: only where a run is stopped"
    )
    checkpoints_total_limit: int = argument(2, "checkpoints that are kept, the last ones")
    max_skipped_steps: int = argument(
        10, "steps without a finite loss and gradient that are skipped before the run stops"
    )
    seed: int = argument(0, "decides initial weights, order and augmentation")

    num_train_epochs: float | None = argument(
        None,
        "passes over the training set; if not given 10, and more for small sets (recipes/docs/fine-tuning.md)",
    )
    max_train_steps: int | None = argument(None, "optimizer steps; overrides num_train_epochs")
    per_device_train_batch_size: int | None = argument(
        None,
        "images a process and a forward pass; if not given 64, and to fine-tune on fewer than 2,048 images 16 or 32",
    )
    per_device_eval_batch_size: int = argument(256, "the same while scoring")
    gradient_accumulation_steps: int = argument(1, "forward passes an optimizer step")
    auto_find_batch_size: bool = argument(
        True, "where memory is short: smaller forward passes, as many more of them a step"
    )

    optimizer: Literal["adamw", "muon"] = argument(
        "adamw", "muon: Muon for the matrices of the layers, AdamW for the rest"
    )
    learning_rate: float | None = argument(
        None, "peak; if not given, 1e-3 from scratch, else by what is trained and how wide the model is"
    )
    head_learning_rate: float | None = argument(
        None,
        "peak of the classification head; if not given, learning_rate where that is given, else by what is trained",
    )
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd", "step"] = argument(
        "cosine", "after the warm-up; wsd: constant, then linear to 0; step: in stages of a tenth each"
    )
    lr_decay_ratio: float = argument(0.2, "wsd: part of the steps at the end over which the rate falls")
    lr_stages: int = argument(2, "step: number of stages")
    layer_decay: float | None = argument(
        None,
        "below 1: each layer learns at this part of the rate of the one above it; if not given 0.75 to fine-tune all layers "
        "without --learning_rate, else 1",
    )
    weight_decay: float = argument(
        0.05, "decoupled weight decay of matrices; biases, norms, tokens and positions have none"
    )
    adam_beta1: float = argument(0.9, "AdamW")
    adam_beta2: float = argument(0.999, "AdamW")
    warmup_ratio: float = argument(0.05, "part of the steps over which the learning rate rises")
    max_grad_norm: float = argument(1.0, "gradients are clipped to this norm; 0 leaves them alone")
    loss: Literal["cross_entropy", "binary_cross_entropy", "asymmetric"] | None = argument(
        None,
        "binary: a yes or no for each label; asymmetric: the same, where easy negatives weigh little (arXiv 2009.14119), for several "
        "labels an image; if not given, binary for these, else cross_entropy",
    )
    label_smoothing: float = argument(
        0.1, "probability mass spread over all classes; of several labels an image, over the yes and no of each"
    )
    calibrate: bool = argument(
        True,
        "with validation images: fit a temperature on them, and fold it into the head, so that probabilities are as often right as "
        "they say",
    )
    ema_decay: float = argument(0.0, "above 0: score and save an exponential moving average of the weights")

    crop: Literal["none", "resized", "simple"] = argument(
        "resized",
        "resized: a random part of the image, stretched over the whole; simple: shifted by up to 4 pixels, mirrored",
    )
    crop_scale: float | None = argument(
        None, "crop resized: smallest part of the image's area; if not given 0.35, and 0.64 to fine-tune"
    )
    eval_crop: float | None = argument(
        None,
        "part of the shorter side that is scored, such as 0.875: resized to 256, the middle 224 cut out; if not given, as the "
        "checkpoint's image processor says, and from scratch the whole image, stretched",
    )
    shift: int = argument(0, "move the image by up to this many pixels in each direction")
    flip: bool = argument(True, "mirror half of the images")
    auto_augment: Literal["none", "trivial", "rand"] = argument("none", "trivial: TrivialAugment; rand: RandAugment")
    rand_magnitude: int = argument(9, "auto_augment rand: strength, of 30")
    color_jitter: float = argument(0.0, "brightness, contrast and saturation change by up to this part")
    erase: float = argument(0.0, "probability to fill a random rectangle with noise")
    mixup: float = argument(0.0, "above 0: blend pairs of images, by a weight from Beta(mixup, mixup)")
    cutmix: float = argument(
        0.0, "above 0: paste a rectangle of one image into another; with mixup, each in half of the batches"
    )

    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = argument(
        "auto", "auto: bf16 where the hardware is fast at it"
    )
    gradient_checkpointing: bool = argument(
        False, "compute the layers' activations anew in the backward pass: less memory, about a third more work"
    )
    compile: Literal["auto", "yes", "no"] = argument("auto", "torch.compile; auto: on CUDA, for 2,000 steps or more")
    num_workers: int | None = argument(
        None, "processes that decode images; if not given, one a core of this process, up to 32"
    )
    log_steps: int | None = argument(
        None, "optimizer steps a line of metrics.jsonl; if not given, 10, and less for fewer than 200 steps"
    )
    eval_epochs: int | None = argument(
        None,
        "epochs between scorings; if not given 1, and more where a checkpoint is fine-tuned for 40 epochs or more",
    )
    eval_steps: int | None = argument(None, "optimizer steps between scorings; overrides eval_epochs")
    report_to: str = argument("none", "trackers beside metrics.jsonl, such as tensorboard,wandb")


AT_LEAST_ONE = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "max_train_steps",
    "log_steps", "eval_epochs", "eval_steps", "image_size", "first_image_size", "shots", "shuffle_buffer", "lr_stages",
    "checkpoints_total_limit",
)  # fmt: skip
POSITIVE = ("num_train_epochs", "learning_rate", "head_learning_rate", "lora_alpha", "distillation_temperature")
NOT_NEGATIVE = (
    "weight_decay", "max_grad_norm", "mixup", "cutmix", "shift", "num_workers", "seed", "freeze_layers", "lora_rank",
    "checkpointing_steps", "max_skipped_steps",
)  # fmt: skip
BELOW_ONE = (
    "eval_fraction", "adam_beta1", "adam_beta2", "label_smoothing", "ema_decay", "lora_dropout", "color_jitter",
)  # fmt: skip
AT_MOST_ONE = ("warmup_ratio", "erase", "distillation_alpha")
PART = ("eval_crop", "train_fraction", "layer_decay", "crop_scale", "lr_decay_ratio", "first_stage")


def check_ranges(args: TrainArguments):
    """Raise ValueError for a number outside of its range."""
    for name, value in vars(args).items():
        wanted = None
        if value is None:
            continue
        if name in AT_LEAST_ONE and value < 1:
            wanted = "1 or more"
        elif name in POSITIVE and value <= 0:
            wanted = "more than 0"
        elif name in BELOW_ONE and not 0 <= value < 1:
            wanted = "0 or more and less than 1"
        elif name in AT_MOST_ONE and not 0 <= value <= 1:
            wanted = "0 to 1"
        elif name == "rand_magnitude" and not 0 <= value <= 30:
            wanted = "0 to 30"
        elif name in PART and not 0 < value <= 1:
            wanted = "more than 0 and at most 1"
            if name == "eval_crop":
                wanted += ", the whole shorter side (0.875 keeps 224 of 256 pixels),"
        elif name in NOT_NEGATIVE and value < 0:
            wanted = "0 or more"
        if wanted is not None:
            raise UserError(f"argument --{name}: {value} was given, {wanted} was wanted")


NEEDED = {  # what has no effect without another flag
    "lora_alpha": "lora_rank", "lora_dropout": "lora_rank", "distillation_alpha": "teacher_name_or_path",
    "distillation_temperature": "teacher_name_or_path", "first_stage": "first_image_size", "shuffle_buffer": "streaming",
}  # fmt: skip


def check_combinations(args: TrainArguments):
    """Raise ValueError for two arguments that contradict each other, and for one that has no effect without another."""
    for name, other in NEEDED.items():
        if getattr(args, name) != getattr(type(args), name) and not getattr(args, other):
            raise UserError(f"--{name} has no effect without --{other}: give both, or neither")

    def refuse(one, other, what_to_do):
        raise UserError(f"{one} does not go with {other}: {what_to_do}")

    augments = args.shift or args.color_jitter or args.erase or args.mixup or args.cutmix
    augments = augments or args.auto_augment != "none"
    partial = args.freeze_backbone or args.freeze_layers > 0 or args.lora_rank > 0
    if args.eval_split is not None and args.eval_split == args.train_split:
        what_to_do = "the score would be of images that were trained on; leave it out, and a part of them is set aside"
        refuse("--eval_split", "the same --train_split", what_to_do)
    if args.crop == "simple" and args.shift > 0:
        refuse("--crop simple", "--shift", "both move the image: give one of them")
    if args.lora_save == "adapter" and args.lora_rank == 0:
        refuse("--lora_save adapter", "no --lora_rank", "give a rank")
    if (args.mixup > 0 or args.cutmix > 0) and args.per_device_train_batch_size == 1:
        refuse("--mixup or --cutmix", "--per_device_train_batch_size 1", "they mix two images of a batch")
    if args.shots is not None and args.train_fraction < 1:
        refuse("--shots", "--train_fraction", "give one of them")
    if args.freeze_backbone and args.lora_rank > 0:
        refuse("--freeze_backbone", "--lora_rank", "give one of them")
    if args.cache_features and not args.freeze_backbone:
        refuse("--cache_features", "a backbone that is trained", "pass --freeze_backbone true")
    if args.cache_features and (augments or args.streaming or args.teacher_name_or_path or args.first_image_size):
        others = "augmentation, --streaming, --teacher_name_or_path or --first_image_size"
        refuse("--cache_features", others, "each image is looked at once: leave one out")
    if args.gradient_checkpointing and args.cache_features:
        what_to_do = "only a head is trained, which has no activations to spare: leave one out"
        refuse("--gradient_checkpointing", "--cache_features", what_to_do)
    if args.freeze_layers > 0 and args.lora_rank > 0:
        refuse("--freeze_layers", "--lora_rank", "give one of them")
    if partial and args.model_name_or_path is None:
        what_to_do = "name a checkpoint with --model_name_or_path"
        refuse("--freeze_backbone, --freeze_layers or --lora_rank", "training from scratch", what_to_do)
    if args.streaming:
        if args.shots is not None or args.train_fraction < 1 or args.balance != "none":
            refuse("--streaming", "--shots, --train_fraction or --balance", "they need the whole data set at hand")
        if args.max_train_steps is None:
            refuse("--streaming", "an open end", "a stream has no length: give --max_train_steps")
    if args.overwrite and args.resume not in ("auto", "never"):
        refuse("--overwrite", "--resume PATH", "go on from there in another --output_dir")


# What a run may change on its way: where it is written and how it is worked through, and not what comes out. How many images
# make a step counts, however they are shared out.
RESUME_MUTABLE = (
    "output_dir", "resume", "checkpointing_steps", "checkpoints_total_limit", "max_skipped_steps", "num_workers", "report_to",
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "auto_find_batch_size",
    "gradient_checkpointing", "log_steps", "calibrate", "on_bad_image",
)  # fmt: skip


# What a run chooses itself where the flags leave it open, and keeps when it is resumed.
DERIVED = (
    "num_train_epochs", "per_device_train_batch_size", "learning_rate", "head_learning_rate", "layer_decay", "eval_epochs",
    "loss", "crop_scale",
)  # fmt: skip


# Flags that earlier versions had, with their defaults: a configuration that was saved with these is read without them.
RETIRED: dict[str, object] = {"augment_repeats": 1, "stream_lanes": 4}


def build_parser(text: str | None = None, kind: type[TrainArguments] = TrainArguments) -> Parser:
    """The flags of a script, whose docstring `text` is; the fields of `kind` in their groups."""
    parser = Parser(text, "[--config PRESET] [--flag value ...]; --help lists the flags", accelerated=True)
    group = parser
    group.add_argument(
        "--config", metavar="PRESET", help="preset of recipes/configs, such as demo, or a YAML file of flags"
    )
    for field_ in dataclasses.fields(kind):
        if field_.name in kind.groups:
            group = parser.add_argument_group(kind.groups[field_.name])
        if field_.name in kind.refused:
            reason = dict(const=kind.refused[field_.name], nargs="?", default=field_.default, help=argparse.SUPPRESS)
            parser.add_argument(f"--{field_.name}", action=RefusedFlag, **reason)
            continue
        of_value = field_.type
        literal = next((part for part in (of_value, *get_args(of_value)) if get_origin(part) is Literal), None)
        if literal is not None:  # or `Literal[...] | None`
            options = dict(choices=get_args(literal))
        elif of_value is bool:
            options = dict(type=bool, nargs="?", const=True, metavar="true|false")
        else:
            options = dict(type=next(iter(get_args(of_value)), of_value))  # `int | None`, or `int`
        group.add_argument(f"--{field_.name}", default=field_.default, help=field_.metadata["help"], **options)
        if field_.default is True:
            negation = dict(dest=field_.name, action="store_false", help=argparse.SUPPRESS)
            group.add_argument(f"--no_{field_.name}", **negation)
    return parser


def parse_args(
    argv: list[str], text: str | None = None, kind: type[TrainArguments] = TrainArguments
) -> TrainArguments:
    """Flags of `recipes/train.py` -> TrainArguments. `--config` is read first, so that a flag overrides its line.

    The YAML goes through the same parser as the flags, so `3e-4` is a float in both and a choice is checked in both.

    Args:
        text: for --help.
        kind: of another script.

    Raises:
        SystemExit: with a message that names the key, for an unknown or ill-typed one.
    """
    parser = build_parser(text, kind)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    config, flags = first.parse_known_args(parser.with_underscores(argv))
    known = {field_.name for field_ in dataclasses.fields(kind)}
    values = vars(parser.parse_args([*read_yaml(config.config, parser, known), *flags]))
    del values["config"]
    args = kind(**values)
    if args.dataset_name is None or args.output_dir is None:
        missing = [f"--{name}" for name in ("dataset_name", "output_dir") if getattr(args, name) is None]
        parser.error(f"{' and '.join(missing)} must be given, as a flag or in --config")
    args.output_dir = os.path.expanduser(args.output_dir)  # which no shell does in a YAML file or after a "="
    given = [flag.partition("=")[0] for flag in flags]
    if "--model_name_or_path" in given and "--preset" not in given:
        if args.preset is not None and "--learning_rate" not in given and kind is TrainArguments:
            args.learning_rate = None  # that of the file is for training from scratch
        args.preset = None  # a flag goes before the file
        if "--config_overrides" not in given:
            args.config_overrides = None  # those of the file's preset
    if "--preset" in given and "--model_name_or_path" not in given:
        args.model_name_or_path = None
    if args.preset is not None and (name := Path(args.preset).stem) in presets():
        parser.error(
            f"--preset {args.preset}: {name} is a training preset: --config {name}; --preset is an architecture"
        )
    if (args.model_name_or_path is None) == (args.preset is None):
        parser.error("give either --model_name_or_path (fine-tune) or --preset (from scratch)")
    try:
        check_ranges(args)
        check_combinations(args)
    except ValueError as error:
        parser.error(str(error))
    if args.cache_features:
        args.crop, args.flip = "none", False
    if args.learning_rate is not None and args.layer_decay is None:
        args.layer_decay = 1.0  # the rate that is asked for, for all layers alike
    if args.model_name_or_path is None and args.crop_scale is None:
        args.crop_scale = 0.35
    if args.streaming and args.eval_steps is None:
        args.eval_steps = max(1, args.max_train_steps // 10)
    return args


def presets() -> list[str]:
    """The names of the presets in recipes/configs."""
    return sorted(file.stem for file in CONFIGS.glob("*.yaml"))


def preset_file(name: str, parser: Parser) -> Path:
    """The YAML file of that name, or the preset."""
    if Path(name).is_file():
        return Path(name)
    stem = Path(name).stem
    if name in (stem, f"{stem}.yaml") and stem in presets():
        return CONFIGS / f"{stem}.yaml"
    if Path(name).is_dir():
        parser.error(
            f"--config {name} is a folder; wanted a YAML file: {Path(name, 'config.yaml')} of a run, for example"
        )
    close = difflib.get_close_matches(stem, presets(), n=1)
    meant = f"did you mean --config {close[0]}?" if close else f"those in recipes/configs are {', '.join(presets())}"
    parser.error(f"--config {name}: no such file, and no preset of that name; {meant}")


def read_yaml(name: str | None, parser: Parser, known: set[str]) -> list[str]:
    """A flat YAML mapping, a file or a preset -> the same as flags, `["--seed=1", ...]`; null leaves the default."""
    if name is None:
        return []
    path = preset_file(name, parser)
    try:
        preset = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        parser.error(f"--config {path} is not YAML: {error}")
    nested = not isinstance(preset, dict) or [key for key, value in preset.items() if isinstance(value, dict | list)]
    if nested:
        parser.error(
            f"--config {path}: wanted flat `key: value` lines, but found {nested if nested is not True else preset!r}"
        )
    try:
        preset = drop_retired(preset, f"--config {path}")
    except UserError as error:
        parser.error(str(error))
    for key in map(str, preset):
        if key.replace("-", "_") not in known:
            meant = re.sub(r"--(\w+)", r"'\1'", parser.meant_by(key))
            parser.error(f"--config {path}: {key!r} is not a key{meant}")
    return [f"--{str(key).replace('-', '_')}={value}" for key, value in preset.items() if value is not None]


def drop_retired(values: dict, where: str) -> dict:
    """A saved configuration without the keys of flags that no longer exist.

    Raises:
        UserError: for one with another value than its old default, which nothing can stand for.
    """
    changed = [f"{name}: {values[name]}" for name in RETIRED if values.get(name, RETIRED[name]) != RETIRED[name]]
    if changed:
        raise UserError(
            f"{where} has {', '.join(changed)}, and hf_vit no longer has such a flag: begin a new run without it"
        )
    return {name: value for name, value in values.items() if name not in RETIRED}


def to_yaml(args: TrainArguments) -> str:
    """Every key that decides the run, as a preset file holds it; `--config` on it gives the same run."""
    values = dataclasses.asdict(args)
    resolved = {key: value for key, value in values.items() if value is not None and key not in args.refused}
    for name in ("overwrite", "resume", "dry_run"):  # of one start alone
        del resolved[name]
    return yaml.safe_dump(resolved, sort_keys=False)


def changed_arguments(saved: dict, args: TrainArguments) -> list[str]:
    """How `args` differ from those of a run, as `to_yaml` wrote them, a sentence each; what is `RESUME_MUTABLE` may differ."""
    saved = drop_retired(saved, "the configuration of the run")
    defaults, now, found = dataclasses.asdict(type(args)()), yaml.safe_load(to_yaml(args)), []
    for name in dict.fromkeys((*saved, *now)):
        was, value = saved.get(name, defaults.get(name)), now.get(name)
        derived = name in DERIVED and value is None  # the run chose it itself
        unused = name in NEEDED and not saved.get(NEEDED[name]) and not now.get(NEEDED[name])
        if name not in RESUME_MUTABLE and not derived and not unused and was != value:
            found.append(f"{name} was {was} and is {value}")
    return found


def parse_overrides(text: str | None) -> dict:
    """`"hidden_size=64,pooling=mean"` -> `{"hidden_size": 64, "pooling": "mean"}`."""
    parts = re.split(r",(?![^\[]*\])", text or "")  # not at the comma of image_size=[32,48]
    pairs = [pair.partition("=") for pair in parts if pair.strip()]
    for name, equals, _value in pairs:
        if not equals:
            raise UserError(f"config_overrides: {name!r} has no value; wanted `field=value,field=value`")
    return {name.strip(): _parse_value(value) for name, _equals, value in pairs}


def _parse_value(text: str):
    value = yaml.safe_load(text)
    with contextlib.suppress(TypeError, ValueError):  # YAML 1.1 takes 1e-4 for text
        return float(value) if isinstance(value, str) else value
    return value

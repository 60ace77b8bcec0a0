"""YAML preset + flags -> one flat dataclass of run numbers, and back to YAML, as resolved."""

import argparse
import contextlib
import dataclasses
import difflib
import re
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
    label_names: str | None = _(None, "text file of class names, a line each, where labels are bare numbers")
    train_split: str = _("train", "split to train on")
    eval_split: str | None = _(None, "split to score; if not given: validation, else test, else a part of train")
    eval_fraction: float = _(0.1, "part of train that is set aside, by class, where there is no split to score")
    train_fraction: float = _(1.0, "part of each class to train on")
    shots: int | None = _(None, "images of each class to train on")
    balance: Literal["none", "sampling", "weights"] = _(
        "none", "rare classes: sampling shows each class as often as any other, weights makes its loss count as much"
    )
    on_bad_image: Literal["stop", "skip"] = _("stop", "images that cannot be read; results.json counts the skipped")
    streaming: bool = _(False, "read the data while training, without a copy on this disk; needs max_train_steps")
    shuffle_buffer: int = _(2048, "rows of a stream that are shuffled at a time")
    stream_lanes: int = _(
        4, "shards of a stream that are read at a time; as many processes or more share them out, one reads all"
    )

    model_name_or_path: str | None = _(None, "checkpoint to fine-tune; without it training starts from scratch")
    preset: str | None = _(None, "architecture to train from scratch, such as tiny-patch16-224")
    config_overrides: str | None = _(None, "fields of HFViTConfig, as `hidden_size=64,pooling=mean`")
    image_size: int | None = _(None, "side of the (square) input in pixels; if not given, the model's own")
    first_image_size: int | None = _(None, "smaller side to begin with, faster; the rest is trained at image_size")
    first_stage: float = _(0.8, "part of the steps that are trained at first_image_size")
    freeze_backbone: bool = _(False, "train the head alone (linear probe)")
    freeze_layers: int = _(0, "do not train the embeddings and this many layers")
    cache_features: bool = _(
        False,
        "with freeze_backbone: compute what the head sees once, of images that are not augmented, and train on that",
    )
    lora_rank: int = _(0, "above 0: train low-rank updates of the layers, and the head, through PEFT")
    lora_alpha: float = _(16.0, "the updates are scaled by lora_alpha / lora_rank")
    lora_dropout: float = _(0.0, "dropout before the updates")
    lora_save: Literal["merged", "adapter"] = _(
        "merged", "merged: a whole model; adapter: what goes on top of the base"
    )
    teacher_name_or_path: str | None = _(None, "image classifier whose answers are learned too (distillation)")
    distillation_alpha: float = _(0.5, "weight of the teacher's part of the loss")
    distillation_temperature: float = _(1.0, "softens both answers")

    output_dir: str | None = _(None, "run folder, such as runs/demo")
    overwrite: bool = _(False, "replace the run in output_dir")
    resume: str = _(
        "auto",
        "auto: go on with the run of this configuration in output_dir; never; or a checkpoint, or a run folder, to go on from",
    )
    checkpointing_steps: int | None = _(
        None, "steps between checkpoints; if not given, 5 minutes; 0: only where a run is stopped"
    )
    checkpoints_total_limit: int = _(2, "checkpoints that are kept, the last ones")
    max_skipped_steps: int = _(10, "steps without a finite loss and gradient that are skipped before the run stops")
    seed: int = _(0, "decides initial weights, order and augmentation")

    num_train_epochs: float | None = _(
        None,
        "passes over the training set; if not given 10, and from scratch up to 100 while fewer than 20,000 images are seen",
    )
    max_train_steps: int | None = _(None, "optimizer steps; overrides num_train_epochs")
    per_device_train_batch_size: int = _(64, "images a process and a forward pass")
    per_device_eval_batch_size: int = _(256, "the same while scoring")
    gradient_accumulation_steps: int = _(1, "forward passes an optimizer step")
    auto_find_batch_size: bool = _(True, "where memory is short: smaller forward passes, as many more of them a step")

    optimizer: Literal["adamw", "muon"] = _("adamw", "muon: Muon for the matrices of the layers, AdamW for the rest")
    learning_rate: float | None = _(
        None, "peak; if not given, 1e-3 from scratch, for a frozen backbone and for LoRA, and 5e-5 to fine-tune"
    )
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd", "step"] = _(
        "cosine", "after the warm-up; wsd: constant, then linear to 0; step: in stages of a tenth each"
    )
    lr_decay_ratio: float = _(0.2, "wsd: part of the steps at the end over which the rate falls")
    lr_stages: int = _(2, "step: number of stages")
    layer_decay: float = _(1.0, "below 1: each layer learns at this part of the rate of the one above it")
    weight_decay: float = _(0.05, "decoupled weight decay of matrices; biases, norms, tokens and positions have none")
    adam_beta1: float = _(0.9, "AdamW")
    adam_beta2: float = _(0.999, "AdamW")
    warmup_ratio: float = _(0.05, "part of the steps over which the learning rate rises")
    max_grad_norm: float = _(1.0, "gradients are clipped to this norm; 0 leaves them alone")
    loss: Literal["cross_entropy", "binary_cross_entropy"] = _("cross_entropy", "binary: a yes or no for each label")
    label_smoothing: float = _(0.1, "probability mass spread over all classes")
    ema_decay: float = _(0.0, "above 0: score and save an exponential moving average of the weights")

    crop: Literal["none", "resized", "simple"] = _(
        "resized",
        "resized: a random part of the image, stretched over the whole; simple: shifted by up to 4 pixels, mirrored",
    )
    crop_scale: float = _(0.35, "crop resized: smallest part of the image's area")
    eval_crop: float | None = _(
        None,
        "part of the shorter side that is scored, such as 0.875: resized to 256, the middle 224 cut out; if not given, as the "
        "checkpoint's image processor says, and from scratch the whole image, stretched",
    )
    shift: int = _(0, "move the image by up to this many pixels in each direction")
    flip: bool = _(True, "mirror half of the images")
    auto_augment: Literal["none", "three", "trivial", "rand"] = _(
        "none", "three: grey, solarise or blur (DeiT III); trivial: TrivialAugment; rand: RandAugment"
    )
    rand_magnitude: int = _(9, "auto_augment rand: strength, of 30")
    color_jitter: float = _(0.0, "brightness, contrast and saturation change by up to this part")
    erase: float = _(0.0, "probability to fill a random rectangle with noise")
    mixup: float = _(0.0, "above 0: blend pairs of images, by a weight from Beta(mixup, mixup)")
    cutmix: float = _(
        0.0, "above 0: paste a rectangle of one image into another; with mixup, each in half of the batches"
    )
    augment_repeats: int = _(1, "times each image stands in its batch, augmented anew")

    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = _("auto", "auto: bf16 where the hardware is fast at it")
    gradient_checkpointing: bool = _(
        False, "compute the layers' activations anew in the backward pass: less memory, about a third more work"
    )
    compile: Literal["auto", "yes", "no"] = _("auto", "torch.compile; auto: on CUDA, for 2,000 steps or more")
    num_workers: int | None = _(
        None, "processes that decode images; if not given, one a core of this process, up to 32"
    )
    log_steps: int = _(10, "optimizer steps a line of metrics.jsonl")
    eval_epochs: int = _(1, "epochs between scorings")
    eval_steps: int | None = _(None, "optimizer steps between scorings; overrides eval_epochs")
    report_to: str = _("none", "trackers beside metrics.jsonl, such as tensorboard,wandb")


RANGES = (
    (
        (
            "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "max_train_steps",
            "log_steps", "eval_epochs", "eval_steps", "image_size", "first_image_size", "shots", "shuffle_buffer", "lr_stages",
            "augment_repeats", "checkpoints_total_limit", "stream_lanes",
        ),
        lambda value: value >= 1, "1 or more",
    ),
    (("num_train_epochs", "learning_rate", "lora_alpha", "distillation_temperature"), lambda value: value > 0, "more than 0"),
    (
        (
            "weight_decay", "max_grad_norm", "mixup", "cutmix", "shift", "num_workers", "seed", "freeze_layers", "lora_rank",
            "checkpointing_steps", "max_skipped_steps",
        ),
        lambda value: value >= 0, "0 or more",
    ),
    (
        ("eval_fraction", "adam_beta1", "adam_beta2", "label_smoothing", "ema_decay", "lora_dropout", "color_jitter"),
        lambda value: 0 <= value < 1, "0 or more and less than 1",
    ),
    (("warmup_ratio", "erase", "distillation_alpha"), lambda value: 0 <= value <= 1, "0 to 1"),
    (("rand_magnitude",), lambda value: 0 <= value <= 30, "0 to 30"),
    (
        ("eval_crop",), lambda value: 0 < value <= 1,
        "more than 0 and at most 1, the whole shorter side (0.875 keeps 224 of 256 pixels),",
    ),
    (
        ("train_fraction", "layer_decay", "crop_scale", "lr_decay_ratio", "first_stage"),
        lambda value: 0 < value <= 1, "more than 0 and at most 1",
    ),
)  # fmt: skip

# What does not go together: both sides hold of the arguments, and what to do.
CONTRADICTIONS = (
    (
        lambda a: a.eval_split is not None, "--eval_split", lambda a: a.eval_split == a.train_split, "the same --train_split",
        "the score would be of images that were trained on; leave it out, and a part of them is set aside",
    ),
    (lambda a: a.crop == "simple", "--crop simple", lambda a: a.shift > 0, "--shift", "both move the image: give one of them"),
    (lambda a: a.lora_save == "adapter", "--lora_save adapter", lambda a: a.lora_rank == 0, "no --lora_rank", "give a rank"),
    (
        lambda a: a.mixup > 0 or a.cutmix > 0, "--mixup or --cutmix",
        lambda a: a.per_device_train_batch_size == 1, "--per_device_train_batch_size 1", "they mix two images of a batch",
    ),
    (lambda a: a.shots is not None, "--shots", lambda a: a.train_fraction < 1, "--train_fraction", "give one of them"),
    (lambda a: a.freeze_backbone, "--freeze_backbone", lambda a: a.lora_rank > 0, "--lora_rank", "give one of them"),
    (
        lambda a: a.cache_features, "--cache_features", lambda a: not a.freeze_backbone, "a backbone that is trained",
        "pass --freeze_backbone true",
    ),
    (
        lambda a: a.cache_features, "--cache_features",
        lambda a: (
            a.shift or a.auto_augment != "none" or a.color_jitter or a.erase or a.mixup or a.cutmix or a.augment_repeats > 1
            or a.streaming or a.teacher_name_or_path or a.first_image_size
        ),
        "augmentation, --streaming, --teacher_name_or_path or --first_image_size", "each image is looked at once: leave one out",
    ),
    (
        lambda a: a.gradient_checkpointing, "--gradient_checkpointing", lambda a: a.cache_features, "--cache_features",
        "only a head is trained, which has no activations to spare: leave one out",
    ),
    (lambda a: a.freeze_layers > 0, "--freeze_layers", lambda a: a.lora_rank > 0, "--lora_rank", "give one of them"),
    (lambda a: a.balance == "sampling", "--balance sampling", lambda a: a.augment_repeats > 1, "--augment_repeats", "give one of them"),
    (
        lambda a: a.freeze_backbone or a.freeze_layers > 0 or a.lora_rank > 0, "--freeze_backbone, --freeze_layers or --lora_rank",
        lambda a: a.model_name_or_path is None, "training from scratch", "name a checkpoint with --model_name_or_path",
    ),
    (
        lambda a: a.streaming, "--streaming",
        lambda a: a.shots is not None or a.train_fraction < 1 or a.balance != "none" or a.augment_repeats > 1,
        "--shots, --train_fraction, --balance or --augment_repeats", "they need the whole data set at hand",
    ),
    (
        lambda a: a.overwrite, "--overwrite", lambda a: a.resume not in ("auto", "never"), "--resume PATH",
        "go on from there in another --output_dir",
    ),
    (
        lambda a: a.streaming, "--streaming", lambda a: a.max_train_steps is None, "an open end",
        "a stream has no length: give --max_train_steps",
    ),
)  # fmt: skip


# What a run may change on its way: where it is written and how it is worked through, and not what comes out. How many images
# make a step counts, however they are shared out.
FREE = (
    "output_dir", "resume", "checkpointing_steps", "checkpoints_total_limit", "max_skipped_steps", "num_workers", "report_to",
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "auto_find_batch_size",
    "gradient_checkpointing",
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
        args.preset = None  # a flag goes before the file
        if "--config_overrides" not in given:
            args.config_overrides = None  # those of the file's preset
    if "--preset" in given and "--model_name_or_path" not in given:
        args.model_name_or_path = None
    if (args.model_name_or_path is None) == (args.preset is None):
        parser.error("give either --model_name_or_path (fine-tune) or --preset (from scratch)")
    for names, holds, wanted in RANGES:
        for name in names:
            value = getattr(args, name)
            if value is not None and not holds(value):
                parser.error(f"argument --{name}: {value} was given, {wanted} was wanted")
    for one, its_name, other, others_name, what_to_do in CONTRADICTIONS:
        if one(args) and other(args):
            parser.error(f"{its_name} does not go with {others_name}: {what_to_do}")
    if args.cache_features:
        args.crop, args.flip = "none", False
    if args.learning_rate is None:
        all_of_it = args.model_name_or_path is not None and not args.freeze_backbone and args.lora_rank == 0
        args.learning_rate = 5e-5 if all_of_it else 1e-3
    if args.streaming and args.eval_steps is None:
        args.eval_steps = max(1, args.max_train_steps // 10)
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
    del resolved["overwrite"], resolved["resume"]  # consent to replace one folder, once; and where to go on this time
    return yaml.safe_dump(resolved, sort_keys=False)


def changes(saved: dict, args: TrainArguments) -> list[str]:
    """How `args` differ from those of a run, as `as_yaml` wrote them, a sentence each; what is `FREE` may differ."""
    defaults, now, found = dataclasses.asdict(TrainArguments()), yaml.safe_load(as_yaml(args)), []
    for name in dict.fromkeys((*saved, *now)):
        was, value = saved.get(name, defaults.get(name)), now.get(name)
        derived = name == "num_train_epochs" and value is None  # the run chose them itself
        if name not in FREE and not derived and was != value:
            found.append(f"{name} was {was} and is {value}")
    return found


def read_names(path: str | None) -> list[str] | None:
    """The lines of a text file of class names; None for None.

    Raises:
        ValueError: if there is no such file, or a name is empty or stands twice.
    """
    if path is None:
        return None
    if not Path(path).is_file():
        raise ValueError(f"--label_names {path}: no such file")
    names = Path(path).read_text(encoding="utf-8").splitlines()
    wrong = [name for name in names if not name.strip() or names.count(name) > 1]
    if wrong or len(names) < 2:
        raise ValueError(
            f"--label_names {path}: wanted two or more lines, each another name, but found {wrong[:1] or names}"
        )
    return names


def overrides(text: str | None) -> dict:
    """`"hidden_size=64,pooling=mean"` -> `{"hidden_size": 64, "pooling": "mean"}`."""
    parts = re.split(r",(?![^\[]*\])", text or "")  # not at the comma of image_size=[32,48]
    pairs = [pair.partition("=") for pair in parts if pair.strip()]
    for name, equals, _value in pairs:
        if not equals:
            raise ValueError(f"config_overrides: {name!r} has no value; wanted `field=value,field=value`")
    return {name.strip(): _typed(value) for name, _equals, value in pairs}


def _typed(text: str):
    value = yaml.safe_load(text)
    with contextlib.suppress(TypeError, ValueError):  # YAML 1.1 takes 1e-4 for text
        return float(value) if isinstance(value, str) else value
    return value

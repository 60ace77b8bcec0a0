"""YAML preset + flags -> one flat, frozen dataclass of what was asked for; `plan.resolve` chooses what is left open.

It imports the standard library and PyYAML alone: flags are answered before the imports that take seconds.
"""

import contextlib
import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import yaml

from hf_vit.system.command_line import parse_fields
from hf_vit.system.errors import UserError
from hf_vit.system.recipes_folder import RECIPES


CONFIGS = RECIPES / "configs"  # the presets

# Ranges of numbers: in words, and as a test.
AT_LEAST_ONE = (">= 1", lambda value: value >= 1)
POSITIVE = ("> 0", lambda value: value > 0)
NOT_NEGATIVE = (">= 0", lambda value: value >= 0)
BELOW_ONE = (">= 0 and < 1", lambda value: 0 <= value < 1)
FRACTION = ("from 0 to 1", lambda value: 0 <= value <= 1)
PART = ("> 0 and at most 1", lambda value: 0 < value <= 1)
OF_THIRTY = ("from 0 to 30", lambda value: 0 <= value <= 30)


def argument(default, help, wanted=None, resume=False, **group):
    """A field with what --help says of it, its range, and whether it may change when a run is resumed: where it is written and how
    it is worked through, and not what comes out."""
    return field(default=default, metadata={"help": help, "wanted": wanted, "resume": resume, **group})


@dataclass(frozen=True)
class TrainArguments:
    """What a run is asked for; None leaves a number to `plan.resolve`. The architecture has its own home, HFViTConfig, which
    `preset` and `config_overrides` reach.

    Raises:
        ValueError: for a number out of its range, and for flags that contradict each other.
    """

    hidden: ClassVar[tuple[str, ...]] = ()  # fields that are no flags of a script

    dataset_name: str | None = argument(
        None, "Hub id, folder, table file, or `fashion-mnist-mini` (bundled)", group="data"
    )
    dataset_config: str | None = argument(None, "configuration of the data set, if it has several")
    image_column: str | None = argument(None, "image column; default: found by its feature type")
    label_column: str | None = argument(None, "label column; default: found by its feature type or name")
    train_split: str = argument("train", "training split")
    eval_split: str | None = argument(
        None, "evaluation split; default: validation, then test, then part of train (--eval_fraction)"
    )
    eval_fraction: float = argument(0.1, "fraction of train to hold out where there is no evaluation split", BELOW_ONE)
    shots: int | None = argument(None, "training images per class; default: all", AT_LEAST_ONE)
    problem_type: Literal["regression"] | None = argument(
        None, "regression: predict a number; default: classification, by the type of the labels"
    )
    balance: Literal["none", "sampling", "weights"] = argument(
        "none", "rare classes: sampling draws classes equally often, weights gives them equal loss"
    )
    label_names: str | None = argument(None, "text file of class names, one per line")
    label_separator: str | None = argument(None, 'multi-label: what separates the labels in a text, such as ";"')
    label_columns: str | None = argument(None, "multi-label: columns of 0 and 1, such as cat,dog,bird")
    class_level: int | None = argument(None, "depth of the class folder below the split, default: 1")
    on_bad_image: Literal["stop", "skip"] = argument(
        "stop", "what to do with images that cannot be decoded", resume=True
    )
    streaming: bool = argument(
        False, "read the data set while training, without a local copy; needs --max_train_steps"
    )
    shuffle_buffer: int = argument(2048, "streaming: rows in the shuffle buffer", AT_LEAST_ONE)
    model_name_or_path: str | None = argument(
        None, "checkpoint to start from: Hub id or folder; default: train from scratch", group="model"
    )
    preset: str | None = argument(None, "architecture to train from scratch, such as tiny-patch16-224")
    image_size: int | None = argument(
        None, "side of the square input, in pixels; default: that of the model", AT_LEAST_ONE
    )
    config_overrides: str | None = argument(None, "HFViTConfig fields, such as hidden_size=64,pooling=mean")
    lora_rank: int = argument(0, "above 0: train low-rank updates (LoRA) of this rank, and the head", NOT_NEGATIVE)
    lora_save: Literal["merged", "adapter"] = argument(
        "merged", "merged: the whole model; adapter: only the LoRA weights"
    )
    freeze_backbone: bool = argument(False, "linear probe: train only the head")
    cache_features: bool = argument(
        False,
        "with --freeze_backbone: compute features once, without augmentation, and train on them",
    )
    freeze_layers: int = argument(0, "freeze the embeddings and the first N layers", NOT_NEGATIVE)
    teacher_name_or_path: str | None = argument(
        None, "image classifier to distil from: its logits are an extra target"
    )
    output_dir: str | None = argument(None, "run folder, such as runs/demo", resume=True, group="run folder")
    overwrite: bool = argument(False, "delete the run in --output_dir and start over", resume=True)
    resume: str = argument(
        "auto",
        "auto: continue the run in --output_dir; never; or a checkpoint or run folder",
        resume=True,
    )
    dry_run: bool = argument(False, "print the data and the plan, then exit", resume=True)
    seed: int = argument(0, "random seed: initial weights, data order, augmentation", NOT_NEGATIVE)
    checkpointing_steps: int | None = argument(
        None,
        "steps between checkpoints; 0: only when stopped; default: after 1 minute, then every 5 minutes",
        NOT_NEGATIVE,
        resume=True,
    )
    num_train_epochs: float | None = argument(
        None, "training epochs; default: by method and number of images", POSITIVE, group="length and batch size"
    )
    max_train_steps: int | None = argument(None, "optimizer steps; overrides --num_train_epochs", AT_LEAST_ONE)
    per_device_train_batch_size: int | None = argument(
        None,
        "images per process and forward pass; default: at most 64, by number of images",
        AT_LEAST_ONE,
        resume=True,
    )
    per_device_eval_batch_size: int = argument(
        256, "images per process and forward pass in evaluation", AT_LEAST_ONE, resume=True
    )
    gradient_accumulation_steps: int = argument(1, "forward passes per optimizer step", AT_LEAST_ONE, resume=True)
    auto_find_batch_size: bool = argument(
        True, "on out-of-memory, halve the micro-batch and accumulate gradients", resume=True
    )
    learning_rate: float | None = argument(
        None,
        "peak learning rate; default: from method, number of images and model width",
        POSITIVE,
        group="optimizer",
    )
    head_learning_rate: float | None = argument(
        None,
        "peak learning rate of the head; default: --learning_rate if given, else by method",
        POSITIVE,
    )
    layer_decay: float | None = argument(
        None,
        "layer-wise learning rate decay; default: 0.75 for full fine-tuning without --learning_rate, else 1",
        PART,
    )
    lr_scheduler_type: Literal["cosine", "linear", "constant", "step"] = argument(
        "cosine", "learning rate schedule after warmup; step: divide by 10 halfway"
    )
    warmup_ratio: float = argument(0.05, "fraction of the steps for linear warmup", FRACTION)
    optimizer: Literal["adamw", "muon"] = argument(
        "adamw", "muon: Muon for the matrices of the layers, AdamW for the rest"
    )
    weight_decay: float = argument(
        0.05, "decoupled weight decay; biases, norms, tokens and position embeddings are excluded", NOT_NEGATIVE
    )
    adam_beta2: float = argument(0.999, "second beta of AdamW", BELOW_ONE)
    max_grad_norm: float = argument(1.0, "gradient clipping norm; 0: no clipping", NOT_NEGATIVE)
    label_smoothing: float = argument(
        0.1,
        "label smoothing, not used in regression",
        BELOW_ONE,
    )
    ema_decay: float = argument(
        0.0, "above 0: evaluate and save an exponential moving average of the weights", BELOW_ONE
    )
    crop: Literal["none", "resized", "simple"] = argument(
        "resized", "resized: random resized crop; simple: shift by up to 4 pixels and flip", group="augmentation"
    )
    crop_scale: float | None = argument(
        None, "minimum area fraction of a random resized crop; default: 0.35, fine-tuning: 0.64", PART
    )
    eval_crop: float | None = argument(
        None,
        "center crop: fraction of the resized shorter side; default: the image processor's",
        PART,
    )
    flip: bool = argument(True, "random horizontal flip")
    shift: int = argument(0, "random translation in pixels", NOT_NEGATIVE)
    auto_augment: Literal["none", "trivial", "rand"] = argument("none", "trivial: TrivialAugment; rand: RandAugment")
    rand_magnitude: int = argument(9, "strength of RandAugment, 0 to 30", OF_THIRTY)
    color_jitter: float = argument(0.0, "strength of brightness, contrast and saturation jitter", BELOW_ONE)
    erase: float = argument(0.0, "probability of random erasing", FRACTION)
    mixup: float = argument(0.0, "above 0: mixup with weights from Beta(mixup, mixup)", NOT_NEGATIVE)
    cutmix: float = argument(
        0.0,
        "above 0: CutMix; with mixup, each in half of the batches",
        NOT_NEGATIVE,
    )
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = argument(
        "auto", "auto: bf16 if the hardware computes in it", resume=True, group="hardware"
    )
    num_workers: int | None = argument(
        None,
        "data loading processes; default: one per core, up to 32",
        NOT_NEGATIVE,
        resume=True,
    )
    compile: Literal["auto", "yes", "no"] = argument(
        "auto", "torch.compile; auto: on CUDA, for 2,000 steps or more", resume=True
    )
    gradient_checkpointing: bool = argument(
        False,
        "recompute activations in the backward pass: less memory, about a third slower",
        resume=True,
    )
    eval_epochs: int | None = argument(
        None,
        "epochs between evaluations; default: evaluation takes at most a fifth of the run",
        AT_LEAST_ONE,
        group="evaluation and logging",
    )
    eval_steps: int | None = argument(None, "steps between evaluations; overrides --eval_epochs", AT_LEAST_ONE)
    log_steps: int | None = argument(
        None,
        "steps between lines of metrics.jsonl; default: 10, or less in short runs",
        AT_LEAST_ONE,
        resume=True,
    )
    report_to: str = argument(
        "none", "experiment trackers besides metrics.jsonl, such as tensorboard,wandb", resume=True
    )

    def __post_init__(self):
        for one in dataclasses.fields(self):
            value, wanted = getattr(self, one.name), one.metadata["wanted"]
            if value is not None and wanted is not None and not wanted[1](value):
                raise UserError(f"--{one.name} must be {wanted[0]}, got {value}")
        check_combinations(self)
        # What follows from other flags alone.
        derived = {"output_dir": os.path.expanduser(self.output_dir)}  # as no shell does in YAML or after a "="
        if self.crop_scale is None:
            derived["crop_scale"] = CROP_SCALE_FROM_SCRATCH if self.model_name_or_path is None else CROP_SCALE
        if self.cache_features:
            derived |= {"crop": "none", "flip": False}
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_flags(cls, values: dict, given: set[str]) -> "TrainArguments":
        """The arguments of a command line.

        Args:
            values: of all fields, from a preset and flags.
            given: names of the flags, which go before their preset.
        """
        if "model_name_or_path" in given and "preset" not in given:
            if values["preset"] is not None and "learning_rate" not in given and cls is TrainArguments:
                values["learning_rate"] = None  # that of the file is for training from scratch
            values["preset"] = None
            if "config_overrides" not in given:
                values["config_overrides"] = None  # those of the file's preset
        elif "preset" in given and "model_name_or_path" not in given:
            values["model_name_or_path"] = None
        return cls(**values)


# Smallest part of the area that a random crop shows. BiT-HyperRule (arXiv 1912.11370, section 3.3) fine-tunes on squares of 128
# pixels out of 160: 0.64.
CROP_SCALE, CROP_SCALE_FROM_SCRATCH = 0.64, 0.35
NEEDED = {  # what has no effect without another flag
    "lora_save": "lora_rank",
    "shuffle_buffer": "streaming",
    "cache_features": "freeze_backbone",
    "streaming": "max_train_steps",  # a stream has no length
}
CONFLICTS = {  # a flag, and those that do not go with it
    "preset": "model_name_or_path freeze_backbone freeze_layers lora_rank",
    "lora_rank": "freeze_backbone freeze_layers",
    "cache_features": "shift color_jitter erase mixup cutmix auto_augment streaming teacher_name_or_path",  # each image is seen once
    "streaming": "shots balance",  # which need the whole data set at hand
    "teacher_name_or_path": "mask_ratio norm_pix_loss decoder_hidden_size decoder_num_hidden_layers "
    "decoder_num_attention_heads decoder_intermediate_size",  # of a masked autoencoder
    "overwrite": "resume",
    "problem_type": "shots balance label_names label_separator label_columns streaming teacher_name_or_path",  # of classes
}


def check_combinations(args: TrainArguments):
    """Raise ValueError for arguments that are missing or contradict each other, and for one that has no effect without another."""
    given = {one.name for one in dataclasses.fields(args) if getattr(args, one.name) != one.default}
    for name in ("dataset_name", "output_dir"):
        if name not in given:
            raise UserError(f"--{name} must be given, as a flag or in --config")
    if args.preset is not None and (name := Path(args.preset).stem) in presets():
        raise UserError(f"--preset {args.preset} is a training preset: --config {name}; --preset is an architecture")
    if given.isdisjoint(("preset", "model_name_or_path")):
        raise UserError("give either --model_name_or_path (fine-tune) or --preset (from scratch)")
    for name in sorted(given & {*NEEDED}):
        if NEEDED[name] not in given:
            raise UserError(f"--{name} has no effect without --{NEEDED[name]}: give both, or neither")
    for name in sorted(given & {*CONFLICTS}):
        for other in sorted(given & {*CONFLICTS[name].split()}):
            raise UserError(f"--{name} does not go with --{other}: leave one out")
    if args.eval_split == args.train_split:
        raise UserError("--eval_split and --train_split are the same: leave one out, and a part of it is held out")


def parse_args(
    argv: list[str], text: str | None = None, kind: type[TrainArguments] = TrainArguments
) -> TrainArguments:
    """Flags of a script -> its arguments; those of `--config` are read first, so that a flag overrides its line.

    Args:
        text: for --help.

    Raises:
        SystemExit: with a message that names the flag or key, for an unknown, ill-typed or contradicting one.
    """
    return parse_fields(kind, argv, text, CONFIGS)


def call_words(**flags) -> list[str]:
    """`learning_rate=1e-3` -> `["--learning_rate=0.001"]`; None leaves the default."""
    as_text = lambda value: ",".join(map(str, value)) if isinstance(value, list | tuple) else value
    return [f"--{name}={as_text(value)}" for name, value in flags.items() if value is not None]


def from_call(**flags) -> TrainArguments:
    """The arguments of a call such as `from_call(config="demo", learning_rate=1e-3)`, checked as those of the command line.

    Raises:
        ValueError: which names the flag.
    """
    return parse_fields(TrainArguments, call_words(**flags), None, CONFIGS, raises=True)


def presets() -> list[str]:
    """The names of the presets in recipes/configs."""
    return sorted(file.stem for file in CONFIGS.glob("*.yaml"))


def to_yaml(args: TrainArguments) -> str:
    """Every key that decides the run, as a preset file holds it; `--config` on it gives the same run."""
    of_one_start = ("overwrite", "resume", "dry_run")
    left_out = {*of_one_start, *args.hidden}
    values = {name: value for name, value in vars(args).items() if value is not None and name not in left_out}
    return yaml.safe_dump(values, sort_keys=False)


def parse_overrides(text: str | None) -> dict:
    """`"hidden_size=64,pooling=mean"` -> `{"hidden_size": 64, "pooling": "mean"}`."""
    try:
        fields = yaml.safe_load("{" + (text or "").replace("=", ": ") + "}")
    except yaml.YAMLError:
        fields = {text: None}
    if len(fields) > (text or "").count("=") or text in fields:
        raise UserError(f"config_overrides must be field=value,field=value, got {text!r}")
    for name, value in fields.items():
        if isinstance(value, str):
            with contextlib.suppress(ValueError):  # YAML 1.1 takes 1e-4 for text
                fields[name] = float(value)
    return fields

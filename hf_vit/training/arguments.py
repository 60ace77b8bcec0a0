"""YAML preset + flags -> one flat, frozen dataclass of what was asked for; `plan.resolve` chooses what is left open.

It imports the standard library and PyYAML alone: flags are answered before the imports that take seconds.
"""

import contextlib
import dataclasses
import os
import re
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
    retired: ClassVar[dict] = {  # see `read_yaml`
        "first_stage": 0.8, "stream_lanes": 4, "augment_repeats": 1, "train_fraction": 1.0, "lora_alpha": 16.0, "lora_dropout": 0.0,
        "distillation_alpha": 0.5, "distillation_temperature": 1.0, "checkpoints_total_limit": 2, "max_skipped_steps": 10,
        "adam_beta1": 0.9, "lr_decay_ratio": 0.2, "lr_stages": 2, "calibrate": True, "loss": None,
    }  # fmt: skip

    dataset_name: str | None = argument(
        None, "Hub id, local folder or file, or `fashion-mnist-mini`, which lies in recipes/data", group="data"
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
        None, "split to evaluate; if not given: validation, else test, else a part of train"
    )
    eval_fraction: float = argument(
        0.1, "part of train that is held out, by class, where there is no split to evaluate", BELOW_ONE
    )
    shots: int | None = argument(None, "images of each class to train on; if not given, all", AT_LEAST_ONE)
    balance: Literal["none", "sampling", "weights"] = argument(
        "none", "rare classes: sampling shows each class as often as any other, weights makes its loss count as much"
    )
    dry_run: bool = argument(
        False, "print what is read and planned, and end before anything is trained or written", resume=True
    )
    on_bad_image: Literal["stop", "skip"] = argument(
        "stop", "images that cannot be read; results.json counts the skipped", resume=True
    )
    streaming: bool = argument(
        False, "read the data while training, without a copy on this disk; needs max_train_steps"
    )
    shuffle_buffer: int = argument(2048, "rows of a stream that are shuffled at a time", AT_LEAST_ONE)
    model_name_or_path: str | None = argument(
        None, "checkpoint to fine-tune; without it training starts from scratch", group="model"
    )
    preset: str | None = argument(None, "architecture to train from scratch, such as tiny-patch16-224")
    config_overrides: str | None = argument(None, "fields of HFViTConfig, as `hidden_size=64,pooling=mean`")
    image_size: int | None = argument(
        None, "side of the (square) input in pixels; if not given, the model's own", AT_LEAST_ONE
    )
    freeze_backbone: bool = argument(False, "train the head alone (linear probe)")
    freeze_layers: int = argument(0, "do not train the embeddings and this many layers", NOT_NEGATIVE)
    cache_features: bool = argument(
        False,
        "with freeze_backbone: compute what the head sees once, of images that are not augmented, and train on that",
    )
    lora_rank: int = argument(
        0, "above 0: train low-rank updates of the layers, and the head, through PEFT", NOT_NEGATIVE
    )
    lora_save: Literal["merged", "adapter"] = argument(
        "merged", "merged: a whole model; adapter: what goes on top of the base"
    )
    teacher_name_or_path: str | None = argument(
        None, "image classifier whose answers are learned too (distillation); if not given, none"
    )
    output_dir: str | None = argument(None, "run folder, such as runs/demo", resume=True, group="run folder")
    overwrite: bool = argument(False, "replace the run in output_dir", resume=True)
    resume: str = argument(
        "auto",
        "auto: go on with the run of this configuration in output_dir; never; or a checkpoint, or a run folder, to go on from",
        resume=True,
    )
    checkpointing_steps: int | None = argument(
        None,
        "steps between checkpoints; if not given, 5 minutes; 0: only where a run is stopped",
        NOT_NEGATIVE,
        resume=True,
    )
    seed: int = argument(0, "decides initial weights, order and augmentation", NOT_NEGATIVE)
    num_train_epochs: float | None = argument(
        None,
        "passes over the training set; if not given 10, and more for small sets (recipes/docs/fine-tuning.md)",
        POSITIVE,
        group="length and batch size",
    )
    max_train_steps: int | None = argument(None, "optimizer steps; overrides num_train_epochs", AT_LEAST_ONE)
    per_device_train_batch_size: int | None = argument(
        None,
        "images a process and a forward pass; if not given 64, and to fine-tune on fewer than 2,048 images 16 or 32",
        AT_LEAST_ONE,
        resume=True,
    )
    per_device_eval_batch_size: int = argument(256, "the same during evaluation", AT_LEAST_ONE, resume=True)
    gradient_accumulation_steps: int = argument(1, "forward passes an optimizer step", AT_LEAST_ONE, resume=True)
    auto_find_batch_size: bool = argument(
        True, "on out-of-memory, halve the micro-batch and accumulate gradients", resume=True
    )
    optimizer: Literal["adamw", "muon"] = argument(
        "adamw", "muon: Muon for the matrices of the layers, AdamW for the rest", group="optimizer"
    )
    learning_rate: float | None = argument(
        None, "peak; if not given, 1e-3 from scratch, else by what is trained and how wide the model is", POSITIVE
    )
    head_learning_rate: float | None = argument(
        None,
        "peak of the classification head; if not given, learning_rate where that is given, else by what is trained",
        POSITIVE,
    )
    lr_scheduler_type: Literal["cosine", "linear", "constant", "step"] = argument(
        "cosine", "after the warm-up; step: a tenth in the second half"
    )
    layer_decay: float | None = argument(
        None,
        "below 1: each layer learns at this part of the rate of the one above it; if not given 0.75 to fine-tune all layers without --learning_rate, else 1",
        PART,
    )
    weight_decay: float = argument(
        0.05, "decoupled weight decay of matrices; biases, norms, tokens and positions have none", NOT_NEGATIVE
    )
    adam_beta2: float = argument(0.999, "AdamW", BELOW_ONE)
    warmup_ratio: float = argument(0.05, "part of the steps over which the learning rate rises", FRACTION)
    max_grad_norm: float = argument(1.0, "gradients are clipped to this norm; 0 leaves them alone", NOT_NEGATIVE)
    label_smoothing: float = argument(
        0.1,
        "probability mass spread over all classes; of several labels an image, over the yes and no of each",
        BELOW_ONE,
    )
    ema_decay: float = argument(
        0.0, "above 0: evaluate and save an exponential moving average of the weights", BELOW_ONE
    )
    crop: Literal["none", "resized", "simple"] = argument(
        "resized",
        "resized: a random part of the image, stretched over the whole; simple: shifted by up to 4 pixels, mirrored",
        group="augmentation",
    )
    crop_scale: float | None = argument(
        None, "crop resized: smallest part of the image's area; if not given 0.35, and 0.64 to fine-tune", PART
    )
    eval_crop: float | None = argument(
        None,
        "part of the shorter side that is evaluated, such as 0.875: resized to 256, the middle 224 cut out; if not given, as the checkpoint's image processor says, and from scratch the whole image, stretched",
        PART,
    )
    shift: int = argument(0, "move the image by up to this many pixels in each direction", NOT_NEGATIVE)
    flip: bool = argument(True, "mirror half of the images")
    auto_augment: Literal["none", "trivial", "rand"] = argument("none", "trivial: TrivialAugment; rand: RandAugment")
    rand_magnitude: int = argument(9, "auto_augment rand: strength, of 30", OF_THIRTY)
    color_jitter: float = argument(0.0, "brightness, contrast and saturation change by up to this part", BELOW_ONE)
    erase: float = argument(0.0, "probability to fill a random rectangle with noise", FRACTION)
    mixup: float = argument(0.0, "above 0: blend pairs of images, by a weight from Beta(mixup, mixup)", NOT_NEGATIVE)
    cutmix: float = argument(
        0.0,
        "above 0: paste a rectangle of one image into another; with mixup, each in half of the batches",
        NOT_NEGATIVE,
    )
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = argument(
        "auto", "auto: bf16 where the hardware is fast at it", resume=True, group="hardware"
    )
    gradient_checkpointing: bool = argument(
        False,
        "compute the layers' activations anew in the backward pass: less memory, about a third more work",
        resume=True,
    )
    compile: Literal["auto", "yes", "no"] = argument(
        "auto", "torch.compile; auto: on CUDA, for 2,000 steps or more", resume=True
    )
    num_workers: int | None = argument(
        None,
        "processes that decode images; if not given, one a core of this process, up to 32",
        NOT_NEGATIVE,
        resume=True,
    )
    log_steps: int | None = argument(
        None,
        "optimizer steps a line of metrics.jsonl; if not given, 10, and less for fewer than 200 steps",
        AT_LEAST_ONE,
        resume=True,
        group="logging and evaluation",
    )
    eval_epochs: int | None = argument(
        None,
        "epochs between evaluations; if not given, as many as keep evaluation to a fifth of the run",
        AT_LEAST_ONE,
    )
    eval_steps: int | None = argument(None, "optimizer steps between evaluations; overrides eval_epochs", AT_LEAST_ONE)
    report_to: str = argument("none", "trackers beside metrics.jsonl, such as tensorboard,wandb", resume=True)

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
    "overwrite": "resume",
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
    parts = re.split(r",(?![^\[]*\])", text or "")  # not at the comma of image_size=[32,48]
    pairs = [part.partition("=") for part in parts if part.strip()]
    for name, equals, _value in pairs:
        if not equals:
            raise UserError(f"config_overrides: {name!r} has no value; wanted `field=value,field=value`")
    return {name.strip(): _parse_value(value) for name, _equals, value in pairs}


def _parse_value(text: str):
    value = yaml.safe_load(text)
    with contextlib.suppress(TypeError, ValueError):  # YAML 1.1 takes 1e-4 for text
        return float(value) if isinstance(value, str) else value
    return value

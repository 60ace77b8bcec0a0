"""The command line of every script: a dataclass or single flags, YAML presets, and an error that names the flag that was meant.

It imports the standard library and PyYAML alone, so that a script answers before the imports that take seconds.
"""

import argparse
import dataclasses
import difflib
import math
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

import yaml

from hf_vit.system.errors import UserError


# What a flag is called elsewhere: by transformers, timm, Keras, or people in a hurry. Of several flags with the same other name,
# a script's first one is meant.
OTHER_NAMES = {
    "dataset_name": "data dataset data_dir data_path data_folder dataset_dir dataset_path train_dir train_data_dir photos",
    "eval_split": "split test_split val_split validation_split eval_set",
    "model_name_or_path": "model model_name model_path checkpoint ckpt pretrained weights",
    "model": "model_name_or_path model_name model_path checkpoint ckpt pretrained weights run",
    "preset": "arch architecture",
    "image_size": "img_size size resolution input_size crop_size",
    "freeze_backbone": "freeze linear_probe probe",
    "lora_rank": "lora lora_r",
    "output_dir": "output out out_dir outdir output_folder output_path save_dir run_dir",
    "output_file": "output out output_path",
    "overwrite": "overwrite_output_dir force",
    "resume": "resume_from_checkpoint resume_from",
    "num_train_epochs": "epochs epoch num_epochs n_epochs max_epochs",
    "max_train_steps": "steps max_steps num_steps iterations",
    "per_device_train_batch_size": "batch_size bs batch train_batch_size",
    "per_device_eval_batch_size": "eval_batch_size batch_size bs batch",
    "optimizer": "opt optim",
    "learning_rate": "lr base_lr",
    "lr_scheduler_type": "scheduler lr_scheduler sched schedule",
    "weight_decay": "wd",
    "warmup_ratio": "warmup warmup_steps warmup_epochs",
    "mixed_precision": "fp16 bf16 amp half precision dtype",
    "num_workers": "workers num_worker dataloader_num_workers jobs",
    "report_to": "logger tracker wandb tensorboard log_with",
}
DEVICE_NAMES = (
    "device", "devices", "gpu", "gpus", "num_gpus", "n_gpu", "gpu_ids", "cuda", "no_cuda", "mps", "cpu", "use_cpu",
)  # fmt: skip
DEVICE = (
    ": what computes on a GPU takes it if there is one; ACCELERATE_USE_CPU=1 before the command keeps it on the CPU, "
    "CUDA_VISIBLE_DEVICES=1 picks a GPU; where several are of use, `accelerate launch` starts a process for each"
)
SWITCH = dict(type=bool, nargs="?", const=True, default="false", metavar="true|false")  # argparse converts the default
command: str | None = None  # "hf-vit", if recipes/cli.py called the script


def number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError
    return value


def boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def checked(convert, wanted: str):
    """A conversion whose failure says what was wanted."""

    def convert_or_raise(text):
        try:
            return convert(text)
        except (KeyError, ValueError):
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}") from None

    return convert_or_raise


def at_least(least: int):
    """An integer that is not smaller."""

    def convert(text):
        if (value := int(text)) < least:
            raise ValueError
        return value

    return checked(convert, f"an integer >= {least}")


TYPES = {int: checked(int, "an integer"), float: checked(number, "a number"), bool: checked(boolean, "true or false")}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the text as it is written, each flag with its default, and a value by the last word of its flag."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32)

    def _get_default_metavar_for_optional(self, action):
        return action.dest.rpartition("_")[2].upper()

    def _get_help_string(self, action):
        # Of a default None, the help says what it means.
        if action.default in (None, argparse.SUPPRESS) or action.nargs == 0:
            return action.help
        return f"{action.help} (default: {action.default})"


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` with `-` for `_`, `--no-flag`, and suggestions; of several processes only the first prints an error.

    Args:
        text: the docstring of the script, which --help shows.
        usage: what goes behind the script's name.
        raises: whether an error is a ValueError, for a call from Python, and not the end of the process.
    """

    def __init__(self, text: str | None, usage: str, raises: bool = False):
        if command and text:
            text = re.sub(r"python recipes/(\w+)\.py", rf"{command} \1", text)
        super().__init__(
            prog=command and f"{command} {Path(sys.argv[0]).stem}",
            usage=f"%(prog)s {usage}",
            description=text,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        self.raises = raises
        for kind, convert in TYPES.items():
            self.register("type", kind, convert)

    def add_group(self, title: str, **flags: str | dict):
        """A group of flags, by their names: what --help says of each, or the options of `add_argument`."""
        group = self.add_argument_group(title)
        for name, options in flags.items():
            group.add_argument(f"--{name}", **({"help": options} if isinstance(options, str) else options))

    def add_fields(self, kind: type):
        """A flag for each field of a dataclass; its metadata holds `help`, and `group` where one begins."""
        group = self
        for field in dataclasses.fields(kind):
            if field.name in kind.hidden:
                continue
            if "group" in field.metadata:
                group = self.add_argument_group(field.metadata["group"])
            kinds = (field.type, *get_args(field.type))  # `int | None`, or `int`
            literal = next((part for part in kinds if get_origin(part) is Literal), None)
            if literal is not None:
                options = dict(choices=get_args(literal))
            elif field.type is bool:
                options = dict(SWITCH, default=str(field.default).lower())
            else:
                options = dict(type=kinds[1] if len(kinds) > 1 else kinds[0])
            options = {"default": field.default, "help": field.metadata["help"], **options}
            group.add_argument(f"--{field.name}", **options)

    @property
    def flags(self) -> dict[str, argparse.Action]:
        return {action.dest: action for action in self._actions if action.dest != "help"}

    def parse_known_args(self, args=None, namespace=None):
        words = [self.normalized(word) for word in (sys.argv[1:] if args is None else args)]
        for flag in (word.partition("=")[0] for word in words):
            if re.match("--?[a-zA-Z]", flag) and flag not in self._option_string_actions:
                self.error(f"unknown argument {flag}{self.meant_by(flag) or '; --help lists them'}")
        found, extra = super().parse_known_args(words, namespace)
        if extra:
            self.error(f"{extra[0]!r} belongs to no flag")
        return found, extra

    def normalized(self, word: str) -> str:
        """`--num-workers=2` -> `--num_workers=2`, `--no-flip` -> `--flip=false`."""
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        negated = self.flags.get(name.removeprefix("no_"))
        if not flag.startswith("--") or negated is None:
            return word
        if name != negated.dest:
            return f"--{negated.dest}=false" if negated.type is bool else word
        return f"--{name}{equals}{value}"

    def meant_by(self, flag: str) -> str:
        """`: did you mean --learning_rate?` for `--lr`, as the end of a sentence; "" for what is like no flag."""
        name, flags = flag.lstrip("-").replace("-", "_").lower(), self.flags
        if name in DEVICE_NAMES:
            return DEVICE
        names = {other: dest for dest in reversed(OTHER_NAMES) for other in OTHER_NAMES[dest].split() if dest in flags}
        names |= {dest: dest for dest in flags}
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
        if not close:
            return ""
        action = flags[names[close[0]]]
        if not action.option_strings:
            return f": {action.metavar} goes without a flag"
        return f": did you mean {action.option_strings[0]}?"

    def error(self, message):
        if self.raises:
            raise UserError(message)
        if os.environ.get("RANK", "0") != "0":
            sys.exit(2)
        super().error(message)

    @staticmethod
    def check_output_files(*files: Path, overwrite: bool = True, endings: tuple[str, ...] = ()):
        """End with exit code 1 and a sentence if a file cannot be written, before there is anything to write: the first lies in no
        folder or has none of these `endings`, or one is there already and may not be replaced."""
        if files[0].is_dir() or not files[0].parent.is_dir():
            sys.exit(f"error: --output_file {files[0]}: must be a file in a folder that exists")
        if endings and files[0].suffix.lower() not in endings:
            sys.exit(f"error: --output_file {files[0]}: must end in {' or '.join(endings)}")
        if there := [str(file) for file in files if file.exists() and not overwrite]:
            sys.exit(f"error: {' and '.join(there)} exists: name another --output_file, or pass --overwrite true")


def read_yaml(parser: Parser, name: str, presets: Path) -> list[str]:
    """A flat YAML mapping, of a file or a preset, as flags; null leaves the default."""
    file = Path(name)
    if not file.is_file() and name in (file.stem, f"{file.stem}.yaml"):
        file = presets / f"{file.stem}.yaml"
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except OSError:
        known = ", ".join(sorted(path.stem for path in presets.glob("*.yaml")))
        parser.error(f"--config {name}: no such file or preset; the presets are {known}")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        parser.error(f"--config {file} is not YAML: {error}")
    if not isinstance(values, dict) or any(isinstance(value, dict | list) for value in values.values()):
        parser.error(f"--config {file}: must hold flat `key: value` lines, got {values!r}")
    values = {str(key).replace("-", "_"): value for key, value in values.items()}
    if unknown := values.keys() - parser.flags:
        parser.error(
            f"--config {file}: unknown key {min(unknown)}{parser.meant_by(min(unknown))} (CHANGELOG.md lists those that went)"
        )
    return [f"--{key}={value}" for key, value in values.items() if value is not None]


def parse_fields(kind: type, argv: list[str], text: str | None, presets: Path, raises: bool = False):
    """Flags -> an instance of the dataclass; a flag overrides its line of --config.

    Raises:
        SystemExit, or ValueError if it `raises`: with a message that names the flag or key, for an unknown or ill-typed one.
    """
    parser = Parser(text, "[--config PRESET] [--flag value ...]; --help lists the flags", raises)
    parser.add_argument("--config", metavar="PRESET", help="preset of recipes/configs, or YAML file of flags")
    parser.add_fields(kind)
    config = parser.parse_args(argv).config
    given = {word.partition("=")[0].removeprefix("--") for word in map(parser.normalized, argv)}
    words = [] if config is None else read_yaml(parser, config, presets)
    values = vars(parser.parse_args([*words, *argv]))
    del values["config"]
    try:
        return kind.from_flags(values, given)
    except ValueError as error:
        parser.error(str(error))


def shell_line(script: Path, *words) -> str:
    """What runs a script of recipes/ if it is typed in the working directory."""
    start = [command, script.stem] if command else ["python", os.path.relpath(script)]
    return shlex.join([*start, *map(str, words)])


def own_line(processes: int, launch_file: str) -> str:
    """What runs this script again in as many processes: `hf-vit train ...`, `python recipes/train.py ...` or `accelerate launch`."""
    several = ["--num_processes", str(processes)] if processes > 1 else []
    if command:
        return shlex.join([command, Path(sys.argv[0]).stem, *several, *sys.argv[1:]])
    launch = ["accelerate", "launch", "--config_file", f"recipes/accelerate/{launch_file}.yaml", *several]
    return shlex.join([*(launch if several else ["python"]), *sys.argv])


def script_name(name: str) -> str:
    """What a user calls the script recipes/NAME.py: `hf-vit NAME` where that command called this one."""
    return f"{command} {name}" if command else f"{name}.py"

"""The command line of every script: help in groups, hyphens or underscores, and a sentence for a flag that is wrong.

It imports the standard library alone, so that a script can answer before the imports that take seconds.
"""

import argparse
import contextlib
import difflib
import math
import re
import shlex
import shutil
import sys
from pathlib import Path


# What a flag is called elsewhere: by transformers, timm, Keras, or people in a hurry. Of several flags with the same other name,
# a script's first one is meant.
OTHER_NAMES = {
    "dataset_name": "data dataset data_dir data_path data_folder dataset_dir dataset_path train_dir train_data_dir photos",
    "dataset_config": "dataset_config_name subset",
    "train_split": "train_set",
    "eval_split": "split test_split val_split validation_split eval_set",
    "split": "eval_split test_split val_split",
    "image_column": "image_column_name",
    "label_column": "label_column_name",
    "label_names": "labels names class_names classes",
    "model_name_or_path": "model model_name model_path checkpoint ckpt pretrained weights",
    "model": "model_name_or_path model_name model_path checkpoint ckpt pretrained weights run",
    "models": "model model_name_or_path model_name model_path checkpoint ckpt pretrained weights run",
    "run": "model model_name_or_path model_path run_dir output_dir",
    "images": "image file files photo photos input data dataset dataset_name",
    "preset": "arch architecture",
    "config": "cfg yaml config_file preset_file",
    "config_overrides": "overrides",
    "image_size": "img_size size resolution input_size crop_size",
    "freeze_backbone": "freeze linear_probe probe",
    "lora_rank": "lora lora_r",
    "output_dir": "output out out_dir outdir output_folder output_path save_dir run_dir",
    "output_file": "output out output_path",
    "overwrite": "overwrite_output_dir force",
    "resume": "resume_from_checkpoint resume_from",
    "checkpointing_steps": "save_steps save_every checkpoint_steps",
    "num_train_epochs": "epochs epoch num_epochs n_epochs max_epochs",
    "max_train_steps": "steps max_steps num_steps iterations",
    "per_device_train_batch_size": "batch_size bs batch train_batch_size",
    "per_device_eval_batch_size": "eval_batch_size batch_size bs batch",
    "gradient_accumulation_steps": "accumulation_steps grad_accum_steps accumulate_grad_batches",
    "optimizer": "opt optim",
    "learning_rate": "lr base_lr",
    "lr_scheduler_type": "scheduler lr_scheduler sched schedule",
    "weight_decay": "wd",
    "warmup_ratio": "warmup warmup_steps warmup_epochs",
    "max_grad_norm": "clip_grad grad_clip gradient_clipping",
    "label_smoothing": "smoothing label_smoothing_factor",
    "ema_decay": "ema model_ema",
    "auto_augment": "aa augment augmentation",
    "mixed_precision": "fp16 bf16 amp half precision dtype",
    "gradient_checkpointing": "grad_checkpointing",
    "num_workers": "workers num_worker dataloader_num_workers jobs",
    "log_steps": "logging_steps log_interval log_every",
    "eval_epochs": "eval_interval",
    "report_to": "logger tracker wandb tensorboard log_with",
    "repo": "repo_id hub_model_id push_to_hub_model_id",
    "without_images": "no_images",
}
DEVICE_NAMES = (
    "device", "devices", "gpu", "gpus", "num_gpus", "n_gpu", "gpu_ids", "cuda", "no_cuda", "mps", "cpu", "use_cpu",
)  # fmt: skip
ACCELERATED = (
    "it takes the GPU if there is one; ACCELERATE_USE_CPU=1 before the command keeps it on the CPU, CUDA_VISIBLE_DEVICES=1 "
    "picks a GPU, and several take `accelerate launch`"
)
command: str | None = None  # "hf-vit", if recipes/cli.py called the script
ON_CPU = "it computes on the CPU"
IMAGE_FILES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".heic", ".heif", ".avif")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the text as it is written, each flag with the default that it has, and a value by the last word of its flag."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32)

    def _get_default_metavar_for_optional(self, action):
        return action.dest.rpartition("_")[2].upper()

    def _get_help_string(self, action):
        default = action.default
        if default in (None, argparse.SUPPRESS) or not action.option_strings or action.nargs == 0:
            return action.help  # of a default None, the help says what it means
        if isinstance(default, bool):
            default = str(default).lower()
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        return f"{action.help} (default: {shown})"


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that takes `--num-workers` for `--num_workers`, and names the flag that was meant by a wrong one.

    Args:
        text: the docstring of the script, which --help shows.
        usage: what goes behind the script's name.
        accelerated: whether the script computes on a GPU where there is one, through Accelerate.
    """

    def __init__(self, text: str | None, usage: str, accelerated: bool = False):
        super().__init__(
            prog=command and f"{command} {Path(sys.argv[0]).stem}",
            usage=f"%(prog)s {usage}",
            description=text
            and (re.sub(r"python recipes/(\w+)\.py", rf"{command} \1", text) if command else text).strip(),
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        self.accelerated = accelerated
        self.register("type", int, whole_number)
        self.register("type", float, number)
        self.register("type", bool, true_or_false)

    def parse_known_args(self, args=None, namespace=None):
        args = self.with_underscores(sys.argv[1:] if args is None else args)
        known = self._option_string_actions
        for flag in (word.partition("=")[0] for word in args):
            if re.match("--?[a-zA-Z]", flag) and flag not in known:
                self.error(f"{flag} is not a flag of {self.prog}{self.meant_by(flag) or '; --help lists them'}")
        found, extra = super().parse_known_args(args, namespace)
        if extra:
            self.error(f"{extra[0]!r} belongs to no flag; wanted {self.format_usage().partition(': ')[2].strip()}")
        return found, extra

    def with_underscores(self, words: list[str]) -> list[str]:
        """`words` with flags as this parser knows them: `--num-workers=2` -> `--num_workers=2`."""
        spelt = []
        for word in words:
            flag, equals, value = word.partition("=")
            flag = flag[:2] + flag[2:].replace("-", "_")
            spelt.append(f"{flag}{equals}{value}" if flag in self._option_string_actions else word)
        return spelt

    def meant_by(self, flag: str) -> str:
        """`: did you mean --learning_rate?` for `--lr`, as the end of a sentence; "" for what is like no flag."""
        name = flag.lstrip("-").replace("-", "_").lower()
        if name in DEVICE_NAMES:
            return f": {ACCELERATED if self.accelerated else ON_CPU}"
        actions = {action.dest: action for action in self._actions if action.help != argparse.SUPPRESS}
        others = {
            other: dest for dest in reversed(OTHER_NAMES) if dest in actions for other in OTHER_NAMES[dest].split()
        } | {dest: dest for dest in actions}
        close = difflib.get_close_matches(name, others, n=1, cutoff=0.75)
        if not close:
            return ""
        action = actions[others[close[0]]]
        if not action.option_strings:
            return f": {action.metavar} goes without a flag"
        value = f" {name}" if action.dest == "mixed_precision" and name in ("bf16", "fp16") else ""
        return f": did you mean {action.option_strings[0]}{value}?"

    @staticmethod
    def refuse_mistyped_paths(**names: str | None):
        """End with exit code 1 and a sentence if a name is that of no file or folder, and of nothing on the Hub either."""
        from hf_vit.system.hub_names import refuse_mistyped_path  # it may import huggingface_hub

        for flag, name in names.items():
            try:
                refuse_mistyped_path(name, flag if flag.isupper() else f"--{flag}")
            except ValueError as error:
                sys.exit(f"error: {error}")

    @staticmethod
    def check_output_file(file: str | Path | None):
        """End with exit code 1 and a sentence if a file cannot be written there, before there is anything to write."""
        if file is not None and (Path(file).is_dir() or not Path(file).parent.is_dir()):
            what = "is a folder" if Path(file).is_dir() else f"lies in no folder that is there ({Path(file).parent})"
            sys.exit(f"error: --output_file {file} {what}; wanted the name of a new file")

    @staticmethod
    def check_images(names: list[str], or_data: bool = False):
        """End with exit code 1 and a sentence if a name is that of no image which can be read here.

        Args:
            or_data: a single name may also be that of a data set, or of a folder of class folders.
        """
        may_be_data = or_data and len(names) == 1
        for name in names:
            path, wrong = Path(name), None
            if "://" in name:
                wrong = "is an address: download the image, and name its file"
            elif path.is_dir() and not (may_be_data and any(path.iterdir()) and not holds_only_images(path)):
                wrong = f"is a folder, not an image{' and no data set' * may_be_data}: name its images, such as "
                wrong += f"{shlex.quote(name.rstrip('/'))}/*.jpg"
            elif not path.exists() and not (may_be_data and path.name == name and not path.suffix):
                wrong = f"cannot be read as an image: No such file here ({Path.cwd()})"
            if wrong is not None:
                sys.exit(f"error: {name} {wrong}")


class RefusedFlag(argparse.Action):
    """A flag of another script: an error, whose reason is `const`."""

    def __call__(self, parser, namespace, values, option_string=None):
        parser.error(f"{option_string} {self.const}")


def number(text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} was given, a number was wanted")


def whole_number(text: str) -> int:
    with contextlib.suppress(ValueError):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} was given, a whole number was wanted")


def true_or_false(text: str) -> bool:
    if text.lower() in ("true", "t", "yes", "y", "1"):
        return True
    if text.lower() in ("false", "f", "no", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} was given, true or false was wanted")


def holds_only_images(folder: Path) -> bool:
    """Whether a folder holds images and no folders."""
    inside = list(folder.iterdir())
    return any(path.suffix.lower() in IMAGE_FILES for path in inside) and not any(path.is_dir() for path in inside)


def shell_line(script: Path, *words) -> str:
    """What runs a script of recipes/ if it is typed in the working directory."""
    if command is not None:
        return shlex.join([command, script.stem, *map(str, words)])
    python = sys.executable
    if shutil.which("python") == python:
        python = "python"
    return shlex.join([from_here(python), from_here(script), *map(str, words)])


def own_line(processes: int, launch_file: str) -> str:
    """What runs this script again in as many processes: `hf-vit train ...`, `python recipes/train.py ...` or `accelerate launch`."""
    script, *flags = sys.argv
    if command is not None:
        several = ["--num_processes", str(processes)] if processes > 1 else []
        return shlex.join([command, Path(script).stem, *several, *flags])
    if processes > 1:
        launch = f"accelerate launch --config_file recipes/accelerate/{launch_file}.yaml --num_processes {processes}"
        return f"{launch} {shlex.join(sys.argv)}"
    return f"python {shlex.join(sys.argv)}"


def script_name(name: str) -> str:
    """What a user calls the script recipes/NAME.py: `hf-vit NAME` where that command called this one."""
    return f"{command} {name}" if command else f"{name}.py"


def from_here(path: str | Path) -> str:
    """A path as one would type it: relative, if it is below the working directory."""
    here = Path.cwd()
    return str(Path(path).relative_to(here) if Path(path).is_relative_to(here) else path)

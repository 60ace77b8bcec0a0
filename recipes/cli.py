"""Runs the hf_vit recipes from any folder.

    hf-vit train --config demo
    hf-vit train --dataset_name photos --model_name_or_path google/vit-base-patch16-224-in21k \\
        --output_dir runs/photos
    hf-vit train --config cifar10 --num_processes 2
    hf-vit classify runs/photos photo.jpg

`hf-vit COMMAND --help` lists the flags of a command, which are those of recipes/COMMAND.py in a
clone. Every command also takes

    --num_processes N     run as N processes of `accelerate launch`, one per GPU, as
                          recipes/accelerate/ddp.yaml says
    --launch_file FILE    another file for `accelerate launch`: a path, or fsdp2 for
                          recipes/accelerate/fsdp2.yaml
"""

import argparse
import os
import runpy
import sys
from pathlib import Path


RECIPES = Path(__file__).resolve().parent
COMMANDS = {
    "train": "train or fine-tune a model on images",
    "pretrain": "learn from images without labels",
    "eval": "evaluate a model, or probe its features",
    "audit": "look for duplicates, broken images and wrong labels",
    "predict": "label or embed all images of a folder",
    "classify": "show what a model sees in a few images",
    "visualize": "draw what a model looks at",
    "app": "open a page that classifies images",
    "publish": "share a run on the Hub",
    "export": "write a model as ONNX",
}


def main():
    name, *flags = sys.argv[1:] or ["--help"]
    if name == "embed":
        name, flags = "predict", ["--output", "embeddings", *flags]
    if name in ("--help", "-h", "help"):
        width = max(map(len, COMMANDS))
        lines = "\n".join(f"    {name:<{width}}  {text}" for name, text in COMMANDS.items())
        try:
            print(f"usage: hf-vit COMMAND [--flag value ...]\n\n{__doc__.strip()}\n\ncommands:\n{lines}", flush=True)
        except BrokenPipeError:  # of `hf-vit --help | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif name == "--version":
        from importlib import metadata

        print(f"hf_vit {metadata.version('hf_vit')}")
    elif name not in COMMANDS:
        print(f"hf-vit: error: {name} is not a command; must be one of {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    else:
        parser = argparse.ArgumentParser(prog="hf-vit", add_help=False, allow_abbrev=False)
        parser.add_argument("--num_processes", "--num-processes", type=int)
        parser.add_argument("--launch_file", "--launch-file", default="ddp")
        launched, others = parser.parse_known_args(flags)
        if others == flags:
            run(name, flags)
        else:
            launch(launched, [name, *others])


def run(name: str, flags: list[str]):
    """The script of that name, as `python recipes/NAME.py` runs it."""
    sys.path.insert(0, str(RECIPES))
    from hf_vit.system import command_line

    command_line.command = "hf-vit"
    sys.argv[:] = [f"{name}.py", *flags]
    runpy.run_path(str(RECIPES / f"{name}.py"), run_name="__main__")


def launch(how: argparse.Namespace, words: list[str]):
    """This command in processes of `accelerate launch`, in place of this process."""
    known = RECIPES / "accelerate" / f"{how.launch_file}.yaml"
    options = ["--config_file", str(known if known.is_file() else how.launch_file)]
    options += [] if how.num_processes is None else ["--num_processes", str(how.num_processes)]
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    line = [sys.executable, "-m", "accelerate.commands.launch", *options, str(RECIPES / "cli.py"), *words]
    os.execv(sys.executable, line)


if __name__ == "__main__":
    main()

"""A training run by a Python call, for notebooks.

    from hf_vit_recipes.notebooks import train

    results = train(dataset_name="photos", preset="tiny-patch16-224", output_dir="runs/photos")
    print(results.metrics["accuracy"])

It is the run of `hf-vit train`, in this process: flags, run folder and bits are the same.
"""

import os
import shlex

import torch.distributed as dist

from hf_vit.evaluation.results import Results
from hf_vit.training import train as library
from hf_vit.training.arguments import call_words, from_call
from hf_vit.training.distributed import exit_with_error


def train(**flags) -> Results | None:
    """Train, and return what results.json holds; see `hf_vit.training.train.train`.

    Args:
        flags: those of `hf-vit train`, without their dashes: `train(config="demo", learning_rate=1e-3, overwrite=True)`.

    Raises:
        ValueError: for a flag that does not exist or a value that it does not take, and as the library's `train`.
    """
    args = from_call(**flags)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    several = ["--num_processes", str(processes)] if processes > 1 else []
    command = shlex.join(["hf-vit", "train", *several, *call_words(**flags)])
    try:
        return library.train(args, command=command)
    except Exception as error:
        if dist.is_initialized():
            exit_with_error(error)
        raise

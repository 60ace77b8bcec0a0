"""What a script needs to read its command line, before the imports that take seconds."""

import os
import signal
import sys
from pathlib import Path

from hf_vit.system.command_line import SWITCH, Parser, at_least  # noqa: F401, for the scripts


DATA = dict(
    dataset_name=dict(required=True, help="Hub id, folder, table file, or `fashion-mnist-mini` (embedded)"),
    dataset_config="configuration of the data set, if it has several",
)
COLUMNS = dict(
    image_column="image column; default: found by its feature type",
    label_column="label column; default: found by its feature type or name",
    class_level=dict(type=int, help="folder level below the split that names the class, default: 1"),
    label_names="text file of class names, one per line, for labels that are bare numbers",
    label_separator='multi-label: what separates the labels in a text, such as ";"',
    label_columns="multi-label: columns of 0 and 1, such as cat,dog,bird",
)


def bad_images(default: str) -> dict:
    """What a script does with images that cannot be read."""
    about = "what to do with images that cannot be decoded"
    return dict(on_bad_image=dict(choices=("stop", "skip"), default=default, help=about))


def output(endings: str) -> dict:
    """The flags of a script whose result is one file, `endings` such as ".csv or .parquet"."""
    file = dict(type=Path, required=True, help=f"file to write, {endings}")
    return dict(output_file=file, overwrite=dict(**SWITCH, help="replace the output file"))


def hardware(batch_size: int) -> dict:
    """The flags of a script that computes the answers of a model."""
    images = dict(type=at_least(1), default=batch_size, help="images per process and forward pass")
    workers = dict(type=at_least(0), help="data loading processes; default: one per core, up to 32")
    precision = dict(
        choices=("auto", "no", "bf16", "fp16"), default="auto", help="auto: bf16 where the hardware is fast at it"
    )
    return dict(per_device_eval_batch_size=images, num_workers=workers, mixed_precision=precision)


def answer_signals():
    """A signal before training has begun ends the process at once, with the exit code of a run that can continue."""

    def leave(*_):
        os.write(2, b"stopped before anything was begun\n")
        os._exit(75)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, leave)


def training_arguments(text: str, kind: type):
    """The flags of a script that trains, before the imports that take seconds."""
    from hf_vit.training.arguments import parse_args

    answer_signals()
    return parse_args(sys.argv[1:], text, kind)

"""What a script needs to read its command line, before the imports that take seconds."""

import os
import signal
import sys

from hf_vit.system.command_line import Parser


SWITCH = dict(type=bool, nargs="?", const=True, default=False, metavar="true|false")


def answer_signals():
    """A signal before training has begun ends the process at once, with the exit code of a run that can continue."""

    def leave(*_):
        os.write(2, b"stopped before anything was begun\n")
        os._exit(75)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, leave)


def training_arguments(text: str, kind: type):
    """The flags of a script that trains, before the imports that take seconds; a path that is not there ends it here."""
    from hf_vit.training.arguments import parse_args

    answer_signals()
    args = parse_args(sys.argv[1:], text, kind)
    names = ("dataset_name", "model_name_or_path", "teacher_name_or_path")
    Parser.refuse_mistyped_paths(**{name: getattr(args, name) for name in names})
    return args


def add_column_flags(group):
    """The flags that say where images and labels are in a data set."""
    flag = group.add_argument
    flag("--image_column", help="column of images; by default found by its feature type")
    flag("--label_column", help="column of labels; by default found by its feature type")
    flag(
        "--class_level",
        type=int,
        help="folder below the split that is the class, 2 for animals/dogs/1.jpg; default: 1",
    )
    flag("--label_names", help="text file of class names, one per line, if the labels are bare numbers")
    flag("--label_separator", help='what stands between several labels of an image, such as ";"')
    flag("--label_columns", help="columns of 0 and 1, one for each of several labels, such as cat,dog,bird")


def add_unlabelled_flags(parser: Parser):
    """The flags of a script that reads images without labels."""
    group = parser.add_argument_group("images")
    flag = group.add_argument
    flag(
        "--dataset_name", required=True,
        help="folder of images, image file, text file of image files, table, data file, Hub id, or fashion-mnist-mini",
    )  # fmt: skip
    flag("--dataset_config", help="configuration of the data set, if it has several")
    flag("--split", help="split of the data set, if it has several")
    flag("--image_column", help="column of images; by default found by its feature type")
    add_bad_image_flag(group, "skip")


def add_bad_image_flag(group, default: str):
    """What a script does with images that cannot be read."""
    group.add_argument(
        "--on_bad_image",
        choices=("stop", "skip"),
        default=default,
        help=f"images that cannot be read; default: {default}",
    )


def add_output_flags(group, endings: str):
    """The flags of a script whose result is one file, `endings` such as ".csv or .parquet"."""
    group.add_argument("--output_file", required=True, help=f"file to write, {endings}")
    group.add_argument("--overwrite", **SWITCH, help="replace the output file")


def add_hardware_flags(parser: Parser, batch_size: int):
    """The flags of a script that computes the answers of a model."""
    flag = parser.add_argument_group("hardware").add_argument
    flag("--per_device_eval_batch_size", type=int, default=batch_size, help="images a process and a forward pass")
    flag("--num_workers", type=int, help="processes that decode images; if not given, one a core, up to 32")
    precision = "auto: bf16 where the hardware is fast at it"
    flag("--mixed_precision", choices=("auto", "no", "bf16", "fp16"), default="auto", help=precision)


def refuse_less(parser: Parser, args, **least: int):
    """End the script if a flag is less than its least value."""
    for name, smallest in least.items():
        if (given := getattr(args, name)) is not None and given < smallest:
            parser.error(f"argument --{name}: {given} was given, {smallest} or more was wanted")

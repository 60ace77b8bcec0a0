"""The files of a run folder: regular files only, and those that a manifest lists."""

import json
import os
import shutil
import stat
from pathlib import Path, PurePosixPath

import yaml

from hf_vit.system.errors import UserError
from hf_vit.system.escapes import printable


MANIFEST = "manifest.json"
SAMPLES, NUM_SAMPLES = "samples.safetensors", 12  # images of those that were scored, drawn at random
PREDICTIONS = "predictions.csv"  # of every scored image; it names files of the owner, and never leaves the run folder


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A file descriptor of a regular file; the last part of `path` is never followed as a link.

    Raises:
        ValueError: if it is a symbolic link, a device, a pipe or anything else.
        OSError: if it cannot be opened.
    """
    wanted = (
        f"{path} is no regular file: wanted a run as recipes/train.py leaves it; do not follow this link, delete it"
    )
    if path.is_symlink():
        raise UserError(wanted)
    # O_NONBLOCK: a pipe without a writer would wait for one.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(wanted)
    return descriptor


def read_text(path: Path) -> str:
    """The UTF-8 text of a regular file; ValueError if it is none."""
    with os.fdopen(open_regular(path), encoding="utf-8") as file:
        return file.read()


def read_flat_yaml(path: Path) -> dict:
    """config.yaml of a run: `key: value` lines; ValueError where it is not."""
    try:
        value = yaml.safe_load(read_text(path))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no YAML ({' '.join(str(error).split())[:200]})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is no configuration of a run: it must hold `key: value` lines")
    return value


def listed_files(folder: Path, *needed: str) -> dict[str, dict]:
    """The regular files that the manifest of `folder` lists: {name: {"bytes": ..., "sha256": ...}}.

    Raises:
        ValueError: if there is no such manifest, it lists none of `needed`, or a name leaves the folder, is missing, or goes
            through a link.
    """
    try:
        files = json.loads(read_text(folder / MANIFEST))["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"its {MANIFEST} cannot be read ({error})") from error
    for name in (*needed, *files):
        if name not in files:
            raise UserError(f"its {MANIFEST} lists no {name}")
        parts = name.split("/")
        if "\0" in name or "\\" in name or {"", ".", ".."} & {*parts} or PurePosixPath(name).is_absolute():
            raise UserError(f"its {MANIFEST} lists {printable(name)}, which is no name of a file below it")
        for depth in range(1, len(parts) + 1):
            _check_kind(folder, "/".join(parts[:depth]), stat.S_ISREG if depth == len(parts) else stat.S_ISDIR)
    return files


def _check_kind(folder: Path, name: str, is_kind):
    try:
        mode = os.lstat(folder / name).st_mode
    except (OSError, ValueError) as error:  # the latter for half a surrogate pair
        raise UserError(f"its {printable(name)} is missing") from error
    if not is_kind(mode):
        raise UserError(f"its {printable(name)} is a link, or no regular file")


def copy_listed(folder: Path, to: Path, leave_out: tuple[str, ...] = ()):
    """Copy the files that the manifest of `folder` lists, and no other."""
    for name in listed_files(folder):
        if name not in leave_out:
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            copy_file(folder / name, to / name)


def copy_file(file: Path, to: Path):
    """Copy a regular file; what is in the place of `to`, a link too, is replaced."""
    to.unlink(missing_ok=True)
    with os.fdopen(open_regular(file), "rb") as source, open(to, "xb") as target:
        shutil.copyfileobj(source, target)

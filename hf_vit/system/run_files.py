"""The files of a run folder that somebody else may have made: regular files only, of a bounded size and the expected shape."""

import json
import os
import shutil
import stat
import sys
from pathlib import Path, PurePosixPath

import yaml

from hf_vit.system.errors import UserError
from hf_vit.system.escapes import printable


LARGEST_TEXT = 2**26  # bytes; results.json of 20,000 classes takes 4 MB
LARGEST_CONFIG = 2**20  # bytes of config.yaml, which PyYAML parses at about 100 kB a second
MANIFEST = "manifest.json"
SAMPLES, NUM_SAMPLES = "samples.safetensors", 12  # images of those that were scored, drawn at random
PREDICTIONS = "predictions.csv"  # of every scored image; it names files of the owner, and never leaves the run folder
NUMBER = (int, float)
OPTIONAL = object()  # in a `check_shape` dict: the key may be absent or null


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


def read_text(path: Path, most: int = LARGEST_TEXT) -> str:
    """The UTF-8 text of a regular file.

    Raises:
        ValueError: if it is no regular file, holds more than `most` bytes, or is no UTF-8.
        OSError: if it cannot be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UserError(f"{path} holds more than {most:,} bytes: no run writes so many")
    return content.decode("utf-8")


def read_json(path: Path, shape, most: int = LARGEST_TEXT) -> dict:
    """The JSON of a regular file, of this shape (`check_shape`); ValueError where it is not."""
    try:
        value = json.loads(read_text(path, most))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is no JSON ({error})") from error
    check_shape(value, shape, str(path))
    return value


def read_flat_yaml(path: Path) -> dict:
    """config.yaml of a run: a flat mapping of names to text, numbers and dates; ValueError where it is not.

    Flat, because nested aliases ("billion laughs") stay small until somebody prints them.
    """
    try:
        value = yaml.safe_load(read_text(path, LARGEST_CONFIG))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is no YAML ({' '.join(str(error).split())[:200]})") from error
    if not isinstance(value, dict) or any(
        isinstance(item, dict | list | set | tuple | bytes) for item in value.values()
    ):
        raise UserError(f"{path} is no configuration of a run: wanted flat `key: value` lines")
    if any(not isinstance(key, str) for key in value):
        raise UserError(f"{path} is no configuration of a run: its keys are not all text")
    return value


def check_shape(value, shape, where: str):
    """Raise ValueError, with the place, unless a JSON value has this shape.

    Args:
        shape: a type or a tuple of types; {key: shape} for a mapping with at least these keys, a pair (OPTIONAL, shape) for
            one that may be absent or null, {str: shape} for any keys; [shape] for a list; [shape, n] for a list of n.
    """
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            raise UserError(f"{where} is a {type(value).__name__}: wanted keys with values")
        if str in shape:
            for key, item in value.items():
                check_shape(item, shape[str], f"{where}: {key[:40]!r}")
            return
        for key, wanted in shape.items():
            optional = isinstance(wanted, tuple) and wanted[0] is OPTIONAL
            if optional and value.get(key) is None:
                continue
            if key not in value:
                raise UserError(f"{where} lacks {key}: another version wrote it, or it was changed since")
            check_shape(value[key], wanted[1] if optional else wanted, f"{where}: {key}")
    elif isinstance(shape, list):
        if not isinstance(value, list) or (len(shape) == 2 and len(value) != shape[1]):
            raise UserError(f"{where} is no list{f' of {shape[1]}' if len(shape) == 2 else ''}")
        for number, item in enumerate(value):
            check_shape(item, shape[0], f"{where}, entry {number}")
    else:
        kinds = shape if isinstance(shape, tuple) else (shape,)
        # True is an int of Python, and none of JSON.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise UserError(f"{where} is a {type(value).__name__}: wanted {' or '.join(k.__name__ for k in kinds)}")
        if shape is NUMBER and abs(value) > sys.float_info.max and isinstance(value, int):
            raise UserError(f"{where} is larger than any number that a run writes")


def listed_files(folder: Path, *needed: str) -> dict[str, dict]:
    """The regular files that the manifest of `folder` lists: {name: {"bytes": ..., "sha256": ...}}.

    Raises:
        ValueError: if there is no such manifest, it lists none of `needed`, or a name leaves the folder, is missing, or goes
            through a link.
    """
    try:
        files = json.loads(read_text(folder / MANIFEST))["files"]
        check_shape(files, {str: {"bytes": int, "sha256": str}}, "files")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
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


def refuse_links(folder: Path, *names: str):
    """Raise ValueError if one of these files or folders of a run, or something below, is a link or no regular file."""
    for name in names:
        root = folder / name
        for path in (root, *(sorted(root.rglob("*")) if root.is_dir() and not root.is_symlink() else ())):
            if path.is_symlink() or (path.exists() and not (path.is_file() or path.is_dir())):
                raise UserError(f"{path} is a link, or no regular file: copy what you want to its place, or delete it")

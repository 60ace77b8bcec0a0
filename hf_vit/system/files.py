"""Files and folders that are whole or absent, whenever the process is killed, and their checksums."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from hf_vit.system.errors import UserError
from hf_vit.system.run_files import listed_files
from hf_vit.system.text import printable


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def checksum(file: Path) -> str:
    """SHA-256 of a file's bytes."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def sync(path: Path):
    """Have the disk keep a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOSYS)):  # some network disks cannot
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_file(path: Path):
    """Replace a file as a whole: whatever happens, it is then the old one or the new one; yields the place to write to."""
    aside = path.with_name(f".{path.name}.part")
    aside.unlink(missing_ok=True)  # of a run that was killed, or a link that leads elsewhere
    yield aside
    sync(aside)
    os.replace(aside, path)
    sync(path.parent)


def write_text(path: Path, text: str):
    with atomic_file(path) as aside, open(aside, "x", encoding="utf-8", newline="") as file:
        file.write(text)


@contextlib.contextmanager
def atomic_dir(folder: Path):
    """Write a folder aside, sync it, and only then give it its name; yields the place to write to."""
    aside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed
    aside.parent.mkdir(parents=True, exist_ok=True)
    aside.mkdir()  # an error where a link is in its place
    try:
        yield aside
        for path in (*aside.rglob("*"), aside):
            sync(path)
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(aside, folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


@contextlib.contextmanager
def checksummed_dir(folder: Path, needed: int):
    """An `atomic_dir` with a manifest of sizes and checksums, which `verify_checksums` compares.

    Args:
        needed: bytes that will be written.

    Raises:
        UserError: if the disk has no room for them; whatever was there before is as it was.
    """
    place = next(parent for parent in folder.parents if parent.exists())
    try:
        if shutil.disk_usage(place).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with atomic_dir(folder) as aside:
            yield aside
            files = {path.relative_to(aside).as_posix(): path for path in aside.rglob("*") if path.is_file()}
            manifest = {name: {"bytes": path.stat().st_size, "sha256": checksum(path)} for name, path in files.items()}
            (aside / "manifest.json").write_text(json.dumps({"files": manifest}, indent=2))
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) in FULL or any(f"os error {number})" in str(error) for number in FULL)
        if not full:
            raise
        free = shutil.disk_usage(place).free
        raise UserError(
            f"{folder} needs {needed / 1e6:,.1f} MB and {free / 1e6:,.1f} MB are free (or left of a quota): make room, and "
            "the same command goes on from the last checkpoint"
        ) from error


def verify_checksums(folder: Path):
    """Raise ValueError unless the files that the manifest of `folder` lists are there, regular, and the same byte for byte."""
    for name, wanted in listed_files(folder).items():
        path, name = folder / name, printable(name)
        if path.stat().st_size != wanted["bytes"]:
            raise UserError(f"its {name} holds {path.stat().st_size:,} of {wanted['bytes']:,} bytes")
        if checksum(path) != wanted["sha256"]:
            raise UserError(f"its {name} does not hold the bytes that were written")

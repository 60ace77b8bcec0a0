"""Image files of strangers: which of them a row may name, which formats are opened, and how large they may be."""

import contextlib
import os
import stat
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO

from datasets import Image, config
from datasets.utils.file_utils import xopen
from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from PIL import Image as PILImage
from PIL import UnidentifiedImageError


# Pillow opens some forty formats, and starts Ghostscript for one of them. MPO, of phones, is opened as JPEG.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
# Bytes of a file: as many as the largest photo that Pillow opens, 178,956,970 pixels, takes at 16 bits in three channels.
LARGEST_FILE = 2**30


@dataclass(frozen=True)
class Files:
    """Which files the rows of one data set may name, where they do not hold the bytes themselves.

    Args:
        folder: regular files in it, and members of zip archives in it; None allows no file on this disk.
        links: whether a symbolic link may lead out of `folder`. That is for paths which were found by listing the folder: a
            row that chooses its own path could use any link that lies there.
        repo: id of a data set on the Hub whose own files are allowed, by the two addresses that `datasets` writes.
    """

    folder: str | None = None
    links: bool = False
    repo: str | None = None

    def locate(self, path: str) -> str:
        """Where the file lies that a row names: a path on this disk, relative ones from `folder`, or an address for `xopen`.

        Raises:
            ValueError: if the data set may not name it; it says what may be named.
        """
        member, chain, archive = path.partition("::")
        if not chain:
            place = self._own(path)
        elif member.startswith("zip://") and "::" not in archive and (archive := self._own(archive)):
            place = f"{member}::{archive}"
        else:
            place = None
        if place is None:
            allowed = [f"files in {self.folder}"] if self.folder else []
            allowed += [f"files of the data set {self.repo}"] if self.repo else []
            raise ValueError(
                f"it names the file {path!r}, which is not opened: only {' and '.join(allowed) or 'images in the rows themselves'} "
                "are"
            )
        return place

    def _own(self, path: str) -> str | None:
        """One file without a chain: its place, or None where it is not allowed."""
        if ".." in urllib.parse.unquote(path).replace("\\", "/").split("/"):
            return None
        if "://" in path:
            own = (f"hf://datasets/{self.repo}@", f"{config.HF_ENDPOINT}/datasets/{self.repo}/resolve/")
            return path if self.repo is not None and path.startswith(own) else None
        if self.folder is None:
            return None
        place, real = os.path.join(self.folder, path), os.path.abspath if self.links else os.path.realpath
        root = os.path.join(real(self.folder), "")
        return place if real(place).startswith(root) else None


NO_FILES = Files()


def files_on_hub(name: str) -> Files:
    """The files of a data set on the Hub: there, and where `huggingface_hub` keeps its copy of them."""
    copy = repo_folder_name(repo_id=name, repo_type="dataset")
    return Files(folder=os.path.join(constants.HF_HUB_CACHE, copy), repo=name)


@dataclass
class ImageFile(Image):
    """The feature of a column of undecoded images that says which files its rows may name. `datasets` keeps it through all
    that is done to the rows; written to disk it becomes a plain `Image`, which may name none."""

    files: Files = NO_FILES


def restrict(splits, files: Files):
    """Splits of a data set, of either kind -> the same, their images undecoded and with `files` as all that they may name."""
    for name, rows in splits.items():
        for column, kind in (rows.features or {}).items():
            if isinstance(kind, Image):
                splits[name] = splits[name].cast_column(column, ImageFile(decode=False, files=files))
    return splits


def files_of(rows) -> Files:
    """Which files the column `image` of some rows may name: none, unless `restrict` has said so."""
    kind = rows.features["image"]
    return kind.files if isinstance(kind, ImageFile) else NO_FILES


def read_bytes(item: dict | None, files: Files = NO_FILES) -> bytes:
    """The file of one undecoded image, `{"bytes": ..., "path": ...}`.

    Raises:
        ValueError, OSError: if it is empty, too large, not allowed by `files`, or cannot be read.
    """
    if item is None or item["bytes"] == b"" or (item["bytes"] is None and item["path"] is None):
        raise ValueError("it is empty")
    if item["bytes"] is not None:
        return item["bytes"]
    place = files.locate(item["path"])
    if "://" not in place:
        return read_file(place)
    archive = place.rpartition("::")[2]
    if "://" not in archive and not os.path.isfile(archive):  # a pipe would be waited for
        raise ValueError(f"{archive} is no file")
    with xopen(place, "rb") as file:
        return _bounded(file)


def read_file(path: str) -> bytes:
    """The bytes of a file that the user named.

    Raises:
        ValueError, OSError: if there is none, if it is no regular file (but a device, say, or a pipe), or if it is larger than
            `LARGEST_FILE`.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path} is no regular file")
    with open(path, "rb") as file:
        return _bounded(file)


def _bounded(file) -> bytes:
    content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise ValueError(f"its file is larger than {LARGEST_FILE:,} bytes, the most that an image may have")
    if not content:
        raise ValueError("it is empty")
    return content


@contextlib.contextmanager
def opened(content: bytes) -> Iterator[PILImage.Image]:
    """The bytes of a file as an image that Pillow has opened and not yet decoded; what is raised in the block too, while it is
    decoded, comes as ValueError or OSError.

    Raises:
        ValueError, OSError: if it is of none of `FORMATS`, damaged, or of more pixels than Pillow opens, 178,956,970.
    """
    try:
        with PILImage.open(BytesIO(content), formats=FORMATS) as image:
            yield image
    except UnidentifiedImageError as error:  # its text holds an address, another one each time
        raise ValueError(f"no known format: wanted {', '.join(FORMATS)}") from error
    except (ValueError, OSError):
        raise
    except Exception as error:  # Pillow's plugins raise anything
        raise ValueError(f"{error or 'it is damaged'} ({type(error).__name__})") from error

"""Access to untrusted image files: which files a row may name, which formats are opened, and how large they may be."""

import contextlib
import os
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO

import pyarrow as pa
from datasets import Dataset, DatasetInfo, Features, Image, config
from datasets.utils.file_utils import xopen
from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from PIL import Image as PILImage
from PIL import UnidentifiedImageError

from hf_vit.system.errors import UserError


# Pillow opens some forty formats, and starts Ghostscript for one of them. MPO, which phones write, is opened as JPEG.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
# Their suffixes, in lower case, and those of other images, which are counted and left out.
IMAGE_SUFFIXES = frozenset(
    {".apng", ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
)
UNREAD_SUFFIXES = frozenset({".avif", ".heic", ".heif", ".jxl", ".svg"})
# The largest photo that Pillow opens, 178,956,970 pixels, takes this many bytes with three channels of 16 bits.
MAX_FILE_BYTES = 2**30


@dataclass(frozen=True)
class AllowedFiles:
    """The files that rows of a data set may name when they do not hold the bytes themselves.

    Args:
        folder: regular files in this folder, and members of its zip archives, are allowed; None allows no local file.
        repo: a Hub data set whose own files are allowed, under the two kinds of address that `datasets` writes.
    """

    folder: str | None = None
    repo: str | None = None

    def resolve(self, path: str) -> str:
        """The location of a file named by a row: a local path (relative paths start at `folder`) or an address for `xopen`.

        Raises:
            UserError: if the data set may not name this file; it says what may be named.
        """
        member, chain, archive = path.partition("::")
        if not chain:
            location = self._resolve_file(path)
        elif member.startswith("zip://") and "::" not in archive and (archive := self._resolve_file(archive)):
            location = f"{member}::{archive}"
        else:
            location = None
        if location is None:
            where = " or ".join(filter(None, (self.folder, self.repo))) or "the rows themselves"
            raise UserError(f"it names the file {path!r}, which is not opened: only images in {where} are")
        return location

    def _resolve_file(self, path: str) -> str | None:
        """The location of a file outside of archives; None if it is not allowed."""
        if ".." in urllib.parse.unquote(path).replace("\\", "/").split("/"):
            return None
        if "://" in path:
            prefixes = (f"hf://datasets/{self.repo}@", f"{config.HF_ENDPOINT}/datasets/{self.repo}/resolve/")
            return path if self.repo is not None and path.startswith(prefixes) else None
        if self.folder is None:
            return None
        location, root = os.path.join(self.folder, path), os.path.join(os.path.realpath(self.folder), "")
        return location if os.path.realpath(location).startswith(root) else None


NO_FILES = AllowedFiles()


@dataclass(frozen=True)
class NamedFiles(AllowedFiles):
    """Files that the user named, or that were found by listing a folder of the user's: they may be anywhere on this machine."""

    def resolve(self, path: str) -> str:
        """The location of a file; relative paths start at `folder`. UserError for an address."""
        if "://" in path:
            raise UserError("it is an address; wanted a file on this machine: download it first")
        return os.path.join(self.folder, path)


def hub_files(repo: str) -> AllowedFiles:
    """The files of a Hub data set: on the Hub, and in the local cache of `huggingface_hub`."""
    folder = repo_folder_name(repo_id=repo, repo_type="dataset")
    return AllowedFiles(folder=os.path.join(constants.HF_HUB_CACHE, folder), repo=repo)


@dataclass
class RestrictedImage(Image):
    """Feature of a column of undecoded images that carries the files its rows may name. `datasets` keeps it through every
    operation on the rows; written to disk it becomes a plain `Image`, which may name none."""

    files: AllowedFiles = NO_FILES


def restrict_files(splits, files: AllowedFiles):
    """Splits of a data set -> the same splits, with undecoded images that may name only `files`."""
    for name, rows in splits.items():
        for column, feature in (rows.features or {}).items():
            if isinstance(feature, Image):
                splits[name] = splits[name].cast_column(column, RestrictedImage(decode=False, files=files))
    return splits


def rows_of_files(paths: list[str], files: AllowedFiles, others: dict, column: str = "image") -> Dataset:
    """Rows whose `column` holds undecoded images, those of the files `paths`, and the `others`, {name: array}.

    Raises:
        UserError: for a file name that is not UTF-8, which tables cannot hold.
    """
    try:
        paths = pa.array(paths, pa.string())
    except UnicodeEncodeError as error:
        raise UserError(
            f"the file name {error.object!r} is not UTF-8: rename the file, for example with convmv"
        ) from error
    images = pa.StructArray.from_arrays([pa.nulls(len(paths), pa.binary()), paths], ["bytes", "path"])
    table = pa.table({column: images, **others})
    features = Features.from_arrow_schema(table.schema)
    features[column] = RestrictedImage(decode=False, files=files)
    return Dataset(table, DatasetInfo(features=features))


def allowed_files(rows) -> AllowedFiles:
    """The files that the column `image` of `rows` may name: none, unless `restrict_files` allowed some."""
    feature = rows.features["image"]
    return feature.files if isinstance(feature, RestrictedImage) else NO_FILES


def read_image_bytes(item: dict | None, files: AllowedFiles = NO_FILES) -> bytes:
    """The file content of an undecoded image, `{"bytes": ..., "path": ...}`.

    Raises:
        ValueError, OSError: if there is none, or its file is too large, not among `files`, or unreadable.
    """
    if item is None or (item["bytes"] is None and item["path"] is None):
        raise UserError("it is empty")
    if item["bytes"] is not None:
        return item["bytes"]
    location = files.resolve(item["path"])
    is_address = "://" in location
    local = location.rpartition("::")[2] if is_address else location
    if "://" not in local and not os.path.isfile(local):  # opening a pipe would block
        raise UserError(f"{local} is no file")
    with (xopen if is_address else open)(location, "rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise UserError(f"the file is larger than {MAX_FILE_BYTES:,} bytes, the most an image may have")
    return content


@contextlib.contextmanager
def open_pillow(content: bytes) -> Iterator[PILImage.Image]:
    """File content -> an image that Pillow has opened but not decoded.

    Raises:
        UserError: if the format is not in `FORMATS`; anything, as Pillow's plugins do, if the file is damaged.
    """
    try:
        with PILImage.open(BytesIO(content), formats=FORMATS) as image:
            yield image
    except UnidentifiedImageError as error:  # Pillow's text contains a memory address, different each time
        raise UserError(f"no known format: wanted {', '.join(FORMATS)}") from error

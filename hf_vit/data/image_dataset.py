"""Data sets of uint8 images, or of their features, that give a whole batch at a time; decoded once if memory allows."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from datasets import Dataset
from transformers.utils import logging

from hf_vit.data.columns import count_labels, label_feature, label_tensor
from hf_vit.data.crops import crop_params
from hf_vit.data.decoding import decode_rows, record_unreadable, replacement_places, stack_images
from hf_vit.data.image_files import allowed_files
from hf_vit.data.image_spec import ImageSpec
from hf_vit.data.sampling import EPOCH_STRIDE
from hf_vit.system.errors import UserError
from hf_vit.system.hardware import own_cores
from hf_vit.system.memory import available_memory
from hf_vit.system.progress import progress_bar


logger = logging.get_logger(__name__)

CACHE_BYTES = 2 * 2**30  # a split is kept in memory if its decoded images take no more than this,
CACHE_SHARE = 0.25  # and no more than this share of the available memory


class ImageDataset(torch.utils.data.Dataset):
    """Rows of a data set as uint8 images, decoded once and kept if memory allows, else decoded whenever they are asked for.

    Random crops differ in each epoch and are not kept. Images that would fit into memory are decoded once all the same, so that
    unreadable ones are found before training.

    Args:
        data: columns `image` (undecoded), `label` and `row`, from `prepare_splits`.
        on_bad_image: "stop" or "skip" images that cannot be read. `skipped` holds an error message for each of those.
        keep_full: whether another image of the batch takes the place of a skipped one, so that batches stay full.
        seed: decides, with the sample id, which part is cropped if the spec has a `crop_scale`.

    Raises:
        ValueError: at an image that cannot be read (here or in `data_loader`), or if none of them or of a class can.
    """

    def __init__(
        self, data: Dataset, spec: ImageSpec, on_bad_image: str = "stop", keep_full: bool = False, seed: int = 0
    ):
        self.rows, self.spec, self.on_bad_image, self.keep_full, self.seed = data, spec, on_bad_image, keep_full, seed
        self.files = allowed_files(data)
        self.skipped: dict[str, None] = {}  # an ordered set
        self.cache = None  # uint8 (n, C, H, W)
        limit = min(CACHE_BYTES, CACHE_SHARE * available_memory())  # less for the next split
        if spec.processor is None and len(data) * spec.height * spec.width * spec.channels <= limit:
            self._decode_all()
        self.labels = label_tensor(self.rows)  # (n,), or (n, L) where an image has several labels

    def _decode_all(self):
        """Decodes every image once, removes unreadable ones, and fills the cache unless crops are random."""
        count, spec = len(self.rows), self.spec
        if spec.crop_scale is None:
            self.cache = torch.empty(count, spec.channels, spec.height, spec.width, dtype=torch.uint8)
        chunks = torch.arange(count).tensor_split(max(1, count // 64))
        readable, errors = [], []
        bar = progress_bar("reading", "images", count)
        with bar, ThreadPoolExecutor(own_cores()) as pool:  # decoding releases the interpreter lock
            for chunk, (images, chunk_errors) in zip(chunks, pool.map(self._decode, chunks), strict=True):
                bar.update(len(chunk))
                errors += chunk_errors
                for row, image in zip(chunk.tolist(), images, strict=True):
                    if image is not None:
                        readable.append(row)
                        if self.cache is not None:
                            self.cache[row] = torch.from_numpy(image).permute(2, 0, 1)
        record_unreadable(errors, self.skipped, self.on_bad_image)
        if not readable:
            raise UserError(f"none of the {count} images can be read; {next(iter(self.skipped))}")
        if len(readable) < count:
            check_skipped_classes(self.rows, readable, next(iter(self.skipped)))
            self.rows = self.rows.select(readable)
            self.cache = None if self.cache is None else self.cache[readable]

    def _decode(self, ids: torch.Tensor):
        """`decode_rows` of sample ids (b,)."""
        rows = self.rows.__getitems__((ids % EPOCH_STRIDE % len(self)).tolist())
        return decode_rows(rows, self.spec, crop_params(ids, self.spec, self.seed), self.files)

    def __len__(self):
        return len(self.rows)

    def row_numbers(self, index: torch.Tensor) -> list[int]:
        """Ids (b,) -> row numbers in the original split."""
        return self.rows.select_columns("row")[(index % len(self)).tolist()]["row"]

    def sources(self, index: torch.Tensor) -> tuple[list[int], list[str]]:
        """Where images come from: their row numbers in the original split, and the files that their rows name, relative to the
        folder of the data; "" where a row names none.

        Args:
            index: (n,), places in this data set.
        """
        named = self.rows.flatten().select_columns(["row", "image.path"])[index.tolist()]  # without the bytes
        folder = f"{self.files.folder}{os.sep}" if self.files.folder else ""
        return named["row"], [(path or "").replace(folder, "", 1) for path in named["image.path"]]

    def __getitems__(self, ids: list[int]) -> dict:
        """A whole batch: `images` uint8 (b, C, H, W), `labels` (b,) or (b, L), `index` (b,), the ids without their epoch, and
        `errors`, a message for each unreadable image. Only `errors` if none can be read.

        Args:
            ids: as `sampling` describes them.
        """
        ids = torch.tensor(ids, dtype=torch.long)
        index, errors = ids % EPOCH_STRIDE, []
        if self.cache is not None:
            images = self.cache[index % len(self)]
        else:
            decoded, errors = self._decode(ids)
            readable = [place for place, image in enumerate(decoded) if image is not None]
            if not readable:
                return {"errors": errors}
            if errors:
                places = replacement_places(readable, len(ids)) if self.keep_full else readable
                index, decoded = index[places], [decoded[place] for place in places]
            images = stack_images(decoded)
        return {"images": images, "labels": self.labels[index % len(self)], "index": index, "errors": errors}


class FeatureDataset(ImageDataset):
    """Features of a frozen network in place of the images: `images` of a batch is float (b, D).

    Args:
        features: (n, D).
        rows: (n,), the rows of `images` they belong to.
    """

    def __init__(self, images: ImageDataset, features: torch.Tensor, rows: torch.Tensor):
        self.rows, self.labels = images.rows.select(rows), images.labels[rows]
        self.cache, self.skipped = features, images.skipped
        self.spec, self.on_bad_image, self.keep_full = images.spec, images.on_bad_image, True


def check_skipped_classes(data: Dataset, readable: list[int], example: str):
    """Warns, with counts, of the classes that lose images because these cannot be read.

    Args:
        readable: the rows of `data` that are kept.
        example: the error message of an image that is skipped.

    Raises:
        ValueError: if a class has no image left.
    """
    labels, names = label_tensor(data), label_feature(data.features["label"]).names
    before, after = (count_labels(some, len(names)).numpy() for some in (labels, labels[readable]))
    if lost := [names[label] for label in np.flatnonzero((before > 0) & (after == 0))]:
        raise UserError(
            f"no image of {len(lost)} classes can be read, and --on_bad_image skip would leave them out: {', '.join(lost[:5])}; "
            f"{example}; mend some of them, or take these classes out of the data"
        )
    reduced = [label for label in np.argsort(after / np.maximum(before, 1)) if after[label] < before[label]]
    worst = ", ".join(f"{names[label]} {before[label] - after[label]} of {before[label]}" for label in reduced[:5])
    logger.warning(f"images that cannot be read are skipped: {worst}{' ...' if len(reduced) > 5 else ''}")

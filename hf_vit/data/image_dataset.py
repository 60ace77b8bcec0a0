"""A data set of uint8 images, or of their features, that gives a whole batch at a time; decoded once if memory allows."""

import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from datasets import Dataset

from hf_vit.data.columns import count_labels, label_tensor
from hf_vit.data.crops import crop_params
from hf_vit.data.decoding import decode_rows, record_unreadable, replacement_places, stack_images
from hf_vit.data.image_files import allowed_files
from hf_vit.data.image_spec import ImageSpec
from hf_vit.data.sampling import EPOCH_STRIDE
from hf_vit.system.errors import UserError
from hf_vit.system.hardware import own_cores
from hf_vit.system.memory import available_memory
from hf_vit.system.progress import progress_bar
from hf_vit.system.text import counted, listed


CACHE_BYTES = 2 * 2**30  # a split is kept in memory if its decoded images take no more than this,
CACHE_SHARE = 0.25  # and no more than this share of the available memory


class ImageDataset(torch.utils.data.Dataset):
    """Rows of a data set as uint8 images, decoded once and kept if memory allows, else decoded whenever they are asked for.

    Random crops differ in each epoch and are not kept. Images that would fit into memory are decoded once all the same, so that
    unreadable ones are found before training.

    Args:
        data: a column `image` (undecoded) and, from `prepare_splits`, `label` and `row`; without them there are no labels, and
            rows are numbered as they come.
        on_bad_image: "stop" or "skip" images that cannot be read. `skipped` holds an error message for each of those.
        keep_full: whether another image of the batch takes the place of a skipped one, so that batches stay full.
        seed: decides, with the sample id, which part is cropped if the spec has a `crop_scale`.
        decode_first: whether images that would fit into memory are decoded at once, and not when they are asked for.

    Raises:
        UserError: at images that cannot be read (here or in `data_loader`), or if none can.
    """

    def __init__(
        self,
        data: Dataset,
        spec: ImageSpec,
        on_bad_image: str = "stop",
        keep_full: bool = False,
        seed: int = 0,
        decode_first: bool = True,
    ):
        self.rows, self.spec, self.on_bad_image, self.keep_full, self.seed = data, spec, on_bad_image, keep_full, seed
        self.files = allowed_files(data)
        self.skipped: dict[str, None] = {}  # an ordered set
        self.cache = None  # uint8 (n, C, H, W)
        self.labels = label_tensor(data) if "label" in data.features else None  # (n,), or (n, L) of several labels
        self.all_labels = self.labels  # also of skipped images
        limit = min(CACHE_BYTES, CACHE_SHARE * available_memory())  # less for the next split
        if decode_first and spec.processor is None and len(data) * spec.height * spec.width * spec.channels <= limit:
            self._decode_all()

    def _decode_all(self):
        """Decodes every image once, removes unreadable ones, and fills the cache unless crops are random."""
        count, spec = len(self), self.spec
        if spec.crop_scale is None:
            self.cache = torch.empty(count, spec.channels, spec.height, spec.width, dtype=torch.uint8)
        chunks, readable, errors = torch.arange(count).split(64), [], []
        with (
            progress_bar("reading", "images", count) as bar,
            ThreadPoolExecutor(own_cores()) as pool,
        ):  # decoding needs no GIL
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
            raise UserError(f"none of {counted(count, 'image')} can be read; {errors[0]}")
        if errors:
            self._select(torch.tensor(readable), None if self.cache is None else self.cache[readable])

    def _select(self, places: torch.Tensor, cache: torch.Tensor | None):
        self.rows, self.cache = self.rows.select(places), cache
        self.labels = None if self.labels is None else self.labels[places]

    def with_features(self, features: torch.Tensor, places: torch.Tensor) -> "ImageDataset":
        """The same rows with features of a frozen network in place of the images: `images` of a batch is float (b, D).

        Args:
            features: (n, D).
            places: (n,), the rows they belong to.
        """
        dataset = copy.copy(self)
        dataset._select(places, features)
        return dataset

    def _decode(self, ids: torch.Tensor):
        """`decode_rows` of sample ids (b,)."""
        places = (ids % EPOCH_STRIDE % len(self)).tolist()
        rows = [{"row": place, **row} for place, row in zip(places, self.rows.__getitems__(places), strict=True)]
        return decode_rows(rows, self.spec, crop_params(ids, self.spec, self.seed), self.files)

    def __len__(self):
        return len(self.rows)

    def sources(self, index: torch.Tensor) -> tuple[list[int], list[str]]:
        """Where images come from: their row numbers in the original split, and the files that their rows name, relative to the
        folder of the data; "" where a row names none.

        Args:
            index: (n,), places in this data set.
        """
        rows = self.rows.with_format(None).flatten()  # a saved format would hide the new columns
        named = rows.select_columns(["row", "image.path"])[index.tolist()]  # without the bytes
        folder = f"{self.files.folder}/" if self.files.folder else ""
        return named["row"], [(path or "").replace(folder, "", 1) for path in named["image.path"]]

    def __getitems__(self, ids: list[int]) -> dict:
        """A whole batch: `images` uint8 (b, C, H, W), or None if none can be read, `labels` (b,) or (b, L), `index` (b,), the ids
        without their epoch, and `errors`, a message for each unreadable image.

        Args:
            ids: as `sampling` describes them.
        """
        ids = torch.tensor(ids, dtype=torch.long)
        index, errors = ids % EPOCH_STRIDE, []
        if self.cache is not None:
            images = self.cache[index % len(self)]
        else:
            decoded, errors = self._decode(ids)
            places = [place for place, image in enumerate(decoded) if image is not None]
            if errors and places and self.keep_full:
                places = replacement_places(places, len(ids))
            images = stack_images([decoded[place] for place in places]) if places else None
            index = index[places]
        labels = {} if self.labels is None else {"labels": self.labels[index % len(self)]}
        return {"images": images, **labels, "index": index, "errors": errors}


def check_unreadable(parts: list[ImageDataset], names: list[str], on_bad_image: str):
    """Judges what all parts of a data set, read with "skip", could not read.

    Args:
        names: of the classes; none of images without labels.

    Raises:
        UserError: that names the images, if `on_bad_image` is "stop"; or if a class has no image left in any part.
    """
    errors = [message for images in parts for message in images.skipped]
    record_unreadable(errors, {}, on_bad_image)
    for images in parts:
        images.on_bad_image = on_bad_image
    if not errors or not names:
        return
    before = sum(count_labels(images.all_labels, len(names)) for images in parts)
    left = sum(count_labels(images.labels, len(names)) for images in parts)
    counts = zip(names, before.tolist(), left.tolist(), strict=True)
    if gone := [name for name, count, rest in counts if count > rest == 0]:
        raise UserError(
            f"no image of {len(gone)} classes can be read, and --on_bad_image skip would leave them out: {listed(gone)}; "
            f"{errors[0]}; fix some of them, or take these classes out of the data"
        )

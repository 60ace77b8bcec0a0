"""Images that are in a data set more than once: the same file, or the same picture resized or saved again."""

import hashlib
from collections import defaultdict

import torch
from datasets import Dataset
from PIL import Image
from torch import nn

from hf_vit.data.columns import label_tensor
from hf_vit.data.decoding import decode_image, stack_images, unreadable_message
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_files import allowed_files, open_pillow, read_image_bytes
from hf_vit.data.image_spec import ImageSpec


SIDE = 16  # pixels of a thumbnail
SIMILAR = 0.99
BLOCK = 1024  # images that are compared with all others at once


class ThumbnailDataset(ImageDataset):
    """Rows of a data set as thumbnails, decoded when they are asked for. `skipped` names those that cannot be read.

    Args:
        rows: columns `image` (undecoded), `label` and `row`, from `splits.select_and_encode`.
    """

    spec = ImageSpec(SIDE, SIDE, 3, Image.Resampling.BILINEAR, (), (), fast_resize=True)

    def __init__(self, rows: Dataset):
        self.rows, self.files, self.labels = rows, allowed_files(rows), label_tensor(rows)
        self.cache, self.skipped, self.on_bad_image, self.keep_full = None, {}, "skip", False

    def __getitems__(self, ids: list[int]) -> dict:
        """A whole batch: `index` (b,), `images` uint8 (b, 3, SIDE, SIDE), `sizes` (b, 2) in pixels, width first, `digests` of the
        files, and `errors`. Only `errors` if none can be read."""
        index, images, sizes, digests, errors = [], [], [], [], []
        for place, row in zip(ids, self.rows.__getitems__(ids), strict=True):
            try:
                content = read_image_bytes(row["image"], self.files)
                with open_pillow(content) as image:
                    size = image.size
                images.append(decode_image({"bytes": content, "path": None}, self.spec))
            except Exception as error:  # file systems raise anything
                errors.append(unreadable_message(row, error))
                continue
            index.append(place)
            sizes.append(size)
            digests.append(hashlib.blake2b(content, digest_size=16).hexdigest())
        if not index:
            return {"errors": errors}
        tensors = {"index": torch.tensor(index), "images": stack_images(images), "sizes": torch.tensor(sizes)}
        return {**tensors, "digests": digests, "errors": errors}


def thumbnail_vectors(images: torch.Tensor) -> torch.Tensor:
    """uint8 images (n, C, H, W) -> (n, 3 * SIDE * SIDE), whose products are correlations in [-1, 1]: colours of a thumbnail without
    its mean, at unit length, so that neither brightness nor contrast counts. An image of one colour is 0."""
    vectors = []
    for some in images.split(BLOCK):
        small = nn.functional.interpolate(some[:, :3], size=(SIDE, SIDE), mode="bilinear", antialias=True)
        colours = small.float().expand(-1, 3, -1, -1).flatten(1)
        vectors.append(nn.functional.normalize(colours - colours.mean(dim=1, keepdim=True), dim=1))
    return torch.cat(vectors)


def also_in(vectors: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Whether each of the images (m, D) is similar to one of `others` (n, D), as `thumbnail_vectors` gives them: (m,)."""
    return torch.cat([(block @ others.T).max(dim=1).values >= SIMILAR for block in vectors.split(BLOCK)])


def duplicate_groups(vectors: torch.Tensor, digests: list[str]) -> list[list[int]]:
    """Groups of places of images that are the same file or similar pictures, rising.

    Each image joins its most similar predecessor if that is similar enough, so that memory does not grow with the number of
    pairs.

    Args:
        vectors: (n, D), from `thumbnail_vectors`.
        digests: of the n files.
    """
    group, first_of = list(range(len(vectors))), {}
    for start in range(0, len(vectors), BLOCK):
        block = vectors[start : start + BLOCK]
        products = block @ vectors[: start + len(block)].T  # (b, start + b)
        rows = torch.arange(len(block))
        products[rows[:, None] <= torch.arange(-start, len(block))] = -1.0  # itself and its successors
        best, before = products.max(dim=1)
        for row in range(len(block)):
            place = start + row
            same_file = first_of.setdefault(digests[place], place)
            if same_file < place:
                group[place] = group[same_file]
            elif best[row] >= SIMILAR:
                group[place] = group[before[row]]
    members = defaultdict(list)
    for place, root in enumerate(group):
        members[root].append(place)
    return [places for places in members.values() if len(places) > 1]

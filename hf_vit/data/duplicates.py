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


SIDE = 8  # pixels of a thumbnail: with more, a small image and its copy at half the size differ too much
# By how many of 255 levels, as a root mean square, thumbnails of copies may differ. In four draws of 5,000 images of Fashion-MNIST and
# four of CIFAR-10, 50 copies each (half to twice the size, JPEG of quality 50 to 90, or both) differed by at most 4.37 and 3.06; of 12
# million other pairs at most four were closer than 4.4.
LEVELS = 4.4
CORRELATION = 0.99  # at least, around the mean image: faint images of one kind may all be within `LEVELS`
LUMINANCE = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)  # Pillow's
BLOCK = 1024  # images that are compared with all others at once


class ThumbnailDataset(ImageDataset):
    """Rows of a data set as thumbnails, decoded when they are asked for. `skipped` names those that cannot be read.

    Args:
        rows: columns `image` (undecoded), `label` and `row`, from `splits.select_and_encode`.
    """

    spec = ImageSpec(SIDE, SIDE, 1, Image.Resampling.BILINEAR, (), (), fast_resize=True)

    def __init__(self, rows: Dataset):
        self.rows, self.files, self.labels = rows, allowed_files(rows), label_tensor(rows)
        self.cache, self.skipped, self.on_bad_image, self.keep_full = None, {}, "skip", False

    def __getitems__(self, ids: list[int]) -> dict:
        """A whole batch: `index` (b,), `images` uint8 (b, 1, SIDE, SIDE), `sizes` (b, 2) in pixels, width first, `digests` of the
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
    """uint8 images (n, C, H, W) -> luminance of their thumbnails in levels of 0 to 255, (n, SIDE * SIDE)."""
    vectors = []
    for some in images.split(BLOCK):
        small = nn.functional.interpolate(some[:, :3], size=(SIDE, SIDE), mode="bilinear", antialias=True).float()
        vectors.append((small * LUMINANCE).sum(dim=1) if small.shape[1] == 3 else small[:, 0])  # (b, SIDE, SIDE)
    return torch.cat(vectors).flatten(1)


def distances(some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Root mean squares (m, n) of what thumbnails (m, D) and (n, D) differ by, in levels; infinite where they are not similar.

    Args:
        some, others: from `thumbnail_vectors`, minus the mean of all.
    """
    products = some @ others.T
    norms, other_norms = some.norm(dim=1, keepdim=True), others.norm(dim=1)
    squares = (norms**2 + other_norms**2 - 2 * products) / some.shape[1]
    similar = (squares <= LEVELS**2) & (products >= CORRELATION * norms * other_norms)
    return squares.clamp(min=0).sqrt().where(similar, torch.inf)


def also_in(vectors: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Whether each of the images (m, D) is similar to one of `others` (n, D), from `thumbnail_vectors`: (m,)."""
    mean = torch.cat([vectors, others]).mean(dim=0)
    found = [distances(some - mean, others - mean).isfinite().any(dim=1) for some in vectors.split(BLOCK)]
    return torch.cat(found)


def duplicate_groups(vectors: torch.Tensor, digests: list[str]) -> list[list[int]]:
    """Groups of places of images that are the same file or similar pictures, rising.

    Each image joins the group of its most similar predecessor, so that memory does not grow with the number of pairs.

    Args:
        vectors: (n, D), from `thumbnail_vectors`.
        digests: of the n files.
    """
    vectors = vectors - vectors.mean(dim=0)
    group, first_of, members = [], {}, defaultdict(list)
    for start in range(0, len(vectors), BLOCK):
        block = vectors[start : start + BLOCK]
        apart = distances(block, vectors[: start + len(block)])  # (b, start + b)
        apart[torch.arange(len(block))[:, None] <= torch.arange(-start, len(block))] = (
            torch.inf
        )  # itself and later ones
        smallest, nearest = apart.min(dim=1)
        for place, is_similar, before in zip(
            range(start, start + len(block)), smallest.isfinite().tolist(), nearest.tolist(), strict=True
        ):
            same_file = first_of.setdefault(digests[place], place)
            group.append(group[same_file] if same_file < place else group[before] if is_similar else place)
            members[group[place]].append(place)
    return [places for places in members.values() if len(places) > 1]

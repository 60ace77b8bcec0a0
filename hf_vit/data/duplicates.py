"""Images that are in a data set more than once: the same file, or the same picture resized or saved again."""

from collections import defaultdict

import torch
from datasets import Dataset
from PIL import Image
from torch import nn

from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_spec import ImageSpec


SIDE = 8  # pixels of a thumbnail: with more, a small image and its copy at half the size differ too much
# By how many of 255 levels, as a root mean square, thumbnails of copies may differ. In four draws of 5,000 images of Fashion-MNIST and
# four of CIFAR-10, 50 copies each (half to twice the size, JPEG of quality 50 to 90, or both) differed by at most 4.37 and 3.06; of 12
# million other pairs at most four were closer than 4.4.
LEVELS = 4.4
CORRELATION = 0.99  # at least, around the mean image: faint images of one kind may all be within `LEVELS`
LUMINANCE = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)  # Pillow's
GREY_IMAGES = (
    4  # that count in the mean image: otherwise two copies alone would be opposite to each other around their mean
)
BLOCK = 1024  # images that are compared with all others at once


class ThumbnailDataset(ImageDataset):
    """Rows of a data set as thumbnails, decoded when they are asked for."""

    def __init__(self, rows: Dataset, on_bad_image: str = "skip"):
        spec = ImageSpec(SIDE, SIDE, 1, Image.Resampling.BILINEAR, (), (), fast_resize=True)
        super().__init__(rows, spec, on_bad_image, decode_first=False)


def thumbnail_vectors(images: torch.Tensor) -> torch.Tensor:
    """uint8 images (n, C, H, W) -> luminance of their thumbnails in levels of 0 to 255, (n, SIDE * SIDE)."""
    vectors = []
    for some in images.split(BLOCK):
        small = nn.functional.interpolate(some[:, :3], size=(SIDE, SIDE), mode="bilinear", antialias=True).float()
        vectors.append((small * LUMINANCE).sum(dim=1) if small.shape[1] == 3 else small[:, 0])  # (b, SIDE, SIDE)
    return torch.cat(vectors).flatten(1)


def closeness(some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Scores (m, n) of which the largest of each row is that of the nearest of `others` (n, D) to `some` (m, D)."""
    return torch.addmm(-others.square().sum(dim=1) / 2, some, others.T)  # (|some|^2 - distance^2) / 2


def mean_pattern(vectors: torch.Tensor) -> torch.Tensor:
    """The mean (D,) of thumbnails (n, D), each without its brightness."""
    return (vectors - vectors.mean(dim=1, keepdim=True)).sum(dim=0) / (len(vectors) + GREY_IMAGES)


def are_similar(some: torch.Tensor, others: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Whether pairs of thumbnails (m, D), from `thumbnail_vectors`, show the same picture: (m,). `mean` is their `mean_pattern`."""
    close = (some - others).square().mean(dim=1) <= LEVELS**2
    some, others = (vectors - vectors.mean(dim=1, keepdim=True) - mean for vectors in (some, others))
    return close & ((some * others).sum(dim=1) >= CORRELATION * some.norm(dim=1) * others.norm(dim=1))


def also_in(vectors: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Whether the nearest of `others` (n, D) is similar to an image, for each of (m, D), from `thumbnail_vectors`: (m,)."""
    nearest = torch.cat([closeness(block, others).argmax(dim=1) for block in vectors.split(BLOCK)])
    return are_similar(vectors, others[nearest], mean_pattern(torch.cat([vectors, others])))


def duplicate_groups(vectors: torch.Tensor) -> list[list[int]]:
    """Groups of places of images that are similar pictures, rising.

    Each image joins the group of its nearest predecessor, so that memory does not grow with the number of pairs.

    Args:
        vectors: (n, D), from `thumbnail_vectors`.
    """
    nearest = []
    for start in range(0, len(vectors), BLOCK):
        block = vectors[start : start + BLOCK]
        scores = closeness(block, vectors[: start + len(block)])  # (b, start + b)
        itself_and_later = torch.arange(len(block))[:, None] <= torch.arange(-start, len(block))
        scores[itself_and_later] = -torch.inf
        nearest.append(scores.argmax(dim=1))
    nearest = torch.cat(nearest)
    similar = are_similar(vectors, vectors[nearest], mean_pattern(vectors)).tolist()
    similar[0] = False  # it has no predecessor
    group, members = [], defaultdict(list)
    for place, (is_similar, before) in enumerate(zip(similar, nearest.tolist(), strict=True)):
        group.append(group[before] if is_similar else place)
        members[group[place]].append(place)
    return [places for places in members.values() if len(places) > 1]

"""Hub ids, folders and Parquet files -> batches of uint8 images and labels, in an order that only (seed, epoch) decides."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Image, load_dataset
from PIL import Image as PILImage
from PIL import ImageOps
from torch.utils.data import DataLoader


EMBEDDED = {"fashion-mnist-mini": Path(__file__).parents[1] / "recipes" / "data" / "fashion-mnist-mini"}
FILE_FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".json": "json", ".jsonl": "json"}
CACHE_BYTES = 2 * 2**30  # data sets that decode to less than this stay in memory


def load(name: str, config: str | None = None) -> DatasetDict:
    """A Hub id, a local folder (class folders, Parquet), a local file, or the name of an embedded set -> its splits."""
    path = EMBEDDED.get(name, Path(name))
    if path.is_file():
        if path.suffix not in FILE_FORMATS:
            raise ValueError(f"{path} is no data file; wanted one of {', '.join(FILE_FORMATS)}, or a folder of images")
        return load_dataset(FILE_FORMATS[path.suffix], data_files=str(path))
    if name in EMBEDDED and not path.is_dir():
        raise ValueError(f"{name} lies in recipes/data of the repository, which is not beside this installation")
    return load_dataset(str(path) if path.is_dir() else name, config)


def find_columns(data: Dataset, image_column: str | None, label_column: str | None) -> tuple[str, str]:
    """Names of the image and the label column: those given, or the only ones of feature type Image and ClassLabel.

    Raises:
        ValueError: if one is not there, or several could be meant; it lists the columns there are.
    """
    there = "; the columns are " + ", ".join(f"{name} ({_kind(kind)})" for name, kind in data.features.items())
    found = []
    for name, wanted, flag in ((image_column, Image, "--image_column"), (label_column, ClassLabel, "--label_column")):
        if name is None:
            fitting = [column for column, kind in data.features.items() if isinstance(kind, wanted)]
            if not fitting and wanted is ClassLabel and "label" in data.features:
                fitting = ["label"]
            if len(fitting) != 1:
                number = "no column" if not fitting else f"{len(fitting)} columns ({', '.join(fitting)})"
                hint = "; in a folder of images, wanted two or more sub-folders, one a class, and no image beside them"
                raise ValueError(
                    f"the data set has {number} of type {wanted.__name__}: name one with {flag}{there}"
                    + (hint if list(data.features) == ["image"] else "")
                )
            name = fitting[0]
        elif name not in data.features:
            raise ValueError(f"{flag} {name}: there is no such column{there}")
        found.append(name)
    return found[0], found[1]


def _kind(feature) -> str:
    return getattr(feature, "dtype", None) if type(feature).__name__ == "Value" else type(feature).__name__


def prepare(
    splits: DatasetDict,
    train_split: str | None,
    eval_split: str | None,
    eval_fraction: float,
    image_column: str | None,
    label_column: str | None,
    seed: int,
) -> tuple[DatasetDict, list[str], str]:
    """The splits to use, each with the columns `image` (undecoded), `label` (class index) and `row` (its number in the
    split as it came), the class names, and what is scored.

    `train_split` is None for scoring only. Without `eval_split` it is "validation", else "test", else a part of the
    training split that is set aside by class. The splits come back as "train" and "eval"; the last value says what
    "eval" is: the name of a split, or "part of train".

    Raises:
        ValueError: for an unknown or empty split, columns that cannot be found, and labels that are no class index.
    """
    for name in (train_split, eval_split):
        if name is not None and name not in splits:
            raise ValueError(f"the data set has no split {name!r}; it has {', '.join(splits)}")
    if eval_split is None:
        known = [name for name in ("validation", "val", "test") if name in splits and name != train_split]
        eval_split = known[0] if known else None
    chosen = {"train": splits[train_split]} if train_split is not None else {}
    if eval_split is not None:
        chosen["eval"] = splits[eval_split]
    if not chosen:
        raise ValueError(f"the data set has no validation or test split; name one with --split: {', '.join(splits)}")
    for role, data in chosen.items():
        if len(data) == 0:
            raise ValueError(f"the split {train_split if role == 'train' else eval_split!r} is empty")

    image_column, label_column = find_columns(next(iter(chosen.values())), image_column, label_column)
    chosen = DatasetDict(chosen).select_columns([image_column, label_column])
    for old, new in ((image_column, "image"), (label_column, "label")):
        if old != new:
            chosen = chosen.rename_column(old, new)
    first = next(iter(chosen.values()))
    if not isinstance(
        first.features["label"], ClassLabel
    ):  # strings or bare integers: the training split names the classes
        for role, data in chosen.items():
            empty = [row for row, label in enumerate(data["label"]) if label is None or label != label]
            if empty:
                raise ValueError(f"{len(empty)} labels of the split {role!r} are missing, the first in row {empty[0]}")
        names = sorted(set(first["label"]), key=lambda label: (str(type(label)), label))
        feature = ClassLabel(names=[str(name) for name in names])
        index = {name: i for i, name in enumerate(names)}
        for role, data in list(chosen.items()):
            if unknown := sorted({str(label) for label in data["label"] if label not in index}):
                raise ValueError(
                    f"labels {', '.join(unknown[:5])} of the split {role!r} do not occur in the training split"
                )
            encoded = [index[label] for label in data["label"]]
            chosen[role] = data.remove_columns("label").add_column("label", encoded, feature=feature)
    names = chosen[next(iter(chosen))].features["label"].names
    for role, data in list(chosen.items()):  # a broken image is later named by its row in the split as it came
        chosen[role] = data.add_column("row", list(range(len(data))))
    if "eval" not in chosen:
        eval_split = f"part of {train_split}"
        aside = set_aside(np.asarray(chosen["train"]["label"]), eval_fraction, seed)
        kept = np.setdiff1d(np.arange(len(chosen["train"])), aside)
        chosen = DatasetDict(train=chosen["train"].select(kept), eval=chosen["train"].select(aside))
    for role, data in chosen.items():
        labels = np.asarray(data["label"])
        wrong = np.flatnonzero((labels < 0) | (labels >= len(names)))
        if len(wrong):
            raise ValueError(
                f"{len(wrong)} labels of the split {role!r} lie outside 0 to {len(names) - 1}, the first is "
                f"{labels[wrong[0]]} in row {wrong[0]}: an unlabelled split cannot be used"
            )
    return chosen.cast_column("image", Image(decode=False)), names, eval_split


def set_aside(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Row numbers of about `fraction` of each class; every class keeps at least one row.

    Raises:
        ValueError: if that leaves nothing to set aside.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for label in np.unique(labels):
        of_class = rng.permutation(np.flatnonzero(labels == label))
        rows.append(of_class[: min(round(fraction * len(of_class)), len(of_class) - 1)])
    if sum(map(len, rows)) == 0:
        raise ValueError(
            f"no image can be set aside to score: a part of {fraction} of the {len(labels)} training images is less than "
            "one of any class; add images, name --eval_split, or raise --eval_fraction"
        )
    return np.sort(np.concatenate(rows))


def match_labels(labels: torch.Tensor, names: list[str], id2label: dict[int, str]) -> torch.Tensor:
    """Class indices of a data set (n,) -> those of a model that calls its classes `id2label`; matched by name.

    Raises:
        ValueError: if the data set names a class that the model does not know.
    """
    index_of = {name: index for index, name in id2label.items()}
    unknown = sorted(set(names) - set(index_of))
    if unknown:
        raise ValueError(
            f"the model does not know {len(unknown)} of the data set's {len(names)} labels: {unknown[:5]}; it knows "
            f"{sorted(index_of)[:5]}; score a data set with the model's labels, or fine-tune the model on this one"
        )
    return torch.tensor([index_of[name] for name in names])[labels]


@dataclass(frozen=True)
class ImageForm:
    """What a model wants to see, as its image processor says: size in pixels, channels, PIL's resampling, mean and std."""

    height: int
    width: int
    channels: int
    resample: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def image_form(processor, config) -> ImageForm:
    """The form of a model's images, from its image processor and its config."""
    return ImageForm(
        processor.size["height"],
        processor.size["width"],
        config.num_channels,
        int(processor.resample),
        tuple(processor.image_mean),
        tuple(processor.image_std),
    )


def decode(item: dict, form: ImageForm) -> np.ndarray:
    """One undecoded image, `{"bytes": ..., "path": ...}` -> uint8 (H, W, C), upright, as the image processor resizes it."""
    if item is None:
        raise ValueError("it is empty")
    source = BytesIO(item["bytes"]) if item["bytes"] is not None else item["path"]
    with PILImage.open(source) as image:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):  # Pillow would clip 16 bits at 255
            image = PILImage.fromarray((np.asarray(image) // 257).astype(np.uint8))
        image = image.convert({1: "L", 3: "RGB", 4: "RGBA"}[form.channels])
    if image.size != (form.width, form.height):
        image = image.resize((form.width, form.height), form.resample)
    return np.asarray(image).reshape(form.height, form.width, form.channels)


class Images(torch.utils.data.Dataset):
    """Rows of a data set as uint8; decoded once and kept where memory allows, else whenever they are asked for.

    Args:
        data: columns `image` (undecoded), `label` and `row`, as `prepare` gives them.
        form: what the images are turned into.
    """

    def __init__(self, data: Dataset, form: ImageForm):
        self.rows, self.form = data, form
        self.labels = torch.tensor(np.asarray(data["label"]), dtype=torch.long)  # (n,)
        self.cache = None
        if len(data) * form.height * form.width * form.channels <= CACHE_BYTES:
            with ThreadPoolExecutor(os.cpu_count()) as pool:  # PIL decodes without the interpreter lock
                chunks = pool.map(self._decode, np.array_split(np.arange(len(data)), max(1, len(data) // 256)))
                self.cache = torch.cat(list(chunks))  # (n, C, H, W)

    def __len__(self):
        return len(self.labels)

    def _decode(self, indices) -> torch.Tensor:
        images = []
        for index in indices:
            row = self.rows[int(index)]
            try:
                images.append(decode(row["image"], self.form))
            except Exception as error:
                where = f" ({row['image']['path']})" if row["image"] and row["image"]["path"] else ""
                raise ValueError(f"row {row['row']}{where} cannot be read as an image: {error}") from error
        return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()  # (b, H, W, C) -> (b, C, H, W)

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """A whole batch at once: images uint8 (b, C, H, W), labels (b,), index (b,), the rows' numbers."""
        index = torch.tensor(indices, dtype=torch.long)
        images = self.cache[index] if self.cache is not None else self._decode(indices)
        return {"images": images, "labels": self.labels[index], "index": index}


def epoch_batches(
    count: int, batch_size: int, seed: int, epoch: int, rank: int = 0, world: int = 1
) -> Iterator[list[int]]:
    """Shuffled row numbers of one epoch, for the process `rank` of `world`: batches of `batch_size`, all full.

    Together the processes see the batches that one process with `world * batch_size` would see. Rows that do not fill
    the last batch wait for another epoch; where there are fewer rows than one batch holds, rows repeat.
    """
    order = np.random.default_rng([seed, epoch]).permutation(count)
    together = batch_size * world
    order = np.resize(order, max(count, together))
    for start in range(0, len(order) - together + 1, together):
        yield order[start + rank * batch_size : start + (rank + 1) * batch_size].tolist()


def batches_in_order(count: int, batch_size: int, rank: int = 0, world: int = 1) -> list[list[int]]:
    """All row numbers in order, in batches; process `rank` of `world` gets every `world`-th batch."""
    return [list(range(start, min(start + batch_size, count))) for start in range(0, count, batch_size)][rank::world]


def loader(images: Images, batches: list[list[int]], num_workers: int) -> DataLoader:
    """Batches of `images` in the order given; decoded in worker processes unless they are already in memory."""
    workers = 0 if images.cache is not None else num_workers
    return DataLoader(images, batch_sampler=batches, num_workers=workers, collate_fn=_as_it_is)


def _as_it_is(batch):
    return batch

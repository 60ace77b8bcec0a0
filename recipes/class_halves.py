"""Two data sets of disjoint classes, made of one: to pre-train on the first and learn the second."""

import json
from pathlib import Path

import numpy as np
import yaml
from datasets import ClassLabel, Dataset, Image

from hf_vit.data.image_files import allowed_files, read_image_bytes
from hf_vit.data.sources import dataset_license, load_splits
from hf_vit.data.splits import prepare_splits, stratified_subset
from hf_vit.system.errors import UserError
from hf_vit.system.files import atomic_dir


def split_classes(
    folder: Path, name: str, shots: int, image_column: str | None = None, label_column: str | None = None
) -> tuple[Path, Path]:
    """Write two data sets of disjoint classes to `folder`, and return their folders.

    NAME-even holds all images of the classes with an even index, NAME-odd those with an odd index: all test images, and `shots`
    training images per class, drawn with seed 0. Columns are `image` and `label`, numbered from 0; images that are files
    elsewhere are copied into them.

    Raises:
        ValueError: for fewer than 4 classes, a class of fewer than `shots` images, no test split, or if `folder` holds other
            halves.
    """
    request = {"dataset_name": name, "shots": shots, "image_column": image_column, "label_column": label_column}
    halves = tuple(folder / f"{Path(name).name}-{which}" for which in ("even", "odd"))
    record = folder / "halves.json"
    if record.is_file():
        if (existing := json.loads(record.read_text())) != request:
            raise UserError(
                f"{folder} holds halves of {existing}, and {request} was asked for: name another --output_dir"
            )
        return halves
    splits = load_splits(name)
    if "test" not in splits:
        raise UserError(
            f"{name} has the splits {', '.join(splits)}; wanted one called test, to evaluate both halves on"
        )
    splits, names, _ = prepare_splits(splits, eval_split="test", image_column=image_column, label_column=label_column)
    if len(names) < 4:
        raise UserError(f"{name} has {len(names)} classes ({', '.join(names)}); wanted 4 or more, two for each half")

    selected = {
        (odd, split): select_half(splits[split], names, odd, shots if split == "train" and odd else None)
        for odd in (0, 1)
        for split in ("train", "eval")
    }
    license = dataset_license(name)
    with atomic_dir(folder) as aside:
        for odd, half in enumerate(halves):
            (aside / half.name).mkdir()
            selected[odd, "train"].to_parquet(aside / half.name / "train.parquet")
            selected[odd, "eval"].to_parquet(aside / half.name / "test.parquet")
            card = {
                "pretty_name": f"{', '.join(names[odd::2])} of {name}",
                **({"license": license} if license else {}),
            }
            text = f"---\n{yaml.safe_dump(card)}---\nMade by recipes/transfer.py.\n"
            (aside / half.name / "README.md").write_text(text, encoding="utf-8")
        (aside / record.name).write_text(json.dumps(request) + "\n")
    return halves


def select_half(rows, names: list[str], odd: int, shots: int | None) -> Dataset:
    """The rows whose label is odd (1) or even (0), `shots` of each class, or all if that is None."""
    labels = np.asarray(rows["label"][:])
    kept = np.flatnonzero(labels % 2 == odd)
    if shots is not None:
        kept = kept[stratified_subset(labels[kept], names, 1.0, shots, seed=0)]
    rows, files = rows.select(kept), allowed_files(rows)
    embed = lambda row: {"image": {"bytes": read_image_bytes(row["image"], files), "path": None}}
    rows = rows.select_columns("image").cast_column("image", Image(decode=False)).map(embed, keep_in_memory=True)
    rows = rows.cast_column("image", Image())
    return rows.add_column("label", (labels[kept] // 2).tolist(), feature=ClassLabel(names=names[odd::2]))

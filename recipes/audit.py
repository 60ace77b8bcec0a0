"""Find what is wrong with a data set: broken images, duplicates, rare classes and, with a trained
model, wrong labels.

    python recipes/audit.py --dataset_name photos --output_file audit.html
    python recipes/audit.py --dataset_name photos --model_name_or_path runs/photos \\
        --output_file runs/photos/audit.html

It writes one page with pictures, and tables beside it: audit.duplicates.csv and, with a model,
audit.labels.csv. Duplicates are equal and near-equal pictures, within a split and across
splits. A label is suspect if a classifier on the model's features, trained without that
image, disagrees. The data is not changed.
"""

import argparse

from command_line import COLUMNS, DATA, Parser, bad_images, hardware, output


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, "--dataset_name DATA --output_file FILE [--flag value ...]")
    splits = "splits to look at, such as train,validation; default: all"
    parser.add_group("data", **DATA, splits=splits, **COLUMNS, **bad_images("skip"))
    model = "run, model folder or Hub id that finds suspect labels; default: do not look for them"
    parser.add_group("model", model_name_or_path=model)
    parser.add_group("output", **output(".html"))
    parser.add_group("hardware", **hardware(batch_size=256))
    args = parser.parse_args(argv)
    parser.check_output_files(args.output_file, overwrite=args.overwrite, endings=(".html",))
    return args


if __name__ == "__main__":
    ARGUMENTS = parse_args()  # before the imports, which take seconds

import base64
import io
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import torch
from jinja2 import Environment

from hf_vit.data.columns import column_arguments, has_several_labels
from hf_vit.data.decoding import open_image
from hf_vit.data.duplicates import ThumbnailDataset, duplicate_groups, thumbnail_vectors
from hf_vit.data.image_files import read_image_bytes
from hf_vit.data.loader import data_loader
from hf_vit.data.sampling import sequential_batches
from hf_vit.data.sources import open_source
from hf_vit.data.splits import select_and_encode
from hf_vit.data.summary import summary
from hf_vit.evaluation.classifiers import SavedClassifier
from hf_vit.evaluation.label_errors import contradicted_labels, out_of_fold_probabilities
from hf_vit.evaluation.tables import image_names, label_texts
from hf_vit.system.errors import UserError, run_script
from hf_vit.system.files import write_text
from hf_vit.system.progress import progress_bar
from hf_vit.system.text import counted, csv_text, printable
from hf_vit.training.setup import set_up_evaluation


PAGE = Path(__file__).resolve().with_name("audit.html")
SHOWN = 60  # groups of duplicates of a kind, and suspects, that have pictures on the page; the tables have all
PICTURE = (224, 112)  # width and height of these, at most
DUPLICATES = (
    "Duplicates across splits, with different labels",
    "Duplicates across splits, with the same label",
    "Duplicates within a split, with different labels",
    "Duplicates within a split, with the same label",
)


def read_rows(args) -> tuple[datasets.Dataset, list[str]]:
    """All images as rows with the columns `image`, `label`, `row`, `file` and `split`, and the class names."""
    source, parts = open_source(args), []
    names = args.splits.split(",") if args.splits else list(source.splits)
    names = dict(zip(names, names, strict=True))
    splits, labels = select_and_encode(source.splits, names, **column_arguments(args))
    print("\n".join(summary(splits, names, labels, source)))
    for name, data in splits.items():
        _, files = ThumbnailDataset(data).sources(torch.arange(len(data)))
        parts.append(data.add_column("file", files).add_column("split", [name] * len(data)))
    return datasets.concatenate_datasets(parts), labels


def read_images(images: ThumbnailDataset, labels: list[str], num_workers: int) -> tuple[pd.DataFrame, torch.Tensor]:
    """A table of the n images that can be read, by their places in `images`, and their thumbnails, see `thumbnail_vectors`."""
    places, vectors = [], []
    batches = sequential_batches(len(images), 256, 0, 1)
    for batch in progress_bar("reading", "batches", len(batches), data_loader(images, batches, num_workers)):
        vectors.append(thumbnail_vectors(batch["images"]))
        places += batch["index"].tolist()
    if not places:
        raise UserError(f"none of {counted(len(images), 'image')} can be read; {next(iter(images.skipped))}")
    table = images.rows.select_columns(["split", "row", "file"]).to_pandas()
    return table.assign(label=label_texts(images.labels, labels)).loc[places], torch.cat(vectors)


def find_duplicates(table: pd.DataFrame, vectors: torch.Tensor) -> pd.DataFrame:
    """The part of the table that has duplicates, with their `kind`, a place in `DUPLICATES`, and the number of their `group`."""
    groups = []
    for places in duplicate_groups(vectors):
        group = table.iloc[places]
        kind = 2 * (group["split"].nunique() == 1) + (group["label"].nunique() == 1)
        groups.append((kind, group.assign(kind=kind)))
    groups = [group for _, group in sorted(groups, key=lambda pair: pair[0])]
    numbered = [group.assign(group=number) for number, group in enumerate(groups, 1)]
    return pd.concat([table[:0].assign(kind=0, group=0), *numbered])


def find_suspects(args, classifier: SavedClassifier, images, table: pd.DataFrame, labels: list[str]) -> pd.DataFrame:
    """The part of the table whose labels are contradicted, the most contradicted first, with `predicted` and
    `label_probability`."""
    how = (args.on_bad_image, args.per_device_eval_batch_size, args.num_workers)
    readable, features, seen = classifier.predict(images.rows.select(table.index), *how, features=True)
    truth = readable.labels[seen]
    places, classes, given = contradicted_labels(out_of_fold_probabilities(features, truth, len(labels)), truth)
    predicted = [labels[index] for index in classes]
    return table.iloc[seen[places].tolist()].assign(predicted=predicted, label_probability=given.numpy())


def summarize(
    images: ThumbnailDataset, duplicates: pd.DataFrame, suspects: pd.DataFrame | None
) -> tuple[list[str], list[tuple[str, int, list[pd.DataFrame]]]]:
    """What was found: a phrase a line; and what the page shows of it: a title, how many there are, and tables of their images.

    Args:
        duplicates: from `find_duplicates`.
        suspects: from `find_suspects`; None without a model.
    """
    counts = pd.Series(images.rows["split"][:]).value_counts(sort=False)
    lines, shown = [f"images in {split}: {count:,}" for split, count in counts.items()], []
    if images.skipped:
        lines.append(f"images that cannot be read: {len(images.skipped):,}")
    for kind, rows in duplicates.groupby("kind"):
        groups = [group for _, group in rows.groupby("group")]
        lines.append(f"{DUPLICATES[kind]}: {len(groups):,} ({counted(len(rows), 'image')})")
        shown.append((DUPLICATES[kind], len(groups), groups[:SHOWN]))
    if not shown:
        lines.append("no duplicates")
    if suspects is not None:
        lines.append(f"labels that predictions contradict: {len(suspects):,}")
        shown.append(("Labels that predictions contradict, the most contradicted first", len(suspects), [suspects]))
    return lines, shown


def gallery(images: ThumbnailDataset, table: pd.DataFrame) -> list[dict]:
    """The rows of a table with `source`, the address of a picture, and `name`."""
    shown = []
    for place, row in table.iterrows():
        content = read_image_bytes(images.rows[place]["image"], images.files)
        picture, file = open_image({"bytes": content, "path": None}, 3), io.BytesIO()
        picture.thumbnail(PICTURE)
        picture.save(file, "PNG")
        source = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        (name,) = image_names([row["row"]], [row["file"]])
        shown.append({**row.map(printable), "source": source, "name": printable(name)})
    return shown


def count_labels(images: ThumbnailDataset, labels: list[str]) -> pd.DataFrame:
    """The images of each class in each split, readable or not."""
    splits, places, classes = np.array(images.rows["split"][:]), torch.arange(len(images)), images.labels
    if classes.ndim == 2:
        places, classes = classes.nonzero(as_tuple=True)
    columns = pd.Index(pd.unique(splits), name="split")
    counts = pd.crosstab(classes.numpy(), splits[places])
    return counts.reindex(index=range(len(labels)), columns=columns, fill_value=0).set_axis(map(printable, labels))


def render_page(name: str, summary: list[str], shown, images: ThumbnailDataset, labels: list[str]) -> str:
    """The page as HTML; `summary` and `shown` are from `summarize`."""
    return (
        Environment(autoescape=True)
        .from_string(PAGE.read_text(encoding="utf-8"))
        .render(
            name=printable(name),
            summary=summary,
            counts=count_labels(images, labels).to_html(),
            unreadable=[*map(printable, images.skipped)],
            galleries=[
                (title, count, [gallery(images, part[:SHOWN]) for part in parts]) for title, count, parts in shown
            ],
        )
    )


def main(args: argparse.Namespace):
    accelerator = set_up_evaluation(args.mixed_precision)
    if accelerator.num_processes > 1:
        raise UserError("one process looks at all images: run it without `accelerate launch` or --num_processes")
    with_model = args.model_name_or_path is not None
    classifier = SavedClassifier(args.model_name_or_path, accelerator) if with_model else None
    rows, labels = read_rows(args)
    if with_model and has_several_labels(rows):
        raise UserError("--model_name_or_path is for images with one label, and these have several: leave it out")
    images = ThumbnailDataset(rows, args.on_bad_image)
    table, vectors = read_images(images, labels, args.num_workers)
    duplicates, suspects = find_duplicates(table, vectors), None
    tables = {"duplicates": duplicates.drop(columns="kind")}
    if with_model:
        tables["labels"] = suspects = find_suspects(args, classifier, images, table, labels)
    for name, found in tables.items():
        text = csv_text(found, float_format="%.6f")
        write_text(args.output_file.with_suffix(f".{name}.csv"), text)
    summary, shown = summarize(images, duplicates, suspects)
    write_text(args.output_file, render_page(args.dataset_name, summary, shown, images, labels))
    print("\n".join([*map(printable, summary), f"the page: {args.output_file}"]))


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))

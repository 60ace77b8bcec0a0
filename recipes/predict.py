"""Predict the labels or embeddings of the images of a folder, a list of files or a data set, and write
CSV, Parquet or .npy.

    python recipes/predict.py --model_name_or_path runs/demo --dataset_name photos \\
        --output_file predictions.csv
    python recipes/predict.py --model_name_or_path runs/demo --dataset_name list.txt \\
        --output_file all.parquet --top_k 0
    python recipes/predict.py --model_name_or_path runs/demo --dataset_name photos \\
        --output embeddings --output_file embeddings.npy

Each image is a row: `file` (or `row`, if the data set has no files), then label_1, probability_1
and so on of the --top_k most likely labels or, with --top_k 0, one probability column per label. A
multi-label model adds `labels`: those that reach their thresholds, joined by ";". A regression
model gives one column, `prediction`.

An embedding is the input of the classification head: a column `embedding` of a Parquet
file, or a row of a .npy array, with the files in FILE.rows.csv beside it.

Images that cannot be read are listed in FILE.unreadable.txt.
"""

import argparse
from pathlib import Path

from command_line import Parser, at_least, bad_images, hardware, output


SUFFIXES = {"labels": (".csv", ".parquet"), "embeddings": (".parquet", ".npy")}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, "--model_name_or_path MODEL --dataset_name DATA --output_file FILE [--flag ...]")
    model = dict(required=True, help="run, model folder or Hub id of an image classifier")
    parser.add_group("model", model_name_or_path=model)
    name = "folder, image file, .txt list, table, Hub id, or `fashion-mnist-mini`"
    parser.add_group(
        "images",
        dataset_name=dict(required=True, help=name),
        dataset_config="configuration of the data set, if it has several",
        split="split of the data set, if it has several",
        image_column="image column; default: found by its feature type",
        **bad_images("skip"),
    )
    best = dict(type=at_least(0), default=5, help="labels per image; 0: the probabilities of all")
    kind = dict(choices=SUFFIXES, default="labels", help="what to write")
    files = output(".csv or .parquet; embeddings: .parquet or .npy")
    parser.add_group("output", output=kind, **files, top_k=best)
    parser.add_group("hardware", **hardware(batch_size=128))
    args = parser.parse_args(argv)
    files = (args.output_file, *beside(args.output_file))
    parser.check_output_files(*files, overwrite=args.overwrite, endings=SUFFIXES[args.output])
    return args


def beside(file: Path) -> list[Path]:
    """Files that are written beside the output file."""
    return [file.with_name(f"{file.name}{ending}") for ending in (".unreadable.txt", ".rows.csv")]


if __name__ == "__main__":
    ARGUMENTS = parse_args()  # before the imports, which take seconds

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate.utils import gather_object

from hf_vit.data.unlabelled import load_unlabelled
from hf_vit.evaluation.classifiers import SavedClassifier, is_regression
from hf_vit.evaluation.tables import best_labels, prediction_columns
from hf_vit.system.errors import run_script
from hf_vit.system.files import atomic_file, write_text
from hf_vit.system.text import counted, csv_text, printable
from hf_vit.training.setup import set_up_evaluation


def write_labels(file: Path, columns: dict):
    with atomic_file(file) as aside:
        if file.suffix.lower() == ".parquet":
            pq.write_table(pa.table(columns), aside)
        else:
            aside.write_text(csv_text(pd.DataFrame(columns), float_format="%.6g"), encoding="utf-8", newline="")


def write_embeddings(file: Path, names: dict, embeddings: torch.Tensor):
    """Names of the n images, by what they are, and embeddings (n, D) -> a Parquet file, or a .npy file and the names beside it."""
    if file.suffix.lower() == ".npy":
        write_labels(file.with_name(f"{file.name}.rows.csv"), names)
        with atomic_file(file) as aside, open(aside, "xb") as opened:
            np.save(opened, embeddings.numpy())
    else:
        values = pa.array(embeddings.flatten().numpy())
        write_labels(file, {**names, "embedding": pa.FixedSizeListArray.from_arrays(values, embeddings.shape[1])})


def main(args: argparse.Namespace):
    embeds, accelerator = args.output == "embeddings", set_up_evaluation(args.mixed_precision)
    with accelerator.main_process_first():
        images = load_unlabelled(args.dataset_name, args.dataset_config, args.split, args.image_column)
    classifier = SavedClassifier(args.model_name_or_path, accelerator, trained=not embeds, regression=True)
    is_number, thresholds, how = is_regression(classifier.model.config), classifier.thresholds, {}
    if not (embeds or is_number):
        how["convert"] = lambda logits: best_labels(logits, args.top_k, thresholds)
    dataset, values, rows = classifier.predict(
        images.rows, args.on_bad_image, args.per_device_eval_batch_size, args.num_workers, features=embeds, **how
    )
    unreadable = [printable(message) for message in gather_object([*dataset.skipped])]
    if accelerator.is_main_process:
        names, listed = {images.key: images.names(rows.tolist())}, beside(args.output_file)[0]
        if embeds:
            write_embeddings(args.output_file, names, values)
        elif is_number:
            write_labels(args.output_file, names | {"prediction": values[:, 0].numpy()})
        else:
            several = thresholds is not None
            columns = prediction_columns(values, classifier.names, args.top_k, several, images.key)
            write_labels(args.output_file, names | columns)
        print(f"{counted(len(rows), 'image')} in {args.output_file}")
        listed.unlink(missing_ok=True)  # of an output file that is replaced
        if unreadable:
            write_text(listed, "".join(f"{message}\n" for message in unreadable))
            print(f"{counted(len(unreadable), 'image')} cannot be read, see {listed}: {unreadable[0]}")
    accelerator.end_training()


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))

"""Evaluate a saved image classifier on a data set, or probe its frozen features.

    python recipes/eval.py --model_name_or_path runs/demo --dataset_name fashion-mnist-mini
    python recipes/eval.py --model_name_or_path runs/photos --dataset_name new_photos \\
        --split train --output_file scores.json
    python recipes/eval.py --model_name_or_path google/vit-base-patch16-224-in21k \\
        --dataset_name photos --probe_split train

It prints the metrics, their 95% intervals and the scores of each class. It writes nothing but
--output_file and, beside it, a table of the predictions.
"""

import argparse
import json
from pathlib import Path

from command_line import COLUMNS, DATA, SWITCH, Parser, at_least, bad_images, hardware


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__, "--model_name_or_path MODEL --dataset_name DATA [--flag value ...]")
    model = dict(required=True, help="run, model folder or Hub id of an image classifier")
    merged = "patches to merge per layer: faster, slightly less accurate (arXiv 2210.09461)"
    merging = dict(type=at_least(0), default=0, metavar="R", help=merged)
    parser.add_group("model", model_name_or_path=model, token_merging=merging)
    probe = "probe frozen features instead of the head: split to train k-NN and linear classifiers on"
    split = "split to evaluate; default: validation, else test"
    parser.add_group("data", **DATA, split=split, probe_split=probe, **COLUMNS, **bad_images("stop"))
    parser.add_group("hardware", **hardware(batch_size=256))
    about = "JSON file for the metrics; beside it, predictions of each image as .predictions.csv"
    overwrite = dict(**SWITCH, help="replace existing output files")
    parser.add_group("results", output_file=dict(type=Path, help=about), overwrite=overwrite)
    args = parser.parse_args()
    if args.output_file is not None:
        table = args.output_file.with_suffix(".predictions.csv")
        parser.check_output_files(args.output_file, table, overwrite=args.overwrite)
    return args


if __name__ == "__main__":  # a wrong flag is answered before the imports, which take seconds
    ARGUMENTS = parse_args()

import pandas as pd

from hf_vit import HFViTForImageClassification
from hf_vit.data.columns import column_arguments, has_several_labels
from hf_vit.data.sources import open_source
from hf_vit.data.splits import prepare_splits
from hf_vit.data.summary import summary
from hf_vit.evaluation.classifiers import SavedClassifier, is_regression
from hf_vit.evaluation.intervals import intervals
from hf_vit.evaluation.probes import probe
from hf_vit.evaluation.regression import regression_intervals, regression_metrics
from hf_vit.evaluation.scores import classification_report, compute_metrics
from hf_vit.evaluation.tables import prediction_table
from hf_vit.system.errors import UserError, as_user_errors, run_script
from hf_vit.system.files import write_text
from hf_vit.system.progress import is_main_process
from hf_vit.system.text import printable
from hf_vit.training.setup import set_up_evaluation


def read_splits(args, regression: bool) -> tuple[dict, list[str], str]:
    """{"eval": rows, and "train": rows of --probe_split}, the class names, and the name of the split to evaluate on."""
    source, choice = open_source(args), {"train_split": args.probe_split, "eval_split": args.split}
    choice["regression"] = regression
    splits, labels, eval_split = prepare_splits(source.splits, **choice, **column_arguments(args))
    if is_main_process():
        print("\n".join(summary(splits, {"train": args.probe_split, "eval": eval_split}, labels, source)))
    if args.probe_split is not None and has_several_labels(splits["eval"]):
        raise UserError("--probe_split scores one label an image, and these have several: leave it out")
    if args.probe_split is not None and args.probe_split == eval_split:
        raise UserError(f"--probe_split and --split are both {eval_split}: wanted two different splits")
    return splits, labels, eval_split


def load_model(args, accelerator) -> SavedClassifier:
    classifier = SavedClassifier(args.model_name_or_path, accelerator, regression=args.probe_split is None)
    if args.token_merging != 0:
        kind = type(classifier.model)
        if not issubclass(kind, HFViTForImageClassification):
            raise UserError(f"--token_merging is for models of hf_vit, not a {kind.__name__}: leave it out")
        with as_user_errors():
            classifier.model.set_token_merging(args.token_merging)
    return classifier


def print_details(details: dict):
    """The scores of each class as a table, and the 95% intervals."""
    if "per_class" in details:
        table = pd.DataFrame(details["per_class"]).rename(columns={"label": "class", "f1": "F1"}).set_index("class")
        print(
            table.rename(index=lambda name: printable(name)[:24]).to_string(float_format="{:.1%}".format, na_rep="-")
        )
    intervals = {name: [round(bound, 4) for bound in bounds] for name, bounds in details["intervals"].items()}
    print(f"95% intervals: {json.dumps(intervals)}")


def main(args: argparse.Namespace):
    accelerator = set_up_evaluation(args.mixed_precision)
    classifier = load_model(args, accelerator)
    regression, names, thresholds = is_regression(classifier.model.config), classifier.names, classifier.thresholds
    with accelerator.main_process_first():
        splits, labels, eval_split = read_splits(args, regression)
    how = (args.on_bad_image, args.per_device_eval_batch_size, args.num_workers)
    probes = args.probe_split is not None
    images, values, seen = classifier.predict(splits["eval"], *how, split=eval_split, features=probes)
    truth, details = images.labels[seen], {}
    if probes:
        known, features, read = classifier.predict(splits["train"], *how, split=args.probe_split, features=True)
        metrics = probe(features, known.labels[read], values, truth)
    elif regression:
        metrics = regression_metrics(values[:, 0], truth)
        details = {"intervals": regression_intervals(values[:, 0], truth)}
    else:
        truth = classifier.match_labels(truth, labels)
        metrics = compute_metrics(values, truth, thresholds)
        details = {"intervals": intervals(values, truth, thresholds)}
        details |= classification_report(values, truth, names, thresholds)

    skipped = len(splits["eval"]) - len(seen)
    metrics |= {"images": len(truth), "skipped_images": skipped, "split": eval_split}
    if accelerator.is_main_process:
        if details:
            print_details(details)
        print(json.dumps(metrics, indent=2))
        if args.output_file:
            results = {**metrics, "model": classifier.folder, "data": args.dataset_name, **details}
            write_text(args.output_file, json.dumps(results, indent=2))
        if args.output_file and "per_class" in details:
            table = prediction_table(*images.sources(seen), truth, values, names, thresholds)
            write_text(args.output_file.with_suffix(".predictions.csv"), table)
    accelerator.end_training()


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))

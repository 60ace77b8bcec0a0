"""Score a saved model on a data set.

python recipes/evaluate.py --model_name_or_path runs/demo/model --dataset_name fashion-mnist-mini --split test
"""

import argparse
import json
import sys
from pathlib import Path


# This folder holds evaluate.py, which would hide the library of that name.
sys.path = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

import datasets
from accelerate import Accelerator
from huggingface_hub.errors import StrictDataclassError
from transformers.utils import logging

import hf_vit
from hf_vit.data.columns import match_labels
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_spec import image_spec_of
from hf_vit.data.loader import data_loader
from hf_vit.data.sampling import sequential_batches
from hf_vit.data.sources import EMBEDDED, load_splits
from hf_vit.data.splits import prepare_splits
from hf_vit.evaluation.classifiers import load_classifier, load_processor, model_folder
from hf_vit.evaluation.probes import probe
from hf_vit.evaluation.scores import classification_report, compute_metrics
from hf_vit.system import hardware
from hf_vit.system.escapes import printable, printable_lines
from hf_vit.system.hub_names import refuse_mistyped_path
from hf_vit.training.arguments import read_label_names


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--model_name_or_path", required=True, help="Hub id or folder of an image classifier")
    parser.add_argument("--dataset_name", required=True, help="Hub id, local folder or file, or fashion-mnist-mini")
    parser.add_argument("--dataset_config", help="configuration of the data set, where it has several")
    parser.add_argument("--split", help="split to score; if not given: validation, else test")
    parser.add_argument(
        "--probe_split",
        help="split whose images teach a k-NN and linear classifiers on frozen features, from 1, 5 and 10 images a class "
        "(3 draws); the head is then scored only where it knows the labels",
    )
    parser.add_argument("--image_column", help="column of images; found by its feature type if not given")
    parser.add_argument("--label_column", help="column of labels; found by its feature type if not given")
    parser.add_argument("--label_names", help="text file of class names, a line each, where labels are bare numbers")
    parser.add_argument("--on_bad_image", choices=("stop", "skip"), default="stop", help="images that cannot be read")
    parser.add_argument("--per_device_eval_batch_size", type=int, default=256)
    parser.add_argument("--num_workers", type=int, default=4, help="processes that decode images")
    parser.add_argument("--mixed_precision", choices=("auto", "no", "bf16", "fp16"), default="auto")
    parser.add_argument(
        "--token_merging",
        type=int,
        default=0,
        metavar="R",
        help="patches merged in each layer, faster and a little less accurate (arXiv 2210.09461)",
    )
    parser.add_argument(
        "--output_file", help="JSON file for metrics, intervals, the table of classes and the confusion matrix"
    )
    args = parser.parse_args()
    if args.dataset_name not in EMBEDDED:
        refuse_mistyped_path(args.dataset_name, "--dataset_name")
    args.model_name_or_path = refuse_mistyped_path(model_folder(args.model_name_or_path), "--model_name_or_path")

    accelerator = Accelerator(mixed_precision=hardware.pick_precision(args.mixed_precision, hardware.device_type()))
    if accelerator.device.type == "cpu":
        hardware.use_all_cores()
        hardware.keep_memory()
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    with accelerator.main_process_first():
        splits, labels, scored = prepare_splits(
            load_splits(args.dataset_name, args.dataset_config),
            train_split=args.probe_split,
            eval_split=args.split,
            image_column=args.image_column,
            label_column=args.label_column,
            label_names=read_label_names(args.label_names),
        )
    if args.probe_split is not None and args.probe_split == scored:
        raise ValueError(
            f"--probe_split and --split are both {scored}: the classifiers would be asked what they were told"
        )
    model = load_classifier(args.model_name_or_path).to(accelerator.device)
    if args.token_merging != 0:
        if not isinstance(model, hf_vit.HFViTForImageClassification):
            raise ValueError(
                f"--token_merging is for models of hf_vit, not a {type(model).__name__}: leave it out, or score our copy"
            )
        model.set_token_merging(args.token_merging)
    form = image_spec_of(load_processor(args.model_name_or_path), model.config)

    def predict(rows, split, **what):
        """The images of `rows`, and what `predict` says of them; every process has its share."""
        images = ImageDataset(rows, form, args.on_bad_image)
        batches = sequential_batches(
            len(images), args.per_device_eval_batch_size, accelerator.process_index, accelerator.num_processes
        )
        values, seen = predict(
            model, data_loader(images, batches, args.num_workers), form, accelerator, len(images), split=split, **what
        )
        return images.labels[seen], values, len(rows) - len(seen)

    truth, logits, skipped = predict(splits["eval"], scored)
    metrics, details = {}, {}
    try:
        matched = match_labels(truth, labels, model.config.id2label)
        metrics = compute_metrics(logits, matched)
        details = classification_report(
            logits, matched, [model.config.id2label[i] for i in range(model.config.num_labels)]
        )
    except ValueError as error:
        if args.probe_split is None:
            raise
        accelerator.print(f"the head is not scored: {printable(error)}")
    if args.probe_split is not None:
        _, features, _ = predict(splits["eval"], scored, features=True)
        train_labels, train_features, _ = predict(splits["train"], args.probe_split, features=True)
        metrics |= probe(train_features, train_labels, features, truth)

    metrics |= {"images": len(truth), "skipped_images": skipped, "split": scored}
    if details:
        accelerator.print(f"{'class':<24} {'images':>7} {'precision':>9} {'recall':>7} {'F1':>7}")
        percent = lambda value: "-" if value is None else f"{value:.1%}"
        for row in details["per_class"]:
            accelerator.print(
                f"{printable(row['label'])[:24]:<24} {row['images']:>7} {percent(row['precision']):>9} {percent(row['recall']):>7} "
                f"{percent(row['f1']):>7}"
            )
        accelerator.print(
            "95% intervals: " + json.dumps({k: [round(x, 4) for x in v] for k, v in details["intervals"].items()})
        )
    accelerator.print(json.dumps(metrics, indent=2))
    if args.output_file and accelerator.is_main_process:
        with open(args.output_file, "w") as file:
            json.dump(
                {**metrics, "model": args.model_name_or_path, "data": args.dataset_name, **details}, file, indent=2
            )
    accelerator.end_training()


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, StrictDataclassError) as error:  # one sentence; a traceback would hide it
        sys.exit(f"error: {printable_lines(error)}")

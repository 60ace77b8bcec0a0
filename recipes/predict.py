"""Predict the labels of images with a saved classifier: a folder, a list of files or a data set -> CSV or Parquet.

    python recipes/predict.py --model_name_or_path runs/demo --dataset_name photos --output_file predictions.csv
    python recipes/predict.py --model_name_or_path runs/demo --dataset_name list.txt --output_file all.parquet --top_k 0

Each row of the output is an image: its `file` (or its `row`, if the data set has no files), then label_1, probability_1 and so on
of the best --top_k labels, or one column of probabilities for each label with --top_k 0. A model of several labels an image adds
`labels`: those that reach their thresholds, joined by ";". Images that cannot be read are listed in
FILE.unreadable.txt. If the command is stopped, the same command goes on.
"""

import argparse

from command_line import Parser, add_hardware_flags, add_output_flags, add_unlabelled_flags, refuse_less


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    usage = "--model_name_or_path MODEL --dataset_name DATA --output_file FILE [--flag value ...]"
    parser = Parser(__doc__, usage, accelerated=True)
    flag = parser.add_argument_group("model").add_argument
    flag("--model_name_or_path", required=True, help="run, model folder, Hub id or ONNX file of an image classifier")
    add_unlabelled_flags(parser)
    group = parser.add_argument_group("output")
    add_output_flags(group, ".csv or .parquet")
    group.add_argument("--top_k", type=int, default=5, help="labels an image; 0 for the probabilities of all")
    add_hardware_flags(parser, batch_size=128)
    args = parser.parse_args(argv)
    refuse_less(parser, args, top_k=0, per_device_eval_batch_size=1, num_workers=0)
    parser.refuse_mistyped_paths(MODEL=args.model_name_or_path, dataset_name=args.dataset_name)
    return args


if __name__ == "__main__":
    ARGUMENTS = parse_args()  # before the imports, which take seconds

from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_spec import image_spec_of
from hf_vit.data.loader import data_loader
from hf_vit.data.unlabelled import load_unlabelled
from hf_vit.evaluation.classifiers import class_names, load_classifier, load_processor, model_digest, model_folder
from hf_vit.evaluation.multi_label import thresholds_of
from hf_vit.evaluation.parts import Parts, compute_parts
from hf_vit.evaluation.prediction import BatchPredictor
from hf_vit.evaluation.result_files import (
    best_labels,
    check_output_file,
    finish_output,
    prediction_columns,
    write_table,
)
from hf_vit.system.errors import run_script
from hf_vit.training.setup import set_up_evaluation


def main(args: argparse.Namespace):
    output = check_output_file(args.output_file, (".csv", ".parquet"), args.overwrite)
    folder = model_folder(args.model_name_or_path, onnx=True)
    accelerator = set_up_evaluation(args.mixed_precision)
    with accelerator.main_process_first():
        images = load_unlabelled(args.dataset_name, args.dataset_config, args.split, args.image_column)
    model, processor = load_classifier(folder, trained=True).to(accelerator.device), load_processor(folder)
    spec = image_spec_of(processor, model.config)
    dataset = ImageDataset(images.rows, spec, args.on_bad_image, decode_first=False)
    parts = Parts(output, len(dataset))
    signature = {
        "model": model_digest(model, processor),
        "data": images.source,
        "top_k": args.top_k,
        "mixed_precision": accelerator.mixed_precision,
    }
    thresholds = thresholds_of(model.config)  # None for a model that gives one label
    with BatchPredictor(model, spec, accelerator) as predict_batch:
        compute_parts(
            parts,
            lambda batches: data_loader(dataset, batches, args.num_workers, keep_empty=True),
            lambda pixels: best_labels(predict_batch(pixels), args.top_k, thresholds),
            accelerator,
            args.per_device_eval_batch_size,
            signature,
            args.overwrite,
        )
    if accelerator.is_main_process:
        labels = class_names(model.config)
        tables = (
            prediction_columns(images.key, images.names(part["index"].tolist()), part, labels, args.top_k)
            for part in parts.read()
        )
        print(finish_output(parts, output, lambda file, _: write_table(file, tables)))
    accelerator.end_training()


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))

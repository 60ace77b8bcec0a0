"""The labels, or the embeddings, of any number of images: a folder, a list of files or a data set -> CSV, Parquet or .npy.

    python recipes/predict.py --model_name_or_path runs/demo --dataset_name photos --output_file predictions.csv
    python recipes/predict.py --model_name_or_path runs/demo --dataset_name list.txt --output_file all.parquet --top_k 0
    python recipes/predict.py --model_name_or_path runs/demo --dataset_name photos --output embeddings --output_file embeddings.npy

Each row of the output is an image: its `file` (or its `row`, if the data set has no files), then label_1, probability_1 and so on
of the best --top_k labels, or one column of probabilities for each label with --top_k 0. A model of several labels an image adds
`labels`: those that reach their thresholds, joined by ";". A model of numbers (regression) gives one column, `prediction`.

An embedding is the vector that the classifier's head reads, or with --layer the mean over the patches of what that layer gives:
a column `embedding` of a Parquet file, or a row of a .npy array, with the files in FILE.rows.csv beside it.

Images that cannot be read are listed in FILE.unreadable.txt. If the command is stopped, the same command goes on.
"""

import argparse

from command_line import Parser, add_hardware_flags, add_output_flags, add_unlabelled_flags, refuse_less


SUFFIXES = {"labels": (".csv", ".parquet"), "embeddings": (".parquet", ".npy")}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    usage = "--model_name_or_path MODEL --dataset_name DATA --output_file FILE [--flag value ...]"
    parser = Parser(__doc__, usage, accelerated=True)
    flag = parser.add_argument_group("model").add_argument
    flag("--model_name_or_path", required=True, help="run, model folder or Hub id of an image classifier")
    add_unlabelled_flags(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--output", choices=SUFFIXES, default="labels", help="what to write; default: labels")
    add_output_flags(group, ".csv or .parquet; embeddings: .parquet or .npy")
    group.add_argument(
        "--top_k", type=int, default=5, help="labels an image; 0 for the probabilities of all; default: 5"
    )
    layer = "embeddings: layer whose patches are averaged, from 0 or negative from the end; default: the head's input"
    group.add_argument("--layer", type=int, help=layer)
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
from hf_vit.evaluation.classifiers import (
    class_names,
    is_regression,
    load_classifier,
    load_processor,
    model_digest,
    model_folder,
)
from hf_vit.evaluation.multi_label import thresholds_of
from hf_vit.evaluation.parts import Parts, compute_parts
from hf_vit.evaluation.prediction import BatchPredictor
from hf_vit.evaluation.result_files import (
    best_labels,
    check_output_file,
    embedding_columns,
    finish_output,
    prediction_columns,
    write_npy,
    write_table,
)
from hf_vit.system.errors import run_script
from hf_vit.training.setup import set_up_evaluation


def main(args: argparse.Namespace):
    output = check_output_file(args.output_file, SUFFIXES[args.output], args.overwrite)
    folder, embeds = model_folder(args.model_name_or_path), args.output == "embeddings"
    accelerator = set_up_evaluation(args.mixed_precision)
    with accelerator.main_process_first():
        images = load_unlabelled(args.dataset_name, args.dataset_config, args.split, args.image_column)
    model = load_classifier(folder, trained=not embeds, regression=True).to(accelerator.device)
    processor = load_processor(folder)
    spec, thresholds = image_spec_of(processor, model.config), thresholds_of(model.config)
    dataset = ImageDataset(images.rows, spec, args.on_bad_image, decode_first=False)
    parts = Parts(output, len(dataset))
    signature = {"model": model_digest(model, processor), "data": images.source}
    signature |= {"layer": args.layer} if embeds else {"top_k": args.top_k}
    signature |= {"mixed_precision": accelerator.mixed_precision}
    with BatchPredictor(model, spec, accelerator, embeds and args.layer is None, args.layer) as predict_batch:

        def compute(pixels):
            values = predict_batch(pixels)
            if embeds or is_regression(model.config):
                return {"embedding" if embeds else "prediction": values}
            return best_labels(values, args.top_k, thresholds)

        load = lambda batches: data_loader(dataset, batches, args.num_workers, keep_empty=True)
        batch_size = args.per_device_eval_batch_size
        compute_parts(parts, load, compute, accelerator, batch_size, signature, args.overwrite)

    def columns_of(part) -> dict:
        names = images.names(part["index"].tolist())
        if embeds:
            return embedding_columns(images.key, names, part["embedding"])
        if "prediction" in part:
            return {images.key: names, "prediction": part["prediction"][:, 0].numpy()}
        return prediction_columns(images.key, names, part, class_names(model.config), args.top_k)

    def write(file, count: int):
        if file.suffix.lower() == ".npy":
            write_npy(file, count, (part["embedding"] for part in parts.read()))
            rows = ({images.key: images.names(part["index"].tolist())} for part in parts.read())
            write_table(file.with_name(f"{file.name}.rows.csv"), rows)
        else:
            write_table(file, map(columns_of, parts.read()))

    if accelerator.is_main_process:
        print(finish_output(parts, output, write))
    accelerator.end_training()


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))

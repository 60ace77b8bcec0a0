"""Embed images with a saved model: a folder, a list of files or a data set -> Parquet or .npy.

    python recipes/embed.py --model_name_or_path runs/demo --dataset_name photos --output_file embeddings.parquet
    python recipes/embed.py --model_name_or_path runs/demo --dataset_name photos --output_file layer.npy --layer 2

The embedding of an image is the vector that the classifier's head reads, or with --layer the mean over the patches of what that
layer gives. A Parquet file has the columns `file` (or `row`, if the data set has no files) and `embedding`. A .npy file is an array
of a row each, and FILE.rows.csv beside it names them. Images that cannot be read are listed in FILE.unreadable.txt. If the command
is stopped, the same command goes on.
"""

import argparse

from command_line import Parser, add_hardware_flags, add_output_flags, add_unlabelled_flags, refuse_less


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    usage = "--model_name_or_path MODEL --dataset_name DATA --output_file FILE [--flag value ...]"
    parser = Parser(__doc__, usage, accelerated=True)
    flag = parser.add_argument_group("model").add_argument
    flag("--model_name_or_path", required=True, help="run, model folder or Hub id of an image classifier")
    layer = (
        "layer whose patches are averaged, from 0, or negative from the end; by default the head's input is written"
    )
    flag("--layer", type=int, help=layer)
    add_unlabelled_flags(parser)
    add_output_flags(parser.add_argument_group("output"), ".parquet or .npy")
    add_hardware_flags(parser, batch_size=128)
    args = parser.parse_args(argv)
    refuse_less(parser, args, per_device_eval_batch_size=1, num_workers=0)
    parser.refuse_mistyped_paths(MODEL=args.model_name_or_path, dataset_name=args.dataset_name)
    return args


if __name__ == "__main__":
    ARGUMENTS = parse_args()  # before the imports, which take seconds

from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_spec import image_spec_of
from hf_vit.data.loader import data_loader
from hf_vit.data.unlabelled import UnlabelledRows, load_unlabelled
from hf_vit.evaluation.classifiers import load_classifier, load_processor, model_digest, model_folder
from hf_vit.evaluation.onnx_classifier import is_onnx
from hf_vit.evaluation.parts import Parts, compute_parts
from hf_vit.evaluation.prediction import BatchPredictor
from hf_vit.evaluation.result_files import (
    check_output_file,
    embedding_columns,
    finish_output,
    write_npy,
    write_table,
)
from hf_vit.system.errors import UserError, run_script
from hf_vit.training.setup import set_up_evaluation


def write_embeddings(file, count: int, parts: Parts, images: UnlabelledRows):
    """The embeddings of all parts as Parquet, or as .npy with a table of the `count` rows beside it."""
    names = lambda part: images.names(part["index"].tolist())
    if file.suffix.lower() == ".parquet":
        write_table(file, (embedding_columns(images.key, names(part), part["embedding"]) for part in parts.read()))
        return
    write_npy(file, count, (part["embedding"] for part in parts.read()))
    write_table(file.with_name(f"{file.name}.rows.csv"), ({images.key: names(part)} for part in parts.read()))


def main(args: argparse.Namespace):
    output = check_output_file(args.output_file, (".parquet", ".npy"), args.overwrite)
    folder = model_folder(args.model_name_or_path, onnx=True)
    if is_onnx(folder):
        raise UserError(
            f"{folder} gives logits and nothing else: name the run or the model folder that it was exported from"
        )
    accelerator = set_up_evaluation(args.mixed_precision)
    with accelerator.main_process_first():
        images = load_unlabelled(args.dataset_name, args.dataset_config, args.split, args.image_column)
    model, processor = load_classifier(folder).to(accelerator.device), load_processor(folder)
    spec = image_spec_of(processor, model.config)
    dataset = ImageDataset(images.rows, spec, args.on_bad_image, decode_first=False)
    parts = Parts(output, len(dataset))
    signature = {
        "model": model_digest(model, processor),
        "data": images.source,
        "layer": args.layer,
        "mixed_precision": accelerator.mixed_precision,
    }
    with BatchPredictor(model, spec, accelerator, features=args.layer is None, layer=args.layer) as embed_batch:
        compute_parts(
            parts,
            lambda batches: data_loader(dataset, batches, args.num_workers, keep_empty=True),
            lambda pixels: {"embedding": embed_batch(pixels)},
            accelerator,
            args.per_device_eval_batch_size,
            signature,
            args.overwrite,
        )
    if accelerator.is_main_process:
        print(finish_output(parts, output, lambda file, count: write_embeddings(file, count, parts, images)))
    accelerator.end_training()


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))

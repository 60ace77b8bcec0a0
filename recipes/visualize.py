"""Pictures of what a model looks at, of what it has learnt, and of where it errs.

python recipes/visualize.py MODEL --images photo.jpg [more.jpg ...]
python recipes/visualize.py MODEL --dataset_name fashion-mnist-mini [--split test]

MODEL is a run, a model folder, or a repository of any format that hf_vit reads. Written to --output_dir:

    attention.png     images, and which patches count for what the model says of them
    layers.png        the attention of every layer, the mean of its heads; with --method or --layers what those ask for
    heads.png         the attention of each head, in the last layer or the last of --layers
    inside.png        patch filters, similarity of positions, how far the heads of each layer look
    positions.png     the numbers of the position embeddings, where there are some
    predictions.png, mistakes.png, confusion.png, calibration.png    of a data set, whose split is scored
"""

import argparse
import sys
from pathlib import Path


# This folder holds evaluate.py, which would hide the library of that name.
sys.path = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

import datasets
import torch
from accelerate import Accelerator
from huggingface_hub.errors import StrictDataclassError
from transformers.utils import logging

from hf_vit import HFViTForImageClassification, figures
from hf_vit.data.columns import match_labels
from hf_vit.data.decoding import decode_rows, stack_images
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_files import read_file
from hf_vit.data.image_spec import image_spec_of
from hf_vit.data.loader import data_loader
from hf_vit.data.normalization import denormalize, normalize
from hf_vit.data.sampling import sequential_batches
from hf_vit.data.sources import load_splits
from hf_vit.data.splits import prepare_splits
from hf_vit.evaluation.classifiers import load_processor, model_folder
from hf_vit.evaluation.prediction import predict
from hf_vit.evaluation.scores import classification_report, compute_metrics, surest_mistakes
from hf_vit.model.attention_maps import GRADIENT_METHODS, MAP_METHODS
from hf_vit.system import hardware
from hf_vit.system.escapes import printable_lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="run folder, model folder or Hub id")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--images", nargs="+", metavar="FILE", help="image files")
    source.add_argument("--dataset_name", "--dataset", help="as for train.py")
    parser.add_argument("--dataset_config")
    parser.add_argument("--split", help="test, validation or val if not given, else the only one")
    parser.add_argument("--image_column")
    parser.add_argument("--label_column")
    parser.add_argument("--count", type=int, default=4, help="images of the data set in the pictures of attention")
    parser.add_argument("--method", choices=[name for name in MAP_METHODS if name != "raw"], default="mean")
    parser.add_argument("--layers", type=int, nargs="+", help="from 0, or negative from the end; all if not given")
    parser.add_argument("--label", help="class whose gradient is followed; what the model answers if not given")
    parser.add_argument("--output_dir", type=Path, help="figures/ of a run, else runs/figures/MODEL, if not given")
    args = parser.parse_args()
    if args.count < 1:
        parser.error(f"--count is {args.count}; wanted 1 or more")
    return args


def score(args, model, form) -> tuple[ImageDataset, dict]:
    """The images of a data set, and the pictures of how the model does on them."""
    accelerator = Accelerator()
    hardware.use_all_cores()
    splits, names, scored = prepare_splits(
        load_splits(args.dataset_name, args.dataset_config),
        train_split=None, eval_split=args.split, image_column=args.image_column, label_column=args.label_column,
    )  # fmt: skip
    images = ImageDataset(splits["eval"], form)
    model.to(accelerator.device)
    share = sequential_batches(len(images), 64)
    logits, rows = predict(model, data_loader(images, share, 0), form, accelerator, len(images))
    model.cpu()
    known = [model.config.id2label[index] for index in range(model.config.num_labels)]
    try:
        truth = match_labels(images.labels[rows], names, model.config.id2label)
    except ValueError as error:
        print(f"not scored: {error}")
        return images, {}
    details, metrics = classification_report(logits, truth, known), compute_metrics(logits, truth)
    print(f"accuracy on {scored}: {metrics['accuracy']:.2%} of {len(truth):,} images")
    drawn = {
        "confusion": figures.confusion(details["confusion_matrix"], known),
        "calibration": figures.calibration(details["calibration"]),
    }
    shown = {
        "predictions": torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:12],
        "mistakes": surest_mistakes(truth, logits),
    }
    for name, some in shown.items():
        if len(some):
            pictures = denormalize(normalize(images.__getitems__(rows[some].tolist())["images"], form), form)
            drawn[name] = figures.predictions(pictures, truth[some], logits[some], known)
    return images, drawn


def main():
    args = parse()
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    source = model_folder(args.model)
    model = HFViTForImageClassification.from_pretrained(source).eval()
    config, drawn = model.config, {}
    if config.num_channels not in (1, 3):
        raise ValueError(f"the model takes {config.num_channels} channels; pictures are made of 1 (grey) or 3 (RGB)")
    gradient = {}
    if args.method in GRADIENT_METHODS and not model.classifier.weight.any():
        raise ValueError(f"the head of the model is all zero, so {args.method} has no gradient to follow")
    if args.label is not None:
        if args.label not in config.label2id:
            raise ValueError(
                f"--label {args.label} is no class of the model; wanted one of {', '.join(config.label2id)}"
            )
        gradient = {"labels": config.label2id[args.label]}
    form = image_spec_of(load_processor(source), config)
    if args.images:
        rows = [
            {"row": row, "image": {"bytes": read_file(file), "path": file}} for row, file in enumerate(args.images)
        ]
        read, bad = decode_rows(rows, form)
        if bad:
            raise ValueError("; ".join(bad))
        pixels = stack_images(read)
    else:
        images, drawn = score(args, model, form)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))[: args.count]
        pixels = images.__getitems__(order.tolist())["images"]
    pixel_values = normalize(pixels, form)  # (n, C, H, W)
    pictures = denormalize(pixel_values, form)

    with torch.no_grad():
        captions = figures.prediction_captions(
            model(pixel_values).logits, [config.id2label[i] for i in range(config.num_labels)]
        )
    drawn |= figures.model_figures(model, pictures, pixel_values, captions)
    layers = list(range(config.num_hidden_layers)) if args.layers is None else args.layers
    maps = model.attention_maps(pixel_values, layers, args.method, **gradient)  # (n, layers, h, w)
    named = [f"layer {layer % config.num_hidden_layers + 1}" for layer in layers]
    heads = model.attention_maps(pixel_values, layers[-1])  # (n, A, h, w)
    drawn["layers"] = figures.attention(pictures, maps, named, captions)
    drawn["heads"] = figures.attention(
        pictures, heads, [f"head {head + 1}" for head in range(heads.shape[1])], captions
    )
    if config.position_embedding not in ("rotary", "none"):
        table = model.vit.embeddings.interpolate_pos_encoding(config.grid_size)[1][0]  # (N, D)
        drawn["positions"] = figures.positions(table, config.position_embedding)

    of_run = Path(args.model) / "figures" if source != args.model else Path("runs/figures") / Path(args.model).name
    folder = args.output_dir or of_run
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        figures.save(figure, folder / f"{name}.png")
        print(folder / f"{name}.png")
    print(f"the attention is that of {model.attention_query}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, StrictDataclassError) as error:  # one sentence; a traceback would hide it
        sys.exit(f"error: {printable_lines(error)}")

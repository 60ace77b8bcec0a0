"""Draw what a model looks at, what it has learnt and where it errs.

    python recipes/visualize.py runs/photos --images photos/cat/1.jpg photos/dog/7.jpg
    python recipes/visualize.py runs/demo --dataset_name fashion-mnist-mini --split test
    python recipes/visualize.py google/vit-base-patch16-224 --images photo.jpg --method rollout --output_dir pictures

MODEL is a run, a model folder or a Hub id of any format that hf_vit reads. The pictures in --output_dir:

    attention.png     images, and how much each patch counts for the predicted class
    layers.png        the attention of every layer, mean of its heads, or what --method and --layers ask for
    heads.png         the attention of each head in the last layer, or in the last of --layers
    inside.png        patch filters, similarity of positions, how far the heads of each layer look
    predictions.png, mistakes.png, confusion.png, calibration.png    with --dataset_name: how the model does on the split
"""

import argparse
from pathlib import Path

from command_line import COLUMNS, Parser, bad_images


MOST_IMAGES = 8  # a row or more each, in pictures that people can open
SAMPLED = 4  # images of a data set in the pictures of attention
METHODS = ("mean", "rollout", "gradient_rollout", "grad_cam")  # those of `attention_maps` with one map a layer


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        __doc__, "MODEL (--images FILE [FILE ...] | --dataset_name DATA) [--flag value ...]", accelerated=True
    )
    parser.add_argument("model", metavar="MODEL", help="run folder, model folder or Hub id")
    source = parser.add_argument_group("images").add_mutually_exclusive_group(required=True)
    source.add_argument("--images", nargs="+", metavar="FILE", help="image files")
    source.add_argument("--dataset_name", help="Hub id, local folder or file, or fashion-mnist-mini")
    config = "configuration of the data set, if it has several"
    split = "by default test or validation, or else the only one"
    parser.add_group("data", dataset_config=config, split=split, **COLUMNS, **bad_images("stop"))
    where = "default: figures/ of the run or the model folder, runs/figures/USER--NAME of a Hub id"
    parser.add_group(
        "pictures",
        method=dict(choices=METHODS, default="mean", help="of layers.png"),
        layers=dict(type=int, nargs="+", help="from 0, or negative from the end; by default all"),
        label="class whose gradient is followed; by default the model's answer",
        output_dir=dict(type=Path, help=where),
    )
    args = parser.parse_args(argv)
    parser.refuse_mistyped_paths(MODEL=args.model, dataset_name=args.dataset_name)
    parser.check_images(args.images or [])
    return args


if __name__ == "__main__":  # a wrong flag is answered before the imports, which take seconds
    ARGUMENTS = parse_args()

import datasets
import torch
from transformers.utils import logging

from hf_vit import HFViTForImageClassification, figures
from hf_vit.data.columns import column_arguments, match_labels
from hf_vit.data.decoding import decode_rows, stack_images
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_files import read_file
from hf_vit.data.image_spec import image_spec_of
from hf_vit.data.normalization import denormalize, normalize
from hf_vit.data.sources import open_source
from hf_vit.data.splits import default_split, describe_scored, prepare_splits
from hf_vit.evaluation.classifiers import class_names, load_processor, model_folder
from hf_vit.evaluation.multi_label import check_task, thresholds_of
from hf_vit.evaluation.prediction import predict_images
from hf_vit.evaluation.scores import (
    classification_report,
    compute_metrics,
    format_prediction,
    headline,
    surest_mistakes,
)
from hf_vit.evaluation.tables import image_names
from hf_vit.model.attention_maps import GRADIENT_METHODS
from hf_vit.run_figures import image_figure, model_figures, report_figures
from hf_vit.system.errors import UserError, as_user_errors, run_script
from hf_vit.system.escapes import counted
from hf_vit.training.setup import set_up_evaluation


def check_model(model, args):
    """Raise ValueError if the model's images cannot be drawn, or if --method or --label do not go with its head."""
    config = model.config
    if config.num_channels not in (1, 3):
        raise UserError(f"the model takes {config.num_channels} channels; pictures are made of 1 (grey) or 3 (RGB)")
    if args.method in GRADIENT_METHODS and not model.classifier.weight.any():
        raise UserError(f"the head of the model is all zero, so {args.method} has no gradient to follow")
    if args.label is not None and args.label not in config.label2id:
        raise UserError(f"--label {args.label} is no class of the model; wanted one of {', '.join(config.label2id)}")


def read_images(files: list[str], image_spec) -> torch.Tensor:
    """Image files -> uint8 (n, C, H, W)."""
    rows = [{"row": row, "image": {"bytes": read_file(file), "path": file}} for row, file in enumerate(files)]
    images, bad = decode_rows(rows, image_spec)
    if bad:
        raise UserError("; ".join(bad))
    return stack_images(images)


def load_images(args, image_spec) -> tuple[ImageDataset, list[str], str]:
    """The images of the data set, its class names and the name of the split."""
    splits = open_source(args).splits
    choice = {"train_split": None, "eval_split": args.split or default_split(splits)}
    splits, labels, split = prepare_splits(splits, **choice, **column_arguments(args))
    return ImageDataset(splits["eval"], image_spec, args.on_bad_image), labels, split


def draw_evaluation(model, images: ImageDataset, labels: list[str], split: str, image_spec) -> dict:
    """Figures of how the model does on the images, by name; none if it does not know the labels."""
    accelerator = set_up_evaluation("no")
    model.to(accelerator.device)
    logits, rows = predict_images(model, images, image_spec, accelerator, batch_size=64, num_workers=0)
    model.cpu()
    names, thresholds = class_names(model.config), thresholds_of(model.config)
    try:
        check_task(images.labels, thresholds)
        truth = match_labels(images.labels[rows], labels, model.config.id2label)
    except ValueError as error:
        print(f"not evaluated: {error}")
        return {}
    metric, value = headline(compute_metrics(logits, truth, thresholds))
    print(f"{metric.replace('_', ' ')} on {describe_scored(split)}: {value:.2%} of {counted(len(truth), 'image')}")
    drawn = report_figures(classification_report(logits, truth, names, thresholds), names)
    sample = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:12]
    mistakes = surest_mistakes(truth, logits, thresholds=thresholds)
    for name, of in (("predictions", sample), ("mistakes", mistakes)):
        if len(of):
            pixels = images.__getitems__(rows[of].tolist())["images"]  # (n, C, H, W)
            shown = {"images": pixels, "labels": truth[of], "logits": logits[of]}
            sources = image_names(*images.sources(rows[of])) if name == "mistakes" else ()
            drawn[name] = image_figure(shown, "", names, image_spec, sources, thresholds)
    return drawn


def draw_attention(model, pixels: torch.Tensor, args, image_spec) -> dict:
    """Figures of what the model looks at in images, uint8 (n, C, H, W), and of its weights, by name."""
    config, names, thresholds = model.config, class_names(model.config), thresholds_of(model.config)
    pixel_values = torch.as_tensor(normalize(pixels, image_spec))  # (n, C, H, W)
    with torch.no_grad():
        captions = [format_prediction(row, names, thresholds) for row in model(pixel_values).logits]
    drawn, shown = model_figures(model, pixels, image_spec, captions), denormalize(pixel_values, image_spec)
    layers = list(range(config.num_hidden_layers)) if args.layers is None else args.layers
    count = config.num_hidden_layers
    if not all(-count <= layer < count for layer in layers):
        raise UserError(f"--layers must be from {-count} to {count - 1}, got {', '.join(map(str, layers))}")
    labels = {} if args.label is None else {"labels": config.label2id[args.label]}
    with as_user_errors():  # of --layers and --method
        maps = model.attention_maps(pixel_values, layers, args.method, **labels)  # (n, layers, h, w)
    titles = [f"layer {layer % config.num_hidden_layers + 1}" for layer in layers]
    drawn["layers"] = figures.attention(shown, maps, titles, captions)
    heads = model.attention_maps(pixel_values, layers[-1])  # (n, A, h, w)
    titles = [f"head {head + 1}" for head in range(heads.shape[1])]
    drawn["heads"] = figures.attention(shown, heads, titles, captions)
    return drawn


def default_folder(source: str) -> Path:
    """figures/ of the run that a model belongs to, or of its own folder; of a model of the Hub, runs/figures/USER--NAME."""
    model = Path(source).resolve()
    if not model.is_dir():
        return Path("runs/figures") / source.replace("/", "--")
    is_of_run = model.name in ("model", "last") and (model.parent / "config.yaml").is_file()
    return (model.parent if is_of_run else model) / "figures"


def main(args: argparse.Namespace):
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    source = model_folder(args.model)
    with as_user_errors():
        model = HFViTForImageClassification.from_pretrained(source).eval()
    check_model(model, args)
    image_spec = image_spec_of(load_processor(source), model.config)
    drawn = {}
    if args.images:
        if len(args.images) > MOST_IMAGES:
            print(f"drawing the first {MOST_IMAGES} of {len(args.images)} images")
        pixels = read_images(args.images[:MOST_IMAGES], image_spec)
    else:
        images, labels, split = load_images(args, image_spec)
        drawn = draw_evaluation(model, images, labels, split, image_spec)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))[:SAMPLED]
        pixels = images.__getitems__(order.tolist())["images"]
    drawn |= draw_attention(model, pixels, args, image_spec)

    folder = args.output_dir or default_folder(source)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        figures.save(figure, folder / f"{name}.png")
        print(folder / f"{name}.png")
    print(f"the attention is that of {model.attention_query}")


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))

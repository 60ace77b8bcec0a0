"""Draw what a model looks at, and its mistakes.

    python recipes/visualize.py runs/photos --images photos/cat/1.jpg photos/dog/7.jpg
    python recipes/visualize.py runs/demo --dataset_name fashion-mnist-mini --split test
    python recipes/visualize.py google/vit-base-patch16-224 --images photo.jpg --output_dir pictures

MODEL is a run, a model folder or a Hub id of any format that hf_vit reads. The pictures in
--output_dir:

    attention.png     images, and how much each patch counts for the predicted class
    layers.png        the attention of every layer, averaged over its heads
    heads.png         the attention of each head in the last layer
    distances.png     mean attention distance of each head, by layer
    predictions.png, mistakes.png, confusion.png, calibration.png
                      with --dataset_name: the results of the model on the split
"""

import argparse
from pathlib import Path

from command_line import COLUMNS, Parser, bad_images


MOST_IMAGES = 8  # a row or more each, in pictures that people can open
SAMPLED = 4  # images of a data set in the pictures of attention


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__, "MODEL (--images FILE [FILE ...] | --dataset_name DATA) [--flag value ...]")
    parser.add_argument("model", metavar="MODEL", help="run, model folder or Hub id")
    source = parser.add_argument_group("images").add_mutually_exclusive_group(required=True)
    source.add_argument("--images", nargs="+", metavar="FILE", help="image files")
    source.add_argument("--dataset_name", help="Hub id, folder, table file, or `fashion-mnist-mini` (embedded)")
    config = "configuration of the data set, if it has several"
    split = "split to draw; default: validation, else test"
    parser.add_group("data", dataset_config=config, split=split, **COLUMNS, **bad_images("stop"))
    where = "folder to write; default: figures/ of the run or model folder"
    parser.add_group("pictures", output_dir=dict(type=Path, help=where))
    return parser.parse_args()


if __name__ == "__main__":  # a wrong flag is answered before the imports, which take seconds
    ARGUMENTS = parse_args()

import torch

from hf_vit import figures
from hf_vit.data.columns import column_arguments
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.normalization import denormalize, normalize
from hf_vit.data.sources import open_source
from hf_vit.data.splits import default_split, describe_scored, prepare_splits
from hf_vit.data.unlabelled import named_files
from hf_vit.evaluation.classifiers import SavedClassifier
from hf_vit.evaluation.scores import (
    classification_report,
    compute_metrics,
    format_prediction,
    headline,
    surest_mistakes,
)
from hf_vit.evaluation.tables import image_names
from hf_vit.run_figures import image_figure, model_figures, report_figures, save_figures
from hf_vit.system.errors import UserError, run_script
from hf_vit.system.text import counted
from hf_vit.training.setup import set_up_evaluation


def evaluate(args, classifier: SavedClassifier) -> tuple[ImageDataset, dict]:
    """The images of the data set, and figures of how the model does on them, by name; none if it does not know the labels."""
    splits, spec, names = open_source(args).splits, classifier.spec, classifier.names
    choice = {"train_split": None, "eval_split": args.split or default_split(splits)}
    splits, labels, split = prepare_splits(splits, **choice, **column_arguments(args))
    images, logits, rows = classifier.predict(splits["eval"], args.on_bad_image)
    thresholds = classifier.thresholds
    try:
        truth = classifier.match_labels(images.labels[rows], labels)
    except ValueError as error:
        print(f"not evaluated: {error}")
        return images, {}
    metric, value = headline(compute_metrics(logits, truth, thresholds))
    print(f"{metric.replace('_', ' ')} on {describe_scored(split)}: {value:.2%} of {counted(len(truth), 'image')}")
    drawn = report_figures(classification_report(logits, truth, names, thresholds), names)
    sample = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:12]
    for name, of in (("predictions", sample), ("mistakes", surest_mistakes(truth, logits, thresholds=thresholds))):
        if len(of):
            pixels = images.__getitems__(rows[of].tolist())["images"]  # (n, C, H, W)
            shown = {"images": pixels, "labels": truth[of], "logits": logits[of]}
            sources = image_names(*images.sources(rows[of])) if name == "mistakes" else ()
            drawn[name] = image_figure(shown, "", names, spec, sources, thresholds)
    return images, drawn


def draw_attention(classifier: SavedClassifier, pixels: torch.Tensor) -> dict:
    """Figures of what the model looks at in images, uint8 (n, C, H, W), by name."""
    model, spec = classifier.model, classifier.spec
    pixel_values = torch.as_tensor(normalize(pixels, spec)).to(model.device)  # (n, C, H, W)
    with torch.no_grad():
        logits = model(pixel_values).logits.cpu()
    captions = [format_prediction(row, classifier.names, classifier.thresholds) for row in logits]
    drawn, shown = model_figures(model, pixels, spec, captions), denormalize(pixel_values, spec).cpu()
    maps = model.attention_maps(pixel_values).cpu()  # (n, layers, A, h, w)
    for name, found in (("layer", maps.mean(dim=2)), ("head", maps[:, -1])):
        titles = [f"{name} {number}" for number in range(1, found.shape[1] + 1)]
        drawn[f"{name}s"] = figures.attention(shown, found, titles, captions)
    return drawn


def default_folder(source: str) -> Path:
    """figures/ of the run that a model belongs to, or of its own folder; of a model of the Hub, runs/figures/USER--NAME."""
    model = Path(source).resolve()
    if not model.is_dir():
        return Path("runs/figures") / source.replace("/", "--")
    is_of_run = model.name in ("model", "last") and (model.parent / "config.yaml").is_file()
    return (model.parent if is_of_run else model) / "figures"


def main(args: argparse.Namespace):
    classifier, drawn = SavedClassifier(args.model, set_up_evaluation("no"), ours=True), {}
    if (channels := classifier.spec.channels) not in (1, 3):
        raise UserError(f"the model takes {channels} channels; pictures are made of 1 (grey) or 3 (RGB)")
    if args.images:
        if len(args.images) > MOST_IMAGES:
            print(f"drawing the first {MOST_IMAGES} of {len(args.images)} images")
        rows = named_files(Path(), Path(), args.images[:MOST_IMAGES]).rows
        images = ImageDataset(rows, classifier.spec, args.on_bad_image)
        order = range(len(images))
    else:
        images, drawn = evaluate(args, classifier)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))[:SAMPLED].tolist()
    drawn |= draw_attention(classifier, images.__getitems__(list(order))["images"])
    folder = args.output_dir or default_folder(classifier.folder)
    save_figures(folder, drawn)
    if images.skipped:
        print(f"{counted(len(images.skipped), 'image')} cannot be read: {next(iter(images.skipped))}")
    print("\n".join(str(folder / f"{name}.png") for name in drawn))
    print(f"The maps show the attention of {classifier.model.attention_query}.")


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))

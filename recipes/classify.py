"""Show what a saved model sees in images, or in a few images of a data set next to their true labels.

    python recipes/classify.py runs/demo/model recipes/data/bag.png
    python recipes/classify.py runs/photos photos/cat/*.jpg
    python recipes/classify.py google/vit-base-patch16-224 photo.jpg
    python recipes/classify.py runs/demo/model fashion-mnist-mini

It prints a sketch of each image and the three most likely classes, and writes nothing.
"""

import argparse
from pathlib import Path

from command_line import Parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, "MODEL IMAGE [IMAGE ...]")
    parser.add_argument("model", metavar="MODEL", help="run, model folder or Hub id of an image classifier")
    parser.add_argument(
        "images", nargs="+", metavar="IMAGE", help="image files, or one folder of class folders, or fashion-mnist-mini"
    )
    args = parser.parse_args(argv)
    parser.refuse_mistyped_paths(MODEL=args.model)
    parser.check_images(args.images, or_data=True)
    return args


if __name__ == "__main__":  # a wrong flag is answered before the imports, which take seconds
    ARGUMENTS = parse_args()

import datasets
import numpy as np
import torch
from PIL import Image
from transformers.utils import logging

from hf_vit.data.decoding import open_image
from hf_vit.data.image_files import allowed_files, read_file, read_image_bytes
from hf_vit.data.sources import load_splits
from hf_vit.data.splits import default_split, describe_scored, prepare_splits
from hf_vit.evaluation.classifiers import load_classifier, load_processor, model_folder
from hf_vit.evaluation.multi_label import thresholds_of
from hf_vit.evaluation.scores import headline
from hf_vit.system import run_files
from hf_vit.system.command_line import shell_line
from hf_vit.system.errors import UserError, run_script
from hf_vit.system.escapes import printable
from hf_vit.system.recipes_folder import EMBEDDED


SHADES = " .:-=+*#%@"
NUM_SAMPLES = 6  # images shown of a data set
VISUALIZE = Path(__file__).resolve().with_name("visualize.py")
TEXT_LINE = 4  # of a sketch, at which the text beside it begins


def open_file(path: str, channels: int) -> Image.Image:
    try:
        return open_image({"bytes": read_file(path), "path": path}, channels)
    except (ValueError, OSError) as error:
        raise UserError(
            f"{path} cannot be read as an image ({error}); wanted image files, or one folder or data set alone"
        ) from error


def is_data(names: list[str]) -> bool:
    """Whether they name a data set, and not image files."""
    return len(names) == 1 and (names[0] in EMBEDDED or Path(names[0]).is_dir())


def open_images(names: list[str], channels: int) -> list[tuple[str, Image.Image]]:
    """Images, each with its file name, or with its true label if it comes from a data set."""
    if is_data(names):
        splits = load_splits(names[0])
        splits, labels, _ = prepare_splits(splits, train_split=None, eval_split=default_split(splits))
        rows = splits["eval"].shuffle(seed=1).select(range(min(NUM_SAMPLES, len(splits["eval"]))))
        items = [
            {"bytes": read_image_bytes(item, allowed_files(rows)), "path": item["path"]} for item in rows["image"]
        ]
        known = [[label] if isinstance(label, int) else label for label in rows["label"]]  # one, or several
        known = [", ".join(labels[index] for index in indices) or "no label" for indices in known]
        return [(label, open_image(item, channels)) for label, item in zip(known, items, strict=True)]
    return [(Path(name).name, open_file(name, channels)) for name in names]


def sketch(image: Image.Image, width: int = 28) -> list[str]:
    """An image as lines of text; a character is about twice as high as it is wide."""
    height = min(2 * width, max(1, round(width * image.height / image.width / 2)))
    gray = np.asarray(image.convert("L").resize((width, height))) / 256
    return ["".join(SHADES[int(value * len(SHADES))] for value in row) for row in gray]


def print_answer(image: Image.Image, known: str, probabilities: torch.Tensor, id2label: dict[int, str]):
    """A sketch of the image, with what is known of it and the three most likely classes beside it.

    Args:
        probabilities: (L,).
    """
    best = probabilities.topk(min(3, len(probabilities)))
    answers = [
        f"{printable(id2label[index])} {probability:.0%}"
        for probability, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]
    text = [f"this is:     {printable(known)}", f"it sees:     {answers[0]}"]
    text += [f"             {answer}" for answer in answers[1:]]
    lines = sketch(image)
    lines += [" " * len(lines[0])] * (TEXT_LINE + len(text) - len(lines))  # below a flat image
    for number, line in enumerate(lines):
        print(line, text[number - TEXT_LINE] if TEXT_LINE <= number < TEXT_LINE + len(text) else "")


def print_accuracy_of_run(folder: str):
    """The accuracy, or mean average precision, in the results.json of the run that `folder` belongs to, if it belongs to one."""
    file = Path(folder).parent / "results.json"
    if Path(folder).name == "model" and file.is_file():
        wanted = {"data": {"scored_images": int, "scored": str}, "metrics": {str: (int, float)}}
        results = run_files.read_json(file, wanted)
        name, value = headline(results["metrics"])
        images, scored = results["data"]["scored_images"], printable(describe_scored(results["data"]["scored"]))
        print(f"\nin its run: {name.replace('_', ' ')} on {scored} ({images:,}): {value:.2%}")


def main(args: argparse.Namespace):
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    folder = model_folder(args.model)
    processor = load_processor(folder)
    model = load_classifier(folder)
    images = open_images(args.images, getattr(model.config, "num_channels", 3))
    pixel_values = processor([image for _, image in images], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        logits = model(pixel_values).logits  # (B, L)
    probabilities = logits.softmax(dim=1) if thresholds_of(model.config) is None else logits.sigmoid()
    for (known, image), row in zip(images, probabilities, strict=True):
        print_answer(image, known, row, model.config.id2label)
    print_accuracy_of_run(folder)
    drawn = ["--dataset_name"] if is_data(args.images) else ["--images"]
    print(f"\nNext, what it looks at:\n  {shell_line(VISUALIZE, args.model, *drawn, *args.images)}")


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))

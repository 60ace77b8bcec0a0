"""Print what a saved model sees in images, or in a few images of a data set next to their true labels.

    python recipes/classify.py runs/demo/model recipes/data/bag.png
    python recipes/classify.py runs/photos photos/cat/*.jpg
    python recipes/classify.py google/vit-base-patch16-224 photo.jpg
    python recipes/classify.py runs/demo/model fashion-mnist-mini

A line an image, with the three most likely classes; nothing is written. predict.py writes a table of any number of images.
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
import torch
from PIL import Image
from transformers.utils import logging

from hf_vit.data.decoding import open_image
from hf_vit.data.image_files import allowed_files, read_file, read_image_bytes
from hf_vit.data.sources import load_splits
from hf_vit.data.splits import default_split, prepare_splits
from hf_vit.evaluation.classifiers import load_classifier, load_processor, model_folder
from hf_vit.evaluation.multi_label import thresholds_of
from hf_vit.system.command_line import shell_line
from hf_vit.system.errors import UserError, run_script
from hf_vit.system.escapes import printable
from hf_vit.system.recipes_folder import EMBEDDED


NUM_SAMPLES = 6  # images shown of a data set
BATCH = 32
VISUALIZE = Path(__file__).resolve().with_name("visualize.py")


def is_data(names: list[str]) -> bool:
    """Whether they name a data set, and not image files."""
    return len(names) == 1 and (names[0] in EMBEDDED or Path(names[0]).is_dir())


def sample_images(name: str, channels: int) -> list[tuple[str, Image.Image]]:
    """A few images of a data set, each with its true label or labels."""
    splits = load_splits(name)
    splits, labels, _ = prepare_splits(splits, train_split=None, eval_split=default_split(splits))
    rows = splits["eval"].shuffle(seed=1).select(range(min(NUM_SAMPLES, len(splits["eval"]))))
    images = [{"bytes": read_image_bytes(item, allowed_files(rows)), "path": item["path"]} for item in rows["image"]]
    known = [[label] if isinstance(label, int) else label for label in rows["label"]]  # one, or several
    known = [", ".join(labels[index] for index in indices) or "no label" for indices in known]
    return [(label, open_image(image, channels)) for label, image in zip(known, images, strict=True)]


def open_file(path: str, channels: int) -> tuple[str, Image.Image]:
    try:
        return Path(path).name, open_image({"bytes": read_file(path), "path": path}, channels)
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read as an image ({error})") from error


@torch.no_grad()
def main(args: argparse.Namespace):
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    folder = model_folder(args.model)
    processor, model = load_processor(folder), load_classifier(folder)
    channels = getattr(model.config, "num_channels", 3)
    of_data = is_data(args.images)
    images = sample_images(args.images[0], channels) if of_data else None
    for start in range(0, len(images or args.images), BATCH):
        some = images or [open_file(path, channels) for path in args.images[start : start + BATCH]]
        logits = model(processor([image for _, image in some], return_tensors="pt")["pixel_values"]).logits  # (B, L)
        several = thresholds_of(model.config) is not None
        best = (logits.sigmoid() if several else logits.softmax(dim=1)).topk(min(3, logits.shape[1]), dim=1)
        for (known, _), values, indices in zip(some, best.values.tolist(), best.indices.tolist(), strict=True):
            answers = [
                f"{model.config.id2label[index]} {value:.0%}" for value, index in zip(values, indices, strict=True)
            ]
            print(f"{printable(known)}{' (true)' * of_data}: {printable(', '.join(answers))}")
    drawn = ["--dataset_name"] if of_data else ["--images"]
    print(f"\nNext, what it looks at:\n  {shell_line(VISUALIZE, args.model, *drawn, *args.images)}")


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))

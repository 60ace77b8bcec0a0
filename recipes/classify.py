"""Load a saved model as any user would, and say what it sees.

python recipes/classify.py MODEL photo.jpg [more images ...]
python recipes/classify.py MODEL fashion-mnist-mini        (a few images of a data set, with the truth beside them)
"""

import sys
from pathlib import Path

import datasets
import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from transformers.utils import logging

import hf_vit  # noqa: F401, makes the Auto classes know the model
from hf_vit.data.decoding import open_image
from hf_vit.data.image_files import allowed_files, read_file, read_image_bytes
from hf_vit.data.sources import EMBEDDED, load_splits
from hf_vit.data.splits import prepare_splits
from hf_vit.evaluation.classifiers import load_classifier, load_processor, model_folder
from hf_vit.system import run_files
from hf_vit.system.escapes import printable, printable_lines
from hf_vit.system.hub_names import refuse_mistyped_path


SHADES = " .:-=+*#%@"


def read(path: str, channels: int) -> Image.Image:
    try:
        return open_image({"bytes": read_file(path), "path": path}, channels)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{path} cannot be read as an image ({error}); wanted image files, or one folder or data set alone"
        ) from error


def gather(arguments: list[str], channels: int, count: int = 6) -> list[tuple[str, Image.Image]]:
    """Images with what is known of them: a file name, or the true label in a data set."""
    if len(arguments) == 1 and (arguments[0] in EMBEDDED or Path(arguments[0]).is_dir()):
        splits = load_splits(arguments[0])
        shown = next((name for name in ("test", "validation", "val") if name in splits), next(iter(splits)))
        splits, labels, _ = prepare_splits(splits, train_split=None, eval_split=shown)
        chosen = splits["eval"].shuffle(seed=1).select(range(min(count, len(splits["eval"]))))
        items = [
            {"bytes": read_image_bytes(item, allowed_files(chosen)), "path": item["path"]} for item in chosen["image"]
        ]
        names = [labels[label] for label in chosen["label"]]
        return [(name, open_image(item, channels)) for name, item in zip(names, items, strict=True)]
    return [(Path(name).name, read(name, channels)) for name in arguments]


def sketch(image: Image.Image, width: int = 28) -> list[str]:
    """An image as lines of text; a character is about twice as high as it is wide."""
    height = min(2 * width, max(1, round(width * image.height / image.width / 2)))
    gray = np.asarray(image.convert("L").resize((width, height))) / 256
    return ["".join(SHADES[int(value * len(SHADES))] for value in row) for row in gray]


def main(folder: str, *arguments: str):
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    folder = refuse_mistyped_path(model_folder(folder), "MODEL")
    processor = load_processor(folder)
    model = load_classifier(folder)
    images = gather(list(arguments), getattr(model.config, "num_channels", 3))
    pixel_values = processor([image for _, image in images], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        probabilities = model(pixel_values).logits.softmax(1)  # (B, L)

    for (known, image), chances in zip(images, probabilities, strict=True):
        best = chances.topk(min(3, len(chances)))
        answers = [
            f"{printable(model.config.id2label[i])} {p:.0%}"
            for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
        beside = [
            f"this is:     {printable(known)}",
            f"it sees:     {answers[0]}",
            *(f"             {answer}" for answer in answers[1:]),
        ]
        lines = sketch(image)
        lines += [" " * len(lines[0])] * (4 + len(beside) - len(lines))  # below a flat picture
        for number, line in enumerate(lines):
            print(line, beside[number - 4] if 4 <= number < 4 + len(beside) else "")

    results = Path(folder).parent / "results.json"
    if Path(folder).name == "model" and results.is_file():
        wanted = {"data": {"scored_images": int, "scored": str}, "metrics": {"accuracy": (int, float)}}
        metrics = run_files.read_json(results, wanted)
        print(
            f"\nin its run: accuracy on {metrics['data']['scored_images']} images ({printable(metrics['data']['scored'])}): {metrics['metrics']['accuracy']:.2%}"
        )
    python = Path(sys.executable)
    python = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    print(f"""
Next:
  {python} recipes/classify.py {folder} YOUR_PHOTO.jpg
  {python} recipes/train.py --dataset_name YOUR_FOLDER --preset tiny-patch16-224 --output_dir runs/mine
  {python} recipes/evaluate.py --model_name_or_path {folder} --dataset_name OTHER_IMAGES_OF_THESE_CLASSES
  {python} recipes/publish.py RUN --repo USER/NAME""")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (ValueError, OSError, StrictDataclassError) as error:  # one sentence; a traceback would hide it
        sys.exit(f"error: {printable_lines(error)}")

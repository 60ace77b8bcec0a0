"""A page in the browser that classifies an image and shows which patches the predicted class rests on.

    python recipes/app.py runs/demo
    python recipes/app.py USER/NAME --port 8000

It listens on http://127.0.0.1:7860 and needs no network. `recipes/publish.py RUN --repo USER/NAME --space` makes a Space of
this file, which then shows the model that the README.md of the Space names.
"""

import argparse
import os
import sys
import tempfile
import threading
from pathlib import Path

from command_line import Parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, "MODEL [--port PORT]")
    parser.add_argument("model", nargs="?", metavar="MODEL", help="run, model folder or Hub id")
    parser.add_argument("--port", type=int, help="default: 7860, or the next that is free")
    args = parser.parse_args(argv)
    readme = Path(__file__).resolve().with_name("README.md")
    if args.model is None and readme.is_file():  # of a Space
        from huggingface_hub import ModelCard  # after the flags

        args.model = ModelCard.load(readme).data.get("models", [None])[0]
    if args.model is None:
        parser.error("MODEL is needed: a run, a model folder or a Hub id")
    parser.refuse_mistyped_paths(MODEL=args.model)
    return args


if __name__ == "__main__":  # a wrong flag is answered before the imports, which take seconds
    ARGUMENTS = parse_args()

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

try:
    import gradio
except ImportError:
    sys.exit("error: the page needs Gradio: pip install 'hf_vit[app]'")
import torch
from transformers.utils import logging

from hf_vit import HFViTForImageClassification, figures
from hf_vit.data.decoding import decode_image, stack_images
from hf_vit.data.image_files import read_file
from hf_vit.data.image_spec import image_spec_of
from hf_vit.data.normalization import denormalize, normalize
from hf_vit.evaluation.classifiers import load_processor, model_folder
from hf_vit.evaluation.multi_label import thresholds_of
from hf_vit.hub.finished_run import write_examples
from hf_vit.system.errors import UserError, as_user_errors, run_script
from hf_vit.system.escapes import inline, printable
from hf_vit.system.hub_names import name_of_path
from hf_vit.system.run_files import SAMPLES


METHODS = {title: method for method, title in figures.METHODS.items()}
DEFAULT = figures.METHODS["gradient_rollout"]
INTRODUCTION = """## What {name} sees
Drop an image, or take one of the examples. The bars are the probabilities of the likeliest classes; the map shows which patches of the
image count."""
COLOURS = (
    "The more orange a patch, the more it counts; each map has its own scale. Maps for the predicted class say what speaks for it, "
    "the others what the model attends to, whatever it predicts."
)
FLAT = "**This map is flat**: all patches count alike, so nothing is orange."
MAX_UPLOAD = "50mb"  # more than a photo takes; without a limit a visitor could fill the disk


class Viewer:
    """A model that answers to images."""

    def __init__(self, source: str):
        folder = model_folder(source)
        self.name = name_of_path(folder) if Path(folder).exists() else folder
        with as_user_errors():
            self.model = HFViTForImageClassification.from_pretrained(folder).eval()
        self.config, self.lock = self.model.config, threading.Lock()
        if self.config.num_channels not in (1, 3):
            raise UserError(f"{source} takes {self.config.num_channels} channels; the page shows images of 1 or 3")
        self.spec = image_spec_of(load_processor(folder), self.config)

    def look(self, file: str | None, title: str):
        """{class: probability}, the image under its attention map, uint8 (H, W, 3), and what to know of the map; empty, None and a
        sentence without an image."""
        if file is None:
            return {}, None, COLOURS
        try:
            pixels = stack_images([decode_image({"bytes": read_file(file), "path": file}, self.spec)])
        except Exception as error:  # a file may hold anything
            return {}, None, f"**This file cannot be read as an image:** {inline(error)}"
        pixel_values = normalize(pixels, self.spec)  # (1, C, H, W)
        with self.lock:  # the hooks that record attention would also see another visitor's image
            heat = self.model.attention_maps(pixel_values, -1, METHODS[title])[0]  # (h, w)
            with torch.no_grad():
                logits = self.model(pixel_values).logits[0]
        probabilities = logits.softmax(dim=0) if thresholds_of(self.config) is None else logits.sigmoid()
        classes = {printable(self.config.id2label[index]): value for index, value in enumerate(probabilities.tolist())}
        seen = figures.overlay(denormalize(pixel_values, self.spec)[0], heat, smallest=384)
        return classes, seen, FLAT if figures.is_flat(heat) else COLOURS


def example_files(source: str, folder: Path) -> list[str]:
    """Images that the model was evaluated on: those in `examples/` of a Space, else samples of its run, written to `folder`."""
    files = sorted(Path(__file__).resolve().parent.glob("examples/*.png"))
    run = Path(model_folder(source)).parent
    if not files and (run / SAMPLES).is_file():
        files = write_examples(run, folder)
    return list(map(str, files))


def build_page(viewer: Viewer, examples: list[str]) -> gradio.Blocks:
    first = examples[0] if examples else None
    classes, seen, about = viewer.look(first, DEFAULT)
    with gradio.Blocks(title=f"What {viewer.name} sees", delete_cache=(3600, 3600)) as blocks:
        gradio.Markdown(INTRODUCTION.format(name=inline(viewer.name)))
        with gradio.Row():
            with gradio.Column():
                sources = ["upload", "clipboard"]
                photo = gradio.Image(
                    first, type="filepath", image_mode=None, height=320, label="image", sources=sources
                )
                # The file, unopened: Gradio itself would open any format, and URLs that hold data.
                photo.preprocess = lambda payload: None if payload is None else payload.path
                if examples:
                    gradio.Examples(examples, photo, label="images that the model was evaluated on")
            with gradio.Column():
                label = gradio.Label(classes, num_top_classes=5, label="predicted class, and the likeliest classes")
                buttons = ["fullscreen", "download"]
                picture = gradio.Image(
                    seen, label="what counts for it", interactive=False, format="png", buttons=buttons
                )
                words = gradio.Markdown(about)
                title = gradio.Dropdown(list(METHODS), value=DEFAULT, label="method")
                gradio.Markdown(f"Attention maps are those of {viewer.model.attention_query}.")
        for changed in (photo, title):
            changed.change(viewer.look, [photo, title], [label, picture, words], show_progress="minimal")
    return blocks


def main(args: argparse.Namespace):
    logging.disable_progress_bar()
    viewer = Viewer(args.model)
    with tempfile.TemporaryDirectory(prefix="hf_vit-") as folder:
        page = build_page(viewer, example_files(args.model, Path(folder)))
        page.launch(
            server_port=args.port, allowed_paths=[folder], show_error=True, footer_links=[], max_file_size=MAX_UPLOAD
        )


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))

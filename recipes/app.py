"""A web demo that classifies an image and shows attention maps of the predicted class.

    python recipes/app.py runs/demo
    python recipes/app.py USER/NAME --port 8000

It listens on http://127.0.0.1:7860; a model on this disk needs no network. `recipes/publish.py RUN
--repo USER/NAME --space --push` publishes this file as a Space for the model that its README.md
names.
"""

import argparse
import os
import sys
import tempfile
import threading
from pathlib import Path

from command_line import Parser


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__, "MODEL [--port PORT]")
    parser.add_argument("model", nargs="?", metavar="MODEL", help="run, model folder or Hub id")
    parser.add_argument("--port", type=int, help="port of the page; default: 7860, or the next free one")
    args = parser.parse_args()
    readme = Path(__file__).resolve().with_name("README.md")
    if args.model is None and readme.is_file():  # of a Space
        from huggingface_hub import ModelCard  # after the flags

        args.model = ModelCard.load(readme).data.get("models", [None])[0]
    if args.model is None:
        parser.error("MODEL is needed: a run, a model folder or a Hub id")
    return args


if __name__ == "__main__":  # a wrong flag is answered before the imports, which take seconds
    ARGUMENTS = parse_args()

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

try:
    import gradio
except ImportError:
    sys.exit("error: the page needs Gradio: pip install 'hf_vit[app]'")
import torch

from hf_vit import figures
from hf_vit.data.decoding import decode_image, stack_images
from hf_vit.data.normalization import denormalize, normalize
from hf_vit.evaluation.classifiers import SavedClassifier
from hf_vit.hub.finished_run import write_examples
from hf_vit.system.errors import UserError, run_script
from hf_vit.system.hub_names import name_of_path
from hf_vit.system.run_files import SAMPLES
from hf_vit.system.text import inline, printable
from hf_vit.training.setup import set_up_evaluation


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
        self.classifier, self.lock = SavedClassifier(source, set_up_evaluation("no"), ours=True), threading.Lock()
        self.name = name_of_path(folder) if Path(folder := self.classifier.folder).exists() else folder
        if (channels := self.classifier.spec.channels) not in (1, 3):
            raise UserError(f"{source} takes {channels} channels; the page shows images of 1 or 3")

    def look(self, file: str | None, title: str):
        """{class: probability}, the image under its attention map, uint8 (H, W, 3), and what to know of the map; empty, None and a
        sentence without an image."""
        if file is None:
            return {}, None, COLOURS
        classifier, spec, model = self.classifier, self.classifier.spec, self.classifier.model
        try:
            pixels = stack_images([decode_image({"bytes": Path(file).read_bytes(), "path": file}, spec)])
        except Exception as error:  # a file may hold anything
            return {}, None, f"**This file cannot be read as an image:** {inline(error)}"
        pixel_values = torch.as_tensor(normalize(pixels, spec)).to(model.device)  # (1, C, H, W)
        with self.lock:  # the hooks that record attention would also see another visitor's image
            heat = model.attention_maps(pixel_values, -1, METHODS[title])[0].cpu()  # (h, w)
            with torch.no_grad():
                logits = model(pixel_values).logits
        (values,) = classifier.probabilities(logits.cpu()).tolist()
        classes = dict(zip(map(printable, classifier.names), values, strict=True))
        seen = figures.overlay(denormalize(pixel_values, spec)[0].cpu(), heat, smallest=384)
        return classes, seen, FLAT if figures.is_flat(heat) else COLOURS


def example_files(run: Path, folder: Path) -> list[str]:
    """Images that the model was evaluated on: those in `examples/` of a Space, else samples of its run, written to `folder`."""
    files = sorted(Path(__file__).resolve().parent.glob("examples/*.png"))
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
                gradio.Markdown(f"The maps show the attention of {viewer.classifier.model.attention_query}.")
        for changed in (photo, title):
            changed.change(viewer.look, [photo, title], [label, picture, words], show_progress="minimal")
    return blocks


def main(args: argparse.Namespace):
    viewer = Viewer(args.model)
    with tempfile.TemporaryDirectory(prefix="hf_vit-") as folder:
        page = build_page(viewer, example_files(Path(viewer.classifier.folder).parent, Path(folder)))
        page.launch(
            server_port=args.port, allowed_paths=[folder], show_error=True, footer_links=[], max_file_size=MAX_UPLOAD
        )


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))

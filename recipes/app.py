"""A page in the browser that classifies an image and shows which patches the predicted class rests on.

    python recipes/app.py runs/demo
    python recipes/app.py runs/photos google/vit-base-patch16-224      (two models side by side)
    python recipes/app.py USER/NAME --port 8000

It listens on http://127.0.0.1:7860 and needs no network. `recipes/publish.py RUN --repo USER/NAME --space` makes a Space of
this file, which then shows the models that the README.md of the Space names.
"""

import argparse
import os
import sys
import tempfile
import threading
from pathlib import Path

from command_line import Parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, "MODEL [MODEL] [--port PORT]")
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="run, model folder or Hub id: one, or two to compare"
    )
    parser.add_argument("--port", type=int, help="by default 7860, or the next that is free")
    args = parser.parse_args(argv)
    args.models = args.models or models_of_space()
    if not 1 <= len(args.models) <= 2:
        parser.error(f"{len(args.models)} models were given; wanted one, or two to compare")
    for model in args.models:
        parser.refuse_mistyped_paths(MODEL=model)
    return args


def models_of_space() -> list[str]:
    """The models that the README.md beside this file lists under `models:`."""
    readme = Path(__file__).resolve().with_name("README.md")
    if not readme.is_file():
        return []
    from huggingface_hub import ModelCard  # after the flags

    return ModelCard.load(readme).data.get("models") or []


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
from hf_vit.evaluation.multi_label import MULTI_LABEL
from hf_vit.hub.finished_run import write_examples
from hf_vit.system.errors import UserError, as_user_errors, run_script
from hf_vit.system.escapes import inline, printable
from hf_vit.system.hub_names import name_of_path
from hf_vit.system.run_files import SAMPLES


HERE = Path(__file__).resolve().parent
ONE_HEAD = "attention of a head"
METHODS = {ONE_HEAD: "raw", "attention, mean of the heads": "mean"} | {
    title: method for method, title in figures.METHODS.items() if method != "mean"
}
DEFAULT = figures.METHODS["gradient_rollout"]
INTRODUCTION = """## What a Vision Transformer sees
Drop an image, or take one of the examples. Below the name of the model is the class that it predicts for the image; the bars are the
probabilities of the likeliest classes. The map below them shows which patches of the image count for that."""
COLOURS = (
    "The more orange a patch, the more it counts; each map has its own scale. Maps for the predicted class say what speaks for it, "
    "the others what the model attends to, whatever it predicts."
)
FLAT = "**This map is flat**: all patches count alike, so nothing is orange."
MAX_UPLOAD = "50mb"  # more than a photo takes; without a limit a visitor could fill the disk


def uploaded(payload) -> str | None:
    """The file of an image component, unopened: Gradio itself would open any format, and URLs that hold data."""
    return None if payload is None else payload.path


def choose_number(count: int, value: int, **options):
    """A slider from 1 to `count`; a fixed number if that is 1, because Gradio has no slider of one value."""
    if count == 1:
        return gradio.Number(1, interactive=False, **options)
    slider = gradio.Slider(1, count, value=value, step=1, **options)
    # The number field is empty or out of range while somebody types.
    slider.preprocess = lambda number: min(max(1, number or value), count)
    return slider


class Viewer:
    """One model and its column of the page."""

    def __init__(self, source: str):
        self.source, source = source, model_folder(source)
        self.name = name_of_path(source) if Path(source).exists() else source
        with as_user_errors():
            self.model = HFViTForImageClassification.from_pretrained(source).eval()
        self.config, self.lock = self.model.config, threading.Lock()
        if self.config.num_channels not in (1, 3):
            raise UserError(f"{source} takes {self.config.num_channels} channels; the page shows images of 1 or 3")
        self.image_spec = image_spec_of(load_processor(source), self.config)

    def look(self, file: str | None, layer: int, head: int, title: str):
        """{class: probability}, the image under its attention map, uint8 (H, W, 3), and what to know of the map; None, None
        and the same without an image."""
        if file is None:
            return None, None, COLOURS
        try:
            pixels = stack_images([decode_image({"bytes": read_file(file), "path": file}, self.image_spec)])
        except Exception as error:  # a file may hold anything
            return None, None, f"**This file cannot be read as an image:** {inline(error)}"
        pixel_values = normalize(pixels, self.image_spec)  # (1, C, H, W)
        with self.lock, torch.no_grad():
            logits = self.model(pixel_values).logits[0]
        several = self.config.problem_type == MULTI_LABEL  # labels an image
        probabilities = (logits.sigmoid() if several else logits.softmax(dim=0)).tolist()
        classes = {printable(self.config.id2label[index]): value for index, value in enumerate(probabilities)}
        with self.lock:  # the hooks that record attention would also see another visitor's image
            maps = self.model.attention_maps(pixel_values, int(layer) - 1, METHODS[title])[0]  # (h, w), or (A, h, w)
        heat = maps[int(head) - 1] if title == ONE_HEAD else maps
        seen = figures.overlay(denormalize(pixel_values, self.image_spec)[0], heat, smallest=384)
        return classes, seen, FLAT if figures.is_flat(heat) else COLOURS

    def column(self, photo, example: str | None):
        """This model's column of the page, with its answer to the example; redrawn when the image or a choice changes."""
        layers, heads = self.config.num_hidden_layers, self.config.num_attention_heads
        classes, seen, about = self.look(example, layers, 1, DEFAULT)
        gradio.Markdown(f"### {inline(self.name)}")
        label = gradio.Label(classes, num_top_classes=5, label="predicted class, and the likeliest classes")
        picture = gradio.Image(
            seen, label="what counts for it", interactive=False, format="png", buttons=["fullscreen", "download"]
        )
        words = gradio.Markdown(about)
        title = gradio.Dropdown(list(METHODS), value=DEFAULT, label="method")
        layer = choose_number(layers, layers, label="layer (with rollouts, all up to it)")
        head = choose_number(heads, 1, label="head", visible=False)
        gradio.Markdown(f"Attention maps are those of {self.model.attention_query}.")
        title.change(lambda title: gradio.update(visible=title == ONE_HEAD), title, head, show_progress="hidden")
        for changed in (photo, title, layer, head):
            changed.change(self.look, [photo, layer, head, title], [label, picture, words], show_progress="minimal")


def example_files(source: str, folder: Path) -> list[str]:
    """Images that the model was evaluated on: those in `examples/` of a Space, else samples of its run, written to `folder`."""
    files = sorted(map(str, (HERE / "examples").glob("*.png")))
    run = Path(model_folder(source)).parent
    if not files and (run / SAMPLES).is_file():
        files = [str(file) for file in write_examples(run, folder)]
    return files


def build_page(viewers: list[Viewer], examples: list[str]) -> gradio.Blocks:
    names = " and ".join(viewer.name for viewer in viewers)
    with gradio.Blocks(title=f"What {names} sees", delete_cache=(3600, 3600)) as blocks:
        gradio.Markdown(INTRODUCTION)
        with gradio.Row():
            with gradio.Column():
                first = examples[0] if examples else None
                photo = gradio.Image(
                    first, type="filepath", image_mode=None, height=320, label="image", sources=["upload", "clipboard"]
                )
                photo.preprocess = uploaded
                if examples:
                    gradio.Examples(examples, photo, label="images that the model was evaluated on")
            for viewer in viewers:
                with gradio.Column():
                    viewer.column(photo, first)
    return blocks


def main(args: argparse.Namespace):
    logging.disable_progress_bar()
    viewers = [Viewer(source) for source in args.models]
    with tempfile.TemporaryDirectory(prefix="hf_vit-") as folder:
        page = build_page(viewers, example_files(viewers[0].source, Path(folder)))
        page.launch(
            server_port=args.port, allowed_paths=[folder], show_error=True, footer_links=[], max_file_size=MAX_UPLOAD
        )


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))

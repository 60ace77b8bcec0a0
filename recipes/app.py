"""A page in the browser: give it an image, see what the model says and which patches count for it.

python recipes/app.py MODEL [OTHER_MODEL]      (a run, a model folder or a repository; two are shown beside each other)

It listens on http://127.0.0.1:7860 and needs no network. This file is also the app.py of a Space, which
`recipes/publish.py RUN --repo USER/NAME --space` makes: there, the models are those that its README.md names.
"""

import argparse
import os
import sys
import tempfile
import threading
from pathlib import Path


HERE = Path(__file__).resolve().parent
if (HERE / "evaluate.py").exists():  # which would hide the library of that name; a Space has none
    sys.path = [path for path in sys.path if Path(path).resolve() != HERE]
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

try:
    import gradio
except ImportError:
    sys.exit("error: the page needs Gradio: pip install 'hf_vit[app]'")
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import StrictDataclassError
from transformers.utils import logging

from hf_vit import HFViTForImageClassification, figures
from hf_vit.data.decoding import decode_image, stack_images
from hf_vit.data.image_files import open_pillow, read_file
from hf_vit.data.image_spec import image_spec_of
from hf_vit.data.normalization import denormalize, normalize
from hf_vit.evaluation.classifiers import load_processor, model_folder
from hf_vit.hub.retry import summarize_error
from hf_vit.hub.run_results import write_examples
from hf_vit.system.escapes import inline, printable
from hf_vit.system.hub_names import refuse_mistyped_path
from hf_vit.system.run_files import SAMPLES


METHODS = {"attention of a head": "raw", "attention, mean of the heads": "mean"} | {
    title: method for method, title in figures.METHODS.items() if method != "mean"
}
LARGEST_UPLOAD = "50mb"  # more than a photo takes; without a limit a visitor fills the disk
ALONE = ("attention of a head",)  # for which a head is chosen


def no_image(error: Exception) -> gradio.Error:
    """The sentence that the page shows for a file that could not be read."""
    why, wanted = str(error).rstrip("."), "Wanted a whole JPEG, PNG, WebP or the like."
    return gradio.Error(f"This file cannot be read as an image: {why}. {wanted}", print_exception=False)


def uploaded(payload) -> str | None:
    """The file of an image component, where it is an image. Gradio's own way would open any format, and addresses with data."""
    if payload is None:
        return None
    try:
        with open_pillow(read_file(payload.path)):
            return payload.path
    except Exception as error:  # a payload may hold anything
        raise no_image(error) from error


def one_of(count: int, value: int, **options):
    """A slider from 1 to `count`, which Gradio has for 2 and more only."""
    if count == 1:
        return gradio.Number(1, interactive=False, **options)
    slider = gradio.Slider(1, count, value=value, step=1, **options)
    # Its field is empty, or out of range, while somebody types.
    slider.preprocess = lambda number: min(max(1, number or value), count)
    return slider


class Viewer:
    """One model, and what the page shows of it."""

    def __init__(self, source: str):
        self.name, source = source, refuse_mistyped_path(model_folder(source), "MODEL")
        self.model = HFViTForImageClassification.from_pretrained(source).eval()
        self.config, self.lock = self.model.config, threading.Lock()
        if self.config.num_channels not in (1, 3):
            raise ValueError(f"{source} takes {self.config.num_channels} channels; the page shows images of 1 or 3")
        self.form = image_spec_of(load_processor(source), self.config)

    def look(self, file: str | None, layer: int, head: int, title: str):
        """The best classes with their probabilities, and the image under a map; nothing where there is no image."""
        if file is None:
            return None, None
        try:
            pixels = stack_images([decode_image({"bytes": read_file(file), "path": file}, self.form)])  # (1, C, H, W)
        except Exception as error:
            raise no_image(error) from error
        pixel_values = normalize(pixels, self.form)
        with self.lock, torch.no_grad():
            chances = self.model(pixel_values).logits.softmax(dim=1)[0]
        classes = {printable(self.config.id2label[index]): chance for index, chance in enumerate(chances.tolist())}
        with self.lock:  # its hooks would hear the pass of another visitor
            maps = self.model.attention_maps(pixel_values, int(layer) - 1, METHODS[title])[0]  # (h, w), or (A, h, w)
        heat = maps[int(head) - 1] if title in ALONE else maps
        return classes, figures.overlay(denormalize(pixel_values, self.form)[0], heat, smallest=384)

    def column(self, photo):
        """This model's part of the page, which changes with the image and with what is chosen."""
        layers, heads = self.config.num_hidden_layers, self.config.num_attention_heads
        gradio.Markdown(f"### {inline(self.name)}")
        label = gradio.Label(num_top_classes=5, label="what it says")
        gradio.Markdown("What counts for it, the more orange the more:")
        seen = gradio.Image(
            show_label=False,
            interactive=False,
            format="png",
            buttons=["fullscreen", "download"],
        )
        title = gradio.Dropdown(list(METHODS), value="rollout, for the answer", label="method")
        layer = one_of(layers, layers, label="layer (with rollouts, all up to it)")
        head = one_of(heads, 1, label="head", visible=False)
        gradio.Markdown(f"Attention maps are those of {self.model.attention_query}.")
        title.change(lambda title: gradio.update(visible=title in ALONE), title, head, show_progress="hidden")
        for changed in (photo, title, layer, head):
            changed.change(self.look, [photo, layer, head, title], [label, seen], show_progress="minimal")


def examples(source: str, folder: Path) -> list[str]:
    """Files of images that the model's run scored: those in `examples/` of a Space, else those that its run kept."""
    there = sorted(map(str, (HERE / "examples").glob("*.png")))
    kept = Path(model_folder(source)).parent / SAMPLES
    if not there and kept.is_file():
        there = [str(file) for file in write_examples(kept, folder)]
    return there


def page(viewers: list[Viewer], shown: list[str]) -> gradio.Blocks:
    with gradio.Blocks(title="What a Vision Transformer sees", delete_cache=(3600, 3600)) as blocks:
        gradio.Markdown("## What a Vision Transformer sees\nDrop an image, or take one of the examples.")
        with gradio.Row():
            with gradio.Column():
                photo = gradio.Image(
                    type="filepath", image_mode=None, height=320, label="image", sources=["upload", "clipboard"]
                )
                photo.preprocess = uploaded
                if shown:
                    gradio.Examples(shown, photo, label="images that the model was scored on")
            for viewer in viewers:
                with gradio.Column():
                    viewer.column(photo)
    return blocks


def models_of_space() -> list[str]:
    """What the README.md beside this file names under `models:`."""
    readme = HERE / "README.md"
    return (ModelCard.load(readme).data.get("models") if readme.is_file() else None) or []


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="run, model folder or Hub id; one, or two to compare"
    )
    parser.add_argument("--port", type=int, help="7860 or the next that is free, if not given")
    args = parser.parse_args()
    sources = args.models or models_of_space()
    if not 1 <= len(sources) <= 2:
        parser.error(f"{len(sources)} models were given; wanted one, or two to compare")
    logging.disable_progress_bar()
    viewers = [Viewer(source) for source in sources]
    with tempfile.TemporaryDirectory(prefix="hf_vit-") as folder:
        blocks = page(viewers, examples(viewers[0].name, Path(folder)))
        blocks.launch(
            server_port=args.port,
            allowed_paths=[folder],
            show_error=True,
            footer_links=[],
            max_file_size=LARGEST_UPLOAD,
        )


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, StrictDataclassError) as error:  # one sentence; a traceback would hide it
        sys.exit(f"error: {printable(summarize_error(error))}")

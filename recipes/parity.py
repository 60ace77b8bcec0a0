"""Measure how far our models are from the ones whose weights they load, format by format.

    python recipes/parity.py
    python recipes/parity.py --output_file parity.json

It takes ViT-Ti's width and depth, and some minutes. model_cards/parity.json, which it writes, is
what recipes/benchmarks/tables.py shows. Each case builds a reference model of transformers with
random weights in every tensor, writes it as its family writes it, loads the file with hf_vit,
compares the outputs, exports it with `to_transformers()` and compares again.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

from command_line import Parser


HOUSE = Path(__file__).resolve().parents[1]


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__, "[--output_file FILE]")
    file = HOUSE / "model_cards" / "parity.json"
    parser.add_argument("--output_file", type=Path, default=file, help="JSON file for the differences")
    args = parser.parse_args()
    parser.check_output_files(args.output_file)
    return args


if __name__ == "__main__":  # a wrong flag is answered before the imports, which take seconds
    ARGUMENTS = parse_args()

import torch
import transformers
from torch.nn import functional


sys.path.insert(0, str(HOUSE / "tests"))

from checkpoint_writers import CASES, Case

from hf_vit import HFViTForImageClassification, HFViTModel
from hf_vit.system.errors import run_script


SIZE = dict(
    hidden_size=192, num_attention_heads=3, num_hidden_layers=12, intermediate_size=768, image_size=64, patch_size=16
)


@torch.no_grad()
def randomize(model):
    """Give every parameter, zero tokens and unit norms included, random values; in eval mode."""
    for name, parameter in model.named_parameters():
        if parameter.ndim <= 1:
            parameter.normal_(float("norm" in name and name.endswith("weight")), 0.1)
        else:  # tokens and positions have one row; the rest are matrices, scaled to their inputs
            parameter.normal_(0, 0.5 if len(parameter) == 1 else parameter[0].numel() ** -0.5)
    return model.eval()


def build(model: str, **fields):
    """A native model with random weights."""
    model_class = getattr(transformers, model)
    config_class = model_class.config_class
    if not config_class.sub_configs or "VisionModel" in model:
        return randomize(model_class(config_class(num_labels=10, **fields)))
    text = dict(num_hidden_layers=1, num_attention_heads=2, hidden_size=fields["hidden_size"], intermediate_size=64)
    return randomize(model_class(config_class(vision_config=fields, text_config=text, num_labels=10)))


def outputs(model, images, **arguments) -> dict[str, torch.Tensor]:
    """Those of tokens, pooled vector and logits that a model has."""
    if hasattr(model, "text_model"):
        model = model.vision_model
    if "ForPreTraining" in type(model).__name__:
        model = model.vit
    if "MAE" in type(model).__name__:  # it shuffles the patches by this noise, even where it masks none
        num_patches = images[0, 0].numel() // model.config.patch_size**2
        arguments["noise"] = torch.arange(num_patches).float().expand(len(images), -1)
    found = model(images, **arguments)
    names = ("last_hidden_state", "pooler_output", "logits")
    return {name: found[name] for name in names if found.get(name) is not None}


def interpolate_as(offset=None, interpolate=functional.interpolate, **arguments):
    """torch's `interpolate` with these arguments, or with `offset` by the factor of DINO."""

    def resample(positions, size, **native):
        if offset is None:
            return interpolate(positions, size, **native | arguments)
        return interpolate(positions, scale_factor=(size[0] + offset) / positions.shape[-1], **native)

    return patch.object(functional, "interpolate", resample)


def difference(found: dict, wanted: dict) -> float:
    """The largest difference of any output, relative to the largest value of that output."""
    shared = set(found) & set(wanted)
    assert shared, (set(found), set(wanted))
    return max(((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()).item() for name in shared)


@torch.no_grad()
def measure(case: Case, size: dict, folder: Path) -> dict:
    """A row of the table: the largest difference when loaded, under both attention backends, at another size, and when exported."""
    torch.manual_seed(0)
    reference, side = build(case.model, **size | case.config), size["image_size"]
    model_class = HFViTForImageClassification if "Classification" in case.model else HFViTModel
    file = case.write(reference, folder)
    read = model_class.from_pretrained if file.is_dir() else model_class.from_checkpoint
    models = [read(file, attn_implementation=backend, **case.load) for backend in ("eager", "sdpa")]
    native = models[0].to_transformers()
    images, larger = (torch.randn(2, 3, pixels, pixels) for pixels in (side, side * 3 // 2))
    wanted = outputs(reference, images)
    with interpolate_as(**case.resample):
        resized = outputs(reference, larger, interpolate_pos_encoding=True)
    return {
        "family": case.family or f"transformers {reference.config.model_type}",
        "reference": case.model,
        "loaded": max(difference(outputs(model, images), wanted) for model in models),
        "resized": difference(outputs(models[0], larger, interpolate_pos_encoding=True), resized),
        "native": type(native).__name__,
        "given_back": difference(outputs(native, images), wanted),
    }


def main(args: argparse.Namespace):
    transformers.logging.disable_progress_bar()
    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(case, SIZE, Path(folder)))
        print(json.dumps(rows[-1]), flush=True)
    args.output_file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))

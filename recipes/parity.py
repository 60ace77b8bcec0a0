"""Measure how far our models are from the ones whose weights they load, format by format.

    python recipes/parity.py
    python recipes/parity.py --output_file parity.json

It takes ViT-B sizes, and several minutes. model_cards/parity.json, which it writes, is what recipes/benchmarks/tables.py shows.
Each case builds a reference model of transformers with random weights in every tensor, writes it as its family writes it, loads
the file with hf_vit, compares the outputs, exports it with `to_transformers()` and compares again.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from command_line import Parser


HOUSE = Path(__file__).resolve().parents[1]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, "[--output_file FILE]")
    file = HOUSE / "model_cards" / "parity.json"
    parser.add_argument("--output_file", type=Path, default=file, help="JSON file for the differences")
    args = parser.parse_args(argv)
    parser.check_output_file(args.output_file)
    return args


if __name__ == "__main__":  # a wrong flag is answered before the imports, which take seconds
    ARGUMENTS = parse_args()

import torch
import transformers


sys.path.insert(0, str(HOUSE / "tests"))

from checkpoint_writers import (
    deit3_file,
    deit_file,
    dino_file,
    dinov2_file,
    jax_file,
    mae_file,
    timm_file,
    timm_repo,
    to_eva,
    to_siglip_timm,
    to_timm,
    torchvision_file,
)

from hf_vit import HFViTForImageClassification, HFViTModel
from hf_vit.system.errors import run_script


SMALL = dict(hidden_size=192, num_attention_heads=3, num_hidden_layers=12, intermediate_size=768, image_size=64)


@dataclass
class Case:
    """A reference and how its family stores it.

    Args:
        family: for the table.
        model: name of the reference class in transformers.
        config: what its config gets beside the size.
        write: None for a folder by save_pretrained, or (reference, folder) -> the file that was written.
        load: arguments of our loading, for what the file does not say.
        back: name of the class that `to_transformers` gives; that of the reference if not given.
        prepare: changes the reference first, where the format cannot hold all that its class can.
    """

    family: str
    model: str
    config: dict = field(default_factory=dict)
    write: Callable | None = None
    load: dict = field(default_factory=dict)
    back: str | None = None
    prepare: Callable | None = None

    def __post_init__(self):
        self.back = self.back or self.model


def zero_class_position(reference):
    reference.base_model.embeddings.position_embeddings[:, 0] = 0


def without_pooler(reference):
    reference.pooler = None


def no_masking(reference):
    reference.config.mask_ratio = 0.0


EPS = dict(layer_norm_eps=1e-6)
IMAGES_14 = dict(patch_size=14, image_size=224)
REGISTERS = dict(num_register_tokens=4)
GATED = dict(use_gated_mlp=True, hidden_act="silu")
CLASSIFIER, BY_CLASS_TOKEN = "ViTForImageClassification", dict(pooling="cls")
DINOV3_REPO = timm_repo(to_eva, architecture="vit_small_patch16_dinov3_qkvb", global_pool="token")
CASES = [
    Case("transformers vit", "ViTModel"),
    Case("transformers vit", CLASSIFIER),
    Case("transformers deit", "DeiTModel"),
    Case("transformers deit", "DeiTForImageClassification"),
    Case("transformers deit", "DeiTForImageClassificationWithTeacher"),
    Case("transformers vit_mae", "ViTMAEModel", back="ViTModel", prepare=no_masking),
    Case("transformers vit_mae", "ViTMAEForPreTraining", back="ViTModel", prepare=no_masking),
    Case("transformers vit_msn", "ViTMSNModel", back="ViTModel"),
    Case("transformers vit_msn", "ViTMSNForImageClassification", back=CLASSIFIER),
    Case("transformers dinov2", "Dinov2Model", IMAGES_14),
    Case("transformers dinov2", "Dinov2Model", IMAGES_14 | dict(use_swiglu_ffn=True)),
    Case("transformers dinov2", "Dinov2ForImageClassification", IMAGES_14),
    Case("transformers dinov2_with_registers", "Dinov2WithRegistersModel", IMAGES_14),
    Case("transformers dinov2_with_registers", "Dinov2WithRegistersForImageClassification", IMAGES_14),
    Case("transformers dinov3_vit", "DINOv3ViTModel", REGISTERS),
    Case("transformers dinov3_vit", "DINOv3ViTModel", REGISTERS | GATED),
    Case("transformers clip", "CLIPModel", back="CLIPVisionModel"),
    Case("transformers clip_vision_model", "CLIPVisionModel"),
    Case("transformers clip", "CLIPForImageClassification"),
    Case("transformers siglip", "SiglipModel", back="SiglipVisionModel"),
    Case("transformers siglip_vision_model", "SiglipVisionModel"),
    # IJepaForImageClassification is the same network as SigLIP's classifier.
    Case("transformers siglip", "SiglipForImageClassification", back="IJepaForImageClassification"),
    Case("transformers ijepa", "IJepaModel"),
    Case("transformers ijepa", "IJepaForImageClassification"),
    Case("timm repo, augreg", CLASSIFIER, EPS, timm_repo(to_timm, global_pool="token")),
    Case("timm file, augreg", CLASSIFIER, EPS, timm_file),
    Case("timm file, no class token", "IJepaForImageClassification", EPS, timm_file),
    Case("timm file, registers", "Dinov2WithRegistersModel", IMAGES_14, timm_file),
    Case("timm file, DeiT III", "Dinov2Model", IMAGES_14, deit3_file, prepare=zero_class_position),
    Case(
        "timm file, CLIP",
        "CLIPVisionModel",
        dict(patch_size=16),
        timm_file,
        dict(hidden_act="quick_gelu", final_norm="pooled"),
    ),
    Case(
        "timm file, SigLIP",
        "SiglipVisionModel",
        write=partial(timm_file, names=to_siglip_timm),
        load=dict(hidden_act="gelu_pytorch_tanh"),
    ),
    Case("timm repo, DINOv3", "DINOv3ViTModel", REGISTERS, DINOV3_REPO),
    Case(
        "timm file, DINOv3",
        "DINOv3ViTModel",
        REGISTERS | dict(query_bias=False, value_bias=False),
        partial(timm_file, names=to_eva),
        BY_CLASS_TOKEN,
    ),
    Case("timm file, DINOv3", "DINOv3ViTModel", REGISTERS | GATED, partial(timm_file, names=to_eva), BY_CLASS_TOKEN),
    Case("DINO .pth, full checkpoint", "ViTModel", EPS, dino_file, prepare=without_pooler),
    Case("DINOv2 .pth", "Dinov2WithRegistersModel", IMAGES_14, dinov2_file),
    Case("DINOv2 .pth", "Dinov2Model", IMAGES_14 | dict(use_swiglu_ffn=True), dinov2_file),
    Case("DeiT .pth, distilled", "DeiTForImageClassificationWithTeacher", EPS, deit_file),
    Case("MAE .pth", "ViTMAEModel", EPS, mae_file, back="ViTModel", prepare=no_masking),
    Case("torchvision .pth", CLASSIFIER, EPS, torchvision_file),
    Case("JAX .npz, original, pre_logits", "ViTModel", EPS, jax_file()),
    Case("JAX .npz, augreg", CLASSIFIER, EPS, jax_file()),
    Case("JAX .npz, training state", CLASSIFIER, EPS, jax_file(prefix="opt/target/")),
    Case("JAX .npz, big_vision", CLASSIFIER, EPS, jax_file(True, "params/")),
]


@torch.no_grad()
def randomize(model):
    """Give every parameter, zero tokens and unit norms included, random values; in eval mode."""
    for name, parameter in model.named_parameters():
        if parameter.ndim <= 1:
            parameter.normal_(float("norm" in name and name.endswith("weight")), 0.1)
        else:  # tokens and positions have one row; the rest are matrices, scaled to their inputs
            parameter.normal_(0, 0.5 if len(parameter) == 1 else parameter[0].numel() ** -0.5)
    return model.eval()


def build(case: Case, size: dict):
    """The reference with random weights."""
    config_class = getattr(transformers, case.model).config_class
    fields = {**size, **case.config}
    if "Dinov2" in case.model:  # its MLP is as wide as a multiple of D
        fields.pop("intermediate_size", None)
    if config_class.sub_configs and "VisionModel" not in case.model:
        text = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
        config = config_class(vision_config=fields, text_config=text, num_labels=10)
    else:
        config = config_class(**fields, num_labels=10)
    model = randomize(getattr(transformers, case.model)(config))
    with torch.no_grad():
        if case.prepare is not None:
            case.prepare(model)
    return model


def outputs(model, images) -> dict[str, torch.Tensor]:
    """Those of tokens, pooled vector and logits that a model has."""
    if type(model).__name__ in ("CLIPModel", "SiglipModel"):
        model = model.vision_model
    if type(model).__name__ == "ViTMAEForPreTraining":
        model = model.vit
    order = {}
    if "MAE" in type(model).__name__:  # it shuffles the patches by this noise, even where it masks none
        grid = images.shape[2] // model.config.patch_size * (images.shape[3] // model.config.patch_size)
        order = {"noise": torch.arange(grid).float().expand(len(images), -1)}
    found = model(images, **order)
    names = ("last_hidden_state", "pooler_output", "logits")
    return {name: found[name] for name in names if found.get(name) is not None}


def difference(found: dict, wanted: dict) -> float:
    """The largest difference of any output, relative to the largest value of that output."""
    shared = set(found) & set(wanted)
    assert shared, (set(found), set(wanted))
    return max(((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()).item() for name in shared)


@torch.no_grad()
def measure(case: Case, size: dict, folder: Path) -> dict:
    """A row of the table: the largest difference when loaded, under both attention backends, and when exported again."""
    torch.manual_seed(0)
    reference = build(case, size)
    vision = getattr(reference.config, "vision_config", reference.config)
    images = torch.randn(2, 3, vision.image_size, vision.image_size)
    wanted = outputs(reference, images)
    model_class = HFViTForImageClassification if "Classification" in case.model else HFViTModel
    if case.write is None:
        reference.save_pretrained(folder)
        model = model_class.from_pretrained(folder, **case.load)
    else:
        file = case.write(reference, folder)
        model = model_class.from_pretrained(file) if file.is_dir() else model_class.from_checkpoint(file, **case.load)
    loaded = []
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        loaded.append(difference(outputs(model, images), wanted))
    native = model.to_transformers()
    return {
        "family": case.family,
        "reference": case.model,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "loaded": max(loaded),
        "native": type(native).__name__,
        "given_back": difference(outputs(native, images), wanted),
    }


def main(args: argparse.Namespace):
    transformers.logging.disable_progress_bar()
    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(case, {}, Path(folder)))
        print(json.dumps(rows[-1]), flush=True)
    args.output_file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))

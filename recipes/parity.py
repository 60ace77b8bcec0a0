"""Measure how far our models are from the ones whose weights they load, format by format.

    python recipes/parity.py
    python recipes/parity.py --output_file parity.json

It takes ViT-Ti's width and depth, and some minutes. model_cards/parity.json, which it writes, is what recipes/benchmarks/tables.py shows.
Each case builds a reference model of transformers with random weights in every tensor, writes it as its family writes it, loads
the file with hf_vit, compares the outputs, exports it with `to_transformers()` and compares again.
"""

import argparse
import copy
import inspect
import json
import re
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
    parser.check_output_files(args.output_file)
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
    dinov3_file,
    jax_file,
    mae_file,
    open_clip_repo,
    timm_file,
    timm_repo,
    to_eva,
    to_open_clip,
    to_siglip_timm,
    to_timm,
    torchvision_file,
)

from hf_vit import HFViTForImageClassification, HFViTModel
from hf_vit.model.configuration_hf_vit import as_pair
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
        resample: how its library interpolates positions, if not as the reference class: arguments of torch's `interpolate`, and
            `offset`, which DINO adds to the new side.
    """

    family: str
    model: str
    config: dict = field(default_factory=dict)
    write: Callable | None = None
    load: dict = field(default_factory=dict)
    back: str | None = None
    prepare: Callable | None = None
    resample: dict | None = None

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
NO_KEY_BIAS = dict(layer_norm_eps=1e-5, key_bias=False)
GATED = dict(use_gated_mlp=True, hidden_act="silu")
TIMM, DINO = dict(antialias=True), dict(offset=0.1)
CORNERS, LINEAR = dict(align_corners=True), dict(mode="bilinear", align_corners=True)
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
    Case("transformers clip", "CLIPForImageClassification", resample={}),
    Case("transformers metaclip_2", "MetaClip2Model", back="CLIPVisionModel"),
    Case("transformers metaclip_2_vision_model", "MetaClip2VisionModel", back="CLIPVisionModel"),
    Case("transformers metaclip_2", "MetaClip2ForImageClassification", back="CLIPForImageClassification", resample={}),
    Case("transformers tipsv2_vision_model", "Tipsv2VisionModel", IMAGES_14, back="Dinov2WithRegistersModel"),
    Case(
        "transformers tipsv2", "Tipsv2Model", dict(use_swiglu_ffn=True, patch_size=16), back="Dinov2WithRegistersModel"
    ),
    Case("transformers pixio", "PixioModel"),
    Case("transformers internvl_vision", "InternVLVisionModel", IMAGES_14),
    Case("transformers siglip", "SiglipModel", back="SiglipVisionModel"),
    Case("transformers siglip_vision_model", "SiglipVisionModel"),
    # IJepaForImageClassification is the same network as SigLIP's classifier.
    Case("transformers siglip", "SiglipForImageClassification", back="IJepaForImageClassification"),
    Case("transformers ijepa", "IJepaModel"),
    Case("transformers ijepa", "IJepaForImageClassification"),
    Case("timm repo, augreg", CLASSIFIER, EPS, timm_repo(to_timm, global_pool="token"), resample=TIMM),
    Case("timm file, augreg", CLASSIFIER, EPS, timm_file, resample=TIMM),
    Case("timm file, no class token", "IJepaForImageClassification", EPS, timm_file, resample=TIMM),
    Case("timm file, registers", "Dinov2WithRegistersModel", IMAGES_14, timm_file, resample=TIMM),
    Case("timm file, DeiT III", "Dinov2Model", IMAGES_14, deit3_file, prepare=zero_class_position, resample=TIMM),
    Case(
        "timm file, CLIP",
        "CLIPVisionModel",
        dict(patch_size=16),
        timm_file,
        dict(hidden_act="quick_gelu", final_norm="pooled"),
        resample=TIMM,
    ),
    Case("OpenCLIP repo", "CLIPVisionModel", {}, open_clip_repo, dict(final_norm="pooled"), resample=TIMM),
    Case(
        "OpenCLIP file",
        "CLIPVisionModel",
        {},
        partial(timm_file, names=to_open_clip),
        dict(hidden_act="quick_gelu", final_norm="pooled"),
        resample=TIMM,
    ),
    Case(
        "timm file, SigLIP",
        "SiglipVisionModel",
        write=partial(timm_file, names=to_siglip_timm),
        load=dict(hidden_act="gelu_pytorch_tanh"),
        resample=TIMM,
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
    Case("DINO .pth, full checkpoint", "ViTModel", EPS, dino_file, prepare=without_pooler, resample=DINO),
    Case("DINOv2 .pth", "Dinov2WithRegistersModel", IMAGES_14, dinov2_file),
    Case("DINOv2 .pth", "Dinov2Model", IMAGES_14 | dict(use_swiglu_ffn=True), dinov2_file, resample=DINO),
    Case("DINOv3 .pth", "DINOv3ViTModel", REGISTERS | NO_KEY_BIAS, dinov3_file),
    Case("DINOv3 .pth", "DINOv3ViTModel", REGISTERS | NO_KEY_BIAS | GATED, dinov3_file),
    Case("DeiT .pth, distilled", "DeiTForImageClassificationWithTeacher", EPS, deit_file),
    Case("MAE .pth", "ViTMAEModel", EPS, mae_file, back="ViTModel", prepare=no_masking),
    Case("torchvision .pth", CLASSIFIER, EPS, torchvision_file, resample=CORNERS),
    Case("JAX .npz, original, pre_logits", "ViTModel", EPS, jax_file(), resample=LINEAR),
    Case("JAX .npz, augreg", CLASSIFIER, EPS, jax_file(), resample=LINEAR),
    Case("JAX .npz, training state", CLASSIFIER, EPS, jax_file(prefix="opt/target/"), resample=LINEAR),
    Case("JAX .npz, big_vision", CLASSIFIER, EPS, jax_file(True, "params/"), resample=LINEAR),
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
    if "mlp_ratio" in config_class.__dataclass_fields__ or case.model.startswith(
        "Tips"
    ):  # its MLP is a multiple of D wide
        fields.pop("intermediate_size", None)
    if config_class.sub_configs and "VisionModel" not in case.model:
        text = dict(
            hidden_size=fields.get("hidden_size", 768),
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
        )
        config = config_class(vision_config=fields, text_config=text, num_labels=10)
    else:
        config = config_class(**fields, num_labels=10)
    model = randomize(getattr(transformers, case.model)(config))
    with torch.no_grad():
        if case.prepare is not None:
            case.prepare(model)
    return model


def at_another_size(case: Case, reference, side: int):
    """The reference for images of another size, its positions resampled as `case.resample` says."""
    config = copy.deepcopy(reference.config)
    getattr(config, "vision_config", config).image_size = side
    other = type(reference)(config).eval()
    tensors = {name: tensor for name, tensor in reference.state_dict().items() if "position_ids" not in name}
    [name] = [name for name in tensors if re.search(r"(?<!text_model\.embeddings\.)position_embedding", name)]
    wanted = other.state_dict()[name]
    old, new = (round(len(rows.flatten(0, -2)) ** 0.5) for rows in (tensors[name], wanted))
    prefix, grid = tensors[name].flatten(0, -2).tensor_split([-(old**2)])
    scale = dict(scale_factor=(new + case.resample.get("offset", 0)) / old)
    how = dict(mode="bicubic", antialias=False) | {key: case.resample[key] for key in case.resample if key != "offset"}
    how |= scale if "offset" in case.resample else dict(size=new)
    grid = torch.nn.functional.interpolate(grid.T.reshape(1, -1, old, old), **how).flatten(2)[0].T
    tensors[name] = torch.cat([prefix, grid]).reshape(wanted.shape)
    other.load_state_dict(tensors, strict=False)
    if case.prepare is not None:
        case.prepare(other)
    return other


def outputs(model, images) -> dict[str, torch.Tensor]:
    """Those of tokens, pooled vector and logits that a model has, for images of any size."""
    if hasattr(model, "text_model"):
        model = model.vision_model
    if type(model).__name__ == "ViTMAEForPreTraining":
        model = model.vit
    order = {}
    own_size = as_pair(getattr(model.config, "vision_config", model.config).image_size)
    if (
        tuple(images.shape[2:]) != own_size
        and "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
    ):
        order["interpolate_pos_encoding"] = True
    if "MAE" in type(model).__name__:  # it shuffles the patches by this noise, even where it masks none
        grid = images.shape[2] // model.config.patch_size * (images.shape[3] // model.config.patch_size)
        order |= {"noise": torch.arange(grid).float().expand(len(images), -1)}
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
    """A row of the table: the largest difference when loaded, under both attention backends, at another size, and when exported."""
    torch.manual_seed(0)
    reference = build(case, size)
    vision = getattr(reference.config, "vision_config", reference.config)
    side = as_pair(vision.image_size)[0]
    images = torch.randn(2, 3, side, side)
    wanted = outputs(reference, images)
    model_class = HFViTForImageClassification if "Classification" in case.model else HFViTModel
    if case.write is None:
        reference.save_pretrained(folder)
        model = model_class.from_pretrained(folder, **case.load)
    else:
        file = case.write(reference, folder)
        read = model_class.from_pretrained if file.is_dir() else model_class.from_checkpoint
        model = read(file, **case.load)
    loaded = []
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        loaded.append(difference(outputs(model, images), wanted))
    native = model.to_transformers()
    larger = torch.randn(2, 3, side * 3 // 2, side * 3 // 2)
    other = reference if case.resample is None else at_another_size(case, reference, side * 3 // 2)
    resized = difference(outputs(model, larger), outputs(other, larger))
    return {
        "family": case.family,
        "reference": case.model,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "loaded": max(loaded),
        "resized": resized,
        "native": type(native).__name__,
        "given_back": difference(outputs(native, images), wanted),
    }


def main(args: argparse.Namespace):
    transformers.logging.disable_progress_bar()
    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(case, SMALL, Path(folder)))
        print(json.dumps(rows[-1]), flush=True)
    args.output_file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))

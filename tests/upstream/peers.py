"""Models that other libraries built, loaded by hf_vit: timm, torchvision, OpenCLIP and transformers, with random weights.

    make peers

It runs in an environment of its own, .venv/peers, with those libraries from the package index. Each model is saved as its library
saves it, read as a repository or a raw file, and compared at its own size and at another one, for which its library resamples the
positions. The exit code is 1 if an output differs by more than 1e-5 of the largest.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import open_clip
import timm
import torch
import torchvision
import transformers
from safetensors.torch import save_file
from torchvision.models.vision_transformer import interpolate_embeddings


HOUSE = Path(__file__).parents[2]
sys.path[:0] = [str(HOUSE), str(HOUSE / "recipes"), str(HOUSE / "tests")]
sys.argv = sys.argv[:1]

import checkpoint_writers  # noqa: E402
import parity  # noqa: E402

from hf_vit import HFViTForImageClassification, HFViTModel  # noqa: E402


TIMM = (
    "vit_tiny_patch16_224", "vit_small_patch16_224", "vit_small_patch32_224", "vit_base_patch32_224", "vit_small_patch16_36x1_224",
    "vit_wee_patch16_reg1_gap_256", "vit_little_patch16_reg4_gap_256", "vit_medium_patch16_gap_240", "vit_medium_patch16_reg4_gap_256",
    "vit_betwixt_patch16_reg1_gap_256", "vit_base_patch32_clip_224", "vit_base_patch32_clip_quickgelu_224", "vit_base_patch16_siglip_224",
    "vit_base_patch16_siglip_gap_224", "vit_small_patch14_dinov2", "vit_small_patch14_reg4_dinov2", "vit_small_patch16_dinov3",
    "vit_small_plus_patch16_dinov3_qkvb", "deit_tiny_patch16_224", "deit_small_distilled_patch16_224", "deit3_small_patch16_224",
    "flexivit_small",
)  # fmt: skip
TORCHVISION = ("vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14")
OPEN_CLIP = ("ViT-B-32", "ViT-B-32-quickgelu", "ViT-B-16")
ROUNDING = 1e-5


def apart(found, wanted) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def timm_rows(name: str, folder: Path):
    model = parity.randomize(timm.create_model(name, pretrained=False, num_classes=10))
    size, patch = model.pretrained_cfg["input_size"][-1], model.patch_embed.patch_size[0]
    size = model.patch_embed.img_size[0] if model.patch_embed.img_size else size
    larger = size + 4 * patch
    timm.models.save_for_hf(model, str(folder / "repo"), safe_serialization=True)
    save_file({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, folder / "raw.safetensors")
    more = dict(hidden_act="quick_gelu") if "quickgelu" in name else {}  # which no tensor tells
    more |= dict(pooling="mean") if "gap" in name or "dinov3" in name else {}
    readers = {
        "repository": partial(HFViTForImageClassification.from_pretrained, folder / "repo"),
        "file": partial(HFViTForImageClassification.from_checkpoint, folder / "raw.safetensors", **more),
    }
    for side in (size, larger):
        images = torch.randn(1, 3, side, side)
        if side != size and hasattr(model, "set_input_size"):
            model.set_input_size(img_size=side)
        for kind, read in readers.items():
            yield kind, side, apart(read(image_size=side)(images).logits, model(images))


def torchvision_rows(name: str, folder: Path):
    build, size = getattr(torchvision.models, name), 224
    model = parity.randomize(build(num_classes=10, image_size=size))
    torch.save(model.state_dict(), folder / "raw.pth")
    heads, patch = model.encoder.layers[0].num_heads, model.patch_size
    for side in (size, size + 4 * patch):
        if side != size:
            state = interpolate_embeddings(side, patch, model.state_dict())
            model = build(num_classes=10, image_size=side).eval()
            model.load_state_dict(state)
        read = HFViTForImageClassification.from_checkpoint(
            folder / "raw.pth", image_size=side, num_attention_heads=heads
        )
        images = torch.randn(1, 3, side, side)
        yield "file", side, apart(read(images).logits, model(images))


def open_clip_rows(name: str, folder: Path):
    build = partial(open_clip.create_model, name, pretrained=None)
    model, config = parity.randomize(build()), open_clip.get_model_config(name)
    save_file({key: t.contiguous() for key, t in model.state_dict().items()}, folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps(dict(model_cfg=config, preprocess_cfg={})))
    act = "quick_gelu" if config.get("quick_gelu") else "gelu"
    size, patch = model.visual.image_size[0], model.visual.patch_size[0]
    readers = {
        "repository": partial(HFViTModel.from_pretrained, folder),
        "file": partial(HFViTModel.from_checkpoint, folder / "open_clip_model.safetensors", hidden_act=act),
    }
    for side in (size, size + 4 * patch):
        images, state = torch.randn(1, 3, side, side), model.state_dict()
        if side != size:
            model = build(force_image_size=side).eval()
            open_clip.model.resize_pos_embed(state, model)
            model.load_state_dict(state)
        for kind, read in readers.items():
            pooled = read(image_size=side)(images).pooler_output
            yield kind, side, apart(pooled @ model.visual.proj, model.visual(images))


def transformers_rows(case: checkpoint_writers.Case, folder: Path):
    row = parity.measure(case, parity.SIZE, folder)
    yield "folder", "its own", row["loaded"]
    yield "folder", "larger", row["resized"]


@torch.no_grad()
def main() -> int:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    work = [("timm", name, timm_rows, name) for name in TIMM]
    work += [("torchvision", name, torchvision_rows, name) for name in TORCHVISION]
    work += [("open_clip", name, open_clip_rows, name) for name in OPEN_CLIP]
    work += [
        ("transformers", case.model, transformers_rows, case) for case in checkpoint_writers.CASES if not case.family
    ]
    versions = {module.__name__: module.__version__ for module in (torch, timm, torchvision, open_clip, transformers)}
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print("| library | model | read as | size | difference |\n|---|---|---|---|---|", flush=True)
    worst = 0.0
    for library, name, rows, what in work:
        with tempfile.TemporaryDirectory() as folder:
            for kind, side, difference in rows(what, Path(folder)):
                worst = max(worst, difference)
                print(f"| {library} | {name} | {kind} | {side} | {difference:.1e} |", flush=True)
    print(f"largest difference {worst:.1e}")
    return int(not worst <= ROUNDING)


if __name__ == "__main__":
    sys.exit(main())

"""Every public format by its name, and its config.json in the terms of HFViTConfig."""

import torch
from safetensors import safe_open
from transformers import AutoConfig
from transformers.backbone_utils import BackboneConfigMixin
from transformers.utils import cached_file

from hf_vit.formats.clip import CLIP, SIGLIP
from hf_vit.formats.dinov2 import DINOV2, DINOV2_WITH_REGISTERS
from hf_vit.formats.dinov3 import DINOV3
from hf_vit.formats.jax import JAX
from hf_vit.formats.timm import TIMM, infer_timm
from hf_vit.formats.torchvision import TORCHVISION
from hf_vit.formats.vit import DEIT, IJEPA, MAE, MSN, VIT
from hf_vit.model.configuration_hf_vit import as_pair
from hf_vit.model.loading import CURRENT_SOURCE, CheckpointSource


# Formats of transformers have the model_type of their config.json. `to_transformers` takes the first that supports a model.
FAMILIES = {
    "vit": VIT,
    "deit": DEIT,
    "ijepa": IJEPA,
    "dinov2": DINOV2,
    "dinov2_with_registers": DINOV2_WITH_REGISTERS,
    "dinov3_vit": DINOV3,
    "clip_vision_model": CLIP,
    "siglip_vision_model": SIGLIP,
    "vit_mae": MAE,
    "vit_msn": MSN,
    "clip": CLIP,
    "siglip": SIGLIP,
    "timm": TIMM,
    "torchvision": TORCHVISION,
    "jax": JAX,
}
# What native configs and HFViTConfig name alike. A native config may lack some of them.
COMMON_FIELDS = (
    "image_size", "patch_size", "num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "intermediate_size", "hidden_act", "qkv_bias", "hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate",
    "layer_norm_eps", "initializer_range",
)  # fmt: skip
BACKBONE_FIELDS = ("out_indices", "apply_layernorm", "reshape_hidden_states")
LABEL_FIELDS = ("id2label", "label2id", "problem_type", "thresholds", "dtype", "torch_dtype")


def translate_config(config: dict, path, arguments: dict) -> dict:
    """The fields of HFViTConfig that the config.json of a public folder or repo, `path`, stands for.

    `arguments` are the other ones of from_pretrained: where the repo is, and what was asked of the config. Family and notes of
    the model that is loading (`CURRENT_SOURCE`) are filled in. ValueError for what no field expresses.
    """
    source = CURRENT_SOURCE.get() or CheckpointSource(str(path))
    name = config.get("model_type", "timm")
    if name in ("timm", "timm_wrapper"):
        source.family_name, shapes = "timm", read_shapes(path, arguments)
        shapes = {key.removeprefix("timm_model."): shape for key, shape in shapes.items()}
        return infer_timm(shapes, arguments, bool(source.is_classifier), source.notes, config)
    known = [key for key, family in FAMILIES.items() if not family.signature]
    if name not in known:
        raise ValueError(f"{path} holds a {name!r} model; hf_vit loads hf_vit, {', '.join(known)}, timm, timm_wrapper")
    source.family_name = name
    return read_native_config(config, name, source)


def read_native_config(config: dict, name: str, source: CheckpointSource) -> dict:
    """Fields of HFViTConfig from a config.json of transformers with the model_type `name`."""
    family = FAMILIES[name]
    native = AutoConfig.for_model(name, **{key: value for key, value in config.items() if key != "model_type"})
    if native.sub_configs:  # of image and text
        native = native.vision_config
    # A native classifier may pool otherwise than its base model: the class asked for decides, else the one saved.
    saved = (config.get("architectures") or [""])[0]
    is_saved = "ForImageClassification" in saved
    is_classifier = is_saved if source.is_classifier is None else source.is_classifier
    classifier = (saved if is_saved else "a new classifier") if is_classifier else ""
    fields = {field: getattr(native, field) for field in COMMON_FIELDS if hasattr(native, field)}
    fields |= {ours: getattr(native, theirs) for theirs, ours in family.fields.items()}
    fields |= family.read_fields(native, classifier)
    fields["position_antialias"] = name == "dinov2_with_registers"
    fields |= {field: config[field] for field in LABEL_FIELDS if config.get(field) not in (None, {})}
    if isinstance(native, BackboneConfigMixin):
        fields |= {field: getattr(native, field) for field in BACKBONE_FIELDS}
    size, patch = as_pair(fields["image_size"]), as_pair(fields["patch_size"])
    covered = (size[0] // patch[0] * patch[0], size[1] // patch[1] * patch[1])
    if covered != size:  # native convolutions drop the rest, as in google/siglip-so400m-patch14-384
        fields["image_size"] = list(covered)
        source.notes.append(
            f"image_size {size} cut to {covered}, which the patches cover: crop or resize the images to that"
        )
    return fields


def read_shapes(path, arguments: dict) -> dict[str, tuple]:
    """Names and shapes in the weights file of a repo, which is then in the cache."""
    names = ("cache_dir", "force_download", "token", "revision", "local_files_only", "subfolder")
    arguments = {key: arguments[key] for key in names if key in arguments}
    for name in ("model.safetensors", "pytorch_model.bin"):
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False, **arguments)
        if file is not None and name.endswith(".safetensors"):
            with safe_open(file, "pt") as tensors:
                return {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
        if file is not None:
            tensors = torch.load(file, map_location="cpu", weights_only=True)
            return {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    raise ValueError(f"{path} has neither model.safetensors nor pytorch_model.bin")

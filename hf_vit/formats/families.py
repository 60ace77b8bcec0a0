"""Every public format by its name, which for formats of transformers is the model_type of config.json."""

from hf_vit.formats.clip import CLIP, SIGLIP
from hf_vit.formats.dinov2 import DINOV2, DINOV2_WITH_REGISTERS
from hf_vit.formats.dinov3 import DINOV3
from hf_vit.formats.jax import JAX
from hf_vit.formats.timm import TIMM
from hf_vit.formats.torchvision import TORCHVISION
from hf_vit.formats.vit import DEIT, IJEPA, MAE_OR_MSN, VIT


FAMILIES = {  # `to_transformers` takes the first that supports a model
    "vit": VIT,
    "deit": DEIT,
    "ijepa": IJEPA,
    "dinov2": DINOV2,
    "dinov2_with_registers": DINOV2_WITH_REGISTERS,
    "dinov3_vit": DINOV3,
    "clip_vision_model": CLIP,
    "siglip_vision_model": SIGLIP,
    "vit_mae": MAE_OR_MSN,
    "vit_msn": MAE_OR_MSN,
    "clip": CLIP,
    "siglip": SIGLIP,
    "timm": TIMM,
    "torchvision": TORCHVISION,
    "jax": JAX,
}

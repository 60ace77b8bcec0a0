"""Public checkpoints, in and out. `HFViTConfig.formats` is this package; the model uses the four names below."""

from hf_vit.formats.families import FAMILIES, translate_config
from hf_vit.formats.native_models import to_transformers
from hf_vit.formats.raw_files import read_raw


__all__ = ["FAMILIES", "read_raw", "to_transformers", "translate_config"]

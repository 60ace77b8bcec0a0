"""Public checkpoints, in and out: `read` one as a value, and give a model back `to_transformers`."""

from hf_vit.formats.native_models import to_transformers
from hf_vit.formats.read import Checkpoint, read


__all__ = ["Checkpoint", "read", "to_transformers"]

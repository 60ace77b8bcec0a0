"""A readable Vision Transformer that is a true transformers model. `import hf_vit` makes the Auto classes know it.

Like transformers itself, this file imports the model classes only when one of them, or a config, is first used: the
import stays light, and what transformers pulls in for a model (accelerate among it) waits until there is one.
"""

import importlib
from typing import TYPE_CHECKING

from transformers import AutoConfig

from hf_vit.model.configuration_hf_vit import HFViTConfig, register_formats


if TYPE_CHECKING:
    from hf_vit.model.masked_autoencoder import HFViTForPreTraining
    from hf_vit.model.modeling_hf_vit import HFViTBackbone, HFViTForImageClassification, HFViTModel

__version__ = "0.1.0"
__all__ = ["HFViTBackbone", "HFViTConfig", "HFViTForImageClassification", "HFViTForPreTraining", "HFViTModel"]


def _register():
    """Tell the Auto classes which class goes with HFViTConfig; runs once."""
    from transformers import (
        AutoBackbone,
        AutoImageProcessor,
        AutoModel,
        AutoModelForImageClassification,
        AutoModelForPreTraining,
        ViTImageProcessorPil,
    )

    modeling = importlib.import_module(".model.modeling_hf_vit", __name__)
    masked_autoencoder = importlib.import_module(".model.masked_autoencoder", __name__)
    for auto_class, model_class in (
        (AutoModel, modeling.HFViTModel),
        (AutoModelForImageClassification, modeling.HFViTForImageClassification),
        (AutoModelForPreTraining, masked_autoencoder.HFViTForPreTraining),
        (AutoBackbone, modeling.HFViTBackbone),
    ):
        auto_class.register(HFViTConfig, model_class, exist_ok=True)
        model_class.register_for_auto_class(auto_class.__name__)
    AutoImageProcessor.register(HFViTConfig, image_processor_classes={"pil": ViTImageProcessorPil}, exist_ok=True)
    HFViTConfig.prepare = staticmethod(lambda: None)  # at last: an import that is interrupted is tried again


register_formats(lambda: importlib.import_module(".formats", __name__))
HFViTConfig.prepare = staticmethod(_register)
HFViTConfig.register_for_auto_class()  # save_pretrained then writes this code beside the weights
AutoConfig.register(HFViTConfig.model_type, HFViTConfig, exist_ok=True)


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    HFViTConfig.prepare()
    file = "masked_autoencoder" if name == "HFViTForPreTraining" else "modeling_hf_vit"
    return getattr(importlib.import_module(f".model.{file}", __name__), name)

"""A readable Vision Transformer that is a true transformers model. `import hf_vit` makes the Auto classes know it.

It imports neither torch nor transformers, which take seconds: a command line answers before. The Auto classes hear of HFViTConfig
when transformers loads them, or at once if it has.
"""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from hf_vit.model.configuration_hf_vit import HFViTConfig
    from hf_vit.model.masked_autoencoder import HFViTForPreTraining
    from hf_vit.model.modeling_hf_vit import HFViTBackbone, HFViTForImageClassification, HFViTModel

__version__ = "0.2.0"
__all__ = ["HFViTBackbone", "HFViTConfig", "HFViTForImageClassification", "HFViTForPreTraining", "HFViTModel"]
AUTO_CONFIG = "transformers.models.auto.configuration_auto"


def _register_models():
    """Tell the Auto classes which class goes with HFViTConfig; runs once, with the first config."""
    from transformers import (
        AutoBackbone,
        AutoImageProcessor,
        AutoModel,
        AutoModelForImageClassification,
        AutoModelForPreTraining,
        ViTImageProcessorPil,
    )

    from hf_vit.model.configuration_hf_vit import HFViTConfig

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


def _register_config():
    """Tell AutoConfig the class of model type "hf_vit"."""
    from transformers import AutoConfig

    from hf_vit.model import configuration_hf_vit
    from hf_vit.model.configuration_hf_vit import HFViTConfig

    configuration_hf_vit.load_formats = lambda: importlib.import_module(".formats", __name__)
    HFViTConfig.prepare = staticmethod(_register_models)
    HFViTConfig.register_for_auto_class()  # save_pretrained then writes this code beside the weights
    AutoConfig.register(HFViTConfig.model_type, HFViTConfig, exist_ok=True)


class _AutoConfigHook:
    """A finder in sys.meta_path that registers HFViTConfig right after transformers has loaded AutoConfig."""

    def find_spec(self, name, path=None, target=None):
        if name != AUTO_CONFIG:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _register_config()

        spec.loader.exec_module = exec_module
        return spec


if AUTO_CONFIG in sys.modules:
    _register_config()
else:
    sys.meta_path.insert(0, _AutoConfigHook())


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(AUTO_CONFIG)
    from hf_vit.model.configuration_hf_vit import HFViTConfig

    if name == "HFViTConfig":
        return HFViTConfig
    HFViTConfig.prepare()
    file = "masked_autoencoder" if name == "HFViTForPreTraining" else "modeling_hf_vit"
    return getattr(importlib.import_module(f".model.{file}", __name__), name)

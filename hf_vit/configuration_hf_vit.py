"""Every architecture number of a plain Vision Transformer, with its checks. This file is copied to the Hub with the weights."""

import difflib
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


# Sizes from "An Image is Worth 16x16 Words", arXiv 2010.11929, table 1; tiny and small from DeiT, arXiv 2012.12877, table 1.
PRESETS = {
    "tiny-patch16-224": dict(hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768),
    "small-patch16-224": dict(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1536),
    "base-patch16-224": dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072),
    "base-patch32-224": dict(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072, patch_size=32
    ),
    "large-patch16-224": dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096),
    "huge-patch14-224": dict(
        hidden_size=1280, num_hidden_layers=32, num_attention_heads=16, intermediate_size=5120, patch_size=14
    ),
}

# What transformers itself hands to a config beside its fields (older config.json files carry some of them).
TRANSFORMERS_KEYS = {
    "attn_implementation", "auto_map", "experts_implementation", "model_type", "name_or_path", "num_labels",
    "output_attentions", "quantization_config", "torch_dtype", "transformers_weights",
}  # fmt: skip


def as_pair(size) -> tuple[int, int]:
    """`16` or `[16, 8]` -> (height, width)."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


@strict
class HFViTConfig(PreTrainedConfig):
    """Architecture of a plain Vision Transformer. The defaults are ViT-B/16 at 224 pixels (arXiv 2010.11929, table 1).

    Args:
        image_size: height and width of the input in pixels, as one int or a pair.
        patch_size: height and width of a patch in pixels, as one int or a pair; it divides `image_size`.
        num_channels: channels of the input, 3 for RGB.
        hidden_size: D, the width of a token.
        num_hidden_layers: number of transformer layers.
        num_attention_heads: A, divides `hidden_size`.
        intermediate_size: width of the MLP's hidden layer.
        hidden_act: activation of the MLP, a name known to `transformers.activations.ACT2FN` ("gelu" is the exact one).
        qkv_bias: whether the query, key and value projections have a bias.
        position_embedding: "learned" (one vector a token, the class token included) or "sincos2d" (a fixed table for the
            patches, half of the channels for the row and half for the column; arXiv 2205.01580, section 3).
        use_class_token: whether a learned class token stands before the patches.
        num_register_tokens: learned tokens between class token and patches, without positions (arXiv 2309.16588).
        pooling: "cls" (the class token) or "mean" (mean of the patch tokens), after the final norm.
        pooler_act: None, or the activation of the dense layer that `HFViTModel` applies to the pooled vector
            ("tanh" in google/vit-base-patch16-224-in21k). Classification does not use it, as in transformers.
        layerscale_value: None, or the initial value of LayerScale (arXiv 2103.17239, section 2).
        drop_path_rate: stochastic depth, 0 at the first layer and rising linearly to this value at the last
            (arXiv 1603.09382, section 3).
        hidden_dropout_prob: dropout after the embeddings, the attention projection and the MLP.
        attention_probs_dropout_prob: dropout of the attention weights.
        layer_norm_eps: epsilon of every LayerNorm.
        initializer_range: standard deviation of the initial tokens and positions; matrices follow their own sizes
            (Xavier uniform, LeCun normal for patches), so that narrow and wide models both start well.

    Raises:
        ValueError: for a value, or two values together, that no model can be built from, and for an unknown name.
        StrictDataclassFieldValidationError: (of huggingface_hub) for a value of another type than the field's.
    """

    model_type = "hf_vit"

    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 16
    num_channels: int = 3
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    qkv_bias: bool = True
    position_embedding: Literal["learned", "sincos2d"] = "learned"
    use_class_token: bool = True
    num_register_tokens: int = 0
    pooling: Literal["cls", "mean"] = "cls"
    pooler_act: str | None = None
    layerscale_value: float | int | None = None
    drop_path_rate: float | int = 0.0
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    layer_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    # Two places the package fills, so that this file can travel alone: public formats by their `model_type`
    # (hf_vit/checkpoints.py), and what is to be imported before the first config is used (hf_vit/__init__.py).
    families: ClassVar[dict[str, Any]] = {}
    prepare: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "HFViTConfig":
        """A published size, such as `from_preset("tiny-patch16-224", num_labels=10)`; any field can be overridden."""
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; the presets are {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **overrides})

    def __post_init__(self, **kwargs):
        self.prepare()
        unknown = [key for key in kwargs if key not in TRANSFORMERS_KEYS and not key.startswith("_")]
        if unknown:
            close = difflib.get_close_matches(unknown[0], self.__dataclass_fields__, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "see help(HFViTConfig) for the names it knows"
            raise ValueError(f"HFViTConfig has no field {unknown[0]!r}; {hint}")
        if self.id2label is not None:
            if kwargs.get("num_labels") not in (None, len(self.id2label)):
                raise ValueError(
                    f"num_labels is {kwargs['num_labels']} but id2label names {len(self.id2label)} labels"
                )
            if self.label2id is None:
                self.label2id = {label: int(index) for index, label in self.id2label.items()}
        super().__post_init__(**kwargs)
        self.validate_architecture()

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """As in transformers; the config.json of a known public family comes back in our terms."""
        cls.prepare()
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        found = config_dict.get("model_type", cls.model_type)
        if found == cls.model_type:
            return config_dict, kwargs
        if found not in cls.families:
            raise ValueError(
                f"{pretrained_model_name_or_path} holds a {found!r} model; hf_vit loads "
                f"{', '.join([cls.model_type, *cls.families])}"
            )
        return {**cls.families[found].translate(config_dict), "_family": found}, kwargs

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As in transformers, but overrides are in place before the checks run, so `image_size=` is checked too."""
        config_dict = dict(config_dict)
        fields = {key: kwargs.pop(key) for key in list(kwargs) if key in cls.__dataclass_fields__ and key != "dtype"}
        asked = kwargs.get("num_labels")
        if {"id2label", "label2id"} & set(fields) or asked not in (None, len(config_dict.get("id2label") or ())):
            config_dict = {k: v for k, v in config_dict.items() if k not in ("id2label", "label2id")}
        family, loading = config_dict.pop("_family", None), kwargs.pop("_loading_model", False)
        result = super().from_dict({**config_dict, **fields}, **kwargs)
        if family is not None and loading:  # while a model loads: the name that checkpoints.py gave the renaming rules
            config = result[0] if isinstance(result, tuple) else result
            config.model_type = f"{cls.model_type}<{family}"
        return result

    def validate_architecture(self):
        """Raise ValueError for numbers that do not fit each other; models call it again before they are built."""
        from transformers.activations import ACT2FN  # here, because it makes transformers import accelerate

        for name in ("num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_labels < 1:
            raise ValueError(f"num_labels is {self.num_labels}; it must be at least 1")
        for name in ("image_size", "patch_size"):
            size = getattr(self, name)
            if (not isinstance(size, int) and len(size) != 2) or min(as_pair(size)) < 1:
                raise ValueError(f"{name} is {size}; give one positive int, or a pair (height, width)")
        (height, width), (patch_height, patch_width) = as_pair(self.image_size), as_pair(self.patch_size)
        if height % patch_height or width % patch_width:
            fitting = (max(1, height // patch_height) * patch_height, max(1, width // patch_width) * patch_width)
            raise ValueError(
                f"patch_size {self.patch_size} does not divide image_size {self.image_size}; "
                f"use image_size {fitting} or another patch_size"
            )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} does not divide hidden_size {self.hidden_size}; "
                "change one of them"
            )
        if self.position_embedding == "sincos2d" and self.hidden_size % 4:
            raise ValueError(
                f"sincos2d positions need a hidden_size that 4 divides, not {self.hidden_size} "
                "(sine and cosine, for row and column)"
            )
        if self.pooling == "cls" and not self.use_class_token:
            raise ValueError('pooling "cls" needs use_class_token=True; without a class token use pooling="mean"')
        if self.num_register_tokens < 0:
            raise ValueError(f"num_register_tokens is {self.num_register_tokens}; it must be 0 or more")
        for name in ("hidden_act", "pooler_act"):
            act = getattr(self, name)
            if act is not None and act not in ACT2FN:
                raise ValueError(f"{name} {act!r} is unknown; transformers knows {', '.join(sorted(ACT2FN))}")
        for name in ("drop_path_rate", "hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a probability in [0, 1) was wanted")
        for name in ("layer_norm_eps", "initializer_range"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")

    @property
    def grid_size(self) -> tuple[int, int]:
        """(rows, columns) of patches at `image_size`."""
        (height, width), (patch_height, patch_width) = as_pair(self.image_size), as_pair(self.patch_size)
        return height // patch_height, width // patch_width

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the patches: the class token and the registers."""
        return int(self.use_class_token) + self.num_register_tokens


__all__ = ["HFViTConfig"]

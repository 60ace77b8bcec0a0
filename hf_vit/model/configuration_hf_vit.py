"""Every architecture number of a plain Vision Transformer, with its checks. This file is copied to the Hub with the weights."""

from collections.abc import Callable
from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.backbone_utils import BackboneConfigMixin

from .fields import MAX_LAYERS, MAX_RATE, MAX_WIDTH, as_pair, check_counts, labels_by_id, within


# Sizes from "An Image is Worth 16x16 Words", arXiv 2010.11929, table 1; tiny and small from DeiT, arXiv 2012.12877, table 1.
PRESETS = {
    f"{name}-patch{P}-224": dict(
        hidden_size=D, num_hidden_layers=layers, num_attention_heads=A, intermediate_size=4 * D, patch_size=P
    )
    for name, D, layers, A, P in (
        ("tiny", 192, 12, 3, 16),
        ("small", 384, 12, 6, 16),
        ("base", 768, 12, 12, 16),
        ("base", 768, 12, 12, 32),
        ("large", 1024, 24, 16, 16),
        ("huge", 1280, 32, 16, 14),
    )
}

# What transformers itself hands to a config beside its fields (older config.json files carry some of them).
TRANSFORMERS_KEYS = {
    "attn_implementation", "auto_map", "experts_implementation", "model_type", "name_or_path", "num_labels",
    "output_attentions", "quantization_config", "torch_dtype", "transformers_weights",
    "thresholds",  # not of transformers: of several labels an image, the probability above which each is given
}  # fmt: skip

# What a folder saved by `save_pretrained` offers to Auto classes, with trust_remote_code=True and without our package.
AUTO_MAP = {
    "AutoConfig": "configuration_hf_vit.HFViTConfig",
    "AutoModel": "modeling_hf_vit.HFViTModel",
    "AutoModelForImageClassification": "modeling_hf_vit.HFViTForImageClassification",
    "AutoBackbone": "modeling_hf_vit.HFViTBackbone",
}

# What only a masked autoencoder reads; the names are those of ViTMAEConfig.
AUTOENCODER_FIELDS = (
    "decoder_hidden_size", "decoder_num_hidden_layers", "decoder_num_attention_heads", "decoder_intermediate_size", "mask_ratio",
    "norm_pix_loss",
)  # fmt: skip

# Left out of config.json where they have their default: the oldest commits refuse what they do not know.
RARE = ("n_cls_tokens", "position_interpolation", "apply_layernorm", "reshape_hidden_states", *AUTOENCODER_FIELDS)

# () -> the package hf_vit.formats, as hf_vit/__init__.py sets it; None in a copy of this file on the Hub, which does without.
load_formats: Callable | None = None


def public_formats(purpose: str):
    """The package that reads public checkpoints, or a ValueError if only the copied model code is there."""
    if load_formats is None:
        raise ValueError(f"this copy of the model's code stands alone: install the package hf_vit to {purpose}")
    return load_formats()


def read_public(path, is_classifier: bool | None, asked: dict):
    """The public checkpoint at a path (`hf_vit.formats.read`); None if it is in our own format, or nobody could read it."""
    return None if load_formats is None else load_formats().read(path, is_classifier, asked)


@strict
class HFViTConfig(BackboneConfigMixin, PreTrainedConfig):
    """Architecture of a plain Vision Transformer. The defaults are ViT-B/16 at 224 pixels (arXiv 2010.11929, table 1).

    Args:
        image_size: height and width of the input in pixels, as one int or a pair.
        patch_size: height and width of a patch in pixels, as one int or a pair; it divides `image_size`.
        num_channels: channels of the input, 3 for RGB.
        patch_projection: "conv" (a convolution whose stride is its kernel) or "norm_linear_norm" (LayerNorm, dense layer,
            LayerNorm over patches flattened in the order row, column, channel).
        patch_bias: whether the patch convolution has a bias (CLIP has none; arXiv 2103.00020); only read with "conv".
        hidden_size: D, the width of a token.
        num_hidden_layers: number of transformer layers.
        num_attention_heads: A, divides `hidden_size`.
        intermediate_size: width of the MLP's hidden layer.
        hidden_act: activation of the MLP, a name known to `transformers.activations.ACT2FN` ("gelu" is the exact one).
        gated_mlp: down(act(gate(x)) * up(x)) (arXiv 2002.05202, equation 6) in place of fc2(act(fc1(x))); SwiGLU with
            hidden_act="silu", and as wide in parameters with two thirds of the `intermediate_size`.
        qkv_bias: whether the query, key and value projections have a bias.
        key_bias: False leaves it out of the keys alone (DINOv3); only read where `qkv_bias` is True.
        qk_norm: LayerNorm, with weights, over the channels of each head's queries and keys (arXiv 2302.05442, section 2.1).
        position_embedding: "learned" (one vector for each patch, class and distillation token), "sincos1d" (a fixed table
            over the same tokens in their order; arXiv 1706.03762, section 3.5), "sincos2d" (a fixed table for the patches,
            half of the channels for the row and half for the column; arXiv 2205.01580, section 3), "rotary" (queries and
            keys of patches turned by their row and column, as in DINOv3; arXiv 2508.10104, section 3.2) or "none".
        position_interpolation: how learned positions are resampled to another grid: "bicubic", "bilinear" (TIPSv2), either with the
            corners of the two grids aligned ("bicubic_corners" in torchvision, "bilinear_corners" in Google's JAX code), or
            "bicubic_offset" (DINO and DINOv2 scale by (side + 0.1) / old side).
        position_antialias: whether learned positions are resampled to another grid with antialiasing, as by timm and by DINOv2
            with registers; ViT and DINOv2 in transformers do without.
        rope_theta: base period of "rotary".
        use_class_token: whether a learned class token stands before the patches.
        n_cls_tokens: how many there are; pooling takes their mean (Pixio has 8); only read where `use_class_token` is True.
        use_distillation_token: whether a second such token follows it (arXiv 2012.12877, section 4).
        num_register_tokens: learned tokens between those and the patches, without positions (arXiv 2309.16588).
        embedding_norm: a LayerNorm between embeddings and layers (CLIP).
        norm_first: True for x + f(norm(x)), False for norm(x + f(x)) (arXiv 2002.04745, figure 1); the latter ends in a
            norm and wants final_norm "none" or "pooled".
        final_norm: the last LayerNorm: on all "tokens" before pooling (and on every map of a backbone), on the "pooled"
            vector alone, or "none".
        pooling: "cls" (the class token), "mean" (mean of the patch tokens), "cls_mean" (both, concatenated; arXiv
            2304.07193, section 7.1), "cls_distillation" (class and distillation token, concatenated) or "map" (attention
            of a learned probe over the patches; arXiv 2106.04560, section 2.1).
        pooler_act: None, or the activation of the dense layer that `HFViTModel` applies to the pooled vector
            ("tanh" in google/vit-base-patch16-224-in21k). Classification does not use it, as in transformers.
        representation_size: None, or the width of a tanh layer between the pooled vector and the classifier (the
            "pre_logits" of arXiv 2010.11929, section 3.1: "a MLP with one hidden layer at pre-training time").
        layerscale_value: None, or the initial value of LayerScale (arXiv 2103.17239, section 2).
        drop_path_rate: stochastic depth, 0 at the first layer and rising linearly to this value at the last
            (arXiv 1603.09382, section 3).
        patch_dropout_rate: part of the patches that the layers do not see while training (arXiv 2208.07220, section 3.2).
        hidden_dropout_prob: dropout after the embeddings, the attention projection, the MLP and the tanh layer of the head.
        attention_probs_dropout_prob: dropout of the attention weights.
        layer_norm_eps: epsilon of every LayerNorm.
        initializer_range: standard deviation of the initial tokens and positions; matrices follow their own sizes
            (Xavier uniform, LeCun normal for patches), so that narrow and wide models both start well.
        out_features, out_indices: which layers `HFViTBackbone` gives, as names ("stem", "stage1", ...) or numbers (0 is the
            embeddings); the last layer by default.
        decoder_hidden_size, decoder_num_hidden_layers, decoder_num_attention_heads, decoder_intermediate_size: sizes of the
            decoder of `HFViTForPreTraining` (arXiv 2111.06377, appendix A.1).
        mask_ratio: part of the patches, in [0, 1), that its encoder does not see; the autoencoder itself needs more than 0.
        norm_pix_loss: whether it learns the pixels of a patch relative to the patch's own mean and standard deviation.
        apply_layernorm: whether the maps of a backbone pass the final norm, where `final_norm` is "tokens".
        reshape_hidden_states: True for maps (B, D, h, w) of the patches; False for all tokens (B, T, D), as DPT and Depth
            Anything want them.

    An unknown argument is an error. Unknown keys of a saved config, which has a `model_type`, are kept and saved again: libraries
    and later versions of transformers add keys of their own to config.json.

    Raises:
        ValueError: for values that do not fit each other, and for an unknown name.
        StrictDataclassFieldValidationError: (of huggingface_hub) for a value that the field cannot have.
    """

    model_type = "hf_vit"

    image_size: int | list[int] | tuple[int, int] = within(224)
    patch_size: int | list[int] | tuple[int, int] = within(16)
    num_channels: int = within(3)
    patch_projection: Literal["conv", "norm_linear_norm"] = "conv"
    patch_bias: bool = True
    hidden_size: int = within(768)
    num_hidden_layers: int = within(12, most=MAX_LAYERS)
    num_attention_heads: int = within(12)
    intermediate_size: int = within(3072, most=MAX_WIDTH)
    hidden_act: str = "gelu"
    gated_mlp: bool = False
    qkv_bias: bool = True
    key_bias: bool = True
    qk_norm: bool = False
    position_embedding: Literal["learned", "sincos1d", "sincos2d", "rotary", "none"] = "learned"
    position_interpolation: Literal["bicubic", "bilinear", "bicubic_corners", "bilinear_corners", "bicubic_offset"] = (
        "bicubic"
    )
    position_antialias: bool = True
    rope_theta: float | int = within(100.0)
    use_class_token: bool = True
    n_cls_tokens: int = within(1)
    use_distillation_token: bool = False
    num_register_tokens: int = within(0, least=0)
    embedding_norm: bool = False
    norm_first: bool = True
    final_norm: Literal["tokens", "pooled", "none"] = "tokens"
    pooling: Literal["cls", "mean", "cls_mean", "cls_distillation", "map"] = "cls"
    pooler_act: str | None = None
    representation_size: int | None = within(None, most=MAX_WIDTH)
    layerscale_value: float | int | None = within(None, least=-MAX_WIDTH)  # NaN is outside
    drop_path_rate: float | int = within(0.0, least=0, most=MAX_RATE)
    patch_dropout_rate: float | int = within(0.0, least=0, most=MAX_RATE)
    hidden_dropout_prob: float | int = within(0.0, least=0, most=MAX_RATE)
    attention_probs_dropout_prob: float | int = within(0.0, least=0, most=MAX_RATE)
    layer_norm_eps: float = within(1e-6, least=0)
    initializer_range: float = within(0.02, least=0)
    decoder_hidden_size: int = within(512)
    decoder_num_hidden_layers: int = within(8, most=MAX_LAYERS)
    decoder_num_attention_heads: int = within(16)
    decoder_intermediate_size: int = within(2048, most=MAX_WIDTH)
    mask_ratio: float = within(0.75, least=0, most=MAX_RATE)  # at 0, a ViTMAEModel gives its features
    norm_pix_loss: bool = True
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None
    apply_layernorm: bool = True
    reshape_hidden_states: bool = True

    # What hf_vit/__init__.py imports before the first config is used; nothing in a copy that travels alone.
    prepare: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "HFViTConfig":
        """A published size, such as `from_preset("tiny-patch16-224", num_labels=10)`; any field can be overridden."""
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; the presets are {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **overrides})

    def __post_init__(self, **kwargs):
        self.prepare()
        stages = [kwargs.pop("out_features", None), kwargs.pop("out_indices", None)]
        if stages != [None, None]:
            self.set_output_features_output_indices(*stages)
        unknown = [key for key in kwargs if key not in TRANSFORMERS_KEYS and not key.startswith("_")]
        if unknown and "model_type" not in kwargs:
            raise ValueError(f"HFViTConfig has no field {unknown[0]!r}")
        check_counts(kwargs)
        if self.id2label is not None:
            self.id2label = labels_by_id(self.id2label)
            self.label2id = self.label2id or {label: index for index, label in self.id2label.items()}
            if kwargs.get("num_labels") not in (None, len(self.id2label)):
                raise ValueError(
                    f"num_labels is {kwargs['num_labels']}, but id2label names {len(self.id2label)} labels"
                )
        super().__post_init__(**kwargs)
        self.validate_architecture()

    def to_dict(self):
        """As in transformers; what few models read is left out where it is the default."""
        fields = super().to_dict()
        if fields["out_indices"] in (None, [self.num_hidden_layers]):
            del fields["out_indices"], fields["out_features"]
        return {key: value for key, value in fields.items() if key not in RARE or value != getattr(type(self), key)}

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """As in transformers; the config.json of a known public family comes back in our terms."""
        cls.prepare()
        kwargs.pop("trust_remote_code", None)  # this class is the code: transformers would warn of it
        asked = dict(kwargs)
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if config_dict.get("model_type") != cls.model_type:
            formats = public_formats(f"read {pretrained_model_name_or_path}")
            checkpoint = formats.read(pretrained_model_name_or_path, asked=asked)
            if checkpoint is None:
                raise OSError(
                    f"{pretrained_model_name_or_path} has no config.json: give a folder or repo with a saved model"
                )
            config_dict = checkpoint.config
        return config_dict, kwargs

    @classmethod
    def from_dict(cls, config_dict, return_unused_kwargs=False, **kwargs):
        """As in transformers, but overrides are in place before the checks run, and one that is no field is an error."""
        if "torch_dtype" in kwargs:  # its name before transformers 5
            kwargs["dtype"] = kwargs.pop("torch_dtype")
        fields = {key: kwargs.pop(key) for key in list(kwargs) if key in cls.__dataclass_fields__}
        if fields.get("dtype") == "auto":
            del fields["dtype"]
        if "id2label" in fields or kwargs.get("num_labels") not in (None, len(config_dict.get("id2label") or ())):
            names = (
                "id2label",
                "label2id",
                "num_labels",
                "thresholds",
            )  # of the checkpoint's head, which is another one
            config_dict = {key: value for key, value in config_dict.items() if key not in names}
        config, unused = super().from_dict({**config_dict, **fields}, return_unused_kwargs=True, **kwargs)
        if return_unused_kwargs:
            return config, unused
        if unused:
            raise ValueError(f"HFViTConfig has no field {min(unused)!r}")
        return config

    def validate_architecture(self):
        """Raise ValueError for fields that do not fit each other; models call it again before they are built."""
        from transformers.activations import ACT2FN  # here, because it makes transformers import accelerate

        (height, width), (patch_height, patch_width) = as_pair(self.image_size), as_pair(self.patch_size)
        D, A, positions, pooling = self.hidden_size, self.num_attention_heads, self.position_embedding, self.pooling
        divisor = {"sincos1d": 2, "sincos2d": 4, "rotary": 4 * A}.get(positions, 1)
        for holds, rule in (
            (
                height % patch_height == 0 and width % patch_width == 0,
                f"patch_size {self.patch_size} does not divide image_size {self.image_size}",
            ),
            (
                {self.hidden_act, self.pooler_act} - {None} <= set(ACT2FN),
                f"hidden_act {self.hidden_act!r} and pooler_act {self.pooler_act!r} must be of {', '.join(sorted(ACT2FN))}",
            ),
            (D % A == 0, f"num_attention_heads {A} must divide hidden_size {D}"),
            (D % divisor == 0, f"{positions} positions need a hidden_size that {divisor} divides, got {D}"),
            (
                self.use_class_token or not (pooling.startswith("cls") or self.use_distillation_token),
                f'pooling "{pooling}" and a distillation token need use_class_token=True: use pooling="mean" or "map"',
            ),
            (
                self.use_distillation_token or pooling != "cls_distillation",
                'pooling "cls_distillation" needs use_distillation_token=True',
            ),
        ):
            if not holds:
                raise ValueError(rule)

    @property
    def stage_names(self) -> list[str]:
        """What `out_features` may name: the embeddings, and each layer."""
        return ["stem", *(f"stage{index + 1}" for index in range(self.num_hidden_layers))]

    @BackboneConfigMixin.out_indices.getter
    def out_indices(self) -> list[int]:
        """The layers that a backbone gives; the last one, also after a change of their number, unless others were named."""
        return [self.num_hidden_layers] if self._out_indices is None else self._out_indices

    @BackboneConfigMixin.out_features.getter
    def out_features(self) -> list[str]:
        """The names of those layers."""
        return [self.stage_names[-1]] if self._out_features is None else self._out_features

    @property
    def grid_size(self) -> tuple[int, int]:
        """(rows, columns) of patches at `image_size`."""
        (height, width), (patch_height, patch_width) = as_pair(self.image_size), as_pair(self.patch_size)
        return height // patch_height, width // patch_width

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the patches: class tokens, distillation token and registers."""
        return self.num_class_tokens + int(self.use_distillation_token) + self.num_register_tokens

    @property
    def num_class_tokens(self) -> int:
        """`n_cls_tokens`, or 0 without a class token."""
        return self.n_cls_tokens if self.use_class_token else 0

    @property
    def pooled_size(self) -> int:
        """Channels of the pooled vector: D, or 2 D where two are concatenated."""
        return self.hidden_size * (2 if self.pooling in ("cls_mean", "cls_distillation") else 1)


__all__ = ["HFViTConfig"]

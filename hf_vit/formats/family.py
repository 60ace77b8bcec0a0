"""What hf_vit knows about one public format: how it names tensors, how its config is read, and which native models it has."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field


ANY = object()  # as supported values: whatever the field holds
# The values of HFViTConfig's fields that a native model supports unless its NativeClass says otherwise.
PLAIN_VIT = dict(
    patch_projection=("conv",), patch_bias=(True,), gated_mlp=(False,), qkv_bias=(True, False), key_bias=(True,),
    qk_norm=(False,), position_embedding=("learned",), use_class_token=(True,), n_cls_tokens=(1,), use_distillation_token=(False,),
    num_register_tokens=(0,), embedding_norm=(False,), norm_first=(True,), final_norm=("tokens",), pooling=("cls",),
    pooler_act=(None,), representation_size=(None,), layerscale_value=(None,),
)  # fmt: skip
VIT_IGNORED = r"(vit\.)?embeddings\.mask_token"


class NativeClass:
    """A model class of transformers by its name, and the values of HFViTConfig's fields that it supports."""

    def __init__(self, name: str, **supports):
        self.name, self.supports = name, supports


def nothing(*_) -> tuple:
    return ()


@dataclass(frozen=True)
class Family:
    """A public checkpoint format; those with a `signature` have raw files, the others a config.json of transformers.

    Args:
        rules: names on disk to names in memory, in transformers' own terms: its loader applies them, and they run backwards.
        extra_rules: HFViTConfig -> the rules that depend on it.
        ignored: a regular expression for tensors that a ViT has no use for, such as a text tower.
        prefix: what a native classifier calls its base model.
        fields: native name -> ours, beyond the names that all families share.
        read_fields: (native config, name of the native classifier that is loaded or "") -> fields of HFViTConfig that are not just renamed.
        native_fields: HFViTConfig -> fields of the native config that are not just renamed.
        base, classifier, autoencoder: the native classes that `to_transformers` builds.
        square_only: whether they take square images and patches only.
        unsupported: HFViTConfig -> what else they cannot express, as "field=value".
        native_head: (head weight, HFViTConfig) -> the head weight of the native classifier, if it is another.
        title, signature: what people call the raw file, and a tensor by which it is recognised.
        infer_fields: (shapes, fields asked for, whether a classifier is loaded, notes to extend) -> fields of HFViTConfig.
    """

    rules: list
    extra_rules: Callable = nothing
    ignored: str | None = None
    prefix: str = ""
    fields: dict = field(default_factory=dict)
    read_fields: Callable = nothing
    native_fields: Callable = nothing
    base: NativeClass | None = None
    classifier: NativeClass | None = None
    autoencoder: NativeClass | None = None
    square_only: bool = False
    unsupported: Callable = nothing
    native_head: Callable | None = None
    title: str = ""
    signature: str = ""
    infer_fields: Callable | None = None

    def rules_for(self, config) -> list:
        """The rules for a model of this config, as new objects: while they work, rules hold tensors."""
        return copy.deepcopy([*self.rules, *self.extra_rules(config)])

"""ViT of transformers, and the families that share its tensor names: DeiT, I-JEPA, MAE and MSN."""

from dataclasses import replace

from transformers.core_model_loading import WeightRenaming

from hf_vit.formats.conversions import join_heads
from hf_vit.formats.family import ANY, VIT_IGNORED, Family, NativeClass
from hf_vit.model.configuration_hf_vit import AUTOENCODER_FIELDS


# transformers 4 named a ViT so, and files keep it, also when transformers 5 writes them.
ATTENTION_RULES = [
    WeightRenaming(r"encoder\.layer\.", "layers."),
    WeightRenaming(r"attention\.attention\.query", "attention.q_proj"),
    WeightRenaming(r"attention\.attention\.key", "attention.k_proj"),
    WeightRenaming(r"attention\.attention\.value", "attention.v_proj"),
    WeightRenaming(r"attention\.output\.dense", "attention.o_proj"),
]
VIT_RULES = [
    *ATTENTION_RULES,
    WeightRenaming(r"intermediate\.dense", "mlp.fc1"),
    WeightRenaming(r"(?<!attention\.)output\.dense", "mlp.fc2"),
]


def read_vit(native, classifier: str) -> dict:
    if native.pooler_output_size not in (None, native.hidden_size):
        raise ValueError(
            f"pooler_output_size {native.pooler_output_size} differs from hidden_size {native.hidden_size}; "
            "hf_vit has no such pooler"
        )
    return {}


def read_deit(native, classifier: str) -> dict:
    fields = read_vit(native, classifier) | dict(use_distillation_token=True)
    if classifier == "DeiTForImageClassificationWithTeacher":
        fields |= dict(pooling="cls_distillation", pooler_act=None)
    return fields


def read_ijepa(native, classifier: str) -> dict:
    return dict(use_class_token=False, pooling="mean", pooler_act=None)


VIT = Family(
    VIT_RULES,
    ignored=VIT_IGNORED,
    prefix="vit",
    fields=dict(pooler_act="pooler_act"),
    read_fields=read_vit,
    base=NativeClass("ViTModel", pooler_act=ANY),
    classifier=NativeClass("ViTForImageClassification", final_norm=("tokens", "pooled")),
)
DISTILLED = dict(use_distillation_token=(True,))
DEIT = replace(
    VIT,
    rules=VIT_RULES + join_heads(r"cls_classifier\.", r"distillation_classifier\."),
    prefix="deit",
    read_fields=read_deit,
    base=NativeClass("DeiTModel", **DISTILLED, pooler_act=ANY),
    classifier=NativeClass("DeiTForImageClassification", **DISTILLED, pooling=("cls", "cls_distillation")),
)
IJEPA = replace(
    VIT,
    prefix="ijepa",
    read_fields=read_ijepa,
    base=NativeClass("IJepaModel", use_class_token=(False,), pooling=("mean",)),
    classifier=NativeClass("IJepaForImageClassification", use_class_token=(False,), pooling=("mean",)),
)
MSN = Family(VIT_RULES, ignored=VIT_IGNORED, prefix="vit")  # given back as ViT
MAE = replace(  # its encoder alone too
    MSN,
    fields=dict(zip(AUTOENCODER_FIELDS, AUTOENCODER_FIELDS, strict=True)),
    autoencoder=NativeClass(
        "ViTMAEForPreTraining",
        final_norm=("tokens", "pooled"),
        pooling=("cls", "mean", "cls_mean"),
        pooler_act=ANY,
        representation_size=ANY,
    ),
    square_only=True,
)

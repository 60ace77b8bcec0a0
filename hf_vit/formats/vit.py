"""ViT of transformers, and the families that share its tensor names: DeiT, I-JEPA, MAE and MSN.

All resample positions by bicubic interpolation to a size (`interpolate_pos_encoding` in transformers/models/vit/modeling_vit.py).
"""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from hf_vit.formats.conversions import join_heads
from hf_vit.formats.family import ANY, NativeFamily
from hf_vit.model.configuration_hf_vit import AUTOENCODER_FIELDS


def rules(config) -> list:
    return get_checkpoint_conversion_mapping("ViTModel")


def deit_rules(config) -> list:
    joined = join_heads(config, r"cls_classifier\.", r"distillation_classifier\.")
    return [*rules(config), *(joined if config.pooling == "cls_distillation" else [])]


def read_vit(native, classifier: str) -> dict:
    if native.pooler_output_size not in (None, native.hidden_size):
        raise ValueError(f"pooler_output_size {native.pooler_output_size} must be hidden_size {native.hidden_size}")
    return {}


def read_deit(native, classifier: str) -> dict:
    fields = read_vit(native, classifier) | dict(use_distillation_token=True)
    if classifier.endswith("WithTeacher"):
        fields |= dict(pooling="cls_distillation", pooler_act=None)
    return fields


def read_ijepa(native, classifier: str) -> dict:
    return WITHOUT_CLASS


WITHOUT_CLASS = dict(use_class_token=False, pooling="mean")
DISTILLED = dict(use_distillation_token=(True,))
ENCODER = dict(use_class_token=(False,), pooling=("mean",))
POOLER = dict(pooler_act="pooler_act")
FAMILIES = [
    NativeFamily(
        name="vit",
        rules=rules,
        prefix="vit",
        read_fields=read_vit,
        base=("ViTModel", dict(pooler_act=ANY)),
        classifier=("ViTForImageClassification", dict(final_norm=("tokens", "pooled"))),
        fields=POOLER,
    ),
    NativeFamily(
        name="deit",
        rules=deit_rules,
        prefix="deit",
        read_fields=read_deit,
        base=("DeiTModel", dict(DISTILLED, pooler_act=ANY)),
        classifier=("DeiTForImageClassification", dict(DISTILLED, pooling=("cls", "cls_distillation"))),
        two_headed="DeiTForImageClassificationWithTeacher",
        fields=POOLER,
    ),
    NativeFamily(
        name="ijepa",
        rules=rules,
        prefix="ijepa",
        read_fields=read_ijepa,
        base=("IJepaModel", ENCODER),
        classifier=("IJepaForImageClassification", ENCODER),
    ),
    NativeFamily(name="vit_msn", rules=rules, prefix="vit"),  # given back as ViT
    NativeFamily(
        name="vit_mae",
        rules=rules,
        prefix="vit",
        fields=dict(zip(AUTOENCODER_FIELDS, AUTOENCODER_FIELDS, strict=True)),
        autoencoder=(
            "ViTMAEForPreTraining",
            dict(
                final_norm=("tokens", "pooled"),
                pooling=("cls", "mean", "cls_mean"),
                pooler_act=ANY,
                representation_size=ANY,
            ),
        ),
        square_only=True,
    ),
]

"""ViT of transformers, and the families that share its tensor names: DeiT, I-JEPA, MAE and MSN.

All resample positions by bicubic interpolation to a size (`interpolate_pos_encoding` in transformers/models/vit/modeling_vit.py).
"""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from hf_vit.formats.conversions import join_heads
from hf_vit.formats.family import NativeFamily


def rules(config) -> list:
    return get_checkpoint_conversion_mapping("ViTModel")


def deit_rules(config) -> list:
    two_heads = config.pooling == "cls_distillation"
    return rules(config) + (join_heads(r"cls_classifier\.", r"distillation_classifier\.") if two_heads else [])


def read_deit(native, classifier: str) -> dict:
    pooled = dict(pooling="cls_distillation", pooler_act=None) if classifier.endswith("WithTeacher") else {}
    return dict(use_distillation_token=True) | pooled


def read_ijepa(native, classifier: str) -> dict:
    return dict(use_class_token=False, pooling="mean", pooler_act=None)


DEIT = ("DeiTModel", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher")
FAMILIES = [
    NativeFamily(name="vit", rules=rules, prefix="vit", classes=("ViTModel", "ViTForImageClassification")),
    NativeFamily(name="deit", rules=deit_rules, prefix="deit", read_fields=read_deit, classes=DEIT),
    NativeFamily(
        name="ijepa",
        rules=rules,
        prefix="ijepa",
        read_fields=read_ijepa,
        classes=("IJepaModel", "IJepaForImageClassification"),
    ),
    NativeFamily(name="vit_msn", rules=rules, prefix="vit"),  # given back as ViT
    NativeFamily(name="vit_mae", rules=rules, prefix="vit", classes=("ViTMAEForPreTraining",), square_only=True),
]

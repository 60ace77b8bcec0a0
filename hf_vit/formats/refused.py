"""Families that look like a plain ViT and are none: refused by name, with the reason."""

from hf_vit.formats.family import NativeFamily


REASONS = {
    "mlcd_vision_model": "rotary positions that count patches, and a learned angle of the class token",
    "aimv2_vision_model": "RMSNorm in place of LayerNorm",
    "siglip2_vision_model": "images of any shape, cut to patches by its processor",
    "beit": "relative positions added to the attention",
}


def refuse(name: str, reason: str) -> NativeFamily:
    def read_fields(*_):
        raise ValueError(f"{name} has {reason}, which no field of HFViTConfig expresses")

    return NativeFamily(name=name, rules=list, read_fields=read_fields)


FAMILIES = [refuse(name, reason) for name, reason in REASONS.items()]

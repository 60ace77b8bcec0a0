"""The image encoder of TIPSv2 of transformers: DINOv2 with registers, whose positions are resampled bilinearly."""

from hf_vit.formats.dinov2 import dinov2
from hf_vit.formats.family import ANTIALIASED


BILINEAR = ANTIALIASED | dict(position_interpolation="bilinear")
IGNORED = r"(text_encoder|text_model|temperature|embeddings\.mask_token)(\.|$)"
FAMILIES = [
    dinov2(
        "tipsv2", "Tipsv2Vision", BILINEAR, ("Model",), aliases=("tipsv2_vision_model",), prefix="", ignored=IGNORED
    )
]

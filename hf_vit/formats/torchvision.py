"""torchvision's `vit_b_16` and its kin: raw files of torch.save.

Positions are resampled with the corners of the grids aligned (`interpolate_embeddings` in torchvision/models/vision_transformer.py).
"""

from hf_vit.formats.conversions import QKV, renamings, split_fused
from hf_vit.formats.family import BICUBIC, RawFamily, Source
from hf_vit.formats.shapes import infer_image_size, infer_num_heads, plain_fields


def rules(config) -> list:
    return [
        *renamings(
            {
                r"encoder\.layers\.encoder_layer_": "layers.",
                "ln_1": "layernorm_before",
                "ln_2": "layernorm_after",
                r"self_attention\.out_proj": "attention.o_proj",
                r"mlp\.(?:linear_1|0)\.": "mlp.fc1.",  # linear_1 in older versions
                r"mlp\.(?:linear_2|3)\.": "mlp.fc2.",
                "class_token": "embeddings.cls_token",
                "conv_proj": "embeddings.patch_embeddings.projection",
                r"encoder\.pos_embedding": "embeddings.position_embeddings",
                r"encoder\.ln\.": "layernorm.",
                r"heads\.head": "classifier",
                r"heads\.pre_logits": "pre_logits",
            }
        ),
        *split_fused(r"self_attention\.in_proj", *QKV),
    ]


def infer_fields(source: Source) -> dict:
    shapes = source.shapes
    fields = plain_fields(source, "conv_proj.weight", r"encoder\.layers\.encoder_layer_(\d+)\.")
    mlp, patch = "encoder.layers.encoder_layer_0.mlp.", fields["patch_size"]
    fields["intermediate_size"] = (shapes.get(f"{mlp}0.weight") or shapes[f"{mlp}linear_1.weight"])[0]
    fields["image_size"] = infer_image_size(source, shapes["encoder.pos_embedding"][1], (1,), patch)
    fields["num_attention_heads"] = infer_num_heads(source, fields["hidden_size"])
    if "heads.pre_logits.weight" in shapes:
        fields["representation_size"] = shapes["heads.pre_logits.weight"][0]
    if "heads.head.weight" in shapes:
        fields["num_labels"] = shapes["heads.head.weight"][0]
    return fields


FAMILIES = [
    RawFamily(
        name="torchvision",
        rules=rules,
        resampling=BICUBIC | dict(position_interpolation="bicubic_corners"),
        title="torchvision",
        signature=("conv_proj.weight", "encoder.pos_embedding"),
        infer_fields=infer_fields,
    )
]

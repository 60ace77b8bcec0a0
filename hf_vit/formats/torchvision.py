"""torchvision's `vit_b_16` and its kin: raw files of torch.save.

Positions are resampled with the corners of the grids aligned (`interpolate_embeddings` in torchvision/models/vision_transformer.py).
"""

from hf_vit.formats.conversions import QKV, renamings, split_fused
from hf_vit.formats.family import BICUBIC, RawFamily
from hf_vit.formats.source import Source


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
    fields, (positions, _) = source.plain_fields(rules), source.tensors["encoder.pos_embedding"][0].shape
    return fields | dict(
        image_size=source.image_size(positions, (1,), fields["patch_size"]),
        num_attention_heads=source.num_heads(fields["hidden_size"]),
    )


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

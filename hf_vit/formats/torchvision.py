"""torchvision's `vit_b_16` and its kin: raw files of torch.save."""

from transformers.core_model_loading import WeightRenaming

from hf_vit.formats.conversions import QKV, split_fused
from hf_vit.formats.family import Family
from hf_vit.formats.shapes import count_layers, infer_image_size, infer_num_heads


RULES = [
    WeightRenaming(r"encoder\.layers\.encoder_layer_", "layers."),
    WeightRenaming("ln_1", "layernorm_before"),
    WeightRenaming("ln_2", "layernorm_after"),
    WeightRenaming(r"self_attention\.out_proj", "attention.o_proj"),
    WeightRenaming(r"mlp\.linear_1", "mlp.fc1"),  # as older versions wrote
    WeightRenaming(r"mlp\.linear_2", "mlp.fc2"),
    WeightRenaming(r"mlp\.0\.", "mlp.fc1."),
    WeightRenaming(r"mlp\.3\.", "mlp.fc2."),
    WeightRenaming("class_token", "embeddings.cls_token"),
    WeightRenaming("conv_proj", "embeddings.patch_embeddings.projection"),
    WeightRenaming(r"encoder\.pos_embedding", "embeddings.position_embeddings"),
    WeightRenaming(r"encoder\.ln\.", "layernorm."),
    WeightRenaming(r"heads\.head", "classifier"),
    WeightRenaming(r"heads\.pre_logits", "pre_logits"),
    *split_fused(r"self_attention\.in_proj", *QKV),
]


def infer_torchvision(shapes: dict, asked: dict, is_classifier: bool, notes: list) -> dict:
    hidden_size, num_channels, *patch = shapes["conv_proj.weight"]
    mlp = "encoder.layers.encoder_layer_0.mlp."
    width = (shapes.get(f"{mlp}0.weight") or shapes[f"{mlp}linear_1.weight"])[0]
    depth, positions = count_layers(shapes, r"encoder\.layers\.encoder_layer_(\d+)\."), shapes["encoder.pos_embedding"]
    fields = dict(num_channels=num_channels, patch_size=patch, hidden_size=hidden_size, intermediate_size=width)
    fields["num_hidden_layers"] = depth
    fields["image_size"] = infer_image_size(positions[1], (1,), patch, notes, asked=asked.get("image_size"))
    fields["num_attention_heads"] = infer_num_heads(hidden_size, asked, notes)
    if "heads.pre_logits.weight" in shapes:
        fields["representation_size"] = shapes["heads.pre_logits.weight"][0]
    if "heads.head.weight" in shapes:
        fields["num_labels"] = shapes["heads.head.weight"][0]
    return fields


TORCHVISION = Family(RULES, title="torchvision", signature="conv_proj.weight", infer_fields=infer_torchvision)

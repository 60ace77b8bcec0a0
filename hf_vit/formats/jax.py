"""Google's `.npz` files: Flax names of vision_transformer (original, augreg) and of big_vision, with dots for slashes.

A dense kernel is (in, out); those of attention keep the heads apart, (D, A, K) and (A, K, D).
"""

import re

from transformers.core_model_loading import Transpose, WeightConverter, WeightRenaming

from hf_vit.formats.conversions import AlignPositions, Apply
from hf_vit.formats.family import Family
from hf_vit.formats.shapes import count_layers, infer_image_size


PATCHES = "embeddings.patch_embeddings.projection"
RULES = [
    WeightRenaming(r"^MAPHead_0\.", "attention_pooling."),
    WeightRenaming(r"attention_pooling\.LayerNorm_0\.", "attention_pooling.layernorm."),
    WeightRenaming(r"attention_pooling\.MultiHeadDotProductAttention_0\.", "attention_pooling."),
    WeightRenaming(r"^Transformer\.encoderblock_", "layers."),
    # vision_transformer counts the parts of a layer on (LayerNorm_2, MlpBlock_3), big_vision counts each kind.
    WeightRenaming(r"LayerNorm_0\.", "layernorm_before."),
    WeightRenaming(r"LayerNorm_[12]\.", "layernorm_after."),
    WeightRenaming(r"MultiHeadDotProductAttention_[01]\.", "attention."),
    WeightRenaming(r"out\.bias", "o_proj.bias"),
    WeightRenaming(r"MlpBlock_[03]\.Dense_0\.", "mlp.fc1."),
    WeightRenaming(r"MlpBlock_[03]\.Dense_1\.", "mlp.fc2."),
    WeightRenaming(r"^Transformer\.encoder_norm\.", "layernorm."),
    WeightRenaming(r"\.scale", ".weight"),
    WeightRenaming(r"^Transformer\.posembed_input\.pos_embedding", "pos_embedding"),
    WeightRenaming("^cls", "embeddings.cls_token"),
    WeightRenaming(r"^embedding\.bias", f"{PATCHES}.bias"),
    WeightRenaming(r"^head\.", "classifier."),
    WeightConverter("^pos_embedding", "embeddings.position_embeddings", [AlignPositions()]),
    WeightConverter(r"^embedding\.kernel", f"{PATCHES}.weight", [Apply(lambda t: t.permute(3, 2, 0, 1))]),
    WeightConverter(r"out\.kernel", "o_proj.weight", [Apply(lambda t: t.flatten(0, 1).T)]),
]
for name in ("query", "key", "value"):
    RULES.append(WeightConverter(rf"{name}\.kernel", f"{name[0]}_proj.weight", [Apply(lambda t: t.flatten(1).T)]))
    RULES.append(WeightConverter(rf"{name}\.bias", f"{name[0]}_proj.bias", [Apply(lambda t: t.flatten())]))
for name in ("mlp.fc1", "mlp.fc2", "classifier", "pre_logits", "pooler.dense"):
    RULES.append(WeightConverter(rf"{name}\.kernel", f"{name}.weight", [Transpose()]))


def infer_jax(shapes: dict, asked: dict, is_classifier: bool, notes: list) -> dict:
    if "conv_root.kernel" in shapes:
        raise ValueError(
            "this is a hybrid of ResNet and ViT, which hf_vit does not express: take a plain ViT checkpoint"
        )
    *patch, num_channels, hidden_size = shapes["embedding.kernel"]
    first = r"Transformer\.encoderblock_0"
    heads = next(shape[1] for name, shape in shapes.items() if re.match(rf"{first}\.Multi\w+\.query\.kernel", name))
    width = next(shape[1] for name, shape in shapes.items() if re.match(rf"{first}\.Mlp\w+\.Dense_0\.kernel", name))
    has_probe, class_token = "MAPHead_0.probe" in shapes, "cls" in shapes
    positions = shapes.get("pos_embedding") or shapes.get("Transformer.posembed_input.pos_embedding")
    depth = count_layers(shapes, r"Transformer\.encoderblock_(\d+)\.")
    fields = dict(num_channels=num_channels, patch_size=patch, hidden_size=hidden_size, intermediate_size=width)
    fields |= dict(num_hidden_layers=depth, num_attention_heads=heads, use_class_token=class_token)
    fields |= dict(pooling="map" if has_probe else "cls" if class_token else "mean")
    fields |= dict(position_embedding="learned" if positions else "sincos2d")
    if positions:
        fields["image_size"] = infer_image_size(
            positions[1], (int(class_token), 0), patch, notes, asked=asked.get("image_size")
        )
    if "pre_logits.kernel" in shapes:
        fields["representation_size"] = shapes["pre_logits.kernel"][1]
    if "pooler.dense.kernel" in shapes:
        fields["pooler_act"] = "tanh"
    if "head.kernel" in shapes:
        fields["num_labels"] = shapes["head.kernel"][1]
    return fields


JAX = Family(RULES, title="Google's JAX .npz", signature="embedding.kernel", infer_fields=infer_jax)

"""Google's `.npz` files: Flax names of vision_transformer (original, augreg) and of big_vision, with dots for slashes.

A dense kernel is (in, out); those of attention keep the heads apart, (D, A, K) and (A, K, D). Positions are resampled linearly,
with the corners of the grids aligned (`scipy.ndimage.zoom(order=1)` in vit_jax/checkpoint.py and big_vision/models/vit.py).
"""

import re

from transformers.core_model_loading import Transpose, WeightConverter, WeightRenaming

from hf_vit.formats.conversions import AlignPositions, Apply, renamings
from hf_vit.formats.family import BICUBIC, RawFamily, Source
from hf_vit.formats.shapes import count_layers, infer_image_size


PATCHES = "embeddings.patch_embeddings.projection"


def rules(config) -> list:
    found = [
        *renamings(
            {
                r"^MAPHead_0\.": "attention_pooling.",
                r"attention_pooling\.LayerNorm_0\.": "attention_pooling.layernorm.",
                r"attention_pooling\.MultiHeadDotProductAttention_0\.": "attention_pooling.",
                r"^Transformer\.encoderblock_": "layers.",
                # vision_transformer counts the parts of a layer on (LayerNorm_2, MlpBlock_3), big_vision counts each kind.
                r"LayerNorm_0\.": "layernorm_before.",
                r"LayerNorm_[12]\.": "layernorm_after.",
                r"MultiHeadDotProductAttention_[01]\.": "attention.",
                r"out\.bias": "o_proj.bias",
                r"MlpBlock_[03]\.Dense_0\.": "mlp.fc1.",
                r"MlpBlock_[03]\.Dense_1\.": "mlp.fc2.",
                r"^Transformer\.encoder_norm\.": "layernorm.",
                r"\.scale": ".weight",
                r"^Transformer\.posembed_input\.pos_embedding": "pos_embedding",
                "^cls": "embeddings.cls_token",
                r"^embedding\.bias": f"{PATCHES}.bias",
                r"^head\.": "classifier.",
                # The tanh layer of a head is what transformers calls the pooler of a base model.
            }
        ),
        *([WeightRenaming(r"^pre_logits\.", "pooler.dense.")] if config.pooler_act else []),
        WeightConverter("^pos_embedding", "embeddings.position_embeddings", [AlignPositions()]),
        WeightConverter(r"^embedding\.kernel", f"{PATCHES}.weight", [Apply(lambda t: t.permute(3, 2, 0, 1))]),
        WeightConverter(r"out\.kernel", "o_proj.weight", [Apply(lambda t: t.flatten(0, 1).T)]),
    ]
    for name in ("query", "key", "value"):
        found.append(WeightConverter(rf"{name}\.kernel", f"{name[0]}_proj.weight", [Apply(lambda t: t.flatten(1).T)]))
        found.append(WeightConverter(rf"{name}\.bias", f"{name[0]}_proj.bias", [Apply(lambda t: t.flatten())]))
    for name in ("mlp.fc1", "mlp.fc2", "classifier", "pre_logits", "pooler.dense"):
        found.append(WeightConverter(rf"{name}\.kernel", f"{name}.weight", [Transpose()]))
    return found


def infer_fields(source: Source) -> dict:
    shapes = source.shapes
    if "conv_root.kernel" in shapes:
        raise ValueError("it is a hybrid of ResNet and ViT, which no field expresses: take a plain ViT checkpoint")
    *patch, num_channels, hidden_size = shapes["embedding.kernel"]
    first = r"Transformer\.encoderblock_0"
    heads = next(shape[1] for name, shape in shapes.items() if re.match(rf"{first}\.Multi\w+\.query\.kernel", name))
    width = next(shape[1] for name, shape in shapes.items() if re.match(rf"{first}\.Mlp\w+\.Dense_0\.kernel", name))
    has_probe, class_token = "MAPHead_0.probe" in shapes, "cls" in shapes
    positions = shapes.get("pos_embedding") or shapes.get("Transformer.posembed_input.pos_embedding")
    fields = dict(
        num_channels=num_channels,
        patch_size=patch,
        hidden_size=hidden_size,
        intermediate_size=width,
        num_hidden_layers=count_layers(shapes, r"Transformer\.encoderblock_(\d+)\."),
        num_attention_heads=heads,
        use_class_token=class_token,
        pooling="map" if has_probe else "cls" if class_token else "mean",
        position_embedding="learned" if positions else "sincos2d",
    )
    if positions:
        fields["image_size"] = infer_image_size(source, positions[1], (int(class_token), 0), patch)
    if "pre_logits.kernel" in shapes and source.is_classifier:
        fields["representation_size"] = shapes["pre_logits.kernel"][1]
    elif "pre_logits.kernel" in shapes:
        fields["pooler_act"] = "tanh"
    if "head.kernel" in shapes:
        fields["num_labels"] = shapes["head.kernel"][1]
    return fields


FAMILIES = [
    RawFamily(
        name="jax",
        rules=rules,
        resampling=BICUBIC | dict(position_interpolation="bilinear_corners"),
        title="Google's JAX .npz",
        signature=("embedding.kernel",),
        infer_fields=infer_fields,
    )
]

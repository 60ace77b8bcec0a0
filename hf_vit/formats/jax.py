"""Google's `.npz` files: Flax names of vision_transformer (original, augreg) and of big_vision, with dots for slashes.

A dense kernel is (in, out); those of attention keep the heads apart, (D, A, K) and (A, K, D). Positions are resampled linearly,
with the corners of the grids aligned (`scipy.ndimage.zoom(order=1)` in vit_jax/checkpoint.py and big_vision/models/vit.py).
"""

from functools import partial

import torch
from transformers.core_model_loading import WeightConverter, WeightRenaming

from hf_vit.formats.conversions import Apply, align_positions, renamings
from hf_vit.formats.family import BICUBIC, RawFamily
from hf_vit.formats.source import PATCHES, Source, count_layers


def rules(config) -> list:
    convert = lambda source, target, forward: WeightConverter(source, target, [Apply(forward)])
    return [
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
                r"\.query\.": ".q_proj.",
                r"\.key\.": ".k_proj.",
                r"\.value\.": ".v_proj.",
                r"\.out\.": ".o_proj.",
                r"MlpBlock_[03]\.Dense_0\.": "mlp.fc1.",
                r"MlpBlock_[03]\.Dense_1\.": "mlp.fc2.",
                r"^Transformer\.encoder_norm\.": "layernorm.",
                r"\.scale": ".weight",
                r"^Transformer\.posembed_input\.pos_embedding": "pos_embedding",
                "^cls": "embeddings.cls_token",
                r"^embedding\.": f"{PATCHES}.",
                r"^head\.": "classifier.",
            }
        ),
        *([WeightRenaming(r"^pre_logits\.", "pooler.dense.")] if config.pooler_act else []),
        convert("^pos_embedding", "embeddings.position_embeddings", partial(align_positions, config)),
        convert(r"projection\.kernel", "projection.weight", lambda t: t.permute(3, 2, 0, 1)),
        convert(r"o_proj\.kernel", "o_proj.weight", lambda t: t.flatten(0, 1).T),
        convert(r"_proj\.kernel", "_proj.weight", lambda t: t.flatten(1).T),
        convert(r"_proj\.bias", "_proj.bias", torch.flatten),
        convert(r"\.kernel", ".weight", lambda t: t.T),
    ]


def infer_fields(source: Source) -> dict:
    if "conv_root.kernel" in source.tensors:
        raise ValueError("it is a hybrid of ResNet and ViT, which no field expresses: take a plain ViT checkpoint")
    shapes = source.renamed_shapes(rules)
    *patch, num_channels, hidden_size = shapes[f"{PATCHES}.kernel"]
    class_token, has_positions = "embeddings.cls_token" in shapes, "pos_embedding" in shapes
    fields = dict(
        num_channels=num_channels,
        patch_size=patch,
        hidden_size=hidden_size,
        intermediate_size=shapes["layers.0.mlp.fc1.kernel"][1],
        num_hidden_layers=count_layers(shapes),
        num_attention_heads=shapes["layers.0.attention.q_proj.kernel"][1],
        use_class_token=class_token,
        pooling="map" if "attention_pooling.probe" in shapes else "cls" if class_token else "mean",
        position_embedding="learned" if has_positions else "sincos2d",
    )
    if has_positions:
        fields["image_size"] = source.image_size(shapes["pos_embedding"][1], (int(class_token), 0), patch)
    if "pre_logits.kernel" in shapes:  # the tanh layer of a head is what transformers calls the pooler of a base model
        tanh = (
            dict(representation_size=shapes["pre_logits.kernel"][1])
            if source.is_classifier
            else dict(pooler_act="tanh")
        )
        fields |= tanh
    if "classifier.kernel" in shapes:
        fields["num_labels"] = shapes["classifier.kernel"][1]
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

"""The image towers of OpenCLIP (open_clip/transformer.py, VisionTransformer): repositories and files, without their projection.

Positions are resampled with antialiasing (`resize_pos_embed` in open_clip/model.py). Tokens pass the last norm, as open_clip's
do; with final_norm="pooled", it is the network of CLIPVisionModel.
"""

from hf_vit.formats.conversions import QKV, add_leading, renamings, split_fused
from hf_vit.formats.family import ANTIALIASED, RawFamily
from hf_vit.formats.source import Source


def rules(config) -> list:
    return [
        *renamings(
            {
                r"^transformer\.resblocks\.": "layers.",
                r"^conv1\.": "embeddings.patch_embeddings.projection.",
                r"^ln_pre\.": "embeddings.layernorm.",
                r"^ln_post\.": "layernorm.",
                "ln_1": "layernorm_before",
                "ln_2": "layernorm_after",
                r"attn\.out_proj": "attention.o_proj",
                r"mlp\.c_fc": "mlp.fc1",
                r"mlp\.c_proj": "mlp.fc2",
                r"ls_([12])\.gamma": r"layer_scale\1.lambda1",
            }
        ),
        add_leading("^class_embedding", "embeddings.cls_token", 2),
        add_leading("^positional_embedding", "embeddings.position_embeddings", 1),
        *split_fused(r"attn\.in_proj", *QKV),
    ]


def infer_fields(source: Source) -> dict:
    said, fields = source.said.get("model_cfg", {}), source.plain_fields(rules)
    vision, width = said.get("vision_cfg", {}), fields["hidden_size"]
    act = "quick_gelu" if said.get("quick_gelu") else "gelu"
    if (vision.get("act_kwargs") or {}).get("approximate") == "tanh":
        act = "gelu_pytorch_tanh"
    if not vision:  # OpenAI's models have quick_gelu
        source.assume(hidden_act=act)
    positions = len(source.tensors["positional_embedding"])
    return fields | dict(
        image_size=source.image_size(positions, (1,), fields["patch_size"], vision.get("image_size")),
        num_attention_heads=width // vision.get("head_width", 64) if vision else source.num_heads(width),
        hidden_act=act,
        use_class_token=True,
        layer_norm_eps=(vision.get("norm_kwargs") or {}).get("eps", 1e-5),
        pooling={"tok": "cls", "avg": "mean"}[vision.get("pool_type", "tok")],
        final_norm="pooled" if vision.get("final_ln_after_pool") else "tokens",
    )


FAMILIES = [
    RawFamily(
        name="open_clip",
        rules=rules,
        ignored="proj$",  # from the pooled vector to the space that images share with text
        resampling=ANTIALIASED,
        title="OpenCLIP",
        signature=("conv1.weight", "class_embedding", "ln_post.weight"),
        infer_fields=infer_fields,
        claims=lambda said: "model_cfg" in said,
        files=("open_clip_config.json", "open_clip_model.safetensors", "open_clip_pytorch_model.bin"),
    )
]

"""Public ViT formats to ours: for each family how its config translates, and one table of renaming rules."""

from collections.abc import Callable
from dataclasses import dataclass

from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from .configuration_hf_vit import HFViTConfig


@dataclass(frozen=True)
class Family:
    """A public format: `translate` turns its config.json (a dict) into fields of HFViTConfig, `rules` rename its tensors."""

    translate: Callable[[dict], dict]
    rules: list


COMMON_FIELDS = (
    "image_size", "patch_size", "num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "intermediate_size", "hidden_act", "qkv_bias", "hidden_dropout_prob", "attention_probs_dropout_prob",
    "layer_norm_eps", "initializer_range", "id2label", "label2id", "problem_type", "dtype", "torch_dtype",
)  # fmt: skip


def translate_vit(config: dict) -> dict:
    """transformers `vit`, such as google/vit-base-patch16-224-in21k. Its defaults, where the file is silent, are ViTConfig's."""
    if config.get("pooler_output_size") not in (None, config.get("hidden_size", 768)):
        raise ValueError(
            f"pooler_output_size {config['pooler_output_size']} differs from hidden_size; hf_vit has no such pooler"
        )
    fields = {"layer_norm_eps": 1e-12, **{name: config[name] for name in COMMON_FIELDS if name in config}}
    return {**fields, "pooler_act": config.get("pooler_act", "tanh")}


FAMILIES = {
    # Files keep the names of transformers 4, also when transformers 5 writes them.
    "vit": Family(
        translate_vit,
        [
            WeightRenaming(r"encoder\.layer\.", "layers."),
            WeightRenaming(r"attention\.attention\.query", "attention.q_proj"),
            WeightRenaming(r"attention\.attention\.key", "attention.k_proj"),
            WeightRenaming(r"attention\.attention\.value", "attention.v_proj"),
            WeightRenaming(r"attention\.output\.dense", "attention.o_proj"),
            WeightRenaming(r"intermediate\.dense", "mlp.fc1"),
            WeightRenaming(r"(?<!attention\.)output\.dense", "mlp.fc2"),
        ],
    ),
}

for name, family in FAMILIES.items():
    # Custom code gets renaming rules only if they are registered; the model carries this name while it loads.
    register_checkpoint_conversion_mapping(f"{HFViTConfig.model_type}<{name}", family.rules, overwrite=True)
    HFViTConfig.families[name] = family

"""The way back: the native transformers model that computes what ours computes.

Each native class is tried by the way in: its config, read as every config.json of its family is, must say what ours says. What
comes back otherwise, the class cannot express; so a new field is refused until a native config has it.
"""

import re
from types import SimpleNamespace

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from hf_vit.formats.family import OWN_FIELDS, NativeFamily
from hf_vit.formats.read import LABEL_FIELDS, families
from hf_vit.model.configuration_hf_vit import AUTOENCODER_FIELDS, HFViTConfig, as_pair
from hf_vit.model.loading import silence_load_report


# Never read: the mask of pre-training, an empty tensor for no registers, and the norm behind which a CLIP classifier takes its tokens.
UNUSED = r"(.*\.)?(mask_token|register_tokens|post_layernorm\.(weight|bias))"
# Fields that change no output in evaluation, at the model's own size.
FREE = {
    "initializer_range", "hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate", "patch_dropout_rate",
    "position_interpolation", "position_antialias", "_out_features", "_out_indices", "apply_layernorm", "reshape_hidden_states",
    *AUTOENCODER_FIELDS,  # which ViTMAEConfig names alike
}  # fmt: skip


def to_transformers(model):
    """See `HFViTPreTrainedModel.to_transformers`; of the classes that express a model, the one with the fewest peculiarities."""
    kind = "ForImageClassification" if model.is_classifier else "ForPreTraining" if model.is_autoencoder else "Model"
    rank = lambda family: (family.square_only, len(family.fields), family.name)
    classes = [(family, name) for family in sorted(families(NativeFamily), key=rank) for name in family.classes]
    wrong = {}
    for family, name in classes:
        if kind not in name:
            continue
        model_class = getattr(transformers, name)
        native = native_config(model.config, family, model_class.config_class)
        read = family.read_config(native, name if model.is_classifier else "")
        read = {field: read.get(field, getattr(HFViTConfig, field)) for field in OWN_FIELDS}
        wrong[name] = inexpressible_fields(model, read)
        if not wrong[name]:
            return build_native(model, family, model_class, native, read)
    closest = min(wrong, key=lambda name: len(wrong[name]))
    raise ValueError(
        f"no native transformers model has {' and '.join(wrong[closest])} (the closest is {closest}); "
        "save_pretrained keeps the model as it is"
    )


def inexpressible_fields(model, read: dict) -> list[str]:
    """What of the model's config was read back otherwise, as "field=value"."""
    config, no_pooler = model.config, model.is_classifier or model.is_autoencoder
    norms, poolings = {config.final_norm, read["final_norm"]}, (config.pooling, read["pooling"])
    is_same = {
        "image_size": as_pair(config.image_size) == as_pair(read["image_size"]),
        "patch_size": as_pair(config.patch_size) == as_pair(read["patch_size"]),
        # A fixed table is a learned one with those values, a missing bias one of zeros, a missing LayerScale one of ones.
        "position_embedding": config.position_embedding.startswith("sincos")
        and read["position_embedding"] == "learned",
        "patch_bias": read["patch_bias"],
        "key_bias": read["key_bias"] or not config.qkv_bias,
        "layerscale_value": read["layerscale_value"] is not None,
        "pooler_act": no_pooler or config.pooler_act is None,
        "representation_size": model.is_autoencoder,
        # A head over class token and mean may take zeros for one of them; the norm of all tokens is that of the class token.
        "pooling": model.is_autoencoder or (no_pooler and poolings in (("cls", "cls_mean"), ("mean", "cls_mean"))),
        "final_norm": no_pooler
        and norms == {"tokens", "pooled"}
        and (model.is_autoencoder or config.pooling == "cls"),
    }
    fields = {name: getattr(config, name) for name in sorted(OWN_FIELDS - FREE)}
    return [f"{name}={value!r}" for name, value in fields.items() if value != read[name] and not is_same.get(name)]


def native_config(config, family: NativeFamily, config_class):
    """The config of a native class of this family, as far as it has our fields."""
    vision_class = config_class.sub_configs.get("vision_config", config_class)
    fields = {theirs: getattr(config, ours) for theirs, ours in family.names(vision_class).items()}
    fields = {name: value for name, value in fields.items() if value is not None}
    if family.square_only:
        fields |= {field: as_pair(fields[field])[0] for field in ("image_size", "patch_size")}
    fields |= dict(family.native_fields(config))
    labels = {name: getattr(config, name) for name in LABEL_FIELDS if hasattr(config, name)}
    if config_class.sub_configs:  # a CLIP classifier has the config of image and text
        return config_class(vision_config=fields, **labels)
    return config_class(**fields, **labels)


def native_weights(model, read: dict) -> dict[str, torch.Tensor]:
    """Copies of the model's weights under our names, and what the native class has beside them."""
    config = model.config
    weights = {key.removeprefix("vit."): tensor.detach().clone() for key, tensor in model.state_dict().items()}
    zeros = torch.zeros_like(weights["layers.0.layernorm_before.bias"])  # (D,)
    if config.position_embedding.startswith("sincos"):
        embeddings = model.base_model.embeddings
        prefix, patches = embeddings.positions_on_grid(config.grid_size)  # (1, 0 to 2, D), (1, N, D)
        no_position = zeros.expand(1, embeddings.num_positioned - prefix.shape[1], -1)
        weights["embeddings.position_embeddings"] = torch.cat([no_position, prefix, patches], dim=1)
    if read["patch_bias"]:
        weights.setdefault("embeddings.patch_embeddings.projection.bias", zeros)
    for layer in range(config.num_hidden_layers):
        if read["qkv_bias"] and read["key_bias"]:
            weights.setdefault(f"layers.{layer}.attention.k_proj.bias", zeros)
        for scale in ("layer_scale1", "layer_scale2") if read["layerscale_value"] is not None else ():
            weights.setdefault(f"layers.{layer}.{scale}.lambda1", torch.ones_like(zeros))
    if model.is_classifier and read["pooling"] != config.pooling:
        head = weights["classifier.weight"]  # (L, D)
        both = [head, torch.zeros_like(head)]
        weights["classifier.weight"] = torch.cat(both if config.pooling == "cls" else both[::-1], dim=1)  # (L, 2 D)
    return weights


def build_native(model, family: NativeFamily, model_class, native, read: dict):
    """The native model with copies of the model's weights."""
    config, weights = model.config, native_weights(model, read)
    no_pooler = hasattr(native, "pooler_act") and not model.is_classifier and model.pooler is None
    decoder = {key: weights.pop(key) for key in list(weights) if key.startswith("decoder.")}  # named alike in memory
    stored = revert_weight_conversion(
        SimpleNamespace(_weight_conversions=family.rules(config), config=config), weights
    )
    if model.is_classifier or model.is_autoencoder:
        stored = {key if "classifier." in key else f"{family.prefix}.{key}": stored[key] for key in stored} | decoder
    with silence_load_report():
        result, info = model_class.from_pretrained(
            None,
            config=native,
            state_dict=stored,
            output_loading_info=True,
            dtype=model.dtype,
            attn_implementation=config._attn_implementation,
            **(dict(add_pooling_layer=False) if no_pooler else {}),
        )
    info["missing_keys"] = {key for key in info["missing_keys"] if not re.fullmatch(UNUSED, key)}
    if any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise RuntimeError(f"{model_class.__name__} does not take the weights of this model: {info}")
    return result.train(model.training).to(model.device)

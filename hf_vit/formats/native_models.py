"""The way back: the native transformers model that computes what ours computes."""

import re
from types import SimpleNamespace

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from hf_vit.formats.family import ANY, NativeFamily
from hf_vit.formats.read import BACKBONE_FIELDS, COMMON_FIELDS, of_kind
from hf_vit.model.configuration_hf_vit import AUTOENCODER_FIELDS, HFViTConfig, as_pair
from hf_vit.model.loading import silence_load_report


# Never read: the mask of pre-training, and the norm behind which a CLIP classifier takes its tokens.
UNUSED = r"(.*\.)?(mask_token|post_layernorm\.(weight|bias))"
# What a native config says where ours has None.
NEUTRAL = dict(layerscale_value=1.0, pooler_act="tanh")
# Fields that native configs take over, or that change no output at the model's own size. Of the others a native class supports
# what it says, else the default alone: a new field is refused until somebody has thought of it.
CARRIED = {
    *COMMON_FIELDS, *BACKBONE_FIELDS, *AUTOENCODER_FIELDS, *PreTrainedConfig.__dataclass_fields__, "rope_theta",
    "position_interpolation", "position_antialias", "patch_dropout_rate", "_out_features", "_out_indices",
}  # fmt: skip


def to_transformers(model):
    """See `HFViTPreTrainedModel.to_transformers`; of the classes that express a model, the one with the fewest peculiarities."""
    kind = "classifier" if model.is_classifier else "autoencoder" if model.is_autoencoder else "base"
    candidates = [family for family in of_kind(NativeFamily) if getattr(family, kind) is not None]
    candidates.sort(key=lambda family: (len(getattr(family, kind)[1]), family.square_only, family.name))
    for fold_layerscale in (False, True):  # it is kept where a family has it, else multiplied into the layer before it
        wrong = {}
        for family in candidates:
            wrong[family.name] = unsupported_fields(model, family, getattr(family, kind)[1], fold_layerscale)
            if not wrong[family.name]:
                return build_native(model, family, *getattr(family, kind))
    closest = min(wrong, key=lambda name: len(wrong[name]))
    raise ValueError(
        f"no native transformers {'model' if kind == 'base' else kind} has {' and '.join(wrong[closest])} "
        f"(the closest is {closest}); save_pretrained keeps the model as it is"
    )


def unsupported_fields(model, family: NativeFamily, supports: dict, fold_layerscale: bool) -> list[str]:
    """What of the model's config the native class cannot express, as "field=value"."""
    config = model.config
    unlisted = sorted(set(HFViTConfig.__dataclass_fields__) - CARRIED)
    supported = {name: (getattr(HFViTConfig, name),) for name in unlisted} | supports
    supported |= dict(layerscale_value=ANY) if fold_layerscale else {}
    fields = {name: getattr(config, name) for name in supported}
    if fields["position_embedding"].startswith("sincos"):
        fields["position_embedding"] = "learned"  # a fixed table is a learned one with those values
    for bias in ("patch_bias", "key_bias"):
        if supported[bias] == (True,):
            fields[bias] = True  # a bias of zero
    if model.is_classifier:
        fields["pooler_act"] = None  # not part of a classifier
    unfit = [name for name in fields if supported[name] is not ANY and fields[name] not in supported[name]]
    wrong = [f"{name}={fields[name]!r}" for name in unfit]
    if family.square_only:
        sizes = {name: as_pair(getattr(config, name)) for name in ("image_size", "patch_size")}
        wrong += [f"{name}={size}" for name, size in sizes.items() if size[0] != size[1]]
    return [*wrong, *family.unsupported(config)]


def native_weights(model, supports: dict) -> dict[str, torch.Tensor]:
    """Copies of the model's weights under our names, with what native fields do not express made part of them."""
    config = model.config
    weights = {key.removeprefix("vit."): tensor.detach().clone() for key, tensor in model.state_dict().items()}
    zeros = torch.zeros_like(weights["layers.0.layernorm_before.bias"])  # (D,)
    if config.position_embedding.startswith("sincos"):
        embeddings = model.base_model.embeddings
        prefix, patches = embeddings.positions_on_grid(config.grid_size)  # (1, 0 to 2, D), (1, N, D)
        no_position = zeros.expand(1, embeddings.num_positioned - prefix.shape[1], -1)
        weights["embeddings.position_embeddings"] = torch.cat([no_position, prefix, patches], dim=1)
    if "num_register_tokens" in supports:  # native models without registers hold an empty tensor
        weights.setdefault("embeddings.register_tokens", zeros.new_zeros(1, 0, config.hidden_size))
    if not config.patch_bias and "patch_bias" not in supports:
        weights["embeddings.patch_embeddings.projection.bias"] = zeros
    for index in range(config.num_hidden_layers):
        layer = f"layers.{index}"
        if config.qkv_bias and not config.key_bias and "key_bias" not in supports:
            weights[f"{layer}.attention.k_proj.bias"] = zeros
        for scale, dense in (
            ("layer_scale1", "attention.o_proj"),
            ("layer_scale2", "mlp.down_proj" if config.gated_mlp else "mlp.fc2"),
        ):
            if "layerscale_value" in supports:
                weights.setdefault(f"{layer}.{scale}.lambda1", torch.ones_like(zeros))
            elif config.layerscale_value is not None:
                factor = weights.pop(f"{layer}.{scale}.lambda1")  # (D,)
                weights[f"{layer}.{dense}.weight"] *= factor.unsqueeze(1)  # (D, in)
                weights[f"{layer}.{dense}.bias"] *= factor
    return weights


def native_config(config, family: NativeFamily, model_class):
    """The config of a native class of this family."""
    known = AutoConfig.for_model(family.name)
    known = known.vision_config if known.sub_configs else known
    fields = {field: getattr(config, field) for field in COMMON_FIELDS if hasattr(known, field)}
    for theirs, ours in family.fields.items():
        value = getattr(config, ours)
        fields[theirs] = NEUTRAL.get(ours) if value is None else value
    if family.square_only:
        fields |= {field: as_pair(fields[field])[0] for field in ("image_size", "patch_size")}
    fields |= dict(family.native_fields(config))
    labels = dict(id2label=config.id2label, label2id=config.label2id, problem_type=config.problem_type)
    if hasattr(config, "thresholds"):  # of several labels an image
        labels["thresholds"] = config.thresholds
    if model_class.config_class.sub_configs:  # a CLIP classifier has the config of image and text
        return model_class.config_class(vision_config=fields, **labels)
    return model_class.config_class(**fields, **labels)


def build_native(model, family: NativeFamily, class_name: str, supports: dict):
    """The native model with copies of the model's weights."""
    config = model.config
    two_heads = model.is_classifier and config.pooling == "cls_distillation"
    model_class = getattr(transformers, family.two_headed if two_heads else class_name)
    weights, options = native_weights(model, supports), {}
    if model.is_classifier and family.native_head is not None:
        weights["classifier.weight"] = family.native_head(weights["classifier.weight"], config)
    if "pooler_act" in family.fields and not model.is_classifier and model.pooler is None:
        options["add_pooling_layer"] = False
    decoder = {key: weights.pop(key) for key in list(weights) if key.startswith("decoder.")}  # named alike in memory
    stored = revert_weight_conversion(
        SimpleNamespace(_weight_conversions=family.rules(config), config=config), weights
    )
    if model.is_classifier or model.is_autoencoder:
        stored = {key if "classifier." in key else f"{family.prefix}.{key}": stored[key] for key in stored} | decoder
    with silence_load_report():
        result, info = model_class.from_pretrained(
            None,
            config=native_config(config, family, model_class),
            state_dict=stored,
            output_loading_info=True,
            dtype=model.dtype,
            attn_implementation=config._attn_implementation,
            **options,
        )
    info["missing_keys"] = {key for key in info["missing_keys"] if not re.fullmatch(UNUSED, key)}
    if any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise RuntimeError(f"{model_class.__name__} does not take the weights of this model: {info}")
    return result.train(model.training).to(model.device)

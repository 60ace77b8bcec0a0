"""Every public format loads with the outputs of its reference and converts back; every broken file is refused by name."""

import copy
import json
import os
import pickle
import random
import re
from pathlib import Path

import numpy as np
import parity
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hf_vit import HFViTBackbone, HFViTForImageClassification, HFViTModel
from hf_vit.formats.timm import infer_timm


HOUSE = Path(__file__).parents[2]

TINY = parity.SMALL | dict(num_hidden_layers=2)
ROUNDING = 1e-5  # of the largest output


def ids(cases):
    return [f"{case.family}, {case.model}{', gated' if 'gated' in str(case.config) else ''}" for case in cases]


def ours_for(case):
    return HFViTForImageClassification if "Classification" in case.model else HFViTModel


def load(case, folder, size=TINY):
    """(the reference, ours as read from the file or folder that was written)"""
    reference = parity.build(case, size)
    if case.write is None:
        reference.save_pretrained(folder)
        return reference, ours_for(case).from_pretrained(folder)
    file = case.write(reference, folder)
    read = ours_for(case).from_pretrained if file.is_dir() else ours_for(case).from_checkpoint
    return reference, read(file, **case.load)


@torch.no_grad()
def difference(model, wanted, images):
    """The largest difference of the outputs from those of a model, or from those given, relative to the largest of them."""
    wanted = wanted if isinstance(wanted, dict) else parity.outputs(wanted, images)
    return parity.difference(parity.outputs(model, images), wanted)


def outcome(act):
    """(what act() gives, "") or (None, the words of its ValueError)"""
    try:
        return act(), ""
    except ValueError as error:
        return None, str(error)


# ----------------------------------------------------------------------------------------------------------------------
# The table of formats


@pytest.mark.parametrize("case", parity.CASES, ids=ids(parity.CASES))
def test_a_family_has_the_outputs_of_its_reference_and_so_has_the_model_given_back(case, tmp_path):
    row = parity.measure(case, parity.SMALL, tmp_path)
    assert row["loaded"] <= ROUNDING
    assert row["given_back"] <= ROUNDING
    assert row["native"] == case.back


def test_the_references_are_told_apart_by_their_outputs():
    """The matrix would be blind if a reference with other weights came as close."""
    case = parity.CASES[1]
    images = torch.randn(2, 3, 64, 64)
    assert difference(parity.build(case, TINY), parity.build(case, TINY), images) > 0.1


# DeiT with its teacher is left to the matrix: its two biases come back as their mean.
FOLDERS = [
    case for case in parity.CASES if case.write is None and case.back == case.model and "Teacher" not in case.model
]


@pytest.mark.parametrize("case", FOLDERS, ids=ids(FOLDERS))
def test_a_folder_given_back_holds_the_same_tensors_and_config_as_the_one_it_came_from(case, tmp_path):
    _, model = load(case, tmp_path / "native")
    model.to_transformers().save_pretrained(tmp_path / "back")
    original, back = (load_file(tmp_path / folder / "model.safetensors") for folder in ("native", "back"))
    assert set(back) == set(original)
    never_read = r"(.*\.)?mask_token|vision_model\.post_layernorm\.(weight|bias)"
    never_read = never_read if "ForImage" in case.model else r"(.*\.)?mask_token"
    other = [name for name in original if not torch.equal(original[name], back[name])]
    assert [name for name in other if not re.fullmatch(never_read, name)] == []

    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("native", "back")]
    for config in configs:
        config.pop("text_config", None)
        config.get("vision_config", {}).pop("dtype", None)
        if config.get("use_swiglu_ffn"):
            del config["hidden_act"]  # which DINOv2 does not read then
    assert configs[0] == configs[1]

    native_class = getattr(transformers, case.back)
    _, info = native_class.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info


SAVED = [
    case
    for case in parity.CASES
    if (case.family, case.model)
    in {
        ("transformers deit", "DeiTForImageClassificationWithTeacher"),
        ("transformers dinov3_vit", "DINOv3ViTModel"),
        ("transformers clip", "CLIPModel"),
        ("transformers siglip", "SiglipModel"),
        ("timm file, registers", "Dinov2WithRegistersModel"),
        ("DINOv2 .pth", "Dinov2Model"),
        ("JAX .npz, original, pre_logits", "ViTModel"),
    }
]


@pytest.mark.parametrize("case", SAVED, ids=ids(SAVED))
def test_a_loaded_family_saved_by_us_reloads_its_weights_bit_for_bit_under_our_names(case, tmp_path, caplog):
    reference, model = load(case, tmp_path / "public" if case.write is None else tmp_path)
    model.save_pretrained(tmp_path / "ours")
    assert set(load_file(tmp_path / "ours" / "model.safetensors")) == set(model.state_dict())
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "hf_vit"
    caplog.clear()
    again = type(model).from_pretrained(tmp_path / "ours")
    assert caplog.messages == []
    size = getattr(reference.config, "vision_config", reference.config).image_size
    images = torch.randn(2, 3, size, size)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert difference(again, model, images) <= 1e-6  # tensors cut from a fused one lie elsewhere, and round otherwise
    assert difference(again, reference, images) <= ROUNDING


def test_saved_families_are_all_there():
    assert len(SAVED) == 8  # DINOv3 twice, once gated


# ----------------------------------------------------------------------------------------------------------------------
# Models of ours that no checkpoint gave


BASE, CLASSIFIER = HFViTModel, HFViTForImageClassification
WITHOUT_CLASS = dict(use_class_token=False, pooling="mean")
DISTILLED = dict(use_distillation_token=True)
ROTARY = dict(position_embedding="rotary", num_register_tokens=2)
SWIGLU = dict(gated_mlp=True, hidden_act="silu")
CLIP = dict(patch_bias=False, embedding_norm=True)

CONVERTED = [
    (BASE, dict(), "ViTModel"),
    (CLASSIFIER, dict(), "ViTForImageClassification"),
    (BASE, dict(position_embedding="sincos1d"), "ViTModel"),
    (CLASSIFIER, dict(position_embedding="sincos1d"), "ViTForImageClassification"),
    (CLASSIFIER, dict(position_embedding="sincos1d", **WITHOUT_CLASS), "IJepaForImageClassification"),
    (CLASSIFIER, dict(position_embedding="sincos1d", **DISTILLED), "DeiTForImageClassification"),
    (CLASSIFIER, dict(position_embedding="sincos1d", num_register_tokens=2), "Dinov2WithRegistersForImageClassification"),
    (BASE, dict(position_embedding="sincos2d"), "ViTModel"),
    (CLASSIFIER, dict(position_embedding="sincos2d"), "ViTForImageClassification"),
    (CLASSIFIER, dict(position_embedding="sincos2d", **WITHOUT_CLASS), "IJepaForImageClassification"),
    (BASE, dict(position_embedding="sincos2d", **DISTILLED), "DeiTModel"),
    (BASE, dict(position_embedding="sincos2d", image_size=(16, 24)), "ViTModel"),
    (BASE, dict(qkv_bias=False), "ViTModel"),
    (CLASSIFIER, dict(qkv_bias=False), "ViTForImageClassification"),
    (CLASSIFIER, dict(key_bias=False), "ViTForImageClassification"),
    (CLASSIFIER, dict(patch_bias=False), "ViTForImageClassification"),
    (BASE, dict(patch_bias=False, key_bias=False, **WITHOUT_CLASS), "IJepaModel"),
    (BASE, dict(pooler_act="gelu"), "ViTModel"),
    (CLASSIFIER, dict(pooler_act="tanh"), "ViTForImageClassification"),
    (CLASSIFIER, dict(final_norm="pooled"), "ViTForImageClassification"),
    (CLASSIFIER, dict(hidden_act="quick_gelu", layer_norm_eps=0.01, num_channels=1), "ViTForImageClassification"),
    (BASE, dict(layerscale_value=0.5), "Dinov2Model"),
    (CLASSIFIER, dict(layerscale_value=0.5), "Dinov2ForImageClassification"),
    (CLASSIFIER, dict(layerscale_value=0.5, intermediate_size=40), "ViTForImageClassification"),
    (BASE, dict(layerscale_value=0.5, **WITHOUT_CLASS), "IJepaModel"),
    (CLASSIFIER, dict(layerscale_value=0.5, **WITHOUT_CLASS), "IJepaForImageClassification"),
    (CLASSIFIER, dict(layerscale_value=0.5, **DISTILLED), "DeiTForImageClassification"),
    (CLASSIFIER, dict(pooling="mean"), "Dinov2ForImageClassification"),
    (CLASSIFIER, dict(pooling="cls_mean"), "Dinov2ForImageClassification"),
    (CLASSIFIER, dict(pooling="cls_mean", patch_bias=False, key_bias=False), "Dinov2ForImageClassification"),
    (BASE, dict(num_register_tokens=3), "Dinov2WithRegistersModel"),
    (CLASSIFIER, dict(num_register_tokens=3), "Dinov2WithRegistersForImageClassification"),
    (CLASSIFIER, dict(num_register_tokens=3, pooling="mean"), "Dinov2WithRegistersForImageClassification"),
    (CLASSIFIER, dict(num_register_tokens=3, pooling="cls_mean"), "Dinov2WithRegistersForImageClassification"),
    (BASE, dict(SWIGLU, intermediate_size=88), "Dinov2Model"),
    (CLASSIFIER, dict(SWIGLU, pooling="mean", num_register_tokens=1), "Dinov2WithRegistersForImageClassification"),
    (BASE, WITHOUT_CLASS, "IJepaModel"),
    (CLASSIFIER, WITHOUT_CLASS, "IJepaForImageClassification"),
    (BASE, dict(use_class_token=False, pooling="map"), "SiglipVisionModel"),
    (BASE, dict(use_class_token=False, pooling="map", layerscale_value=0.5), "SiglipVisionModel"),
    (BASE, ROTARY, "DINOv3ViTModel"),
    (BASE, dict(position_embedding="rotary"), "DINOv3ViTModel"),
    (BASE, dict(ROTARY, rope_theta=50.0, layerscale_value=0.5, intermediate_size=40), "DINOv3ViTModel"),
    (BASE, dict(ROTARY, key_bias=False), "DINOv3ViTModel"),
    (BASE, dict(ROTARY, qkv_bias=False), "DINOv3ViTModel"),
    (BASE, dict(ROTARY, gated_mlp=True), "DINOv3ViTModel"),
    (BASE, dict(ROTARY, **SWIGLU, key_bias=False, patch_bias=False), "DINOv3ViTModel"),
    (BASE, dict(ROTARY, image_size=(16, 24), patch_size=(4, 8)), "DINOv3ViTModel"),
    (BASE, DISTILLED, "DeiTModel"),
    (CLASSIFIER, DISTILLED, "DeiTForImageClassification"),
    (CLASSIFIER, dict(DISTILLED, pooling="cls_distillation"), "DeiTForImageClassificationWithTeacher"),
    (BASE, dict(CLIP, final_norm="pooled"), "CLIPVisionModel"),
    (CLASSIFIER, dict(CLIP, final_norm="none", pooling="mean"), "CLIPForImageClassification"),
    (CLASSIFIER, dict(CLIP, final_norm="none", pooling="mean", layerscale_value=0.5), "CLIPForImageClassification"),
    (BASE, dict(image_size=(16, 24)), "ViTModel"),
    (CLASSIFIER, dict(image_size=(16, 24), patch_size=(4, 8)), "ViTForImageClassification"),
    (CLASSIFIER, dict(image_size=(16, 24), **DISTILLED), "DeiTForImageClassification"),
    (CLASSIFIER, dict(image_size=(16, 24), layerscale_value=0.5), "ViTForImageClassification"),
]  # fmt: skip


def in_words(value):
    if isinstance(value, type):
        return "base" if value is BASE else "classifier"
    return " ".join(f"{name}={of}" for name, of in value.items()) if isinstance(value, dict) else None


@pytest.fixture
def make(tiny_config, randomize):
    """make(class, **fields) -> a tiny model with random weights, and images for it."""

    def make(model_class, **fields):
        config = tiny_config(**fields)
        (rows, columns), size = config.grid_size, config.patch_size
        height, width = (size, size) if isinstance(size, int) else size
        images = torch.randn(2, config.num_channels, rows * height, columns * width)
        return randomize(model_class(config)), images

    return make


def assert_the_same(native, model, images):
    """The same tokens, pooled vector and logits; where a native model pools nothing, the class token is all there is."""
    found, wanted = parity.outputs(native, images), parity.outputs(model, images)
    if "pooler_output" not in found:
        assert "logits" in wanted or (model.pooler is None and model.config.pooling in ("cls", "mean"))
        wanted.pop("pooler_output", None)
    assert set(found) == set(wanted)
    assert parity.difference(found, wanted) <= ROUNDING


@pytest.mark.parametrize(("model_class", "fields", "native_class"), CONVERTED, ids=in_words)
@torch.no_grad()
def test_a_model_with_a_native_counterpart_becomes_it_with_the_same_outputs(make, model_class, fields, native_class):
    model, images = make(model_class, **fields)
    native = model.to_transformers()
    assert type(native).__name__ == native_class
    assert type(native).__module__.startswith("transformers.")
    assert_the_same(native, model, images)


REFUSED = [
    (CLASSIFIER, dict(qk_norm=True), "qk_norm=True"),
    (BASE, dict(qk_norm=True), "qk_norm=True"),
    (CLASSIFIER, dict(norm_first=False, final_norm="none"), "norm_first=False"),
    (CLASSIFIER, dict(representation_size=8), "representation_size=8"),
    (CLASSIFIER, dict(patch_projection="norm_linear_norm"), "patch_projection='norm_linear_norm'"),
    (CLASSIFIER, dict(position_embedding="none"), "position_embedding='none'"),
    (CLASSIFIER, dict(embedding_norm=True), "embedding_norm=True"),
    (CLASSIFIER, dict(final_norm="none"), "final_norm='none'"),
    (BASE, dict(final_norm="none"), "final_norm='none'"),
    (BASE, dict(final_norm="pooled"), "final_norm='pooled'"),
    (CLASSIFIER, dict(final_norm="none", pooling="cls_mean"), "final_norm='none' (the closest is dinov2)"),
    (CLASSIFIER, dict(final_norm="pooled", **WITHOUT_CLASS), "final_norm='pooled' (the closest is ijepa)"),
    (CLASSIFIER, dict(CLIP, final_norm="none", pooling="mean", patch_bias=True), "patch_bias=True"),
    (CLASSIFIER, dict(use_class_token=False, pooling="map"), "pooling='map'"),
    (BASE, dict(pooling="map"), "pooling='map'"),
    (BASE, dict(pooling="mean"), "pooling='mean'"),
    (BASE, dict(pooling="cls_mean"), "pooling='cls_mean'"),
    (CLASSIFIER, dict(num_register_tokens=3, pooling="map"), "pooling='map'"),
    (BASE, dict(DISTILLED, pooling="cls_distillation"), "pooling='cls_distillation'"),
    (CLASSIFIER, dict(DISTILLED, pooling="mean"), "pooling='mean'"),
    (CLASSIFIER, dict(DISTILLED, num_register_tokens=2), "num_register_tokens=2 (the closest is deit)"),
    (CLASSIFIER, ROTARY, "position_embedding='rotary'"),
    (BASE, dict(ROTARY, pooler_act="tanh"), "pooler_act='tanh'"),
    (CLASSIFIER, dict(gated_mlp=True), "gated_mlp=True"),
    (BASE, dict(gated_mlp=True, pooling="cls", layerscale_value=0.5, num_register_tokens=2), "hidden_act='gelu'"),
    (BASE, dict(SWIGLU, num_register_tokens=2, intermediate_size=60), "intermediate_size=60"),
    (CLASSIFIER, dict(num_register_tokens=2, intermediate_size=60, pooling="mean"), "intermediate_size=60"),
    (CLASSIFIER, dict(num_register_tokens=2, image_size=(16, 24), pooling="mean"), "image_size=(16, 24)"),
    (CLASSIFIER, dict(num_register_tokens=2, patch_size=(4, 8), pooling="mean"), "patch_size=(4, 8)"),
    (CLASSIFIER, dict(qk_norm=True, norm_first=False, final_norm="none"), "qk_norm=True and norm_first=False"),
]  # fmt: skip


@pytest.mark.parametrize(("model_class", "fields", "named"), REFUSED, ids=in_words)
def test_a_model_without_a_native_counterpart_is_refused_by_the_name_of_the_field(make, model_class, fields, named):
    model, _ = make(model_class, **fields)
    with pytest.raises(ValueError, match=rf"no native transformers \w+ has .*{re.escape(named)}"):
        model.to_transformers()


CHANGES = dict(
    patch_bias=[False, True], gated_mlp=[True, False], hidden_act=["silu", "gelu", "relu"], qkv_bias=[False, True], key_bias=[False],
    qk_norm=[True], position_embedding=["learned", "sincos1d", "sincos2d", "none"], use_class_token=[False, True],
    use_distillation_token=[True], num_register_tokens=[0, 1, 2], embedding_norm=[True, False], norm_first=[False],
    final_norm=["tokens", "pooled", "none"], pooling=["cls", "mean", "cls_mean", "cls_distillation", "map"],
    pooler_act=["tanh", None], representation_size=[8], layerscale_value=[0.3, 1.0], intermediate_size=[64, 96, 100],
    image_size=[16, (8, 24)], patch_size=[4, (4, 2)], num_channels=[1, 4], layer_norm_eps=[1e-3], num_labels=[1, 7],
    num_attention_heads=[1, 8], patch_projection=["norm_linear_norm"],
)  # fmt: skip


@torch.no_grad()
def test_40_random_models_are_converted_with_equal_outputs_or_refused_by_a_field_of_theirs(make):
    """Each is one of the table's with up to four fields changed."""
    draw, outcomes = random.Random(1), {"converted": 0, "refused": 0}
    while sum(outcomes.values()) < 40:
        model_class, fields, _ = draw.choice(CONVERTED)
        fields = fields | {name: draw.choice(CHANGES[name]) for name in draw.sample(list(CHANGES), draw.randrange(5))}
        made, _ = outcome(lambda fields=fields, model_class=model_class: make(model_class, **fields))
        if made is None:
            continue  # not even a config
        model, images = made
        native, refusal = outcome(model.to_transformers)
        outcomes["refused" if refusal else "converted"] += 1
        if native is not None:
            assert_the_same(native, model, images)
            continue
        named = re.findall(r"(\w+)=('\w*'|[\w.]+|\([\d, ]+\))", refusal)
        assert named, refusal
        for name, value in named:
            has = getattr(model.config, name)
            assert value == repr(tuple(has) if isinstance(has, (list, tuple)) else has), (fields, refusal)
    assert min(outcomes.values()) >= 12, outcomes


def test_a_model_without_the_pooler_of_its_config_becomes_a_native_one_without(tiny_config):
    config = tiny_config(pooler_act="tanh")
    for model in (HFViTModel(config, add_pooling_layer=False), HFViTBackbone(config)):
        assert model.to_transformers().pooler is None
    assert HFViTModel(config).to_transformers().pooler is not None


def test_labels_mode_dtype_and_problem_type_are_carried_over(make):
    id2label = {0: "cat", 1: "dog", 2: "cow", 3: "owl"}
    for fields in (dict(), dict(pooling="mean"), dict(DISTILLED, pooling="cls_distillation"), WITHOUT_CLASS):
        model, images = make(
            CLASSIFIER, **fields, num_labels=4, id2label=id2label, problem_type="multi_label_classification"
        )
        native = model.to(torch.bfloat16).to_transformers()
        assert native.config.id2label == id2label
        assert native.config.label2id == {label: index for index, label in id2label.items()}
        assert native.config.num_labels == 4
        assert native.config.problem_type == "multi_label_classification"
        assert {parameter.dtype for parameter in native.parameters()} == {torch.bfloat16}
        assert not native.training
        assert model.train().to_transformers().training
        with torch.no_grad():
            assert difference(native, model.eval(), images.bfloat16()) <= 1e-2


def test_dropout_rates_and_backend_are_carried_over(make):
    model, _ = make(
        CLASSIFIER, drop_path_rate=0.1, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3, pooling="mean"
    )
    model.set_attn_implementation("eager")
    config = model.to_transformers().config
    assert (config.drop_path_rate, config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (0.1, 0.2, 0.3)
    assert config._attn_implementation == "eager"
    rotary, _ = make(BASE, **ROTARY, attention_probs_dropout_prob=0.3)
    assert rotary.to_transformers().config.attention_dropout == 0.3


@pytest.mark.parametrize(
    ("model_class", "fields"),
    [
        (CLASSIFIER, dict()),
        (CLASSIFIER, dict(pooling="mean")),
        (CLASSIFIER, dict(layerscale_value=0.5, **WITHOUT_CLASS)),
        (BASE, dict(position_embedding="sincos2d")),
        (BASE, dict(use_class_token=False, pooling="map")),
        (BASE, dict(CLIP, final_norm="pooled")),
    ],
    ids=in_words,
)
@torch.no_grad()
def test_the_native_model_has_copies_of_the_weights(make, model_class, fields):
    model, images = make(model_class, **fields)
    before, weights = parity.outputs(model, images), copy.deepcopy(model.state_dict())
    for tensor in model.to_transformers().state_dict().values():
        tensor.zero_()
    assert difference(model, before, images) == 0
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


# ----------------------------------------------------------------------------------------------------------------------
# Raw files and repos of timm


D, F = 192, 256  # the narrowest of the published ViTs, and any width for the MLP
SIZE = dict(
    image_size=32, patch_size=8, hidden_size=D, num_attention_heads=3, num_hidden_layers=2, intermediate_size=F
)


@pytest.fixture
def reference(randomize):
    """reference(class, **fields) -> a native model with random weights, two layers deep and with 64 channels a head."""

    def make(model_class=transformers.ViTForImageClassification, **fields):
        fields = {**SIZE, "layer_norm_eps": 1e-6, "num_labels": 5, **fields}
        return randomize(model_class(model_class.config_class(**fields)))

    return make


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 32)


def save(tensors, file):
    """As the file's name says, but `old.` means torch.save as it was before version 1.6."""
    file.parent.mkdir(exist_ok=True)
    if file.suffix == ".npz":
        np.savez(file, **tensors)
    elif file.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    else:
        torch.save(tensors, file, _use_new_zipfile_serialization=not file.name.startswith("old."))
    return file


def jax_arrays(native, folder, **how):
    return dict(np.load(parity.jax_file(**how)(native, folder)))


TIMM = {"architecture": "vit_base_patch16_224", "num_classes": 5, "pretrained_cfg": {}}


def timm_repo(folder, tensors, file="model.safetensors", **said):
    save(tensors, folder / file)
    (folder / "config.json").write_text(json.dumps(TIMM | said))
    return folder


@pytest.mark.parametrize(
    ("model_class", "fields"),
    [
        (transformers.Dinov2Model, dict(mlp_ratio=4, use_swiglu_ffn=True)),
        (transformers.SiglipVisionModel, dict()),
        (transformers.DeiTForImageClassificationWithTeacher, dict()),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_folder_in_shards_loads_the_same(reference, images, tmp_path, model_class, fields):
    native = reference(model_class, **fields)
    native.save_pretrained(tmp_path, max_shard_size="500KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    ours = CLASSIFIER if "Classification" in model_class.__name__ else BASE
    assert difference(ours.from_pretrained(tmp_path), native, images) <= ROUNDING


def test_dinov3_without_registers_loads_its_empty_tensor(reference, images, tmp_path):
    native = reference(transformers.DINOv3ViTModel)
    native.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["embeddings.register_tokens"].shape == (1, 0, D)
    assert difference(BASE.from_pretrained(tmp_path), native, images) <= ROUNDING


def test_a_tensor_in_two_shards_is_an_error(reference, tmp_path):
    reference(transformers.SiglipVisionModel).save_pretrained(tmp_path, max_shard_size="500KB")
    first, *_, last = sorted(tmp_path.glob("*.safetensors"))
    name, tensor = next(iter(load_file(last).items()))
    save(load_file(first) | {name: tensor}, first)
    with pytest.raises(ValueError, match=rf"2 times, as {re.escape(name)} and {re.escape(name)}"):
        BASE.from_pretrained(tmp_path)


def test_a_folder_in_half_precision_stays_in_it(reference, images, tmp_path):
    native = reference(transformers.Dinov2ForImageClassification, mlp_ratio=4).bfloat16()
    native.save_pretrained(tmp_path)
    model = CLASSIFIER.from_pretrained(tmp_path)
    assert model.dtype == model.to_transformers().dtype == torch.bfloat16
    assert difference(model, native, images.bfloat16()) <= 1e-2


@pytest.mark.parametrize(
    "name",
    ["Dinov2ForImageClassification", "CLIPForImageClassification", "SiglipForImageClassification", "IJepaForImageClassification"],
)  # fmt: skip
def test_a_classifier_opens_as_base_model_with_the_tokens_and_pooled_vector_of_its_own(images, tmp_path, name):
    """CLIP and SigLIP pool otherwise to classify, DINOv2 twice as wide."""
    case = parity.Case("", name, dict(patch_size=16))
    native = parity.build(case, TINY | dict(image_size=32))
    native.save_pretrained(tmp_path)
    base = getattr(native, "vision_model", None) or native.base_model
    assert difference(BASE.from_pretrained(tmp_path), base, images) <= ROUNDING


@pytest.mark.parametrize(
    ("name", "pooling"),
    [("Dinov2Model", "cls_mean"), ("CLIPVisionModel", "cls"), ("SiglipVisionModel", "map"), ("IJepaModel", "mean"), ("DeiTModel", "cls")],
)  # fmt: skip
@torch.no_grad()
def test_a_base_model_opens_as_classifier_with_a_zero_head_over_the_pooled_vector(
    images, tmp_path, caplog, name, pooling
):
    native = parity.build(parity.Case("", name, dict(patch_size=16)), TINY | dict(image_size=32))
    native.save_pretrained(tmp_path)
    model = CLASSIFIER.from_pretrained(tmp_path, num_labels=4)
    assert "classifier reset to 4 labels (the checkpoint has none)" in caplog.text
    assert model.config.pooling == pooling
    assert model(images).logits.eq(0).all()
    tokens = native(images).last_hidden_state
    assert (model.vit(images).last_hidden_state - tokens).abs().max() <= ROUNDING * tokens.abs().max()
    pooled = model.vit(images).pooler_output
    if pooling == "cls_mean":
        wanted = torch.cat([tokens[:, 0], tokens[:, 1:].mean(dim=1)], dim=1)
    elif pooling == "mean":
        wanted = tokens.mean(dim=1)
    else:
        wanted = tokens[:, 0] if name == "DeiTModel" else native(images).pooler_output
    assert (pooled - wanted).abs().max() <= ROUNDING * wanted.abs().max()


@pytest.mark.parametrize("name", ["Dinov2Model", "SiglipVisionModel", "CLIPVisionModel", "DeiTModel"])
@torch.no_grad()
def test_a_family_opens_as_a_backbone_whose_last_map_holds_its_patches(images, tmp_path, name):
    native = parity.build(parity.Case("", name, dict(patch_size=16)), TINY | dict(image_size=32))
    native.save_pretrained(tmp_path)
    patches = native(images).last_hidden_state[:, -4:]
    [found] = HFViTBackbone.from_pretrained(tmp_path)(images).feature_maps
    assert found.shape == (2, D, 2, 2)
    assert (found.flatten(2).transpose(1, 2) - patches).abs().max() <= ROUNDING * patches.abs().max()


@pytest.mark.parametrize(
    ("written", "called"),
    [("vit.safetensors", "vit.pth"), ("vit.npz", "vit.bin"), ("vit.safetensors", "vit.npz"), ("old.pth", "vit.npz"), ("vit.pth", "vit")],
)  # fmt: skip
def test_the_family_is_found_whatever_the_file_is_called(reference, images, tmp_path, written, called):
    native = reference()
    tensors = jax_arrays(native, tmp_path) if written.endswith("npz") else parity.to_timm(native)
    file = save(tensors, tmp_path / written).rename(tmp_path / called)
    assert difference(CLASSIFIER.from_checkpoint(file), native, images) <= ROUNDING
    assert difference(CLASSIFIER.from_checkpoint(str(file)), native, images) <= ROUNDING


@pytest.mark.parametrize(
    ("prefix", "beside", "said"),
    [
        ("module.", "queue", "left out queue, outside module"),
        ("module.backbone.", "module.head.weight", "left out module, outside module.backbone"),
        ("_orig_mod.", "predictor.weight", "left out predictor, outside _orig_mod"),
        ("opt/target/", "opt/state/step", "left out opt, outside opt.target"),
        ("params/img/", "params/txt/head/kernel", "left out params, outside params.img"),
    ],
)
def test_what_stands_outside_the_prefix_is_left_out_and_said(
    reference, images, tmp_path, caplog, prefix, beside, said
):
    native = reference()
    if "/" in prefix:
        file = save(jax_arrays(native, tmp_path, prefix=prefix) | {beside: np.ones(3)}, tmp_path / "vit.npz")
    else:
        tensors = {prefix + name: tensor for name, tensor in parity.to_timm(native).items()}
        file = save(tensors | {beside: torch.ones(3)}, tmp_path / "vit.pth")
    assert difference(CLASSIFIER.from_checkpoint(file), native, images) <= ROUNDING
    assert re.search(rf"{re.escape(said)}\b", caplog.messages[-1])


def test_a_prefix_with_nothing_outside_is_not_spoken_of(reference, tmp_path, caplog):
    tensors = {f"module.{name}": tensor for name, tensor in parity.to_timm(reference()).items()}
    CLASSIFIER.from_checkpoint(save(tensors, tmp_path / "vit.pth"))
    assert "outside" not in caplog.text


@pytest.mark.parametrize(
    "keys", [["state_dict"], ["model"], ["teacher"], ["target_encoder"], ["state_dict", "model"]], ids=".".join
)
def test_the_weights_are_found_in_what_training_scripts_wrap_around_them(reference, images, tmp_path, keys):
    native = reference()
    content = parity.to_timm(native)
    for key in reversed(keys):
        content = {"epoch": 3, "optimizer": {"state": {}}, key: content}
    assert difference(CLASSIFIER.from_checkpoint(save(content, tmp_path / "vit.pth")), native, images) <= ROUNDING


@pytest.mark.parametrize(("averaged", "other"), [("model_ema", "model"), ("state_dict_ema", "state_dict")])
def test_averaged_weights_are_preferred(reference, images, tmp_path, averaged, other):
    native, last = reference(), reference()
    content = {other: parity.to_timm(last), averaged: parity.to_timm(native)}
    assert difference(CLASSIFIER.from_checkpoint(save(content, tmp_path / "vit.pth")), native, images) <= ROUNDING


def test_a_timm_repo_may_hold_a_pickle_instead_of_safetensors(reference, images, tmp_path):
    native = reference()
    folder = timm_repo(tmp_path / "repo", parity.to_timm(native), "pytorch_model.bin")
    assert difference(CLASSIFIER.from_pretrained(folder), native, images) <= ROUNDING


def test_a_timm_wrapper_of_transformers_is_read_as_timm(reference, images, tmp_path):
    native = reference()
    tensors = {f"timm_model.{name}": tensor for name, tensor in parity.to_timm(native).items()}
    folder = timm_repo(tmp_path / "repo", tensors, model_type="timm_wrapper")
    assert difference(CLASSIFIER.from_pretrained(folder), native, images) <= ROUNDING


def test_label_names_of_timm_become_id2label_until_other_labels_are_asked_for(reference, tmp_path, caplog):
    folder = timm_repo(tmp_path / "repo", parity.to_timm(reference()), label_names=["a", "b", "c", "d", "e"])
    config = CLASSIFIER.from_pretrained(folder).config
    assert config.id2label == {0: "a", 1: "b", 2: "c", 3: "d", 4: "e"}
    assert config.label2id["e"] == 4
    config = CLASSIFIER.from_pretrained(folder, num_labels=7).config
    assert (len(config.id2label), config.id2label[0]) == (7, "LABEL_0")
    assert "classifier reset to 7 labels (the checkpoint has 5)" in caplog.text
    config = CLASSIFIER.from_pretrained(folder, id2label={0: "x", 1: "y", 2: "z"}).config  # as fine-tuning asks for
    assert (config.num_labels, config.id2label[2]) == (3, "z")
    assert "classifier reset to 3 labels (the checkpoint has 5)" in caplog.text


def test_of_a_network_and_the_moments_of_its_optimizer_in_one_file_the_network_is_read(reference, tmp_path):
    tensors = parity.to_timm(reference())
    moments = {f"opt.0.{name}": torch.zeros_like(tensor) for name, tensor in tensors.items()}
    student = {f"student.{name}": torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for others, prefix in ((moments, "params."), (student, "teacher.")):
        torch.save({**others, **{f"{prefix}{name}": tensor for name, tensor in tensors.items()}}, tmp_path / "all.pth")
        loaded = CLASSIFIER.from_checkpoint(
            tmp_path / "all.pth", num_attention_heads=4, id2label=dict(enumerate("vwxyz")), dtype="auto"
        )
        torch.testing.assert_close(loaded.classifier.weight, tensors["head.weight"])


@torch.no_grad()
def tokens_before_the_norm(native, images):
    """Tokens (B, T, D) of a native ViT or DINOv2 behind its last layer."""
    kept = []
    hook = native.base_model.layernorm.register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0]))
    native(images)
    hook.remove()
    return kept[0]


@pytest.mark.parametrize("family", ["vit", "dinov2", "dinov2_with_registers"])
@pytest.mark.parametrize("side", [16, 48])
@torch.no_grad()
def test_positions_on_another_grid_are_those_of_the_native_model(randomize, tmp_path, family, side):
    """smaller and larger images than the positions are for | the native tokens, and ours after `image_size=`"""
    native = transformers.AutoModel.from_config(
        transformers.AutoConfig.for_model(family, **{**SIZE, "image_size": 32, "patch_size": 4})
    )
    randomize(native).eval().save_pretrained(tmp_path)
    images = torch.randn(2, 3, side, side)
    by_flag = dict(interpolate_pos_encoding=True) if family == "vit" else {}
    wanted = native(images, **by_flag).last_hidden_state
    found = BASE.from_pretrained(tmp_path)(images, interpolate_pos_encoding=True).last_hidden_state
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    resized = BASE.from_pretrained(tmp_path, image_size=side)(images).last_hidden_state
    torch.testing.assert_close(resized, wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_act_layer_of_a_timm_repo_is_the_activation(reference, images, tmp_path):
    native = reference(hidden_act="relu")
    said = dict(architecture="vit_tiny_patch16_224", model_args={"act_layer": "relu", "depth": 2, "drop_rate": 0.1})
    assert (
        difference(
            CLASSIFIER.from_pretrained(timm_repo(tmp_path / "repo", parity.to_timm(native), **said)), native, images
        )
        <= ROUNDING
    )


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            dict(model_args={"pool_include_prefix": True}),
            "pool_include_prefix=True in its model_args, which no field expresses",
        ),
        (dict(model_args={"norm_layer": "rmsnorm"}), "norm_layer='rmsnorm' in its model_args"),
        (dict(model_args={"act_layer": "hard_mish"}), "act_layer 'hard_mish' of timm has no counterpart: gelu, "),
        (dict(architecture="test_vit3"), "test_vit3 has attention pooling over class token and registers too"),
    ],
)
def test_what_a_timm_repo_says_and_no_field_expresses_is_an_error(reference, tmp_path, said, message):
    folder = timm_repo(
        tmp_path / "repo", parity.to_timm(reference()), **{"architecture": "vit_tiny_patch16_224", **said}
    )
    with pytest.raises(ValueError, match=message):
        CLASSIFIER.from_pretrained(folder)


@pytest.mark.parametrize("said", [dict(global_pool="avg"), dict(model_args={"global_pool": "avg"})])
@torch.no_grad()
def test_global_pool_avg_of_timm_pools_by_the_mean_of_the_patches(reference, images, tmp_path, said):
    native = reference()
    tokens = native.vit.layernorm(tokens_before_the_norm(native, images))
    wanted = {"logits": native.classifier(tokens[:, 1:].mean(dim=1))}
    model = CLASSIFIER.from_pretrained(timm_repo(tmp_path / "repo", parity.to_timm(native), **said))
    assert difference(model, wanted, images) <= ROUNDING


@torch.no_grad()
def test_fc_norm_of_timm_is_a_norm_behind_the_mean_of_the_patches(reference, images, tmp_path):
    native = reference()
    pooled = tokens_before_the_norm(native, images)[:, 1:].mean(dim=1)
    wanted = {"logits": native.classifier(native.vit.layernorm(pooled))}
    tensors = {re.sub(r"^norm\.", "fc_norm.", name): tensor for name, tensor in parity.to_timm(native).items()}
    model = CLASSIFIER.from_checkpoint(save(tensors, tmp_path / "vit.pth"))
    assert (model.config.final_norm, model.config.pooling) == ("pooled", "mean")
    assert difference(model, wanted, images) <= ROUNDING


@pytest.mark.parametrize(
    ("architecture", "hidden_act"),
    [
        ("vit_base_patch16_clip_quickgelu_224", "quick_gelu"),
        ("vit_so400m_patch16_siglip_gap_512", "gelu_pytorch_tanh"),
        ("vit_large_patch16_siglip_256", "gelu"),
        ("vit_large_patch16_siglip_512", "gelu_pytorch_tanh"),
        ("vit_base_patch16_siglip_224", "gelu"),
    ],
)
def test_the_architectures_name_of_timm_tells_the_activation(reference, images, tmp_path, architecture, hidden_act):
    native = reference(hidden_act=hidden_act)
    model = CLASSIFIER.from_pretrained(timm_repo(tmp_path / "repo", parity.to_timm(native), architecture=architecture))
    assert model.config.hidden_act == hidden_act
    assert difference(model, native, images) <= ROUNDING


def test_a_timm_architecture_that_norms_inside_its_branches_is_refused(reference, tmp_path):
    folder = timm_repo(tmp_path / "repo", parity.to_timm(reference()), architecture="vit_base_patch16_rpn_224")
    with pytest.raises(ValueError, match="vit_base_patch16_rpn_224"):
        CLASSIFIER.from_pretrained(folder)


def test_another_network_of_timm_is_refused(tmp_path):
    folder = timm_repo(tmp_path / "repo", {"conv1.weight": torch.ones(8, 3, 7, 7)}, architecture="resnet50")
    with pytest.raises(ValueError, match="resnet50 is no VisionTransformer of timm"):
        CLASSIFIER.from_pretrained(folder)


def test_a_timm_register_takes_its_row_of_the_positions_in(reference, images, tmp_path):
    native = reference(transformers.Dinov2WithRegistersModel, mlp_ratio=4, num_register_tokens=3)
    tensors = parity.to_timm(native)
    of_registers = torch.randn(1, 3, D)
    cls, patches = tensors["pos_embed"].split([1, 16], dim=1)
    tensors["pos_embed"] = torch.cat([cls, of_registers, patches], dim=1)
    tensors["reg_token"] = tensors["reg_token"] - of_registers
    assert difference(BASE.from_checkpoint(save(tensors, tmp_path / "vit.pth")), native, images) <= ROUNDING


@pytest.fixture
def dinov3(reference):
    """dinov3(**fields) -> a native DINOv3 with random weights and registers."""

    def make(**fields):
        return reference(transformers.DINOv3ViTModel, **dict(num_register_tokens=3, layer_norm_eps=1e-5) | fields)

    return make


WITHOUT_BIASES, SWIGLU = dict(query_bias=False, value_bias=False), dict(use_gated_mlp=True, hidden_act="silu")


@pytest.mark.parametrize("fields", [dict(), WITHOUT_BIASES, SWIGLU, WITHOUT_BIASES | SWIGLU], ids=repr)
@pytest.mark.parametrize("in_repo", [False, True])
def test_dinov3_of_timm_has_the_outputs_of_the_native_one_at_any_size(dinov3, tmp_path, fields, in_repo):
    native = dinov3(**fields)
    if in_repo:
        said = dict(architecture="vit_small_patch16_dinov3", global_pool="avg")
        model = BASE.from_pretrained(timm_repo(tmp_path / "repo", parity.to_eva(native), **said), pooling="cls")
    else:
        model = BASE.from_checkpoint(save(parity.to_eva(native), tmp_path / "vit.pth"), pooling="cls")
    back = model.to_transformers()
    assert type(back) is transformers.DINOv3ViTModel
    for size in ((32, 32), (24, 64)):
        images = torch.randn(2, 3, *size)
        assert difference(model, native, images) <= ROUNDING
        assert difference(back, native, images) <= ROUNDING


@torch.no_grad()
def test_dinov3_of_timm_pools_by_the_mean_of_the_patches_where_no_config_says_token(dinov3, images, tmp_path, caplog):
    native, head = dinov3(), torch.randn(5, D)
    tokens = native(images).last_hidden_state
    tensors = parity.to_eva(native) | {"head.weight": head, "head.bias": torch.zeros(5)}
    said = dict(architecture="vit_small_patch16_dinov3_qkvb")
    of_mean, of_class = ({"logits": pooled @ head.T} for pooled in (tokens[:, 4:].mean(dim=1), tokens[:, 0]))
    file = save(tensors, tmp_path / "vit.pth")
    assert difference(CLASSIFIER.from_checkpoint(file), of_mean, images) <= ROUNDING
    assert (
        difference(CLASSIFIER.from_pretrained(timm_repo(tmp_path / "a", tensors, **said)), of_mean, images) <= ROUNDING
    )
    assert all("pooling mean" in message for message in caplog.messages)
    for global_pool, wanted in (("avg", of_mean), ("token", of_class)):
        folder = timm_repo(tmp_path / global_pool, tensors, **said, global_pool=global_pool)
        assert difference(CLASSIFIER.from_pretrained(folder), wanted, images) <= ROUNDING
        assert "pooling" not in caplog.messages[-1]


def test_what_a_raw_dinov3_cannot_tell_is_assumed_and_said_unless_it_is_given(dinov3, images, tmp_path, caplog):
    native = dinov3(rope_theta=7.0, layer_norm_eps=0.1)
    file = save(parity.to_eva(native), tmp_path / "vit.pth")
    assert difference(BASE.from_checkpoint(file, pooling="cls"), native, images) > 1e-2
    assert (
        "num_attention_heads 3 assumed; position_embedding rotary, rope_theta 100.0, layer_norm_eps 1e-05, "
        "image_size [128, 128] assumed; hidden_act gelu assumed" in caplog.text
    )
    given = dict(rope_theta=7.0, layer_norm_eps=0.1, pooling="cls", position_embedding="rotary", image_size=32)
    assert difference(BASE.from_checkpoint(file, **given), native, images) <= ROUNDING
    assert "num_attention_heads 3 assumed; hidden_act gelu assumed" in caplog.messages[-1]


def test_a_repo_whose_name_does_not_say_dinov3_is_told_by_its_tensors_and_the_log_says_so(
    dinov3, images, tmp_path, caplog
):
    native = dinov3()
    folder = timm_repo(tmp_path, parity.to_eva(native), architecture="vit_base_patch16_new", global_pool="token")
    assert difference(BASE.from_pretrained(folder), native, images) <= ROUNDING
    assert "position_embedding rotary, rope_theta 100.0, layer_norm_eps 1e-05, image_size" in caplog.text


def test_a_dinov3_repo_says_its_size_and_what_it_was_built_with(dinov3, images, tmp_path, caplog):
    native = dinov3(rope_theta=7.0, num_attention_heads=6)
    arguments = dict(rope_temperature=7.0, num_heads=6, rope_rotate_half=True, img_size=[32, 48], qkv_bias=True)
    said = dict(architecture="vit_small_patch16_dinov3_qkvb", global_pool="token", model_args=arguments)
    folder = timm_repo(tmp_path, parity.to_eva(native), **said, pretrained_cfg={"input_size": [3, 32, 48]})
    model = BASE.from_pretrained(folder)
    assert difference(model, native, images) <= ROUNDING
    assert model.config.image_size == [32, 48]
    assert "assumed" not in caplog.text


@pytest.mark.parametrize(("width", "heads"), [(384, 6), (1280, 20), (4096, 32)])
def test_dinov3_has_the_heads_of_its_published_sizes(dinov3, width, heads):
    shapes = {name: tuple(tensor.shape) for name, tensor in parity.to_eva(dinov3()).items()}
    shapes["patch_embed.proj.weight"] = (width, 3, 16, 16)
    assert infer_timm(shapes, {}, False, [])["num_attention_heads"] == heads


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("eva02_tiny_patch14_224", "rotary positions on top of learned ones, or norms behind its branches"),
        ("vit_base_patch16_rope_mixed_224", "rotary positions with learned frequencies"),
        ("vit_base_patch16_rope_ape_224", "rotary positions that count patches, where those of DINOv3 span the image"),
        ("vit_pe_core_base_patch16_224", "rotary positions on top of learned ones"),
        ("vit_base_patch16_sapiens2", "RMSNorm in place of LayerNorm"),
    ],
)
def test_a_timm_architecture_with_other_rotary_positions_or_norms_is_refused(dinov3, tmp_path, architecture, message):
    folder = timm_repo(tmp_path / "repo", parity.to_eva(dinov3()), architecture=architecture)
    with pytest.raises(ValueError, match=f"^{architecture} has {message}, which no field expresses$"):
        BASE.from_pretrained(folder)


@pytest.mark.parametrize(
    "argument", [dict(rope_type="cat"), dict(rope_rotate_half=False), dict(rope_grid_indexing="xy"), dict(use_post_norm=True)], ids=repr
)  # fmt: skip
def test_dinov3_of_timm_built_with_what_no_field_expresses_is_refused(dinov3, tmp_path, argument):
    [(name, value)] = argument.items()
    said = dict(architecture="vit_small_patch16_dinov3", global_pool="token", model_args=argument)
    folder = timm_repo(tmp_path / "repo", parity.to_eva(dinov3()), **said)
    with pytest.raises(ValueError, match=f"has {name}={value!r} in its model_args, which no field expresses"):
        BASE.from_pretrained(folder)


ROPE = "rotary positions on top of learned ones"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.update({"rope.freqs": torch.ones(2, 2, 96)}), "rotary positions with learned frequencies"),
        (lambda w: w.update({"blocks.0.mlp.norm.weight": torch.ones(F)}), "norms inside its attention or MLP"),
        (lambda w: w.update({"blocks.0.attn.norm.weight": torch.ones(D)}), "norms inside its attention or MLP"),
        (lambda w: w.update({"pos_embed": torch.ones(1, 20, D)}), f"q_bias beside pos_embed, the sign of EVA-02's {ROPE}"),
        (lambda w: (w.update({"norm_pre.weight": torch.ones(D)}), w.pop("norm.weight")), f"{ROPE}, as timm's Perception Encoder has"),
        (lambda w: w.update({"norm_pre.weight": torch.ones(D), "attn_pool.latent": torch.ones(1, 1, D)}), f"{ROPE}, as timm's Perception"),
        (lambda w: w.update({"attn_pool.latent": torch.ones(1, 1, D)}), "attention pooling over class token and registers too"),
        (lambda w: w.pop("cls_token"), "no pos_embed, and the other tensors are not those of timm's DINOv3"),
        (lambda w: w.pop("reg_token"), "no pos_embed, and the other tensors are not those of timm's DINOv3"),
        (lambda w: w.pop("blocks.0.gamma_1"), "no pos_embed, and the other tensors are not those of timm's DINOv3"),
        (lambda w: w.update({"blocks.0.attn.qkv.bias": torch.ones(3 * D)}), "no pos_embed, and the other tensors are not those"),
        (lambda w: w.pop("blocks.1.attn.v_bias"), "layers.1.attention.v_proj.bias is missing"),
        (lambda w: w.pop("blocks.1.mlp.fc1_x.bias"), "layers.1.mlp.up_proj.bias is missing"),
    ],
)  # fmt: skip
def test_a_raw_file_that_is_not_quite_dinov3_is_refused(dinov3, tmp_path, change, message):
    tensors = parity.to_eva(dinov3(**SWIGLU))
    change(tensors)
    file = save(tensors, tmp_path / "vit.pth")
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        BASE.from_checkpoint(file)
    assert str(file) in str(error.value)


def test_a_timm_repo_of_the_first_eva_has_no_bias_of_the_keys(reference, images, tmp_path):
    native, tensors = reference(), {}
    for name, tensor in parity.to_timm(native).items():
        if name.endswith("qkv.bias"):
            block = name.removesuffix("qkv.bias")
            tensors[f"{block}q_bias"], _, tensors[f"{block}v_bias"] = tensor.chunk(3)
        else:
            tensors[name] = tensor
    with torch.no_grad():
        for layer in native.vit.layers:
            layer.attention.k_proj.bias.zero_()
    folder = timm_repo(tmp_path / "repo", tensors, architecture="eva_giant_patch14_clip_224", global_pool="token")
    assert difference(CLASSIFIER.from_pretrained(folder), native, images) <= ROUNDING


def test_a_raw_file_of_deit_3_might_have_rotary_positions_and_the_log_says_that_none_are_assumed(
    reference, tmp_path, caplog
):
    tensors = parity.to_timm(reference(transformers.Dinov2Model, mlp_ratio=4))
    tensors = {re.sub(r"ls(\d)\.gamma", r"gamma_\1", name): tensor for name, tensor in tensors.items()}
    BASE.from_checkpoint(save(tensors, tmp_path / "vit.pth"))
    assert "no rotary positions assumed" in caplog.text


def test_registers_load_without_positions_too(reference, images, tmp_path):
    native = reference(transformers.Dinov2WithRegistersModel, mlp_ratio=4, num_register_tokens=3)
    with torch.no_grad():
        native.embeddings.position_embeddings.zero_()
    tensors = parity.to_timm(native)
    del tensors["pos_embed"]
    file = save(tensors, tmp_path / "vit.pth")
    model = BASE.from_checkpoint(file, position_embedding="none", image_size=32)
    assert difference(model, native, images) <= ROUNDING


def test_old_torchvision_names_load_too(reference, images, tmp_path):
    native = reference()
    tensors = torch.load(parity.torchvision_file(native, tmp_path))
    names = {".mlp.0.": ".mlp.linear_1.", ".mlp.3.": ".mlp.linear_2."}
    for old, new in names.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    assert difference(CLASSIFIER.from_checkpoint(save(tensors, tmp_path / "vit.pth")), native, images) <= ROUNDING


def test_bfloat16_arrays_of_an_npz_are_read_although_numpy_has_no_such_type(reference, images, tmp_path):
    native = reference().bfloat16()
    arrays = jax_arrays(native.float(), tmp_path)
    halves = {name: torch.from_numpy(array).bfloat16() for name, array in arrays.items()}
    file = save({name: t.view(torch.int16).numpy().view("V2") for name, t in halves.items()}, tmp_path / "half.npz")
    assert {array.dtype.str for array in np.load(file).values()} == {"|V2"}
    assert difference(CLASSIFIER.from_checkpoint(file).float(), native, images) <= ROUNDING


@torch.no_grad()
def test_pre_logits_of_jax_are_the_tanh_layer_of_a_classifier(reference, images, tmp_path):
    native, kernel, bias, head = reference(), torch.randn(D, 24) / 14, torch.randn(24), torch.randn(24, 5)
    arrays = jax_arrays(native, tmp_path) | {
        "pre_logits/kernel": kernel.numpy(),
        "pre_logits/bias": bias.numpy(),
        "head/kernel": head.numpy(),
    }
    cls = native.vit(images).last_hidden_state[:, 0]
    wanted = {"logits": (cls @ kernel + bias).tanh() @ head + native.classifier.bias}
    model = CLASSIFIER.from_checkpoint(save(arrays, tmp_path / "vit.npz"))
    assert model.config.representation_size == 24
    assert difference(model, wanted, images) <= ROUNDING


@torch.no_grad()
def test_pre_logits_of_jax_are_the_pooler_of_a_base_model(reference, images, tmp_path):
    native, kernel, bias = reference(), torch.randn(D, D) / 14, torch.randn(D)
    arrays = jax_arrays(native, tmp_path) | {"pre_logits/kernel": kernel.numpy(), "pre_logits/bias": bias.numpy()}
    tokens = native.vit(images).last_hidden_state
    wanted = {"last_hidden_state": tokens, "pooler_output": (tokens[:, 0] @ kernel + bias).tanh()}
    assert difference(BASE.from_checkpoint(save(arrays, tmp_path / "vit.npz")), wanted, images) <= ROUNDING


def test_the_probe_of_big_vision_pools_as_siglip_does(reference, images, tmp_path):
    native = reference(transformers.SiglipVisionModel, hidden_act="gelu")
    arrays = jax_arrays(native, tmp_path, big_vision=True)
    arrays = {name: array for name, array in arrays.items() if not name.startswith(("head", "MlpBlock"))}
    head, heads = native.head.state_dict(), (D, 3, 64)
    attention, mlp = "MAPHead_0/MultiHeadDotProductAttention_0", "MAPHead_0/MlpBlock_0"
    head = {name: tensor.numpy() for name, tensor in head.items()}
    for index, part in enumerate(("query", "key", "value")):
        arrays[f"{attention}/{part}/kernel"] = np.split(head["attention.in_proj_weight"], 3)[index].T.reshape(heads)
        arrays[f"{attention}/{part}/bias"] = np.split(head["attention.in_proj_bias"], 3)[index].reshape(heads[1:])
    arrays |= {
        "MAPHead_0/probe": head["probe"],
        f"{attention}/out/kernel": head["attention.out_proj.weight"].T.reshape(*heads[1:], D),
        f"{attention}/out/bias": head["attention.out_proj.bias"],
        "MAPHead_0/LayerNorm_0/scale": head["layernorm.weight"],
        "MAPHead_0/LayerNorm_0/bias": head["layernorm.bias"],
        f"{mlp}/Dense_0/kernel": head["mlp.fc1.weight"].T,
        f"{mlp}/Dense_0/bias": head["mlp.fc1.bias"],
        f"{mlp}/Dense_1/kernel": head["mlp.fc2.weight"].T,
        f"{mlp}/Dense_1/bias": head["mlp.fc2.bias"],
    }
    assert difference(BASE.from_checkpoint(save(arrays, tmp_path / "vit.npz")), native, images) <= ROUNDING


def test_a_class_token_that_big_vision_gives_no_position_has_none(reference, images, tmp_path):
    native = reference()
    with torch.no_grad():
        parity.zero_class_position(native)
    arrays = jax_arrays(native, tmp_path, big_vision=True)
    arrays["pos_embedding"] = arrays["pos_embedding"][:, 1:]
    assert difference(CLASSIFIER.from_checkpoint(save(arrays, tmp_path / "vit.npz")), native, images) <= ROUNDING


def test_a_hybrid_of_resnet_and_vit_is_refused(reference, tmp_path):
    arrays = jax_arrays(reference(), tmp_path) | {"conv_root/kernel": np.ones((7, 7, 3, 8))}
    with pytest.raises(ValueError, match="hybrid of ResNet and ViT"):
        CLASSIFIER.from_checkpoint(save(arrays, tmp_path / "vit.npz"))


def test_the_number_of_heads_is_assumed_and_can_be_given(reference, images, tmp_path, caplog):
    native = reference(num_attention_heads=6)
    file = save(parity.to_timm(native), tmp_path / "vit.pth")
    assert difference(CLASSIFIER.from_checkpoint(file), native, images) > 1e-2
    assert "num_attention_heads 3 assumed" in caplog.text
    assert "hidden_act gelu assumed" in caplog.text
    assert difference(CLASSIFIER.from_checkpoint(file, num_attention_heads=6), native, images) <= ROUNDING


def test_a_timm_repo_of_an_odd_width_loads_once_it_is_told_its_heads(reference, images, tmp_path):
    native = reference(hidden_size=96, num_attention_heads=2)
    parity.timm_repo(global_pool="token")(native, tmp_path)
    with pytest.raises(ValueError, match="how many heads share its 96 channels: pass num_attention_heads="):
        CLASSIFIER.from_pretrained(tmp_path)
    assert difference(CLASSIFIER.from_pretrained(tmp_path, num_attention_heads=2), native, images) <= ROUNDING


def test_the_number_of_heads_is_asked_for_where_no_published_model_tells_it(reference, images, tmp_path):
    native = reference(hidden_size=48, num_attention_heads=4)
    for file in (save(parity.to_timm(native), tmp_path / "vit.pth"), parity.torchvision_file(native, tmp_path)):
        with pytest.raises(ValueError, match=r"how many heads share its 48 channels: pass num_attention_heads="):
            CLASSIFIER.from_checkpoint(file)
        assert difference(CLASSIFIER.from_checkpoint(file, num_attention_heads=4), native, images) <= ROUNDING


def test_other_fields_can_be_given_with_a_raw_file(reference, images, tmp_path):
    native = reference(hidden_act="relu")
    file = save(parity.to_timm(native), tmp_path / "vit.pth")
    model = CLASSIFIER.from_checkpoint(file, hidden_act="relu", id2label=dict(enumerate("abcde")))
    assert difference(model, native, images) <= ROUNDING
    assert model.config.id2label[4] == "e"
    assert CLASSIFIER.from_checkpoint(file, num_labels=9).config.num_labels == 9
    with pytest.raises(ValueError, match="hidden_sizes"):
        CLASSIFIER.from_checkpoint(file, hidden_sizes=D)


def test_a_rectangular_grid_needs_its_image_size_and_says_so(reference, tmp_path):
    native, images = reference(image_size=(16, 40)), torch.randn(2, 3, 16, 40)
    for file in (
        save(parity.to_timm(native), tmp_path / "vit.pth"),
        parity.torchvision_file(native, tmp_path),
        save(jax_arrays(native, tmp_path), tmp_path / "vit.npz"),
    ):
        for wrong in (dict(), dict(image_size=(16, 48))):
            with pytest.raises(
                ValueError, match=r"11 positions make no square grid: pass image_size=\(height, width\)"
            ):
                CLASSIFIER.from_checkpoint(file, **wrong)
        assert difference(CLASSIFIER.from_checkpoint(file, image_size=(16, 40)), native, images) <= ROUNDING


def test_the_input_size_that_a_timm_repo_states_gives_a_rectangular_grid(reference, tmp_path):
    native, images = reference(image_size=(16, 40)), torch.randn(2, 3, 16, 40)
    said = dict(pretrained_cfg={"input_size": [3, 16, 40]})
    folder = timm_repo(tmp_path / "repo", parity.to_timm(native), **said)
    assert difference(CLASSIFIER.from_pretrained(folder), native, images) <= ROUNDING


def test_image_size_of_a_square_checkpoint_resamples_also_when_it_has_as_many_patches(reference, tmp_path, caplog):
    native = reference(image_size=64)
    file, images = save(parity.to_timm(native), tmp_path / "vit.pth"), torch.randn(2, 3, 32, 128)
    square, wide = CLASSIFIER.from_checkpoint(file), CLASSIFIER.from_checkpoint(file, image_size=(32, 128))
    assert "positions resampled from a grid of 8x8 to 4x16" in caplog.messages[-1]
    assert wide.config.grid_size == (4, 16)
    assert difference(square, native, torch.randn(2, 3, 64, 64)) <= ROUNDING
    assert not torch.equal(
        square.vit.embeddings.position_embeddings[:, 1:], wide.vit.embeddings.position_embeddings[:, 1:]
    )
    square.resize_input(image_size=(32, 128))
    assert difference(wide, square, images) == 0


def test_an_image_that_patches_do_not_cover_is_cut_and_the_log_says_so(reference, tmp_path, caplog):
    """google/siglip-so400m-patch14-384 has 27 patches of 14 pixels on a side, 378 pixels."""
    native = reference(transformers.SiglipVisionModel, image_size=30, patch_size=14)
    native.save_pretrained(tmp_path)
    model, images = BASE.from_pretrained(tmp_path), torch.randn(2, 3, 30, 30)
    assert "image_size (30, 30) cut to (28, 28), which the patches cover" in caplog.text
    assert model.config.grid_size == (2, 2)
    assert difference(model, parity.outputs(native, images), images[..., :28, :28]) <= ROUNDING


# ----------------------------------------------------------------------------------------------------------------------
# Broken and hostile files


CUTS = {"empty": lambda data: b"", "4 bytes": lambda data: data[:4], "half": lambda data: data[: len(data) // 2],
        "all but a byte": lambda data: data[:-1], "text": lambda data: b"<!DOCTYPE html><p>404: Not Found</p>",
        "a git-lfs pointer": lambda data: b"version https://git-lfs.github.com/spec/v1\nsize 346284714\n"}  # fmt: skip


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ["vit.safetensors", "vit.pth", "vit.npz"])
def test_a_raw_file_that_is_not_whole_is_an_error_that_names_it(reference, tmp_path, name, cut):
    native = reference()
    file = save(jax_arrays(native, tmp_path) if name == "vit.npz" else parity.to_timm(native), tmp_path / name)
    file.write_bytes(CUTS[cut](file.read_bytes()))
    with pytest.raises(ValueError, match=rf"{re.escape(str(file))} (cannot be read|is no checkpoint)"):
        CLASSIFIER.from_checkpoint(file)


def test_a_flipped_bit_in_an_npz_is_an_error_that_names_the_array(reference, tmp_path):
    file = save(jax_arrays(reference(), tmp_path), tmp_path / "vit.npz")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"vit\.npz cannot be read: .*Bad CRC-32 for file '\S+\.npy'"):
        CLASSIFIER.from_checkpoint(file)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_folder_whose_file_is_not_whole_is_an_error_that_names_it(reference, tmp_path, name, cut):
    native = reference(transformers.Dinov2Model, mlp_ratio=4)
    native.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    file = save(tensors, tmp_path / name)
    assert difference(BASE.from_pretrained(tmp_path), native, torch.randn(2, 3, 32, 32)) <= ROUNDING
    file.write_bytes(CUTS[cut](file.read_bytes()))
    with pytest.raises(ValueError, match=rf"{re.escape(str(tmp_path))} cannot be read"):
        BASE.from_pretrained(tmp_path)


class Evil:
    """Its pickle makes a file when it is opened."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def evil(tmp_path):
    """An object whose pickle runs code; fails if it was run."""
    yield Evil(tmp_path / "marker")
    assert not (tmp_path / "marker").exists()


def test_the_pickle_of_these_tests_would_run_code(tmp_path):
    pickle.loads(pickle.dumps(Evil(tmp_path / "marker"), protocol=2))
    assert (tmp_path / "marker").exists()


REFUSES_CODE = r"cannot be read: it holds more than tensors \((posix|nt)\.system\), and none of that was run"


@pytest.mark.parametrize("name", ["new.pth", "old.pth"])
def test_code_in_a_raw_pickle_is_never_run(reference, tmp_path, evil, name):
    file = save({"model": parity.to_timm(reference()), "args": evil}, tmp_path / name)
    with pytest.raises(ValueError, match=REFUSES_CODE):
        CLASSIFIER.from_checkpoint(file)


def test_code_in_a_bare_pickle_is_never_run(tmp_path, evil):
    (tmp_path / "vit.pth").write_bytes(pickle.dumps(evil, protocol=2))
    with pytest.raises(ValueError, match=REFUSES_CODE):
        CLASSIFIER.from_checkpoint(tmp_path / "vit.pth")


@pytest.mark.parametrize("family", ["transformers", "timm"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "bare"])
def test_code_in_the_pickle_of_a_folder_is_never_run(reference, tmp_path, evil, family, name):
    native = reference()
    native.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    if family == "timm":
        tensors = parity.to_timm(native)
        (tmp_path / "config.json").write_text(json.dumps(TIMM))
    save({**tensors, "more": evil}, tmp_path / "pytorch_model.bin")
    if name == "bare":
        (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(evil, protocol=2))
    with pytest.raises(ValueError, match=REFUSES_CODE):
        CLASSIFIER.from_pretrained(tmp_path)


def test_text_in_an_npz_is_an_error_that_names_it(reference, tmp_path):
    file = save(jax_arrays(reference(), tmp_path) | {"note": np.array("hello")}, tmp_path / "vit.npz")
    with pytest.raises(ValueError, match=r"vit\.npz cannot be read: note holds text"):
        CLASSIFIER.from_checkpoint(file)


def test_objects_in_an_npz_are_never_opened(reference, tmp_path, evil):
    arrays = jax_arrays(reference(), tmp_path) | {"note": np.array(evil, dtype=object)}
    file = save(arrays, tmp_path / "vit.npz")
    with pytest.raises(ValueError, match=r"vit\.npz cannot be read: note holds more than numbers"):
        CLASSIFIER.from_checkpoint(file)


@pytest.mark.parametrize("content", [[1, 2], torch.ones(3), {"epoch": 3}, {"weight": torch.ones(3)}, {}], ids=repr)
def test_a_pickle_without_a_vit_says_what_it_holds(tmp_path, content):
    with pytest.raises(
        ValueError, match=r"vit\.pth holds (a list|a Tensor|no ViT that hf_vit knows: its tensors are (none|weight))"
    ):
        CLASSIFIER.from_checkpoint(save(content, tmp_path / "vit.pth"))


def test_a_list_or_a_text_as_the_pickle_of_a_folder_is_an_error_that_names_it(reference, tmp_path):
    reference().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save([1, 2], tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=rf"{re.escape(str(tmp_path))}.* is no checkpoint"):
        CLASSIFIER.from_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_text("hello world")
    with pytest.raises(ValueError, match=rf"{re.escape(str(tmp_path))}.* is no checkpoint"):
        CLASSIFIER.from_pretrained(tmp_path)


NAN, INF = float("nan"), float("inf")
BLOCK = "blocks.1.attn."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("blocks.1.mlp.fc1.weight"), "vit.layers.1.mlp.fc1.weight is missing"),
        (lambda w: w.pop(f"{BLOCK}qkv.weight"), "k_proj.weight is missing; vit.layers.1.attention.q_proj.weight is missing"),
        (lambda w: w.pop(f"{BLOCK}qkv.bias"), "vit.layers.1.attention.v_proj.bias is missing"),
        (lambda w: w.pop("norm.bias"), "vit.layernorm.bias is missing"),
        (lambda w: w.pop("head.bias"), "classifier.bias is missing"),
        (lambda w: w.update({"layers.1.layernorm_before.weight": torch.ones(D)}),
         "holds vit.layers.1.layernorm_before.weight 2 times, as blocks.1.norm1.weight and layers.1.layernorm_before.weight"),
        (lambda w: w.update({"layers.1.attention.q_proj.weight": torch.ones(D, D)}), "q_proj.weight 2 times, as blocks.1.attn.qkv"),
        (lambda w: w.update({"fc_norm.weight": torch.ones(D)}), "layernorm.weight 2 times, as fc_norm.weight and norm.weight"),
        (lambda w: w.update({f"{BLOCK}proj.bias": torch.ones(63)}), "o_proj.bias has shape (63,), the model (192,)"),
        (lambda w: w.update({f"{BLOCK}qkv.weight": w[f"{BLOCK}qkv.weight"][:288]}), "q_proj.weight has shape (96, 192), the model (192, 192)"),
        (lambda w: w.update({f"{BLOCK}qkv.weight": w[f"{BLOCK}qkv.weight"][:384]}), "v_proj.weight has shape (128, 192), the model (192, 192)"),
        (lambda w: w.update({"head.bias": torch.ones(7)}), "classifier.bias has shape (7,), the model (5,)"),
        (lambda w: w[f"{BLOCK}qkv.weight"][D + 1].fill_(NAN), "vit.layers.1.attention.k_proj.weight holds NaN or infinity."),
        (lambda w: w["cls_token"][0, 0, 0].fill_(INF), "vit.embeddings.cls_token holds NaN or infinity"),
        (lambda w: w["pos_embed"][0, 3, 0].fill_(-INF), "vit.embeddings.position_embeddings holds NaN or infinity"),
        (lambda w: w["head.bias"][2].fill_(NAN), "classifier.bias holds NaN or infinity"),
        (lambda w: w.update({f"{BLOCK}rel_pos": torch.ones(3)}), "layers.1.attn.rel_pos is not known to the model"),
        (lambda w: w.update({"segment_embed": torch.ones(3)}), "segment_embed is not known to the model"),
        (lambda w: w.update({"blocks.5.norm1.bias": torch.ones(D)}), "vit.layers.2.attention.k_proj.bias is missing"),
    ],
)  # fmt: skip
def test_any_difference_in_a_raw_file_is_an_error_that_names_the_tensor(reference, tmp_path, change, message):
    tensors = parity.to_timm(reference())
    change(tensors)
    with pytest.raises(ValueError, match=re.escape(message)):
        CLASSIFIER.from_checkpoint(save(tensors, tmp_path / "vit.pth"))


LAYER = "dinov2.encoder.layer.1."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.update({"dinov2.layers.1.layernorm_before.bias": torch.ones(D)}),
         "layernorm_before.bias 2 times, as dinov2.encoder.layer.1.norm1.bias and dinov2.layers.1.layernorm_before.bias"),
        (lambda w: w.update({"vit.layers.1.layer_scale1.lambda1": torch.ones(D)}), "layer_scale1.lambda1 2 times"),
        (lambda w: w.update({f"{LAYER}norm2.weight": torch.ones(32)}), "vit.layers.1.layernorm_after.weight has shape (32,), the model (192,)"),
        (lambda w: w[f"{LAYER}mlp.fc1.weight"][D // 2, D // 2].fill_(NAN), "vit.layers.1.mlp.fc1.weight holds NaN or infinity."),
        (lambda w: w[f"{LAYER}layer_scale2.lambda1"][5].fill_(NAN), "vit.layers.1.layer_scale2.lambda1 holds NaN or infinity."),
        (lambda w: w["dinov2.embeddings.patch_embeddings.projection.weight"][D // 2, 0, 0].fill_(-INF), "projection.weight holds NaN or infinity"),
        (lambda w: w.update({f"{LAYER}attention.rel_pos": torch.ones(3)}), "layers.1.attention.rel_pos is not known to the model"),
        (lambda w: w.update({"dinov2.embeddings.register_tokens": torch.ones(1, 4, D)}), "register_tokens is not known to the model"),
        (lambda w: w.update({"classifier.weight": torch.ones(5, D)}), "classifier.weight has shape (5, 192), the model (5, 384)"),
    ],
)  # fmt: skip
def test_any_difference_in_a_native_folder_is_an_error_that_names_the_tensor(reference, tmp_path, change, message):
    reference(transformers.Dinov2ForImageClassification, mlp_ratio=4).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(message)):
        CLASSIFIER.from_pretrained(tmp_path)


def test_no_tensor_of_a_native_folder_can_be_missing_but_the_mask(reference, tmp_path):
    reference(transformers.Dinov2ForImageClassification, mlp_ratio=4).save_pretrained(tmp_path)
    tensors, loaded = load_file(tmp_path / "model.safetensors"), []
    for name in tensors:
        save({n: tensor for n, tensor in tensors.items() if n != name}, tmp_path / "model.safetensors")
        model, refusal = outcome(lambda: CLASSIFIER.from_pretrained(tmp_path))
        assert model is not None or "is missing" in refusal, name
        loaded += [name] if model is not None else []
    assert loaded == ["dinov2.embeddings.mask_token"]


@pytest.mark.parametrize("family", ["timm", "torchvision"])
def test_no_tensor_of_a_raw_file_can_be_missing_but_the_bias_of_the_patches_that_clip_lacks(
    reference, tmp_path, family
):
    native = reference()
    tensors = parity.to_timm(native) if family == "timm" else torch.load(parity.torchvision_file(native, tmp_path))
    loaded = []
    for name in tensors.keys() - {"head.weight", "heads.head.weight"}:
        file = save({n: tensor for n, tensor in tensors.items() if n != name}, tmp_path / "vit.pth")
        model, refusal = outcome(lambda file=file: CLASSIFIER.from_checkpoint(file))
        assert model is not None or str(file) in refusal, name
        loaded += [name] if model is not None else []
    assert loaded == (["patch_embed.proj.bias"] if family == "timm" else [])


@pytest.mark.parametrize("gone", ["cls_classifier", "distillation_classifier"])
def test_a_deit_folder_with_one_of_its_two_heads_is_an_error(reference, tmp_path, gone):
    reference(transformers.DeiTForImageClassificationWithTeacher).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save({name: t for name, t in tensors.items() if not name.startswith(gone)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"classifier\.(weight|bias).* heads"):
        CLASSIFIER.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "gone", [["head.weight", "head.bias"], ["head.weight"], ["head.bias"], ["head_dist.weight"], ["head_dist.bias"]], ids=" ".join
)  # fmt: skip
def test_a_raw_deit_file_with_part_of_its_heads_is_an_error(reference, tmp_path, gone):
    tensors = parity.to_timm(reference(transformers.DeiTForImageClassificationWithTeacher))
    for name in gone:
        del tensors[name]
    with pytest.raises(ValueError, match=r"classifier\.(weight|bias).* heads"):
        CLASSIFIER.from_checkpoint(save(tensors, tmp_path / "vit.pth"))


def test_an_unknown_model_type_lists_the_known_ones(reference, tmp_path):
    reference().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "swin", "hidden_size": D}))
    with pytest.raises(ValueError, match="holds a 'swin' model; hf_vit loads hf_vit") as error:
        CLASSIFIER.from_pretrained(tmp_path)
    for name in {case.family.split()[1] for case in parity.CASES if case.family.startswith("transformers")} | {"timm"}:
        assert re.search(rf"\b{name}\b", str(error.value)), name


def test_a_native_pooler_or_bias_that_we_lack_is_refused(reference, tmp_path):
    reference(transformers.ViTModel, pooler_output_size=32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="pooler_output_size 32 differs from hidden_size 192"):
        BASE.from_pretrained(tmp_path)
    config = dict(SIZE, num_register_tokens=2)
    for missing in (dict(proj_bias=False), dict(mlp_bias=False), dict(query_bias=False)):
        transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**config, **missing)).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="hf_vit has no dinov3_vit without proj_bias or mlp_bias"):
            BASE.from_pretrained(tmp_path)


def test_a_file_of_transformers_is_told_that_it_needs_its_config(reference, tmp_path):
    reference().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"holds no ViT that hf_vit knows.*config\.json beside it: give the folder to from_pretrained"
    ):
        CLASSIFIER.from_checkpoint(tmp_path / "model.safetensors")


def test_file_and_folder_are_told_where_they_belong(reference, tmp_path):
    file = save(parity.to_timm(reference()), tmp_path / "vit.pth")
    with pytest.raises(
        ValueError, match=r"vit\.pth is a file: from_pretrained takes a folder or a repo, from_checkpoint a file"
    ):
        CLASSIFIER.from_pretrained(file)
    for absent in (tmp_path, tmp_path / "no.pth"):
        with pytest.raises(
            ValueError, match=rf"there is no file {re.escape(str(absent))}; from_checkpoint takes a file"
        ):
            CLASSIFIER.from_checkpoint(absent)


@pytest.mark.parametrize("sizes", [dict(image_size=30), dict(patch_size=7), dict(image_size=(32, 36))], ids=repr)
def test_sizes_that_the_patch_does_not_divide_are_an_error(reference, tmp_path, sizes):
    native = reference()
    native.save_pretrained(tmp_path / "native")
    with pytest.raises(ValueError, match=r"patch_size .* does not divide image_size"):
        CLASSIFIER.from_pretrained(tmp_path / "native", **sizes)
    with pytest.raises(ValueError, match=r"patch_size .* does not divide image_size"):
        CLASSIFIER.from_checkpoint(save(parity.to_timm(native), tmp_path / "vit.pth"), **sizes)

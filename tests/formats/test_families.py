"""Every public format loads with the outputs of its reference, at its own size and at another, and converts back."""

import copy
import json
import random
import re

import parity
import pytest
import torch
import transformers
from checkpoint_writers import CASES
from safetensors.torch import load_file

from hf_vit import HFViTBackbone, HFViTConfig, HFViTForImageClassification, HFViTModel
from hf_vit.formats import native_models
from hf_vit.formats.family import OWN_FIELDS


TINY = parity.SIZE | dict(num_hidden_layers=2)
ROUNDING = 1e-5  # of the largest output
BASE, CLASSIFIER = HFViTModel, HFViTForImageClassification
# References that are given back as another class, of the same network.
GIVEN_BACK = dict(
    ViTMAEModel="ViTModel", ViTMAEForPreTraining="ViTModel", ViTMSNModel="ViTModel",
    ViTMSNForImageClassification="ViTForImageClassification", CLIPModel="CLIPVisionModel", MetaClip2Model="CLIPVisionModel",
    MetaClip2VisionModel="CLIPVisionModel", MetaClip2ForImageClassification="CLIPForImageClassification",
    Tipsv2VisionModel="Dinov2WithRegistersModel", Tipsv2Model="Dinov2WithRegistersModel", SiglipModel="SiglipVisionModel",
    SiglipForImageClassification="IJepaForImageClassification",
)  # fmt: skip


def name_of(case):
    return f"{case.family}, {case.model}{', gated' if 'use_' in str(case.config) else ''}"


def native_of(name, folder=None, **fields):
    """A native model with random weights and the patches of a tiny image, saved in a folder."""
    native = parity.build(name, **TINY | dict(image_size=32) | fields)
    if folder is not None:
        native.save_pretrained(folder)
    return native


@torch.no_grad()
def difference(model, wanted, images):
    return parity.difference(parity.outputs(model, images), parity.outputs(wanted, images))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_family_has_the_outputs_of_its_reference_at_two_sizes_and_so_has_the_model_given_back(case, tmp_path):
    row = parity.measure(case, TINY, tmp_path)
    assert max(row["loaded"], row["resized"], row["given_back"]) <= ROUNDING
    assert row["native"] == GIVEN_BACK.get(case.model, case.model)


def test_the_references_are_told_apart_by_their_outputs():
    """The table would be blind if a reference with other weights came as close."""
    assert difference(native_of("ViTModel"), native_of("ViTModel"), torch.randn(2, 3, 32, 32)) > 0.1


# DeiT with its teacher is left to the table: its two biases come back as their mean.
FOLDERS = [case for case in CASES if not (case.family or case.model in GIVEN_BACK or "Teacher" in case.model)]


@pytest.mark.parametrize("case", FOLDERS, ids=name_of)
def test_a_folder_given_back_holds_the_same_tensors_and_config_as_the_one_it_came_from(case, tmp_path):
    more = dict(pos_embed_rescale=None) if "DINOv3" in case.model else {}  # of training, which ours lacks
    parity.build(case.model, **TINY | case.config | more).save_pretrained(tmp_path / "native")
    ours = CLASSIFIER if "Classification" in case.model else BASE
    ours.from_pretrained(tmp_path / "native").to_transformers().save_pretrained(tmp_path / "back")
    original, back = (load_file(tmp_path / folder / "model.safetensors") for folder in ("native", "back"))
    assert set(back) == set(original)
    other = [name for name in original if not torch.equal(original[name], back[name])]
    assert [name for name in other if "mask_token" not in name and "vision_model.post_layernorm" not in name] == []
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("native", "back")]
    for config in configs:
        config.pop("text_config", None)
        config.get("vision_config", {}).pop("dtype", None)
        if "mlp_ratio" in config:
            config.pop("intermediate_size", None)
        if config.get("use_swiglu_ffn"):
            del config["hidden_act"]  # which DINOv2 does not read then
    assert configs[0] == configs[1]


@pytest.mark.parametrize("name", ["DeiTForImageClassificationWithTeacher", "DINOv3ViTModel", "SiglipVisionModel"])
def test_a_loaded_family_saved_by_us_reloads_its_weights_bit_for_bit_under_our_names(name, tmp_path):
    native_of(name, tmp_path / "public")
    model = (CLASSIFIER if "Class" in name else BASE).from_pretrained(tmp_path / "public")
    model.save_pretrained(tmp_path / "ours")
    saved, again = load_file(tmp_path / "ours" / "model.safetensors"), type(model).from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(saved, dict(model.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "pooling"),
    [("Dinov2Model", "cls_mean"), ("CLIPVisionModel", "cls"), ("SiglipVisionModel", "map"), ("IJepaModel", "mean")],
)
@torch.no_grad()
def test_a_base_model_opens_as_classifier_with_a_zero_head_and_as_backbone(tmp_path, caplog, name, pooling):
    native, images = native_of(name, tmp_path), torch.randn(2, 3, 32, 32)
    model = CLASSIFIER.from_pretrained(tmp_path, num_labels=4)
    assert "classifier reset" in caplog.text
    assert model.config.pooling == pooling
    assert model(images).logits.eq(0).all()
    tokens = native(images).last_hidden_state
    assert (model.vit(images).last_hidden_state - tokens).abs().max() <= ROUNDING * tokens.abs().max()
    [found] = HFViTBackbone.from_pretrained(tmp_path)(images).feature_maps
    assert (found.flatten(2).transpose(1, 2) - tokens[:, -4:]).abs().max() <= ROUNDING * tokens.abs().max()


@pytest.mark.parametrize("name", ["Dinov2", "CLIP", "Siglip", "IJepa"])
def test_a_classifier_opens_as_base_model_with_the_tokens_and_pooled_vector_of_its_own(tmp_path, name):
    """CLIP and SigLIP pool otherwise to classify, DINOv2 twice as wide."""
    native = native_of(f"{name}ForImageClassification", tmp_path)
    base = getattr(native, "vision_model", None) or native.base_model
    assert difference(BASE.from_pretrained(tmp_path), base, torch.randn(2, 3, 32, 32)) <= ROUNDING


def test_a_folder_in_shards_of_half_precision_loads_the_same(tmp_path):
    native = native_of("Dinov2ForImageClassification").bfloat16()
    native.save_pretrained(tmp_path, max_shard_size="250KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    model, images = CLASSIFIER.from_pretrained(tmp_path), torch.randn(2, 3, 32, 32)
    assert model.dtype == torch.bfloat16
    assert difference(model.float(), native.float(), images) <= ROUNDING


def test_an_image_that_patches_do_not_cover_is_cut_and_the_log_says_so(tmp_path, caplog):
    """google/siglip-so400m-patch14-384 has 27 patches of 14 pixels on a side, 378 pixels."""
    native = native_of("SiglipVisionModel", tmp_path, image_size=40)
    model, images = BASE.from_pretrained(tmp_path), torch.randn(2, 3, 40, 40)
    assert model.config.grid_size == (2, 2)
    assert "(40, 40) cut to (32, 32)" in caplog.text
    wanted = native(images).pooler_output
    assert (model(images[..., :32, :32]).pooler_output - wanted).abs().max() <= ROUNDING * wanted.abs().max()


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("DINOv3ViTModel", dict(reshape_hidden_states=False), "reshape_hidden_states"),
        ("InternVLVisionModel", dict(norm_type="rms_norm"), "RMSNorm"),
        ("MLCDVisionModel", {}, "mlcd_vision_model"),
    ],
)
def test_a_native_network_that_no_field_expresses_is_refused_with_the_reason(tmp_path, name, fields, reason):
    getattr(transformers, name).config_class(**TINY | fields).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=reason):
        BASE.from_pretrained(tmp_path)


# ----------------------------------------------------------------------------------------------------------------------
# Models of ours that no checkpoint gave


WITHOUT_CLASS = dict(use_class_token=False, pooling="mean")
DISTILLED = dict(use_distillation_token=True)
ROTARY = dict(position_embedding="rotary", num_register_tokens=2)
SWIGLU = dict(gated_mlp=True, hidden_act="silu")
CLIP = dict(patch_bias=False, embedding_norm=True)
CLIP_HEAD = dict(CLIP, final_norm="none", pooling="mean")
OF_CLASS = "ForImageClassification"
CONVERTED = [
    (BASE, dict(position_embedding="sincos2d", image_size=(16, 24)), "ViTModel"),
    (BASE, dict(pooler_act="gelu", qkv_bias=False), "ViTModel"),
    (CLASSIFIER, dict(key_bias=False, patch_bias=False, final_norm="pooled", num_channels=1), f"ViT{OF_CLASS}"),
    (CLASSIFIER, dict(position_embedding="sincos1d", **WITHOUT_CLASS), f"IJepa{OF_CLASS}"),
    (BASE, dict(position_embedding="sincos2d", **DISTILLED), "DeiTModel"),
    (CLASSIFIER, dict(DISTILLED, pooling="cls_distillation"), f"DeiT{OF_CLASS}WithTeacher"),
    (BASE, dict(SWIGLU, intermediate_size=88), "Dinov2Model"),
    (CLASSIFIER, dict(pooling="mean"), f"Dinov2{OF_CLASS}"),
    (CLASSIFIER, dict(layerscale_value=0.5, patch_bias=False), f"Dinov2{OF_CLASS}"),
    (CLASSIFIER, dict(num_register_tokens=3, pooling="cls_mean"), f"Dinov2WithRegisters{OF_CLASS}"),
    (BASE, dict(n_cls_tokens=3), "PixioModel"),
    (BASE, dict(use_class_token=False, pooling="map"), "SiglipVisionModel"),
    (BASE, dict(ROTARY, **SWIGLU, rope_theta=50.0, key_bias=False, patch_bias=False), "DINOv3ViTModel"),
    (BASE, dict(CLIP, final_norm="pooled"), "CLIPVisionModel"),
    (CLASSIFIER, CLIP_HEAD, f"CLIP{OF_CLASS}"),
    (BASE, dict(final_norm="none", pooling="mean", layerscale_value=0.5), "InternVLVisionModel"),
]


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
    """The same tokens, pooled vector and logits; a native model may pool nothing."""
    found, wanted = parity.outputs(native, images), parity.outputs(model, images)
    if "pooler_output" not in found:
        wanted.pop("pooler_output", None)
    assert set(found) == set(wanted)
    assert parity.difference(found, wanted) <= ROUNDING


@pytest.mark.parametrize(("model_class", "fields", "native_class"), CONVERTED, ids=str)
@torch.no_grad()
def test_a_model_with_a_native_counterpart_becomes_it_with_the_same_outputs(make, model_class, fields, native_class):
    model, images = make(model_class, **fields)
    before = copy.deepcopy(model.state_dict())
    native = model.to_transformers()
    assert type(native).__name__ == native_class
    assert_the_same(native, model, images)
    for tensor in native.state_dict().values():
        tensor.zero_()  # copies
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_new_field_is_refused_on_the_way_back_until_a_native_config_has_it(tiny_model, monkeypatch):
    monkeypatch.setattr(native_models, "OWN_FIELDS", OWN_FIELDS | {"new_field"})
    monkeypatch.setattr(HFViTConfig, "new_field", "as before", raising=False)
    model = tiny_model()
    assert model.to_transformers() is not None
    model.config.new_field = "other"
    with pytest.raises(ValueError, match="new_field='other'"):
        model.to_transformers()


CHANGES = dict(
    patch_bias=[False, True], gated_mlp=[True, False], hidden_act=["silu", "gelu", "relu"], qkv_bias=[False, True], key_bias=[False],
    qk_norm=[True], position_embedding=["learned", "sincos1d", "sincos2d", "none"], use_class_token=[False, True],
    use_distillation_token=[True], num_register_tokens=[0, 1, 2], n_cls_tokens=[1, 2], embedding_norm=[True, False],
    norm_first=[False], final_norm=["tokens", "pooled", "none"], pooling=["cls", "mean", "cls_mean", "cls_distillation", "map"],
    pooler_act=["tanh", None], representation_size=[8], layerscale_value=[0.3, 1.0], intermediate_size=[64, 96, 100],
    image_size=[16, (8, 24)], patch_size=[4, (4, 2)], num_channels=[1, 4], layer_norm_eps=[1e-3], num_labels=[1, 7],
    num_attention_heads=[1, 8], patch_projection=["norm_linear_norm"],
)  # fmt: skip


@torch.no_grad()
def test_40_random_models_are_converted_with_equal_outputs_or_refused_by_a_field_of_theirs(make):
    """Each is one of the table's with up to four fields changed."""
    draw, outcomes = random.Random(1), dict(converted=0, refused=0)
    while sum(outcomes.values()) < 40:
        model_class, fields, _ = draw.choice(CONVERTED)
        fields = fields | {name: draw.choice(CHANGES[name]) for name in draw.sample(list(CHANGES), draw.randrange(5))}
        try:
            model, images = make(model_class, **fields)
        except ValueError:
            continue  # not even a config
        try:
            native, refusal = model.to_transformers(), ""
        except ValueError as error:
            native, refusal = None, str(error)
        outcomes["refused" if refusal else "converted"] += 1
        if native is not None:
            assert_the_same(native, model, images)
            continue
        named = re.findall(r"(\w+)=('\w*'|[\w.]+|\([\d, ]+\))", refusal)
        assert named, refusal
        for name, value in named:
            has = getattr(model.config, name)
            assert value == repr(tuple(has) if isinstance(has, (list, tuple)) else has), (fields, refusal)
    assert min(outcomes.values()) >= 10, outcomes


def test_a_model_without_the_pooler_of_its_config_becomes_a_native_one_without(tiny_config):
    config = tiny_config(pooler_act="tanh")
    for model in (HFViTModel(config, add_pooling_layer=False), HFViTBackbone(config)):
        assert model.to_transformers().pooler is None
    assert HFViTModel(config).to_transformers().pooler is not None


@pytest.mark.parametrize("fields", [dict(), dict(pooling="mean"), dict(DISTILLED, pooling="cls_distillation")])
def test_labels_mode_dtype_rates_and_backend_are_carried_over(make, fields):
    carried = dict(id2label=dict(enumerate("abcd")), label2id={label: row for row, label in enumerate("abcd")})
    carried |= dict(problem_type="multi_label_classification", hidden_dropout_prob=0.2)
    model, _ = make(CLASSIFIER, **fields, num_labels=4, **carried)
    model.set_attn_implementation("eager")
    native = model.to(torch.bfloat16).to_transformers()
    assert {name: getattr(native.config, name) for name in carried} == carried
    assert (native.config._attn_implementation, native.dtype, native.training) == ("eager", torch.bfloat16, False)

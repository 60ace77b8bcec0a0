"""HFViTConfig: published sizes, checks that say what to do, and a lossless way to disk and back."""

import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError

from hf_vit import HFViTConfig, HFViTForImageClassification


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("tiny-patch16-224", 5_717_416),
        ("small-patch16-224", 22_050_664),
        ("base-patch16-224", 86_567_656),
        ("base-patch32-224", 88_224_232),
        ("large-patch16-224", 304_326_632),
        ("huge-patch14-224", 632_045_800),
    ],
)
def test_preset_has_the_published_number_of_parameters(preset, parameters):
    with torch.device("meta"):
        model = HFViTForImageClassification(HFViTConfig.from_preset(preset, num_labels=1000))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_the_defaults_are_the_base_preset():
    assert HFViTConfig().to_dict() == HFViTConfig.from_preset("base-patch16-224").to_dict()


def test_a_preset_takes_overrides():
    config = HFViTConfig.from_preset("tiny-patch16-224", num_labels=10, image_size=384)
    assert (config.hidden_size, config.num_labels, config.grid_size) == (192, 10, (24, 24))


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'giant'.*tiny-patch16-224.*huge-patch14-224"):
        HFViTConfig.from_preset("giant")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(image_size=18), r"patch_size 4 does not divide image_size 18; use image_size \(16, 16\)"),
        (dict(image_size=(16, 18)), r"use image_size \(16, 16\)"),
        (dict(image_size=2), r"use image_size \(4, 4\)"),
        (dict(image_size=0), "image_size is 0; give one positive int, or a pair"),
        (dict(image_size=[16]), "image_size is .* give one positive int, or a pair"),
        (dict(patch_size=[4, -4]), "patch_size is .* give one positive int, or a pair"),
        (dict(num_channels=0), "num_channels is 0; it must be at least 1"),
        (dict(hidden_size=0), "hidden_size is 0; it must be at least 1"),
        (dict(num_hidden_layers=0), "num_hidden_layers is 0; it must be at least 1"),
        (dict(num_attention_heads=-1), "num_attention_heads is -1; it must be at least 1"),
        (dict(intermediate_size=0), "intermediate_size is 0; it must be at least 1"),
        (dict(num_attention_heads=5), "num_attention_heads 5 does not divide hidden_size 32; change one"),
        (dict(position_embedding="sincos2d", hidden_size=18, num_attention_heads=1), "hidden_size that 4 divides, not 18"),
        (dict(use_class_token=False), 'without a class token use pooling="mean"'),
        (dict(num_register_tokens=-1), "num_register_tokens is -1; it must be 0 or more"),
        (dict(hidden_act="gelo"), "hidden_act 'gelo' is unknown; transformers knows gelu"),
        (dict(pooler_act="tan"), "pooler_act 'tan' is unknown; transformers knows .*tanh"),
        (dict(drop_path_rate=1.0), r"drop_path_rate is 1.0; a probability in \[0, 1\)"),
        (dict(hidden_dropout_prob=-0.1), r"hidden_dropout_prob is -0.1; a probability in \[0, 1\)"),
        (dict(attention_probs_dropout_prob=2), r"attention_probs_dropout_prob is 2; a probability in \[0, 1\)"),
        (dict(layer_norm_eps=0.0), "layer_norm_eps is 0.0; it must be above 0"),
        (dict(initializer_range=-0.02), "initializer_range is -0.02; it must be above 0"),
    ],
)  # fmt: skip
def test_an_impossible_architecture_is_an_error_that_says_what_to_do(tiny_config, fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(hidden_size="768"), "'hidden_size' expected int, got str"),
        (dict(image_size=16.0), "'image_size' with value 16.0"),
        (dict(image_size=(16, 16, 16)), "'image_size' with value"),
        (dict(use_class_token=1), "'use_class_token' expected bool"),
        (dict(pooling="max"), r"'pooling' expected one of \('cls', 'mean', .*\), got max"),
        (dict(position_embedding="alibi"), r"expected one of \('learned', .*\), got alibi"),
        (dict(layerscale_value="0.1"), "'layerscale_value' with value '0.1'"),
    ],
)
def test_a_value_of_another_type_is_an_error_that_names_the_field(tiny_config, fields, message):
    with pytest.raises(StrictDataclassFieldValidationError, match=message):
        tiny_config(**fields)


def test_an_architecture_made_impossible_later_is_an_error_before_the_model_is_built(tiny_config):
    config = tiny_config()
    config.patch_size = 5
    with pytest.raises(ValueError, match="patch_size 5 does not divide"):
        HFViTForImageClassification(config)


def test_an_unknown_field_is_an_error_with_a_suggestion():
    with pytest.raises(ValueError, match=r"no field 'hiden_size'; did you mean 'hidden_size'\?"):
        HFViTConfig(hiden_size=64)
    with pytest.raises(ValueError, match=r"no field 'xyz'; see help\(HFViTConfig\)"):
        HFViTConfig(xyz=16)


def test_label_names_set_the_number_of_labels():
    config = HFViTConfig(id2label={0: "cat", 1: "dog", 2: "cow"})
    assert config.num_labels == 3
    assert config.label2id == {"cat": 0, "dog": 1, "cow": 2}


def test_label_names_and_a_number_of_labels_that_disagree_are_an_error():
    with pytest.raises(ValueError, match="num_labels is 10 but id2label names 2 labels"):
        HFViTConfig(id2label={0: "cat", 1: "dog"}, num_labels=10)


def test_a_config_comes_back_from_disk_as_it_was(tiny_config, tmp_path):
    config = tiny_config(
        image_size=[16, 32], patch_size=[4, 8], num_channels=1, hidden_act="relu", qkv_bias=False, position_embedding="sincos2d",
        use_class_token=False, num_register_tokens=2, pooling="mean", pooler_act="tanh", layerscale_value=0.1, drop_path_rate=0.2,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.3, layer_norm_eps=1e-5, initializer_range=0.01,
        id2label={0: "cat", 1: "dog", 2: "cow"},
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    assert HFViTConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_a_pair_given_as_a_tuple_comes_back_with_the_same_grid(tiny_config, tmp_path):
    tiny_config(image_size=(16, 32), patch_size=(4, 8)).save_pretrained(tmp_path)
    assert HFViTConfig.from_pretrained(tmp_path).grid_size == (4, 4)


def test_overrides_of_a_saved_config_are_checked(tiny_config, tmp_path):
    tiny_config().save_pretrained(tmp_path)
    assert HFViTConfig.from_pretrained(tmp_path, image_size=32).grid_size == (8, 8)
    with pytest.raises(ValueError, match="patch_size 4 does not divide image_size 17"):
        HFViTConfig.from_pretrained(tmp_path, image_size=17)


def test_another_number_of_labels_replaces_the_saved_names(tmp_path):
    HFViTConfig(id2label={0: "cat", 1: "dog"}).save_pretrained(tmp_path)
    assert HFViTConfig.from_pretrained(tmp_path, num_labels=2).id2label == {0: "cat", 1: "dog"}
    assert HFViTConfig.from_pretrained(tmp_path, num_labels=3).label2id == {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}
    assert HFViTConfig.from_pretrained(tmp_path, id2label={0: "cow"}).label2id == {"cow": 0}


def test_the_config_of_an_unknown_family_is_an_error_that_lists_the_known_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "swin", "hidden_size": 96}))
    with pytest.raises(ValueError, match=r"holds a 'swin' model; hf_vit loads hf_vit, vit"):
        HFViTConfig.from_pretrained(tmp_path)


def test_a_native_vit_config_is_translated(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "vit", "hidden_size": 384, "num_attention_heads": 6})
    )
    config = HFViTConfig.from_pretrained(tmp_path)
    assert (config.model_type, config.hidden_size, config.pooler_act) == ("hf_vit", 384, "tanh")
    assert config.layer_norm_eps == 1e-12  # ViTConfig's default, not ours


def test_a_model_saved_after_its_number_of_layers_changed_loads_again(tiny_config, tmp_path):
    from hf_vit import HFViTBackbone, HFViTForImageClassification

    config = tiny_config()
    config.num_hidden_layers = 1
    HFViTForImageClassification(config).save_pretrained(tmp_path)
    assert len(HFViTForImageClassification.from_pretrained(tmp_path).vit.layers) == 1
    assert HFViTBackbone.from_pretrained(tmp_path).out_indices == [1]


def test_an_out_index_outside_the_layers_is_an_error(tiny_config):
    with pytest.raises(ValueError, match=r"out_indices \[-4\] are not all within 0 to 2, or -1 to -3"):
        tiny_config(out_indices=[-4])


def test_a_field_beside_a_config_object_is_an_error(tiny_config, tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="config= and image_size= are both given: set image_size in the config"):
        type(tiny_model()).from_pretrained(tmp_path, config=tiny_config(), image_size=32)

"""HFViTConfig: published sizes, checks that name the field and its value, and a lossless way to disk and back."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError

from hf_vit import HFViTBackbone, HFViTConfig, HFViTForImageClassification


@pytest.mark.parametrize(
    ("preset", "parameters"), [("tiny-patch16-224", 5_717_416), ("small-patch16-224", 22_050_664)]
)
def test_a_small_preset_has_the_published_number_of_parameters(preset, parameters):
    """The larger ones are in tests/formats/test_write_ups.py."""
    with torch.device("meta"):
        model = HFViTForImageClassification(HFViTConfig.from_preset(preset, num_labels=1000))
    assert model.num_parameters() == parameters


def test_the_defaults_are_the_base_preset_and_a_preset_takes_overrides():
    assert HFViTConfig().to_dict() == HFViTConfig.from_preset("base-patch16-224").to_dict()
    config = HFViTConfig.from_preset("tiny-patch16-224", num_labels=10, image_size=384)
    assert (config.hidden_size, config.num_labels, config.grid_size) == (192, 10, (24, 24))
    with pytest.raises(ValueError, match=r"'giant'.*tiny-patch16-224.*huge-patch14-224"):
        HFViTConfig.from_preset("giant")


OUTSIDE = [
    dict(image_size=[16]), dict(image_size=16.0), dict(patch_size=[4, -4]), dict(hidden_size=2**30), dict(num_hidden_layers=10**6),
    dict(rope_theta=0), dict(use_class_token=1), dict(pooling="max"), dict(mask_ratio=1.0), dict(layerscale_value=float("nan")),
]  # fmt: skip


@pytest.mark.parametrize("fields", OUTSIDE, ids=str)
def test_a_value_that_a_field_cannot_have_is_an_error_that_names_the_field(tiny_config, fields):
    with pytest.raises(StrictDataclassFieldValidationError, match=next(iter(fields))):
        tiny_config(**fields)


TOGETHER = [
    (dict(image_size=18), "patch_size 4 .* image_size 18"),
    (dict(num_attention_heads=5), "num_attention_heads 5 .* hidden_size 32"),
    (dict(position_embedding="sincos2d", hidden_size=18, num_attention_heads=1), "sincos2d .* 18"),
    (dict(position_embedding="rotary", hidden_size=24), "rotary .* 24"),
    (dict(use_class_token=False), "use_class_token"),
    (dict(pooling="cls_distillation"), "use_distillation_token"),
    (dict(out_indices=[4]), "4"),
    (dict(num_labels=10**9), "num_labels .* 1000000000"),
    (dict(num_labels=None, id2label={1: "cat", 2: "dog"}), "id2label"),
    (dict(hiden_size=64), "hiden_size"),
]


@pytest.mark.parametrize(("fields", "named"), TOGETHER, ids=str)
def test_fields_that_do_not_fit_each_other_are_an_error_that_names_them(tiny_config, fields, named):
    with pytest.raises(ValueError, match=named):
        tiny_config(**fields)


def test_an_architecture_made_impossible_later_is_an_error_before_the_model_is_built(tiny_config):
    config = tiny_config()
    config.patch_size = 5
    with pytest.raises(ValueError, match="patch_size 5"):
        HFViTForImageClassification(config)


def test_label_names_set_the_number_of_labels():
    config = HFViTConfig(id2label={"1": "dog", "0": "cat", 2: "cow"})
    assert config.num_labels == 3
    assert list(config.id2label.values()) == ["cat", "dog", "cow"]
    assert config.label2id == {"cat": 0, "dog": 1, "cow": 2}


def test_overrides_of_a_saved_config_are_checked(tiny_config, tmp_path):
    tiny_config().save_pretrained(tmp_path)
    assert HFViTConfig.from_pretrained(tmp_path, image_size=32).grid_size == (8, 8)
    for wrong in (dict(image_size=17), dict(hiden_size=4), dict(nonsense=4)):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            HFViTConfig.from_pretrained(tmp_path, **wrong)


def test_a_model_saved_after_its_number_of_layers_changed_loads_again(tiny_config, tmp_path):
    config = tiny_config()
    config.num_hidden_layers = 1
    HFViTForImageClassification(config).save_pretrained(tmp_path)
    assert len(HFViTForImageClassification.from_pretrained(tmp_path).vit.layers) == 1
    assert HFViTBackbone.from_pretrained(tmp_path).out_indices == [1]

"""Claims about the classifiers that scripts load, and their image processors."""

import math

import pytest
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForSequenceClassification, ResNetConfig, ResNetForImageClassification

from hf_vit import HFViTForImageClassification
from hf_vit.evaluation import classifiers
from hf_vit.evaluation.classifiers import load_classifier, load_processor, model_folder
from hf_vit.system.errors import UserError


def test_a_checkpoint_without_a_processor_is_warned_about(tiny_model, tmp_path, caplog, monkeypatch):
    tiny_model().save_pretrained(tmp_path)
    monkeypatch.setattr(classifiers.logger, "propagate", True)
    assert dict(load_processor(str(tmp_path)).size) == {"height": 16, "width": 16}
    assert "preprocessor_config.json" in caplog.text


def test_a_head_of_another_number_of_labels_is_no_trained_one(tiny_config, tmp_path):
    HFViTForImageClassification(tiny_config()).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="classifier"):
        load_classifier(str(tmp_path), trained=True, num_labels=7, ignore_mismatched_sizes=True)


def test_a_model_of_another_task_is_no_classifier_of_images(tmp_path):
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20)
    BertForSequenceClassification(BertConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="bert"):
        load_classifier(str(tmp_path))
    with pytest.raises(ValueError, match="is a file"):
        model_folder(str(tmp_path / "config.json"))


@pytest.mark.parametrize("fields", [dict(num_labels=3, problem_type="regression"), dict(num_labels=1)])
def test_a_model_of_numbers_is_refused(tmp_path, fields):
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", **fields)
    ResNetForImageClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="regression"):
        load_classifier(str(tmp_path))


def test_a_run_is_a_model_too_and_one_that_is_not_finished_says_so(tiny_model, tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(ValueError, match="not finished"):
        model_folder(str(tmp_path))
    tiny_model().save_pretrained(tmp_path / "model")
    assert model_folder(str(tmp_path)) == str(tmp_path / "model")
    (tmp_path / "model" / "config.yaml").write_text("seed: 0\n")  # as model_cards keeps them
    assert model_folder(str(tmp_path / "model")) == str(tmp_path / "model")


def test_a_nan_in_the_middle_of_a_tensor_is_found_before_training_and_scoring(saved):
    """In one of more than 2^14 numbers, where loading does not look."""
    folder, name = saved(hidden_size=64, intermediate_size=512), "vit.layers.0.mlp.fc1.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[tensors[name].numel() // 2] = math.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=name):
        load_classifier(str(folder))


@pytest.mark.parametrize("content", ["{", '{"base_model_name_or_path": null}'])
def test_an_adapter_without_a_base_is_refused(saved, content):
    folder = saved()
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").write_text(content)
    with pytest.raises(ValueError, match="adapter"):
        load_classifier(str(folder))

"""Public ViT formats load with the same numbers as their native model, and every other difference is logged or refused."""

import gc
import json
import shutil
import subprocess
import sys

import pytest
import torch
from datasets import load_dataset
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
    ViTModel,
)

from hf_vit import HFViTConfig, HFViTForImageClassification, HFViTModel


# ----------------------------------------------------------------------------------------------------------------------
# ViT-B/16 at full size


@pytest.fixture(scope="module", params=["base", "classifier"])
def full_size(request, randomize, tmp_path_factory):
    """(native ViT-B/16 with random weights, the folder it is saved in, our class that reads it)."""
    native_class, our_class = {
        "base": (ViTModel, HFViTModel),
        "classifier": (ViTForImageClassification, HFViTForImageClassification),
    }[request.param]
    torch.manual_seed(0)
    native = randomize(native_class(ViTConfig(num_labels=1000)))
    folder = tmp_path_factory.mktemp(request.param)
    native.save_pretrained(folder)
    yield native, folder, our_class
    shutil.rmtree(folder)
    del native
    gc.collect()


def largest_difference(ours, native):
    """The largest absolute difference between two outputs: last hidden state, pooled vector or logits, all hidden states."""
    pairs = [(ours[name], native[name]) for name in native if name != "hidden_states"]
    pairs += zip(ours.hidden_states, native.hidden_states, strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@torch.no_grad()
def test_full_size_matches_native_in_every_hidden_state_and_the_logits(full_size, capsys):
    native, folder, our_class = full_size
    model, images = our_class.from_pretrained(folder), torch.randn(2, 3, 224, 224)
    for backend in ("eager", "sdpa"):
        native.set_attn_implementation(backend)
        model.set_attn_implementation(backend)
        expected = native(images, output_hidden_states=True)
        assert len(expected.hidden_states) == 13
        difference = largest_difference(model(images, output_hidden_states=True), expected)
        with capsys.disabled():
            print(f"\n{our_class.__name__} against native ViT-B/16, {backend}: largest difference {difference:.1e}")
        assert difference <= 1e-5


def test_full_size_matches_native_in_the_gradient_of_every_parameter(full_size):
    native, folder, our_class = full_size
    model, images = our_class.from_pretrained(folder), torch.randn(1, 3, 224, 224)
    for network in (native, model):
        network.zero_grad()
        outputs = network(images)
        (outputs.logits if "logits" in outputs else outputs.pooler_output).square().sum().backward()
    theirs = dict(native.named_parameters())
    assert {name for name, _ in model.named_parameters()} == set(theirs)
    for name, parameter in model.named_parameters():
        scale = theirs[name].grad.abs().max()
        if name.endswith("k_proj.bias"):  # softmax does not see it: both are rounding around zero
            scale = theirs[name.replace("k_proj", "q_proj")].grad.abs().max()
        assert scale > 0, name
        assert (parameter.grad - theirs[name].grad).abs().max() <= 1e-4 * scale, name


# ----------------------------------------------------------------------------------------------------------------------
# The same at tiny size: names and reports


@pytest.fixture
def native_folder(tiny_fields, randomize, tmp_path):
    """native_folder(class, **arguments) -> (native model with random weights, the folder it is saved in)."""

    def make(native_class, **arguments):
        native = randomize(native_class(ViTConfig(**tiny_fields), **arguments))
        native.save_pretrained(tmp_path / "native")
        return native, tmp_path / "native"

    return make


def edit_weights(folder, change):
    """Apply change(dict of tensors) to the folder's safetensors file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


QUERY = "encoder.layer.0.attention.attention.query.weight"


def test_native_files_have_the_old_names_and_load_as_ours(native_folder, pixels, caplog):
    native, folder = native_folder(ViTForImageClassification)
    names = set(load_file(folder / "model.safetensors"))
    assert {f"vit.{QUERY}", "vit.encoder.layer.1.output.dense.bias", "classifier.weight"} <= names
    model, images = HFViTForImageClassification.from_pretrained(folder), pixels()
    torch.testing.assert_close(model(images).logits, native(images).logits)
    assert caplog.messages == [f"HFViTForImageClassification from {folder}: read as vit, 32 of 40 tensors renamed."]


def test_a_loaded_native_model_is_hf_vit_and_is_saved_under_our_names(native_folder, pixels, tmp_path):
    native, folder = native_folder(ViTForImageClassification)
    model, images = HFViTForImageClassification.from_pretrained(folder), pixels()
    assert model.config.model_type == "hf_vit"
    assert model.config.to_dict()["model_type"] == "hf_vit"
    model.save_pretrained(tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "hf_vit"
    assert set(load_file(tmp_path / "ours" / "model.safetensors")) == set(model.state_dict())
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "ours")
    assert type(again) is HFViTForImageClassification
    torch.testing.assert_close(again(images).logits, native(images).logits)


def test_a_classifier_read_from_a_native_folder_opens_as_a_base_model_once_saved(native_folder, pixels, tmp_path):
    native, folder = native_folder(ViTModel)
    HFViTForImageClassification.from_pretrained(folder).save_pretrained(tmp_path / "ours")
    images = pixels()
    base = HFViTModel.from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(base(images).last_hidden_state, native(images).last_hidden_state)


def test_the_pooler_of_a_native_base_model_is_ours_too(native_folder, pixels):
    native, folder = native_folder(ViTModel)
    images = pixels()
    torch.testing.assert_close(HFViTModel.from_pretrained(folder)(images).pooler_output, native(images).pooler_output)


def test_a_native_base_model_without_pooler_gives_the_class_token(native_folder, pixels, caplog, tmp_path):
    native, folder = native_folder(ViTModel, add_pooling_layer=False)
    model, images = HFViTModel.from_pretrained(folder), pixels()
    torch.testing.assert_close(model(images).pooler_output, native(images).last_hidden_state[:, 0])
    assert "no pooler in the checkpoint: pooler_output is the pooled token itself" in caplog.text
    model.save_pretrained(tmp_path / "ours")
    torch.testing.assert_close(
        HFViTModel.from_pretrained(tmp_path / "ours")(images).pooler_output, model(images).pooler_output
    )


def test_a_native_base_model_becomes_a_classifier_and_says_what_it_left_out(native_folder, pixels, caplog):
    native, folder = native_folder(ViTModel)
    model, images = HFViTForImageClassification.from_pretrained(folder), pixels()
    torch.testing.assert_close(model.vit(images).last_hidden_state, native(images).last_hidden_state)
    assert "classifier reset to 3 labels (the checkpoint has none)" in caplog.text
    assert "left out pooler (2 tensors)" in caplog.text


@pytest.mark.parametrize("ignore_mismatched_sizes", [False, True])
def test_another_number_of_labels_resets_only_the_head_and_says_so(
    native_folder, pixels, caplog, ignore_mismatched_sizes
):
    native, folder = native_folder(ViTForImageClassification)
    model = HFViTForImageClassification.from_pretrained(
        folder, num_labels=10, ignore_mismatched_sizes=ignore_mismatched_sizes
    )
    assert "classifier reset to 10 labels (the checkpoint has 3)" in caplog.text
    assert torch.equal(model(pixels()).logits, torch.zeros(2, 10))
    for name, value in native.state_dict().items():
        assert name.startswith("classifier.") or torch.equal(model.state_dict()[name], value), name


def test_the_same_number_of_labels_keeps_the_head(native_folder, caplog):
    native, folder = native_folder(ViTForImageClassification)
    model = HFViTForImageClassification.from_pretrained(folder, num_labels=3)
    assert torch.equal(model.classifier.weight, native.classifier.weight)
    assert "reset" not in caplog.text


def test_loading_info_is_given_when_asked(native_folder):
    _, folder = native_folder(ViTModel)
    model, info = HFViTForImageClassification.from_pretrained(folder, output_loading_info=True)
    assert isinstance(model, HFViTForImageClassification)
    assert set(info["missing_keys"]) == {"classifier.weight", "classifier.bias"}


# ----------------------------------------------------------------------------------------------------------------------
# What does not fit is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(f"vit.{QUERY}"), "vit.layers.0.attention.q_proj.weight is missing"),
        (lambda w: w.pop("vit.embeddings.cls_token"), "vit.embeddings.cls_token is missing"),
        (lambda w: w.update({"vit.encoder.layer.7.output.dense.bias": torch.ones(32)}), "vit.layers.7.mlp.fc2.bias is not known"),
        (lambda w: w.update({"vit.embeddings.seg_token": torch.ones(1, 1, 32)}), "vit.embeddings.seg_token is not known"),
        (lambda w: w.update({"vit.embeddings.position_embeddings": torch.ones(1, 5, 32)}),
         r"vit.embeddings.position_embeddings has shape \(1, 5, 32\), the model \(1, 17, 32\)"),
        (lambda w: w.pop("classifier.bias"), "classifier.bias"),
        (lambda w: w.update({"classifier.weight": torch.ones(3, 16)}), r"classifier.weight has shape \(3, 16\)"),
        (lambda w: w.update({"classifier.weight": torch.ones(5, 32)}), r"classifier.weight has shape \(5, 32\)"),
        (lambda w: w.update({"classifier.dense.weight": torch.ones(3, 3)}), "classifier.dense.weight is not known"),
        (lambda w: w.update({"vit.encoder.layer.0.pooler.x": torch.ones(3)}), "vit.layers.0.pooler.x is not known"),
    ],
    ids=["missing", "missing token", "extra layer", "extra token", "shape", "head without bias", "head of another width",
         "half a head", "extra head", "extra pooler"],
)  # fmt: skip
def test_any_other_difference_is_an_error_that_names_the_tensor(native_folder, change, message):
    """Another shape is reset where `ignore_mismatched_sizes=True` asks for it, and nothing else is excused by it."""
    _, folder = native_folder(ViTForImageClassification)
    edit_weights(folder, change)
    load = HFViTForImageClassification.from_pretrained
    with pytest.raises(ValueError, match=message):
        load(folder)
    if "has shape" in message:
        assert load(folder, ignore_mismatched_sizes=True).num_labels == 3
    else:
        with pytest.raises(ValueError, match=message):
            load(folder, ignore_mismatched_sizes=True)


def test_a_file_of_more_than_tensors_is_an_error_that_names_it(tiny_model, tmp_path):
    model = tiny_model()
    model.config.save_pretrained(tmp_path)
    torch.save({**model.state_dict(), "epoch": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"pytorch_model.bin holds a int called epoch; wanted a dict of tensors alone"
    ):
        type(model).from_pretrained(tmp_path)


def test_a_native_folder_saved_without_labels_opens_as_a_base_model(tiny_fields, tmp_path):
    ViTForImageClassification(ViTConfig(**{**tiny_fields, "num_labels": 0})).save_pretrained(tmp_path)
    assert HFViTModel.from_pretrained(tmp_path).config.num_labels == 2


def test_half_a_pooler_is_an_error(native_folder):
    _, folder = native_folder(ViTModel)
    edit_weights(folder, lambda weights: weights.pop("pooler.dense.bias"))
    with pytest.raises(ValueError, match=r"pooler.dense.bias is missing"):
        HFViTModel.from_pretrained(folder)


def test_half_a_hidden_layer_of_the_head_is_an_error_beside_another_number_of_labels(tiny_model, tmp_path):
    tiny_model(representation_size=8).save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda weights: weights.pop("pre_logits.weight"))
    edit_weights(tmp_path, lambda weights: weights.update({"pre_logits.bias": torch.ones(5)}))
    with pytest.raises(ValueError, match=r"pre_logits.weight is missing"):
        HFViTForImageClassification.from_pretrained(tmp_path, num_labels=7)


def test_our_own_folder_without_a_tensor_is_an_error(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda weights: weights.pop("vit.layers.1.mlp.fc1.weight"))
    with pytest.raises(ValueError, match=r"vit.layers.1.mlp.fc1.weight is missing"):
        HFViTForImageClassification.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "override",
    [dict(num_hidden_layers=1), dict(num_hidden_layers=3), dict(qkv_bias=False), dict(num_register_tokens=2)],
)
def test_an_override_that_the_weights_do_not_fit_is_an_error(native_folder, override):
    _, folder = native_folder(ViTForImageClassification)
    with pytest.raises(ValueError, match="do not fit HFViTForImageClassification"):
        HFViTForImageClassification.from_pretrained(folder, **override, ignore_mismatched_sizes=True)


@pytest.mark.parametrize("as_state_dict", [False, True])
def test_old_names_under_our_config_are_an_error_and_never_a_random_encoder(native_folder, as_state_dict):
    _, folder = native_folder(ViTForImageClassification)
    config = HFViTConfig.from_pretrained(folder)
    config.save_pretrained(folder)
    source = dict(state_dict=load_file(folder / "model.safetensors"), config=config) if as_state_dict else {}
    with pytest.raises(ValueError, match=r"vit\.layers\.0\.attention\.k_proj\.bias is missing"):
        HFViTForImageClassification.from_pretrained(None if as_state_dict else folder, **source)


def test_a_native_config_object_is_refused(native_folder):
    _, folder = native_folder(ViTModel)
    with pytest.raises(ValueError, match="config is a ViTConfig; leave it out, or pass an HFViTConfig"):
        HFViTModel.from_pretrained(folder, config=ViTConfig.from_pretrained(folder))


def test_our_config_object_reads_a_native_folder(native_folder, pixels):
    native, folder = native_folder(ViTForImageClassification)
    config = HFViTConfig.from_pretrained(folder, id2label={0: "cat", 1: "dog", 2: "cow"})
    model, images = HFViTForImageClassification.from_pretrained(folder, config=config), pixels()
    torch.testing.assert_close(model(images).logits, native(images).logits)
    assert model.config.id2label[2] == "cow"
    assert config.model_type == model.config.model_type == "hf_vit"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_does_not_hide_a_base_that_does_not_fit(native_folder, tmp_path):
    from peft import LoraConfig, get_peft_model

    _, folder = native_folder(ViTForImageClassification)
    model = get_peft_model(HFViTForImageClassification.from_pretrained(folder), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    edit_weights(folder, lambda weights: weights.pop(f"vit.{QUERY}"))
    with pytest.raises(ValueError, match=r"vit.layers.0.attention.q_proj.weight is missing"):
        HFViTForImageClassification.from_pretrained(tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_of_another_model_is_an_error(tiny_model, tmp_path):
    from peft import LoraConfig, get_peft_model

    tiny_model().save_pretrained(tmp_path / "base")
    model = get_peft_model(
        HFViTForImageClassification.from_pretrained(tmp_path / "base"), LoraConfig(target_modules=["q_proj"])
    )
    model.save_pretrained(tmp_path / "adapter")
    tiny_model(hidden_size=64).save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=r"adapter.*q_proj.lora_A"):
        HFViTForImageClassification.from_pretrained(tmp_path / "adapter")


# ----------------------------------------------------------------------------------------------------------------------
# The real repositories


@pytest.mark.network
@pytest.mark.parametrize(
    ("repo", "native_class", "our_class"),
    [
        ("google/vit-base-patch16-224-in21k", ViTModel, HFViTModel),
        ("google/vit-base-patch16-224", ViTForImageClassification, HFViTForImageClassification),
    ],
)
@torch.no_grad()
def test_the_real_repository_matches_native(repo, native_class, our_class):
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    native, model = native_class.from_pretrained(repo), our_class.from_pretrained(repo)
    expected = native(images, output_hidden_states=True)
    assert largest_difference(model(images, output_hidden_states=True), expected) <= 1e-5
    assert model.config.id2label == native.config.id2label


@pytest.mark.network
@torch.no_grad()
def test_the_published_logits_of_vit_base_are_reproduced():
    """The first three logits in transformers' own test of this checkpoint (tests/models/vit/test_modeling_vit.py,
    test_inference_image_classification_head), of COCO's image 39769, which the Hub has as a JPEG file."""
    image = load_dataset("huggingface/cats-image", split="test")["image"][0]
    inputs = ViTImageProcessorPil.from_pretrained("google/vit-base-patch16-224")(image, return_tensors="pt")
    logits = HFViTForImageClassification.from_pretrained("google/vit-base-patch16-224")(**inputs).logits
    assert logits.shape == (1, 1000)
    expected = torch.tensor([-0.2744, 0.8215, -0.0836])
    torch.testing.assert_close(logits[0, :3], expected, rtol=0, atol=1e-2)  # decoders of JPEG differ by a level


INTERRUPTED = """
import sys, hf_vit

class Interrupt:
    def find_spec(self, name, *_):
        if name == "hf_vit.formats.timm":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
try:
    sys.exit(f"{hf_vit.HFViTModel} was imported")
except KeyboardInterrupt:
    del sys.meta_path[0]
hf_vit.HFViTModel.from_pretrained(sys.argv[1])
"""


def test_a_first_import_that_was_interrupted_is_made_up_for(tmp_path):
    config = ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    ViTModel(config).save_pretrained(tmp_path)
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

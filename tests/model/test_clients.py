"""Other people's clients read what we write, and we read what they write: Trainer, pipelines, quantisers, detectors, segmenters."""

import json
import math
import sys

import forked
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from test_hub_code import CLASSIFIER_FILES, PACKAGE
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    Dinov2Backbone,
    Dinov2Config,
    ViTImageProcessorPil,
)
from without_package import BLOCK_OUR_PACKAGE

from hf_vit import HFViTBackbone, HFViTConfig, HFViTForImageClassification, HFViTForPreTraining, HFViTModel
from hf_vit.model.loading import non_finite
from hf_vit.model.modeling_hf_vit import HFViTPreTrainedModel


# What others write into config.json: Trainer, Transformers.js, other and later versions of transformers.
FOREIGN_KEYS = {
    "transformers.js_config": {"dtype": "q8"},
    "tie_word_embeddings": False,
    "batch_norm_eps": 1e-3,
    "a_key_of_transformers_9": [1, 2],
}


# ----------------------------------------------------------------------------------------------------------------------
# Strict in code, open in files


def test_keys_of_others_in_a_saved_config_are_kept_and_saved_again(tiny_model, tmp_path, caplog):
    tiny_model().save_pretrained(tmp_path / "once")
    file = tmp_path / "once" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | FOREIGN_KEYS | {"use_cache": False}))
    HFViTForImageClassification.from_pretrained(tmp_path / "once").save_pretrained(tmp_path / "twice")
    config = AutoConfig.from_pretrained(tmp_path / "twice").to_dict()
    assert {key: config[key] for key in FOREIGN_KEYS} == FOREIGN_KEYS
    assert caplog.messages == []


@pytest.mark.parametrize(
    "load", [HFViTConfig.from_pretrained, HFViTForImageClassification.from_pretrained, AutoModel.from_pretrained]
)
def test_a_misspelt_argument_is_an_error_that_names_it(tiny_model, tmp_path, load):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises((ValueError, TypeError), match="drop_path_rates"):
        load(tmp_path, drop_path_rates=0.5)


# ----------------------------------------------------------------------------------------------------------------------
# A process without our package

AS_A_STRANGER = (
    BLOCK_OUR_PACKAGE
    + """
import json
import warnings
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor, AutoModel, AutoModelForImageClassification, AutoModelForPreTraining, pipeline,
)

def logits_of(folder):
    model = AutoModelForImageClassification.from_pretrained(folder, **trust)
    return model, model(pixels).logits[0].tolist()

torch.set_grad_enabled(False)
warnings.simplefilter("error")
trust = dict(trust_remote_code=True)
processor = AutoImageProcessor.from_pretrained("saved")
pixels = processor(Image.open("image.png"), return_tensors="pt")["pixel_values"]
model, once = logits_of("saved")
model.save_pretrained("again")
_, twice = logits_of("again")
answers = pipeline("image-classification", "saved", top_k=3, **trust)("image.png")
features = pipeline("image-feature-extraction", "saved", **trust)("image.png", return_tensors=True)
tokens = AutoModel.from_pretrained("saved", **trust)(pixels).last_hidden_state
assert torch.equal(torch.as_tensor(features), tokens)

AutoModelForPreTraining.from_pretrained("pretrained", **trust).save_pretrained("pretrained-again")
pretrained = AutoModelForPreTraining.from_pretrained("pretrained-again", **trust)(pixels, noise=torch.arange(16.0).view(1, 16))
AutoModelForImageClassification.from_pretrained("pretrained-again", **trust).save_pretrained("fine-tuned")
encoder = AutoModel.from_pretrained("fine-tuned", **trust)(pixels)
assert "hf_vit" not in sys.modules
scores = {answer["label"]: answer["score"] for answer in answers}
print(json.dumps([once, twice, scores, pretrained.logits.tolist(), encoder.last_hidden_state.tolist()]))
"""
)


def test_saved_folders_load_and_are_saved_again_in_a_process_without_our_package(
    tiny_model, tiny_config, randomize, tmp_path
):
    fields = dict(position_embedding="sincos2d", num_register_tokens=2, layerscale_value=0.1)
    model = tiny_model(id2label={0: "cat", 1: "cow", 2: "dog"}, **fields)
    decoder = dict(decoder_hidden_size=24, decoder_num_hidden_layers=1, decoder_num_attention_heads=3)
    pretrained = randomize(HFViTForPreTraining(tiny_config(position_embedding="rotary", **decoder)))
    pretrained.save_pretrained(tmp_path / "pretrained")
    processor = ViTImageProcessorPil(size=dict(height=16, width=16))
    for one in (model, processor):
        one.save_pretrained(tmp_path / "saved")
    Image.effect_noise((16, 16), 80).convert("RGB").save(tmp_path / "image.png")
    pixels = processor(Image.open(tmp_path / "image.png"), return_tensors="pt")["pixel_values"]
    logits = model(pixels).logits[0]
    done = forked.run([sys.executable, "-W", "ignore", "-c", AS_A_STRANGER], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    once, twice, scores, *answers = json.loads(done.stdout.splitlines()[-1])
    torch.testing.assert_close(torch.tensor([once, twice]), logits.expand(2, -1), rtol=0, atol=1e-6)
    wanted = [
        pretrained(pixels, noise=torch.arange(16.0).view(1, 16)).logits,
        pretrained.vit(pixels).last_hidden_state,
    ]
    torch.testing.assert_close(list(map(torch.tensor, answers)), wanted, rtol=1e-5, atol=1e-5)
    expected = dict(zip(("cat", "cow", "dog"), logits.softmax(dim=0).tolist(), strict=True))
    assert scores == pytest.approx(expected, abs=1e-5)
    for folder in ("saved", "again", "fine-tuned"):
        code = {path.name: path.read_text() for path in (tmp_path / folder).glob("*.py")}
        assert code == {name: (PACKAGE / "model" / name).read_text() for name in CLASSIFIER_FILES}


@pytest.mark.parametrize("model_class", [HFViTModel, HFViTForImageClassification, HFViTBackbone])
def test_every_saved_folder_names_all_classes_for_the_auto_classes(tiny_config, tmp_path, model_class):
    model_class(tiny_config()).save_pretrained(tmp_path)
    named = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert named == {
        "AutoConfig": "configuration_hf_vit.HFViTConfig",
        "AutoModel": "modeling_hf_vit.HFViTModel",
        "AutoModelForImageClassification": "modeling_hf_vit.HFViTForImageClassification",
        "AutoBackbone": "modeling_hf_vit.HFViTBackbone",
    }


# ----------------------------------------------------------------------------------------------------------------------
# Quantisers


class QuantizedTensor(torch.Tensor):
    """A parameter as quantisers make them: a subclass that knows few operations."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function.__name__)


def test_quantised_tensors_are_not_looked_at_for_nan():
    """`make upstream` loads with the quantisers themselves."""
    weights = {name: torch.tensor([1.0, math.nan]) for name in ("quantised", "plain")}
    weights["quantised"] = weights["quantised"].as_subclass(QuantizedTensor)
    assert non_finite(weights) == ["plain"]


# ----------------------------------------------------------------------------------------------------------------------
# Backbones of native models


def test_a_depth_model_runs_on_our_backbone_and_comes_back(tiny_config, pixels, tmp_path):
    layers = dict(num_hidden_layers=4, out_indices=[1, 2, 3, 4], reshape_hidden_states=False)
    config = transformers.DPTConfig(
        backbone_config=tiny_config(image_size=28, patch_size=7, **layers),
        neck_hidden_sizes=[8, 16, 16, 16], fusion_hidden_size=16, head_in_index=-1, is_hybrid=False,
    )  # fmt: skip
    model, images = transformers.DPTForDepthEstimation(config).eval(), pixels(height=28, width=28)
    assert type(model.backbone) is HFViTBackbone
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(images).predicted_depth, model(images).predicted_depth)


@pytest.mark.parametrize(
    "fields", [dict(out_features=["stem", "stage3"], apply_layernorm=False), dict(reshape_hidden_states=False)]
)
def test_a_saved_native_backbone_keeps_its_layers_and_its_kind_of_maps(randomize, pixels, tmp_path, fields):
    sizes = dict(image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, mlp_ratio=2)
    native, images = randomize(Dinov2Backbone(Dinov2Config(**sizes, **fields))), pixels()
    native.save_pretrained(tmp_path)
    ours = HFViTBackbone.from_pretrained(tmp_path)
    assert (ours.out_indices, ours.out_features) == (native.out_indices, native.out_features)
    torch.testing.assert_close(ours(images).feature_maps, native(images).feature_maps, rtol=1e-4, atol=1e-5)
    ours.save_pretrained(tmp_path / "ours")
    again = HFViTBackbone.from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(again(images).feature_maps, ours(images).feature_maps, rtol=0, atol=0)


# ----------------------------------------------------------------------------------------------------------------------
# Heads of one's own


class Segmenter(HFViTPreTrainedModel):
    """As a user would write one: our base model, and a head that no checkpoint has."""

    def __init__(self, config, width=8):
        super().__init__(config)
        self.vit = HFViTModel(config, add_pooling_layer=False)
        self.decode_head = nn.Sequential(
            nn.ConvTranspose2d(config.hidden_size, width, 2),
            nn.BatchNorm2d(width),
            nn.Conv2d(width, config.num_labels, 1),
        )
        self.post_init()

    def forward(self, pixel_values):
        patches = self.vit(pixel_values).last_hidden_state[:, self.config.num_prefix_tokens :]
        return self.decode_head(patches.transpose(1, 2).unflatten(2, self.config.grid_size))


def test_a_head_of_ones_own_starts_from_a_base_checkpoint_with_one_line(tiny_model, pixels, tmp_path, caplog):
    model, images = tiny_model(), pixels()
    model.save_pretrained(tmp_path / "base")
    torch.full((2**20,), float("nan"))  # what freed memory may hold
    segmenter = Segmenter.from_pretrained(tmp_path / "base")
    (message,) = caplog.messages
    assert all(part in message for part in ("decode_head reset", "left out classifier"))
    assert torch.equal(segmenter.vit(images).last_hidden_state, model.vit(images).last_hidden_state)
    assert segmenter(images).isfinite().all()

    caplog.clear()
    segmenter.save_pretrained(tmp_path / "segmenter")
    named = json.loads((tmp_path / "segmenter" / "config.json").read_text())["auto_map"]
    assert list(named) == ["AutoConfig"]  # the code of our models is not saved beside those of a subclass
    again = Segmenter.from_pretrained(tmp_path / "segmenter")
    torch.testing.assert_close(again(images), segmenter(images))
    assert caplog.messages == []


def test_a_head_of_ones_own_does_not_excuse_a_base_tensor_that_is_missing(tiny_model, tmp_path):
    model = tiny_model()
    tensors = {name: value for name, value in model.state_dict().items() if "layers.1.mlp.fc1.bias" not in name}
    model.save_pretrained(tmp_path, state_dict=tensors)
    with pytest.raises(ValueError, match=r"vit\.layers\.1\.mlp\.fc1\.bias is missing"):
        Segmenter.from_pretrained(tmp_path)


def test_another_shape_is_reset_only_where_that_is_asked_for_by_name(tiny_model, tmp_path, caplog):
    tiny_model().save_pretrained(tmp_path)
    load = HFViTForImageClassification.from_pretrained
    with pytest.raises(ValueError, match=r"mlp\.fc1\.bias has shape \(64,\).*ignore_mismatched_sizes=True"):
        load(tmp_path, intermediate_size=96)
    model = load(tmp_path, intermediate_size=96, ignore_mismatched_sizes=True)
    assert model.vit.layers[0].mlp.fc1.weight.shape == (96, 32)
    assert "vit.layers.0.mlp.fc1.bias, " in caplog.text


def test_a_classifier_with_a_tanh_layer_and_a_zero_head_starts_from_a_base_checkpoint(
    tiny_model, pixels, tmp_path, caplog
):
    model, images = tiny_model(), pixels()
    model.vit.save_pretrained(tmp_path)
    loaded = HFViTForImageClassification.from_pretrained(tmp_path, representation_size=8)
    assert "classifier, pre_logits reset" in caplog.text
    assert loaded.pre_logits.weight.shape == (8, 32)
    torch.testing.assert_close(loaded.vit(images).last_hidden_state, model.vit(images).last_hidden_state)
    assert torch.equal(loaded(images).logits, torch.zeros(2, 3))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_tensor_that_stands_twice_in_the_files_is_an_error_that_names_it(tiny_model, tmp_path, sharded):
    name = "layers.1.mlp.fc1.bias"
    tiny_model().save_pretrained(tmp_path, max_shard_size="40KB" if sharded else "1GB")
    file = min(tmp_path.glob("*.safetensors"))
    twice = {f"vit.{name}" if sharded else name: torch.ones(64)}
    save_file(load_file(file) | twice, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=name):
        HFViTForImageClassification.from_pretrained(tmp_path)

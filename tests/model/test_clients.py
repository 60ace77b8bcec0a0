"""Other people's clients read what we write, and we read what they write: Trainer, pipelines, quantisers, detectors, segmenters."""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from loopback_hub import Hub
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    Dinov2Backbone,
    Dinov2Config,
    DINOv3ViTBackbone,
    DINOv3ViTConfig,
    Trainer,
    TrainingArguments,
    ViTImageProcessorPil,
)
from without_package import BLOCK_OUR_PACKAGE

from hf_vit import HFViTBackbone, HFViTConfig, HFViTForImageClassification, HFViTForPreTraining, HFViTModel
from hf_vit.model.modeling_hf_vit import HFViTPreTrainedModel


# What others write into config.json: Trainer, Transformers.js, other and later versions of transformers.
FOREIGN_KEYS = {
    "transformers.js_config": {"dtype": "q8"},
    "tie_word_embeddings": False,
    "batch_norm_eps": 1e-3,
    "a_key_of_transformers_9": [1, 2],
}


def edit_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


# ----------------------------------------------------------------------------------------------------------------------
# Strict in code, open in files


def test_keys_of_others_in_a_saved_config_are_kept_and_saved_again(tiny_model, pixels, tmp_path, caplog):
    model, images = tiny_model(), pixels()
    model.save_pretrained(tmp_path / "once")
    edit_config(tmp_path / "once", use_cache=False, **FOREIGN_KEYS)
    loaded = HFViTForImageClassification.from_pretrained(tmp_path / "once")
    assert torch.equal(loaded(images).logits, model(images).logits)
    loaded.save_pretrained(tmp_path / "twice")
    for config in (
        json.loads((tmp_path / "twice" / "config.json").read_text()),
        AutoConfig.from_pretrained(tmp_path / "twice").to_dict(),
        HFViTConfig.from_json_file(tmp_path / "twice" / "config.json").to_dict(),
    ):
        assert {key: config[key] for key in FOREIGN_KEYS} == FOREIGN_KEYS
    assert caplog.messages == []


@pytest.mark.parametrize(
    "load", [HFViTConfig.from_pretrained, HFViTForImageClassification.from_pretrained, AutoModel.from_pretrained]
)
def test_a_misspelt_argument_is_an_error_that_names_it(tiny_model, tmp_path, load):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises((ValueError, TypeError), match="drop_path_rates"):
        load(tmp_path, drop_path_rates=0.5)


@pytest.mark.parametrize(
    "key", ["validate_architecture", "to_dict", "prepare", "grid_size", "per_layer_config", "_get_config_dict"]
)
def test_a_saved_key_that_would_hide_a_part_of_the_class_is_an_error(tiny_model, tmp_path, key):
    tiny_model().save_pretrained(tmp_path)
    edit_config(tmp_path, **{key: 1})
    with pytest.raises(ValueError, match=f"the saved config sets '{key}', which is no field"):
        HFViTForImageClassification.from_pretrained(tmp_path)


# ----------------------------------------------------------------------------------------------------------------------
# Trainer

AS_A_STRANGER = (
    BLOCK_OUR_PACKAGE
    + """
import json
import torch
import transformers
from PIL import Image
from transformers import AutoBackbone, AutoImageProcessor, AutoModel, AutoModelForImageClassification, pipeline

is_repo = sys.argv[1] == "alice/model"  # AutoBackbone (5.23) takes no folder, of native models either
trust = dict(trust_remote_code=True)
pixels = AutoImageProcessor.from_pretrained(sys.argv[1])(Image.open("image.png"), return_tensors="pt")["pixel_values"]
with torch.no_grad():
    model = AutoModelForImageClassification.from_pretrained(sys.argv[1], **trust)
    logits = model(pixels).logits[0]
    maps = AutoBackbone.from_pretrained(sys.argv[1], **trust)(pixels).feature_maps if is_repo else None
answers = pipeline("image-classification", sys.argv[1], top_k=3, **trust)("image.png")
features = pipeline("image-feature-extraction", sys.argv[1], **trust)("image.png", return_tensors=True)
tokens = AutoModel.from_pretrained(sys.argv[1], **trust)(pixels).last_hidden_state
assert torch.equal(torch.as_tensor(features), tokens)
assert maps is None or maps[0].shape[1] == tokens.shape[2]
assert "hf_vit" not in sys.modules
print(json.dumps({"logits": logits.tolist(), "scores": {answer["label"]: answer["score"] for answer in answers}}))
"""
)


def read_as_a_stranger(source, folder, **environment):
    """What a process without our package reads at `source`: logits of image.png, and the pipeline's answer."""
    environment = {**os.environ, "HF_HOME": str(folder / "home"), **environment}
    command = [sys.executable, "-W", "error", "-c", AS_A_STRANGER, str(source)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "no effect" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def trained(tiny_config, tmp_path_factory):
    """A folder with the model that transformers' Trainer trained for 20 steps and saved, and an image with its logits."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("trainer")
    model = HFViTForImageClassification(tiny_config(id2label={0: "cat", 1: "cow", 2: "dog"}))
    processor = ViTImageProcessorPil(size=dict(height=16, width=16))
    examples = [{"pixel_values": torch.randn(3, 16, 16) + row % 3, "labels": row % 3} for row in range(40)]
    arguments = TrainingArguments(
        folder / "checkpoints", max_steps=20, save_steps=10, learning_rate=1e-2, use_cpu=True, report_to="none", disable_tqdm=True
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=examples, processing_class=processor)
    trainer.train()
    trainer.save_model(folder / "saved")
    Image.effect_noise((16, 16), 80).convert("RGB").save(folder / "image.png")
    pixels = processor(Image.open(folder / "image.png"), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        return folder, model.eval()(pixels).logits[0]


def test_what_trainer_saved_loads_here_and_so_do_its_checkpoints(trained):
    folder, logits = trained
    weights = load_file(folder / "saved" / "model.safetensors")
    for saved in (folder / "saved", folder / "checkpoints" / "checkpoint-20"):
        for model_class in (HFViTForImageClassification, AutoModelForImageClassification):
            found = model_class.from_pretrained(saved).state_dict()
            assert all(torch.equal(found[name], value) for name, value in weights.items())
    processor = ViTImageProcessorPil.from_pretrained(folder / "saved")
    pixels = processor(Image.open(folder / "image.png"), return_tensors="pt")["pixel_values"]
    model = HFViTForImageClassification.from_pretrained(folder / "saved")
    torch.testing.assert_close(model(pixels).logits[0], logits, rtol=0, atol=1e-6)


def test_what_trainer_saved_loads_in_a_process_without_our_package(trained):
    folder, logits = trained
    read = read_as_a_stranger(folder / "saved", folder)
    torch.testing.assert_close(torch.tensor(read["logits"]), logits, rtol=0, atol=1e-6)
    expected = dict(zip(("cat", "cow", "dog"), logits.softmax(dim=0).tolist(), strict=True))
    assert read["scores"] == pytest.approx(expected, abs=1e-5)


def test_what_trainer_saved_loads_after_push_to_hub(trained):
    folder, logits = trained
    push = """
import sys
from transformers import AutoImageProcessor
from hf_vit import HFViTForImageClassification
HFViTForImageClassification.from_pretrained(sys.argv[1]).push_to_hub("alice/model")
AutoImageProcessor.from_pretrained(sys.argv[1]).push_to_hub("alice/model")
"""
    with Hub() as hub:
        online = dict(HF_HUB_OFFLINE="0", TRANSFORMERS_OFFLINE="0", HF_HUB_DISABLE_XET="1")
        online |= dict(HF_ENDPOINT=hub.url, HF_TOKEN=hub.token, HF_HOME=str(folder / "pusher"))
        command = [sys.executable, "-c", push, str(folder / "saved")]
        subprocess.run(command, env=os.environ | online, check=True, capture_output=True, timeout=200)
        read = read_as_a_stranger("alice/model", folder, **{**online, "HF_HOME": str(folder / "stranger")})
    torch.testing.assert_close(torch.tensor(read["logits"]), logits, rtol=0, atol=1e-6)


def test_trust_remote_code_is_accepted_without_a_word(tiny_model, tmp_path, caplog):
    tiny_model().save_pretrained(tmp_path)
    for load in (HFViTConfig, HFViTForImageClassification, AutoConfig, AutoModelForImageClassification):
        load.from_pretrained(tmp_path, trust_remote_code=True)
    assert "no effect" not in caplog.text


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
        if function in (torch.Tensor.flatten, torch.Tensor.float, torch.Tensor.isfinite, torch.aminmax):
            raise NotImplementedError(f"{cls.__name__} has no {function.__name__}")
        return super().__torch_function__(function, types, args, kwargs)


def test_quantised_tensors_are_not_looked_at_for_nan(tiny_model, tmp_path, monkeypatch):
    """A check that flattens tensors fails on those of a quantiser; `make upstream` loads with the quantisers themselves."""
    tiny_model().save_pretrained(tmp_path)
    finalize = transformers.PreTrainedModel._finalize_model_loading

    def quantize(model, *args):
        fc1 = model.vit.layers[0].mlp.fc1
        fc1.weight = nn.Parameter(fc1.weight.detach().as_subclass(QuantizedTensor))
        return finalize(model, *args)

    monkeypatch.setattr(transformers.PreTrainedModel, "_finalize_model_loading", staticmethod(quantize))
    model = HFViTForImageClassification.from_pretrained(tmp_path)
    assert isinstance(model.vit.layers[0].mlp.fc1.weight, QuantizedTensor)


# ----------------------------------------------------------------------------------------------------------------------
# Backbones of native models


def build_dpt(config):
    sizes = dict(neck_hidden_sizes=[8, 16, 16, 16], fusion_hidden_size=16, head_in_index=-1, is_hybrid=False)
    return transformers.DPTForDepthEstimation(transformers.DPTConfig(backbone_config=config, **sizes))


def build_depth_anything(config):
    sizes = dict(
        neck_hidden_sizes=[8, 16, 16, 16], fusion_hidden_size=16, head_in_channels=16, reassemble_hidden_size=32
    )
    config = transformers.DepthAnythingConfig(backbone_config=config, patch_size=config.patch_size, **sizes)
    return transformers.DepthAnythingForDepthEstimation(config)


def build_upernet(config):
    sizes = dict(hidden_size=16, auxiliary_in_channels=32, pool_scales=[1, 2])
    return transformers.UperNetForSemanticSegmentation(transformers.UperNetConfig(backbone_config=config, **sizes))


def build_detr(config):
    sizes = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=3)
    heads = dict(encoder_attention_heads=2, decoder_attention_heads=2)
    return transformers.DetrForObjectDetection(transformers.DetrConfig(backbone_config=config, **sizes, **heads))


TOKENS = dict(out_indices=[1, 2, 3, 4], reshape_hidden_states=False)


@pytest.mark.parametrize(
    ("build", "fields", "output"),
    [
        (build_dpt, TOKENS, "predicted_depth"),
        (build_depth_anything, TOKENS, "predicted_depth"),
        (build_upernet, dict(out_indices=[1, 2, 3, 4]), "logits"),
        (build_detr, dict(out_indices=[4]), "logits"),
    ],
    ids=["DPT", "Depth Anything", "UPerNet", "DETR"],
)
def test_a_native_model_runs_on_our_backbone_and_comes_back(tiny_config, pixels, tmp_path, build, fields, output):
    config = tiny_config(image_size=28, patch_size=7, num_hidden_layers=4, **fields)
    model, images = build(config).eval(), pixels(height=28, width=28)
    assert type(model.backbone if hasattr(model, "backbone") else model.model.backbone.model) is HFViTBackbone
    for part in model.modules():
        if isinstance(part, HFViTBackbone):
            part.config.use_cache, part.config.a_key_of_transformers_9 = False, 1
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(getattr(loaded(images), output), getattr(model(images), output))
    assert loaded.config.backbone_config.a_key_of_transformers_9 == 1


def test_a_vision_encoder_decoder_and_a_llava_run_on_our_model_and_come_back(tiny_config, pixels, tmp_path):
    text = dict(bos_token_id=0, eos_token_id=1, vocab_size=20)
    decoder = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=16, add_cross_attention=True, **text)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(tiny_config(), decoder)
    speaker = transformers.VisionEncoderDecoderModel(config).eval()
    language = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, **text
    )
    sizes = dict(image_token_index=5, image_seq_length=16, vision_feature_layer=-1)
    config = transformers.LlavaConfig(vision_config=tiny_config(), text_config=language, **sizes)
    llava = transformers.LlavaForConditionalGeneration(config).eval()
    for model, texts in (
        (speaker, dict(decoder_input_ids=torch.tensor([[1, 2, 3]]))),
        (llava, dict(input_ids=torch.tensor([[1, *[5] * 16, 2]]))),
    ):
        images = pixels(batch=1)
        model.save_pretrained(tmp_path / type(model).__name__)
        loaded = type(model).from_pretrained(tmp_path / type(model).__name__).eval()
        torch.testing.assert_close(
            loaded(pixel_values=images, **texts).logits, model(pixel_values=images, **texts).logits
        )


SIZE = dict(image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)
DINOV2 = Dinov2Backbone, Dinov2Config, dict(mlp_ratio=2)
DINOV3 = DINOv3ViTBackbone, DINOv3ViTConfig, dict(intermediate_size=64)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        (DINOV2, dict(out_indices=[1, 2])),
        (DINOV2, dict(out_features=["stem", "stage3"], apply_layernorm=False)),
        (DINOV2, dict(reshape_hidden_states=False)),
        (DINOV3, dict(out_indices=[1, 3])),
        (DINOV3, dict(out_indices=[0, 2], apply_layernorm=False)),
    ],
)
def test_a_saved_native_backbone_keeps_its_layers_and_its_kind_of_maps(randomize, pixels, tmp_path, family, fields):
    backbone_class, config_class, width = family
    native = randomize(backbone_class(config_class(**SIZE, **width, **fields)))
    native.save_pretrained(tmp_path)
    ours, images = HFViTBackbone.from_pretrained(tmp_path), pixels()
    assert (ours.out_indices, ours.out_features) == (native.out_indices, native.out_features)
    torch.testing.assert_close(ours(images).feature_maps, native(images).feature_maps, rtol=1e-4, atol=1e-5)
    ours.save_pretrained(tmp_path / "ours")
    again = HFViTBackbone.from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(again(images).feature_maps, ours(images).feature_maps, rtol=0, atol=0)


@pytest.mark.parametrize("fields", [dict(reshape_hidden_states=False), dict(apply_layernorm=False)])
def test_a_dinov3_backbone_with_maps_of_another_kind_is_an_error(tmp_path, fields):
    DINOv3ViTConfig(**SIZE, **fields).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=next(iter(fields))):
        HFViTBackbone.from_pretrained(tmp_path)


def test_a_backbone_takes_images_of_any_size(tiny_config, pixels):
    network = HFViTBackbone(tiny_config()).eval()
    assert network(pixels(height=24, width=8)).feature_maps[0].shape == (2, 32, 6, 2)


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


def test_a_head_of_ones_own_keeps_the_size_that_it_takes_from_the_decoders_fields(tiny_config, tmp_path):
    segmenter = Segmenter(tiny_config(decoder_hidden_size=48))
    segmenter.save_pretrained(tmp_path)
    assert Segmenter.from_pretrained(tmp_path).config.decoder_hidden_size == 48


def test_a_head_of_ones_own_starts_from_a_base_checkpoint_with_one_line(tiny_model, pixels, tmp_path, caplog):
    model, images = tiny_model(), pixels()
    model.save_pretrained(tmp_path / "base")
    torch.full((2**20,), float("nan"))  # what freed memory may hold
    segmenter = Segmenter.from_pretrained(tmp_path / "base")
    news = "newly initialised decode_head (9 tensors); left out classifier (2 tensors)"
    assert caplog.messages == [f"Segmenter from {tmp_path / 'base'}: {news}."]
    assert torch.equal(segmenter.vit(images).last_hidden_state, model.vit(images).last_hidden_state)
    assert segmenter(images).isfinite().all()

    caplog.clear()
    segmenter.save_pretrained(tmp_path / "segmenter")
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
    with pytest.raises(ValueError, match=r"mlp\.fc1\.bias has shape \(64,\).*ignore_mismatched_sizes=True resets"):
        load(tmp_path, intermediate_size=96)
    model = load(tmp_path, intermediate_size=96, ignore_mismatched_sizes=True)
    assert model.vit.layers[0].mlp.fc1.weight.shape == (96, 32)
    assert "vit.layers.0.mlp.fc1.bias, " in caplog.text
    assert "of another shape reset, as ignore_mismatched_sizes=True asks" in caplog.text
    positions = load(tmp_path, image_size=32, ignore_mismatched_sizes=True).vit.embeddings.position_embeddings
    assert torch.equal(positions, load(tmp_path, image_size=32).vit.embeddings.position_embeddings)  # resampled


def test_a_classifier_with_a_tanh_layer_starts_from_a_base_checkpoint(tiny_config, tmp_path, caplog):
    HFViTModel(tiny_config()).save_pretrained(tmp_path)
    load = HFViTForImageClassification.from_pretrained
    assert load(tmp_path, representation_size=8).pre_logits.weight.shape == (8, 32)
    assert "classifier and pre_logits reset to 3 labels (the checkpoint has none)" in caplog.text


def test_a_head_of_ones_own_promises_no_code_that_is_not_saved(tiny_model, tmp_path):
    """a subclass that started from a saved folder | its auto_map names files beside it alone"""
    tiny_model().save_pretrained(tmp_path / "base")
    Segmenter.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "own")
    named = json.loads((tmp_path / "own" / "config.json").read_text())["auto_map"]
    assert {code.partition(".")[0] + ".py" for code in named.values()} <= {
        file.name for file in (tmp_path / "own").iterdir()
    }


@pytest.mark.parametrize("model_class", [HFViTModel, HFViTForImageClassification, HFViTBackbone, HFViTForPreTraining])
def test_a_client_may_pass_no_attention_mask(tiny_config, pixels, model_class):
    """PEFT passes attention_mask=None for most of its task types"""
    model, images = model_class(tiny_config(pooling="mean")).eval(), pixels()
    given = {"noise": torch.rand(2, 16)} if model_class is HFViTForPreTraining else {}
    with torch.no_grad():
        wanted, found = model(images, **given), model(images, **given, attention_mask=None)
    torch.testing.assert_close(found[0], wanted[0])
    with pytest.raises(ValueError, match="attention_mask: every patch is attended to"):
        model(images, attention_mask=torch.ones(2, 17))

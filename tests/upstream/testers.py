"""Our model testers for transformers' common tests; `run.py` copies this file to where its relative imports lead."""

import os
import unittest
from pathlib import Path

import pytest
from PIL import Image
from torch import nn
from transformers import ViTImageProcessorPil, pipeline
from transformers.models.auto import modeling_auto

from hf_vit import HFViTBackbone, HFViTConfig, HFViTForImageClassification, HFViTForPreTraining, HFViTModel

from .test_backbone_common import BackboneTesterMixin
from .test_configuration_common import ConfigTester
from .test_modeling_common import ModelTesterMixin, floats_tensor
from .test_pipeline_mixin import PipelineTesterMixin


ARCHITECTURES = {
    "Plain": dict(pooler_act="tanh"),
    "DeiT": dict(use_distillation_token=True, pooling="cls_distillation"),
    "DINOv3": dict(
        position_embedding="rotary", num_register_tokens=4, gated_mlp=True, hidden_act="silu", layerscale_value=1.0,
        key_bias=False,
    ),
    "SigLIP": dict(use_class_token=False, pooling="map"),
    "PostNorm": dict(norm_first=False, final_norm="none", position_embedding="sincos2d"),
}  # fmt: skip

# Tests that contradict a promise of ours, and which one. One that passes after all fails the run.
EXCEPTIONS = {
    "test_can_init_all_missing_weights": "loading is strict: an empty state dict raises",
    "test_model_weights_reload_no_missing_tied_weights": "loading is strict: a file without our weights raises",
    "test_can_load_ignoring_mismatched_shapes": "num_labels= resets the head without ignore_mismatched_sizes=True",
}

# In these tables the common tests look up, by the name of a class, whether it takes labels and returns a loss.
modeling_auto.MODEL_MAPPING_NAMES["hf_vit"] = "HFViTModel"
modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES["hf_vit"] = "HFViTForImageClassification"
modeling_auto.MODEL_FOR_BACKBONE_MAPPING_NAMES["hf_vit"] = "HFViTBackbone"
modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES["hf_vit"] = "HFViTForPreTraining"


SIZES = dict(
    num_channels=3, image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37,
)  # fmt: skip


class ModelTester:
    """A tiny model of one architecture and a batch for it, under the names by which the common tests ask for them."""

    is_training, batch_size = True, 13

    def __init__(self, architecture):
        self.architecture = architecture
        vars(self).update(SIZES)
        config = self.get_config()
        self.seq_length = config.num_prefix_tokens + config.grid_size[0] * config.grid_size[1]

    def get_config(self):
        dropout = dict(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
        return HFViTConfig(attn_implementation="eager", **SIZES, **dropout, **self.architecture)

    def prepare_config_and_inputs_for_common(self):
        pixel_values = floats_tensor([self.batch_size, self.num_channels, self.image_size, self.image_size])
        return self.get_config(), {"pixel_values": pixel_values}


class AutoencoderTester(ModelTester):
    """A tiny masked autoencoder, always with the same mask; its encoder sees half of the patches."""

    def __init__(self, architecture):
        decoder = dict(decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2)
        super().__init__(architecture | decoder | dict(decoder_intermediate_size=20, mask_ratio=0.5))
        self.num_patches = self.seq_length - self.get_config().num_prefix_tokens
        self.seq_length -= self.num_patches // 2

    def prepare_config_and_inputs_for_common(self):
        config, inputs = super().prepare_config_and_inputs_for_common()
        return config, inputs | {"noise": floats_tensor([self.batch_size, self.num_patches])}


class ModelTests(ModelTesterMixin, PipelineTesterMixin):
    """The common tests of models, configs and pipelines, on models, classifiers and backbones."""

    all_model_classes = (HFViTModel, HFViTForImageClassification, HFViTBackbone)
    pipeline_model_mapping = {
        "image-feature-extraction": HFViTModel,
        "image-classification": HFViTForImageClassification,
    }
    test_resize_embeddings = False  # there is no vocabulary
    test_can_init_all_missing_weights_before_2023 = True  # our files name no year, so they count as older

    @classmethod
    def setUpClass(cls):
        """Save the model that the pipeline tests load; upstream's own tiny models are on the Hub."""
        folder = Path(os.environ["TRANSFORMERS_TINY_MODEL_PATH"]) / "hf_vit" / "HFViTForImageClassification"
        config = ModelTester(cls.architecture).get_config()
        HFViTForImageClassification(config).save_pretrained(folder)
        size = {"height": config.image_size, "width": config.image_size}
        ViTImageProcessorPil(size=size).save_pretrained(folder)

    def setUp(self):
        self.model_tester = ModelTester(self.architecture)
        self.config_tester = ConfigTester(
            self, config_class=HFViTConfig, has_text_modality=False, hidden_size=48, **self.architecture
        )

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_model_get_set_embeddings(self):
        for model_class in self.all_model_classes:
            model = model_class(self.model_tester.get_config())
            assert isinstance(model.get_input_embeddings(), nn.Module)
            assert model.get_output_embeddings() is None

    @unittest.skip("pixels are no embeddings")
    def test_inputs_embeds(self):
        pass


class AutoencoderTests(ModelTesterMixin):
    """The common tests of models, on masked autoencoders."""

    all_model_classes = (HFViTForPreTraining,)
    test_resize_embeddings = False
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = AutoencoderTester(self.architecture)

    test_model_get_set_embeddings = ModelTests.test_model_get_set_embeddings
    test_inputs_embeds = ModelTests.test_inputs_embeds


class BackboneTests(BackboneTesterMixin):
    """The common tests of backbones."""

    all_model_classes = (HFViTBackbone,)
    config_class = HFViTConfig

    def setUp(self):
        self.model_tester = ModelTester(self.architecture)


class ImageClassificationPipelineTests:
    """What PipelineTesterMixin runs on that model. Upstream's own class is not in the sdist, and downloads images."""

    def get_test_pipeline(self, model, tokenizer=None, dtype="float32", **processors):
        classifier = pipeline("image-classification", model=model, dtype=dtype, top_k=2, **processors)
        return classifier, [Image.new("RGB", (40, 30), color) for color in ("red", "green", "blue")]

    def run_pipeline_test(self, classifier, examples):
        for answers in [classifier(examples[0]), *classifier(examples, batch_size=2)]:
            assert len(answers) == 2
            assert {answer["label"] for answer in answers} == set(classifier.model.config.id2label.values())
            assert sum(answer["score"] for answer in answers) == pytest.approx(1, abs=1e-3)


for test in EXCEPTIONS:  # pytest's strict xfail would want each subtest of the test to fail
    setattr(ModelTests, test, unittest.expectedFailure(getattr(ModelTests, test)))
    if test != "test_can_load_ignoring_mismatched_shapes":  # a masked autoencoder has no labels
        setattr(AutoencoderTests, test, unittest.expectedFailure(getattr(AutoencoderTests, test)))

for name, architecture in ARCHITECTURES.items():
    for tests in (ModelTests, AutoencoderTests, BackboneTests):
        full_name = f"{name}{tests.__name__}"
        globals()[full_name] = type(full_name, (tests, unittest.TestCase), {"architecture": architecture})

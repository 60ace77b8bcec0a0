"""A student learns the pooled vector and the patches of a larger model, whatever its width, grid and format."""

import pytest
import torch
from torch import nn
from transformers import Dinov2Config, Dinov2Model, ViTImageProcessorPil

from hf_vit import HFViTModel
from hf_vit.data.image_spec import ImageSpec
from hf_vit.training.feature_distillation import FeatureDistillation, FeatureTeacher


SPEC = ImageSpec(16, 16, 3, 2, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@pytest.fixture
def teacher_folder(randomize, tmp_path):
    """A DINOv2 with random weights, of 6 x 6 patches, and the folder it is saved in."""
    sizes = dict(image_size=24, patch_size=4, hidden_size=48, num_hidden_layers=2, num_attention_heads=4)
    native = randomize(Dinov2Model(Dinov2Config(**sizes)))
    native.save_pretrained(tmp_path)
    processor = ViTImageProcessorPil(size={"height": 24, "width": 24}, image_mean=[0.4] * 3, image_std=[0.2] * 3)
    processor.save_pretrained(tmp_path)
    return native, str(tmp_path)


@torch.no_grad()
def test_a_teacher_gives_its_features_of_the_students_pixels_whitened(teacher_folder, pixels):
    native, folder = teacher_folder
    images = pixels()
    pooled, patches = FeatureTeacher(folder, SPEC)(images)
    seen = (nn.functional.interpolate(images * 0.5 + 0.5, (24, 24), mode="bilinear", antialias=True) - 0.4) / 0.2
    tokens = native(seen).last_hidden_state  # (2, 37, 48)
    tokens = nn.functional.layer_norm(tokens, tokens.shape[-1:])
    torch.testing.assert_close(pooled, tokens[:, 0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(patches[:, 1, 2], tokens[:, 1 + 6 + 2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fields", [{}, dict(pooling="map"), dict(pooler_act="tanh")])
def test_every_weight_of_the_student_learns_and_none_of_the_teacher(
    tiny_config, randomize, teacher_folder, pixels, fields
):
    teacher, images = FeatureTeacher(teacher_folder[1], SPEC), pixels()
    pooled, patches = teacher(images)
    assert (pooled.shape, patches.shape) == ((2, 48), (2, 6, 6, 48))  # resampled to the student's 4 x 4
    model = FeatureDistillation(randomize(HFViTModel(tiny_config(**fields))).train(), (48, 48))
    model(images, pooled, patches).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert all(parameter.grad is None for parameter in teacher.model.parameters())


def test_a_teacher_of_other_channels_is_refused(teacher_folder):
    with pytest.raises(ValueError, match="1 channels, got 3"):
        FeatureTeacher(teacher_folder[1], ImageSpec(16, 16, 1, 2, (0.5,), (0.5,)))

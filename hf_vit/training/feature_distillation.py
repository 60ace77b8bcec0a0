"""A student that learns a larger model's features of unlabelled images.

The student's features, through a linear projection, are to be the teacher's of the same pixels, by mean squared error, as in
LightlyTrain's distillation (docs.lightly.ai/train, "Distillation"). That teacher and student see the same crop, augmented alike,
is "function matching" (arXiv 2106.05237). The teacher's features are first normalised without learned numbers, so that
no few channels decide the loss ("whitening", arXiv 2205.14141).

Letters of the shapes: B batch, C channels, H W image height and width, h w rows and columns of patches, N = h * w, D channels.
"""

import torch
from torch import nn

from hf_vit.data.image_spec import ImageSpec
from hf_vit.model.modeling_hf_vit import HFViTModel
from hf_vit.system.errors import as_user_errors
from hf_vit.training.losses import FrozenTeacher


def patch_features(model: HFViTModel, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pooled vector (B, D) and the features of the patches as a map (B, h, w, D)."""
    outputs = model(pixel_values)
    patches = outputs.last_hidden_state[:, model.config.num_prefix_tokens :]  # (B, T, D) -> (B, N, D)
    grid = model.embeddings.patch_embeddings.grid_size(pixel_values)
    return outputs.pooler_output, patches.unflatten(1, grid)  # (B, N, D) -> (B, h, w, D)


class FeatureTeacher(FrozenTeacher):
    """A model of any format that `HFViTModel.from_pretrained` reads."""

    @as_user_errors()
    def __init__(self, checkpoint: str, spec: ImageSpec):
        super().__init__(HFViTModel.from_pretrained(checkpoint, dtype=torch.float32), checkpoint, spec)

    @torch.no_grad()
    def forward(self, pixel_values):
        """The student's normalised pixels (B, C, H, W) -> the teacher's pooled vector (B, D) and map (B, h, w, D), normalised."""
        pooled, features = patch_features(self.model, self.as_own(pixel_values))
        return tuple(nn.functional.layer_norm(values, values.shape[-1:]) for values in (pooled, features))


class FeatureDistillation(nn.Module):
    """A student and the two linear projections of its features to the width of the teacher's.

    Args:
        student: the model to train.
        teacher_widths: channels of the teacher's pooled vector, and of its patches.
    """

    def __init__(self, student: HFViTModel, teacher_widths: tuple[int, int]):
        super().__init__()
        self.vit, self.config = student, student.config
        self.pooled_projection = nn.Linear(student.config.pooled_size, teacher_widths[0])
        self.patch_projection = nn.Linear(student.config.hidden_size, teacher_widths[1])

    def activation_checkpointing_enable(self, options: dict):
        self.vit.activation_checkpointing_enable(options)

    def save_pretrained(self, folder):
        """The student alone."""
        self.vit.save_pretrained(folder)

    def forward(self, pixel_values, teacher_pooled, teacher_patches):
        """The loss (), the mean of two mean squared errors: of the pooled vector, and of the patches.

        Args:
            pixel_values: (B, C, H, W).
            teacher_pooled: (B, D) of the teacher.
            teacher_patches: (B, h, w, D); another grid than the student's is resampled to it, bilinear and antialiased.
        """
        pooled, patches = patch_features(self.vit, pixel_values)
        grid = patches.shape[1:3]
        if teacher_patches.shape[1:3] != grid:
            teacher_patches = nn.functional.interpolate(
                teacher_patches.movedim(3, 1), size=grid, mode="bilinear", antialias=True
            ).movedim(1, 3)
        of_pooled = nn.functional.mse_loss(self.pooled_projection(pooled).float(), teacher_pooled.float())
        of_patches = nn.functional.mse_loss(self.patch_projection(patches).float(), teacher_patches.float())
        return (of_pooled + of_patches) / 2

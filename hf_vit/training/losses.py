"""Targets, losses, and a teacher whose answers are learned too."""

import torch
from torch import nn

from hf_vit.data.columns import match_labels
from hf_vit.data.image_spec import ImageSpec, image_spec_of
from hf_vit.evaluation.classifiers import load_classifier, load_processor
from hf_vit.system.errors import UserError


def soft_targets(labels: torch.Tensor, num_labels: int, smoothing: float) -> torch.Tensor:
    """Class indices (B,) -> probabilities (B, L): 1 - smoothing for the class, and smoothing spread over all L classes.

    Of several labels an image, 0 and 1 of each (B, L), each is moved towards 1/2: 1 - smoothing / 2, and smoothing / 2.
    """
    if labels.ndim == 2:
        return labels * (1 - smoothing) + smoothing / 2
    return nn.functional.one_hot(labels, num_labels) * (1 - smoothing) + smoothing / num_labels


def classification_loss(logits, targets, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Mean cross-entropy of the images, in float32.

    Args:
        logits, targets: (B, L); targets are probabilities.
        weights: (L,), one per label. An image counts as much as its targets weigh: if each label's term were weighted instead,
            as PyTorch does, the smoothed targets of a rare label would outweigh the label of a frequent one.
    """
    if weights is None:
        return nn.functional.cross_entropy(logits.float(), targets)
    each = nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    return (each * (targets * weights).sum(dim=1)).mean()


def multi_label_loss(logits, targets, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over the labels, then over the images, of each label's binary cross-entropy, in float32.

    Args:
        logits, targets: (B, L); each target is a probability of its own.
        weights: (L,), of the images that have the label; those without it count 1, and smoothed targets what lies between.
    """
    counts = 1.0 if weights is None else 1 + (weights - 1) * targets
    each = nn.functional.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none")
    return (counts * each).mean()


def count_correct(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Images whose class is right, (); of several labels an image (B, L), the sum of the shares of its labels that are right."""
    if labels.ndim == 2:
        return ((logits > 0) == (labels > 0.5)).float().mean(dim=1).sum()
    return (logits.argmax(1) == labels).sum()


def distillation_loss(logits, teacher_logits) -> torch.Tensor:
    """KL(teacher || student) of the probabilities, mean of the images (arXiv 1503.02531, section 2, at temperature 1)."""
    answers = [values.float().log_softmax(dim=1) for values in (logits, teacher_logits)]
    return nn.functional.kl_div(*answers, reduction="batchmean", log_target=True)


class FrozenTeacher(nn.Module):
    """A network that is learned from, given the student's own pixels.

    Args:
        checkpoint: Hub id or folder that it is of.
        spec: of the student's images.

    Raises:
        ValueError: if its image processor does more than resize and normalise, or it looks at other channels.
    """

    def __init__(self, model: nn.Module, checkpoint: str, spec: ImageSpec):
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.own, self.students = image_spec_of(load_processor(checkpoint), model.config), spec
        if self.own.processor is not None or self.own.channels != spec.channels:
            raise UserError(
                f"--teacher_name_or_path {checkpoint} must look at {spec.channels} channels, got {self.own.channels}, of images "
                "that are resized and normalised, and no more: take another teacher"
            )

    def as_own(self, pixel_values):
        """The student's normalised pixels (B, C, H, W) in the teacher's size and normalisation."""
        channels = lambda values: torch.tensor(values, device=pixel_values.device).view(1, -1, 1, 1)
        pixels = pixel_values * channels(self.students.std) + channels(self.students.mean)
        size = (self.own.height, self.own.width)
        if tuple(pixels.shape[2:]) != size:
            pixels = nn.functional.interpolate(pixels, size=size, mode="bilinear", antialias=True)
        return (pixels - channels(self.own.mean)) / channels(self.own.std)


class Teacher(FrozenTeacher):
    """Any image classifier.

    Args:
        checkpoint: of an `AutoModelForImageClassification` that knows the student's labels by name.
        labels: the student's.

    Raises:
        ValueError: if it does not know one of the labels.
    """

    def __init__(self, checkpoint: str, labels: list[str], spec: ImageSpec):
        super().__init__(load_classifier(checkpoint, dtype=torch.float32), checkpoint, spec)
        try:
            columns = match_labels(torch.arange(len(labels)), labels, self.model.config.id2label)
        except ValueError as error:
            raise UserError(f"--teacher_name_or_path {checkpoint}: {error}") from error
        self.register_buffer("columns", columns)

    @torch.no_grad()
    def forward(self, pixel_values):
        """The student's normalised pixels (B, C, H, W) -> the teacher's logits for the student's labels (B, L)."""
        return self.model(self.as_own(pixel_values)).logits[:, self.columns]

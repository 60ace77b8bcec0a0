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


class TeacherImages:
    """The pixels of a student, as a teacher wants them.

    Args:
        checkpoint, config: of the teacher.
        spec: of the student's images.

    Raises:
        ValueError: if the teacher's image processor does more than resize and normalise, or it looks at other channels.
    """

    def __init__(self, checkpoint: str, config, spec: ImageSpec):
        self.own, self.students = image_spec_of(load_processor(checkpoint), config), spec
        if self.own.processor is not None:
            raise UserError(
                f"--teacher_name_or_path {checkpoint}: its {type(self.own.processor).__name__} does more to an image than "
                "resize and normalise, which a teacher's must not; take another teacher"
            )
        if self.own.channels != spec.channels:
            raise UserError(
                f"--teacher_name_or_path {checkpoint} looks at {self.own.channels} channels, the student at {spec.channels}"
            )

    def __call__(self, pixel_values):
        """The student's normalised pixels (B, C, H, W) in the teacher's size and normalisation."""
        channels = lambda values: torch.tensor(values, device=pixel_values.device).view(1, -1, 1, 1)
        pixels = pixel_values * channels(self.students.std) + channels(self.students.mean)
        size = (self.own.height, self.own.width)
        if tuple(pixels.shape[2:]) != size:
            pixels = nn.functional.interpolate(pixels, size=size, mode="bilinear", antialias=True)
        return (pixels - channels(self.own.mean)) / channels(self.own.std)


class Teacher:
    """Any image classifier, given the student's own pixels.

    Args:
        checkpoint: Hub id or folder of an `AutoModelForImageClassification` that knows the student's labels by name.
        labels: the student's.
        spec: of the student's images.

    Raises:
        ValueError: if it does not know one of the labels.
    """

    def __init__(self, checkpoint: str, labels: list[str], spec: ImageSpec):
        self.model = load_classifier(checkpoint, dtype=torch.float32).eval().requires_grad_(False)
        try:
            self.columns = match_labels(torch.arange(len(labels)), labels, self.model.config.id2label)
        except ValueError as error:
            raise UserError(f"--teacher_name_or_path {checkpoint}: {error}") from error
        self.images = TeacherImages(checkpoint, self.model.config, spec)

    def to(self, device):
        self.model.to(device)
        self.columns = self.columns.to(device)

    @torch.no_grad()
    def __call__(self, pixel_values):
        """The student's normalised pixels (B, C, H, W) -> the teacher's logits for the student's labels (B, L)."""
        return self.model(self.images(pixel_values)).logits[:, self.columns]

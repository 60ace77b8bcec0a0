"""Claims about targets, losses, teachers, and a head that is fitted first."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import nn
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from hf_vit.data.image_spec import ImageSpec
from hf_vit.data.normalization import normalize
from hf_vit.training.arguments import TrainArguments
from hf_vit.training.classification import Classification
from hf_vit.training.losses import (
    Teacher,
    classification_loss,
    count_correct,
    distillation_loss,
    multi_label_loss,
    soft_targets,
)


LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]])
TARGETS = torch.tensor([[0.9, 0.1, 0.0], [0.25, 0.0, 0.75]])
SEVERAL = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.3]])  # labels of an image, the last of them mixed


def test_several_labels_are_smoothed_towards_a_half_and_each_right_one_counts():
    labels = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(soft_targets(labels, 2, 0.2), torch.tensor([[0.9, 0.1], [0.1, 0.1]]))
    assert count_correct(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), labels) == 1.5
    assert count_correct(torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.tensor([1, 1])) == 1


def test_the_loss_of_one_label_is_computed_in_float32():
    """test_loop.py has its value in a run."""
    loss = classification_loss(LOGITS.bfloat16(), TARGETS)
    assert torch.equal(loss, classification_loss(LOGITS, TARGETS))
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 1.0, 4.0])], ids=["even", "weighted"])
def test_the_loss_of_several_labels_is_that_of_its_formula(weights):
    """The mean of all labels' yes or no; the weights count for the yes alone, and for 0.3 of a mixed one by 0.3."""
    yes = LOGITS.sigmoid()
    each = SEVERAL * yes.log() + (1 - SEVERAL) * (1 - yes).log()
    counts = 1 if weights is None else SEVERAL * weights + 1 - SEVERAL
    torch.testing.assert_close(multi_label_loss(LOGITS, SEVERAL, weights), -(each * counts).mean())


def test_distillation_loss_is_the_divergence_of_the_students_answers():
    teacher = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    taught, found = teacher.log_softmax(dim=1), LOGITS.log_softmax(dim=1)
    wanted = (taught.exp() * (taught - found)).sum(dim=1).mean()
    torch.testing.assert_close(distillation_loss(LOGITS, teacher), wanted)


@pytest.fixture
def teacher(tmp_path, tiny_fields, randomize):
    """teacher(names, size, channels) -> a native ViT in eval mode, its image processor, and the folder that holds both."""

    def make(names="abc", size=16, channels=3):
        id2label = dict(enumerate(names))
        fields = tiny_fields | dict(image_size=size, num_channels=channels, num_labels=len(names), id2label=id2label)
        native = randomize(
            ViTForImageClassification(ViTConfig(**fields, label2id={b: a for a, b in id2label.items()}))
        )
        processor = ViTImageProcessorPil(
            size={"height": size, "width": size}, image_mean=[0.1, 0.4, 0.3][:channels], image_std=[0.3, 0.2, 0.4][:channels],
            resample=Image.Resampling.BILINEAR,
        )  # fmt: skip
        for part in (native, processor):
            part.save_pretrained(tmp_path)
        return native, processor, str(tmp_path)

    return make


FORM = ImageSpec(16, 16, 3, 2, (0.5, 0.45, 0.4), (0.25, 0.2, 0.3))


@pytest.mark.parametrize(("size", "tolerance"), [(16, 1e-5), (32, 0.01)])
def test_a_teacher_sees_the_students_pixels_as_its_own_processor_makes_them_and_its_labels_by_name(
    teacher, size, tolerance
):
    """At another size the processor rounds to whole bytes, which the teacher does not."""
    native, processor, folder = teacher("cxab", size)
    images = (256 * torch.rand(4, 3, 1, 1) * torch.rand(4, 3, 16, 16)).byte()
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    with torch.no_grad():
        wanted = native(processor(pictures, return_tensors="pt")["pixel_values"]).logits[:, [2, 3, 0]]
    found = Teacher(folder, ["a", "b", "c"], FORM)(normalize(images, FORM))
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance, check_stride=False)
    assert wanted.std(dim=0).min() > 3 * tolerance


def test_a_teacher_is_not_trained_and_answers_in_float32(teacher, pixels):
    native, _, folder = teacher()
    native.bfloat16().save_pretrained(folder)
    asked = Teacher(folder, ["a", "b", "c"], FORM)
    assert not asked.model.training
    assert not any(parameter.requires_grad for parameter in asked.model.parameters())
    answers = asked(pixels().requires_grad_())
    assert (answers.dtype, answers.requires_grad) == (torch.float32, False)


@pytest.mark.parametrize(("labels", "channels", "named"), [(["a", "eel"], 3, "eel"), (["a", "b", "c"], 1, "got 1")])
def test_a_teacher_of_other_labels_or_channels_is_an_error(teacher, labels, channels, named):
    with pytest.raises(ValueError, match=f"--teacher_name_or_path .*{named}"):
        Teacher(teacher(channels=channels)[2], labels, FORM)


def classification(labels, multi_label=False, weights=None, **flags):
    """A task without data."""
    task = Classification(TrainArguments("d", preset="tiny-patch16-224", output_dir="o", **flags))
    task.data = SimpleNamespace(labels=labels, multi_label=multi_label)
    task.weights = weights
    return task


def fitted(features, labels, multi_label, classes, weights=None):
    """How many of the labels a head gets right that was fitted to them."""
    head = nn.Linear(features.shape[1], classes)
    nn.init.zeros_(head.weight)
    labels = nn.functional.one_hot(labels, classes).float() if multi_label else labels
    classification([*range(classes)], multi_label, weights).fit_head(head, features, labels)
    assert head.weight.grad is None
    return count_correct(head(features), labels)


@pytest.mark.parametrize("multi_label", [False, True])
def test_a_head_that_is_fitted_first_separates_what_can_be_separated(multi_label):
    labels = torch.arange(30) % 3
    features = nn.functional.one_hot(labels, 8) + 0.3 * torch.randn(30, 8)
    assert fitted(features, labels, multi_label, 3) >= 29


@pytest.mark.parametrize("multi_label", [False, True])
def test_weights_of_rare_classes_and_smoothing_do_not_lose_the_frequent_one(multi_label):
    """In losses that weigh each label's term, the smoothed targets of 30 images outweigh the labels of 950."""
    labels = (torch.arange(980) >= 950).long()
    weights = torch.tensor([980 / 2 / 950, 980 / 2 / 30])
    assert fitted(4.0 * nn.functional.one_hot(labels, 8), labels, multi_label, 2, weights) == 980


def test_the_more_accurate_weights_are_the_better_and_of_equal_ones_those_with_the_smaller_loss():
    score = classification(list("ab")).selection_score
    rising = [(0.5, 2.0), (0.5, 1.0), (0.6, 3.0)]
    scores = [score({"accuracy": accuracy, "loss": loss}) for accuracy, loss in rising]
    assert scores == sorted(set(scores))

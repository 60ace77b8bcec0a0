"""Claims about targets, losses, teachers, and a head that is fitted first."""

import math
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


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_soft_targets_smooth_over_all_classes():
    targets = soft_targets(torch.tensor([2, 0]), 4, 0.2)
    torch.testing.assert_close(targets, torch.tensor([[0.05, 0.05, 0.85, 0.05], [0.85, 0.05, 0.05, 0.05]]))


def test_several_labels_are_smoothed_towards_a_half_and_each_right_one_counts():
    labels = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(soft_targets(labels, 2, 0.2), torch.tensor([[0.9, 0.1], [0.1, 0.1]]))
    assert count_correct(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), labels) == 1.5
    assert count_correct(torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.tensor([1, 1])) == 1


@pytest.mark.parametrize("weights", [None, (0.5, 1.0, 4.0)])
def test_the_loss_of_one_label_is_that_of_a_hand_computation(weights):
    """An image counts as much as its label does, 0.9 x 0.5 + 0.1 x 1 and 0.25 x 0.5 + 0.75 x 4."""
    parts = []
    for logits, targets in zip(LOGITS.tolist(), TARGETS.tolist(), strict=True):
        log_sum = math.log(sum(math.exp(x) for x in logits))
        parts.append(sum(t * (log_sum - x) for t, x in zip(targets, logits, strict=True)))
    counts = (1, 1) if weights is None else (0.55, 3.125)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        loss = classification_loss(LOGITS.to(dtype), TARGETS, None if weights is None else torch.tensor(weights))
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx((counts[0] * parts[0] + counts[1] * parts[1]) / 2, abs=tolerance)


@pytest.mark.parametrize("weights", [None, (0.5, 1.0, 4.0)])
def test_the_loss_of_several_labels_is_that_of_a_hand_computation(weights):
    """The mean of all labels' yes or no; the weights count for the yes alone, and for 0.3 of a mixed one by 0.3."""
    parts = []
    for logits, targets in zip(LOGITS.tolist(), SEVERAL.tolist(), strict=True):
        for weight, t, x in zip(weights or (1, 1, 1), targets, logits, strict=True):
            p, counts = sigmoid(x), t * weight + 1 - t
            parts.append(-counts * (t * math.log(p) + (1 - t) * math.log(1 - p)))
    loss = multi_label_loss(LOGITS, SEVERAL, None if weights is None else torch.tensor(weights))
    assert loss.item() == pytest.approx(sum(parts) / 6, abs=1e-6)


def test_distillation_loss_is_that_of_a_hand_computation():
    teacher = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    softmax = lambda logits: [math.exp(x) / sum(map(math.exp, logits)) for x in logits]
    total = 0.0
    for student, taught in zip(LOGITS.tolist(), teacher.tolist(), strict=True):
        total += sum(p * math.log(p / q) for p, q in zip(softmax(taught), softmax(student), strict=True))
    loss = distillation_loss(LOGITS, teacher)
    assert loss.item() == pytest.approx(total / 2, abs=1e-5)


@pytest.fixture
def teacher(tmp_path, tiny_fields, randomize):
    """teacher(id2label, size, **fields) -> a native ViT in eval mode, its image processor, and the folder that holds both."""

    def make(names=("a", "b", "c"), size=16, **fields):
        id2label = dict(enumerate(names))
        labels = dict(id2label=id2label, label2id={name: index for index, name in id2label.items()})
        sizes = {key: value for key, value in tiny_fields.items() if key != "num_labels"}
        native = randomize(ViTForImageClassification(ViTConfig(**{**sizes, "image_size": size, **labels, **fields})))
        channels = native.config.num_channels
        processor = ViTImageProcessorPil(
            size={"height": size, "width": size}, image_mean=[0.1, 0.4, 0.3][:channels], resample=Image.Resampling.BILINEAR,
            image_std=[0.3, 0.2, 0.4][:channels],
        )  # fmt: skip
        native.save_pretrained(tmp_path)
        processor.save_pretrained(tmp_path)
        return native, processor, str(tmp_path)

    return make


FORM = ImageSpec(16, 16, 3, 2, (0.5, 0.45, 0.4), (0.25, 0.2, 0.3))


@pytest.mark.parametrize(("size", "tolerance"), [(16, 1e-5), (32, 0.01)])
def test_a_teacher_sees_the_students_pixels_as_its_own_processor_makes_them_and_its_labels_by_name(
    teacher, size, tolerance
):
    """At another size the processor rounds to whole bytes, which the teacher does not."""
    native, processor, folder = teacher(names=("c", "x", "a", "b"), size=size)
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


@pytest.mark.parametrize(
    ("labels", "fields", "named"), [(["a", "eel"], {}, "eel"), (["a", "b", "c"], {"num_channels": 1}, "got 1")]
)
def test_a_teacher_of_other_labels_or_channels_is_an_error(teacher, labels, fields, named):
    with pytest.raises(ValueError, match=f"--teacher_name_or_path .*{named}"):
        Teacher(teacher(**fields)[2], labels, FORM)


def classification(labels, multi_label=False, weights=None, **flags):
    """A task without data."""
    task = Classification(TrainArguments("d", preset="tiny-patch16-224", output_dir="o", **flags))
    task.data = SimpleNamespace(labels=labels, multi_label=multi_label)
    task.weights = weights
    return task


def zero_head(labels):
    head = nn.Linear(8, labels)
    nn.init.zeros_(head.weight)
    return head


@pytest.mark.parametrize("multi_label", [False, True])
def test_a_head_that_is_fitted_first_separates_what_can_be_separated(multi_label):
    labels = torch.arange(30) % 3
    features = nn.functional.one_hot(labels, 8) + 0.3 * torch.randn(30, 8)
    labels = nn.functional.one_hot(labels, 3).float() if multi_label else labels
    task, head = classification(list("abc"), multi_label), zero_head(3)
    task.fit_head(head, features, labels)
    assert head.weight.grad is None
    assert count_correct(head(features), labels) >= 29


@pytest.mark.parametrize("kind", ["one label", "multi_label"])
def test_weights_of_rare_classes_and_smoothing_do_not_lose_the_frequent_one(kind):
    """In losses that weigh each label's term, the smoothed targets of 30 images outweigh the labels of 950."""
    labels = (torch.arange(980) >= 950).long()
    features = 4.0 * nn.functional.one_hot(labels, 8)
    labels = nn.functional.one_hot(labels, 2).float() if kind == "multi_label" else labels
    weights, head = torch.tensor([980 / 2 / 950, 980 / 2 / 30]), zero_head(2)
    classification(list("ab"), kind == "multi_label", weights).fit_head(head, features, labels)
    assert count_correct(head(features), labels) == 980


def test_the_more_accurate_weights_are_the_better_and_of_equal_ones_those_with_the_smaller_loss():
    score = classification(list("ab")).selection_score
    rising = [(0.5, 2.0), (0.5, 1.0), (0.6, 3.0)]
    scores = [score({"accuracy": accuracy, "loss": loss}) for accuracy, loss in rising]
    assert scores == sorted(set(scores))

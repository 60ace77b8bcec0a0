"""Claims about logits and features of whole data sets."""

import math

import forked
import pytest
import torch
from runs import ended, start
from transformers import (
    Dinov2ForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from hf_vit import HFViTForImageClassification
from hf_vit.data.image_spec import ImageSpec
from hf_vit.data.normalization import normalize
from hf_vit.evaluation.prediction import classification_head, gather_rows, predict
from hf_vit.training.model import add_lora


FORM = ImageSpec(16, 16, 3, 2, (0.5, 0.45, 0.4), (0.25, 0.2, 0.3))


def mean_too(tokens):
    return torch.cat([tokens[:, 0], tokens[:, 1:].mean(dim=1)], dim=1)


FEATURES = {
    "ours": (HFViTForImageClassification, {}, lambda model, x: model.vit(x).pooler_output),
    "ours, two vectors": (
        HFViTForImageClassification, dict(pooling="cls_mean"), lambda model, x: mean_too(model.vit(x).last_hidden_state),
    ),
    "ours, tanh layer": (
        HFViTForImageClassification, dict(representation_size=12, hidden_dropout_prob=0.5),
        lambda model, x: torch.tanh(model.pre_logits(model.vit(x).pooler_output)),
    ),
    "ViT": (ViTForImageClassification, {}, lambda model, x: model.vit(x).last_hidden_state[:, 0]),
    "DINOv2": (Dinov2ForImageClassification, {}, lambda model, x: mean_too(model.dinov2(x).last_hidden_state)),
}  # fmt: skip


def in_batches(images, *rows):
    return [{"images": images[places], "index": torch.tensor(places)} for places in rows]


@pytest.mark.parametrize(("model_class", "fields", "by_hand"), FEATURES.values(), ids=FEATURES)
def test_features_are_what_the_head_sees(accelerator, tiny_fields, randomize, model_class, fields, by_hand):
    fields = {**tiny_fields, **fields}
    if model_class is Dinov2ForImageClassification:
        fields["mlp_ratio"] = fields.pop("intermediate_size") // fields["hidden_size"]
    model = randomize(model_class(model_class.config_class(**fields))).train()
    images = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    batches = in_batches(images, [4, 0], [2], [1, 3])
    features, rows = predict(model, batches, FORM, accelerator(), 5, features=True)
    assert rows.tolist() == [0, 1, 2, 3, 4]
    assert model.training
    assert not model.classifier._forward_pre_hooks
    with torch.no_grad():
        wanted = by_hand(model.eval(), normalize(images, FORM))
        logits = model(normalize(images, FORM)).logits
    torch.testing.assert_close(features, wanted, check_stride=False, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.classifier(features), logits, rtol=1e-4, atol=1e-5)


def test_a_model_without_a_head_has_no_features(accelerator, tiny_fields):
    model = ViTModel(ViTConfig(**{**tiny_fields, "num_labels": 7}), add_pooling_layer=False)
    with pytest.raises(ValueError, match="ViTModel has no dense layer of 7 labels"):
        predict(model, in_batches(torch.zeros(1, 3, 16, 16), [0]), FORM, accelerator(), 1, features=True)


def test_the_head_is_the_last_layer_of_as_many_outputs(tiny_config):
    """Layers inside may be as wide as there are labels."""
    model = HFViTForImageClassification(tiny_config(num_labels=32, pooling="map", representation_size=32))
    assert classification_head(model) is model.classifier
    model = HFViTForImageClassification(tiny_config(num_labels=32))
    assert classification_head(add_lora(model, 2)) is model.classifier.modules_to_save["default"]


OF_TWO = """
import sys, torch
from accelerate import Accelerator
from hf_vit.evaluation.prediction import predict
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
assert accelerator.num_processes == 2
model, images, form, shares = torch.load("given", weights_only=False)
found = []
for share in shares:
    batches = [{"images": images[rows], "index": torch.tensor(rows)} for rows in share[rank]]
    for features in (False, True):
        found.append(predict(model, batches, form, accelerator, len(images), features))
torch.save(found, f"found.{rank}")
accelerator.end_training()
sys.exit()
"""


def test_two_processes_get_every_row_once_and_the_same(accelerator, tmp_path, tiny_model):
    """In the second part one process has nothing to do."""
    model, images = tiny_model(), torch.randint(0, 256, (7, 3, 16, 16), dtype=torch.uint8)
    shares = [([[0, 3], [5]], [[1], [6, 2]]), ([[6, 4, 3, 2, 1]], [])]
    torch.save((model, images, FORM, shares), tmp_path / "given")
    ended(*(start(before=OF_TWO, cwd=tmp_path, **rank) for rank in forked.group_of_two()))
    first, second = (torch.load(tmp_path / f"found.{rank}") for rank in (0, 1))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    for number, (values, rows) in enumerate(first):
        wanted = [[0, 1, 2, 3, 5, 6], [1, 2, 3, 4, 6]][number // 2]
        assert rows.tolist() == wanted
        alone, _ = predict(model, in_batches(images, wanted), FORM, accelerator(), 7, features=number % 2 == 1)
        torch.testing.assert_close(values, alone)


@pytest.mark.parametrize("features", [False, True])
def test_predictions_that_are_not_finite_name_the_split_and_how_many(accelerator, tiny_model, features):
    model = tiny_model()
    batch = {"images": torch.zeros(3, 3, 16, 16, dtype=torch.uint8), "index": torch.arange(3)}
    model.vit.layernorm.bias.data[0] = math.nan
    with pytest.raises(ValueError, match="3 of 3 images of validation"):
        predict(model, [batch], FORM, accelerator(), 3, features, split="validation")


def test_batches_that_do_not_fit_are_halved_and_other_errors_are_raised(accelerator):
    asked = []

    def answer(batch):
        asked.append(len(batch["images"]))
        if len(batch["images"]) > 3:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return batch["images"].float().flatten(1)

    images = torch.randint(0, 256, (14, 1, 1, 1), dtype=torch.uint8)
    values, rows = gather_rows(answer, in_batches(images, list(range(8)), list(range(8, 14))), accelerator(), 14)
    assert asked == [8, 4, 2, 2, 2, 2, 2, 2, 2]
    assert rows.tolist() == list(range(14))
    assert torch.equal(values[:, 0], images.flatten().float())

    def fail(batch):
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes"):
        gather_rows(fail, in_batches(images, [0, 1]), accelerator(), 14)

"""Claims about the images and the steps of a run: each step is that of a plain loop."""

import pytest
import runs
import torch
from accelerate.state import AcceleratorState
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, List
from image_data import dataset, picture
from runs import logged, save_with_processor
from safetensors.torch import load_file
from torch import nn
from transformers import AutoImageProcessor

from hf_vit.data.augment import mix
from hf_vit.data.sampling import epoch_batches
from hf_vit.system.errors import UserError
from hf_vit.training import inputs
from hf_vit.training.classification import Classification
from hf_vit.training.optimizers import parameter_groups


NAMES = ("a", "b", "c")


def test_a_run_is_a_plain_loop_over_mixed_images_and_keeps_the_average(tmp_path, tiny_model):
    rows = dataset([0] * 12 + [1, 2] * 6, NAMES)
    DatasetDict(train=rows, test=dataset([0, 1, 2, 2, 2, 2], NAMES)).save_to_disk(tmp_path / "data")
    model = tiny_model(id2label=dict(enumerate(NAMES)))
    save_with_processor(model, tmp_path / "start")
    processor = AutoImageProcessor.from_pretrained(tmp_path / "start")
    images = torch.cat([processor(image, return_tensors="pt")["pixel_values"] for image in rows["image"]])
    flags = dict(
        model_name_or_path=str(tmp_path / "start"), learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5, warmup_ratio=0.0, mixup=0.4,
        lr_scheduler_type="constant", ema_decay=0.3, label_smoothing=0.1, balance="weights", crop="none", flip=False, max_train_steps=6,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, eval_steps=3, log_steps=1, mixed_precision="no",
    )  # fmt: skip
    runs.train(tmp_path / "data", tmp_path / "run", **flags)

    labels, weights = torch.tensor(rows["label"][:]), torch.tensor([24 / 3 / 12, 24 / 3 / 6, 24 / 3 / 6])
    optimizer = torch.optim.AdamW(parameter_groups(model.train(), 0.1), 1e-3, betas=(0.9, 0.999))
    average = {name: weight.clone() for name, weight in model.state_dict().items()}
    losses, norms = [], []
    for step in range(6):
        epoch, number = divmod(step, 3)
        ids = list(epoch_batches(24, 8, 0, epoch))[number]
        targets = nn.functional.one_hot(labels[ids], 3) * 0.9 + 0.1 / 3
        mixed, targets = mix(images[ids], targets, 0.4, 0.0, 0, epoch, number)
        each = -(targets * model(mixed).logits.log_softmax(dim=1)).sum(dim=1)
        loss = (each * (targets * weights).sum(dim=1)).mean()
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        for name, weight in model.state_dict().items():
            average[name].lerp_(weight, 1 - min(0.3, (1 + step) / (10 + step)))

    for name, wanted in (("loss", losses), ("gradient_norm", norms)):
        assert list(logged(tmp_path / "run", name).values()) == pytest.approx(wanted, rel=1e-4)
    assert min(norms) > 0.5  # else nothing was clipped
    for kind, state in (("step", model.state_dict()), ("best", average)):
        saved = load_file(tmp_path / "run" / "checkpoints" / f"{kind}-000006" / "model.safetensors")
        for name, weight in state.items():
            if "k_proj.bias" not in name:  # changes no answer: its gradient is rounding, which Adam makes a step of
                torch.testing.assert_close(saved[name], weight, rtol=1e-4, atol=1e-5)


class Draws(Classification):
    """Notes a random number of each micro-batch, as dropout would draw it."""

    drawn = []

    def loss(self, model, batch):
        self.drawn.append(torch.rand(()).item())
        return super().loss(model, batch)


def test_what_a_network_drops_differs_between_steps_micro_batches_and_seeds_alone(photos, tmp_path):
    for number, seed in enumerate((0, 0, 1)):
        how = dict(seed=seed, max_train_steps=3, gradient_accumulation_steps=2)
        runs.train(photos, tmp_path / str(number), Draws, **how)
    first, again, other = (Draws.drawn[start : start + 6] for start in (0, 6, 12))
    assert first == again
    assert len({*first, *other}) == 12


class Scored(Classification):
    """The second of three evaluations is the best."""

    def selection_score(self, metrics):
        return -abs(metrics["step"] - 4)


@pytest.mark.parametrize(("split", "kept"), [("validation", 4), ("test", 6)])
def test_of_images_that_select_the_best_weights_are_kept_and_of_a_test_split_the_last(split, kept, tmp_path):
    rows = dataset([0, 1] * 8)
    DatasetDict({"train": rows, split: rows}).save_to_disk(tmp_path / "data")
    how = dict(max_train_steps=6, eval_steps=2)
    assert runs.train(tmp_path / "data", tmp_path / "run", Scored, **how).metrics["step"] == kept
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("best-*")] == [f"best-{kept:06d}"]
    assert list(logged(tmp_path / "run", "eval_loss")) == [2, 4, 6]
    again = runs.train(tmp_path / "data", tmp_path / "run", Scored, **how)  # finished: read back
    assert again.metrics["step"] == kept
    assert not AcceleratorState._shared_state


class Uncropped(Classification):
    """The images of a batch are those that were decoded, normalised."""

    def loss(self, model, batch):
        decoded = self.data.train_images.__getitems__(batch.rows["index"].tolist())["images"]
        assert torch.equal(batch.inputs, self.data.spec.normalize(decoded))
        return super().loss(model, batch)


def test_a_part_of_a_photo_is_not_cropped_again(tmp_path):
    rows = dataset([0, 1] * 8)
    DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "data")
    results = runs.train(tmp_path / "data", tmp_path / "run", Uncropped, crop_scale=0.5, flip=False, max_train_steps=2)
    assert results.data["scored_duplicates"] is None  # images that are not in memory are not compared


@pytest.mark.parametrize(("most", "found"), [(99, None), (100, 3)])
def test_scored_images_that_are_trained_on_too_are_counted_if_there_are_not_too_many(
    most, found, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(inputs, "MAX_PAIRS", most)
    images = dataset([0, 1] * 12)
    splits = dict(train=images.select(range(20)), test=images.select([3, 8, 11, 20, 21]))
    DatasetDict(splits).save_to_disk(tmp_path / "data")
    results = runs.train(tmp_path / "data", tmp_path / "run", crop="none", max_train_steps=1)
    assert results.data["scored_duplicates"] == found
    assert ("3 of 5 images" in capsys.readouterr().out) == (found is not None)


def test_a_split_to_score_in_which_no_image_has_a_label_ends_the_run_before_it_trains(tmp_path):
    features = Features(image=Image(), label=List(ClassLabel(names=["a", "b"])))
    of = lambda labels: Dataset.from_dict({"image": [picture()] * len(labels), "label": labels}, features)
    DatasetDict(train=of([[0], [1]] * 4), test=of([[]] * 8)).save_to_disk(tmp_path / "data")
    with pytest.raises(UserError, match="8 images of test"):
        runs.train(tmp_path / "data", tmp_path / "run")

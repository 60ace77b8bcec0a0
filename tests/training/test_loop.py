"""Claims about the steps of train.py: each is that of a plain loop."""

import contextlib
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import DatasetDict
from image_data import dataset
from safetensors.torch import load_file
from torch import nn
from train import train
from transformers import ViTImageProcessorPil

from hf_vit.data.augment import mix
from hf_vit.data.sampling import epoch_batches
from hf_vit.training.arguments import parse_args
from hf_vit.training.classification import Classification
from hf_vit.training.inputs import seed_micro_batch
from hf_vit.training.optimizers import parameter_groups
from hf_vit.training.run import build_run, start_or_resume
from hf_vit.training.setup import set_up_accelerator
from hf_vit.training.state import TrainState
from hf_vit.training.validation import evaluate


NAMES = ("a", "b", "c")
FLAGS = dict(
    learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5, lr_scheduler_type="constant", warmup_ratio=0, ema_decay=0.9, mixup=0.4,
    label_smoothing=0.1, balance="weights", crop="none", flip="false", per_device_train_batch_size=8, max_train_steps=6, eval_steps=6,
    first_image_size=8, first_stage=1 / 3, log_steps=1, mixed_precision="no", num_workers=0, auto_find_batch_size="false",
)  # fmt: skip


def test_a_run_is_a_plain_loop_over_mixed_images_and_keeps_the_average(tmp_path, tiny_model):
    rows = dataset([0] * 12 + [1, 2] * 6, NAMES)
    DatasetDict(train=rows, validation=dataset([0, 1, 2, 2, 2, 2], NAMES)).save_to_disk(tmp_path / "data")
    model = tiny_model(id2label=dict(enumerate(NAMES)))
    model.save_pretrained(tmp_path / "start")
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "start")
    places = dict(dataset_name=tmp_path / "data", model_name_or_path=tmp_path / "start", output_dir=tmp_path / "run")
    (tmp_path / "run").mkdir()
    args = parse_args([f"--{name}={value}" for name, value in (places | FLAGS).items()])
    accelerator, signals = set_up_accelerator(args), SimpleNamespace(asked=None, in_notebook=True)
    run = build_run(args, Classification(args, accelerator), accelerator, signals, time.monotonic())
    assert train(run, start_or_resume(run, None, None))

    images, labels = (run.data.train_images.cache / 255 - 0.5) / 0.5, torch.tensor(rows["label"][:])
    weights = torch.tensor([24 / 3 / 12, 24 / 3 / 6, 24 / 3 / 6])
    optimizer = torch.optim.AdamW(parameter_groups(model.train(), 0.1), 1e-3, betas=(args.adam_beta1, args.adam_beta2))
    average = {name: weight.clone() for name, weight in model.state_dict().items()}
    losses, norms = [], []
    for step in range(6):
        epoch, number = divmod(step, 3)
        ids = list(epoch_batches(24, 8, 0, epoch))[number]
        targets = nn.functional.one_hot(labels[ids], 3) * 0.9 + 0.1 / 3
        inputs, targets = mix(images[ids], targets, 0.4, 0.0, 0, epoch, number)
        if step < 2:
            inputs = nn.functional.interpolate(inputs, (8, 8), mode="bilinear", antialias=True)
        logits = model(inputs, interpolate_pos_encoding=True).logits
        each = -(targets * logits.log_softmax(dim=1)).sum(dim=1)
        loss = (each * (targets * weights).sum(dim=1)).mean()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        for name, weight in model.state_dict().items():
            average[name].lerp_(weight, 1 - min(0.9, (1 + step) / (10 + step)))

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [(line["loss"], line["gradient_norm"]) for line in lines if "loss" in line]
    np.testing.assert_allclose(logged, list(zip(losses, norms, strict=True)), rtol=1e-4)
    assert min(norms) > 0.5  # else nothing was clipped
    saved = load_file(tmp_path / "run" / "checkpoints" / "best-000006" / "model.safetensors")
    for found, wanted in ((run.network.state_dict(), model.state_dict()), (saved, average)):
        for name, weight in wanted.items():
            if "k_proj.bias" not in name:  # changes no answer: its gradient is rounding, which Adam makes a step of
                torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5)


def test_what_a_network_drops_differs_between_steps_micro_batches_processes_and_seeds_alone():
    drawn = []
    for numbers in ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, 0)):
        seed_micro_batch(*numbers)
        drawn.append(torch.rand(()).item())
    assert drawn[0] == drawn[-1]
    assert len(set(drawn)) == 5


@pytest.mark.parametrize(("selects_best", "kept"), [(True, [1, 2]), (False, [4])])
def test_of_images_that_select_the_best_weights_are_kept_and_of_others_the_last(selects_best, kept):
    accuracies, found = iter([0.5, 0.7, 0.6, 0.6]), []
    task = SimpleNamespace(
        score=lambda *_: SimpleNamespace(metrics={"accuracy": next(accuracies)}),
        merit=lambda metrics: metrics["accuracy"],
        keep_best=lambda run, model, metrics, scored: found.append(metrics["step"]),
        describe=lambda *_: "",
    )
    data = SimpleNamespace(selects_best=selects_best, scored="images")
    ignored = dict.fromkeys(("seconds_of_training", "print", "log"), lambda *_, **__: None)
    run = SimpleNamespace(
        task=task, data=data, best=None, batches=SimpleNamespace(total_steps=4), whole_model=contextlib.nullcontext,
        accelerator=SimpleNamespace(is_main_process=True), **ignored,
    )  # fmt: skip
    for step in (1, 2, 3, 4):
        assert evaluate(run, TrainState(step=step))
    assert found == kept

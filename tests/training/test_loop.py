"""Claims about the steps of a run: each is that of a plain loop."""

import contextlib
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import DatasetDict
from image_data import dataset
from safetensors.torch import load_file
from torch import nn
from transformers import ViTImageProcessorPil

from hf_vit.data.augment import mix
from hf_vit.data.sampling import epoch_batches
from hf_vit.training import loop
from hf_vit.training.arguments import TrainArguments, parse_args
from hf_vit.training.classification import Classification
from hf_vit.training.evaluate import evaluate
from hf_vit.training.inputs import seed_micro_batch
from hf_vit.training.optimizers import parameter_groups
from hf_vit.training.setup import set_up_accelerator
from hf_vit.training.task import Evaluation
from hf_vit.training.train import start, train


NAMES = ("a", "b", "c")
FLAGS = dict(
    learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5, lr_scheduler_type="constant", warmup_ratio=0, ema_decay=0.9, mixup=0.4,
    label_smoothing=0.1, balance="weights", crop="none", flip="false", per_device_train_batch_size=8, max_train_steps=6, eval_steps=6,
    log_steps=1, mixed_precision="no", num_workers=0, auto_find_batch_size="false",
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
    accelerator, signals = set_up_accelerator(args), SimpleNamespace(received=None, in_notebook=True)
    run = start(args, Classification(args), accelerator, signals, time.monotonic(), None)
    assert loop.fit(run)

    images, labels = (run.data.train_images.cache / 255 - 0.5) / 0.5, torch.tensor(rows["label"][:])
    weights = torch.tensor([24 / 3 / 12, 24 / 3 / 6, 24 / 3 / 6])
    optimizer = torch.optim.AdamW(parameter_groups(model.train(), 0.1), 1e-3, betas=(0.9, args.adam_beta2))
    average = {name: weight.clone() for name, weight in model.state_dict().items()}
    losses, norms = [], []
    for step in range(6):
        epoch, number = divmod(step, 3)
        ids = list(epoch_batches(24, 8, 0, epoch))[number]
        targets = nn.functional.one_hot(labels[ids], 3) * 0.9 + 0.1 / 3
        inputs, targets = mix(images[ids], targets, 0.4, 0.0, 0, epoch, number)
        logits = model(inputs).logits
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
    for found, wanted in ((run.state.network.state_dict(), model.state_dict()), (saved, average)):
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
def test_of_images_that_select_the_best_weights_are_kept_and_of_others_the_last(selects_best, kept, monkeypatch):
    accuracies, found = iter([0.5, 0.7, 0.6, 0.6]), []
    monkeypatch.setattr(
        "hf_vit.training.evaluate.keep_best", lambda run, model, metrics, _: found.append(metrics["step"])
    )
    task = SimpleNamespace(
        evaluate=lambda *_: Evaluation({"accuracy": next(accuracies)}, None),
        selection_score=lambda metrics: metrics["accuracy"],
        describe=lambda *_: "",
    )
    run = SimpleNamespace(
        task=task, data=SimpleNamespace(selects_best=selects_best, scored="images"), best=None, predictor=None,
        plan=SimpleNamespace(total_steps=4), whole_model=contextlib.nullcontext, state=SimpleNamespace(epoch=0, clock=lambda: 0),
        accelerator=SimpleNamespace(is_main_process=True), log=SimpleNamespace(log=lambda **_: None),
    )  # fmt: skip
    for run.state.step in (1, 2, 3, 4):
        assert evaluate(run)
    assert found == kept
    assert run.state.evaluated_step == 4


def test_a_call_trains_in_this_process_and_leaves_no_trace_of_its_accelerator(tmp_path):
    rows = dataset([0, 1] * 8, ("a", "b"))
    DatasetDict(train=rows, validation=rows).save_to_disk(tmp_path / "data")
    fields = "image_size=16,patch_size=8,hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"
    args = TrainArguments(
        str(tmp_path / "data"), preset="tiny-patch16-224", config_overrides=fields, output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=4, max_train_steps=3, num_workers=0,
    )  # fmt: skip
    results = train(args)
    assert (results.steps, len(results.per_class)) == (3, 2)
    assert train(args) == results  # finished: read back
    assert not AcceleratorState._shared_state


@pytest.fixture
def stub(monkeypatch):
    """stub(...) -> (a run on a GPU that is none, its batches, and in which order these and the optimizer were called)."""
    monkeypatch.setattr(loop, "forward_backward", lambda *_: (torch.ones(3), torch.tensor(1.0), None))
    monkeypatch.setattr(loop, "read_while", lambda values, work: work() or values.tolist())

    def make(in_memory=True, saved_step=0, checkpointing_steps=None):
        order = []
        monkeypatch.setattr(loop, "optimizer_step", lambda *_: order.append("step"))
        state = SimpleNamespace(
            step=5,
            saved_step=saved_step,
            seconds={"input": 0, "step": 0},
            optimizers=[],
            timed=lambda _, work: work(),
        )
        args = SimpleNamespace(
            lr_scheduler_type="constant", learning_rate=1.0,
            checkpointing_steps=checkpointing_steps,
        )  # fmt: skip
        accelerator = SimpleNamespace(
            scaler=None, is_main_process=True, device=SimpleNamespace(type="cuda"), reduce=lambda values, _: values
        )
        run = SimpleNamespace(
            plan=SimpleNamespace(args=args, total_steps=9, warmup_steps=0), state=state, accelerator=accelerator,
            signals=SimpleNamespace(received=None), data=SimpleNamespace(in_memory=in_memory),
            log=SimpleNamespace(update=lambda *_: None),
        )  # fmt: skip
        return run, SimpleNamespace(prefetch=lambda: order.append("batch")), order

    return make


@pytest.mark.parametrize("in_memory", [True, False])
def test_the_optimizer_waits_for_no_batch_that_must_be_decoded(in_memory, stub):
    run, batches, order = stub(in_memory)
    loop.train_step(run, batches, 0.0)
    assert order == (["batch", "step"] if in_memory else ["step"])
    assert run.state.step == 6


@pytest.mark.parametrize(
    ("how", "seconds", "is_due"),
    [
        (dict(), 61, True), (dict(), 59, False), (dict(saved_step=3), 61, False), (dict(saved_step=3), 301, True),
        (dict(checkpointing_steps=3), 0, True), (dict(checkpointing_steps=4), 999, False), (dict(checkpointing_steps=0), 999, False),
    ],
)  # fmt: skip
def test_a_checkpoint_is_due_after_a_minute_and_then_every_five_or_every_few_steps(how, seconds, is_due, stub):
    run, batches, _ = stub(**how)
    assert loop.train_step(run, batches, time.monotonic() - seconds) == (False, is_due)

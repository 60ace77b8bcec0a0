"""Claims about training that would go wrong without a word: half precision, NaN, labels, and a process that fails."""

import json
import math
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import forked
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from safetensors.torch import load_file, save_file

from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_spec import ImageSpec, image_spec_of
from hf_vit.data.loader import data_loader
from hf_vit.data.normalization import normalize
from hf_vit.data.sampling import epoch_batches, sequential_batches
from hf_vit.data.sources import load_splits
from hf_vit.data.splits import prepare_splits
from hf_vit.evaluation.classifiers import load_classifier
from hf_vit.evaluation.prediction import predict
from hf_vit.evaluation.scores import compute_metrics
from hf_vit.training.losses import Teacher, classification_loss, soft_targets
from hf_vit.training.model import add_lora, build_model, save_model
from hf_vit.training.optimizers import build_optimizers, is_finite
from hf_vit.training.state import TrainState


HOUSE = Path(__file__).parents[2]
TRAIN = HOUSE / "recipes" / "train.py"
FORM = ImageSpec(16, 16, 3, 2, (0.5,) * 3, (0.5,) * 3)
NAMES = ["eel", "cat", "dog"]


def change_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_checkpoint_of_any_precision_is_trained_in_float32(saved, dtype):
    folder = saved(dtype)
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {dtype}
    model, _ = build_model(NAMES, str(folder), None, None, {})
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    (optimizer,) = build_optimizers(model, "adamw", 5e-5, 0.0, 0.999)
    before = [weight.detach().clone() for weight in model.parameters()]
    for _ in range(20):
        model(pixel_values=torch.randn(4, 3, 16, 16), labels=torch.randint(3, (4,))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = [(new != old).float().mean().item() for new, old in zip(model.parameters(), before, strict=True)]
    assert np.mean(moved) > 0.95


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("lora_save", ["merged", "adapter"])
def test_lora_on_a_half_precision_base_is_merged_in_float32(saved, tmp_path, lora_save, pixels):
    model, _ = build_model(NAMES, str(saved(torch.bfloat16)), None, None, {})
    model = add_lora(model, 4)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=1e-2)
    save_model(model, tmp_path / "out", lora_save)
    images = pixels(4)
    wanted = model.eval()(images).logits
    loaded = load_classifier(str(tmp_path / "out"), dtype=torch.float32)
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}
    torch.testing.assert_close(loaded.eval()(images).logits, wanted, rtol=0, atol=1e-5)


def test_a_teacher_in_half_precision_answers_in_float32(saved, pixels):
    teacher = Teacher(str(saved(torch.bfloat16)), NAMES, FORM)
    assert teacher(pixels(2)).dtype == torch.float32


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_filled(tmp_path):
    model = torch.nn.Linear(2, 2)
    good = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator = SimpleNamespace(device="cpu", num_processes=1, process_index=0)
    state = TrainState(accelerator, model, [], None, SimpleNamespace(), 0.0, 0.0)
    for wrong in ({}, {**good, "more": torch.ones(1)}, {"weight": torch.zeros(2, 2), "bias": torch.ones(3)}):
        save_file(wrong, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            state.load(tmp_path)
        assert torch.equal(model.weight, good["weight"])


def test_the_head_of_a_checkpoint_is_kept_by_the_ids_of_its_labels(saved):
    folder = saved()
    head = load_file(folder / "model.safetensors")["classifier.weight"]
    change_config(folder, id2label={"2": "dog", "0": "eel", "1": "cat"})  # as before, in another order
    kept, _ = build_model(NAMES, str(folder), None, None, {})
    assert torch.equal(kept.classifier.weight, head)
    assert list(load_classifier(str(folder)).config.id2label.values()) == NAMES
    change_config(folder, id2label={"1": "eel", "0": "cat", "2": "dog"})  # the order of NAMES, of other rows
    reset, _ = build_model(NAMES, str(folder), None, None, {})
    assert not reset.classifier.weight.any()


def test_two_classes_of_one_name_keep_no_head(saved):
    folder = saved()
    change_config(folder, id2label={"0": "cat", "1": "cat", "2": "dog"})
    reset, _ = build_model(["cat", "dog", "eel"], str(folder), None, None, {})
    assert not reset.classifier.weight.any()


# ----------------------------------------------------------------------------------------------------------------------
# Whole runs


TINY = "patch_size=7,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64,image_size=28"
FLAGS = [
    "--dataset_name", "photos", "--preset", "tiny-patch16-224", "--config_overrides", TINY, "--max_train_steps", "6",
    "--per_device_train_batch_size", "4", "--checkpointing_steps", "2", "--eval_steps", "6",
]  # fmt: skip
ALONE = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def started(cwd, before, *argv, **environment):
    """A process that runs some code, and then the script that `argv` names, if any."""
    line = [sys.executable, "-W", "ignore", "-c", before + forked.THEN_THE_SCRIPT, *argv]
    return forked.Forked(line, cwd, {**os.environ, **ALONE, **environment}, together=True)


def ended(processes, codes):
    try:
        printed = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == codes, "\n----\n".join(printed)
    return printed


def train(cwd, *flags, before="", code=0):
    return ended([started(cwd, before, TRAIN, *FLAGS, "--num_workers", "0", *flags)], [code])[0]


@pytest.fixture
def photos(tmp_path):
    """A working directory with photos/ in it: two classes of colour, 8 images each to train on, 4 to score."""
    rng = np.random.default_rng(0)
    for split, count in {"train": 8, "validation": 4}.items():
        for name, color in {"red": (150, 90, 90), "blue": (90, 90, 150)}.items():
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = np.clip(np.array(color) + rng.normal(0, 60, (28, 28, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / "photos" / split / name / f"{index}.png")
    return tmp_path


def results_of(run):
    return json.loads((run / "results.json").read_text())


SAVED_IN_BF16 = """
from hf_vit.training import model as module
save = module.save_model
def save_rounded(model, folder, lora_save):
    rounded = {name: weight.bfloat16().float() for name, weight in model.state_dict().items()}
    kept = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.load_state_dict(rounded)
    save(model, folder, lora_save)
    model.load_state_dict(kept)
module.save_model = save_rounded
"""


def test_a_run_warns_if_its_saved_model_does_not_give_the_logits_that_were_evaluated(photos):
    printed = train(photos, "--output_dir", "run", "--learning_rate", "3e-3", before=SAVED_IN_BF16)
    assert "WARNING: The saved model" in printed
    assert results_of(photos / "run")["saved_logits_apart"] > 1e-3


@pytest.fixture(scope="module")
def clothes():
    """51 embedded images of each of ten classes to train on, and 2,000 to score, as `prepare_splits` gives them."""
    return prepare_splits(load_splits("fashion-mnist-mini"), train_split="train", shots=51, seed=0)


def fine_tuned(checkpoint, splits, labels, seed, steps=60):
    """Accuracy of a checkpoint after some steps of AdamW at 1e-4, on images of 16 pixels, which take a quarter of the time."""
    torch.manual_seed(seed)
    model, processor = build_model(labels, str(checkpoint), None, 16, {})
    form = image_spec_of(processor, model.config)
    images, scored = (ImageDataset(splits[name], form) for name in ("train", "eval"))
    (optimizer,) = build_optimizers(model, "adamw", 1e-4, 0.05, 0.999)
    batches = (ids for epoch in range(steps) for ids in epoch_batches(len(images), 32, seed, epoch))
    for _, ids in zip(range(steps), batches, strict=False):
        batch = images.__getitems__(ids)
        logits = model.train()(normalize(batch["images"], form).to(model.dtype)).logits
        classification_loss(logits, soft_targets(batch["labels"], len(labels), 0.1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    batches = data_loader(scored, sequential_batches(len(scored), 500), 0)
    logits, rows = predict(model.float(), batches, form, Accelerator(cpu=True), len(scored))
    return compute_metrics(logits, scored.labels[rows])["accuracy"]


@pytest.mark.slow
def test_a_checkpoint_is_fine_tuned_as_well_from_half_precision(tmp_path, clothes):
    """The pre-trained model of model_cards/transfer, stored in three precisions; three seeds each. pytest -s prints what they
    reach. The noise is that of the start, which is rounded: seeds, images and order are the same."""
    splits, labels, _ = clothes
    accuracies = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        shutil.copytree(HOUSE / "model_cards" / "transfer" / "pretrained", tmp_path / name)
        tensors = load_file(tmp_path / name / "model.safetensors")
        stored = {key: tensor.to(dtype) for key, tensor in tensors.items()}
        save_file(stored, tmp_path / name / "model.safetensors", {"format": "pt"})
        change_config(tmp_path / name, dtype=name)
        accuracies[name] = [fine_tuned(tmp_path / name, splits, labels, seed) for seed in range(3)]
        print(name, accuracies[name], flush=True)
    for name in ("bfloat16", "float16"):
        assert np.mean(accuracies[name]) == pytest.approx(np.mean(accuracies["float32"]), abs=0.01), accuracies


ONE_SKIPPED = "from hf_vit.training import loop\nloop.MOST_SKIPPED = 1\n"
GRADIENTS_OF_NAN = """
import torch
from accelerate import Accelerator
make, backward = Accelerator.__init__, Accelerator.backward
def with_scaler(self, *args, **how):
    make(self, *args, **how)
    self.scaler, self.native_amp = torch.amp.GradScaler("cpu", init_scale=2.0**{power}), True
def spoiled(self, loss, **how):
    backward(self, loss, **how)
    for optimizer in self._optimizers:
        optimizer.param_groups[0]["params"][0].grad.fill_(float("nan"))
Accelerator.__init__, Accelerator.backward = with_scaler, spoiled
"""


def test_gradients_that_stay_nan_in_fp16_are_no_matter_of_scale_and_stop_the_run(photos):
    flags = ["--output_dir", "run", "--mixed_precision", "fp16"]
    on_cpu = "from hf_vit.system import hardware\nhardware.pick_precision = lambda asked, device_type: asked\n"
    printed = train(photos, *flags, before=on_cpu + ONE_SKIPPED + GRADIENTS_OF_NAN.format(power=3), code=1)
    assert "step 4 is skipped" in printed  # 8, 4, 2 are scales to come down from
    assert "in step 5, and before in 4:" in printed


def test_an_overflow_in_fp16_is_excused_only_while_the_loss_is_scaled_up():
    for loss, norm, scale, wanted in (
        (1.0, 1.0, 1.0, True), (1.0, math.inf, 2.0, True), (1.0, math.nan, 1.0, False), (1.0, math.inf, 0.5, False),
        (math.nan, 1.0, 65536.0, False),
    ):  # fmt: skip
        assert bool(is_finite(torch.tensor(loss), torch.tensor(norm), scale)) is wanted


TIMED_OUT = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from hf_vit.training.distributed import exit_with_error, set_timeout
dist.init_process_group("gloo")
dist.barrier()
set_timeout(timedelta(seconds=3))
if dist.get_rank() == 1:
    time.sleep(20)
    sys.exit()
try:
    dist.barrier()
except RuntimeError as error:
    exit_with_error(error)
"""


def test_a_process_that_does_not_come_is_waited_for_no_longer_than_the_time_out(tmp_path):
    processes = [started(tmp_path, TIMED_OUT, **rank) for rank in forked.group_of_two()]
    try:
        assert processes[0].wait(15) == 1
    finally:
        for process in processes:
            process.kill()


BROKEN = """
import importlib, os
module = importlib.import_module("hf_vit.data.augment")
augment, passes = module.augment, []
def broken(*args, **how):
    passes.append(None)
    if os.environ["RANK"] == "1" and len(passes) == 3:
        raise RuntimeError("one process is out of luck")
    return augment(*args, **how)
module.augment = broken
"""


def test_an_error_of_any_kind_in_any_process_ends_a_run_with_that_error(photos):
    flags = [*FLAGS, "--per_device_train_batch_size", "2", "--num_workers", "0", "--output_dir", "run"]
    printed = ended([started(photos, BROKEN, TRAIN, *flags, **rank) for rank in forked.group_of_two()], [1, 1])
    assert "RuntimeError: one process is out of luck" in printed[1]
    train(photos, "--output_dir", "run")  # and the same command goes on
    assert results_of(photos / "run")["resumed_at_steps"] == [2]

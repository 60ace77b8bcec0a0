"""What only a CUDA device can show: `pytest -m gpu` there. Tiny models, a few minutes; no test asserts a time."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from image_data import augmented
from runs import logged
from torch import nn

from hf_vit import HFViTForImageClassification
from hf_vit.data import augment
from hf_vit.data.image_spec import ImageSpec
from hf_vit.evaluation.prediction import predict
from hf_vit.training import muon
from hf_vit.training.ema import ModelEMA
from hf_vit.training.losses import classification_loss, soft_targets
from hf_vit.training.model import compile_model, find_batch_size
from hf_vit.training.optimizers import build_optimizers, clip_gradients


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TRAIN = Path(__file__).parents[2] / "recipes" / "train.py"
FLAGS = """--dataset_name fashion-mnist-mini --preset tiny-patch16-224 --shots 100 --max_train_steps 20 --per_device_train_batch_size 32
    --log_steps 1 --eval_steps 20 --learning_rate 1e-3 --erase 0.25 --auto_augment rand --mixup 0.8 --ema_decay 0.9 --warmup_ratio 0
    --config_overrides image_size=28,patch_size=7,hidden_size=64,num_hidden_layers=3,num_attention_heads=4,intermediate_size=128"""
FORM = ImageSpec(16, 16, 3, 2, (0.4, 0.5, 0.6), (0.2, 0.3, 0.25))


@pytest.fixture
def device():
    """The CUDA device, with products in float32 where float32 is asked for."""
    modules = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [module.allow_tf32 for module in modules]
    for module in modules:
        module.allow_tf32 = False
    yield torch.device("cuda", 0)
    for module, allowed in zip(modules, before, strict=True):
        module.allow_tf32 = allowed


def train(folder, flags, resume=None, launcher=""):
    """A run of train.py in `folder`."""
    line = f"{launcher} {TRAIN} {FLAGS} {flags} --output_dir {folder}"
    line += f" --resume {resume}/checkpoints/step-000010" if resume else ""
    done = subprocess.run([sys.executable, "-W", "ignore", *line.split()], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


def losses(folder):
    return torch.tensor(list(logged(folder, "loss").values()))


# ----------------------------------------------------------------------------------------------------------------------
# Runs of train.py


@pytest.mark.parametrize("compiled", ["no", "yes"])
def test_a_run_in_bf16_that_is_stopped_and_resumed_ends_as_an_undisturbed_one(tmp_path, compiled):
    flags = f"--mixed_precision bf16 --compile {compiled} --checkpointing_steps 10"
    train(tmp_path / "whole", flags)
    train(tmp_path / "resumed", flags, resume=tmp_path / "whole")
    whole, resumed = losses(tmp_path / "whole"), losses(tmp_path / "resumed")
    assert len(resumed) == 20
    torch.testing.assert_close(resumed, whole, rtol=0.01, atol=0.01)  # some backward kernels add in any order
    assert whole[-5:].mean() < whole[:5].mean()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_sharded_by_fsdp2_scores_saves_and_goes_on_unsharded(tmp_path, optimizer):
    launcher = "-m accelerate.commands.launch --num_processes 1 --main_process_port 0 --config_file recipes/accelerate/fsdp2.yaml"
    flags = f"--optimizer {optimizer} --mixed_precision no --compile no --checkpointing_steps 10"
    train(tmp_path / "sharded", flags, launcher=launcher.replace("recipes", str(TRAIN.parent)))
    train(tmp_path / "plain", flags, resume=tmp_path / "sharded")
    torch.testing.assert_close(losses(tmp_path / "plain"), losses(tmp_path / "sharded"), rtol=1e-3, atol=1e-3)
    assert HFViTForImageClassification.from_pretrained(tmp_path / "sharded" / "model").num_labels == 10


# ----------------------------------------------------------------------------------------------------------------------
# Numbers: as on the CPU


def test_random_numbers_equal_those_of_the_cpu_to_the_bit(device):
    index = torch.randint(-(2**62), 2**62, (10_000,))
    there, here = (augment.uniform(ids, 7, 3, 12).cpu() for ids in (index.to(device), index))
    assert torch.equal(there, here)


@pytest.mark.parametrize(
    "recipe",
    [
        dict(shift=2, flip=True), dict(crop="resized"), dict(auto_augment="rand", erase=0.5),
    ],
)  # fmt: skip
def test_augmented_images_are_those_of_the_cpu_within_a_level(device, recipe):
    images, index = torch.randint(0, 256, (128, 3, 32, 32), dtype=torch.uint8), torch.arange(128)
    large = replace(FORM, height=32, width=32)
    there, here = (augmented(images.to(kind), index, 0, 1, large, **recipe).cpu() for kind in (device, "cpu"))
    levels = (there - here).abs() * torch.tensor(FORM.std).view(1, 3, 1, 1) * 255
    assert (levels > 1).float().mean() < 0.002  # a pixel at a border may fall to either side of it
    assert levels.mean() < 0.05


@pytest.mark.parametrize(
    "fields",
    [
        {}, dict(position_embedding="rotary", num_register_tokens=2),
        dict(position_embedding="sincos2d", pooling="mean", use_class_token=False, gated_mlp=True),
    ],
)  # fmt: skip
def test_logits_are_those_of_the_cpu(device, tiny_model, pixels, fields):
    model, images = tiny_model(hidden_size=64, intermediate_size=128, **fields), pixels(batch=16)
    with torch.no_grad():
        expected = model(images).logits
        model.to(device)
        torch.testing.assert_close(model(images.to(device)).logits.cpu(), expected, rtol=1e-4, atol=1e-5)
        with torch.autocast("cuda", torch.bfloat16):
            rounded = model(images.to(device)).logits.float().cpu()
        torch.testing.assert_close(rounded, expected, rtol=0.05, atol=0.05)


def test_muon_steps_as_on_the_cpu(device, monkeypatch):
    monkeypatch.setattr(muon, "has_native_bf16", lambda kind: False)
    start = [torch.randn(shape) for shape in ((32, 64), (64, 32), (32, 32), (32, 64))]
    here, there = ([nn.Parameter(weight.to(kind)) for weight in start] for kind in ("cpu", device))
    for weights in (here, there):
        optimizer = muon.Muon(weights, lr=0.02)
        for _ in range(3):
            for weight in weights:
                weight.grad = weight.detach().sin()
            optimizer.step()
    for weight, wanted in zip(there, here, strict=True):
        torch.testing.assert_close(weight.cpu(), wanted, rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# Waits, graphs, memory


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_training_step_waits_for_the_device_nowhere(device, tiny_model):
    """What all processes must agree on is read once a step; that read stands in loop.py, after what is timed here."""
    model = tiny_model(position_embedding="sincos2d", drop_path_rate=0.1).to(device).train()
    optimizers = build_optimizers(model, "muon", 1e-3, 0.05, 0.999)
    average, accelerator = ModelEMA(model, 0.9), Accelerator(mixed_precision="bf16")
    images = torch.randint(0, 256, (32, 3, 16, 16), dtype=torch.uint8).pin_memory()
    labels, index = torch.randint(0, 3, (32,)).pin_memory(), torch.arange(32)
    recipe = dict(crop="simple", flip=True, auto_augment="rand", color_jitter=0.2, erase=0.25)
    try:
        for mode in ("default", "default", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            pixel_values = augmented(images.to(device, non_blocking=True), index, 0, 0, FORM, **recipe)
            targets = soft_targets(labels.to(device, non_blocking=True), 3, 0.1)
            pixel_values, targets = augment.mix(pixel_values, targets, 0.8, 1.0, 0, 0, 0)
            with torch.autocast("cuda", torch.bfloat16):
                loss = classification_loss(model(pixel_values).logits, targets)
            loss.backward()
            clip_gradients(accelerator, model, 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            average.update(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_training_evaluation_and_its_tail_are_three_graphs_and_no_more(device, tiny_model):
    from torch._dynamo.utils import counters

    model = tiny_model(position_embedding="sincos2d", drop_path_rate=0.1).to(device)
    accelerator = Accelerator()
    compile_model(model, sharded=False)
    torch._dynamo.reset()
    counters.clear()
    images = torch.zeros(4, 3, 16, 16, dtype=torch.uint8)
    evaluation = [{"images": images[: len(part)], "index": part} for part in torch.arange(10).split(4)]
    for _ in range(2):
        model.train()(torch.randn(4, 3, 16, 16, device=device)).logits.sum().backward()
        predict(model, evaluation, FORM, accelerator, 10)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 3


def test_the_batch_size_found_in_little_memory_survives_ten_steps(device, tiny_model):
    model = tiny_model(num_hidden_layers=8, hidden_size=128, intermediate_size=512).to(device).train()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, 2 * 2**30 / total))
    try:
        batch = find_batch_size(model, lambda images: model(images).logits.square().sum(), FORM, 2**15, device, 3)
        assert batch < 2**15
        average = ModelEMA(model, 0.9)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        images = torch.zeros(batch, 3, 16, 16, dtype=torch.uint8)
        for _ in range(10):
            pixel_values = augmented(images.to(device), torch.arange(batch), 0, 0, FORM, crop="simple", flip=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = classification_loss(model(pixel_values).logits, torch.full((batch, 3), 1 / 3, device=device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update(model)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def test_a_checkpoint_loads_straight_to_the_device(device, tiny_model, pixels, tmp_path):
    tiny_model(position_embedding="sincos1d").save_pretrained(tmp_path)
    loaded = HFViTForImageClassification.from_pretrained(tmp_path, device_map={"": 0}, image_size=32)
    assert {parameter.device for parameter in loaded.parameters()} == {device}
    expected = HFViTForImageClassification.from_pretrained(tmp_path, image_size=32)
    images = pixels(height=32, width=32)
    torch.testing.assert_close(loaded(images.to(device)).logits.cpu(), expected(images).logits, rtol=1e-3, atol=1e-4)

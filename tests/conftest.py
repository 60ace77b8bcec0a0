"""Every test runs offline, from the same seed and in its own Hugging Face home; tiny models are made here."""

import atexit
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import pytest


assert "transformers" not in sys.modules, "the environment below must be set before transformers is imported"
HOUSE = Path(__file__).parents[1]
HOME = tempfile.mkdtemp(prefix="hf_vit-tests-")
atexit.register(shutil.rmtree, HOME, ignore_errors=True)
# ONEDNN_MAX_CPU_ISA: a CPU with bf16 would choose it by default, and round what tests compare; those of bf16 ask for it.
# passive: threads that wait leave the cores to other tests
os.environ |= {"HF_HOME": HOME, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
os.environ |= {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_WAIT_POLICY": "passive"}
if "PYTEST_XDIST_WORKER" in os.environ:  # of several: the cores are busy without threads
    os.environ["OMP_NUM_THREADS"] = "1"


def pytest_configure(config):
    """Where there is a GPU, only the tests that are of it use it."""
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items):
    """Files that start processes come first, so that of several workers none is left with a long one at the end."""
    items.sort(key=lambda item: {"forked", "recipe", "subprocess", "torture"}.isdisjoint(vars(item.module)))


@pytest.fixture(autouse=True)
def no_network(request, monkeypatch):
    """A connection that leaves this machine fails the test, unless it is marked `network`."""
    if request.node.get_closest_marker("network"):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        return
    connect = socket.socket.connect

    def connect_here(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            pytest.fail(f"this test opened a connection to {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_here)
    monkeypatch.setattr(socket.socket, "connect_ex", connect_here)


@pytest.fixture(autouse=True)
def seed():
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_fields():
    """Architecture of the tests: 4 x 4 patches, 2 layers, 3 labels; native ViTConfig takes the same fields."""
    return dict(
        image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_labels=3
    )  # fmt: skip


@pytest.fixture(scope="session")
def tiny_config(tiny_fields):
    """tiny_config(**overrides) -> HFViTConfig."""
    from hf_vit import HFViTConfig

    return lambda **overrides: HFViTConfig(**{**tiny_fields, **overrides})


@pytest.fixture(scope="session")
def randomize():
    """randomize(model) -> the model in eval mode, no parameter of it (zero head, unit norms) left at a special value."""
    import torch

    @torch.no_grad()
    def fill(model):
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(float("norm" in name and name.endswith("weight")), 0.1)
            else:  # tokens and positions have one row; the rest are matrices, scaled to their inputs
                parameter.normal_(0, 0.5 if len(parameter) == 1 else parameter[0].numel() ** -0.5)
        return model.eval()

    return fill


@pytest.fixture
def tiny_model(tiny_config, randomize):
    """tiny_model(**overrides) -> HFViTForImageClassification with random weights everywhere, in eval mode."""
    from hf_vit import HFViTForImageClassification

    return lambda **overrides: randomize(HFViTForImageClassification(tiny_config(**overrides)))


@pytest.fixture
def pixels():
    """pixels(batch, height, width, channels) -> random pixel_values."""
    import torch

    return lambda batch=2, height=16, width=16, channels=3: torch.randn(batch, channels, height, width)


@pytest.fixture
def shrunk_to(monkeypatch):
    """The size (height, width) of each image that simplejpeg decodes."""
    import simplejpeg

    sizes, decode_jpeg = [], simplejpeg.decode_jpeg

    def noted(*args, **how):
        pixels = decode_jpeg(*args, **how)
        sizes.append(pixels.shape[:2])
        return pixels

    monkeypatch.setattr(simplejpeg, "decode_jpeg", noted)
    return sizes


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory):
    """A finished run of recipes/train.py on the embedded images: three steps of a tiny model that has a native twin."""
    import forked

    home = tmp_path_factory.mktemp("demo")
    tiny = (
        "image_size=28,patch_size=7,hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=64,"
        "position_embedding=sincos2d,pooling=mean,use_class_token=false"
    )
    train, preset = HOUSE / "recipes" / "train.py", HOUSE / "recipes" / "configs" / "demo.yaml"
    flags = ["--output_dir", "demo", "--max_train_steps=3", "--shots=50", "--config_overrides", tiny]
    forked.run([sys.executable, "-W", "ignore", train, "--config", preset, *flags], cwd=home, check=True)
    shutil.rmtree(home / "demo" / "checkpoints")
    return home / "demo"


@pytest.fixture
def accelerator():
    """accelerator(**arguments) -> Accelerator on CPU; the state that all Accelerators of a process share is new, and given back."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    def reset():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    yield lambda **arguments: Accelerator(cpu=True, **arguments)
    reset()


@pytest.fixture
def saved(tiny_model, tmp_path):
    """saved(**overrides) -> a folder with a tiny model, its labels eel, cat and dog."""
    import torch
    from transformers import ViTImageProcessorPil

    def save(dtype=torch.float32, **overrides):
        model = tiny_model(id2label=dict(enumerate(["eel", "cat", "dog"])), num_labels=3, **overrides).to(dtype)
        model.save_pretrained(tmp_path / "saved")
        side = model.config.image_size
        ViTImageProcessorPil(size={"height": side, "width": side}).save_pretrained(tmp_path / "saved")
        return tmp_path / "saved"

    return save

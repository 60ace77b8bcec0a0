"""What is chosen for a machine: by stubs of what it can do, and by counts of what a GPU would have to wait for."""

import math
import os
import platform
import subprocess
import sys
import types

import pytest
import torch
from image_data import augmented
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_vit import HFViTModel
from hf_vit.data import augment
from hf_vit.system import hardware
from hf_vit.training.inputs import Prefetcher
from hf_vit.training.model import compile_model


# ----------------------------------------------------------------------------------------------------------------------
# Choices


def test_accelerates_wish_for_the_cpu_counts_on_a_machine_with_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert hardware.device_type() == "cuda"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert hardware.device_type() == "cpu"


def test_an_apple_gpu_is_found_where_there_is_no_other(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert hardware.device_type() == "mps"
    assert hardware.pick_precision("auto", "mps") == "no"
    assert not hardware.pick_compile("auto", "mps", 10**6)


@pytest.mark.parametrize(
    ("feature", "picked", "environment"),
    [
        ("amx_bf16", "bf16", {}),
        ("avx512_bf16", "bf16", {}),
        ("avx512_f", "no", {}),
        ("avx512_bf16", "no", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}),
    ],
)
def test_bf16_on_cpu_only_where_the_processor_computes_in_it(monkeypatch, feature, picked, environment):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {feature: True})
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert hardware.pick_precision("auto", "cpu") == picked
    assert hardware.pick_precision("no", "cpu") == "no"
    assert hardware.pick_precision("bf16", "cpu") == "bf16"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")  # as ATEN_CPU_CAPABILITY=avx2 has it
    assert hardware.pick_precision("auto", "cpu") == "no"


@pytest.mark.parametrize(("processes", "threads"), [("1", 8), ("4", 2), ("16", 1)])
def test_a_launched_process_gets_its_share_of_the_cores(monkeypatch, processes, threads):
    chosen = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    hardware.use_all_cores()  # nothing launched it: one thread was asked for
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    hardware.use_all_cores()
    assert chosen == [threads]


@pytest.fixture
def gpu(monkeypatch):
    """gpu(capability=, triton=, compiler=): a CUDA device of such a kind, and what is installed beside it."""

    def pretend(capability=(9, 0), triton=True, compiler=True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: triton or None)
        monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/cc" if compiler else None)

    return pretend


@pytest.mark.parametrize("lacking", [dict(capability=(6, 1)), dict(triton=False), dict(compiler=False)])
def test_auto_compiles_long_runs_on_a_gpu_that_can_and_yes_says_what_is_lacking(gpu, lacking):
    gpu()
    assert [hardware.pick_compile("auto", "cuda", steps) for steps in (100, 10**5)] == [False, True]
    assert hardware.pick_compile("yes", "cuda", 1)
    gpu(**lacking)
    assert not hardware.pick_compile("auto", "cuda", 10**5)
    with pytest.raises(ValueError, match=r"--compile yes: torch.compile on cuda needs Triton, a C compiler"):
        hardware.pick_compile("yes", "cuda", 10**5)


@pytest.mark.parametrize(("processes", "share"), [("1", 6), ("4", 1), ("16", 1)])
def test_a_process_counts_the_cores_it_may_use_and_not_those_of_the_machine(monkeypatch, processes, share):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert hardware.own_cores() == share


def test_cores_that_slurm_has_bound_a_process_to_are_not_shared_again(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    assert hardware.own_cores() == 6


def test_a_container_has_the_cores_of_its_quota(tmp_path):
    for text, cores in (("max 100000", math.inf), ("250000 100000", 2), ("50000 100000", 1)):
        (tmp_path / "cpu.max").write_text(f"{text}\n")
        assert hardware.container_quota(tmp_path / "cpu.max") == cores
    assert hardware.container_quota(tmp_path / "none") == math.inf


# ----------------------------------------------------------------------------------------------------------------------
# What a device would wait for. The meta device has no numbers: an operation that needs one on the host fails there.

FORM = types.SimpleNamespace(height=32, width=32, mean=[0.4, 0.5, 0.6], std=[0.2, 0.3, 0.25], processor=None)
RECIPES = {
    "demo": dict(shift=2, flip=True),
    "DeiT": dict(crop="resized", flip=True, auto_augment="rand", erase=0.25),
}


class Operations(TorchDispatchMode):
    """How many operations, each about a kernel, work on tensors of the meta device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [
            value for value in torch.utils._pytree.tree_leaves((args, result)) if isinstance(value, torch.Tensor)
        ]
        views = ("view", "expand", "select", "slice", "squeeze", "detach", "unbind", "permute", "alias", "split")
        if any(tensor.is_meta for tensor in tensors) and not any(name in function.__name__ for name in views):
            self.count += 1
        return result


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_batch_is_augmented_and_mixed_without_waiting_for_the_device(recipe):
    images = torch.randint(0, 256, (64, 3, 40, 40), dtype=torch.uint8)
    index = torch.randint(0, 10**12, (64,))
    batch = augmented(images.to("meta"), index, 3, 5, FORM, **RECIPES[recipe])
    mixed, targets = augment.mix(batch, torch.rand(64, 10, device="meta"), 0.8, 1.0, 3, 5, 0)
    assert mixed.is_meta
    assert targets.is_meta


def test_erasing_takes_no_more_kernels_for_more_images():
    """The numbers of each image are drawn on the CPU: on the device they took about 57 kernels a draw."""
    counts = []
    for size in (64, 256):
        images, index = torch.empty(size, 3, 40, 40, dtype=torch.uint8, device="meta"), torch.arange(size)
        with Operations() as operations:
            augmented(images, index, 3, 5, FORM, **RECIPES["DeiT"])
        counts.append(operations.count)
    assert counts[0] == counts[1] <= 350


def test_a_forward_pass_with_fixed_positions_copies_nothing_to_the_device(tiny_config):
    """A table that is made on the CPU at each pass is a copy that waits."""
    model = HFViTModel(tiny_config(position_embedding="sincos2d")).to("meta").eval()
    images = torch.empty(2, 3, 16, 16, device="meta")
    for size in (16, 8, 16, 8):  # as a smaller first stage and an evaluation take turns
        with Operations() as operations:
            model(images[:, :, :size, :size], interpolate_pos_encoding=True)
        last = operations.count
    with Operations() as operations:
        model(images[:, :, :8, :8], interpolate_pos_encoding=True)
    assert operations.count == last


# ----------------------------------------------------------------------------------------------------------------------
# Steps, compilation and memory on a device


def test_a_batch_is_made_ahead_only_when_that_is_asked_for():
    taken = []

    def batches():
        for number in range(3):
            taken.append(number)
            yield number

    ahead = Prefetcher(batches())
    assert next(ahead) == 0
    assert taken == [0]
    ahead.prefetch()
    ahead.prefetch()  # one, and never more
    assert taken == [0, 1]
    assert [next(ahead), next(ahead)] == [1, 2]
    ahead.prefetch()  # there is none
    with pytest.raises(StopIteration):
        next(ahead)


def test_an_error_in_the_making_of_a_batch_comes_through_and_closing_closes_the_source():
    closed = []

    def batches():
        try:
            yield 0
            raise ValueError("no picture")
        finally:
            closed.append(True)

    for number in (1, 2):
        ahead = Prefetcher(batches())
        assert next(ahead) == 0
        if number == 1:
            with pytest.raises(ValueError, match="no picture"):
                ahead.prefetch()
        ahead.close()
        assert len(closed) == number


@pytest.mark.parametrize("sharded", [False, True])
def test_layers_are_compiled_one_by_one_only_where_the_model_is_sharded(tiny_model, monkeypatch, sharded):
    model, compiled = tiny_model(drop_path_rate=0.1), []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: compiled.append((module, options)))
    compile_model(model, sharded)
    expected = list(model.vit.layers) if sharded else [model]
    assert [module for module, _ in compiled] == expected
    assert all(options == {"dynamic": False} for _, options in compiled)


def test_hooks_of_fsdp_do_not_make_the_last_layer_compute_every_token(tiny_model, pixels):
    model, seen = tiny_model(), []

    def gather(module, args):
        seen.append(module)

    model.vit.layers[-1].register_forward_pre_hook(gather)
    assert model.vit(pixels(), pooled_only=True).last_hidden_state.shape[1] == 17  # somebody looks
    gather.__module__ = "torch.distributed.fsdp._fully_shard._fsdp_state"
    assert model.vit(pixels(), pooled_only=True).last_hidden_state.shape[1] == 1
    assert len(seen) == 2


KEPT = """
import resource, torch
from torch import nn
from hf_vit.system import hardware

def step():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 8))
    network(torch.randn(256, 512)).square().mean().backward()
    return [parameter.grad for parameter in network.parameters()]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(2**24)  # 64 MiB: 2^14 pages
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 2**14

before = step()
print(hardware.keep_memory())
print(all(map(torch.equal, before, step())))
print(faults() < 4)  # not once for each of the 8: the heap has grown, once or twice
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")
def test_memory_that_is_kept_is_not_filled_anew_and_changes_no_number():
    """In a process of its own: it cannot be undone."""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", KEPT], capture_output=True, text=True)
    assert result.stdout.split() == ["True"] * 3, result.stdout + result.stderr

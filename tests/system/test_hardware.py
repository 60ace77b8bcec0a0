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
from torch.utils._python_dispatch import TorchDispatchMode

from hf_vit import HFViTModel
from hf_vit.data import augment
from hf_vit.system import hardware
from hf_vit.training.inputs import Prefetcher


# ----------------------------------------------------------------------------------------------------------------------
# Choices


@pytest.mark.parametrize(
    ("cuda", "wish", "kind"), [(True, "false", "cuda"), (True, "true", "cpu"), (False, "false", "mps")]
)
def test_a_gpu_is_used_if_there_is_one_unless_accelerate_is_to_use_the_cpu(monkeypatch, cuda, wish, kind):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", wish)
    assert hardware.device_type() == kind
    assert hardware.pick_precision("auto", "mps") == "no"
    assert not hardware.pick_compile("auto", "mps", 10**6)


@pytest.mark.parametrize(
    ("feature", "most", "kernels", "picked"),
    [
        ("amx_bf16", "ALL", "AVX512", "bf16"),
        ("avx512_bf16", "ALL", "AVX512", "bf16"),
        ("avx512_f", "ALL", "AVX512", "no"),
        ("avx512_bf16", "AVX512_CORE", "AVX512", "no"),
        ("avx512_bf16", "ALL", "AVX2", "no"),  # as ATEN_CPU_CAPABILITY=avx2 has it
    ],
)
def test_bf16_on_cpu_only_where_the_processor_computes_in_it(monkeypatch, feature, most, kernels, picked):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {feature: True})
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: kernels)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", most)
    asked = {asked: hardware.pick_precision(asked, "cpu") for asked in ("auto", "no", "bf16")}
    assert asked == {"auto": picked, "no": "no", "bf16": "bf16"}


@pytest.mark.parametrize(
    ("environment", "cores"),
    [
        ({}, 6),
        (dict(LOCAL_WORLD_SIZE="4"), 1),
        (dict(LOCAL_WORLD_SIZE="16"), 1),
        (dict(LOCAL_WORLD_SIZE="4", SLURM_CPUS_PER_TASK="6"), 6),  # bound to them, and not shared out again
    ],
)
def test_a_process_has_its_share_of_the_cores_that_it_may_use(monkeypatch, environment, cores):
    chosen = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert hardware.own_cores() == cores
    hardware.use_all_cores()  # nothing launched it: one thread was asked for
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    hardware.use_all_cores()
    assert chosen == [cores]


@pytest.mark.parametrize("lacking", [(6, 1), "triton", "compiler", None])
def test_auto_compiles_long_runs_on_a_gpu_that_can_and_yes_says_what_is_lacking(monkeypatch, lacking):
    capability = lacking if isinstance(lacking, tuple) else (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if lacking == "triton" else name)
    monkeypatch.setattr("shutil.which", lambda name: None if lacking == "compiler" else "/usr/bin/cc")
    assert hardware.pick_compile("auto", "cuda", 10**5) is (lacking is None)
    assert not hardware.pick_compile("auto", "cuda", 100)
    if lacking is None:
        assert hardware.pick_compile("yes", "cuda", 1)
    else:
        with pytest.raises(ValueError, match=r"--compile yes: .*Triton, a C compiler"):
            hardware.pick_compile("yes", "cuda", 10**5)


def test_a_container_has_the_cores_of_its_quota(tmp_path):
    for text, cores in (("max 100000", math.inf), ("250000 100000", 2), ("50000 100000", 1)):
        (tmp_path / "cpu.max").write_text(f"{text}\n")
        assert hardware.container_quota(tmp_path / "cpu.max") == cores
    assert hardware.container_quota(tmp_path / "none") == math.inf


# ----------------------------------------------------------------------------------------------------------------------
# What a device would wait for. The meta device has no numbers: an operation that needs one on the host fails there.

FORM = types.SimpleNamespace(height=32, width=32, mean=[0.4, 0.5, 0.6], std=[0.2, 0.3, 0.25], processor=None)
RECIPE = dict(crop="resized", flip=True, auto_augment="rand", erase=0.25)


class Operations(TorchDispatchMode):
    """How many operations there are."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def operations_of(call, *args, **how) -> int:
    with Operations() as operations:
        call(*args, **how)
    return operations.count


def test_a_batch_is_augmented_and_mixed_without_waiting_for_the_device():
    images = torch.randint(0, 256, (64, 3, 40, 40), dtype=torch.uint8)
    index = torch.randint(0, 10**12, (64,))
    batch = augmented(images.to("meta"), index, 3, 5, FORM, **RECIPE)
    mixed, targets = augment.mix(batch, torch.rand(64, 10, device="meta"), 0.8, 1.0, 3, 5, 0)
    assert mixed.is_meta
    assert targets.is_meta


def test_erasing_takes_no_more_kernels_for_more_images():
    """The numbers of each image are drawn on the CPU: on the device they took about 57 kernels a draw."""
    few, many = (
        operations_of(
            augmented,
            torch.empty(size, 3, 40, 40, dtype=torch.uint8, device="meta"),
            torch.arange(size),
            *(3, 5, FORM),
            **RECIPE,
        )
        for size in (64, 256)
    )
    assert many < few + 9


def test_a_forward_pass_with_fixed_positions_copies_nothing_to_the_device(tiny_config):
    """A table that is made on the CPU at each pass is a copy that waits."""
    model = HFViTModel(tiny_config(position_embedding="sincos2d")).to("meta").eval()
    images = torch.empty(2, 3, 16, 16, device="meta")
    *_, in_turns, again = (  # as a smaller first stage and an evaluation take turns
        operations_of(model, images[:, :, :size, :size], interpolate_pos_encoding=True) for size in (16, 8, 16, 8, 8)
    )
    assert in_turns == again


# ----------------------------------------------------------------------------------------------------------------------
# Steps, compilation and memory on a device


def test_one_batch_is_made_ahead_when_that_is_asked_for_and_closing_closes_the_source():
    taken = []

    def batches():
        try:
            for number in range(3):
                taken.append(number)
                yield number
            raise ValueError("no picture")
        finally:
            taken.append("closed")

    ahead = Prefetcher(batches())
    assert next(ahead) == 0
    assert taken == [0]
    ahead.prefetch()
    ahead.prefetch()  # one, and never more
    assert taken == [0, 1]
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(ValueError, match="no picture"):
        ahead.prefetch()
    assert taken == [0, 1, 2, "closed"]
    other = Prefetcher(batches())
    next(other)
    other.close()
    assert taken[-1] == "closed"


def test_hooks_of_fsdp_do_not_make_the_last_layer_compute_every_token(tiny_model, pixels):
    model, gather = tiny_model(), lambda module, args: None
    model.vit.layers[-1].register_forward_pre_hook(gather)
    assert model.vit(pixels(), pooled_only=True).last_hidden_state.shape[1] == 17  # somebody looks
    gather.__module__ = "torch.distributed.fsdp._fully_shard._fsdp_state"
    assert model.vit(pixels(), pooled_only=True).last_hidden_state.shape[1] == 1


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

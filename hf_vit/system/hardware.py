"""What this machine can do, and what is chosen for it: device, precision, compilation, threads, workers, memory."""

import ctypes
import importlib.util
import math
import os
import re
import shutil
import sys
from pathlib import Path

import psutil
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, parse_flag_from_env

from hf_vit.system.errors import UserError


def device_type() -> str:
    """The kind of device that Accelerate is going to use: "cuda", "mps" or "cpu"."""
    if parse_flag_from_env("ACCELERATE_USE_CPU"):
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def has_native_bf16(device_type: str) -> bool:
    """Whether devices of this type ("cpu", "cuda", "mps", ...) multiply bfloat16 in hardware.

    On CPU that takes AMX or AVX512-BF16, which `ONEDNN_MAX_CPU_ISA` and `ATEN_CPU_CAPABILITY` must not have switched off:
    without them bfloat16 is emulated, many times slower than float32. PyTorch cannot tell the Apple GPUs that emulate it (M1,
    M2) from those that do not, so MPS counts as without.
    """
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type != "cpu" or not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()  # what oneDNN may use, such as AVX2 or AVX512_CORE_AMX
    features = torch.cpu.get_capabilities() if re.search("BF16|FP16|AMX|AVX10|ALL|DEFAULT", most) else {}
    return bool(features.get("amx_bf16") or features.get("avx512_bf16"))


def pick_precision(asked: str, device_type: str) -> str:
    """ "auto" -> "bf16" where the hardware computes in it, else "no" (or "fp16" on an older GPU).

    Very narrow models lose by bf16 everywhere: their presets say "no".

    Raises:
        ValueError: for "fp16" on a CPU, where Accelerate has none.
    """
    if asked == "fp16" and device_type == "cpu":
        raise UserError(
            "--mixed_precision fp16 needs a GPU, and this computes on the CPU: leave it out, or pass --mixed_precision no"
        )
    if asked != "auto":
        return asked
    if has_native_bf16(device_type):
        return "bf16"
    return "fp16" if device_type == "cuda" else "no"


# Compiling a ViT takes about as long as some thousand steps save by it.
FEWEST_COMPILED_STEPS = 2000


def can_compile(device_type: str) -> bool:
    """Whether `torch.compile` has what it needs: Triton, a C compiler and a GPU of compute capability 7.0 on CUDA."""
    if device_type != "cuda":
        return device_type == "cpu"
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    has_triton = importlib.util.find_spec("triton") is not None
    return has_triton and compiler is not None and torch.cuda.get_device_capability() >= (7, 0)


def pick_compile(asked: str, device_type: str, steps: int) -> bool:
    """ "auto" -> compile long runs on CUDA; on CPU compiling takes longer than it saves.

    Raises:
        ValueError: if "yes" is asked for, and this machine cannot compile.
    """
    if asked == "yes" and not can_compile(device_type):
        raise UserError(
            f"--compile yes: torch.compile on {device_type} needs Triton, a C compiler and a GPU of compute capability 7.0 or "
            "more; leave it out to train uncompiled"
        )
    if asked == "auto":
        return device_type == "cuda" and steps >= FEWEST_COMPILED_STEPS and can_compile(device_type)
    return asked == "yes"


def own_cores() -> int:
    """The cores that this process may use: of those that the system leaves to it, its share beside the other processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(cores, container_quota())
    if cores <= int(os.environ.get("SLURM_CPUS_PER_TASK", "0")):  # srun has bound each process to cores of its own
        return cores
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def container_quota(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """The cores that a container may keep busy (cgroup v2), at least 1; infinite without a limit."""
    quota, _, period = file.read_text().strip().partition(" ") if file.is_file() else ("max", "", "")
    return math.inf if quota == "max" else max(1, int(quota) // int(period))


def peak_memory(device: torch.device) -> dict[str, str]:
    """The most memory that tensors took on a CUDA device so far, for a progress line; nothing elsewhere."""
    return {"memory": f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB"} if device.type == "cuda" else {}


def launched() -> bool:
    """Whether `accelerate launch` or torchrun started this process."""
    return bool({"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & set(os.environ))


def use_all_cores():
    """Give a process on CPU its share of the cores: a launcher leaves it one thread, at about half the speed.

    Where there was no launcher, one thread is what OMP_NUM_THREADS asks for, and stays.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if launched() and torch.get_num_threads() == 1:
        torch.set_num_threads(max(1, min((psutil.cpu_count(logical=False) or 1) // processes, own_cores())))


def keep_memory() -> bool:
    """Let a process on CPU keep the memory it frees, and say whether that can be had (of glibc alone).

    Else each large tensor is a mapping of its own, which the kernel fills with zeros page by page, every step anew.
    """
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # mallopt(3)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def shard_on_cpu(accelerator):
    """Where FSDP is asked for on CPU, have it: Accelerate (1.15) then trains unsharded, without a word."""
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if asked and accelerator.distributed_type == DistributedType.MULTI_CPU:
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP


def keep_float32(accelerator):
    """Let FSDP hold and exchange float32 alone: autocast then computes in mixed precision what it does under DDP.

    The policy of Accelerate rounds every input and output of a sharded module: noise, targets, and tables of positions too.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        accelerator.state.fsdp_plugin.mixed_precision_policy = None

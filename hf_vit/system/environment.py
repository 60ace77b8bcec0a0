"""Where a run took place: commit, hardware and versions."""

import contextlib
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from hf_vit.system.hardware import has_native_bf16


PACKAGES = ("torch", "transformers", "accelerate", "datasets", "evaluate", "huggingface_hub", "safetensors", "hf_vit")


def environment_info(device_type: str, processes: int, precision: str) -> dict:
    """Commit, hardware and versions of this run, as results.json holds them."""
    chip = torch.cuda.get_device_name() if device_type == "cuda" else processor_name()
    kind = torch.backends.cpu.get_cpu_capability() + (", bf16" if has_native_bf16("cpu") else "")
    cores = f", {os.cpu_count()} cores, {kind}" if device_type == "cpu" else ""
    return {
        "commit": commit_of(Path(__file__).parents[2]),
        "hardware": f"{processes} x {chip}{cores}" if processes > 1 else f"{chip}{cores}",
        "mixed_precision": precision,
        "versions": {"python": platform.python_version(), **_versions()},
    }


def commit_of(clone: Path) -> str | None:
    """The commit of a clone, and whether its files differ; None of an installed package, and without git."""
    if not (clone / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty= with local changes"]
    return subprocess.run(command, cwd=clone, capture_output=True, text=True).stdout.strip() or None


def _versions() -> dict[str, str]:
    """Of the packages that are installed: a copy of this repository runs without being so."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def processor_name() -> str:
    name = torch.cpu.get_capabilities().get("cpu_name") or platform.machine()
    return f"{name} CPU" if "cpu" not in name.lower() else name

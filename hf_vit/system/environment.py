"""Where a run took place: commit, hardware and versions."""

import contextlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from hf_vit.system.hardware import has_native_bf16


PACKAGES = ("torch", "transformers", "accelerate", "datasets", "evaluate", "huggingface_hub", "safetensors", "hf_vit")


def environment_info(device_type: str, processes: int, precision: str) -> dict:
    """Commit, hardware and versions of this run, as results.json holds them."""
    repository = Path(__file__).parents[2]
    git = lambda *command: subprocess.run(
        ["git", *command], cwd=repository, capture_output=True, text=True
    ).stdout.strip()
    commit = None
    with contextlib.suppress(FileNotFoundError):  # git itself, on a small machine
        if git("rev-parse", "--show-toplevel") == str(repository):  # and no repository around an installed package
            commit = git("rev-parse", "--verify", "--quiet", "HEAD") or None
        if commit and git("status", "--porcelain", "--untracked-files=no"):
            commit += " with local changes"
    chip = torch.cuda.get_device_name() if device_type == "cuda" else processor_name()
    kind = torch.backends.cpu.get_cpu_capability() + (", bf16" if has_native_bf16("cpu") else "")
    cores = f", {os.cpu_count()} cores, {kind}" if device_type == "cpu" else ""
    return {
        "commit": commit,
        "hardware": f"{processes} x {chip}{cores}" if processes > 1 else f"{chip}{cores}",
        "mixed_precision": precision,
        "versions": {"python": platform.python_version(), **_versions()},
    }


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

"""Checkpoints: the state of a run to a folder and back, and the best weights so far."""

import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.utils import logging

from hf_vit.system.files import checksummed_dir, sync, verify_checksums


logger = logging.get_logger(__name__)

KEPT = 2  # checkpoints: a damaged one has one before it


def list_checkpoints(run: Path, kind: str = "step") -> list[Path]:
    """The checkpoints of a run, or its `kind` "best", the oldest first."""
    return sorted(run.glob(f"checkpoints/{kind}-*"), key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name.partition("-")[2])


def newest_checkpoint(run: Path, kind: str = "step") -> Path | None:
    """The newest intact one, None if there is none; those that are broken are named in a warning."""
    for folder in reversed(list_checkpoints(run, kind)):
        try:
            verify_checksums(folder)
            return folder
        except ValueError as error:
            logger.warning(f"{folder} is broken and left out: {error}")
    return None


def full_tensors(tensors: dict[str, torch.Tensor], wanted: bool = True) -> dict[str, torch.Tensor]:
    """Named tensors, unsharded and on CPU, if `wanted`; all processes must call it, because shards are gathered."""
    whole = {}
    for name, tensor in tensors.items():
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if wanted:
            whole[name] = tensor.detach().cpu().contiguous()
    return whole


def as_sharded(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy of a whole tensor on the device of `like`, sharded as that is."""
    value = value.to(like.device, copy=True)  # not the memory-mapped file, which will be deleted
    if isinstance(like, DTensor) and value.shape == like.shape:
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value


def frozen_digest(model) -> str | None:
    """SHA-256 of the frozen weights, by the order of their names; None if all are trained. Embeddings are left out: where they were
    resampled, the last bit is the machine's."""
    named = {name: weight for name, weight in model.named_parameters() if not weight.requires_grad}
    if not named:
        return None
    found = hashlib.sha256()
    for name in sorted(name for name in named if "embeddings" not in name):
        found.update(name.encode())
        found.update(named[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def save_checkpoint(run: Path, counters: dict, tensors: dict[str, dict[str, torch.Tensor]]):
    """Write `checkpoints/step-N`, N being `counters["step"]`, and delete all but the last `KEPT`; OSError on a full disk."""
    step = counters["step"]
    needed = sum(value.nbytes for part in tensors.values() for value in part.values())
    if (run / "metrics.jsonl").exists():
        sync(run / "metrics.jsonl")  # a run that goes on from here will not write its lines again
    with checksummed_dir(run / "checkpoints" / f"step-{step:06d}", needed) as aside:
        for name, part in tensors.items():
            save_file(part, aside / f"{name}.safetensors")
        (aside / "state.json").write_text(json.dumps(counters))
    for old in [folder for folder in list_checkpoints(run) if step_of(folder) <= step][:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def save_best(run: Path, step: int, scores: dict, needed: int, write_model):
    """Write `checkpoints/best-N`, a model folder with its scores, and delete the previous best.

    `write_model` is called with the folder to write the model to, which takes `needed` bytes.
    """
    folder = run / "checkpoints" / f"best-{step:06d}"
    with checksummed_dir(folder, needed) as aside:
        write_model(aside)
        (aside / "scores.json").write_text(json.dumps(scores))
    for old in list_checkpoints(run, "best"):
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)


def load_best(run: Path) -> tuple[Path, dict] | None:
    """The folder and the scores that `save_best` wrote last, or None."""
    folder = newest_checkpoint(run, "best")
    return folder and (folder, json.loads((folder / "scores.json").read_text()))

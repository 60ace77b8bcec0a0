"""Checkpoints: the state of a run to a folder and back, and the best weights so far.

The rest of a run is decided by its weights, their average, the optimizers' state and a few counters. Order, augmentation and the
random numbers of a step are functions of (seed, step) and need not be saved.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from accelerate.utils import broadcast, broadcast_object_list
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.utils import logging

from hf_vit.system.errors import UserError
from hf_vit.system.escapes import printable
from hf_vit.system.files import checksummed_dir, sync, verify_checksums


logger = logging.get_logger(__name__)

KEPT = 2  # checkpoints: a damaged one has one before it
TENSORS = ("average", "model", "optimizer")  # the files of a checkpoint, beside state.json


def list_checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    return numbered_folders(run, "step")


def numbered_folders(run: Path, kind: str) -> list[Path]:
    folders = [folder for folder in run.glob(f"checkpoints/{kind}-*") if folder.name.partition("-")[2].isdigit()]
    return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name.partition("-")[2])


def newest_checkpoint(run: Path) -> Path | None:
    """The newest intact checkpoint, None if there is none, ValueError if all are broken; others are named in a warning."""
    broken = []
    for folder in reversed(list_checkpoints(run)):
        try:
            verify_checksums(folder)
            for one in broken:
                logger.warning(f"a broken checkpoint is left out, {one}")
            return folder
        except ValueError as error:
            broken.append(f"{folder}: {error}")
    if broken:
        raise UserError(
            f"no checkpoint of {run} can be read ({'; '.join(broken)}): pass --overwrite true to begin anew"
        )
    return None


def full_tensors(tensors: Iterable[tuple[str, torch.Tensor]], wanted: bool) -> dict[str, torch.Tensor]:
    """Named tensors, unsharded and on CPU, if `wanted`; all processes must call it, because shards are gathered."""
    whole = {}
    for name, tensor in tensors:
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if wanted:
            whole[name] = tensor.detach().cpu().contiguous()
    return whole


def gather_weights(model, wanted: bool = True) -> dict[str, torch.Tensor]:
    """All weights of a model by name, unsharded, on CPU; all processes must call it, whether they want them or not."""
    return full_tensors(model.state_dict().items(), wanted)


def named_parameters(optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Its parameters with their names, group by group, as `parameter_groups` gave them."""
    for group in optimizer.param_groups:
        yield from zip(group["names"], group["params"], strict=True)


def saved_weights(model) -> dict[str, torch.Tensor]:
    """The weights that a checkpoint holds: all but the frozen ones, which the base model has."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


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


def gather_state(model, optimizers, average=None, wanted: bool = True) -> dict[str, dict[str, torch.Tensor]]:
    """{"model": ..., "optimizer": ..., "average": ...}: tensors by name, unsharded, on CPU; all processes must call it.

    The optimizers' state is named `parameter.key`, such as `classifier.weight.exp_avg`, whatever the number of processes.
    """
    tensors = {"model": full_tensors(saved_weights(model).items(), wanted)}
    states = (
        (f"{name}.{key}", value)
        for optimizer in optimizers
        for name, parameter in named_parameters(optimizer)
        for key, value in optimizer.state[parameter].items()
    )
    tensors["optimizer"] = full_tensors(states, wanted)
    if average is not None:
        with average.applied(model):
            # Copies: on CPU these tensors are the model's own, which go back to what they were.
            averaged = full_tensors(saved_weights(model).items(), wanted)
            tensors["average"] = {name: value.clone() for name, value in averaged.items()}
    return tensors


def restore_state(tensors: dict | None, model, optimizers, average, accelerator):
    """Restore what `gather_state` returned, from the main process to all, sharded as the model is now.

    ValueError on the main process if the tensors are not those of this model.
    """
    if tensors is not None:
        _check_tensors(tensors, model, average is not None)
    shapes = [tensors and {file: shapes_and_types(part) for file, part in tensors.items()}]
    broadcast_object_list(shapes)
    if tensors is None:  # not the main process: what is received has the shape and type of this
        tensors = {
            file: {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in part.items()}
            for file, part in shapes[0].items()
        }

    def received(value, like):
        value = value.to(like.device, copy=True)  # not the memory-mapped file, which will be deleted
        if isinstance(like, DTensor) and value.shape == like.shape:
            return distribute_tensor(value, like.device_mesh, like.placements)
        return broadcast(value) if accelerator.num_processes > 1 else value

    @torch.no_grad()
    def fill(part):
        for name, like in saved_weights(model).items():
            like.copy_(received(part[name], like))

    if average is not None:
        fill(tensors["average"])
        average.copy_from(model)
    fill(tensors["model"])
    for optimizer in optimizers:
        states = {}
        for index, (name, parameter) in enumerate(named_parameters(optimizer)):
            own = {key: value for key, value in tensors["optimizer"].items() if key.rpartition(".")[0] == name}
            states[index] = {key.rpartition(".")[2]: received(value, parameter) for key, value in own.items()}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": states})


def shapes_and_types(tensors: dict[str, torch.Tensor]) -> dict[str, tuple]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _check_tensors(tensors: dict, model, averaged: bool):
    own = shapes_and_types(saved_weights(model))
    for part in ("model", "average") if averaged else ("model",):
        found = shapes_and_types(tensors.get(part, {}))
        if found != own:
            other = min(name for name in {*found, *own} if found.get(name) != own.get(name))
            raise UserError(
                f"{part}.safetensors of the checkpoint is not of this model: {printable(other)} is {found.get(other)} there, and "
                f"{own.get(other)} here"
            )


def save_checkpoint(run: Path, state: dict):
    """Write `checkpoints/step-N`, N being `state["step"]`, and delete all but the last `KEPT`; OSError on a full disk.

    Args:
        state: as `TrainState.state_dict` returns it.
    """
    tensors = {name: state[name] for name in TENSORS if name in state}
    counters = {name: value for name, value in state.items() if name not in tensors}
    folder = run / "checkpoints" / f"step-{state['step']:06d}"
    needed = sum(value.nbytes for part in tensors.values() for value in part.values())
    if (run / "metrics.jsonl").exists():
        sync(run / "metrics.jsonl")  # a run that goes on from here will not write its lines again
    with checksummed_dir(folder, needed) as aside:
        for name, part in tensors.items():
            save_file(part, aside / f"{name}.safetensors")
        (aside / "state.json").write_text(json.dumps(counters))
    earlier = [other for other in list_checkpoints(run) if step_of(other) < state["step"]]
    for old in earlier[: max(0, len(earlier) - KEPT + 1)]:
        shutil.rmtree(old, ignore_errors=True)


def save_best(run: Path, step: int, scores: dict, needed: int, write_model):
    """Write `checkpoints/best-N`, a model folder with its scores, and delete the previous best.

    `write_model` is called with the folder to write the model to, which takes `needed` bytes.
    """
    folder = run / "checkpoints" / f"best-{step:06d}"
    with checksummed_dir(folder, needed) as aside:
        write_model(aside)
        (aside / "scores.json").write_text(json.dumps(scores))
    for old in numbered_folders(run, "best"):
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)


def load_best(run: Path) -> tuple[Path, dict] | None:
    """The folder and the scores that `save_best` wrote last, or None; a broken one is named in a warning."""
    for folder in reversed(numbered_folders(run, "best")):
        try:
            verify_checksums(folder)
            return folder, json.loads((folder / "scores.json").read_text())
        except ValueError as error:
            logger.warning(f"the best weights so far are lost, {folder}: {error}")
    return None

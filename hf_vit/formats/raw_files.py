"""The tensors of a file, read so that nothing in it can run."""

import argparse
from zipfile import ZipFile

import numpy as np
import torch
from safetensors.torch import load_file


def read_tensors(file) -> tuple[dict[str, torch.Tensor], bool]:
    """All tensors of a file, whatever it is called, and whether it is a pickle; tensors of safetensors stay on disk until they are used.

    Safetensors, npz without pickled objects, and torch.load with weights_only. Names within the dicts of a pickle are
    joined by "/", as in "teacher/module.backbone.cls_token".
    """
    with open(file, "rb") as opened:
        start = opened.read(9)
    if start[8:] == b"{":
        return load_file(file), False
    if start[:2] == b"PK":  # torch.save writes zip files too
        with ZipFile(file) as archive:
            names = archive.namelist()
        if all(name.endswith(".npy") for name in names):
            return read_npz(file), False
        if any(name.endswith("/constants.pkl") for name in names):
            raise ValueError(
                f"{file} is TorchScript, as OpenAI publishes CLIP: code, which is not run. Where you trust it, save "
                "torch.jit.load(file).state_dict() as safetensors, and load that with hidden_act='quick_gelu' and dtype='float32'"
            )
    with torch.serialization.safe_globals([argparse.Namespace]):  # which DINO and MAE save beside the weights
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except (KeyError, IndexError, TypeError, AttributeError, UnicodeDecodeError) as error:  # of the unpickler
            raise ValueError(f"{file} is no checkpoint: neither safetensors, npz nor a file of torch.save") from error
    return flatten("", content), True


def flatten(name: str, content) -> dict[str, torch.Tensor]:
    """The tensors in dicts of dicts by their paths."""
    if not isinstance(content, dict):
        return {name: content} if isinstance(content, torch.Tensor) else {}
    path = f"{name}/" if name else ""
    return {inner: tensor for key in content for inner, tensor in flatten(f"{path}{key}", content[key]).items()}


def read_npz(file) -> dict[str, torch.Tensor]:
    tensors = {}
    with np.load(file, allow_pickle=False) as archive:
        for name in archive.files:
            try:
                array = archive[name]
                is_bfloat16 = array.dtype.kind == "V"  # numpy has no such type and saves its bytes
                tensor = torch.from_numpy(array.view(np.int16) if is_bfloat16 else array)
            except (TypeError, ValueError) as error:  # text or objects
                raise ValueError(f"{file} cannot be read: {name} holds more than numbers") from error
            tensors[name.replace("/", ".")] = tensor.view(torch.bfloat16) if is_bfloat16 else tensor
    return tensors

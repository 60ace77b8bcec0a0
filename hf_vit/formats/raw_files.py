"""Raw files, without a config.json: reading their tensors safely, and finding out what network they hold."""

import argparse
import re
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import torch
from safetensors.torch import load_file

from hf_vit.formats.families import FAMILIES
from hf_vit.model.configuration_hf_vit import HFViTConfig
from hf_vit.model.loading import CheckpointSource
from hf_vit.model.resizing import INPUT_FIELDS


# Where training scripts put the weights in what they save, the averaged ones first.
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "teacher", "target_encoder")


def read_raw(file, source: CheckpointSource, overrides: dict) -> tuple[HFViTConfig, dict[str, torch.Tensor]]:
    """The config as the file has it, with those overrides that are no sizes of images, and its tensors; `source` is filled in."""
    if not Path(file).is_file():
        raise ValueError(f"there is no file {file}; from_checkpoint takes a file, from_pretrained a folder or a repo")
    tensors = read_tensors(file)
    raw_formats = {name: family for name, family in FAMILIES.items() if family.signature}
    found = [
        (tensor.removesuffix(family.signature), name)
        for name, family in raw_formats.items()
        for tensor in tensors
        if tensor.endswith(family.signature)
    ]
    if not found:
        raise ValueError(
            f"{file} holds no ViT that hf_vit knows: its tensors are {', '.join(list(tensors)[:3]) or 'none'}, ...; it reads "
            f"{', '.join(family.title for family in raw_formats.values())}. A file of transformers needs its config.json "
            "beside it: give the folder to from_pretrained"
        )
    prefix, source.family_name = choose_copy(found)
    outside = sorted({name.split(".")[0] for name in tensors if not name.startswith(prefix)})
    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if not source.is_classifier:  # the tanh layer of JAX heads is what transformers calls the pooler
        tensors = {re.sub(r"^pre_logits\.(?=kernel|bias)", "pooler.dense.", name): t for name, t in tensors.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    family = FAMILIES[source.family_name]
    try:
        fields = family.infer_fields(shapes, overrides, source.is_classifier, source.notes)
    except (KeyError, IndexError, StopIteration) as error:
        raise ValueError(
            f"{file} begins like a {source.family_name} checkpoint but lacks {str(error) or 'a layer'}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{file}, read as {source.family_name}: {error}") from error
    if outside:
        source.notes.append(f"left out {', '.join(outside)}, outside {prefix.rstrip('.')}")
    if {"num_labels", "id2label"} & set(overrides):
        fields.pop("num_labels", None)
    as_stored = INPUT_FIELDS if overrides.get("dtype") != "auto" else (*INPUT_FIELDS, "dtype")
    fields |= {name: value for name, value in overrides.items() if name not in as_stored}
    return HFViTConfig(**fields), tensors


def choose_copy(found: list[tuple[str, str]]) -> tuple[str, str]:
    """Of the networks in a file, (prefix, family) each, an average or a teacher, else the first that is no optimizer's moment."""
    networks = [each for each in found if not each[0].startswith("opt.") or each[0].startswith("opt.target.")] or found
    words = ("ema", "teacher", "target")  # big_vision keeps the weights under opt.target, beside the moments
    averaged = [each for word in words for each in networks if word in each[0]]
    return (averaged or networks)[0]


def read_tensors(file) -> dict[str, torch.Tensor]:
    """All tensors of a file, whatever it is called, and nothing that could run.

    safetensors, npz without pickled objects, and torch.load with weights_only.
    """
    with open(file, "rb") as opened:
        start = opened.read(9)
    if start[8:] == b"{":
        return load_file(file)
    if start[:2] == b"PK":  # torch.save writes zip files too
        with ZipFile(file) as archive:
            is_npz = all(name.endswith(".npy") for name in archive.namelist())
        if is_npz:
            return read_npz(file)
    return read_pickle(file)


def read_npz(file) -> dict[str, torch.Tensor]:
    tensors = {}
    with np.load(file, allow_pickle=False) as archive:
        for name in archive.files:
            try:
                array = archive[name]
            except ValueError as error:
                raise ValueError(f"{file} cannot be read: {name} holds more than numbers ({error})") from error
            if array.dtype.kind in "USO":
                raise ValueError(f"{file} cannot be read: {name} holds text, where numbers were wanted")
            is_bfloat16 = array.dtype.kind == "V"  # numpy has no such type and saves its bytes
            tensor = torch.from_numpy(array.view(np.int16) if is_bfloat16 else array)
            tensors[name.replace("/", ".")] = tensor.view(torch.bfloat16) if is_bfloat16 else tensor
    return tensors


def read_pickle(file) -> dict[str, torch.Tensor]:
    with torch.serialization.safe_globals([argparse.Namespace]):  # which DINO and MAE save beside the weights
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except (KeyError, IndexError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is no checkpoint: neither safetensors, npz nor a file of torch.save") from error
    while isinstance(content, dict):
        inner = [content[key] for key in WRAPPERS if isinstance(content.get(key), dict) and content[key]]
        if not inner:
            break
        content = inner[0]
    if not isinstance(content, dict):
        raise ValueError(
            f"{file} holds a {type(content).__name__}; wanted a dict of tensors, such as model.state_dict()"
        )
    return {name: tensor for name, tensor in content.items() if isinstance(tensor, torch.Tensor)}

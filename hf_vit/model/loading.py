"""Strict loading: every difference between checkpoint and model is explained in one log line, or is an error.

`from_pretrained` runs the parts of this file from top to bottom:

    the adapter     of PEFT: its base is loaded by these same steps, and the adapter goes on top
    the checkpoint  a public format is read first, as a value: its config, and its tensors under our names (hf_vit/formats, which
                    a copy of this file on the Hub does without); our own format goes to transformers as it is
    the model       `PreTrainedModel.from_pretrained` builds and fills it
    what differs    `check_loading_info` accepts a new head and what a model does not use; all else is one error that names it
    the end         `finish_loading` adapts the weights to other images (resizing.py) and logs what was done
"""

import copy
import json
import logging as python_logging
import os
import pickle
import re
from contextlib import contextmanager, suppress
from pathlib import Path
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError
from transformers import PreTrainedConfig
from transformers.utils import logging
from transformers.utils.peft_utils import find_adapter_config_file

from .configuration_hf_vit import AUTO_MAP, AUTOENCODER_FIELDS, public_formats, read_public
from .resizing import INPUT_FIELDS


logger = logging.get_logger(__name__)
FROM_HUB = ("cache_dir", "revision", "token", "local_files_only")  # keywords that say how a repository is read
ONLY_FROM_HUB = (*FROM_HUB, "force_download", "subfolder", "variant", "adapter_kwargs")
# Parts beside the encoder, which a model without them does not use.
HEADS = ("classifier", "pre_logits", "pooler", "attention_pooling", "decoder")


class LoadingMixin:
    """`from_pretrained`, `from_checkpoint`, `save_pretrained` and `to_transformers` of every model."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, output_loading_info=False, **kwargs):
        """Load our own repos and every public format in `hf_vit/formats`; arguments as in transformers.

        `image_size=`, `patch_size=` and `num_channels=` may differ from the checkpoint: its weights are then adapted, see
        `resize_input`. So may `num_labels=`, and the head be absent: it alone is then reset. `ignore_mismatched_sizes=True` resets
        every tensor of another shape; a subclass with a head of its own starts from any base checkpoint. One log line says so.

        Raises:
            ValueError: if any other tensor is missing, unexpected, duplicate, mis-shaped or not finite (see `non_finite`):
                all of them by name; or if a file is truncated, or holds more than tensors.
        """
        path = pretrained_model_name_or_path
        if path is not None and os.path.isfile(path):
            raise ValueError(f"{path} is a file: from_pretrained takes a folder or a repo, from_checkpoint a file")
        kwargs.pop("trust_remote_code", None)  # this class is the code; transformers would warn
        found = kwargs.pop("adapter_kwargs", None) or {}  # of an Auto class, which has looked for an adapter
        adapter = found.get("_adapter_model_path", path)
        kwargs |= {name: found[name] for name in FROM_HUB if found.get(name) is not None}
        if (base := base_of_adapter(adapter, kwargs)) is not None:
            model, info = load_with_adapter(cls, base, adapter, *model_args, **kwargs)
        else:
            with readable_errors(path):
                checkpoint = None if path is None else read_public(path, cls.is_classifier, kwargs)
                model, info = load(super().from_pretrained, cls, path, checkpoint, *model_args, **kwargs)
        return (model, info) if output_loading_info else model

    @classmethod
    def from_checkpoint(cls, file, **overrides):
        """Load one raw file without a config: Google's JAX `.npz`, timm, torchvision, OpenCLIP, original DINO to DINOv3, DeiT, MAE.

        Args:
            file: path of an `.npz`, `.safetensors`, `.pth`, `.pt` or `.bin` file.
            overrides: fields of HFViTConfig. The shapes of the tensors give most of them. The rest is assumed as the format
                has it, named in the log line, and may be overridden (`num_attention_heads=`, `hidden_act=`, `pooling=`,
                `dtype=`). `image_size=`, `patch_size=` and `num_channels=` adapt the weights; where the positions make no
                square grid, `image_size=` says what grid they make.

        Raises:
            ValueError: for an unknown format, and as `from_pretrained`.
        """
        if not os.path.isfile(file):
            raise ValueError(
                f"there is no file {file}; from_checkpoint takes a file, from_pretrained a folder or a repo"
            )
        with readable_errors(file):
            checkpoint = public_formats("read raw files").read(file, cls.is_classifier, overrides)
            model, _ = load(super().from_pretrained, cls, file, checkpoint, **overrides)
        return model

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As in transformers; the folder's config.json then names every public class for the Auto classes."""
        auto_map = getattr(self.config, "auto_map", None) or {}
        if self._auto_class is not None and is_ours(self):
            # The file of the masked autoencoder goes with its class alone, which adds it again.
            self.config.auto_map = {
                name: auto_map[name] for name in auto_map if name != "AutoModelForPreTraining"
            } | AUTO_MAP
        elif auto_map:  # of the checkpoint that a subclass started from, whose code stays behind
            own = lambda name: name == "AutoConfig" or auto_map[name] != AUTO_MAP.get(name)
            self.config.auto_map = {name: code for name, code in auto_map.items() if own(name)}
        super().save_pretrained(save_directory, *args, **kwargs)

    def to_transformers(self):
        """The native transformers model with the same tokens and logits, such as a ViTForImageClassification.

        Weights are copied. The pooled vector is the same too where the native model has one. What matters only in training
        (dropout, stochastic depth) is kept as far as the native config has a field for it.

        Raises:
            ValueError: naming the fields that no native architecture can express.
        """
        return public_formats("convert models").to_transformers(self)


def base_of_adapter(path, kwargs) -> str | None:
    """The base checkpoint that a PEFT adapter must name; None if `path` is none, or has a whole model beside it."""
    if path is None or os.path.isfile(os.path.join(path, "model.safetensors")):
        return None
    file = find_adapter_config_file(path, **{name: kwargs[name] for name in FROM_HUB if name in kwargs})
    if file is None:
        return None
    try:
        base = json.loads(Path(file).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):  # no JSON, no such key, no dict
        base = None
    if not isinstance(base, str) or not base:
        raise ValueError(f"base_model_name_or_path in the adapter_config.json of {path} must be a Hub id or folder")
    return base


def load_with_adapter(cls, base: str, adapter, *model_args, **kwargs):
    """The base model, of the config beside the adapter if there is one, with the adapter on top.

    transformers itself would load the base without the rules of its format, and leave it random without an error.
    """
    from_hub = {name: kwargs.pop(name) for name in FROM_HUB if name in kwargs}
    fields = [name for name in kwargs if name in cls.config_class.__dataclass_fields__ and name != "dtype"]
    if kwargs.get("config") is None:
        with suppress(OSError):  # PEFT alone saves no config.json
            asked = {name: kwargs[name] for name in fields}
            kwargs["config"] = cls.config_class.from_pretrained(adapter, **from_hub, **asked)
            kwargs = {name: value for name, value in kwargs.items() if name not in fields}
    of_base = {name: value for name, value in from_hub.items() if name != "revision"}  # the revision is the adapter's
    model = cls.from_pretrained(base, *model_args, **of_base, **kwargs)
    with silence_load_report():
        info = model.load_adapter(adapter, adapter_kwargs=from_hub, ignore_mismatched_sizes=True).to_dict()
    check_adapter(adapter, info)
    return model, info


def check_adapter(path, info: dict):
    """Raise ValueError unless a PEFT adapter fits its base model."""
    if wrong := {*info["missing_keys"], *info["unexpected_keys"], *(name for name, *_ in info["mismatched_keys"])}:
        raise ValueError(f"the adapter {path} does not fit its base model: {', '.join(sorted(wrong))}")


def load(from_pretrained, cls, path, checkpoint, *model_args, ignore_mismatched_sizes=False, **kwargs):
    """A model by transformers' own `from_pretrained`, and its loading info; `checkpoint` is None for our own format."""
    notes = []
    if checkpoint is None:
        check_index(path, kwargs.get("subfolder", ""))
        own = dict(kwargs)
        sizes = take_sizes(cls, kwargs, lambda: cls.config_class.get_config_dict(path, **own)[0] if path else {})
    else:
        notes = checkpoint.source.notes
        kwargs = {name: value for name, value in kwargs.items() if name not in ONLY_FROM_HUB}
        sizes = take_sizes(cls, kwargs, lambda: checkpoint.config)
        config, dtype = kwargs.pop("config", None), kwargs.pop("dtype", None)
        if config is None:
            config, kwargs = cls.config_class.from_dict(checkpoint.config, return_unused_kwargs=True, **kwargs)
        kwargs["dtype"] = (config.dtype or checkpoint.dtype()) if dtype in (None, "auto") else dtype
        kwargs |= dict(config=config, state_dict=checkpoint.state_dict(config))
    with silence_load_report():
        model, info = from_pretrained(
            None if checkpoint else path,
            *model_args,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # all of them pass here, and `check_loading_info` judges
            **kwargs,
        )
    if checkpoint is not None:
        model.config.name_or_path = model.name_or_path = str(path)
    if getattr(model, "_hf_peft_config_loaded", False):  # of an adapter beside a whole model
        check_adapter(path, info)
    else:
        ignored = checkpoint.family.ignored if checkpoint else None
        notes += check_loading_info(model, path or "the given state_dict", info, ignored, ignore_mismatched_sizes)
    finish_loading(model, path, notes, sizes)
    return model, info


def take_sizes(cls, kwargs: dict, stored) -> dict:
    """Take the sizes asked for out of `kwargs`, so that the model loads at the checkpoint's; `resize_input` applies them later.

    `stored` () gives the config of the checkpoint as a dict, {} without one.
    """
    config = kwargs.get("config")
    if not isinstance(config, PreTrainedConfig):
        return {name: kwargs.pop(name) for name in INPUT_FIELDS if name in kwargs}
    if config.model_type != cls.config_class.model_type:
        raise ValueError(f"config is a {type(config).__name__}; leave it out, or pass an HFViTConfig")
    if both := [name for name in kwargs if name in config.__dataclass_fields__ and name != "dtype"]:
        raise ValueError(f"config= and {both[0]}= are both given: set {both[0]} in the config")
    with suppress(OSError):  # a folder without config.json holds what the given config says
        if fields := stored():
            kwargs["config"], as_stored = copy.deepcopy(config), cls.config_class.from_dict(fields)
            for name in INPUT_FIELDS:
                setattr(kwargs["config"], name, getattr(as_stored, name))
    return {name: getattr(config, name) for name in INPUT_FIELDS}


def check_index(path, subfolder: str):
    """Raise ValueError if an index in a local folder names files outside of it."""
    for index in Path(path, subfolder).glob("*.index.json") if path is not None and os.path.isdir(path) else ():
        for file in json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values():
            if os.path.isabs(file) or ".." in Path(file).parts:
                raise ValueError(f"the index of {path} names {file}, which lies outside: it is not to be trusted")


def check_loading_info(model, source, info: dict, ignored: str | None, ignore_mismatched_sizes: bool) -> list[str]:
    """Explain every difference between checkpoint and model in a phrase of the log line, or raise ValueError with all others.

    Explained are: a head (all that is beside the base model) that is new as a whole, or the classifier of other labels; a
    missing pooler, for a native config does not say whether there is one, and our heads save none; tensors of HEADS that the
    model is without; what matches `ignored`; and, in a subclass, all that is beside the base model.
    """
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    shapes = {name: (tuple(found), tuple(wanted)) for name, found, wanted in info["mismatched_keys"]}
    tensors, ours, notes = model.state_dict(), is_ours(model), []
    parts = {part_of(name) for name in tensors}
    head = {name for name in tensors if not in_base_model(model, name)}
    new = head & (missing | set(shapes) if ours else missing)
    if ours and new not in (head, {"classifier.weight", "classifier.bias"}):
        new = set()  # half a head is a broken file
    if ours and "classifier.weight" in new:
        found = shapes["classifier.weight"][0][0] if "classifier.weight" in shapes else "none"
        what = " and ".join(sorted({part_of(name) for name in new}))
        notes.append(f"{what} reset to {model.config.num_labels} labels (the checkpoint has {found})")
    elif new:
        notes.append(f"newly initialised {count_tensors(new)}")
    missing -= new
    shapes = {name: shapes[name] for name in set(shapes) - new}
    has_head = any(part_of(name) in ("classifier", "decoder") for name in unexpected)
    if missing == {"pooler.dense.weight", "pooler.dense.bias"} and (ignored is not None or has_head):
        model.pooler = model.config.pooler_act = None
        notes.append("no pooler in the checkpoint: pooler_output is the pooled token itself")
        missing = set()
    left_out = {name for name in unexpected if part_of(name) in HEADS and part_of(name) not in parts}
    left_out |= {name for name in unexpected if re.match(ignored or "$^", name)}
    left_out |= set() if ours else {name for name in unexpected if not in_base_model(model, name)}
    if left_out:
        notes.append(f"left out {count_tensors(left_out)}")
    if shapes and ignore_mismatched_sizes:
        names = ", ".join(sorted(shapes))
        notes.append(f"{names} of another shape reset, as ignore_mismatched_sizes=True asks")
        shapes = {}
    wrong = [f"{name} is missing, of shape {tuple(tensors[name].shape)}" for name in sorted(missing)]
    wrong += [f"{name} is not known to the model" for name in sorted(unexpected - left_out)]
    wrong += [f"{name} has shape {found}, the model {wanted}" for name, (found, wanted) in sorted(shapes.items())]
    advice = "Check that the sizes asked for are the checkpoint's, and that config.json and file are whole"
    if shapes:
        advice += ". ignore_mismatched_sizes=True resets what has another shape"
    if not wrong:
        advice = "Save it again from a run that did not diverge"
        wrong = [f"{name} holds NaN or infinity" for name in non_finite(tensors)]
    if wrong:
        raise ValueError(f"the weights of {source} do not fit {type(model).__name__}: {'; '.join(wrong)}. {advice}")
    return notes


def is_ours(model) -> bool:
    """Whether its class is one of this folder, and not a subclass."""
    return type(model).__module__.rpartition(".")[2] in ("modeling_hf_vit", "masked_autoencoder")


def part_of(name: str) -> str:
    """The part of a model that a tensor belongs to."""
    return name.removeprefix("vit.").partition(".")[0]


def in_base_model(model, name: str) -> bool:
    """Whether a tensor belongs to the base model, and not to a head."""
    if model.base_model is not model:
        return name.startswith(f"{model.base_model_prefix}.")
    return part_of(name) in ("embeddings", "layers", "layernorm", "attention_pooling", "pooler")


def count_tensors(names: set[str]) -> str:
    """The parts that tensors belong to, or inside of the encoder their names, and how many they are."""
    inside = ("embeddings.", "layers.")
    parts = {re.sub(r"^layers\.\d+\.", "", name) if name.startswith(inside) else part_of(name) for name in names}
    return f"{', '.join(sorted(parts))} ({len(names)} tensor{'s' * (len(names) > 1)})"


def non_finite(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors with NaN or infinity, of plain floats: quantised ones and those without memory are left alone.

    `aminmax` reads each number once and takes no memory; its answer is NaN if one number is.
    """
    extremes = {
        name: torch.stack(torch.aminmax(tensor if tensor.element_size() > 1 else tensor.float()))
        for name, tensor in tensors.items()
        if type(tensor) is torch.Tensor and tensor.is_floating_point() and tensor.numel() and not tensor.is_meta
    }
    return [name for name, ends in extremes.items() if not ends.isfinite().all()]


@contextmanager
def silence_load_report():
    """Silence transformers' loading table: our log line says what happened, or an error does."""
    table = python_logging.getLogger("transformers.modeling_utils")
    keep = lambda record: "LOAD REPORT" not in record.getMessage()
    table.addFilter(keep)
    try:
        yield
    finally:
        table.removeFilter(keep)


@contextmanager
def readable_errors(path):
    """What libraries say about files that are not whole, or that hold code, as one ValueError that says what to do."""
    try:
        yield
    except (EOFError, pickle.UnpicklingError, SafetensorError, BadZipFile, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "PytorchStreamReader" not in str(error):
            raise
        reason = str(error).partition(". ")[0]
        if code := re.search(r"GLOBAL (\S+)", str(error)):
            reason = f"it holds more than tensors ({code[1]}), and none of that was run"
        raise ValueError(
            f"{path} cannot be read: {reason} ({type(error).__name__}). Fetch it again, or save its tensors as safetensors"
        ) from error


def finish_loading(model, path, notes: list[str], sizes: dict):
    """Adapt the loaded model to the sizes asked for, and log what was done in one line."""
    if model.is_autoencoder:
        model.freeze_attention_pooling()  # transformers makes all that it loads trainable
    elif is_ours(model):
        for name in AUTOENCODER_FIELDS:  # of a decoder that is not there
            setattr(model.config, name, getattr(type(model.config), name))
    notes = notes + (model.resize_input(**sizes) if sizes else [])
    if notes:
        logger.warning(f"{type(model).__name__} from {path}: {'; '.join(notes)}.")

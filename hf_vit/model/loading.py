"""Strict loading: every difference between checkpoint and model is explained in one log line, or is an error.

`from_pretrained` runs the parts of this file from top to bottom:

    the adapter     of PEFT: its base is loaded, and the adapter goes on top
    the checkpoint  a public format is read first, as a value: its config, and its tensors under our names (hf_vit/formats, which
                    a copy of this file on the Hub does without); our own format goes to transformers as it is
    the model       `PreTrainedModel.from_pretrained` builds and fills it, at the checkpoint's own image size, patches and channels
    what differs    `check_loading_info` accepts new and unused heads; all else is one error that names it
    the end         `resize_input` (resizing.py) adapts the weights to the images asked for, and one line says what was done
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
from safetensors import SafetensorError, safe_open
from transformers.utils import logging
from transformers.utils.peft_utils import find_adapter_config_file

from .configuration_hf_vit import AUTO_MAP, public_formats, read_public
from .resizing import INPUT_FIELDS


logger = logging.get_logger(__name__)
FROM_HUB = ("cache_dir", "revision", "token", "local_files_only")  # keywords that say how a repository is read
# Parts of the encoder, and parts that a model without them does not use.
ENCODER = ("embeddings", "layers", "layernorm")
HEADS = ("classifier", "pre_logits", "pooler", "attention_pooling", "decoder")


class LoadingMixin:
    """`from_pretrained`, `from_checkpoint`, `save_pretrained` and `to_transformers` of every model."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path, *model_args, adapter_kwargs=None, output_loading_info=False, **kwargs
    ):
        """Load our own repos and every public format in `hf_vit/formats`, a raw file too; arguments as in transformers.

        `image_size=`, `patch_size=` and `num_channels=` may differ from the checkpoint: its weights are then adapted, see
        `resize_input`. So may `num_labels=`, and a head be absent: it alone is then reset. `ignore_mismatched_sizes=True` resets
        every tensor of another shape; a subclass with a head of its own starts from any base checkpoint. One log line says so.

        Raises:
            ValueError: if any other tensor is missing, unexpected, duplicate, mis-shaped or not finite (see `non_finite`):
                all of them by name; or if a file is truncated, or holds more than tensors.
        """
        path, adapter_kwargs = pretrained_model_name_or_path, adapter_kwargs or {}
        kwargs.pop("trust_remote_code", None)  # this class is the code; transformers would warn
        adapter = adapter_kwargs.get("_adapter_model_path", path)  # an Auto class has looked for one
        from_hub = {name: both[name] for both in (kwargs, adapter_kwargs) for name in FROM_HUB if name in both}
        if (base := base_of_adapter(adapter, from_hub)) is not None:
            model, info = load_with_adapter(cls, base, adapter, from_hub, *model_args, **kwargs)
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
        public_formats("read raw files")
        return cls.from_pretrained(file, **overrides)

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As in transformers; the folder's config.json then names every public class for the Auto classes."""
        if not is_ours(self):
            self.config.auto_map = {}  # the code of the class that a subclass started from stays behind
        elif self._auto_class is not None:  # transformers adds the class itself
            self.config.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, *args, **kwargs)

    def to_transformers(self):
        """The native transformers model with the same tokens and logits, such as a ViTForImageClassification.

        Weights are copied. The pooled vector is the same too where the native model has one. What matters only in training
        (dropout, stochastic depth) is kept as far as the native config has a field for it.

        Raises:
            ValueError: naming the fields that no native architecture can express.
        """
        return public_formats("convert models").to_transformers(self)


def base_of_adapter(path, from_hub: dict) -> str | None:
    """The base checkpoint that a PEFT adapter must name; None if `path` is none, or has a whole model beside it."""
    if path is None or os.path.isfile(path) or os.path.isfile(os.path.join(path, "model.safetensors")):
        return None
    file = find_adapter_config_file(path, **from_hub)
    if file is None:
        return None
    try:
        base = json.loads(Path(file).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError):  # no JSON, or no dict
        base = None
    if base is None:
        raise ValueError(f"the adapter_config.json of {path} names no base_model_name_or_path")
    return base


def load_with_adapter(cls, base: str, adapter, from_hub: dict, *model_args, **kwargs):
    """The base model, of the config beside the adapter if there is one, with the adapter on top."""
    kwargs = {name: value for name, value in kwargs.items() if name != "revision"}  # which is the adapter's
    if kwargs.get("config") is None:
        with suppress(OSError):  # PEFT alone saves no config.json
            fields, _ = cls.config_class.get_config_dict(adapter, **from_hub)
            config, kwargs = cls.config_class.from_dict(fields, return_unused_kwargs=True, **kwargs)
            kwargs["config"] = config
    model = cls.from_pretrained(base, *model_args, **kwargs)
    with silence_load_report():
        info = model.load_adapter(adapter, adapter_kwargs=from_hub, ignore_mismatched_sizes=True).to_dict()
    if wrong := {*info["missing_keys"], *info["unexpected_keys"], *(name for name, *_ in info["mismatched_keys"])}:
        raise ValueError(f"the adapter {adapter} does not fit its base model: {', '.join(sorted(wrong))}")
    return model, info


def load(from_pretrained, cls, path, checkpoint, *model_args, config=None, ignore_mismatched_sizes=False, **kwargs):
    """A model by transformers' own `from_pretrained`, and its loading info; `checkpoint` is None for our own format."""
    stored, notes, ignored = {}, [], None
    if checkpoint is not None:
        stored, notes, ignored = checkpoint.config, checkpoint.source.notes, checkpoint.family.ignored
    elif path is not None:
        check_index(path, kwargs.get("subfolder", ""))
        # Without config.json, a folder holds what the given config says.
        with suppress(*([] if config is None else [OSError])):
            stored, _ = cls.config_class.get_config_dict(path, **kwargs)
    if config is None:
        config, kwargs = cls.config_class.from_dict(stored, return_unused_kwargs=True, **kwargs)
    elif config.model_type != cls.config_class.model_type:
        raise ValueError(f"config is a {type(config).__name__}; leave it out, or pass an HFViTConfig")
    sizes, config = {name: getattr(config, name) for name in INPUT_FIELDS}, copy.deepcopy(config)
    for name in INPUT_FIELDS if stored else ():  # the model is built as the checkpoint is, and resized at the end
        setattr(config, name, stored.get(name, getattr(type(config), name)))
    if checkpoint is not None:
        kwargs = {name: value for name, value in kwargs.items() if name not in FROM_HUB}
        dtype = kwargs.get("dtype")
        kwargs["dtype"] = (config.dtype or checkpoint.dtype()) if dtype in (None, "auto") else dtype
        kwargs["state_dict"] = checkpoint.state_dict(config)
    with silence_load_report():
        model, info = from_pretrained(
            None if checkpoint else path,
            *model_args,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # all of them pass here, and `check_loading_info` judges
            **kwargs,
        )
    if checkpoint is not None:
        model.config.name_or_path = model.name_or_path = str(path)
    notes += check_loading_info(model, path or "the given state_dict", info, ignored, ignore_mismatched_sizes)
    notes += model.resize_input(**sizes)
    if notes:
        logger.warning(f"{cls.__name__} from {path}: {'; '.join(notes)}.")
    return model, info


def check_index(path, subfolder: str):
    """Raise ValueError if the index in a local folder names files outside of it, or if a tensor stands twice in its files."""
    folder, names = Path(path, subfolder), []
    files = {
        name for file in folder.glob("*.index.json") for name in json.loads(file.read_text())["weight_map"].values()
    }
    if outside := [file for file in files if os.path.isabs(file) or ".." in Path(file).parts]:
        raise ValueError(f"the index of {path} names {outside[0]}, which lies outside: it is not to be trusted")
    for file in {"model.safetensors"} if (folder / "model.safetensors").is_file() else files:
        if file.endswith(".safetensors"):
            with safe_open(folder / file, "pt") as opened:
                names += [name.removeprefix("vit.") for name in opened.keys()]  # noqa: SIM118
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path} holds {', '.join(twice)} 2 times: leave one of each in its files")


def check_loading_info(model, source, info: dict, ignored: str | None, ignore_mismatched_sizes: bool) -> list[str]:
    """Explain every difference between checkpoint and model in a phrase of the log line, or raise ValueError with all others.

    Explained are: a part beside the base model that is new as a whole, such as the classifier of other labels; tensors of HEADS
    (in a subclass, of any part beside the base model) that the model is without; and what matches `ignored`.
    """
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    shapes = {name: (tuple(found), tuple(wanted)) for name, found, wanted in info["mismatched_keys"]}
    part_of = lambda name: name.removeprefix("vit.").partition(".")[0]
    in_base = lambda name: part_of(name) in ENCODER and (model.base_model is model or name.startswith("vit."))
    tensors, heads, notes = model.state_dict(), {}, []
    for name in tensors:
        if not in_base(name):
            heads.setdefault(part_of(name), set()).add(name)
    new = {part: names for part, names in heads.items() if names <= missing | set(shapes)}
    others = {part_of(name) for name in unexpected}
    if "decoder" not in others:  # masked autoencoders alone have no pooling
        new.pop("attention_pooling", None)
    # Native configs do not say whether there is a pooler, and what has a head saves none.
    is_optional = ignored is not None or not others.isdisjoint(("classifier", "decoder"))
    if model.base_model is model and (names := new.pop("pooler", None)) and is_optional:
        model.pooler = model.config.pooler_act = None
        missing -= names
        notes.append("no pooler in the checkpoint: pooler_output is the pooled token itself")
    if new:
        notes.append(f"{', '.join(sorted(new))} reset")
    for names in new.values():
        missing, shapes = missing - names, {name: shapes[name] for name in shapes.keys() - names}
    parts = {part_of(name) for name in tensors}
    known = lambda name: part_of(name) in parts or (is_ours(model) and part_of(name) not in HEADS)
    left_out = {name for name in unexpected if not known(name) or re.match(ignored or "$^", name)}
    if left_out:
        notes.append(f"left out {', '.join(sorted({name if known(name) else part_of(name) for name in left_out}))}")
    if shapes and ignore_mismatched_sizes:
        notes.append(f"{', '.join(sorted(shapes))} of another shape reset, as ignore_mismatched_sizes=True asks")
        shapes = {}
    wrong = [f"{name} is missing, of shape {tuple(tensors[name].shape)}" for name in sorted(missing)]
    wrong += [f"{name} is not known to the model" for name in sorted(unexpected - left_out)]
    wrong += [f"{name} has shape {found}, the model {wanted}" for name, (found, wanted) in sorted(shapes.items())]
    wrong = wrong or [f"{name} holds NaN or infinity" for name in non_finite(tensors)]
    if wrong:
        raise ValueError(
            f"the weights of {source} do not fit {type(model).__name__}: {'; '.join(wrong)}. Check that the sizes asked for are the "
            "checkpoint's, and that config.json and file are whole; ignore_mismatched_sizes=True resets what has another shape"
        )
    return notes


def is_ours(model) -> bool:
    """Whether its class is one of this folder, and not a subclass."""
    return type(model).__module__.rpartition(".")[2] in ("modeling_hf_vit", "masked_autoencoder")


def non_finite(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors with NaN or infinity, of plain floats: quantised ones (float8 too) and those without memory are left alone.

    `aminmax` reads each number once and takes no memory; its answer is NaN if one number is.
    """
    plain = lambda tensor: type(tensor) is torch.Tensor and tensor.is_floating_point() and not tensor.is_meta
    looked_at = {name: tensor for name, tensor in tensors.items() if plain(tensor) and tensor.element_size() > 1}
    return [name for name, one in looked_at.items() if one.numel() and not torch.stack(one.aminmax()).isfinite().all()]


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

"""Strict loading: every difference between checkpoint and model is explained in one log line, or is an error.

`from_pretrained` runs the parts of this file from top to bottom:

    the config    `use_adapter_config` and `split_off_input_sizes`; hf_vit/formats translates the config of a public format
    the tensors   `_load_pretrained_model`: `add_family_rules` renames those of a public format, `check_size` and `check_names`
                  refuse what cannot fit, transformers loads the rest
    what differs  `_finalize_model_loading`, with transformers' lists of tensors that are missing, unexpected or of another
                  shape: `check_loading_info` accepts a new classifier or decoder, a missing pooler and what a ViT has no use for;
                  any other is an error that names it
    the end       `finish_loading` adapts the weights to other images (resizing.py) and logs what was done
"""

import dataclasses
import json
import logging as python_logging
import os
import pickle
import re
from collections import defaultdict
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import PreTrainedModel, load_state_dict
from transformers.utils import logging
from transformers.utils.peft_utils import find_adapter_config_file

from .configuration_hf_vit import AUTO_MAP, AUTOENCODER_FIELDS, no_such_field
from .resizing import INPUT_FIELDS, split_off_input_sizes


logger = logging.get_logger(__name__)


@dataclasses.dataclass
class CheckpointSource:
    """Where weights come from, how they are read, and what the log line will say about them.

    Args:
        name: the file, folder or repo.
        is_classifier: whether a classifier is loaded; None for a config alone.
        family_name: the public format, a key of `hf_vit.formats.FAMILIES`, set by `translate_config` (which
            HFViTConfig.get_config_dict calls) or `read_raw`; None for our own.
        notes: phrases of the log line.
        ignored: a regular expression for tensors that a ViT has no use for; this one matches none.
        reset_mismatched: whether `ignore_mismatched_sizes=True` was passed.
    """

    name: str
    is_classifier: bool | None = None
    family_name: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    ignored: str = "$^"
    reset_mismatched: bool = False


FROM_HUB = ("cache_dir", "revision", "token", "local_files_only")  # keywords that say how a repository is read
ROOM = 2**25  # numbers that a checkpoint may lack: those of a new decoder
# Of the model that is loading: transformers itself calls what reads its config and its tensors, and hands nothing on.
CURRENT_SOURCE: ContextVar[CheckpointSource | None] = ContextVar("current_source", default=None)


class LoadingMixin:
    """`from_pretrained`, `from_checkpoint`, `save_pretrained` and `to_transformers` of every model."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, output_loading_info=False, **kwargs):
        """Load our own repos and every public format in `hf_vit/formats`; arguments as in transformers.

        `image_size=`, `patch_size=` and `num_channels=` may differ from the checkpoint: its weights are then adapted, see
        `resize_input`. So may `num_labels=`, and the head be absent: it alone is then reset. `ignore_mismatched_sizes=True` resets
        every tensor of another shape; a subclass with a head of its own starts from any base checkpoint. One log line says so.

        Raises:
            ValueError: if any other tensor is missing, unexpected, duplicate, mis-shaped or not finite (see `non_finite`),
                with its name; or if a file is truncated, or holds more than tensors.
        """
        if pretrained_model_name_or_path is not None and os.path.isfile(pretrained_model_name_or_path):
            raise ValueError(
                f"{pretrained_model_name_or_path} is a file: from_pretrained takes a folder or a repo, from_checkpoint a file"
            )
        kwargs.pop("trust_remote_code", None)  # this class is the code; transformers would warn
        reset_mismatched = kwargs.pop("ignore_mismatched_sizes", False)  # a head is reset without it
        pretrained_model_name_or_path = use_adapter_config(cls, pretrained_model_name_or_path, kwargs)
        name = "the given state_dict" if pretrained_model_name_or_path is None else str(pretrained_model_name_or_path)
        source = CheckpointSource(name, cls.is_classifier, reset_mismatched=reset_mismatched)
        with silence_load_report(), readable_errors(name), loading_from(source):
            sizes = split_off_input_sizes(cls, pretrained_model_name_or_path, kwargs)
            model, info = super().from_pretrained(
                pretrained_model_name_or_path,
                *model_args,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # all of them pass here, and `check_loading_info` judges
                **kwargs,
            )
        if getattr(model, "_hf_peft_config_loaded", False):  # info is then about the adapter, not its base
            check_adapter(pretrained_model_name_or_path, info)
        finish_loading(model, source, sizes)
        return (model, info) if output_loading_info else model

    @classmethod
    def from_checkpoint(cls, file, **overrides):
        """Load one raw file without a config: Google's JAX `.npz`, timm, torchvision, original DINO, DINOv2, DeiT, MAE.

        Args:
            file: path of an `.npz`, `.safetensors`, `.pth`, `.pt` or `.bin` file.
            overrides: fields of HFViTConfig. The shapes of the tensors give most of them. The rest is assumed as the format
                has it, named in the log line, and may be overridden (`num_attention_heads=`, `hidden_act=`, `pooling=`,
                `dtype=`). `image_size=`, `patch_size=` and `num_channels=` adapt the weights; where the positions make no
                square grid, `image_size=` says what grid they make.

        Raises:
            ValueError: for an unknown format, and as `from_pretrained`.
        """
        source = CheckpointSource(str(file), cls.is_classifier)
        sizes = {name: overrides[name] for name in INPUT_FIELDS if name in overrides}
        with silence_load_report(), readable_errors(file), loading_from(source):
            config, state_dict = installed_formats(cls, "read raw files").read_raw(file, source, overrides)
            model, _ = super().from_pretrained(
                None, config=config, state_dict=state_dict, output_loading_info=True, ignore_mismatched_sizes=True
            )
        model.config.name_or_path = str(file)
        finish_loading(model, source, sizes)
        return model

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As in transformers; the folder's config.json then names every public class for the Auto classes."""
        if self._auto_class is not None and is_ours(self):
            self.config.auto_map = {**(getattr(self.config, "auto_map", None) or {}), **AUTO_MAP}
            # The file of the masked autoencoder goes with its class alone, which adds it again.
            self.config.auto_map.pop("AutoModelForPreTraining", None)
        elif getattr(
            self.config, "auto_map", None
        ):  # of the checkpoint that a subclass started from, whose code stays behind
            own = lambda name: name == "AutoConfig" or self.config.auto_map[name] != AUTO_MAP.get(name)
            self.config.auto_map = {name: code for name, code in self.config.auto_map.items() if own(name)}
        super().save_pretrained(save_directory, *args, **kwargs)

    def to_transformers(self):
        """The native transformers model with the same tokens and logits, such as a ViTForImageClassification.

        Weights are copied. The pooled vector is the same too where the native model has one. What matters only in training
        (dropout, stochastic depth) is kept as far as the native config has a field for it.

        Raises:
            ValueError: naming the fields that no native architecture can express.
        """
        return installed_formats(type(self), "convert models").to_transformers(self)

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        """As in transformers, with the renaming rules of the checkpoint's family; no tensor may come from two sources."""
        source = CURRENT_SOURCE.get() or CheckpointSource("the adapter")  # of `load_adapter`, which has no other
        if load_config.pretrained_model_name_or_path is not None:  # of an adapter its base
            source.name = str(load_config.pretrained_model_name_or_path)
        load_config = add_family_rules(model, load_config, source)
        tensors = list_tensors(state_dict, checkpoint_files, source)
        if not getattr(model, "_hf_peft_config_loaded", False):  # an adapter is small, and its base is there
            check_size(model, tensors, source)
        check_names(model, tensors, load_config.weight_mapping, source)
        return PreTrainedModel._load_pretrained_model(
            model, state_dict, checkpoint_files, load_config, *args, **kwargs
        )

    @staticmethod
    def _finalize_model_loading(model, load_config, loading_info):
        """As in transformers, which fills what is missing; then every difference is accepted by name, or an error."""
        source = CURRENT_SOURCE.get()
        if loading_info.conversion_errors:
            name, error = next(iter(loading_info.conversion_errors.items()))  # a traceback, what was raised, and where
            raise ValueError(f"{source.name} cannot be read: {name} cannot be made: {error.splitlines()[-2]}")
        loading_info = PreTrainedModel._finalize_model_loading(model, load_config, loading_info)
        model._weight_conversions = []  # whatever was read, our own names are written
        check_loading_info(model, loading_info.to_dict(), source)
        return loading_info


@contextmanager
def loading_from(source: CheckpointSource):
    """What `CURRENT_SOURCE` is while a model loads."""
    token = CURRENT_SOURCE.set(source)
    try:
        yield
    finally:
        CURRENT_SOURCE.reset(token)


def installed_formats(cls, purpose: str):
    """The package `hf_vit.formats`, or a ValueError if only the copied model code is there."""
    cls.config_class.prepare()
    if cls.config_class.formats is None:
        raise ValueError(f"this copy of the model's code stands alone: install the package hf_vit to {purpose}")
    return cls.config_class.formats


def base_of_adapter(path, kwargs) -> str | None:
    """The base checkpoint that a PEFT adapter must name; None if `path` is none, or has a whole model beside it."""
    if path is None or os.path.isfile(os.path.join(path, "model.safetensors")):
        return None
    file = find_adapter_config_file(path, **{name: kwargs[name] for name in FROM_HUB if name in kwargs})
    if file is None:
        return None
    try:
        base = json.loads(Path(file).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError, RecursionError):  # no JSON, no such key, no dict
        base = None
    if not isinstance(base, str) or not base:
        raise ValueError(
            f"adapter_config.json of {path} does not say which model the adapter goes on top of: wanted a Hub id or folder as "
            "base_model_name_or_path"
        )
    return base


def use_adapter_config(cls, path, kwargs: dict):
    """The path of the checkpoint to load: of an adapter its base, whose config is then the given one, or the one beside the
    adapter."""
    base = base_of_adapter(path, kwargs)
    if base is None:
        return path
    if kwargs.get("config") is None:
        try:
            config = cls.config_class.from_pretrained(
                path, **{name: kwargs[name] for name in FROM_HUB if name in kwargs}
            )
        except OSError:  # PEFT alone saves no config.json
            return path
        if "num_labels" in kwargs:
            raise ValueError("an adapter comes with a head for its own labels: leave num_labels= out")
        for name in [name for name in kwargs if name in config.__dataclass_fields__ and name != "dtype"]:
            setattr(config, name, kwargs.pop(name))
        kwargs["config"] = config
    kwargs["adapter_kwargs"] = {"_adapter_model_path": path}
    if "revision" in kwargs:  # the adapter's, not its base's
        kwargs["adapter_kwargs"]["revision"] = kwargs.pop("revision")
    return base


def add_family_rules(model, load_config, source: CheckpointSource):
    """The load_config with the renaming rules of the checkpoint's family."""
    if source.family_name is None:
        return load_config
    family = model.config_class.formats.FAMILIES[source.family_name]
    source.ignored = family.ignored or source.ignored
    rules = [*family.rules_for(model.config), *load_config.weight_mapping]
    if family.prefix not in ("", model.base_model_prefix):
        rules.insert(0, WeightRenaming(rf"^{family.prefix}\.", ""))
    return dataclasses.replace(load_config, weight_mapping=rules)


def list_tensors(state_dict, checkpoint_files, source: CheckpointSource) -> list[tuple[str, torch.Tensor]]:
    """Names and tensors of a checkpoint, those of files on the meta device; files outside of a local folder are refused."""
    if state_dict is not None:
        return list(state_dict.items())
    tensors, folder = [], os.path.abspath(source.name)  # links are not resolved: those of the Hub's cache lead outside
    for file in checkpoint_files:
        if os.path.isdir(folder) and not os.path.abspath(file).startswith(os.path.join(folder, "")):
            raise ValueError(
                f"the index of {source.name} names {file}, which lies outside: the repository is not to be trusted"
            )
        try:
            found = load_state_dict(file, map_location="meta").items()
        except (KeyError, IndexError, TypeError, AttributeError, UnicodeDecodeError) as error:  # of the unpickler
            raise ValueError(f"{file} is no checkpoint: wanted a dict of tensors as torch.save writes it") from error
        for name, value in found:
            if not isinstance(value, torch.Tensor):
                raise ValueError(
                    f"{file} holds a {type(value).__name__} called {name}; wanted a dict of tensors alone"
                )
        tensors += found
    return tensors


def check_size(model, tensors: list[tuple[str, torch.Tensor]], source: CheckpointSource):
    """Raise ValueError if the model is far larger than its checkpoint, before memory is taken for what is missing."""
    stored = sum(tensor.numel() for _, tensor in tensors)
    wanted = sum(tensor.numel() for name, tensor in model.named_parameters() if not name.startswith("classifier."))
    if wanted > 4 * stored + ROOM:
        raise ValueError(
            f"the config of {source.name} says {wanted:,} numbers, its files hold {stored:,}: they do not belong together"
        )


def check_names(model, tensors: list[tuple[str, torch.Tensor]], rules: list, source: CheckpointSource):
    """Raise ValueError if several tensors of the checkpoint become the same one of the model; note how many are renamed."""
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    known, renamed = model.state_dict(), 0
    found = defaultdict(list)  # target name -> [(converter's pattern or None, name in the file), ...]
    for name, tensor in tensors:
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if target not in known and name in known:  # one of our names that a rule matched, as transformers decides too
            target, pattern = name, None
        if tensor.numel() == 0:  # what a native model without registers holds
            source.ignored += f"|{re.escape(target)}$"
        if target in known:
            found[target].append((pattern, name))
            renamed += target.removeprefix("vit.") != name.removeprefix("vit.")
    for target, pairs in found.items():
        patterns = [pattern for pattern, _ in pairs]
        if len(pairs) > 1 and (None in patterns or len(set(patterns)) < len(patterns)):
            raise ValueError(
                f"{source.name} holds {target} {len(pairs)} times, as {' and '.join(sorted(name for _, name in pairs))}: "
                "leave one of them in the file"
            )
    if source.family_name is not None:
        source.notes.insert(0, f"read as {source.family_name}, {renamed} of {len(tensors)} tensors renamed")


def check_loading_info(model, info: dict, source: CheckpointSource):
    """Explain every difference between checkpoint and model in a note for the log line, or raise ValueError.

    Each `accept_...` takes off what it explains; what is left is wrong.
    """
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    mismatched = {name: (tuple(found), tuple(wanted)) for name, found, wanted in info["mismatched_keys"]}
    accept_new_head(model, missing, mismatched, source)
    accept_new_decoder(model, missing, source)
    accept_missing_pooler(model, missing, unexpected, source)
    accept_head_of_subclass(model, missing, source)
    accept_left_out(model, unexpected, source)
    if mismatched and source.reset_mismatched:
        names = ", ".join(sorted(mismatched))
        source.notes.append(f"{names} of another shape reset, as ignore_mismatched_sizes=True asks")
        mismatched = {}

    wrong = [f"{name} is missing" for name in sorted(missing)]
    wrong += [f"{name} is not known to the model" for name in sorted(unexpected)]
    wrong += [f"{name} has shape {found}, the model {wanted}" for name, (found, wanted) in sorted(mismatched.items())]
    advice = (
        "Only the classifier may differ, and image_size, patch_size and num_channels are adapted: check that the other "
        "sizes asked for are those of the checkpoint, and that config.json and file are whole"
    )
    if mismatched:
        advice += ". ignore_mismatched_sizes=True resets what has another shape"
    if not wrong:
        advice = "Save it again from a run that did not diverge"
        wrong = [f"{name} holds NaN or infinity" for name in non_finite(model.state_dict())]
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(
            f"the weights of {source.name} do not fit {type(model).__name__}: {'; '.join(wrong[:5])}{more}. {advice}"
        )


def accept_new_head(model, missing: set, mismatched: dict, source: CheckpointSource):
    """A missing or mis-shaped head is reset as a whole; half of it is a broken file."""
    head = {name for name in missing | set(mismatched) if name.startswith(("classifier.", "pre_logits."))}
    parts = ("classifier", "pre_logits") if any(name.startswith("pre_logits.") for name in head) else ("classifier",)
    tensors = [{f"{part}.weight", f"{part}.bias"} for part in parts]
    if head != set().union(*tensors) or any(len(both & missing) == 1 for both in tensors):
        return
    found = mismatched["classifier.weight"][0][0] if "classifier.weight" in mismatched else "none"
    what = " and ".join(parts)
    source.notes.append(f"{what} reset to {model.config.num_labels} labels (the checkpoint has {found})")
    missing -= head
    for name in head & set(mismatched):
        del mismatched[name]


def accept_new_decoder(model, missing: set, source: CheckpointSource):
    """The decoder of a masked autoencoder is new where the checkpoint has none; half of one is a broken file."""
    decoder = {name for name in model.state_dict() if name.startswith("decoder.")}
    if model.is_autoencoder and decoder <= missing:
        source.notes.append(f"newly initialised {count_tensors({'decoder'}, decoder)}")
        missing -= decoder


def accept_missing_pooler(model, missing: set, unexpected: set, source: CheckpointSource):
    """Base model without pooler: a native config does not say whether there is one, and our heads save none."""
    has_head = any(name.startswith(("classifier.", "decoder.")) for name in unexpected)
    if missing == {"pooler.dense.weight", "pooler.dense.bias"} and (source.family_name is not None or has_head):
        model.pooler = model.config.pooler_act = None
        source.notes.append("no pooler in the checkpoint: pooler_output is the pooled token itself")
        missing.clear()


def accept_head_of_subclass(model, missing: set, source: CheckpointSource):
    """A subclass starts from any base checkpoint: what it adds to the base model is new."""
    new = {name for name in missing if not in_base_model(model, name)}
    if new and not is_ours(model):
        source.notes.append(f"newly initialised {count_tensors({name.partition('.')[0] for name in new}, new)}")
        missing -= new


def accept_left_out(model, unexpected: set, source: CheckpointSource):
    """Heads and poolers that this model does not have, and what no ViT has a use for (`source.ignored`)."""
    unused = r"classifier\.(weight|bias)|pre_logits\.(weight|bias)|(vit\.)?pooler\.dense\.(weight|bias)"
    if getattr(model.base_model, "attention_pooling", None) is None:
        unused += r"|(vit\.)?attention_pooling\..+"
    if not model.is_autoencoder:
        unused += r"|decoder\..+"
    left_out = {name for name in unexpected if re.fullmatch(unused, name)}
    if not is_ours(model):
        left_out |= {name for name in unexpected if not in_base_model(model, name)}
    foreign = {name for name in unexpected - left_out if re.match(source.ignored, name)}
    if left_out | foreign:
        parts = {name.removeprefix("vit.").partition(".")[0] for name in left_out}
        parts |= {re.match(source.ignored, name).group().strip("./") for name in foreign}
        source.notes.append(f"left out {count_tensors(parts, left_out | foreign)}")
    unexpected -= left_out | foreign


def is_ours(model) -> bool:
    """Whether its class is one of this folder, and not a subclass."""
    return type(model).__module__.rpartition(".")[2] in ("modeling_hf_vit", "masked_autoencoder")


def in_base_model(model, name: str) -> bool:
    """Whether a tensor belongs to the base model, and not to a head."""
    parts = r"(embeddings|layers|layernorm|attention_pooling|pooler)\."
    return bool(re.match(parts if model.base_model is model else rf"{model.base_model_prefix}\.", name))


def count_tensors(parts: set[str], tensors: set[str]) -> str:
    """Modules, and how many tensors of them are meant."""
    return f"{', '.join(sorted(parts))} ({len(tensors)} tensor{'s' * (len(tensors) > 1)})"


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


def check_adapter(path, info: dict):
    """Raise ValueError unless a PEFT adapter fits its base model."""
    wrong = {*info["missing_keys"], *info["unexpected_keys"], *(name for name, *_ in info["mismatched_keys"])}
    if wrong:
        raise ValueError(f"the adapter {path} does not fit its base model: {', '.join(sorted(wrong)[:5])}")


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
def readable_errors(name):
    """What libraries say about broken files and misspelt arguments, as one ValueError that says what to do."""
    try:
        yield
    except TypeError as error:
        misspelt = re.search(r"__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
        if misspelt is None:
            raise
        raise ValueError(no_such_field(misspelt.group(1))) from error
    except (EOFError, pickle.UnpicklingError, SafetensorError, BadZipFile, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "PytorchStreamReader" not in str(error):
            raise
        reason = f"the file is not whole, or no checkpoint ({type(error).__name__}: {str(error).partition('. ')[0]})"
        if isinstance(error, EOFError):
            reason = "the file is empty"
        elif isinstance(error, pickle.UnpicklingError):
            found = re.search(r"GLOBAL (\S+)", str(error))
            what = f" ({found.group(1)})" if found is not None else ", or is no checkpoint"
            reason = f"it holds more than tensors{what}, and none of that was run"
        raise ValueError(
            f"{name} cannot be read: {reason}. Fetch it again, or save its tensors as safetensors"
        ) from error


def finish_loading(model, source: CheckpointSource, sizes: dict):
    """Adapt the loaded model to the sizes asked for, and log what was done in one line."""
    if model.is_autoencoder:
        model.freeze_attention_pooling()  # transformers makes all that it loads trainable
    elif is_ours(model):
        for name in AUTOENCODER_FIELDS:  # of a decoder that is not there
            setattr(model.config, name, getattr(type(model.config), name))
    notes = source.notes + (model.resize_input(**sizes) if sizes else [])
    if notes:
        logger.warning(f"{type(model).__name__} from {source.name}: {'; '.join(notes)}.")

"""`read` a public checkpoint: the fields of HFViTConfig, its tensors, and the rules that turn these into ours. Nothing is built.

    read(source) -> Checkpoint(config, tensors, rules, notes), or None for our own format
    Checkpoint.state_dict(config) -> the tensors under our names, as `from_pretrained` of transformers takes them

Families are found by their files: a module of this folder with a list FAMILIES. No code here knows one by name.
"""

import copy
import importlib
import os
import pkgutil
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import _add_variant
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from hf_vit.formats.family import Family, NativeFamily, RawFamily
from hf_vit.formats.raw_files import read_tensors
from hf_vit.formats.source import Source
from hf_vit.model.configuration_hf_vit import HFViTConfig
from hf_vit.model.fields import as_pair, check_counts
from hf_vit.model.loading import check_index


WHERE = ("cache_dir", "force_download", "token", "revision", "local_files_only", "subfolder", "variant")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
LABEL_FIELDS = ("id2label", "label2id", "problem_type", "thresholds")  # the last of several labels an image
OURS = dict(model_type=HFViTConfig.model_type)  # so that a config may hold keys that HFViTConfig does not know


@dataclass
class Checkpoint:
    """A public checkpoint.

    Args:
        config: fields of HFViTConfig, as the checkpoint has them; how positions are resampled is among them.
        family: what it is.
        source: its tensors by the names of its files, and phrases of the log line.
    """

    config: dict
    family: Family
    source: Source

    def dtype(self) -> torch.dtype:
        """The type of its first floating tensor."""
        return next(
            (tensor.dtype for tensor in self.source.tensors.values() if tensor.is_floating_point()), torch.float32
        )

    def state_dict(self, config: HFViTConfig) -> dict[str, torch.Tensor]:
        """The tensors under our names.

        Raises:
            ValueError: if two tensors of the checkpoint become the same one.
        """
        rules = self.family.rules(config)
        prefix = WeightRenaming(rf"^{self.family.prefix}\.", "")
        renamings = [prefix, *(rule for rule in rules if isinstance(rule, WeightRenaming))]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        found, conversions, sources = {}, {}, {}
        for name, tensor in self.source.tensors.items():
            if not tensor.numel():  # what a native model without registers holds
                continue
            target, pattern = rename_source_key(name, renamings, converters)
            if (first := sources.setdefault((target, pattern), name)) != name:
                raise ValueError(f"{target} is there 2 times, as {first} and {name}: leave one of them in the file")
            if pattern is None:
                found[target] = tensor
            else:
                rule = conversions.setdefault(target, copy.deepcopy(by_pattern[pattern]))
                rule.add_tensor(target, name, pattern, tensor)
        for target, rule in conversions.items():
            made = rule.convert(target, config=config)
            if both := set(made) & set(found):
                raise ValueError(f"{min(both)} is there 2 times: leave one of them in the file")
            found |= made
        self.source.notes.insert(0, f"read as {self.family.name}")
        return found


@cache
def families(kind: type = Family) -> list:
    """Every family, or those of a kind."""
    files = pkgutil.iter_modules([os.path.dirname(__file__)])
    modules = [importlib.import_module(f"{__package__}.{file.name}") for file in files]
    return [family for module in modules for family in getattr(module, "FAMILIES", ()) if isinstance(family, kind)]


def read(path, is_classifier: bool | None = None, asked: dict | None = None) -> Checkpoint | None:
    """The public checkpoint at a path: a file, a folder or a repository; None if that is our own, or has no config.

    Args:
        path: of a raw file; a folder; or a Hub id.
        is_classifier: whether it is to become a classifier; None if only the config matters.
        asked: arguments of `from_pretrained`: where a repository is, and fields that its tensors do not tell.

    Raises:
        ValueError: for an unknown family, for what no field expresses, and for a file that is not whole or holds code.
    """
    asked = asked or {}
    if os.path.isfile(path):
        tensors, is_pickle = read_tensors(path)
        return read_raw(Source(str(path), lambda: tensors, is_classifier, asked, is_pickle=is_pickle), None)
    where = {name: asked[name] for name in WHERE if name in asked}
    variant = where.pop("variant", None)
    others = [name for family in families(RawFamily) for name in family.files]
    said, _ = PreTrainedConfig.get_config_dict(path, **where)
    for name in others if not said else ():
        if name.endswith("config.json"):
            with suppress(OSError):
                said, _ = PreTrainedConfig.get_config_dict(path, _configuration_file=name, **where)
    if not said or said.get("model_type") == HFViTConfig.model_type:
        return None
    weights = [_add_variant(name, variant) for name in (*WEIGHTS, *others) if not name.endswith("config.json")]
    source = Source(str(path), lambda: open_tensors(path, where, weights), is_classifier, asked, said)
    family = next((family for family in families() if family.claims(said)), None)
    if family is None:
        raise ValueError(
            f"{path} holds a {said.get('model_type')!r} model; hf_vit loads hf_vit, {', '.join(family.name for family in families())}, timm_wrapper"
        )
    return read_raw(source, family) if isinstance(family, RawFamily) else read_native(source, family)


def read_native(source: Source, family: NativeFamily) -> Checkpoint:
    """From a config.json of transformers."""
    said = source.said
    for part in (said, said.get("vision_config")):
        check_counts(part or {})
    native = AutoConfig.for_model(**said)
    # A native classifier may pool otherwise than its base model: the class asked for decides, else the one saved.
    saved = (said.get("architectures") or [""])[0]
    is_saved = "ForImageClassification" in saved
    is_classifier = is_saved if source.is_classifier is None else source.is_classifier
    classifier = (saved if is_saved else "a new classifier") if is_classifier else ""
    fields = family.read_config(native, classifier)
    fields |= {field: said[field] for field in LABEL_FIELDS if said.get(field) not in (None, {})}
    size, patch = as_pair(fields["image_size"]), as_pair(fields["patch_size"])
    covered = tuple(side // length * length for side, length in zip(size, patch, strict=True))
    if covered != size:  # native convolutions drop the rest, as in google/siglip-so400m-patch14-384
        fields["image_size"] = list(covered)
        source.notes.append(
            f"image_size {size} cut to {covered}, which the patches cover: crop or resize the images to that"
        )
    return Checkpoint(OURS | fields, family, source)


def read_raw(source: Source, family: RawFamily | None) -> Checkpoint:
    """From the tensors of a file or repository, of this family or of the one that knows them."""
    known = [family] if family else sorted(families(RawFamily), key=lambda other: -len(other.signature))
    found = [(each, each.prefixes(source.tensors)) for each in known]
    family, prefixes = next((pair for pair in found if pair[1]), (family, [""]))
    if family is None:
        raise ValueError(
            f"{source.name} holds no ViT that hf_vit knows: its tensors are {', '.join(list(source.tensors)[:3])}, "
            f"...; it reads {', '.join(each.title for each in known)}. A file of transformers needs its "
            "config.json beside it: give the folder to from_pretrained"
        )
    source.select(choose_copy(prefixes))
    try:
        fields = family.resampling | family.infer_fields(source)
    except (LookupError, ValueError) as error:
        what = error if isinstance(error, ValueError) else f"it lacks {error}"
        raise ValueError(f"{source.name}, read as {family.name}: {what}") from error
    return Checkpoint(OURS | fields, family, source)


def choose_copy(prefixes: list[str]) -> str:
    """Of the networks in a file an average or a teacher, else the model, else the first that is no optimizer's moment."""
    networks = [prefix for prefix in prefixes if not re.match(r"opt\.(?!target\.)", prefix)] or prefixes
    # big_vision keeps the weights under opt.target, beside the moments
    words = ("ema", "teacher", "target", "state_dict", "model")
    ranked = [each for word in words for each in networks if re.search(rf"(^|[._/]){word}([._/]|$)", each)]
    return (ranked or networks)[0]


def open_tensors(path, where: dict, names: list[str]) -> dict[str, torch.Tensor]:
    """Tensors by their names on disk, of the first file that is there.

    Raises:
        ValueError: if a tensor is in two files, or if a file holds anything else.
        OSError: if there is no file of weights.
    """
    check_index(path, where.get("subfolder", ""))
    find = lambda name: cached_file(path, name, _raise_exceptions_for_missing_entries=False, **where)
    file = next(filter(None, map(find, names)), None)
    if file is None:
        raise OSError(f"{path} has none of {', '.join(names)}")
    files = get_checkpoint_shard_files(path, file, **where)[0] if file.endswith(".index.json") else [file]
    tensors = {}
    for file in files:
        part, _ = read_tensors(file)
        if both := set(part) & set(tensors):
            raise ValueError(f"{path} holds {min(both)} 2 times, in two files")
        tensors |= part
    return tensors

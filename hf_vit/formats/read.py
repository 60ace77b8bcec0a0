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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import torch
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedConfig
from transformers.backbone_utils import BackboneConfigMixin
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import _add_variant, str_to_torch_dtype
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from hf_vit.formats.family import Family, NativeFamily, RawFamily, Source, shape_of
from hf_vit.formats.raw_files import read_tensors
from hf_vit.model.configuration_hf_vit import HFViTConfig
from hf_vit.model.fields import as_pair, check_counts
from hf_vit.model.loading import check_index


WHERE = ("cache_dir", "force_download", "token", "revision", "local_files_only", "subfolder", "variant")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# What native configs and HFViTConfig name alike. A native config may lack some of them.
COMMON_FIELDS = (
    "image_size", "patch_size", "num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "intermediate_size", "hidden_act", "qkv_bias", "hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate",
    "layer_norm_eps", "initializer_range",
)  # fmt: skip
BACKBONE_FIELDS = ("out_indices", "apply_layernorm", "reshape_hidden_states")
LABEL_FIELDS = ("id2label", "label2id", "problem_type", "thresholds", "dtype", "torch_dtype")
OURS = dict(model_type=HFViTConfig.model_type)  # so that a config may hold keys that HFViTConfig does not know


@dataclass
class Checkpoint:
    """A public checkpoint.

    Args:
        config: fields of HFViTConfig, as the checkpoint has them; how positions are resampled is among them.
        family: what it is; `to_transformers` knows which fields its native classes express.
        notes: phrases of the log line.
        open: () -> its tensors by the names of its files; those of safetensors stay on disk.
        prefix: of the names of its base model, which is dropped.
    """

    config: dict
    family: Family
    notes: list[str]
    open: Callable[[], dict]
    prefix: str = ""

    def rules(self, config: HFViTConfig) -> list:
        """transformers' rules from the names on disk to ours, as new objects: while they work, rules hold tensors."""
        prefix = [WeightRenaming(rf"^{self.prefix}\.", "")] if self.prefix else []
        return [*prefix, *self.family.rules(config)]

    def dtype(self) -> torch.dtype:
        """The type of its first floating tensor."""
        tensors = self.open().values()
        types = (str_to_torch_dtype[t.get_dtype()] if hasattr(t, "get_dtype") else t.dtype for t in tensors)
        return next((found for found in types if found.is_floating_point), torch.float32)

    def state_dict(self, config: HFViTConfig) -> dict:
        """The tensors under our names; those that are only renamed stay on disk until transformers reads them.

        Raises:
            ValueError: if two tensors of the checkpoint become the same one.
        """
        rules, tensors = self.rules(config), self.open()
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        found, conversions, sources = {}, {}, {}
        for name, tensor in tensors.items():
            if 0 in shape_of(tensor):  # what a native model without registers holds
                continue
            target, pattern = rename_source_key(name, renamings, converters)
            target = target.removeprefix("vit.")
            if twice := sources.get((target, pattern), sources.get((target, None))):
                raise ValueError(f"{target} is there 2 times, as {twice} and {name}: leave one of them in the file")
            sources[target, pattern] = name
            if pattern is None:
                found[target] = tensor
            else:
                rule = conversions.setdefault(target, copy.deepcopy(by_pattern[pattern]))
                rule.add_tensor(target, name, pattern, lambda tensor=tensor: tensor[...])
        renamed = sum(name.removeprefix("vit.") != target for (target, _), name in sources.items())
        self.notes.insert(0, f"read as {self.family.name}, {renamed} of {len(tensors)} tensors renamed")
        for target, rule in conversions.items():
            made = rule.convert(target, config=config)
            if both := set(made) & set(found):
                raise ValueError(f"{min(both)} is there 2 times: leave one of them in the file")
            found |= {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}
        return found


@cache
def families() -> dict[str, Family]:
    """Every family by its name."""
    folder = importlib.import_module(__package__)
    modules = [
        importlib.import_module(f"{__package__}.{found.name}") for found in pkgutil.iter_modules(folder.__path__)
    ]
    return {family.name: family for module in modules for family in getattr(module, "FAMILIES", ())}


def of_kind(kind: type) -> list:
    return [family for family in families().values() if isinstance(family, kind)]


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
        tensors, container = read_tensors(path)
        source = Source(str(path), lambda: tensors, is_classifier, asked, container=container)
        return read_raw(source, None)
    where = {name: asked[name] for name in WHERE if name in asked}
    files = [name for family in of_kind(RawFamily) for name in family.files]
    said = read_config_file(path, where, [name for name in files if name.endswith(".json")])
    if not said or said.get("model_type") == HFViTConfig.model_type:
        return None
    weights = [*WEIGHTS, *(name for name in files if not name.endswith(".json"))]
    source = Source(str(path), cache(lambda: open_tensors(path, where, weights)), is_classifier, asked, said)
    family = next((family for family in families().values() if family.claims(said)), None)
    if family is None:
        known = ", ".join(families())
        raise ValueError(
            f"{path} holds a {said.get('model_type')!r} model; hf_vit loads hf_vit, {known}, timm_wrapper"
        )
    return read_raw(source, family) if isinstance(family, RawFamily) else read_native(source, family)


def read_config_file(path, where: dict, others: list[str]) -> dict:
    """config.json, or the first of the other files that is there; {} without any."""
    where = {name: value for name, value in where.items() if name != "variant"}
    said, _ = PreTrainedConfig.get_config_dict(path, **where)
    for name in [] if said else others:
        with suppress(OSError):
            said, _ = PreTrainedConfig.get_config_dict(path, _configuration_file=name, **where)
    return said


def read_native(source: Source, family: NativeFamily) -> Checkpoint:
    """From a config.json of transformers."""
    said = source.said
    for part in (said, said.get("vision_config")):
        check_counts(part or {})
    native = AutoConfig.for_model(family.name, **{key: said[key] for key in said if key != "model_type"})
    if native.sub_configs:  # of image and text
        native = native.vision_config
    # A native classifier may pool otherwise than its base model: the class asked for decides, else the one saved.
    saved = (said.get("architectures") or [""])[0]
    is_saved = "ForImageClassification" in saved
    is_classifier = is_saved if source.is_classifier is None else source.is_classifier
    classifier = (saved if is_saved else "a new classifier") if is_classifier else ""
    fields = {field: getattr(native, field) for field in COMMON_FIELDS if hasattr(native, field)}
    fields |= {ours: getattr(native, theirs) for theirs, ours in family.fields.items()}
    fields |= family.resampling | dict(family.read_fields(native, classifier))
    fields |= {field: said[field] for field in LABEL_FIELDS if said.get(field) not in (None, {})}
    if isinstance(native, BackboneConfigMixin):
        fields |= {field: getattr(native, field) for field in BACKBONE_FIELDS}
    size, patch = as_pair(fields["image_size"]), as_pair(fields["patch_size"])
    covered = tuple(side // length * length for side, length in zip(size, patch, strict=True))
    if covered != size:  # native convolutions drop the rest, as in google/siglip-so400m-patch14-384
        fields["image_size"] = list(covered)
        cut = f"image_size {size} cut to {covered}, which the patches cover: crop or resize the images to that"
        source.notes.append(cut)
    return Checkpoint(OURS | fields, family, source.notes, source.open, family.prefix)


def read_raw(source: Source, family: RawFamily | None) -> Checkpoint:
    """From the tensors of a file or repository, of this family or of the one that knows them."""
    known = [family] if family else sorted(of_kind(RawFamily), key=lambda other: -len(other.signature))
    found = [(prefix, each) for each in known for prefix in each.prefixes(source.tensors)]
    if not found and family is None:
        raise ValueError(
            f"{source.name} holds no ViT that hf_vit knows: its tensors are {', '.join(list(source.tensors)[:3]) or 'none'}, "
            f"...; it reads {', '.join(each.title for each in known)}. A file of transformers needs its "
            "config.json beside it: give the folder to from_pretrained"
        )
    family = found[0][1] if found else family
    prefix = choose_copy([prefix for prefix, each in found if each is family] or [""])
    tensors = {name.removeprefix(prefix): tensor for name, tensor in source.tensors.items() if name.startswith(prefix)}
    outside = sorted({name.split(".")[0] for name in source.tensors if not name.startswith(prefix)})
    source.tensors = tensors
    try:
        fields = family.resampling | family.infer_fields(source)
    except (KeyError, IndexError, StopIteration, ValueError) as error:
        what = error if isinstance(error, ValueError) else f"it lacks {error}"
        raise ValueError(f"{source.name}, read as {family.name}: {what}") from error
    if outside:
        source.notes.append(f"left out {', '.join(outside)}, outside {prefix.rstrip('.')}")
    return Checkpoint(OURS | fields, family, source.notes, lambda: tensors)


def choose_copy(prefixes: list[str]) -> str:
    """Of the networks in a file an average or a teacher, else the first that is no optimizer's moment."""
    networks = [prefix for prefix in prefixes if not re.match(r"opt\.(?!target\.)", prefix)] or prefixes
    words = ("ema", "teacher", "target")  # big_vision keeps the weights under opt.target, beside the moments
    averaged = [each for word in words for each in networks if re.search(rf"(^|[._]){word}([._]|$)", each)]
    return (averaged or networks)[0]


def open_tensors(path, where: dict, weights: list[str]) -> dict:
    """Tensors by their names on disk, where safetensors leaves them until they are used.

    Raises:
        ValueError: if a tensor is in two files, or if a file holds anything else.
        OSError: if there is no file of weights.
    """
    check_index(path, where.get("subfolder", ""))
    variant, where = where.get("variant"), {name: value for name, value in where.items() if name != "variant"}
    names = [_add_variant(name, variant) for name in weights]
    find = lambda name: cached_file(path, name, _raise_exceptions_for_missing_entries=False, **where)
    file = next((file for file in map(find, names) if file is not None), None)
    if file is None:
        raise OSError(f"{path} has none of {', '.join(names)}")
    files = get_checkpoint_shard_files(path, file, **where)[0] if file.endswith(".index.json") else [file]
    tensors = {}
    for file in files:
        if file.endswith(".safetensors"):
            opened = safe_open(file, "pt")
            part = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        else:
            part, _ = read_tensors(file)
        if both := set(part) & set(tensors):
            raise ValueError(f"{path} holds {min(both)} 2 times, in two files")
        tensors |= part
    return tensors

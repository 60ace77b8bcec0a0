"""What a family of public checkpoints is. A file of this folder that has a list FAMILIES describes some; `read.py` finds it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property


ANY = object()  # as supported values: whatever the field holds
# How a family resamples learned positions to another grid.
BICUBIC = dict(position_antialias=False)
ANTIALIASED = dict(position_antialias=True)


@dataclass
class Source:
    """A file, folder or repository while its config is read.

    Args:
        name: for messages.
        open: () -> its tensors by their names; those of safetensors stay on disk (`safetensors` calls them slices).
        is_classifier: whether a classifier is loaded; None for a config alone.
        asked: fields of HFViTConfig, and arguments of `from_pretrained`, that were passed.
        said: its config.json, or what stands in for one.
        container: keys of the dicts around the tensors of a pickle; None for another kind of file.
        notes: phrases of the log line, to be extended.
    """

    name: str
    open: Callable[[], dict]
    is_classifier: bool | None
    asked: dict
    said: dict = field(default_factory=dict)
    container: list[str] | None = None
    notes: list[str] = field(default_factory=list)

    @cached_property
    def tensors(self) -> dict:
        return self.open()

    @cached_property
    def shapes(self) -> dict[str, tuple]:
        return {name: shape_of(tensor) for name, tensor in self.tensors.items()}


def shape_of(tensor) -> tuple:
    return tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)


def nothing(*_) -> tuple:
    return ()


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of checkpoints.

    Args:
        name: the model_type of its config.json; for the log line and for errors.
        rules: HFViTConfig -> new rules of transformers from names on disk to ours; they run backwards too.
        ignored: a regular expression for tensors, by our names, that a ViT has no use for, such as a text tower.
        resampling: the fields of HFViTConfig that say how its library resamples positions.
    """

    name: str
    rules: Callable
    ignored: str = r"embeddings\.mask_token"
    resampling: dict = field(default_factory=lambda: BICUBIC)


@dataclass(frozen=True, kw_only=True)
class NativeFamily(Family):
    """A model of transformers, with a config.json.

    Args:
        prefix: what a native classifier calls its base model.
        fields: native name -> ours, beyond the names that all families share.
        read_fields: (native config, name of the native classifier that is loaded or "") -> fields of HFViTConfig that are not just renamed.
        native_fields: HFViTConfig -> fields of the native config that are not just renamed.
        base, classifier, autoencoder: (name of the native class, {field of HFViTConfig: values that it supports
            beside the default alone}).
        two_headed: the native classifier with a head for each of class and distillation token.
        square_only: whether these take square images and patches only.
        unsupported: HFViTConfig -> what else they cannot express, as "field=value".
        native_head: (head weight, HFViTConfig) -> the head weight of the native classifier, if it is another.
    """

    prefix: str = ""
    fields: dict = field(default_factory=dict)
    read_fields: Callable = nothing
    native_fields: Callable = nothing
    base: tuple[str, dict] | None = None
    classifier: tuple[str, dict] | None = None
    autoencoder: tuple[str, dict] | None = None
    two_headed: str = ""
    square_only: bool = False
    unsupported: Callable = nothing
    native_head: Callable | None = None

    def claims(self, said: dict) -> bool:
        return said.get("model_type") == self.name


@dataclass(frozen=True, kw_only=True)
class RawFamily(Family):
    """Files without a config.json of transformers, recognised by their tensors, and repositories of them.

    Args:
        title: what people call it.
        signature: names of tensors, behind one prefix; of two families that recognise a file, the one with more of them has it.
        infer_fields: Source -> fields of HFViTConfig.
        claims: config -> whether a repository is of this family.
        files: (its config, its weights, ...) in such a repository, beside the usual names.
    """

    title: str
    signature: tuple[str, ...]
    infer_fields: Callable
    claims: Callable = nothing
    files: tuple[str, ...] = ()

    def prefixes(self, names) -> list[str]:
        """What stands in front of the signature, for each time that it is there."""
        first, *others = self.signature
        found = [name.removesuffix(first) for name in names if name.endswith(first)]
        return [prefix for prefix in found if all(prefix + other in names for other in others)]

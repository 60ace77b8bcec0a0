"""What a family of public checkpoints is. A file of this folder that has a list FAMILIES describes some; `read.py` finds it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from transformers import PreTrainedConfig

from hf_vit.model.configuration_hf_vit import HFViTConfig


# How a family resamples learned positions to another grid.
BICUBIC = dict(position_antialias=False)
ANTIALIASED = dict(position_antialias=True)
OWN_FIELDS = HFViTConfig.__dataclass_fields__.keys() - PreTrainedConfig.__dataclass_fields__.keys()


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
        prefix: what stands in front of the names of the base model in larger ones.
    """

    name: str
    rules: Callable
    ignored: str = r"embeddings\.mask_token"
    resampling: dict = field(default_factory=lambda: BICUBIC)
    prefix: str = ""


@dataclass(frozen=True, kw_only=True)
class NativeFamily(Family):
    """A model of transformers, with a config.json.

    Args:
        aliases: other model types of the family, such as a model of image and text.
        classes: names of the native classes that `to_transformers` gives; a base model, a classifier (...ForImageClassification),
            an autoencoder (...ForPreTraining).
        fields: native name -> ours, beyond the fields that are named alike.
        read_fields: (native config, name of the native classifier that is loaded or "") -> fields of HFViTConfig that are not just renamed.
        native_fields: HFViTConfig -> fields of the native config that are not just renamed.
        square_only: whether its classes take square images and patches only.
    """

    aliases: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    fields: dict = field(default_factory=dict)
    read_fields: Callable = nothing
    native_fields: Callable = nothing
    square_only: bool = False

    def claims(self, said: dict) -> bool:
        return said.get("model_type") in (self.name, *self.aliases)

    def names(self, config_class) -> dict[str, str]:
        """Native name -> ours, of all fields that are taken over as they are."""
        return {name: name for name in OWN_FIELDS & config_class.__dataclass_fields__.keys()} | self.fields

    def read_config(self, native, classifier: str) -> dict:
        """Fields of HFViTConfig that a native config says; `classifier` as in `read_fields`."""
        native = getattr(native, "vision_config", native)
        fields = {ours: getattr(native, theirs) for theirs, ours in self.names(type(native)).items()}
        return fields | self.resampling | dict(self.read_fields(native, classifier))


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

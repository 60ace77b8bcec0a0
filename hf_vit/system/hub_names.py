"""Names of the Hub and paths on this machine: which of them is meant, and what a path is called elsewhere."""

import re
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_vit.system.errors import UserError
from hf_vit.system.recipes_folder import EMBEDDED


# Names that the Hub would take for its own: folders as people call theirs, and files.
LIKE_A_PATH = re.compile(
    r"(checkpoints|data|datasets?|models|recipes|runs)/.*"
    r"|.*\.(arrow|bin|ckpt|csv|gz|jsonl?|npz|onnx|parquet|pth?|safetensors|tar|tsv|txt|ya?ml|zip)"
    r"|.*\.(avif|bmp|gif|heic|jpe?g|png|tiff?|webp)",
    re.IGNORECASE,
)


def name_of_path(path: str) -> str:
    """What others may know of a path: its last part; of a run's model, the run."""
    path = Path(path)
    path = path if path.name not in ("", "..") else path.resolve()
    return path.parent.name if path.name in ("model", "last") and path.parent.name else path.name


def refuse_mistyped_path(name: str | None, what: str) -> str | None:
    """`name` as it is: a path that is there, an embedded data set, or the name of a repository on the Hub, USER/NAME.

    Whoever means `runs/mine/model` and types `runs/mime` must not be given what a stranger stores under that name, nor what
    `datasets` once cached under it.

    Args:
        what: the flag, or what the name is for, which the error tells.

    Raises:
        ValueError: if nothing is there and the name looks like a path: it begins with `.`, `/`, `~` or the name of a folder that
            is here or usual, has no slash, more than one or one at its end, ends as a file does, or cannot be a name on the Hub.
    """
    if name is None or name in EMBEDDED or Path(name).expanduser().exists():
        return name
    try:
        validate_repo_id(name)
        is_repo_id = name.count("/") == 1
    except HFValidationError:  # of what begins with . or ~, has a \, or more than one slash
        is_repo_id = False
    if not is_repo_id or LIKE_A_PATH.fullmatch(name) or Path(name).parent.is_dir():
        raise UserError(
            f"{what} {name}: {Path(name).expanduser().absolute()} does not exist. Check the spelling; on the Hub, names are USER/NAME"
        )
    return name

"""The files of a run folder, and those that a manifest lists."""

import json
import shutil
from pathlib import Path

from hf_vit.system.errors import UserError
from hf_vit.system.text import printable


MANIFEST = "manifest.json"
SAMPLES, NUM_SAMPLES = "samples.safetensors", 12  # images of those that were evaluated, drawn at random
# Of every evaluated image: a table that names files of the owner, and never leaves the run folder; and logits and labels, which
# lie beside the best weights until the report.
PREDICTIONS, EVALUATED = "predictions.csv", "evaluated.safetensors"


def listed_files(folder: Path, *needed: str) -> dict[str, dict]:
    """The regular files that the manifest of `folder` lists: {name: {"bytes": ..., "sha256": ...}}.

    Raises:
        ValueError: if there is no such manifest, it lists none of `needed`, or a name leaves the folder, is missing, or goes
            through a link.
    """
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"its {MANIFEST} cannot be read ({error})") from error
    for name in (*needed, *files):
        if name not in files:
            raise UserError(f"its {MANIFEST} lists no {name}")
        if not (folder / name).resolve().is_relative_to(folder.resolve()) or not (folder / name).is_file():
            raise UserError(f"its {MANIFEST} lists {printable(name)}, which is no regular file below it")
    return files


def copy_listed(folder: Path, to: Path, leave_out: tuple[str, ...] = ()):
    """Copy the files that the manifest of `folder` lists, and no other."""
    for name in listed_files(folder):
        if name not in leave_out:
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / name, to / name)

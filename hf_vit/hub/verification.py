"""Probes: images, the logits a model gave for them and the checksums of its files, against which every copy is checked."""

import json
from pathlib import Path

import torch
from huggingface_hub import HfApi, snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_vit.evaluation.classifiers import load_classifier
from hf_vit.hub.retry import summarize_error
from hf_vit.hub.run_results import read_tensors
from hf_vit.system import run_files
from hf_vit.system.errors import UserError
from hf_vit.system.files import checksum
from hf_vit.system.hub_names import refuse_mistyped_path


PROBES, NUM_PROBES = "probes.safetensors", 4
CHECKSUMMED_FILES = (SAFE_WEIGHTS_NAME, "config.json", "preprocessor_config.json")  # their checksums are in the probes


def load_without_code(folder: Path):
    """The classifier in a folder, ours or a native one, without running its code; ValueError or OSError if it does not load."""
    try:
        return load_classifier(str(folder)).eval()
    except (ValueError, OSError):
        raise
    except Exception as error:  # files that do not belong together raise anything
        raise UserError(f"{folder} does not load: {summarize_error(error)}") from error


def compare_logits(logits: torch.Tensor, expected: torch.Tensor, tolerance: float, message: str) -> float:
    """The largest difference; ValueError if it exceeds `tolerance` times the largest expected logit (at least 1)."""
    if logits.shape != expected.shape:
        raise UserError(f"{message}: they have shape {tuple(logits.shape)}, not {tuple(expected.shape)}")
    difference = (logits - expected).abs().max().item()
    if not difference <= tolerance * max(1.0, expected.abs().max().item()):
        raise UserError(f"{message}: they are {difference:.3g} apart")
    return difference


def write_probes(folder: Path, pixel_values: torch.Tensor, logits: torch.Tensor):
    """Write probes.safetensors beside a saved model: its logits (n, L) for some images (n, C, H, W), and checksums."""
    sums = {name: checksum(folder / name) for name in CHECKSUMMED_FILES}
    metadata = {"sha256": json.dumps(sums)}  # a single text, since safetensors does not keep the order of its keys
    save_file({"pixel_values": pixel_values, "logits": logits}, folder / PROBES, metadata=metadata)


@torch.no_grad()
def verify(source: str | Path, revision: str | None = None) -> float:
    """Load a model from the Hub or a folder, check it against its probes, and return the largest difference of a logit.

    No code of the repository is run. This proves that nothing was damaged or mixed up since the push, not who pushed it:
    whoever can replace the weights can replace these logits and their checksums too.

    Raises:
        ValueError: if it is a path that does not exist, has no probes, or its files or logits are not those that were pushed.
        OSError: if it cannot be downloaded.
    """
    folder = Path(refuse_mistyped_path(str(source), "--verify"))
    if not folder.is_dir():
        head = HfApi().model_info(str(source), revision=revision).sha  # what is there now, not a cached revision
        folder = Path(snapshot_download(str(source), revision=head, allow_patterns=[*CHECKSUMMED_FILES, PROBES]))
    if missing := [name for name in (PROBES, *CHECKSUMMED_FILES) if not (folder / name).is_file()]:
        missing = " and no ".join(missing)
        raise UserError(f"{source} has no {missing}: it is incomplete, or was not pushed by recipes/publish.py")
    probes = read_tensors(folder / PROBES, "pixel_values", "logits")
    with safe_open(folder / PROBES, "pt") as opened:
        recorded = json.loads((opened.metadata() or {}).get("sha256", "{}"))
    run_files.check_shape(recorded, {str: str}, f"the checksums in {PROBES} of {source}")
    for name in CHECKSUMMED_FILES:
        if (found := checksum(folder / name)) != recorded.get(name):
            raise UserError(
                f"{name} of {source} has the checksum {found[:12]}, not {str(recorded.get(name))[:12]} as when it was pushed: "
                "it was changed since, or the download is damaged (delete it from the cache and try again)"
            )
    try:
        logits = load_without_code(folder)(probes["pixel_values"]).logits
    except (RuntimeError, KeyError) as error:  # probes that do not fit the model
        raise UserError(f"{source} does not load: {summarize_error(error)}") from error
    message = f"the logits of {source} are not those that were saved with it"
    return compare_logits(logits, probes["logits"], 1e-5, message)

"""Probes: images, what a model gave for them and the checksums of its files, against which every copy is checked."""

import json
from pathlib import Path

import torch
from huggingface_hub import HfApi, snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_vit.card import read_config
from hf_vit.evaluation.classifiers import load_classifier
from hf_vit.model.masked_autoencoder import HFViTForPreTraining
from hf_vit.model.modeling_hf_vit import HFViTModel
from hf_vit.system.errors import UserError, as_user_errors
from hf_vit.system.files import checksum
from hf_vit.system.hub_names import refuse_mistyped_path


PROBES, NUM_PROBES = "probes.safetensors", 4
CHECKSUMMED_FILES = (SAFE_WEIGHTS_NAME, "config.json", "preprocessor_config.json")  # their checksums are in the probes


def is_pretrained(folder: Path) -> bool:
    """Whether a saved model is that of a run without labels."""
    return read_config(folder).get("architectures") == [HFViTForPreTraining.__name__]


@torch.no_grad()
def outputs_of(folder: Path, pixel_values: torch.Tensor) -> torch.Tensor:
    """What a saved model gives for images (n, C, H, W): logits (n, L), or of one without labels the encoder's tokens (n, T, D)."""
    if is_pretrained(folder):
        return HFViTModel.from_pretrained(folder).eval()(pixel_values).last_hidden_state
    return load_classifier(str(folder), regression=True).eval()(pixel_values).logits


def compare_outputs(found: torch.Tensor, expected: torch.Tensor, tolerance: float, message: str) -> float:
    """The largest difference; ValueError if it exceeds `tolerance` times the largest expected value (at least 1)."""
    if found.shape != expected.shape:
        raise UserError(f"{message}: they have shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    difference = (found - expected).abs().max().item()
    if not difference <= tolerance * max(1.0, expected.abs().max().item()):
        raise UserError(f"{message}: they are {difference:.3g} apart")
    return difference


def write_probes(folder: Path, pixel_values: torch.Tensor, outputs: torch.Tensor):
    """Write probes.safetensors beside a saved model: its outputs for some images (n, C, H, W), and checksums."""
    sums = {name: checksum(folder / name) for name in CHECKSUMMED_FILES}
    metadata = {"sha256": json.dumps(sums)}  # a single text, since safetensors does not keep the order of its keys
    save_file({"pixel_values": pixel_values, "logits": outputs.contiguous()}, folder / PROBES, metadata=metadata)


def verify(source: str | Path, revision: str | None = None) -> float:
    """Load a model from the Hub or a folder, check it against its probes, and return the largest difference of an output.

    No code of the repository is run. This proves that nothing was damaged or mixed up since the push, not who pushed it:
    whoever can replace the weights can replace these outputs and their checksums too.

    Raises:
        ValueError: if it is a path that does not exist, has no probes, or its files or outputs are not those that were pushed.
        OSError: if it cannot be downloaded.
    """
    folder = Path(refuse_mistyped_path(str(source), "--verify"))
    if not folder.is_dir():
        head = HfApi().model_info(str(source), revision=revision).sha  # what is there now, not a cached revision
        folder = Path(snapshot_download(str(source), revision=head, allow_patterns=[*CHECKSUMMED_FILES, PROBES]))
    if missing := [name for name in (PROBES, *CHECKSUMMED_FILES) if not (folder / name).is_file()]:
        raise UserError(
            f"{source} has no {' and no '.join(missing)}: it is incomplete, or was not pushed by publish.py"
        )
    with as_user_errors(), safe_open(folder / PROBES, "pt") as opened:
        probes = {name: opened.get_tensor(name) for name in ("pixel_values", "logits")}
        recorded = json.loads(opened.metadata()["sha256"])
    for name in CHECKSUMMED_FILES:
        if (found := checksum(folder / name)) != recorded.get(name):
            raise UserError(
                f"{name} of {source} has the checksum {found[:12]}, not {str(recorded.get(name))[:12]}: it was changed since the "
                "push, or the download is damaged"
            )
    message = f"the outputs of {source} are not those that were saved with it"
    with as_user_errors():
        return compare_outputs(outputs_of(folder, probes["pixel_values"]), probes["logits"], 1e-5, message)

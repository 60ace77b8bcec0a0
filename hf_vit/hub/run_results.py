"""A finished run: the names of its files, what they must hold, and how to read them safely."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoImageProcessor
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_NAME

from hf_vit.evaluation.results import Results
from hf_vit.model.configuration_hf_vit import as_pair
from hf_vit.system import run_files
from hf_vit.system.command_line import script_name
from hf_vit.system.errors import UserError
from hf_vit.system.hub_names import name_of_path
from hf_vit.system.run_files import NUMBER, OPTIONAL, SAMPLES


TRAINING_FILES = ("results.json", "config.yaml", "metrics.jsonl", "confusion_matrix.csv")
FIGURES = (
    "predictions", "mistakes", "attention", "confusion", "average_precision", "calibration", "curves", "augmentations", "inside",
)  # fmt: skip
FIGURES_WITH_IMAGES = ("predictions", "mistakes", "attention", "augmentations")  # that show images of the data set
MAX_TRAINING_FILE_BYTES = 2**30  # the confusion matrix of 20,000 classes
PER_CLASS = ("images", "average_precision", "precision", "recall", "f1")
RESULTS_SHAPE = {  # the part of results.json that a card shows
    **dict.fromkeys(("metrics_of", "mixed_precision", "hardware", "command", "answer"), str),
    **dict.fromkeys(("commit", "base_model_hub_id", "attention_query"), (OPTIONAL, str)),
    **dict.fromkeys(("parameters", "steps", "images_per_step", "seed"), int),
    **dict.fromkeys(("train_seconds", "images_per_second"), NUMBER),
    "metrics": {str: NUMBER},
    "intervals": {str: [NUMBER, 2]},
    "warnings": (OPTIONAL, [str]),
    "thresholds": (OPTIONAL, [NUMBER]),
    "temperature": (OPTIONAL, NUMBER),
    "per_class": [{"label": str, **dict.fromkeys(PER_CLASS, (OPTIONAL, NUMBER))}],
    "image_size": [int, 2],
    "versions": {str: str},
    "data": {
        **dict.fromkeys(("name", "scored"), str),
        **dict.fromkeys(("hub_id", "config", "license"), (OPTIONAL, str)),
        **dict.fromkeys(("train_images", "scored_duplicates"), (OPTIONAL, int)),
        **{"labels": [str], "scored_images": int},
    },
}


def read_redacted(file: Path) -> str:
    """The text of a run's file, with ~ for the home directory, whose path may hold a person's name."""
    text, home = run_files.read_text(file, MAX_TRAINING_FILE_BYTES), Path.home()
    return text if len(home.parts) < 2 else re.sub(rf"(?<![\w.-]){re.escape(str(home))}(?![\w.-])", "~", text)


def read_run(run: Path) -> tuple[Results, str]:
    """results.json and the text of config.yaml of a finished run, without the name of the home directory.

    Raises:
        ValueError: if it is not a finished run, or a file has unexpected content or is a link, whose target would be published.
    """
    if not run.is_dir():
        raise UserError(f"there is no folder {run}: wanted that of a finished run, as recipes/train.py leaves it")
    if (run / "config.json").is_file():
        raise UserError(f"{run} is the folder of a model: wanted that of its run, such as {run.resolve().parent}")
    missing = [name for name in (*TRAINING_FILES, "model/config.json") if not (run / name).is_file()]
    if missing and (run / "config.yaml").is_file() and "\nmask_ratio: " in read_redacted(run / "config.yaml"):
        raise UserError(
            f"{run} was trained without labels, and has no classifier to share: fine-tune it with {script_name('train')}"
        )
    if missing:
        unfinished = "is not finished (the command that began it resumes it)"
        state = unfinished if (run / "config.yaml").is_file() else "is not a run"
        raise UserError(f"{run} {state}: it has no {' and no '.join(missing)}")
    run_files.refuse_links(run, *TRAINING_FILES, SAMPLES, "model", "export")
    run_files.read_flat_yaml(run / "config.yaml")
    results = run_files.read_json(run / "results.json", {}, MAX_TRAINING_FILE_BYTES)
    if absent := {"metrics", "intervals", "per_class", "data", "mixed_precision", "steps"} - set(results):
        absent = ", ".join(sorted(absent))
        raise UserError(f"results.json of {run} lacks {absent}: another version wrote it; train it again")
    text = read_redacted(run / "results.json")
    run_files.check_shape(json.loads(text), RESULTS_SHAPE, str(run / "results.json"))
    return Results.from_json(text), read_redacted(run / "config.yaml")


def without_paths(results: Results, config: str) -> tuple[Results, str]:
    """The record of a run as others may read it, in its card and on the Hub: each path of this machine is replaced by a name.

    The files in the run's own folder keep the paths; its config.yaml repeats the run. A path is what begins with / or ~, or leads
    out of the working folder; others, such as runs/mine, say nothing of the machine.

    Args:
        config: the text of config.yaml.
    """
    is_path = lambda value: isinstance(value, str) and (value.startswith(("/", "~")) or ".." in Path(value).parts)
    public = lambda value: name_of_path(value) if is_path(value) else value
    words = []
    try:
        said, join = shlex.split(results.command), shlex.join
    except ValueError:  # a quotation mark is open: it was changed since
        said, join = results.command.split(), " ".join
    for word in said:
        flag, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        words.append(flag + equals + public(value))
    settings, data = yaml.safe_load(config), {**results.data, "name": public(results.data["name"])}
    if "skipped_first" in data:  # names of files
        data["skipped_first"] = []
    public_results = replace(results, command=join(words), data=data, preset=public(results.preset))
    named = {key: public(value) for key, value in settings.items()}
    return public_results, config if named == settings else yaml.safe_dump(named, sort_keys=False)


def thresholds_of_run(results: Results) -> torch.Tensor | None:
    """The thresholds (L,) of a run with several labels an image; None of one with one label."""
    return torch.tensor(results.thresholds) if results.thresholds else None


def read_config(model: Path) -> dict:
    """config.json of a saved model."""
    return json.loads((model / "config.json").read_text())


def num_channels(model: Path) -> int:
    """Channels of the images that a saved model takes."""
    config = read_config(model)
    return config.get("vision_config", config).get("num_channels", 3)


def weights_file(model: Path) -> Path:
    """The weights of a saved model: the whole model or a LoRA adapter."""
    adapter = model / ADAPTER_SAFE_WEIGHTS_NAME
    return adapter if adapter.is_file() else model / SAFE_WEIGHTS_NAME


def read_tensors(file: Path, *required: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file; ValueError if it is damaged or lacks a required one."""
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise UserError(f"{file} cannot be read ({error}): fetch or make it again") from error
    if missing := set(required) - set(tensors):
        raise UserError(f"{file} lacks {' and '.join(sorted(missing))}: it was not written by this version")
    return tensors


def read_samples(file: Path, *required: str) -> dict[str, torch.Tensor]:
    """ "images" (n, C, H, W), as bytes, "logits" (n, L), and what else is required of a run's samples.safetensors."""
    if not file.is_file():
        raise UserError(f"{file.parent} holds no {SAMPLES}: pass --without_images, or train it with this version")
    return read_tensors(file, "images", "logits", *required)


def load_samples(run: Path, config) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised sample images of a run (n, C, H, W), and the logits that the run computed for them (n, L).

    Args:
        config: of the run's model.

    Raises:
        ValueError: if the run has no samples, or they do not fit the model and its image processor.
    """
    samples = read_samples(run / SAMPLES)
    processor = AutoImageProcessor.from_pretrained(run / "model", trust_remote_code=False)
    images, size = samples["images"], (config.num_channels, *as_pair(config.image_size))
    if images.dtype != torch.uint8 or images.shape[1:] != size or not len(images):
        raise UserError(f"{run / SAMPLES} holds no uint8 images of shape {size}: it is of another run")
    try:
        mean, std = (
            torch.tensor(values).view(1, size[0], 1, 1) for values in (processor.image_mean, processor.image_std)
        )
        return (images.float() / 255 - mean) / std, samples["logits"]
    except (AttributeError, RuntimeError, TypeError) as error:
        raise UserError(f"preprocessor_config.json of {run / 'model'} does not fit its model: {error}") from error


def write_examples(samples: Path, folder: Path, count: int = 6) -> list[Path]:
    """Write the first images of a run's samples.safetensors as PNG files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, image in enumerate(read_samples(samples)["images"][:count], 1):
        files.append(folder / f"{number}.png")
        Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy()).save(files[-1])  # (C, H, W) -> (H, W, 3) or (H, W)
    return files

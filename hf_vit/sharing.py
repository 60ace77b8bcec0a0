"""results.json -> a model card; and the circumstances of a run that belong into results.json."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData


REPORTED = ("torch", "transformers", "accelerate", "datasets", "evaluate", "huggingface_hub", "safetensors", "hf_vit")


def circumstances(device_type: str, processes: int, precision: str) -> dict:
    """Commit, hardware and versions of this run, as results.json holds them."""
    repository = Path(__file__).parents[1]
    git = lambda *command: subprocess.run(["git", *command], cwd=repository, capture_output=True, text=True)
    commit = git("rev-parse", "--verify", "--quiet", "HEAD").stdout.strip() or None
    if commit and git("status", "--porcelain", "--untracked-files=no").stdout.strip():
        commit += " with local changes"
    chip = torch.cuda.get_device_name() if device_type == "cuda" else _processor()
    cores = f", {os.cpu_count()} cores" if device_type == "cpu" else ""
    return {
        "commit": commit,
        "hardware": f"{processes} x {chip}{cores}" if processes > 1 else f"{chip}{cores}",
        "mixed_precision": precision,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in REPORTED}},
    }


def _processor() -> str:
    name = torch.cpu.get_capabilities().get("cpu_name") or platform.machine()
    return f"{name} CPU" if "cpu" not in name.lower() else name


def write_card(folder: Path, template: Path, results: dict, config: str, base_model: str | None = None) -> Path:
    """Write README.md beside a saved model, from its results; every number in it comes from there.

    Args:
        folder: holds the saved model; its name in the card's example is its path.
        template: Jinja template of the card.
        results: as in results.json.
        config: the run's configuration, as YAML.
        base_model: the checkpoint that was fine-tuned, if one was.
    """
    data = results["data"]
    name = Path(data["name"]).name
    title = f"Vision Transformer on {name}"
    card_data = ModelCardData(
        library_name="transformers",
        pipeline_tag="image-classification",
        tags=["hf_vit", "vision", "image-classification"],
        base_model=base_model,
        model_name=title,
        eval_results=[
            EvalResult(
                task_type="image-classification",
                dataset_type=data["name"],
                dataset_name=name,
                dataset_split=data["scored"],
                metric_type="accuracy",
                metric_value=results["metrics"]["accuracy"],
            )
        ],
    )
    card = ModelCard.from_template(
        card_data,
        template_path=str(template),
        title=title,
        results=results,
        height=results["image_size"][0],
        width=results["image_size"][1],
        parameters=f"{results['parameters']:,}",
        how=f"from `{base_model}`" if base_model else "from scratch",
        where=str(folder),
        base_model=base_model,
        adapter=(folder / "adapter_config.json").is_file(),
        labels=", ".join(data["labels"]),
        versions=", ".join(f"{package} {number}" for package, number in results["versions"].items()),
        config=config,
    )
    card.save(folder / "README.md")
    return folder / "README.md"

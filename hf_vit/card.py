"""A model card: a template, filled from the `Results` of a run."""

import json
import re
import shlex
import urllib.parse
from dataclasses import replace
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_NAME

from hf_vit.evaluation.results import Results
from hf_vit.model.configuration_hf_vit import HFViTConfig
from hf_vit.system.escapes import as_license, inline, inline_all, printable
from hf_vit.system.files import checksum
from hf_vit.system.hub_names import name_of_path
from hf_vit.system.recipes_folder import EMBEDDED
from hf_vit.system.run_files import NUM_SAMPLES


TRANSFORMERS_JS_MODELS = ("vit", "deit", "ijepa", "dinov2", "dinov2_with_registers")  # classifiers of version 4
FIGURES = (
    "predictions", "mistakes", "attention", "confusion", "scatter", "average_precision", "calibration", "curves", "augmentations", "inside",
    "reconstructions",
)  # fmt: skip
METRICS = {  # key of results.json: name in the card, metric of the Hub, format
    "accuracy": ("accuracy", "accuracy", "{:.2%}"),
    "top5_accuracy": ("top-5 accuracy", "accuracy", "{:.2%}"),
    "balanced_accuracy": ("balanced accuracy", "balanced_accuracy", "{:.2%}"),
    "macro_f1": ("macro F1", "f1", "{:.2%}"),
    "calibration_error": ("expected calibration error", "ece", "{:.4f}"),
    "mean_average_precision": ("mean average precision", "mean_average_precision", "{:.2%}"),
    "micro_f1": ("micro F1", "f1", "{:.2%}"),
    "exact_match": ("exact match", "exact_match", "{:.2%}"),
    "mae": ("mean absolute error", "mae", "{:.4g}"),
    "r2": ("R²", "r_squared", "{:.4f}"),
    "loss": ("cross-entropy", "loss", "{:.4f}"),
}


def write_card(
    folder: Path,
    template: Path,
    results: Results,
    config: str,
    *,
    model_path: str | None = None,
    repo: str | None = None,
    revision: str | None = None,
    license: str | None = None,
    prediction: str | None = None,
    layout: str | None = None,
    export: dict | None = None,
):
    """Write README.md beside a saved classifier; every number in it comes from the run's results, and no path (`without_paths`).

    Args:
        folder: holds the saved model and perhaps `example.png` and `figures/`.
        template: Jinja template of the card.
        config: the text of config.yaml.
        model_path: what the card calls the folder if not by its path.
        repo, revision: where the model will be on the Hub; None for a local model, and for the main branch.
        license: of the weights, an id such as apache-2.0.
        prediction: for example.png; default: that of the results.
        layout: a sentence on how the model is stored and why.
        export: the content of export.json if its files are published too.
    """
    results, config = without_paths(results, config)
    title = f"Vision Transformer on {_data_name(results)}"
    metrics, evaluations = _metrics(results)
    about = _metadata(results, license, "image-classification", model_name=title, eval_results=evaluations)
    model_type, channels, weights = read_config(folder)["model_type"], num_channels(folder), weights_file(folder)
    is_ours = model_type == HFViTConfig.model_type
    has_code = is_ours and (folder / "modeling_hf_vit.py").is_file()
    at = f", revision={json.dumps(revision)}" if revision else ""
    example = json.dumps("photo.jpg")
    if has_example := (folder / "example.png").is_file():
        local = json.dumps(str(Path(model_path or folder, "example.png")))
        example = f'hf_hub_download("{repo}", "example.png"{at})' if repo else local
    recalls = [row for row in results.per_class if row.get("recall") is not None]
    _write(
        folder,
        template,
        about,
        results,
        config,
        title=title,
        metrics=metrics,
        thresholds=results.thresholds,
        weakest=inline_all(sorted(recalls, key=lambda row: row["recall"])[:3] if len(recalls) > 3 else []),
        license=inline(as_license(license) or ""),
        has_weights=weights.is_file(),
        checksum=checksum(weights) if weights.is_file() else results.weights_sha256,
        adapter=weights.name == ADAPTER_SAFE_WEIGHTS_NAME,
        channels=channels,
        repo=repo,
        source=json.dumps(repo or model_path or str(folder)),
        at=at,
        trust=", trust_remote_code=True" if has_code else "",
        needs_package=is_ours and not has_code,
        has_example=has_example,
        example=example,
        javascript=bool(export and repo and channels == 3 and model_type in TRANSFORMERS_JS_MODELS),
        samples=min(NUM_SAMPLES, results.data["scored_images"]),
        layout=layout,
        prediction=inline(prediction or results.answer),
        export=inline_all(export),
    )


def write_pretraining_card(
    folder: Path,
    template: Path,
    results: Results,
    config: str,
    *,
    repo: str | None = None,
    revision: str | None = None,
    license: str | None = None,
):
    """Write README.md beside a model that was trained without labels; see `write_card`."""
    results, config = without_paths(results, config)
    _write(
        folder,
        template,
        _metadata(results, license, "image-feature-extraction"),
        results,
        config,
        title=f"Vision Transformer pre-trained on {_data_name(results)}",
        license=inline(as_license(license) or ""),
        source=json.dumps(repo or str(folder)),
        at=f", revision={json.dumps(revision)}" if revision else "",
        checksum=checksum(weights_file(folder)),
    )


def write_regression_card(
    folder: Path,
    template: Path,
    results: Results,
    config: str,
    *,
    repo: str | None = None,
    revision: str | None = None,
    license: str | None = None,
):
    """Write README.md beside a model that predicts a number; see `write_card`."""
    results, config = without_paths(results, config)
    title = f"Vision Transformer for regression on {_data_name(results)}"
    metrics, evaluations = _metrics(results)
    has_code = (folder / "modeling_hf_vit.py").is_file()
    _write(
        folder,
        template,
        _metadata(results, license, None, model_name=title, eval_results=evaluations),
        results,
        config,
        title=title,
        metrics=metrics,
        license=inline(as_license(license) or ""),
        source=json.dumps(repo or str(folder)),
        at=f", revision={json.dumps(revision)}" if revision else "",
        trust=", trust_remote_code=True" if has_code else "",
        channels=num_channels(folder),
        checksum=checksum(weights_file(folder)),
    )


def _write(folder: Path, template: Path, metadata: ModelCardData, results: Results, config: str, title: str, **values):
    data = results.data
    card = ModelCard.from_template(
        metadata,
        template_path=str(template),
        title=inline(title),
        results=inline_all(results.as_dict()),
        settings=inline_all(yaml.safe_load(config)),
        command=printable(results.command),
        hub_id=urllib.parse.quote(data.get("hub_id") or ""),
        on_disk=not data.get("hub_id") and data["name"] not in EMBEDDED,
        data_license=inline(as_license(data.get("license")) or ""),
        weights=weights_file(folder).name,
        pictures={name: (folder / "figures" / f"{name}.png").is_file() for name in FIGURES},
        config=config,
        fence="`" * max(3, 1 + max(map(len, re.findall("`+", config)), default=0)),  # longer than any in the config
        **values,
    )
    (folder / "README.md").write_text(re.sub(r"\n{3,}", "\n\n", card.content), encoding="utf-8")


def _data_name(results: Results) -> str:
    return printable(Path(results.data["name"]).name) or "images"


def _metadata(results: Results, license: str | None, task: str | None, **more) -> ModelCardData:
    hub_id = results.data.get("hub_id")
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        tags=["hf_vit", "vision"],
        license=as_license(license),
        base_model=results.base_model_hub_id,
        datasets=[hub_id] if hub_id else None,
        **more,
    )


def _metrics(results: Results) -> tuple[list[tuple], list[EvalResult]]:
    """Rows (metric, value, interval) of the card's table, and the same for the metadata."""
    data, rows, evaluations = results.data, [], []
    for key, (metric, hub_metric, form) in METRICS.items():
        if key not in results.metrics:
            continue
        value, interval = results.metrics[key], results.intervals.get(key)
        if key == "loss" and results.thresholds:  # of several labels an image
            metric = "binary cross-entropy"
        elif key == "loss" and "r2" in results.metrics:
            metric = "squared error, of standardised labels"
        interval = interval and f"{form.format(interval[0])} to {form.format(interval[1])}"
        rows.append((metric, form.format(value), interval))
        evaluations.append(
            EvalResult(
                task_type="image-regression" if "r2" in results.metrics else "image-classification",
                dataset_type=data.get("hub_id") or "imagefolder",
                dataset_name=_data_name(results),
                dataset_config=data.get("config") and printable(data["config"]),
                dataset_split=printable(data["scored"]),
                metric_type=hub_metric,
                metric_value=round(value, 6),
                metric_name=f"{metric} (95% interval {interval})" if interval else metric,
            )
        )
    return rows, evaluations


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
    for word in shlex.split(results.command):
        flag, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        words.append(flag + equals + public(value))
    settings, data = yaml.safe_load(config), {**results.data, "name": public(results.data["name"])}
    if "skipped_first" in data:  # names of files
        data["skipped_first"] = []
    public_results = replace(results, command=shlex.join(words), data=data, preset=public(results.preset))
    named = {key: public(value) for key, value in settings.items()}
    return public_results, config if named == settings else yaml.safe_dump(named, sort_keys=False)


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

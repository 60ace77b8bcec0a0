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
from hf_vit.system.files import checksum
from hf_vit.system.hub_names import name_of_path
from hf_vit.system.recipes_folder import EMBEDDED
from hf_vit.system.run_files import NUM_SAMPLES
from hf_vit.system.text import as_license, counted, inline, inline_all, printable


TRANSFORMERS_JS_MODELS = ("vit", "deit", "ijepa", "dinov2", "dinov2_with_registers")  # classifiers of version 4
FIGURES = (
    "predictions", "mistakes", "attention", "confusion", "scatter", "average_precision", "calibration", "curves", "distances",
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
    """Write README.md beside a saved model; every number in it comes from the run's results, and no path (`without_paths`).

    Args:
        folder: holds the saved model and perhaps `example.png` and `figures/`.
        template: Jinja template of the card: that of a classifier, a regression, or a model that was trained without labels.
        config: the text of config.yaml.
        model_path: what the card calls the folder if not by its path.
        repo, revision: where the model will be on the Hub; None for a local model, and for the main branch.
        license: of the weights, an id such as apache-2.0.
        prediction: for example.png; default: that of the results.
        layout: a sentence on how the model is stored and why.
        export: the content of export.json if its files are published too.
    """
    results, config = without_paths(results, config)
    data, has_labels = results.data, results.intervals is not None
    name = printable(Path(data["name"]).name) or "images"
    kind = "" if has_labels else "pre-trained "
    title = f"Vision Transformer {'for regression ' if 'r2' in results.metrics else kind}on {name}"
    metrics, evaluations = _metrics(results, name) if has_labels else ([], None)
    recalls = [row for row in results.per_class or () if row.get("recall") is not None]
    card = ModelCard.from_template(
        _metadata(results, title, license, evaluations),
        template_path=str(template),
        **_loading(folder, model_path, repo, revision, export),
        counted=counted,
        title=inline(title),
        results=inline_all(results.as_dict()),
        metrics=metrics,
        thresholds=results.thresholds,
        weakest=inline_all(sorted(recalls, key=lambda row: row["recall"])[:3] if len(recalls) > 3 else []),
        settings=inline_all(yaml.safe_load(config)),
        command=printable(results.command),
        hub_id=urllib.parse.quote(data.get("hub_id") or ""),
        on_disk=not data.get("hub_id") and data["name"] not in EMBEDDED,
        data_license=inline(as_license(data.get("license")) or ""),
        license=inline(as_license(license) or ""),
        checksum=checksum(file) if (file := weights_file(folder)).is_file() else results.weights_sha256,
        pictures={name: (folder / "figures" / f"{name}.png").is_file() for name in FIGURES},
        samples=min(NUM_SAMPLES, data["scored_images"]),
        layout=layout,
        prediction=inline(prediction or results.answer),
        export=inline_all(export),
        config=config,
        fence="`" * max(3, 1 + max(map(len, re.findall("`+", config)), default=0)),  # longer than any in the config
    )
    (folder / "README.md").write_text(re.sub(r"\n{3,}", "\n\n", card.content), encoding="utf-8")


def _metadata(results: Results, title: str, license: str | None, evaluations) -> ModelCardData:
    """What the Hub reads of a card; `evaluations` as `_metrics` gives them, None of a model without labels."""
    hub_id, is_classifier = results.data.get("hub_id"), evaluations is not None and "r2" not in results.metrics
    task = "image-classification" if is_classifier else None if evaluations else "image-feature-extraction"
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        tags=["hf_vit", "vision"],
        license=as_license(license),
        base_model=results.base_model_hub_id,
        datasets=[hub_id] if hub_id else None,
        model_name=title if evaluations else None,
        eval_results=evaluations,
    )


def _loading(
    folder: Path, model_path: str | None, repo: str | None, revision: str | None, export: dict | None
) -> dict:
    """What the lines of code in the card depend on; arguments as of `write_card`."""
    weights, model_type, channels = weights_file(folder), read_config(folder)["model_type"], num_channels(folder)
    is_ours, has_code = model_type == HFViTConfig.model_type, (folder / "modeling_hf_vit.py").is_file()
    has_example, at = (folder / "example.png").is_file(), f", revision={json.dumps(revision)}" if revision else ""
    example = json.dumps(str(Path(model_path or folder, "example.png")) if has_example else "photo.jpg")
    return dict(
        weights=weights.name,
        has_weights=weights.is_file(),
        adapter=weights.name == ADAPTER_SAFE_WEIGHTS_NAME,
        channels=channels,
        repo=repo,
        source=json.dumps(repo or model_path or str(folder)),
        at=at,
        trust=", trust_remote_code=True" if is_ours and has_code else "",
        needs_package=is_ours and not has_code,
        has_example=has_example,
        example=f'hf_hub_download("{repo}", "example.png"{at})' if has_example and repo else example,
        javascript=bool(export and repo and channels == 3 and model_type in TRANSFORMERS_JS_MODELS),
    )


def _metrics(results: Results, name: str) -> tuple[list[tuple], list[EvalResult]]:
    """Rows (metric, value, interval) of the card's table, and the same for the metadata; `name` is that of the data."""
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
                dataset_name=name,
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

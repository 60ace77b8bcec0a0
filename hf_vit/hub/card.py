"""The model card: written from the results of a run, and merged into the README.md that a repository already has."""

import contextlib
import json
import re
import urllib.parse
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME

from hf_vit.evaluation.results import Results
from hf_vit.hub.retry import summarize_error
from hf_vit.hub.run_results import FIGURES, PER_CLASS, num_channels, read_config, weights_file, without_paths
from hf_vit.model.configuration_hf_vit import HFViTConfig
from hf_vit.system.errors import UserError
from hf_vit.system.escapes import as_license, inline, inline_all, printable
from hf_vit.system.files import checksum
from hf_vit.system.recipes_folder import EMBEDDED
from hf_vit.system.run_files import NUM_SAMPLES


# These three stand in repositories that were pushed already: a later push finds the card of an earlier one by them.
CARD_BEGIN = "<!-- hf_vit wrote this part; a later push replaces it, and keeps the text around it -->"
CARD_END = "<!-- end of hf_vit's part -->"
METADATA_RECORD = "<!-- metadata of this part: {} -->"

COMMIT_PLACEHOLDER = "<commit>"  # until the push knows the hash
TRANSFORMERS_JS_MODELS = ("vit", "deit", "ijepa", "dinov2", "dinov2_with_registers")  # classifiers of version 4
METRICS = (  # key of results.json, name in the card, metric of the Hub, format
    ("accuracy", "accuracy", "accuracy", "{:.2%}"),
    ("top5_accuracy", "top-5 accuracy", "accuracy", "{:.2%}"),
    ("balanced_accuracy", "balanced accuracy", "balanced_accuracy", "{:.2%}"),
    ("macro_f1", "macro F1", "f1", "{:.2%}"),
    ("calibration_error", "expected calibration error", "ece", "{:.4f}"),
    ("mean_average_precision", "mean average precision", "mean_average_precision", "{:.2%}"),
    ("micro_f1", "micro F1", "f1", "{:.2%}"),
    ("exact_match", "exact match", "exact_match", "{:.2%}"),
    ("loss", "cross-entropy", "loss", "{:.4f}"),
)


def write_card(
    folder: Path,
    template: Path,
    results: Results,
    config: str,
    *,
    model_path: str | None = None,
    repo: str | None = None,
    revision: str | None = None,
    prediction: str | None = None,
    layout: str | None = None,
    license: str | None = None,
    export: dict | None = None,
) -> Path:
    """Write README.md beside a saved model; every number in it comes from the run's results, and no path (`without_paths`).

    Args:
        folder: holds the saved model and perhaps `example.png` and `figures/`.
        template: Jinja template of the card.
        config: the text of config.yaml.
        model_path: what the card calls the folder if not by its path.
        repo, revision: where the model will be on the Hub; None for a local model, and for the main branch.
        prediction: for `example.png`, see `format_prediction`; by default that of the results.
        layout: a sentence on how the model is stored and why, see `package.choose_layout`.
        license: of the weights, an id such as apache-2.0.
        export: the content of export.json if its files are published too.
    """
    results, config = without_paths(results, config)
    data, license = results.data, as_license(license)
    name = printable(Path(data["name"]).name) or "images"
    title = f"Vision Transformer on {name}"
    metrics, metadata = _metrics_and_metadata(results, name, title, license)
    base_model = yaml.safe_load(config).get("model_name_or_path")
    weights, channels, model_type = weights_file(folder), num_channels(folder), read_config(folder)["model_type"]
    is_adapter = weights.name == ADAPTER_SAFE_WEIGHTS_NAME
    if is_adapter:
        layout = f"This is a LoRA adapter of {inline(base_model)}; it needs the packages hf_vit and peft."
    recalls = sorted(
        (row for row in results.per_class if row.get("recall") is not None), key=lambda row: row["recall"]
    )
    thresholds = results.thresholds
    card = ModelCard.from_template(
        metadata,
        template_path=str(template),
        begin=CARD_BEGIN,
        end=CARD_END,
        record=METADATA_RECORD.format(_encode_metadata(metadata.to_dict())),
        title=inline(title),
        results=inline_all(results.as_dict()),
        hub_id=urllib.parse.quote(data.get("hub_id") or ""),
        selected="the best" in results.metrics_of,
        command=printable(results.command),
        metrics=metrics,
        base_model=base_model and inline(base_model),
        data_license=inline(as_license(data.get("license")) or ""),
        thresholds=thresholds and [f"{value:.4f}" for value in thresholds],
        per_class=[_percentages(row) for row in results.per_class] if thresholds else None,
        on_disk=not data.get("hub_id") and data["name"] not in EMBEDDED,
        license=inline(license or ""),
        weights=weights.name,
        has_weights=weights.is_file(),
        checksum=checksum(weights) if weights.is_file() else results.weights_sha256,
        repo=repo,
        layout=layout,
        adapter=is_adapter,
        channels=channels,
        prediction=inline(prediction or results.answer),
        export=export
        and inline_all(export) | {"files": {inline(k): inline_all(v) for k, v in export["files"].items()}},
        javascript=bool(export and repo and channels == 3 and model_type in TRANSFORMERS_JS_MODELS),
        pictures={name: (folder / "figures" / f"{name}.png").is_file() for name in FIGURES},
        samples=min(NUM_SAMPLES, data["scored_images"]),
        weakest=", ".join(f"{inline(row['label'])} ({row['recall']:.2%})" for row in recalls[:3] if len(recalls) > 3),
        versions=inline(", ".join(f"{package} {number}" for package, number in results.versions.items())),
        config=config,
        fence="`" * max(3, 1 + max(map(len, re.findall("`+", config)), default=0)),  # longer than any in the config
        **_code_arguments(folder, model_path or str(folder), repo, revision),
    )
    (folder / "README.md").write_text(_escape_comments(card), encoding="utf-8")
    return folder / "README.md"


def write_pretraining_card(folder: Path, template: Path, results: Results, config: str) -> Path:
    """Write README.md beside a model that was trained without labels; see `write_card`."""
    results, config = without_paths(results, config)
    title = f"Vision Transformer pre-trained on {printable(Path(results.data['name']).name) or 'images'}"
    metadata = ModelCardData(
        library_name="transformers", pipeline_tag="image-feature-extraction", tags=["hf_vit", "vision"]
    )
    settings = yaml.safe_load(config)
    card = ModelCard.from_template(
        metadata,
        template_path=str(template),
        title=inline(title),
        results=inline_all(results.as_dict()),
        settings=inline_all(settings),
        command=printable(results.command),
        source=json.dumps(str(folder)),
        checksum=checksum(weights_file(folder)),
        pictures={file.stem for file in (folder / "figures").glob("*.png")},
        versions=inline(", ".join(f"{package} {number}" for package, number in results.versions.items())),
        config=config,
    )
    (folder / "README.md").write_text(card.content, encoding="utf-8")
    return folder / "README.md"


def _percentages(row: dict) -> dict:
    """A row of `per_class` of several labels an image, as the card shows it."""
    percent = lambda value: "-" if value is None else f"{value:.2%}"
    shares = {key: percent(row.get(key)) for key in PER_CLASS if key != "images"}
    return {**shares, "label": inline(row["label"]), "images": row.get("images")}


def _code_arguments(folder: Path, model_path: str, repo: str | None, revision: str | None) -> dict:
    """How the card's Python blocks name the model, its revision and an image, and whether they trust its code or import ours."""
    is_ours = read_config(folder)["model_type"] == HFViTConfig.model_type
    has_code = is_ours and (folder / "modeling_hf_vit.py").is_file()
    if has_code and repo:  # main may hold other code tomorrow: `push_model` writes the commit's hash here
        revision = COMMIT_PLACEHOLDER
    at = revision_argument(revision) if revision else ""
    has_example, image = (folder / "example.png").is_file(), json.dumps("photo.jpg")
    if has_example:
        local = json.dumps(str(Path(model_path, "example.png")))
        image = f'hf_hub_download("{repo}", "example.png"{at})' if repo else local
    trust = ", trust_remote_code=True" if has_code else ""
    source, needs_package = json.dumps(repo or model_path), is_ours and not has_code
    return dict(source=source, at=at, has_example=has_example, example=image, trust=trust, needs_package=needs_package)


def _escape_comments(card: ModelCard) -> str:
    """The card's content, where comments in our part are text: a mark of ours among them would cut it short when merged."""
    record, _, part = card.text.partition(CARD_BEGIN)[2].partition("-->")
    body = part.rpartition(CARD_END)[0].replace("<!--", "&lt;!--")
    text = f"{card.content.removesuffix(card.text)}\n{CARD_BEGIN}{record}-->{body}{CARD_END}"
    return re.sub(r"\n{3,}", "\n\n", text)


def _metrics_and_metadata(results: Results, name: str, title: str, license: str | None) -> tuple[list, ModelCardData]:
    """Rows (metric, value, interval) of the card's table, and the metadata at its top."""
    data, rows, evaluations = results.data, [], []
    for key, metric, hub_metric, form in METRICS:
        if key not in results.metrics:
            continue
        value, interval = results.metrics[key], results.intervals.get(key)
        if key == "loss" and results.thresholds:  # of several labels an image
            metric = "binary cross-entropy"
        interval = interval and f"{form.format(interval[0])} to {form.format(interval[1])}"
        rows.append((metric, form.format(value), interval))
        evaluations.append(
            EvalResult(
                task_type="image-classification",
                dataset_type=data.get("hub_id") or "imagefolder",
                dataset_name=name,
                dataset_config=data.get("config") and printable(data["config"]),
                dataset_split=printable(data["scored"]),
                metric_type=hub_metric,
                metric_value=round(value, 6),
                metric_name=f"{metric} (95% interval {interval})" if interval else metric,
            )
        )
    about = dict(library_name="transformers", pipeline_tag="image-classification", tags=["hf_vit", "vision"])
    about |= dict(license=license, base_model=results.base_model_hub_id, datasets=None)
    if data.get("hub_id"):
        about["datasets"] = [data["hub_id"]]
    return rows, ModelCardData(model_name=title, eval_results=evaluations, **about)


def _encode_metadata(metadata: dict) -> str:
    """The metadata that this push writes, so that the next one can tell them from the owner's; safe in an HTML comment."""
    brief = {**metadata, "model-index": [entry["name"] for entry in metadata["model-index"]]}
    return json.dumps(brief).replace("<", "\\u003c").replace(">", "\\u003e").replace("--", "-\\u002d")


def revision_argument(revision: str) -> str:
    """How the card's Python blocks name a revision."""
    return f", revision={json.dumps(revision)}"


def split_card(text: str) -> tuple[dict, str]:
    """The metadata of a card and the text after them.

    Raises:
        ValueError: if the metadata are not a YAML mapping.
    """
    front, text = _front_matter(text)
    try:
        metadata = yaml.safe_load(front) or {}
    except yaml.YAMLError as error:
        raise UserError(
            f"the metadata of README.md cannot be read: fix them first ({summarize_error(error)})"
        ) from error
    if not isinstance(metadata, dict):
        kind = type(metadata).__name__
        raise UserError(f"the metadata of README.md are a {kind}, not keys with values: fix them first")
    return metadata, text


def _front_matter(text: str) -> tuple[str, str]:
    """The lines between the first two `---`, and the text after them."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    found = re.match(r"\s*---[ \t]*\n(.*?)^---[ \t]*$", text, re.DOTALL | re.MULTILINE)
    return ("", text) if found is None else (found.group(1), text[found.end() :])


def _lines_of_keys(text: str) -> dict[str, str]:
    """The lines of each key in a card's metadata, and under "" those above the first; {} where keys share a line."""
    front, lines = _front_matter(text)[0], {}
    for block in re.split(r"^(?=[^\s#-])", front, flags=re.MULTILINE):
        with contextlib.suppress(yaml.YAMLError):
            lines[next(iter(yaml.safe_load(block) or {""}))] = block
    return lines if [key for key in lines if key != ""] == list(yaml.safe_load(front) or {}) else {}


def merge_cards(new: str, existing: str, license: str | None = None) -> str:
    """The existing card with the part between our marks replaced by that of the new card, or the new part appended.

    Metadata that an earlier push did not write, or that were edited since, belong to the owner: they win, and keep their very
    lines. Tags and entries of model-index of both are kept; those of an earlier push are replaced.

    Args:
        new: as `write_card` makes it.
        existing: the README.md of the repository; "" for none.
        license: overrides that of the owner.

    Raises:
        ValueError: if the existing metadata cannot be read.
    """
    (generated, part), (old, text), lines = split_card(new), split_card(existing), _lines_of_keys(existing)
    part = CARD_BEGIN + part.rpartition(CARD_BEGIN)[2].partition(CARD_END)[0] + CARD_END
    before, begin, rest = text.rpartition(CARD_BEGIN)
    inside, end, after = rest.partition(CARD_END)
    if not (begin and end):
        before, inside, after = f"{text.rstrip()}\n\n", "", ""
    recorded = re.search(METADATA_RECORD.format("(.*?)"), inside)
    earlier = json.loads(recorded.group(1)) if recorded is not None else {}

    owned = {key: value for key, value in old.items() if key == "license" or value != earlier.get(key)}
    if license is not None:
        owned["license"] = license
    in_old_order = dict.fromkeys(key for key in old if key in owned or key in generated)
    merged = in_old_order | generated | owned
    outdated_tags = set(_as_list(earlier.get("tags"))) - set(generated["tags"])
    tags = [tag for tag in _as_list(old.get("tags")) if tag not in outdated_tags]
    merged["tags"] = list(dict.fromkeys([*tags, *generated["tags"]]))
    ours = [*_as_list(earlier.get("model-index")), *(entry["name"] for entry in generated["model-index"])]
    entries = _as_list(old.get("model-index"))
    theirs = [entry for entry in entries if not isinstance(entry, dict) or entry.get("name") not in ours]
    merged["model-index"] = [*theirs, *generated["model-index"]]

    front = lines.get("", "")
    for key, value in merged.items():
        unchanged = key in lines and value == old.get(key)
        front += lines[key] if unchanged else yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True)
    return f"---\n{front}---\n\n{(before.replace(CARD_BEGIN, '') + part + after).strip()}\n"


def _as_list(value) -> list:
    return value if isinstance(value, list) else [] if value is None else [value]


def replaced_title(new: str, existing: str) -> str:
    """The title of the model that an earlier push left in a repository, if the new card has another one; else ""."""
    titles = [re.search(r"^# (.+)$", card.rpartition(CARD_BEGIN)[2], re.MULTILINE) for card in (new, existing)]
    if CARD_BEGIN not in existing or not all(titles):
        return ""
    new_title, old_title = (title.group(1) for title in titles)
    return old_title if old_title != new_title else ""


def validate_card(text: str, repo_type: str = "model"):
    """Let the Hub check a card before anything is created; raises a ValueError with its complaints."""
    try:
        ModelCard(text).validate(repo_type=repo_type)
    except HfHubHTTPError:
        raise
    except ValueError as error:
        message = str(error)
        with contextlib.suppress(ValueError, TypeError, KeyError):
            message = "; ".join(complaint["message"] for complaint in json.loads(message)["errors"])
        raise UserError(f"the Hub refuses the card: {summarize_error(message)}") from error

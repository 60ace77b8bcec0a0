"""A finished run to a repository on the Hub: the circumstances of a run, its card, the folder to push, the push, the check.

A repository that is pushed from here holds `probes.safetensors`: images as the model takes them, the logits it gave for them, and
the checksum of its weights. `verify` holds what somebody loads against it.
"""

import contextlib
import json
import platform
import re
import shutil
import tempfile
import time
import urllib.parse
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
import yaml
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    EvalResult,
    HfApi,
    ModelCard,
    ModelCardData,
    constants,
    get_session,
    get_token,
    hf_hub_download,
    set_client_factory,
    snapshot_download,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import hf_raise_for_status
from packaging.requirements import Requirement
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_vit import model as model_code
from hf_vit.model.configuration_hf_vit import HFViTConfig, as_pair
from hf_vit.model.modeling_hf_vit import HFViTForImageClassification
from hf_vit.system import run_files
from hf_vit.system.escapes import as_license, inline, inline_all, printable
from hf_vit.system.files import checksum
from hf_vit.system.hub_names import refuse_mistyped_path


WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
DESCRIBED = (WEIGHTS, "config.json", "preprocessor_config.json")  # whose checksums the probes carry
PROBES, NUM_PROBES = "probes.safetensors", 4
SAMPLES, NUM_SAMPLES = "samples.safetensors", 12  # of a run: images of those that were scored, drawn at random
EVIDENCE = ("results.json", "config.yaml", "metrics.jsonl", "confusion_matrix.csv")  # go along in training/
PICTURES = {  # of figures/, in the order of the card; whether scored or training images can be seen in them
    "predictions": True, "mistakes": True, "attention": True, "confusion": False,
    "calibration": False, "curves": False, "augmentations": True, "inside": False,
}  # fmt: skip
# What an earlier push may have left, and a later one takes away.
OURS = {
    *(file.name for file in Path(model_code.__file__).parent.glob("[!_]*.py")), WEIGHTS, PROBES, "example.png",
    *(f"figures/{name}.png" for name in PICTURES), *(f"training/{name}" for name in EVIDENCE),
    *(f"onnx/{name}.onnx{part}" for name in ("model", "model_quantized") for part in ("", ".data")),
}  # fmt: skip
BEGIN = "<!-- hf_vit wrote this part; a later push replaces it, and keeps the text around it -->"
END = "<!-- end of hf_vit's part -->"
LARGEST_EVIDENCE = 2**30  # bytes; the confusion matrix of 20,000 classes
NUMBER, MAYBE = (int, float), run_files.OPTIONAL
RESULTS = {  # what a card reads of results.json
    "metrics": {str: NUMBER}, "metrics_of": str, "intervals": {str: [NUMBER, 2]}, "mixed_precision": str, "hardware": str,
    "per_class": [{"label": str, "recall": (MAYBE, NUMBER)}], "image_size": [int, 2], "parameters": int, "steps": int,
    "images_per_step": int, "train_seconds": NUMBER, "images_per_second": NUMBER, "command": str, "seed": int, "answer": str,
    "versions": {str: str}, "commit": (MAYBE, str), "base_model_hub_id": (MAYBE, str), "attention_query": (MAYBE, str),
    "data": {
        "name": str, "hub_id": (MAYBE, str), "config": (MAYBE, str), "license": (MAYBE, str), "scored": str, "labels": [str],
        "scored_images": int, "train_images": (MAYBE, int),
    },
}  # fmt: skip
EXPORTED = {
    "weights_sha256": str, "data": (MAYBE, {"split": str, "images": int}),
    "files": {str: {"megabytes": NUMBER, "accuracy": (MAYBE, NUMBER), "interval": (MAYBE, [NUMBER, 2])}},
}  # fmt: skip
COMMIT = "<commit>"  # in a card that is not pushed yet
RECORD = "<!-- metadata of this part: {} -->"
IN_JAVASCRIPT = ("vit", "deit", "ijepa", "dinov2", "dinov2_with_registers")  # classifiers that Transformers.js 4 knows
ATTEMPTS = 5
LONGEST_WAIT = 300  # seconds
NO_ADDRESS = ("UnsupportedProtocol", "InvalidURL")  # of httpx: HF_ENDPOINT is no address
NETWORK_ERROR = HfHubHTTPError.__mro__[1]  # HTTPError of httpx, or of httpx2, whichever huggingface_hub stands on


# ----------------------------------------------------------------------------------------------------------------------
# The card


def write_card(
    folder: Path,
    template: Path,
    results: dict,
    config: str,
    *,
    where: str | None = None,
    repo: str | None = None,
    revision: str | None = None,
    answer: str | None = None,
    layout: str | None = None,
    license: str | None = None,
    export: dict | None = None,
) -> Path:
    """Write README.md beside a saved model, from its results; every number in it comes from there.

    Args:
        folder: holds the saved model, and where there are some `example.png` and `figures/`.
        template: Jinja template of the card.
        results: as in results.json.
        config: the run's configuration, as YAML.
        where: what the card calls the folder, where it was not always `folder`.
        repo, revision: where it will be; None for a model that stays in its folder, and for main.
        answer: what the model says of `example.png`, see `in_words`; what the results say if not given.
        layout: a sentence on how it is stored and why, see `choose_layout`.
        license: of the weights, an id such as apache-2.0.
        export: what export.json of recipes/export.py holds, where its files go along.
    """
    data, base_model = results["data"], yaml.safe_load(config).get("model_name_or_path")
    license = as_license(license)
    name, where = printable(Path(data["name"]).name) or "images", repo or where or str(folder)
    title = f"Vision Transformer on {name}"
    percent = lambda value: f"{100 * value:.2f}%"
    said = {
        "accuracy": ("accuracy", "accuracy", percent),
        "top5_accuracy": ("top-5 accuracy", "accuracy", percent),
        "balanced_accuracy": ("balanced accuracy", "balanced_accuracy", percent),
        "macro_f1": ("macro F1", "f1", percent),
        "calibration_error": ("expected calibration error", "ece", "{:.4f}".format),
        "loss": ("cross-entropy", "loss", "{:.4f}".format),
    }
    rows, evaluations = [], []
    for key, (metric, kind, show) in said.items():
        if key in results["metrics"]:
            value, interval = results["metrics"][key], results["intervals"].get(key)
            interval = interval and f"{show(interval[0])} to {show(interval[1])}"
            rows.append((metric, show(value), interval))
            evaluation = EvalResult(
                task_type="image-classification",
                dataset_type=data.get("hub_id") or "imagefolder",
                dataset_name=name,
                dataset_config=data.get("config") and printable(data["config"]),
                dataset_split=printable(data["scored"]),
                metric_type=kind,
                metric_value=round(value, 6),
                metric_name=f"{metric} (95% interval {interval})" if interval else metric,
            )
            evaluations.append(evaluation)
    card_data = ModelCardData(
        library_name="transformers",
        pipeline_tag="image-classification",
        tags=["hf_vit", "vision"],
        license=license,
        base_model=results.get("base_model_hub_id"),
        datasets=[data["hub_id"]] if data.get("hub_id") else None,
        model_name=title,
        eval_results=evaluations,
    )
    example = folder / "example.png"
    channels = _channels(folder)
    trusts = _config(folder)["model_type"] == HFViTConfig.model_type
    if trusts and repo:  # main may hold other code tomorrow: `push` writes the commit here
        revision = COMMIT
    at = f", revision={json.dumps(revision)}" if revision else ""
    argument = (
        json.dumps(str(Path(where, example.name))) if repo is None else f'hf_hub_download("{repo}", "example.png"{at})'
    )
    recalls = [row for row in results["per_class"] if row["recall"] is not None]
    weakest = sorted(recalls, key=lambda row: row["recall"])[:3] if len(recalls) > 3 else []
    weights = weights_of(folder)
    if weights.name == ADAPTER:
        layout = f"What is saved here goes on top of {inline(base_model)}; it takes the packages hf_vit and peft."
    elif layout is None:
        layout = (
            "The code of the model lies beside its weights; `import hf_vit` makes `trust_remote_code` unnecessary."
        )
    card = ModelCard.from_template(
        card_data,
        template_path=str(template),
        begin=BEGIN,
        end=END,
        record=RECORD.format(_as_record(card_data.to_dict())),
        title=inline(title),
        results=inline_all(results),
        hub_id=urllib.parse.quote(data.get("hub_id") or ""),
        selected="best scoring" in results["metrics_of"],
        command=printable(results["command"]),
        metrics=rows,
        height=results["image_size"][0],
        width=results["image_size"][1],
        parameters=f"{results['parameters']:,}",
        how=f"from {inline(base_model)}" if base_model else "from scratch",
        data=inline(data["name"]),
        data_license=inline(as_license(data.get("license")) or ""),
        on_disk="/" in data["name"] and not data.get("hub_id"),
        license=inline(license or ""),
        weights=weights.name,
        checksum=checksum(weights) if weights.is_file() else results["weights_sha256"],
        where=json.dumps(where),
        at=at,
        repo=repo,
        layout=layout,
        trust=", trust_remote_code=True" if trusts else "",
        adapter=weights.name == ADAPTER,
        plain=channels == 3,
        channels=channels,
        has_example=example.is_file(),
        example=argument if example.is_file() else '"photo.jpg"',
        answer=inline(answer or results["answer"]),
        export=export
        and {**inline_all(export), "files": {inline(k): inline_all(v) for k, v in export["files"].items()}},
        javascript=all((export, repo, channels == 3, _config(folder)["model_type"] in IN_JAVASCRIPT)),
        pictures={name: (folder / "figures" / f"{name}.png").is_file() for name in PICTURES},
        samples=min(NUM_SAMPLES, data["scored_images"]),
        labels=[inline(label) for label in data["labels"]],
        weakest=", ".join(f"{inline(row['label'])} ({percent(row['recall'])})" for row in weakest),
        versions=inline(", ".join(f"{package} {number}" for package, number in results["versions"].items())),
        config=config,
        fence="`" * max(3, 1 + max(map(len, re.findall("`+", config)), default=0)),  # no text of the config ends it
    )
    # A comment within our part is text of the run: a mark of ours in it would cut the part short at the next merge.
    _, _, part = card.text.partition(BEGIN)
    record, _, part = part.partition("-->")
    body = part.rpartition(END)[0].replace("<!--", "&lt;!--")
    text = f"{card.content.removesuffix(card.text)}\n{BEGIN}{record}-->{body}{END}"
    text = re.sub(r"\n{3,}", "\n\n", text)
    (folder / "README.md").write_text(text, encoding="utf-8")
    return folder / "README.md"


def _config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def _channels(folder: Path) -> int:
    fields = _config(folder)
    return fields.get("vision_config", fields).get("num_channels", 3)


def weights_of(folder: Path) -> Path:
    """The file of weights of a saved model, whole or an adapter."""
    return folder / (ADAPTER if (folder / ADAPTER).is_file() else WEIGHTS)


def _as_record(metadata: dict) -> str:
    """What a push must know of an earlier one, to tell its metadata from the owner's; safe within an HTML comment."""
    brief = {**metadata, "model-index": [entry["name"] for entry in metadata["model-index"]]}
    return json.dumps(brief).replace("<", "\\u003c").replace(">", "\\u003e").replace("--", "-\\u002d")


def _load(folder: Path):
    """The classifier in a folder, ours or a native one; no code that lies there is run.

    Raises:
        ValueError: if it does not load, whatever transformers raises then.
    """
    try:
        ours = HFViTConfig.get_config_dict(folder)[0].get("model_type") == HFViTConfig.model_type
        loader = HFViTForImageClassification if ours else AutoModelForImageClassification
        return loader.from_pretrained(folder, trust_remote_code=False).eval()
    except (ValueError, OSError):
        raise
    except Exception as error:  # files that do not fit each other raise anything
        raise ValueError(f"{folder} does not load: {one_line(error)}") from error


def in_words(logits: torch.Tensor, labels: list[str]) -> str:
    """The answer that logits (L,) are, such as "Bag (98%)"."""
    chance, index = logits.softmax(dim=0).max(dim=0)
    return f"{labels[index]} ({chance:.0%})"


def split_card(text: str) -> tuple[dict, str]:
    """A card's metadata and what follows them.

    Raises:
        ValueError: if the metadata are not YAML, or no mapping.
    """
    front, text = _front(text)
    try:
        metadata = yaml.safe_load(front) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"the metadata of README.md cannot be read ({one_line(error)}): mend them first") from error
    if not isinstance(metadata, dict):
        raise ValueError(
            f"the metadata of README.md are a {type(metadata).__name__}, not keys with values: mend them first"
        )
    return metadata, text


def _front(text: str) -> tuple[str, str]:
    """The lines between the first two of three hyphens, and what follows."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    found = re.match(r"\s*---[ \t]*\n(.*?)^---[ \t]*$", text, re.DOTALL | re.MULTILINE)
    return ("", text) if found is None else (found.group(1), text[found.end() :])


def _lines_of_keys(text: str) -> dict[str, str]:
    """The lines that each key of a card's metadata stands in, and under "" what is above the first."""
    front, lines = _front(text)[0], {}
    for block in re.split(r"^(?=[^\s#-])", front, flags=re.MULTILINE):
        with contextlib.suppress(yaml.YAMLError):
            lines[next(iter(yaml.safe_load(block) or {""}))] = block
    as_said = [key for key in lines if key != ""] == list(yaml.safe_load(front) or {})
    return lines if as_said else {}  # {key: value} in one line, say


def merge_cards(ours: str, theirs: str, license: str | None = None) -> str:
    """The card that is there, with our part of it replaced, or put behind it where it has none.

    The owner's metadata win, and keep the very lines they stand in: those are the owner's that no earlier push wrote, or that
    are no longer as it wrote them. Tags and entries of model-index of both are kept; those of an earlier push are replaced.

    Args:
        ours: as `write_card` makes it.
        theirs: the README.md that is there; "" for none.
        license: wins over that of the owner.

    Raises:
        ValueError: if the metadata that are there cannot be read.
    """
    (new, part), (old, text), lines = split_card(ours), split_card(theirs), _lines_of_keys(theirs)
    part = BEGIN + part.rpartition(BEGIN)[2].partition(END)[0] + END
    before, begin, rest = text.rpartition(BEGIN)
    inside, end, after = rest.partition(END)
    if not (begin and end):
        before, inside, after = f"{text.rstrip()}\n\n", "", ""
    before = before.replace(BEGIN, "")
    recorded = re.search(RECORD.format("(.*?)"), inside)
    earlier = json.loads(recorded.group(1)) if recorded is not None else {}

    as_list = lambda value: value if isinstance(value, list) else [] if value is None else [value]
    owned = {key: value for key, value in old.items() if key == "license" or value != earlier.get(key)}
    if license is not None:
        owned["license"] = license
    outdated_tags = set(as_list(earlier.get("tags"))) - set(new["tags"])
    tags = [tag for tag in as_list(old.get("tags")) if tag not in outdated_tags]
    names = [*as_list(earlier.get("model-index")), *(entry["name"] for entry in new["model-index"])]
    kept = [
        entry
        for entry in as_list(old.get("model-index"))
        if not isinstance(entry, dict) or entry.get("name") not in names
    ]
    merged = {
        **dict.fromkeys(key for key in old if key in owned or key in new),
        **new,
        **owned,
    }  # in the owner's order
    merged["tags"] = list(dict.fromkeys([*tags, *new["tags"]]))
    merged["model-index"] = [*kept, *new["model-index"]]
    dumped = lambda key: yaml.safe_dump({key: merged[key]}, sort_keys=False, allow_unicode=True)
    front = [lines[key] if key in lines and merged[key] == old.get(key) else dumped(key) for key in merged]
    return f"---\n{lines.get('', '')}{''.join(front)}---\n\n{(before + part + after).strip()}\n"


def other_model(ours: str, theirs: str) -> str:
    """What an earlier push calls its model, where this one's is called otherwise; else ""."""
    titles = [re.search(r"^# (.+)$", card.rpartition(BEGIN)[2], re.MULTILINE) for card in (ours, theirs)]
    return titles[1].group(1) if BEGIN in theirs and all(titles) and titles[0].group(1) != titles[1].group(1) else ""


# ----------------------------------------------------------------------------------------------------------------------
# The folder to push


def read_for_others(file: Path) -> str:
    """A text file of a run, with ~ for the home directory, which may hold the name of a person."""
    text, home = run_files.read_text(file, LARGEST_EVIDENCE), Path.home()
    return text if len(home.parts) < 2 else re.sub(rf"(?<![\w.-]){re.escape(str(home))}(?![\w.-])", "~", text)


def read_run(run: Path) -> tuple[dict, str]:
    """results.json and config.yaml of a run, as `read_for_others` gives them.

    Raises:
        ValueError: if the run is not there or not finished, its files hold something else, or one of them is a link: what a
            link leads to would be pushed.
    """
    if not run.is_dir():
        raise ValueError(f"there is no folder {run}: wanted that of a finished run, as recipes/train.py leaves it")
    if (run / "config.json").is_file():
        raise ValueError(f"{run} is the folder of a model: wanted that of its run, such as {run.resolve().parent}")
    missing = [name for name in (*EVIDENCE, "model/config.json") if not (run / name).is_file()]
    if missing:
        what = (
            "is not finished, and the command that began it goes on" if (run / EVIDENCE[1]).is_file() else "is no run"
        )
        raise ValueError(f"{run} {what}: it holds no {' and no '.join(missing)}")
    run_files.refuse_links(run, *EVIDENCE, SAMPLES, "model", "export")
    run_files.read_flat_yaml(run / "config.yaml")
    results = run_files.read_json(run / "results.json", {}, LARGEST_EVIDENCE)
    if absent := {"metrics", "intervals", "per_class", "data", "mixed_precision", "steps"} - set(results):
        raise ValueError(
            f"results.json of {run} lacks {', '.join(sorted(absent))}: another version wrote it; train it again"
        )
    results = json.loads(read_for_others(run / "results.json"))
    run_files.check_shape(results, RESULTS, str(run / "results.json"))
    return results, read_for_others(run / "config.yaml")


def load_whole(folder: Path):
    """The classifier of a run; low-rank updates that were saved alone are merged into their base."""
    if not (folder / "adapter_config.json").is_file():
        return _load(folder)
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ValueError(
            f"{folder} holds low-rank updates alone, which PEFT merges into their base: pip install peft"
        ) from error

    adapter = run_files.read_json(folder / "adapter_config.json", {"base_model_name_or_path": str})
    base = refuse_mistyped_path(adapter["base_model_name_or_path"], f"the base of {folder}")
    model = HFViTForImageClassification.from_pretrained(base, config=HFViTConfig.from_pretrained(folder))
    return PeftModel.from_pretrained(model, folder).merge_and_unload().eval()


def choose_layout(model, asked: str | None = None) -> tuple[object, str]:
    """What is saved, the model itself or its native twin, and a sentence that says why.

    Args:
        asked: None for native where that is possible, "native" or "code".

    Raises:
        ValueError: if "native" was asked for and no native architecture expresses the model.
    """
    why = "as was asked for"
    if asked != "code":
        try:
            native = model.to_transformers().eval()
            return native, (
                f"It is stored as the native `{native.config.model_type}` of transformers, which computes the same: no code "
                "comes with it, and no `trust_remote_code` is needed."
            )
        except ValueError as error:
            if asked == "native":
                raise ValueError(f"--layout native: {error}; --layout code publishes it") from error
            why = f"because {error}".partition(" (the closest")[0]
    return model, (
        f"The code of the model lies beside its weights, {why}; loading it takes `trust_remote_code=True`, or the package: "
        "after `import hf_vit` it loads without."
    )


@torch.no_grad()
def assemble(
    run: Path,
    folder: Path,
    template: Path,
    repo: str,
    *,
    revision: str | None = None,
    layout: str | None = None,
    license: str | None = None,
    data_license: str | None = None,
    with_images: bool = True,
) -> str:
    """Write everything that is to be pushed into `folder`, and return how it is laid out and why; `run` is only read.

    Args:
        run: the folder of a finished run.
        layout: None, "native" or "code", see `choose_layout`.
        with_images: whether a few of the scored images go along: four probes, an example, and the picture of predictions.
            Otherwise the probes are noise.

    Raises:
        ValueError: if the run is not finished or not whole, or what was written does not give the logits of the run.
    """
    results, config = read_run(run)
    if data_license is not None:
        results["data"]["license"] = data_license
    model = load_whole(run / "model").float()
    saved, reason = choose_layout(model, layout)
    saved.save_pretrained(folder)
    shutil.copy(run / "model" / "preprocessor_config.json", folder)
    (folder / "training").mkdir()
    for name in EVIDENCE:
        text = read_for_others(run / name)
        if name == "results.json":  # names of files on this machine
            text = json.dumps({**results, "data": {**results["data"], "skipped_first": []}}, indent=2) + "\n"
        (folder / "training" / name).write_text(text, encoding="utf-8")
    if (run / "model" / "figures").is_dir():
        (folder / "figures").mkdir()
        for name, shows_images in PICTURES.items():
            file = run / "model" / "figures" / f"{name}.png"
            if file.is_file() and (with_images or not shows_images):
                shutil.copy(file, folder / "figures")

    if with_images:
        pixel_values, logits = _samples(run, model.config)
        if (run / "model" / "example.png").is_file():
            shutil.copy(run / "model" / "example.png", folder)
        exact = results["mixed_precision"] == "no"
        what = f"the logits of {run / 'model'} are not those of its run"
        _compare(model(pixel_values).logits, logits, 1e-3 if exact else 0.1, what)
    else:
        generator = torch.Generator().manual_seed(0)
        size = (NUM_PROBES, _channels(run / "model"), *as_pair(model.config.image_size))
        pixel_values = torch.randn(size, generator=generator)
    pixel_values = pixel_values[:NUM_PROBES].contiguous()
    logits = model(pixel_values).logits
    described = json.dumps(
        {name: checksum(folder / name) for name in DESCRIBED}
    )  # one text: safetensors shuffles keys
    save_file({"pixel_values": pixel_values, "logits": logits}, folder / PROBES, metadata={"sha256": described})
    verify(folder)
    write_card(
        folder, template, results, config, repo=repo, revision=revision, layout=reason, license=license,
        export=_exported(run, folder), answer=in_words(logits[0], results["data"]["labels"]),
    )  # fmt: skip
    return reason


def _samples_file(run: Path) -> Path:
    if not (run / SAMPLES).is_file():
        raise ValueError(f"{run} holds no {SAMPLES}: pass --without_images, or train it again with this version")
    return run / SAMPLES


def _samples(run: Path, config) -> tuple[torch.Tensor, torch.Tensor]:
    """The run's sample images as the model takes them (n, C, H, W), and the logits that the run gave them (n, L)."""
    samples = _read(_samples_file(run), "images", "logits")
    processor = AutoImageProcessor.from_pretrained(run / "model", trust_remote_code=False)
    wanted = (config.num_channels, *as_pair(config.image_size))
    if samples["images"].dtype != torch.uint8 or samples["images"].shape[1:] != wanted or not len(samples["images"]):
        raise ValueError(
            f"{run / SAMPLES} holds no images of {wanted} bytes, which its model takes: it is of another run"
        )
    shape = (1, config.num_channels, 1, 1)
    try:
        mean, std = (torch.tensor(values).view(shape) for values in (processor.image_mean, processor.image_std))
    except (AttributeError, RuntimeError, TypeError) as error:
        raise ValueError(f"preprocessor_config.json of {run / 'model'} does not fit its model: {error}") from error
    return (samples["images"].float() / 255 - mean) / std, samples["logits"]


def _read(file: Path, *wanted: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file; ValueError where it is not whole."""
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read ({error}): fetch or make it again") from error
    if missing := set(wanted) - set(tensors):
        raise ValueError(f"{file} lacks {' and '.join(sorted(missing))}: it was not written by this version")
    return tensors


def _compare(logits: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> float:
    """The largest difference; ValueError if it is above `tolerance` times the largest expected logit (1 at least)."""
    if logits.shape != expected.shape:
        raise ValueError(f"{what}: they have shape {tuple(logits.shape)}, not {tuple(expected.shape)}")
    difference = (logits - expected).abs().max().item()
    if not difference <= tolerance * max(1.0, expected.abs().max().item()):
        raise ValueError(f"{what}: they are {difference:.3g} apart")
    return difference


def _exported(run: Path, folder: Path) -> dict | None:
    """Copy the ONNX files that recipes/export.py made of these very weights; returns its export.json, None where there is none."""
    file = run / "export" / "export.json"
    if not file.is_file():
        return None
    made = run_files.read_json(file, EXPORTED)
    if made["weights_sha256"] != checksum(weights_of(run / "model")):
        raise ValueError(
            f"{run / 'export'} was made of other weights than those in {run / 'model'}: run recipes/export.py again, or delete it"
        )
    shutil.copytree(run / "export" / "onnx", folder / "onnx")
    return made


# ----------------------------------------------------------------------------------------------------------------------
# Load = what was saved


@torch.no_grad()
def verify(source: str | Path, revision: str | None = None) -> float:
    """Load a repository or folder and hold it against its probes; returns the largest difference of a logit.

    No code of the repository is run. This proves that nothing was damaged or mixed up since the push, not who pushed: whoever can
    replace the weights can replace the probes and their checksums with them.

    Raises:
        ValueError: if it looks like a path where nothing is, if it has no probes, if its weights are not those that were pushed, or it gives other logits than then.
        OSError: if it cannot be fetched.
    """
    folder = Path(refuse_mistyped_path(str(source), "--verify"))
    if not folder.is_dir():
        now = (
            HfApi().model_info(str(source), revision=revision).sha
        )  # what is there, not what was there when it was cached
        folder = Path(snapshot_download(str(source), revision=now, allow_patterns=[*DESCRIBED, PROBES]))
    if missing := [name for name in (PROBES, *DESCRIBED) if not (folder / name).is_file()]:
        raise ValueError(
            f"{source} has no {' and no '.join(missing)}: it is not whole, or was not pushed by recipes/publish.py"
        )
    probes = _read(folder / PROBES, "pixel_values", "logits")
    with safe_open(folder / PROBES, "pt") as opened:
        noted = json.loads((opened.metadata() or {}).get("sha256", "{}"))
    run_files.check_shape(noted, {str: str}, f"the checksums in {PROBES} of {source}")
    for name in DESCRIBED:
        if (found := checksum(folder / name)) != noted.get(name):
            raise ValueError(
                f"{name} of {source} has the checksum {found[:12]}, not {str(noted.get(name))[:12]} as when it was pushed: it was "
                "changed since, or download it again (delete it from the cache first)"
            )
    try:
        logits = _load(folder)(probes["pixel_values"]).logits
    except (RuntimeError, KeyError) as error:  # of probes that do not fit the model
        raise ValueError(f"{source} does not load: {one_line(error)}") from error
    return _compare(logits, probes["logits"], 1e-5, f"the logits of {source} are not those that were saved with it")


# ----------------------------------------------------------------------------------------------------------------------
# The push


def set_timeout(seconds: float):
    """Have huggingface_hub give up a request whose other end is silent for so long, or asks to wait longer than `LONGEST_WAIT`.

    By itself it waits for ever on most requests, and sleeps as long as a Retry-After says.
    """
    usual = get_session()

    def limit(request):  # the library asks for other limits, or none, request by request
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), seconds)

    def refuse(response):
        if response.status_code >= 400 and (_retry_after(response) or 0) > LONGEST_WAIT:
            response.read()
            hf_raise_for_status(response)

    hooks = {"request": [*usual.event_hooks["request"], limit], "response": [*usual.event_hooks["response"], refuse]}
    set_client_factory(lambda: type(usual)(event_hooks=hooks, follow_redirects=True))


def _retry_after(response) -> float | None:
    asked = response.headers.get("Retry-After", "")
    return float(asked) if asked.isdigit() else None


def inspect_repo(repo: str, revision: str | None = None) -> tuple[object, str]:
    """What is on the Hub: the repository's info, and its README.md, "" where it has none."""
    info = HfApi().model_info(repo, revision=revision)
    if "README.md" not in [file.rfilename for file in info.siblings or ()]:
        return info, ""
    with tempfile.TemporaryDirectory() as cache:
        file = hf_hub_download(repo, "README.md", revision=info.sha or revision, cache_dir=cache)
        try:
            return info, Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"the README.md of {repo} is no UTF-8 text ({error}): mend it first") from error


def push(
    folder: Path,
    repo: str,
    *,
    public: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    license: str | None = None,
    with_images: bool = False,
    say=print,
):
    """Make `folder` the newest state of a repository, in one commit, and read it back.

    A card that names its own commit (`COMMIT`, of a model with code) takes a second one, with the hash of the first in it. A pull
    request has no lasting hash: its card names none.

    Args:
        with_images: the folder shows images of the run, which do not go to a public repository unless `public`.

    Returns what `create_commit` does, and whether there was anything to commit.

    What fails in passing is tried again from the start, which sends only what is not there yet. The README.md that is there
    is merged (`merge_cards`), files that an earlier push left and this one does not have are deleted, others are kept.

    Raises:
        ValueError: if images would become public, or the Hub refuses the card.
        OSError: if the Hub refuses, cannot be reached, or gives back something else than was sent; one line, with what to do.
    """
    card = (folder / "README.md").read_text(encoding="utf-8")
    files, before = [], None

    def act():
        nonlocal files, before
        check_card(card)
        if with_images and not public:
            refuse_public(repo)
        HfApi().create_repo(repo, private=not public, exist_ok=True)
        if revision is not None:
            HfApi().create_branch(repo, branch=revision, exist_ok=True)
        info, there = inspect_repo(repo, revision)
        before = before or info.sha
        if other := other_model(card, there):
            say(f"{repo} holds {other}, which this replaces; its history keeps it")
        if public and info.private:
            say(f"{repo} is private and stays so: its settings on the Hub make it public")
        files = files_of(folder)
        deleted = [CommitOperationDelete(name, is_folder=False) for name in outdated(info, files)]
        send = lambda names, parent, delete=(): HfApi().create_commit(
            repo,
            [*(CommitOperationAdd(name, folder / name) for name in names), *delete],
            commit_message=f"Vision Transformer, pushed by hf_vit {version('hf_vit')}",
            revision=revision,
            create_pr=create_pr,
            parent_commit=parent,
        )
        if _pin(COMMIT) not in card or create_pr:
            merged = merge_cards(card.replace(_pin(COMMIT), ""), there, license)
            (folder / "README.md").write_text(merged, encoding="utf-8")
            return send(files, info.sha, deleted)
        first = send([name for name in files if name != "README.md"], info.sha, deleted).oid
        pinned = first
        if first == info.sha:  # nothing new: the commit that the card names may do as well
            pinned = _pinned_before(repo, there, first) or first
        merged = merge_cards(card.replace(_pin(COMMIT), _pin(pinned)), there, license)
        (folder / "README.md").write_text(merged, encoding="utf-8")
        return send(["README.md"], first)

    def arrived(error):  # perhaps: a second pull request would be one too many
        return create_pr and "/commit/" in _url(error) and _status(error) in (None, 500, 502, 503, 504)

    commit = _patiently(act, lambda error, times: explain(error, repo, times, folder), say, give_up=arrived)
    _read_back(folder, repo, commit, files, say, verify)
    return commit, commit.oid != before


def refuse_public(repo: str, kind: str = "model"):
    """Raise ValueError if a repository is there and public: a push would show the run's images to everybody."""
    try:
        info = HfApi().repo_info(repo, repo_type=kind)
    except RepositoryNotFoundError:
        return
    if not info.private:
        raise ValueError(
            f"{repo} is public, and images of the run would go along (example.png, probes.safetensors, figures/, examples/): pass --public "
            "if everybody may see them, or --without_images"
        )


def _pin(commit: str) -> str:
    return f', revision="{commit}"'


def _pinned_before(repo: str, card: str, head: str) -> str | None:
    """The commit that a card names, if it has the same files as `head` but for the card; else None."""
    found = re.search(_pin("([0-9a-f]{40})"), card.rpartition(BEGIN)[2])
    if found is None:
        return None
    blobs = []
    for revision in (found.group(1), head):
        try:
            siblings = HfApi().model_info(repo, revision=revision, files_metadata=True).siblings
        except RevisionNotFoundError:  # of a history that was rewritten
            return None
        blobs.append({file.rfilename: file.blob_id for file in siblings if file.rfilename != "README.md"})
    return found.group(1) if blobs[0] == blobs[1] else None


def _read_back(folder: Path, repo: str, commit, files: list[str], say, check=lambda back: None, kind: str = "model"):
    """Download what was committed, and hold its bytes against those in `folder`; `check` looks at the download.

    Raises:
        OSError: if it cannot be had, is not the same twice, or `check` raises a ValueError.
    """
    where = f"{repo} at commit {commit.oid[:12]}"
    look = f"check it with --verify {repo}" if kind == "model" else "look at it there"
    for _ in range(2):
        with tempfile.TemporaryDirectory() as cache:
            fetch = lambda: snapshot_download(
                repo, repo_type=kind, revision=commit.oid, cache_dir=cache, allow_patterns=files, max_workers=2
            )
            unread = lambda error, times: (
                f"{where} was pushed but could not be read back ({one_line(error)}), {times} times: {look}"
            )
            back = Path(_patiently(fetch, unread, say))
            wrong = [
                name
                for name in files
                if not (back / name).is_file() or checksum(back / name) != checksum(folder / name)
            ]
            if not wrong:
                try:
                    return check(back)
                except ValueError as error:
                    raise OSError(f"{where} was pushed, but {error}") from error
    raise OSError(
        f"{where} gives back other bytes than were sent ({', '.join(wrong)}), twice: do not use it; push it again, and {look}"
    )


# ----------------------------------------------------------------------------------------------------------------------
# A Space: the page of recipes/app.py, for a model that was pushed


def write_examples(samples: Path, folder: Path, count: int = 6) -> list[Path]:
    """Images that a run scored, from its samples.safetensors, as PNG files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, image in enumerate(_read(samples, "images")["images"][:count]):
        files.append(folder / f"{number + 1}.png")
        Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy()).save(files[-1])  # (C, H, W) -> (H, W, 3) or (H, W)
    return files


def assemble_space(
    run: Path, folder: Path, app: Path, repo: str, license: str | None = None, with_images: bool = True
):
    """Write a Space of the Hub into `folder`: the page, this package, what they need, and example images.

    Args:
        run: the folder of a finished run; it is only read.
        app: recipes/app.py.
        repo: the model that the page loads, USER/NAME on the Hub.
        with_images: whether a few of the scored images go along as examples.

    Raises:
        ValueError: if the run is not finished, its model is none that the page can show, or Gradio is not installed.
    """
    results, _ = read_run(run)
    if _channels(run / "model") not in (1, 3):
        raise ValueError(f"{run / 'model'} takes {_channels(run / 'model')} channels; the page shows images of 1 or 3")
    try:
        gradio = version("gradio")
    except PackageNotFoundError as error:
        raise ValueError(
            "Gradio is not installed, whose version the Space must name: pip install 'hf_vit[app]'"
        ) from error
    package = Path(__file__).parents[1]
    for file in package.rglob("*.py"):
        (folder / "hf_vit" / file.relative_to(package)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder / "hf_vit" / file.relative_to(package))
    shutil.copy(app, folder / "app.py")
    wanted = [Requirement(text) for text in requires("hf_vit")]
    wanted = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": "recipes"})]
    lines = [f"{each.name}{each.specifier}\n" for each in wanted]
    (folder / "requirements.txt").write_text("".join(lines))
    if with_images:
        write_examples(_samples_file(run), folder / "examples")
    title = f"What a Vision Transformer sees: {Path(results['data']['name']).name}"
    python = ".".join(platform.python_version_tuple()[:2])  # a Space takes 3.10 by itself, too old for this package
    metadata = {"title": title, "sdk": "gradio", "sdk_version": gradio, "python_version": python, "app_file": "app.py"}
    metadata |= {"models": [repo]}
    metadata |= {"license": as_license(license)} if license else {}
    (folder / "README.md").write_text(
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n# {inline(title)}\n\nThe page of [{repo}](https://hf.co/{repo}): drop an "
        "image, see what the model says of it and which patches count for that. If that repository is private, the Space needs a "
        "secret `HF_TOKEN` that may read it.\n",
        encoding="utf-8",
    )


def push_space(folder: Path, repo: str, *, public: bool = False, with_images: bool = False, say=print):
    """Make `folder` the newest state of a Space, in one commit, and read it back.

    What an earlier push left of the package and the examples is deleted; other files are kept.

    Args:
        with_images: the folder shows images of the run, which do not go to a public Space unless `public`.

    Raises:
        ValueError: if images would become public, or the Hub refuses the README.md.
        OSError: if the Hub refuses, cannot be reached, or gives back something else than was sent.
    """
    card, files = (folder / "README.md").read_text(encoding="utf-8"), files_of(folder)

    def act():
        check_card(card, "space")
        if with_images and not public:
            refuse_public(repo, "space")
        HfApi().create_repo(repo, repo_type="space", space_sdk="gradio", private=not public, exist_ok=True)
        info = HfApi().space_info(repo)
        if not public and not info.private:
            say(f"{repo} is PUBLIC and stays so")
        there = [file.rfilename for file in info.siblings or ()]
        ours = re.compile(r"hf_vit/.*|examples/\d+\.png")
        return HfApi().create_commit(
            repo,
            [
                *(CommitOperationAdd(name, folder / name) for name in files),
                *(CommitOperationDelete(name) for name in there if ours.fullmatch(name) and name not in files),
            ],
            repo_type="space",
            commit_message=f"The page of a Vision Transformer, pushed by hf_vit {version('hf_vit')}",
        )

    commit = _patiently(act, lambda error, times: explain(error, repo, times, folder), say)
    _read_back(folder, repo, commit, files, say, kind="space")
    return commit


def files_of(folder: Path) -> list[str]:
    """Names of all files below a folder, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def outdated(info, files: list[str]) -> list[str]:
    """What an earlier push left in a repository and this one has not.

    Raises:
        ValueError: if the repository holds an adapter, which transformers would load in place of the whole model.
    """
    there = [file.rfilename for file in info.siblings or ()]
    if "adapter_config.json" in there:
        raise ValueError(
            f"{info.id} holds adapter_config.json, a LoRA adapter: with a whole model beside it, neither would load; delete it there, "
            "or take another --repo"
        )
    return [name for name in there if name in OURS and name not in files]


def check_card(text: str, kind: str = "model"):
    """Have the Hub look at a card, before anything is made there; ValueError with what it says."""
    try:
        ModelCard(text).validate(repo_type=kind)
    except HfHubHTTPError:
        raise
    except ValueError as error:
        said = str(error)
        with contextlib.suppress(ValueError, TypeError, KeyError):
            said = "; ".join(one["message"] for one in json.loads(said)["errors"])
        raise ValueError(f"the Hub refuses the card: {one_line(said)}") from error


def _patiently(act, explain, say, give_up=lambda error: False):
    """What `act()` gives, which is tried again where it fails in passing.

    Args:
        explain: (error, number of times) -> the sentence of the OSError that is raised in the end.
        give_up: whether an error must not be tried again, although it passes.
    """
    began = time.monotonic()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return act()
        except (
            NETWORK_ERROR,
            OSError,
            json.JSONDecodeError,
            KeyError,
            RuntimeError,
        ) as error:  # KeyError: of the client
            cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
            wait = _wait(cause, attempt)
            tired = attempt == ATTEMPTS or time.monotonic() - began > LONGEST_WAIT
            if wait is None or tired or give_up(cause):
                raise OSError(explain(cause, attempt)) from error
            say(f"{one_line(cause)}: trying again in {wait:g} s ({attempt} of {ATTEMPTS})")
            time.sleep(wait)


def _status(error) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None


def _url(error) -> str:
    """Where the request went that failed; "" for what was no request."""
    try:
        return str((error.response.request if _status(error) is not None else error.request).url)
    except (AttributeError, RuntimeError):
        return ""


def one_line(error) -> str:
    """An error, or a text, in a few words on one line, without the token."""
    text = str(error) or type(error).__name__
    token = get_token()
    text = " ".join((text.replace(token, "***") if token else text).split())
    return text if len(text) <= 400 else f"{text[:400]} ..."


def _wait(error, attempt: int) -> float | None:
    """Seconds until it is worth trying again; None where it is not."""
    status = _status(error)
    if status is not None and status not in (408, 409, 412, 429, 500, 502, 503, 504):
        return None
    passing = (NETWORK_ERROR, ConnectionError, TimeoutError, LocalEntryNotFoundError)  # the last: tried again, in vain
    if isinstance(error, OSError) and not isinstance(error, passing):
        return None  # of this machine
    if type(error).__name__ in NO_ADDRESS:
        return None
    asked = None if status is None else _retry_after(error.response)
    wait = 2.0 ** (attempt - 1) if asked is None else asked
    return wait if wait <= LONGEST_WAIT else None


def explain(error, repo: str, attempts: int = 1, folder: Path | None = None) -> str:
    """One line: what happened between here and the Hub, and what to do.

    Args:
        attempts: how often it was tried.
        folder: what was sent, if something was.
    """
    status, hub, owner = _status(error), constants.ENDPOINT, repo.partition("/")[0]
    kept = "nothing on this disk has changed"
    again = f"{kept}; the same command goes on, and what has arrived is not sent again"
    if (
        status in (405, 501)
        or isinstance(error, (json.JSONDecodeError, KeyError))
        or type(error).__name__ in NO_ADDRESS
    ):
        return f"{hub} does not answer as a Hub does ({one_line(error)}): look at HF_ENDPOINT; {kept}"
    if status == 404 or isinstance(error, RepositoryNotFoundError):
        return (
            f"{hub} knows no {repo}, or no such revision of it, or does not show it to this token ({status}): look at the name, at "
            f"--revision and at HF_ENDPOINT; {kept}"
        )
    if status == 401:
        return f"{hub} does not accept the token (401): log in with `hf auth login`, or set HF_TOKEN to one that may write; {kept}"
    if status == 403:
        return (
            f"the token may not write to {repo} (403: {one_line(error.server_message or 'no reason is given')}): take a --repo under your own "
            f"name or an organisation of yours if {owner} is neither, or a token with write access; {kept}"
        )
    if status in (409, 412):
        return f"others changed {repo} while this was sent ({status}), {attempts} times: wait for them; {again}"
    if status == 413 and folder is not None:
        largest = sorted(((folder / name).stat().st_size, name) for name in files_of(folder))[::-1]
        return (
            f"{hub} takes no files so large (413): the largest are "
            + ", ".join(f"{name} ({size / 1e6:,.1f} MB)" for size, name in largest[:3])
            + f": look at the limits of your plan; {kept}"
        )
    if status == 429:
        seconds = error.response.headers.get("Retry-After", "some")
        return f"{hub} asks to wait {seconds} s (429): run it again then; {again}"
    if status is not None and status >= 500:
        return f"{hub} fails ({status}), {attempts} times: run it again later; {again}"
    if "Timeout" in type(error).__name__:
        return f"{hub} gave no answer in time, {attempts} times: look at the connection, or allow more by --timeout; {again}"
    if status is None and isinstance(error, (NETWORK_ERROR, ConnectionError)):
        return f"{hub} cannot be reached, or broke off ({one_line(error)}), {attempts} times: look at the connection and at HF_ENDPOINT; {again}"
    return f"{repo}: {one_line(error)}; {kept}"

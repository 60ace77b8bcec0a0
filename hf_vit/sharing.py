"""A finished run to a repository on the Hub: the circumstances of a run, its card, the folder to push, the push, the check.

A repository that is pushed from here holds `probes.safetensors`: images as the model takes them, the logits it gave for them, and
the checksum of its weights. `verify` holds what somebody loads against it.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from importlib.metadata import version
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
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import hf_raise_for_status
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForImageClassification
from transformers.utils import logging

from .configuration_hf_vit import HFViTConfig
from .modeling_hf_vit import HFViTForImageClassification


logger = logging.get_logger(__name__)

REPORTED = ("torch", "transformers", "accelerate", "datasets", "evaluate", "huggingface_hub", "safetensors", "hf_vit")
WEIGHTS = "model.safetensors"
PROBES, NUM_PROBES = "probes.safetensors", 4
SAMPLES, NUM_SAMPLES = "samples.safetensors", 12  # of a run: images of those that were scored, drawn at random
EVIDENCE = ("results.json", "config.yaml", "metrics.jsonl", "confusion_matrix.csv")  # go along in training/
# What an earlier push may have left, and a later one takes away.
OURS = r"(modeling|configuration)_hf_vit\.py|model\.safetensors|probes\.safetensors|example\.png|(onnx|figures|training)/.*"
BEGIN = "<!-- hf_vit wrote this part; a later push replaces it, and keeps the text around it -->"
END = "<!-- end of hf_vit's part -->"
REPO_ID = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
ATTEMPTS = 5
LONGEST_WAIT = 300  # seconds
NETWORK_ERROR = HfHubHTTPError.__mro__[1]  # HTTPError of httpx, or of httpx2, whichever huggingface_hub stands on


# ----------------------------------------------------------------------------------------------------------------------
# What is known of a run


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


def is_repo_id(name: str | None) -> bool:
    """Whether a name is that of a repository, such as google/vit-base-patch16-224-in21k, and not of something on this disk."""
    return name is not None and re.fullmatch(REPO_ID, name) is not None and not Path(name).exists()


def checksum(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# The card


def write_card(
    folder: Path,
    template: Path,
    results: dict,
    config: str,
    *,
    repo: str | None = None,
    answer: str | None = None,
    layout: str | None = None,
    trusted: bool = True,
    license: str | None = None,
    export: dict | None = None,
) -> Path:
    """Write README.md beside a saved model, from its results; every number in it comes from there.

    Args:
        folder: holds the saved model, and where there are some `example.png` and `figures/`.
        template: Jinja template of the card.
        results: as in results.json.
        config: the run's configuration, as YAML.
        repo: where it will be; None for a model that stays in `folder`.
        answer: what the model says of `example.png`, see `in_words`.
        layout: a sentence on how it is stored and why, see `choose_layout`.
        trusted: whether it takes `trust_remote_code=True` to load it.
        license: of the weights, an id such as apache-2.0.
        export: what export.json of recipes/export.py holds, where its files go along.
    """
    data, base_model = results["data"], yaml.safe_load(config).get("model_name_or_path")
    name, where = Path(data["name"]).name or "images", repo or str(folder)
    title = f"Vision Transformer on {name}"
    known_data, known_base = is_repo_id(data["name"]), is_repo_id(base_model)
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
                dataset_type=data["name"] if known_data else "imagefolder",
                dataset_name=name,
                dataset_config=data["config"],
                dataset_split=data["scored"],
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
        base_model=base_model if known_base else None,
        datasets=[data["name"]] if known_data else None,
        model_name=title,
        eval_results=evaluations,
    )
    example = folder / "example.png"
    channels = _channels(folder)
    argument = f'"{folder / "example.png"}"' if repo is None else f'hf_hub_download("{repo}", "example.png")'
    recalls = [row for row in results["per_class"] if row["recall"] is not None]
    weakest = sorted(recalls, key=lambda row: row["recall"])[:3] if len(recalls) > 3 else []
    weights = next(file for file in (WEIGHTS, "adapter_model.safetensors") if (folder / file).is_file())
    if weights != WEIGHTS:
        layout = f"What is saved here goes on top of `{base_model}`; it takes the packages hf_vit and peft."
    elif layout is None:
        layout = (
            "The code of the model lies beside its weights; `import hf_vit` makes `trust_remote_code` unnecessary."
        )
    card = ModelCard.from_template(
        card_data,
        template_path=str(template),
        begin=BEGIN,
        end=END,
        title=title,
        results=results,
        metrics=rows,
        height=results["image_size"][0],
        width=results["image_size"][1],
        parameters=f"{results['parameters']:,}",
        how=f"from `{base_model}`" if base_model else "from scratch",
        data=f"[{data['name']}](https://hf.co/datasets/{data['name']})" if known_data else f"`{data['name']}`",
        data_license=data.get("license"),
        license=license,
        weights=weights,
        checksum=checksum(folder / weights),
        where=where,
        repo=repo,
        layout=layout,
        trust=", trust_remote_code=True" if trusted else "",
        adapter=weights != WEIGHTS,
        plain=channels == 3,
        channels=channels,
        has_example=example.is_file(),
        example=argument if example.is_file() else '"photo.jpg"',
        answer=answer,
        export=export,
        javascript=bool(export) and not trusted and repo is not None,
        pictures={
            kind: (folder / "figures" / f"{kind}.png").is_file() for kind in ("predictions", "confusion", "curves")
        },
        samples=min(NUM_SAMPLES, data["scored_images"]),
        labels=data["labels"],
        weakest=", ".join(f"{row['label']} ({percent(row['recall'])})" for row in weakest),
        versions=", ".join(f"{package} {number}" for package, number in results["versions"].items()),
        config=config,
    )
    text = re.sub(r"\n{3,}", "\n\n", card.content)
    (folder / "README.md").write_text(text, encoding="utf-8")
    return folder / "README.md"


def _channels(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text()).get("num_channels", 3)


def _load(folder: Path):
    """The classifier in a folder: ours, an adapter on its base, or a native one; no code that lies there is run."""
    ours = HFViTConfig.get_config_dict(folder)[0].get("model_type") == HFViTConfig.model_type
    loader = HFViTForImageClassification if ours else AutoModelForImageClassification
    return loader.from_pretrained(folder).eval()


def in_words(logits: torch.Tensor, labels: list[str]) -> str:
    """The answer that logits (L,) are, such as "Bag (98%)"."""
    chance, index = logits.softmax(dim=0).max(dim=0)
    return f"{labels[index]} ({chance:.0%})"


def split_card(text: str) -> tuple[dict, str]:
    """A card's metadata and what follows them.

    Raises:
        ValueError: if the metadata are not YAML, or no mapping.
    """
    text = text.removeprefix("\ufeff")
    found = re.match(r"\s*---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", text, re.DOTALL | re.MULTILINE)
    try:
        metadata = {} if found is None else yaml.safe_load(found.group(1)) or {}
    except yaml.YAMLError as error:
        raise ValueError(
            f"the metadata of README.md cannot be read ({' '.join(str(error).split())}): mend them first"
        ) from error
    if not isinstance(metadata, dict):
        raise ValueError(
            f"the metadata of README.md are a {type(metadata).__name__}, not keys with values: mend them first"
        )
    return metadata, text if found is None else text[found.end() :]


def merge_cards(ours: str, theirs: str, license: str | None = None) -> str:
    """The card that is there, with our part of it replaced, or put behind it where it has none.

    Of the metadata, the owner's win where the card was written by hand; where an earlier push wrote it, the new ones do. Keys
    and tags that only one of them has are kept. The scores of this model in model-index are always the new ones.

    Args:
        ours: as `write_card` makes it.
        theirs: the README.md that is there; "" for none.
        license: wins over that of either.

    Raises:
        ValueError: if the metadata that are there cannot be read.
    """
    (new, part), (old, text) = split_card(ours), split_card(theirs)
    before, _, rest = text.partition(BEGIN)
    by_hand = END not in rest
    merged = {**new, **old} if by_hand else {**old, **new}
    as_list = lambda value: value if isinstance(value, list) else [] if value is None else [value]
    merged["tags"] = list(dict.fromkeys([*as_list(old.get("tags")), *new["tags"]]))
    names = [entry["name"] for entry in new["model-index"]]
    kept = [
        entry
        for entry in as_list(old.get("model-index"))
        if isinstance(entry, dict) and entry.get("name") not in names
    ]
    merged["model-index"] = [*kept, *new["model-index"]]
    if license is not None:
        merged["license"] = license
    if by_hand:
        text = f"{text.strip()}\n\n{part.strip()}"
    else:
        text = before + part.strip() + rest.partition(END)[2]
    return f"---\n{yaml.safe_dump(merged, sort_keys=False, allow_unicode=True)}---\n\n{text.strip()}\n"


# ----------------------------------------------------------------------------------------------------------------------
# The folder to push


def read_for_others(file: Path) -> str:
    """A text file of a run, with ~ for the home directory, which may hold the name of a person."""
    text = file.read_text(encoding="utf-8")
    return text.replace(str(Path.home()), "~") if len(Path.home().parts) > 1 else text


def read_run(run: Path) -> tuple[dict, str]:
    """results.json and config.yaml of a run, as `read_for_others` gives them.

    Raises:
        ValueError: if the run is not there or not finished.
    """
    missing = [name for name in (*EVIDENCE, "model/config.json") if not (run / name).is_file()]
    if missing:
        raise ValueError(
            f"{run} holds no {' and no '.join(missing)}: wanted the folder of a finished run, as recipes/train.py leaves it"
        )
    return json.loads(read_for_others(run / "results.json")), read_for_others(run / "config.yaml")


def load_whole(folder: Path):
    """The classifier of a run; low-rank updates that were saved alone are merged into their base."""
    if not (folder / "adapter_config.json").is_file():
        return _load(folder)
    from peft import PeftModel

    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
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
    is_native = saved is not model
    saved.save_pretrained(folder)
    if not is_native:  # `save_pretrained` names the class that is saved; the others read the same weights
        file = folder / "config.json"
        fields = json.loads(file.read_text())
        for auto, ours in (("AutoModel", "HFViTModel"), ("AutoBackbone", "HFViTBackbone")):
            fields["auto_map"][auto] = f"modeling_hf_vit.{ours}"
        file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    shutil.copy(run / "model" / "preprocessor_config.json", folder)
    (folder / "training").mkdir()
    for name in EVIDENCE:
        (folder / "training" / name).write_text(read_for_others(run / name), encoding="utf-8")
    if (run / "model" / "figures").is_dir():
        hidden = shutil.ignore_patterns(*([] if with_images else ["predictions.png"]))
        shutil.copytree(run / "model" / "figures", folder / "figures", ignore=hidden)

    if with_images:
        pixel_values, logits = _samples(run)
        if (run / "model" / "example.png").is_file():
            shutil.copy(run / "model" / "example.png", folder)
        exact = results["mixed_precision"] == "no"
        what = f"the logits of {run / 'model'} are not those of its run"
        _compare(model(pixel_values).logits, logits, 1e-3 if exact else 0.1, what)
    else:
        generator = torch.Generator().manual_seed(0)
        size = (NUM_PROBES, _channels(run / "model"), *results["image_size"])
        pixel_values = torch.randn(size, generator=generator)
    pixel_values = pixel_values[:NUM_PROBES].contiguous()
    weights = {WEIGHTS: checksum(folder / WEIGHTS)}
    logits = model(pixel_values).logits
    save_file({"pixel_values": pixel_values, "logits": logits}, folder / PROBES, metadata=weights)
    verify(folder)
    write_card(
        folder, template, results, config, repo=repo, layout=reason, trusted=not is_native, license=license,
        export=_exported(run, folder), answer=in_words(logits[0], results["data"]["labels"]),
    )  # fmt: skip
    return reason


def _samples(run: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The run's sample images as the model takes them (n, C, H, W), and the logits that the run gave them (n, L)."""
    if not (run / SAMPLES).is_file():
        raise ValueError(f"{run} holds no {SAMPLES}: pass --without_images, or train it again with this version")
    samples = load_file(run / SAMPLES)
    processor = AutoImageProcessor.from_pretrained(run / "model")
    shape = (1, -1, 1, 1)
    mean, std = (torch.tensor(values).view(shape) for values in (processor.image_mean, processor.image_std))
    return (samples["images"].float() / 255 - mean) / std, samples["logits"]


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
    made = json.loads(file.read_text())
    weights = run / "model" / WEIGHTS
    if not weights.is_file() or made["weights_sha256"] != checksum(weights):
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

    No code of the repository is run.

    Raises:
        ValueError: if it has no probes, if its weights are not those that were pushed, or it gives other logits than then.
        OSError: if it cannot be fetched.
    """
    folder = Path(source)
    if not folder.is_dir():
        wanted = ["*.json", WEIGHTS, PROBES]
        folder = Path(snapshot_download(str(source), revision=revision, allow_patterns=wanted))
    if missing := [name for name in (PROBES, WEIGHTS) if not (folder / name).is_file()]:
        raise ValueError(
            f"{source} has no {' and no '.join(missing)}: it is not whole, or was not pushed by recipes/publish.py"
        )
    with safe_open(folder / PROBES, "pt") as opened:
        noted = opened.metadata() or {}
    if (found := checksum(folder / WEIGHTS)) != noted.get(WEIGHTS):
        raise ValueError(
            f"{WEIGHTS} of {source} has the checksum {found[:12]}, not {str(noted.get(WEIGHTS))[:12]} as when it was pushed: "
            "download it again (delete it from the cache first)"
        )
    probes = load_file(folder / PROBES)
    logits = _load(folder)(probes["pixel_values"]).logits
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
        if response.status_code == 429 and (_retry_after(response) or 0) > LONGEST_WAIT:
            response.read()
            hf_raise_for_status(response)

    hooks = {"request": [*usual.event_hooks["request"], limit], "response": [*usual.event_hooks["response"], refuse]}
    set_client_factory(lambda: type(usual)(event_hooks=hooks, follow_redirects=True, timeout=seconds))


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
    say=print,
):
    """Make `folder` the newest state of a repository, in one commit, and read it back; returns what `create_commit` does.

    What fails in passing is tried again from the start, which sends only what is not there yet. The README.md that is there
    is merged (`merge_cards`), files that an earlier push left and this one does not have are deleted, others are kept.

    Raises:
        OSError: if the Hub refuses, cannot be reached, or gives back something else than was sent; one line, with what to do.
    """
    card = (folder / "README.md").read_text(encoding="utf-8")
    files, stage = [], "reading"

    def act():
        nonlocal files, stage
        stage = "reading"
        HfApi().create_repo(repo, private=not public, exist_ok=True)
        if revision is not None:
            HfApi().create_branch(repo, branch=revision, exist_ok=True)
        info, there = inspect_repo(repo, revision)
        (folder / "README.md").write_text(merge_cards(card, there, license), encoding="utf-8")
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        there = [file.rfilename for file in info.siblings or ()]
        gone = [name for name in there if re.fullmatch(OURS, name) and name not in files]
        stage = "committing"
        return HfApi().create_commit(
            repo,
            [
                *(CommitOperationAdd(name, folder / name) for name in files),
                *(CommitOperationDelete(name, is_folder=False) for name in gone),
            ],
            commit_message=f"Vision Transformer, pushed by hf_vit {version('hf_vit')}",
            revision=revision,
            create_pr=create_pr,
            parent_commit=info.sha,
        )

    def arrived(error):  # perhaps: a second pull request would be one too many
        return create_pr and stage == "committing" and _status(error) is None

    commit = _patiently(act, lambda error, times: explain(error, repo, folder, times), say, give_up=arrived)
    where = f"{repo} at commit {commit.oid[:12]}"
    for _ in range(2):
        wrong = _patiently(
            lambda: _read_back(folder, repo, commit.oid, files),
            lambda error, times: (
                f"{where} was pushed but could not be read back ({_what(error)}), {times} times: check it "
                f"with --verify {repo}"
            ),
            say,
        )
        if not wrong:
            return commit
    raise OSError(
        f"{where} gives back other bytes than were sent ({', '.join(wrong)}), twice: do not use it; push it again, and check "
        f"it with --verify {repo}"
    )


def _read_back(folder: Path, repo: str, revision: str, files: list[str]) -> list[str]:
    """Download what was pushed; returns the files that differ from those in `folder`."""
    with tempfile.TemporaryDirectory() as cache:
        back = Path(snapshot_download(repo, revision=revision, cache_dir=cache, max_workers=2))
        wrong = [
            name for name in files if not (back / name).is_file() or checksum(back / name) != checksum(folder / name)
        ]
        if not wrong:
            verify(back)
        return wrong


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
        except (NETWORK_ERROR, OSError, json.JSONDecodeError, KeyError, RuntimeError) as error:
            cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
            wait = _wait(cause, attempt)
            tired = attempt == ATTEMPTS or time.monotonic() - began > LONGEST_WAIT
            if wait is None or tired or give_up(cause):
                raise OSError(explain(cause, attempt)) from error
            say(f"{_what(cause)}: trying again in {wait:g} s ({attempt} of {ATTEMPTS})")
            time.sleep(wait)


def _status(error) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None


def _what(error) -> str:
    """An error in a few words on one line, without the token."""
    text = " ".join((str(error) or type(error).__name__).split())[:300]
    token = get_token()
    return text.replace(token, "***") if token else text


def _wait(error, attempt: int) -> float | None:
    """Seconds until it is worth trying again; None where it is not."""
    status = _status(error)
    if status is not None and status not in (408, 409, 412, 429, 500, 502, 503, 504):
        return None
    passing = (NETWORK_ERROR, ConnectionError, TimeoutError, LocalEntryNotFoundError)  # the last: tried again, in vain
    if isinstance(error, OSError) and not isinstance(error, passing):
        return None  # of this machine
    asked = None if status is None else _retry_after(error.response)
    wait = 2.0 ** (attempt - 1) if asked is None else asked
    return wait if wait <= LONGEST_WAIT else None


def explain(error, repo: str, folder: Path, attempts: int) -> str:
    """One line: what happened and what to do."""
    status, hub, owner = _status(error), constants.ENDPOINT, repo.partition("/")[0]
    kept = "nothing on this disk has changed"
    again = f"{kept}; the same command goes on, and what has arrived is not sent again"
    largest = sorted(((file.stat().st_size, file.name) for file in folder.rglob("*") if file.is_file()), reverse=True)
    if status == 401:
        return f"{hub} does not accept the token (401): log in with `hf auth login`, or set HF_TOKEN to one that may write; {kept}"
    if status == 403:
        return (
            f"the token may not write to {repo} (403): take a --repo under your own name or an organisation of yours instead of "
            f"{owner}, or a token with write access; {kept}"
        )
    if status == 404:
        return (
            f"{hub} knows no {repo}, or no such revision of it, or does not show it to this token (404): look at --repo, "
            f"--revision and HF_ENDPOINT; {kept}"
        )
    if status in (409, 412):
        return f"others changed {repo} while this was sent ({status}), {attempts} times: wait for them; {again}"
    if status == 413:
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
        return f"{hub} cannot be reached, or broke off ({_what(error)}), {attempts} times: look at the connection and at HF_ENDPOINT; {again}"
    if isinstance(error, (json.JSONDecodeError, KeyError)):
        return f"{hub} does not answer as a Hub does: look at HF_ENDPOINT; {kept}"
    return f"{repo} was not pushed: {_what(error)}; {kept}"

"""The runs that model_cards keeps: copy a finished run there, read it with its seeds, write its card again."""

import json
import shutil
from pathlib import Path

import yaml

from hf_vit.evaluation.results import Results
from hf_vit.hub.card import write_card
from hf_vit.hub.run_results import FIGURES_WITH_IMAGES, read_redacted, read_run, weights_file
from hf_vit.system.errors import UserError


NUMBERS = ("results.json", "config.yaml", "confusion_matrix.csv")
MODEL_FILES = ("README.md", "example.png", "config.json", "preprocessor_config.json", "model.safetensors")
LARGEST_WEIGHTS = 5_000_000  # bytes that git may well hold
TRANSFER = {
    "scratch": "from scratch",
    "full": "full fine-tuning",
    "layer-decay": "full, lower layers slower",
    "lora": "LoRA",
    "probe": "linear probe",
}  # folders of recipes/transfer.py, and what tables call them


def keep(run: Path, name: str, house: Path):
    """Copy a finished run to model_cards/`name`, replacing what was kept there.

    Of a further seed (`name`/seeds/N) only the numbers are kept. A folder of recipes/transfer.py is kept run by run, without the
    weights of what was fine-tuned. Images of a data set without a known licence, and figures that show them, are left out.
    """
    if (run / "knn").is_dir():
        return _keep_transfer(run, name, house)
    results, _ = read_run(run)
    target = house / "model_cards" / name
    target.mkdir(parents=True, exist_ok=True)
    numbers = NUMBERS if "seeds" in Path(name).parts else (*NUMBERS, "metrics.jsonl")
    for file in (*numbers, *MODEL_FILES):
        (target / file).unlink(missing_ok=True)
    if (target / "figures").exists():
        shutil.rmtree(target / "figures")
    for file in numbers:
        (target / file).write_text(read_redacted(run / file), encoding="utf-8")
    if "seeds" in Path(name).parts:
        return
    left_out = set()
    if results.data.get("license") is None:
        left_out = {"example.png", *(f"{name}.png" for name in FIGURES_WITH_IMAGES)}
    if target.name in TRANSFER or weights_file(run / "model").stat().st_size >= LARGEST_WEIGHTS:
        left_out.add("model.safetensors")
    shutil.copytree(run / "model" / "figures", target / "figures", ignore=lambda *_: left_out)
    for file in MODEL_FILES:
        if file not in left_out and (run / "model" / file).is_file():
            shutil.copy(run / "model" / file, target)


def _keep_transfer(folder: Path, name: str, house: Path):
    keep(folder / "pretrained", f"{name}/pretrained", house)
    for method in TRANSFER:
        for run in sorted((folder / method).iterdir(), key=lambda run: int(run.name)):
            keep(run, f"{name}/{method}" + (f"/seeds/{run.name}" if run.name != "0" else ""), house)
    knn = house / "model_cards" / name / "knn"
    knn.mkdir(exist_ok=True)
    text = read_redacted(folder / "knn" / "results.json")
    (knn / "results.json").write_text(text, encoding="utf-8")


def read_seeds(folder: Path) -> list[dict]:
    """The results.json of a kept run and of its seeds/, by seed; ValueError if they differ in more than that."""
    places = [folder, *(file.parent for file in folder.glob("seeds/*/results.json"))]
    runs = [json.loads((place / "results.json").read_text()) for place in places]
    first, *others = (yaml.safe_load((place / "config.yaml").read_text()) for place in places)
    differing = {key for config in others for key in config.keys() | first.keys() if config.get(key) != first.get(key)}
    if differing - {"seed", "output_dir"} or len({run["seed"] for run in runs}) < len(runs):
        raise UserError(
            f"{folder} and its seeds/ are not one run with other seeds: their config.yaml differ in {sorted(differing)}; "
            "wanted a different seed for each, and no other difference but output_dir"
        )
    return sorted(runs, key=lambda run: run["seed"])


def write_cards(house: Path):
    """Write the card of each kept run, by its path in the repository."""
    template = Path(__file__).resolve().parents[1] / "model_card.md"
    for card in sorted(house.glob("model_cards/**/README.md")):
        folder, config = card.parent, card.with_name("config.yaml").read_text(encoding="utf-8")
        results = Results.from_json((folder / "results.json").read_text())
        write_card(folder, template, results, config, model_path=folder.relative_to(house).as_posix())

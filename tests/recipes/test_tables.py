"""Claims about recipes/tables.py and what it writes: the tables of the READMEs, the cards and numbers in model_cards/."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import tables
import torch
import yaml
from benchmarks import kept_runs, run_tables
from PIL import Image
from transformers import AutoImageProcessor

from hf_vit import HFViTForImageClassification
from hf_vit.evaluation.scores import format_prediction
from hf_vit.hub.run_results import FIGURES_WITH_IMAGES
from hf_vit.system.files import checksum
from hf_vit.training.arguments import TrainArguments, parse_args


HOUSE = Path(__file__).parents[2]
RUNS = sorted(file for file in HOUSE.glob("model_cards/**/results.json") if file.with_name("config.yaml").is_file())


def test_the_tables_are_what_the_script_writes():
    pages = {page: page.read_text() for page in tables.pages(HOUSE)}
    assert {page: tables.fill_tables(text, HOUSE) for page, text in pages.items()} == pages
    for name in tables.TABLES:
        assert sum(f"<!-- {name}: recipes/tables.py writes this -->" in text for text in pages.values()) == 1


@pytest.mark.parametrize("file", sorted(HOUSE.glob("model_cards/*/results.json")), ids=lambda file: file.parent.name)
def test_a_published_runs_preset_and_card_state_its_results(file):
    results = json.loads(file.read_text())
    accuracy = f"{100 * results['metrics']['accuracy']:.2f}%"
    preset = HOUSE / "recipes" / "configs" / f"{file.parent.name}.yaml"
    assert accuracy in preset.read_text()
    assert f" {results['train_seconds']:,.0f} s" in preset.read_text()
    assert results["command"].endswith(f" recipes/train.py --config recipes/configs/{preset.name}")
    was = yaml.safe_load(file.with_name("config.yaml").read_text())
    now, defaults = vars(parse_args(["--config", str(preset)])), vars(TrainArguments())
    now["loss"] = now["loss"] or "cross_entropy"  # what one label an image gets
    was = {name: was.get(name, defaults[name]) for name in now}  # a flag may be younger than the run
    for args in (now, was):
        args["log_steps"] = args["log_steps"] or 10  # what 200 steps or more get
    assert now == was
    assert accuracy in (file.parent / "README.md").read_text()


@pytest.mark.parametrize("file", RUNS, ids=lambda file: str(file.parent.relative_to(HOUSE / "model_cards")))
def test_a_kept_runs_accuracy_is_that_of_its_confusion_matrix(file):
    with open(file.with_name("confusion_matrix.csv"), newline="", encoding="utf-8") as opened:
        counts = torch.tensor([[int(count) for count in row[1:]] for row in list(csv.reader(opened))[1:]])
    assert counts.trace().item() / counts.sum().item() == pytest.approx(
        json.loads(file.read_text())["metrics"]["accuracy"], abs=1e-6
    )


@pytest.mark.parametrize(
    "weights", sorted(HOUSE.glob("model_cards/**/model.safetensors")), ids=lambda file: file.parent.name
)
def test_kept_weights_give_the_answer_that_is_in_the_results(weights):
    folder, results = weights.parent, json.loads(weights.with_name("results.json").read_text())
    assert checksum(weights) == results["weights_sha256"]
    model = HFViTForImageClassification.from_pretrained(folder).eval()
    if not (folder / "example.png").is_file():  # its licence is not known
        return
    inputs = AutoImageProcessor.from_pretrained(folder)(Image.open(folder / "example.png"), return_tensors="pt")
    with torch.no_grad():
        assert format_prediction(model(**inputs).logits[0], results["data"]["labels"]) == results["answer"]


@pytest.mark.parametrize("file", RUNS, ids=lambda file: str(file.parent.relative_to(HOUSE / "model_cards")))
def test_images_whose_licence_is_not_known_are_not_kept(file):
    shows_images = {f"{name}.png" for name in FIGURES_WITH_IMAGES} | {"example.png"}
    if json.loads(file.read_text())["data"]["license"] is None:
        assert [picture for picture in file.parent.rglob("*.png") if picture.name in shows_images] == []


def cards_of(house):
    return {file.relative_to(house): file.read_text() for file in house.glob("model_cards/**/README.md")}


def test_the_cards_are_what_the_script_writes(tmp_path):
    kept = [file.parent for file in HOUSE.glob("model_cards/**/results.json") if file.with_name("README.md").is_file()]
    assert [folder.name for folder in kept if not (folder / "config.yaml").is_file()] == []
    shutil.copytree(HOUSE / "model_cards", tmp_path / "model_cards")
    kept_runs.write_cards(tmp_path)
    assert cards_of(tmp_path) == cards_of(HOUSE)


def test_a_card_whose_number_was_changed_is_written_anew(tmp_path):
    shutil.copytree(HOUSE / "model_cards", tmp_path / "model_cards")
    card, file = (tmp_path / "model_cards" / "demo" / name for name in ("README.md", "results.json"))
    before, results = card.read_text(), json.loads(file.read_text())
    card.write_text(before.replace(f"{results['metrics']['accuracy']:.2%}", "99.99%"))
    assert card.read_text() != before
    kept_runs.write_cards(tmp_path)
    assert card.read_text() == before
    results["metrics"]["accuracy"] = 0.1234
    file.write_text(json.dumps(results))
    kept_runs.write_cards(tmp_path)
    assert "12.34%" in card.read_text()
    assert "12.34%" not in before


def finished_run(folder, seed=0, accuracy=0.5, **config):
    """A folder of the files that recipes/train.py leaves, as far as model_cards keeps them; seven bytes of weights."""
    (folder / "model" / "figures").mkdir(parents=True)
    demo = json.loads((HOUSE / "model_cards" / "demo" / "results.json").read_text())
    own = {"metrics": {"accuracy": accuracy}, "seed": seed, "hardware": "a machine", "commit": "0123456789"}
    results = {**demo, **own, "data": {**demo["data"], "license": None}}
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "config.yaml").write_text(json.dumps({"seed": seed, "output_dir": str(folder), **config}))
    for name in ("metrics.jsonl", "confusion_matrix.csv", "samples.safetensors", "model/figures/curves.png"):
        (folder / name).touch()
    for name in ("README.md", "config.json", "model.safetensors", "modeling_hf_vit.py"):
        (folder / "model" / name).write_text("of seed" + str(seed))
    return folder


def test_what_is_kept_of_a_run_replaces_what_was_and_leaves_its_seeds(tmp_path, monkeypatch):
    kept, names = tmp_path / "model_cards" / "tiny", lambda folder: sorted(file.name for file in folder.iterdir())
    kept_runs.keep(finished_run(tmp_path / "first"), "tiny", tmp_path)
    kept_runs.keep(finished_run(tmp_path / "other", seed=1), "tiny/seeds/1", tmp_path)
    numbers = ["config.yaml", "confusion_matrix.csv", "results.json"]
    assert names(kept / "seeds" / "1") == numbers
    assert names(kept) == sorted(
        [*numbers, "README.md", "config.json", "figures", "metrics.jsonl", "model.safetensors", "seeds"]
    )
    (kept / "figures" / "old.png").touch()
    monkeypatch.setattr(kept_runs, "LARGEST_WEIGHTS", 7)
    kept_runs.keep(tmp_path / "first", "tiny", tmp_path)
    assert names(kept) == sorted([*numbers, "README.md", "config.json", "figures", "metrics.jsonl", "seeds"])
    assert names(kept / "figures") == ["curves.png"]
    (tmp_path / "first" / "results.json").unlink()
    with pytest.raises(ValueError, match="is not finished"):
        kept_runs.keep(tmp_path / "first", "tiny", tmp_path)
    assert (kept / "results.json").is_file()


def test_the_table_of_seeds_is_of_one_run_with_other_seeds(tmp_path):
    assert run_tables.seeds(tmp_path).count("\n") == 1
    for seed, accuracy in ((0, 0.5), (2, 0.54), (1, 0.52)):
        name = "tiny" if seed == 0 else f"tiny/seeds/{seed}"
        kept_runs.keep(finished_run(tmp_path / str(seed), seed, accuracy), name, tmp_path)
    row = "| [tiny](../../model_cards/tiny/README.md) | 3 | 52.00% | 2.00 | 50.00% | 54.00% | 50.00%, 52.00%, 54.00% |"
    assert run_tables.seeds(tmp_path).splitlines()[2:] == [row, "", "a machine, commit 0123456."]
    kept_runs.keep(finished_run(tmp_path / "3", 3, learning_rate=1), "tiny/seeds/3", tmp_path)
    with pytest.raises(ValueError, match="learning_rate"):
        run_tables.seeds(tmp_path)

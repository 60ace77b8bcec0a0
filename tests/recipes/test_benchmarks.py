"""Claims about recipes/benchmarks, and about the tables, cards and numbers of model_cards/."""

import shutil
import subprocess
import sys

import gpu
import loader
import pytest
import tables
import torch
import yaml
from PIL import Image
from runs import HOUSE, read_json, results_of
from transformers import AutoImageProcessor

from hf_vit import HFViTForImageClassification
from hf_vit.card import write_card
from hf_vit.evaluation.results import Results
from hf_vit.evaluation.scores import format_prediction
from hf_vit.hub.finished_run import FIGURES_WITH_IMAGES
from hf_vit.system.files import checksum
from hf_vit.training.arguments import TrainArguments, parse_args


RUNS = sorted(file for file in HOUSE.glob("model_cards/**/results.json") if file.with_name("config.yaml").is_file())
by_name = pytest.mark.parametrize("file", RUNS, ids=lambda file: str(file.parent.relative_to(HOUSE / "model_cards")))


def test_the_tables_are_what_the_script_writes():
    pages = {page: page.read_text() for page in tables.pages(HOUSE)}
    assert {page: tables.fill_tables(text, HOUSE) for page, text in pages.items()} == pages
    for name in tables.TABLES:
        assert sum(f"<!-- {name}: " in text for text in pages.values()) == 1


@pytest.mark.parametrize("file", sorted(HOUSE.glob("model_cards/*/results.json")), ids=lambda file: file.parent.name)
def test_the_readme_the_preset_and_the_card_of_a_published_run_state_its_results(file):
    results = read_json(file)
    accuracy, seconds = f"{results['metrics']['accuracy']:.2%}", f" {results['train_seconds']:,.0f} s"
    preset = HOUSE / "recipes" / "configs" / f"{file.parent.name}.yaml"
    (row,) = (
        line for line in (HOUSE / "README.md").read_text().splitlines() if f"[{preset.stem}](model_cards/" in line
    )
    for text in (preset.read_text(), row):
        assert accuracy in text
        assert seconds in text
    assert accuracy in file.with_name("README.md").read_text()
    assert results["command"].endswith(f" recipes/train.py --config recipes/configs/{preset.name}")
    now, defaults = vars(parse_args(["--config", str(preset)])), vars(TrainArguments("", preset="", output_dir="."))
    was = yaml.safe_load(file.with_name("config.yaml").read_text())
    was = {name: was.get(name, defaults[name]) for name in now}  # a flag may be younger than the run
    for args in (now, was):
        args["log_steps"] = args["log_steps"] or 10  # what 200 steps or more get
        args["layer_decay"] = args["layer_decay"] or 1.0  # from scratch
    assert now == was


@pytest.mark.parametrize(
    "weights", sorted(HOUSE.glob("model_cards/**/model.safetensors")), ids=lambda file: file.parent.name
)
def test_kept_weights_give_the_answer_that_is_in_the_results(weights):
    folder, results = weights.parent, results_of(weights.parent)
    assert checksum(weights) == results["weights_sha256"]
    model = HFViTForImageClassification.from_pretrained(folder).eval()
    if not (folder / "example.png").is_file():  # its licence is not known
        return
    inputs = AutoImageProcessor.from_pretrained(folder)(Image.open(folder / "example.png"), return_tensors="pt")
    with torch.no_grad():
        assert format_prediction(model(**inputs).logits[0], results["data"]["labels"]) == results["answer"]


@by_name
def test_images_whose_licence_is_not_known_are_not_kept(file):
    shows_images = {f"{name}.png" for name in FIGURES_WITH_IMAGES} | {"example.png"}
    if read_json(file)["data"]["license"] is None:
        assert [picture for picture in file.parent.rglob("*.png") if picture.name in shows_images] == []


@pytest.mark.parametrize("card", sorted(HOUSE.glob("model_cards/*/**/README.md")), ids=lambda card: card.parent.name)
def test_the_cards_are_what_their_results_give(card, tmp_path):
    run = shutil.copytree(card.parent, tmp_path / "run")
    (run / "README.md").unlink()
    results, config = Results.from_json((run / "results.json").read_text()), (run / "config.yaml").read_text()
    template, place = HOUSE / "recipes" / "model_card.md", card.parent.relative_to(HOUSE).as_posix()
    write_card(run, template, results, config, model_path=place)
    assert (run / "README.md").read_text() == card.read_text()


def test_the_loader_is_measured_on_rows_that_both_read(tmp_path):
    rows = loader.photos(tmp_path, 64, 48, 128)
    measured = loader.compare(rows, loader.square_spec(32), repeats=1)
    assert min(measured[name] for name in ("reference", "hf_vit", "hf_vit_bytes")) > 0


@pytest.mark.slow
def test_every_stage_of_the_gpu_benchmark_works_and_is_measured_once(tmp_path):
    command = [sys.executable, "-W", "ignore", gpu.__file__, "--output_file", tmp_path / "gpu.json", "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert tuple(read_json(tmp_path / "gpu.json")) == tuple(gpu.STAGES), done.stderr
    assert subprocess.run(command, capture_output=True, text=True).stdout == ""  # nothing is left

"""What a stranger's text or repository may not do to who reads or publishes it, and what of a run stays at home."""

import json
import os
import re
import sys
from dataclasses import replace
from datetime import date

import forked
import pandas as pd
import pytest
import runs
import yaml
from huggingface_hub import metadata_load
from loopback_hub import Hub, check_card
from PIL import Image
from publishing import HOUSE, at, one_line, recipe
from runs import TINY, results_of

from hf_vit import figures
from hf_vit.card import write_card
from hf_vit.hub.finished_run import read_run
from hf_vit.system import text as escapes
from hf_vit.system.files import atomic_dir, checksum, verify_checksums, write_text
from hf_vit.system.hub_names import refuse_mistyped_path


TEMPLATE = HOUSE / "recipes" / "model_card.md"
# Runs commands one after the other in one process, and prints what each exits with and prints.
RUN_EACH = """
import contextlib, io, json, os, runpy, sys

for line in json.loads(sys.argv[1]):
    sys.argv, printed = line, io.StringIO()
    sys.path.insert(0, os.path.dirname(line[0]))  # as Python does for a script
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            runpy.run_path(line[0], run_name="__main__")
            code = 0
        except SystemExit as stopped:
            code = stopped.code
    print(json.dumps({"exit": code, "printed": printed.getvalue()}))
"""


# ----------------------------------------------------------------------------------------------------------------------
# Text of strangers

HOSTILE = [
    "a\n-->\nb", "\n# other", "a\n---\nlicense: gpl\n---", "```\n# out of the fence", "<img src=x>", "x | y", "it's: \"so\" 北京",
    "\x1b]0;title\x07\x1b[2J", "\u202egpj.exe", "=HYPERLINK(0)", "\udcff", "<!-- a comment", "{{ 7 * 7 }}",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_card_of_hostile_text_keeps_its_shape(text, run):
    """Each place of results.json and config.yaml that reaches the card."""
    results, config = read_run(run)
    fields = ("hardware", "commit", "answer", "metrics_of", "mixed_precision", "attention_query")
    results = replace(results, **dict.fromkeys(fields, text), versions={"torch": text}, base_model_hub_id=None)
    results.data |= {"name": text, "license": text, "scored": text, "labels": [text, "other"]}
    results.per_class = [{"label": text, "recall": share / 4} for share in range(4)]
    config = yaml.safe_dump({**yaml.safe_load(config), "model_name_or_path": text, "label_names": text})
    write_card(run / "model", TEMPLATE, results, config, repo="alice/model", license="mit", prediction=text)
    card, metadata = (run / "model" / "README.md").read_text(), metadata_load(run / "model" / "README.md")
    body = card.partition("\n---\n")[2]
    above, configuration = body.split("<summary>Full configuration</summary>")
    assert check_card(card) == []
    assert set(metadata) <= {"library_name", "license", "pipeline_tag", "tags", "model-index"}
    assert len(re.findall("^# ", body, re.MULTILINE)) == 1
    assert len(re.findall("^## ", body, re.MULTILINE)) == 6  # the sections of the template
    assert "<!--" not in above
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", card)
    fences = re.findall(r"^ {0,3}(`{3,})\w*$", body, re.MULTILINE)
    assert max(fences, key=len) in configuration
    for block in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
        compile(block, "card", "exec")


@pytest.mark.parametrize(
    ("value", "license"),
    [(None, None), (["mit", date(2024, 1, 2)], "mit, 2024-01-02"), ("a\nb\x1b", "a b\\x1b"), ("x" * 999, "x" * 200)],
)
def test_a_licence_is_one_line_of_text_whatever_yaml_made_of_it(value, license):
    assert escapes.as_license(value) == license


def test_names_and_licences_of_the_data_are_text_in_what_a_run_prints_and_writes(tmp_path):
    """Class names are a formula and an escape, and the licence is a date."""
    for name, shade in (("=1+1", 0), ("b\x1b[2J", 255)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (16, 16), (shade,) * 3).save(tmp_path / "photos" / name / f"{number}.png")
    (tmp_path / "photos" / "README.md").write_text("---\nlicense: 2024-01-02\n---\n")
    flags = f"--dataset_name photos --preset tiny-patch16-224 --config_overrides {TINY} --output_dir run --max_train_steps 1"
    trained = runs.recipe("train.py", flags, cwd=tmp_path)
    classified = runs.recipe("classify.py run run/model/example.png", cwd=tmp_path)
    for said in (trained, classified):
        assert "b\\x1b[2J" in said
        assert "\x1b" not in said
    assert results_of(tmp_path / "run")["data"]["license"] == "2024-01-02"
    assert "2024-01-02" in (tmp_path / "run" / "model" / "README.md").read_text()
    table = pd.read_csv(tmp_path / "run" / "confusion_matrix.csv", index_col="true class")
    assert list(table.columns) == list(table.index) == ["'=1+1", "b\\x1b[2J"]


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "\uff1d"])
def test_no_cell_of_a_table_is_a_formula(start):
    assert escapes.csv_cell(start + "HYPERLINK(0)").startswith("'")
    assert escapes.csv_cell("T-shirt = top") == "T-shirt = top"


def test_no_class_name_moves_the_cursor_or_turns_the_line():
    said = escapes.printable("cat\x1b[1A\x9b2J\u202e\u2066\n\x07\udcff")
    assert said == "cat\\x1b[1A\\x9b2J\\u202e\\u2066\\n\\x07\\udcff"
    assert escapes.printable(said) == said
    assert escapes.printable("\u06cc\u200c\u06cc 北京") == "\u06cc\u200c\u06cc 北京"
    assert figures.shorten("a\x1b$") == r"a\x1b$"


# ----------------------------------------------------------------------------------------------------------------------
# Private images and a public repository


@pytest.mark.parametrize("flags", ["", "--create_pr", "--revision new", "--space"])
def test_images_do_not_go_to_a_repository_that_is_public_already(flags, run, hub):
    repo = "spaces/alice/model" if flags == "--space" else "alice/model"
    first = hub.put(repo, {"notes.txt": b"mine"})
    with one_line("alice/model.*--public.*--without_images"):
        recipe(run, "--repo alice/model --push", flags)
    assert hub.history(repo) == [first]
    assert hub.uploaded == []
    if flags in ("", "--space"):
        pictures = {"examples/1.png", "example.png"}
        recipe(run, "--repo alice/model --push --without_images", flags)
        assert pictures.isdisjoint(hub.files(repo))
        recipe(run, "--repo alice/model --push --public", flags)
        assert not pictures.isdisjoint(hub.files(repo))


def test_names_of_skipped_images_stay_at_home_and_images_go_to_a_private_repository(run, hub):
    results = results_of(run)
    results["data"] |= {"skipped_images": 1, "skipped_first": ["/home/al/diagnosis of Bob.png cannot be read"]}
    (run / "results.json").write_text(json.dumps(results))
    hub.put("alice/model", {"notes.txt": b"mine"}, private=True)
    recipe(run, "--repo alice/model --push")
    files = hub.files("alice/model")
    assert "example.png" in files
    assert b"diagnosis" not in b"".join(files.values())
    assert json.loads(files["training/results.json"])["data"]["skipped_images"] == 1


# ----------------------------------------------------------------------------------------------------------------------
# Links and manifests


@pytest.fixture
def victim(tmp_path):
    """A file of the user, that must stay as it is."""
    (tmp_path / "home of the user").mkdir()
    file = tmp_path / "home of the user" / "letter.txt"
    file.write_text("mine")
    yield file
    assert file.read_text() == "mine"
    assert os.listdir(file.parent) == ["letter.txt"]


def test_a_file_that_is_written_aside_follows_no_link(tmp_path, victim):
    run = tmp_path / "run"
    run.mkdir()
    for name in (".metrics.jsonl.part", "metrics.jsonl"):
        (run / name).symlink_to(victim)
    (run / ".model.part").symlink_to(victim.parent)
    write_text(run / "metrics.jsonl", "{}")
    assert not (run / "metrics.jsonl").is_symlink()
    with pytest.raises(FileExistsError), atomic_dir(run / "model") as aside:
        (aside / "weights").write_text("new")


@pytest.mark.parametrize("name", ["../../home of the user/letter.txt", "ABSOLUTE", "link"])
def test_a_manifest_that_lists_what_is_no_regular_file_below_it_is_refused(name, tmp_path, victim):
    folder = tmp_path / "run" / "best"
    folder.mkdir(parents=True)
    (folder / "link").symlink_to(victim)
    name = str(victim) if name == "ABSOLUTE" else name
    entry = {"bytes": victim.stat().st_size, "sha256": checksum(victim)}
    (folder / "manifest.json").write_text(json.dumps({"files": {name: entry}}))
    with pytest.raises(ValueError, match=re.escape(name)):
        verify_checksums(folder)


# ----------------------------------------------------------------------------------------------------------------------
# Names

PATHS = "runs/mine/model ./photos ~/photos photos/ photos.csv Data/photos here/typo photos"
NAMES = "google/vit-base-patch16-224 timm/vit_base_patch16_224.augreg_in21k alice/runs fashion-mnist-mini here"


def test_a_mistyped_path_is_no_name_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in PATHS.split():
        with pytest.raises(ValueError, match=re.escape(f"--model {name}")):
            refuse_mistyped_path(name, "--model")
    for name in NAMES.split():
        assert refuse_mistyped_path(name, "--model") == name


SCRIPTS = [
    "train.py --dataset_name runs/mime --output_dir out --preset tiny-patch16-224",
    "train.py --dataset_name fashion-mnist-mini --output_dir out --model_name_or_path runs/mime",
    "train.py --dataset_name fashion-mnist-mini --output_dir out --preset tiny-patch16-224 --teacher_name_or_path runs/mime",
    "eval.py --dataset_name fashion-mnist-mini --model_name_or_path runs/mime",
    "classify.py runs/mime fashion-mnist-mini",
    "publish.py --verify runs/mime",
]


def test_no_script_asks_the_hub_for_a_mistyped_path(tmp_path):
    lines = [f"{HOUSE}/recipes/{line}".split() for line in SCRIPTS]
    command = [sys.executable, "-W", "ignore", "-c", RUN_EACH, json.dumps(lines)]
    with Hub() as hub:
        printed = forked.run(command, tmp_path, os.environ | at(hub, tmp_path), check=True).stdout
        assert hub.requests == []
    for line, done in zip(SCRIPTS, map(json.loads, printed.splitlines()), strict=True):
        said = f"{done['printed']}{done['exit']}"  # a text that a script exits with is printed, and its code is 1
        assert done["exit"] == 1 or "error: " in said, line
        assert "runs/mime" in said, line
        assert "Traceback" not in said, line

"""What a stranger's text or repository may not do to who reads or publishes it, and what of a run stays at home."""

import csv
import io
import json
import os
import re
import shutil
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path

import forked
import pytest
import yaml
from huggingface_hub import metadata_load
from loopback_hub import Hub
from PIL import Image
from publishing import content, one_line, publish, recipe, talking_to

from hf_vit import figures
from hf_vit.card import write_card
from hf_vit.evaluation.classifiers import load_classifier
from hf_vit.hub.finished_run import read_run
from hf_vit.hub.package import build_package, load_merged_model
from hf_vit.system import text as quoting
from hf_vit.system.files import atomic_dir, checksum, verify_checksums, write_text
from hf_vit.system.hub_names import refuse_mistyped_path


pytestmark = [
    pytest.mark.filterwarnings("ignore:Warnings while validating metadata"),  # the Hub's advice to name a licence
    pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning"),  # huggingface_hub 2.4 to httpx2
]
HOUSE = Path(__file__).parents[2]
TEMPLATE = HOUSE / "recipes" / "model_card.md"


@pytest.fixture
def run(demo_run, tmp_path):
    return shutil.copytree(demo_run, tmp_path / "run")


@pytest.fixture
def hub(tmp_path):
    with Hub() as hub, talking_to(hub.url, tmp_path / "home"):
        yield hub


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


def run_scripts(lines, cwd, **environment):
    """Run commands one after the other in one process of their own: what each exits with, and prints."""
    lines = [[str(HOUSE / "recipes" / script), *map(str, flags)] for script, *flags in lines]
    command = [sys.executable, "-W", "ignore", "-c", RUN_EACH, json.dumps(lines)]
    environment = {**os.environ, **environment}
    done = forked.run(command, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def change(file, edit):
    value = json.loads(file.read_text())
    edit(value)
    file.write_text(json.dumps(value, indent=2))


# ----------------------------------------------------------------------------------------------------------------------
# Text of strangers

HOSTILE = [
    "a\n-->\nb", "\n# other", "a\n---\nlicense: gpl\n---", "```\n# out of the fence", "<img src=x>", "x | y",
    "\x1b]0;title\x07\x1b[2J", "\u202egpj.exe", "=HYPERLINK(0)", "\udcff", "<!-- a comment", "{{ 7 * 7 }}",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_card_of_hostile_text_keeps_its_shape(text, run, tmp_path):
    """Each place of results.json and config.yaml that reaches the card."""
    results, config = read_run(run)
    fields = ("hardware", "commit", "answer", "metrics_of", "mixed_precision", "attention_query")
    results = replace(results, **dict.fromkeys(fields, text), versions={"torch": text}, base_model_hub_id=None)
    results.data |= {"name": text, "license": text, "scored": text, "labels": [text, "other"]}
    results.per_class = [{"label": text, "recall": share / 4} for share in range(4)]
    config = yaml.safe_dump({**yaml.safe_load(config), "model_name_or_path": text, "label_names": text})
    folder = shutil.copytree(run / "model", tmp_path / "card")
    write_card(folder, TEMPLATE, results, config, repo="alice/model", license=text, prediction=text)
    card, metadata = (folder / "README.md").read_text(), metadata_load(folder / "README.md")
    body = card.partition("\n---\n")[2]
    assert set(metadata) <= {"library_name", "license", "pipeline_tag", "tags", "model-index"}
    assert "\n" not in metadata["license"]
    assert len(re.findall("^# ", body, re.MULTILINE)) == 1
    assert "<!--" not in body.partition("<summary>Full configuration")[0]
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", card)
    fences = re.findall(r"^ {0,3}(`{3,})\w*$", body, re.MULTILINE)
    assert len(re.findall(r"^## ", body, re.MULTILINE)) == 6  # the sections of the template
    assert max(fences, key=len) in body.split("<summary>Full configuration</summary>")[1]


@pytest.mark.parametrize(
    ("value", "license"),
    [
        (None, None), ("", None), ("mit", "mit"), (date(2024, 1, 2), "2024-01-02"), (1.0, "1.0"), (["mit", date(2024, 1, 2)], "mit, 2024-01-02"),
        ("a\nb", "a b"), ({"a": 1}, "{'a': 1}"), ("\x1b[2J", "\\x1b[2J"), ("x" * 10**6, "x" * 200),
    ],
    ids=str,
)  # fmt: skip
def test_a_licence_is_one_line_of_text_whatever_yaml_made_of_it(value, license):
    assert quoting.as_license(value) == license
    json.dumps(quoting.as_license(value))


def test_a_date_as_licence_of_the_data_ends_in_the_card(tmp_path):
    """By the real command, on a folder whose card says `license: 2024-01-02`, with class names that are formulas and escapes."""
    for name, shade in (("=1+1", 0), ("b\x1b[2J", 255)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (16, 16), (shade,) * 3).save(tmp_path / "photos" / name / f"{number}.png")
    (tmp_path / "photos" / "README.md").write_text("---\nlicense: 2024-01-02\n---\n")
    tiny = "image_size=16,patch_size=8,hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"
    flags = (
        "--dataset_name",
        "photos",
        "--preset",
        "tiny-patch16-224",
        "--config_overrides",
        tiny,
        "--max_train_steps",
        "1",
    )
    flags += ("--output_dir", "run", "--num_workers", "0", "--per_device_train_batch_size", "4")
    line = [sys.executable, "-W", "ignore", HOUSE / "recipes" / "train.py", *flags]
    done = forked.run(line, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\x1b[2J" not in done.stdout + done.stderr
    assert "b\\x1b[2J" in done.stdout
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["data"]["license"] == "2024-01-02"
    assert "licence: 2024-01-02" in (tmp_path / "run" / "model" / "README.md").read_text()
    table = list(csv.reader(io.StringIO((tmp_path / "run" / "confusion_matrix.csv").read_text())))
    assert table[0] == ["true class", "'=1+1", "b\\x1b[2J"]
    assert [row[0] for row in table[1:]] == table[0][1:]


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "\uff1d"])
def test_no_cell_of_a_table_is_a_formula(start):
    cell = quoting.csv_cell(start + "HYPERLINK(0)")
    assert cell.startswith("'")
    assert quoting.csv_cell("T-shirt = top") == "T-shirt = top"


def test_no_class_name_moves_the_cursor_or_turns_the_line():
    name = "cat\x1b[1A\x9b2J\u202e\u2066\n\x07\udcff"
    said = quoting.printable(name)
    assert said == "cat\\x1b[1A\\x9b2J\\u202e\\u2066\\n\\x07\\udcff"
    assert quoting.printable(said) == said
    assert quoting.printable("\u06cc\u200c\u06cc 北京") == "\u06cc\u200c\u06cc 北京"
    assert figures.shorten("a\x1b$") == r"a\x1b$"


def test_classify_prints_class_names_as_text(run, tmp_path):
    names = {"0": "\x1b]0;owned\x07", **{str(index): f"{index}\u202e" for index in range(1, 10)}}
    config = run / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"id2label": names, "label2id": {}}))
    (done,) = run_scripts([["classify.py", run, run / "model" / "example.png"]], tmp_path)
    assert done["exit"] == 0
    assert not re.search("[\x07\x1b\u202e]", done["printed"])
    assert re.search(r"\\u202e|\\x1b", done["printed"])


# ----------------------------------------------------------------------------------------------------------------------
# Private images and a public repository


def test_images_do_not_go_to_a_repository_that_is_public_already(run, hub):
    first = hub.put("alice/model", {"notes.txt": b"mine"})
    for flags in ((), ("--create_pr",), ("--revision", "new")):
        with one_line(ValueError, "alice/model is public.*--public.*--without_images"):
            recipe(run, "--repo", "alice/model", "--push", *flags)
    assert hub.history("alice/model") == [first]
    assert hub.uploaded == []
    recipe(run, "--repo", "alice/model", "--push", "--without_images")
    assert "example.png" not in hub.files("alice/model")
    recipe(run, "--repo", "alice/model", "--push", "--public")
    assert "example.png" in hub.files("alice/model")


def test_images_go_to_a_repository_that_is_private(run, hub):
    hub.put("alice/model", {"notes.txt": b"mine"}, private=True)
    recipe(run, "--repo", "alice/model", "--push")
    assert "example.png" in hub.files("alice/model")


def test_examples_do_not_go_to_a_space_that_is_public_already(run, hub):
    hub.put("spaces/alice/page", {"notes.txt": b"mine"})
    with one_line(ValueError, "alice/page is public"):
        recipe(run, "--repo", "alice/page", "--space", "--push")
    assert len(hub.history("spaces/alice/page")) == 1
    recipe(run, "--repo", "alice/page", "--space", "--push", "--without_images")


def test_names_of_skipped_images_stay_at_home(run, tmp_path):
    results = json.loads((run / "results.json").read_text())
    results["data"] |= {"skipped_images": 1, "skipped_first": ["/home/al/diagnosis of Bob.png cannot be read"]}
    (run / "results.json").write_text(json.dumps(results))
    build_package(run, tmp_path / "folder", publish.RECIPES, "alice/model")
    assert [name for name, data in content(tmp_path / "folder").items() if b"diagnosis" in data] == []
    pushed = json.loads((tmp_path / "folder" / "training" / "results.json").read_text())
    assert pushed["data"]["skipped_images"] == 1


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
    with pytest.raises(OSError, match="exists"), atomic_dir(run / "model") as aside:
        (aside / "weights").write_text("new")


@pytest.mark.parametrize(
    "kind", ["link", "link to a folder", "pipe", "..", "absolute", "backslash", "dot", "nul", "empty"]
)
def test_a_manifest_that_lists_what_is_no_regular_file_below_it_is_refused(kind, tmp_path, victim):
    folder = tmp_path / "run" / "best"
    folder.mkdir(parents=True)
    name = {
        "..": "../../home of the user/letter.txt", "absolute": str(victim), "link to a folder": "sub/letter.txt",
        "backslash": "..\\letter.txt", "dot": "./weights", "nul": "a\0b", "empty": "",
    }.get(kind, "other")  # fmt: skip
    if kind == "link":
        (folder / name).symlink_to(victim)
    elif kind == "link to a folder":
        (folder / "sub").symlink_to(victim.parent)
    elif kind == "pipe":
        os.mkfifo(folder / name)
    entry = {"bytes": victim.stat().st_size, "sha256": checksum(victim)}
    (folder / "manifest.json").write_text(json.dumps({"files": {name: entry}}))
    with pytest.raises(ValueError, match=r"below it|null byte"):
        verify_checksums(folder)


# ----------------------------------------------------------------------------------------------------------------------
# Code and names


@pytest.fixture
def evil(tmp_path, tiny_model, monkeypatch):
    """A repository of an unknown type with code, and a working directory to look for traces in."""
    (tmp_path / "desk").mkdir()
    monkeypatch.chdir(tmp_path / "desk")
    tiny_model().save_pretrained(tmp_path / "evil")
    for file in (tmp_path / "evil").glob("*.py"):
        file.write_text("open('opened', 'w')\n")
    (tmp_path / "evil" / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Evil", "auto_map": {"AutoImageProcessor": "modeling_hf_vit.Evil"}})
    )
    config = tmp_path / "evil" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "evil"}))
    asked = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "y")
    yield tmp_path / "evil"
    assert asked == []
    assert os.listdir() == []


def test_nobody_is_asked_whether_to_run_the_code_of_a_repository(evil):
    for load in (lambda folder: load_classifier(str(folder)), load_merged_model):
        with pytest.raises(ValueError, match=r"trust_remote_code|evil"):
            load(evil)


PATHS = [
    "data/photos", "runs/mine", "runs/mine/model", "./photos", "../photos", "/photos", "~/photos", "a/b/c", "photos/", "photos.csv", "mine/weights.safetensors",
    "Data/photos", "here/typo", "data\\photos", "photos", "beans",
]  # fmt: skip
NAMES = [
    "google/vit-base-patch16-224",
    "timm/vit_base_patch16_224.augreg_in21k",
    "alice/data",
    "alice/runs",
    "fashion-mnist-mini",
]


def test_a_mistyped_path_is_no_name_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in PATHS:
        with pytest.raises(ValueError, match=re.escape(f"--model {name}: there is no such folder or file here")):
            refuse_mistyped_path(name, "--model")
    for name in NAMES:
        assert refuse_mistyped_path(name, "--model") == name
    assert refuse_mistyped_path("here", "--model") == "here"


SCRIPTS = {
    "train.py": ["--dataset_name", "PATH", "--output_dir", "out", "--preset", "tiny-patch16-224"],
    "train.py model": ["--dataset_name", "fashion-mnist-mini", "--output_dir", "out", "--model_name_or_path", "PATH"],
    "train.py teacher": [
        "--dataset_name", "fashion-mnist-mini", "--output_dir", "out", "--preset", "tiny-patch16-224", "--teacher_name_or_path", "PATH",
    ],
    "eval.py": ["--model_name_or_path", "PATH", "--dataset_name", "fashion-mnist-mini"],
    "eval.py data": ["--model_name_or_path", "alice/model", "--dataset_name", "PATH"],
    "classify.py": ["PATH", "fashion-mnist-mini"],
    "app.py": ["PATH"],
    "publish.py": ["--verify", "PATH"],
}  # fmt: skip


def test_no_script_asks_the_hub_for_a_mistyped_path(tmp_path):
    lines = [
        [case.partition(" ")[0], *(flag.replace("PATH", "runs/mime") for flag in SCRIPTS[case])] for case in SCRIPTS
    ]
    with Hub() as hub:
        online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        for case, done in zip(SCRIPTS, run_scripts(lines, tmp_path, **online), strict=True):
            said = f"{done['printed']}{done['exit']}"  # a text that a script exits with is printed, and its code is 1
            assert done["exit"] == 1 or "error: " in said, case
            assert "runs/mime" in said, case
            assert "Traceback" not in said, case
        assert hub.requests == []


@pytest.mark.parametrize("selected", [False, True])
def test_the_card_says_that_an_interval_ignores_the_selection(selected, run):
    results, config = read_run(run)
    results.metrics_of = (
        "validation, the best scoring, kept in model/" if selected else "test, the last scoring, in model/"
    )
    write_card(run / "model", TEMPLATE, results, config)
    card = (run / "model" / "README.md").read_text()
    assert ("ignore that selection" in card) is selected

"""What a stranger's text, run folder or repository may not do to who reads, resumes or publishes it."""

import csv
import io
import json
import os
import random
import re
import resource
import shutil
import sys
from collections import Counter
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import torch
import yaml
from loopback_hub import Hub, check_card
from PIL import Image
from publishing import content, one_line, publish, recipe, talking_to, with_model
from safetensors.torch import save_file

from hf_vit import figures
from hf_vit.hub.card import CARD_BEGIN, CARD_END, merge_cards, split_card, write_card
from hf_vit.hub.package import build_package, load_merged_model
from hf_vit.hub.push import push_model
from hf_vit.hub.run_results import RESULTS_SHAPE, load_samples, read_run
from hf_vit.hub.verification import load_without_code
from hf_vit.system import escapes, run_files
from hf_vit.system.files import atomic_dir, checksum, verify_checksums, write_text
from hf_vit.system.hub_names import refuse_mistyped_path
from hf_vit.training import checkpoints
from hf_vit.training.checkpoints import load_best, restore_state
from hf_vit.training.run_folder import continue_run, locked, publish_best


pytestmark = [
    pytest.mark.filterwarnings("ignore:Warnings while validating metadata"),  # the Hub's advice to name a licence
    pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning"),  # huggingface_hub 2.4 to httpx2
]
HOUSE = Path(__file__).parents[2]


@pytest.fixture
def run(demo_run, tmp_path):
    return shutil.copytree(demo_run, tmp_path / "run")


@pytest.fixture
def hub(tmp_path):
    with Hub() as hub, talking_to(hub.url, tmp_path / "home"):
        yield hub


@pytest.fixture(scope="module")
def code_run(demo_run, randomize, tmp_path_factory):
    """A run whose model no native architecture expresses, so that its code is pushed."""
    torch.manual_seed(0)
    return with_model(demo_run, tmp_path_factory.mktemp("code") / "run", randomize, qk_norm=True)


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
    f"a\n{CARD_END}\nb", f"{CARD_BEGIN}\n# other", "a\n---\nlicense: gpl\n---", "```\n# out of the fence", "<img src=x>", "x | y",
    "\x1b]0;title\x07\x1b[2J", "\u202egpj.exe", "=HYPERLINK(0)", "\udcff", "<!-- metadata of this part: {} -->", "{{ 7 * 7 }}",
]  # fmt: skip


def test_a_card_is_written_without_what_may_be_absent_and_numbers_that_are_none_are_refused(run, tmp_path):
    results, config = read_run(run)
    results = replace(results, temperature=None, per_class=[{"label": "a"}, {"label": "b", "recall": None}])
    run_files.check_shape(results.as_dict(), RESULTS_SHAPE, "results.json")
    folder = shutil.copytree(run / "model", tmp_path / "card")
    write_card(folder, publish.TEMPLATE, results, config)
    assert "temperature" not in split_card((folder / "README.md").read_text())[1].split("## Limits")[1]
    with pytest.raises(ValueError, match=r"results.json: temperature is larger than any number that a run writes"):
        run_files.check_shape({**results.as_dict(), "temperature": 10**400}, RESULTS_SHAPE, "results.json")


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_card_of_hostile_text_keeps_its_shape_and_the_owners_words(text, run, tmp_path):
    """Each place of results.json and config.yaml that reaches the card."""
    results, config = read_run(run)
    fields = ("hardware", "commit", "command", "answer", "metrics_of", "mixed_precision", "attention_query")
    results = replace(results, **dict.fromkeys(fields, text), versions={"torch": text}, base_model_hub_id=None)
    results.data |= {"name": text, "license": text, "scored": text, "labels": [text, "other"]}
    results.per_class = [{"label": text, "recall": share / 4} for share in range(4)]
    config = yaml.safe_dump({**yaml.safe_load(config), "model_name_or_path": text, "label_names": text})
    folder = shutil.copytree(run / "model", tmp_path / "card")
    write_card(
        folder, publish.TEMPLATE, results, config, repo="alice/model", license=text, prediction=text, layout=escapes.inline(text)
    )  # fmt: skip
    card = (folder / "README.md").read_text()
    metadata, body = split_card(card)
    assert set(metadata) <= {"library_name", "license", "pipeline_tag", "tags", "model-index"}
    assert "\n" not in metadata["license"]
    assert body.count(CARD_BEGIN) == body.count(CARD_END) == body.count("<!-- metadata of") == 1
    assert body.rstrip().endswith(CARD_END)
    assert len(re.findall("^# ", body, re.MULTILINE)) == 1
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", card)
    fences = re.findall(r"^ {0,3}(`{3,})\w*$", body, re.MULTILINE)
    assert len(re.findall(r"^## ", body, re.MULTILINE)) == 6  # the sections of the template
    assert max(fences, key=len) in body.split("<summary>Full configuration</summary>")[1]

    theirs = f"Words before.\n\n{body.strip()}\n\nWords behind.\n"
    for _ in range(2):
        theirs = merge_cards(card, theirs)
    assert split_card(theirs)[1].strip() == f"Words before.\n\n{body.strip()}\n\nWords behind."


@pytest.mark.parametrize(
    ("value", "license"),
    [
        (None, None), ("", None), ("mit", "mit"), (date(2024, 1, 2), "2024-01-02"), (1.0, "1.0"), (["mit", date(2024, 1, 2)], "mit, 2024-01-02"),
        ("a\nb", "a b"), ({"a": 1}, "{'a': 1}"), ("\x1b[2J", "\\x1b[2J"), ("x" * 10**6, "x" * 200),
    ],
    ids=str,
)  # fmt: skip
def test_a_licence_is_one_line_of_text_whatever_yaml_made_of_it(value, license):
    assert escapes.as_license(value) == license
    json.dumps(escapes.as_license(value))


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
    cell = escapes.csv_cell(start + "HYPERLINK(0)")
    assert cell.startswith("'")
    assert escapes.csv_cell("T-shirt = top") == "T-shirt = top"


def test_no_class_name_moves_the_cursor_or_turns_the_line():
    name = "cat\x1b[1A\x9b2J\u202e\u2066\n\x07\udcff"
    said = escapes.printable(name)
    assert said == "cat\\x1b[1A\\x9b2J\\u202e\\u2066\\n\\x07\\udcff"
    assert escapes.printable(said) == said
    assert escapes.printable("\u06cc\u200c\u06cc 北京") == "\u06cc\u200c\u06cc 北京"
    assert figures.shorten("a\x1b$") == r"a\x1b\$"


def test_classify_prints_class_names_as_text(run, tmp_path):
    names = {"0": "\x1b]0;owned\x07", **{str(index): f"{index}\u202e" for index in range(1, 10)}}
    change(run / "model" / "config.json", lambda config: config.update(id2label=names, label2id={}))
    (run / "results.json").write_text('{"metrics": [], "data": "\x1b"}')
    alone = shutil.copytree(run / "model", tmp_path / "alone")
    picture = run / "model" / "example.png"
    damaged, good = run_scripts([["classify.py", run, picture], ["classify.py", alone, picture]], tmp_path)
    assert damaged["exit"].startswith("error: ")  # Python prints a text and exits with 1
    assert good["exit"] == 0
    for done in (damaged, good):
        assert not re.search("[\x07\x1b\u202e]", done["printed"] + str(done["exit"]))
        assert re.search(r"\\u202e|\\x1b", done["printed"])


# ----------------------------------------------------------------------------------------------------------------------
# Private images and a public repository


def test_images_do_not_go_to_a_repository_that_is_public_already(run, hub):
    first = hub.put("alice/model", {"notes.txt": b"mine"})
    for flags in ((), ("--create_pr",), ("--revision", "new")):
        with one_line(
            ValueError, "alice/model is public, and images of the run would be published .*--public .*--without_images"
        ):
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


def test_what_is_only_shown_says_that_a_push_would_be_refused(run, hub, capsys):
    hub.put("alice/model", {"notes.txt": b"mine"})
    recipe(run, "--repo", "alice/model")
    assert (
        "--push refuses to show the run's images there without --public, or --without_images"
        in capsys.readouterr().out
    )
    recipe(run, "--repo", "alice/model", "--public")
    assert "--push refuses" not in capsys.readouterr().out


def test_examples_do_not_go_to_a_space_that_is_public_already(run, hub):
    hub.put("spaces/alice/page", {"notes.txt": b"mine"})
    with one_line(ValueError, "alice/page is public, and images of the run would be published"):
        recipe(run, "--repo", "alice/page", "--space", "--push")
    assert len(hub.history("spaces/alice/page")) == 1
    recipe(run, "--repo", "alice/page", "--space", "--push", "--without_images")


def test_names_of_skipped_images_stay_at_home(run, tmp_path):
    names = ["/home/al/diagnosis of Bob.png cannot be read"]
    change(run / "results.json", lambda results: results["data"].update(skipped_images=1, skipped_first=names))
    build_package(run, tmp_path / "folder", publish.TEMPLATE, "alice/model")
    assert [name for name, data in content(tmp_path / "folder").items() if b"diagnosis" in data] == []
    pushed = json.loads((tmp_path / "folder" / "training" / "results.json").read_text())
    assert pushed["data"]["skipped_images"] == 1


# ----------------------------------------------------------------------------------------------------------------------
# The run folder of a stranger


@pytest.fixture
def victim(tmp_path):
    """A file of the user, that must stay as it is."""
    (tmp_path / "home of the user").mkdir()
    file = tmp_path / "home of the user" / "letter.txt"
    file.write_text("mine")
    yield file
    assert file.read_text() == "mine"
    assert os.listdir(file.parent) == ["letter.txt"]


def test_a_lock_that_is_a_link_is_not_followed(tmp_path, victim):
    places = []
    for name in ("link", "dangling", "pipe", "folder"):
        (tmp_path / name).mkdir()
        places.append(tmp_path / name / ".lock")
    places[0].symlink_to(victim)
    places[1].symlink_to(victim.parent / "new.txt")
    os.mkfifo(places[2])
    places[3].mkdir()
    for place in places:
        with pytest.raises((ValueError, OSError), match=re.escape(str(place.parent))):
            locked(place.parent).__enter__()


def test_a_file_that_is_written_aside_follows_no_link(tmp_path, victim):
    run = tmp_path / "run"
    run.mkdir()
    for name in (".metrics.jsonl.part", "metrics.jsonl", "samples.safetensors"):
        (run / name).symlink_to(victim)
    (run / ".model.part").symlink_to(victim.parent)
    write_text(run / "metrics.jsonl", "{}")
    assert not (run / "metrics.jsonl").is_symlink()
    (tmp_path / "samples").write_text("images")
    run_files.copy_file(tmp_path / "samples", run / "samples.safetensors")
    assert (run / "samples.safetensors").read_text() == "images"
    with pytest.raises(OSError, match="exists"), atomic_dir(run / "model") as aside:
        (aside / "weights").write_text("new")


def save_best(run, **more):
    def write(folder):
        (folder / "weights").write_text("some")
        (folder / "sub").mkdir()
        (folder / "sub" / "more").write_text("more")

    scores = {"metrics": {"accuracy": 0.5, "loss": 1.0}, "images": 4, "confusion_matrix": [[1]]}
    checkpoints.save_best(run, 4, {**scores, **more}, 0, write)
    return run / "checkpoints" / "best-000004"


@pytest.mark.parametrize("name", ["link", ".hidden", "sub/link"])
def test_what_the_manifest_does_not_list_is_not_copied(name, tmp_path, victim):
    best = save_best(tmp_path / "run")
    (best / name).symlink_to(victim)
    (best / "unlisted").write_text("by a stranger")
    folder, _ = load_best(tmp_path / "run")
    publish_best(folder, tmp_path / "run" / "model", leave_out=("scores.json",))
    assert sorted(content(tmp_path / "run" / "model")) == ["sub/more", "weights"]
    (tmp_path / "other").mkdir()
    continue_run(tmp_path / "run", tmp_path / "other", 4, 4)
    copied = content(tmp_path / "other" / "checkpoints" / "best-000004")
    assert sorted(copied) == ["manifest.json", "scores.json", "sub/more", "weights"]


@pytest.mark.parametrize(
    "kind", ["link", "link to a folder", "pipe", "..", "absolute", "backslash", "dot", "nul", "empty"]
)
def test_a_manifest_that_lists_what_is_no_regular_file_below_it_is_refused(kind, tmp_path, victim):
    best = save_best(tmp_path / "run")
    name = {
        "..": "../../../home of the user/letter.txt", "absolute": str(victim), "link to a folder": "sub2/letter.txt", "backslash": "..\\letter.txt",
        "dot": "./weights", "nul": "a\0b", "empty": "",
    }.get(kind, "other")  # fmt: skip
    if kind == "link":
        (best / name).symlink_to(victim)
    elif kind == "link to a folder":
        (best / "sub2").symlink_to(victim.parent)
    elif kind == "pipe":
        os.mkfifo(best / name)
    entry = {"bytes": victim.stat().st_size, "sha256": checksum(victim)}
    change(best / "manifest.json", lambda manifest: manifest["files"].update({name: entry}))
    with pytest.raises(ValueError, match=r"link, or no regular file|no name of a file below it"):
        verify_checksums(best)
    assert load_best(tmp_path / "run") is None


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "config.yaml", "samples.safetensors", "model/preprocessor_config.json", "model/example.png", "model/figures", "export"]
)  # fmt: skip
def test_no_file_outside_of_a_run_is_published(name, run, victim, tmp_path):
    place = run / name
    outside = victim.parent.parent / "outside"
    if place.exists():
        shutil.move(place, outside)
    else:
        outside.mkdir()
    place.symlink_to(outside)
    with one_line(ValueError, f"{re.escape(name)} is a link, or no regular file"):
        build_package(run, tmp_path / "folder", publish.TEMPLATE, "alice/model")


def test_a_configuration_that_unfolds_without_end_is_refused(tmp_path):
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    (tmp_path / "config.yaml").write_text(bomb)
    with pytest.raises(ValueError, match=r"config\.yaml"):
        run_files.read_flat_yaml(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "config.yaml").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="no regular file"):
        run_files.read_flat_yaml(tmp_path / "config.yaml")


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_filled():
    model, accelerator = torch.nn.Linear(2, 2), SimpleNamespace(num_processes=1)
    good = {name: value.clone() for name, value in model.state_dict().items()}
    for wrong in (
        {},
        {**good, "more": torch.ones(1)},
        {**good, "bias": torch.ones(3)},
        {**good, "bias": torch.ones(2).half()},
    ):
        with pytest.raises(ValueError, match=r"model\.safetensors of the checkpoint is not of this model"):
            restore_state({"model": wrong, "optimizer": {}}, model, [], None, accelerator)


# ----------------------------------------------------------------------------------------------------------------------
# Code, names and commits


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
    change(tmp_path / "evil" / "config.json", lambda config: config.update(model_type="evil"))
    asked = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "y")
    yield tmp_path / "evil"
    assert asked == []
    assert os.listdir() == []


def test_nobody_is_asked_whether_to_run_the_code_of_a_repository(evil, tmp_path):
    for load in (load_without_code, load_merged_model):
        with pytest.raises(ValueError, match=r"trust_remote_code|evil"):
            load(evil)
    run = tmp_path / "run of a stranger"
    shutil.copytree(evil, run / "model")
    save_file(
        {"images": torch.zeros(1, 3, 16, 16, dtype=torch.uint8), "logits": torch.zeros(1, 3)},
        run / "samples.safetensors",
    )
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_samples(run, SimpleNamespace(num_channels=3, image_size=16))


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


def pinned(card):
    return set(re.findall(r'revision="([^"]*)"', card))


def test_the_commands_of_a_card_with_code_name_a_commit_that_has_all_but_the_card(code_run, hub, tmp_path):
    recipe(code_run, "--repo", "alice/code", "--push")
    (commit,) = pinned(hub.files("alice/code")["README.md"].decode())
    assert hub.history("alice/code")[1:] == [commit, hub.history("alice/code")[-1]]
    without_card = {name: data for name, data in hub.files("alice/code").items() if name != "README.md"}
    assert {
        name: data for name, data in hub.files("alice/code", commit).items() if name != "README.md"
    } == without_card
    blocks = re.findall(r"```python\n(.*?)```", hub.files("alice/code")["README.md"].decode(), re.DOTALL)
    for block in blocks:
        assert block.count("trust_remote_code=True") <= block.count(f'revision="{commit}"')

    recipe(code_run, "--repo", "alice/code", "--push")  # nothing new: no commit
    assert len(hub.history("alice/code")) == 3
    assert check_card(hub.files("alice/code")["README.md"].decode())[0] == []

    hub.put("alice/code", {"modeling_hf_vit.py": b"open('opened', 'w')"})  # main moves; what the card names does not
    assert hub.files("alice/code", commit)["modeling_hf_vit.py"] == without_card["modeling_hf_vit.py"]
    recipe(code_run, "--repo", "alice/code", "--push")
    (newer,) = pinned(hub.files("alice/code")["README.md"].decode())
    assert newer != commit
    assert hub.files("alice/code", newer)["modeling_hf_vit.py"] == without_card["modeling_hf_vit.py"]


def test_a_push_that_broke_off_before_its_card_names_no_older_commit(code_run, hub, tmp_path, randomize):
    recipe(code_run, "--repo", "alice/code", "--push")
    (old,) = pinned(hub.files("alice/code")["README.md"].decode())
    torch.manual_seed(1)
    other = with_model(code_run, tmp_path / "other", randomize, qk_norm=True)
    build_package(other, tmp_path / "folder", publish.TEMPLATE, "alice/code")
    files = content(tmp_path / "folder")
    hub.put("alice/code", {name: data for name, data in files.items() if name != "README.md"})  # and then it broke off
    push_model(tmp_path / "folder", "alice/code")
    (new,) = pinned(hub.files("alice/code")["README.md"].decode())
    assert new != old
    assert hub.files("alice/code", new)["model.safetensors"] == files["model.safetensors"]


def test_a_pull_request_and_a_native_model_name_no_commit(code_run, run, hub):
    recipe(run, "--repo", "alice/native", "--push")
    recipe(code_run, "--repo", "alice/code", "--push", "--create_pr")
    cards = hub.files("alice/native")["README.md"], hub.files("alice/code", "refs/pr/1")["README.md"]
    assert [pinned(card.decode()) for card in cards] == [set(), set()]


def test_verify_says_what_it_does_not_prove(run, tmp_path, capsys):
    build_package(run, tmp_path / "folder", publish.TEMPLATE, "alice/model")
    recipe("--verify", tmp_path / "folder")
    assert "who wrote it this cannot tell" in capsys.readouterr().out
    assert "not who wrote it" in (tmp_path / "folder" / "README.md").read_text()


@pytest.mark.parametrize("selected", [False, True])
def test_the_card_says_that_an_interval_ignores_the_selection(selected, run):
    results, config = read_run(run)
    results.metrics_of = (
        "validation, the best scoring, kept in model/" if selected else "test, the last scoring, in model/"
    )
    card = write_card(run / "model", publish.TEMPLATE, results, config).read_text()
    assert ("ignore that selection" in card) is selected


# ----------------------------------------------------------------------------------------------------------------------
# Fuzz: a run folder and a configuration of a stranger


def leaves(value, at=()):
    """Every place in a JSON value, as the keys that lead there."""
    yield at
    for key, item in (
        value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    ):
        yield from leaves(item, (*at, key))


def change_one(rng, value):
    """A copy of a JSON value with one place replaced or taken away."""
    value = json.loads(json.dumps(value))
    *above, last = rng.choice([at for at in leaves(value) if at])
    parent = value
    for key in above:
        parent = parent[key]
    if rng.random() < 0.2:
        del parent[last]
        return value
    odd = [
        None,
        True,
        -1,
        0,
        10**9,
        10**400,
        1e308,
        float("nan"),
        "",
        "../../x",
        "/etc/passwd",
        "\x1b[2J",
        "\udc80",
        [],
        {},
        [[]] * 3,
        {"a": {}},
    ]
    parent[last] = rng.choice([*odd, *HOSTILE])
    return value


def change_bytes(rng, content):
    content = bytearray(content)
    for _ in range(rng.choice([1, 4, 64])):
        if not content:
            break
        place = rng.randrange(len(content))
        if rng.random() < 0.5:
            content[place] = rng.randrange(256)
        else:
            del content[place : place + rng.choice([1, 8, 1000])]
    return bytes(content)


def damage(rng, folder, names, victim, seal=None):
    """Change one file of a folder: a value in its JSON, its bytes, or its kind."""
    file = folder / rng.choice(names)
    how = rng.choice(["value"] * 6 + ["bytes"] * 3 + ["link", "folder", "gone"])
    if how == "value" and file.suffix == ".json":
        file.write_text(json.dumps(change_one(rng, json.loads(file.read_text()))))
    elif how in ("value", "bytes"):
        file.write_bytes(change_bytes(rng, file.read_bytes()))
    else:
        file.unlink()
        if how == "link":
            file.symlink_to(victim)
        elif how == "folder":
            file.mkdir()
    if seal is not None and rng.random() < 0.9:  # a stranger's manifest fits
        files = {
            name: file
            for file in seal.rglob("*")
            if (name := file.relative_to(seal).as_posix()) != "manifest.json" and file.is_file()
        }
        listed = {name: {"bytes": file.stat().st_size, "sha256": checksum(file)} for name, file in files.items()}
        shutil.rmtree(seal / "manifest.json", ignore_errors=True)  # what `damage` may have put there
        (seal / "manifest.json").unlink(missing_ok=True)
        (seal / "manifest.json").write_text(json.dumps({"files": listed}))


@pytest.fixture
def little_memory():
    """Whatever is read here, the process may not grow by more than 6 GiB."""
    held = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + 6 * 2**30, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def only_sentences(act, seen):
    """Run what may refuse its input; a refusal is a ValueError or an OSError with a sentence."""
    try:
        act()
        seen["accepted"] += 1
    except (ValueError, OSError) as error:
        seen["refused"] += bool(str(error).strip())
        seen["silent"] += not str(error).strip()


@pytest.mark.slow
def test_no_finished_run_of_a_stranger_ends_in_a_traceback_or_leaks_a_file(run, tmp_path, victim, little_memory):
    """Seeded: 300 run folders with one changed file, made ready to be published."""
    victim_text = victim.read_text()
    names = [
        "results.json", "results.json", "results.json", "config.yaml", "metrics.jsonl", "confusion_matrix.csv", "samples.safetensors", "model/config.json",
        "model/config.json", "model/preprocessor_config.json", "model/model.safetensors", "model/example.png",
    ]  # fmt: skip
    rng, seen = random.Random(0), Counter()
    for _ in range(300):
        other = shutil.copytree(run, tmp_path / "other")
        damage(rng, other, names, victim)
        out = tmp_path / "out"
        only_sentences(lambda: build_package(other, out, publish.TEMPLATE, "alice/model"), seen)  # noqa: B023
        if out.exists():
            assert [name for name, data in content(out).items() if data == victim_text.encode()] == []
            shutil.rmtree(out)
        shutil.rmtree(other)
    assert min(seen["accepted"], seen["refused"]) > 30
    assert seen["silent"] == 0


@pytest.mark.slow
def test_no_configuration_of_a_stranger_ends_in_a_traceback(tmp_path, tiny_model, victim, little_memory):
    """Seeded: 1,000 model folders with one changed value, or changed bytes, in their config.json."""
    tiny_model().save_pretrained(tmp_path / "good")
    rng, seen = random.Random(0), Counter()
    for _ in range(1000):
        folder = shutil.copytree(tmp_path / "good", tmp_path / "model")
        damage(rng, folder, ["config.json"], victim)
        only_sentences(lambda: load_without_code(folder), seen)  # noqa: B023
        shutil.rmtree(folder)
    assert min(seen["accepted"], seen["refused"]) > 100
    assert seen["silent"] == 0

"""Claims about recipes/publish.py: what is pushed to a Hub on loopback, what loads from there, and what faults come to."""

import hashlib
import http.server
import json
import re
import shutil
import sys
import threading
import time
from pathlib import Path

import forked
import pytest
import torch
import yaml
from huggingface_hub import snapshot_download
from loopback_hub import Hub, check_card
from publishing import FOR_EVER, TOKEN, at, command, content, one_line, publish, recipe, talking_to, with_model
from safetensors.torch import load_file, save_file
from without_package import in_clean_python

from hf_vit import HFViTForImageClassification, HFViTModel
from hf_vit.card import write_card
from hf_vit.hub import push
from hf_vit.hub.finished_run import read_redacted, read_run
from hf_vit.hub.package import build_package
from hf_vit.hub.push import content_tag, push_model
from hf_vit.hub.retry import MAX_WAIT, set_http_timeout
from hf_vit.hub.verification import CHECKSUMMED_FILES, verify
from hf_vit.system.errors import UserError
from hf_vit.system.files import checksum


pytestmark = [
    pytest.mark.filterwarnings("ignore:Warnings while validating metadata"),  # the Hub's advice to name a licence
    pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning"),  # huggingface_hub 2.4 to httpx2
]
HOUSE = Path(__file__).parents[2]
NOT_OF_A_CLASSIFIER = ("__init__.py", "masked_autoencoder.py")
CODE = sorted(path.name for path in HOUSE.glob("hf_vit/model/*.py") if path.name not in NOT_OF_A_CLASSIFIER)


def refused(folder, repo="alice/model", **options):
    """What a push that fails says."""
    with one_line(UserError, "nothing on this disk has changed") as error:
        push_model(folder, repo, log=lambda _: None, **options)
    return str(error.value)


@pytest.fixture(scope="session")
def runs(tmp_path_factory, randomize, demo_run):
    """native: of recipes/train.py; code: with a model that no native architecture expresses; large: 4 MB of weights."""
    home = tmp_path_factory.mktemp("runs")
    shutil.copytree(demo_run, home / "native")
    torch.manual_seed(0)
    with_model(home / "native", home / "code", randomize, qk_norm=True)
    with_model(home / "native", home / "large", randomize, hidden_size=256, intermediate_size=512)
    return {name: home / name for name in ("native", "code", "large")}


@pytest.fixture(scope="session")
def assembled(runs, tmp_path_factory):
    """assembled(name) -> the folder to push of that run."""
    home = tmp_path_factory.mktemp("assembled")

    def make(name):
        if not (home / name).exists():
            build_package(runs[name], home / name, publish.RECIPES, "alice/model")
        return home / name

    return make


@pytest.fixture(scope="module")
def pretrained_run(tmp_path_factory):
    """A finished run of recipes/pretrain.py: two steps of a tiny autoencoder."""
    home = tmp_path_factory.mktemp("pretrained")
    tiny = "image_size=28,patch_size=7,hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=64"
    flags = ["--dataset_name", "fashion-mnist-mini", "--preset", "tiny-patch16-224", "--config_overrides", tiny]
    flags += ["--output_dir", "run", "--max_train_steps=2"]
    forked.run([sys.executable, "-W", "ignore", HOUSE / "recipes" / "pretrain.py", *flags], cwd=home, check=True)
    return home / "run"


@pytest.fixture(autouse=True)
def the_run_folders_stay_as_they_are(runs):
    before = {name: content(folder) for name, folder in runs.items()}
    yield
    assert {name: content(folder) for name, folder in runs.items()} == before


@pytest.fixture
def folder(assembled, tmp_path):
    return shutil.copytree(assembled("native"), tmp_path / "repository")


@pytest.fixture
def large(assembled, tmp_path):
    return shutil.copytree(assembled("large"), tmp_path / "repository")


@pytest.fixture
def hub(tmp_path):
    with Hub() as hub, talking_to(hub.url, tmp_path / "home") as hub.waits:
        yield hub


# ----------------------------------------------------------------------------------------------------------------------
# What is shown, and what is pushed


def test_without_push_all_is_shown_and_nothing_sent(runs, assembled, hub, capsys):
    hub.put("alice/there", {"README.md": b"Mine."})
    for repo, said in (
        ("alice/model", "it will be private"),
        ("alice/there", "is there and PUBLIC; its README.md is kept"),
    ):
        recipe(runs["native"], "--repo", repo)
        shown = capsys.readouterr().out
        for name, data in content(assembled("native")).items():
            assert name == "README.md" or re.search(rf"^ *{len(data):,}  {re.escape(name)}$", shown, re.MULTILINE), (
                name
            )
        assert said in shown
        assert "stored as the native `ijepa` of transformers" in shown
    assert {method for method, _ in hub.requests} <= {"GET", "HEAD"}
    hub.fault("GET", "/api/models/", status=500, times=FOR_EVER)
    recipe(runs["native"], "--repo", "alice/model")
    assert "could not be asked for" in capsys.readouterr().out


@pytest.fixture(scope="module")
def published(runs, tmp_path_factory):
    """A Hub with alice/native and alice/code, the first pushed by the real command; what that printed, and its HF_HOME."""
    home = tmp_path_factory.mktemp("home")
    with Hub() as hub:
        flags = ["--repo", "alice/native", "--push", "--license", "apache-2.0"]
        hub.done, hub.home = command(runs["native"], *flags, cwd=home, **at(hub, home)), home
        with talking_to(hub.url, home):
            recipe(runs["code"], "--repo", "alice/code", "--push")
        yield hub


def test_a_push_is_one_commit_to_a_new_private_repository(published, assembled):
    assert published.done.returncode == 0, published.done.stderr
    assert published.done.stderr == ""
    assert f"{published.url}/alice/native; read back, it has the same bytes" in published.done.stdout
    assert published.repos["alice/native"].private
    assert len(published.history("alice/native")) == 2  # the first makes the repository
    files = published.files("alice/native")
    assert {*files} - {".gitattributes"} == {*content(assembled("native"))}
    sent = {upload.sha256 for upload in published.uploaded}
    for name in ("model.safetensors", "probes.safetensors"):
        assert hashlib.sha256(files[name]).hexdigest() in sent


def test_the_token_is_written_nowhere(published, runs):
    said = published.done.stdout + published.done.stderr
    places = [said.encode(), *content(published.home).values(), *content(runs["native"]).values()]
    places += [*published.files("alice/native").values(), *published.files("alice/code").values()]
    assert not [place for place in places if TOKEN.encode() in place]


def test_a_branch_is_made_and_used_and_main_left_alone(folder, hub):
    first = hub.put("alice/model", {"notes.txt": b"mine"})
    for _ in range(2):  # made, then found
        push_model(folder, "alice/model", revision="better")
        assert hub.history("alice/model") == [first]
        assert len(hub.history("alice/model", "better")) == 2
    assert {*content(folder)} < {*hub.files("alice/model", "better")}


@pytest.mark.parametrize("repo", ["alice/model", "bob/model"])
def test_a_pull_request_leaves_main_alone_and_its_link_is_printed(repo, runs, hub, capsys, tmp_path):
    first = hub.put(repo, {"notes.txt": b"mine"})
    kept = tmp_path / "kept"
    recipe(runs["native"], "--repo", repo, "--push", "--public", "--create_pr", "--output_dir", kept)
    assert hub.history(repo) == [first]
    assert f"at {hub.url}/{repo}/discussions/1;" in capsys.readouterr().out
    files = hub.files(repo, "refs/pr/1")
    assert files == {**content(kept), "notes.txt": b"mine"}


def test_the_same_push_again_makes_no_commit(assembled, hub, tmp_path):
    """the repository is there already (409) | it is used, and what has not changed is not sent: no empty commit is made"""
    for name in ("first", "again"):
        push_model(shutil.copytree(assembled("code"), tmp_path / name), "alice/model")
        assert len(hub.history("alice/model")) == 2


def test_another_layout_takes_away_what_the_first_left_and_keeps_the_owners_files(assembled, folder, hub, tmp_path):
    push_model(shutil.copytree(assembled("code"), tmp_path / "first"), "alice/model")
    own = {"notes.txt": b"mine", "images/own.png": b"png", "modeling_other.py": b"", "sub/model.safetensors": b"w"}
    hub.put("alice/model", {**own, "onnx/model.onnx": b"onnx", "onnx/model.onnx.data": b"data"})
    before = hub.files("alice/model")
    assert {*CODE} < {*before}
    push_model(folder, "alice/model")
    after = hub.files("alice/model")
    assert {*before} - {*after} == {*CODE, "onnx/model.onnx", "onnx/model.onnx.data"}
    assert own.items() <= after.items()


def test_a_run_without_labels_is_pushed_with_its_code_and_gives_the_same_features(pretrained_run, hub, tmp_path):
    recipe(pretrained_run, "--repo", "alice/encoder", "--push")
    files = hub.files("alice/encoder")
    assert {"masked_autoencoder.py", "probes.safetensors", "training/results.json"} <= {*files}
    assert metadata_of(files)["pipeline_tag"] == "image-feature-extraction"
    images = torch.randn(2, 3, 28, 28)
    wanted, found = (
        HFViTModel.from_pretrained(name).eval()(images) for name in (pretrained_run / "model", "alice/encoder")
    )
    torch.testing.assert_close(found.last_hidden_state, wanted.last_hidden_state)


# ----------------------------------------------------------------------------------------------------------------------
# The card


def metadata_of(files):
    return yaml.safe_load(files["README.md"].decode().split("---\n")[1])


BY_HAND = """---
license: mit
language: en
tags: [mine, vision]
model-index:
- name: another
  results: [{task: {type: image-classification}, dataset: {name: d, type: d}, metrics: [{type: accuracy, value: 0.5}]}]
---
# My words

They stay. <!-- so does this -->
"""


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_a_readme_that_is_there_keeps_its_text_and_its_metadata_follow_the_run(ends, folder, hub):
    hub.put("alice/model", {"README.md": BY_HAND.replace("\n", ends).encode()})
    for license, wanted in ((None, "mit"), ("apache-2.0", "apache-2.0")):
        push_model(folder, "alice/model", license=license)
        files = hub.files("alice/model")
        assert (
            files["README.md"]
            .decode()
            .replace("\r\n", "\n")
            .endswith("---\n# My words\n\nThey stay. <!-- so does this -->\n")
        )
        metadata = metadata_of({"README.md": files["README.md"].replace(b"\r\n", b"\n")})
        assert (metadata["license"], metadata["language"]) == (wanted, "en")
        assert metadata["tags"] == ["mine", "vision", "hf_vit"]
        assert metadata["pipeline_tag"] == "image-classification"
        assert [entry["name"] for entry in metadata["model-index"]] == [
            "another",
            "Vision Transformer on fashion-mnist-mini",
        ]


def test_overwrite_card_replaces_a_readme(folder, hub):
    ours = (folder / "README.md").read_bytes()
    hub.put("alice/model", {"README.md": BY_HAND.encode()})
    push_model(folder, "alice/model", overwrite_card=True)
    assert hub.files("alice/model")["README.md"] == ours


def test_the_card_of_a_model_with_code_names_a_tag_that_has_what_was_pushed(runs, assembled, hub, tmp_path):
    """main may hold other code tomorrow"""
    first = shutil.copytree(assembled("code"), tmp_path / "first")
    push_model(first, "alice/model")
    (tag,) = hub.repos["alice/model"].tags
    assert tag == content_tag(first)
    assert f'revision="{tag}"' in hub.files("alice/model")["README.md"].decode()
    hub.put("alice/model", {"modeling_hf_vit.py": b"evil"})
    assert hub.files("alice/model", tag).items() >= content(first).items()
    build_package(runs["code"], tmp_path / "request", publish.RECIPES, "alice/other", pinned=False)
    push_model(tmp_path / "request", "alice/other", create_pr=True)
    assert "revision=" not in (tmp_path / "request" / "README.md").read_text()
    assert hub.repos["alice/other"].tags == {}


def test_what_is_verified_is_what_is_there_now(published, tmp_path):
    with talking_to(published.url, tmp_path / "home"):
        verify("alice/native")
        published.fault("GET", "/api/models/alice/native", status=500)
        with pytest.raises((OSError, ValueError), match="500"):  # although a copy is in the cache
            verify("alice/native")


@pytest.mark.parametrize("create_pr", [False, True])
def test_a_commit_whose_answer_is_lost_is_made_once(create_pr, folder, hub):
    """the Hub makes the commit and its answer is lost (504) | no second one is made; with --create_pr one line says so"""
    hub.put("alice/model", {"README.md": BY_HAND.encode()})
    hub.fault("POST", "/commit/main", status=504, done=True)
    if create_pr:
        assert "504" in refused(folder, create_pr=True)
        assert list(hub.repos["alice/model"].pull_requests) == ["refs/pr/1"]
    else:
        push_model(folder, "alice/model", log=lambda _: None)
        assert len(hub.history("alice/model")) == 2


def test_a_repository_with_an_adapter_is_left_alone(folder, hub):
    """the repository holds a LoRA adapter | refused, for with a whole model beside it neither would load"""
    hub.put("alice/model", {"adapter_config.json": b"{}"})
    with one_line(ValueError, "holds adapter_config.json"):
        push_model(folder, "alice/model")
    assert len(hub.history("alice/model")) == 1


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_revision_of_an_adapter_is_not_asked_of_its_base(tiny_model, hub, tmp_path):
    """two commits of an adapter, by revision= | either's logits, although the base has no such revision"""
    from peft import LoraConfig, get_peft_model

    tiny_model().save_pretrained(tmp_path / "base")
    hub.put("alice/base", content(tmp_path / "base"))
    pixels, wanted = torch.randn(2, 3, 16, 16), {}
    for name in ("first", "second"):
        lora = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        model = get_peft_model(HFViTForImageClassification.from_pretrained(tmp_path / "base"), lora).eval()
        model.peft_config["default"].base_model_name_or_path = "alice/base"
        model.save_pretrained(tmp_path / name, save_embedding_layers=False)
        model.config.save_pretrained(tmp_path / name)
        wanted[hub.put("alice/adapter", content(tmp_path / name))] = model(pixel_values=pixels).logits
    for revision, logits in wanted.items():
        loaded = HFViTForImageClassification.from_pretrained("alice/adapter", revision=revision)
        torch.testing.assert_close(loaded(pixels).logits, logits)


def test_labels_and_names_of_any_kind_make_a_card(runs, folder):
    odd = ["a|b", "<b>bold", "line\nbreak", "-->", "`tick`", 'it\'s: "so"', "北京", "x]"]
    results, config = read_run(runs["native"])
    results.data |= {"labels": odd, "name": 'here/a "b" | c`d'}
    for row, label in zip(results.per_class, odd, strict=False):
        row["label"] = label
    template = publish.RECIPES / "model_card.md"
    write_card(folder, template, results, config, repo="alice/model", prediction=odd[0], license="mit")
    card = (folder / "README.md").read_text()
    assert check_card(card) == ([], [])
    assert "a\\|b" in card
    for block in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
        compile(block, "card", "exec")


def test_the_home_directory_is_not_told(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/al"))
    file = tmp_path / "config.yaml"
    file.write_text("a: /home/al/photos, b: /home/alice/photos, c: x/home/al, d: /home/al\n")
    assert read_redacted(file) == "a: ~/photos, b: /home/alice/photos, c: x/home/al, d: ~\n"


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_a_config_that_was_changed_is_told(name, folder):
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [9, 9, 9], "id2label": {"0": "other"}}))
    with one_line(ValueError, f"{name} of .* it was changed since"):
        verify(folder)


@pytest.mark.parametrize(
    "text", [b"---\nlicense: [mit\n---\nWords.\n", b"---\n- license\n---\n", "Café".encode("latin-1")]
)
def test_a_readme_that_cannot_be_read_stops_the_push(text, folder, hub):
    """the README.md that is there cannot be read | one line names it; nothing is committed"""
    hub.put("alice/model", {"README.md": text})
    with one_line(ValueError, r"README\.md of alice/model"):
        push_model(folder, "alice/model")
    assert len(hub.history("alice/model")) == 1
    assert hub.uploaded == []


def test_a_card_that_the_hub_refuses_leaves_no_empty_repository(folder, hub):
    text = (folder / "README.md").read_text()
    (folder / "README.md").write_text(text.replace("library_name:", "license: apache2\nlibrary_name:"))
    with pytest.raises(ValueError, match="license"):
        push_model(folder, "alice/model")
    assert hub.repos == {}


CARDS = {
    "as it is": ({}, {}, None),
    "base on the Hub": ({"model_name_or_path": "google/vit-base-patch16-224-in21k"}, {}, None),
    "base on this disk": ({"model_name_or_path": "here/model"}, {}, None),
    "base at a path": ({"model_name_or_path": "/data/runs/mine/model"}, {}, None),
    "data on the Hub": ({}, {"name": "someone/pictures", "hub_id": "someone/pictures"}, None),
    "data on this disk": ({}, {"name": "here/model"}, None),
    "data at a path": ({}, {"name": "/data/my photos"}, None),
    "licence": ({}, {"license": "cc-by-4.0"}, "apache-2.0"),
}


@pytest.mark.parametrize("case", CARDS)
def test_the_hub_accepts_the_card(case, runs, folder):
    changes, data, license = CARDS[case]
    results, config = read_run(runs["native"])
    results.data |= data
    if case == "base on the Hub":
        results.base_model_hub_id = changes["model_name_or_path"]
    config = yaml.safe_dump({**yaml.safe_load(config), **changes})
    write_card(folder, publish.RECIPES / "model_card.md", results, config, repo="alice/model", license=license)
    card = (folder / "README.md").read_text()
    assert check_card(card) == ([], [] if license else ['"license" is missing'])
    metadata = metadata_of({"README.md": card.encode()})
    assert metadata.get("base_model") == (changes["model_name_or_path"] if case == "base on the Hub" else None)
    assert metadata.get("datasets") == (["someone/pictures"] if case == "data on the Hub" else None)
    assert metadata.get("license") == license


def test_the_card_on_the_hub_holds_scores_intervals_and_checksum(published, runs):
    files = published.files("alice/native")
    card = files["README.md"].decode()
    assert card in published.validated
    metadata, text = metadata_of(files), card
    results = json.loads((runs["native"] / "results.json").read_text())
    ((result,),) = [entry["results"] for entry in metadata["model-index"]]
    scores = {metric["name"]: metric["value"] for metric in result["metrics"]}
    low, high = (f"{100 * value:.2f}%" for value in results["intervals"]["accuracy"])
    wanted = {name: pytest.approx(results["metrics"][name], abs=1e-6) for name in ("accuracy", "loss")}
    assert scores[f"accuracy (95% interval {low} to {high})"] == wanted["accuracy"]
    assert wanted["loss"] in scores.values()
    assert metadata["license"] == "apache-2.0"
    assert f"`{hashlib.sha256(files['model.safetensors']).hexdigest()}`" in text


# ----------------------------------------------------------------------------------------------------------------------
# A machine without hf_vit


LOAD = """
import importlib.util, sys, torch
assert not [name for name in ("hf_vit", "accelerate", "datasets", "PIL") if importlib.util.find_spec(name)]
for name in ("hf_vit", "accelerate"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    sys.exit(f"{name} is here")
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForImageClassification

pixels = load_file("pixels.safetensors")["pixels"]
load = AutoModelForImageClassification.from_pretrained
native, code = load("alice/native"), load("alice/code", trust_remote_code=True)
features = AutoModel.from_pretrained("alice/code", trust_remote_code=True)
try:
    load("alice/code")
except ValueError as error:
    print(error)
else:
    sys.exit("code was run that nobody trusted")
with torch.no_grad():
    logits = {"native": native(pixels).logits, "code": code(pixels).logits}
    logits["features"] = features(pixels).last_hidden_state.contiguous()
save_file(logits, "logits.safetensors")
"""


def test_what_was_pushed_loads_without_our_package_and_gives_the_same_logits(published, runs, tmp_path):
    pixels = torch.randn(2, 3, 28, 28)
    save_file({"pixels": pixels}, tmp_path / "pixels.safetensors")
    assert "trust_remote_code=True" in in_clean_python(
        LOAD, "torch", "transformers", cwd=tmp_path, **at(published, tmp_path / "home")
    )
    logits = load_file(tmp_path / "logits.safetensors")
    for name in ("native", "code"):
        model = HFViTForImageClassification.from_pretrained(runs[name] / "model").eval()
        with torch.no_grad():
            torch.testing.assert_close(model(pixels).logits, logits[name], rtol=1e-5, atol=1e-5)
            if name == "code":
                features = model.base_model(pixels).last_hidden_state
                torch.testing.assert_close(features, logits["features"], rtol=1e-5, atol=1e-5)
    assert "model_type" in json.loads(published.files("alice/native")["config.json"])
    assert not [name for name in published.files("alice/native") if name.endswith(".py")]


def test_the_blocks_of_the_card_run_as_printed_and_print_the_answer(published, tmp_path):
    cards = [published.files(f"alice/{name}")["README.md"].decode() for name in ("native", "code")]
    blocks = [re.findall(r"```python\n(.*?)```", card, re.DOTALL) for card in cards]
    assert [len(found) for found in blocks] == [2, 2]
    script = "\n".join(f"exec({block!r}, {{}})" for found in blocks for block in found)
    environment = at(published, tmp_path / "home")
    printed = in_clean_python(script, "torch", "transformers", "Pillow", cwd=tmp_path, **environment).splitlines()
    assert len(printed) == 4
    for card, said, difference in zip(cards, printed[::2], printed[1::2], strict=True):
        answer = yaml.safe_load(said)
        assert f"\nPredicted class: {answer['label']} ({answer['score']:.0%}).\n" in card
        assert float(difference) <= 1e-5


# ----------------------------------------------------------------------------------------------------------------------
# Faults on the wire


STAGES = {
    "create": ("POST", "/api/repos/create"),
    "inspect": ("GET", r"/api/models/alice/model$"),
    "validate": ("POST", "/api/validate-yaml"),
    "preupload": ("POST", "/preupload/"),
    "batch": ("POST", "/objects/batch"),
    "upload": ("PUT", "/storage/"),
    "check": ("POST", "/info/lfs/verify"),
    "commit": ("POST", "/commit/"),
    "tag": ("POST", "/tag/"),
    "list": ("GET", r"/api/models/alice/model/(revision|tree)/"),
    "head": ("HEAD", "/resolve/.*/model.safetensors"),
    "download": ("GET", "/resolve/.*/model.safetensors"),
}


def test_a_token_that_is_wrong_ends_in_one_line(runs, hub, tmp_path):
    """the token is wrong (401) | one line says so, and how to log in; exit code 1"""
    environment = at(hub, tmp_path / "home", "hf_wrong")
    done = command(runs["native"], "--repo", "alice/model", "--push", cwd=tmp_path, **environment)
    assert hub.repos == {}
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "hf auth login" in line
    assert "hf_wrong" not in done.stdout + done.stderr


def test_a_push_without_a_token_or_to_no_repository_is_not_begun(runs, hub, monkeypatch):
    for name in ("model", "alice/mo del", "alice/model/more"):
        with one_line(ValueError, re.escape(name)):
            recipe(runs["native"], "--repo", name, "--push")
    monkeypatch.delenv("HF_TOKEN")
    with one_line(ValueError, "hf auth login"):
        recipe(runs["native"], "--repo", "alice/model", "--push")
    assert hub.requests == []


@pytest.mark.parametrize("stage", ["create", "preupload", "batch", "commit"])
def test_a_token_that_expires_in_between_is_named(stage, folder, hub):
    hub.fault(*STAGES[stage], status=401, times=FOR_EVER)
    assert "hf auth login" in refused(folder)


def test_a_foreign_namespace_is_refused_at_once(folder, hub):
    """the repository belongs to somebody else (403) | one line says what to take instead; tried once"""
    hub.put("bob/model", {"notes.txt": b"his"})
    assert "under your own name" in refused(folder, "bob/model")
    assert hub.uploaded == []
    assert hub.waits == []


def test_an_endpoint_that_is_no_hub_or_where_nobody_listens_is_named(folder, hub, tmp_path):
    """HF_ENDPOINT names something that is no Hub | one line says to look at HF_ENDPOINT"""
    with Hub() as other:
        url = other.url
    with talking_to(url, tmp_path / "home") as waits:
        assert url in refused(folder)
    assert waits == [1, 2, 4, 8]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), NoHub) as server:
        threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        with talking_to(f"http://127.0.0.1:{server.server_port}", tmp_path / "home"):
            assert "HF_ENDPOINT" in refused(folder)
        server.shutdown()


class NoHub(http.server.BaseHTTPRequestHandler):
    """A site that answers whatever is posted with a page."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n<html>Welcome to our network</html>")


@pytest.mark.parametrize("status", [409, 412])
def test_a_commit_that_comes_in_between_is_kept_and_the_push_goes_on(status, folder, hub, monkeypatch):
    """others commit while a push is on its way (409, 412) | it goes on by itself, and their README.md is kept"""
    hub.put("alice/model", {"README.md": b"Old words.\n"})
    stale, theirs = push.stale_files, [b"New words.\n"]

    def stale_and_commit(*arguments):
        if theirs:
            hub.put("alice/model", {"README.md": theirs.pop(), "notes.txt": b"theirs"})
        return stale(*arguments)

    monkeypatch.setattr(push, "stale_files", stale_and_commit)
    if status == 409:  # as answered by a Hub that is still at work on theirs; the loopback one says 412
        hub.fault(*STAGES["commit"], status=409)
    push_model(folder, "alice/model", log=lambda _: None)
    assert len(hub.history("alice/model")) == 3
    files = hub.files("alice/model")
    assert files["notes.txt"] == b"theirs"
    assert files["README.md"].decode().endswith("---\nNew words.\n")


@pytest.mark.parametrize("stage", ["create", "preupload", "upload", "commit", "download"])
def test_a_wait_that_the_hub_asks_for_is_kept(stage, folder, hub):
    """too many requests (429) | the time the Hub asks for is waited, and the push goes on"""
    hub.fault(*STAGES[stage], status=429, headers={"Retry-After": "7"})
    push_model(folder, "alice/model", log=lambda _: None)
    assert len(hub.waits) == 1
    assert 7 <= hub.waits[0] <= 8
    assert len(hub.history("alice/model")) == 2


@pytest.mark.parametrize("stage", ["create", "commit"])
def test_a_wait_of_a_day_is_not_kept(stage, folder, hub):
    """the Hub asks to wait for longer than five minutes (429) | one line, at once"""
    hub.fault(*STAGES[stage], status=429, headers={"Retry-After": "86400"}, times=FOR_EVER)
    assert "429" in refused(folder)
    assert max(hub.waits, default=0) <= MAX_WAIT


@pytest.mark.parametrize("stage", STAGES)
def test_a_hub_that_fails_twice_is_asked_again(stage, folder, hub):
    """the Hub fails for a moment (500), at any stage of a push | it is asked again, and one commit is made"""
    fault = hub.fault(*STAGES[stage], status=500, times=2)
    push_model(folder, "alice/model", log=lambda _: None)
    assert fault.times == 0
    assert len(hub.history("alice/model")) == 2
    assert hub.files("alice/model").items() >= content(folder).items()


@pytest.mark.parametrize("stage", ["create", "validate", "upload", "commit"])
def test_a_hub_that_always_fails_ends_in_one_line(stage, folder, hub):
    """the Hub fails for good (500) | one line after five attempts; nothing is committed"""
    hub.fault(*STAGES[stage], status=500, times=FOR_EVER)
    assert "500" in refused(folder)
    assert len(hub.history("alice/model")) == 1 if stage not in ("create", "validate") else hub.repos == {}


@pytest.mark.parametrize("fault", [dict(status=500), dict(cut_after=0), dict(corrupt=True)])
def test_what_cannot_be_read_back_is_said_to_be_there(fault, folder, hub):
    """what was pushed cannot be read back, or comes back with another checksum | one line names the commit"""
    hub.fault(*STAGES["download"], **fault, times=FOR_EVER)
    with one_line(UserError, "alice/model at commit") as error:
        push_model(folder, "alice/model", log=lambda _: None)
    assert hub.history("alice/model")[-1][:12] in str(error.value)
    assert ("(model.safetensors)" in str(error.value)) is ("corrupt" in fault)


def test_a_wrong_checksum_is_read_again(folder, hub):
    """a file comes back with another checksum, once | it is read again"""
    hub.fault(*STAGES["download"], corrupt=True)
    push_model(folder, "alice/model")
    reads = [path for method, path in hub.requests if method == "GET" and path.endswith("/model.safetensors")]
    assert len(reads) == 2


@pytest.mark.parametrize("parts", [False, True])
def test_an_upload_that_is_cut_goes_on(parts, large, tmp_path):
    """the connection is cut in the middle of a large upload | it goes on; of several parts, only the one is sent again"""
    size = (large / "model.safetensors").stat().st_size
    sha256 = checksum(large / "model.safetensors")
    with Hub(chunk_size=1 << 20 if parts else None) as hub, talking_to(hub.url, tmp_path / "home"):
        fault = hub.fault("PUT", f"{sha256}/2$" if parts else sha256, cut_after=300_000)
        push_model(large, "alice/model")
        assert fault.times == 0
        assert len(hub.history("alice/model")) == 2
        assert hub.files("alice/model")["model.safetensors"] == (large / "model.safetensors").read_bytes()
        came = [upload.received for upload in hub.uploaded if upload.sha256 == sha256]
    assert came.count(300_000) == 1
    assert sum(came) == size + 300_000
    assert len(came) == (-(-size // (1 << 20)) + 1 if parts else 2)


def test_the_same_push_again_sends_only_what_is_missing(large, hub):
    """the connection is cut again and again | one line; the same push later sends only what did not arrive"""
    sha256 = checksum(large / "model.safetensors")
    fault = hub.fault("PUT", sha256, cut_after=300_000, times=FOR_EVER)
    assert "the same command goes on" in refused(large)
    assert len(hub.history("alice/model")) == 1
    fault.times = 0
    hub.uploaded.clear()
    push_model(large, "alice/model")
    assert hub.uploaded == [(sha256, (large / "model.safetensors").stat().st_size)]


@pytest.mark.parametrize("stage", ["create", "upload", "commit", "download"])
def test_a_hub_that_hangs_once_is_asked_again(stage, folder, hub):
    """the Hub is silent once, at any stage of a push | the time limit ends the wait, and it is asked again"""
    set_http_timeout(0.5)
    began = time.monotonic()
    fault = hub.fault(*STAGES[stage], hang=60)
    push_model(folder, "alice/model", log=lambda _: None)
    assert fault.times == 0
    assert time.monotonic() - began < 50
    assert len(hub.history("alice/model")) == 2


# ----------------------------------------------------------------------------------------------------------------------
# What is held against its probes


def test_a_repository_and_a_folder_give_what_was_saved(published, assembled, tmp_path, capsys):
    with talking_to(published.url, tmp_path / "home"):
        recipe("--verify", "alice/code")
        recipe("--verify", assembled("native"))
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("alice/code gives the outputs that were saved with it")
    assert len(said) == 2


def test_a_copy_that_is_damaged_is_told(folder):
    """a copy of a repository is damaged, or has other weights | --verify names both checksums"""
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 0xFF
    file.write_bytes(data)
    with one_line(ValueError, r"model\.safetensors of .* has the checksum .*, or the download is damaged"):
        verify(folder)


def test_weights_that_give_other_logits_are_told(folder):
    weights = {name: tensor + 1e-3 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    noted = json.dumps({name: checksum(folder / name) for name in CHECKSUMMED_FILES})
    save_file(load_file(folder / "probes.safetensors"), folder / "probes.safetensors", metadata={"sha256": noted})
    with one_line(ValueError, "saved with it: they are"):
        verify(folder)


@pytest.mark.parametrize("missing", ["probes.safetensors", "model.safetensors"])
def test_a_repository_that_was_not_pushed_from_here_cannot_be_verified(missing, folder, hub):
    """a repository holds no probes, or no weights | --verify names the file that is missing"""
    hub.put("alice/bare", {name: data for name, data in content(folder).items() if name != missing})
    with one_line(ValueError, f"alice/bare .*{re.escape(missing)}"):
        recipe("--verify", "alice/bare")


# ----------------------------------------------------------------------------------------------------------------------
# Runs that cannot be pushed


def test_a_run_that_is_not_finished_is_refused(runs, tmp_path):
    """the run is not finished | one line names what is missing"""
    run = shutil.copytree(runs["native"], tmp_path / "run")
    (run / "results.json").unlink()
    for folder in (run, tmp_path / "nowhere"):
        with one_line(ValueError, r"it has no results\.json"):
            build_package(folder, tmp_path / "out", publish.RECIPES, "alice/model")


def test_a_run_without_samples_is_pushed_with_probes_of_noise(runs, hub, tmp_path):
    """the run holds no sample images | one line says so; --without_images pushes it with probes of noise"""
    run = shutil.copytree(runs["native"], tmp_path / "run")
    (run / "samples.safetensors").unlink()
    with one_line(ValueError, "--without_images"):
        recipe(run, "--repo", "alice/model", "--push")
    recipe(run, "--repo", "alice/model", "--push", "--without_images")
    files = hub.files("alice/model")
    assert not {"example.png", "figures/predictions.png"} & {*files}
    assert "figures/predictions.png" not in files["README.md"].decode()
    assert "probes.safetensors" in files


def test_native_where_it_cannot_be_names_the_field(runs, tmp_path):
    """--layout native for a model that no native architecture expresses | one line names the field, and --layout code"""
    with one_line(ValueError, r"--layout native: .*qk_norm.*--layout code publishes it"):
        build_package(runs["code"], tmp_path / "out", publish.RECIPES, "alice/model", layout="native")


def test_weights_of_another_run_are_refused(runs, tmp_path):
    """the weights in the run's folder are not those that were scored | one line says how far the logits are apart"""
    run = shutil.copytree(runs["native"], tmp_path / "run")
    weights = {name: tensor + 0.1 for name, tensor in load_file(run / "model" / "model.safetensors").items()}
    save_file(weights, run / "model" / "model.safetensors", metadata={"format": "pt"})
    with one_line(ValueError, "not those of its run: they are"):
        build_package(run, tmp_path / "out", publish.RECIPES, "alice/model")


@pytest.mark.parametrize("name", ["../../../../outside.json", "/outside.json", "a/../../../../outside.json"])
def test_a_file_name_that_leaves_the_folder_is_refused(name, hub, assembled, tmp_path):
    """a repository whose file names lead out of its folder | refused; nothing is written outside"""
    files = content(assembled("native"))
    hub.put("alice/evil", {**files, name: b"{}"})
    with pytest.raises((ValueError, OSError)):
        snapshot_download("alice/evil")
    verify("alice/evil")  # which asks for the files that it knows alone
    assert list(tmp_path.rglob("outside.json")) == []
    assert not Path("/outside.json").exists()

"""Claims about recipes/publish.py: what is pushed to a Hub on loopback, what loads from there, and what faults come to."""

import hashlib
import json
import re
import shutil

import pytest
import torch
import yaml
from huggingface_hub import metadata_load
from loopback_hub import TOKEN, Hub
from peft import LoraConfig, get_peft_model
from publishing import HOUSE, at, command, content, one_line, publish, recipe, talking_to
from runs import read_json, results_of
from safetensors.torch import load_file, save_file
from without_package import in_clean_python

from hf_vit import HFViTForImageClassification, HFViTModel
from hf_vit.card import write_card
from hf_vit.hub.finished_run import read_run
from hf_vit.hub.package import build_package
from hf_vit.hub.push import content_tag, push_model
from hf_vit.hub.verification import write_probes


NOT_OF_A_CLASSIFIER = ("__init__.py", "masked_autoencoder.py")
CODE = {path.name for path in HOUSE.glob("hf_vit/model/*.py") if path.name not in NOT_OF_A_CLASSIFIER}


def metadata_of(files):
    return yaml.safe_load(files["README.md"].decode().split("---\n")[1])


# ----------------------------------------------------------------------------------------------------------------------
# What is shown, and what is pushed


def test_without_push_all_is_shown_and_nothing_sent(runs, assembled, hub, capsys):
    recipe(runs["native"], "--repo alice/model")
    shown = capsys.readouterr().out
    for name, data in content(assembled["native"]).items():
        assert name == "README.md" or f"{len(data):,}  {name}\n" in shown
    assert "alice/model" in shown.splitlines()[-2]
    assert {method for method, _ in hub.requests} <= {"GET", "HEAD"}


@pytest.fixture(scope="module")
def published(runs, tmp_path_factory):
    """A Hub with alice/native and alice/code, the first pushed by the real command; what that printed, and its HF_HOME."""
    home = tmp_path_factory.mktemp("home")
    with Hub() as hub:
        flags = ["--repo", "alice/native", "--push", "--license", "apache-2.0"]
        hub.done, hub.home = command(runs["native"], *flags, cwd=home, **at(hub, home)), home
        with talking_to(hub.url, home):
            recipe(runs["code"], "--repo alice/code --push")
        yield hub


def test_a_push_is_one_commit_to_a_new_private_repository(published, assembled):
    assert (published.done.returncode, published.done.stderr) == (0, "")
    assert f"{published.url}/alice/native;" in published.done.stdout
    assert published.repos["alice/native"].private
    assert len(published.history("alice/native")) == 2  # the first makes the repository
    assert {*published.files("alice/native")} - {".gitattributes"} == {*content(assembled["native"])}


def test_the_token_is_written_nowhere(published, runs):
    places = [published.done.stdout.encode()]
    for files in (
        content(published.home),
        content(runs["native"]),
        *map(published.files, ("alice/native", "alice/code")),
    ):
        places += files.values()
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
    recipe(runs["native"], f"--repo {repo} --push --public --create_pr --output_dir {kept}")
    assert hub.history(repo) == [first]
    assert f"{hub.url}/{repo}/discussions/1" in capsys.readouterr().out
    assert hub.files(repo, "refs/pr/1") == {**content(kept), "notes.txt": b"mine"}


def test_the_same_push_again_makes_no_commit(assembled, hub, tmp_path):
    for name in ("first", "again"):
        push_model(shutil.copytree(assembled["code"], tmp_path / name), "alice/model")
        assert len(hub.history("alice/model")) == 2


def test_another_layout_takes_away_what_the_first_left_and_keeps_the_owners_files(assembled, folder, hub):
    own = {"notes.txt": b"mine", "images/own.png": b"png", "modeling_other.py": b"", "sub/model.safetensors": b"w"}
    before = {**content(assembled["code"]), "onnx/model.onnx": b"onnx", **own}
    hub.put("alice/model", before)
    push_model(folder, "alice/model")
    after = hub.files("alice/model")
    assert {*before} - {*after} == {*CODE, "onnx/model.onnx"}
    assert own.items() <= after.items()


def test_a_run_without_labels_is_pushed_with_its_code_and_gives_the_same_features(runs, hub):
    recipe(runs["unlabelled"], "--repo alice/encoder --push --without_images")
    files = hub.files("alice/encoder")
    assert (runs["unlabelled"] / "model" / "figures" / "reconstructions.png").is_file()
    assert "figures/reconstructions.png" not in files
    assert {"masked_autoencoder.py", "probes.safetensors", "training/results.json"} <= {*files}
    assert metadata_of(files)["pipeline_tag"] == "image-feature-extraction"
    images, places = torch.randn(2, 3, 16, 16), (runs["unlabelled"] / "model", "alice/encoder")
    wanted, found = (HFViTModel.from_pretrained(place).eval()(images).last_hidden_state for place in places)
    torch.testing.assert_close(found, wanted)


# ----------------------------------------------------------------------------------------------------------------------
# The card

TEXT = "---\n# My words\n\nThey stay. <!-- so does this -->\n"
BY_HAND = f"""---
license: mit
language: en
tags: [mine, vision]
model-index:
- name: another
  results: [{{task: {{type: image-classification}}, dataset: {{name: d, type: d}}, metrics: [{{type: accuracy, value: 0.5}}]}}]
{TEXT}"""


def test_a_readme_that_is_there_keeps_its_text_and_its_metadata_follow_the_run(folder, hub):
    ours = (folder / "README.md").read_bytes()
    hub.put("alice/model", {"README.md": BY_HAND.encode()})
    for license, wanted in ((None, "mit"), ("apache-2.0", "apache-2.0")):
        push_model(folder, "alice/model", license=license)
        files = hub.files("alice/model")
        assert files["README.md"].decode().endswith(TEXT)
        metadata = metadata_of(files)
        assert (metadata["license"], metadata["language"]) == (wanted, "en")
        assert metadata["tags"] == ["mine", "vision", "hf_vit"]
        assert metadata["pipeline_tag"] == "image-classification"
        names = [entry["name"] for entry in metadata["model-index"]]
        assert names == ["another", "Vision Transformer on fashion-mnist-mini"]
    (folder / "README.md").write_bytes(ours)
    push_model(folder, "alice/model", overwrite_card=True)
    assert hub.files("alice/model")["README.md"] == ours


def test_the_card_of_a_model_with_code_names_a_tag_that_has_what_was_pushed(runs, assembled, hub, tmp_path):
    """main may hold other code tomorrow"""
    first = shutil.copytree(assembled["code"], tmp_path / "first")
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


@pytest.mark.parametrize("text", [b"---\nlicense: [mit\n---\nWords.\n", "Café".encode("latin-1")])
def test_a_readme_that_cannot_be_read_stops_the_push(text, folder, hub):
    hub.put("alice/model", {"README.md": text})
    with one_line(r"README\.md of alice/model"):
        push_model(folder, "alice/model")
    assert len(hub.history("alice/model")) == 1
    assert hub.uploaded == []


@pytest.mark.parametrize("flags", ["", "--space"])
def test_a_licence_that_the_hub_does_not_know_leaves_no_empty_repository(flags, runs, hub):
    with one_line("license"):
        recipe(runs["native"], "--repo alice/model --push --license free-beer", flags)
    assert hub.repos == {}


@pytest.mark.parametrize("place", ["somebody/thing", "here/thing"])
def test_the_card_names_base_and_data_on_the_hub_and_not_those_on_this_disk(place, runs, folder):
    results, config = read_run(runs["native"])
    hub_id = place if place == "somebody/thing" else None
    results.data |= {"name": place, "hub_id": hub_id}
    results.base_model_hub_id = hub_id
    write_card(
        folder,
        publish.RECIPES / "model_card.md",
        results,
        f"{config}model_name_or_path: {place}\n",
        repo="alice/model",
    )
    metadata = metadata_load(folder / "README.md")
    assert (metadata.get("base_model"), metadata.get("datasets")) == (hub_id, hub_id and [hub_id])


def test_the_card_on_the_hub_holds_scores_intervals_and_checksum(published, runs):
    files, results = published.files("alice/native"), results_of(runs["native"])
    card, metadata = files["README.md"].decode(), metadata_of(files)
    assert card in published.validated
    ((result,),) = (entry["results"] for entry in metadata["model-index"])
    low, high = results["intervals"]["accuracy"]
    name = f"accuracy (95% interval {low:.2%} to {high:.2%})"
    (found,) = (metric["value"] for metric in result["metrics"] if metric["name"] == name)
    assert found == pytest.approx(results["metrics"]["accuracy"], abs=1e-6)
    assert metadata["license"] == "apache-2.0"
    assert f"`{hashlib.sha256(files['model.safetensors']).hexdigest()}`" in card


# ----------------------------------------------------------------------------------------------------------------------
# A machine without hf_vit


LOAD = """
import importlib.util, sys, torch
assert not [name for name in ("hf_vit", "accelerate", "datasets") if importlib.util.find_spec(name)]
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForImageClassification

pixels = load_file("pixels.safetensors")["pixels"]
load = AutoModelForImageClassification.from_pretrained
native, code = load("alice/native"), load("alice/code", trust_remote_code=True)
features = AutoModel.from_pretrained("alice/code", trust_remote_code=True)
try:
    load("alice/code")
except ValueError as error:
    print()  # after the question whether to run it
else:
    sys.exit("code was run that nobody trusted")
with torch.no_grad():
    logits = {"native": native(pixels).logits, "code": code(pixels).logits}
    logits["features"] = features(pixels).last_hidden_state.contiguous()
save_file(logits, "logits.safetensors")
"""


def test_without_our_package_what_was_pushed_gives_the_same_logits_and_the_blocks_of_the_card_their_answers(
    published, runs, tmp_path
):
    cards = [published.files(f"alice/{name}")["README.md"].decode() for name in ("native", "code")]
    blocks = [block for card in cards for block in re.findall(r"```python\n(.*?)```", card, re.DOTALL)]
    pixels = torch.randn(2, 3, 28, 28)
    save_file({"pixels": pixels}, tmp_path / "pixels.safetensors")
    script = "\n".join([LOAD, *(f"exec({block!r}, {{}})" for block in blocks)])
    environment = at(published, tmp_path / "home")
    printed = in_clean_python(script, "torch", "transformers", "Pillow", cwd=tmp_path, **environment).splitlines()
    logits = load_file(tmp_path / "logits.safetensors")
    for name in ("native", "code"):
        model = HFViTForImageClassification.from_pretrained(runs[name] / "model").eval()
        torch.testing.assert_close(model(pixels).logits.detach(), logits[name], rtol=1e-5, atol=1e-5)
    features = model.base_model(pixels).last_hidden_state.detach()
    torch.testing.assert_close(features, logits["features"], rtol=1e-5, atol=1e-5)
    assert not [name for name in published.files("alice/native") if name.endswith(".py")]
    assert len(blocks) == 4
    for card, said, difference in zip(cards, printed[-4::2], printed[-3::2], strict=True):
        answer = yaml.safe_load(said)
        assert f"{answer['label']} ({answer['score']:.0%})" in card
        assert float(difference) <= 1e-5


def test_a_revision_of_an_adapter_is_not_asked_of_its_base(tiny_model, hub, tmp_path):
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


# ----------------------------------------------------------------------------------------------------------------------
# What is held against its probes


def test_a_repository_and_a_folder_are_verified_as_they_are_now(published, assembled, tmp_path, capsys):
    with talking_to(published.url, tmp_path / "home"):
        for source in ("alice/code", assembled["native"]):
            recipe("--verify", source)
            assert capsys.readouterr().out.startswith(str(source))
        published.fault("GET", "/api/models/alice/code", status=500)
        with one_line("500"):  # although a copy is in the cache
            recipe("--verify alice/code")


def change(folder, by=0.1):
    """Other weights."""
    file = folder / "model.safetensors"
    save_file({name: tensor + by for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


def change_with_probes(folder):
    change(folder, by=1e-3)
    probes = load_file(folder / "probes.safetensors")
    write_probes(folder, probes["pixel_values"], probes["logits"])


def rename_labels(folder):
    config = read_json(folder / "config.json") | {"id2label": {"0": "other"}}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (change, r"model\.safetensors"),
        (rename_labels, r"config\.json"),
        (change_with_probes, "outputs"),
        (lambda folder: (folder / "probes.safetensors").unlink(), r"probes\.safetensors"),
    ],
)
def test_a_copy_that_was_changed_damaged_or_never_pushed_is_told(harm, named, folder, hub):
    harm(folder)
    hub.put("alice/copy", content(folder))
    for source in ("alice/copy", folder):
        with one_line(named):
            recipe("--verify", source)


# ----------------------------------------------------------------------------------------------------------------------
# Runs that cannot be pushed


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lambda run: (run / "results.json").unlink(), r"results\.json"),
        (lambda run: (run / "samples.safetensors").unlink(), "--without_images"),
        (lambda run: change(run / "model"), "logits"),
    ],
)
def test_a_run_that_is_not_finished_or_of_other_weights_is_refused(harm, named, run, tmp_path):
    harm(run)
    with one_line(named):
        build_package(run, tmp_path / "out", publish.RECIPES, "alice/model")


def test_a_run_without_samples_is_pushed_with_probes_of_noise(run, hub):
    (run / "samples.safetensors").unlink()
    recipe(run, "--repo alice/model --push --without_images")
    files = hub.files("alice/model")
    assert not {"example.png", "figures/predictions.png"} & {*files}
    assert "figures/predictions.png" not in files["README.md"].decode()
    assert "probes.safetensors" in files


def test_native_where_it_cannot_be_names_the_field(runs, tmp_path):
    with one_line(r"qk_norm.*--layout code"):
        build_package(runs["code"], tmp_path / "out", publish.RECIPES, "alice/model", layout="native")

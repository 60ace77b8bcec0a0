"""Claims about recipes/app.py, the page in the browser."""

import contextlib
import json
import os
import re
import runpy
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor

from hf_vit import HFViTConfig, HFViTForImageClassification, figures
from hf_vit.data.decoding import decode_image, stack_images
from hf_vit.data.normalization import normalize
from hf_vit.hub.space import build_space


HOUSE = Path(__file__).parents[2]
APP = HOUSE / "recipes" / "app.py"
pytest.importorskip("gradio", reason="the page needs Gradio: pip install 'hf_vit[app]'")
import app  # noqa: E402
from gradio_client import Client, handle_file  # noqa: E402


ANSWER = "rollout, predicted class"
# Prints where a process connects to, and whose names it looks up.
WATCH = """
import sys
def watch(event, arguments):
    if event == "socket.connect":
        print("connects to", arguments[1], file=sys.stderr)
    if event == "socket.getaddrinfo":
        print("looks up", arguments[0], file=sys.stderr)
sys.addaudithook(watch)
"""


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    """A photograph-like file, larger than any model here."""
    file = tmp_path_factory.mktemp("photo") / "photo.png"
    coarse = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8))
    coarse.resize((140, 100)).save(file)
    return file


@contextlib.contextmanager
def serving(folder, *line, **environment):
    """`python *line` as a process that serves a page on a free port, until the block ends: its address, and the file of what it
    writes."""
    folder.mkdir(exist_ok=True)
    port = forked.free_port()
    usual = {name: os.environ[name] for name in os.environ.keys() - {"PYTHONPATH", "GRADIO_ANALYTICS_ENABLED"}}
    ours = {"GRADIO_SERVER_PORT": port, "GRADIO_TEMP_DIR": str(folder / "cache"), "TMPDIR": str(folder)}
    log, url = folder / "log.txt", f"http://127.0.0.1:{port}/"
    with open(log, "w") as opened:
        pipes = dict(stdout=opened, stderr=opened)
        process = subprocess.Popen([sys.executable, *line], cwd=folder, env=usual | ours | environment, **pipes)
    try:
        until = time.monotonic() + 90
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, f"no answer in time: {log.read_text()}"
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10):
                break
            time.sleep(0.1)
        yield url, log
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def asking(url, folder):
    """ask(file, method) -> {class: probability}, the picture or None, and the words, as the page would show them."""
    client = Client(url, analytics_enabled=False, verbose=False, download_files=folder)

    def ask(file, method=ANSWER):
        label, picture, words = client.predict(handle_file(file), method, api_name="/look")
        answers = {row["label"]: row["confidence"] for row in (label or {}).get("confidences") or ()}
        return answers, picture and np.asarray(Image.open(picture)), words

    yield ask
    client.close()


def config_of(url):
    """The title of a page, and its components by their kinds."""
    with urllib.request.urlopen(f"{url}config", timeout=10) as answer:
        config = json.load(answer)
    kinds = defaultdict(list)
    for each in config["components"]:
        kinds[each["type"]].append(each["props"])
    return config["title"], kinds


@pytest.fixture(scope="module")
def served(tmp_path_factory, demo_run):
    """The page of a run."""
    home = tmp_path_factory.mktemp("page")
    (home / "sitecustomize.py").write_text(WATCH)
    with serving(home / "served", APP, demo_run, PYTHONPATH=f"{home}{os.pathsep}{HOUSE}") as server:
        yield server


@pytest.fixture
def ask(served, tmp_path):
    with asking(served[0], tmp_path / "answers") as ask:
        yield ask


# ----------------------------------------------------------------------------------------------------------------------
# The page, asked as a browser asks it


def test_an_answer_is_the_models_and_every_method_gives_another_picture(ask, demo_run, photo):
    model = HFViTForImageClassification.from_pretrained(demo_run / "model").eval()
    processor = AutoImageProcessor.from_pretrained(demo_run / "model")
    inputs = processor(Image.open(photo).convert("RGB"), return_tensors="pt")
    best, pictures = model(**inputs).logits.softmax(dim=1)[0].topk(5), set()
    wanted = {
        model.config.id2label[index]: value for value, index in zip(*map(torch.Tensor.tolist, best), strict=True)
    }
    for method in app.METHODS:
        answers, picture, _ = ask(photo, method)
        assert answers == pytest.approx(wanted, abs=1e-4)
        assert picture.shape == (392, 392, 3)  # 28 x 28, enlarged by a whole factor to 384 at least
        pictures.add(picture.tobytes())
    assert len(pictures) == len(app.METHODS)


@pytest.mark.parametrize("content", [b"I am a letter, not a photo.", b"\x89PNG\r\n\x1a\n cut"])
def test_a_file_that_is_no_image_is_told_in_a_sentence_and_an_earlier_answer_goes(
    content, ask, served, photo, tmp_path
):
    assert ask(photo)[0]
    (tmp_path / "broken.png").write_bytes(content)
    answers, picture, words = ask(tmp_path / "broken.png")
    assert (answers, picture) == ({}, None)
    assert words
    assert not re.search(r"\n|Traceback|BytesIO", words)
    assert "Traceback" not in served[1].read_text()


def test_the_page_connects_to_nobody_and_links_to_nothing_it_needs(ask, served, photo):
    ask(photo)
    url, log = served
    said = log.read_text()
    assert "looks up 127.0.0.1" in said  # the hook is at work
    assert set(re.findall(r"(?:looks up|connects to) \(?'?([^',\s]+)", said)) == {"127.0.0.1"}
    with urllib.request.urlopen(url, timeout=10) as answer:
        html = answer.read().decode()
    loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"'](https?://[^\"']+)", html)
    assert [address for address in loaded if not address.startswith(url)] == []


def best_class(run):
    """The class of the first sample of a run, and its probability."""
    chances = load_file(run / "samples.safetensors")["logits"][0].softmax(dim=0)
    return HFViTConfig.from_pretrained(run / "model").id2label[chances.argmax().item()], chances.max().item()


def test_the_page_opens_on_an_example_that_is_answered_under_the_name_of_the_model(served, demo_run):
    title, shown = config_of(served[0])
    with urllib.request.urlopen(shown["image"][0]["value"]["url"], timeout=10) as answer, Image.open(answer) as image:
        scored = load_file(demo_run / "samples.safetensors")["images"][0].permute(1, 2, 0)
        assert (np.asarray(image.convert("RGB")) == scored.numpy()).all()
    assert shown["label"][0]["value"]["label"] == best_class(demo_run)[0]
    assert all(props["value"] for props in shown["image"])  # the example, and its map
    assert title == "What demo sees"
    assert str(demo_run) not in json.dumps(shown)


@pytest.mark.parametrize("channels", [None, 5])
def test_models_that_cannot_be_shown_end_in_one_sentence(channels, saved, tmp_path, monkeypatch):
    folder = tmp_path if channels is None else saved(num_channels=channels)
    monkeypatch.setattr(sys, "argv", [str(APP), str(folder)])
    with pytest.raises(SystemExit, match=f"^error: [^\n]*({folder}|, 5, )[^\n]*$"):
        runpy.run_path(str(APP), run_name="__main__")


def test_a_space_answers_with_the_package_beside_it(demo_run, tmp_path):
    folder = tmp_path / "space"
    build_space(demo_run, folder, APP, "alice/model")
    readme = folder / "README.md"
    readme.write_text(readme.read_text().replace("- alice/model", f"- {demo_run / 'model'}"))
    with open(folder / "hf_vit" / "__init__.py", "a") as opened:
        opened.write("\nprint('hf_vit is', __file__, flush=True)\n")
    with serving(folder, "app.py") as (url, log), asking(url, tmp_path / "answers") as ask:
        answers, *_ = ask(folder / "examples" / "1.png")
        ((shown,), said) = config_of(url)[1]["dataset"], log.read_text()
    assert [sample["orig_name"] for (sample,) in shown["samples"]] == [f"{number}.png" for number in range(1, 7)]
    name, chance = best_class(demo_run)
    assert answers[name] == max(answers.values()) == pytest.approx(chance, abs=1e-4)
    assert f"hf_vit is {folder / 'hf_vit' / '__init__.py'}" in said
    assert "Traceback" not in said


def test_a_map_lies_where_the_image_is(demo_run, photo):
    """test_figures.py: an overlay is orange where its map is large."""
    viewer = app.Viewer(str(demo_run))
    classifier = viewer.classifier
    pixels = stack_images([decode_image({"bytes": photo.read_bytes(), "path": None}, classifier.spec)])
    (heat,) = classifier.model.attention_maps(normalize(pixels, classifier.spec), -1, "rollout")
    _, seen, _ = viewer.look(str(photo), figures.METHODS["rollout"])
    np.testing.assert_array_equal(seen, figures.overlay(pixels[0], heat, smallest=384))

"""Claims about recipes/app.py, the page in the browser."""

import contextlib
import json
import os
import re
import runpy
import struct
import subprocess
import sys
import time
import urllib.request
import zlib
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor, ViTImageProcessorPil

from hf_vit import HFViTForImageClassification
from hf_vit.hub.space import build_space


HOUSE = Path(__file__).parents[2]
APP = HOUSE / "recipes" / "app.py"
pytest.importorskip("gradio", reason="the page needs Gradio: pip install 'hf_vit[app]'")
import app  # noqa: E402


ANSWER = "rollout, predicted class"
SORRY = "This file cannot be read as an image:"
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
def model(tmp_path_factory, tiny_config, randomize):
    """model(name, **overrides) -> the folder of a tiny model with its image processor; three labels."""
    home = tmp_path_factory.mktemp("models")

    def make(name, **overrides):
        torch.manual_seed(0)
        config = tiny_config(**{"id2label": {0: "cat", 1: "dog", 2: "owl"}} | overrides)
        randomize(HFViTForImageClassification(config)).save_pretrained(home / name)
        half = [0.5] * config.num_channels
        size = {"height": 16, "width": 16}
        ViTImageProcessorPil(size=size, image_mean=half, image_std=half).save_pretrained(home / name)
        return home / name

    return make


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    """A photograph-like file, larger than any model here."""
    file = tmp_path_factory.mktemp("photo") / "photo.png"
    coarse = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8))
    coarse.resize((140, 100)).save(file)
    return file


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


@pytest.fixture(scope="module")
def broken(tmp_path_factory, photo):
    """Files that are no image, or not a whole one."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "cut.png").write_bytes(photo.read_bytes()[:5000])
    (folder / "letter.jpg").write_text("I am a letter, not a photo.")
    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    bomb = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    (folder / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bomb)
    return folder


class Server:
    """A page that is being served: its address, and what it has written."""

    def __init__(self, url, log):
        self.url, self.log = url, log

    def said(self) -> str:
        return self.log.read_text()


@contextlib.contextmanager
def serving(folder, *line, cwd=None, **environment):
    """`python *line` as a process that serves a page on a free port, until the block ends."""
    folder.mkdir(exist_ok=True)
    port = forked.free_port()
    usual = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "GRADIO_ANALYTICS_ENABLED")
    }
    ours = {"GRADIO_SERVER_PORT": str(port), "GRADIO_TEMP_DIR": str(folder / "cache"), "TMPDIR": str(folder)}
    log, url = folder / "log.txt", f"http://127.0.0.1:{port}/"
    with open(log, "w") as opened:
        process = subprocess.Popen(
            [sys.executable, *map(str, line)], cwd=cwd or folder, stdout=opened, stderr=opened, env=usual | ours | environment
        )  # fmt: skip
    try:
        until = time.monotonic() + 90
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, f"no answer in time: {log.read_text()}"
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10):
                break
            time.sleep(0.1)
        yield Server(url, log)
    finally:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)


@pytest.fixture(scope="module")
def served(tmp_path_factory, demo_run):
    """The page of a run."""
    home = tmp_path_factory.mktemp("page")
    (home / "sitecustomize.py").write_text(WATCH)
    with serving(home / "served", APP, demo_run, PYTHONPATH=str(home)) as server:
        yield server


@pytest.fixture
def ask(served, tmp_path):
    """ask(file, method) -> {class: probability}, the picture or None, and the words, as the page would show them."""
    from gradio_client import Client, handle_file

    client = Client(served.url, analytics_enabled=False, verbose=False, download_files=tmp_path / "answers")

    def look(file, method=ANSWER):
        label, picture, words = client.predict(handle_file(file), method, api_name="/look")
        answers = {row["label"]: row["confidence"] for row in (label or {}).get("confidences") or ()}
        return answers, picture and np.asarray(Image.open(picture)), words

    yield look
    client.close()


# ----------------------------------------------------------------------------------------------------------------------
# The page, asked as a browser asks it


def own(folder, photo):
    """What the model in `folder` itself says of an image, {class: probability}."""
    model = HFViTForImageClassification.from_pretrained(folder).eval()
    with Image.open(photo) as image:
        inputs = AutoImageProcessor.from_pretrained(folder)(image.convert("RGB"), return_tensors="pt")
    with torch.no_grad():
        chances = model(**inputs).logits.softmax(dim=1)[0].tolist()
    return {model.config.id2label[index]: chance for index, chance in enumerate(chances)}


def test_an_answer_is_the_models_and_every_method_gives_another_picture(ask, demo_run, photo):
    expected, pictures = own(demo_run / "model", photo), set()
    for method in app.METHODS:
        answers, picture, _ = ask(photo, method)
        assert set(answers) == set(sorted(expected, key=expected.get)[-5:])
        assert answers == pytest.approx({name: expected[name] for name in answers}, abs=1e-4)
        assert picture.shape == (392, 392, 3)  # 28 x 28, enlarged by a whole factor to 384 at least
        pictures.add(picture.tobytes())
    assert len(pictures) == len(app.METHODS)


@pytest.mark.parametrize("name", ["letter.jpg", "bomb.png", "cut.png"])
def test_a_file_that_is_no_image_is_told_in_a_sentence_and_an_earlier_answer_goes(name, ask, served, broken, photo):
    assert ask(photo)[0]
    answers, picture, words = ask(broken / name)
    assert (answers, picture) == ({}, None)
    assert SORRY in words
    assert not re.search(r"\n|Traceback|BytesIO", words)
    assert "Traceback" not in served.said()


def test_the_page_connects_to_nobody_and_links_to_nothing_it_needs(ask, served, photo):
    ask(photo)
    said = served.said()
    assert "looks up 127.0.0.1" in said  # the hook is at work
    assert set(re.findall(r"(?:looks up|connects to) \(?'?([^',\s]+)", said)) == {"127.0.0.1"}
    with urllib.request.urlopen(served.url, timeout=10) as answer:
        html = answer.read().decode()
    loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"'](https?://[^\"']+)", html)
    assert [address for address in loaded if not address.startswith(served.url)] == []


def test_the_page_opens_on_an_example_that_is_answered_under_the_name_of_the_model(served, demo_run):
    with urllib.request.urlopen(f"{served.url}config", timeout=10) as answer:
        config = json.load(answer)
    shown = {kind: [each["props"] for each in config["components"] if each["type"] == kind] for kind in ("label", "image", "markdown")}  # fmt: skip
    with urllib.request.urlopen(shown["image"][0]["value"]["url"], timeout=10) as answer, Image.open(answer) as image:
        scored = load_file(demo_run / "samples.safetensors")["images"][0].permute(1, 2, 0)
        assert (np.asarray(image.convert("RGB")) == scored.numpy()).all()
    logits = load_file(demo_run / "samples.safetensors")["logits"][0]
    names = yaml.safe_load((demo_run / "model" / "config.json").read_text())["id2label"]
    assert shown["label"][0]["value"]["label"] == names[str(logits.argmax().item())]
    assert all(props["value"] for props in shown["image"])  # the example, and its map
    assert config["title"] == "What demo sees"
    assert str(demo_run) not in json.dumps(config)


@pytest.mark.parametrize("given", ["{tmp}", "{tmp}/nowhere", "{five}"])
def test_models_that_cannot_be_shown_end_in_one_sentence(given, model, tmp_path, monkeypatch):
    given = given.format(tmp=tmp_path, five=model("five", num_channels=5))
    monkeypatch.setattr(sys, "argv", [str(APP), given])
    with pytest.raises(SystemExit, match=rf"^error: .*({given}|\(1, 5, height)[^\n]*$"):
        runpy.run_path(str(APP), run_name="__main__")


def test_a_space_answers_with_the_package_beside_it(demo_run, tmp_path):
    folder = tmp_path / "space"
    build_space(demo_run, folder, APP, "alice/model")
    readme = folder / "README.md"
    readme.write_text(readme.read_text().replace("- alice/model", f"- {demo_run / 'model'}"))
    with open(folder / "hf_vit" / "__init__.py", "a") as opened:
        opened.write("\nprint('hf_vit is', __file__, flush=True)\n")
    from gradio_client import Client, handle_file

    with serving(tmp_path / "served", "app.py", cwd=folder) as server:
        client = Client(server.url, analytics_enabled=False, verbose=False, download_files=tmp_path / "answers")
        label, _, _ = client.predict(handle_file(folder / "examples" / "1.png"), ANSWER, api_name="/look")
        client.close()
        with urllib.request.urlopen(f"{server.url}config", timeout=10) as answer:
            components = json.load(answer)["components"]
    (shown,) = [each["props"]["samples"] for each in components if each["type"] == "dataset"]
    assert [sample["orig_name"] for (sample,) in shown] == [f"{number}.png" for number in range(1, 7)]
    scored = load_file(demo_run / "samples.safetensors")["logits"][0].softmax(dim=0)
    names = yaml.safe_load((demo_run / "model" / "config.json").read_text())["id2label"]
    assert label["label"] == names[str(scored.argmax().item())]
    assert label["confidences"][0]["confidence"] == pytest.approx(scored.max().item(), abs=1e-4)
    assert f"hf_vit is {folder / 'hf_vit' / '__init__.py'}" in server.said()
    assert "Traceback" not in server.said()


# ----------------------------------------------------------------------------------------------------------------------
# One model, without the page


def test_a_map_lies_where_the_image_is(model, tmp_path):
    folder = model("bright", num_hidden_layers=1)
    net = HFViTForImageClassification.from_pretrained(folder)
    projection, attention = net.vit.embeddings.patch_embeddings.projection, net.vit.layers[0].attention
    with torch.no_grad():  # a model that attends to bright patches
        for parameter in (projection.weight, projection.bias, attention.q_proj.weight, attention.k_proj.weight):
            parameter.zero_()
        projection.weight[0] = 1
        attention.q_proj.bias.fill_(1)
        attention.k_proj.weight[:, 0] = 1
    net.save_pretrained(folder)
    row, column = corner = 1, 3
    image = np.full((16, 16, 3), 20, np.uint8)
    image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 250
    Image.fromarray(image).save(tmp_path / "corner.png")
    _, seen, _ = app.Viewer(str(folder)).look(str(tmp_path / "corner.png"), "attention, last layer")
    patches = seen.reshape(4, 96, 4, 96, 3).mean(axis=(1, 3))  # 384 pixels a side, 4 x 4 patches
    orange = patches[:, :, 0] - patches[:, :, 2]
    assert np.unravel_index(orange.argmax(), orange.shape) == corner
    assert orange.max() > 50

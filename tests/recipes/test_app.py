"""Claims about recipes/app.py, the page in the browser."""

import contextlib
import json
import os
import re
import runpy
import shutil
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


pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=<...>':DeprecationWarning"
)  # huggingface_hub 2.4 to httpx2
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
    with Image.open(photo) as image:
        image.save(folder / "cut.jpg")
    whole = (folder / "cut.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "photo.jpg").write_text("I am a letter, not a photo.")
    (folder / "empty.jpg").write_bytes(b"")
    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    bomb = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    (folder / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bomb)
    with Image.open(photo) as image:
        image.save(folder / "page.eps")
    (folder / "page.eps").rename(folder / "page.png")
    (folder / "drawing.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>')
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


@pytest.mark.parametrize("name", ["photo.jpg", "empty.jpg", "bomb.png", "page.png", "drawing.svg", "cut.jpg"])
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


@pytest.mark.parametrize(
    ("given", "code", "sentence"),
    [
        ([], 2, "MODEL"),
        (["{tmp}"], 1, "{tmp} has no config.json: give a folder or repo with a saved model"),
        (["{tmp}/nowhere"], 1, "{tmp}/nowhere"),
        (["alice/nowhere"], 1, "alice/nowhere|couldn't connect"),
        (["{five}"], 1, r"wanted finite numbers \(1, 5, height, width\)"),
    ],
)
def test_models_that_cannot_be_shown_end_in_one_sentence(given, code, sentence, model, tmp_path, monkeypatch, capsys):
    """recipes/app.py gets no model, or one that it cannot show | one sentence, exit code 2 for the number, else 1"""
    places = dict(tmp=tmp_path, five=model("five", num_channels=5))
    monkeypatch.setattr(sys, "argv", [str(APP), *(text.format(**places) for text in given)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(APP), run_name="__main__")
    said = capsys.readouterr().err if code == 2 else ended.value.code  # a text is written, and means 1
    assert ended.value.code == code if code == 2 else said.startswith("error: ")
    assert re.search(sentence.format(**places), said)
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == code  # 2: the usage before it


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


@pytest.mark.parametrize("corner", [(0, 0), (0, 3), (3, 0), (3, 3)])
def test_a_map_lies_where_the_image_is(corner, model, tmp_path):
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
    row, column = corner
    image = np.full((16, 16, 3), 20, np.uint8)
    image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 250
    Image.fromarray(image).save(tmp_path / "corner.png")
    _, seen, _ = app.Viewer(str(folder)).look(str(tmp_path / "corner.png"), "attention, last layer")
    patches = seen.reshape(4, 96, 4, 96, 3).mean(axis=(1, 3))  # 384 pixels a side, 4 x 4 patches
    orange = patches[:, :, 0] - patches[:, :, 2]
    assert np.unravel_index(orange.argmax(), orange.shape) == corner
    assert np.partition(orange.ravel(), -2)[-2] < 1 < orange.max() / 50  # and nowhere else
    assert (
        seen == np.kron(seen[::24, ::24], np.ones((24, 24, 1), np.uint8))
    ).all()  # whole pixels of the model's image


def test_a_flat_map_is_told_in_words(model, photo):
    folder = model("even")
    net = HFViTForImageClassification.from_pretrained(folder)
    with torch.no_grad():  # every patch is attended to alike
        for layer in net.vit.layers:
            layer.attention.q_proj.weight.zero_()
            layer.attention.q_proj.bias.zero_()
    net.save_pretrained(folder)
    viewer = app.Viewer(str(folder))
    assert viewer.look(str(photo), "attention, last layer")[2] == app.FLAT
    assert app.Viewer(str(model("three"))).look(str(photo), "attention, last layer")[2] == app.COLOURS


# ----------------------------------------------------------------------------------------------------------------------
# In a browser


@pytest.fixture(scope="module")
def driver():
    """Chromium without a window."""
    selenium = pytest.importorskip("selenium", reason="needs the dependency group `browser`")
    found = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if None in found.values():
        pytest.skip(f"no {' and no '.join(name for name, path in found.items() if path is None)} on this machine")
    from selenium.webdriver.chrome.service import Service

    options = selenium.webdriver.ChromeOptions()
    options.binary_location = found["chromium"]
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1400,1100"):
        options.add_argument(f"--{flag}")
    driver = selenium.webdriver.Chrome(options=options, service=Service(found["chromedriver"]))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


class Visitor:
    """Somebody who opens the page, looks and clicks; `SHOTS` in the environment names a folder for what they see."""

    def __init__(self, driver, server):
        self.driver, self.server = driver, server
        driver.get(server.url)
        self.until(lambda: self.all("input[type=file]") and self.all("[data-testid=label]"))

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def until(self, met):
        """What `met()` gives, as soon as that is something."""
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.wait import WebDriverWait

        wait = WebDriverWait(self.driver, 30, ignored_exceptions=[StaleElementReferenceException])
        return wait.until(lambda _: met())

    def drop(self, file):
        self.all("input[type=file]")[0].send_keys(str(file))

    def sees(self):
        """The class that is named, and the address of its picture, once both are there; None before."""
        read = """
            const column = document.querySelector("[data-testid=label]").closest(".column");
            const said = column.querySelector("[data-testid=label-output-value]"), image = column.querySelector("img");
            const pending = [...column.querySelectorAll("[data-testid=status-tracker]")].some(
                tracker => !tracker.classList.contains("hide"));
            if (pending || !said || !said.innerText || !image || !image.complete || !image.naturalWidth) return null;
            return [said.innerText, image.src];
        """
        return self.driver.execute_script(read)

    def sees_another(self, before):
        """The same, as soon as the picture is none of those `before`."""
        return self.until(lambda: (now := self.sees()) and now[1] not in before and now)

    def picks(self, title):
        """Choose a method."""
        self.all("input[role=combobox]")[0].click()
        self.until(lambda: [each for each in self.all("[role=option]") if each.text.endswith(title)])[0].click()

    def shot(self, name):
        if "SHOTS" in os.environ:
            self.driver.save_screenshot(f"{os.environ['SHOTS']}/{name}.png")

    def is_content(self):
        assert "Traceback" not in self.driver.page_source
        assert "Traceback" not in self.server.said()


@pytest.mark.browser
def test_an_uploaded_image_is_named_and_every_choice_changes_the_picture(driver, served, demo_run, photo):
    page = Visitor(driver, served)
    page.shot("example")
    _, before = page.until(page.sees)
    page.drop(photo)
    said, first = page.sees_another([before])
    expected = own(demo_run / "model", photo)
    assert said == max(expected, key=expected.get)
    page.shot("answer")
    page.picks("Grad-CAM, predicted class")
    assert page.sees_another([before, first])[0] == said
    page.is_content()


@pytest.mark.browser
@pytest.mark.parametrize("name", ["photo.jpg", "empty.jpg", "cut.jpg"])
def test_a_broken_upload_is_told_once_on_the_page_and_no_answer_stays(name, driver, served, broken, photo):
    page = Visitor(driver, served)
    page.drop(broken / name)
    page.until(lambda: [each for each in page.all(".column") if SORRY in each.text])
    page.shot(f"broken-{name}")
    assert driver.page_source.count(SORRY) == 1
    assert page.sees() is None
    page.is_content()

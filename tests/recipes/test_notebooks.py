"""A run by a Python call is that of the command, and leaves the process as it was."""

import os
import signal
import sys

import forked
import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from runs import HOUSE, UNDRAWN, as_flags, recipe, results_of

from hf_vit import run_figures
from hf_vit.data import image_dataset
from hf_vit.training.log import RunLog


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)
FLAGS = {
    "config": "demo", "max_train_steps": 4, "shots": 20, "per_device_train_batch_size": 32, "eval_steps": 2,
    "config_overrides": "image_size=28,patch_size=14,hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=32",
}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder for PYTHONPATH that has the scripts of this checkout under the name that an installation gives them."""
    site = tmp_path_factory.mktemp("site")
    (site / "hf_vit_recipes").symlink_to(HOUSE / "recipes")
    return site


@pytest.fixture(scope="module", autouse=True)
def train(site):
    """`train`, without the pictures, which take most of the time of a tiny run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.setattr(run_figures, "draw_run", lambda *_: None)
        from hf_vit_recipes.notebooks import train

        yield train


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def called(train, home):
    return train(**FLAGS, output_dir=home / "called")


@pytest.fixture(autouse=True)
def process_is_as_before():
    """After every call, whatever its end: handlers, child processes and locks."""
    forked.server()
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # as a shell's background job is started
    state = lambda: ([signal.getsignal(number) for number in SIGNALS], psutil.Process().children(), sys.argv)
    before = state()
    yield
    assert state() == before
    signal.signal(signal.SIGINT, ignored)


@pytest.fixture
def at_step(monkeypatch):
    """at_step(number, act) calls `act` after that step of a run."""
    update = RunLog.update

    def patch(number, act):
        def acting(self, *numbers):
            update(self, *numbers)
            if self.run.state.step == number:
                act()

        monkeypatch.setattr(RunLog, "update", acting)

    return patch


def test_a_call_returns_the_results_of_the_command_and_a_finished_run_those_that_it_has(train, called, at_step, home):
    flags = as_flags(FLAGS)
    recipe("train.py", *flags, "--output_dir", "command", cwd=home, launcher=UNDRAWN)
    found, command = called.as_dict(), results_of(home / "command")
    assert found == results_of(home / "called")
    assert found.keys() == command.keys()
    for key in ("weights_sha256", "metrics", "intervals", "per_class"):
        assert found[key] == command[key]
    assert found["command"] == f"hf-vit train {' '.join(flags)} --output_dir={home / 'called'}"
    at_step(1, lambda: pytest.fail("it trains"))
    assert train(**FLAGS, output_dir=home / "called") == called


def test_an_interrupt_saves_and_the_same_call_goes_on_to_the_same_weights(train, called, at_step, monkeypatch, home):
    monkeypatch.setattr(image_dataset, "CACHE_BYTES", 0)  # so that there are decoding workers
    flags = {**FLAGS, "num_workers": 1, "output_dir": home / "stopped"}
    at_step(1, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGINT"):
        train(**flags)
    (saved,) = (home / "stopped" / "checkpoints").glob("step-*")
    assert saved.name == "step-000002"
    results = train(**flags)
    assert results.resumed_at_steps == [2]
    assert results.weights_sha256 == called.weights_sha256


def test_a_second_interrupt_leaves_at_once(train, at_step, tmp_path):
    at_step(2, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
    with pytest.raises(KeyboardInterrupt):
        train(**FLAGS, output_dir=tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_signal_to_end_saves_and_then_reaches_the_kernel(train, at_step, tmp_path):
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        at_step(1, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(KeyboardInterrupt, match="stopped by SIGTERM"):
            train(**FLAGS, output_dir=tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]
    assert (tmp_path / "checkpoints" / "step-000002").is_dir()


LAUNCHED = """
import sys
from accelerate import notebook_launcher
site, house, folder, port, flags = sys.argv[1:]
sys.path[:0] = site, house
from hf_vit import run_figures
from hf_vit_recipes.notebooks import train

run_figures.draw_run = lambda *_: None
notebook_launcher(lambda: train(**eval(flags), output_dir=folder), num_processes=2, use_port=port)
"""


def test_notebook_launcher_runs_it_in_several_processes(site, home):
    words = (site, HOUSE, home / "two", forked.free_port(), FLAGS | {"per_device_train_batch_size": 16})
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    forked.run([sys.executable, "-W", "ignore", "-c", LAUNCHED, *words], env=environment, check=True)
    assert results_of(home / "two")["command"].startswith("hf-vit train --num_processes 2 --config=demo")


def test_the_notebook_goes_from_photos_to_a_card_with_pictures(site, tmp_path, monkeypatch):
    notebook = nbformat.read(HOUSE / "recipes" / "fine_tune.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in code] == [[]] * len(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(HOUSE)]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in code for output in cell.outputs]
    printed = "".join(output.get("text", "") for output in outputs)
    shown = ["image/png" in output.get("data", {}) for output in outputs]
    card = tmp_path / "runs" / "example" / "model" / "README.md"
    drawn = list(card.parent.glob("figures/*.png"))
    assert len(drawn) > 5
    assert sum(shown) == 9 + len(drawn)
    assert all(f"figures/{picture.name}" in card.read_text() for picture in drawn)
    assert "accuracy" in printed
    assert "USER/photos" in printed

"""Claims about all scripts of recipes/."""

import logging
import runpy
import signal
import sys
import warnings
from pathlib import Path

import pytest


HOUSE = Path(__file__).parents[2]
SCRIPTS = [file for file in sorted(HOUSE.glob("recipes/**/*.py")) if '__name__ == "__main__"' in file.read_text()]


@pytest.fixture
def as_before(monkeypatch):
    """What a script changes in its process is put back."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    logger = logging.getLogger("huggingface_hub.utils._http")
    monkeypatch.setattr(logger, "filters", list(logger.filters))
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_help_is_answered_and_nothing_else_done(script, as_before, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {script.name} ")
    assert list(tmp_path.iterdir()) == []


def test_a_script_is_not_called_as_a_library_is():
    """A script's folder comes first on the path of those beside it, and would hide the library."""
    libraries = {"accelerate", "datasets", "evaluate", "torch", "transformers", *sys.stdlib_module_names}
    assert {script.stem for script in SCRIPTS} & libraries == set()

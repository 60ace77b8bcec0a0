"""Claims about all scripts of recipes/."""

import ast
import logging
import runpy
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from hf_vit.model.attention_maps import MAP_METHODS


HOUSE = Path(__file__).parents[2]
# cli.py calls the others: test_cli.py. minimal.py, an example for readers, imports everything at its top.
FILES = {file for file in HOUSE.glob("recipes/*.py") if file.name not in ("cli.py", "minimal.py")}
SCRIPTS = [file for file in sorted(FILES) if '__name__ == "__main__"' in file.read_text()]


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


HEAVY = [
    "torch",
    "transformers",
    "datasets",
    "accelerate",
    "huggingface_hub",
    "numpy",
    "PIL",
    "matplotlib",
    "gradio",
    "onnx",
]
ALONE = """
import os, runpy, sys
sys.modules |= dict.fromkeys({heavy!r})  # an import of one of these fails
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
@pytest.mark.parametrize("flag", ["--help", "--no-such-flag"])
def test_flags_are_answered_before_the_imports_that_take_seconds(script, flag, tmp_path):
    command = [sys.executable, "-c", ALONE.format(heavy=HEAVY), str(script), flag]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == (0 if flag == "--help" else 2), done.stderr
    if flag == "--help":
        text = ast.get_docstring(ast.parse(script.read_text()), clean=False).strip()
        assert text in done.stdout
        assert (
            text.count(f"recipes/{script.relative_to(HOUSE / 'recipes')} ") + text.count(f"{script.name}\n") >= 2
        )  # examples
    else:
        assert "--no-such-flag" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_gpu_tests_are_found_where_the_extras_export_and_app_are_not_installed(tmp_path):
    hidden = ("onnx", "onnxruntime", "onnxscript", "onnx_ir", "gradio", "selenium")
    words = ["-m", "gpu", "--collect-only", "-p", "no:cacheprovider", "--rootdir", str(HOUSE), str(HOUSE / "tests")]
    program = f"import sys, pytest; sys.modules |= dict.fromkeys({hidden!r}); sys.exit(pytest.main({words!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=HOUSE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_gpu" in done.stdout


def test_visualize_offers_the_methods_that_there_are():
    import visualize

    assert ("raw", *visualize.METHODS) == MAP_METHODS


def test_a_script_is_not_called_as_a_library_is():
    """A script's folder comes first on the path of those beside it, and would hide the library."""
    libraries = {"accelerate", "datasets", "evaluate", "torch", "transformers", *sys.stdlib_module_names}
    assert {script.stem for script in SCRIPTS} & libraries == set()

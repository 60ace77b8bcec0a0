"""Claims about all scripts of recipes/."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest


HOUSE = Path(__file__).parents[2]
# cli.py calls the others: test_cli.py. minimal.py, an example for readers, imports everything at its top.
FILES = {file for file in HOUSE.glob("recipes/*.py") if file.name not in ("cli.py", "minimal.py")}
SCRIPTS = [file for file in sorted(FILES) if '__name__ == "__main__"' in file.read_text()]


ALONE = """
import os, runpy, sys
heavy = "torch transformers datasets accelerate huggingface_hub numpy PIL matplotlib gradio onnx"
sys.modules |= dict.fromkeys(heavy.split())  # an import of one of these fails
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
@pytest.mark.parametrize("flag", ["--help", "--no-such-flag"])
def test_flags_are_answered_before_the_imports_that_take_seconds(script, flag, tmp_path):
    command = [sys.executable, "-c", ALONE, script, flag]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    if flag == "--help":
        text = ast.get_docstring(ast.parse(script.read_text()), clean=False).strip()
        assert text in done.stdout
        assert done.returncode == 0
    else:
        assert "--no-such-flag" in done.stderr
        assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_a_script_is_not_called_as_a_library_is():
    """A script's folder comes first on the path of those beside it, and would hide the library."""
    libraries = {"accelerate", "datasets", "evaluate", "torch", "transformers", *sys.stdlib_module_names}
    assert {script.stem for script in SCRIPTS} & libraries == set()

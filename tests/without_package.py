"""Python processes that know nothing of this package."""

import importlib.metadata
import os
import subprocess
import sys

from packaging.requirements import Requirement


BLOCK_OUR_PACKAGE = """
import sys

class NoPackage:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_vit":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, NoPackage())
"""


def in_clean_python(script, *names, cwd, **environment):
    """What a script prints in a Python that finds these distributions and what they require, and no more."""
    site = cwd / "clean"
    site.mkdir()
    wanted, held = list(names), set()
    while wanted:
        distribution = importlib.metadata.distribution(wanted.pop())
        if distribution.name in held:
            continue
        held.add(distribution.name)
        needs = [Requirement(text) for text in distribution.requires or ()]
        wanted += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    kept = {name: os.environ[name] for name in ("PATH", "ONEDNN_MAX_CPU_ISA")}  # its products round as this process's
    environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(site), **environment}
    line = [sys.executable, "-S", "-W", "ignore", "-c", script]
    pipes = dict(stdin=subprocess.DEVNULL, capture_output=True, text=True)
    done = subprocess.run(line, cwd=cwd, env=environment, timeout=120, **pipes)
    assert done.returncode == 0, done.stderr
    return done.stdout

"""What a script needs to read its command line, before the imports that take seconds."""

import importlib
import os
import signal
import sys
from importlib.util import find_spec
from types import ModuleType


def answer_signals():
    """A signal before training has begun ends the process at once, with the exit code of a run that can continue."""

    def leave(*_):
        os.write(2, b"stopped before anything was begun\n")
        os._exit(75)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, leave)


def import_light(name: str) -> ModuleType:
    """A module of hf_vit that needs neither torch nor transformers, which `import hf_vit` itself imports.

    Until the package is imported, an empty one stands in for it, which makes room again.
    """
    if "hf_vit" in sys.modules:
        return importlib.import_module(name)
    found = find_spec("hf_vit")
    if found is None:
        sys.exit(
            f"error: hf_vit is not installed for {sys.executable}: activate its environment (. .venv/bin/activate), or set it up as "
            "README.md says"
        )
    package = ModuleType("hf_vit")
    package.__path__ = found.submodule_search_locations
    sys.modules["hf_vit"] = package
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {error.name} cannot be imported, which the recipes need: pip install -e '.[recipes]' ({error})"
        )
    finally:
        del sys.modules["hf_vit"]


Parser = import_light("hf_vit.system.command_line").Parser

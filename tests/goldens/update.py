"""Rewrite the goldens: `python tests/goldens/update.py`. A deliberate change is then one diff of JSON, to be reviewed."""

import json
import sys
import tempfile
from pathlib import Path


HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    import conftest  # noqa: F401, sets the environment of the tests
    from observed import observe

    with tempfile.TemporaryDirectory() as home:
        found = observe(Path(home))
    (HERE / "goldens.json").write_text(json.dumps(found, indent=1) + "\n")

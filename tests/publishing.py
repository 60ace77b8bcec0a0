"""Helpers of tests that publish: the command, and a process that talks to the loopback Hub."""

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants, set_client_factory
from huggingface_hub.utils import _http
from loopback_hub import TOKEN
from runs import words_of

from hf_vit.hub.retry import set_http_timeout
from hf_vit.system.errors import UserError


HOUSE = Path(__file__).parents[1]
sys.path.insert(0, str(HOUSE / "recipes"))  # publish.py takes it out again
import publish  # noqa: E402


FOR_EVER = 1_000_000


def command(*flags, cwd, **environment):
    """Run recipes/publish.py as a user would."""
    line = [sys.executable, str(HOUSE / "recipes" / "publish.py"), *map(str, flags)]
    return subprocess.run(
        line, capture_output=True, text=True, cwd=cwd, timeout=120, env={**os.environ, **environment}
    )


def at(hub, home):
    """The environment of a process whose Hub this is."""
    return dict(
        HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN, HF_HOME=str(home), HF_HUB_DISABLE_XET="1", HF_HUB_OFFLINE="0", TRANSFORMERS_OFFLINE="0"
    )  # fmt: skip


@contextmanager
def talking_to(url, home):
    """The Hub client of this process talks to `url`, as in the command; what it would wait is written down, not waited."""
    waits = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):  # put back what set_timeout may set
            patch.setattr(constants, name, getattr(constants, name))
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setattr(time, "sleep", waits.append)
        set_client_factory(_http.default_client_factory)
        set_http_timeout(60)
        yield waits
    set_client_factory(_http.default_client_factory)


def content(folder):
    """Every file below a folder, by name."""
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@contextmanager
def one_line(match):
    """What is done here raises a UserError that names this: one line, without traceback and token."""
    with pytest.raises(UserError, match=match) as caught:
        yield caught
    assert not re.search(f"\n|Traceback|{TOKEN}", str(caught.value))


def recipe(*parts):
    """The command in this process; its errors are raised."""
    publish.main(publish.parse_args(words_of(*parts)))

"""Claims about a push that meets a fault: one that passes is got over, one that lasts ends in one line."""

import http.server
import re
import threading
import time
from pathlib import Path

import pytest
from publishing import FOR_EVER, content, one_line, recipe, talking_to

from hf_vit.hub import push
from hf_vit.hub.push import push_model
from hf_vit.hub.retry import set_http_timeout
from hf_vit.system.files import checksum


STAGES = {
    "create": ("POST", "/api/repos/create"),
    "inspect": ("GET", r"/api/models/alice/model$"),
    "validate": ("POST", "/api/validate-yaml"),
    "preupload": ("POST", "/preupload/"),
    "batch": ("POST", "/objects/batch"),
    "upload": ("PUT", "/storage/"),
    "commit": ("POST", "/commit/"),
    "tag": ("POST", "/tag/"),
    "download": ("GET", "/resolve/.*/model.safetensors"),
}
PASSING = {
    "a pause that is asked for": ("commit", dict(status=429, headers={"Retry-After": "7"})),
    "an answer that is lost": ("commit", dict(status=504, done=True)),
    "silence": ("upload", dict(hang=60)),
    "a cut upload": ("upload", dict(cut_after=1000)),
    "a changed byte": ("download", dict(corrupt=True)),
    **{f"{stage} fails twice": (stage, dict(status=500, times=2)) for stage in STAGES},
}


@pytest.mark.parametrize("case", PASSING)
def test_after_a_fault_that_passes_the_push_is_one_commit_of_the_same_bytes(case, folder, hub):
    stage, how = PASSING[case]
    set_http_timeout(0.5 if "hang" in how else 60)
    fault, began = hub.fault(*STAGES[stage], **how), time.monotonic()
    _, is_new = push_model(folder, "alice/model", log=lambda _: None)
    assert (fault.times, is_new) == (0, True)
    assert len(hub.history("alice/model")) == 2
    assert hub.files("alice/model").items() >= content(folder).items()
    assert time.monotonic() - began < 50
    if case == "a pause that is asked for":
        assert hub.waits == [7]


LASTING = [  # stage, what goes wrong there, and what the one line names
    *((stage, dict(status=401), "hf auth login") for stage in ("create", "preupload", "commit")),
    *((stage, dict(status=500), "500") for stage in ("create", "upload", "commit")),
    ("create", dict(status=429, headers={"Retry-After": "86400"}), "429"),
    ("download", dict(status=500), "alice/model at commit"),
    ("download", dict(corrupt=True), r"alice/model at commit.*model\.safetensors"),
]


@pytest.mark.parametrize(("stage", "how", "named"), LASTING)
def test_a_fault_that_lasts_ends_in_one_line_and_commits_nothing(stage, how, named, folder, hub):
    hub.fault(*STAGES[stage], **how, times=FOR_EVER)
    with one_line(named) as error:
        push_model(folder, "alice/model", log=lambda _: None)
    assert max(hub.waits, default=0) <= 300
    if stage == "download":
        assert hub.history("alice/model")[-1][:12] in str(error.value)
    else:
        assert len(hub.history("alice/model")) == 1 if stage != "create" else hub.repos == {}


def test_the_same_push_again_sends_only_what_is_missing(folder, hub):
    sha256 = checksum(folder / "model.safetensors")
    fault = hub.fault("PUT", sha256, cut_after=1000, times=FOR_EVER)
    with one_line("same command"):
        push_model(folder, "alice/model", log=lambda _: None)
    fault.times = 0
    hub.uploaded.clear()
    push_model(folder, "alice/model")
    assert hub.uploaded == [(sha256, (folder / "model.safetensors").stat().st_size)]


def test_a_pull_request_whose_answer_is_lost_is_not_opened_twice(folder, hub):
    hub.put("alice/model", {"README.md": b"Mine."})
    hub.fault("POST", "/commit/main", status=504, done=True)
    with one_line("504"):
        push_model(folder, "alice/model", create_pr=True)
    assert [*hub.repos["alice/model"].refs] == ["main", "refs/pr/1"]


@pytest.mark.parametrize("status", [409, 412])
def test_a_commit_that_comes_in_between_is_kept_and_the_push_goes_on(status, folder, hub, monkeypatch):
    hub.put("alice/model", {"README.md": b"Old words.\n"})
    stale, theirs = push.stale_files, [{"README.md": b"New words.\n", "notes.txt": b"theirs"}]

    def stale_and_commit(*arguments):
        if theirs:
            hub.put("alice/model", theirs.pop())
        return stale(*arguments)

    monkeypatch.setattr(push, "stale_files", stale_and_commit)
    if status == 409:  # as answered by a Hub that is still at work on theirs; the loopback one says 412
        hub.fault(*STAGES["commit"], status=409)
    push_model(folder, "alice/model", log=lambda _: None)
    assert len(hub.history("alice/model")) == 3
    files = hub.files("alice/model")
    assert files["notes.txt"] == b"theirs"
    assert files["README.md"].endswith(b"---\nNew words.\n")


def test_a_push_without_a_token_with_a_wrong_one_or_to_no_repository_is_refused(runs, hub, monkeypatch):
    for name in ("model", "alice/mo del", "alice/model/more"):
        with pytest.raises(ValueError, match=re.escape(name)):
            recipe(runs["native"], "--repo", Path(name), "--push")
    monkeypatch.delenv("HF_TOKEN")
    with one_line("hf auth login"):
        recipe(runs["native"], "--repo alice/model --push")
    assert hub.requests == []
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with one_line("hf auth login") as error:
        recipe(runs["native"], "--repo alice/model --push")
    assert "hf_wrong" not in str(error.value)
    assert hub.repos == {}


def test_a_foreign_namespace_and_a_repository_with_an_adapter_are_left_alone(folder, hub):
    """Beside an adapter, transformers would load no whole model."""
    hub.put("bob/model", {"notes.txt": b"his"})
    hub.put("alice/model", {"adapter_config.json": b"{}"})
    for repo, named in (("bob/model", "your own name"), ("alice/model", "adapter_config.json")):
        with one_line(named):
            push_model(folder, repo)
        assert len(hub.history(repo)) == 1
    assert (hub.uploaded, hub.waits) == ([], [])


class NoHub(http.server.BaseHTTPRequestHandler):
    """A site that answers whatever is posted with a page."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n<html>Welcome to our network</html>")


def test_an_endpoint_that_is_no_hub_or_where_nobody_listens_is_named(folder, tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), NoHub) as server:
        threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with talking_to(url, tmp_path / "home"), one_line(f"HF_ENDPOINT.*{url}"):
            push_model(folder, "alice/model")
        server.shutdown()
    with talking_to(url, tmp_path / "home") as waits, one_line(url):
        push_model(folder, "alice/model", log=lambda _: None)
    assert waits == [1, 2, 4, 8]

"""A small Hugging Face Hub on loopback, for tests that drive the real huggingface_hub client.

    with Hub() as hub:
        hub.put("alice/model", {"config.json": b"{}"})
        hub.fault("PUT", "/storage/", status=500, times=2)
        subprocess.run(command, env={**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, ...})

The client reads HF_ENDPOINT when it is imported, so it runs in a process of its own, with HF_HUB_DISABLE_XET=1 and a
fresh HF_HOME. Status codes, headers and messages are those of huggingface.co, as far as the client or the docs tell
them. There are models and Spaces, and no Xet storage: large files go by git-lfs, in one piece or in parts. A Space is
named as its address is, "spaces/alice/page"; nothing of it is built or run.
"""

import base64
import hashlib
import json
import re
import secrets
import socket
import sys
import threading
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

import yaml


LFS_SUFFIXES = (".safetensors", ".onnx", ".data", ".pt2", ".bin", ".png")
LFS_BYTES = 1_000_000  # larger files go to LFS whatever their name
MOST_BYTES = 1 << 30  # of one request
IDLE_SECONDS = 60  # after which a silent connection is dropped
DATE = "2026-01-01T00:00:00.000Z"  # of every repository

# huggingface.co/docs/hub/repositories-licenses
LICENSES = re.findall(
    r"\S+",
    """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0
    lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl
    open-mdw openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license
    fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 grok2-community gemma unknown
    other
    """,
)

# huggingface/huggingface.js, packages/tasks/src/pipelines.ts
TASKS = re.findall(
    r"\S+",
    """
    biology text-classification token-classification table-question-answering question-answering
    zero-shot-classification translation summarization feature-extraction text-generation text2text-generation
    fill-mask sentence-similarity text-to-speech text-to-audio automatic-speech-recognition audio-to-audio
    audio-classification audio-text-to-text voice-activity-detection depth-estimation image-classification
    object-detection image-segmentation text-to-image image-to-text image-to-image image-to-video
    unconditional-image-generation video-classification reinforcement-learning robotics tabular-classification
    tabular-regression tabular-to-text table-to-text multiple-choice text-ranking text-retrieval
    time-series-forecasting text-to-video image-text-to-text visual-question-answering document-question-answering
    zero-shot-image-classification graph-ml mask-generation zero-shot-object-detection text-to-3d image-to-3d
    image-feature-extraction video-text-to-text keypoint-detection visual-document-retrieval any-to-any other
    """,
)

FRONT_MATTER = re.compile(r"^(\s*---(?:\r\n|\r|\n))([\S\s]*?)((?:\r\n|\r|\n)---[ \t]*(\r\n|\n|$))")
REPO_ID = re.compile(r"(\b[\w.-]+\b/)?\b[\w.-]{1,96}\b", re.ASCII)  # as huggingface_hub's validator has it
DATASET_TYPE = re.compile(r"(?:[\w-]+/)?[\w.-]+", re.ASCII)
SDKS = ("gradio", "docker", "static")
COLORS = ("red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray")
KINDS = {str: "a string", list: "an array", dict: "of type object", (int, float, str): "a number or a string"}


# --- model cards -----------------------------------------------------------------------------------------------------


def check_card(text: str) -> tuple[list[str], list[str]]:
    """What the Hub says of a model card: (errors, warnings).

    The rules are those of huggingface/hub-docs modelcard.md and of the messages on model pages. As there, a card
    without metadata or with an unknown pipeline_tag is warned about, and all else that is wrong is an error.
    """
    errors, warnings = [], []
    front_matter = FRONT_MATTER.match(text)
    try:
        card = yaml.safe_load(front_matter[2]) if front_matter else None
    except yaml.YAMLError as error:
        return [f"bad YAML: {error}"], []
    if card is None:
        return [], ["empty or missing yaml metadata in repo card"]
    if not isinstance(card, dict):
        return ["the metadata must be of type object"], []

    if "license" not in card:
        warnings.append('"license" is missing')
    for name, license_id in _values(card, "license"):
        if license_id not in LICENSES:
            errors.append(f'"{name}" must be one of [{", ".join(LICENSES)}, array]')
        if license_id == "other":
            for key in ("license_name", "license_link"):
                _member(errors, card, key, "", str)
    for name, language in _values(card, "language"):
        if not re.fullmatch(r"[a-z]{2,3}|code|multilingual", str(language)):
            errors.append(
                f'"{name}" with value "{language}" is not valid. It must be an ISO 639-1, 639-2 or 639-3 code '
                '(two/three letters), or a special value like "code", "multilingual".'
            )
    for name, model in _values(card, "base_model"):
        if not isinstance(model, str) or not REPO_ID.fullmatch(model):
            errors.append(f'"{name}" with value "{model}" is not valid. Use a model id from https://hf.co/models.')
    for key in ("datasets", "tags", "metrics"):
        for name, value in _items(errors, card, key, "", str):
            if key == "datasets" and not REPO_ID.fullmatch(value):
                errors.append(
                    f'"{name}" with value "{value}" is not valid. '
                    "If possible, use a dataset id from https://hf.co/datasets."
                )
    for key in ("library_name", "pipeline_tag", "license_name", "license_link"):
        if key in card and not (card.get("license") == "other" and key.startswith("license")):
            _member(errors, card, key, "", str)
    if isinstance(card.get("pipeline_tag"), str) and card["pipeline_tag"] not in TASKS:
        warnings.append(f'The pipeline tag "{card["pipeline_tag"]}" is not in the official list: {", ".join(TASKS)}')
    _check_model_index(errors, card)
    return errors, warnings


def check_space(text: str) -> list[str]:
    """What the Hub refuses in the README.md of a Space; the rules of huggingface/hub-docs spaces-config-reference.md."""
    front_matter = FRONT_MATTER.match(text)
    try:
        card = yaml.safe_load(front_matter[2]) if front_matter else None
    except yaml.YAMLError as error:
        return [f"bad YAML: {error}"]
    if not isinstance(card, dict):
        return ["Missing configuration in README"]
    errors = []
    if card.get("sdk") not in SDKS:
        errors.append(f'"sdk" must be one of [{", ".join(SDKS)}]')
    for key in ("title", "sdk_version", "python_version", "app_file"):
        if key in card:
            _member(errors, card, key, "", str)
    for key in ("colorFrom", "colorTo"):
        if card.get(key, COLORS[0]) not in COLORS:
            errors.append(f'"{key}" must be one of [{", ".join(COLORS)}]')
    for name, license_id in _values(card, "license"):
        if license_id not in LICENSES:
            errors.append(f'"{name}" must be one of [{", ".join(LICENSES)}, array]')
    for key in ("models", "datasets"):
        for name, value in _items(errors, card, key, "", str):
            if not REPO_ID.fullmatch(value):
                errors.append(f'"{name}" with value "{value}" is not valid. Use an id from https://hf.co/{key}.')
    return errors


def _check_model_index(errors: list[str], card: dict):
    """Each model has a name and results; each result a task, a data set and metrics, with their required fields."""
    for model_name, model in _items(errors, card, "model-index", "", dict):
        _member(errors, model, "name", model_name, str)
        for name, result in _items(errors, model, "results", model_name, dict, required=True):
            task = _member(errors, result, "task", name, dict)
            if task is not None:
                _member(errors, task, "type", f"{name}.task", str)
            dataset = _member(errors, result, "dataset", name, dict)
            if dataset is not None:
                _member(errors, dataset, "name", f"{name}.dataset", str)
                dataset_type = _member(errors, dataset, "type", f"{name}.dataset", str)
                if dataset_type is not None and not DATASET_TYPE.fullmatch(dataset_type):
                    errors.append(
                        f'"{name}.dataset.type" with value "{dataset_type}" fails to match the required pattern: '
                        r"/^(?:[\w-]+\/)?[\w-.]+$/"
                    )
            for metric_name, metric in _items(errors, result, "metrics", name, dict, required=True):
                _member(errors, metric, "type", metric_name, str)
                _member(errors, metric, "value", metric_name, (int, float, str))


def _values(card: dict, key: str) -> list[tuple[str, object]]:
    """A field that may be one value or a list: the name and value of each."""
    if key not in card:
        return []
    value = card[key]
    return [(f"{key}[{i}]", item) for i, item in enumerate(value)] if isinstance(value, list) else [(key, value)]


def _member(errors: list[str], parent: dict, key: str, where: str, kind):
    """parent[key], or None and an error where it is missing or not of its kind."""
    name = f"{where}.{key}" if where else key
    if key not in parent:
        errors.append(f'"{name}" is required')
    elif isinstance(parent[key], bool) or not isinstance(parent[key], kind):
        errors.append(f'"{name}" must be {KINDS[kind]}')
    else:
        return parent[key]
    return None


def _items(errors: list[str], parent: dict, key: str, where: str, kind, required: bool = False) -> list[tuple]:
    """Name and value of each item of the list parent[key] that is of its kind; an error for each that is not."""
    if key not in parent and not required:
        return []
    items = []
    for i, item in enumerate(_member(errors, parent, key, where, list) or []):
        name = f"{where}.{key}[{i}]" if where else f"{key}[{i}]"
        if isinstance(item, kind):
            items.append((name, item))
        else:
            errors.append(f'"{name}" must be {KINDS[kind]}')
    return items


# --- repositories ----------------------------------------------------------------------------------------------------


class Refusal(Exception):
    """An answer that is an error: status, message and the X-Error-Code that the client turns into its exception."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers):
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers


@dataclass
class Repo:
    """A repository. branches and pull_requests ("refs/pr/1") map a name to its commits, oldest first."""

    private: bool = False
    branches: dict[str, list[str]] = field(default_factory=lambda: {"main": []})
    pull_requests: dict[str, list[str]] = field(default_factory=dict)
    tags: dict[str, list[str]] = field(default_factory=dict)  # each of one commit
    trees: dict[str, dict[str, bytes]] = field(default_factory=dict)  # commit -> path -> content
    messages: dict[str, str] = field(default_factory=dict)  # commit -> summary, or summary, blank line, description

    def commits(self, revision: str) -> list[str]:
        """The commits of a branch or pull request, oldest first; of a commit, itself."""
        refs = {**self.tags, **self.branches, **self.pull_requests}
        if revision in refs:
            return refs[revision]
        if revision in self.trees:
            return [revision]
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def head(self, revision: str) -> str:
        return self.commits(revision)[-1]

    def add(self, commits: list[str], tree: dict[str, bytes], message: str) -> str:
        """Append a commit with these files to a branch's commits; returns its oid."""
        contents = sorted((path, hashlib.sha256(content).hexdigest()) for path, content in tree.items())
        oid = hashlib.sha1(repr((len(self.trees), commits[-1:], message, contents)).encode()).hexdigest()
        self.trees[oid], self.messages[oid] = tree, message
        commits.append(oid)
        return oid


def is_lfs(path: str, size: int) -> bool:
    """Whether the Hub keeps this file in LFS; empty files never."""
    return size > 0 and (path.endswith(LFS_SUFFIXES) or size > LFS_BYTES)


def blob_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def file_entry(path: str, content: bytes) -> dict:
    """A file as /tree and /paths-info list it; the git oid of an LFS file is that of its pointer."""
    if not is_lfs(path, len(content)):
        return {"type": "file", "oid": blob_oid(content), "size": len(content), "path": path}
    sha256 = hashlib.sha256(content).hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(content)}\n".encode()
    lfs = {"oid": sha256, "size": len(content), "pointerSize": len(pointer)}
    return {"type": "file", "oid": blob_oid(pointer), "size": len(content), "path": path, "lfs": lfs}


def list_tree(tree: dict[str, bytes], recursive: bool) -> list[dict]:
    """The files of a tree and the folders they lie in; without recursive, those of the top only."""
    folders = {str(parent) for path in tree for parent in PurePosixPath(path).parents if str(parent) not in (".", "/")}
    entries = [file_entry(path, content) for path, content in tree.items()]
    for folder in folders:
        inside = sorted((path, blob_oid(content)) for path, content in tree.items() if path.startswith(folder + "/"))
        oid = hashlib.sha1(repr(inside).encode()).hexdigest()
        entries.append({"type": "directory", "oid": oid, "size": 0, "path": folder})
    return sorted((e for e in entries if recursive or "/" not in e["path"]), key=lambda entry: entry["path"])


# --- the server ------------------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """query has the last value of each name; signed_in: with the user's token."""

    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    signed_in: bool

    def json(self) -> dict:
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise Refusal(400, f"The body is not JSON: {error}") from None


class Reply(NamedTuple):
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = {}


def json_reply(data, status: int = 200, **headers) -> Reply:
    return Reply(json.dumps(data, default=str).encode(), status, {"Content-Type": "application/json", **headers})


def refusal_reply(refusal: Refusal) -> Reply:
    headers = {"X-Error-Message": refusal.message, **refusal.headers}
    if refusal.code:
        headers["X-Error-Code"] = refusal.code
    return json_reply({"error": refusal.message}, refusal.status, **headers)


class Upload(NamedTuple):
    """One PUT that came to the storage: the sha256 of the object it is, or is a part of, and the bytes that came."""

    sha256: str
    received: int


@dataclass
class Fault:
    """See Hub.fault; times and after count down."""

    method: str
    pattern: str
    times: int
    after: int
    status: int | None
    headers: dict[str, str]
    message: str
    cut_after: int | None
    hang: float | None
    corrupt: bool
    done: bool


class Hub:
    """with Hub() as hub: a Hub at hub.url, whose one user may write to the namespaces `user` and `organisations`.

    Args:
        user, token: the one account; requests with another token are refused with 401.
        organisations: further namespaces the user may write to.
        chunk_size: LFS files with more bytes than this are uploaded in parts of it; None: in one piece.

    Attributes:
        url: for HF_ENDPOINT.
        repos: by "namespace/name", or "spaces/namespace/name".
        requests: (method, path with its query) as they came, never headers.
        uploaded: every PUT to the storage, cut and refused ones too.
        validated: the texts that came to /api/validate-yaml.
    """

    def __init__(
        self,
        user: str = "alice",
        token: str = "hf_loopback_token",
        organisations: tuple[str, ...] = ("team",),
        chunk_size: int | None = None,
    ):
        self.user, self.token, self.organisations, self.chunk_size = user, token, organisations, chunk_size
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str]] = []
        self.uploaded: list[Upload] = []
        self.validated: list[str] = []
        self._objects: dict[str, bytes] = {}  # LFS storage, by sha256
        self._tickets: dict[str, dict] = {}  # what an upload URL allows: oid, size and the parts that came
        self._faults: list[Fault] = []
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._connections: set[socket.socket] = set()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._closed.set()
        self._server.shutdown()
        self._thread.join(timeout=10)
        with self._lock:
            for connection in self._connections:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:  # the client was faster
                    continue
        self._server.server_close()

    # what a test calls

    def fault(
        self,
        method: str,
        pattern: str,
        *,
        times: int = 1,
        after: int = 0,
        status: int | None = None,
        headers: dict[str, str] | None = None,
        message: str = "",
        cut_after: int | None = None,
        hang: float | None = None,
        corrupt: bool = False,
        done: bool = False,
    ) -> Fault:
        """Let the next `times` requests go wrong, after `after` that pass, in one of four ways.

        Args:
            method: a regex for the whole method: "PUT", "HEAD|GET".
            pattern: a regex searched in the path with its query.
            status: answer with this status, `headers` and `message`; nothing is done, or with `done` all of it.
            cut_after: close the connection when this many bytes of the body have come; nothing is done.
            hang: stay silent for this many seconds, or until the hub is closed, and then close the connection.
            corrupt: answer a GET of /resolve/ with one byte of the body changed.
        """
        if [status is not None, cut_after is not None, hang is not None, corrupt].count(True) != 1:
            raise ValueError("A fault has exactly one of status, cut_after, hang and corrupt.")
        fault = Fault(method, pattern, times, after, status, headers or {}, message, cut_after, hang, corrupt, done)
        with self._lock:
            self._faults.append(fault)
        return fault

    def put(self, repo: str, files: dict[str, bytes], private: bool = False, message: str = "Seed") -> str:
        """Add or replace files on main with a commit, in a new repository where there is none; any path is taken."""
        with self._lock:
            if repo not in self.repos:
                self.repos[repo] = Repo(private=private)
            found = self.repos[repo]
            main = found.branches["main"]
            for path, content in files.items():
                if is_lfs(path, len(content)):
                    self._objects[hashlib.sha256(content).hexdigest()] = content
            return found.add(main, {**(found.trees[main[-1]] if main else {}), **files}, message)

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        with self._lock:
            return dict(self.repos[repo].trees[self.repos[repo].head(revision)])

    def history(self, repo: str, revision: str = "main") -> list[str]:
        """Commits of a branch or pull request, oldest first."""
        with self._lock:
            return list(self.repos[repo].commits(revision))

    # how a request is answered

    def receive(self, method: str, path: str) -> Fault | None:
        """Write down a request; returns the fault that it meets."""
        with self._lock:
            self.requests.append((method, path))
            for fault in self._faults:
                if fault.times and re.fullmatch(fault.method, method) and re.search(fault.pattern, path):
                    if not fault.after:
                        fault.times -= 1
                        return fault
                    fault.after -= 1
        return None

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Reply:
        """The reply to a request; all routes run one after the other, so a commit is there whole or not at all."""
        parts = urlsplit(target)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        try:
            if headers.get("Authorization") not in (None, f"Bearer {self.token}"):
                raise Refusal(401, "Invalid credentials in Authorization header")
            request = Request(query, headers, body, "Authorization" in headers)
            for route_method, pattern, route in ROUTES:
                match = re.fullmatch(pattern, parts.path)
                if match and route_method == ("GET" if method == "HEAD" else method):
                    named = {name: unquote(value) for name, value in match.groupdict(default="").items()}
                    with self._lock:
                        return route(self, request, **named)
            raise Refusal(404, f"Not found: {method} {parts.path}")
        except Refusal as refusal:
            return refusal_reply(refusal)

    def _owns(self, repo: str) -> bool:
        return repo.removeprefix("spaces/").split("/")[0] in (self.user, *self.organisations)

    def _readable(self, request: Request, repo: str) -> Repo:
        """The repository; a private one is, for others, not there."""
        found = self.repos.get(repo)
        if found and (not found.private or (request.signed_in and self._owns(repo))):
            return found
        if request.signed_in:
            raise Refusal(404, "Repository not found", "RepoNotFound")
        raise Refusal(401, "Invalid username or password.", "RepoNotFound")

    def _signed_in(self, request: Request):
        if not request.signed_in:
            raise Refusal(401, "Invalid username or password.")

    def _writable(self, request: Request, repo: str) -> Repo:
        found = self._readable(request, repo)
        self._signed_in(request)
        if not self._owns(repo):
            raise Refusal(403, f"You don't have the rights to write to {repo}")
        return found

    def _proposable(self, request: Request, repo: str) -> Repo:
        """The repository to write to or, with ?create_pr=1, to read: anybody may open a pull request."""
        if request.query.get("create_pr") == "1":
            self._signed_in(request)
            return self._readable(request, repo)
        return self._writable(request, repo)

    # account and repositories

    def whoami(self, request: Request) -> Reply:
        self._signed_in(request)
        organisations = [{"type": "org", "name": name, "roleInOrg": "admin"} for name in self.organisations]
        access = {"type": "access_token", "accessToken": {"displayName": "loopback", "role": "write"}}
        return json_reply(
            {"type": "user", "name": self.user, "fullname": self.user, "orgs": organisations, "auth": access}
        )

    def create(self, request: Request) -> Reply:
        self._signed_in(request)
        wanted = request.json()
        kind = wanted.get("type") or "model"
        if kind not in ("model", "space"):
            raise Refusal(400, f"This hub keeps models and Spaces, not a {kind}")
        if kind == "space" and wanted.get("sdk") not in SDKS:
            raise Refusal(400, f'"sdk" must be one of [{", ".join(SDKS)}]')
        namespace = wanted.get("organization") or self.user
        repo = f"{'spaces/' if kind == 'space' else ''}{namespace}/{wanted['name']}"
        url = f"{self.url}/{repo}"
        if not self._owns(repo):
            raise Refusal(403, f'You don\'t have the rights to create a {kind} under the namespace "{namespace}"')
        if repo in self.repos:
            error = f"You already created this {kind} repo"
            return json_reply({"error": error, "url": url}, 409, **{"X-Error-Message": error})
        private = wanted.get("private") or wanted.get("visibility") == "private"
        attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES)
        self.put(repo, {".gitattributes": attributes.encode()}, private=bool(private), message="initial commit")
        return json_reply({"url": url, "name": repo})

    def info(self, request: Request, repo: str, rev: str = "") -> Reply:
        found = self._readable(request, repo)
        oid = found.head(rev or "main")
        siblings = []
        for path, content in sorted(found.trees[oid].items()):
            entry = file_entry(path, content)
            sibling = {"rfilename": entry["path"]}
            if "blobs" in request.query:
                sibling |= {"size": entry["size"], "blobId": entry["oid"]}
                if "lfs" in entry:
                    lfs = entry["lfs"]
                    sibling["lfs"] = {"sha256": lfs["oid"], "size": lfs["size"], "pointerSize": lfs["pointerSize"]}
            siblings.append(sibling)
        name = repo.removeprefix("spaces/")
        data = {
            "id": name,
            "author": name.split("/")[0],
            "sha": oid,
            "private": found.private,
            "gated": False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "createdAt": DATE,
            "lastModified": DATE,
            "siblings": siblings,
        }
        readme = found.trees[oid].get("README.md", b"").decode(errors="replace")
        data |= {"sdk": "gradio"} if repo != name else {"modelId": repo}
        if FRONT_MATTER.match(readme) and not (check_space(readme) if repo != name else check_card(readme)[0]):
            data["cardData"] = yaml.safe_load(FRONT_MATTER.match(readme)[2])
        return json_reply(data)

    def tree(self, request: Request, repo: str, rev: str, path: str = "") -> Reply:
        found = self._readable(request, repo)
        tree = found.trees[found.head(rev)]
        recursive = request.query.get("recursive", "").lower() in ("true", "1")
        if not path:
            return json_reply(list_tree(tree, recursive))
        entries = list_tree(
            {name[len(path) + 1 :]: tree[name] for name in tree if name.startswith(path + "/")}, recursive
        )
        if not entries:
            raise Refusal(404, f"{path} does not exist on {rev}", "EntryNotFound")
        return json_reply([{**entry, "path": f"{path}/{entry['path']}"} for entry in entries])

    def paths_info(self, request: Request, repo: str, rev: str) -> Reply:
        found = self._readable(request, repo)
        wanted = parse_qs(request.body.decode()).get("paths", [])
        entries = list_tree(found.trees[found.head(rev)], recursive=True)
        return json_reply([entry for entry in entries if entry["path"] in [path.rstrip("/") for path in wanted]])

    def refs(self, request: Request, repo: str) -> Reply:
        found = self._readable(request, repo)
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": oids[-1]}
            for name, oids in found.branches.items()
        ]
        data = {"branches": branches, "converts": [], "tags": []}
        if "include_prs" in request.query:
            data["pullRequests"] = [
                {"name": name, "ref": name, "targetCommit": oids[-1]} for name, oids in found.pull_requests.items()
            ]
        return json_reply(data)

    def branch(self, request: Request, repo: str, branch: str) -> Reply:
        found = self._writable(request, repo)
        if branch in found.branches:
            raise Refusal(409, f"Reference already exists: refs/heads/{branch}")
        found.branches[branch] = list(found.commits(request.json().get("startingPoint", "main")))
        return json_reply({"success": True})

    def tag(self, request: Request, repo: str, rev: str) -> Reply:
        found, name = self._writable(request, repo), request.json()["tag"]
        if name in found.tags:
            raise Refusal(409, f"Reference already exists: refs/tags/{name}")
        found.tags[name] = [found.head(rev)]
        return json_reply({"success": True})

    def validate_yaml(self, request: Request) -> Reply:
        self.validated.append(request.json()["content"])
        space = request.json().get("repoType") == "space"
        errors, warnings = (check_space(self.validated[-1]), []) if space else check_card(self.validated[-1])
        data = {"errors": [{"message": text} for text in errors], "warnings": [{"message": text} for text in warnings]}
        return json_reply(data, 400 if errors else 200)

    # upload

    def preupload(self, request: Request, repo: str, rev: str) -> Reply:
        found = self._proposable(request, repo)
        tree = found.trees[found.head(rev)]
        files = []
        for wanted in request.json()["files"]:
            path = wanted["path"]
            present = file_entry(path, tree[path]) if path in tree else {"oid": None}
            oid = present["lfs"]["oid"] if "lfs" in present else present["oid"]
            mode = "lfs" if is_lfs(path, wanted["size"]) else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return json_reply({"files": files})

    def lfs_batch(self, request: Request, repo: str) -> Reply:
        """Where to upload each object. The client names the branch unless it is about to open a pull request."""
        wanted = request.json()
        self._signed_in(request)
        (self._writable if "ref" in wanted else self._readable)(request, repo)
        objects = [self._lfs_object(repo, item["oid"], item["size"]) for item in wanted["objects"]]
        parts = any("chunk_size" in item.get("actions", {}).get("upload", {}).get("header", {}) for item in objects)
        return json_reply({"transfer": "multipart" if parts else "basic", "objects": objects})

    def _lfs_object(self, repo: str, oid: str, size: int) -> dict:
        if oid in self._objects:
            return {"oid": oid, "size": size}
        ticket = secrets.token_hex(8)
        self._tickets[ticket] = {"oid": oid, "size": size, "parts": {}}
        href = f"{self.url}/storage/{ticket}/{oid}"
        upload = {"href": href}
        if self.chunk_size and size > self.chunk_size:
            count = -(-size // self.chunk_size)
            upload["header"] = {f"{number:05d}": f"{href}/{number}" for number in range(1, count + 1)}
            upload["header"]["chunk_size"] = str(self.chunk_size)
        verify = {"href": f"{self.url}/{quote(repo)}.git/info/lfs/verify"}
        return {"oid": oid, "size": size, "authenticated": True, "actions": {"upload": upload, "verify": verify}}

    def _ticket(self, ticket: str, oid: str) -> dict:
        """What this URL allows; the URL is the permission, the storage asks for no token."""
        if self._tickets.get(ticket, {}).get("oid") != oid:
            raise Refusal(403, "The request signature does not match")
        return self._tickets[ticket]

    def _store(self, oid: str, content: bytes):
        came = hashlib.sha256(content).hexdigest()
        if came != oid:
            raise Refusal(400, f"The sha256 of what came is {came}, not {oid}")
        self._objects[oid] = content

    def lfs_put(self, request: Request, ticket: str, oid: str, part: str = "") -> Reply:
        allowed = self._ticket(ticket, oid)
        etag = f'"{hashlib.md5(request.body).hexdigest()}"'
        if part:
            allowed["parts"][int(part)] = (etag, request.body)
        else:
            self._store(oid, request.body)
        return Reply(headers={"ETag": etag})

    def lfs_complete(self, request: Request, ticket: str, oid: str) -> Reply:
        parts = self._ticket(ticket, oid)["parts"]
        named = request.json()["parts"]
        if [(part["partNumber"], part["etag"]) for part in named] != [
            (number, parts[number][0]) for number in sorted(parts)
        ]:
            raise Refusal(400, "One or more of the specified parts could not be found")
        self._store(oid, b"".join(parts[number][1] for number in sorted(parts)))
        return json_reply({"success": True})

    def lfs_verify(self, request: Request, repo: str) -> Reply:
        self._signed_in(request)
        self._readable(request, repo)
        wanted = request.json()
        if len(self._objects.get(wanted["oid"], b"")) != wanted["size"]:
            raise Refusal(404, f"No object {wanted['oid']} of {wanted['size']} bytes")
        return json_reply({"success": True})

    def commit(self, request: Request, repo: str, rev: str) -> Reply:
        found = self._proposable(request, repo)
        if rev not in found.branches and rev not in found.pull_requests:
            raise Refusal(404, f"Invalid rev id: {rev}", "RevisionNotFound")
        head = found.head(rev)
        before, tree = found.trees[head], dict(found.trees[head])
        message = ""
        for line in request.body.splitlines():
            operation = request._replace(body=line).json()
            key, value = operation["key"], operation["value"]
            if key == "header":
                message = "\n\n".join(text for text in (value["summary"], value.get("description")) if text)
                if not head.startswith(value.get("parentCommit", "")):
                    raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            else:
                self._apply(tree, key, value)
        readme = tree.get("README.md", b"")
        if readme != before.get("README.md", b""):
            text = readme.decode(errors="replace")
            errors = check_space(text) if repo.startswith("spaces/") else check_card(text)[0]
            if errors:
                raise Refusal(400, "Invalid metadata in README.md: " + " ".join(errors))
        data = {"success": True, "hookOutput": ""}
        commits = found.commits(rev)
        if request.query.get("create_pr") == "1":
            number = len(found.pull_requests) + 1
            commits = found.pull_requests[f"refs/pr/{number}"] = list(commits)
            data["pullRequestUrl"] = f"{self.url}/{repo}/discussions/{number}"
        oid = found.add(commits, tree, message)
        return json_reply({**data, "commitOid": oid, "commitUrl": f"{self.url}/{repo}/commit/{oid}"})

    def _apply(self, tree: dict[str, bytes], key: str, value: dict):
        """One operation of a commit, on the files it will have."""
        path = value["path"]
        if path.startswith("/") or ".." in path.split("/"):
            raise Refusal(400, f"Invalid path: {path}")
        if key == "file":
            tree[path] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            content = self._objects.get(value["oid"])
            if content is None or len(content) != value.get("size", len(content)):
                raise Refusal(400, f"The LFS object {value['oid']} of {path} was not uploaded")
            tree[path] = content
        elif key in ("deletedFile", "deletedFolder"):
            folder = path.rstrip("/") + "/"
            gone = [name for name in tree if (name.startswith(folder) if key == "deletedFolder" else name == path)]
            if not gone:
                raise Refusal(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
            for name in gone:
                del tree[name]
        else:
            raise Refusal(400, f"Unknown operation: {key}")

    # download

    def resolve(self, request: Request, repo: str, rev: str, path: str) -> Reply:
        found = self._readable(request, repo)
        oid = found.head(rev)
        headers = {"X-Repo-Commit": oid, "Accept-Ranges": "bytes"}
        if path not in found.trees[oid]:
            raise Refusal(404, "Entry not found", "EntryNotFound", **headers)
        content = found.trees[oid][path]
        entry = file_entry(path, content)
        headers |= {"Content-Type": "application/octet-stream", "ETag": f'"{entry["oid"]}"'}
        if "lfs" in entry:
            etag = f'"{entry["lfs"]["oid"]}"'
            headers |= {"ETag": etag, "X-Linked-ETag": etag, "X-Linked-Size": str(len(content))}
        first_last = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("Range", ""))
        if not first_last or first_last[0] == "bytes=-":
            return Reply(content, 200, headers)
        first, last = (int(text) if text else None for text in first_last.groups())
        if first is None:
            first, last = max(0, len(content) - last), None
        last = len(content) - 1 if last is None else min(last, len(content) - 1)
        if first > last:
            return Reply(b"", 416, {**headers, "Content-Range": f"bytes */{len(content)}"})
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return Reply(content[first : last + 1], 206, headers)


REPO = r"(?P<repo>spaces/[^/]+/[^/]+|[^/]+(?:/[^/]+)?)"
API = f"/api/(?:models/|(?=spaces/)){REPO}"
REV = r"(?P<rev>refs/pr/\d+|[^/]+)"
STORAGE = r"/storage/(?P<ticket>[^/]+)/(?P<oid>[0-9a-f]{64})"
ROUTES = (
    ("GET", "/api/whoami-v2", Hub.whoami),
    ("POST", "/api/repos/create", Hub.create),
    ("POST", "/api/validate-yaml", Hub.validate_yaml),
    ("GET", API, Hub.info),
    ("GET", f"{API}/revision/{REV}", Hub.info),
    ("GET", f"{API}/tree/{REV}(?:/(?P<path>.+))?", Hub.tree),
    ("POST", f"{API}/paths-info/{REV}", Hub.paths_info),
    ("GET", f"{API}/refs", Hub.refs),
    ("POST", f"{API}/branch/(?P<branch>[^/]+)", Hub.branch),
    ("POST", f"{API}/tag/{REV}", Hub.tag),
    ("POST", f"{API}/preupload/{REV}", Hub.preupload),
    ("POST", f"{API}/commit/{REV}", Hub.commit),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", Hub.lfs_batch),
    ("POST", rf"/{REPO}\.git/info/lfs/verify", Hub.lfs_verify),
    ("PUT", rf"{STORAGE}(?:/(?P<part>\d+))?", Hub.lfs_put),
    ("POST", STORAGE, Hub.lfs_complete),
    ("GET", f"/{REPO}/resolve/{REV}/(?P<path>.+)", Hub.resolve),
)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that goes away is no error of ours
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Reads a request, meets its fault or asks the hub, and writes the reply."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = IDLE_SECONDS

    def setup(self):
        super().setup()
        with self.server.hub._lock:
            self.server.hub._connections.add(self.connection)

    def finish(self):
        with self.server.hub._lock:
            self.server.hub._connections.discard(self.connection)
        super().finish()

    def handle_request(self):
        hub = self.server.hub
        fault = hub.receive(self.command, self.path)
        if fault and fault.hang is not None:
            hub._closed.wait(fault.hang)
            self.close_connection = True
            return
        cut = fault is not None and fault.cut_after is not None
        body, whole = self.read_body(fault.cut_after if cut else MOST_BYTES)
        storage = re.match(STORAGE, self.path)
        if storage and self.command == "PUT":
            hub.uploaded.append(Upload(storage["oid"], len(body)))
        if cut or not whole:
            self.close_connection = True
        elif fault and fault.status is not None:
            if fault.done:
                hub.answer(self.command, self.path, self.headers, body)
            message = fault.message or HTTPStatus(fault.status).phrase
            self.reply(refusal_reply(Refusal(fault.status, message, **fault.headers)))
        else:
            reply = hub.answer(self.command, self.path, self.headers, body)
            if fault and fault.corrupt and reply.status in (200, 206) and reply.body:
                middle = len(reply.body) // 2
                changed = reply.body[:middle] + bytes([reply.body[middle] ^ 0xFF]) + reply.body[middle + 1 :]
                reply = reply._replace(body=changed)
            self.reply(reply)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

    def read_body(self, most: int) -> tuple[bytes, bool]:
        """The body, or its first `most` bytes, and whether all of it came; the client sends files in HTTP chunks."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(min(length, most))
            return body, len(body) == length
        body = bytearray()
        while len(body) < most:
            size = self.rfile.readline()
            if not size:  # the client went away
                break
            size = int(size.split(b";")[0], 16)
            body += self.rfile.read(min(size, most - len(body)))
            if len(body) < most:
                self.rfile.readline()
            if size == 0:
                return bytes(body), True
        return bytes(body), False

    def reply(self, reply: Reply):
        self.send_response(reply.status)
        for name, value in {**reply.headers, "Content-Length": str(len(reply.body))}.items():
            self.send_header(name, " ".join(value.encode("latin-1", "replace").decode("latin-1").split()))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    def log_message(self, *arguments):
        """Nothing: a test reads hub.requests."""

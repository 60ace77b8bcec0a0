"""A small Hugging Face Hub on loopback, for tests that drive the real huggingface_hub client.

    with Hub() as hub:
        hub.put("alice/model", {"config.json": b"{}"})
        hub.fault("PUT", "/storage/", status=500, times=2)
        subprocess.run(command, env={**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, ...})

Status codes, headers and messages are those of huggingface.co, as far as the client or the docs tell them. There are models and
Spaces, named "alice/model" and "spaces/alice/page", and no Xet storage: large files go by git-lfs.
"""

import base64
import hashlib
import json
import re
import socket
import sys
import threading
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from huggingface_hub import ModelCard


USER, TOKEN = "alice", "hf_loopback_token"  # the one account, which writes to the namespace of its name
LFS_SUFFIXES = (".safetensors", ".onnx", ".data", ".pt2", ".bin", ".png")
LICENSES = ("apache-2.0", "mit", "cc-by-4.0", "other")  # of those in huggingface.co/docs/hub/repositories-licenses
TASKS = ("image-classification", "image-feature-extraction", "image-regression")
REPO_ID = re.compile(r"(\b[\w.-]+\b/)?\b[\w.-]{1,96}\b", re.ASCII)  # as huggingface_hub's validator has it
DATASET_TYPE = re.compile(r"(?:[\w-]+/)?[\w.-]+", re.ASCII)


def check_card(text: str, is_space: bool = False) -> list[str]:
    """What the Hub refuses in a README.md; the rules of huggingface/hub-docs modelcard.md and spaces-config-reference.md."""
    try:
        card = ModelCard(text).data.to_dict()  # with the fields that each entry of its model-index needs
    except (ValueError, yaml.YAMLError) as error:
        return [str(error)]
    given = {key: value if isinstance(value, list) else [value] for key, value in card.items()}
    results = [result for entry in given.get("model-index", ()) for result in entry["results"]]
    types = [result["dataset"]["type"] for result in results]
    known = {"license": LICENSES, "pipeline_tag": TASKS} | ({"sdk": ("gradio",)} if is_space else {})
    wrong = [(key, value) for key in known for value in given.get(key, ()) if value not in known[key]]
    for key, pattern, values in (
        *((key, REPO_ID, given.get(key, ())) for key in ("base_model", "datasets", "models")), ("model-index", DATASET_TYPE, types),
    ):  # fmt: skip
        wrong += [(key, value) for value in values if not pattern.fullmatch(str(value))]
    missing = [f'"{key}" is required' for key in known if is_space and key == "sdk" and key not in card]
    return [*missing, *(f'"{key}" with value "{value}" is not valid' for key, value in wrong)]


class Refusal(Exception):
    """An answer that is an error: status, message and the X-Error-Code that the client turns into its exception."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers):
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers | ({"X-Error-Code": code} if code else {})


@dataclass
class Repo:
    """A repository. refs: branches, pull requests ("refs/pr/1") and tags, each with its commits, oldest first."""

    private: bool = False
    refs: dict[str, list[str]] = field(default_factory=lambda: {"main": []})
    tags: dict[str, list[str]] = field(default_factory=dict)  # each of one commit
    trees: dict[str, dict[str, bytes]] = field(default_factory=dict)  # commit -> path -> content

    def commits(self, revision: str) -> list[str]:
        """The commits of a branch or pull request, oldest first; of a commit, itself."""
        if found := {**self.tags, **self.refs}.get(revision) or ([revision] if revision in self.trees else None):
            return found
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def head(self, revision: str) -> str:
        return self.commits(revision)[-1]

    def add(self, commits: list[str], tree: dict[str, bytes]) -> str:
        """Append a commit with these files to a branch's commits; returns its oid."""
        oid = hashlib.sha1(repr((len(self.trees), sorted(tree.items()))).encode()).hexdigest()
        self.trees[oid] = tree
        commits.append(oid)
        return oid


def file_entry(path: str, content: bytes) -> dict:
    """A file as /tree lists it; the git oid of an LFS file is in truth that of its pointer."""
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry = {"type": "file", "oid": oid, "size": len(content), "path": path}
    if content and path.endswith(LFS_SUFFIXES):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


class Request(NamedTuple):
    """query has the last value of each name; signed_in: with the user's token."""

    query: dict[str, str]
    body: bytes
    signed_in: bool

    def json(self) -> dict:
        return json.loads(self.body)


class Reply(NamedTuple):
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = {}


def json_reply(data, status: int = 200, **headers) -> Reply:
    return Reply(json.dumps(data).encode(), status, {"Content-Type": "application/json", **headers})


def refusal_reply(refusal: Refusal) -> Reply:
    headers = {"X-Error-Message": refusal.message, **refusal.headers}
    return json_reply({"error": refusal.message}, refusal.status, **headers)


class Upload(NamedTuple):
    """One PUT that came to the storage: the sha256 of the object and the bytes that came."""

    sha256: str
    received: int


@dataclass
class Fault:
    """The next `times` requests of a method, a regex, and of a path in which `pattern` is found, go wrong in one of four ways.

    Args:
        status: answer with this status and `headers`; nothing is done, or with `done` all of it.
        cut_after: close the connection when this many bytes of the body have come; nothing is done.
        hang: stay silent for this many seconds, or until the hub is closed, and then close the connection.
        corrupt: answer with one byte of the body changed.
    """

    method: str
    pattern: str
    times: int = 1
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    done: bool = False
    cut_after: int | None = None
    hang: float | None = None
    corrupt: bool = False


class Hub:
    """with Hub() as hub: a Hub at hub.url.

    Attributes:
        repos: by "namespace/name", or "spaces/namespace/name".
        requests: (method, path with its query) as they came, never headers.
        uploaded: every PUT to the storage, cut and refused ones too.
        validated: the texts that came to /api/validate-yaml.
    """

    def __init__(self):
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str]] = []
        self.uploaded: list[Upload] = []
        self.validated: list[str] = []
        self._objects: dict[str, bytes] = {}  # LFS storage, by sha256
        self._faults: list[Fault] = []
        self.lock, self.closed = threading.RLock(), threading.Event()
        self.connections: set[socket.socket] = set()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self.closed.set()
        self._server.shutdown()
        self._thread.join(timeout=10)
        with self.lock:
            for connection in self.connections:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:  # the client was faster
                    continue
        self._server.server_close()

    def fault(self, method: str, pattern: str, **how) -> Fault:
        self._faults.append(Fault(method, pattern, **how))
        return self._faults[-1]

    def put(self, repo: str, files: dict[str, bytes], private: bool = False) -> str:
        """Add or replace files on main with a commit, in a new repository where there is none; any path is taken."""
        with self.lock:
            found = self.repos.setdefault(repo, Repo(private))
            main = found.refs["main"]
            return found.add(main, {**(found.trees[main[-1]] if main else {}), **files})

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        with self.lock:
            return dict(self.repos[repo].trees[self.repos[repo].head(revision)])

    def history(self, repo: str, revision: str = "main") -> list[str]:
        """Commits of a branch or pull request, oldest first."""
        with self.lock:
            return list(self.repos[repo].commits(revision))

    # how a request is answered

    def receive(self, method: str, path: str) -> Fault:
        """Write down a request; returns the fault that it meets, which may be none."""
        with self.lock:
            self.requests.append((method, path))
            for fault in self._faults:
                if fault.times and re.fullmatch(fault.method, method) and re.search(fault.pattern, path):
                    fault.times -= 1
                    return fault
        return Fault(method, path)

    def answer(self, method: str, target: str, authorization: str | None, body: bytes) -> Reply:
        """The reply to a request; all routes run one after the other, so a commit is there whole or not at all."""
        parts = urlsplit(target)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        try:
            if authorization not in (None, f"Bearer {TOKEN}"):
                raise Refusal(401, "Invalid credentials in Authorization header")
            for route_method, pattern, route in ROUTES:
                match = re.fullmatch(pattern, parts.path)
                if match and route_method == ("GET" if method == "HEAD" else method):
                    named = {name: unquote(value) for name, value in match.groupdict(default="").items()}
                    with self.lock:
                        return route(self, Request(query, body, authorization is not None), **named)
            raise Refusal(404, f"Not found: {method} {parts.path}")
        except Refusal as refusal:
            return refusal_reply(refusal)

    def _readable(self, request: Request, repo: str) -> Repo:
        """The repository; a private one is, for others, not there."""
        found = self.repos.get(repo)
        if found and (not found.private or (request.signed_in and is_own(repo))):
            return found
        raise Refusal(404 if request.signed_in else 401, "Repository not found", "RepoNotFound")

    def _writable(self, request: Request, repo: str) -> Repo:
        """The repository to write to or, with ?create_pr=1, to read: anybody may open a pull request."""
        found = self._readable(request, repo)
        if not request.signed_in:
            raise Refusal(401, "Invalid username or password.")
        if not is_own(repo) and request.query.get("create_pr") != "1":
            raise Refusal(403, f"You don't have the rights to write to {repo}")
        return found

    def create(self, request: Request) -> Reply:
        wanted = request.json()
        kind = "spaces/" if wanted.get("type") == "space" else ""
        repo = f"{kind}{wanted.get('organization') or USER}/{wanted['name']}"
        if not is_own(repo):
            raise Refusal(403, f"You don't have the rights to create {repo}")
        if repo in self.repos:
            return json_reply({"error": "You already created it", "url": f"{self.url}/{repo}"}, 409)
        self.put(
            repo,
            {".gitattributes": b"*.png filter=lfs"},
            private=wanted.get("visibility") == "private" or wanted.get("private"),
        )
        return json_reply({"url": f"{self.url}/{repo}", "name": repo})

    def info(self, request: Request, repo: str, rev: str = "") -> Reply:
        found = self._readable(request, repo)
        oid = found.head(rev or "main")
        siblings = [{"rfilename": path} for path in sorted(found.trees[oid])]
        name = repo.removeprefix("spaces/")
        return json_reply({"id": name, "modelId": name, "sha": oid, "private": found.private, "siblings": siblings})

    def tree(self, request: Request, repo: str, rev: str) -> Reply:
        found = self._readable(request, repo)
        return json_reply([file_entry(*file) for file in sorted(found.trees[found.head(rev)].items())])

    def branch(self, request: Request, repo: str, branch: str) -> Reply:
        found = self._writable(request, repo)
        if branch in found.refs:
            raise Refusal(409, f"Reference already exists: refs/heads/{branch}")
        found.refs[branch] = list(found.commits("main"))
        return json_reply({"success": True})

    def tag(self, request: Request, repo: str, rev: str) -> Reply:
        found, name = self._writable(request, repo), request.json()["tag"]
        if name in found.tags:
            raise Refusal(409, f"Reference already exists: refs/tags/{name}")
        found.tags[name] = [found.head(rev)]
        return json_reply({"success": True})

    def validate_yaml(self, request: Request) -> Reply:
        self.validated.append(request.json()["content"])
        errors = check_card(self.validated[-1], request.json().get("repoType") == "space")
        return json_reply({"errors": [{"message": text} for text in errors], "warnings": []}, 400 if errors else 200)

    def preupload(self, request: Request, repo: str, rev: str) -> Reply:
        found, files = self._writable(request, repo), []
        tree = found.trees[found.head(rev)]
        for path in (wanted["path"] for wanted in request.json()["files"]):
            there = file_entry(path, tree[path]) if path in tree else {"oid": None}
            mode = "lfs" if path.endswith(LFS_SUFFIXES) else "regular"
            files.append(
                {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": there.get("lfs", there)["oid"]}
            )
        return json_reply({"files": files})

    def lfs_batch(self, request: Request, repo: str) -> Reply:
        """Where to upload each object that is not here. The client names no branch if it is about to open a pull request."""
        wanted = request.json()
        (self._writable if "ref" in wanted else self._readable)(request, repo)
        objects = [{"oid": item["oid"], "size": item["size"]} for item in wanted["objects"]]
        for item in objects:
            if item["oid"] not in self._objects:
                item["actions"] = {"upload": {"href": f"{self.url}/storage/{item['oid']}"}}
        return json_reply({"transfer": "basic", "objects": objects})

    def lfs_put(self, request: Request, oid: str) -> Reply:
        if hashlib.sha256(request.body).hexdigest() != oid:
            raise Refusal(400, f"The sha256 of what came is not {oid}")
        self._objects[oid] = request.body
        return Reply()

    def commit(self, request: Request, repo: str, rev: str) -> Reply:
        found = self._writable(request, repo)
        commits = found.commits(rev)
        before, tree = found.trees[commits[-1]], dict(found.trees[commits[-1]])
        for operation in map(json.loads, request.body.splitlines()):
            key, value = operation["key"], operation["value"]
            if key == "header":
                if not commits[-1].startswith(value.get("parentCommit", "")):
                    raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            elif key == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                tree[value["path"]] = self._objects[value["oid"]]
            else:
                del tree[value["path"]]
        readme = tree.get("README.md", b"")
        if readme != before.get("README.md", b""):
            errors = check_card(readme.decode(errors="replace"), repo.startswith("spaces/"))
            if errors:
                raise Refusal(400, "Invalid metadata in README.md: " + " ".join(errors))
        data = {"success": True, "hookOutput": ""}
        if request.query.get("create_pr") == "1":
            number = 1 + sum(name.startswith("refs/pr/") for name in found.refs)
            commits = found.refs[f"refs/pr/{number}"] = list(commits)
            data["pullRequestUrl"] = f"{self.url}/{repo}/discussions/{number}"
        oid = found.add(commits, tree)
        return json_reply({**data, "commitOid": oid, "commitUrl": f"{self.url}/{repo}/commit/{oid}"})

    def resolve(self, request: Request, repo: str, rev: str, path: str) -> Reply:
        found = self._readable(request, repo)
        oid = found.head(rev)
        if path not in found.trees[oid]:
            raise Refusal(404, "Entry not found", "EntryNotFound", **{"X-Repo-Commit": oid})
        content = found.trees[oid][path]
        entry = file_entry(path, content)
        headers = {"X-Repo-Commit": oid, "ETag": f'"{entry.get("lfs", entry)["oid"]}"'}
        return Reply(content, 200, headers)


def is_own(repo: str) -> bool:
    return repo.removeprefix("spaces/").startswith(f"{USER}/")


REPO = r"(?P<repo>spaces/[^/]+/[^/]+|[^/]+(?:/[^/]+)?)"
API = f"/api/(?:models/|(?=spaces/)){REPO}"
REV = r"(?P<rev>refs/pr/\d+|[^/]+)"
STORAGE = "/storage/(?P<oid>[0-9a-f]{64})"
ROUTES = (
    ("POST", "/api/repos/create", Hub.create),
    ("POST", "/api/validate-yaml", Hub.validate_yaml),
    ("GET", API, Hub.info),
    ("GET", f"{API}/revision/{REV}", Hub.info),
    ("GET", f"{API}/tree/{REV}", Hub.tree),
    ("POST", f"{API}/branch/(?P<branch>[^/]+)", Hub.branch),
    ("POST", f"{API}/tag/{REV}", Hub.tag),
    ("POST", f"{API}/preupload/{REV}", Hub.preupload),
    ("POST", f"{API}/commit/{REV}", Hub.commit),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", Hub.lfs_batch),
    ("PUT", STORAGE, Hub.lfs_put),
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

    def setup(self):
        super().setup()
        with self.server.hub.lock:
            self.server.hub.connections.add(self.connection)

    def finish(self):
        with self.server.hub.lock:
            self.server.hub.connections.discard(self.connection)
        super().finish()

    def handle_request(self):
        hub = self.server.hub
        fault = hub.receive(self.command, self.path)
        if fault.hang is not None:
            hub.closed.wait(fault.hang)
            self.close_connection = True
            return
        body = self.read_body(fault.cut_after)
        storage = re.match(STORAGE, self.path)
        if storage and self.command == "PUT":
            hub.uploaded.append(Upload(storage["oid"], len(body)))
        if fault.cut_after is not None:
            self.close_connection = True
            return
        reply = None
        if fault.status is None or fault.done:
            reply = hub.answer(self.command, self.path, self.headers.get("Authorization"), body)
        if fault.status is not None:
            reply = refusal_reply(Refusal(fault.status, HTTPStatus(fault.status).phrase, **fault.headers))
        if fault.corrupt:
            reply = reply._replace(body=bytes([reply.body[0] ^ 0xFF]) + reply.body[1:])
        self.reply(reply)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def read_body(self, most: int | None) -> bytes:
        """The body, or its first `most` bytes; the client sends files in HTTP chunks."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            length = int(self.headers.get("Content-Length", 0))
            return self.rfile.read(length if most is None else min(length, most))
        body = bytearray()
        while (size := int(self.rfile.readline().split(b";")[0] or b"0", 16)) > 0:
            body += self.rfile.read(size)
            self.rfile.readline()
            if most is not None and len(body) >= most:
                return bytes(body[:most])
        self.rfile.readline()
        return bytes(body)

    def reply(self, reply: Reply):
        self.send_response(reply.status)
        for name, value in {**reply.headers, "Content-Length": str(len(reply.body))}.items():
            self.send_header(name, " ".join(value.encode("latin-1", "replace").decode("latin-1").split()))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    def log_message(self, *arguments):
        """Nothing: a test reads hub.requests."""

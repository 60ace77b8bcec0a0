"""The push: one commit of a package to a repository, and what arrived read back."""

import hashlib
import tempfile
from importlib.metadata import version
from pathlib import Path

import yaml
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    hf_hub_download,
    metadata_load,
    metadata_save,
    snapshot_download,
)
from huggingface_hub.errors import RepositoryNotFoundError
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_vit import model as model_code
from hf_vit.card import FIGURES
from hf_vit.hub.finished_run import TRAINING_FILES
from hf_vit.hub.retry import retry, status_of
from hf_vit.hub.verification import PROBES, verify
from hf_vit.system.errors import UserError, one_line
from hf_vit.system.files import checksum


# Files that a push may write: one that an earlier push left and this one does not have is deleted, all others are kept.
MANAGED_FILES = {
    *(file.name for file in Path(model_code.__file__).parent.glob("[!_]*.py")),
    *(SAFE_WEIGHTS_NAME, PROBES, "example.png"),
    *(f"figures/{name}.png" for name in FIGURES),
    *(f"training/{name}" for name in TRAINING_FILES),
    *(f"onnx/{name}.onnx{part}" for name in ("model", "model_quantized") for part in ("", ".data")),
}


def list_files(folder: Path) -> list[str]:
    """The names of all files below a folder, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def content_tag(folder: Path) -> str:
    """A tag for what a package holds, but for its card."""
    sums = [f"{name} {checksum(folder / name)}" for name in list_files(folder) if name != "README.md"]
    return f"pushed-{hashlib.sha256(' '.join(sums).encode()).hexdigest()[:12]}"


def remote_files(info) -> list[str]:
    """The names of all files in a repository, from its info."""
    return [file.rfilename for file in info.siblings or ()]


def stale_files(info, files: list[str]) -> list[str]:
    """Files that an earlier push left in a repository and this one does not have.

    ValueError if it holds a LoRA adapter, which transformers would load in place of the whole model.
    """
    remote = remote_files(info)
    if "adapter_config.json" in remote:
        raise UserError(
            f"{info.id} holds adapter_config.json, a LoRA adapter: delete it there, or take another --repo"
        )
    return [name for name in remote if name in MANAGED_FILES and name not in files]


def refuse_public_images(repo: str, repo_type: str = "model"):
    """Raise ValueError if a repository exists and is public: a push would show the run's images to everybody."""
    try:
        info = HfApi().repo_info(repo, repo_type=repo_type)
    except RepositoryNotFoundError:
        return
    if not info.private:
        raise UserError(f"{repo} is public: pass --public to publish images of the run there, or --without_images")


def keep_readme(folder: Path, repo: str, revision: str, license: str | None):
    """Put the README.md of a repository in the place of ours, with its text as it is, and in its metadata what ours say.

    Other metadata and tags stay; a licence stays unless another is given.
    """
    ours = metadata_load(folder / "README.md")
    try:
        with tempfile.TemporaryDirectory() as cache:
            theirs = Path(hf_hub_download(repo, "README.md", revision=revision, cache_dir=cache)).read_bytes()
        (folder / "README.md").write_text(theirs.decode("utf-8"), encoding="utf-8", newline="")
        before = metadata_load(folder / "README.md") or {}
        tags = [*before.get("tags", []), *ours["tags"]]
        licenses = {"license": license or before.get("license")}
        merged = {**before, **ours, **licenses, "tags": list(dict.fromkeys(tags))}
        if "model-index" in ours:
            names = [entry["name"] for entry in ours["model-index"]]
            others = [entry for entry in before.get("model-index", []) if entry["name"] not in names]
            merged["model-index"] = [*others, *ours["model-index"]]
    except (ValueError, TypeError, AttributeError, KeyError, yaml.YAMLError) as error:
        raise UserError(
            f"the README.md of {repo} cannot be read ({one_line(error)}): fix it, or --overwrite_card"
        ) from error
    metadata_save(folder / "README.md", {key: value for key, value in merged.items() if value is not None})


def commit_files(repo: str, folder: Path, names: list[str], deleted: list[str], **options):
    """Add and delete files of a repository in one commit; without any change, the Hub makes none.

    Not by `HfApi.upload_folder`: with Xet, it splits an upload of more than five minutes into several commits.
    """
    added = [CommitOperationAdd(name, folder / name) for name in names]
    removed = [CommitOperationDelete(name, is_folder=False) for name in deleted]
    return HfApi().create_commit(repo, [*added, *removed], **options)


def push_model(
    folder: Path,
    repo: str,
    *,
    public: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    license: str | None = None,
    with_images: bool = False,
    overwrite_card: bool = False,
    log=print,
):
    """Make a package the newest state of a repository, in one commit with a tag, and read it back.

    The README.md that is there is kept (`keep_readme`) unless `overwrite_card`; files that an earlier push left are deleted
    (`MANAGED_FILES`), all others are kept. A failure that may pass is retried from the start; what has arrived is not sent again.

    Args:
        with_images: the package shows images of the run, which never go to a public repository unless `public`.

    Returns what `create_commit` does, and whether there was anything to commit.

    Raises:
        ValueError: if images would become public, or the Hub refuses, cannot be reached, or returns other files than were sent.
    """
    ours, heads = (folder / "README.md").read_text(encoding="utf-8"), []
    message = f"Vision Transformer, pushed by hf_vit {version('hf_vit')}"

    def attempt():
        (folder / "README.md").write_text(ours, encoding="utf-8")
        check_card(ours)
        if with_images and not public:
            refuse_public_images(repo)
        HfApi().create_repo(repo, private=not public, exist_ok=True)
        if revision is not None:
            HfApi().create_branch(repo, branch=revision, exist_ok=True)
        info = HfApi().model_info(repo, revision=revision)
        heads.append(info.sha)  # one per attempt: an earlier one may have committed although its answer was lost
        if "README.md" in remote_files(info) and not overwrite_card:
            keep_readme(folder, repo, info.sha, license)
            check_card((folder / "README.md").read_text(encoding="utf-8"))
        files = list_files(folder)
        options = dict(revision=revision, create_pr=create_pr, parent_commit=info.sha, commit_message=message)
        commit = commit_files(repo, folder, files, stale_files(info, files), **options)
        if not create_pr:  # whose commits do not last
            HfApi().create_tag(repo, tag=content_tag(folder), revision=commit.oid, exist_ok=True)
        return commit

    def may_have_arrived(error):  # and then a second pull request would be one too many
        return create_pr and "/commit/" in str(getattr(error, "response", "") and error.response.request.url)

    commit = retry(attempt, log, give_up=may_have_arrived)
    read_back(folder, repo, commit, log, verify)
    return commit, commit.oid != heads[0]


def check_card(text: str, repo_type: str = "model"):
    """Let the Hub check a card before anything is created; ValueError with its complaints."""
    try:
        ModelCard(text).validate(repo_type=repo_type)
    except ValueError as error:
        if status_of(error) is not None:
            raise
        raise UserError(f"the Hub refuses the card: {one_line(error)}") from error


def read_back(folder: Path, repo: str, commit, log, check=lambda copy: None, repo_type: str = "model"):
    """Download a commit, compare its bytes with those in `folder`, and `check` it; ValueError if one of them fails, twice."""
    where, files = f"{repo} at commit {commit.oid[:12]}", list_files(folder)
    options = dict(repo_type=repo_type, revision=commit.oid, allow_patterns=files, max_workers=2)
    for _ in range(2):
        with tempfile.TemporaryDirectory() as cache:
            try:
                copy = Path(retry(lambda: snapshot_download(repo, cache_dir=cache, **options), log))
                wrong = [name for name in files if not same_bytes(copy / name, folder / name)]
                if not wrong:
                    return check(copy)
            except ValueError as error:
                raise UserError(f"{where} was pushed, but could not be read back: {one_line(error)}") from error
    raise UserError(
        f"{where} gives back other bytes than were sent ({', '.join(wrong)}), twice: do not use it, push it again"
    )


def same_bytes(one: Path, other: Path) -> bool:
    return one.is_file() and checksum(one) == checksum(other)

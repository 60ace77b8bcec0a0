"""The push: inspect a repository, commit a package to it, and read back what arrived."""

import re
import tempfile
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_vit import model as model_code
from hf_vit.hub.card import (
    CARD_BEGIN,
    COMMIT_PLACEHOLDER,
    merge_cards,
    replaced_title,
    revision_argument,
    validate_card,
)
from hf_vit.hub.retry import explain_error, retry, status_of, summarize_error, url_of
from hf_vit.hub.run_results import FIGURES, TRAINING_FILES
from hf_vit.hub.verification import PROBES, verify
from hf_vit.system.errors import UserError
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


def remote_files(info) -> list[str]:
    """The names of all files in a repository, from its info."""
    return [file.rfilename for file in info.siblings or ()]


def inspect_repo(repo: str, revision: str | None = None) -> tuple[object, str]:
    """The info of a model repository, and the text of its README.md ("" if it has none)."""
    info = HfApi().model_info(repo, revision=revision)
    if "README.md" not in remote_files(info):
        return info, ""
    with tempfile.TemporaryDirectory() as cache:
        file = hf_hub_download(repo, "README.md", revision=info.sha or revision, cache_dir=cache)
        try:
            return info, Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"the README.md of {repo} is not UTF-8 text ({error}): fix it first") from error


def stale_files(info, files: list[str]) -> list[str]:
    """Files that an earlier push left in a repository and this one does not have.

    ValueError if it holds a LoRA adapter, which transformers would load in place of the whole model.
    """
    remote = remote_files(info)
    if "adapter_config.json" in remote:
        raise UserError(
            f"{info.id} holds adapter_config.json, a LoRA adapter: with a whole model beside it, neither would load; delete it "
            "there, or take another --repo"
        )
    return [name for name in remote if name in MANAGED_FILES and name not in files]


def refuse_public_images(repo: str, repo_type: str = "model"):
    """Raise ValueError if a repository exists and is public: a push would show the run's images to everybody."""
    try:
        info = HfApi().repo_info(repo, repo_type=repo_type)
    except RepositoryNotFoundError:
        return
    if not info.private:
        raise UserError(
            f"{repo} is public, and images of the run would be published (example.png, probes.safetensors, figures/, examples/): "
            "pass --public if everybody may see them, or --without_images"
        )


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
    log=print,
):
    """Make a package the newest state of a repository, in one commit, and read it back.

    An existing README.md is merged (`merge_cards`), files that an earlier push left are deleted (`MANAGED_FILES`), all others
    are kept. A failure that may pass is retried from the start; what has arrived is not sent again. The card of a model with
    code names the commit to load, so it takes a second commit; a pull request has no lasting commit, so its card names none.

    Args:
        with_images: the package shows images of the run, which never go to a public repository unless `public`.

    Returns what `create_commit` does, and whether there was anything to commit.

    Raises:
        ValueError: if images would become public, or the Hub refuses the card.
        OSError: if the Hub refuses, cannot be reached, or returns other files than were sent; one line, with what to do.
    """
    card = (folder / "README.md").read_text(encoding="utf-8")
    pins_commit = revision_argument(COMMIT_PLACEHOLDER) in card and not create_pr
    message = f"Vision Transformer, pushed by hf_vit {version('hf_vit')}"
    options = dict(commit_message=message, revision=revision, create_pr=create_pr)
    heads = []  # of the repository, one per attempt: an earlier one may have committed although its answer was lost

    def write_merged_card(existing: str, commit: str | None = None):
        named = card.replace(revision_argument(COMMIT_PLACEHOLDER), revision_argument(commit) if commit else "")
        (folder / "README.md").write_text(merge_cards(named, existing, license), encoding="utf-8")

    def attempt():
        info, existing = _prepare_repo(repo, card, public, revision, with_images, log)
        heads.append(info.sha)
        files = list_files(folder)
        stale = stale_files(info, files)
        if not pins_commit:
            write_merged_card(existing)
            return commit_files(repo, folder, files, stale, parent_commit=info.sha, **options)
        others = [name for name in files if name != "README.md"]
        commit = commit_files(repo, folder, others, stale, parent_commit=info.sha, **options).oid
        same = commit == info.sha  # nothing new: the commit that the existing card names may do as well
        write_merged_card(existing, (same and _equal_pinned_commit(repo, existing, commit)) or commit)
        return commit_files(repo, folder, ["README.md"], [], parent_commit=commit, **options)

    def may_have_arrived(error):  # and then a second pull request would be one too many
        return create_pr and "/commit/" in url_of(error) and status_of(error) in (None, 500, 502, 503, 504)

    explain = lambda error, attempts: explain_error(error, repo, attempts, folder)
    commit = retry(attempt, explain, log, give_up=may_have_arrived)
    read_back(folder, repo, commit, log, verify)
    return commit, commit.oid != heads[0]


def _prepare_repo(repo: str, card: str, public: bool, revision: str | None, with_images: bool, log):
    """Check a card, create the repository and the branch where they do not exist; return what `inspect_repo` does."""
    validate_card(card)
    if with_images and not public:
        refuse_public_images(repo)
    HfApi().create_repo(repo, private=not public, exist_ok=True)
    if revision is not None:
        HfApi().create_branch(repo, branch=revision, exist_ok=True)
    info, existing = inspect_repo(repo, revision)
    if other := replaced_title(card, existing):
        log(f"{repo} holds {other}, which this replaces; its history keeps it")
    if public and info.private:
        log(f"{repo} is private and stays so: its settings on the Hub make it public")
    return info, existing


def _equal_pinned_commit(repo: str, card: str, head: str) -> str | None:
    """The commit that a card names, if all files but the card are the same there as at `head`; else None."""
    found = re.search(revision_argument("([0-9a-f]{40})"), card.rpartition(CARD_BEGIN)[2])
    if found is None:
        return None
    blobs = []
    for revision in (found.group(1), head):
        try:
            siblings = HfApi().model_info(repo, revision=revision, files_metadata=True).siblings
        except RevisionNotFoundError:  # the history was rewritten
            return None
        blobs.append({file.rfilename: file.blob_id for file in siblings if file.rfilename != "README.md"})
    return found.group(1) if blobs[0] == blobs[1] else None


def read_back(folder: Path, repo: str, commit, log, check=lambda copy: None, repo_type: str = "model"):
    """Download a commit, compare its bytes with those in `folder`, and `check` it; OSError if one of them fails."""
    where, files = f"{repo} at commit {commit.oid[:12]}", list_files(folder)
    advice = f"check it with --verify {repo}" if repo_type == "model" else "look at it there"
    pushed = f"{where} was pushed but could not be read back"
    unread = lambda error, attempts: f"{pushed} ({summarize_error(error)}), {attempts} times: {advice}"
    options = dict(repo_type=repo_type, revision=commit.oid, allow_patterns=files, max_workers=2)
    for _ in range(2):
        with tempfile.TemporaryDirectory() as cache:
            copy = Path(retry(lambda: snapshot_download(repo, cache_dir=cache, **options), unread, log))
            missing = {name for name in files if not (copy / name).is_file()}
            wrong = [name for name in files if name in missing or checksum(copy / name) != checksum(folder / name)]
            if not wrong:
                try:
                    return check(copy)
                except ValueError as error:
                    raise UserError(f"{where} was pushed, but {error}") from error
    other = f"gives back other bytes than were sent ({', '.join(wrong)}), twice"
    raise UserError(f"{where} {other}: do not use it; push it again, and {advice}")

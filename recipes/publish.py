"""Publish a finished run on the Hub, or show what would be published; check what came back.

    python recipes/publish.py runs/mine --repo USER/NAME            (shows files, sizes, card and destination; sends nothing)
    python recipes/publish.py runs/mine --repo USER/NAME --push     (one commit; private, unless --public)
    python recipes/publish.py runs/mine --repo USER/NAME --space    (its page, recipes/app.py, as a Space of that name; with --push)
    python recipes/publish.py --verify USER/NAME                    (whether a repository gives what was saved)

The token is that of `hf auth login`, or HF_TOKEN; HF_ENDPOINT names another Hub. The run's folder is only read. After an
interruption or a failure, the same command goes on. Exit codes: 0, 1 after an error, 2 for a flag that is wrong.
"""

import argparse
import logging
import os
import re
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

from command_line import Parser

from hf_vit.system import escapes


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, "RUN --repo USER/NAME [--flag value ...], or --verify USER/NAME")
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="folder of a finished run")
    flag = parser.add_argument_group("destination").add_argument
    flag("--repo", metavar="USER/NAME", help="destination: USER/NAME or ORGANISATION/NAME")
    flag("--push", action="store_true", help="send it; without this flag it is only shown")
    flag("--public", action="store_true", help="everybody may see the images of the run; a new repository is public")
    flag("--revision", help="branch to commit to, created if it does not exist; main by default")
    flag("--create_pr", action="store_true", help="open a pull request instead of committing to main")
    flag("--timeout", type=float, default=60, help="seconds that the Hub may be silent")
    flag = parser.add_argument_group("content").add_argument
    layout = "native: as a model of transformers, which loads without trust_remote_code; code: with the model's code beside the "
    flag("--layout", choices=("native", "code"), help=f"{layout}weights. Native where possible by default")
    flag("--license", help="of the weights, as the Hub calls it: apache-2.0, mit, cc-by-4.0, ...; none by default")
    flag("--data_license", help="of the images, if their own card does not say it")
    private = "publish no sample images of the run; what an earlier push sent stays in the repository's history"
    flag("--without_images", action="store_true", help=private)
    flag("--output_dir", type=Path, help="keep the folder that would be pushed, to look at; must be new")
    space = (
        "not the model, which should be there already, but a Space: a page that shows its predictions and attention"
    )
    flag("--space", action="store_true", help=space)
    flag = parser.add_argument_group("afterwards").add_argument
    flag("--verify", metavar="REPO", help="check a repository (or folder) against the probes in it")
    args = parser.parse_args(argv)
    for name, given in (("RUN", args.run), ("--repo", args.repo)):
        if args.verify is None and given is None:
            parser.error(f"{name} is missing: wanted RUN and --repo USER/NAME, or --verify USER/NAME")
    if args.verify is not None and (args.run is not None or args.repo is not None or args.push):
        parser.error("--verify goes alone, or with --revision")
    if args.space and (args.verify is not None or args.data_license is not None):
        parser.error("--space has nothing to verify and no data: leave --verify and --data_license out")
    if args.space and (args.revision is not None or args.create_pr or args.layout is not None):
        parser.error("--space has no branch and no layout: leave --revision, --create_pr and --layout out")
    if args.create_pr and args.revision is not None:
        parser.error("--create_pr asks for a merge into main: leave --revision out")
    for name in ("license", "data_license"):
        given = getattr(args, name)
        if given is not None and given != escapes.as_license(given):
            parser.error(f"--{name} {given!r}: wanted one line of up to {escapes.LONGEST_LICENSE} characters")
    if args.timeout <= 0:
        parser.error(f"--timeout is {args.timeout:g}; wanted seconds above 0")
    return args


if __name__ == "__main__":  # a wrong flag is answered before the imports, which take seconds
    ARGUMENTS = parse_args()

if "HF_ENDPOINT" in os.environ:  # Xet is a protocol of the one Hub; every other speaks that of git LFS
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")

from huggingface_hub import constants, errors, get_token
from huggingface_hub.utils import disable_progress_bars, validate_repo_id
from transformers.utils import logging as transformers_logging

from hf_vit.hub.card import merge_cards, replaced_title, split_card, validate_card
from hf_vit.hub.package import build_package
from hf_vit.hub.push import inspect_repo, list_files, push_model, remote_files, stale_files
from hf_vit.hub.retry import REQUEST_ERRORS, explain_error, set_http_timeout
from hf_vit.hub.space import build_space, push_space
from hf_vit.hub.verification import verify
from hf_vit.system.command_line import shell_line
from hf_vit.system.errors import UserError, run_script


TEMPLATE = Path(__file__).resolve().with_name("model_card.md")
APP = Path(__file__).resolve().with_name("app.py")


def show(folder: Path):
    """Print the card, and every file with its size."""
    print((folder / "README.md").read_text(encoding="utf-8"))
    sizes = {name: (folder / name).stat().st_size for name in list_files(folder)}
    for name, size in sizes.items():
        print(f"{size:>13,}  {name}")
    print(f"{sum(sizes.values()):>13,}  bytes in {len(sizes)} files\n")


def remarks(folder: Path, args, reason: str) -> str:
    """What the user should know before the folder is sent."""
    lines = [reason]
    if not split_card((folder / "README.md").read_text(encoding="utf-8"))[0].get("license"):
        lines.append(
            "The card names no licence of the weights: --license apache-2.0 (or another) lets others use them."
        )
    if not args.without_images:
        published = "A few images of the data set are published (example.png, probes.safetensors, some figures)"
        lines.append(f"{published}: --without_images keeps them here.")
    lines.append("The run's command and configuration are published too, with names in place of this machine's paths.")
    return "\n".join(lines)


def merge_into(folder: Path, args) -> str:
    """Merge the README.md of the repository into that of `folder`, as a push would; a sentence on the repository."""
    card = (folder / "README.md").read_text(encoding="utf-8")
    try:
        validate_card(card)
        try:
            info, existing = inspect_repo(args.repo, args.revision)
        except errors.RevisionNotFoundError:  # the new branch begins as main is
            info, existing = inspect_repo(args.repo)
    except errors.RepositoryNotFoundError:
        return f"not there yet, or not shown to this token: it will be {'public' if args.public else 'private'}"
    except REQUEST_ERRORS as error:
        return f"perhaps there already, but the Hub could not be asked: {explain_error(error, args.repo)}"
    (folder / "README.md").write_text(merge_cards(card, existing, args.license), encoding="utf-8")
    files = list_files(folder)
    replaced = ", ".join(sorted(set(remote_files(info)) & set(files))) or "none"
    deleted = ", ".join(stale_files(info, files)) or "none"
    visibility = "private" if info.private else "PUBLIC"
    other = replaced_title(card, existing)
    sentence = f"there, {visibility}, and stays so" + (f"; its {other} is replaced" if other else "")
    sentence += (
        f". Its README.md is merged; replaced if they differ: {replaced}; deleted, of an earlier push: {deleted}"
    )
    sentence += "; all others are kept"
    if not (args.public or args.without_images or info.private):
        sentence += "; --push refuses to show the run's images there without --public, or --without_images"
    return sentence


def push_line(args) -> str:
    """The command that sends what was shown."""
    words = [args.run]
    for name, value in vars(args).items():
        if name not in ("run", "verify", "output_dir", "timeout") and value not in (None, False):
            words += [f"--{name}"] if value is True else [f"--{name}", value]
    return shell_line(Path(__file__).resolve(), *words, "--push")


def publish_model(args, folder: Path):
    about = dict(revision=args.revision, license=args.license, with_images=not args.without_images)
    package = dict(layout=args.layout, data_license=args.data_license)
    reason = build_package(args.run, folder, TEMPLATE, args.repo, **about, **package)
    if not args.push:
        repository = merge_into(folder, args)
        show(folder)
        print(remarks(folder, args, reason))
        branch = "a new pull request" if args.create_pr else f"branch {args.revision or 'main'}"
        print(f"To: {constants.ENDPOINT}/{args.repo}, {branch}, in one commit; the repository is {repository}.")
        print(f"Nothing was sent; --push sends it.\n  {push_line(args)}")
        return
    print(remarks(folder, args, reason))
    commit, changed = push_model(folder, args.repo, public=args.public, create_pr=args.create_pr, **about)
    done = "pushed as" if changed else "nothing has changed since"
    address = commit.pr_url or f"{constants.ENDPOINT}/{args.repo}"
    print(f"{done} {commit.oid[:12]} at {address}; read back, it has the same bytes and gives the same logits")


def publish_space(args, folder: Path):
    with_images = not args.without_images
    build_space(args.run, folder, APP, args.repo, args.license, with_images=with_images)
    address = f"{constants.ENDPOINT}/spaces/{args.repo}"
    if args.push:
        commit = push_space(folder, args.repo, public=args.public, with_images=with_images)
        print(f"pushed as {commit.oid[:12]} at {address}; read back, it has the same bytes")
        return
    show(folder)
    if with_images:
        print("A few of the evaluated images are published (examples/): --without_images keeps them here.")
    kind = "public" if args.public else "private"
    print(f"To: {address}, in one commit; a new Space will be {kind}. It loads the model {args.repo}: push it first.")
    print(f"Nothing was sent; --push sends it.\n  {push_line(args)}")


def check_copy(args):
    """--verify: what the Hub or a folder holds, against its probes."""
    try:
        difference = verify(args.verify, args.revision)
    except (errors.HTTPError, ConnectionError, errors.LocalEntryNotFoundError) as error:
        raise UserError(explain_error(error, args.verify)) from error
    given = f"{args.verify} gives the logits that were saved with it (largest difference {difference:.1e})"
    print(f"{given}: nothing was damaged on its way; who wrote it this cannot tell")


def hide_queries(record) -> bool:
    """Remove signatures from the addresses that huggingface_hub logs when it tries again."""
    record.msg, record.args = re.sub(r"(https?://[^\s?]+)\?\S*", r"\1", record.getMessage()), ()
    return True


def main(args: argparse.Namespace):
    transformers_logging.disable_progress_bar()
    if not sys.stderr.isatty():
        disable_progress_bars()
    set_http_timeout(args.timeout)
    if args.verify is not None:
        check_copy(args)
        return
    if args.repo.count("/") != 1:
        raise UserError(f"--repo {args.repo}: wanted USER/NAME, USER being you or an organisation of yours")
    validate_repo_id(args.repo)
    if args.push and constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE is set: unset it to push")
    if args.push and get_token() is None:
        raise UserError("there is no token: log in with `hf auth login`, or set HF_TOKEN to one that may write")
    if args.output_dir is not None and args.output_dir.exists():
        raise UserError(f"--output_dir {args.output_dir} is there already: name a new folder")
    with tempfile.TemporaryDirectory(prefix="hf_vit-") as temporary:
        folder = Path(temporary) / "repository"
        (publish_space if args.space else publish_model)(args, folder)
        if args.output_dir is not None:
            shutil.copytree(folder, args.output_dir)


if __name__ == "__main__":
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
    logging.getLogger("huggingface_hub.utils._http").addFilter(hide_queries)
    try:
        run_script(lambda: main(ARGUMENTS))
    except KeyboardInterrupt:
        sys.exit("stopped: nothing on this disk has changed; the same command goes on")

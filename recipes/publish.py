"""Show what a finished run would be on the Hub, or push it there, and hold what came back against what was sent.

python recipes/publish.py runs/mine --repo USER/NAME            (shows files, sizes, card and destination; sends nothing)
python recipes/publish.py runs/mine --repo USER/NAME --push     (one commit; private, unless --public)
python recipes/publish.py runs/mine --repo USER/NAME --space    (its page, recipes/app.py, as a Space of that name; with --push)
python recipes/publish.py --verify USER/NAME                    (whether a repository gives what was saved)

The token is that of `hf auth login`, or HF_TOKEN; HF_ENDPOINT names another Hub. The run's folder is only read. Stopped or failed,
the same command goes on. Exit codes: 0, 1 after an error, 2 for a flag that is wrong.
"""

import argparse
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import warnings
from pathlib import Path


if "HF_ENDPOINT" in os.environ:  # Xet is a protocol of the one Hub; every other speaks that of git LFS
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars, validate_repo_id
from transformers.utils import logging as transformers_logging

from hf_vit.hub import sharing
from hf_vit.system.errors import run_script
from hf_vit.system.escapes import LONGEST_LICENSE, as_license


TEMPLATE = Path(__file__).resolve().parents[1] / "model_cards" / "template.md"
APP = Path(__file__).resolve().with_name("app.py")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="folder of a finished run")
    parser.add_argument("--repo", help="where to: USER/NAME or ORGANISATION/NAME")
    parser.add_argument("--push", action="store_true", help="send it; without, it is only shown")
    parser.add_argument(
        "--public", action="store_true", help="everybody may see the images of the run; a new repository is public"
    )
    parser.add_argument(
        "--revision", help="branch to commit to, which is made where it is not there; main if not given"
    )
    parser.add_argument("--create_pr", action="store_true", help="open a pull request instead of committing to main")
    parser.add_argument(
        "--layout",
        choices=("native", "code"),
        help="native: as a model of transformers itself, which loads without trust_remote_code; code: with the code of the "
        "model beside the weights. Native where it can be, if not given",
    )
    parser.add_argument("--license", help="of the weights, as the Hub calls it: apache-2.0, mit, cc-by-4.0, ...")
    parser.add_argument("--data_license", help="of the images, where their own card does not say it")
    parser.add_argument(
        "--without_images",
        action="store_true",
        help="keep the sample images of the run here, where they are private; what an "
        "earlier push took along stays in the history of the repository",
    )
    parser.add_argument(
        "--output_dir", type=Path, help="keep the folder that would be pushed, to look at; must be new"
    )
    parser.add_argument(
        "--space",
        action="store_true",
        help="not the model, which should be there already, but a Space: a page that shows what it says and looks at",
    )
    parser.add_argument("--timeout", type=float, default=60, help="seconds that the Hub may be silent")
    parser.add_argument("--verify", metavar="REPO", help="hold a repository (or folder) against the probes in it")
    args = parser.parse_args(argv)
    if args.verify is None and args.run is None:
        parser.error("RUN is missing: wanted RUN and --repo USER/NAME, or --verify USER/NAME")
    if args.verify is None and args.repo is None:
        parser.error("--repo is missing: wanted RUN and --repo USER/NAME, or --verify USER/NAME")
    if args.verify is not None and (args.run is not None or args.repo is not None or args.push):
        parser.error("--verify goes alone, or with --revision")
    if args.space and (args.verify is not None or args.data_license is not None):
        parser.error("--space has nothing to verify and no data: leave --verify and --data_license out")
    if args.space and (args.revision is not None or args.create_pr or args.layout is not None):
        parser.error(
            "--space goes to the main branch and has no layout: leave --revision, --create_pr and --layout out"
        )
    if args.create_pr and args.revision is not None:
        parser.error("--create_pr asks for a merge into main: leave --revision out")
    for flag in ("license", "data_license"):
        given = getattr(args, flag)
        if given is not None and given != as_license(given):
            parser.error(f"--{flag} {given!r}: wanted one line of up to {LONGEST_LICENSE} characters")
    if args.timeout <= 0:
        parser.error(f"--timeout is {args.timeout:g}; wanted seconds above 0")
    return args


def show(folder: Path, args, reason: str, there: str):
    """What would be sent, and where to."""
    print((folder / "README.md").read_text(encoding="utf-8"))
    sizes = {name: (folder / name).stat().st_size for name in sharing.files_of(folder)}
    for name, size in sizes.items():
        print(f"{size:>13,}  {name}")
    print(f"{sum(sizes.values()):>13,}  bytes in {len(sizes)} files\n")
    print(remarks(folder, args, reason))
    place = "a new pull request" if args.create_pr else f"branch {args.revision or 'main'}"
    print(f"To: {constants.ENDPOINT}/{args.repo}, {place}, in one commit; the repository is {there}.")
    print("Nothing was sent; --push sends it.")


def remarks(folder: Path, args, reason: str) -> str:
    """What somebody should know before, or at the latest while, the folder is sent."""
    lines = [reason]
    if not sharing.split_card((folder / "README.md").read_text(encoding="utf-8"))[0].get("license"):
        lines.append(
            "The card names no licence of the weights: --license apache-2.0 (or another) lets others use them."
        )
    if not args.without_images:
        lines.append(
            "A few of the scored and training images go along (example.png, probes.safetensors, pictures in figures/): --without_images "
            "keeps them here."
        )
    lines.append("So do the run's command and configuration, with the names of folders in them.")
    return "\n".join(lines)


def destination(args, folder: Path) -> str:
    """What is on the Hub already, in a sentence; its README.md is merged into the one in `folder`, as a push would."""
    card = (folder / "README.md").read_text(encoding="utf-8")
    try:
        sharing.check_card(card)
        try:
            info, there = sharing.inspect_repo(args.repo, args.revision)
        except RevisionNotFoundError:  # the new branch begins as main is
            info, there = sharing.inspect_repo(args.repo)
    except RepositoryNotFoundError:
        return f"not there yet, or not shown to this token: it will be {'public' if args.public else 'private'}"
    except (OSError, json.JSONDecodeError, KeyError, sharing.NETWORK_ERROR) as error:
        return f"perhaps there already, but the Hub could not be asked: {sharing.explain(error, args.repo)}"
    (folder / "README.md").write_text(sharing.merge_cards(card, there, args.license), encoding="utf-8")
    files = sharing.files_of(folder)
    replaced = sorted({file.rfilename for file in info.siblings or ()} & set(files))
    names = lambda what: ", ".join(what) or "none"
    other = sharing.other_model(card, there)
    shown = not (args.public or args.without_images or info.private)
    refused = "; --push refuses to show the run's images there without --public, or --without_images" if shown else ""
    return (
        f"there, {'private' if info.private else 'PUBLIC'}, and stays so{other and f'; its {other} is replaced'}. Its README.md is merged; replaced where they differ: "
        f"{names(replaced)}; deleted, of an earlier push: {names(sharing.outdated(info, files))}; all others are kept{refused}"
    )


def publish_space(args, folder: Path):
    sharing.assemble_space(args.run, folder, APP, args.repo, args.license, with_images=not args.without_images)
    if args.output_dir is not None:
        shutil.copytree(folder, args.output_dir)
    at = f"{constants.ENDPOINT}/spaces/{args.repo}"
    if args.push:
        commit = sharing.push_space(folder, args.repo, public=args.public, with_images=not args.without_images)
        print(f"pushed as {commit.oid[:12]} at {at}; read back, it has the same bytes")
        return
    print((folder / "README.md").read_text(encoding="utf-8"))
    for name in sharing.files_of(folder):
        print(f"{(folder / name).stat().st_size:>13,}  {name}")
    if not args.without_images:
        print("A few of the scored images go along (examples/): --without_images keeps them here.")
    kind = "public" if args.public else "private"
    print(
        f"To: {at}, in one commit; a new Space will be {kind}. It loads the model {args.repo}: push that first. Nothing was sent; --push sends it."
    )


def without_queries(record) -> bool:
    """Take signatures out of the addresses that huggingface_hub logs when it tries again."""
    record.msg, record.args = re.sub(r"(https?://[^\s?]+)\?\S*", r"\1", record.getMessage()), ()
    return True


def main(args: argparse.Namespace):
    transformers_logging.disable_progress_bar()
    if not sys.stderr.isatty():
        disable_progress_bars()
    sharing.set_timeout(args.timeout)
    if args.verify is not None:
        try:
            difference = sharing.verify(args.verify, args.revision)
        except (HfHubHTTPError, ConnectionError, LocalEntryNotFoundError, sharing.NETWORK_ERROR) as error:
            raise OSError(sharing.explain(error, args.verify)) from error
        print(
            f"{args.verify} gives the logits that were saved with it (largest difference {difference:.1e}): nothing was damaged on its "
            "way; who wrote it this cannot tell"
        )
        return
    if args.repo.count("/") != 1:
        raise ValueError(
            f"--repo {args.repo}: wanted USER/NAME, with your name or that of an organisation before the slash"
        )
    validate_repo_id(args.repo)
    if args.push and constants.HF_HUB_OFFLINE:
        raise ValueError("HF_HUB_OFFLINE is set: unset it to push")
    if args.push and get_token() is None:
        raise ValueError("there is no token: log in with `hf auth login`, or set HF_TOKEN to one that may write")
    if args.output_dir is not None and args.output_dir.exists():
        raise ValueError(f"--output_dir {args.output_dir} is there already: name a new folder")

    with tempfile.TemporaryDirectory(prefix="hf_vit-") as temporary:
        folder = Path(temporary) / "repository"
        if args.space:
            publish_space(args, folder)
            return
        reason = sharing.assemble(
            args.run, folder, TEMPLATE, args.repo, revision=args.revision, layout=args.layout, license=args.license,
            data_license=args.data_license, with_images=not args.without_images,
        )  # fmt: skip
        if not args.push:
            show(folder, args, reason, destination(args, folder))
        else:
            print(remarks(folder, args, reason))
            commit, changed = sharing.push(
                folder, args.repo, public=args.public, revision=args.revision, create_pr=args.create_pr, license=args.license,
                with_images=not args.without_images,
            )  # fmt: skip
            print(
                f"{'pushed as' if changed else 'nothing has changed since'} {commit.oid[:12]} at "
                f"{commit.pr_url or f'{constants.ENDPOINT}/{args.repo}'}; read back, it has the same bytes and gives the same logits"
            )
        if args.output_dir is not None:
            shutil.copytree(folder, args.output_dir)


if __name__ == "__main__":
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
    logging.getLogger("huggingface_hub.utils._http").addFilter(without_queries)
    try:
        run_script(lambda: main(parse()))
    except KeyboardInterrupt:
        sys.exit("stopped: nothing on this disk has changed; the same command goes on")

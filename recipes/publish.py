"""Publish a finished run on the Hub, or show what would be published; verify a published model.

    python recipes/publish.py runs/mine --repo USER/NAME
    python recipes/publish.py runs/mine --repo USER/NAME --push
    python recipes/publish.py runs/mine --repo USER/NAME --space --push
    python recipes/publish.py --verify USER/NAME

The first command shows card, files, sizes and destination, and sends nothing. The second makes one
commit, to a private repository unless --public. The third publishes recipes/app.py as a Space.
The last checks that a repository gives the logits saved in it.

The run is one of train.py or pretrain.py; its folder is only read. The token is that of `hf auth
login`, or HF_TOKEN; HF_ENDPOINT names another Hub. After an interruption or a failure, the same
command continues.
"""

import argparse
import logging
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from command_line import Parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, "RUN --repo USER/NAME [--flag value ...], or --verify USER/NAME")
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="folder of a finished run")
    switch = lambda text: dict(action="store_true", help=text)
    parser.add_group(
        "destination",
        repo=dict(metavar="USER/NAME", help="destination: USER/NAME or ORGANISATION/NAME"),
        push=switch("upload; default: only show what would be uploaded"),
        public=switch("make a new repository public, with the sample images; default: private"),
        revision="branch, created if it does not exist; default: main",
        create_pr=switch("open a pull request instead of committing to main"),
        overwrite_card=switch("replace an existing README.md; default: keep its text"),
    )
    layout = "native: loads with transformers alone; code: with the model's code; default: native if possible"
    parser.add_group(
        "content",
        layout=dict(choices=("native", "code"), help=layout),
        license="licence of the weights, as the Hub spells it, such as apache-2.0; default: none",
        without_images=switch("leave out the sample images of the run"),
        output_dir=dict(type=Path, help="new folder that keeps a copy of what would be uploaded"),
        space=switch("publish a Space that shows the model, instead of the model"),
    )
    parser.add_group(
        "afterwards",
        verify=dict(metavar="REPO", help="check that a repository (or folder) gives the logits saved in it"),
    )
    args = parser.parse_args(argv)
    if args.verify is None and None in (args.run, args.repo):
        parser.error("RUN and --repo USER/NAME are needed, or --verify USER/NAME")
    if args.verify is not None and (args.run is not None or args.repo is not None or args.push):
        parser.error("--verify goes alone, or with --revision")
    if args.space and (args.revision is not None or args.create_pr or args.layout is not None):
        parser.error("--space has no branch and no layout: leave --revision, --create_pr and --layout out")
    if args.create_pr and args.revision is not None:
        parser.error("--create_pr asks for a merge into main: leave --revision out")
    return args


if __name__ == "__main__":  # a wrong flag is answered before the imports, which take seconds
    ARGUMENTS = parse_args()

if "HF_ENDPOINT" in os.environ:  # Xet is a protocol of the one Hub; every other speaks that of git LFS
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")

from huggingface_hub import constants, get_token
from huggingface_hub.utils import disable_progress_bars, validate_repo_id
from transformers.utils import logging as transformers_logging

from hf_vit.hub.package import build_package
from hf_vit.hub.push import list_files, push_model
from hf_vit.hub.retry import REQUEST_ERRORS, explain_error, set_http_timeout
from hf_vit.hub.space import build_space, push_space
from hf_vit.hub.verification import verify
from hf_vit.system.errors import UserError, as_user_errors, run_script


RECIPES = Path(__file__).resolve().parent


def show(folder: Path):
    """Print the card, and every file with its size."""
    print((folder / "README.md").read_text(encoding="utf-8"))
    for name in list_files(folder):
        print(f"{(folder / name).stat().st_size:>13,}  {name}")


def publish_model(args, folder: Path):
    about = dict(revision=args.revision, license=args.license, with_images=not args.without_images)
    package = dict(layout=args.layout, pinned=not args.create_pr)
    print(build_package(args.run, folder, RECIPES, args.repo, **about, **package))
    if args.license is None:
        print("The card names no licence of the weights: --license apache-2.0 (or another) lets others use them.")
    if not args.without_images:
        print("A few images of the data set are published: --without_images keeps them here.")
    if not args.push:
        show(folder)
        branch = "a new pull request" if args.create_pr else f"branch {args.revision or 'main'}"
        kind = "public" if args.public else "private"
        print(f"To: {constants.ENDPOINT}/{args.repo}, {branch}, in one commit; a new repository will be {kind}.")
        return
    options = dict(public=args.public, create_pr=args.create_pr, overwrite_card=args.overwrite_card)
    commit, changed = push_model(folder, args.repo, **options, **about)
    done = "pushed as" if changed else "nothing has changed since"
    address = commit.pr_url or f"{constants.ENDPOINT}/{args.repo}"
    print(f"{done} {commit.oid[:12]} at {address}; read back, it has the same bytes and gives the same outputs")


def publish_space(args, folder: Path):
    with_images = not args.without_images
    build_space(args.run, folder, RECIPES / "app.py", args.repo, args.license, with_images=with_images)
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


def check_copy(args):
    """--verify: what the Hub or a folder holds, against its probes."""
    try:
        difference = verify(args.verify, args.revision)
    except REQUEST_ERRORS as error:
        raise UserError(explain_error(error)) from error
    given = f"{args.verify} gives the outputs that were saved with it (largest difference {difference:.1e})"
    print(f"{given}: nothing was damaged on its way; who wrote it this cannot tell")


def hide_queries(record) -> bool:
    """Remove signatures from the addresses that huggingface_hub logs when it tries again."""
    record.msg, record.args = re.sub(r"(https?://[^\s?]+)\?\S*", r"\1", record.getMessage()), ()
    return True


def main(args: argparse.Namespace):
    transformers_logging.disable_progress_bar()
    if not sys.stderr.isatty():
        disable_progress_bars()
    set_http_timeout()
    if args.verify is not None:
        check_copy(args)
        return
    if args.repo.count("/") != 1:
        raise UserError(f"--repo must be USER/NAME, got {args.repo}")
    with as_user_errors():
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
        if not args.push:
            print("Nothing was sent; the same command with --push sends it.")
        if args.output_dir is not None:
            shutil.copytree(folder, args.output_dir)


if __name__ == "__main__":
    logging.getLogger("huggingface_hub.utils._http").addFilter(hide_queries)
    run_script(lambda: main(ARGUMENTS))

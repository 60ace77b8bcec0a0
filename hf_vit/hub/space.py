"""A Space: the page of recipes/app.py on the Hub, for a model that was pushed."""

import platform
import re
import shutil
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from huggingface_hub import HfApi, SpaceCardData
from packaging.requirements import Requirement

from hf_vit.card import num_channels
from hf_vit.hub.finished_run import read_run, write_examples
from hf_vit.hub.push import check_card, commit_files, list_files, read_back, refuse_public_images, remote_files
from hf_vit.hub.retry import retry
from hf_vit.system.errors import UserError
from hf_vit.system.hub_names import name_of_path
from hf_vit.system.text import as_license, inline


MANAGED_FILES = re.compile(r"hf_vit/.*|examples/\d+\.png")  # what an earlier push may have left


def build_space(run: Path, folder: Path, app: Path, repo: str, license: str | None = None, with_images: bool = True):
    """Write a Space into `folder`: the page, this package, its requirements, and example images.

    Args:
        run: the folder of a finished run; it is only read.
        app: recipes/app.py.
        repo: the model that the page loads, USER/NAME on the Hub.
        with_images: whether a few of the evaluated images are published as examples.

    Raises:
        ValueError: if the run is not finished, the page cannot show its model, or Gradio is not installed.
    """
    results, _ = read_run(run)
    if (channels := num_channels(run / "model")) not in (1, 3) or results.per_class is None:
        raise UserError(f"{run / 'model'}: the page shows classifiers of images with 1 or 3 channels, got {channels}")
    try:
        gradio = version("gradio")
    except PackageNotFoundError as error:
        raise UserError("Gradio is not installed, whose version the Space names: pip install 'hf_vit[app]'") from error
    package = Path(__file__).parents[1]
    # export.py takes packages that a page does not need.
    shutil.copytree(package, folder / "hf_vit", ignore=shutil.ignore_patterns("__pycache__", "export.py"))
    shutil.copy(app, folder / "app.py")
    shutil.copy(app.with_name("command_line.py"), folder)
    requirements = [Requirement(text) for text in requires("hf_vit")]
    needed = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": "recipes"})]
    (folder / "requirements.txt").write_text("".join(f"{each.name}{each.specifier}\n" for each in needed))
    if with_images:
        write_examples(run, folder / "examples")
    title = f"What a Vision Transformer sees: {name_of_path(results.data['name'])}"
    metadata = SpaceCardData(
        title=title,
        sdk="gradio",
        sdk_version=gradio,
        python_version=".".join(platform.python_version_tuple()[:2]),  # by default it is too old for this package
        app_file="app.py",
        models=[repo],
        license=as_license(license),
    )
    (folder / "README.md").write_text(
        f"---\n{metadata}\n---\n\n# {inline(title)}\n\nThe page of [{repo}](https://hf.co/{repo}): drop an image to see the predicted "
        "class and the patches that count for it. If that repository is private, the Space needs a secret `HF_TOKEN` that may "
        "read it.\n",
        encoding="utf-8",
    )


def push_space(folder: Path, repo: str, *, public: bool = False, with_images: bool = False, log=print):
    """Make `folder` the newest state of a Space, in one commit, and read it back.

    What an earlier push left of the package and the examples is deleted; other files are kept.

    Args:
        with_images: the folder shows images of the run, which never go to a public Space unless `public`.

    Raises:
        ValueError: if images would become public, or the Hub refuses, cannot be reached, or returns other files than were sent.
    """
    card, files = (folder / "README.md").read_text(encoding="utf-8"), list_files(folder)

    def attempt():
        check_card(card, "space")
        if with_images and not public:
            refuse_public_images(repo, "space")
        HfApi().create_repo(repo, repo_type="space", space_sdk="gradio", private=not public, exist_ok=True)
        info = HfApi().space_info(repo)
        stale = [name for name in remote_files(info) if MANAGED_FILES.fullmatch(name) and name not in files]
        message = f"The page of a Vision Transformer, pushed by hf_vit {version('hf_vit')}"
        return commit_files(repo, folder, files, stale, repo_type="space", commit_message=message)

    commit = retry(attempt, log)
    read_back(folder, repo, commit, log, repo_type="space")
    return commit

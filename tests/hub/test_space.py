"""Claims about the Space that `recipes/publish.py --space` makes of a run: its files, and how they get to the Hub."""

import importlib.metadata
import re
import shutil
import sys

import pytest
from huggingface_hub import ModelCard
from loopback_hub import check_card
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from publishing import FOR_EVER, HOUSE, content, one_line, recipe

from hf_vit.hub import space as spaces


APP = HOUSE / "recipes" / "app.py"
EXAMPLES = {f"examples/{number}.png" for number in range(1, 7)}
pytest.importorskip("gradio", reason="a Space names the version of Gradio: pip install 'hf_vit[app]'")


# ----------------------------------------------------------------------------------------------------------------------
# The folder of a Space


@pytest.fixture(scope="module")
def space(tmp_path_factory, demo_run):
    folder = tmp_path_factory.mktemp("space") / "space"
    spaces.build_space(demo_run, folder, APP, "alice/model", "apache-2.0")
    return folder


def test_a_space_is_the_page_the_package_and_what_they_need(space):
    files = content(space)
    package = {
        f"hf_vit/{name}"
        for name in content(HOUSE / "hf_vit")
        if "__pycache__" not in name and not name.endswith("hub/export.py")
    }
    assert {*files} == {"app.py", "command_line.py", "README.md", "requirements.txt", *package, *EXAMPLES}
    assert files["app.py"] == APP.read_bytes()
    for name in package:
        assert files[name] == (HOUSE / name).read_bytes()


def test_a_space_requires_every_package_that_its_files_import(space):
    """What is imported within functions can be done without."""
    lines = map(Requirement, (space / "requirements.txt").read_text().splitlines())
    wanted = {canonicalize_name(requirement.name): requirement for requirement in lines}
    files, dists = (
        [*space.glob("*.py"), *(space / "hf_vit").rglob("*.py")],
        importlib.metadata.packages_distributions(),
    )
    names = {name for file in files for name in re.findall(r"^(?:import|from) (\w+)", file.read_text(), re.MULTILINE)}
    names -= {*sys.stdlib_module_names, "hf_vit", "gradio", "command_line"}
    assert [name for name in names if wanted.keys().isdisjoint(map(canonicalize_name, dists[name]))] == []
    for name, requirement in wanted.items():
        assert requirement.specifier.contains(importlib.metadata.version(name), prereleases=True)


def test_the_readme_of_a_space_names_the_model_and_what_runs_it(space, demo_run, tmp_path):
    card = ModelCard.load(space / "README.md").data.to_dict()
    assert (card["models"], card["license"]) == (["alice/model"], "apache-2.0")
    assert (card["sdk"], card["sdk_version"]) == ("gradio", importlib.metadata.version("gradio"))
    assert card["python_version"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert (space / card["app_file"]).is_file()
    assert check_card((space / "README.md").read_text(), is_space=True) == []
    spaces.build_space(demo_run, tmp_path / "space", APP, "alice/model", with_images=False)
    assert {*content(space)} - {*content(tmp_path / "space")} == EXAMPLES


def test_a_run_that_has_no_page_is_refused(run, demo_run, tiny_config, tmp_path, monkeypatch):
    assemble = lambda folder, **options: spaces.build_space(folder, tmp_path / "space", APP, "alice/model", **options)
    (run / "samples.safetensors").unlink()
    with one_line("--without_images"):
        assemble(run)
    shutil.rmtree(tmp_path / "space", ignore_errors=True)
    assemble(run, with_images=False)
    with monkeypatch.context() as patch, one_line("Gradio is not installed.*pip install"):
        patch.setattr(spaces, "version", lambda name: importlib.metadata.version("no-such-package"))
        assemble(demo_run)
    tiny_config(num_channels=5).save_pretrained(run / "model")
    with one_line("got 5"):
        assemble(run)
    (run / "results.json").unlink()
    with one_line(r"results\.json"):
        assemble(run)


def test_a_pushed_space_has_the_same_bytes_and_is_private(demo_run, hub, tmp_path, capsys):
    hub.put("alice/model", {"README.md": b"theirs"})
    recipe(demo_run, f"--repo alice/model --space --push --license mit --output_dir {tmp_path}/kept")
    said = capsys.readouterr().out
    assert hub.history("spaces/alice/model")[-1][:12] in said
    assert f"{hub.url}/spaces/alice/model" in said
    assert hub.repos["spaces/alice/model"].private
    files = hub.files("spaces/alice/model")
    assert files.pop(".gitattributes")
    assert files == content(tmp_path / "kept")
    assert hub.files("alice/model") == {"README.md": b"theirs"}


def test_a_space_is_pushed_again_and_keeps_what_others_put_there(space, hub):
    spaces.push_space(space, "alice/page", public=True)
    assert not hub.repos["spaces/alice/page"].private
    theirs = {"notes.txt": b"theirs", "examples/mine.jpg": b"theirs"}
    hub.put("spaces/alice/page", {**theirs, "hf_vit/old.py": b"ours, once"})
    hub.fault("POST", "/api/spaces/alice/page/commit/", status=500)  # which passes
    spaces.push_space(space, "alice/page", log=lambda _: None)
    files = hub.files("spaces/alice/page")
    assert files.pop(".gitattributes")
    assert files == content(space) | theirs
    assert not hub.repos["spaces/alice/page"].private
    hub.fault("GET", "/spaces/alice/page/resolve/.*/app.py", corrupt=True, times=FOR_EVER)
    with one_line("app.py"):
        spaces.push_space(space, "alice/page", log=lambda _: None)


def test_without_push_a_space_is_shown_and_nothing_sent(demo_run, space, hub, tmp_path, capsys):
    flags = f"--repo alice/model --space --license apache-2.0 --output_dir {tmp_path}/kept"
    recipe(demo_run, flags)
    assert content(tmp_path / "kept") == content(space)
    shown = capsys.readouterr().out
    assert (space / "README.md").read_text() in shown
    assert all(f"{len(data):,}  {name}\n" in shown for name, data in content(space).items())
    assert f"{hub.url}/spaces/alice/model" in shown
    assert hub.requests == []
    with one_line("--output_dir"):
        recipe(demo_run, flags)


@pytest.mark.parametrize("flags", ["--revision v2", "--create_pr", "--layout code"])
def test_a_space_has_no_branch_and_no_layout(flags, demo_run, capsys):
    with pytest.raises(SystemExit):
        recipe(demo_run, "--repo alice/page --space", flags)
    assert "--space" in capsys.readouterr().err

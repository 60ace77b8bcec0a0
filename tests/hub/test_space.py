"""Claims about the Space that `recipes/publish.py --space` makes of a run: its files, and how they get to the Hub."""

import ast
import importlib.metadata
import re
import shutil
import sys
from pathlib import Path

import publish
import pytest
from huggingface_hub import ModelCard
from loopback_hub import Hub, check_space
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_publish import FOR_EVER, at, command, content, one_line, recipe, talking_to

from hf_vit.hub import space as spaces
from hf_vit.system.errors import UserError
from hf_vit.system.files import checksum


pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=<...>':DeprecationWarning"
)  # huggingface_hub 2.4 to httpx2
HOUSE = Path(__file__).parents[2]
APP = HOUSE / "recipes" / "app.py"
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
    examples = {f"examples/{number}.png" for number in range(1, 7)}
    assert {*files} == {"app.py", "command_line.py", "README.md", "requirements.txt", *package, *examples}
    assert files["app.py"] == APP.read_bytes()
    for name in package:
        assert files[name] == (HOUSE / name).read_bytes()


def test_a_space_requires_every_package_that_its_files_import(space):
    lines = (space / "requirements.txt").read_text().splitlines()
    wanted = {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}
    assert len(wanted) == len(lines)
    dists, missing = importlib.metadata.packages_distributions(), set()
    for file in [space / "app.py", space / "command_line.py", *(space / "hf_vit").rglob("*.py")]:
        for node in ast.parse(file.read_text()).body:  # within functions it is what can be done without
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in (
                {name.partition(".")[0] for name in names}
                - {*sys.stdlib_module_names}
                - {"hf_vit", "gradio", "command_line"}
            ):
                if not {canonicalize_name(each) for each in dists.get(name, [name])} & {*wanted}:
                    missing.add((file.relative_to(space).as_posix(), name))
    assert missing == set()
    for name, requirement in wanted.items():
        assert requirement.specifier.contains(importlib.metadata.version(name), prereleases=True)


def test_the_readme_of_a_space_names_the_model_and_what_runs_it(space, demo_run, tmp_path):
    card = ModelCard.load(space / "README.md").data.to_dict()
    assert card["models"] == ["alice/model"]
    assert card["license"] == "apache-2.0"
    assert (card["sdk"], card["sdk_version"]) == ("gradio", importlib.metadata.version("gradio"))
    assert card["python_version"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert (space / card["app_file"]).is_file()
    text = (space / "README.md").read_text()
    assert check_space(text) == []
    assert "https://hf.co/alice/model" in text
    spaces.build_space(demo_run, tmp_path / "space", APP, "alice/model", with_images=False)
    assert "license" not in ModelCard.load(tmp_path / "space" / "README.md").data.to_dict()
    assert {*content(space)} - {*content(tmp_path / "space")} == {f"examples/{number}.png" for number in range(1, 7)}


def test_a_run_that_has_no_page_is_refused(demo_run, tiny_config, tmp_path, monkeypatch):
    """a Space of a run that is not finished, has no sample images or takes five channels; Gradio is not installed | one line says so"""
    run = shutil.copytree(demo_run, tmp_path / "run")
    assemble = lambda folder, **options: spaces.build_space(folder, tmp_path / "space", APP, "alice/model", **options)
    (run / "samples.safetensors").unlink()
    with one_line(ValueError, "--without_images"):
        assemble(run)
    shutil.rmtree(tmp_path / "space", ignore_errors=True)
    assemble(run, with_images=False)
    with monkeypatch.context() as patch, one_line(ValueError, "Gradio is not installed.*pip install"):
        patch.setattr(spaces, "version", lambda name: importlib.metadata.version("no-such-package"))
        assemble(demo_run)
    tiny_config(num_channels=5).save_pretrained(run / "model")
    with one_line(ValueError, "got 5"):
        assemble(run)
    (run / "results.json").unlink()
    with one_line(ValueError, r"results\.json"):
        assemble(run)


# ----------------------------------------------------------------------------------------------------------------------
# To the Hub


@pytest.fixture
def hub(tmp_path):
    with Hub() as hub, talking_to(hub.url, tmp_path / "home") as hub.waits:
        yield hub


def test_a_pushed_space_has_the_same_bytes_and_is_private(demo_run, tmp_path):
    with Hub() as hub:
        hub.put("alice/model", {"README.md": b"theirs"})
        flags = ["--repo", "alice/model", "--space", "--push", "--license", "mit", "--output_dir", tmp_path / "kept"]
        done = command(demo_run, *flags, cwd=tmp_path, **at(hub, tmp_path / "home"))
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        commit = hub.history("spaces/alice/model")[-1]
        assert f"pushed as {commit[:12]} at {hub.url}/spaces/alice/model" in done.stdout
        assert hub.repos["spaces/alice/model"].private
        files = hub.files("spaces/alice/model")
        assert files.pop(".gitattributes")
        assert files == content(tmp_path / "kept")
        assert {checksum(tmp_path / "kept" / "examples" / "1.png")} <= {sent.sha256 for sent in hub.uploaded}
        assert hub.files("alice/model") == {"README.md": b"theirs"}


def test_a_space_is_pushed_again_and_keeps_what_others_put_there(space, hub):
    spaces.push_space(space, "team/page", public=True)
    assert not hub.repos["spaces/team/page"].private
    hub.put(
        "spaces/team/page", {"notes.txt": b"theirs", "examples/mine.jpg": b"theirs", "hf_vit/old.py": b"ours, once"}
    )
    spaces.push_space(space, "team/page")
    files = hub.files("spaces/team/page")
    assert files.items() >= content(space).items()
    assert {*files} - {*content(space)} == {".gitattributes", "notes.txt", "examples/mine.jpg"}
    assert not hub.repos["spaces/team/page"].private


def test_examples_leave_a_space_that_is_pushed_without_images(demo_run, hub, capsys):
    recipe(demo_run, "--repo", "alice/page", "--space", "--push")
    recipe(demo_run, "--repo", "alice/page", "--space", "--push", "--without_images")
    assert [name for name in hub.files("spaces/alice/page") if name.endswith(".png")] == []
    assert capsys.readouterr().out.count("read back, it has the same bytes") == 2


def test_without_push_a_space_is_shown_and_nothing_sent(demo_run, space, hub, tmp_path, capsys):
    recipe(demo_run, "--repo", "alice/model", "--space", "--license", "apache-2.0", "--output_dir", tmp_path / "kept")
    assert content(tmp_path / "kept") == content(space)
    shown = capsys.readouterr().out
    assert (space / "README.md").read_text() in shown
    for name, data in content(space).items():
        assert re.search(rf"^ *{len(data):,}  {re.escape(name)}$", shown, re.MULTILINE), name
    assert f"To: {hub.url}/spaces/alice/model, in one commit; a new Space will be private." in shown
    assert hub.requests == []
    with one_line(ValueError, "--output_dir"):
        recipe(demo_run, "--repo", "alice/model", "--space", "--output_dir", tmp_path / "kept")


@pytest.mark.parametrize("flags", [["--revision", "v2"], ["--create_pr"], ["--layout", "code"]])
def test_a_space_has_no_branch_and_no_layout(flags, demo_run, capsys):
    """--space with --revision, --create_pr or --layout | refused in a sentence, exit code 2"""
    with pytest.raises(SystemExit) as ended:
        publish.parse_args([str(demo_run), "--repo", "alice/page", "--space", *flags])
    assert ended.value.code == 2
    assert "--space" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "advice"), [(401, "hf auth login"), (403, "under your own name"), (500, "500")])
def test_a_space_that_cannot_be_pushed_ends_in_one_line(status, advice, space, hub):
    """the Hub refuses a Space, or fails (401, 403, 500) | one line says what to do"""
    hub.fault("POST", "/api/spaces/alice/page/commit/", status=status, times=FOR_EVER)
    with one_line(UserError, advice):
        spaces.push_space(space, "alice/page", log=lambda _: None)


def test_a_hub_that_fails_for_a_moment_gets_the_space(space, hub):
    hub.fault("POST", "/api/repos/create", status=500)
    hub.fault("POST", "/api/spaces/alice/page/commit/", status=500)
    hub.fault("GET", "/spaces/alice/page/resolve/.*/app.py", corrupt=True)
    spaces.push_space(space, "alice/page", log=lambda _: None)
    assert len(hub.history("spaces/alice/page")) == 2
    assert hub.waits == [1, 2]


def test_a_space_that_comes_back_changed_is_told(space, hub):
    hub.fault("GET", "/spaces/alice/page/resolve/.*/app.py", corrupt=True, times=FOR_EVER)
    with one_line(UserError, "app.py"):
        spaces.push_space(space, "alice/page", log=lambda _: None)


def test_a_licence_that_the_hub_does_not_know_ends_in_one_line(demo_run, hub):
    """the licence of a Space is none that the Hub knows | one line, with what the Hub says; no Space is made"""
    with one_line(ValueError, "license"):
        recipe(demo_run, "--repo", "alice/page", "--space", "--push", "--license", "free-beer")
    assert hub.repos == {}

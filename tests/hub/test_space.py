"""Claims about the Space that `recipes/publish.py --space` makes of a run: its files, and how they get to the Hub."""

import ast
import importlib.metadata
import shutil
import sys

import pytest
from huggingface_hub import ModelCard
from loopback_hub import check_card
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from publishing import FOR_EVER, HOUSE, content, one_line, publish, recipe

from hf_vit.hub import space as spaces


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
    assert check_card(text, is_space=True) == []
    assert "https://hf.co/alice/model" in text
    spaces.build_space(demo_run, tmp_path / "space", APP, "alice/model", with_images=False)
    assert {*content(space)} - {*content(tmp_path / "space")} == {f"examples/{number}.png" for number in range(1, 7)}


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
    recipe(
        demo_run, "--repo", "alice/model", "--space", "--push", "--license", "mit", "--output_dir", tmp_path / "kept"
    )
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
    hub.put(
        "spaces/alice/page", {"notes.txt": b"theirs", "examples/mine.jpg": b"theirs", "hf_vit/old.py": b"ours, once"}
    )
    spaces.push_space(space, "alice/page")
    files = hub.files("spaces/alice/page")
    assert files.items() >= content(space).items()
    assert {*files} - {*content(space)} == {".gitattributes", "notes.txt", "examples/mine.jpg"}
    assert not hub.repos["spaces/alice/page"].private


def test_without_push_a_space_is_shown_and_nothing_sent(demo_run, space, hub, tmp_path, capsys):
    flags = ("--repo", "alice/model", "--space", "--license", "apache-2.0", "--output_dir", tmp_path / "kept")
    recipe(demo_run, *flags)
    assert content(tmp_path / "kept") == content(space)
    shown = capsys.readouterr().out
    assert (space / "README.md").read_text() in shown
    assert all(f"{len(data):,}  {name}\n" in shown for name, data in content(space).items())
    assert f"{hub.url}/spaces/alice/model" in shown
    assert hub.requests == []
    with one_line("--output_dir"):
        recipe(demo_run, *flags)


@pytest.mark.parametrize("flags", [["--revision", "v2"], ["--create_pr"], ["--layout", "code"]])
def test_a_space_has_no_branch_and_no_layout(flags, demo_run, capsys):
    with pytest.raises(SystemExit) as ended:
        publish.parse_args([str(demo_run), "--repo", "alice/page", "--space", *flags])
    assert ended.value.code == 2
    assert "--space" in capsys.readouterr().err


def test_a_hub_that_fails_for_a_moment_gets_the_space_and_one_that_changes_its_bytes_is_told(space, hub):
    hub.fault("POST", "/api/repos/create", status=500)
    hub.fault("POST", "/api/spaces/alice/page/commit/", status=500)
    fault = hub.fault("GET", "/spaces/alice/page/resolve/.*/app.py", corrupt=True)
    spaces.push_space(space, "alice/page", log=lambda _: None)
    assert len(hub.history("spaces/alice/page")) == 2
    assert hub.waits == [1, 2]
    fault.times = FOR_EVER
    with one_line("app.py"):
        spaces.push_space(space, "alice/page", log=lambda _: None)

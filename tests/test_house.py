"""Claims about the repository: what it requires, how it is tested, and that its pages list its files."""

import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement


HOUSE = Path(__file__).parents[1]
README = (HOUSE / "README.md").read_text()
PROJECT = tomllib.loads((HOUSE / "pyproject.toml").read_text())


def requirements():
    extras = PROJECT["project"]["optional-dependencies"].values()
    return [Requirement(line) for line in sum(extras, PROJECT["project"]["dependencies"])]


def test_torchvision_is_never_required():
    """Its import fails beside a CPU build of torch."""
    assert "torchvision" not in {requirement.name for requirement in requirements()}
    files = [*HOUSE.glob("hf_vit/**/*.py"), *HOUSE.glob("recipes/**/*.py")]
    assert not [file for file in files if re.search(r"^\s*(import|from) torchvision", file.read_text(), re.MULTILINE)]


def test_nothing_that_is_required_requires_torchvision():
    waiting, seen = [requirement.name for requirement in requirements()], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    assert len(seen) > 20
    assert "torchvision" not in seen


def test_ranges_are_open_and_the_tested_set_is_one():
    """The constraints pick a torch that has a CPU wheel; pyproject.toml leaves room."""
    pinned = {
        Requirement(line).name: Requirement(line).specifier
        for line in (HOUSE / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    assert str(pinned["torch"]) == "==2.13.0"
    for requirement in requirements():
        assert "==" not in str(requirement.specifier)
        if requirement.name in pinned:
            (pin,) = pinned[requirement.name]
            assert pin.version in requirement.specifier


def test_ci_runs_the_readmes_test_command():
    assert "\nmake test\n" in README
    assert [line for line in (HOUSE / ".ci" / "run").read_text().splitlines() if line.startswith("make")] == [
        "make test"
    ]
    assert "- run: make test" in (HOUSE / ".github" / "workflows" / "test.yml").read_text()


def test_the_list_of_files_names_every_room_and_script_and_nothing_else():
    text = (HOUSE / "CONTRIBUTING.md").read_text()
    listed = re.findall(r"^    ((?:hf_vit|recipes|model_cards|tests)/\S*)", text, re.MULTILINE)
    assert [name for name in listed if not (HOUSE / name).exists()] == []
    modules = [f"recipes/{file.name}" for file in (HOUSE / "recipes").glob("*.py")]
    modules += ["hf_vit/figures.py"] + [f"hf_vit/{room.parent.name}/" for room in HOUSE.glob("hf_vit/*/__init__.py")]
    assert sorted(set(modules) - set(listed)) == []


def test_every_page_of_the_handbook_is_linked_and_every_link_leads_to_a_file():
    pages = [HOUSE / "README.md", *HOUSE.glob("recipes/README.md"), *HOUSE.glob("recipes/docs/*.md")]
    links = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in pages
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
        if "://" not in target
    }
    assert [str(target) for target in links if not target.exists()] == []
    assert [page.name for page in (HOUSE / "recipes" / "docs").glob("*.md") if page.resolve() not in links] == []


@pytest.mark.parametrize("name", ["demo", "test"])
def test_make_knows_the_readmes_commands(name):
    result = subprocess.run(["make", "-n", name], cwd=HOUSE, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr

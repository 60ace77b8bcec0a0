"""Claims about the repository: what is promised in words holds."""

import importlib.metadata
import json
import re
import subprocess
import sys
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
    """T22: with a CPU build of torch its import fails."""
    assert "torchvision" not in {requirement.name for requirement in requirements()}
    files = [*HOUSE.glob("hf_vit/**/*.py"), *HOUSE.glob("recipes/**/*.py")]
    assert not [file for file in files if re.search(r"^\s*(import|from) torchvision", file.read_text(), re.MULTILINE)]


def test_nothing_that_is_required_requires_torchvision():
    """T22, for the whole tree of requirements."""
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
    """T23: the constraints pick the torch whose CPU wheel is at hand, pyproject.toml leaves room."""
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
    assert "\n    make test\n" in README
    assert [line for line in (HOUSE / ".ci" / "run").read_text().splitlines() if line.startswith("make")] == [
        "make test"
    ]
    assert "- run: make test" in (HOUSE / ".github" / "workflows" / "test.yml").read_text()


def test_every_file_in_the_readme_exists_and_every_module_is_in_it():
    listed = re.findall(r"^    ((?:hf_vit|recipes|model_cards|tests)/\S*)", README, re.MULTILINE)
    assert [name for name in listed if not (HOUSE / name).exists()] == []
    modules = [
        f"{file.parent.name}/{file.name}" for folder in ("hf_vit", "recipes") for file in (HOUSE / folder).glob("*.py")
    ]
    assert sorted(set(modules) - set(listed)) == ["hf_vit/__init__.py"]


def test_the_tables_are_what_the_script_writes():
    sys.path.insert(0, str(HOUSE / "recipes"))
    try:
        import tables
    finally:
        sys.path.pop(0)
    pages = {page: (HOUSE / page).read_text() for page in tables.PAGES}
    assert {page: tables.with_tables(text, HOUSE) for page, text in pages.items()} == pages
    for name in tables.TABLES:
        assert sum(f"<!-- {name}: recipes/tables.py writes this -->" in text for text in pages.values()) == 1


@pytest.mark.parametrize("file", sorted(HOUSE.glob("model_cards/*/results.json")), ids=lambda file: file.parent.name)
def test_a_published_runs_preset_and_card_state_its_results(file):
    accuracy = f"{100 * json.loads(file.read_text())['metrics']['accuracy']:.2f}%"
    assert accuracy in (HOUSE / "recipes" / "configs" / f"{file.parent.name}.yaml").read_text()
    assert accuracy in (file.parent / "README.md").read_text()


@pytest.mark.parametrize("name", ["demo", "test"])
def test_make_knows_the_readmes_commands(name):
    result = subprocess.run(["make", "-n", name], cwd=HOUSE, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr

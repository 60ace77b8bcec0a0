"""Claims about the repository: what it requires, how it is tested, and that its pages list its files."""

import re
import tomllib
from pathlib import Path

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


def test_the_tested_set_lies_in_the_ranges_that_are_required():
    lines = (HOUSE / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {requirement.name: next(iter(requirement.specifier)).version for requirement in pinned}
    known = [requirement for requirement in requirements() if requirement.name in versions]
    assert [one.name for one in known if not one.specifier.contains(versions[one.name])] == []


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

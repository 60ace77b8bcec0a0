"""Claims about the repository: what it requires, how it is tested, and that its pages list its files."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement


HOUSE = Path(__file__).parents[1]


def test_torchvision_is_never_required():
    """Its import fails beside a CPU build of torch; these tests run without it."""
    project = tomllib.loads((HOUSE / "pyproject.toml").read_text())["project"]
    required = sum(project["optional-dependencies"].values(), project["dependencies"])
    assert "torchvision" not in {Requirement(line).name for line in required}


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

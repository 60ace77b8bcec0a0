"""Imports only go down: each room of hf_vit knows the rooms below it and none beside or above it; recipes/ know all."""

import ast
from pathlib import Path


HOUSE = Path(__file__).parents[1]
FLOORS = [
    {"system"},
    {"model"},
    {"formats"},
    {"data"},
    {"evaluation"},
    {"figures", "card"},
    {"run_figures"},
    {"training"},
    {"hub"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# Rooms that are below and closed all the same: what travels to the Hub stands alone, images know no model, and a run is shared
# without what trained it.
CLOSED = {"model": {"system"}, "data": {"model", "formats"}, "hub": {"training"}}


def imported_names(file: Path):
    """(line number, dotted name) of every import, at the top or in a function; relative imports are resolved."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = file.relative_to(HOUSE).parts[: -node.level] if node.level else ()
            module = ".".join([*package, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def test_no_import_goes_up_a_floor():
    found = []
    for file in HOUSE.glob("hf_vit/**/*.py"):
        room = file.relative_to(HOUSE / "hf_vit").with_suffix("").parts[0]
        known = {name for name in FLOOR if room != "__init__" and FLOOR[name] < FLOOR[room]} - CLOSED.get(room, set())
        known |= {"model", "formats"} if room == "__init__" else {room}
        for line, name in imported_names(file):
            top, reached = f"{name}.".split(".")[:2]
            reached = reached if reached in FLOOR else "model"  # for a name that the package itself gives
            if "recipes" in top or (top == "hf_vit" and reached not in known):
                found.append(f"{file.relative_to(HOUSE)}:{line} {room} -> {name}")
    assert found == []

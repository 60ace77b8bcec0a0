"""Imports only go down: each room of hf_vit, and recipes/, knows the rooms below it and none beside or above it."""

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
    {"recipes"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# Rooms that are below and closed all the same: what travels to the Hub stands alone, images know no model, and a run is shared
# without what trained it.
CLOSED = {"model": {"system"}, "data": {"model", "formats"}, "hub": {"training"}}


def room_of(file: Path, house: Path) -> str:
    """The first folder below hf_vit/, or the name of a file there; `__init__` is that of the package itself."""
    top, *inside = file.relative_to(house).with_suffix("").parts
    return inside[0] if top == "hf_vit" else top


def imported_names(file: Path, house: Path):
    """(line number, dotted name) of every import, at the top or in a function; relative imports are resolved."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = file.relative_to(house).parts[: -node.level] if node.level else ()
            module = ".".join([*package, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def imported_room(name: str, scripts: set[str]) -> str | None:
    """The room that an import reaches; the models, for a name that `hf_vit` itself gives; None for other libraries."""
    top, *rest = name.split(".")
    if top == "hf_vit":
        return rest[0] if rest and rest[0] in FLOOR else "model"
    return "recipes" if top in scripts else None


def imports_going_up(house: Path) -> list[str]:
    """Every import of a room that the importing one may not know, as `file:line room -> room`."""
    package, recipes = (sorted(house.glob(f"{folder}/**/*.py")) for folder in ("hf_vit", "recipes"))
    scripts = {
        name for file in recipes for name in (file.stem, file.parent.name)
    }  # how a file of recipes/ is imported
    found = []
    for file in [*package, *recipes]:
        room = room_of(file, house)
        below = {name for name in FLOOR if FLOOR[name] < FLOOR[room]} if room != "__init__" else {"model", "formats"}
        known = below - CLOSED.get(room, set()) | {room}
        for line, name in imported_names(file, house):
            reached = imported_room(name, scripts)
            if reached is not None and reached not in known:
                found.append(f"{file.relative_to(house)}:{line} {room} -> {reached}")
    return found


def test_no_import_goes_up_a_floor():
    assert imports_going_up(HOUSE) == []


def test_every_room_has_a_floor():
    rooms = {room_of(file, HOUSE) for file in [*HOUSE.glob("hf_vit/**/*.py"), *HOUSE.glob("recipes/**/*.py")]}
    assert rooms - {"__init__"} == set(FLOOR)

"""Fields of HFViTConfig with the values that they may have, which `@strict` checks whenever one is set."""

import dataclasses
from collections.abc import Callable
from typing import Any


# Above anything published: ViT-22B is 24,576 wide (arXiv 2302.05442, table 1). A config.json that asks for more is a mistake or an
# attack: building it would fill the memory.
MAX_SIZE, MAX_WIDTH, MAX_LAYERS, MAX_LABELS = 2**16, 2**15, 1000, 10**6


def checked(default, holds: Callable[[Any], bool], wanted: str):
    """A field whose value, where it is not None, must hold; transformers' own `interval` would take 1.4 s to import."""

    def validate(value):
        if value is not None and not holds(value):
            raise ValueError(f"must be {wanted}, got {value}")

    return dataclasses.field(default=default, metadata={"validator": validate})


def count(default, least=1, most=MAX_SIZE):
    return checked(default, lambda value: least <= value <= most, f"in [{least}, {most}]")


def pair(default):
    return checked(
        default,
        lambda value: all(1 <= side <= MAX_SIZE for side in as_pair(value)),
        f"one or two sizes in [1, {MAX_SIZE}]",
    )


def rate(default=0.0):
    return checked(default, lambda value: 0 <= value < 1, "in [0, 1)")


def positive(default):
    return checked(default, lambda value: value > 0, "above 0")


def check_counts(config: dict):
    """Raise ValueError for as many labels or layers as no model has: a config makes a name for each before it is checked."""
    for name, most in (("num_labels", MAX_LABELS), ("num_hidden_layers", MAX_LAYERS)):
        if isinstance(config.get(name), int) and config[name] > most:
            raise ValueError(f"{name} in config.json must be at most {most}, got {config[name]}")


def as_pair(size) -> tuple[int, int]:
    """`16` or `[16, 8]` -> (height, width)."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def labels_by_id(id2label: dict) -> dict[int, str]:
    """Class names in the order of their ids, whatever the order in a file and whether its ids are text or numbers.

    Raises:
        ValueError: unless the ids are 0, 1, 2, ..., each once.
    """
    try:
        ids = [int(index) for index in id2label]
    except (TypeError, ValueError):
        ids = []
    if sorted(ids) != list(range(len(id2label))):
        shown = ", ".join(repr(index) for index in list(id2label)[:5]) + (", ..." if len(id2label) > 5 else "")
        raise ValueError(
            f"id2label has the ids {shown}; wanted each of 0 to {len(id2label) - 1} once, for the {len(id2label)} rows of the "
            "head: give every row a name in config.json"
        )
    return dict(sorted(zip(ids, id2label.values(), strict=True)))

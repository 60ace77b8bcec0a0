"""Fields of HFViTConfig with the values that they may have, which `@strict` checks whenever one is set."""

import dataclasses


# Above anything published: ViT-22B is 24,576 wide (arXiv 2302.05442, table 1). A config.json that asks for more is a mistake or an
# attack: building it would fill the memory.
MAX_SIZE, MAX_WIDTH, MAX_LAYERS, MAX_LABELS = 2**16, 2**15, 1000, 10**6
MAX_RATE = 0.999  # of what is dropped or masked: something must be left


def within(default, least=1, most=MAX_SIZE):
    """A field of numbers in [least, most], or None; of a pair, both. transformers' `interval` imports torch."""

    def validate(value):
        if value is not None and not all(least <= number <= most for number in as_pair(value)):
            raise ValueError(f"must be in [{least}, {most}], got {value}")

    return dataclasses.field(default=default, metadata={"validator": validate})


def check_counts(config: dict):
    """Raise ValueError for as many labels or layers as no model has: a config makes a name for each before it is checked."""
    for name, most in (("num_labels", MAX_LABELS), ("num_hidden_layers", MAX_LAYERS)):
        if isinstance(config.get(name), int) and not 1 <= config[name] <= most:
            raise ValueError(f"{name} must be in [1, {most}], got {config[name]}")


def as_pair(size) -> tuple:
    """`16` or `[16, 8]` -> (height, width)."""
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return height, width


def labels_by_id(id2label: dict) -> dict[int, str]:
    """Class names in the order of their ids, whatever the order in a file and whether its ids are text or numbers.

    Raises:
        ValueError: unless the ids are 0, 1, 2, ..., each once: every row of the head has a name.
    """
    by_id = {str(index): label for index, label in id2label.items()}
    rows = range(max(1, len(id2label)))
    if set(by_id) != set(map(str, rows)):
        raise ValueError(f"the ids of id2label must be 0 to {len(rows) - 1}, each once, got {list(id2label)[:5]}")
    return {row: by_id[str(row)] for row in rows}

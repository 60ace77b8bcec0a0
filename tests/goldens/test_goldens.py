"""What was promised to a user, as an earlier commit kept it; `python tests/goldens/update.py` rewrites it on purpose."""

import json
import re
from pathlib import Path

import pytest
import torch
from observed import observe
from saved_models import SAVED, outputs


GOLDENS = json.loads((Path(__file__).parent / "goldens.json").read_text())
# The first of these that is part of a value's name decides; bootstrapped intervals may be drawn otherwise.
TOLERANCES = {
    ".csv": 1e-6, "loss": 1e-6, "confidence": 1e-6, "eval.json/calibration": 1e-6, "intervals/accuracy": 1e-6,
    "intervals/top5": 1e-6, "intervals": 0.03, "": 1e-12,
}  # fmt: skip
NUMBER = re.compile(r"(?<=,)(\d[\d.]*(?:e-\d+)?)(?=,|$)")  # a cell of a table


def is_close(found, golden, name: str) -> bool:
    """Whether a value is its golden; numbers, also those in a line of a table, within their tolerance."""
    if isinstance(golden, str) and isinstance(found, str) and NUMBER.search(golden):
        texts, numbers = zip(
            *((NUMBER.split(text)[::2], NUMBER.findall(text)) for text in (found, golden)), strict=True
        )
        return texts[0] == texts[1] and is_close(*(list(map(float, cells)) for cells in numbers), name)
    if isinstance(golden, float | list) and isinstance(found, int | float | list):
        tolerance = next(value for part, value in TOLERANCES.items() if part in name)
        return found == pytest.approx(golden, rel=0, abs=tolerance)
    return found == golden


def differences(found, golden, name: str):
    """Where a JSON value differs from its golden."""
    if isinstance(golden, dict) and isinstance(found, dict):
        for key in {**golden, **found}:
            yield from differences(found.get(key), golden.get(key), f"{name}/{key}")
    elif isinstance(golden, list) and isinstance(found, list) and len(golden) == len(found):
        for place, pair in enumerate(zip(found, golden, strict=True)):
            yield from differences(*pair, f"{name}/{place}")
    elif not is_close(found, golden, name):
        yield f"{name}: {found!r}, not {golden!r}"


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    return observe(tmp_path_factory.mktemp("goldens"))


@pytest.mark.parametrize("name", GOLDENS)
def test_a_user_sees_what_was_promised(name, observed):
    assert not list(differences(observed[name], GOLDENS[name], name))


@pytest.mark.parametrize("folder", sorted(SAVED.glob("*/*")), ids=lambda folder: f"{folder.parent.name} {folder.name}")
def test_a_model_of_an_earlier_commit_says_what_it_said(folder):
    for reader, named in json.loads((folder / "expected.json").read_text()).items():
        found = outputs(folder, reader)
        for name, expected in named.items():
            expected = torch.tensor(expected)
            torch.testing.assert_close(
                torch.tensor(found[name]), expected, rtol=0, atol=1e-6 * max(1, expected.abs().max().item())
            )

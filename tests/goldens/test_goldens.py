"""What was promised to a user, as an earlier commit kept it; `python tests/goldens/update.py` rewrites it on purpose."""

import io
import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from observed import observe
from saved_models import SAVED, outputs


GOLDENS = json.loads((Path(__file__).parent / "goldens.json").read_text())
# The first of these that is part of a value's name decides; bootstrapped intervals may be drawn otherwise.
TOLERANCES = {
    "loss": 1e-6, "confidence": 1e-6, "eval.json/calibration": 1e-6, "intervals/accuracy": 1e-6,
    "intervals/top5": 1e-6, "intervals": 0.03, "": 1e-12,
}  # fmt: skip


def flat(value, name: str) -> dict:
    """All numbers and texts of a JSON value, by their places."""
    if not isinstance(value, dict | list):
        return {name: value}
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    return {place: part for key, each in inner for place, part in flat(each, f"{name}/{key}").items()}


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    return observe(tmp_path_factory.mktemp("goldens"))


@pytest.mark.parametrize("name", GOLDENS)
def test_a_user_sees_what_was_promised(name, observed):
    found, golden = observed[name], GOLDENS[name]
    if name.endswith(".csv"):
        tables = (pd.read_csv(io.StringIO("\n".join(lines))) for lines in (found, golden))
        pd.testing.assert_frame_equal(*tables, rtol=0, atol=1e-6)
        return
    found, golden = flat(found, name), flat(golden, name)
    assert found.keys() == golden.keys()
    for place, value in golden.items():
        tolerance = next(value for part, value in TOLERANCES.items() if part in place)
        assert found[place] == (pytest.approx(value, rel=0, abs=tolerance) if isinstance(value, float) else value), (
            place
        )


@pytest.mark.parametrize("folder", sorted(SAVED.glob("*/*")), ids=lambda folder: f"{folder.parent.name} {folder.name}")
def test_a_model_of_an_earlier_commit_says_what_it_said(folder):
    for reader, named in json.loads((folder / "expected.json").read_text()).items():
        found = outputs(folder, reader)
        for name, expected in named.items():
            expected = torch.tensor(expected)
            torch.testing.assert_close(
                torch.tensor(found[name]), expected, rtol=0, atol=1e-6 * max(1, expected.abs().max().item())
            )

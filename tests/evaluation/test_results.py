"""Claims about the results of a run as a value."""

import json
from pathlib import Path

import pytest

from hf_vit.evaluation.results import Results


HOUSE = Path(__file__).parents[2]
GONE = {"lives"}  # keys that kept runs have and no part reads
KEPT = [file for file in HOUSE.glob("model_cards/**/results.json") if file.parent.name != "knn"]


def kept_results(file):
    return {name: value for name, value in json.loads(file.read_text()).items() if name not in GONE}


@pytest.mark.parametrize("file", KEPT, ids=lambda file: str(file.parent.relative_to(HOUSE / "model_cards")))
def test_results_are_read_and_written_without_a_change(file):
    kept = kept_results(file)
    results = Results.from_json(file.read_text())
    assert results.as_dict() == kept
    assert list(json.loads(results.to_json())) == list(kept)


def test_a_key_of_another_version_is_left_out_and_a_missing_one_is_named():
    kept = kept_results(KEPT[0])
    assert Results.from_json(json.dumps({**kept, "of_tomorrow": 1})).as_dict() == kept
    with pytest.raises(TypeError, match="weights_sha256"):
        Results.from_json(json.dumps({name: kept[name] for name in kept if name != "weights_sha256"}))

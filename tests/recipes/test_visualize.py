"""Where recipes/visualize.py puts its pictures."""

from pathlib import Path

import pytest
import visualize


def test_pictures_of_two_runs_lie_in_two_folders(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "config.yaml").touch()
    (tmp_path / "alone").mkdir()
    found = {visualize.default_folder(str(tmp_path / name)) for name in ("a/model", "b/model", "alone")}
    assert found == {tmp_path / name / "figures" for name in ("a", "b", "alone")}


@pytest.mark.parametrize("name", ["alice/model", "bob/model"])
def test_pictures_of_a_model_of_the_hub_have_a_folder_of_its_whole_name(name):
    assert visualize.default_folder(name) == Path("runs/figures") / name.replace("/", "--")

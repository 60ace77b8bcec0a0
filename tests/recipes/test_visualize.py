"""Where recipes/visualize.py puts its pictures."""

import visualize


def test_pictures_of_two_runs_lie_in_two_folders(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "config.yaml").touch()
    (tmp_path / "alone").mkdir()
    found = {visualize.default_folder(str(tmp_path / name)) for name in ("a/model", "b/model", "alone")}
    assert found == {tmp_path / name / "figures" for name in ("a", "b", "alone")}

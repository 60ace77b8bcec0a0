"""Small photos that the runs of several files train on."""

import pytest
from runs import write_photos


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """Three classes of 8 images to train on and 4 to evaluate."""
    return write_photos(tmp_path_factory.mktemp("training") / "photos", train=8, validation=4)

"""Folders of images that several files of tests read."""

import pytest
from image_data import animal, pictures


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """photos/train/cat/0.png, ..., photos/val/dog/5.png"""
    folder = tmp_path_factory.mktemp("sources") / "photos"
    for number, image in enumerate(pictures(range(6))):
        file = folder / ("train" if number < 4 else "val") / animal(number) / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(image)
    return folder

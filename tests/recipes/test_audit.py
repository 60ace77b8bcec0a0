"""Claims about recipes/audit.py: what is planted in a data set is found, and little else."""

import io
import re

import audit
import numpy as np
import pandas as pd
import pytest
from datasets import Dataset, Features, Image, List, ClassLabel
from PIL import Image as PILImage

from hf_vit.data.sources import load_splits


def photo(seed, side=64):
    """Smooth shapes and colours, which a smaller or a compressed copy keeps."""
    noise = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return PILImage.fromarray(noise).resize((side, side), PILImage.Resampling.BICUBIC)


def start(data, output, *flags):
    words = ["--dataset_name", data, "--output_file", output, "--num_workers", 0, *flags]
    audit.main(audit.parse_args(list(map(str, words))))


def duplicates(output):
    """{names of a group and their labels, "split/file label"} for each group of the table of duplicates."""
    table = pd.read_csv(output.with_suffix(".duplicates.csv"), keep_default_na=False)
    return {frozenset(f"{row.file} {row.label}" for row in rows.itertuples()) for _, rows in table.groupby("group")}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """60 photos to train on and 20 to score, with copies across and within splits, and a broken file."""
    folder = tmp_path_factory.mktemp("audit") / "photos"
    for split, seeds in (("train", range(60)), ("test", range(60, 80))):
        for seed in seeds:
            file = folder / split / ("cat", "dog")[seed % 2] / f"{seed}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            photo(seed).save(file)
    photo(0).resize((40, 40)).save(folder / "test" / "cat" / "small.png")
    photo(2).save(folder / "test" / "cat" / "again.jpg", quality=75)
    photo(4).resize((150, 90)).save(folder / "test" / "dog" / "wide.jpg")
    photo(6).save(folder / "train" / "cat" / "same.png")
    PILImage.new("RGB", (30, 30), "red").save(folder / "train" / "dog" / "red.png")
    PILImage.new("RGB", (30, 30), "blue").save(folder / "train" / "dog" / "blue.png")
    (folder / "test" / "dog" / "broken.jpg").write_bytes(b"no image")
    return folder


def test_copies_are_found_also_resized_or_saved_again_and_nothing_else_is(photos, tmp_path, capsys):
    start(photos, tmp_path / "page.html")
    assert duplicates(tmp_path / "page.html") == {
        frozenset({"train/cat/0.png cat", "test/cat/small.png cat"}),
        frozenset({"train/cat/2.png cat", "test/cat/again.jpg cat"}),
        frozenset({"train/cat/4.png cat", "test/dog/wide.jpg dog"}),
        frozenset({"train/cat/6.png cat", "train/cat/same.png cat"}),
    }
    assert capsys.readouterr().out.splitlines() == [
        "images in train: 63",
        "images in test: 24",
        "images that cannot be read: 1",
        "Duplicates across splits, with different labels: 1 (2 images)",
        "Duplicates across splits, with the same label: 2 (4 images)",
        "Duplicates within a split, with the same label: 1 (2 images)",
        f"the page: {tmp_path / 'page.html'}",
    ]


def test_the_page_shows_counts_sizes_broken_files_and_pictures(photos, tmp_path):
    start(photos, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert re.search(r"<th>cat</th>\s*<td>31</td>\s*<td>12</td>", page)
    assert re.search(r"<th>train</th>\s*<td>30</td>\s*<td>64</td>\s*<td>64</td>", page)
    assert re.search(r"<li>row \d+ \(.*broken.jpg\) cannot be read as an image: no known format", page)
    assert page.count('src="data:image/png;base64,') == 8
    assert "http" not in page.replace("https://", "http://").split("<style>")[0]


def test_names_from_strangers_are_text_on_the_page(tmp_path):
    (tmp_path / "photos" / "<script>").mkdir(parents=True)
    (tmp_path / "photos" / "dog").mkdir()
    for name in ("<script>/=1.png", "<script>/2.png", "dog/3.png"):
        photo(len(name)).save(tmp_path / "photos" / name)
    photo(len("dog/3.png")).save(tmp_path / "photos" / "<script>" / "=1.png")
    start(tmp_path / "photos", tmp_path / "page.html")
    assert "<script>" not in (tmp_path / "page.html").read_text()

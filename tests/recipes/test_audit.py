"""Claims about recipes/audit.py: what is planted in a data set is found, and little else."""

import re

import audit
import numpy as np
import pandas as pd
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, List
from PIL import Image as PILImage
from runs import save_with_processor

from hf_vit import HFViTConfig, HFViTForImageClassification
from hf_vit.data.duplicates import also_in, duplicate_groups, thumbnail_vectors
from hf_vit.data.sources import load_splits
from hf_vit.evaluation.label_errors import out_of_fold_probabilities


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
    copies = {
        "test/cat/small.png": photo(0).resize((40, 40)),
        "test/cat/again.jpg": photo(2),
        "test/dog/wide.jpg": photo(4).resize((150, 90)),
        "train/cat/same.png": photo(6),
        "train/dog/red.png": PILImage.new("RGB", (30, 30), "red"),
        "train/dog/blue.png": PILImage.new("RGB", (30, 30), "blue"),
    }
    for name, image in copies.items():
        image.save(folder / name)
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
    said = capsys.readouterr().out
    assert all(f"images in {split}: {count}\n" in said for split, count in (("train", 63), ("test", 24)))
    assert [int(line.split(": ")[1][0]) for line in said.splitlines() if line.startswith("Duplicates")] == [1, 2, 1]


def test_the_page_shows_counts_broken_files_and_pictures(photos, tmp_path):
    start(photos, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert re.search(r"<th>cat</th>\s*<td>31</td>\s*<td>12</td>", page)
    assert re.search(r"<li>test: row \d+ \(.*broken.jpg\) cannot be read as an image: no known format", page)
    assert page.count('src="data:image/png;base64,') == 8
    assert "http" not in page.replace("https://", "http://").split("<style>")[0]


def test_a_class_is_counted_under_its_name_whatever_is_in_it_and_can_be_read(tmp_path):
    for name in ("a;b/1.png", "dog/2.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True)
        photo(0).save(tmp_path / "photos" / name)
    (tmp_path / "photos" / "eel").mkdir()
    (tmp_path / "photos" / "eel" / "broken.png").write_bytes(b"no image")
    start(tmp_path / "photos", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert [re.search(rf"<th>{name}</th>\s*<td>1</td>", page) is None for name in ("a;b", "dog", "eel")] == [False] * 3


def test_names_from_strangers_are_text_on_the_page_and_in_its_tables(tmp_path):
    for name in ("=<script>/=1.png", "=<script>/2.png", "dog/3.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        photo(name == "=<script>/2.png").save(tmp_path / "photos" / name)
    start(tmp_path / "photos", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    cells = (tmp_path / "page.duplicates.csv").read_text().replace("\n", ",").split(",")
    assert "'=<script>" in cells
    assert not [cell for cell in cells if cell.startswith("=")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A network that was not trained, whose features tell clothes apart all the same."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = HFViTConfig(image_size=28, patch_size=7, num_labels=2, **sizes)
    return save_with_processor(HFViTForImageClassification(config), tmp_path_factory.mktemp("model"))


def test_planted_wrong_labels_are_named_first(model, tmp_path):
    rows = load_splits("fashion-mnist-mini")["train"].select(range(600))
    labels, wrong = np.array(rows["label"]), np.arange(0, 600, 30)
    labels[wrong] = (labels[wrong] + 5) % 10
    rows = rows.remove_columns("label").add_column("label", labels, feature=rows.features["label"])
    DatasetDict(train=rows).save_to_disk(tmp_path / "data")
    start(tmp_path / "data", tmp_path / "page.html", "--model_name_or_path", model)
    table = pd.read_csv(tmp_path / "page.labels.csv")
    assert list(table.columns) == ["split", "row", "file", "label", "predicted", "label_probability"]
    assert table["label_probability"].is_monotonic_increasing
    assert np.isin(table["row"][:30], wrong).sum() >= 12
    assert "rather" in (tmp_path / "page.html").read_text()


def test_a_prediction_does_not_know_the_label_of_its_image():
    features = torch.eye(60)  # enough to know each image by heart, and nothing about the others
    labels = torch.rand(60, generator=torch.Generator().manual_seed(0)).round().long()
    given = out_of_fold_probabilities(features, labels, 2).gather(1, labels[:, None])
    assert (given - 0.5).abs().max() < 0.2


def vectors_of(photos):
    return torch.cat([thumbnail_vectors(torch.from_numpy(np.array(one)).permute(2, 0, 1)[None]) for one in photos])


def groups_of(photos):
    return duplicate_groups(vectors_of(photos))


@pytest.mark.parametrize("copies", [1, 4])
@pytest.mark.parametrize("others", [0, 30])
def test_copies_are_found_in_a_set_of_any_size_and_other_images_are_not(copies, others):
    group = [photo(0), *(photo(0).resize((side, side)) for side in range(40, 40 + copies))]
    assert groups_of([*group, *map(photo, range(1, others + 1))]) == [list(range(len(group)))]
    assert also_in(vectors_of(group[:1]), vectors_of(group[1:])).tolist() == [True]


def test_brightness_and_faint_differences_tell_images_apart():
    photos = [photo(seed) for seed in range(8)]
    brighter = photos[0].point(lambda level: min(255, level + 30))
    faint = [one.point(lambda level: level // 64 + 100) for one in photos]
    assert groups_of([*photos, brighter]) == groups_of(faint) == []


def test_bad_input_is_one_clear_error(photos, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "there.html").touch()
    (tmp_path / "broken" / "cat").mkdir(parents=True)
    (tmp_path / "broken" / "cat" / "1.jpg").write_text("nothing")
    before = sorted(tmp_path.rglob("*"))
    for data, output, flags, named in (
        ("empty", "page.html", (), "empty"),
        ("broken", "page.html", (), "1.jpg"),
        (photos, "there.html", (), "there.html"),
        (photos, "page.pdf", (), "page.pdf"),
        (photos, "page.html", ("--splits", "train,val"), "'val'"),
    ):
        with pytest.raises((ValueError, SystemExit), match=named):
            start(tmp_path / data, tmp_path / output, *flags)
    assert sorted(tmp_path.rglob("*")) == before


def test_several_labels_are_counted_and_compared_and_not_judged(model, tmp_path):
    rows = [{"image": photo(seed % 5), "label": [seed % 2] if seed < 5 else [0, 1]} for seed in range(6)]
    features = Features(image=Image(), label=List(ClassLabel(names=["cat", "dog"])))
    DatasetDict(train=Dataset.from_list(rows, features)).save_to_disk(tmp_path / "data")
    start(tmp_path / "data", tmp_path / "page.html")
    assert duplicates(tmp_path / "page.html") == {frozenset({" cat", " cat;dog"})}
    with pytest.raises(ValueError, match="--model_name_or_path"):
        start(tmp_path / "data", tmp_path / "other.html", "--model_name_or_path", model)

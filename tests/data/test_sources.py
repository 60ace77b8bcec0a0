"""Claims about where data sets come from: folders, files, tables, archives, and the embedded one."""

import contextlib
import http.server
import shutil
import threading

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, Value
from image_data import ANIMALS, animal, dataset, picture, pictures, prepare, spec_of, table_of, write_table, write_tar

from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.sources import load_splits
from hf_vit.data.streaming import prepare_stream


def test_loading_knows_folders_files_and_the_embedded_set(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(2):
            picture().save(tmp_path / "photos" / name / f"{index}.png")
    _, names, _ = prepare(load_splits(str(tmp_path / "photos")), fraction=0.5)
    assert names == ["cat", "dog"]
    dataset([0, 1, 1]).to_parquet(tmp_path / "some.parquet")
    assert len(load_splits(str(tmp_path / "some.parquet"))["train"]) == 3
    (tmp_path / "some.txt").write_text("no data")
    with pytest.raises(ValueError, match=r"some.txt is no data file"):
        load_splits(str(tmp_path / "some.txt"))
    embedded = load_splits("fashion-mnist-mini")
    assert np.bincount(embedded["train"]["label"]).tolist() == [1000] * 10
    assert np.bincount(embedded["test"]["label"]).tolist() == [200] * 10


def known(splits, split="train", **how):
    """The (class, number) of each picture of a split; it is found by its pixels."""
    chosen, names, _ = prepare(splits, train=None, eval_split=split, **how)
    images = ImageDataset(chosen["eval"], spec_of())
    numbers = [
        next(n for n in range(6) if np.array_equal(np.asarray(picture(n, (8, 12))), image.permute(1, 2, 0)))
        for image in images.cache
    ]
    return {(names[label], number) for label, number in zip(images.labels.tolist(), numbers, strict=True)}


def all_of(numbers):
    return {(animal(number), number) for number in numbers}


def test_a_folder_of_class_folders_keeps_its_splits(photos):
    splits = load_splits(str(photos))
    assert known(splits) == all_of(range(4))
    assert known(splits, "validation") == all_of([4, 5])


@pytest.mark.parametrize(("suffix", "separator"), [(".csv", ","), (".tsv", "\t"), (".jsonl", None)])
def test_a_table_names_images_below_itself_by_relative_or_absolute_paths(photos, suffix, separator):
    beside = write_table(photos.parent / f"list{suffix}", range(4), "photos", separator)
    absolute = write_table(photos.parent / f"absolute{suffix}", range(4), photos, separator)
    for table in (beside, absolute):
        assert known(load_splits(table), label_column="kind") == all_of(range(4))


def test_a_folder_of_tables_has_a_split_for_each(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "photos")
    write_table(tmp_path / "train.csv", range(4), "photos")
    write_table(tmp_path / "val.csv", [4, 5], "photos")
    splits = load_splits(str(tmp_path))
    assert known(splits, label_column="kind") == all_of(range(4))
    assert known(splits, "validation", label_column="kind") == all_of([4, 5])


def test_tar_shards_are_read_alone_or_as_a_folder(tmp_path):
    for name, numbers in (("train-0000", [0, 1]), ("train-0001", [2, 3]), ("val-0000", [4, 5])):
        write_tar(tmp_path / f"{name}.tar", pictures(numbers), [n % 2 for n in numbers])
    named = {"label_names": list(ANIMALS)}
    splits = load_splits(str(tmp_path))
    assert known(splits, **named) == all_of(range(4))
    assert known(splits, "validation", **named) == all_of([4, 5])
    assert known(load_splits(str(tmp_path / "val-0000.tar")), **named) == all_of([4, 5])


def test_parquet_and_arrow_files_saved_folders_and_columns_of_bytes_are_read(tmp_path):
    table = table_of(range(4))
    table.to_parquet(tmp_path / "table.parquet")
    table.save_to_disk(str(tmp_path / "saved"))
    DatasetDict(train=table, test=table_of([4, 5])).save_to_disk(str(tmp_path / "both"))
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    (tmp_path / "table.arrow").write_bytes(arrow.read_bytes())
    for name in ("table.parquet", "table.arrow", "saved", "both"):
        assert known(load_splits(str(tmp_path / name))) == all_of(range(4)), name
    assert known(load_splits(str(tmp_path / "both")), "test") == all_of([4, 5])
    table_of(range(4), "png", Value("binary")).to_parquet(tmp_path / "bytes.parquet")
    assert known(load_splits(str(tmp_path / "bytes.parquet")), image_column="png") == all_of(range(4))


@pytest.mark.parametrize(
    "name",
    [
        "./nowhere",
        "/nowhere/at/all",
        "~/nowhere-at-all",
        "a/b/nowhere",
        "../nowhere.csv",
        "nowhere.csv",
        "data/nowhere.tar",
        "my nowhere",
        "nowhere.JPEG",
        "nowhere",
    ],
)
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name):
    with pytest.raises(ValueError, match=r"--dataset_name .*nowhere.*: there is no such folder or file here"):
        load_splits(name)


@pytest.fixture
def online(monkeypatch):
    """online(status) -> paths that are asked of a Hub that answers all with this status; None: nobody listens."""

    @contextlib.contextmanager
    def hub(status):
        asked = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append(self.path)
                self.send_response(status)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.end_headers()

            do_HEAD = do_GET

            def log_message(self, *_):
                pass

        listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{listening.server_port}")
        if status is not None:
            threading.Thread(target=listening.serve_forever, daemon=True).start()
        else:
            listening.server_close()
        yield asked
        if status is not None:
            listening.shutdown()
            listening.server_close()

    return hub


def test_a_name_that_is_nowhere_is_asked_of_the_hub_once(online):
    """a mistyped folder that may be a name on the Hub | one request, and a sentence that says both"""
    name = "alice/photos"
    with (
        online(404) as asked,
        pytest.raises(
            ValueError,
            match=rf"{name}: there is no such folder or file here .*, and the Hub has no data set {name} that you may read",
        ),
    ):
        load_splits(name)
    assert [path for path in asked if "datasets" in path] == [f"/api/datasets/{name}"]


def test_a_hub_that_cannot_be_reached_is_not_tried_again(online, monkeypatch):
    """no network | one attempt, then the cache of datasets, then a sentence that says both"""
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waited to try again"))
    with (
        online(None),
        pytest.raises(
            ValueError,
            match=r"alice/nowhere_kept: there is no such folder .*, and the Hub cannot be reached .*its cache has no copy",
        ),
    ):
        load_splits("alice/nowhere_kept")


def test_a_table_whose_text_names_no_image_files_is_an_error(tmp_path):
    (tmp_path / "list.csv").write_text("note,label\nhello,1\ngood bye,0\n")
    with pytest.raises(
        ValueError, match=r"no column of type Image: name one with --image_column.*note \((large_)?string\)"
    ):
        prepare(load_splits(str(tmp_path / "list.csv")))


def test_a_file_of_no_split_beside_others_is_an_error_that_names_it(tmp_path):
    for name in ("train", "test", "holdout"):
        (tmp_path / f"{name}.csv").write_text("image,label\na.png,cat\nb.png,dog\n")
    with pytest.raises(
        ValueError, match=r"the split of holdout.csv cannot be told beside .*; wanted train, validation or test in"
    ):
        load_splits(str(tmp_path))


def class_folders(folder, *names, count=3, suffix=".png"):
    for name in names:
        (folder / name).mkdir(parents=True)
        for index in range(count):
            picture(index).save(folder / name / f"{index}{suffix}")


def test_folders_of_splits_may_be_written_with_capitals(tmp_path):
    class_folders(tmp_path, "Training/cat", "Training/dog", "Testing/cat", "Testing/dog")
    splits, names, scored = prepare(load_splits(str(tmp_path)))
    assert (names, scored, len(splits["train"]), len(splits["eval"])) == (["cat", "dog"], "test", 6, 6)


def test_none_and_na_are_classes_of_a_table_as_any_word_and_hidden_tables_are_not_read(tmp_path):
    for name, image in zip("abcd", pictures(range(4)), strict=True):
        (tmp_path / f"{name}.png").write_bytes(image)
    (tmp_path / "train.csv").write_text("image,label\na.png,None\nb.png,NA\n")
    (tmp_path / "test.csv").write_text("image,label\nc.png,NA\nd.png,None\n")
    (tmp_path / "._train.csv").write_bytes(b"\0\5\x16\7")  # as a Mac leaves it beside each file
    splits, names, _ = prepare(load_splits(str(tmp_path)))
    assert names == ["NA", "None"]
    assert [splits[name]["label"][:] for name in ("train", "eval")] == [[1, 0], [0, 1]]


def test_a_table_beside_folders_says_that_it_is_the_data_set_and_one_of_our_own_is_not(tmp_path, caplog):
    for name, image in zip(("cat/a", "cat/b", "dog/c", "dog/d"), pictures(range(4)), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.png").write_bytes(image)
    (tmp_path / "audit.duplicates.csv").write_text("file,label\ncat/a.png,cat\n")
    assert len(load_splits(str(tmp_path))["train"]) == 4
    (tmp_path / "birds.csv").write_text("file,label\ncat/a.png,x\ncat/b.png,y\n")
    assert len(load_splits(str(tmp_path))["train"]) == 2
    assert "images and labels are those of birds.csv, and folders are no classes (2 rows, 4 images)" in caplog.text


OURS = {
    "audit.labels.csv": "split,row,file,label\ntrain,0,cat/0.png,cat\n",
    "all.npy.rows.csv": "file\ncat/0.png\n",
    "mine.csv": "file,label_1,probability_1\ncat/0.png,eel,0.9\n",
}


@pytest.mark.parametrize("name", OURS)
def test_tables_that_our_scripts_write_are_no_data_set(name, tmp_path, caplog):
    class_folders(tmp_path, "cat", "dog")
    (tmp_path / name).write_text(OURS[name])
    splits = load_splits(str(tmp_path))
    assert (splits["train"].features["label"].names, len(splits["train"])) == (["cat", "dog"], 6)
    assert caplog.text == ""


def test_class_folders_go_before_a_table_without_labels_or_of_a_part_of_them(tmp_path, caplog):
    class_folders(tmp_path, "cat", "dog")
    (tmp_path / "notes.csv").write_text("file,comment\ncat/0.png,dark\ndog/0.png,old\n")
    assert len(load_splits(str(tmp_path))["train"]) == 6
    assert "notes.csv is not used: it has no column of labels (file, comment): name one with" in caplog.text
    assert len(load_splits(str(tmp_path), label_column="comment")["train"]) == 2
    (tmp_path / "notes.csv").rename(tmp_path / "train.csv")
    assert len(load_splits(str(tmp_path))["train"]) == 2
    (tmp_path / "train.csv").unlink()
    (tmp_path / "list.csv").write_text("file,label\ncat/0.png,cat\ndog/0.png,dog\n")
    assert len(load_splits(str(tmp_path))["train"]) == 6
    assert "list.csv is not used: it lists 2 of 6 images" in caplog.text
    assert len(load_splits(str(tmp_path / "list.csv"))["train"]) == 2


@pytest.mark.parametrize("stray", ["list.csv", "photos.tar"])
def test_a_stray_file_beside_class_folders_is_no_data_set(stray, tmp_path):
    class_folders(tmp_path, "cat", "dog")
    (tmp_path / stray).write_text("a,b\n1,2\n")
    assert len(load_splits(str(tmp_path))["train"]) == 6


def test_a_table_beside_the_images_it_names_is_the_data_set(tmp_path):
    class_folders(tmp_path, "images")
    (tmp_path / "list.csv").write_text("file,class\nimages/0.png,cat\nimages/1.png,dog\n")
    splits, names, _ = prepare(load_splits(str(tmp_path)), train=None, eval_split="train")
    assert (names, len(splits["eval"])) == (["cat", "dog"], 2)


@pytest.mark.parametrize("stray", ["embeddings.parquet", "some.parquet", "README.md"])
def test_a_parquet_file_or_card_beside_class_folders_leaves_the_classes_as_they_are(stray, tmp_path, caplog):
    class_folders(tmp_path, *(f"{name}/{place}" for name in ("cat", "dog") for place in ("indoor", "outdoor")))
    if stray == "README.md":
        (tmp_path / stray).write_text(
            "---\nlicense: mit\nconfigs:\n- config_name: default\ndataset_info:\n  splits: 1\n---\n"
        )
    elif stray == "some.parquet":
        table_of(range(2)).to_parquet(tmp_path / stray)
    else:
        Dataset.from_dict({"file": ["cat/indoor/0.png"], "embedding": [[1.0, 2.0]]}).to_parquet(tmp_path / stray)
    splits = load_splits(str(tmp_path))
    assert splits["train"].features["label"].names == ["cat", "dog"]
    assert len(splits["train"]) == 12
    if stray != "README.md":
        holding = "no images" if stray == "embeddings.parquet" else "2 images, the class folders 12"
        assert f"{stray} are left alone: they hold {holding}" in caplog.text


def test_a_card_that_names_files_goes_before_the_folders_and_a_line_says_so(tmp_path, caplog):
    class_folders(tmp_path, "a/cat/indoor", "a/dog/outdoor", "raw/eel")
    files = "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: a/**\n"
    (tmp_path / "README.md").write_text(f"---\n{files}---\n")
    assert len(load_splits(str(tmp_path))["train"]) == 6
    assert "images are read as `datasets` finds them, by their innermost folders: indoor, outdoor" in caplog.text


def test_more_images_in_parquet_files_than_in_folders_are_the_data_set(tmp_path):
    class_folders(tmp_path, "figures", "assets", count=1)
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        table_of(range(4)).to_parquet(tmp_path / "data" / f"{split}-0.parquet")
    assert known(load_splits(str(tmp_path)), "test") == all_of(range(4))


@pytest.mark.parametrize("streaming", [False, True])
def test_parquet_files_whose_class_names_differ_keep_their_classes(streaming, tmp_path):
    dataset([0, 1], ["cat", "dog"]).to_parquet(tmp_path / "train.parquet")
    dataset([0, 1, 1], ["dog", "cat"]).to_parquet(tmp_path / "test.parquet")
    splits = load_splits(str(tmp_path), streaming=streaming)
    rows = prepare_stream(splits)[1] if streaming else prepare(splits)[0]["eval"]
    assert rows["label"][:] == [1, 0, 0]
    dataset([0, 1], ["dog", "cat"]).to_parquet(tmp_path / "train-2.parquet")
    with pytest.raises(
        ValueError, match=r"has other class names, or in another order, than .* of the same split train"
    ):
        load_splits(str(tmp_path), streaming=streaming)


def test_parquet_files_of_no_split_are_named(tmp_path, caplog):
    for name in ("photos", "photos_test"):
        dataset([0, 1]).to_parquet(tmp_path / f"{name}.parquet")
    assert list(load_splits(str(tmp_path))) == ["test"]
    assert "photos.parquet are not read: their names and folders say no split" in caplog.text


def test_a_broken_archive_is_named(tmp_path):
    (tmp_path / "train-0.tar").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"train-0.tar cannot be read as webdataset"):
        load_splits(str(tmp_path))

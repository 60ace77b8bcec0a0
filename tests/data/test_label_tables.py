"""Claims about tables: which split and class an image gets, and what is said where that cannot be told."""

import gc
import json
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from image_data import animal, pictures, prepare, write_tar

from hf_vit.data.sources import load_splits
from hf_vit.data.splits import prepare_splits


def write_images(folder, names):
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(pictures([number])[0])


def rows_of(numbers, header="image,label"):
    return "\n".join([header, *(f"images/{n}.png,{animal(n)}" for n in numbers)])


@pytest.fixture
def folder(tmp_path):
    """images/0.png ... images/5.png; even numbers are cats"""
    write_images(tmp_path, [f"images/{number}.png" for number in range(6)])
    return tmp_path


@pytest.mark.parametrize(("train", "test"), [("labels_train", "labels_test"), ("Train2024", "my-Test")])
def test_a_word_anywhere_in_the_name_of_a_table_says_its_split(train, test, folder):
    (folder / f"{train}.csv").write_text(rows_of(range(4)))
    (folder / f"{test}.csv").write_text(rows_of([4, 5]))
    assert {split: len(rows) for split, rows in load_splits(str(folder)).items()} == {"train": 4, "test": 2}


@pytest.mark.parametrize("names", [("photos_train", "photos_test"), ("train-0", "test-0")])
def test_a_word_anywhere_in_the_name_of_a_shard_says_its_split(names, tmp_path):
    for name in names:
        write_tar(tmp_path / f"{name}.tar", pictures([0, 1]), [0, 1])
    assert list(load_splits(str(tmp_path))) == ["train", "test"]


def test_numbered_tables_and_shards_are_parts_of_one_split(folder, tmp_path):
    for number in range(3):
        (folder / f"photos-{number:04}.csv").write_text(rows_of([2 * number, 2 * number + 1]))
    assert {split: len(rows) for split, rows in load_splits(str(folder)).items()} == {"train": 6}
    (tmp_path / "shards").mkdir()
    for number in range(2):
        write_tar(tmp_path / "shards" / f"{number:05}.tar", pictures([0, 1]), [0, 1])
    assert len(load_splits(str(tmp_path / "shards"))["train"]) == 4


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (("train", "holdout"), r"the split of holdout.csv cannot be told beside train.csv"),
        (("train", "sample_submission"), r"the split of sample_submission.csv cannot be told beside train.csv"),
        (("labels", "labels_old"), r"holds several data sets, or the splits of one: labels.csv, labels_old.csv"),
        (("labels_v1", "labels_v2"), r"labels_v1.csv, labels_v2.csv; wanted one, .* name one with --dataset_name"),
    ],
)
def test_tables_whose_split_cannot_be_told_are_not_trained_on(names, sentence, folder):
    """a table that may be a test set, or another version of the first | one error that names it"""
    for name in names:
        (folder / f"{name}.csv").write_text(rows_of(range(4)))
    with pytest.raises(ValueError, match=sentence):
        load_splits(str(folder))


@pytest.mark.parametrize("names", [("train-0", "holdout-0"), ("cats", "dogs")])
def test_shards_whose_split_cannot_be_told_are_not_trained_on(names, tmp_path):
    for name in names:
        write_tar(tmp_path / f"{name}.tar", pictures([0, 1]), [0, 1])
    with pytest.raises(ValueError, match=r"cannot be told|holds several data sets"):
        load_splits(str(tmp_path))


def labels(path, **how):
    splits, names, _ = prepare(load_splits(str(path)), train=None, eval_split="train", **how)
    return [names[label] for label in splits["eval"]["label"][:]]


@pytest.mark.parametrize(
    "rows",
    [
        "images/0.png,cat,small\nimages/1.png,dog,large",
        "images/0.png,cat,\nimages/1.png,dog,",
        "images/0.png,cat\nimages/1.png,dog,large",
    ],
)
def test_rows_with_more_cells_than_the_header_are_refused(rows, folder):
    """an unquoted comma, or one at the end of each line | never another column as the label"""
    (folder / "labels.csv").write_text(f"image,label\n{rows}\n")
    with pytest.raises(
        ValueError, match=r"labels.csv cannot be read as csv: .*(more cells than its header|Expected 2)"
    ):
        load_splits(str(folder))


@pytest.mark.parametrize(
    ("cells", "names"),
    [
        (["01", "1", "10"], ["01", "1", "10"]),
        (["1e3", "1000", "10"], ["1e3", "1000", "10"]),
        (["007", "042", "100"], ["007", "042", "100"]),
        (["1", "2", "10"], ["1", "2", "10"]),
        (["True", "False", "True"], ["True", "False", "True"]),
        (["nan", "None", "NA"], ["nan", "None", "NA"]),
    ],
)
def test_a_label_is_the_text_of_its_cell(cells, names, folder):
    (folder / "labels.csv").write_text(
        "image,label\n" + "".join(f"images/{number}.png,{cell}\n" for number, cell in enumerate(cells))
    )
    assert labels(folder / "labels.csv") == names


def test_whole_numbers_are_class_indices_and_decimals_no_labels(folder):
    write = lambda *cells: (folder / "labels.csv").write_text(
        "image,label\n" + "".join(f"images/{n}.png,{cell}\n" for n, cell in enumerate(cells))
    )
    write(2, 0, 1, 10)
    assert load_splits(str(folder / "labels.csv"))["train"]["label"][:] == [2, 0, 1, 10]
    for cells in (("0.5", "1", "2.25"), ("1e-05", "0.5")):
        write(*cells)
        with pytest.raises(ValueError, match=r"the labels are numbers with decimals"):
            labels(folder / "labels.csv")


def test_columns_of_0_and_1_and_separated_labels_are_read_from_a_table(folder):
    (folder / "labels.csv").write_text("image,cat,dog\nimages/0.png,1,0\nimages/1.png,1,1\n")
    splits, _, _ = prepare(load_splits(str(folder)), train=None, eval_split="train", label_columns="cat,dog")
    assert splits["eval"]["label"][:] == [[0], [0, 1]]
    (folder / "labels.csv").write_text("image,label\nimages/0.png,cat;dog\nimages/1.png,\n")
    splits, _, _ = prepare(load_splits(str(folder)), train=None, eval_split="train", label_separator=";")
    assert splits["eval"]["label"][:] == [[0, 1], []]


@pytest.fixture
def parts(tmp_path):
    """part_1/a0.png ... part_2/a3.png: folders that are no classes"""
    write_images(tmp_path, ["part_1/a0.png", "part_1/a1.png", "part_2/a2.png", "part_2/a3.png"])
    return tmp_path


FILES = ["part_1/a0.png", "part_1/a1.png", "part_2/a2.png", "part_2/a3.png"]
KINDS = ["cat", "dog", "cat", "dog"]


def write_kinds(path, files=FILES, separator=",", header="image,label"):
    rows = [header.split(","), *zip(files, KINDS, strict=True)]
    if path.suffix in (".json", ".jsonl"):
        rows = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
        path.write_text(json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows)))
    else:
        path.write_text("\n".join(map(separator.join, rows)))


@pytest.mark.parametrize(
    ("name", "separator"),
    [
        ("l.tsv", "\t"),
        ("l.tsv", ","),
        ("LABELS.CSV", ","),
        ("l.csv", ";"),
        ("l.csv", "\t"),
        ("l.jsonl", ""),
        ("l.json", ""),
    ],
)
def test_a_table_of_any_kind_beside_folders_is_the_data_set(name, separator, parts, caplog):
    write_kinds(parts / name, separator=separator)
    assert labels(parts) == KINDS
    assert f"images and labels are those of {name}, and folders are no classes (4 rows, 4 images)" in caplog.text
    assert labels(parts / name) == KINDS


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    "names", [["a0", "a1", "a2", "a3"], ["a0.png", "a1.png", "a2.png", "a3.png"], [file[:-4] for file in FILES]]
)
def test_names_without_suffix_or_folder_stand_for_the_one_image_of_that_name(names, alone, parts, caplog):
    """HAM10000_images_part_1/ISIC_1.jpg and a column image_id of ISIC_1 | used, and said"""
    write_kinds(parts / "HAM10000_metadata.csv", names, header="image_id,dx")
    assert labels(parts / "HAM10000_metadata.csv" if alone else parts, label_column="dx") == KINDS
    assert "its column image_id" in caplog.text


def test_names_that_are_of_no_image_or_several_are_an_error(parts):
    write_kinds(parts / "l.csv", ["a0", "a1", "a2", "a9"])
    with pytest.raises(
        ValueError,
        match=r"1 of the 4 names in its column image are those of no image or of several, such as a9 in row 3",
    ):
        load_splits(str(parts))
    write_images(parts, ["part_3/a2.png"])
    write_kinds(parts / "l.csv", ["a0", "a1", "a2", "a3"])
    with pytest.raises(ValueError, match=r"such as a2 in row 2 \(part_2/a2.png, part_3/a2.png\)"):
        load_splits(str(parts))


def test_a_table_that_may_be_the_data_set_and_cannot_be_used_stops_the_run(parts):
    """as many rows as images, or folders that are no classes | one error, and no training on folders"""
    write_kinds(parts / "l.csv", ["x", "y", "z", "w"])
    with pytest.raises(
        ValueError, match=r"l.csv has a row for each of the 4 images, but it names no image of the folder"
    ):
        load_splits(str(parts))
    for name in ("a2.png", "a3.png"):
        (parts / "part_2" / name).unlink()
    with pytest.raises(
        ValueError, match=r"all in one folder, part_1, and no table says .*: l.csv is not used: it names no"
    ):
        load_splits(str(parts))


def test_a_table_that_is_not_used_is_named_with_the_reason(parts, caplog):
    (parts / "sites.csv").write_text("id,name\n1,north\n")
    (parts / "classes.json").write_text('{"cat": 0,\n"dog": 1}')
    (parts / "labels").mkdir()
    write_kinds(parts / "labels" / "labels.csv")
    assert labels(parts) == ["part_1", "part_1", "part_2", "part_2"]
    for reason in (
        "sites.csv is not used: it names no image of the folder",
        "classes.json is not used: it is no list of rows",
        "labels/labels.csv is not used: only tables in the folder itself are read",
    ):
        assert reason in caplog.text


def test_blanks_and_backslashes_around_cells_are_none_of_the_label_or_path(parts):
    (parts / "l.csv").write_text("label, image\n cat, part_1\\a0.png\ncat , part_2\\a2.png\ndog, part_1/a1.png\n")
    assert labels(parts) == ["cat", "cat", "dog"]
    assert load_splits(str(parts))["train"]["image"][0]["path"] == "part_1/a0.png"


def test_a_table_without_rows_is_refused_and_beside_class_folders_named(parts, caplog):
    (parts / "l.csv").write_text("image,label\n")
    sentence = "l.csv has no rows: wanted a row for each image below the header"
    with pytest.raises(ValueError, match=sentence):
        load_splits(str(parts / "l.csv"))
    with pytest.raises(ValueError, match=sentence):
        load_splits(str(parts), label_column="label")
    load_splits(str(parts))
    assert f"l.csv is not used: {sentence}" in caplog.text


def sizes(path):
    return {split: len(rows) for split, rows in load_splits(str(path)).items()}


@pytest.mark.parametrize("column", ["split", "Set", "subset", "partition"])
def test_a_column_of_split_words_divides_a_table(column, folder, caplog):
    rows = [
        f"images/{n}.png,{animal(n)},{word}"
        for n, word in enumerate(["train", "train", "Training", "val", "test", "TEST"])
    ]
    (folder / "labels.csv").write_text("\n".join([f"image,label,{column}", *rows]))
    assert sizes(folder) == sizes(folder / "labels.csv") == {"train": 3, "validation": 1, "test": 2}
    assert f"the column {column} says the split: 3 train, 1 validation, 2 test" in caplog.text


@pytest.mark.parametrize(
    ("column", "cells", "sentence"),
    [
        ("split", ["train", "a", "b"], "the column split is not used, as 'a' in it is no split: all rows train"),
        ("split", ["", "", "train"], "the column split is not used, as None in it is no split"),
        ("is_test", ["0", "1", "1"], "the column is_test is not used, and all rows train: wanted train, validation"),
    ],
)
def test_a_column_that_may_say_splits_in_other_words_is_named(column, cells, sentence, folder, caplog):
    rows = [f"images/{n}.png,{animal(n)},{cell}" for n, cell in enumerate(cells)]
    (folder / "labels.csv").write_text("\n".join([f"image,label,{column}", *rows]))
    assert sizes(folder) == {"train": 3}
    assert sentence in caplog.text


def test_folders_of_splits_divide_a_table_that_names_images_in_them(tmp_path, caplog):
    names = [f"data/{split}/{n}.png" for split in ("train", "valid", "test") for n in range(2)]
    write_images(tmp_path, names)
    (tmp_path / "labels.csv").write_text("\n".join(["image,label", *(f"{name},{name[-5]}" for name in names)]))
    assert sizes(tmp_path) == {"train": 2, "validation": 2, "test": 2}
    assert "the folders of the images say the split: 2 train, 2 validation, 2 test" in caplog.text


@pytest.mark.parametrize("name", ["labels.csv", "metadata.csv"])
def test_a_table_above_folders_of_splits_goes_before_the_folders_in_them(name, tmp_path):
    places = [f"{split}/{site}/{n}.png" for split in ("train", "test") for site in ("here", "there") for n in range(2)]
    write_images(tmp_path, places)
    (tmp_path / name).write_text(
        "\n".join(["file_name,label", *(f"{place},{animal(n)}" for n, place in enumerate(places))])
    )
    splits, names, _ = prepare_splits(load_splits(str(tmp_path)))
    assert names == ["cat", "dog"]
    assert {key: len(rows) for key, rows in splits.items()} == {"train": 4, "eval": 4}


@pytest.mark.parametrize("column", ["data set", "phase"])
def test_any_column_of_nothing_but_splits_divides_a_table(column, folder):
    rows = [f"images/{n}.png,{animal(n)},{('train', 'valid', 'test')[n % 3]}" for n in range(6)]
    (folder / "labels.csv").write_text("\n".join([f"image,label,{column}", *rows]))
    assert sizes(folder) == {"train": 2, "validation": 2, "test": 2}


def test_a_column_of_splits_divides_parquet_files(tmp_path, caplog):
    splits = ["train", "train", "train", "val", "test", "test"]
    columns = {"image": pictures(range(6)), "label": [animal(n) for n in range(6)], "split": splits}
    pq.write_table(pa.table(columns), tmp_path / "photos.parquet")
    for path in (tmp_path, tmp_path / "photos.parquet"):
        assert sizes(path) == {"train": 3, "validation": 1, "test": 2}
    assert "the column split says the split: 3 train, 1 validation, 2 test" in caplog.text
    load_splits(str(tmp_path), streaming=True)
    assert "the column split is not used by a stream: all rows train" in caplog.text


@pytest.mark.parametrize("table", ["test.csv", "val_annotations.csv", "sample_submission.csv"])
def test_a_table_of_other_images_leaves_the_class_folders_alone(table, tmp_path, caplog):
    write_images(
        tmp_path, [f"train/{name}/{n}.png" for name in ("cat", "dog") for n in range(2)] + ["test/7.png", "test/8.png"]
    )
    (tmp_path / table).write_text("image,label\ntest/7.png,cat\ntest/8.png,dog\n")
    assert sizes(tmp_path) == {"train": 4}
    assert f"{table} is not used: it names no image of the class folders" in caplog.text


@pytest.mark.parametrize("names", [("{}.png", "{}.png"), ("{}", "{}")])
def test_a_name_that_is_in_several_splits_is_that_of_the_table(names, tmp_path):
    write_images(tmp_path, [f"{split}/{n}.png" for split in ("train", "test") for n in range(4)])
    for split, name in zip(("train", "test"), names, strict=True):
        rows = [f"{name.format(n)},{animal(n)}" for n in range(4)]
        (tmp_path / f"{split}Labels.csv").write_text("\n".join(["id,label", *rows]))
    splits = load_splits(str(tmp_path))
    for split in ("train", "test"):
        assert [image["path"] for image in splits[split]["id"]] == [f"{split}/{n}.png" for n in range(4)]


def test_a_row_for_each_label_of_an_image_is_an_error(folder):
    (folder / "labels.csv").write_text("filename,class,xmin\nimages/0.png,cat,1\nimages/0.png,dog,2\n")
    with pytest.raises(
        ValueError, match=r"0.png is in several training rows with different labels, 'cat' and 'dog': wanted a row"
    ):
        prepare_splits(load_splits(str(folder)))


def test_crops_of_one_image_are_several_images(folder):
    rows = [f"images/{n // 2}.png,images/{n}.png,{animal(n)}" for n in range(6)]
    (folder / "labels.csv").write_text("\n".join(["source,crop,label", *rows]))
    splits, _, _ = prepare_splits(load_splits(str(folder)), image_column="crop", eval_fraction=0.4)
    assert sum(map(len, splits.values())) == 6


def test_a_table_of_boxes_beside_class_folders_is_named_and_left_alone(tmp_path, caplog):
    write_images(tmp_path, [f"{name}/{n}.png" for name in ("cat", "dog") for n in range(2)])
    (tmp_path / "boxes.csv").write_text("filename,class,xmin\ncat/0.png,cat,1\ncat/0.png,dog,2\n")
    assert sizes(tmp_path) == {"train": 4}
    assert "boxes.csv is not used: it lists 2 of 4 images" in caplog.text


def test_folders_of_few_images_beside_those_of_a_table_are_no_classes(tmp_path):
    write_images(tmp_path, [*(f"{n}.png" for n in range(6)), "thumbs/0.png", "figures/1.png"])
    (tmp_path / "labels.csv").write_text("\n".join(["image,label", *(f"{n}.png,{animal(n)}" for n in range(6))]))
    assert sizes(tmp_path) == {"train": 6}


def test_a_table_that_says_its_split_by_its_name_is_not_divided_by_folders_or_other_columns(folder):
    rows = [f"images/{n}.png,{animal(n)},{('train', 'test')[n % 2]}" for n in range(6)]
    (folder / "train.csv").write_text("\n".join(["image,label,original_split", *rows]))
    assert sizes(folder / "train.csv") == {"train": 6}


def test_a_table_without_labels_is_not_divided_by_folders(tmp_path):
    write_images(tmp_path, [f"{split}/{n}.png" for split in ("train", "test") for n in range(2)])
    (tmp_path / "files.csv").write_text("file\ntrain/0.png\ntrain/1.png\ntest/0.png\ntest/1.png\n")
    assert sizes(tmp_path / "files.csv") == {"train": 4}


def test_a_column_of_lists_called_set_says_no_split(tmp_path):
    columns = {"image": pictures(range(2)), "label": ["cat", "dog"], "set": [["train"], ["test"]]}
    pq.write_table(pa.table(columns), tmp_path / "photos.parquet")
    assert sizes(tmp_path) == {"train": 2}


def test_a_name_in_brackets_is_a_label(folder):
    (folder / "labels.csv").write_text(
        "\n".join(["image,label", *(f"images/{n}.png,{('[other]', 'cat')[n % 2]}" for n in range(6))])
    )
    assert prepare_splits(load_splits(str(folder)))[1] == ["[other]", "cat"]


def test_a_list_of_files_beside_class_folders_is_left_alone(tmp_path, caplog):
    write_images(tmp_path, [f"{name}/{n}.png" for name in ("cat", "dog") for n in range(2)])
    (tmp_path / "list.csv").write_text("cat/0.png,0\ncat/1.png,0\ndog/0.png,1\ndog/1.png,1\n")
    assert sizes(tmp_path) == {"train": 4}
    assert (
        "list.csv is not used: list.csv begins with cat/0.png: wanted a first line that names the columns"
        in caplog.text
    )


def test_images_that_several_rows_name_are_counted(folder, caplog):
    (folder / "train.csv").write_text(rows_of([0, 1, 2, 2]))
    (folder / "val.csv").write_text(rows_of([2, 3]))
    load_splits(str(folder))
    assert "rows of the split train whose image a row before them names: 1" in caplog.text
    assert "rows of the split validation whose image is of the split train, too: 1" in caplog.text


def test_a_table_whose_first_line_names_no_columns_is_an_error(folder):
    (folder / "labels.csv").write_text("images/0.png,cat\nimages/1.png,dog\n")
    with pytest.raises(
        ValueError, match=r"labels.csv begins with images/0.png: wanted a first line that names the columns"
    ):
        load_splits(str(folder))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # `datasets` leaves metadata.csv open
def test_images_that_no_metadata_file_names_are_counted(folder, caplog):
    (folder / "images" / "metadata.csv").write_text("file_name,label\n0.png,cat\n1.png,dog\n2.png,cat\n")
    assert sizes(folder) == {"train": 3}
    gc.collect()  # what is left open is closed here, where that is no error
    assert "3 images that no metadata file names are left out" in caplog.text


def test_an_empty_separator_is_an_error(folder):
    (folder / "labels.csv").write_text(rows_of(range(6)))
    with pytest.raises(ValueError, match="--label_separator is empty: wanted what stands between two labels"):
        prepare_splits(load_splits(str(folder)), label_separator="")


@pytest.mark.parametrize("separator", [None, ",", ";"])
def test_lists_as_text_are_an_error(separator, folder):
    cells = ["['cat', 'dog']", "['cat']", "[]", "['dog']", "['cat']", "['dog']"]
    rows = [f'images/{n}.png,"{cell}"' for n, cell in enumerate(cells)]
    (folder / "labels.csv").write_text("\n".join(["image,label", *rows]))
    with pytest.raises(
        ValueError, match=r"is a list as text: wanted cat;dog, with --label_separator ';', or a .jsonl file"
    ):
        prepare_splits(load_splits(str(folder)), label_separator=separator)


@pytest.mark.parametrize(
    ("numbers", "names", "line"),
    [((1, 2, 3), ["a", "b", "c"], "1 is a, 2 is b, 3 is c"), ((1, 2), ["a", "b", "c"], "0 is a, 1 is b, 2 is c")],
)
def test_names_of_numbers_that_do_not_begin_at_0_are_said(numbers, names, line, folder, caplog):
    rows = [f"images/{n}.png,{numbers[n % len(numbers)]}" for n in range(6)]
    (folder / "labels.csv").write_text("\n".join(["image,label", *rows]))
    assert prepare_splits(load_splits(str(folder)), label_names=names)[1] == names
    assert f"--label_names: {line}" in caplog.text


@pytest.mark.parametrize("unknown", ["", "a"])
def test_a_column_of_splits_with_a_cell_that_is_none_is_an_error(unknown, folder):
    rows = [f"images/{n}.png,{animal(n)},{cell}" for n, cell in enumerate(["train", unknown, "test"])]
    (folder / "labels.csv").write_text("\n".join(["image,label,split", *rows]))
    with pytest.raises(
        ValueError, match=r"the column split says the split of most rows, but .* in row 1 is none: wanted train"
    ):
        sizes(folder)


@pytest.mark.parametrize(
    "test", ["image\nimages/4.png\nimages/5.png\n", "image,label\nimages/4.png,\nimages/5.png,\n"]
)
def test_a_test_table_without_labels_is_left_out(test, folder, caplog):
    (folder / "train.csv").write_text(rows_of(range(4)))
    (folder / "test.csv").write_text(test)
    assert sizes(folder) == {"train": 4}
    assert "test.csv has not the labels of train.csv and is left out" in caplog.text


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ("image,species", r"val.csv lacks label of train.csv: wanted the same columns"),
        ("image,label,weight", r"val.csv has weight, which train.csv lacks: wanted the same columns"),
    ],
)
def test_tables_of_other_columns_are_refused_in_one_sentence(header, sentence, folder):
    (folder / "train.csv").write_text(rows_of(range(4)))
    (folder / "val.csv").write_text(rows_of([4], header) + ",3" * header.count("weight"))
    with pytest.raises(ValueError, match=sentence):
        load_splits(str(folder))


def test_a_table_of_class_names_beside_the_labels_is_no_data_set(folder, caplog):
    (folder / "labels.csv").write_text(rows_of(range(6)))
    (folder / "classes.csv").write_text("id,name\n0,cat\n1,dog\n")
    assert sizes(folder) == {"train": 6}
    assert "classes.csv is not used" in caplog.text


def test_an_image_in_two_tables_of_a_split_is_an_error(folder):
    (folder / "train.csv").write_text(rows_of(range(4)))
    (folder / "train_old.csv").write_text(rows_of([3, 4]))
    with pytest.raises(
        ValueError, match=r"images/3.png is in train.csv and in train_old.csv, both of the split 'train'"
    ):
        load_splits(str(folder))


@pytest.mark.parametrize("nested", [False, True])
def test_a_metadata_file_that_names_no_images_or_labels_leaves_the_folders_their_classes(nested, parts, caplog):
    place = parts / "part_1" if nested else parts
    for text in (
        "id,camera\n1,canon\n",
        "id,camera\n" + "1,canon\n" * 4,
        "file_name,photographer\n"
        + "".join(f"{file.rpartition('/')[2] if nested else file},bob\n" for file in FILES[:2]),
    ):
        (place / "metadata.csv").write_text(text)
        caplog.clear()
        assert labels(parts) == ["part_1", "part_1", "part_2", "part_2"]
        assert "metadata.csv is not used" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # `datasets` leaves metadata.csv open
def test_a_metadata_file_of_labels_or_beside_no_class_folders_is_read_as_by_datasets(parts, tmp_path):
    write_kinds(parts / "metadata.csv", header="file_name,species")
    assert labels(parts, label_column="species") == KINDS
    write_images(tmp_path / "flat", ["0.png", "1.png"])
    (tmp_path / "flat" / "metadata.csv").write_text("file_name,caption\n0.png,a cat\n1.png,a dog\n")
    assert load_splits(str(tmp_path / "flat"))["train"]["caption"][:] == ["a cat", "a dog"]
    gc.collect()  # what is left open is closed here, where that is no error


def test_class_names_that_only_look_different_are_named(folder, caplog):
    cells = ["cat", "Cat", "caf\u00e9", "cafe\u0301", "dog", "dog "]
    (folder / "labels.csv").write_text(
        "image,label\n" + "".join(f"images/{number}.png,{cell}\n" for number, cell in enumerate(cells))
    )
    assert len(set(labels(folder))) == 5
    assert "'Cat' and 'cat'" in caplog.text
    assert "are different classes: rename the labels if they are the same" in caplog.text
    assert "dog" not in caplog.text.partition("are different classes")[0].rpartition("\n")[2]


def test_a_folder_with_an_archive_alone_says_to_unpack_it(tmp_path):
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        for number, image in enumerate(pictures(range(4))):
            archive.writestr(f"{animal(number)}/{number}.png", image)
    with pytest.raises(ValueError, match=r"photos.zip, which cannot be read as it is: unpack it"):
        load_splits(str(tmp_path))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_parquet_file_may_name_images_beside_it(streaming, folder):
    rows = {"image": [f"images/{number}.png" for number in range(4)], "label": [animal(number) for number in range(4)]}
    pq.write_table(pa.table(rows), folder / "rows.parquet")
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: rows.parquet\n---\n")
    for path in (folder, folder / "rows.parquet"):
        row = next(iter(load_splits(str(path), streaming=streaming)["train"]))
        assert row["image"] == {"bytes": None, "path": "images/0.png"}
    if not streaming:
        assert labels(folder) == labels(folder / "rows.parquet") == ["cat", "dog", "cat", "dog"]

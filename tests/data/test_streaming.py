"""Claims about streams: 22 images in three shards, in the order of their numbers; 4 to score."""

import contextlib
import itertools

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image, List
from image_data import (
    ANIMALS,
    animal,
    assert_own,
    encoded,
    good_items,
    picture,
    pictures,
    spec_of,
    table_of,
    write_tar,
)

from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.sampling import EPOCH_STRIDE
from hf_vit.data.sources import load_splits
from hf_vit.data.streaming import ImageStream, prepare_stream


COUNT = 22


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    """datasets waits five seconds after each pass over several Parquet files."""
    monkeypatch.setattr("datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)


@pytest.fixture(scope="module", params=["tar", "parquet"])
def shards(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for name, start, stop in (("train-0", 0, 9), ("train-1", 9, 16), ("train-2", 16, COUNT), ("validation-0", 0, 4)):
        if request.param == "tar":
            numbers = range(start, stop)
            write_tar(folder / f"{name}.tar", pictures(numbers), [n % 2 for n in numbers], start)
        else:
            table_of(range(start, stop)).to_parquet(folder / f"{name}.parquet")
    return folder


def stream_of(folder, seed=0, on_bad_image="stop", buffer=6, lanes=4, **how):
    rows, _, names, _ = prepare_stream(
        load_splits(str(folder), streaming=True), **{"label_names": list(ANIMALS), **how}
    )
    return ImageStream(rows, names, spec_of(), seed, buffer, on_bad_image, lanes)


def batches_of(stream, count, batch_size, rank=0, world=1, step=0):
    """The first `count` batches from `step` on."""
    with contextlib.closing(stream.batches(step, batch_size, rank, world)) as batches:
        return [batch for _, batch in itertools.islice(batches, count)]


def seen_in(stream, *how, **where):
    """(id, (pixels, label)) of each image of some batches, in their order."""
    return [
        (index, (image.numpy().tobytes(), label))
        for batch in batches_of(stream, *how, **where)
        for index, image, label in zip(batch["index"].tolist(), batch["images"], batch["labels"].tolist(), strict=True)
    ]


def test_a_streams_splits_are_the_training_stream_and_a_whole_split_to_score(shards):
    _, held, names, scored = prepare_stream(load_splits(str(shards), streaming=True), label_names=list(ANIMALS))
    assert (names, scored) == (list(ANIMALS), "validation")
    assert held["row"][:] == [0, 1, 2, 3]
    images = ImageDataset(held, spec_of())
    assert images.labels.tolist() == [0, 1, 0, 1]
    assert_own(images.__getitems__([0, 1, 2, 3]), good_items(4), [0, 1, 0, 1])


def test_a_streams_order_depends_on_the_seed_alone(shards):
    first = seen_in(stream_of(shards), 11, 4)
    assert seen_in(stream_of(shards), 11, 4) == first
    assert [pixels for _, pixels in seen_in(stream_of(shards, seed=1), 11, 4)] != [pixels for _, pixels in first]
    assert [pixels for _, pixels in first[:COUNT]] != [pixels for _, pixels in first[COUNT : 2 * COUNT]]


def test_each_pass_of_a_stream_shows_every_image_once_with_an_id_of_its_own(shards):
    known_pixels = {np.asarray(picture(n, (8, 12))).transpose(2, 0, 1).tobytes(): n for n in range(COUNT)}
    seen = seen_in(stream_of(shards), 3 * COUNT, 1)
    numbers = [known_pixels[pixels] for _, (pixels, _) in seen]
    for start in range(0, 3 * COUNT, COUNT):
        assert sorted(numbers[start : start + COUNT]) == list(range(COUNT))
    assert [number % 2 for number in numbers] == [label for _, (_, label) in seen]
    assert len({index for index, _ in seen}) == 3 * COUNT
    pairs = {(number, index % EPOCH_STRIDE) for number, (index, _) in zip(numbers, seen, strict=True)}
    assert len(pairs) == COUNT  # the place of an image is the same in each pass


@pytest.mark.parametrize(("together", "world"), [(12, 2), (12, 4), (6, 3), (10, 2)])
def test_any_number_of_processes_sees_together_what_one_sees_of_a_stream(shards, together, world):
    steps = 2 * COUNT // together + 1
    whole = [index for index, _ in seen_in(stream_of(shards, lanes=3), steps, together)]
    streams = [stream_of(shards, lanes=3) for _ in range(world)]
    parts = [batches_of(stream, steps, together // world, rank, world) for rank, stream in enumerate(streams)]
    assert [index for step in zip(*parts, strict=True) for part in step for index in part["index"].tolist()] == whole
    if world == 3:  # a process a shard
        assert [list(stream.lengths) for stream in streams] == [[0], [1], [2]]


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("knows", [True, False])
def test_a_stream_goes_on_at_any_step_as_if_it_had_not_stopped(shards, knows, lanes):
    stream = stream_of(shards, lanes=lanes)
    whole = [batch["index"].tolist() for batch in batches_of(stream, 24, 3)]
    for step in range(24):
        resumed = stream_of(shards, lanes=lanes)
        resumed.lengths = dict(stream.lengths) if knows else {}
        assert [batch["index"].tolist() for batch in batches_of(resumed, 24 - step, 3, step=step)] == whole[step:]


def test_a_streamed_label_outside_the_names_is_an_error(tmp_path):
    for name, labels in (("train", [0, 1, 2]), ("validation", [0])):
        write_tar(tmp_path / f"{name}.tar", pictures(range(len(labels))), labels)
    with pytest.raises(ValueError, match=r"row 2 has the label 2, none of the 2 classes"):
        batches_of(stream_of(tmp_path), 3, 1)


def test_an_unknown_label_of_the_split_to_score_is_an_error(tmp_path):
    for name, labels in (("train", [0, 1]), ("validation", [0, 5])):
        write_tar(tmp_path / f"{name}.tar", pictures(range(len(labels))), labels)
    with pytest.raises(ValueError, match="0, 5"):
        stream_of(tmp_path)


def test_text_labels_of_a_stream_are_places_in_label_names(tmp_path):
    for name, numbers in (("train", range(4)), ("validation", [0, 1])):
        text = table_of(numbers).remove_columns("label").add_column("label", [animal(n) for n in numbers])
        text.to_parquet(tmp_path / f"{name}.parquet")
    (batch,) = batches_of(stream_of(tmp_path, label_names=["dog", "cat"]), 1, 4)
    assert batch["labels"].tolist() == [1 - index % 2 for index in batch["index"].tolist()]
    with pytest.raises(ValueError, match=r"the labels \(label\) are bare string.*pass --label_names FILE"):
        stream_of(tmp_path, label_names=None)


def test_a_stream_of_bare_numbers_needs_label_names_and_one_of_classes_does_not(shards):
    if any(shards.glob("*.parquet")):
        assert stream_of(shards, label_names=None).names == list(ANIMALS)
    else:
        with pytest.raises(ValueError, match=r"the labels \(cls\) are bare int64.*pass --label_names FILE"):
            stream_of(shards, label_names=None)


def test_a_stream_without_a_split_to_score_is_an_error(tmp_path):
    tar = write_tar(tmp_path / "train.tar", pictures([0, 1]), [0, 1])
    with pytest.raises(
        ValueError, match=r"--streaming needs the split 'train' and another one to evaluate on.*has train"
    ):
        prepare_stream(load_splits(tar, streaming=True), label_names=list(ANIMALS))


def test_bad_images_of_a_stream_stop_it_or_are_skipped(tmp_path):
    images = pictures(range(8))
    images[5] = b"no picture"
    write_tar(tmp_path / "train.tar", images, [n % 2 for n in range(8)])
    write_tar(tmp_path / "validation.tar", pictures([0]), [0])
    with pytest.raises(ValueError, match=r"row 5 .*cannot be read as an image.*--on_bad_image skip"):
        batches_of(stream_of(tmp_path), 2, 4)
    stream = stream_of(tmp_path, on_bad_image="skip")
    batches = batches_of(stream, 2, 4)
    assert [len(batch["images"]) for batch in batches] == [4, 4]
    assert {index for batch in batches for index in batch["index"].tolist()} == set(range(8)) - {5}
    for batch in batches:
        assert_own(batch, good_items(8), [n % 2 for n in range(8)])
    assert len(stream.skipped) == 1
    with pytest.raises(ValueError, match="no image of a whole batch can be read; row 5"):
        batches_of(stream_of(tmp_path, on_bad_image="skip"), 8, 1)


def test_a_stream_of_a_table_reads_the_files_it_names(photos):
    lines = [
        f"{'train' if n < 4 else 'val'}/{animal(n)}/{n}.png,{animal(n)},{'train' if n < 4 else 'val'}"
        for n in range(6)
    ]
    (photos / "all.csv").write_text("\n".join(["file,kind,split", *lines]))
    (batch,) = batches_of(stream_of(photos / "all.csv", label_column="kind"), 1, 4)
    assert_own(batch, good_items(4), [n % 2 for n in range(4)])  # by their rows in the table, in whatever order


def test_numbers_of_a_stream_begin_at_0(photos):
    (photos / "all.csv").write_text("image,label,split\ntrain/cat/0.png,1,train\ntrain/dog/1.png,2,val\n")
    with pytest.raises(ValueError, match="wanted 2,"):
        prepare_stream(load_splits(str(photos / "all.csv"), streaming=True), label_names=["a", "b"])


def test_a_stream_of_class_folders_is_not_read_class_by_class(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for n in range(200):
            (tmp_path / "train" / name / f"{n}.png").touch()
    rows = load_splits(str(tmp_path), streaming=True)["train"]
    assert rows.num_shards == 64  # that lanes and processes share out
    first = [row["label"] for row in itertools.islice(rows, 100)]
    assert 25 < sum(first) < 75


def test_a_streamed_jpeg_is_not_decoded_and_packed_again_on_its_way(tmp_path):
    jpeg = encoded(picture(0, (64, 64)), "JPEG", quality=95)
    for name in ("train", "validation"):
        write_tar(tmp_path / f"{name}.tar", [jpeg], [0])
    rows, held, _, _ = prepare_stream(load_splits(str(tmp_path), streaming=True), label_names=list(ANIMALS))
    assert [row["image"]["bytes"] for row in rows] == [jpeg]
    assert held[0]["image"]["bytes"] == jpeg


def test_a_streams_split_to_score_is_read_anew_when_its_file_has_changed(tmp_path):
    for count in (1, 3):
        for name, numbers in (("train", [0, 1]), ("validation", range(count))):
            table_of(numbers).to_parquet(tmp_path / f"{name}.parquet")
        held = prepare_stream(load_splits(str(tmp_path), streaming=True))[1]
        assert len(held) == count


def test_lists_of_labels_are_streamed_as_0_and_1_of_each(tmp_path):
    lists = [[number % 2, 2] if number % 3 else [] for number in range(8)]
    features = Features(image=Image(), labels=List(ClassLabel(names=["cat", "dog", "owl"])))
    for name in ("train", "validation"):
        rows = {"image": [picture(number) for number in range(8)], "labels": lists}
        Dataset.from_dict(rows, features).to_parquet(tmp_path / f"{name}.parquet")
    (batch,) = batches_of(stream_of(tmp_path, label_names=None), 1, 8)
    wanted = [[float(label in lists[number]) for label in range(3)] for number in batch["index"].tolist()]
    assert batch["labels"].tolist() == wanted
    with pytest.raises(ValueError, match="--streaming does not go with --label_separator or --label_columns"):
        stream_of(tmp_path, label_separator=";")

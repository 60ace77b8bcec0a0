"""Claims about streams: 22 images in three shards, in the order of their numbers; 4 to score."""

import contextlib
import dataclasses
import itertools
import os

import numpy as np
import pytest
import torch
from datasets import ClassLabel, List
from image_data import ANIMALS, animal, assert_own, good_items, picture, pictures, spec_of, table_of, write_tar

from hf_vit.data import streaming
from hf_vit.data.crops import crop_params
from hf_vit.data.decoding import decode_image
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.sampling import EPOCH_STRIDE
from hf_vit.data.sources import load_splits
from hf_vit.data.streaming import ImageStream, prepare_stream
from hf_vit.system.errors import UserError


COUNT = 22


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    """datasets waits five seconds after each pass over several Parquet files."""
    monkeypatch.setattr("datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)


@pytest.fixture(params=[1, 3])
def lanes(request, monkeypatch):
    monkeypatch.setattr(streaming, "LANES", request.param)


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


def prepared(folder, **how):
    return prepare_stream(load_splits(str(folder), streaming=True), **{"label_names": list(ANIMALS), **how})


def stream_of(folder, seed=0, on_bad_image="stop", spec=None, **how):
    rows, _, names, _ = prepared(folder, **how)
    return ImageStream(rows, names, spec or spec_of(), seed, 6, on_bad_image)


def batches_of(stream, count, batch_size, rank=0, world=1, step=0):
    """The first `count` batches from `step` on."""
    with contextlib.closing(stream.batches(step, batch_size, rank, world)) as batches:
        return [batch for _, batch in itertools.islice(batches, count)]


def ids_of(batches):
    return [batch["index"].tolist() for batch in batches]


def number_of(index):
    """The number of the image with this id: shards are read in turn."""
    position = index % EPOCH_STRIDE
    return (0, 9, 16)[position % 3] + position // 3


def test_a_streams_splits_are_the_training_stream_and_a_whole_split_to_score(shards):
    _, held, names, scored = prepared(shards)
    assert (names, scored, held["row"][:]) == (list(ANIMALS), "validation", [0, 1, 2, 3])
    assert_own(ImageDataset(held, spec_of()).__getitems__([0, 1, 2, 3]), good_items(4), [0, 1, 0, 1])


def test_each_pass_shows_every_image_once_in_an_order_of_seed_and_epoch(shards):
    def passes(seed):
        batches = batches_of(stream_of(shards, seed), 2 * COUNT, 1)
        ids = [batch["index"].item() for batch in batches]
        assert len(set(ids)) == 2 * COUNT
        for batch, index in zip(batches, ids, strict=True):
            number = number_of(index)
            np.testing.assert_array_equal(batch["images"][0].permute(1, 2, 0), picture(number, (8, 12)))
            assert batch["labels"] == number % 2
        return [tuple(map(number_of, ids[:COUNT])), tuple(map(number_of, ids[COUNT:]))]

    seen = passes(seed=0)
    assert all(sorted(one) == list(range(COUNT)) for one in seen)
    assert passes(seed=0) == seen
    assert len({*seen, *passes(seed=1)}) == 4


@pytest.mark.parametrize(("together", "world"), [(12, 4), (6, 3), (10, 2)])
def test_any_number_of_processes_sees_together_what_one_sees_of_a_stream(shards, together, world, monkeypatch):
    monkeypatch.setattr(streaming, "LANES", 3)
    steps = 2 * COUNT // together + 1
    whole = ids_of(batches_of(stream_of(shards), steps, together))
    streams = [stream_of(shards) for _ in range(world)]
    parts = [ids_of(batches_of(stream, steps, together // world, rank, world)) for rank, stream in enumerate(streams)]
    assert [list(itertools.chain(*step)) for step in zip(*parts, strict=True)] == whole
    if world == 3:  # a process a shard
        assert [list(stream.lengths) for stream in streams] == [[0], [1], [2]]


@pytest.mark.parametrize("knows", [True, False])
def test_a_stream_goes_on_at_any_step_as_if_it_had_not_stopped(shards, knows, lanes):
    stream = stream_of(shards)
    whole = ids_of(batches_of(stream, 24, 3))
    for step in (1, 4, 7, 8, 16, 23):
        resumed = stream_of(shards)
        resumed.lengths = dict(stream.lengths) if knows else {}
        assert ids_of(batches_of(resumed, 24 - step, 3, step=step)) == whole[step:]


def test_a_streams_random_parts_are_those_of_its_ids(shards):
    spec = dataclasses.replace(spec_of(), crop_scale=0.3)
    for batch in batches_of(stream_of(shards, seed=7, spec=spec), 2 * COUNT // 4, 4):
        params = crop_params(batch["index"], spec, 7)
        for index, image, box in zip(batch["index"].tolist(), batch["images"], params, strict=True):
            wanted = decode_image(good_items(COUNT)[number_of(index)], spec, box)
            np.testing.assert_array_equal(image.permute(1, 2, 0), wanted)


@pytest.mark.parametrize(
    ("train", "validation", "names", "wrong"),
    [
        ([0, 1, 2], [0], ANIMALS, "row 2 .*2"),  # a label outside the names
        ([0, 1], [1, 2], ANIMALS, "2"),  # numbers of a stream begin at 0
        ([0, 1], [0], None, "cls.*--label_names"),  # bare numbers
        ([0, 1], None, ANIMALS, "--eval_split"),
    ],
)
def test_what_a_stream_cannot_know_is_an_error(train, validation, names, wrong, tmp_path):
    for name, labels in (("train", train), ("validation", validation)):
        if labels is not None:
            write_tar(tmp_path / f"{name}.tar", pictures(range(len(labels))), labels)
    with pytest.raises(ValueError, match=wrong):
        batches_of(stream_of(tmp_path, label_names=names and list(names)), 3, 1)


def test_text_labels_of_a_stream_are_places_in_label_names_and_classes_need_none(tmp_path):
    rows = table_of(range(4))
    text = rows.remove_columns("label").add_column("label", [animal(n) for n in range(4)])
    for table, names, labels in ((text, ["dog", "cat"], [1, 0, 1, 0]), (rows, None, [0, 1, 0, 1])):
        for split in ("train", "validation"):
            table.to_parquet(tmp_path / f"{split}.parquet")
        (batch,) = batches_of(stream_of(tmp_path, label_names=names), 1, 4)
        assert_own(batch, good_items(4), labels)
    with pytest.raises(UserError, match="--label_names"):
        stream_of(tmp_path, label_names=["dog", "cat"])


def test_bad_images_of_a_stream_stop_it_or_are_skipped(tmp_path):
    images = pictures(range(8))
    images[5] = b"no picture"
    write_tar(tmp_path / "train.tar", images, [n % 2 for n in range(8)])
    write_tar(tmp_path / "validation.tar", pictures([0]), [0])
    with pytest.raises(UserError, match=r"row 5 .*--on_bad_image skip"):
        batches_of(stream_of(tmp_path), 2, 4)
    stream = stream_of(tmp_path, on_bad_image="skip")
    batches = batches_of(stream, 2, 4)
    assert {index for ids in ids_of(batches) for index in ids} == set(range(8)) - {5}
    for batch in batches:
        assert len(batch["images"]) == 4
        assert_own(batch, good_items(8), [n % 2 for n in range(8)])
    assert len(stream.skipped) == 1
    with pytest.raises(UserError, match="row 5"):
        batches_of(stream_of(tmp_path, on_bad_image="skip"), 8, 1)


def test_lists_of_labels_are_streamed_as_0_and_1_of_each(tmp_path):
    lists = [[number % 2, 2] if number % 3 else [] for number in range(8)]
    rows = table_of(range(8)).remove_columns("label")
    rows = rows.add_column("labels", lists, feature=List(ClassLabel(names=["cat", "dog", "owl"])))
    for name in ("train", "validation"):
        rows.to_parquet(tmp_path / f"{name}.parquet")
    (batch,) = batches_of(stream_of(tmp_path, label_names=None), 1, 8)
    wanted = [[float(label in lists[number]) for label in range(3)] for number in batch["index"].tolist()]
    assert torch.equal(batch["labels"], torch.tensor(wanted))
    with pytest.raises(UserError, match="--label_separator"):
        stream_of(tmp_path, label_separator=";")


def test_a_stream_started_again_finds_its_split_to_score_in_the_cache(tmp_path):
    for name in ("train", "validation"):
        table_of(range(2)).to_parquet(tmp_path / f"{name}.parquet")
    cached = lambda: prepared(tmp_path, label_names=None)[1].cache_files[0]["filename"]
    first = cached()
    assert cached() == first
    os.utime(tmp_path / "validation.parquet", (1, 1))
    assert cached() != first

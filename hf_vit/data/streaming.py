"""Training images that are read while training, in an order that any number of processes share and any step can resume."""

import hashlib
import itertools
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from datasets import ClassLabel, Dataset, IterableDataset, IterableDatasetDict

from hf_vit.data.columns import (
    find_columns,
    has_several_labels,
    label_feature,
    multi_hot,
    select_image_and_label,
    set_labels,
)
from hf_vit.data.crops import crop_params
from hf_vit.data.decoding import decode_rows, record_unreadable, replacement_places, stack_images
from hf_vit.data.image_files import allowed_files
from hf_vit.data.image_spec import ImageSpec
from hf_vit.data.sampling import EPOCH_STRIDE
from hf_vit.data.splits import find_eval_split
from hf_vit.system.errors import UserError
from hf_vit.system.hardware import own_cores
from hf_vit.system.text import listed


LANES = 4  # shards that are read at a time


def prepare_stream(
    splits: IterableDatasetDict,
    *,
    train_split: str = "train",
    eval_split: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    label_names: list[str] | None = None,
    **separated,
) -> tuple[IterableDataset, Dataset, list[str], str]:
    """As `prepare_splits`, for streaming: the training stream, the evaluation split (downloaded whole and cached), the class
    names, and the name of the evaluation split; also a UserError if classes or evaluation split are unknown."""
    if any(separated.values()):
        raise UserError(
            "--streaming does not support --label_separator and --label_columns: store several labels of an image as a list of "
            "names or of class indices, or leave --streaming out"
        )
    eval_split = eval_split or find_eval_split(splits, train_split)
    if not {train_split, eval_split} <= set(splits) or train_split == eval_split:
        raise UserError(
            f"--streaming needs a split to train on, {train_split!r}, and one to evaluate on, {eval_split or 'validation'!r}; the data set "
            f"has {', '.join(splits)}: name them with --train_split and --eval_split"
        )
    train, held_out = splits[train_split], splits[eval_split]
    if train.features is None:
        train, held_out = train._resolve_features(), held_out._resolve_features()
    columns = find_columns(train, image_column, label_column)
    feature = label_feature(train.features[columns[1]])
    known = feature.names if isinstance(feature, ClassLabel) else label_names
    if known is None:
        raise UserError(
            f"the labels ({columns[1]}) of a stream are bare numbers or text, and it does not say how many there are: pass "
            "--label_names FILE, one name a line"
        )
    if label_names not in (None, known):
        raise UserError(
            f"the classes of the stream are {listed(known)} in this order, and --label_names has others: leave it out"
        )
    fingerprint = stream_fingerprint(held_out, columns)
    held_out = select_image_and_label(held_out, columns)
    rows = Dataset.from_generator(held_out.__iter__, features=held_out.features, fingerprint=fingerprint)
    rows = rows.cast_column("image", held_out.features["image"])  # the files it may name are not stored on disk
    place_of = {name: place for place, name in enumerate(known)}
    labels = [class_indices(label, place_of, row) for row, label in enumerate(rows["label"])]
    rows = set_labels(rows, labels, known).add_column("row", np.arange(len(rows)))
    return select_image_and_label(train, columns), rows, known, eval_split


def class_indices(label, place_of: dict[str, int], row: int) -> int | list[int]:
    """The label of a row of a stream, or each of a list, as class index: a whole number is one, a text is a name, or a whole number.

    Raises:
        UserError: for one that is none of the classes.
    """
    if isinstance(label, list):
        return [class_indices(one, place_of, row) for one in label]
    place = label if isinstance(label, int) else place_of.get(label, label)
    if not str(place).isdecimal() or int(place) >= len(place_of):
        raise UserError(f"row {row} has the label {label!r}, none of the {len(place_of)} classes")
    return int(place)


def stream_fingerprint(rows: IterableDataset, columns: tuple[str, str]) -> str:
    """The same for the same data in every process: a hash of what a stream reads, of size and time of local files, and of the
    columns. (The fingerprint of `datasets` hashes objects that differ from start to start.)"""

    def leaves(value):
        if isinstance(value, str):
            yield value
            file = value.rpartition("::")[2]
            if os.path.isfile(file):
                yield os.stat(file).st_size
                yield os.stat(file).st_mtime_ns
        elif isinstance(value, (dict, list, tuple)):
            for part in value.items() if isinstance(value, dict) else value:
                yield from leaves(part)
        elif hasattr(value, "__dict__"):
            yield from leaves(vars(value))
        else:
            yield repr(value)

    parts = [*leaves(rows._ex_iterable), repr(rows.features), *columns]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


class ImageStream:
    """An endless stream of training images: shards and rows in an order of (seed, epoch), decoded by threads.

    The shards are dealt out to lanes, whose number divides `LANES`, the number of shards and the images of a step. Each lane
    reads its shards in random order, shuffles blocks of rows, fills the same places of every step, and starts over when all
    shards are read. So a process reads only the lanes of its own places, and the number of processes changes nothing.

    The id of an image is its position in the unshuffled stream, plus `EPOCH_STRIDE` for each epoch before.

    Args:
        rows: columns `image` (undecoded) and `label`, a class index or one of `names`, or a list of them.
        buffer: rows that are shuffled at a time, in all lanes together.
    """

    def __init__(
        self,
        rows: IterableDataset,
        names: list[str],
        spec: ImageSpec,
        seed: int,
        buffer: int,
        on_bad_image: str = "stop",
    ):
        self.rows, self.spec, self.seed, self.on_bad_image = rows, spec, seed, on_bad_image
        self.buffer, self.files = buffer, allowed_files(rows)
        self.place_of = {name: place for place, name in enumerate(names)}
        self.skipped: dict[str, None] = {}  # an ordered set
        self.lengths: dict[int, int] = {}  # rows of each shard that was read to its end: a resumed run skips it unread

    def batches(
        self, step: int, batch_size: int, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Endless (epoch, batch) from step number `step` on: the epoch of the first image, and a batch as of `data_loader`.

        `batch_size` is of one process.
        """
        total_batch = batch_size * world
        lanes = math.gcd(self.rows.num_shards, total_batch, LANES)
        per_lane = total_batch // lanes
        first, last = rank * batch_size, (rank + 1) * batch_size
        own_lanes = range(first // per_lane, -(-last // per_lane))

        def read_steps(pool):
            readers = {lane: self._read_lane(lane, lanes, step * per_lane) for lane in own_lanes}
            while True:
                rows = [row for lane in own_lanes for row in itertools.islice(readers[lane], per_lane)]
                rows = rows[first - own_lanes.start * per_lane :][:batch_size]
                ids = torch.tensor([row["row"] + epoch * EPOCH_STRIDE for epoch, row in rows])
                decode = lambda row, params: decode_rows([row[1]], self.spec, [params], self.files)
                yield rows, ids, pool.map(decode, rows, crop_params(ids, self.spec, self.seed))

        pool, reader = ThreadPoolExecutor(own_cores()), ThreadPoolExecutor(1)
        try:
            steps = read_steps(pool)
            ahead = deque(reader.submit(next, steps) for _ in range(3))
            while True:
                rows, ids, decoded = ahead.popleft().result()
                ahead.append(reader.submit(next, steps))
                yield rows[0][0], self._make_batch(rows, ids, list(decoded))
        finally:  # without waiting: the network may be slow
            reader.shutdown(wait=False, cancel_futures=True)
            pool.shutdown(wait=False, cancel_futures=True)

    def _read_shards(self, shards: Iterable[int], skip: int) -> Iterator[dict]:
        """Rows of shards one after the other, without the first `skip`."""
        count = self.rows.num_shards
        for shard in shards:
            if self.lengths.get(shard, skip + 1) > skip:
                place = -1
                for place, row in enumerate(self.rows.shard(count, shard)):
                    if place >= skip:
                        yield {**row, "row": place * count + shard}
                self.lengths[shard] = place + 1
            skip = max(0, skip - self.lengths[shard])

    def _read_lane(self, lane: int, lanes: int, start: int) -> Iterator[tuple[int, dict]]:
        """Endless (epoch, row) of a lane, from its row number `start` on, counted over all epochs."""
        block_size = max(1, self.buffer // lanes)
        own = range(lane, self.rows.num_shards, lanes)
        for epoch in itertools.count():
            length = sum(self.lengths.get(shard, math.inf) for shard in own)
            if length == 0:
                raise UserError("there are no rows in some shards of the stream: remove them")
            if start < length:
                shards = np.random.default_rng([self.seed, epoch, lane]).permutation(own).tolist()
                rows = self._read_shards(shards, start // block_size * block_size)
                for number in itertools.count(start // block_size):
                    block: list[dict | None] = list(itertools.islice(rows, block_size))
                    if not block:
                        break
                    order = np.random.default_rng([self.seed, epoch, lane, number]).permutation(len(block))
                    for place in order[max(0, start - number * block_size) :].tolist():
                        yield epoch, block[place]
                        block[place] = None  # frees its bytes for the next block
            start = max(0, start - sum(self.lengths[shard] for shard in own))

    def _make_batch(self, rows, ids: torch.Tensor, decoded) -> dict[str, torch.Tensor]:
        """A batch of (epoch, row), their ids (b,) and what `decode_rows` made of each; unreadable images are replaced."""
        record_unreadable([error for _, errors in decoded for error in errors], self.skipped, self.on_bad_image)
        readable = [place for place, ((image,), _) in enumerate(decoded) if image is not None]
        if not readable:
            raise UserError(f"no image of a whole batch can be read; {decoded[0][1][0]}")
        places = replacement_places(readable, len(rows))
        images = stack_images([decoded[place][0][0] for place in places])
        labels = [class_indices(rows[place][1]["label"], self.place_of, rows[place][1]["row"]) for place in places]
        return {
            "images": images.pin_memory() if torch.cuda.is_available() else images,
            "labels": multi_hot(labels, len(self.place_of)) if has_several_labels(self.rows) else torch.tensor(labels),
            "index": ids[places],
        }

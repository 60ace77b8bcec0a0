"""The images of a run: read, split, and described for the model; and the batches that are made of them."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hf_vit.data.augment import augment
from hf_vit.data.columns import column_arguments, count_labels
from hf_vit.data.duplicates import also_in, thumbnail_vectors
from hf_vit.data.image_dataset import ImageDataset, check_unreadable
from hf_vit.data.image_spec import ImageSpec, image_spec_of, training_image_spec
from hf_vit.data.loader import data_loader
from hf_vit.data.sampling import EPOCH_STRIDE, epoch_batches
from hf_vit.data.sources import dataset_license, open_source
from hf_vit.data.splits import is_test_split, prepare_splits
from hf_vit.data.streaming import ImageStream, prepare_stream
from hf_vit.data.summary import summary
from hf_vit.system.command_line import script_name
from hf_vit.system.errors import UserError
from hf_vit.system.recipes_folder import EMBEDDED
from hf_vit.system.text import as_license, counted
from hf_vit.training.arguments import TrainArguments
from hf_vit.training.log import print_main


MAX_PAIRS = 10**9  # of a scored image and one to train on, that are compared before a run


@dataclass
class RunData:
    """Images and labels of a run.

    Args:
        labels: names of the classes; none of images without labels.
        scored: which images are scored, in words, such as "test".
        train_images, eval_images: an `ImageDataset`, or an `ImageStream` to train on; of features if they are cached.
        spec, train_spec: `ImageSpec` of the images that are scored and trained on.
        fingerprints: of each split that is not streamed.
        license: of the data set, on the main process.
        seconds: spent reading.
        scored_duplicates: see `count_scored_duplicates`.
    """

    labels: list[str]
    scored: str
    train_images: ImageDataset | ImageStream
    eval_images: ImageDataset
    spec: ImageSpec
    train_spec: ImageSpec
    fingerprints: dict[str, str]
    license: str | None
    seconds: float
    scored_duplicates: int | None = None

    @property
    def is_stream(self) -> bool:
        """Whether training images are read while training."""
        return isinstance(self.train_images, ImageStream)

    @property
    def train_size(self) -> int | None:
        """How many images there are to train on; None for a stream."""
        return None if self.is_stream else len(self.train_images)

    @property
    def multi_label(self) -> bool:
        """Whether an image has any number of labels."""
        return self.eval_images.labels is not None and self.eval_images.labels.ndim == 2

    @property
    def in_memory(self) -> bool:
        """Whether the training images need not be waited for."""
        return getattr(self.train_images, "cache", None) is not None

    @property
    def selects_best(self) -> bool:
        """Whether the scored images decide which weights are kept; a test split does not."""
        return not is_test_split(self.scored)


class Batch(NamedTuple):
    """A micro-batch of one process, on its device.

    Args:
        epoch: from 0.
        inputs: (B, C, H, W), or cached features (B, D).
        targets: as the run's task makes them.
        rows: "labels", and on the CPU "index", the ids of the images.
    """

    epoch: int
    inputs: torch.Tensor
    targets: torch.Tensor | None
    rows: dict


def load_rows(args: TrainArguments, print_main):
    """Labelled images, not yet decoded: (splits, the stream to train on or None, labels, what is scored), see `prepare_splits`. What
    was read is printed."""
    columns = {"train_split": args.train_split, "eval_split": args.eval_split, **column_arguments(args)}
    source, stream = open_source(args, args.streaming), None
    if args.streaming:
        stream, eval_rows, labels, scored = prepare_stream(source.splits, **columns)
        splits = {"eval": eval_rows}
    else:
        sizes = {name: getattr(args, name) for name in ("eval_fraction", "shots", "seed")}
        regression = args.problem_type == "regression"
        splits, labels, scored = prepare_splits(source.splits, regression=regression, **columns, **sizes)
    read = {"train": stream, **splits}
    print_main("\n".join(summary(read, {"train": args.train_split, "eval": scored}, labels, source)))
    return splits, stream, labels, scored


def read_data(args: TrainArguments, task, accelerator):
    """The data, and the model and image processor that decide how images are read: (RunData, model, processor)."""
    began = time.monotonic()
    with accelerator.main_process_first():
        splits, stream, labels, scored = task.load_rows(print_main)
    # Read before training: a licence that the card cannot hold must not end the run after it.
    data_license = as_license(dataset_license(args.dataset_name)) if accelerator.is_main_process else None
    model, processor = task.build_model(labels, splits["eval"])
    spec = image_spec_of(processor, model.config)
    train_spec = training_image_spec(spec, splits.get("train"), args.crop, args.crop_scale)
    # What cannot be read is skipped until all is read: then all of it is named, and each class is judged as a whole.
    parts = [eval_images := ImageDataset(splits["eval"], spec, "skip")]
    if stream is None:
        parts.append(train_images := ImageDataset(splits["train"], train_spec, "skip", keep_full=True, seed=args.seed))
    else:
        train_images = ImageStream(stream, labels, train_spec, args.seed, args.shuffle_buffer, args.on_bad_image)
    check_unreadable(parts, labels, args.on_bad_image)
    seconds = time.monotonic() - began
    if labels and not count_labels(eval_images.labels, len(labels)).any():
        raise UserError(
            f"none of {counted(len(eval_images), 'image')} of {scored} has a label: wanted images with labels to score"
        )
    fingerprints = {name: part._fingerprint for name, part in splits.items() if stream is None}
    data = RunData(labels, scored, train_images, eval_images, spec, train_spec, fingerprints, data_license, seconds)
    if accelerator.is_main_process:
        data.scored_duplicates = count_scored_duplicates(data)
    return data, model, processor


def count_scored_duplicates(data: RunData) -> int | None:
    """How many of the scored images are to be trained on too, as `duplicates.also_in` tells; None where the images are not in
    memory, too many to compare all, or cut in another way."""
    scored, trained, is_same_cut = (
        data.eval_images.cache,
        data.train_images,
        data.spec.resize == data.train_spec.resize,
    )
    if scored is None or not data.in_memory or not is_same_cut or len(scored) * len(trained) > MAX_PAIRS:
        return None
    if count := int(also_in(thumbnail_vectors(scored), thumbnail_vectors(trained.cache)).sum()):
        print_main(
            f"{count:,} of {counted(len(scored), 'image')} to score are trained on too ({script_name('audit')} shows them)"
        )
    return count


def seed_micro_batch(seed: int, step: int, number: int, rank: int):
    """Seed what is random inside the network (dropout, drop path, patch dropout) for one micro-batch of one process."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, number, rank]).generate_state(1)[0]))


class TrainBatches:
    """The micro-batches of one process, in an order that is a function of seed and step.

    Args:
        run: with its plan, data, task and accelerator.
        batch_size, accumulation: images of a micro-batch, and micro-batches of a step.
    """

    def __init__(self, run, batch_size: int, accumulation: int):
        self.plan, self.args, self.data, self.task = run.plan, run.plan.args, run.data, run.task
        self.accelerator, self.batch_size, self.accumulation = run.accelerator, batch_size, accumulation

    def rows(self, first_step: int) -> Iterator[tuple[int, dict]]:
        """(epoch, rows) of each micro-batch from step `first_step` on, without an end."""
        images, size, plan = self.data.train_images, self.batch_size, self.plan
        per_process = size * self.accumulation
        starts, place = range(0, per_process, size), (self.accelerator.process_index, plan.processes)
        if self.data.is_stream:
            for epoch, rows in images.batches(first_step, per_process, *place):
                for at in starts:
                    yield epoch, {key: value[at : at + size] for key, value in rows.items()}
            return

        def order():
            labels = images.labels.numpy() if self.args.balance == "sampling" else None
            for epoch in itertools.count(first_step // plan.steps_per_epoch):
                steps = epoch_batches(len(images), per_process, self.args.seed, epoch, *place, labels)
                for ids in itertools.islice(steps, max(0, first_step - epoch * plan.steps_per_epoch), None):
                    yield from ([epoch * EPOCH_STRIDE + number for number in ids[at : at + size]] for at in starts)

        for number, rows in enumerate(data_loader(images, order(), self.args.num_workers)):
            yield (first_step + number // self.accumulation) // plan.steps_per_epoch, rows

    def augmented(self, rows: dict, epoch: int, step: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Inputs and targets of these rows, see `Batch`."""
        args, data = self.args, self.data
        # The ids of a stream's images differ in each epoch.
        epoch, batch = (0, step) if data.is_stream else (epoch, step % self.plan.steps_per_epoch)
        inputs = rows["images"]
        if not args.cache_features:
            crop = "none" if data.train_spec.crop_scale else args.crop
            inputs = augment(inputs, rows["index"], epoch, data.spec, args, crop)
        return self.task.with_targets(inputs, rows["labels"], epoch, batch)

    def prepared(self, first_step: int) -> Iterator[Batch]:
        """Each micro-batch up to the last step."""
        count = (self.plan.total_steps - first_step) * self.accumulation
        for number, (epoch, rows) in enumerate(itertools.islice(self.rows(first_step), count)):
            on_device = {key: rows[key].to(self.accelerator.device, non_blocking=True) for key in ("images", "labels")}
            rows = {**rows, **on_device}  # the ids stay on the CPU, where random numbers are drawn from them
            inputs, targets = self.augmented(rows, epoch, first_step + number // self.accumulation)
            del rows["images"]
            yield Batch(epoch, inputs, targets, rows)


def read_while(values: torch.Tensor, work) -> list:
    """The numbers of a tensor; `work` is done while a GPU computes them, and what it launches there is not waited for."""
    if values.is_cuda:
        values, arrived = values.to("cpu", non_blocking=True), torch.cuda.Event()
        arrived.record()
        work()
        arrived.synchronize()
    return values.tolist()


class Prefetcher:
    """An iterator that can make its next batch before it is asked for, while the device works on the one before."""

    def __init__(self, batches: Iterator):
        self.batches, self.ahead = batches, None

    def prefetch(self):
        """Make the next batch, if there is one."""
        if self.ahead is None:
            self.ahead = next(self.batches, None)

    def __next__(self):
        self.prefetch()
        batch, self.ahead = self.ahead, None
        if batch is None:
            raise StopIteration
        return batch

    def close(self):
        self.batches.close()


def on_hub(name: str | None) -> str | None:
    """The Hub id of a data set or model; None for what lies on this machine."""
    return None if name is None or name in EMBEDDED or Path(name).expanduser().exists() else name

"""What is computed for the images of a data set, part by part beside the output file: a killed command goes on where it was."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from hf_vit.evaluation.prediction import check_finite
from hf_vit.system.errors import UserError
from hf_vit.system.files import sync, write_text
from hf_vit.system.run_files import read_json


ROWS = 512  # of a part: as many as a killed process computes again, at most


class Parts:
    """The folder `FILE.part` of an output file: `signature.json`, and a file for each `ROWS` rows, which is whole or absent.

    Args:
        output: the file that is made of the parts in the end.
        count: rows of the data set.
    """

    def __init__(self, output: Path, count: int):
        self.folder, self.count = output.with_name(f"{output.name}.part"), count

    def start(self, signature: dict, overwrite: bool):
        """Take the folder, for the one process that makes the output file; parts of the same computation stay.

        Args:
            signature: JSON of all that the results depend on.
            overwrite: drop the parts of another computation.

        Raises:
            ValueError: at parts of another computation, or if another command is at work there.
            OSError: if the folder cannot be written to.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT)  # held until the process ends
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:  # which of them depends on the system
            raise UserError(
                f"another command is at work in {self.folder}: wait for its end, or name another --output_file"
            ) from error
        if differing := self.differing(signature):
            if any(self.folder.glob("*.safetensors")) and not overwrite:
                raise UserError(
                    f"{self.folder} holds results that were computed with another {' and another '.join(differing)}: name another "
                    "--output_file, or pass --overwrite true to begin anew"
                )
            for file in self.folder.glob("*.*"):
                file.unlink()
            write_text(self.folder / "signature.json", json.dumps(signature, indent=2))

    def differing(self, signature: dict) -> list[str]:
        """The keys of `signature` in which the parts are of another computation."""
        file = self.folder / "signature.json"
        found = read_json(file, {}) if file.is_file() else {}
        return [key for key, value in json.loads(json.dumps(signature)).items() if found.get(key) != value]

    def rows(self) -> list[range]:
        """The rows of each part, in order."""
        return [range(start, min(start + ROWS, self.count)) for start in range(0, self.count, ROWS)]

    def missing(self) -> list[range]:
        return [rows for rows in self.rows() if not self._file(rows).is_file()]

    def write(self, rows: range, tensors: dict[str, torch.Tensor], unreadable: list[str]):
        """Keep a part: `tensors` of n rows each, among them `index` (n,), and the error messages of the other images."""
        file = self._file(rows)
        aside = file.with_suffix(".aside")
        save_file(tensors, aside, {"unreadable": json.dumps(unreadable)})
        sync(aside)
        os.replace(aside, file)
        sync(self.folder)

    def read(self) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors of each part in order; parts without a readable image are left out."""
        for rows in self.rows():
            if tensors := load_file(self._file(rows)):
                yield tensors

    def unreadable(self) -> Iterator[str]:
        """The error messages of all parts in order."""
        for rows in self.rows():
            with safe_open(self._file(rows), "pt") as part:
                yield from json.loads(part.metadata()["unreadable"])

    def remove(self):
        shutil.rmtree(self.folder)

    def _file(self, rows: range) -> Path:
        return self.folder / f"{rows.start:012}.safetensors"


def compute_parts(
    parts: Parts,
    load: Callable[[list[list[int]]], Iterable[dict]],
    compute: Callable[[torch.Tensor], dict[str, torch.Tensor]],
    accelerator,
    batch_size: int,
    signature: dict,
    overwrite: bool = False,
):
    """Compute the parts that are missing, shared out among the processes; all of them are there when it returns.

    Args:
        load: batches of row numbers -> batches in that order, as `data_loader` gives them, empty ones too.
        compute: images (b, C, H, W) -> results of b rows each.
        signature, overwrite: as `Parts.start` takes them.

    Raises:
        ValueError: if a result is not finite, or as `Parts.start`.
    """
    if accelerator.is_main_process:
        parts.start(signature, overwrite)
    accelerator.wait_for_everyone()
    if differing := parts.differing(signature):
        raise UserError(
            f"process {accelerator.process_index} found another {' and another '.join(differing)} than the first one"
        )
    missing = parts.missing()
    accelerator.wait_for_everyone()  # before a part is written that another process would not miss
    left = sum(map(len, missing))
    if left < parts.count:
        accelerator.print(f"{parts.count - left:,} of {parts.count:,} images are done already, {left:,} are left")
    own = missing[accelerator.process_index :: accelerator.num_processes]
    batches = (list(rows[start : start + batch_size]) for rows in own for start in range(0, len(rows), batch_size))
    threads = ThreadsOnDemand(accelerator.device)
    progress = tqdm(total=sum(map(len, own)), unit=" images", disable=not accelerator.is_main_process)
    try:
        with progress, ThreadPoolExecutor(1) as writer:  # the disk takes tens of milliseconds for a part
            loaded, written = iter(load(batches)), None
            for rows in own:
                part = _compute_part(len(rows), loaded, compute, progress.update, threads)
                if written is not None:
                    written.result()
                written = writer.submit(parts.write, rows, *part)
            if written is not None:
                written.result()
    except Exception:
        if accelerator.is_main_process and len(parts.missing()) == len(parts.rows()):
            parts.remove()  # nothing to go on with
        raise
    finally:
        threads.restore()
    accelerator.wait_for_everyone()


class ThreadsOnDemand:
    """One thread for a model on CPU, and all threads once it is found to keep one busy.

    Threads that wait for each other beside busy decoders take these the cores: on 2 cores with 4 decoders of 500 x 375 JPEG files,
    a small model and its images took 6.3 ms of CPU time an image with two threads, 3.3 ms with one.
    """

    BUSY = 0.7  # of the time, by the processor's clock: other processes may slow the model down without its being what takes time

    def __init__(self, device: torch.device):
        self.threads, self.seconds, self.busy_seconds = torch.get_num_threads(), 0.0, 0.0
        if device.type == "cpu":
            torch.set_num_threads(1)

    def record(self, seconds: float, busy_seconds: float):
        """How long the last batch took, and for how long of it this thread computed."""
        self.seconds, self.busy_seconds = self.seconds + seconds, self.busy_seconds + busy_seconds
        if self.busy_seconds > self.BUSY * self.seconds:
            self.restore()

    def restore(self):
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)


def _compute_part(
    count: int, loaded: Iterator[dict], compute, update, threads: ThreadsOnDemand
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The results of the next `count` rows, and the error messages of those that cannot be read.

    Args:
        update: called with the number of rows of each batch.
    """
    found, unreadable = [], []
    while count:
        started, started_busy = time.monotonic(), time.thread_time()
        batch = next(loaded)
        if batch["images"] is not None:
            found.append({"index": batch["index"], **compute(batch["images"])})
            threads.record(time.monotonic() - started, time.thread_time() - started_busy)
        unreadable += batch["errors"]
        done = len(batch["index"]) + len(batch["errors"])
        count -= done
        update(done)
    results = {name: torch.cat([each[name] for each in found]).cpu() for name in (found[0] if found else ())}
    for values in results.values():
        if values.is_floating_point():
            check_finite(values)
    return results, unreadable

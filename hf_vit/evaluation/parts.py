"""What is computed for the images of a data set, part by part beside the output file: a killed command goes on where it was."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from hf_vit.evaluation.prediction import check_finite
from hf_vit.system.errors import UserError
from hf_vit.system.files import sync, write_text


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
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT)  # held until the process ends
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:  # which of them depends on the system
            raise UserError(
                f"another command is at work in {self.folder}: wait for its end, or name another --output_file"
            ) from error
        file = self.folder / "signature.json"
        found = json.loads(file.read_text()) if file.is_file() else {}
        if differing := [key for key, value in json.loads(json.dumps(signature)).items() if found.get(key) != value]:
            parts = list(self.folder.glob("*.safetensors"))
            if parts and not overwrite:
                raise UserError(
                    f"{self.folder} holds results of another {' and another '.join(differing)}: name another --output_file, or "
                    "pass --overwrite true to begin anew"
                )
            for part in parts:
                part.unlink()
            write_text(file, json.dumps(signature, indent=2))

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

    def read(self) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors of each part in order; parts without a readable image are left out."""
        for rows in self.rows():
            if tensors := load_file(self._file(rows)):
                yield tensors

    def unreadable(self) -> list[str]:
        """The error messages of all parts in order."""
        messages = []
        for rows in self.rows():
            with safe_open(self._file(rows), "pt") as part:
                messages += json.loads(part.metadata()["unreadable"])
        return messages

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
    missing = parts.missing()
    accelerator.wait_for_everyone()  # before a part is written that another process would not miss
    left = sum(map(len, missing))
    if left < parts.count:
        accelerator.print(f"{parts.count - left:,} of {parts.count:,} images are done already, {left:,} are left")
    own = missing[accelerator.process_index :: accelerator.num_processes]
    batches = (list(rows[start : start + batch_size]) for rows in own for start in range(0, len(rows), batch_size))
    progress = tqdm(total=sum(map(len, own)), unit=" images", disable=not accelerator.is_main_process)
    with progress:
        loaded = iter(load(batches))
        for rows in own:
            parts.write(rows, *_compute_part(len(rows), loaded, compute, progress))
    accelerator.wait_for_everyone()


def _compute_part(count: int, loaded: Iterator[dict], compute, progress: tqdm) -> tuple[dict, list[str]]:
    """The results of the next `count` rows, and the error messages of those that cannot be read."""
    found, unreadable = [], []
    while count:
        batch = next(loaded)
        if batch["images"] is not None:
            found.append({"index": batch["index"], **compute(batch["images"])})
        unreadable += batch["errors"]
        done = len(batch["index"]) + len(batch["errors"])
        count -= done
        progress.update(done)
    results = {name: torch.cat([each[name] for each in found]).cpu() for name in (found[0] if found else ())}
    for values in results.values():
        if values.is_floating_point():
            check_finite(values)
    return results, unreadable

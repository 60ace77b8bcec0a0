"""Runs of the recipes on small made photos, in this process or in one of their own, and what their folders hold."""

import json
import os
import shutil
import sys
from pathlib import Path

import datasets
import forked
import numpy as np
from PIL import Image
from transformers import ViTImageProcessorPil

from hf_vit.data.sources import load_splits
from hf_vit.evaluation.results import Results
from hf_vit.training.arguments import TrainArguments
from hf_vit.training.classification import Classification
from hf_vit.training.train import train as train_in_this_process


HOUSE = Path(__file__).parents[1]
TRAIN = HOUSE / "recipes" / "train.py"
TINY = "image_size=16,patch_size=4,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"

UNDRAWN = ("-c", forked.THEN_THE_SCRIPT)  # a launcher of runs without pictures

# What recipes/accelerate/fsdp2.yaml says, for processes that no launcher starts.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "HFViTLayer", "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}  # fmt: skip


def write_photos(folder: Path, spread=60, **splits: int) -> Path:
    """Three classes of colour, as many noisy PNG files of 16 x 16 pixels of each in each split."""
    rng = np.random.default_rng(0)
    for split, count in splits.items():
        for name, color in {"red": (150, 90, 90), "green": (90, 150, 90), "blue": (90, 90, 150)}.items():
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = np.clip(np.array(color) + rng.normal(0, spread, (16, 16, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{index}.png")
    return folder


def start(*flags, before="", recipe=TRAIN, cwd=".", launcher=(), **environment) -> forked.Forked:
    """A process that runs some code and then a recipe; `launcher` are words that stand before these."""
    line = [sys.executable, "-W", "ignore", *launcher]
    line += [] if launcher else ["-c", before + forked.THEN_THE_SCRIPT]
    own = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **environment}
    return forked.Forked([*line, recipe, *flags], cwd, {**os.environ, **own}, together=True)


def words_of(*parts) -> list[str]:
    """The words of a command line, from parts of which a text may be several words, and a path is one."""
    return [word for part in parts for word in (part.split() if isinstance(part, str) else [str(part)])]


def recipe(*parts, cwd, fails=False, launcher=(), **environment) -> str:
    """Run a recipe as a user would, by the parts of its command line; what it printed."""
    script, *flags = words_of(*parts)
    line = [sys.executable, "-W", "ignore", *launcher, HOUSE / "recipes" / script, *flags]
    done = forked.run(line, cwd=cwd, env={**os.environ, **environment})
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def ended(*processes: forked.Forked, code=0, timeout=150) -> list[str]:
    """What each of them printed; all must leave with the exit code `code`."""
    try:
        printed = [process.communicate(timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [code] * len(processes), "\n----\n".join(printed)
    return printed


def write_shards(photos: Path, folder: Path) -> Path:
    """The same photos in four Parquet files a split."""
    folder.mkdir()
    for split, rows in load_splits(str(photos)).items():
        rows = rows.cast_column("image", datasets.Image(decode=False)).map(
            lambda row: {"image": {"path": None, "bytes": Path(row["image"]["path"]).read_bytes()}}
        )
        for number in range(4):
            rows.shard(4, number, contiguous=False).to_parquet(folder / f"{split}-{number}.parquet")
    return folder


def train(photos: Path, run: Path, task=Classification, kind=TrainArguments, draw=lambda *_: None, **flags) -> Results:
    """A run of a tiny model in this process, without pictures."""
    network = {} if "model_name_or_path" in flags else dict(preset="tiny-patch16-224", config_overrides=TINY)
    flags = network | dict(per_device_train_batch_size=4, num_workers=0, auto_find_batch_size=False) | flags
    task = type(task.__name__, (task,), {"draw": draw})
    return train_in_this_process(kind(dataset_name=str(photos), output_dir=str(run), **flags), task)


def save_with_processor(model, folder: Path) -> Path:
    """The folder of a model, with an image processor of its size."""
    model.save_pretrained(folder)
    size = model.config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    ViTImageProcessorPil(size={"height": height, "width": width}).save_pretrained(folder)
    return folder


def cut_back(run: Path, step: int) -> Path:
    """The folder of a finished run as a kill leaves it if its last checkpoint is that of `step`."""
    (run / "results.json").unlink()
    for place in [run / "model", run / "last", *run.glob("checkpoints/*-*")]:
        if "-" not in place.name or int(place.name.partition("-")[2]) > step:
            shutil.rmtree(place, ignore_errors=True)
    return run


def as_flags(values: dict) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def read_json(file: Path):
    return json.loads(file.read_text())


def results_of(run: Path) -> dict:
    return read_json(run / "results.json")


def log_of(run: Path) -> list[dict]:
    """The lines of metrics.jsonl, without what a clock says."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in line if key not in ("images_per_second", "seconds")} for line in lines]


def logged(run: Path, key: str) -> dict:
    """{step: value} of the lines of metrics.jsonl that have the key."""
    return {line["step"]: line[key] for line in log_of(run) if key in line}


def files_of(folder: Path) -> dict[Path, bytes]:
    """Every byte of a folder but its lock."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}

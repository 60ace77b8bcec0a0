"""What a user sees of the commands on a small made folder of images: tables, keys, names of files and exit codes."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import forked
import numpy as np
from loopback_hub import Hub
from PIL import Image
from publishing import at
from saved_models import COLORS, SAVED


HOUSE = Path(__file__).resolve().parents[2]
TINY = "image_size=16,patch_size=4,hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16,qk_norm=true"
RUN = (
    "train.py", "--dataset_name", "photos", "--on_bad_image", "skip", "--preset", "tiny-patch16-224", "--config_overrides", TINY,
    "--per_device_train_batch_size", "16", "--max_train_steps", "40", "--log_steps", "1", "--checkpointing_steps", "15",
)  # fmt: skip
WITH_MODEL = ("--model_name_or_path", "classifier", "--num_workers", "0")
SCRIPTS = ("train", "pretrain", "eval", "predict", "audit", "classify", "visualize", "app", "publish", "export")
WRONG_INPUT = (
    (
        "train.py",
        *["--dataset_name", "photos", "--preset", "tiny-patch16-224", "--output_dir", "broken"],
    ),  # a broken image
    ("eval.py", "--dataset_name", "photos", "--split", "nowhere", *WITH_MODEL),
    ("publish.py", "nowhere", "--repo", "alice/model"),
)
HUB_CODE = (
    "configuration_hf_vit.py",
    "modeling_hf_vit.py",
)  # config.json names them; the files they import are our own affair


def picture(seed: int, color=(128, 128, 128), size=(16, 16)) -> Image.Image:
    """Coarse blocks in shades of a color."""
    blocks = np.random.default_rng(seed).integers(-40, 40, (4, 4, 1)) + np.array(color)
    rows, columns = (np.arange(side) * 4 // side for side in size)
    return Image.fromarray(blocks[rows][:, columns].astype(np.uint8))


def write_photos(folder: Path):
    """Six classes: 8 images each to train on and 4 to test with, and planted faults."""
    for number, (name, color) in enumerate(COLORS.items()):
        for split, count in (("train", 8), ("test", 4)):
            (folder / split / name).mkdir(parents=True)
            for place in range(count):
                seed = 1000 * number + 100 * (split == "test") + place
                picture(seed, color).save(folder / split / name / f"{place}.png")
    shutil.copy(folder / "train" / "red" / "0.png", folder / "test" / "red" / "copy.png")
    picture(2000, COLORS["blue"], (48, 48)).save(folder / "train" / "cyan" / "larger.png")  # train/blue/0.png
    picture(7, COLORS["yellow"]).save(folder / "train" / "pink" / "wrong.png")
    (folder / "train" / "green" / "broken.png").write_bytes(b"no image")
    picture(8, COLORS["green"], (40, 24)).save(folder / "test" / "green" / "portrait.png")
    picture(9).convert("L").save(folder / "test" / "yellow" / "grey.png")
    picture(10, COLORS["pink"]).convert("RGBA").save(folder / "test" / "pink" / "alpha.png")


def command(script: str, *flags) -> list[str]:
    return [sys.executable, "-W", "ignore", str(HOUSE / "recipes" / script), *flags]


def start(home: Path, script: str, *flags) -> forked.Forked:
    return forked.Forked(command(script, *flags), cwd=home, together=True)


def finish(process: forked.Forked):
    code = process.wait()
    assert code == 0, process.printed()


def table(file: Path, leave_out=()) -> list[str]:
    """The lines of a CSV file, without the columns whose names are in `leave_out`."""
    with file.open(newline="") as opened:
        rows = list(csv.reader(opened))
    kept = [place for place, name in enumerate(rows[0]) if name not in leave_out]
    return [",".join(row[place] for place in kept) for row in rows]


def keys(value, name="") -> set[str]:
    """Names such as per_class[].recall of all that a JSON value holds."""
    if isinstance(value, dict):
        return set().union(*(keys(inner, f"{name}.{key}".lstrip(".")) for key, inner in value.items()), {name})
    if isinstance(value, list):
        return set().union(*(keys(inner, f"{name}[]") for inner in value), {name})
    return {name}


def files(names) -> list[str]:
    """Names of files, of our code only those that a config names."""
    return sorted(name for name in names if not name.endswith(".py") or name in HUB_CODE)


def pushed_files(home: Path) -> list[str]:
    """What `publish.py --push` leaves in a repository."""
    with Hub() as hub:
        environment = {**os.environ, **at(hub, home / "hub")}
        done = forked.run(command("publish.py", "run", "--repo", "alice/model", "--push"), cwd=home, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        (repository,) = hub.repos.values()
        return files(repository.trees[repository.head("main")])


def wrong_flag(script: str) -> int:
    return subprocess.run(command(f"{script}.py", "--no_such_flag", "1"), capture_output=True).returncode


def exit_codes(home: Path) -> dict[str, int]:
    codes = {f"{script}.py, a wrong flag": wrong_flag(script) for script in SCRIPTS}
    return codes | {f"{line[0]}, wrong input": start(home, *line).wait() for line in WRONG_INPUT}


def observe(home: Path) -> dict:
    """All goldens but the weights, by name."""
    write_photos(home / "photos")
    shutil.copytree(SAVED / "ba8e6ca" / "classifier", home / "classifier")
    data = ("--dataset_name", "photos")
    processes = [
        start(home, *RUN, "--output_dir", "run"),
        start(
            home,
            "eval.py",
            *WITH_MODEL,
            *data,
            *["--split", "train", "--on_bad_image", "skip", "--output_file", "eval.json"],
        ),
        start(home, "predict.py", *WITH_MODEL, *data, "--output_file", "predict.csv"),
        start(home, "audit.py", *WITH_MODEL, *data, "--output_file", "audit.html"),
    ]
    for process in processes:
        finish(process)
    run, page = home / "run", (home / "audit.html").read_text()
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = json.loads((home / "eval.json").read_text())
    return {
        "eval.json": evaluated,
        "eval.predictions.csv": table(home / "eval.predictions.csv"),
        "predict.csv": table(home / "predict.csv"),
        "predict.csv.unreadable.txt names": ["broken.png" in (home / "predict.csv.unreadable.txt").read_text()],
        "audit.duplicates.csv": table(home / "audit.duplicates.csv"),
        "audit.labels.csv": table(
            home / "audit.labels.csv", leave_out=("label_probability",)
        ),  # hangs on how folds are drawn
        "audit.html names": [name for name in ("broken.png", "copy.png", "larger.png", "wrong.png") if name in page],
        "files of a run": sorted(path.name for path in run.iterdir() if not path.name.startswith(".")),
        "files of its model": files(
            path.relative_to(run / "model").as_posix() for path in run.glob("model/**/*") if path.is_file()
        ),
        "keys of results.json": sorted(keys(json.loads((run / "results.json").read_text()))),
        "keys of metrics.jsonl": sorted({", ".join(sorted(line)) for line in logged}),
        "files of a pushed repository": pushed_files(home),
        "exit codes": exit_codes(home),
    }

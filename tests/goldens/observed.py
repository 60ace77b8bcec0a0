"""What a user sees of the commands on a small made folder of images: tables, keys and names of files."""

import json
import shutil
import sys
from pathlib import Path

import forked
import numpy as np
from PIL import Image
from saved_models import COLORS, SAVED

from hf_vit.hub.package import build_package


HOUSE = Path(__file__).resolve().parents[2]
TINY = "image_size=16,patch_size=4,hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16,qk_norm=true"
RUN = f"""train.py --dataset_name photos --on_bad_image skip --preset tiny-patch16-224 --config_overrides {TINY}
    --per_device_train_batch_size 16 --max_train_steps 40 --log_steps 1 --checkpointing_steps 15 --output_dir run"""
WITH_MODEL = "--model_name_or_path classifier --num_workers 0 --dataset_name photos"
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


def start(home: Path, line: str) -> forked.Forked:
    script, *flags = line.split()
    return forked.Forked([sys.executable, "-W", "ignore", HOUSE / "recipes" / script, *flags], cwd=home, together=True)


def keys(value, name="") -> set[str]:
    """Names such as per_class[].recall of all that a JSON value holds."""
    if isinstance(value, dict):
        return set().union(*(keys(inner, f"{name}.{key}".lstrip(".")) for key, inner in value.items()), {name})
    if isinstance(value, list):
        return set().union(*(keys(inner, f"{name}[]") for inner in value), {name})
    return {name}


def files(folder: Path) -> list[str]:
    """Names of the files below a folder, of our code only those that a config names."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return sorted(name for name in names if not name.endswith(".py") or name in HUB_CODE)


def observe(home: Path) -> dict:
    """All goldens but the weights, by name."""
    write_photos(home / "photos")
    shutil.copytree(SAVED / "ba8e6ca" / "classifier", home / "classifier")
    processes = [
        start(home, RUN),
        start(home, f"eval.py {WITH_MODEL} --split train --on_bad_image skip --output_file eval.json"),
        start(home, f"predict.py {WITH_MODEL} --output_file predict.csv"),
    ]
    for process in processes:
        assert process.wait() == 0, process.printed()
    run = home / "run"
    build_package(run, home / "package", HOUSE / "recipes", "alice/model")
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "eval.json": json.loads((home / "eval.json").read_text()),
        "eval.predictions.csv": (home / "eval.predictions.csv").read_text().splitlines(),
        "predict.csv": (home / "predict.csv").read_text().splitlines(),
        "predict.csv.unreadable.txt names": ["broken.png" in (home / "predict.csv.unreadable.txt").read_text()],
        "files of a run": sorted(path.name for path in run.iterdir() if not path.name.startswith(".")),
        "files of its model": files(run / "model"),
        "keys of results.json": sorted(keys(json.loads((run / "results.json").read_text()))),
        "keys of metrics.jsonl": sorted({", ".join(sorted(line)) for line in logged}),
        "files of a pushed repository": files(home / "package"),
    }

"""The demo beside the reference loop on a native ViT of the same sizes, which gets as many images, or as many seconds."""

import json
import statistics
import tempfile
from pathlib import Path

import torch
import yaml
from benchmarks.measuring import DEMO, run_training, square_spec, training_seconds
from benchmarks.model_speed import native_vit
from benchmarks.reference import reference_loop

from hf_vit import HFViTConfig
from hf_vit.data.sources import load_splits
from hf_vit.training.arguments import parse_overrides


RATES = (3e-4, 1e-3, 3e-3)  # of which the reference loop gets the best


def summarize(who: str, runs: list[dict], ours: list[dict]) -> dict:
    gains = [100 * (our["accuracy"] - run["accuracy"]) for our, run in zip(ours, runs, strict=True)]
    return {
        "who": who,
        "epochs": statistics.median(run["epochs"] for run in runs),
        "seconds": round(statistics.median(run["seconds"] for run in runs), 1),
        "accuracy": round(statistics.mean(run["accuracy"] for run in runs), 4),
        "accuracies": [round(run["accuracy"], 4) for run in runs],
        "gain": None if runs is ours else round(statistics.mean(gains), 2),
    }


def measure(repeats: int) -> dict:
    preset = yaml.safe_load(DEMO.read_text())
    config = HFViTConfig(**parse_overrides(preset["config_overrides"]), num_labels=10)
    spec, splits = square_spec(config.image_size), load_splits(preset["dataset_name"])
    demo_epochs, seeds = preset["num_train_epochs"], min(repeats, 3)

    def run_reference(rate: float, seed: int, epochs: int) -> dict:
        torch.manual_seed(seed)
        run = reference_loop(native_vit(config), splits["train"], splits["test"], spec, rate, seed, epochs)
        print(json.dumps({"learning_rate": rate, "seed": seed, **run}), flush=True)
        return run

    by_rate = {rate: run_reference(rate, 0, demo_epochs) for rate in RATES}
    best = max(RATES, key=lambda rate: by_rate[rate]["accuracy"])
    runs = {"hf_vit, demo.yaml": [], "reference, as many images": [], "reference, as many seconds": []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            run = run_training(Path(folder, str(seed)), config=DEMO, seed=seed)
            seconds = run["seconds"]["reading"] + training_seconds(run)
            ours = {"seconds": seconds, "accuracy": run["metrics"]["accuracy"], "epochs": demo_epochs}
            same_images = by_rate[best] if seed == 0 else run_reference(best, seed, demo_epochs)
            epochs = max(1, round(ours["seconds"] * demo_epochs / same_images["seconds"]))
            same_seconds = run_reference(best, seed, epochs)
            for each, run in zip(runs.values(), (ours, same_images, same_seconds), strict=True):
                each.append(run)
    ours = runs["hf_vit, demo.yaml"]
    return {
        "rows": [summarize(who, each, ours) for who, each in runs.items()],
        "reference_learning_rate": best,
        "seeds": seeds,
        "train_images": len(splits["train"]),
        "test_images": len(splits["test"]),
    }

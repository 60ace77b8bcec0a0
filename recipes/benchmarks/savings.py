"""What saves work, and what it costs in accuracy: in training (`measure`), and in evaluation by token merging."""

import functools
import json
import statistics
import tempfile
from pathlib import Path

import torch
import yaml
from benchmarks.measuring import (
    DEMO,
    DEVICE,
    median_ratio,
    run_training,
    time_in_turns,
    to_overrides,
    training_seconds,
)

from hf_vit import HFViTForImageClassification
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_spec import image_spec_of
from hf_vit.data.normalization import normalize
from hf_vit.data.sources import load_splits
from hf_vit.data.splits import prepare_splits
from hf_vit.evaluation.classifiers import load_processor


# The demo without mixtures and shifts, at twice its rate: for a few epochs.
QUICK = dict(config=DEMO, num_train_epochs=7, learning_rate=8e-3, mixup=0, shift=0, ema_decay=0.98)
# A model to fine-tune, and one of 49 patches to merge tokens in.
SMALL = dict(
    image_size=28, patch_size=7, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256
)
MERGED = dict(
    image_size=28, patch_size=4, hidden_size=96, num_hidden_layers=6, num_attention_heads=4, intermediate_size=384,
    position_embedding="sincos2d", pooling="mean", use_class_token=False,
)  # fmt: skip


def save_half(folder: Path, part: int) -> Path:
    """Half of the embedded training images, and the test images, as a saved data set."""
    splits = load_splits("fashion-mnist-mini")
    splits["train"] = splits["train"].select(range(part, len(splits["train"]), 2))
    splits.save_to_disk(str(folder / f"half-{part}"))
    return folder / f"half-{part}"


def measure(repeats: int) -> dict:
    """Seconds of training and test accuracy of each way to save work, over up to 3 seeds."""
    demo = yaml.safe_load(DEMO.read_text())["config_overrides"]
    scratch = {**QUICK, "eval_epochs": 7}
    tuned = {**QUICK, "learning_rate": 2e-3, "num_train_epochs": 5, "eval_epochs": 5, "flip": "false"}
    head = {"freeze_backbone": "true"}
    patch_dropout = "patch dropout, `patch_dropout_rate=0.25` among --config_overrides"
    kinds = [  # what, beside which other, flags they share, flags of its own
        ("from scratch", None, scratch, {}),
        (patch_dropout, "from scratch", scratch, {"config_overrides": f"{demo},patch_dropout_rate=0.25"}),
        ("a smaller first stage", "from scratch", scratch, {"first_image_size": 14, "first_stage": 0.5}),
        ("fine-tuning", None, tuned, {}),
        ("frozen layers", "fine-tuning", tuned, {"freeze_layers": 2}),
        ("a head alone", "fine-tuning", tuned, head),
        ("a head alone, cached features", "a head alone", tuned, {**head, "cache_features": "true"}),
    ]
    found = {name: [] for name, *_ in kinds}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        fields = to_overrides({**SMALL, "pooling": "cls", "position_embedding": "learned"})
        first = {**QUICK, "num_train_epochs": 12, "dataset_name": save_half(folder, 0), "config_overrides": fields}
        run_training(folder / "pretrained", **first)
        tuned |= {"dataset_name": save_half(folder, 1), "model_name_or_path": folder / "pretrained" / "model"}
        for seed in range(min(repeats, 3)):
            for name, _, shared, flags in kinds:
                run = run_training(folder / f"{name}-{seed}".replace(" ", "-"), **{**shared, **flags}, seed=seed)
                found[name].append((training_seconds(run), run["metrics"]["accuracy"]))
    rows = []
    for name, beside, _, flags in kinds:
        seconds, accuracies = zip(*found[name], strict=True)
        row = {"what": name, "flags": {key: str(value) for key, value in flags.items()}, "beside": beside}
        row |= {"seconds": round(statistics.median(seconds), 1), "accuracy": round(statistics.mean(accuracies), 4)}
        if beside is not None:
            base_seconds, base_accuracies = zip(*found[beside], strict=True)
            row["times_faster"] = median_ratio(base_seconds, seconds)
            row["points"] = round(100 * (statistics.mean(accuracies) - statistics.mean(base_accuracies)), 2)
        print(json.dumps(row), flush=True)
        rows.append(row)
    return {"rows": rows, "seeds": min(repeats, 3), "hidden_size": SMALL["hidden_size"]}


def measure_merging(repeats: int) -> dict:
    """Speed and accuracy on the embedded test images, by the number of patches merged in each layer."""
    with tempfile.TemporaryDirectory() as folder:
        run_training(Path(folder, "run"), **QUICK, config_overrides=to_overrides(MERGED), eval_epochs=7)
        model = HFViTForImageClassification.from_pretrained(Path(folder, "run", "model")).to(DEVICE).eval()
        processor = load_processor(str(Path(folder, "run", "model")))
    spec = image_spec_of(processor, model.config)
    images = ImageDataset(prepare_splits(load_splits("fashion-mnist-mini"), train_split=None)[0]["eval"], spec)
    pixel_values, accuracy = normalize(images.cache, spec).to(DEVICE), {}

    @torch.no_grad()
    def classify(r):
        model.set_token_merging(r)
        logits = torch.cat([model(some).logits for some in pixel_values.split(250)])
        accuracy[str(r)] = (logits.argmax(1).cpu() == images.labels).float().mean().item()

    counts = (0, 3, 6, 9, [4, 10, 12, 10, 6, 0])
    seconds = time_in_turns({str(r): functools.partial(classify, r) for r in counts}, repeats)
    rows = [
        {
            "r": r,
            "images_per_second": round(len(images) / statistics.median(each)),
            "times_faster": median_ratio(seconds["0"], each),
            "accuracy": round(accuracy[r], 4),
            "points": round(100 * (accuracy[r] - accuracy["0"]), 2),
        }
        for r, each in seconds.items()
    ]
    return {"rows": rows, "patches": 49}

"""How fast this machine trains, reads and loads with hf_vit, beside native transformers, timm and the usual training loop.

    python recipes/benchmark.py [--parts model loader ...] [--output_file model_cards/benchmark.json]

What is compared runs in turns (A B A B ...) in one process where it can; the first round does not count, figures are medians
of the others, and a ratio is the median of the ratios of each round. timm takes part where it is installed. The parts:

    model       forward pass and training step at four sizes, and their share of what bare matrix products of the same shapes
                reach; cost by batch and by number of tokens
    loading     from_pretrained of ViT-B and its peak memory, and the import
    loader      images a second to batches of tensors
    demo        what part of the demo's training is spent in the model
    accuracy    seconds to an accuracy, from scratch and fine-tuned, beside the reference loop
    budget      the demo beside the reference loop with as many images, or as many seconds: the accuracy of each
    savings     what saves work (patch dropout, a smaller first stage, frozen layers, cached features), and its accuracy
    merging     images a second and accuracy of a trained model whose tokens are merged
    checkpoint  one checkpoint beside a training step
    stream      peak memory of a run over a stream, and over ten times as many images

The reference loop is what people copy from the examples of transformers: a native ViT with its default initial weights, PIL
transforms of each sample through `with_transform`, AdamW, a linear schedule, batches of 64; its learning rate is the best of
three.
"""

import argparse
import contextlib
import copy
import datetime
import functools
import importlib
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import datasets
import numpy as np
import psutil
import torch
import transformers
import yaml
from accelerate import Accelerator
from datasets import ClassLabel, Dataset, Features
from PIL import Image
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification, get_scheduler

from hf_vit import HFViTConfig, HFViTForImageClassification
from hf_vit.data import crops
from hf_vit.data import datasets as data
from hf_vit.data.augment import normalize
from hf_vit.system import environment, hardware
from hf_vit.system.errors import run_script
from hf_vit.training import arguments as presets
from hf_vit.training import parts as training
from hf_vit.training import resume


RECIPES = Path(__file__).resolve().parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH, WORKERS = 64, 2
RATES = (3e-4, 1e-3, 3e-3)  # of which the reference loop gets the best
REFERENCE_EPOCHS = 20
# The demo without mixtures and shifts, at twice its rate: for a few epochs.
QUICK = dict(
    config=RECIPES / "configs" / "demo.yaml", num_train_epochs=7, learning_rate=8e-3, mixup=0, shift=0, ema_decay=0.98
)
SMALL = dict(
    image_size=28, patch_size=7, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256
)


# ----------------------------------------------------------------------------------------------------------------------
# Measuring


def seconds_of(what, times: int = 1) -> float:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        what()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def in_turns(contenders: dict, repeats: int, times: int = 1) -> dict[str, list[float]]:
    """Seconds of each contender in each round, every other one in reverse; the first round does not count."""
    rounds = []
    for turn in range(repeats + 1):
        order = list(contenders)[:: 1 if turn % 2 else -1]
        rounds.append({name: seconds_of(contenders[name], times) for name in order})
    return {name: [each[name] for each in rounds[1:]] for name in contenders}


def ratio(one: list[float], other: list[float]) -> float:
    """How many times longer `one` took than `other`, round by round."""
    return round(statistics.median(a / b for a, b in zip(one, other, strict=True)), 3)


def milliseconds(seconds: list[float]) -> float:
    return round(1e3 * statistics.median(seconds), 2)


def train_command(**flags) -> list[str]:
    return [sys.executable, str(RECIPES / "train.py"), *(f"--{name}={value}" for name, value in flags.items())]


def train(folder: Path, **flags) -> dict:
    """The results.json of a run of train.py, in a process of its own, with the lines it logged."""
    command = train_command(output_dir=folder, **flags)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {**json.loads((folder / "results.json").read_text()), "lines": lines}


def trained_for(run: dict) -> float:
    """Seconds of a whole run of train.py, without its scorings."""
    return [line["seconds"] for line in run["lines"] if "loss" in line][-1]


def square_form(side: int) -> data.ImageForm:
    """Square RGB images of `side` pixels, as the usual examples normalise them."""
    return data.ImageForm(side, side, 3, int(Image.Resampling.BILINEAR), (0.5,) * 3, (0.5,) * 3)


def as_overrides(fields: dict) -> str:
    return ",".join(f"{name}={value}".lower() for name, value in fields.items())


# ----------------------------------------------------------------------------------------------------------------------
# The model


def products(config: HFViTConfig, batch: int) -> list[tuple[int, int, int, int]]:
    """The products of dense layers in one forward pass of a classifier, as (count, rows, inner, columns).

    With a pooled class token the last layer computes queries, outputs and MLP for that token alone.
    """
    D, F, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    patches = config.grid_size[0] * config.grid_size[1]
    T = config.num_prefix_tokens + patches
    flat = config.num_channels * config.patch_size**2
    short = config.pooling == "cls"
    whole = [(1, batch * T, D, 3 * D), (1, batch * T, D, D), (1, batch * T, D, F), (1, batch * T, F, D)]
    last = [(1, batch * T, D, 2 * D), (2, batch, D, D), (1, batch, D, F), (1, batch, F, D)] if short else whole
    found = [(1, batch * patches, flat, D), *last, (1, batch, D, config.num_labels)]
    return found + [(layers - 1, *shape) for _, *shape in whole]


def flops(config: HFViTConfig, batch: int) -> float:
    """Multiplications and additions of one forward pass: dense layers and attention."""
    dense = sum(2 * count * rows * inner * columns for count, rows, inner, columns in products(config, batch))
    T = config.num_prefix_tokens + config.grid_size[0] * config.grid_size[1]
    queries = (config.num_hidden_layers - 1) * T + (1 if config.pooling == "cls" else T)
    return dense + 4 * batch * queries * T * config.hidden_size


def bare_products(config: HFViTConfig, batch: int, backward: bool):
    """A function that computes these products and nothing else, the two of the backward pass too if asked; and their FLOPs."""
    calls, total = [], 0
    for count, rows, inner, columns in products(config, batch):
        x, weight, grad = (torch.randn(*s, device=DEVICE) for s in ((rows, inner), (columns, inner), (rows, columns)))
        forward, of_x, of_weight = torch.empty_like(grad), torch.empty_like(x), torch.empty_like(weight)
        for _ in range(count):
            calls.append((x, weight.T, forward))
            if backward:
                calls += [(grad, weight, of_x), (grad.T, x, of_weight)]
        total += 2 * count * rows * inner * columns * (3 if backward else 1)

    def compute():
        for left, right, out in calls:
            torch.mm(left, right, out=out)

    return compute, total


def peers(config: HFViTConfig) -> dict:
    """The same network as native transformers and, where it is installed, timm build it: with a class token."""
    names = (
        "image_size", "patch_size", "num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    )  # fmt: skip
    fields = {name: getattr(config, name) for name in names}
    found = {"transformers": ViTForImageClassification(ViTConfig(**fields, num_labels=config.num_labels))}
    if importlib.util.find_spec("timm") is not None:
        timm = importlib.import_module("timm.models.vision_transformer")
        found["timm"] = timm.VisionTransformer(
            img_size=config.image_size, patch_size=config.patch_size, in_chans=config.num_channels,
            embed_dim=config.hidden_size, depth=config.num_hidden_layers, num_heads=config.num_attention_heads,
            mlp_ratio=config.intermediate_size / config.hidden_size, num_classes=config.num_labels,
        )  # fmt: skip
    return found


def forward_of(model, pixel_values):
    def forward():
        model.eval()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=DEVICE.type == "cuda"):
            model(pixel_values)

    return forward


def step_of(model, pixel_values, labels):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        model.train()
        with torch.autocast("cuda", torch.bfloat16, enabled=DEVICE.type == "cuda"):
            answer = model(pixel_values)
        logits = answer if isinstance(answer, torch.Tensor) else answer.logits
        torch.nn.functional.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def model_part(repeats: int) -> dict:
    demo = presets.overrides(yaml.safe_load((RECIPES / "configs" / "demo.yaml").read_text())["config_overrides"])
    with_class_token = {**demo, "position_embedding": "learned", "pooling": "cls", "use_class_token": True}
    factor = 16 if DEVICE.type == "cuda" else 1
    sizes = [
        ("the demo's", HFViTConfig(**demo, num_labels=10), 128, 10),
        ("the demo's, with a class token", HFViTConfig(**with_class_token, num_labels=10), 128, 10),
        ("ViT-Ti/16, 224", HFViTConfig.from_preset("tiny-patch16-224", num_labels=1000), 32, 1),
        ("ViT-S/16, 224", HFViTConfig.from_preset("small-patch16-224", num_labels=1000), 16, 1),
        ("ViT-B/16, 224", HFViTConfig.from_preset("base-patch16-224", num_labels=1000), 8, 1),
    ]
    rows = []
    for name, config, batch, times in sizes:
        batch *= factor
        models = {"hf_vit": HFViTForImageClassification(config), **peers(config)}
        pixel_values = torch.randn(batch, config.num_channels, config.image_size, config.image_size, device=DEVICE)
        labels = torch.randint(0, config.num_labels, (batch,), device=DEVICE)
        for model in models.values():
            model.to(DEVICE)
            if DEVICE.type == "cuda":
                model.compile()
        row = {"model": name, "batch": batch}
        for what in ("forward", "step"):
            bare, bare_flops = bare_products(config, batch, what == "step")
            runs = {
                name: forward_of(model, pixel_values) if what == "forward" else step_of(model, pixel_values, labels)
                for name, model in models.items()
            }
            seconds = in_turns({**runs, "products": bare}, repeats, times)
            performed = flops(config, batch) * (3 if what == "step" else 1)
            ratios = {peer: ratio(seconds[peer], seconds["hf_vit"]) for peer in models if peer != "hf_vit"}
            row[what] = {
                **{f"{name}_ms": milliseconds(seconds[name]) for name in models},
                "ratios": ratios,
                "against_best_peer": min(ratios.values()),
                "gflops_a_second": round(performed / statistics.median(seconds["hf_vit"]) / 1e9, 1),
                "ceiling_gflops_a_second": round(bare_flops / statistics.median(seconds["products"]) / 1e9, 1),
                "share_of_ceiling": round(ratio(seconds["products"], seconds["hf_vit"]) * performed / bare_flops, 3),
            }
        print(json.dumps(row))
        rows.append(row)
        del models, runs, bare
    versions = {"transformers": transformers.__version__}
    if "timm" in ratios:
        versions["timm"] = importlib.import_module("timm").__version__
    held = torch.empty(2**26, device=DEVICE)
    target = torch.empty_like(held)
    copy_seconds = statistics.median(in_turns({"copy": lambda: target.copy_(held)}, repeats)["copy"])
    return {
        "sizes": rows,
        "peers": versions,
        "copy_gigabytes_a_second": round(2 * held.nbytes / copy_seconds / 1e9, 1),
        "growth": growth(repeats),
    }


def growth(repeats: int) -> dict:
    """Milliseconds of a training step of ViT-Ti by batch, and of its forward pass by number of patches, of 8 images."""
    steps = {}
    for batch in (8, 16, 32, 64):
        config = HFViTConfig.from_preset("tiny-patch16-224", num_labels=1000)
        model = HFViTForImageClassification(config).to(DEVICE)
        pixel_values = torch.randn(batch, 3, 224, 224, device=DEVICE)
        steps[str(batch)] = step_of(model, pixel_values, torch.zeros(batch, dtype=torch.long, device=DEVICE))
    by_batch = {name: milliseconds(seconds) for name, seconds in in_turns(steps, repeats).items()}
    forwards = {}
    for side in (128, 192, 256, 384, 512):
        config = HFViTConfig.from_preset("tiny-patch16-224", image_size=side, num_labels=1000)
        model = HFViTForImageClassification(config).to(DEVICE)
        forwards[str((side // 16) ** 2)] = forward_of(model, torch.randn(8, 3, side, side, device=DEVICE))
    by_tokens = {name: milliseconds(seconds) for name, seconds in in_turns(forwards, repeats).items()}
    return {"step_ms_by_batch": by_batch, "forward_ms_by_patches": by_tokens}


# ----------------------------------------------------------------------------------------------------------------------
# Loading and importing, each in a process of its own

LOAD = """
import json, sys, threading, time
began = time.perf_counter()
import torch, transformers
from transformers import ViTForImageClassification
if sys.argv[1] == "hf_vit":
    from hf_vit import HFViTForImageClassification as Model
else:
    Model = ViTForImageClassification
imported = time.perf_counter() - began
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
import psutil
torch.ones(8) @ torch.ones(8)
process, peak, over = psutil.Process(), 0, threading.Event()
def watch():
    global peak
    while not over.is_set():
        peak = max(peak, process.memory_full_info().uss)
        time.sleep(0.002)
before = process.memory_full_info().uss
watcher = threading.Thread(target=watch)
if sys.argv[3] == "memory":
    watcher.start()
began = time.perf_counter()
model = Model.from_pretrained(sys.argv[2])
loaded = time.perf_counter() - began
over.set()
size = sum(parameter.nbytes for parameter in model.parameters())
print(json.dumps({"imported": imported, "loaded": loaded, "memory": max(0, peak - before) / size}))
"""


def loading_part(repeats: int) -> dict:
    """Seconds to import and to load ViT-B, ours and native, from one folder; the peak of memory in sizes of the weights."""
    turns = {"hf_vit": [], "transformers": []}
    with tempfile.TemporaryDirectory() as folder:
        ViTForImageClassification(ViTConfig(num_labels=1000)).save_pretrained(folder)
        for _ in range(repeats + 1):
            for name, seen in turns.items():
                both = {}
                for wanted in ("memory", "seconds"):
                    done = subprocess.run(
                        [sys.executable, "-c", LOAD, name, folder, wanted], capture_output=True, text=True, check=True
                    )
                    found = json.loads(done.stdout.splitlines()[-1])
                    both |= {"memory": found["memory"]} if wanted == "memory" else {**found, "memory": both["memory"]}
                seen.append(both)
    turns = {name: seen[1:] for name, seen in turns.items()}
    of = lambda name, key: [turn[key] for turn in turns[name]]
    return {
        name: {key: round(statistics.median(of(name, key)), 3) for key in ("imported", "loaded", "memory")}
        for name in turns
    } | {"loading_ratio": ratio(of("transformers", "loaded"), of("hf_vit", "loaded"))}


# ----------------------------------------------------------------------------------------------------------------------
# The input


def photos(folder: Path, width: int, height: int, count: int) -> Dataset:
    """`count` rows of JPEG files: smooth noise with grain, two classes."""
    rng = np.random.default_rng(0)
    files = []
    for index in range(min(count, 64)):  # more would not be read otherwise than these again
        coarse = Image.fromarray(rng.integers(0, 256, (height // 25, width // 25, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
        grain = rng.normal(0, 6, (height, width, 1)).astype(np.float32)
        files.append(str(folder / f"{width}-{index}.jpg"))
        Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(files[-1], quality=90)
    rows = {"image": [files[index % len(files)] for index in range(count)], "label": [0, 1] * (count // 2)}
    return Dataset.from_dict(rows, Features(image=datasets.Image(), label=ClassLabel(names=["a", "b"])))


def reference_rows(rows: Dataset, form: data.ImageForm) -> Dataset:
    """Rows whose images are decoded, converted, cut where the form says so, resized and normalised one by one, as they are asked
    for."""
    mean, std = (np.array(values, dtype=np.float32) for values in (form.mean, form.std))

    def transform(batch):
        images = [image.convert("RGB") for image in batch["image"]]
        if form.crop_scale is not None:
            numbers = torch.rand(len(images), len(crops.STREAMS)).tolist()
            boxes = [
                crops.crop_box(*image.size, some, form.crop_scale) for image, some in zip(images, numbers, strict=True)
            ]
            images = [image.crop(box) for image, box in zip(images, boxes, strict=True)]
        images = [image.resize((form.width, form.height), form.resample) for image in images]
        arrays = [(np.asarray(image, dtype=np.float32) / 255 - mean) / std for image in images]
        batch["pixel_values"] = [torch.from_numpy(array).permute(2, 0, 1) for array in arrays]
        return batch

    return rows.with_transform(transform)


def collate(rows):
    labels = torch.tensor([row["label"] for row in rows])
    return {"pixel_values": torch.stack([row["pixel_values"] for row in rows]), "labels": labels}


def reference_loader(rows: Dataset, workers: int, shuffle: bool = True) -> DataLoader:
    return DataLoader(rows, batch_size=BATCH, shuffle=shuffle, num_workers=workers, collate_fn=collate)


def loader_part(repeats: int) -> dict:
    form, small = square_form(224), square_form(28)
    measured, kept = [], data.CACHE_BYTES
    with tempfile.TemporaryDirectory() as folder:
        embedded = data.load("fashion-mnist-mini")["train"]
        kinds = [
            ("photos of 4000x3000, JPEG", photos(Path(folder), 4000, 3000, 2 * BATCH), form, False),
            ("photos of 500x375, JPEG", photos(Path(folder), 500, 375, 1024), form, False),
            ("the embedded 10,000 of 28x28, kept in memory", embedded, small, True),
        ]
        for name, rows, wanted, cached in kinds:
            data.CACHE_BYTES = 2**40 if cached else 0  # photos as if they were too many to keep
            numbered = data.rename(rows, ("image", "label")).add_column("row", np.arange(len(rows)))
            filling = time.perf_counter()
            train_form = data.training_form(wanted, numbered, "resized")
            images = data.Images(numbered, train_form)
            filled = time.perf_counter() - filling
            theirs = reference_rows(rows, train_form)
            epochs = itertools.count()

            def as_bytes(images=images, epochs=epochs):
                epoch = next(epochs)
                batches = data.epoch_batches(len(images), BATCH, 0, epoch)
                ids = ([epoch * data.PASS + number for number in batch] for batch in batches)
                for batch in data.loader(images, ids, WORKERS):
                    yield batch["images"]

            def through_bytes(batches=as_bytes):
                for _ in batches():
                    pass

            def through_ours(batches=as_bytes, wanted=wanted):
                for batch in batches():
                    normalize(batch, wanted)  # as the reference gives them

            def through_reference(theirs=theirs):
                for _ in reference_loader(theirs, WORKERS):
                    pass

            seconds = in_turns(
                {"reference": through_reference, "hf_vit": through_ours, "hf_vit_bytes": through_bytes}, repeats
            )
            speed = {key: round(len(rows) / statistics.median(values), 1) for key, values in seconds.items()}
            measured.append(
                {
                    "data": name,
                    **speed,
                    "ratio": ratio(seconds["reference"], seconds["hf_vit"]),
                    "ratio_of_bytes": ratio(seconds["reference"], seconds["hf_vit_bytes"]),
                    "seconds_to_fill_memory": round(filled, 1) if cached else None,
                }
            )
            print(json.dumps(measured[-1]))
    data.CACHE_BYTES = kept
    return {"kinds": measured, "workers": WORKERS}


def demo_part(repeats: int) -> dict:
    """Which part of the time after the first batch the demo spends in its model and optimizers; scoring apart."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            train(Path(folder, str(turn)), config=RECIPES / "configs" / "demo.yaml", num_train_epochs=2)
            for turn in range(min(repeats, 3))
        ]
    share = statistics.median(run["seconds"]["model"] / trained_for(run) for run in runs)
    return {"model_share": round(share, 3), "images_per_second": runs[-1]["images_per_second"]}


# ----------------------------------------------------------------------------------------------------------------------
# Time to accuracy


def reference_loop(
    model,
    train_rows,
    test_rows,
    form,
    learning_rate: float,
    target: float | None,
    seed: int,
    epochs: int = REFERENCE_EPOCHS,
) -> dict:
    """Train as the examples do. Seconds until a scoring, one an epoch, reaches `target`, without the scorings; None if none does.

    Without a target: the seconds of all epochs, and the accuracy of the last weights.
    """
    torch.manual_seed(seed)
    model.to(DEVICE)
    loader = reference_loader(reference_rows(train_rows, form), workers=0)
    test = reference_loader(reference_rows(test_rows, form), workers=0, shuffle=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = get_scheduler("linear", optimizer, 0, epochs * len(loader))
    seconds, scores = 0.0, []
    for epoch in range(1, epochs + 1):
        began = time.perf_counter()
        model.train()
        for batch in loader:
            batch = {key: value.to(DEVICE) for key, value in batch.items()}
            model(**batch).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        seconds += time.perf_counter() - began
        if target is None and epoch < epochs:
            continue
        model.eval()
        with torch.no_grad():
            right = sum(
                (model(batch["pixel_values"].to(DEVICE)).logits.argmax(1).cpu() == batch["labels"]).sum().item()
                for batch in test
            )
        scores.append(right / len(test_rows))
        if target is None or scores[-1] >= target:
            return {"seconds": seconds, "accuracy": scores[-1]}
    return {"seconds": None, "accuracy": max(scores)}


def our_loop(folder: Path, target: float, **flags) -> dict:
    """The same of train.py, with the time it takes to read the images."""
    run = train(folder, **flags)
    for line in run["lines"]:
        if line.get("eval_accuracy", 0) >= target:
            return {"seconds": run["seconds"]["reading"] + line["seconds"], "accuracy": line["eval_accuracy"]}
    return {"seconds": None, "accuracy": run["metrics"]["accuracy"]}


def race(reference, ours, repeats: int, target: float) -> dict:
    """Seconds to `target` of both, in turns; the reference loop with the best of its learning rates."""
    tried = {rate: reference(rate, 0) for rate in RATES}
    best = min(RATES, key=lambda rate: (tried[rate]["seconds"] or float("inf"), -tried[rate]["accuracy"]))
    turns = [(tried[best], ours(0)), *((reference(best, seed), ours(seed)) for seed in range(1, repeats))]
    result = {
        "target": target,
        "reference_learning_rate": best,
        "reference_epochs": REFERENCE_EPOCHS,
        "repeats": repeats,
    }
    for name, each in zip(("reference", "hf_vit"), zip(*turns, strict=True), strict=True):
        reached = [turn["seconds"] for turn in each if turn["seconds"] is not None]
        result[name] = {
            "seconds": round(statistics.median(reached), 1) if len(reached) == repeats else None,
            "reached": len(reached),
            "accuracy": round(statistics.median(turn["accuracy"] for turn in each), 4),
        }
    pairs = [(one["seconds"], other["seconds"]) for one, other in turns if one["seconds"] and other["seconds"]]
    result["ratio"] = ratio(*zip(*pairs, strict=True)) if len(pairs) == repeats else None
    print(json.dumps(result))
    return result


def half(folder: Path, part: int) -> Path:
    """Half of the embedded training images, and its test images, as a saved data set."""
    place = folder / f"half-{part}"
    splits = data.load("fashion-mnist-mini")
    splits["train"] = splits["train"].select(range(part, len(splits["train"]), 2))
    splits.save_to_disk(str(place))
    return place


def pretrained(folder: Path, images: Path) -> Path:
    """A small ViT that native transformers can load too, trained on `images`."""
    run = folder / "pretrained"
    if not run.exists():
        fields = as_overrides({**SMALL, "pooling": "cls", "position_embedding": "learned"})
        train(run, **{**QUICK, "num_train_epochs": 12}, dataset_name=images, config_overrides=fields)
    return run / "model"


def accuracy_part(repeats: int) -> dict:
    form = square_form(28)
    splits, target = data.load("fashion-mnist-mini"), 0.85
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        labels = splits["train"].features["label"].names

        def native(learning_rate, seed):
            torch.manual_seed(seed)
            model = ViTForImageClassification(ViTConfig(**SMALL, num_labels=len(labels)))
            return reference_loop(model, splits["train"], splits["test"], form, learning_rate, target, seed)

        def from_scratch(seed):
            fields = as_overrides(
                {**SMALL, "position_embedding": "sincos2d", "pooling": "mean", "use_class_token": False}
            )
            return our_loop(
                folder / f"scratch-{seed}", target, **QUICK, seed=seed, config_overrides=fields, eval_epochs=1
            )

        scratch = race(native, from_scratch, repeats, target)
        first, second = half(folder, 0), half(folder, 1)
        start = pretrained(folder, first)
        rest = data.load(str(second))
        whole = HFViTForImageClassification.from_pretrained(start).to_transformers()

        def native_tuned(learning_rate, seed):
            model = copy.deepcopy(whole)
            return reference_loop(model, rest["train"], rest["test"], form, learning_rate, target, seed)

        def tuned(seed):
            return our_loop(
                folder / f"tuned-{seed}", target, **{**QUICK, "learning_rate": 2e-3, "num_train_epochs": 5}, seed=seed, dataset_name=second,
                model_name_or_path=start, eval_epochs=1,
            )  # fmt: skip

        return {"scratch": scratch, "tuned": race(native_tuned, tuned, repeats, target)}


def budget_part(repeats: int) -> dict:
    """The demo, and the reference loop on a native ViT of the same sizes, which gets as many images, or as many seconds of training."""
    demo = RECIPES / "configs" / "demo.yaml"
    preset = yaml.safe_load(demo.read_text())
    config = HFViTConfig(**presets.overrides(preset["config_overrides"]), num_labels=10)
    form, splits = square_form(config.image_size), data.load(preset["dataset_name"])

    def reference(learning_rate, seed, epochs):
        torch.manual_seed(seed)
        model = peers(config)["transformers"]
        done = reference_loop(model, splits["train"], splits["test"], form, learning_rate, None, seed, epochs)
        print(json.dumps({"learning_rate": learning_rate, "seed": seed, "epochs": epochs, **done}), flush=True)
        return {**done, "epochs": epochs}

    def ours(folder, seed):
        run = train(Path(folder, str(seed)), config=demo, seed=seed)
        done = {"seconds": run["seconds"]["reading"] + trained_for(run), "accuracy": run["metrics"]["accuracy"]}
        print(json.dumps({"seed": seed, **done}), flush=True)
        return {**done, "epochs": preset["num_train_epochs"]}

    with tempfile.TemporaryDirectory() as folder:
        tried = {rate: reference(rate, 0, preset["num_train_epochs"]) for rate in RATES}
        best = max(RATES, key=lambda rate: tried[rate]["accuracy"])
        turns = {"hf_vit, demo.yaml": [], "reference, as many images": [], "reference, as many seconds": []}
        for seed in range(min(repeats, 3)):
            run = ours(folder, seed)
            images = tried[best] if seed == 0 else reference(best, seed, preset["num_train_epochs"])
            epochs = max(1, round(run["seconds"] * images["epochs"] / images["seconds"]))
            for each, done in zip(turns.values(), (run, images, reference(best, seed, epochs)), strict=True):
                each.append(done)
    rows, first = [], turns["hf_vit, demo.yaml"]
    for who, each in turns.items():
        ahead = [100 * (one["accuracy"] - other["accuracy"]) for one, other in zip(first, each, strict=True)]
        row = {
            "who": who,
            "epochs": statistics.median(done["epochs"] for done in each),
            "seconds": round(statistics.median(done["seconds"] for done in each), 1),
            "accuracy": round(statistics.mean(done["accuracy"] for done in each), 4),
            "accuracies": [round(done["accuracy"], 4) for done in each],
            "gain": None if each is first else round(statistics.mean(ahead), 2),
        }
        rows.append(row)
    return {
        "rows": rows,
        "reference_learning_rate": best,
        "seeds": min(repeats, 3),
        "train_images": len(splits["train"]),
        "test_images": len(splits["test"]),
    }


# ----------------------------------------------------------------------------------------------------------------------
# Less work


def savings_part(repeats: int) -> dict:
    """What each way to save work gives and costs: seconds of training, and accuracy on the test images, of `repeats` seeds."""
    demo = yaml.safe_load((RECIPES / "configs" / "demo.yaml").read_text())["config_overrides"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        start = pretrained(folder, half(folder, 0))
        scratch = {**QUICK, "eval_epochs": 7}
        head = {**QUICK, "learning_rate": 2e-3, "num_train_epochs": 5, "eval_epochs": 5, "flip": "false"}
        head |= {"dataset_name": half(folder, 1), "model_name_or_path": start}
        kinds = [
            ("from scratch", None, scratch, {}),
            (
                "patch dropout, `patch_dropout_rate=0.25` among --config_overrides",
                "from scratch",
                scratch,
                {"config_overrides": f"{demo},patch_dropout_rate=0.25"},
            ),
            ("a smaller first stage", "from scratch", scratch, {"first_image_size": 14, "first_stage": 0.5}),
            ("fine-tuning", None, head, {}),
            ("frozen layers", "fine-tuning", head, {"freeze_layers": 2}),
            ("a head alone", "fine-tuning", head, {"freeze_backbone": "true"}),
            (
                "a head alone, cached features",
                "a head alone",
                head,
                {"freeze_backbone": "true", "cache_features": "true"},
            ),
        ]
        found = {name: [] for name, *_ in kinds}
        for seed in range(min(repeats, 3)):
            for name, _, common, flags in kinds:
                run = train(folder / f"{name}-{seed}".replace(" ", "-"), **common, **flags, seed=seed)
                found[name].append((trained_for(run), run["metrics"]["accuracy"]))
        for name, beside, _, flags in kinds:
            seconds, scores = (list(column) for column in zip(*found[name], strict=True))
            row = {"what": name, "flags": {key: str(value) for key, value in flags.items()}, "beside": beside}
            row |= {"seconds": round(statistics.median(seconds), 1), "accuracy": round(statistics.mean(scores), 4)}
            if beside is not None:
                row["times_faster"] = ratio([turn[0] for turn in found[beside]], seconds)
                row["points"] = round(
                    100 * statistics.mean(b - a[1] for a, b in zip(found[beside], scores, strict=True)), 2
                )
            print(json.dumps(row))
            rows.append(row)
    return {"rows": rows, "seeds": min(repeats, 3), "hidden_size": SMALL["hidden_size"]}


def merging_part(repeats: int) -> dict:
    """Speed and accuracy on the embedded test images by patches merged in each layer, of a model with 49 patches trained here."""
    fields = dict(
        image_size=28, patch_size=4, hidden_size=96, num_hidden_layers=6, num_attention_heads=4, intermediate_size=384,
        position_embedding="sincos2d", pooling="mean", use_class_token=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder, "run"), **QUICK, config_overrides=as_overrides(fields), eval_epochs=7)
        model = HFViTForImageClassification.from_pretrained(Path(folder, "run", "model")).to(DEVICE).eval()
        processor = training.load_processor(str(Path(folder, "run", "model")))
    form = data.image_form(processor, model.config)
    images = data.Images(data.prepare(data.load("fashion-mnist-mini"), train_split=None)[0]["eval"], form)
    pixel_values, found = normalize(images.cache, form).to(DEVICE), {}

    @torch.no_grad()
    def classify(r):
        model.set_token_merging(r)
        logits = torch.cat([model(some).logits for some in pixel_values.split(250)])
        found[str(r)] = (logits.argmax(1).cpu() == images.labels).float().mean().item()

    seconds = in_turns({str(r): functools.partial(classify, r) for r in (0, 3, 6, 9, [4, 10, 12, 10, 6, 0])}, repeats)
    rows = [
        {
            "r": r,
            "images_per_second": round(len(images) / statistics.median(each)),
            "times_faster": ratio(seconds["0"], each),
            "accuracy": round(found[r], 4),
            "points": round(100 * (found[r] - found["0"]), 2),
        }
        for r, each in seconds.items()
    ]
    return {"rows": rows, "patches": 49}


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints and streams


def checkpoint_part(repeats: int) -> dict:
    """Seconds of a training step of the tiny preset and of a checkpoint of it."""
    accelerator = Accelerator(mixed_precision=hardware.pick_precision("auto", DEVICE.type))
    model = HFViTForImageClassification(HFViTConfig.from_preset("tiny-patch16-224", num_labels=1000))
    optimizers = training.build_optimizers(model, "adamw", 1e-3, 0.05, (0.9, 0.999))
    model, *optimizers = accelerator.prepare(model, *optimizers)
    pixel_values = torch.randn(BATCH, 3, 224, 224, device=accelerator.device)
    labels = torch.randint(0, 1000, (BATCH,), device=accelerator.device)

    def train():
        accelerator.backward(model(pixel_values, labels=labels).loss)
        training.clip_gradients(accelerator, model, 1.0).item()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    with tempfile.TemporaryDirectory(dir=".") as folder:  # on this disk, and not in memory
        save = lambda: resume.save_checkpoint(Path(folder), resume.collect(model, optimizers), {"step": 1}, keep=2)
        seconds = in_turns({"step": train, "checkpoint": save}, repeats)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*.*") if file.is_file())
    step, checkpoint = (statistics.median(values) for values in seconds.values())
    return {
        "step_seconds": round(step, 3),
        "checkpoint_seconds": round(checkpoint, 3),
        "checkpoint_megabytes": round(size / 1e6, 1),
        "cost_every_100_steps": round(checkpoint / (100 * step), 5),
    }


def stream_memory(folder: Path, shards: int) -> float:
    """Peak memory, in MB, of a run of one epoch over `shards` Parquet files of 128 photos each."""
    place = folder / f"{shards}-shards"
    place.mkdir()
    rows = photos(folder, 500, 375, 128).cast_column("image", datasets.Image(decode=False))
    held = [
        {"image": {"bytes": Path(row["image"]["path"]).read_bytes(), "path": None}, "label": row["label"]}
        for row in rows
    ]
    rows = Dataset.from_list(held, Features(image=datasets.Image(), label=ClassLabel(names=["a", "b"])))
    for number in range(shards):
        rows.to_parquet(place / f"train-{number}.parquet")
    rows.select(range(16)).to_parquet(place / "validation.parquet")
    fields = (
        "image_size=64,patch_size=16,hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64"
    )
    flags = dict(
        dataset_name=place, output_dir=place / "run", preset="tiny-patch16-224", config_overrides=fields, streaming="true",
        shuffle_buffer=256, max_train_steps=shards * 128 // BATCH, per_device_train_batch_size=BATCH, checkpointing_steps=10,
    )  # fmt: skip
    with open(place / "log", "w") as log:
        run = psutil.Popen(train_command(**flags), stdout=log, stderr=log)
        peak = 0
        while run.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                peak = max(peak, run.memory_info().rss)
            time.sleep(0.02)
    if run.returncode != 0:
        raise RuntimeError((place / "log").read_text())
    return peak / 1e6


def stream_part(repeats: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        some, many = (stream_memory(Path(folder), shards) for shards in (8, 80))
    return {"images": 8 * 128, "megabytes": round(some, 1), "megabytes_of_ten_times_as_many": round(many, 1)}


PARTS = {name.removesuffix("_part"): part for name, part in list(globals().items()) if name.endswith("_part")}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure; all if not given"
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count")
    parser.add_argument("--output_file", help="JSON file for the figures; other parts that are in it stay")
    args = parser.parse_args()
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    file = Path(args.output_file) if args.output_file else None
    results = json.loads(file.read_text()) if file is not None and file.is_file() else {}
    if DEVICE.type == "cpu":
        hardware.use_all_cores()
        hardware.keep_memory()
    for name in args.parts:
        print(f"{name}:", flush=True)
        measured = PARTS[name](args.repeats)
        circumstances = environment.environment_info(DEVICE.type, 1, "bf16" if DEVICE.type == "cuda" else "no")
        results[name] = {
            **measured,
            "rounds": args.repeats,
            "date": datetime.date.today().isoformat(),
            **circumstances,
        }
        print(json.dumps(measured, indent=2), flush=True)
        if file is not None:  # at once: the next part may take long
            file.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    run_script(main)

"""What one GPU does: its tests, speed, memory, and how many minutes two data sets take. Goes on in calls of a few minutes.

    python recipes/benchmarks/gpu.py --output_dir runs/gpu-benchmark --minutes 9
    python recipes/benchmarks/gpu.py --output_dir runs/gpu-benchmark --cifar10 data/cifar10 --fashion_mnist data/fashion_mnist
    python recipes/benchmarks/gpu.py --output_dir runs/gpu-check --tiny true

The same command goes on with what OUTPUT_DIR/gpu.json does not hold yet; a training run is stopped before the minutes are over, and
goes on too. A stage that fails is told there, and tried again by the next call. `--tiny` runs each stage with small sizes, also
without a GPU, to see that all of it works. --cifar10 and --fashion_mnist are folders of Parquet files in the
columns of uoft-cs/cifar10 and zalando-datasets/fashion_mnist, in as many pieces as you like.

    ceiling      billions of operations a second of a large product in bf16
    small, base  ViT-S/16 and ViT-B/16, model only: images a second, memory and share of the ceiling, eager and compiled, beside
                 native transformers by PyTorch's attention, and by flash-attn where that is installed
    profile      kernels of a compiled training step of ViT-S/16: what is no product, what waits, how long the GPU is idle
    memory       peak of a training step of ViT-B/16 with and without gradient checkpointing
    optimizers   milliseconds of a step of AdamW and of Muon on the weights of ViT-S/16
    fed          ViT-S/16 trained from JPEG files of 500x375, by the number of workers
    tests        pytest -m gpu
    cifar10      configs/cifar10.yaml: accuracy, and minutes to 90% and 94%
    fashion_mnist  configs/fashion-mnist.yaml
    pretraining  a masked autoencoder with the network of cifar10.yaml, then fine-tuned
"""

import argparse
import json
import re
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # command_line.py

from command_line import SWITCH, Parser


STAGES = (
    "ceiling", "small", "base", "profile", "memory", "optimizers", "fed", "tests", "cifar10", "fashion_mnist", "pretraining",
)  # fmt: skip


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, "--output_dir FOLDER [--minutes N] [--cifar10 FOLDER] [--fashion_mnist FOLDER]")
    flag = parser.add_argument
    flag("--output_dir", type=Path, required=True, help="folder of gpu.json and of the training runs")
    flag("--minutes", type=float, default=9.0, help="after which nothing more is begun, and a training run is stopped")
    flag("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="what to measure, in this order")
    flag("--cifar10", help="folder of CIFAR-10; by default what needs it is left out")
    flag("--fashion_mnist", help="folder of Fashion-MNIST; by default what needs it is left out")
    flag("--tiny", **SWITCH, help="small sizes, to check the script itself, also without a GPU")
    return parser.parse_args(argv)


if __name__ == "__main__":  # a wrong flag is answered before the imports, which take seconds
    ARGUMENTS = parse_args()

import contextlib
import datetime
import gc
import importlib.util
import itertools
import os
import signal
import statistics
import subprocess
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree

import datasets
import numpy as np
import torch
import transformers
import yaml
from benchmarks.loader import photos
from benchmarks.measuring import DEVICE, RECIPES, median_ratio, seconds_of, square_spec, time_in_turns, to_overrides
from benchmarks.memory import flops_per_image
from benchmarks.model_speed import forward, native_vit, step

from hf_vit import HFViTConfig, HFViTForImageClassification
from hf_vit.data import image_dataset
from hf_vit.data.columns import select_image_and_label
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_spec import training_image_spec
from hf_vit.data.loader import data_loader
from hf_vit.data.sampling import EPOCH_STRIDE, epoch_batches
from hf_vit.system.environment import environment_info
from hf_vit.system.errors import UserError, run_script
from hf_vit.system.files import write_text
from hf_vit.training.arguments import parse_overrides
from hf_vit.training.optimizers import build_optimizers
from hf_vit.training.report import read_log


TINY = dict(image_size=32, patch_size=8, hidden_size=64, num_hidden_layers=2, num_attention_heads=2)
TO_STOP = 40  # seconds that a training run may take to save itself
LEAST = {  # seconds left to begin a stage; 240 for others, which compile or train
    "base": 300,
    "tests": 300,
    "profile": 90,
    "memory": 60,
    "fed": 120,
}
TRIES = 2  # of a stage that fails
KINDS = {  # of kernels, by their names; the first that fits
    "fused": r"^triton_(?!tem)",
    "optimizer": r"multi_tensor_apply|AdamW",
    "attention": r"flash|fmha|attention|sdpa",
    "product": r"gemm|nvjet|cutlass|xmma|addmm|::mm|bmm",
    "copy": r"memcpy|memset|copy_",
}
SUMMED = ("accuracy", "knn_accuracy", "loss")


class OutOfTime(Exception):
    """The minutes are over; the same command goes on. `measured` is what is known so far."""

    measured = {}


class Bench:
    """What a stage needs.

    Args:
        deadline: on the monotonic clock.
        results: of the stages that are done.
    """

    def __init__(self, args: argparse.Namespace, deadline: float, results: dict):
        self.args, self.deadline, self.results, self.tiny = args, deadline, results, args.tiny

    def config(self, preset: str) -> HFViTConfig:
        return HFViTConfig.from_preset(f"{preset}-patch16-224", num_labels=1000, **(TINY if self.tiny else {}))

    def batch(self, size: int) -> int:
        return 4 if self.tiny else size

    def tests(self) -> dict:
        file = self.args.output_dir / "tests.xml"
        what = ["--collect-only"] if self.tiny else ["-n", "4", f"--junitxml={file}"]
        tests = "tests/training/test_gpu.py"
        plugins = ["-p", "no:cacheprovider", "-p", "no:benchmark"]  # pytest-benchmark warns of several workers
        command = [sys.executable, "-m", "pytest", "-m", "gpu", *plugins, *what, tests]
        done = self.run(command, cwd=RECIPES.parent)
        if self.tiny:
            return {"collected": int(re.search(r"(\d+)(/\d+)? tests? collected", done.stdout)[1])}
        suite = ElementTree.parse(file).getroot().find("testsuite")
        failed = [case.get("name") for case in suite.iter("testcase") if {"failure", "error"} & {e.tag for e in case}]
        counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
        return {**counts, "failed": failed, "tail": done.stdout[-2000:] if failed else ""}

    def ceiling(self) -> dict:
        side = 256 if self.tiny else 8192
        one, other = (torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        product = lambda: one @ other
        product()
        seconds = statistics.median(seconds_of(product, 20) for _ in range(5))
        return {"side": side, "tflops": round(2 * side**3 / seconds / 1e12, 3)}

    def small(self) -> dict:
        return self.speed("small", self.batch(256))

    def base(self) -> dict:
        return self.speed("base", self.batch(128))

    def speed(self, preset: str, batch: int) -> dict:
        """Images a second of each contender in a forward pass and a training step, and peak memory of the step."""
        config = self.config(preset)
        images, labels = self.images(config, batch)
        kinds = {"hf_vit": HFViTForImageClassification, "transformers": native_vit}
        if importlib.util.find_spec("flash_attn") is not None:
            kinds["transformers, flash-attn"] = lambda config: _with_attention(native_vit(config), "flash_attention_2")
        passes, peaks, of_kind = {"forward": {}, "step": {}}, {}, {}
        for kind, compiled in itertools.product(kinds, (False, True)):
            name = f"{kind}, {'compiled' if compiled else 'eager'}"
            of_kind[name] = kind
            before = _allocated()
            model = kinds[kind](config).to(DEVICE)
            if compiled:
                model.compile(dynamic=False)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
            passes["step"][name] = lambda m=model, o=optimizer: step(m, o, images, labels)
            passes["forward"][name] = lambda m=model: forward(m, images)
            passes["step"][name]()
            if DEVICE.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            passes["step"][name]()
            peaks[name] = _allocated(peak=True) - before
        result = {"batch": batch, "peak_bytes": peaks}
        for one_pass, contenders in passes.items():
            seconds = time_in_turns(contenders, 2 if self.tiny else 5, 1 if self.tiny else 10)
            work = {kind: flops_per_image(config, one_pass == "step", kinds[kind]) for kind in kinds}
            ceiling = self.results.get("ceiling", {}).get("tflops")
            speeds = {name: batch / statistics.median(each) for name, each in seconds.items()}
            ratio = lambda peer, ours, seconds=seconds: median_ratio(
                seconds[f"transformers, {peer}"], seconds[f"hf_vit, {ours}"]
            )
            result[one_pass] = {
                "images_per_second": {name: round(speed, 1) for name, speed in speeds.items()},
                "share_of_ceiling": ceiling
                and {name: round(speed * work[of_kind[name]] / ceiling / 1e12, 4) for name, speed in speeds.items()},
                "eager_beside_eager": ratio("eager", "eager"),
                "compiled_beside_eager": ratio("eager", "compiled"),
                "compiled_beside_compiled": ratio("compiled", "compiled"),
            }
        return result

    def images(self, config: HFViTConfig, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random pixels (B, C, H, W) and labels (B,) on the device."""
        size = (batch, config.num_channels, config.image_size, config.image_size)
        return torch.randn(size, device=DEVICE), torch.randint(0, config.num_labels, (batch,), device=DEVICE)

    def profile(self) -> dict:
        config, steps = self.config("small"), 5
        model = HFViTForImageClassification(config).to(DEVICE)
        model.compile(dynamic=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        images = self.images(config, self.batch(256))
        one = lambda: step(model, optimizer, *images)
        for _ in range(3):
            one()
        milliseconds = 1e3 * seconds_of(one, steps)
        with torch.profiler.profile() as profiler:
            seconds_of(one, steps)
        on_device = DEVICE.type == "cuda"
        spent, names = dict.fromkeys([*KINDS, "other"], 0.0), {}
        launches = waits = 0
        for event in profiler.key_averages():
            launches += event.count * ("LaunchKernel" in event.key)
            waits += event.count * bool(re.search(r"(Stream|Event)Synchronize|cudaMemcpy$", event.key))
            own = (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e3 / steps
            # Regions that have names, such as the optimizer's step, are listed as if they were kernels.
            is_kernel = not on_device or (str(event.device_type).endswith("CUDA") and not event.is_user_annotation)
            if is_kernel and own > 0:
                kind = next((kind for kind, text in KINDS.items() if re.search(text, event.key, re.I)), "other")
                spent[kind] += own
                names[event.key[:80]] = names.get(event.key[:80], 0.0) + own
        longest = {name: round(names[name], 3) for name in sorted(names, key=names.get, reverse=True)[:20]}
        return {
            "batch": self.batch(256),
            "milliseconds": round(milliseconds, 3),
            "kernels": {kind: round(value, 3) for kind, value in spent.items()},
            "idle": round(max(0.0, 1 - sum(spent.values()) / milliseconds), 4),
            "launches_per_step": launches / steps,
            "waits_per_step": waits / steps,
            "longest": longest,
        }

    def memory(self) -> dict:
        config, batch, peaks = self.config("base"), self.batch(256), {}
        images = self.images(config, batch)
        for checkpointing in (False, True):
            before = _allocated()
            model = HFViTForImageClassification(config).to(DEVICE)
            if checkpointing:
                model.activation_checkpointing_enable({"use_reentrant": False})
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
            step(model, optimizer, *images)
            if DEVICE.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            milliseconds = 1e3 * seconds_of(lambda m=model, o=optimizer: step(m, o, *images), 2)
            name = "checkpointing" if checkpointing else "full"
            peaks[name] = {"peak_bytes": _allocated(peak=True) - before, "milliseconds": round(milliseconds, 1)}
            del model, optimizer
        return {"batch": batch, **peaks}

    def optimizers(self) -> dict:
        model = HFViTForImageClassification(self.config("small")).to(DEVICE)
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        contenders = {}
        for name in ("adamw", "muon"):
            made = build_optimizers(model, name, 1e-5, 0.05, (0.9, 0.95))
            contenders[name] = lambda made=made: [optimizer.step() for optimizer in made]
        seconds = time_in_turns(contenders, 3, 1 if self.tiny else 20)
        return {f"{name}_ms": round(1e3 * statistics.median(each), 3) for name, each in seconds.items()}

    def fed(self) -> dict:
        """Images a second of a compiled training step on JPEG files, each decoded anew, by the number of workers."""
        config, batch = self.config("small"), self.batch(256)
        model = HFViTForImageClassification(config).to(DEVICE)
        model.compile(dynamic=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        step(model, optimizer, *self.images(config, batch))
        spec, kept = square_spec(config.image_size), image_dataset.CACHE_BYTES
        result, settings = {"batch": batch}, (1, 2) if self.tiny else (4, 8, 16)
        with tempfile.TemporaryDirectory() as folder:
            # Of eight rounds of the workers two pass before the clock is started, at the end of a round.
            rows = photos(Path(folder), 500, 375, 8 * batch * settings[-1])
            rows = select_image_and_label(rows, ("image", "label")).add_column("row", np.arange(len(rows)))
            image_dataset.CACHE_BYTES = 0  # as if they were too many to keep
            images = ImageDataset(rows, training_image_spec(spec, rows, "resized"))
            for workers in settings:
                ids = itertools.islice(epoch_batches(len(images), batch, 0, 0), 8 * workers)
                numbers = ([EPOCH_STRIDE + number for number in each] for each in ids)
                for number, each in enumerate(data_loader(images, numbers, workers)):
                    pixels = spec.normalize(each["images"].to(DEVICE, non_blocking=True))
                    step(model, optimizer, pixels, each["labels"].to(DEVICE, non_blocking=True))
                    if number == 2 * workers - 1:
                        seconds_of(lambda: None)  # waits for the device
                        began = time.perf_counter()
                seconds_of(lambda: None)
                result[f"{workers} workers"] = round(6 * workers * batch / (time.perf_counter() - began), 1)
        image_dataset.CACHE_BYTES = kept
        return result

    def cifar10(self) -> dict:
        return self.train("train.py", "cifar10", dataset_name=self.args.cifar10)

    def fashion_mnist(self) -> dict:
        return self.train("train.py", "fashion-mnist", dataset_name=self.args.fashion_mnist)

    def pretraining(self) -> dict:
        preset = yaml.safe_load((RECIPES / "configs" / "cifar10.yaml").read_text())
        network = parse_overrides(preset["config_overrides"])
        del network["drop_path_rate"]
        data = {"dataset_name": self.args.cifar10}
        before = self.train(
            "pretrain.py", "pretrain-cifar10", **data, num_train_epochs=100, per_device_train_batch_size=512,
            eval_epochs=10, config_overrides=to_overrides(network),
        )  # fmt: skip
        after = self.train(
            "train.py", "cifar10", **data, num_train_epochs=30, layer_decay=0.75, preset=None,
            config_overrides="drop_path_rate=0.1",
            model_name_or_path=self.args.output_dir / "pretrain-cifar10" / "model", folder="cifar10-pretrained",
        )  # fmt: skip
        return {"pretraining": before, "fine_tuning": after}

    def train(self, script: str, config: str, folder: str | None = None, **flags) -> dict:
        """A run of a preset, or what is left of it; OutOfTime if it is stopped."""
        run = self.args.output_dir / (folder or config)
        settings = {**yaml.safe_load((RECIPES / "configs" / f"{config}.yaml").read_text()), **flags, "output_dir": run}
        settings = {name: value for name, value in settings.items() if value is not None}
        settings.pop("mixed_precision", None)  # the GPU's own
        if self.tiny:
            del settings["num_train_epochs"]
            settings |= {"max_train_steps": 4, "eval_steps": 4, "per_device_train_batch_size": 8, "num_workers": 0}
            del settings["eval_epochs"]
        command = [sys.executable, str(RECIPES / script), *(f"--{name}={value}" for name, value in settings.items())]
        try:
            self.run(command, accepted=(0,))
        except OutOfTime as stopped:
            stopped.measured = {folder or config: self.curve(run)}
            raise
        results = json.loads((run / "results.json").read_text())
        return {
            "metrics": {name: value for name, value in results["metrics"].items() if name in SUMMED},
            "minutes": round((results["train_seconds"] - results["seconds"]["scoring"]) / 60, 2),
            "lives": len(results["lives"]),
            **self.curve(run),
        }

    def curve(self, run: Path) -> dict:
        """What a run, perhaps an unfinished one, has logged; seconds are of training, without its evaluations."""
        lines = read_log(run) if (run / "metrics.jsonl").is_file() else []
        speeds = [line["images_per_second"] for line in lines if line.get("images_per_second")]
        scored = [line for line in lines if "eval_loss" in line]
        score = lambda line: line.get("eval_accuracy", line.get("eval_knn_accuracy", line["eval_loss"]))
        reached = lambda wanted: next((line for line in scored if line.get("eval_accuracy", 0) >= wanted), None)
        return {
            "images_per_second": round(statistics.median(speeds), 1) if speeds else None,
            "minutes_to": {
                str(part): round(line["seconds"] / 60, 2)
                for part in (0.9, 0.94)
                if (line := reached(part)) is not None
            },
            "evaluations": [[line["epoch"], line["seconds"], score(line)] for line in scored],
        }

    def run(self, command: list[str], accepted=(0, 1, 5), **options) -> subprocess.CompletedProcess:
        """A process, which is asked to stop in time; OutOfTime if it had to be."""
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0, **options
        )
        try:
            output, _ = process.communicate(timeout=max(1.0, self.deadline - time.monotonic() - TO_STOP))
        except subprocess.TimeoutExpired as error:
            raise OutOfTime from error
        finally:  # with what it has started
            if process.poll() is None:  # time is over, or this script is stopped: a run saves itself
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=TO_STOP)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode not in accepted:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{output[-3000:]}")
        return subprocess.CompletedProcess(command, process.returncode, output)


def _with_attention(model, implementation: str):
    model.set_attn_implementation(implementation)
    return model


def _allocated(peak: bool = False) -> int:
    """Bytes on the device; 0 where there is none."""
    if DEVICE.type != "cuda":
        return 0
    if not peak:
        gc.collect()  # a compiled model is a cycle
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


def main(args: argparse.Namespace):
    if DEVICE.type != "cuda" and not args.tiny:
        raise UserError("there is no CUDA device here: --tiny true checks the script without one")
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    args.output_dir = args.output_dir.resolve()  # pytest works in another folder
    args.output_dir.mkdir(parents=True, exist_ok=True)
    file = args.output_dir / "gpu.json"
    results = json.loads(file.read_text()) if file.is_file() else {}
    deadline = time.monotonic() + 60 * args.minutes
    torch._dynamo.config.recompile_limit = 64  # of both classes, to train and to evaluate
    needed = {"cifar10": args.cifar10, "pretraining": args.cifar10, "fashion_mnist": args.fashion_mnist}
    about_machine = environment_info(DEVICE.type, 1, "bf16")
    warm_up()
    is_left = lambda name: needed.get(name, name) is not None and "error" in results.get(name, {"error": None})
    for name in sorted(filter(is_left, args.stages), key=lambda name: results.get(name, {}).get("tries", 0)):
        tries, began = results.get(name, {}).get("tries", 0), time.monotonic()
        if tries >= TRIES or (not args.tiny and began > deadline - LEAST.get(name, 240)):
            continue  # a shorter one may fit
        gc.collect()
        torch.compiler.reset()  # graphs of another stage count towards the limit of recompilations
        try:
            measured = getattr(Bench(args, deadline, results), name)()
        except OutOfTime as stopped:
            measured = {"error": "not finished: the same command goes on", "tries": tries, **stopped.measured}
        except Exception as error:  # the other stages may work
            lines = traceback.format_exc()[-4000:]
            measured = {"error": f"{type(error).__name__}: {error}", "traceback": lines, "tries": tries + 1}
        about = {"seconds": round(time.monotonic() - began, 1), "date": datetime.date.today().isoformat()}
        results[name] = {**measured, **about, **about_machine}
        print(json.dumps({name: measured}), flush=True)
        write_text(file, json.dumps(results, indent=1) + "\n")
        torch.cuda.empty_cache()
    left = ", ".join(filter(is_left, args.stages))
    print(f"{file}: {len(results)} stages; not measured: {left or 'none'}")


def warm_up():
    """A product and its gradient, so that no stage pays for the library's own memory."""
    matrix = torch.randn(64, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    (matrix @ matrix).sum().backward()


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))

"""What one GPU does: speed, memory and kernels of a step. Goes on in calls of a few minutes.

    python recipes/benchmarks/gpu.py --output_file gpu.json --minutes 9
    python recipes/benchmarks/gpu.py --output_file check.json --tiny

The same command goes on with the stages that the file does not hold yet. --tiny runs each with
small sizes, also without a GPU, to see that it works.

    ceiling      TFLOP/s of a large product in bf16
    small, base  ViT-S/16 and ViT-B/16, model only: images a second, memory and share of the
                 ceiling, eager and compiled, beside native transformers by PyTorch's attention,
                 and by flash-attn where that is installed
    profile      kernels of a compiled training step of ViT-S/16: the longest, what waits, how long
                 the GPU is idle
    memory       peak of a training step of ViT-B/16 with and without gradient checkpointing
    optimizers   milliseconds of a step of AdamW and of Muon on the weights of ViT-S/16
"""

import argparse
import contextlib
import datetime
import gc
import importlib.util
import itertools
import json
import re
import statistics
import time
import traceback
from functools import partial
from pathlib import Path

import torch
from measuring import DEVICE, median_ratio, prepare_device, seconds_of, time_in_turns
from model import forward, native_vit, step
from torch.utils.flop_counter import FlopCounterMode

from hf_vit import HFViTConfig, HFViTForImageClassification
from hf_vit.system.environment import environment_info
from hf_vit.training.optimizers import build_optimizers


TINY = dict(image_size=32, patch_size=8, hidden_size=64, num_hidden_layers=2, num_attention_heads=2)


class Bench:
    """A method a stage; `results` are those of the earlier ones."""

    def __init__(self, tiny: bool, results: dict):
        self.tiny, self.results = tiny, results

    def config(self, preset: str) -> HFViTConfig:
        return HFViTConfig.from_preset(f"{preset}-patch16-224", num_labels=1000, **(TINY if self.tiny else {}))

    def batch(self, size: int) -> int:
        return 4 if self.tiny else size

    def images(self, config: HFViTConfig, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random pixels (B, C, H, W) and labels (B,) on the device."""
        size = (batch, config.num_channels, config.image_size, config.image_size)
        return torch.randn(size, device=DEVICE), torch.randint(0, config.num_labels, (batch,), device=DEVICE)

    def training(self, make, config: HFViTConfig, images, compiled: bool = True):
        """A model, and a function that takes one of its training steps, which has run once."""
        model = make(config).to(DEVICE)
        if compiled:
            model.compile(dynamic=False)
        one_step = partial(step, model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), *images)
        one_step()
        return model, one_step

    def ceiling(self) -> dict:
        side = 256 if self.tiny else 8192
        one, other = (torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        one @ other
        seconds = statistics.median(seconds_of(lambda: one @ other, 20) for _ in range(5))
        return {"side": side, "tflops": round(2 * side**3 / seconds / 1e12, 3)}

    def small(self) -> dict:
        return self.speed("small", self.batch(256))

    def base(self) -> dict:
        return self.speed("base", self.batch(128))

    def speed(self, preset: str, batch: int) -> dict:
        """Images a second of each contender in a forward pass and a training step, and peak memory of the step."""
        config = self.config(preset)
        images = self.images(config, batch)
        kinds = {"hf_vit": HFViTForImageClassification, "transformers": native_vit}
        if importlib.util.find_spec("flash_attn") is not None:
            kinds["transformers, flash-attn"] = native_vit_with_flash_attention
        passes, peaks = {"forward": {}, "step": {}}, {}
        for (kind, make), compiled in itertools.product(kinds.items(), (False, True)):
            name, before = f"{kind}, {'compiled' if compiled else 'eager'}", allocated()
            model, one_step = self.training(make, config, images, compiled)
            peaks[name] = peak_of(one_step) - before
            passes["step"][name], passes["forward"][name] = one_step, partial(forward, model, images[0])
        result, ceiling = {"batch": batch, "peak_bytes": peaks}, self.results.get("ceiling", {}).get("tflops")
        for kind, contenders in passes.items():
            seconds = time_in_turns(contenders, 2 if self.tiny else 5, 1 if self.tiny else 10)
            speeds = {name: batch / statistics.median(each) for name, each in seconds.items()}
            work = flops_per_image(config, training=kind == "step")
            result[kind] = {"images_per_second": {name: round(speed, 1) for name, speed in speeds.items()}}
            if ceiling:
                ours = (name for name in speeds if name.startswith("hf_vit"))
                result[kind]["share_of_ceiling"] = {
                    name: round(speeds[name] * work / ceiling / 1e12, 4) for name in ours
                }
            for peer, ours in itertools.combinations_with_replacement(("eager", "compiled"), 2):
                ratio = median_ratio(seconds[f"transformers, {peer}"], seconds[f"hf_vit, {ours}"])
                result[kind][f"{ours}_beside_{peer}"] = ratio
        return result

    def profile(self) -> dict:
        config, steps, batch = self.config("small"), 5, self.batch(256)
        _, one_step = self.training(HFViTForImageClassification, config, self.images(config, batch))
        seconds_of(one_step, 3)
        milliseconds = 1e3 * seconds_of(one_step, steps)
        with torch.profiler.profile() as profiler:
            seconds_of(one_step, steps)
        events = profiler.key_averages()
        counted = lambda pattern: sum(event.count for event in events if re.search(pattern, event.key)) / steps
        kernels = {}
        for event in events:
            # Regions that have names, such as the optimizer's step, are listed as if they were kernels.
            if DEVICE.type == "cpu" or (str(event.device_type).endswith("CUDA") and not event.is_user_annotation):
                own = event.self_cpu_time_total if DEVICE.type == "cpu" else event.self_device_time_total
                kernels[event.key[:80]] = kernels.get(event.key[:80], 0.0) + own / 1e3 / steps
        return {
            "batch": batch,
            "milliseconds": round(milliseconds, 3),
            "idle": round(max(0.0, 1 - sum(kernels.values()) / milliseconds), 4),
            "launches_per_step": counted("LaunchKernel"),
            "waits_per_step": counted("(Stream|Event)Synchronize|cudaMemcpy$"),
            "longest": {name: round(kernels[name], 3) for name in sorted(kernels, key=kernels.get, reverse=True)[:30]},
        }

    def memory(self) -> dict:
        config, batch = self.config("base"), self.batch(256)
        images, result = self.images(config, batch), {"batch": batch}
        for name in ("full", "checkpointing"):
            gc.collect()
            before = allocated()
            model, one_step = self.training(HFViTForImageClassification, config, images, compiled=False)
            if name == "checkpointing":
                model.activation_checkpointing_enable({"use_reentrant": False})
            peak = peak_of(one_step) - before
            result[name] = {"peak_bytes": peak, "milliseconds": round(1e3 * seconds_of(one_step, 2), 1)}
            del model, one_step
        return result

    def optimizers(self) -> dict:
        model = HFViTForImageClassification(self.config("small")).to(DEVICE)
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        contenders = {}
        for name in ("adamw", "muon"):
            made = build_optimizers(model, name, 1e-5, 0.05, 0.95)
            contenders[name] = lambda made=made: [optimizer.step() for optimizer in made]
        seconds = time_in_turns(contenders, 3, 1 if self.tiny else 20)
        return {f"{name}_ms": round(1e3 * statistics.median(each), 3) for name, each in seconds.items()}


STAGES = {  # and the seconds that must be left to begin one
    "ceiling": 30, "small": 240, "base": 300, "profile": 90, "memory": 60, "optimizers": 60,
}  # fmt: skip


def native_vit_with_flash_attention(config: HFViTConfig):
    model = native_vit(config)
    model.set_attn_implementation("flash_attention_2")
    return model


def flops_per_image(config: HFViTConfig, training: bool) -> int:
    """Multiplications and additions of one image, of a forward pass or of a full training step."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = HFViTForImageClassification(config).train(training)
        model.set_attn_implementation("eager")  # as many, and each a product that is counted
        with contextlib.nullcontext() if training else torch.no_grad():
            logits = model(torch.zeros(1, config.num_channels, config.image_size, config.image_size)).logits
        if training:
            logits.sum().backward()
    return counter.get_total_flops()


def allocated() -> int:
    return torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0


def peak_of(function) -> int:
    """The most bytes on the device while the function runs; 0 without one."""
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    function()
    return torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0


def main(args: argparse.Namespace):
    prepare_device()
    deadline = time.monotonic() + 60 * args.minutes
    results = json.loads(args.output_file.read_text()) if args.output_file.is_file() else {}
    torch._dynamo.config.recompile_limit = 64  # of both classes, to train and to evaluate
    for name in args.stages:
        if name in results or (not args.tiny and time.monotonic() > deadline - STAGES[name]):
            continue  # a shorter one may fit
        gc.collect()
        torch.compiler.reset()  # graphs of another stage count towards the limit of recompilations
        try:
            measured = getattr(Bench(args.tiny, results), name)()
        except Exception:  # the other stages may work
            traceback.print_exc()
            continue
        environment = environment_info(DEVICE.type, 1, "bf16")
        results[name] = {**measured, "date": datetime.date.today().isoformat(), **environment}
        print(json.dumps({name: measured}), flush=True)
        args.output_file.write_text(json.dumps(results, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("--output_file", type=Path, required=True, help="JSON file of the stages")
    flag("--minutes", type=float, default=9.0, help="no stage begins that may end later; default: 9")
    flag(
        "--stages",
        nargs="+",
        metavar="STAGE",
        choices=STAGES,
        default=list(STAGES),
        help="what to measure, in this order",
    )
    flag("--tiny", action="store_true", help="small sizes, to check the script itself, also without a GPU")
    args = parser.parse_args()
    if DEVICE.type != "cuda" and not args.tiny:
        parser.error("no CUDA device: --tiny checks the script without one")
    return args


if __name__ == "__main__":
    main(parse_args())

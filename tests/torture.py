"""Kill a small training with SIGKILL again and again, at random instants and inside checkpoint writes, and compare its end.

    make torture
    python tests/torture.py --kind fsdp2 --runs 3 --seed 1

Kinds: adamw, muon, lora of a model that is trained first, and fsdp2 in two processes. Each run is killed one to three times and
then left to finish. Its weights, the losses and scores in metrics.jsonl and the metrics in results.json must be those of a run
that nobody touched, bit for bit.
"""

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from forked import group_of_two
from runs import FSDP2, TRAIN, as_flags, log_of, results_of, write_photos


MOST_SECONDS = 300  # of one start
KINDS = {"adamw": {}, "muon": {"optimizer": "muon"}, "lora": {"lora_rank": 4}, "fsdp2": {}}


def command(photos: Path, run: Path, kind: str) -> list[str]:
    """A run with all that could go astray: dropout, drop path, mixing, averages, accumulation, a best that is selected."""
    fields = dict(drop_path_rate=0.2, hidden_dropout_prob=0.1, patch_dropout_rate=0.25)
    if kind == "lora":
        network = dict(model_name_or_path=photos.with_name("untouched") / "model")
    else:
        network = dict(preset="tiny-patch16-224")
        fields |= dict(image_size=16, patch_size=4, hidden_size=48, num_hidden_layers=2)
        fields |= dict(num_attention_heads=2, intermediate_size=96)
    flags = dict(
        dataset_name=photos, output_dir=run, eval_fraction=0.25, max_train_steps=60, per_device_train_batch_size=6,
        config_overrides=",".join(f"{name}={value}" for name, value in fields.items()),
        gradient_accumulation_steps=2, ema_decay=0.9, mixup=0.2, cutmix=0.5, erase=0.3, color_jitter=0.2, log_steps=2, eval_steps=7,
        checkpointing_steps=3, mixed_precision="no",
    )  # fmt: skip
    flags |= network | KINDS[kind]
    return [sys.executable, "-W", "ignore", str(TRAIN), *as_flags(flags)]


def outcome(run: Path) -> dict:
    """What must not depend on how often a run was killed."""
    return {
        "weights": (run / "model" / "model.safetensors").read_bytes(),
        "last weights": [file.read_bytes() for file in run.glob("last/model.safetensors")],
        "log": log_of(run),
        "metrics": results_of(run)["metrics"],
        "checkpoints": sorted(path.name for path in (run / "checkpoints").iterdir()),
    }


class Training:
    """The processes of a run, in a group of their own."""

    def __init__(self, photos: Path, run: Path, kind: str):
        self.run, self.processes = run, []
        own = [{**FSDP2, **rank, "ACCELERATE_USE_CPU": "true"} for rank in group_of_two()] if kind == "fsdp2" else [{}]
        with open(run.with_suffix(".log"), "a") as log:
            for more in own:
                group = self.processes[0].pid if self.processes else 0
                line, environment = command(photos, run, kind), {**os.environ, **more}
                self.processes.append(
                    subprocess.Popen(line, stdout=log, stderr=log, process_group=group, env=environment)
                )

    def is_over(self) -> bool:
        return any(process.poll() is not None for process in self.processes)

    def finish(self):
        if any(process.wait(MOST_SECONDS) != 0 for process in self.processes):
            raise RuntimeError(f"{self.run} failed:\n{self.run.with_suffix('.log').read_text()[-3000:]}")

    def half_written(self) -> list[str]:
        """Checkpoints that are being written, or that a kill left half written."""
        return [path.name for path in self.run.glob("checkpoints/.*.part")]

    def kill(self, in_a_write: bool, rng: random.Random, span: float) -> str | None:
        """SIGKILL at an instant of the seconds that a run takes; what it hit, or None where the run was faster."""
        if in_a_write:
            for wanted in (False, True) * rng.randint(1, 8):  # which write of those it will see
                while bool(self.half_written()) != wanted and not self.is_over():
                    time.sleep(0.0005)
            time.sleep(rng.uniform(0, 0.002))
        else:
            time.sleep(rng.uniform(0.5, span))
        if self.is_over():
            self.finish()
            return None
        os.killpg(self.processes[0].pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        return f"while {', '.join(half)} was written" if (half := self.half_written()) else "elsewhere"


def torture(folder: Path, runs: int, seed: int, kind: str = "adamw") -> list[list[str]]:
    """What hit each run; raises AssertionError at one that ends otherwise than the run that was left alone."""
    rng = random.Random(seed)
    photos, untouched = folder / "photos", folder / "untouched"
    write_photos(photos, train=24)
    if kind == "lora":
        Training(photos, untouched, "adamw").finish()
        untouched = folder / "untouched-lora"
    began = time.monotonic()
    Training(photos, untouched, kind).finish()
    span = time.monotonic() - began
    wanted, hits = outcome(untouched), []
    for number in itertools.count():
        if len(hits) == runs:
            return hits
        run, hit = folder / f"run-{number}", []
        for in_a_write in rng.choices([True, False], k=rng.randint(1, 3)):
            if not (run / "results.json").exists():
                hit += filter(None, [Training(photos, run, kind).kill(in_a_write, rng, span)])
        Training(photos, run, kind).finish()
        found = outcome(run)
        differing = [name for name in wanted if found[name] != wanted[name]]
        assert not differing, f"{run}, killed {hit}: {', '.join(differing)} differ"
        if hit:  # else it was faster than all its kills
            hits.append(hit)
            print(f"run {len(hits)} of {runs}: killed {'; then '.join(hit)}: the same to the last bit", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=6, help="runs that a kill must have hit (default: 6)")
    parser.add_argument("--seed", type=int, default=0, help="decides the instants (default: 0)")
    parser.add_argument("--kind", choices=KINDS, default="adamw", help="(default: adamw)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torture(Path(folder), args.runs, args.seed, args.kind)


if __name__ == "__main__":
    main()

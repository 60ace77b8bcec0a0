"""Kill a small training with SIGKILL again and again, at random instants and inside checkpoint writes, and compare its end.

    make torture
    python tests/torture.py --kind fsdp2 --runs 3 --seed 1

Kinds: adamw, muon, lora of a model that is trained first, and fsdp2 in two processes. Each run is killed one to three times and
then left to finish. Its weights, the losses and scores in metrics.jsonl and the metrics in results.json must be those of a run
that nobody touched, bit for bit.
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from forked import group_of_two
from runs import FSDP2, TRAIN, write_photos


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
    return [sys.executable, "-W", "ignore", str(TRAIN), *(f"--{name}={value}" for name, value in flags.items())]


def outcome(run: Path) -> dict:
    """What must not depend on how often a run was killed."""
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "weights": (run / "model" / "model.safetensors").read_bytes(),
        "last weights": [file.read_bytes() for file in run.glob("last/model.safetensors")],
        "log": [
            {name: value for name, value in line.items() if name not in ("images_per_second", "seconds")}
            for line in logged
        ],
        "metrics": json.loads((run / "results.json").read_text())["metrics"],
        "checkpoints": sorted(path.name for path in (run / "checkpoints").iterdir()),
    }


class Training:
    """The processes of a run, in a group of their own."""

    def __init__(self, photos: Path, run: Path, kind: str):
        self.run, self.processes, group = run, [], 0
        own = [{**FSDP2, **rank, "ACCELERATE_USE_CPU": "true"} for rank in group_of_two()] if kind == "fsdp2" else [{}]
        with open(run.with_suffix(".log"), "a") as log:
            for more in own:
                environment = {**os.environ, **more}
                line = command(photos, run, kind)
                self.processes.append(
                    subprocess.Popen(line, stdout=log, stderr=log, process_group=group, env=environment)
                )
                group = self.processes[0].pid

    def is_over(self) -> bool:
        return any(process.poll() is not None for process in self.processes)

    def send(self, number: int):
        os.killpg(self.processes[0].pid, number)

    def kill(self):
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def finish(self):
        if any(process.wait(MOST_SECONDS) != 0 for process in self.processes):
            raise RuntimeError(f"{self.run} failed:\n{self.run.with_suffix('.log').read_text()[-3000:]}")


def parts(run: Path) -> list[str]:
    """Folders that are being written, or that a kill left half written."""
    return [path.name for path in run.glob("checkpoints/.*.part")]


def kill(training: Training, where: str, rng: random.Random, span: float) -> str | None:
    """SIGKILL at a random instant; what it hit, or None where the run was faster."""
    run, latest = training.run, time.monotonic() + MOST_SECONDS

    def wait_for(there) -> bool:
        while not training.is_over() and time.monotonic() < latest and not there():
            time.sleep(0.0005)
        return not training.is_over()

    def changed() -> int:
        return (run / "metrics.jsonl").stat().st_mtime_ns if (run / "metrics.jsonl").exists() else 0

    if where == "start":
        time.sleep(rng.uniform(0.5, 5))
    elif where == "training":
        before = changed()
        wait_for(lambda: changed() != before)
        time.sleep(rng.uniform(0, span))
    else:
        wanted = rng.randint(1, 8)  # which write of those it will see
        while wait_for(lambda: parts(run)):
            wanted -= 1
            if wanted <= 0:
                time.sleep(rng.uniform(0, 0.004))
                training.send(signal.SIGSTOP)
                time.sleep(0.01)
                if parts(run):
                    break
                training.send(signal.SIGCONT)
            wait_for(lambda: not parts(run))
    if training.is_over():
        training.finish()
        return None
    training.kill()
    half = parts(run)
    return f"while {', '.join(half)} was written" if half else f"at {where}"


def torture(folder: Path, runs: int, seed: int, kind: str = "adamw", say=print) -> list[list[str]]:
    """What hit each run; raises AssertionError at one that ends otherwise than the run that was left alone."""
    rng = random.Random(seed)
    photos, untouched = folder / "photos", folder / "untouched"
    write_photos(photos, train=24)
    if kind == "lora":
        Training(photos, untouched, "adamw").finish()
        untouched = folder / "untouched-lora"
    training = Training(photos, untouched, kind)
    while not training.is_over() and not (untouched / "config.yaml").exists():
        time.sleep(0.01)
    began = time.monotonic()
    training.finish()
    span = time.monotonic() - began
    wanted, hits = outcome(untouched), []
    for number in itertools.count():
        if len(hits) == runs:
            return hits
        run, hit = folder / f"run-{number}", []
        for where in rng.choices(["write", "training", "start"], [3, 3, 1], k=rng.randint(1, 3)):
            if not (run / "results.json").exists():
                hit += filter(None, [kill(Training(photos, run, kind), where, rng, span)])
        Training(photos, run, kind).finish()
        found = outcome(run)
        differing = [name for name in wanted if found[name] != wanted[name]]
        assert not differing, f"{run}, killed {hit}: {', '.join(differing)} differ"
        if hit:  # else it was faster than all its kills
            hits.append(hit)
            say(f"run {len(hits)} of {runs}: killed {'; then '.join(hit)}: the same to the last bit", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=6, help="runs that a kill must have hit (default: 6)")
    parser.add_argument("--seed", type=int, default=0, help="decides the instants (default: 0)")
    parser.add_argument("--kind", choices=KINDS, default="adamw", help="(default: adamw)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        hits = torture(Path(folder), args.runs, args.seed, args.kind)
    every = [one for hit in hits for one in hit]
    inside = sum("was written" in one for one in every)
    print(
        f"{len(hits)} of {args.runs} runs ended as the one left alone; {len(every)} kills, {inside} inside checkpoint writes"
    )


if __name__ == "__main__":
    main()

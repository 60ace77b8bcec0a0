"""Are trained weights still the same to the bit? Short runs of the recipes, one thread and AVX2 alone.

    python tests/goldens/same_weights.py COMMIT               (runs each case with the code of COMMIT too, and compares)
    python tests/goldens/same_weights.py COMMIT --cases demo  (40 steps of the demo alone)
    python tests/goldens/same_weights.py                      (compares with weights.json, where it knows this kind of CPU)
    python tests/goldens/same_weights.py --update             (writes weights.json for this kind of CPU)

Exit codes: 0 the same, 1 they differ, 2 for a wrong flag or where nothing is known of this kind of CPU.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from commits import HOUSE, environment, extract


HERE = Path(__file__).resolve().parent
KNOWN = HERE / "weights.json"
DEMO = ("--config", "demo", "--max_train_steps", "40")
# All 40 steps with their warm-up and decay; the others have twelve, of a smaller network on a part of the images.
SMALL = (
    "--dataset_name", "fashion-mnist-mini", "--preset", "tiny-patch16-224", "--max_train_steps", "12",
    "--per_device_train_batch_size", "32", "--mixed_precision", "no", "--config_overrides",
)  # fmt: skip
FEW = ("--shots", "50")
NETWORK = "image_size=28,patch_size=7,hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=64"
CASES = {
    "demo": ("train.py", *DEMO),
    "adamw": (
        "train.py", *FEW, *SMALL, f"{NETWORK},drop_path_rate=0.2,hidden_dropout_prob=0.1,patch_dropout_rate=0.25", "--ema_decay", "0.9",
        "--gradient_accumulation_steps", "2", "--mixup", "0.2", "--cutmix", "0.5", "--erase", "0.3", "--color_jitter", "0.2",
        "--layer_decay", "0.8", "--auto_augment", "rand",
    ),
    "resumed": ("train.py", *FEW, *SMALL, f"{NETWORK},drop_path_rate=0.2", "--ema_decay", "0.9", "--optimizer", "muon"),
    "lora": (
        "train.py", "--dataset_name", "fashion-mnist-mini", "--shots", "50", "--model_name_or_path",
        str(HERE / "saved" / "ba8e6ca" / "classifier"), "--lora_rank", "4", "--max_train_steps", "12", "--mixed_precision", "no",
    ),
    "stream": (
        "train.py", "--dataset_name", "fashion-mnist-mini", "--streaming", "true", "--preset", "tiny-patch16-224", "--mixed_precision",
        "no", "--per_device_train_batch_size", "32", "--max_train_steps", "12", "--config_overrides", NETWORK,
    ),
    "pretrain": (
        "pretrain.py", *SMALL,
        f"{NETWORK},decoder_hidden_size=32,decoder_num_hidden_layers=1,decoder_num_attention_heads=4,decoder_intermediate_size=64",
    ),
}  # fmt: skip


def start(tree: Path, name: str, run: Path) -> subprocess.Popen:
    script, *flags = CASES[name]
    line = [sys.executable, "-W", "ignore", str(tree / "recipes" / script), *flags, "--output_dir", str(run)]
    line += ["--log_steps", "1"] * (name == "resumed")
    with run.with_suffix(".log").open("a") as log:
        return subprocess.Popen(line, cwd=run.parent, env=environment(tree), stdout=log, stderr=log)


def kill_after_a_step(process: subprocess.Popen, run: Path):
    """SIGTERM, as soon as a step is logged."""
    while process.poll() is None and not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size):
        time.sleep(0.005)
    process.terminate()
    if process.wait() != 75:
        raise RuntimeError(
            f"{run} was not stopped, exit code {process.returncode}:\n{run.with_suffix('.log').read_text()[-3000:]}"
        )


def run_case(name: str, trees: list[Path], home: Path) -> list[str]:
    """The sha256 of the weights that a case ends with, in each tree; both run at a time."""
    runs = [home / f"{name}-{number}" for number in range(len(trees))]
    processes = [start(tree, name, run) for tree, run in zip(trees, runs, strict=True)]
    if name == "resumed":
        for process, run in zip(processes, runs, strict=True):
            kill_after_a_step(process, run)
        processes = [start(tree, name, run) for tree, run in zip(trees, runs, strict=True)]
    for process, run in zip(processes, runs, strict=True):
        if process.wait() != 0:
            raise RuntimeError(f"{run} failed:\n{run.with_suffix('.log').read_text()[-3000:]}")
    return [hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest() for run in runs]


def kind_of_cpu() -> str:
    """What decides the last bit: the version of torch and the processor's family, which selects its matrix products."""
    import torch

    described = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines())
    described = {name.strip(): value.strip() for name, value in described.items()}
    cpu = " ".join(described.get(name, "?") for name in ("vendor_id", "cpu family", "model"))
    return f"torch {torch.__version__}, {cpu}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", nargs="?")
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, help="default: demo adamw resumed; without COMMIT, those known"
    )
    parser.add_argument("--update", action="store_true")
    args = parser.parse_args()
    known, kind = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}, kind_of_cpu()
    if args.commit is None and not args.update and kind not in known:
        parser.error(f"no weights are known for {kind}: name a COMMIT to compare with, or --update to write them")
    is_check = args.commit is None and not args.update
    cases = args.cases or (list(known[kind]) if is_check else ["demo", "adamw", "resumed"])
    found, differing = {}, []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        trees = [HOUSE] if args.commit is None else [HOUSE, extract(args.commit, home / "tree")]
        for name in cases:
            began = time.monotonic()
            found[name], *others = run_case(name, trees, home)
            wanted = others[0] if others else found[name] if args.update else known[kind].get(name)
            if found[name] != wanted:
                differing.append(name)
            says = "differs" if name in differing else "same"
            print(f"{name}: {says}, {found[name][:16]}, {time.monotonic() - began:.0f} s", flush=True)
    if args.update:  # weights of other kinds of CPU are out of date where those of this kind have changed
        before = known.get(kind, {})
        kept = known if {**found, **before} == {**before, **found} else {}
        KNOWN.write_text(json.dumps({**kept, kind: {**before, **found}}, indent=1) + "\n")
    sys.exit(f"other weights: {', '.join(differing)}" if differing else 0)


if __name__ == "__main__":
    main()

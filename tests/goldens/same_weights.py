"""Are trained weights still the same to the bit? Short runs of the recipes, one thread and AVX2 alone.

    python tests/goldens/same_weights.py COMMIT               (runs each case with the code of COMMIT too, and compares)
    python tests/goldens/same_weights.py COMMIT --cases demo  (40 steps of the demo alone)

The exit code is 1 if they differ.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from commits import HOUSE, environment, extract


# The demo has all of its warm-up and decay in 40 steps; the others have twelve, of a smaller network on a part of the images.
DATA = "--dataset_name fashion-mnist-mini --max_train_steps 12 --mixed_precision no"
SMALL = f"{DATA} --preset tiny-patch16-224 --per_device_train_batch_size 32 --config_overrides"
NETWORK = "image_size=28,patch_size=7,hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=64"
DROPS = "drop_path_rate=0.2,hidden_dropout_prob=0.1,patch_dropout_rate=0.25"
DECODER = (
    "decoder_hidden_size=32,decoder_num_hidden_layers=1,decoder_num_attention_heads=4,decoder_intermediate_size=64"
)
BASE = Path(__file__).parent / "saved" / "ba8e6ca" / "classifier"
CASES = {
    "demo": "train.py --config demo --max_train_steps 40",
    "adamw": f"""train.py {SMALL} {NETWORK},{DROPS} --shots 50 --ema_decay 0.9 --gradient_accumulation_steps 2 --mixup 0.2
        --cutmix 0.5 --erase 0.3 --color_jitter 0.2 --layer_decay 0.8 --auto_augment rand""",
    "muon": f"train.py {SMALL} {NETWORK},drop_path_rate=0.2 --shots 50 --ema_decay 0.9 --optimizer muon",
    "lora": f"train.py {DATA} --shots 50 --model_name_or_path {BASE} --lora_rank 4",
    "stream": f"train.py {SMALL} {NETWORK} --streaming true",
    "pretrain": f"pretrain.py {SMALL} {NETWORK},{DECODER}",
}


def run_case(name: str, trees: list[Path], home: Path) -> list[str]:
    """The sha256 of the weights that a case ends with, in each tree; both run at a time."""
    script, *flags = CASES[name].split()
    runs, processes = [home / f"{name}-{number}" for number in range(len(trees))], []
    for tree, run in zip(trees, runs, strict=True):
        line = [sys.executable, "-W", "ignore", str(tree / "recipes" / script), *flags, "--output_dir", str(run)]
        processes.append(subprocess.Popen(line, cwd=home, env=environment(tree)))
    if {process.wait() for process in processes} != {0}:
        raise RuntimeError(f"{name} failed")
    return [hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest() for run in runs]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["demo", "adamw", "muon"])
    args = parser.parse_args()
    differing = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        trees = [HOUSE, extract(args.commit, home / "tree")]
        for name in args.cases:
            began = time.monotonic()
            found, before = run_case(name, trees, home)
            says = "same" if found == before else "differs"
            differing += [name] * (found != before)
            print(f"{name}: {says}, {found[:16]}, {time.monotonic() - began:.0f} s", flush=True)
    sys.exit(f"other weights: {', '.join(differing)}" if differing else 0)


if __name__ == "__main__":
    main()

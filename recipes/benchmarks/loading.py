"""Import, `from_pretrained` of ViT-B and its peak memory, each in a process of its own, beside
native transformers.

python recipes/benchmarks/loading.py
python recipes/benchmarks/loading.py --output_file model_cards/benchmark.json
"""

import json
import statistics
import subprocess
import sys
import tempfile

from measuring import median_ratio, run_benchmark
from transformers import ViTConfig, ViTForImageClassification


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
if sys.argv[3] == "memory":
    threading.Thread(target=watch).start()
began = time.perf_counter()
model = Model.from_pretrained(sys.argv[2])
loaded = time.perf_counter() - began
over.set()
size = sum(parameter.nbytes for parameter in model.parameters())
print(json.dumps({"imported": imported, "loaded": loaded, "memory": max(0, peak - before) / size}))
"""


def load_once(library: str, folder: str) -> dict:
    """Seconds to import and to load, and the peak memory in sizes of the weights, which slows a process of its own."""
    seen = {}
    for measured in ("seconds", "memory"):
        command = [sys.executable, "-c", LOAD, library, folder, measured]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seen[measured] = json.loads(done.stdout.splitlines()[-1])
    return {**seen["seconds"], "memory": seen["memory"]["memory"]}


def measure(repeats: int) -> dict:
    turns = {"hf_vit": [], "transformers": []}
    with tempfile.TemporaryDirectory() as folder:
        ViTForImageClassification(ViTConfig(num_labels=1000)).save_pretrained(folder)
        for turn in range(repeats + 1):
            for library, seen in turns.items():
                found = load_once(library, folder)
                if turn > 0:  # the first round is warm-up
                    seen.append(found)
    medians = {
        library: {
            key: round(statistics.median(turn[key] for turn in seen), 3) for key in ("imported", "loaded", "memory")
        }
        for library, seen in turns.items()
    }
    loaded = {library: [turn["loaded"] for turn in seen] for library, seen in turns.items()}
    return {**medians, "loading_ratio": median_ratio(loaded["transformers"], loaded["hf_vit"])}


if __name__ == "__main__":
    run_benchmark("loading", measure, __doc__)

"""Claims about recipes/benchmarks/gpu.py, which is meant for a GPU: its stages work, end in time and are not measured twice."""

import json
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
from benchmarks import gpu
from datasets import ClassLabel, Dataset, Features, Image
from image_data import picture


SAVES = "import signal, time; signal.signal(15, lambda *_: (open('saved', 'w'), exit(75))); time.sleep(60)"


def write_parquet(folder, column, side, mode):
    folder.mkdir()
    kinds = Features({column: Image(), "label": ClassLabel(names=["cat", "dog"])})
    for name, count in (("train-00000-of-00002", 20), ("train-00001-of-00002", 20), ("test", 8)):
        rows = {
            column: [picture(number, (side, side), mode) for number in range(count)],
            "label": [0, 1] * (count // 2),
        }
        Dataset.from_dict(rows, kinds).to_parquet(folder / f"{name}.parquet")
    return folder


@pytest.mark.slow
def test_every_stage_works_and_is_measured_once(tmp_path):
    script = Path(gpu.__file__)
    command = [
        sys.executable, "-W", "ignore", script, "--output_dir", tmp_path / "out", "--tiny", "true", "--minutes", "60",
        "--cifar10", write_parquet(tmp_path / "cifar10", "img", 32, "RGB"),
        "--fashion_mnist", write_parquet(tmp_path / "fashion_mnist", "image", 28, "L"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert {name: result["error"] for name, result in results.items() if "error" in result} == {}
    assert tuple(results) == gpu.STAGES
    assert results["tests"]["collected"] >= 12
    assert results["cifar10"]["evaluations"][-1][2] == results["cifar10"]["metrics"]["accuracy"]
    assert subprocess.run(command, capture_output=True, text=True).stdout.count("\n") == 1  # nothing is left


def test_a_process_that_takes_too_long_is_asked_to_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "TO_STOP", 5)
    bench = gpu.Bench(Namespace(output_dir=tmp_path, tiny=True), time.monotonic() + 7, {})
    with pytest.raises(gpu.OutOfTime):
        bench.run([sys.executable, "-c", SAVES], cwd=tmp_path)
    assert (tmp_path / "saved").exists()


def test_a_process_is_asked_to_stop_when_the_script_is(tmp_path):
    """By SIGTERM, whose handler raises SystemExit; here by an alarm."""
    bench = gpu.Bench(Namespace(output_dir=tmp_path, tiny=True), time.monotonic() + 600, {})
    before = signal.signal(signal.SIGALRM, lambda *_: sys.exit(75))
    signal.setitimer(signal.ITIMER_REAL, 5)
    try:
        with pytest.raises(SystemExit):
            bench.run([sys.executable, "-c", SAVES], cwd=tmp_path)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (tmp_path / "saved").exists()


def test_a_gpu_is_needed_to_measure_one(tmp_path):
    with pytest.raises(ValueError, match="there is no CUDA device here: --tiny true checks the script without one"):
        gpu.main(gpu.parse_args(["--output_dir", str(tmp_path / "out")]))

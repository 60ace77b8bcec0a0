"""The code of another commit, to run beside that of this tree."""

import io
import os
import subprocess
import tarfile
from pathlib import Path


HOUSE = Path(__file__).resolve().parents[2]
# One thread and the instructions that every x86 CPU of the last ten years has: the same sums in the same order each time.
PINNED = {
    "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive",
}  # fmt: skip


def extract(commit: str, folder: Path) -> Path:
    """The files of a commit in a new folder: a copy that leaves nothing behind in .git, unlike a worktree that is interrupted."""
    archive = subprocess.run(["git", "archive", commit], cwd=HOUSE, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder


def environment(tree: Path) -> dict[str, str]:
    """Environment variables of a process that imports hf_vit from `tree`, whatever is installed."""
    return {**os.environ, **PINNED, "PYTHONPATH": str(tree)}

"""How much memory this process may take: of what the machine has left, and of what its control groups allow."""

import os
import re
from pathlib import Path

import psutil


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still take before the machine swaps or its container is ended: the least of what the system
    has available and what each control group (version 2) above the process leaves, shared with the other processes of the run.

    Args:
        root: where `proc/self/cgroup` and `sys/fs/cgroup` lie.
    """
    left, groups = [psutil.virtual_memory().available], root / "proc" / "self" / "cgroup"
    found = re.search("^0::/(.*)", groups.read_text(), re.MULTILINE) if groups.is_file() else None
    # In a container the path may be the host's, and the group's own files lie at the top.
    own = root / "sys" / "fs" / "cgroup" / (found[1] if found else "")
    for group in (own, *own.parents):
        if (group / "memory.max").is_file() and (most := (group / "memory.max").read_text().strip()) != "max":
            stat = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
            droppable = int(stat.get("inactive_file", 0))  # cached files
            left.append(int(most) - int((group / "memory.current").read_text()) + droppable)
    return max(0, min(left)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

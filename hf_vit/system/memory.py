"""How much memory this process may take: of what the machine has left, and of what its control groups allow."""

import os
from pathlib import Path

import psutil


# Where the limit of a control group stands, what it uses, and what of that are cached files, which it can drop: versions 2, 1.
VERSIONS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still take before the machine swaps or its container is ended: the least of what the system
    has available and what each control group above the process leaves, shared with the other processes of the run.

    Args:
        root: where `proc/self/cgroup` and `sys/fs/cgroup` lie.
    """
    left = [psutil.virtual_memory().available]
    groups = root / "proc" / "self" / "cgroup"
    for line in groups.read_text().splitlines() if groups.is_file() else []:
        _, controllers, own = line.split(":", 2)
        if controllers in VERSIONS:
            folder, limit, usage, cached = VERSIONS[controllers]
            top = root / "sys" / "fs" / "cgroup" / folder
            inside = top / own.lstrip("/")
            # In a container the path may be the host's, and the group's own files lie at the top.
            for group in (one for one in (inside, *inside.parents) if one.is_relative_to(top)):
                if (group / limit).is_file() and (most := (group / limit).read_text().strip()) != "max":
                    lines = (group / "memory.stat").read_text().splitlines()
                    droppable = next((int(line.split()[1]) for line in lines if line.split()[0] == cached), 0)
                    left.append(int(most) - int((group / usage).read_text()) + droppable)
    return max(0, min(left)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

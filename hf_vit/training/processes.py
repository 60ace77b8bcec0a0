"""Several processes of one run end together: the first failure is told to all, and nobody waits for hours for one that is gone."""

import contextlib
import os
import sys
import threading
import time
import traceback
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hf_vit.system.escapes import printable_lines


POLL_SECONDS = 1
PATIENCE_SECONDS = 3  # that a process which failed leaves the others to hear of it, for it may hold the store
TIMEOUT = timedelta(minutes=10)  # a collective of a training run; the longest thing one process does alone is to save
FAILED, HEARD = "hf_vit/failed", "hf_vit/heard"  # keys of the store


def _store():
    """A connection of its own to the store at which the processes met: it answers while a collective waits."""
    return distributed_c10d._get_default_store().clone()


def watch() -> threading.Event:
    """Look out for a process that fails (`leave_after`), and then end this one with exit code 1, whatever it waits for, until `part` sets the event that
    is returned.
    """
    over = threading.Event()
    if dist.is_initialized():
        threading.Thread(target=_look_out, args=(_store(), over), daemon=True).start()
    return over


def _look_out(store, over: threading.Event):
    while not over.wait(POLL_SECONDS):
        try:
            if not store.check([FAILED]):
                continue
            _tell(store.get(FAILED).decode())
            store.add(HEARD, 1)
        except RuntimeError:  # the process that held the store is gone
            if over.is_set():
                return
        os._exit(1)


def _tell(failure: str):
    """Say on the first process which other one failed first, and why."""
    rank, _, why = failure.partition(" ")
    if dist.get_rank() == 0:
        os.write(2, f"stopped, because process {rank} failed: {why}\n".encode())


def leave_after(error: Exception, in_a_sentence: bool):
    """Say what went wrong, in a sentence or with a traceback, tell the other processes, and leave with exit code 1.

    Where another process failed before, only the first process says so: the rest is what follows from it.
    """
    name = "" if in_a_sentence else f"{type(error).__name__}: "
    own = first = f"{dist.get_rank() if dist.is_initialized() else 0} {name}{error}"
    store = None
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # who held the store is gone
            store = _store()
            first = store.compare_set(FAILED, "", own).decode()
    if first != own:
        _tell(first)
    elif in_a_sentence:
        print(f"error: {printable_lines(error)}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    if not dist.is_initialized():
        sys.exit(1)
    with contextlib.suppress(RuntimeError):
        until = time.monotonic() + PATIENCE_SECONDS
        while store and first == own and time.monotonic() < until and store.add(HEARD, 0) < dist.get_world_size() - 1:
            time.sleep(0.1)
    os._exit(1)


def part(accelerator, over: threading.Event):
    """Wait for all processes, and let each of them leave: who leaves first takes connections and store along."""
    accelerator.wait_for_everyone()
    over.set()
    accelerator.wait_for_everyone()  # nobody is watched any more


def shorten_timeout(timeout: timedelta = TIMEOUT):
    """From now on, give up a collective after this time: a process that was killed cannot say that it failed."""
    if dist.is_initialized():
        distributed_c10d._set_pg_timeout(timeout)  # PyTorch has no public function for a group that is there

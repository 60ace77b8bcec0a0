"""Several processes of one run: what the main one decides reaches all, and the first failure ends all of them."""

import contextlib
import os
import sys
import threading
import time
import traceback
from datetime import timedelta

import torch.distributed as dist
from accelerate.utils import broadcast_object_list
from torch.distributed import distributed_c10d

from hf_vit.system.errors import is_users, one_line


POLL_SECONDS = 1
PATIENCE_SECONDS = 3  # that a process which failed leaves the others to hear of it, for it may hold the store
STEP_TIMEOUT = timedelta(minutes=10)  # while training: the longest thing one process does alone is to save
REPORT_TIMEOUT = timedelta(hours=1)  # at the end, it draws and publishes alone
FAILED, HEARD = "hf_vit/failed", "hf_vit/heard"  # keys of the store


def _store():
    """A connection of its own to the store at which the processes met: it answers while a collective waits."""
    return distributed_c10d._get_default_store().clone()


def watch_for_failures() -> threading.Event:
    """End this process with exit code 1 when another one fails (`exit_with_error`), whatever it is waiting for.

    It stops watching once `leave_together` sets the event that is returned.
    """
    over = threading.Event()
    if dist.is_initialized():
        threading.Thread(target=_watch, args=(_store(), over), daemon=True).start()
    return over


def _watch(store, over: threading.Event):
    while not over.wait(POLL_SECONDS):
        try:
            if not store.check([FAILED]):
                continue
            failure = store.get(FAILED).decode()
            if failure.startswith(f"{dist.get_rank()} "):  # its own: `exit_with_error` prints it and leaves
                return
            _report_failure(failure)
            store.add(HEARD, 1)
        except RuntimeError:  # the process that held the store is gone
            if over.is_set():
                return
        os._exit(1)


def _report_failure(failure: str):
    """Print on the main process which process failed first, and why."""
    rank, _, why = failure.partition(" ")
    if dist.get_rank() == 0:
        os.write(2, f"stopped, because process {rank} failed: {one_line(why)}\n".encode())


def exit_with_error(error: Exception):
    """Print the error, as a sentence or a traceback (`is_users`), tell the other processes, and leave with exit code 1.

    If another process failed first, only the main process says so: this error is a consequence.
    """
    in_a_sentence = is_users(error)
    name = "" if in_a_sentence else f"{type(error).__name__}: "
    own = first = f"{dist.get_rank() if dist.is_initialized() else 0} {name}{error}"
    store = None
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # who held the store is gone
            store = _store()
            first = store.compare_set(FAILED, "", own).decode()
    if first != own:
        _report_failure(first)
    elif in_a_sentence:
        print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
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


def leave_together(accelerator, over: threading.Event):
    """Wait for all processes before any leaves: the first to leave takes connections and store with it."""
    accelerator.wait_for_everyone()
    over.set()
    accelerator.wait_for_everyone()  # nobody is watched any more


def set_timeout(timeout: timedelta):
    """From now on, give up a collective after this time: a killed process cannot report its failure."""
    if dist.is_initialized():
        distributed_c10d._set_pg_timeout(timeout)  # PyTorch has no public function for a group that is there


def run_on_main(accelerator, act):
    """Call `act` on the main process and return its result on all; if it fails, all processes end.

    Raises:
        ValueError, OSError: on the main process, as `act` does; the others leave at once, silently.
    """
    result = [None]
    if accelerator.is_main_process:
        try:
            result = [act()]
        except (ValueError, OSError) as error:
            result = [error]
    broadcast_object_list(result)
    if isinstance(result[0], Exception):
        if not accelerator.is_main_process:
            os._exit(1)
        raise result[0]
    return result[0]

"""Several processes of one run: what the main one decides reaches all, and an error ends all of them."""

import os
import sys
import traceback
from datetime import timedelta

import torch.distributed as dist
from accelerate.utils import broadcast_object_list
from torch.distributed import distributed_c10d

from hf_vit.system.errors import is_users, one_line


STEP_TIMEOUT = timedelta(minutes=10)  # while training: the longest thing one process does alone is to save
REPORT_TIMEOUT = timedelta(hours=1)  # at the end, it draws and publishes alone


def exit_with_error(error: Exception):
    """Print the error, as a sentence or a traceback (`is_users`), and leave with exit code 1: the launcher ends the other processes."""
    if is_users(error):
        print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    if not dist.is_initialized():
        sys.exit(1)
    os._exit(1)  # threads of gloo may hang at exit


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

"""Several processes of one run: what the main one decides reaches all, and an error ends all of them."""

import os
import sys
import traceback
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate.utils import broadcast_object_list
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from hf_vit.system.errors import is_users, one_line


STEP_TIMEOUT = timedelta(minutes=10)  # while training: the longest thing one process does alone is to save
REPORT_TIMEOUT = timedelta(hours=1)  # at the end, it draws and publishes alone


def leave(code: int):
    """End this process at once: threads of gloo or of a stream may hang at an ordinary exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_with_error(error: Exception):
    """Print the error, as a sentence or a traceback (`is_users`), and leave with exit code 1: the launcher ends the other processes."""
    if is_users(error):
        print(f"error: {one_line(error)}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    if not dist.is_initialized():
        sys.exit(1)
    leave(1)


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


def local_tensors(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What this process has of each, all but for a DTensor (FSDP 2)."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]

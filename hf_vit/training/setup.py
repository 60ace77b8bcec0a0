"""The accelerator of a run or an evaluation: precision, processes, threads and seeds."""

import os
from datetime import timedelta

import datasets
import transformers
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, InitProcessGroupKwargs, set_seed

from hf_vit.system import hardware
from hf_vit.system.errors import UserError
from hf_vit.training.arguments import TrainArguments


def set_up_accelerator(args: TrainArguments) -> Accelerator:
    """Accelerate as this machine and the arguments want it.

    Raises:
        ValueError: for a launcher or tracker that the recipe does not support, and for Muon in float16.
    """
    accelerator = Accelerator(
        mixed_precision=hardware.pick_precision(args.mixed_precision, hardware.device_type()),
        log_with=known_trackers(args.report_to) or None,
        project_dir=args.output_dir,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=6))],  # one process may download for hours
    )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise UserError(
            f"{launched} processes were launched, but they found no GPU and would each train alone: to train on the CPU, put "
            "ACCELERATE_USE_CPU=true before the command"
        )
    hardware.shard_on_cpu(accelerator)
    hardware.keep_float32(accelerator)
    kind = accelerator.distributed_type
    unknown = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
    if kind in unknown or (kind == DistributedType.FSDP and not accelerator.is_fsdp2):
        raise UserError(f"{kind} is not known here: use FSDP 2 (recipes/accelerate/fsdp2.yaml) or DDP (ddp.yaml)")
    _set_up_process(accelerator)
    set_seed(args.seed)
    if not accelerator.is_main_process:
        transformers.utils.logging.set_verbosity_error()
    if args.optimizer == "muon" and accelerator.mixed_precision == "fp16":
        raise UserError("muon does not go with fp16, whose loss scaling knows one optimizer: use bf16, or adamw")
    return accelerator


def set_up_evaluation(mixed_precision: str) -> Accelerator:
    """Accelerate for a script that computes what a saved model answers."""
    accelerator = Accelerator(mixed_precision=hardware.pick_precision(mixed_precision, hardware.device_type()))
    _set_up_process(accelerator)
    return accelerator


def _set_up_process(accelerator: Accelerator):
    if accelerator.device.type == "cpu":
        hardware.use_all_cores()
        hardware.keep_memory()
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()


def known_trackers(names: str) -> list[str]:
    """`--report_to` as Accelerate takes it, which passes over a tracker whose library is not installed.

    Raises:
        ValueError: for a tracker that is not installed, or that Accelerate does not know.
    """
    asked = {name.strip() for name in names.split(",")} - {"", "none"}
    installed = {str(name) for name in get_available_trackers()}
    if missing := asked - installed:
        raise UserError(
            f"--report_to {', '.join(missing)}: install it; installed are {', '.join(installed) or 'none'}"
        )
    return sorted(asked)

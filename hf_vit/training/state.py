"""The state of a run: all that decides the rest of it.

Order, augmentation and the random numbers of a step are functions of (seed, epoch, step, image) and need not be saved.
"""

import json
import time
from collections import ChainMap
from pathlib import Path

import torch
from accelerate.utils import gather_object
from safetensors.torch import load_file

from hf_vit.system.errors import UserError
from hf_vit.training.checkpoints import as_sharded, full_tensors, save_checkpoint
from hf_vit.training.distributed import run_on_main
from hf_vit.training.ema import ModelEMA, trainable


COUNTERS = ("step", "epoch", "evaluated_step", "resumed_at", "skipped_steps", "tracker_ids", "seconds")


class TrainState:
    """Counters, and what learns: model, optimizers, average and loss scaler.

    Args:
        network: the model, unwrapped.
        images: to train on, which count what cannot be read, and a stream the lengths of its shards.
        began, training_began: when the process began, and its training; in a resumed run, by so much earlier as it has lasted.

    Attributes:
        step: optimizer steps taken.
        epoch: of the latest batch, from 0.
        evaluated_step, saved_step: the last step that was evaluated; that was saved, or resumed from.
        resumed_at, skipped_steps: steps at which the run was resumed; whose loss or gradient was not finite.
        tracker_ids: of the trackers' runs, by tracker.
        seconds: over all starts of the run: step, input (waiting for a batch, part of step), scoring, training (with what
            follows), total.
        sums: of this process since the last log line, (3,): loss, correct images, images.
        is_consistent: whether weights, optimizers and counters are all of one step.
    """

    def __init__(self, accelerator, network, optimizers: list, ema: ModelEMA | None, images, began, training_began):
        self.accelerator, self.network, self.optimizers, self.ema = accelerator, network, optimizers, ema
        self.images, self.began, self.training_began = images, began, training_began
        self.step = self.epoch = self.evaluated_step = self.saved_step = 0
        self.resumed_at, self.skipped_steps, self.tracker_ids = [], [], {}
        self.seconds = dict.fromkeys(("step", "input", "scoring", "training", "total"), 0.0)
        self.sums, self.is_consistent = torch.zeros(3, device=accelerator.device), True

    def timed(self, what: str, work):
        """What `work` returns; its time is added to `seconds[what]`."""
        began = time.monotonic()
        result = work()
        self.seconds[what] += time.monotonic() - began
        return result

    def clock(self) -> float:
        """Bring `seconds` up to this moment of training; how long this lasted without evaluation."""
        now = time.monotonic()
        self.seconds |= {"training": now - self.training_began, "total": now - self.began}
        return round(self.seconds["training"] - self.seconds["scoring"], 3)

    def weights(self) -> dict[str, dict[str, torch.Tensor]]:
        """Those that are trained and their average, each by the name of its file."""
        return {"model": trainable(self.network)} | ({} if self.ema is None else {"average": self.ema.weights})

    def optimizer_states(self) -> dict[str, tuple[torch.Tensor, dict]]:
        """A parameter, and what its optimizer keeps of it, by name."""
        return {
            name: (parameter, optimizer.state[parameter])
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for name, parameter in zip(group["names"], group["params"], strict=True)
        }

    def save(self, run: Path, identity: dict):
        """Write a checkpoint of this step; all processes must call it."""
        states = self.optimizer_states().items()
        kept = {f"{name}.{key}": value for name, (_, state) in states for key, value in state.items()}
        parts = {**self.weights(), "optimizer": kept}  # such as classifier.weight.exp_avg
        tensors = {file: full_tensors(part, self.accelerator.is_main_process) for file, part in parts.items()}
        lengths = getattr(self.images, "lengths", {})
        of_each = gather_object([(self.sums.tolist(), list(self.images.skipped), dict(lengths))])
        sums, skipped, lengths = zip(*of_each, strict=True)
        self.clock()
        counters = {
            **{name: getattr(self, name) for name in COUNTERS},
            "identity": identity,
            "average_step": self.ema and self.ema.step,
            "scaler": self.accelerator.scaler and self.accelerator.scaler.state_dict(),
            "sums": sums,
            "skipped_images": sorted(set().union(*skipped)),
            "lengths": dict(ChainMap(*lengths)),
        }
        run_on_main(self.accelerator, lambda: save_checkpoint(run, counters, tensors))
        self.saved_step = self.step

    def load(self, folder: Path):
        """Go on from a checkpoint of any number of processes; each of these reads its files.

        Raises:
            ValueError: if the tensors are not those of this model.
        """
        for file, part in self.weights().items():
            saved = load_file(folder / f"{file}.safetensors")
            shapes = [{name: tensor.shape for name, tensor in tensors.items()} for tensors in (saved, part)]
            if shapes[0] != shapes[1]:
                raise UserError(
                    f"{folder / file}.safetensors does not hold the weights of this model, by names and shapes"
                )
            for name, tensor in part.items():
                tensor.copy_(as_sharded(saved[name], tensor))
        states = self.optimizer_states()
        for name, value in load_file(folder / "optimizer.safetensors").items():
            parameter, state = states[name.rpartition(".")[0]]
            state[name.rpartition(".")[2]] = as_sharded(value, parameter)
        saved = json.loads((folder / "state.json").read_text())
        for name in COUNTERS:
            setattr(self, name, saved[name])
        self.resumed_at, self.saved_step = [*self.resumed_at, self.step], self.step
        self.began -= self.seconds["total"]
        self.training_began -= self.seconds["training"]
        if self.ema is not None:
            self.ema.step = saved["average_step"]
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(saved["scaler"])
        rank, sums = self.accelerator.process_index, torch.tensor(saved["sums"], device=self.accelerator.device)
        # (processes, 3); of another number of processes, the first one takes all
        self.sums = sums[rank] if len(sums) == self.accelerator.num_processes else sums.sum(dim=0) * (rank == 0)
        self.images.skipped.update(dict.fromkeys(saved["skipped_images"]))
        if saved["lengths"]:
            self.images.lengths = {int(shard): length for shard, length in saved["lengths"].items()}

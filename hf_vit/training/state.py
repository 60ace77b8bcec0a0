"""The state of a run: all that decides the rest of it, in one `state_dict`.

Order, augmentation and the random numbers of a step are functions of (seed, epoch, step, image) and need not be saved.
"""

import dataclasses
import time
from dataclasses import dataclass, field

import torch
from accelerate.utils import gather_object

from hf_vit.training.checkpoints import TENSORS, gather_state, restore_state
from hf_vit.training.ema import ModelEMA


SECONDS = ("training", "scoring", "input", "model", "total")


@dataclass
class Counters:
    """The numbers of state.json that all processes share.

    Args:
        step: optimizer steps taken.
        epoch: of the latest batch, from 0.
        evaluated_step: the last step that was evaluated.
        resumed_at: steps at which the run was resumed.
        skipped_steps: steps whose loss or gradient was not finite.
        tracker_ids: of the trackers' runs, by tracker.
        seconds: over all starts of the run: training (with what follows), scoring, input (waiting for a batch), model, total.
    """

    step: int = 0
    epoch: int = 0
    evaluated_step: int = 0
    resumed_at: list[int] = field(default_factory=list)
    skipped_steps: list[int] = field(default_factory=list)
    tracker_ids: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SECONDS, 0.0))


class TrainState(Counters):
    """Counters, and what learns: model, optimizers, average and loss scaler.

    Args:
        network: the model, unwrapped.
        images: to train on, which count what cannot be read, and a stream the lengths of its shards.

    Attributes:
        sums: of this process since the last log line, (3,): loss, correct images, images.
        saved_step: the last step that was saved, or resumed from.
        is_consistent: whether weights, optimizers and counters are all of one step.
    """

    def __init__(self, accelerator, network, optimizers: list, ema: ModelEMA | None, images, began: float):
        super().__init__()
        self.accelerator, self.network, self.optimizers, self.ema, self.images = (
            accelerator,
            network,
            optimizers,
            ema,
            images,
        )
        self.sums = torch.zeros(3, device=accelerator.device)
        self.saved_step, self.is_consistent = 0, True
        self.began = self.training_began = began

    def timed(self, what: str, work):
        """What `work` returns; its time is added to `seconds[what]`."""
        began = time.monotonic()
        result = work()
        self.seconds[what] += time.monotonic() - began
        return result

    @property
    def total_seconds(self) -> float:
        return self.seconds["total"] + time.monotonic() - self.began

    @property
    def training_seconds(self) -> float:
        """Of all starts of the run, without evaluation."""
        return round(self.seconds["training"] + time.monotonic() - self.training_began - self.seconds["scoring"], 3)

    def state_dict(self) -> dict:
        """Tensors by file and name, unsharded, on the main process, and the counters of state.json; all processes must call it."""
        tensors = gather_state(self.network, self.optimizers, self.ema, wanted=self.accelerator.is_main_process)
        own = {
            "sums": self.sums.tolist(),
            "skipped": list(self.images.skipped),
            "lengths": dict(getattr(self.images, "lengths", {})),
        }
        of_each = gather_object([own])
        seconds = {**self.seconds, "total": self.total_seconds}
        seconds["training"] += time.monotonic() - self.training_began
        return {
            **{one.name: getattr(self, one.name) for one in dataclasses.fields(Counters)},
            "seconds": seconds,
            "average_step": self.ema and self.ema.step,
            "scaler": self.accelerator.scaler and self.accelerator.scaler.state_dict(),
            "sums": [one["sums"] for one in of_each],
            "skipped_images": sorted({text for one in of_each for text in one["skipped"]}),
            "lengths": {shard: length for one in of_each for shard, length in one["lengths"].items()},
            **tensors,
        }

    def load_state_dict(self, state: dict):
        """Go on from what `state_dict` returned, of any number of processes; the tensors are those of the main process.

        Raises:
            ValueError: if the tensors are not those of this model.
        """
        tensors = {name: state[name] for name in TENSORS if name in state}
        restore_state(tensors or None, self.network, self.optimizers, self.ema, self.accelerator)
        for one in dataclasses.fields(Counters):
            setattr(self, one.name, state[one.name])
        self.resumed_at, self.saved_step = [*self.resumed_at, self.step], self.step
        if self.ema is not None:
            self.ema.step = state["average_step"]
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        rank, sums = self.accelerator.process_index, torch.tensor(state["sums"], device=self.accelerator.device)
        # (processes, 3); of another number of processes, the first one takes all
        self.sums = sums[rank] if len(sums) == self.accelerator.num_processes else sums.sum(dim=0) * (rank == 0)
        self.images.skipped.update(dict.fromkeys(state["skipped_images"]))
        if hasattr(self.images, "lengths"):
            self.images.lengths = {int(shard): length for shard, length in state["lengths"].items()}

"""What decides the rest of a run beside its tensors."""

import dataclasses
import time
from dataclasses import dataclass, field

from hf_vit.system.run_files import NUMBER, OPTIONAL


SCALAR = (str, int, float, bool, type(None))
STATE_SHAPE = {  # of a state.json that somebody else may have written
    "step": int,
    "epoch": int,
    "scored_step": int,
    "resumed_at": [int],
    "skipped_steps": [int],
    "skipped_images": [str],
    "average_step": (OPTIONAL, int),
    "scaler": (OPTIONAL, {str: NUMBER}),
    "lengths": {str: int},
    "sums": [[NUMBER, 3]],
    "seconds": dict.fromkeys(("training", "scoring", "input", "model", "total"), NUMBER),
    "facts": {str: SCALAR},
    "lives": (OPTIONAL, [dict]),
    "config": {str: SCALAR},
}


@dataclass
class TrainState:
    """Exactly what state.json holds.

    While a run is at work, some live elsewhere and are filled in by `Run.save`: sums, skipped images and lengths of this
    process, the average's and the scaler's state, and the seconds since this start.

    Args:
        step: optimizer steps taken.
        epoch: of the latest batch, from 0.
        scored_step: the last step that was evaluated.
        resumed_at: steps at which the run was resumed.
        skipped_steps: steps whose loss or gradient was not finite.
        average_step: updates of the moving average, None without one.
        scaler: state of the float16 loss scaler, None without one.
        sums: of each process, since the last log line: loss, correct images, images.
        skipped_images: names of the training images that could not be read.
        lengths: images in each shard of a stream that was read to its end.
        seconds: in all lives of the run: training (with what follows), scoring, input (waiting for a batch), model, total.
        facts: the `run_signature`.
        lives: one entry per start of the run (`lives.life`).
        config: the arguments, as config.yaml holds them.
    """

    step: int = 0
    epoch: int = 0
    scored_step: int = 0
    resumed_at: list[int] = field(default_factory=list)
    skipped_steps: list[int] = field(default_factory=list)
    average_step: int | None = None
    scaler: dict | None = None
    sums: list[list[float]] = field(default_factory=list)
    skipped_images: list[str] = field(default_factory=list)
    lengths: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("training", "scoring", "input", "model", "total"), 0.0)
    )
    facts: dict = field(default_factory=dict)
    lives: list[dict] = field(default_factory=list)
    config: dict = field(default_factory=dict)

    def timed(self, what: str, work):
        """What `work` returns; its time is added to `seconds[what]`."""
        began = time.monotonic()
        result = work()
        self.seconds[what] += time.monotonic() - began
        return result

    @classmethod
    def from_json(cls, saved: dict) -> "TrainState":
        """Of a state.json; other versions may hold fewer keys, or more."""
        return cls(**{name.name: saved[name.name] for name in dataclasses.fields(cls) if name.name in saved})

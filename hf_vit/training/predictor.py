"""What a model answers to a whole split, on all processes."""

from dataclasses import dataclass
from typing import Any

from hf_vit.data.loader import data_loader
from hf_vit.data.sampling import sequential_batches
from hf_vit.evaluation.prediction import gather_rows, predict
from hf_vit.training.signals import Signals


@dataclass
class SplitPredictor:
    """Gives every process the answers to all images of a split, each process having computed its share.

    Args:
        batch_size: images of a process and a forward pass.
    """

    accelerator: Any
    batch_size: int
    num_workers: int | None
    signals: Signals

    def is_stopped(self) -> bool:
        return self.signals.received is not None

    def batches(self, images):
        """Those of this process."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        return data_loader(images, sequential_batches(len(images), self.batch_size, rank, world), self.num_workers)

    def predict(self, model, images, spec, split: str, features: bool = False, may_stop: bool = True):
        """Logits (n, L) or features (n, D), and rows (n,), see `evaluation.prediction.predict`; None if a signal came."""
        stopped = self.is_stopped if may_stop else lambda: False
        return predict(model, self.batches(images), spec, self.accelerator, len(images), features, stopped, split)

    def gather(self, answer, images, split: str):
        """What `answer` gives to each batch (b, K), of all images (n, K), and rows (n,); None if a signal came."""
        return gather_rows(answer, self.batches(images), self.accelerator, len(images), self.is_stopped, split)

"""What a model answers to a whole split, on all processes."""

from dataclasses import dataclass
from typing import Any

from hf_vit.data.loader import data_loader
from hf_vit.data.sampling import sequential_batches
from hf_vit.evaluation.prediction import batch_predictor, gather_rows
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

    def gather(self, answer, images, split: str):
        """What `answer` gives to each batch (b, K), of all images (n, K), and rows (n,); None if a signal came."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        batches = data_loader(images, sequential_batches(len(images), self.batch_size, rank, world), self.num_workers)
        stopped = lambda: self.signals.received is not None
        return gather_rows(answer, batches, self.accelerator, len(images), stopped, split)

    def predict(self, model, images, spec, split: str, features: bool = False):
        """Logits (n, L) or the features (n, D) that the head reads, and rows (n,); None if a signal came."""
        with batch_predictor(model, spec, self.accelerator, features) as predict_batch:
            return self.gather(lambda batch: predict_batch(batch["images"]), images, split)

"""An exponential moving average of the weights."""

import contextlib

import torch
from torch import nn

from hf_vit.training.distributed import local_tensors


def trainable(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights that a run changes, by name; those that are frozen are the base model's."""
    return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}


class ModelEMA:
    """Exponential moving average of the trainable weights, `average += (1 - decay) * (weights - average)`.

    The decay warms up as min(decay, (1 + step) / (10 + step)), so that a short run does not remember its start
    (the schedule of TensorFlow's ExponentialMovingAverage). Of a sharded model each process averages its own shard.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay, self.step = decay, 0
        self.weights = {name: weight.clone() for name, weight in trainable(model).items()}

    def update(self, model: nn.Module):
        decay = min(self.decay, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(local_tensors(self.weights.values()), local_tensors(trainable(model).values()), 1 - decay)
        self.step += 1

    @contextlib.contextmanager
    def applied(self, model: nn.Module):
        """The model with the averaged weights in it, meanwhile."""
        weights = local_tensors(trainable(model).values())
        kept = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, local_tensors(self.weights.values()))
        try:
            yield model
        finally:
            torch._foreach_copy_(weights, kept)

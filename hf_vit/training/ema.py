"""An exponential moving average of the weights."""

import contextlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class ModelEMA:
    """Exponential moving average of the trainable weights, `average += (1 - decay) * (weights - average)`.

    The decay warms up as min(decay, (1 + step) / (10 + step)), so that a short run does not remember its start
    (the schedule of TensorFlow's ExponentialMovingAverage). Of a sharded model each process averages its own shard.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay, self.step = decay, 0
        self.weights = [weight.clone() for weight in self._trainable(model)]

    @staticmethod
    def _trainable(model: nn.Module) -> list[torch.Tensor]:
        weights = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
        return [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]

    def update(self, model: nn.Module):
        decay = min(self.decay, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self.weights, self._trainable(model), 1 - decay)
        self.step += 1

    def copy_from(self, model: nn.Module):
        """Set the average to the model's weights."""
        torch._foreach_copy_(self.weights, self._trainable(model))

    @contextlib.contextmanager
    def applied(self, model: nn.Module):
        """The model with the averaged weights in it, meanwhile."""
        weights = self._trainable(model)
        kept = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, self.weights)
        try:
            yield model
        finally:
            torch._foreach_copy_(weights, kept)

"""What the residual branches of a layer may have beside attention and the plain MLP: a gated MLP, LayerScale, drop path.

Letters of the shapes: B batch, D hidden size, F width of the MLP.
"""

import torch
from torch import nn
from transformers.activations import ACT2FN

from .configuration_hf_vit import HFViTConfig


class HFViTGatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)): three dense layers; SwiGLU if the activation is "silu" (arXiv 2002.05202, equation 6)."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states):
        gate = self.activation(self.gate_proj(hidden_states))  # (..., D) -> (..., F)
        return self.down_proj(gate * self.up_proj(hidden_states))  # (..., F) -> (..., D)


class HFViTLayerScale(nn.Module):
    """A learned factor for each channel of a residual branch (arXiv 2103.17239, section 2)."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.lambda1 = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, hidden_states):
        return hidden_states * self.lambda1  # (..., D)


class HFViTDropPath(nn.Module):
    """Drop the residual branch of whole samples while training (stochastic depth, arXiv 1603.09382, section 3)."""

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability

    def forward(self, hidden_states):
        if not self.training or self.probability == 0:
            return hidden_states
        keep = hidden_states.new_empty(hidden_states.shape[0], 1, 1).bernoulli_(1 - self.probability)  # (B, 1, 1)
        return hidden_states * keep / (1 - self.probability)

"""What is optimised, by which optimizer, at which rate."""

import math
import re

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_vit.training.muon import Muon


BETA1 = 0.9
# Learned vectors, not maps between vectors: weight decay would pull them to zero for no reason (arXiv 2010.11929, B.1).
NO_DECAY = (
    "cls_token", "distillation_token", "register_tokens", "mask_token", "probe", "position_embeddings", "lambda1"
)  # fmt: skip


def layer_id(name: str, num_layers: int) -> int:
    """0 for parameters of the embeddings, i + 1 of layer i, num_layers + 1 after the layers, a decoder among them."""
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    if layer:
        return int(layer[1]) + 1
    return 0 if re.search(r"(?:^|\.)embeddings\.", name) else num_layers + 1


def parameter_groups(
    model: nn.Module, weight_decay: float, layer_decay: float = 1.0, head_scale: float = 1.0
) -> list[dict]:
    """The trainable parameters as an optimizer takes them, each group with its names and its `lr_scale`, and whether it is of the
    matrices of the layers (`hidden`).

    Weight decay is for matrices: not for biases, norms, tokens, positions and layer scale. Layer-wise learning rate decay (BEiT,
    arXiv 2106.08254, section 3.2): k layers below the head, the rate is layer_decay ** k of the head's. The classifier, whose
    weights start at zero for new classes, learns at `head_scale` times its rate (arXiv 2202.10054: a backbone that moves before
    its head fits is distorted).
    """
    layers, groups = model.config.num_hidden_layers, {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = parameter.ndim > 1 and name.rpartition(".")[2] not in NO_DECAY
        hidden = decays and "layers." in name  # also "decoder_layers."
        scale = layer_decay ** (layers + 1 - layer_id(name, layers))
        if re.search(r"(?:^|\.)classifier\.", name):
            scale *= head_scale
        group = {"params": [], "names": [], "weight_decay": weight_decay * decays, "lr_scale": scale, "hidden": hidden}
        group = groups.setdefault((not decays, hidden, scale), group)
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def build_optimizers(
    model: nn.Module,
    kind: str,
    learning_rate: float,
    weight_decay: float,
    beta2: float,
    layer_decay: float = 1.0,
    head_scale: float = 1.0,
) -> list[torch.optim.Optimizer]:
    """ "adamw": AdamW for all parameters. "muon": Muon for the matrices of the layers, AdamW for the rest, with one rate and decay.

    Call `set_learning_rate` before each step.
    """
    hidden, others = [], []
    for group in parameter_groups(model, weight_decay, layer_decay, head_scale):
        (hidden if kind == "muon" and group["hidden"] else others).append(group)
    fused = next(model.parameters()).device.type in ("cuda", "cpu")
    adamw = torch.optim.AdamW(others, lr=learning_rate, betas=(BETA1, beta2), fused=fused)
    return [adamw, Muon(hidden, lr=learning_rate)] if hidden else [adamw]


def learning_rate(step: int, total_steps: int, warmup_steps: int, peak: float, schedule: str = "cosine") -> float:
    """The rate of a step, counted from 0: a linear warm-up to `peak`, and then

    "cosine": half a cosine to 0 (arXiv 1608.03983, equation 5, one period);
    "linear": a line to 0;
    "constant": `peak`;
    "step": `peak`, and a tenth of it in the second half of all steps.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    if schedule == "linear":
        return peak * (1 - progress)
    return peak * 0.1 if schedule == "step" and 2 * step >= total_steps else peak


def set_learning_rate(optimizers: list[torch.optim.Optimizer], rate: float):
    """The schedule's rate times the `lr_scale` of each group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]


def clip_gradients(accelerator, model, largest: float) -> torch.Tensor:
    """The norm of all gradients together, (), before they are scaled down to `largest`, where that is above 0."""
    norm = accelerator.clip_grad_norm_(model.parameters(), largest or math.inf)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def is_finite(loss: torch.Tensor, norm: torch.Tensor, scale: float) -> torch.Tensor:
    """Whether a step may be taken, (): its loss and gradient are finite.

    In float16 a gradient may overflow because the loss is scaled up; the scaler then skips the step and halves its scale
    ("Mixed Precision Training", arXiv 1710.03740, section 3.2). At a scale of 1, which 16 such steps in a row reach, an
    overflow is no longer the scaler's. Without a scaler `scale` is 1.
    """
    return loss.isfinite() & (norm.isfinite() | (scale > 1))

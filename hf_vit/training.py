"""The parts of a run that are not its loop: the model to train, parameter groups, schedule, precision, average, scores."""

import copy
import math
import os
from pathlib import Path

import evaluate
import psutil
import torch
from torch import nn
from transformers import AutoImageProcessor, ViTImageProcessorPil

from .augment import normalize
from .configuration_hf_vit import HFViTConfig, as_pair
from .modeling_hf_vit import HFViTForImageClassification


# Learned vectors, not maps between vectors: weight decay would pull them to zero for no reason (arXiv 2010.11929, B.1).
UNDECAYED = ("cls_token", "distillation_token", "register_tokens", "probe", "position_embeddings", "lambda1")


def split_decay(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of trained parameters that decay (matrices) and that do not (biases, norms, tokens, positions, layer scale)."""
    decayed, undecayed = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            matrix = parameter.ndim > 1 and name.rpartition(".")[2] not in UNDECAYED
            (decayed if matrix else undecayed).append(name)
    return decayed, undecayed


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """The two groups of `split_decay` as an optimizer takes them."""
    decayed, undecayed = split_decay(model)
    parameters = dict(model.named_parameters())
    return [
        {"params": [parameters[name] for name in decayed], "weight_decay": weight_decay},
        {"params": [parameters[name] for name in undecayed], "weight_decay": 0.0},
    ]


def build_optimizers(
    model: nn.Module, kind: str, learning_rate: float, weight_decay: float, betas: tuple[float, float]
) -> list[torch.optim.Optimizer]:
    """ "adamw": AdamW for all. "muon": Muon for the matrices of the layers, and AdamW for the rest.

    Muon steps along the orthogonalised momentum; scaled as in arXiv 2502.16982 (section 2.2) it takes AdamW's learning
    rate and decay.
    """
    groups = parameter_groups(model, weight_decay)
    hidden = []
    if kind == "muon":
        names = [name for name in split_decay(model)[0] if ".layers." in name]
        hidden = [model.get_parameter(name) for name in names]
        chosen = {id(parameter) for parameter in hidden}
        groups[0]["params"] = [parameter for parameter in groups[0]["params"] if id(parameter) not in chosen]
    fused = next(model.parameters()).device.type in ("cuda", "cpu")
    optimizers = [torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)]
    if hidden:
        optimizers.append(
            torch.optim.Muon(hidden, lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    return optimizers


def learning_rate(step: int, total_steps: int, warmup_steps: int, peak: float) -> float:
    """Linear warm-up to `peak`, then half a cosine to 0 (arXiv 1608.03983, equation 5, one period); steps count from 0."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def soft_targets(labels: torch.Tensor, num_labels: int, smoothing: float) -> torch.Tensor:
    """Class indices (B,) -> probabilities (B, L): 1 - smoothing for the class, and smoothing spread over all L classes."""
    return nn.functional.one_hot(labels, num_labels) * (1 - smoothing) + smoothing / num_labels


def build_model(
    labels: list[str], checkpoint: str | None, preset: str | None, image_size: int | None, overrides: dict
):
    """A model with a head for `labels`, and its image processor: from `checkpoint`, else from scratch as `preset` says.

    The head of a checkpoint is kept only where it was trained for these labels in this order.
    """
    fields = dict(overrides) if image_size is None else {**overrides, "image_size": image_size}
    fields["id2label"] = dict(enumerate(labels))
    if checkpoint is None:
        model = HFViTForImageClassification(HFViTConfig.from_preset(preset, **fields))
        source = ViTImageProcessorPil()
    else:
        before = HFViTConfig.from_pretrained(checkpoint).id2label
        model = HFViTForImageClassification.from_pretrained(checkpoint, **fields)
        if list(before.values()) != labels:
            nn.init.zeros_(model.classifier.weight)
            nn.init.zeros_(model.classifier.bias)
        source = AutoImageProcessor.from_pretrained(checkpoint)
    height, width = as_pair(model.config.image_size)
    channels = model.config.num_channels
    a_channel = lambda values: list(values) if len(values) == channels else [sum(values) / len(values)] * channels
    processor = ViTImageProcessorPil(
        size={"height": height, "width": width},
        resample=source.resample,
        image_mean=a_channel(source.image_mean),
        image_std=a_channel(source.image_std),
        do_convert_rgb=channels == 3,
    )
    return model, processor


def pick_precision(asked: str, device_type: str) -> str:
    """ "auto" -> "bf16" where the hardware computes in it, else "no" (or "fp16" on an older GPU).

    On CPU that means AMX or AVX512-BF16; without them bf16 is emulated, many times slower than float32. Very narrow models
    lose by it everywhere: their presets say "no".
    """
    if asked != "auto":
        return asked
    if device_type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    features = torch.cpu.get_capabilities() if device_type == "cpu" else {}
    return "bf16" if features.get("amx_bf16") or features.get("avx512_bf16") else "no"


def use_all_cores():
    """Give a process on CPU its share of the cores: `accelerate launch` leaves it one thread, at about half the speed."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.get_num_threads() == 1:
        torch.set_num_threads(max(1, (psutil.cpu_count(logical=False) or 1) // processes))


def pick_compile(asked: str, device_type: str) -> bool:
    """ "auto" -> compile on CUDA; on CPU compiling takes longer than it saves."""
    return device_type == "cuda" if asked == "auto" else asked == "yes"


class AverageModel:
    """Exponential moving average of the weights, `average += (1 - decay) * (weights - average)`.

    The decay warms up as min(decay, (1 + step) / (10 + step)), so that a short run does not average in its start
    (the schedule of TensorFlow's ExponentialMovingAverage).
    """

    def __init__(self, model: nn.Module, decay: float):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay, self.step = decay, 0

    @torch.no_grad()
    def update(self, model: nn.Module):
        decay = min(self.decay, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(list(self.model.parameters()), list(model.parameters()), 1 - decay)
        self.step += 1


@torch.no_grad()
def predict(model, batches, form, accelerator, count: int) -> torch.Tensor:
    """Logits (count, L) in float32 for the rows 0 to count - 1, on every process, each row counted once.

    Args:
        batches: this process's share, dicts of `images` uint8 (b, C, H, W) and `index` (b,); shares do not overlap.
        form: the `data.ImageForm` of the model's images.
    """
    was_training = model.training
    model.eval()
    table = None
    for batch in batches:
        images = batch["images"].to(accelerator.device, non_blocking=True)
        with accelerator.autocast():
            logits = model(normalize(images, form)).logits.float()  # (b, L)
        if table is None:
            table = torch.zeros(count, logits.shape[1], device=logits.device)
        table[batch["index"].to(logits.device)] = logits
    model.train(was_training)
    if accelerator.num_processes > 1:
        labels = model.config.num_labels
        table = torch.zeros(count, labels, device=accelerator.device) if table is None else table
        table = accelerator.reduce(table, reduction="sum")
    return table.cpu()


def score(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Logits (n, L) and class indices (n,) -> {"accuracy": in [0, 1], "loss": mean cross-entropy}."""
    accuracy = evaluate.load(str(Path(__file__).parent / "metrics" / "accuracy.py"))
    metrics = accuracy.compute(predictions=logits.argmax(1).tolist(), references=labels.tolist())
    return {**metrics, "loss": nn.functional.cross_entropy(logits, labels).item()}

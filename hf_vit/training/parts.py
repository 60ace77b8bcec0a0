"""The parts of a run that are not its loop: the model to train, parameter groups, schedule, losses, average, scores."""

import contextlib
import copy
import functools
import importlib.util
import math
import re
from pathlib import Path

import evaluate
import numpy as np
import torch
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    PreTrainedConfig,
    ViTImageProcessorPil,
)
from transformers.utils import logging

from hf_vit.data.columns import match_labels
from hf_vit.data.image_spec import ImageSpec, eval_resize, image_spec_of
from hf_vit.data.normalization import normalize
from hf_vit.evaluation import metrics
from hf_vit.formats.checkpoints import timm_input_size
from hf_vit.formats.timm_processor import timm_processor
from hf_vit.model.configuration_hf_vit import HFViTConfig, as_pair, labels_by_id
from hf_vit.model.loading import base_of_adapter
from hf_vit.model.modeling_hf_vit import HFViTForImageClassification, HFViTLayer
from hf_vit.system.hub_names import refuse_mistyped_path
from hf_vit.training.muon import Muon


logger = logging.get_logger(__name__)


# ----------------------------------------------------------------------------------------------------------------------
# What is optimised

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


def depth(name: str, num_layers: int) -> int:
    """Where a parameter stands: 0 in the embeddings, i + 1 in layer i, num_layers + 1 behind the layers."""
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    if layer:
        return int(layer[1]) + 1
    return 0 if re.search(r"(?:^|\.)embeddings\.", name) else num_layers + 1


def parameter_groups(model: nn.Module, weight_decay: float, layer_decay: float = 1.0) -> list[dict]:
    """The trained parameters as an optimizer takes them, each group with its names and its `lr_scale`.

    Layer-wise learning rate decay (BEiT, arXiv 2106.08254, section 3.2): what stands k steps below the head learns at
    layer_decay ** k of the head's rate. 1 makes two groups: what decays, and what does not.
    """
    decayed, undecayed = split_decay(model)
    layers = model.config.num_hidden_layers
    groups: dict[tuple, dict] = {}
    for names, decay in ((decayed, weight_decay), (undecayed, 0.0)):
        for name in names:
            scale = layer_decay ** (layers + 1 - depth(name, layers))
            group = groups.setdefault(
                (decay > 0, scale), {"params": [], "names": [], "weight_decay": decay, "lr_scale": scale}
            )
            group["params"].append(model.get_parameter(name))
            group["names"].append(name)
    return list(groups.values())


def build_optimizers(
    model: nn.Module,
    kind: str,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    layer_decay: float = 1.0,
) -> list[torch.optim.Optimizer]:
    """ "adamw": AdamW for all. "muon": Muon for the matrices of the layers, and AdamW for the rest, with one rate and decay.

    The rate of each group is to be set before each step, as the schedule's rate times its `lr_scale`.
    """
    decayed = set(split_decay(model)[0])
    is_hidden = lambda name: kind == "muon" and name in decayed and ".layers." in name
    hidden, others = [], []
    for group in parameter_groups(model, weight_decay, layer_decay):
        for groups, wanted in ((hidden, True), (others, False)):
            names = [name for name in group["names"] if is_hidden(name) is wanted]
            if names:
                groups.append({**group, "names": names, "params": [model.get_parameter(name) for name in names]})
    fused = next(model.parameters()).device.type in ("cuda", "cpu")
    optimizers = [torch.optim.AdamW(others, lr=learning_rate, betas=betas, fused=fused)] if others else []
    if hidden:
        optimizers.append(Muon(hidden, lr=learning_rate))
    return optimizers


def learning_rate(
    step: int,
    total_steps: int,
    warmup_steps: int,
    peak: float,
    schedule: str = "cosine",
    decay: float = 0.2,
    stages: int = 2,
) -> float:
    """The rate of a step, counted from 0: a linear warm-up to `peak`, and then

    "cosine": half a cosine to 0 (arXiv 1608.03983, equation 5, one period);
    "linear": a line to 0;
    "constant": `peak`;
    "wsd": `peak`, and in the last `decay` of all steps a line to 0 (warm-up, stable, decay: arXiv 2404.06395, section 4);
    "step": as many equally long `stages`, each at a tenth of the rate of the one before.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    if schedule == "linear":
        return peak * (1 - progress)
    if schedule == "wsd":
        return peak * min(1.0, (total_steps - step) / max(1, round(decay * total_steps)))
    return peak * 0.1 ** (step * stages // total_steps) if schedule == "step" else peak


# ----------------------------------------------------------------------------------------------------------------------
# Losses


def soft_targets(labels: torch.Tensor, num_labels: int, smoothing: float) -> torch.Tensor:
    """Class indices (B,) -> probabilities (B, L): 1 - smoothing for the class, and smoothing spread over all L classes."""
    return nn.functional.one_hot(labels, num_labels) * (1 - smoothing) + smoothing / num_labels


def loss_of(logits, targets, kind: str = "cross_entropy", weights: torch.Tensor | None = None) -> torch.Tensor:
    """Mean loss of the images, in float32.

    Args:
        logits, targets: (B, L); targets are probabilities.
        kind: "cross_entropy", or "binary_cross_entropy", a yes or no for each label, mean of the labels
            (arXiv 2110.00476, section 2.2).
        weights: (L,), how much each label's part counts.
    """
    logits = logits.float()
    if kind == "cross_entropy":
        return nn.functional.cross_entropy(logits, targets, weight=weights)
    weights = torch.ones_like(targets[0]) if weights is None else weights
    each = nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")  # (B, L)
    return (each.mean(dim=1) * (targets * weights).sum(dim=1)).mean()


def distillation_loss(logits, teacher_logits, temperature: float) -> torch.Tensor:
    """temperature^2 KL(teacher || student) of the softened probabilities, mean of the images (arXiv 1503.02531, section 2)."""
    log_student = (logits.float() / temperature).log_softmax(dim=1)
    log_teacher = (teacher_logits.float() / temperature).log_softmax(dim=1)
    return temperature**2 * nn.functional.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True)


class Teacher:
    """Any image classifier, asked about the student's own pixels.

    Args:
        checkpoint: Hub id or folder of an `AutoModelForImageClassification` that knows the student's labels by name.
        labels: the student's.
        form: of the student's images.

    Raises:
        ValueError: if it does not know one of the labels.
    """

    def __init__(self, checkpoint: str, labels: list[str], form: ImageSpec, device):
        self.model = load_classifier(checkpoint, dtype=torch.float32).to(device).eval().requires_grad_(False)
        self.own, self.students = image_spec_of(load_processor(checkpoint), self.model.config), form
        try:
            columns = match_labels(torch.arange(len(labels)), labels, self.model.config.id2label)
        except ValueError as error:
            raise ValueError(f"--teacher_name_or_path {checkpoint}: {error}") from error
        if self.own.processor is not None:
            raise ValueError(
                f"--teacher_name_or_path {checkpoint}: its {type(self.own.processor).__name__} does more to an image than "
                "resize and normalise, which a teacher's must not; take another teacher"
            )
        if self.own.channels != form.channels:
            raise ValueError(
                f"--teacher_name_or_path {checkpoint} looks at {self.own.channels} channels, the student at {form.channels}"
            )
        self.columns = columns.to(device)

    @torch.no_grad()
    def __call__(self, pixel_values):
        """The student's normalised pixels (B, C, H, W) -> the teacher's logits for the student's labels (B, L)."""
        channels = lambda values: torch.tensor(values, device=pixel_values.device).view(1, -1, 1, 1)
        pixels = pixel_values * channels(self.students.std) + channels(self.students.mean)
        size = (self.own.height, self.own.width)
        if tuple(pixels.shape[2:]) != size:
            pixels = nn.functional.interpolate(pixels, size=size, mode="bilinear", antialias=True)
        pixels = (pixels - channels(self.own.mean)) / channels(self.own.std)
        return self.model(pixels).logits[:, self.columns]


# ----------------------------------------------------------------------------------------------------------------------
# The model


def load_processor(checkpoint: str):
    """The image processor of a checkpoint; of a timm repo, what its `pretrained_cfg` says; else, with a warning, ViT's own."""
    config = PreTrainedConfig.get_config_dict(checkpoint)[0]
    if config.get("pretrained_cfg") is not None:
        timm_input_size(config)
        return timm_processor(config["pretrained_cfg"], checkpoint)
    try:
        return AutoImageProcessor.from_pretrained(checkpoint, trust_remote_code=False)
    except OSError:
        processor, config = ViTImageProcessorPil(), HFViTConfig.from_pretrained(checkpoint)
        processor.size = dict(zip(("height", "width"), as_pair(config.image_size), strict=True))
        logger.warning(
            f"{checkpoint} has no preprocessor_config.json: nothing says how its images were normalised; mean "
            f"{processor.image_mean} and std {processor.image_std} are taken. Where that is wrong, save the right image "
            "processor beside it"
        )
        return processor
    except ValueError:
        raise
    except Exception as error:  # whatever a wrong kind of value leads to
        raise ValueError(
            f"the preprocessor_config.json of {checkpoint} cannot be read as an image processor: {error!r}"
        ) from error


def build_model(
    labels: list[str],
    checkpoint: str | None,
    preset: str | None,
    image_size: int | None,
    overrides: dict,
    eval_crop: float | None = None,
):
    """A model with a head for `labels`, and its image processor: from `checkpoint`, else from scratch as `preset` says.

    Weights are float32, whatever the checkpoint holds: most steps are too small to change a bfloat16 or float16 number
    ("Mixed Precision Training", arXiv 1710.03740, section 3.1). The head of a checkpoint is kept only where it was trained for
    these labels in this order. Its image processor says how images are resized and cut, unless `eval_crop` does
    (`image_spec.eval_resize`).

    Raises:
        ValueError: if a weight is not finite, or `overrides` ask for another type.
    """
    if asked := {"dtype", "torch_dtype"} & set(overrides):
        raise ValueError(
            f"config_overrides: {asked.pop()} cannot be chosen, weights are trained in float32; --mixed_precision says what "
            "their products are computed in"
        )
    fields = dict(overrides) if image_size is None else {**overrides, "image_size": image_size}
    fields["id2label"] = dict(enumerate(labels))
    if checkpoint is None:
        model = HFViTForImageClassification(HFViTConfig.from_preset(preset, **fields))
        source = ViTImageProcessorPil()
    else:
        before = HFViTConfig.from_pretrained(checkpoint).id2label
        model = HFViTForImageClassification.from_pretrained(checkpoint, dtype=torch.float32, **fields)
        check_weights(model, checkpoint)
        if list(before.values()) != labels:
            nn.init.zeros_(model.classifier.weight)
            nn.init.zeros_(model.classifier.bias)
        source = load_processor(checkpoint)
    height, width = as_pair(model.config.image_size)
    channels = model.config.num_channels
    a_channel = lambda values: list(values) if len(values) == channels else [sum(values) / len(values)] * channels
    size, center = {"height": height, "width": width}, {}
    resize = eval_resize(image_spec_of(source, model.config), height, width, eval_crop)
    if resize is not None:
        center = {"do_center_crop": True, "crop_size": size}
        size = {"shortest_edge": resize} if isinstance(resize, int) else dict(zip(size, resize, strict=True))
    processor = ViTImageProcessorPil(
        size=size,
        **center,
        resample=source.resample,
        image_mean=a_channel(source.image_mean),
        image_std=a_channel(source.image_std),
        do_convert_rgb=channels == 3,
    )
    return model, processor


def freeze(model: nn.Module, backbone: bool, layers: int):
    """Train the head alone (`backbone`), or nothing up to and with layer number `layers`, the embeddings included.

    Raises:
        ValueError: if the model has fewer layers.
    """
    there = model.config.num_hidden_layers
    if layers > there:
        raise ValueError(
            f"--freeze_layers {layers}: the model has {there} layers; to train the head alone pass --freeze_backbone true"
        )
    last = there + 1 if backbone else layers
    for name, parameter in model.named_parameters():
        if (backbone or layers > 0) and not name.startswith("classifier.") and depth(name, there) <= last:
            parameter.requires_grad_(False)


def add_lora(model, rank: int, alpha: float, dropout: float):
    """The model with low-rank updates of all dense layers of its transformer layers (arXiv 2106.09685, section 4.1), by PEFT;
    they and the head are trained.

    Raises:
        ValueError: if PEFT is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise ValueError("--lora_rank needs the library peft, which is not installed: pip install peft")
    from peft import LoraConfig, get_peft_model

    inside = [
        name.rpartition(".")[2] for name, module in model.vit.layers.named_modules() if isinstance(module, nn.Linear)
    ]
    lora = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=rf".*\.layers\..*\.({'|'.join(sorted(set(inside)))})",
        modules_to_save=["classifier"],
    )
    return get_peft_model(model, lora)


def save_model(model, folder: Path, lora_save: str):
    """Write the model, with its low-rank updates merged in; or only those ("adapter"), with the config of the whole."""
    if not hasattr(model, "merge_and_unload"):
        model.save_pretrained(folder)
    elif lora_save == "merged":
        copy.deepcopy(model).merge_and_unload().save_pretrained(folder)
    else:
        model.save_pretrained(folder)
        model.config.save_pretrained(folder)


def default_epochs(images: int, from_scratch: bool) -> float:
    """Epochs where none are asked for: 10; from scratch as many, up to 100, as show 20,000 images."""
    return max(10.0, min(100.0, 20_000 / images)) if from_scratch else 10.0


def check_first_size(side: int | None, config: HFViTConfig):
    """Raise ValueError unless a run can begin at `side` x `side` pixels."""
    if side is None:
        return
    image, patch = as_pair(config.image_size), as_pair(config.patch_size)
    if side >= min(image) or side % patch[0] or side % patch[1] or image[0] != image[1]:
        raise ValueError(
            f"--first_image_size {side}: wanted a multiple of the patch size {patch} below the image size {image}, "
            "which must be square"
        )


def shrink(pixel_values: torch.Tensor, side: int) -> torch.Tensor:
    """Images (B, C, H, W) -> (B, C, side, side), bilinear and antialiased."""
    return nn.functional.interpolate(pixel_values, size=(side, side), mode="bilinear", antialias=True)


def trackers(names: str) -> list[str]:
    """`--report_to` as Accelerate takes it.

    Raises:
        ValueError: for a tracker that Accelerate does not know, or whose library is not installed.
    """
    asked = [name.strip() for name in names.split(",") if name.strip() not in ("", "none")]
    installed = [str(name) for name in get_available_trackers()]
    known = [str(name) for name in LoggerType if str(name) != "all"]
    for name in asked:
        if name not in known:
            raise ValueError(f"--report_to {name}: wanted none, or some of {', '.join(known)}")
        if name not in installed:
            raise ValueError(f"--report_to {name}: its library is not installed: pip install {name}")
    return asked


def model_folder(checkpoint: str) -> str:
    """A Hub id or folder as it is; of a run folder, its model/.

    Raises:
        ValueError: if it looks like a path, because the folder above is there, and there is nothing.
    """
    above = Path(checkpoint).parent
    if above != Path() and above.is_dir() and not Path(checkpoint).exists():
        raise ValueError(f"{checkpoint} is not there, while {above} is: name a run, a model folder or a Hub id")
    inside = Path(checkpoint) / "model"
    found = str(inside) if inside.is_dir() and not (Path(checkpoint) / "config.json").exists() else checkpoint
    return refuse_mistyped_path(found, "MODEL")


def load_classifier(checkpoint: str, **how):
    """Any `AutoModelForImageClassification`, or the base and adapter that a LoRA run saved.

    Args:
        how: goes to `from_pretrained`, such as `dtype=`.

    Raises:
        ValueError: if a weight is not finite, a class has no name, or an adapter no base.
    """
    config = {}
    if Path(checkpoint, "adapter_config.json").is_file():
        base_of_adapter(checkpoint, {})
        config = HFViTConfig.get_config_dict(checkpoint)[0]
    ours = config.get("model_type") == HFViTConfig.model_type
    kind = HFViTForImageClassification if ours else AutoModelForImageClassification
    model = kind.from_pretrained(checkpoint, trust_remote_code=False, **how)
    model.config.id2label = labels_by_id(model.config.id2label)
    check_weights(model, checkpoint)
    return model


def check_weights(model: nn.Module, source: str):
    """Raise ValueError if a number of a weight is NaN or infinite. `from_pretrained` looks at the ends of large tensors only,
    to load in no time; here minutes of work depend on the weights, and reading all of them takes a part of a second."""
    plain = {
        name: weight for name, weight in model.state_dict().items() if type(weight) is torch.Tensor
    }  # not quantised
    plain = {
        name: weight for name, weight in plain.items() if weight.is_floating_point() and weight.dtype.itemsize > 1
    }
    if found := [name for name, weight in plain.items() if not weight.isfinite().all()]:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise ValueError(
            f"the weights of {source} are not finite: {', '.join(found[:5])}{more} hold NaN or infinity; take another "
            "checkpoint, or save this one again from a run that did not diverge"
        )


def find_batch_size(model, compute_loss, form: ImageSpec, batch_size: int, device, copies: int = 2) -> int:
    """`batch_size`, or where memory is short a part of it, half or less each time, whose forward and backward pass fits
    beside what else a step holds: another batch, three times while it is augmented, and copies of the trainable weights.

    Args:
        compute_loss: pixel_values (B, C, H, W) -> a loss.
        copies: of the trainable weights; AdamW's two moments, an average, the buckets of DDP.

    Raises:
        RuntimeError: if one image is too many.
    """
    asked = batch_size
    while True:
        state = held = pixel_values = None
        try:
            state = [torch.empty_like(p) for p in model.parameters() if p.requires_grad for _ in range(copies)]
            pixel_values = torch.zeros(batch_size, form.channels, form.height, form.width, device=device)
            state += [torch.empty_like(pixel_values) for _ in range(3)]
            held = compute_loss(pixel_values)
            held.backward()
            return batch_size
        except Exception as error:
            if not should_reduce_batch_size(error) or batch_size == 1:
                raise
            smaller = [size for size in range(1, batch_size // 2 + 1) if asked % size == 0]
            batch_size = max(smaller, key=lambda size: (size % 2 == 0, size))  # even: pairs are mixed
        finally:
            del state, held, pixel_values
            model.zero_grad(set_to_none=True)
            if device.type != "cpu":
                clear_device_cache(garbage_collection=True)


class Prefetcher:
    """Batches in their order, one of which may be made before it is asked for: while the device works on the one before."""

    def __init__(self, batches):
        self.batches, self.ahead = batches, None

    def prefetch(self):
        """Make the next batch, where there is one."""
        if self.ahead is None:
            self.ahead = next(self.batches, None)

    def __next__(self):
        self.prefetch()
        batch, self.ahead = self.ahead, None
        if batch is None:
            raise StopIteration
        return batch

    def close(self):
        self.batches.close()


def compile_model(model: nn.Module, sharded: bool):
    """Compile in place: the whole model as one graph, or where FSDP's hooks stand between the layers each of these.

    Each size of input is a graph of its own, for shapes that vary are slower.
    """
    layers = [module for module in model.modules() if isinstance(module, HFViTLayer)]
    if sharded:
        # Each layer has its own drop path rate, and so its own graphs: in training, evaluation and a first stage.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(layers))
        for layer in layers:
            layer.compile(dynamic=False)
    else:
        model.compile(dynamic=False)


def seed_pass(seed: int, step: int, number: int, rank: int):
    """Seed what is random inside the network (dropout, drop path, patch dropout) for pass `number` of a step on one process."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, number, rank]).generate_state(1)[0]))


def clip_gradients(accelerator, model, largest: float) -> torch.Tensor:
    """The norm of all gradients together, (), before they are scaled down to `largest`, where that is above 0."""
    norm = accelerator.clip_grad_norm_(model.parameters(), largest or math.inf)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def is_fit(loss: torch.Tensor, norm: torch.Tensor, scale: float) -> torch.Tensor:
    """Whether a step may be taken, (): its loss and gradient are finite. In float16 a gradient may overflow because the loss is
    scaled up; the scaler then leaves the step out and halves its scale ("Mixed Precision Training", arXiv 1710.03740, section 3.2).
    At a scale of 1, where it would have come down to from its first one within 16 such steps, that is no excuse.

    Args:
        scale: of the loss in this step, 1 where it is not scaled.
    """
    return loss.isfinite() & (norm.isfinite() | (scale > 1))


class AverageModel:
    """Exponential moving average of the trained weights, `average += (1 - decay) * (weights - average)`.

    The decay warms up as min(decay, (1 + step) / (10 + step)), so that a short run does not average in its start
    (the schedule of TensorFlow's ExponentialMovingAverage). Of a sharded model each process averages its own part.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay, self.step = decay, 0
        self.weights = [weight.clone() for weight in self._trained(model)]

    @staticmethod
    def _trained(model: nn.Module) -> list[torch.Tensor]:
        trained = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
        return [weight.to_local() if isinstance(weight, DTensor) else weight for weight in trained]

    def update(self, model: nn.Module):
        decay = min(self.decay, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self.weights, self._trained(model), 1 - decay)
        self.step += 1

    def take(self, model: nn.Module):
        """Make the average what the model's weights are."""
        torch._foreach_copy_(self.weights, self._trained(model))

    @contextlib.contextmanager
    def applied(self, model: nn.Module):
        """The model with the averaged weights in it, meanwhile."""
        weights = self._trained(model)
        kept = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, self.weights)
        try:
            yield model
        finally:
            torch._foreach_copy_(weights, kept)


# ----------------------------------------------------------------------------------------------------------------------
# Scores


def head_of(model) -> nn.Linear:
    """The dense layer that gives the logits; what goes into it are the features.

    Raises:
        ValueError: if there is none.
    """
    fitting = [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear) and module.out_features == model.config.num_labels
    ]
    if not fitting:
        raise ValueError(
            f"{type(model).__name__} has no dense layer of {model.config.num_labels} labels: its features cannot be taken"
        )
    return fitting[-1]


@torch.no_grad()
def predict(
    model, batches, form, accelerator, count: int, features: bool = False, stopped=lambda: False, split: str = ""
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Logits (n, L) in float32, or the features (n, D) that the head sees, and the row number of each, (n,) rising.

    Every process gets all of them, each row once, however the rows are shared out. n is `count` unless images were skipped.

    Args:
        batches: this process's share, dicts of `images` uint8 (b, C, H, W) and `index` (b,); shares do not overlap.
        form: the `ImageSpec` of the model's images.
        stopped: is asked before each batch; None is returned where it is True on any process.
        split: what the images are, for the error.

    Raises:
        ValueError: if no image can be read, or if a logit or feature is not finite.
    """
    was_training = model.training
    model.eval()
    seen_by_head = []
    hook = (
        head_of(model).register_forward_pre_hook(lambda _, inputs: seen_by_head.append(inputs[0]))
        if features
        else None
    )
    table, seen = None, torch.zeros(count, device=accelerator.device)
    largest = 0
    for batch in batches:
        if stopped():
            break
        images = batch["images"].to(accelerator.device, non_blocking=True)
        largest = max(largest, len(images))
        short = largest - len(images) if images.device.type == "cuda" else 0
        if short:  # the tail, whose other size would be compiled anew
            images = torch.cat([images, images[:1].expand(short, -1, -1, -1)])
        with accelerator.autocast():
            values = model(normalize(images, form)).logits  # (b, L)
        if features:
            values = seen_by_head.pop().flatten(1)  # (b, D)
        values = values[: len(batch["images"])]
        if table is None:
            table = torch.zeros(count, values.shape[1], device=accelerator.device)
        index = batch["index"].to(accelerator.device)
        table[index], seen[index] = values.float(), 1.0
    model.train(was_training)
    if hook is not None:
        hook.remove()
    if accelerator.reduce(torch.tensor(float(stopped()), device=accelerator.device), reduction="sum") > 0:
        return None
    if accelerator.num_processes > 1:
        width = torch.tensor(0 if table is None else table.shape[1], device=accelerator.device)
        width = int(accelerator.gather(width.view(1)).max())
        table = torch.zeros(count, width, device=accelerator.device) if table is None else table
        table, seen = accelerator.reduce(table, reduction="sum"), accelerator.reduce(seen, reduction="sum")
    if not seen.any():
        raise ValueError(f"none of the {count} images to score can be read")
    rows = seen.nonzero().flatten()
    values = table[rows].cpu()
    check_answers(values, split)
    return values, rows.cpu()


def check_answers(values: torch.Tensor, split: str = ""):
    """Raise ValueError if a row of logits or features (n, L) is not finite: argmax would take NaN for an answer."""
    wrong = int((~values.isfinite().all(dim=1)).sum())
    if wrong:
        where = f" of {split}" if split else ""
        raise ValueError(
            f"the model gives NaN or infinity for {wrong:,} of {len(values):,} images{where}, which cannot be scored: try "
            "--mixed_precision no; if it does the same, look at these images, or take weights of an earlier step"
        )


# How far apart two computations of the same logits may be, in parts of the largest one, by --mixed_precision. Other batch
# sizes have other kernels, and a sum in another order differs by some units in the last place: 2^-24 of float32 (2^-11 where a
# GPU computes in TF32), 2^-11 of float16, 2^-8 of bfloat16, times a few for the layers that it passes.
LOGITS_TOLERANCE = {"no": 1e-3, "fp16": 1e-2, "bf16": 6e-2}


@torch.no_grad()
def logits_apart(model, images: torch.Tensor, logits: torch.Tensor, form: ImageSpec, accelerator) -> float:
    """How far the logits of a saved model are from those that were scored, in parts of the largest of these.

    Args:
        model: as `load_classifier` gives it back.
        images: uint8 (n, C, H, W), scored ones.
        logits: (n, L), what was scored.
    """
    model = model.to(accelerator.device).eval()
    with accelerator.autocast():
        again = model(normalize(images.to(accelerator.device), form)).logits.float().cpu()  # (n, L)
    return float((again - logits).abs().max() / logits.abs().max().clamp_min(1e-6))


@functools.cache
def metric(name: str):
    """An `evaluate` module of hf_vit/evaluation/metrics."""
    return evaluate.load(str(Path(metrics.__file__).parent / f"{name}.py"))


def _answers(logits, labels) -> dict[str, np.ndarray]:
    probabilities = logits.softmax(dim=1)
    confidences, predictions = probabilities.max(dim=1)
    top5 = logits.topk(min(5, logits.shape[1]), dim=1).indices
    return {
        name: value.numpy()
        for name, value in zip(
            ("predictions", "references", "top5", "confidences"), (predictions, labels, top5, confidences), strict=True
        )
    }


def score(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Logits (n, L) and class indices (n,) -> accuracy, top5_accuracy (of more than five classes), balanced_accuracy, macro_f1,
    calibration_error (all in [0, 1], see hf_vit/evaluation/metrics) and loss, the mean cross-entropy.

    Raises:
        ValueError: if a logit is not finite.
    """
    check_answers(logits)
    answers = _answers(logits, labels)
    pair = {name: answers[name] for name in ("predictions", "references")}
    scores = metric("accuracy").compute(**pair)
    if logits.shape[1] > 5:
        top5 = metric("top_k_accuracy").compute(predictions=answers["top5"], references=answers["references"])
        scores["top5_accuracy"] = top5["top_k_accuracy"]
    for name in ("balanced_accuracy", "macro_f1"):
        scores |= metric(name).compute(**pair)
    scores |= metric("calibration_error").compute(**pair, confidences=answers["confidences"])
    return {**scores, "loss": nn.functional.cross_entropy(logits, labels).item()}


def report(logits: torch.Tensor, labels: torch.Tensor, names: list[str]) -> dict:
    """What `score` leaves out: {"intervals": {metric: [low, high]}, "calibration": [...], "per_class": [...],
    "confusion_matrix": (L, L) rows}."""
    answers = _answers(logits, labels)
    spread = metrics.intervals(**answers)
    if logits.shape[1] <= 5:
        del spread["top5_accuracy"]
    pair = {name: answers[name] for name in ("predictions", "references")}
    confusion = metric("confusion_matrix").compute(**pair, num_labels=len(names))["confusion_matrix"]
    return {
        "intervals": spread,
        "calibration": metrics.calibration_bins(**pair, confidences=answers["confidences"]),
        "per_class": metrics.per_class(confusion, names),
        "confusion_matrix": confusion.tolist(),
    }


def knn_accuracy(train, train_labels, features, labels, neighbours: int = 20, temperature: float = 0.07) -> float:
    """Accuracy in [0, 1] of a vote of the `neighbours` most similar training images, each weighted by
    exp(cosine similarity / temperature): "Unsupervised Feature Learning via Non-Parametric Instance Discrimination"
    (arXiv 1805.01978, section 3.4), with DINO's neighbours and temperature.

    Args:
        train, features: (n, D) and (m, D) of the training images and of those that are scored.
        train_labels, labels: (n,) and (m,) class indices.
    """
    train, features = nn.functional.normalize(train, dim=1), nn.functional.normalize(features, dim=1)
    right = 0
    for some, truth in zip(features.split(1024), labels.split(1024), strict=True):
        nearest = (some @ train.T).topk(min(neighbours, len(train)), dim=1)  # (b, k)
        votes = torch.zeros(len(some), int(train_labels.max()) + 1)
        votes.scatter_add_(1, train_labels[nearest.indices], (nearest.values / temperature).exp())
        right += int((votes.argmax(dim=1) == truth).sum())
    return right / len(labels)


def few_shot_accuracy(
    train, train_labels, features, labels, shots: int, seed: int, l2: float = 2.0**10, bias: float = 100.0
) -> float:
    """Accuracy in [0, 1] of a linear classifier on frozen features, in closed form: least squares with L2 decay to targets in
    {-1, 1}, from `shots` random images of each class. As big_vision does (evaluators/fewshot_lsr.py): each feature
    whitened, a constant feature for the bias so large that it hardly decays, one fixed decay.

    Args: as `knn_accuracy`; `seed` draws the images.

    Raises:
        ValueError: if a class has fewer images.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for label in train_labels.unique().tolist():
        of_class = rng.permutation((train_labels == label).nonzero().flatten().numpy())
        if len(of_class) < shots:
            raise ValueError(f"a class has only {len(of_class)} training images, fewer than the {shots} shots")
        rows.append(of_class[:shots])
    x, y = train[np.concatenate(rows)].double(), train_labels[np.concatenate(rows)]
    mean, std = x.mean(dim=0), x.std(dim=0, correction=0) + 1e-5
    whiten = lambda values: nn.functional.pad((values.double() - mean) / std, (0, 1), value=bias)  # (n, D + 1)
    x, targets = whiten(x), 2 * nn.functional.one_hot(y, int(train_labels.max()) + 1).double() - 1
    dual = torch.linalg.solve(x @ x.T + l2 * torch.eye(len(x), dtype=x.dtype), targets)  # (n, L)
    return float((whiten(features) @ (x.T @ dual)).argmax(dim=1).eq(labels).double().mean())


def probe(train, train_labels, features, labels, shots=(1, 5, 10), seeds: int = 3) -> dict[str, float]:
    """{"knn_accuracy", "1_shot_accuracy", ...}: the mean over `seeds` draws of what `few_shot_accuracy` gives. A number of
    shots that a class does not have is left out."""
    scores = {"knn_accuracy": knn_accuracy(train, train_labels, features, labels)}
    fewest = int(torch.bincount(train_labels)[train_labels.unique()].min())
    for count in [count for count in shots if count <= fewest]:
        each = [few_shot_accuracy(train, train_labels, features, labels, count, seed) for seed in range(seeds)]
        scores[f"{count}_shot_accuracy"] = sum(each) / seeds
    return scores

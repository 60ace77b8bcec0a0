"""Length, batch size and learning rates of a run where its flags leave them open: by the size of the set and of the network.

Small sets are trained for a number of steps, large ones for a number of epochs, as BiT-HyperRule (arXiv 1912.11370, section 3.3)
and big_vision's configs/transfer.py choose the schedule by the size of the set. Their 500 steps of 512 images for the smallest
sets are for accelerators; ours are fewer and smaller, so that a ViT-B learns a few dozen photos on a CPU in half an hour.

Adam's best rate falls with the width of a network (arXiv 2203.03466, table 3), so rates are `RATES` over the hidden size. They were
searched for with a model 128 wide on 100 images of CIFAR-10, the head's also on Fashion-MNIST. For a ViT-B, 768 wide, they are 1e-4
with a layer decay of 0.75, and 3.3e-4 for LoRA. MAE's fine-tuning (arXiv 2111.06377, table 9) comes to 6e-5 for 16 images a step and
to 2.5e-4 for 64, with the same decay; LoRA's own runs lie between 2e-4 and 5e-4 (arXiv 2106.09685, tables 9 and 11).
"""

import math

from hf_vit.system.errors import UserError
from hf_vit.training.arguments import DERIVED, TrainArguments, check_ranges
from hf_vit.training.pretrain_arguments import PretrainArguments


LOSSES = ("cross_entropy", "binary_cross_entropy", "asymmetric")
FEWEST_STEPS = 150
EPOCHS = 10.0
# Pre-training goes on improving for hundreds of epochs (arXiv 2111.06377, figure 7).
PRETRAINING_IMAGES, PRETRAINING_EPOCHS = 500_000, 400.0
# Learning rate, that of the head, and layer decay. The rates are those of a network one unit wide.
RATES = {
    "full": (0.08, 1.0, 0.75),
    "lora": (0.25, 1.0, 1.0),
    "probe": (1.0, 1.0, 1.0),
    "pretraining": (0.128, 0.128, 1.0),
}
# Up to so many images, a new head is fitted on the checkpoint's features before all layers learn: "linear probing, then fine-tuning"
# (arXiv 2202.10054). On 30 images full fine-tuning gained 1.4 points on CIFAR-10, 7.9 on digits and 2.6 on Fashion-MNIST by it.
HEAD_FIRST_IMAGES, HEAD_STEPS = 1000, 150
# Below so many images, a backbone and its low-rank updates learn at a rate that falls with a power of their number. On 30 images of
# CIFAR-10 the root of it leaves LoRA 1.1 points below the probe of the same checkpoint, and this power 0.3, for which LoRA loses 2.3 on
# digits and 0.9 on Fashion-MNIST (three seeds, as before it).
FULL_RATE_IMAGES, RATE_POWER = 300, 0.75
# Smallest part of the area that a random crop shows, to fine-tune. BiT-HyperRule cuts squares of 128 pixels out of 160: 0.64.
CROP_SCALE = 0.64


def training_method(args: TrainArguments) -> str:
    """ "scratch", "full", "lora", "probe", or "pretraining" without labels."""
    if isinstance(args, PretrainArguments):
        return "pretraining"
    if args.model_name_or_path is None:
        return "scratch"
    return "probe" if args.freeze_backbone else "lora" if args.lora_rank > 0 else "full"


def fill_crop_scale(args: TrainArguments):
    """Fill in, in place, the smallest part of an image that is cut out, if the flags leave it open: before images are read."""
    if args.crop_scale is None:
        args.crop_scale = CROP_SCALE


def default_rates(method: str, images: int | None, hidden_size: int) -> tuple[float, float, float]:
    """(learning rate, learning rate of the head, layer decay) of AdamW.

    Args:
        images: to train on; None for a stream.
    """
    if method == "scratch":
        return 1e-3, 1e-3, 1.0
    rate, head_rate, layer_decay = RATES[method]
    if method in ("full", "lora") and images is not None:
        rate *= min(1.0, (images / FULL_RATE_IMAGES) ** RATE_POWER)
    return float(f"{rate / hidden_size:.2g}"), float(f"{head_rate / hidden_size:.2g}"), layer_decay


def fits_head_first(args: TrainArguments, images: int | None) -> bool:
    """Whether a head that is new is fitted to the labels, alone, before training. With a teacher, labels are not all it learns.

    Args:
        images: to train on; None for a stream.
    """
    few = images is not None and images <= HEAD_FIRST_IMAGES
    return few and training_method(args) in ("full", "lora") and args.teacher_name_or_path is None


def default_batch_size(method: str, images: int | None, processes: int = 1) -> int:
    """Images of one process in a step: 64; to fine-tune on few images, fewer, so that an epoch has many steps.

    Args:
        images: to train on; None for a stream.
    """
    if method in ("scratch", "pretraining") or images is None:
        return 64
    per_step = 2 ** int(math.log2(max(images, 512) / 32))
    return max(2, min(64, per_step // processes))  # mixup blends two


def default_epochs(method: str, images: int, images_per_step: int) -> float:
    """Passes over the training set: 10, and more where these are few steps.

    From scratch as many, up to 100, as show 20,000 images; without labels as many, up to 400, as show 500,000; else as many as
    make `FEWEST_STEPS`.
    """
    if method == "pretraining":
        return max(EPOCHS, min(PRETRAINING_EPOCHS, float(PRETRAINING_IMAGES // images)))
    if method == "scratch":
        return max(EPOCHS, min(100.0, 20_000 / images))
    return max(EPOCHS, FEWEST_STEPS / max(1, images // images_per_step))


def fill_defaults(args: TrainArguments, images: int | None, hidden_size: int, processes: int = 1):
    """Fill in, in place, what the flags leave open.

    A learning rate that is given holds for the head too, and for all layers alike, unless these are given their own.

    Args:
        images: to train on; None for a stream, whose length is given in steps.
    """
    method = training_method(args)
    if args.learning_rate is None:
        args.learning_rate, head_rate, layer_decay = default_rates(method, images, hidden_size)
        if method in ("full", "lora") and args.head_learning_rate is None:
            args.head_learning_rate = head_rate
        if args.layer_decay is None:  # where a rate is given, `parse_args` has set it to 1
            args.layer_decay = layer_decay
    if args.per_device_train_batch_size is None:
        args.per_device_train_batch_size = default_batch_size(method, images, processes)
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * processes
    if args.num_train_epochs is None and images is not None:
        args.num_train_epochs = default_epochs(method, images, per_step)
    if args.eval_epochs is None and (method == "scratch" or images is None):
        args.eval_epochs = 1
    elif args.eval_epochs is None:
        steps = args.max_train_steps
        epochs = args.num_train_epochs if steps is None else steps * per_step / images
        args.eval_epochs = max(1, int(epochs) // 20)


def keep_defaults(args: TrainArguments, saved: dict):
    """Fill in, in place, what the flags leave open by what the run that is resumed chose, or an older version for it.

    Args:
        saved: the arguments of its checkpoint.

    Raises:
        ValueError: if one of them is no number, or out of range.
    """
    for name in DERIVED:
        value = saved.get(name)
        if getattr(args, name) is None and value is not None:
            wanted = LOSSES if name == "loss" else "a number"
            if value not in LOSSES if name == "loss" else type(value) not in (int, float):
                raise UserError(f"{name} of the run that is resumed is {value!r}; wanted {wanted}")
            setattr(args, name, value)
    args.calibrate = args.calibrate and saved.get("calibrate", False)  # a run that began before there was one has none
    check_ranges(args)


def describe_training(args: TrainArguments, steps: int, images_per_step: int) -> str:
    """How the run trains, in a line."""
    what = {"scratch": "from scratch", "full": "fine-tuning", "lora": "LoRA", "probe": "the head alone"}
    what["pretraining"] = "masked autoencoding" if args.teacher_name_or_path is None else "feature distillation"
    decay = f" (layer decay {args.layer_decay:g})" if args.layer_decay < 1 else ""
    head = f", of the head {args.head_learning_rate:g}" if args.head_learning_rate is not None else ""
    return (
        f"{what[training_method(args)]}: {steps:,} steps of {images_per_step:,} images, learning rate "
        f"{args.learning_rate:g}{decay}{head}"
    )

"""The plan of a run: every number of it, chosen once, by the size of the data and of the network where flags leave it open.

Small sets are trained for a number of steps, large ones for a number of epochs, as BiT-HyperRule (arXiv 1912.11370, section 3.3)
and big_vision's configs/transfer.py choose the schedule by the size of the set. Their 500 steps of 512 images for the smallest
sets are for accelerators; ours are fewer and smaller, so that a ViT-B learns a few dozen photos on a CPU in half an hour.

Adam's best rate falls with the width of a network (arXiv 2203.03466, table 3), so rates are `RATES` over the hidden size. They were
searched for with a model 128 wide on 100 images of CIFAR-10, the head's also on Fashion-MNIST. For a ViT-B, 768 wide, they are 1e-4
with a layer decay of 0.75, and 3.3e-4 for LoRA. MAE's fine-tuning (arXiv 2111.06377, table 9) comes to 6e-5 for 16 images a step and
to 2.5e-4 for 64, with the same decay; LoRA's own runs lie between 2e-4 and 5e-4 (arXiv 2106.09685, tables 9 and 11).
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from hf_vit.system.errors import UserError
from hf_vit.system.text import counted
from hf_vit.training.arguments import TrainArguments, to_yaml
from hf_vit.training.pretrain_arguments import PretrainArguments


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
HEAD_FIRST_IMAGES = 1000
# Below so many images, a backbone and its low-rank updates learn at a rate that falls with a power of their number. On 30 images of
# CIFAR-10 the root of it leaves LoRA 1.1 points below the probe of the same checkpoint, and this power 0.3, for which LoRA loses 2.3 on
# digits and 0.9 on Fashion-MNIST (three seeds, as before it).
FULL_RATE_IMAGES, RATE_POWER = 300, 0.75
# To evaluate an image takes about 0.4 of the time of training on it: no backward pass. Evaluation is to take a fifth of the run.
EVALUATION_COST, EVALUATION_SHARE, MOST_EVALUATIONS = 0.4, 0.2, 40
METHODS = {
    "scratch": "from scratch", "full": "fine-tuning", "lora": "LoRA", "probe": "the head alone",
    "pretraining": "pre-training",
}  # fmt: skip


class DataSize(NamedTuple):
    """What the plan must know of the data.

    Args:
        images: to train on, None for a stream.
        evaluated: images that an evaluation looks at.
    """

    images: int | None
    evaluated: int


FIXED, MUTABLE = {"resume": False}, {"resume": True}  # when a run is resumed


@dataclass(frozen=True)
class Plan:
    """All numbers of a run; a field's metadata say whether it may change when the run is resumed.

    Args:
        args: with what the flags left open.
        fingerprint: of data, labels and frozen weights, and the precision.
        images_per_step: of all processes.
        steps_per_epoch: None for a stream.
        eval_every: steps between evaluations.
        first_eval: the step of the first evaluation, where nobody said how often.
        fit_head_first: whether a new head is fitted alone before training.
    """

    args: TrainArguments = field(metadata=FIXED)
    fingerprint: dict = field(metadata=FIXED)
    processes: int = field(metadata=MUTABLE)
    images_per_step: int = field(metadata=FIXED)
    steps_per_epoch: int | None = field(metadata=FIXED)
    total_steps: int = field(metadata=FIXED)
    warmup_steps: int = field(metadata=FIXED)
    eval_every: int = field(metadata=FIXED)
    first_eval: int = field(metadata=FIXED)
    log_every: int = field(metadata=MUTABLE)
    fit_head_first: bool = field(metadata=FIXED)

    @property
    def method(self) -> str:
        return training_method(self.args)

    def is_evaluation_step(self, step: int) -> bool:
        return step > 0 and (step % self.eval_every == 0 or step in (self.first_eval, self.total_steps))

    def identity(self) -> dict:
        """What a checkpoint must share with this run to continue it, by name."""
        own = [one.name for one in dataclasses.fields(self) if not one.metadata["resume"]]
        numbers = {name: getattr(self, name) for name in own if name not in ("args", "fingerprint")}
        return {**numbers, **self.fingerprint, **fixed_arguments(self.args)}

    def describe(self) -> str:
        """How the run trains, in two lines."""
        args, epochs = self.args, ""
        if self.steps_per_epoch is not None:
            epochs = f" in {self.total_steps / self.steps_per_epoch:.4g} epochs"
        decay = f" (layer decay {args.layer_decay:g})" if args.layer_decay < 1 else ""
        head = f", of the head {args.head_learning_rate:g}" if args.head_learning_rate is not None else ""
        evaluations = sum(map(self.is_evaluation_step, range(self.total_steps + 1)))
        early = self.first_eval % self.eval_every and self.first_eval < self.total_steps
        first = f"after step {self.first_eval:,}, " if early else ""
        return (
            f"{METHODS[self.method]}: {self.total_steps:,} steps of {counted(self.images_per_step, 'image')}{epochs}, learning rate "
            f"{args.learning_rate:g}{decay}{head}\n"
            f"{counted(evaluations, 'evaluation')}, {first}every {self.eval_every:,} steps and at the end (--eval_epochs, --eval_steps)"
        )

    def to_yaml(self) -> str:
        """config.yaml: the plan as comments, and the flags of this run, each with its value."""
        numbers = "".join(
            f"# {name}: {value}\n" for name, value in self.identity().items() if not hasattr(self.args, name)
        )
        return f"{numbers}{to_yaml(self.args)}"


def fixed_arguments(args: TrainArguments) -> dict:
    """The arguments that a resumed run must share, by name."""
    names = [
        one.name for one in dataclasses.fields(args) if not one.metadata["resume"] and one.name not in args.hidden
    ]
    return {name: getattr(args, name) for name in names}


def check_identity(saved: dict, now: dict, what: str):
    """Raise ValueError if a checkpoint is of another run; the error names the fields that differ, then and now.

    Args:
        saved, now: as `Plan.identity` gives them; what `now` lacks is not compared.
        what: how the sentence begins, such as `step-3 is of`.
    """
    changed = [
        f"{name} was {saved.get(name)} and is {value}" for name, value in now.items() if saved.get(name) != value
    ]
    if changed:
        raise UserError(
            f"{what} another run: {'; '.join(changed)}. Keep what it had (images_per_step by --per_device_train_batch_size), choose "
            "another --output_dir, or pass --overwrite to begin anew"
        )


def training_method(args: TrainArguments) -> str:
    """ "scratch", "full", "lora", "probe", or "pretraining" without labels."""
    if isinstance(args, PretrainArguments):
        return "pretraining"
    if args.model_name_or_path is None:
        return "scratch"
    return "probe" if args.freeze_backbone else "lora" if args.lora_rank > 0 else "full"


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


def default_batch_size(method: str, images: int | None, processes: int = 1) -> int:
    """Images of one process in a step: 64; to fine-tune on few images, fewer, so that an epoch has many steps."""
    if method in ("scratch", "pretraining") or images is None:
        return 64
    per_step = 2 ** int(math.log2(max(images, 512) / 32))
    return max(2, min(64, per_step // processes // 2 * 2))  # mixup blends two


def default_epochs(method: str, images: int, images_per_step: int) -> float:
    """Passes over the training set: 10, and more where these are few steps.

    From scratch they show 20,000 images, but at most 100 times each; without labels 500,000, at most 400 times; else they make
    `FEWEST_STEPS`.
    """
    if method == "pretraining":
        return max(EPOCHS, min(PRETRAINING_EPOCHS, float(PRETRAINING_IMAGES // images)))
    if method == "scratch":
        return max(EPOCHS, min(100.0, 20_000 / images))
    return max(EPOCHS, FEWEST_STEPS / max(1, images // images_per_step))


def default_eval_steps(cost: float, evaluated: int, total_steps: int, steps_per_epoch: int | None) -> int:
    """Steps between evaluations, in whole epochs, so that these take at most a fifth of the run; two evaluations in any case.

    Args:
        cost: of training, in images.
        evaluated: images of one evaluation.
    """
    affordable = cost * EVALUATION_SHARE / (1 - EVALUATION_SHARE) / (EVALUATION_COST * max(1, evaluated))
    evaluations = max(2, min(MOST_EVALUATIONS, int(affordable)))
    every = -(-total_steps // (evaluations - 1))  # the first one comes after an epoch
    return every if steps_per_epoch is None else -(-every // steps_per_epoch) * steps_per_epoch


def fill_open_arguments(
    args: TrainArguments, method: str, data: DataSize, hidden_size: int, processes: int, checkpoint: dict | None
) -> TrainArguments:
    """The arguments with what they left open; see `resolve`.

    A learning rate that is given holds for the head too, and for all layers alike, unless these are given their own.
    """
    images, chosen = data.images, {}
    rate, head_rate, layer_decay = default_rates(method, images, hidden_size)
    if args.learning_rate is None:
        chosen["learning_rate"] = rate
        if method in ("full", "lora") and args.head_learning_rate is None:
            chosen["head_learning_rate"] = head_rate
    if args.layer_decay is None:
        chosen["layer_decay"] = layer_decay if args.learning_rate is None else 1.0
    accumulated, batch_size = processes * args.gradient_accumulation_steps, args.per_device_train_batch_size
    if batch_size is None and checkpoint is not None:
        batch_size = max(1, checkpoint["images_per_step"] // accumulated)
    elif batch_size is None:
        batch_size = default_batch_size(method, images, processes)
    if args.num_train_epochs is None and images is not None:
        chosen["num_train_epochs"] = default_epochs(method, images, batch_size * accumulated)
    return dataclasses.replace(args, per_device_train_batch_size=batch_size, **chosen)


def resolve(
    args: TrainArguments,
    data: DataSize,
    hidden_size: int,
    processes: int = 1,
    fingerprint: dict | None = None,
    checkpoint: dict | None = None,
) -> Plan:
    """The plan of a run: a function of its arguments alone.

    Args:
        processes: that train together.
        fingerprint: see `Plan`.
        checkpoint: identity of the run that is resumed, whose images a step are kept on any number of processes.
    """
    method, images = training_method(args), data.images
    args = fill_open_arguments(args, method, data, hidden_size, processes, checkpoint)
    images_per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * processes
    steps_per_epoch = None if images is None else max(1, images // images_per_step)
    total_steps = args.max_train_steps or max(1, round(args.num_train_epochs * steps_per_epoch))
    cost, first_eval = total_steps * images_per_step, 0
    if args.freeze_backbone:
        cost = EVALUATION_COST * (images if args.cache_features else cost)  # no backward pass through it
    if args.eval_steps is not None or (args.eval_epochs is not None and steps_per_epoch is not None):
        eval_every = args.eval_steps or args.eval_epochs * steps_per_epoch
    else:
        eval_every = default_eval_steps(cost, data.evaluated, total_steps, steps_per_epoch)
        first_eval = min(total_steps, steps_per_epoch or eval_every)
    few = images is not None and images <= HEAD_FIRST_IMAGES
    return Plan(
        args=args,
        fingerprint=fingerprint or {},
        processes=processes,
        images_per_step=images_per_step,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        warmup_steps=round(args.warmup_ratio * total_steps),
        eval_every=eval_every,
        first_eval=first_eval,
        log_every=args.log_steps or max(1, min(10, total_steps // 20)),
        # With a teacher, labels are not all that it learns.
        fit_head_first=few and method in ("full", "lora") and args.teacher_name_or_path is None,
    )

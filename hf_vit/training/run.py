"""What a run works on: plan, task, data, model and state, and where it is written to."""

import contextlib
import copy
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import AutocastKwargs, DistributedType

from hf_vit.data.image_dataset import ImageDataset
from hf_vit.evaluation.prediction import classification_head
from hf_vit.system import hardware
from hf_vit.system.errors import UserError
from hf_vit.training.arguments import TrainArguments
from hf_vit.training.checkpoints import frozen_digest, gather_weights, save_checkpoint
from hf_vit.training.distributed import run_on_main
from hf_vit.training.ema import ModelEMA
from hf_vit.training.inputs import RunData, TrainBatches, read_data
from hf_vit.training.log import RunLog, print_main
from hf_vit.training.model import add_lora, compile_model, find_batch_size, freeze, save_model, shard_by_layer
from hf_vit.training.optimizers import build_optimizers
from hf_vit.training.plan import DataSize, Plan, resolve
from hf_vit.training.predictor import SplitPredictor
from hf_vit.training.signals import Signals
from hf_vit.training.state import TrainState
from hf_vit.training.task import Task


@dataclass
class Run:
    """A run in this process.

    Args:
        unsharded: takes the weights of all processes, to evaluate and save them; the model itself if it is not sharded.
        model: as Accelerate prepared it.
        frozen_modules: parts of the model that stay in eval mode.
        parameters: (of the model, those that are trained).
        best: metrics of `checkpoints/best-N`.
    """

    plan: Plan
    task: Task
    accelerator: Any
    signals: Signals
    data: RunData
    processor: Any
    model: torch.nn.Module
    unsharded: torch.nn.Module
    frozen_modules: list[torch.nn.Module]
    parameters: tuple[int, int]
    state: TrainState
    batches: TrainBatches
    predictor: SplitPredictor
    best: dict | None = None
    log: RunLog = field(default=None)

    @property
    def folder(self) -> Path:
        return Path(self.plan.args.output_dir)

    @property
    def is_sharded(self) -> bool:
        return self.accelerator.distributed_type == DistributedType.FSDP

    @contextlib.contextmanager
    def whole_model(self):
        """The model to evaluate and to save: with the averaged weights, if there are any, and unsharded on each process."""
        network, ema = self.state.network, self.state.ema
        with contextlib.nullcontext() if ema is None else ema.applied(network):
            if self.is_sharded:
                self.unsharded.load_state_dict(gather_weights(network))
                self.unsharded.to(self.accelerator.device)
            yield self.unsharded
            if self.is_sharded:
                self.unsharded.cpu()

    def write_model(self, model, folder: Path):
        with self.task.as_saved(model):
            save_model(model, folder, self.plan.args.lora_save)
        self.processor.save_pretrained(folder)

    def save(self):
        """Write a checkpoint of this step."""
        state = {**self.state.state_dict(), "identity": self.plan.identity()}
        run_on_main(self.accelerator, lambda: save_checkpoint(self.folder, state))
        self.state.saved_step = self.state.step


def build_run(
    args: TrainArguments, task: Task, accelerator, signals: Signals, began: float, checkpoint: dict | None = None
) -> Run:
    """Read the data, plan the run, and build all that it works on.

    Args:
        checkpoint: whose weights will replace those of the model.
    """
    say = lambda text: print_main(accelerator, text)
    sharded = accelerator.distributed_type == DistributedType.FSDP
    data, model, processor = read_data(args, task, accelerator, say)
    frozen_modules, backbone = freeze(model, args.freeze_backbone, args.freeze_layers), model.vit
    if args.lora_rank > 0:
        model = add_lora(model, args.lora_rank)
    task.set_up(data, backbone, accelerator)
    images = None if data.is_stream else len(data.train_images)
    plan = resolve(
        args,
        DataSize(images, task.evaluation_images()),
        model.config.hidden_size,
        accelerator.num_processes,
        fingerprint(data, model, task.teacher, accelerator),
        checkpoint and checkpoint["identity"],
    )
    args = plan.args
    predictor = SplitPredictor(accelerator, args.per_device_eval_batch_size, args.num_workers, signals)
    if args.cache_features and sharded:
        raise UserError("--cache_features trains a head, which FSDP has no need to split: use ddp.yaml")
    seconds_before = prepare_head(plan, task, accelerator, data, model, predictor, resumes=checkpoint is not None)
    unsharded = copy.deepcopy(model.cpu()) if sharded else model
    parameters = list(model.parameters())
    counts = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if sharded:  # it goes to its devices in parts, when it is prepared
        shard_by_layer(accelerator, model)
    micro_batches = fit_batch_size(plan, task, accelerator, data, model)
    accelerator.gradient_accumulation_steps = micro_batches[1]
    state, model = prepare(plan, accelerator, model, data, began)
    state.seconds["training"] = seconds_before
    return Run(
        plan=plan,
        task=task,
        accelerator=accelerator,
        signals=signals,
        data=data,
        processor=processor,
        model=model,
        unsharded=unsharded,
        frozen_modules=frozen_modules,
        parameters=counts,
        state=state,
        batches=TrainBatches(plan, data, task, accelerator.device, accelerator.process_index, *micro_batches),
        predictor=predictor,
    )


def prepare(plan: Plan, accelerator, model, data: RunData, began: float) -> tuple[TrainState, torch.nn.Module]:
    """The optimizers and the average of a model, as a `TrainState`, and the model as Accelerate prepared it."""
    args, sharded = plan.args, accelerator.distributed_type == DistributedType.FSDP
    head_scale = (args.head_learning_rate or args.learning_rate) / args.learning_rate
    optimizers = build_optimizers(
        model, args.optimizer, args.learning_rate, args.weight_decay, args.adam_beta2, args.layer_decay, head_scale
    )
    if args.cache_features:
        model = classification_head(model)
    if hardware.pick_compile(args.compile, accelerator.device.type, plan.total_steps):
        compile_model(model, sharded)
    model, *optimizers = accelerator.prepare(model, *optimizers)
    if sharded:
        # Accelerate does so for every other kind of run. Uncached: else the copies of all layers would be kept.
        model.forward = accelerator.autocast(AutocastKwargs(cache_enabled=False))(model.forward)
    network = accelerator.unwrap_model(model)
    ema = ModelEMA(network, args.ema_decay) if args.ema_decay > 0 else None
    return TrainState(accelerator, network, optimizers, ema, data.train_images, began), model


def fingerprint(data: RunData, model, teacher, accelerator) -> dict:
    """What must be the same when a run is resumed, beside its numbers."""
    labels, images = "\n".join(data.labels).encode(), data.train_images
    return {
        "mixed_precision": accelerator.mixed_precision,
        "training_images": f"{images.rows.num_shards} shards" if data.is_stream else len(images),
        "classes": len(data.labels),
        "labels_crc32": zlib.crc32(labels + (b"" if data.is_stream else images.labels.numpy().tobytes())),
        "frozen_sha256": run_on_main(accelerator, lambda: frozen_digest(model)),
        "teacher_sha256": run_on_main(accelerator, lambda: teacher and frozen_digest(teacher.model)),
    }


def prepare_head(plan: Plan, task, accelerator, data: RunData, model, predictor, resumes: bool) -> float:
    """Put the model on its device; cache the features that a head is trained on, or fit a new head on those of a small set.

    Returns the seconds that this took.
    """
    began, args, images = time.monotonic(), plan.args, data.train_images
    sharded = accelerator.distributed_type == DistributedType.FSDP
    fits_head = plan.fit_head_first and not resumes and not classification_head(model).weight.any()
    if fits_head or not sharded:
        model.to(accelerator.device)
    if args.cache_features:
        print_main(accelerator, f"computing the features of {len(images):,} images")
        data.train_images = extract_features(predictor, model, images, data, args.train_split)
    elif fits_head:
        print_main(accelerator, f"fitting the head on the features of {len(images):,} images")
        if images.cache is None or data.train_spec != data.spec:  # without random crops
            images = ImageDataset(images.rows, data.spec, args.on_bad_image)
        seen = extract_features(predictor, model, images, data, args.train_split)
        device = accelerator.device
        task.fit_head(classification_head(model), seen.cache.to(device), seen.labels.to(device))
    return time.monotonic() - began


def extract_features(predictor, model, images, data: RunData, split: str) -> ImageDataset:
    """What the model's head reads of these training images."""
    features = predictor.predict(model, images, data.spec, split, features=True, may_stop=False)
    return images.with_features(*features)


def fit_batch_size(plan: Plan, task, accelerator, data: RunData, model) -> tuple[int, int]:
    """(images of a micro-batch, micro-batches of a step): as planned, or smaller ones where memory is short."""
    args = plan.args
    batch_size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    sharded = accelerator.distributed_type == DistributedType.FSDP  # a trial would need the whole model
    if not args.auto_find_batch_size or args.cache_features or sharded:
        return batch_size, accumulation
    device = accelerator.device

    def trial_loss(pixel_values):
        with accelerator.autocast():
            return task.loss(model, task.trial_batch(pixel_values))[0]

    model.train()
    copies = 2 + (args.ema_decay > 0) + (accelerator.num_processes > 1)  # AdamW's moments, the average, DDP's buckets
    fitting = find_batch_size(model, trial_loss, data.spec, batch_size, device, copies)
    fitting = int(accelerator.gather(torch.tensor([fitting], device=device)).min())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # the progress line tells the run's, not the trial's
    if fitting < batch_size:
        print_main(
            accelerator,
            f"{batch_size} images do not fit in memory: {batch_size // fitting} x {fitting}, to the same effect",
        )
    return fitting, accumulation * (batch_size // fitting)

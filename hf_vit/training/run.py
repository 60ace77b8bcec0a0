"""What a run works on: plan, task, data, model and state, and where it is written to."""

import contextlib
import copy
import time
import zlib
from pathlib import Path

import torch
from accelerate.utils import AutocastKwargs, DistributedType

from hf_vit.data.image_dataset import ImageDataset
from hf_vit.evaluation.prediction import classification_head
from hf_vit.system import hardware
from hf_vit.system.errors import UserError
from hf_vit.system.text import counted
from hf_vit.training.arguments import TrainArguments
from hf_vit.training.checkpoints import frozen_digest, full_tensors
from hf_vit.training.distributed import run_on_main
from hf_vit.training.ema import ModelEMA
from hf_vit.training.inputs import Batch, TrainBatches, read_data
from hf_vit.training.log import print_main
from hf_vit.training.model import add_lora, compile_model, find_batch_size, freeze, save_model, shard_by_layer
from hf_vit.training.optimizers import build_optimizers
from hf_vit.training.plan import DataSize, resolve
from hf_vit.training.predictor import SplitPredictor
from hf_vit.training.signals import Signals
from hf_vit.training.state import TrainState
from hf_vit.training.task import Task


class Run:
    """A run in this process. It reads the data, is planned, and builds all that it works on.

    Args:
        began: when, by `time.monotonic`.
        checkpoint: identity of that whose weights will replace those of the model.

    Attributes:
        plan, data, processor, predictor, batches: `Plan`, `RunData`, image processor, `SplitPredictor`, `TrainBatches`.
        model: as Accelerate prepared it.
        unsharded: takes the weights of all processes, to evaluate and save them; the model itself if it is not sharded.
        frozen_modules: parts of the model that stay in eval mode.
        parameters: (of the model, those that are trained).
        best: metrics of `checkpoints/best-N`.
        log: the `RunLog`, once it has started.
    """

    def __init__(
        self,
        args: TrainArguments,
        task: Task,
        accelerator,
        signals: Signals,
        began: float,
        checkpoint: dict | None = None,
    ):
        self.task, self.accelerator, self.signals, self.best, self.log = task, accelerator, signals, None, None
        self.folder, self.is_sharded = Path(args.output_dir), accelerator.distributed_type == DistributedType.FSDP
        self.data, model, self.processor = read_data(args, task, accelerator)
        self.frozen_modules, backbone = freeze(model, args.freeze_backbone, args.freeze_layers), model.vit
        if args.lora_rank > 0:
            model = add_lora(model, args.lora_rank)
        task.set_up(self.data, backbone, accelerator)
        self.plan = resolve(
            args,
            DataSize(self.data.train_size, task.evaluation_images(len(self.data.eval_images))),
            model.config.hidden_size,
            accelerator.num_processes,
            self.fingerprint(model),
            checkpoint,
        )
        args = self.plan.args
        if args.cache_features and self.is_sharded:
            raise UserError("--cache_features trains a head, which FSDP has no need to split: use ddp.yaml")
        self.predictor = SplitPredictor(accelerator, args.per_device_eval_batch_size, args.num_workers, signals)
        training_began = time.monotonic()
        self.prepare_head(model, resumes=checkpoint is not None)
        self.unsharded = copy.deepcopy(model.cpu()) if self.is_sharded else model
        parameters = list(model.parameters())
        self.parameters = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
        if args.gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        self.batches = TrainBatches(self, *self.fit_batch_size(model))
        accelerator.gradient_accumulation_steps = self.batches.accumulation
        self.model, network, optimizers = self.prepare(model)
        ema = ModelEMA(network, args.ema_decay) if args.ema_decay > 0 else None
        self.state = TrainState(accelerator, network, optimizers, ema, self.data.train_images, began, training_began)

    def fingerprint(self, model) -> dict:
        """What must be the same when a run is resumed, beside its numbers."""
        data, teacher, accelerator = self.data, self.task.teacher, self.accelerator
        labels = "\n".join(data.labels).encode()
        return {
            "mixed_precision": accelerator.mixed_precision,
            "training_images": data.train_size or f"{data.train_images.rows.num_shards} shards",
            "classes": len(data.labels),
            "labels_crc32": zlib.crc32(
                labels + (b"" if data.is_stream else data.train_images.labels.numpy().tobytes())
            ),
            "frozen_sha256": run_on_main(accelerator, lambda: frozen_digest(model)),
            "teacher_sha256": run_on_main(accelerator, lambda: teacher and frozen_digest(teacher.model)),
        }

    def prepare_head(self, model, resumes: bool):
        """Put the model on its device; cache the features that a head is trained on, or fit a new head on those of a small set."""
        plan, data, images = self.plan, self.data, self.data.train_images
        device, head = self.accelerator.device, None
        if plan.fit_head_first and not resumes and not classification_head(model).weight.any():
            head = classification_head(model)
        if head is not None or not self.is_sharded:  # else it goes to its devices in parts, when it is prepared
            model.to(device)
        if not plan.args.cache_features and head is None:
            return
        print_main(f"computing the features of {counted(len(images), 'image')}")
        if head is not None and (images.cache is None or data.train_spec != data.spec):  # without random crops
            images = ImageDataset(images.rows, data.spec, plan.args.on_bad_image)
        features, rows = self.predictor.predict(model, images, data.spec, plan.args.train_split, features=True)
        if head is None:
            data.train_images = images.with_features(features, rows)
        else:
            print_main("fitting the head on them")
            self.task.fit_head(head, features.to(device), images.labels[rows].to(device))

    def fit_batch_size(self, model) -> tuple[int, int]:
        """(images of a micro-batch, micro-batches of a step): as planned, or smaller ones where memory is short."""
        args, accelerator = self.plan.args, self.accelerator
        batch_size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
        if not args.auto_find_batch_size or args.cache_features or self.is_sharded:  # a trial needs the whole model
            return batch_size, accumulation
        device = accelerator.device

        def trial_loss(pixel_values):
            rows = {"index": torch.arange(len(pixel_values))}
            labels = self.data.eval_images.labels
            labels = None if labels is None else labels[rows["index"] % len(labels)].to(device)
            inputs, targets = self.task.with_targets(pixel_values, labels, 0, 0)
            with accelerator.autocast():
                return self.task.loss(model, Batch(0, inputs, targets, rows))[0]

        model.train()
        copies = (
            2 + (args.ema_decay > 0) + (accelerator.num_processes > 1)
        )  # AdamW's moments, the average, DDP's buckets
        fitting = find_batch_size(model, trial_loss, self.data.spec, batch_size, device, copies)
        fitting = int(accelerator.gather(torch.tensor([fitting], device=device)).min())
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # the progress line tells the run's, not the trial's
        parts = batch_size // fitting
        if parts > 1:
            print_main(f"{batch_size} images do not fit in memory: {parts} x {fitting}, to the same effect")
        return fitting, accumulation * parts

    def prepare(self, model) -> tuple[torch.nn.Module, torch.nn.Module, list]:
        """(the model as Accelerate prepared it, the same without its wrapper, the optimizers)."""
        args, accelerator = self.plan.args, self.accelerator
        if self.is_sharded:
            shard_by_layer(accelerator, model)
        optimizers = build_optimizers(
            model,
            args.optimizer,
            args.learning_rate,
            args.weight_decay,
            args.adam_beta2,
            args.layer_decay,
            (args.head_learning_rate or args.learning_rate) / args.learning_rate,
        )
        if args.cache_features:
            model = classification_head(model)
        if hardware.pick_compile(args.compile, accelerator.device.type, self.plan.total_steps):
            compile_model(model, self.is_sharded)
        model, *optimizers = accelerator.prepare(model, *optimizers)
        if self.is_sharded:
            # Accelerate does so for every other kind of run. Uncached: else the copies of all layers would be kept.
            model.forward = accelerator.autocast(AutocastKwargs(cache_enabled=False))(model.forward)
        return model, accelerator.unwrap_model(model), optimizers

    @contextlib.contextmanager
    def whole_model(self):
        """The model to evaluate and to save: with the averaged weights, if there are any, and unsharded on each process."""
        network, ema = self.state.network, self.state.ema
        with contextlib.nullcontext() if ema is None else ema.applied(network):
            if self.is_sharded:
                self.unsharded.load_state_dict(full_tensors(network.state_dict()))
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
        self.state.save(self.folder, self.plan.identity())

    def summary(self) -> str:
        """Model and plan, in some lines; those of the data were printed when these were read."""
        spec, (parameters, trained) = self.data.spec, self.parameters
        trainable = f" ({trained:,} trained)" if trained < parameters else ""
        kept = "" if self.data.selects_best else "There is no validation split, so the final weights are kept.\n"
        return (
            f"{kept}{parameters:,} parameters{trainable}, {spec.height}x{spec.width} pixels, on {self.accelerator.device} x "
            f"{self.plan.processes}{', sharded' * self.is_sharded} (mixed precision: {self.accelerator.mixed_precision})\n"
            + self.plan.describe()
        )

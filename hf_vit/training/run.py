"""What a run works on: data, model, optimizers, and where it is written to."""

import contextlib
import copy
import json
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml
from accelerate.utils import AutocastKwargs, DistributedType, gather_object
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.loader import data_loader
from hf_vit.data.sampling import sequential_batches
from hf_vit.data.splits import describe_scored
from hf_vit.evaluation.prediction import classification_head, predict
from hf_vit.system import hardware, run_files
from hf_vit.system.errors import UserError
from hf_vit.system.escapes import printable_lines
from hf_vit.system.files import write_text
from hf_vit.training import lives
from hf_vit.training.arguments import TrainArguments, to_yaml
from hf_vit.training.checkpoints import gather_state, gather_weights, restore_state, save_checkpoint
from hf_vit.training.defaults import describe_training, fill_crop_scale, fill_defaults, fits_head_first
from hf_vit.training.distributed import run_on_main
from hf_vit.training.ema import ModelEMA
from hf_vit.training.inputs import RunData, TrainBatches, read_data
from hf_vit.training.model import (
    add_lora,
    check_first_image_size,
    compile_model,
    find_batch_size,
    freeze,
    save_model,
    shard_by_layer,
)
from hf_vit.training.optimizers import build_optimizers
from hf_vit.training.run_folder import NEW_RUN, STARTED, clear, continue_run
from hf_vit.training.signals import Signals
from hf_vit.training.state import TrainState
from hf_vit.training.task import Task


@dataclass
class Run:
    """A run in this process. What is saved of it is its `TrainState` and the tensors of model, optimizers and average.

    Args:
        task: what is learned.
        began: when `main` began, on the monotonic clock.
        unsharded: takes the weights of all processes, to score and save them; the model itself if it is not sharded.
        backbone: the network without its head.
        model: as Accelerate prepared it; `network` is the same unwrapped.
        trainable_parameters, parameters: counts.
        best: metrics of `checkpoints/best-N`.
        sums: of this process since the last log line: loss, correct images, images.
        saved_step: the last step that was saved, or resumed from.
    """

    args: TrainArguments
    task: Task
    accelerator: object
    signals: Signals
    began: float
    data: RunData
    processor: object
    unsharded: torch.nn.Module
    backbone: torch.nn.Module
    model: torch.nn.Module
    network: torch.nn.Module
    optimizers: list
    ema: ModelEMA | None
    batches: TrainBatches
    warmup_steps: int
    parameters: int
    trainable_parameters: int
    feature_seconds: float
    best: dict | None = None
    sums: torch.Tensor = None
    saved_step: int = 0
    training_began: float = field(default_factory=time.monotonic)

    @property
    def folder(self) -> Path:
        return Path(self.args.output_dir)

    @property
    def images_per_step(self) -> int:
        return self.batches.per_process * self.accelerator.num_processes

    @property
    def is_sharded(self) -> bool:
        return self.accelerator.distributed_type == DistributedType.FSDP

    def print(self, text: str):
        """Print on the main process, above a progress bar."""
        print_main(self.accelerator, text)

    def log_jsonl(self, **line):
        """Append a line to metrics.jsonl."""
        if self.accelerator.is_main_process:
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")

    def log(self, step: int, epoch: int, **values):
        """Log values to metrics.jsonl and to the trackers."""
        self.log_jsonl(step=step, epoch=epoch, **values)
        self.accelerator.log({key: value for key, value in values.items() if value is not None}, step=step)

    def seconds_of_training(self, state: TrainState) -> float:
        """In all lives of the run, without evaluation."""
        return round(state.seconds["training"] + time.monotonic() - self.training_began - state.seconds["scoring"], 3)

    def is_evaluation_step(self, step: int) -> bool:
        args = self.args
        every = args.eval_steps if args.eval_steps is not None else args.eval_epochs * self.batches.steps_per_epoch
        return step % every == 0 or step == self.batches.total_steps

    @contextlib.contextmanager
    def whole_model(self):
        """The model to score and to save: with the averaged weights, if there are any, and unsharded on each process."""
        with contextlib.nullcontext() if self.ema is None else self.ema.applied(self.network):
            if self.is_sharded:
                self.unsharded.load_state_dict(gather_weights(self.network))
                self.unsharded.to(self.accelerator.device)
            yield self.unsharded
            if self.is_sharded:
                self.unsharded.cpu()

    def write_model(self, model, folder: Path):
        save_model(model, folder, self.args.lora_save)
        self.processor.save_pretrained(folder)

    def predict(self, model, images, split: str, stopped=lambda: False):
        """Logits of all images, see `evaluation.prediction.predict`."""
        return predict_images(self.args, self.accelerator, model, images, self.data.spec, split, stopped=stopped)

    def save(self, state: TrainState):
        """Write a checkpoint of this step."""
        state.average_step = None if self.ema is None else self.ema.step
        state.scaler = None if self.accelerator.scaler is None else self.accelerator.scaler.state_dict()
        tensors = gather_state(self.network, self.optimizers, self.ema, wanted=self.accelerator.is_main_process)
        images = self.data.train_images
        own = {
            "sums": self.sums.tolist(),
            "skipped": list(images.skipped),
            "lengths": dict(images.lengths) if self.data.is_stream else {},
        }
        of_each = gather_object([own])
        now = time.monotonic()
        seconds = {
            **state.seconds,
            "training": state.seconds["training"] + now - self.training_began,
            "total": state.seconds["total"] + now - self.began,
        }
        saved = {
            **vars(state),
            "sums": [one["sums"] for one in of_each],
            "skipped_images": sorted({text for one in of_each for text in one["skipped"]}),
            "lengths": {shard: length for one in of_each for shard, length in one["lengths"].items()},
            "seconds": seconds,
        }
        keep = self.args.checkpoints_total_limit
        run_on_main(self.accelerator, lambda: save_checkpoint(self.folder, tensors, saved, keep))
        self.saved_step = state.step


def print_main(accelerator, text: str):
    """Print on the main process, above a progress bar."""
    if accelerator.is_main_process:
        tqdm.write(printable_lines(text))


def predict_images(args, accelerator, model, images, spec, split: str, features=False, stopped=lambda: False):
    """Logits or features of all images; every process predicts its share."""
    batches = own_batches(args, accelerator, images)
    return predict(model, batches, spec, accelerator, len(images), features, stopped, split)


def extract_features(args: TrainArguments, accelerator, model, images: ImageDataset, spec) -> ImageDataset:
    """What the model's head reads of these training images."""
    return images.with_features(*predict_images(args, accelerator, model, images, spec, args.train_split, True))


def fit_new_head(args: TrainArguments, task, accelerator, model, data: RunData):
    """Train the head alone, on the features of all training images without random crops."""
    images, device = data.train_images, accelerator.device
    if images.cache is None or data.train_spec != data.spec:
        images = ImageDataset(images.rows, data.spec, args.on_bad_image)
    seen = extract_features(args, accelerator, model, images, data.spec)
    task.fit_head(classification_head(model), seen.cache.to(device), seen.labels.to(device))


def own_batches(args: TrainArguments, accelerator, images):
    """The batches that this process scores."""
    rank, world = accelerator.process_index, accelerator.num_processes
    share = sequential_batches(len(images), args.per_device_eval_batch_size, rank, world)
    return data_loader(images, share, args.num_workers)


def build_run(args: TrainArguments, task, accelerator, signals: Signals, began: float, resumes: bool = False) -> Run:
    """Read the data and build all that a run works on.

    Args:
        resumes: whether the weights of a checkpoint will replace those of the model.
    """
    say = lambda text: print_main(accelerator, text)
    device, world = accelerator.device, accelerator.num_processes
    fill_crop_scale(args)
    data, model, processor = read_data(args, task, accelerator, say)
    images = None if data.is_stream else len(data.train_images)
    fill_defaults(args, images, model.config.hidden_size, world)
    freeze(model, args.freeze_backbone, args.freeze_layers)
    check_first_image_size(args.first_image_size, model.config)
    backbone = model.vit
    if args.lora_rank > 0:
        model = add_lora(model, args.lora_rank, args.lora_alpha, args.lora_dropout)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parameters = sum(p.numel() for p in model.parameters())
    sharded = accelerator.distributed_type == DistributedType.FSDP
    unsharded = copy.deepcopy(model) if sharded else model
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if sharded:  # it goes to its devices in parts, when it is prepared
        shard_by_layer(accelerator, model)
    else:
        model.to(device)
    task.set_up(data, backbone)
    features_began = time.monotonic()
    if args.cache_features and sharded:
        raise UserError("--cache_features trains a head, which FSDP has no need to split: use ddp.yaml")
    if args.cache_features:
        say(f"computing the features of {images:,} images")
        data.train_images = extract_features(args, accelerator, model, data.train_images, data.spec)
    elif fits_head_first(args, images) and not (sharded or resumes) and not classification_head(model).weight.any():
        say(f"fitting the head on the features of {images:,} images")
        fit_new_head(args, task, accelerator, model, data)
    feature_seconds = time.monotonic() - features_began

    batch_size, accumulation = fit_batch_size(args, task, accelerator, data, model)
    accelerator.gradient_accumulation_steps = accumulation
    betas = (args.adam_beta1, args.adam_beta2)
    head_scale = (args.head_learning_rate or args.learning_rate) / args.learning_rate
    optimizers = build_optimizers(
        model, args.optimizer, args.learning_rate, args.weight_decay, betas, args.layer_decay, head_scale
    )
    if args.cache_features:
        model = classification_head(model)
    images = data.train_images
    steps_per_epoch = None if data.is_stream else max(1, len(images) // (batch_size * accumulation * world))
    total_steps = args.max_train_steps or max(1, round(args.num_train_epochs * steps_per_epoch))
    first_stage_steps = round(args.first_stage * total_steps) if args.first_image_size else 0
    if hardware.pick_compile(args.compile, device.type, total_steps):
        compile_model(model, sharded)
    model, *optimizers = accelerator.prepare(model, *optimizers)
    if sharded:
        # Accelerate does so for every other kind of run. Uncached: else the copies of all layers would be kept.
        model.forward = accelerator.autocast(AutocastKwargs(cache_enabled=False))(model.forward)
    network = accelerator.unwrap_model(model)
    return Run(
        args=args,
        task=task,
        accelerator=accelerator,
        signals=signals,
        began=began,
        data=data,
        processor=processor,
        unsharded=unsharded,
        backbone=backbone,
        model=model,
        network=network,
        optimizers=optimizers,
        ema=ModelEMA(network, args.ema_decay) if args.ema_decay > 0 else None,
        batches=TrainBatches(
            args, data, task, accelerator, batch_size, accumulation, steps_per_epoch, total_steps, first_stage_steps
        ),
        warmup_steps=round(args.warmup_ratio * total_steps),
        parameters=parameters,
        trainable_parameters=trainable,
        feature_seconds=feature_seconds,
        sums=torch.zeros(3, device=device),
    )


def fit_batch_size(args: TrainArguments, task, accelerator, data: RunData, model) -> tuple[int, int]:
    """(images of a micro-batch, micro-batches of a step): as asked for, or smaller ones where memory is short."""
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
            f"{batch_size} images do not fit in memory: {batch_size // fitting} x {fitting} instead, to the same effect",
        )
    return fitting, accumulation * (batch_size // fitting)


def run_signature(run: Run) -> dict:
    """What must be the same when a run is resumed, beside its arguments."""
    data, labels = run.data, "\n".join(run.data.labels).encode()
    images = data.train_images
    return {
        "images_per_step": run.images_per_step,
        "steps": run.batches.total_steps,
        "mixed_precision": run.accelerator.mixed_precision,
        "training_images": f"{images.rows.num_shards} shards" if data.is_stream else len(images),
        "classes": len(data.labels),
        "checksum_of_labels": zlib.crc32(labels + (b"" if data.is_stream else images.labels.numpy().tobytes())),
    }


def start_or_resume(run: Run, saved: dict | None, tensors: dict | None) -> TrainState:
    """A new run in an empty folder, or the run of the checkpoint `saved` with its tensors.

    Raises:
        ValueError: if the checkpoint does not fit the data, the length or the precision of the run.
    """
    accelerator, args = run.accelerator, run.args
    signature = run_signature(run)
    state = TrainState()
    if saved is not None:
        check_signature(run, saved, signature)
        restore_state(tensors, run.network, run.optimizers, run.ema, accelerator)
        state = TrainState.from_json(saved)
        state.resumed_at = [*state.resumed_at, state.step]
        if run.ema is not None:
            run.ema.step = state.average_step
        if accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(state.scaler)
        rank = accelerator.process_index
        sums = torch.tensor(state.sums, device=accelerator.device)  # (processes, 3)
        run.sums = sums[rank] if len(sums) == accelerator.num_processes else sums.sum(dim=0) * (rank == 0)
        run.data.train_images.skipped.update(dict.fromkeys(state.skipped_images))
        if run.data.is_stream:
            run.data.train_images.lengths = {int(shard): length for shard, length in state.lengths.items()}
        run.print(f"going on after step {state.step:,}, from {saved['folder']}")
    state.facts, state.config = signature, yaml.safe_load(to_yaml(args))
    if accelerator.is_main_process:
        add_life(run, state)
    run.saved_step = state.step
    run.print(summary(run))
    run.best = run_on_main(accelerator, lambda: open_folder(run, state, saved))
    if run.best is None and state.step == run.batches.total_steps:
        state.scored_step = 0  # its best weights are lost: score the last ones again
    if args.report_to != "none":
        config = {key: value for key, value in vars(args).items() if value is not None}
        # Lines of a run that was replaced, or that was stopped before it saved them, go.
        later = {"tensorboard": {"purge_step": state.step + 1}}
        accelerator.init_trackers("hf_vit", config, later)
    state.seconds["training"] += run.feature_seconds
    run.training_began = time.monotonic()
    return state


def check_signature(run: Run, saved: dict, signature: dict):
    """Raise ValueError if the checkpoint is of other data, another length or precision, or another number of images a step."""
    before = saved["facts"]
    changed = [name for name in signature if before.get(name) != signature[name]]
    if changed:
        fitting = before["images_per_step"] / (run.accelerator.num_processes * run.batches.accumulation)
        raise UserError(
            f"{saved['folder']} does not fit: "
            + "; ".join(f"{name} was {before.get(name)} and is {signature[name]}" for name in changed)
            + ". Wanted the same data, length and precision, and as many images a step"
            + (f": --per_device_train_batch_size {fitting:g}" if "images_per_step" in changed else "")
            + f"; else {NEW_RUN}"
        )


def add_life(run: Run, state: TrainState):
    """Note what this life of the run runs on, and warn of what changed since the last one."""
    accelerator, teacher = run.accelerator, run.task.teacher
    life = lives.life(
        state.step,
        accelerator.device.type,
        accelerator.num_processes,
        accelerator.mixed_precision,
        None if teacher is None else teacher.model,
        run.data.splits,
    )
    for change in lives.changes(state.lives[-1], life) if state.lives else ():
        run.print(f"WARNING: {change}: the run goes on, and may end otherwise than it would have")
    state.lives = [*state.lives, life]


def open_folder(run: Run, state: TrainState, saved: dict | None) -> dict | None:
    """Clear the folder for a new run, or cut it back to the checkpoint; the metrics of the best weights so far."""
    found = None
    if saved is None:
        clear(run.folder)
    else:
        found = continue_run(Path(saved["folder"]).parents[1], run.folder, state.step, state.scored_step)
        if found is not None:
            run_files.check_shape(found[1], run.task.scores_shape, str(found[0] / "scores.json"))
    write_text(run.folder / STARTED, to_yaml(run.args))
    return found and found[1]["metrics"]


def summary(run: Run) -> str:
    """Data, model, length and rates of the run, in four lines."""
    data, batches, accelerator = run.data, run.batches, run.accelerator
    labels = ", ".join(data.labels[:10]) + (" ..." if len(data.labels) > 10 else "") or "no labels"
    images = "a stream of images" if data.is_stream else f"{len(data.train_images):,} images"
    trainable = f" ({run.trainable_parameters:,} trained)" if run.trainable_parameters < run.parameters else ""
    epochs = "" if data.is_stream else f" in {batches.total_steps / batches.steps_per_epoch:.4g} epochs"
    sharded = ", sharded" if isinstance(run.network, FSDPModule) else ""
    return (
        f"{run.args.dataset_name}: {labels}\n"
        f"{images} to train on, {len(data.eval_images):,} to score ({describe_scored(data.scored)}), {len(data.labels)} classes\n"
        f"{run.parameters:,} parameters{trainable}, {data.spec.height}x{data.spec.width} pixels, "
        f"{batches.total_steps:,} steps{epochs}, on {accelerator.device} x {accelerator.num_processes}{sharded} "
        f"(mixed precision: {accelerator.mixed_precision})\n"
        + describe_training(run.args, batches.total_steps, run.images_per_step)
    )

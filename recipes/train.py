"""Train or fine-tune a Vision Transformer on any image data set: one run, top to bottom.

    python recipes/train.py --config recipes/configs/demo.yaml [--key value ...]

Every key is a field of `hf_vit.training.arguments.TrainArguments`. A run that was killed goes on by the same command, as if nothing had
happened. The run folder then holds

    config.yaml     what was resolved; `--config` on it repeats the run
    metrics.jsonl   a line a log step and a line a scoring
    checkpoints/    step-N: all that decides the rest of the run; best-N: the best weights so far
    model/          config, weights, image processor, code and card: ready for `from_pretrained` and for the Hub
    last/           the last weights, where model/ holds those of an earlier, better scoring
    results.json    metrics with their intervals, scores of each class, times, seed, commit, command, hardware, versions, data
    confusion_matrix.csv   a row a true class, a column an answer
    samples.safetensors    a few of the scored images, drawn at random, and its surest mistakes, with label and logits

Exit codes: 0 when the run is finished, 75 when SIGTERM, SIGINT or SIGUSR1 stopped it and it can go on, 1 after an error, 2 for a
flag that is wrong. `accelerate launch` makes a 1 of all but 0.
"""

import contextlib
import copy
import csv
import io
import itertools
import json
import os
import shlex
import signal
import sys
import time
import zlib
from dataclasses import replace
from datetime import timedelta
from pathlib import Path


def leave_at_once(*_):
    os.write(2, b"stopped before anything was begun\n")
    os._exit(75)


if __name__ == "__main__":  # the imports take seconds
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, leave_at_once)

import datasets
import torch
import transformers
import yaml
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, gather_object, set_seed
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

from hf_vit import figures
from hf_vit.data import datasets as data
from hf_vit.data.augment import as_bytes, augment, mix, normalize
from hf_vit.hub import sharing
from hf_vit.system import environment, escapes, hardware, run_files
from hf_vit.system.files import atomic_dir, checksum, write_text
from hf_vit.system.hub_names import refuse_mistyped_path
from hf_vit.training import arguments as presets
from hf_vit.training import lives, processes, resume
from hf_vit.training import parts as training


TEMPLATE = Path(__file__).resolve().parents[1] / "model_cards" / "template.md"
SECONDS_BETWEEN_CHECKPOINTS = 300


def main():
    signals = resume.Signals()
    began = time.monotonic()
    args = presets.parse(sys.argv[1:])
    if args.dataset_name not in data.EMBEDDED:
        refuse_mistyped_path(args.dataset_name, "--dataset_name")
    for flag in ("model_name_or_path", "teacher_name_or_path"):
        refuse_mistyped_path(getattr(args, flag), f"--{flag}")
    accelerator = Accelerator(
        mixed_precision=hardware.pick_precision(args.mixed_precision, hardware.device_type()),
        log_with=training.trackers(args.report_to) or None,
        project_dir=args.output_dir,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=6))],  # one process may download for hours
    )
    ended = processes.watch()
    hardware.shard_on_cpu(accelerator)
    hardware.keep_float32(accelerator)
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM) or (
        kind == DistributedType.FSDP and not accelerator.is_fsdp2
    ):
        raise ValueError(f"{kind} is not known here: use FSDP 2 (recipes/accelerate/fsdp2.yaml) or DDP (ddp.yaml)")
    if accelerator.device.type == "cpu":
        hardware.use_all_cores()
        hardware.keep_memory()
    set_seed(args.seed)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    if not accelerator.is_main_process:
        transformers.utils.logging.set_verbosity_error()
    if args.optimizer == "muon" and accelerator.mixed_precision == "fp16":
        raise ValueError("muon does not go with fp16, whose loss scaling knows one optimizer: use bf16, or adamw")
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes
    run = Path(args.output_dir)

    def say(text):
        if accelerator.is_main_process:
            tqdm.write(escapes.printable_lines(text))

    finished, state, tensors = resume.begin(run, args, accelerator)
    if finished:
        say(f"{run} is finished: its results.json and model/ are there; --overwrite true trains anew")
        processes.part(accelerator, ended)
        return accelerator.end_training()

    # Data: uint8 images in memory where they fit, else decoded by workers
    columns = {key: getattr(args, key) for key in ("train_split", "eval_split", "image_column", "label_column")}
    columns["label_names"] = presets.read_names(args.label_names)
    reading_began = time.monotonic()
    with accelerator.main_process_first():
        splits = data.load(args.dataset_name, args.dataset_config, args.streaming)
        if args.streaming:
            stream, eval_rows, labels, scored = data.prepare_stream(splits, **columns)
        else:
            sizes = {key: getattr(args, key) for key in ("eval_fraction", "train_fraction", "shots", "seed")}
            splits, labels, scored = data.prepare(splits, **columns, **sizes)
            stream, eval_rows = None, splits["eval"]
    # Before training: what cannot be written into the card must not end the run after it.
    data_license = escapes.as_license(data.license_of(args.dataset_name)) if accelerator.is_main_process else None
    model, processor = training.build_model(
        labels,
        args.model_name_or_path,
        args.preset,
        args.image_size,
        presets.overrides(args.config_overrides),
        args.eval_crop,
    )
    form = data.image_form(processor, model.config)
    train_form = data.training_form(form, None if stream else splits["train"], args.crop, args.crop_scale)
    say(f"reading {len(eval_rows) + (0 if stream else len(splits['train'])):,} images")
    eval_images = data.Images(eval_rows, form, args.on_bad_image)
    if stream:
        train_images = data.Stream(
            stream, labels, train_form, args.seed, args.shuffle_buffer, args.on_bad_image, args.stream_lanes
        )
    else:
        train_images = data.Images(splits["train"], train_form, args.on_bad_image, fill=True, seed=args.seed)
    reading_seconds = time.monotonic() - reading_began
    unscored = [label for index, label in enumerate(labels) if not (eval_images.labels == index).any()]
    if unscored:
        say(
            f"no image of {', '.join(unscored[:5])}{' ...' if len(unscored) > 5 else ''} is among those that are scored"
        )
    workers = args.num_workers
    if workers is None:
        workers = min(32, hardware.own_cores())

    # Model: whole, or in part frozen, or with low-rank updates; a teacher beside it
    training.freeze(model, args.freeze_backbone, args.freeze_layers)
    training.check_first_size(args.first_image_size, model.config)
    backbone = model.vit
    if args.lora_rank > 0:
        model = training.add_lora(model, args.lora_rank, args.lora_alpha, args.lora_dropout)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parameters = sum(p.numel() for p in model.parameters())
    unsharded, sharded = model, accelerator.distributed_type == DistributedType.FSDP
    if sharded:
        unsharded = copy.deepcopy(model)  # takes the weights of all processes to score and save them
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if not sharded:  # a model that one device does not hold goes there in parts, when it is prepared
        model.to(device)
    features_began = time.monotonic()
    if args.cache_features:
        if sharded:
            raise ValueError("--cache_features trains a head, which FSDP has no need to split: use ddp.yaml")
        say(f"computing the features of {len(train_images):,} images")
        share = data.batches_in_order(len(train_images), args.per_device_eval_batch_size, rank, world)
        seen_by_head = training.predict(
            model, data.loader(train_images, share, workers), form, accelerator, len(train_images), features=True,
            split=args.train_split,
        )  # fmt: skip
        train_images = data.Features(train_images, *seen_by_head)
    features_seconds = time.monotonic() - features_began
    teacher = None
    if args.teacher_name_or_path is not None:
        teacher = training.Teacher(args.teacher_name_or_path, labels, form, device)
    weights = None
    if args.balance == "weights":
        weights = data.class_weights(train_images.labels, len(labels)).to(device)

    def loss_of(model, pixel_values, targets, **kwargs):
        """The loss of a batch (B, C, H, W) with targets (B, L), and its logits (B, L); of features (B, D), if they are cached."""
        answer = model(pixel_values, **kwargs)
        logits = answer if args.cache_features else answer.logits
        loss = training.loss_of(logits, targets, args.loss, weights)
        if teacher is not None:
            with accelerator.autocast():
                answers = teacher(pixel_values)
            taught = training.distillation_loss(logits, answers, args.distillation_temperature)
            loss = (1 - args.distillation_alpha) * loss + args.distillation_alpha * taught
        return loss, logits

    # Batch size, optimizer, steps
    batch, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if args.auto_find_batch_size and not args.cache_features and not sharded:  # a trial would need the whole model

        def trial(pixel_values):
            with accelerator.autocast():
                return loss_of(
                    model, pixel_values, torch.full((len(pixel_values), len(labels)), 1 / len(labels), device=device)
                )[0]

        model.train()
        copies = (
            2 + (args.ema_decay > 0) + (world > 1)
        )  # of the trainable weights: AdamW's, the average, DDP's buckets
        fitting = training.find_batch_size(model, trial, form, batch, device, copies)
        fitting = int(accelerator.gather(torch.tensor([fitting], device=device)).min())
        if fitting < batch:
            say(f"{batch} images do not fit in memory: {batch // fitting} x {fitting} instead, to the same effect")
            batch, accumulation = fitting, accumulation * (batch // fitting)
    accelerator.gradient_accumulation_steps = accumulation
    betas = (args.adam_beta1, args.adam_beta2)
    optimizers = training.build_optimizers(
        model, args.optimizer, args.learning_rate, args.weight_decay, betas, args.layer_decay
    )
    if args.cache_features:
        model = training.head_of(model)
    together = batch * accumulation  # images a process and step
    an_epoch = None if stream else max(1, len(train_images) // (together * world))  # steps
    if not stream and args.num_train_epochs is None:
        args.num_train_epochs = training.default_epochs(len(train_images), args.model_name_or_path is None)
    total_steps = args.max_train_steps or max(1, round(args.num_train_epochs * an_epoch))
    warmup_steps = round(args.warmup_ratio * total_steps)
    first_stage = round(args.first_stage * total_steps) if args.first_image_size else 0
    if hardware.pick_compile(args.compile, device.type, total_steps):
        training.compile_model(model, sharded)
    model, *optimizers = accelerator.prepare(model, *optimizers)
    network = accelerator.unwrap_model(model)
    average = training.AverageModel(network, args.ema_decay) if args.ema_decay > 0 else None

    # Where the run stands: at its beginning, or where a checkpoint left it
    facts = {
        "images_per_step": together * world,
        "steps": total_steps,
        "mixed_precision": accelerator.mixed_precision,
        "training_images": f"{stream.num_shards} shards" if stream else len(train_images),
        "classes": len(labels),
        "checksum_of_labels": zlib.crc32(
            "\n".join(labels).encode() + (b"" if stream else train_images.labels.numpy().tobytes())
        ),
    }
    step, epoch, scored_step, resumed_at = 0, 0, 0, []  # resumed_at: the steps that the run was taken up at
    starts = []  # what each life of the run ran on
    best, skipped_steps = None, []  # best: the scores of checkpoints/best-N
    # Before this start; of training, what passes until a batch is ready, and what the model and its optimizers take.
    seconds = {"training": 0.0, "scoring": 0.0, "input": 0.0, "model": 0.0, "total": 0.0}
    sums = torch.zeros(3, device=device)  # of the loss, of correct images, of images, since the last log line
    if state is not None:
        if changed := [name for name in facts if state["facts"].get(name) != facts[name]]:
            fitting = state["facts"]["images_per_step"] / (world * accumulation)
            raise ValueError(
                f"{state['folder']} does not fit: "
                + "; ".join(f"{name} was {state['facts'].get(name)} and is {facts[name]}" for name in changed)
                + ". Wanted the same data, length and precision, and as many images a step"
                + (f": --per_device_train_batch_size {fitting:g}" if "images_per_step" in changed else "")
            )
        resume.restore(tensors, network, optimizers, average, accelerator)
        del tensors  # as large as the model and its optimizers
        step, epoch, scored_step, skipped_steps, seconds = (
            state[name] for name in ("step", "epoch", "scored_step", "skipped_steps", "seconds")
        )
        resumed_at = [*state["resumed_at"], step]
        starts = state.get("lives", [])  # a checkpoint of an earlier version has none
        if average is not None:
            average.step = state["average_step"]
        if accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(state["scaler"])
        held = torch.tensor(state["sums"], device=device)  # (processes, 3)
        sums = held[rank] if len(held) == world else held.sum(dim=0) * (rank == 0)
        train_images.skipped.update(dict.fromkeys(state["skipped_images"]))
        if stream:
            train_images.lengths = {int(shard): length for shard, length in state["lengths"].items()}
        say(f"going on after step {step:,}, from {state['folder']}")
    if accelerator.is_main_process:
        rows = {"eval": eval_rows} if stream else splits  # a stream is not read twice
        model_of_teacher = None if teacher is None else teacher.model
        life = lives.life(step, device.type, world, accelerator.mixed_precision, model_of_teacher, rows)
        for change in lives.changes(starts[-1], life) if starts else ():
            say(f"WARNING: {change}: the run goes on, and may end otherwise than it would have")
        starts = [*starts, life]
    saved_step = step

    say(
        f"{args.dataset_name}: {', '.join(labels[:10])}{' ...' if len(labels) > 10 else ''}\n"
        + ("a stream of images" if stream else f"{len(train_images):,} images")
        + f" to train on, {len(eval_images):,} to score ({scored}), {len(labels)} classes\n"
        f"{parameters:,} parameters"
        + (f" ({trained:,} trained)" if trained < parameters else "")
        + f", {form.height}x{form.width} pixels, {total_steps:,} steps"
        + ("" if stream else f" in {total_steps / an_epoch:.4g} epochs")
        + f", on {device} x {world}"
        + (", sharded" if isinstance(network, FSDPModule) else "")
        + f" (mixed precision: {accelerator.mixed_precision})"
    )

    def open_folder():
        if state is None:
            resume.clear(run)
            found = None
        else:
            found = resume.take_over(Path(state["folder"]).parents[1], run, step)
            if found is not None:
                run_files.check_shape(found[1], resume.SCORES, str(found[0] / "scores.json"))
        write_text(run / resume.STARTED, presets.as_yaml(args))
        return found and found[1]["metrics"]

    best = resume.on_main(accelerator, open_folder)
    if best is None and step == total_steps:
        scored_step = 0  # its best weights are lost: score the last ones again
    if args.report_to != "none":
        told = {key: value for key, value in vars(args).items() if value is not None}
        accelerator.init_trackers("hf_vit", told, {"tensorboard": {"purge_step": step + 1}} if step else {})

    def note(**line):
        if accelerator.is_main_process:
            with open(run / "metrics.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")

    def trained_for() -> float:
        """Seconds of training so far, in all lives of the run, without scoring."""
        return round(seconds["training"] + time.monotonic() - training_began - seconds["scoring"], 3)

    def log(step, epoch, **values):
        note(step=step, epoch=epoch, **values)
        accelerator.log({key: value for key, value in values.items() if value is not None}, step=step)

    def train_batches(first):
        """(epoch, rows) of each pass from step number `first` on, without an end; the rows are this process's share."""
        starts = range(0, together, batch)
        if stream:
            for epoch, rows in train_images.batches(first, together, rank, world):
                for start in starts:
                    yield epoch, {key: value[start : start + batch] for key, value in rows.items()}

        def order():
            shares = train_images.labels.numpy() if args.balance == "sampling" else None
            for epoch in itertools.count(first // an_epoch):
                steps = data.epoch_batches(
                    len(train_images), together, args.seed, epoch, rank, world, shares, args.augment_repeats
                )
                for ids in itertools.islice(steps, max(0, first - epoch * an_epoch), None):
                    ids = [epoch * data.PASS + number for number in ids]
                    yield from (ids[start : start + batch] for start in starts)

        for number, rows in enumerate(data.loader(train_images, order(), workers)):
            yield (first + number // accumulation) // an_epoch, rows

    def prepare(rows, epoch, step):
        """What the model is shown of these rows, and asked to say: inputs (B, C, H, W) or features (B, D), targets (B, L)."""
        # The ids of a stream's images are others in each epoch.
        time_and_place = (args.seed, 0, step) if stream else (args.seed, epoch, step % an_epoch)
        inputs = rows["images"]
        if not args.cache_features:
            inputs = augment(
                inputs, rows["index"], *time_and_place[:2], form,
                crop="none" if train_form.crop_scale else args.crop, crop_scale=args.crop_scale, shift=args.shift, flip=args.flip,
                auto_augment=args.auto_augment, magnitude=args.rand_magnitude, jitter=args.color_jitter, erase=args.erase,
            )  # fmt: skip
        targets = training.soft_targets(rows["labels"], len(labels), args.label_smoothing)
        # All passes of one step are mixed alike: as one large batch would be.
        return mix(inputs, targets, args.mixup, args.cutmix, *time_and_place)

    def prepared_batches(first):
        """Each pass from step number `first` to the last, on its device: epoch, inputs, targets (B, L), and its rows."""
        passes = (total_steps - first) * accumulation
        for number, (epoch, rows) in enumerate(itertools.islice(train_batches(first), passes)):
            step = first + number // accumulation
            on_device = {key: rows[key].to(device, non_blocking=True) for key in ("images", "labels")}
            rows = {**rows, **on_device}  # the ids stay: numbers are drawn by them, and rows chosen
            inputs, targets = prepare(rows, epoch, step)
            del rows["images"]
            if step < first_stage:
                inputs = training.shrink(inputs, args.first_image_size)
            yield epoch, inputs, targets, rows

    def pictures(best_model, lines, details, matrix, samples):
        """The run's pictures by their names: how it went, where it errs, what it says of single images and what it looks at."""
        yield "curves", figures.curves(lines)
        yield "confusion", figures.confusion(matrix, labels)
        yield "calibration", figures.calibration(details["calibration"])
        if form.channels not in (1, 3):
            return
        some = {name: samples[name] for name in ("images", "labels", "logits")}
        pixel_values = normalize(some["images"], form)
        some["images"] = as_bytes(pixel_values, form)
        yield "predictions", figures.predictions(**some, names=labels)
        if "mistaken_images" in samples:
            wrong = {name: samples[f"mistaken_{name}"] for name in some}
            wrong["images"] = as_bytes(normalize(wrong["images"], form), form)
            yield "mistakes", figures.predictions(**wrong, names=labels)
        if not stream and not args.cache_features and form.processor is None:
            places = range(0, len(train_images), -(-len(train_images) // 4))
            epochs = [train_images.__getitems__([epoch * data.PASS + place for place in places]) for epoch in range(5)]
            shown = [prepare(rows, epoch, epoch * an_epoch) for epoch, rows in enumerate(epochs)]
            rows = train_images.rows.select((epochs[0]["index"] % len(train_images)).tolist())
            whole = data.Images(rows, replace(train_form, crop_scale=None)).cache
            titles = [[figures.shorten(labels[label], 14) for label in epochs[0]["labels"]]]
            titles += [figures.in_shares(targets, labels) for _, targets in shown]
            versions = [as_bytes(inputs, form) for inputs, _ in shown]
            yield "augmentations", figures.augmentations(whole, versions, titles)
        captions = figures.answers(some["logits"][:4], labels)
        yield from figures.of_model(best_model, some["images"][:4], pixel_values[:4].to(device), captions).items()

    @contextlib.contextmanager
    def finished_model():
        """The model to score and to save: with the averaged weights, where there are some, and whole on each process."""
        with contextlib.nullcontext() if average is None else average.applied(network):
            if sharded:
                unsharded.load_state_dict(resume.weights_of(network))
                unsharded.to(device)
            yield unsharded
            if sharded:
                unsharded.cpu()

    def write_model(model, folder):
        training.save_model(model, folder, args.lora_save)
        processor.save_pretrained(folder)

    def checkpoint():
        tensors = resume.collect(network, optimizers, average, wanted=accelerator.is_main_process)
        lengths = train_images.lengths if stream else {}
        each = gather_object(
            [{"sums": sums.tolist(), "skipped": list(train_images.skipped), "lengths": dict(lengths)}]
        )
        now = time.monotonic()
        state = {
            "step": step,
            "epoch": epoch,
            "scored_step": scored_step,
            "resumed_at": resumed_at,
            "skipped_steps": skipped_steps,
            "average_step": None if average is None else average.step,
            "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
            "sums": [one["sums"] for one in each],
            "skipped_images": sorted({text for one in each for text in one["skipped"]}),
            "lengths": {shard: length for one in each for shard, length in one["lengths"].items()},
            "seconds": {
                "training": seconds["training"] + now - training_began,
                **{name: seconds[name] for name in ("scoring", "input", "model")},
                "total": seconds["total"] + now - began,
            },
            "facts": facts,
            "lives": starts,
            "config": yaml.safe_load(presets.as_yaml(args)),
        }
        resume.on_main(accelerator, lambda: resume.save_checkpoint(run, tensors, state, args.checkpoints_total_limit))

    # A test split selects nothing: only a validation split, or a part of train, decides which weights are kept.
    selects = not scored.startswith("test")
    if not selects:
        say("test images select nothing: the last weights are kept (a split called validation would keep the best)")

    def score():
        """Score the weights, and keep them if they are the best; False where a signal came in between."""
        nonlocal best
        trained = trained_for()
        with finished_model() as model:
            share = data.batches_in_order(len(eval_images), args.per_device_eval_batch_size, rank, world)
            answers = training.predict(
                model, data.loader(eval_images, share, workers), form, accelerator, len(eval_images),
                stopped=lambda: signals.asked is not None, split=scored,
            )  # fmt: skip
            if answers is None:
                return False
            logits, truth = answers[0], eval_images.labels[answers[1]]
            metrics = {**training.score(logits, truth), "step": step, "epoch": epoch + 1}
            merit = lambda metrics: (metrics["accuracy"], -metrics["loss"])
            better = best is None or merit(metrics) > merit(best)
            if better if selects else step == total_steps:

                def keep():
                    scores = {"metrics": metrics, "images": len(truth), **training.report(logits, truth, labels)}
                    size = sum(parameter.nbytes for parameter in model.parameters())
                    drawn = torch.Generator().manual_seed(args.seed)
                    drawn = torch.randperm(len(truth), generator=drawn)[: sharing.NUM_SAMPLES]
                    samples = {}
                    for prefix, rows in (("", drawn), ("mistaken_", figures.mistakes(truth, logits))):
                        if len(rows):
                            samples[f"{prefix}images"] = eval_images.__getitems__(answers[1][rows].tolist())["images"]
                            samples |= {f"{prefix}labels": truth[rows], f"{prefix}logits": logits[rows]}

                    def write(folder):
                        write_model(model, folder)
                        save_file(samples, folder / sharing.SAMPLES)

                    resume.save_best(run, step, scores, size, write)

                resume.on_main(accelerator, keep)
                best = metrics
            say(
                f"step {step:,}, epoch {epoch + 1}: {scored} accuracy {metrics['accuracy']:.2%}, loss {metrics['loss']:.4f}"
            )
            scores = {key if key in ("step", "epoch") else f"eval_{key}": value for key, value in metrics.items()}
            log(**scores, seconds=trained)
        return True

    def leave(code):
        signals.answer(signal.SIG_IGN)
        processes.part(accelerator, ended)
        accelerator.end_training()
        if world > 1 or code:  # gloo may hang where connections are taken apart, a stream where it is read
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def is_scored(step):
        every = args.eval_steps if args.eval_steps is not None else args.eval_epochs * an_epoch
        return step % every == 0 or step == total_steps

    bar = tqdm(
        total=total_steps,
        initial=step,
        unit="step",
        mininterval=1 if sys.stderr.isatty() else 20,  # in a log file, a line now and then
        disable=not accelerator.is_main_process,
    )
    batches = training.Prefetcher(prepared_batches(step))
    seconds["training"] += features_seconds
    training_began = saved_at = logged_at = time.monotonic()
    logged_step, wanted, stopped = step, False, False  # wanted: a checkpoint
    settled = True  # whether weights, optimizers and counters are all of one step
    processes.shorten_timeout()
    signals.training = True
    try:
        while True:
            # Between two steps: score, save, leave
            if scored_step < step and is_scored(step) and not stopped:
                paused = time.monotonic()
                stopped = not score()
                if not stopped:
                    scored_step = step
                seconds["scoring"] += time.monotonic() - paused
                logged_at += time.monotonic() - paused
            if saved_step < step and (wanted or stopped or (step == total_steps and args.checkpointing_steps != 0)):
                checkpoint()
                saved_step, saved_at = step, time.monotonic()
            if stopped:
                say(
                    f"stopped by {signals.asked or 'a signal'} after step {step:,}: the same command goes on from there"
                )
                leave(resume.STOPPED)
            if step == total_steps:
                break

            # One step: as many passes as it accumulates
            step_began, input_before = time.monotonic(), seconds["input"]
            model.train()
            if args.freeze_backbone:
                backbone.eval()  # no dropout in what is not trained
            rate = training.learning_rate(
                step, total_steps, warmup_steps, args.learning_rate, args.lr_scheduler_type, args.lr_decay_ratio, args.lr_stages
            )  # fmt: skip
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate * group["lr_scale"]
            step_sums, ids = torch.zeros(3, device=device), []
            for number in range(accumulation):
                waited = time.monotonic()
                epoch, inputs, targets, rows = next(batches)
                seconds["input"] += time.monotonic() - waited
                ids.append(rows["index"])
                sized = {"interpolate_pos_encoding": True} if step < first_stage else {}
                training.seed_pass(args.seed, step, number, rank)
                with accelerator.accumulate(model):
                    loss, logits = loss_of(model, inputs, targets, **sized)
                    accelerator.backward(loss)
                if device.type == "cuda":  # read and augmented while the device is at work
                    batches.prefetch()
                with torch.no_grad():
                    correct = (logits.argmax(1) == rows["labels"]).sum()
                    step_sums += torch.stack(
                        [loss.detach().float() * len(targets), correct, torch.full_like(correct, len(targets))]
                    )
            norm = training.clip_gradients(accelerator, model, args.max_grad_norm)

            # What all processes must agree on: whether the step is fit to be taken, and what comes after it
            scale = 1.0 if accelerator.scaler is None else accelerator.scaler.get_scale()
            fit = training.is_fit(step_sums[0], norm, scale)
            if args.checkpointing_steps is None:
                wanted = time.monotonic() - saved_at > SECONDS_BETWEEN_CHECKPOINTS
            else:
                wanted = args.checkpointing_steps > 0 and (step + 1) % args.checkpointing_steps == 0
            asked = torch.tensor([signals.asked is not None, wanted and accelerator.is_main_process], device=device)
            unfit, stopped, wanted = (
                count > 0 for count in accelerator.reduce(torch.cat([~fit.view(1), asked]).float(), "sum").tolist()
            )
            if unfit:
                rows = gather_object(train_images.row_numbers(torch.cat(ids)))
                if len(skipped_steps) >= args.max_skipped_steps:
                    raise FloatingPointError(
                        f"the loss or its gradient was not finite in step {step + 1:,}"
                        + (f", and before in {', '.join(map(str, skipped_steps))}" if skipped_steps else "")
                        + f": learning rate {rate:.3g}, rows {', '.join(map(str, rows[:64]))}{' ...' if len(rows) > 64 else ''} of "
                        "the training images. Look at these images, or begin a new run with a smaller --learning_rate; "
                        "--max_skipped_steps allows more of such steps"
                    )
                skipped_steps.append(step + 1)
                say(f"step {step + 1:,} is skipped: its loss or gradient is not finite")
                note(step=step + 1, epoch=epoch + 1, skipped=True, learning_rate=rate, rows=rows)
            settled = False
            if not unfit:
                for optimizer in optimizers:
                    optimizer.step()
                if average is not None:
                    average.update(network)
                sums += step_sums
            elif accelerator.scaler is not None:
                accelerator.scaler.update()  # which the optimizer's step would have done
            for optimizer in optimizers:
                optimizer.zero_grad()
            step += 1
            settled = True
            seconds["model"] += time.monotonic() - step_began - (seconds["input"] - input_before)
            bar.update()

            if step % args.log_steps == 0 or step == total_steps:
                total_loss, correct, seen = accelerator.reduce(sums, reduction="sum").tolist()
                now = time.monotonic()
                speed = (step - logged_step) * together * world / (now - logged_at)
                mean = {} if seen == 0 else {"loss": total_loss / seen, "accuracy": correct / seen}
                bar.set_postfix(
                    **{f"train_{name}": f"{value:.3f}" for name, value in mean.items()},
                    images_per_second=f"{speed:,.0f}",
                    **hardware.peak_memory(device),
                    refresh=False,
                )
                log(
                    step, epoch + 1, **mean, learning_rate=rate, gradient_norm=norm.item() if norm.isfinite() else None,
                    images_per_second=speed, seconds=trained_for(),
                )  # fmt: skip
                sums.zero_()
                logged_step, logged_at = step, now
    except Exception:
        if settled and saved_step < step and world == 1:
            with contextlib.suppress(Exception):  # it must not hide what went wrong
                checkpoint()
                saved_step = step
        if saved_step > 0:
            say(f"stopped in step {step + 1:,}: the same command goes on from step {saved_step:,}")
        raise
    finally:
        batches.close()
        bar.close()
    training_seconds = seconds["training"] + time.monotonic() - training_began

    # The run's results, and the card that is made from them
    skipped = sorted(set(gather_object([*train_images.skipped, *eval_images.skipped])))
    if selects and best["step"] != total_steps:
        with finished_model() as model:
            if accelerator.is_main_process:
                with atomic_dir(run / "last") as folder:
                    write_model(model, folder)
    if accelerator.is_main_process:
        if (found := resume.load_best(run)) is None:
            raise OSError("the best weights cannot be read back: the same command scores the last ones again")
        folder, details = found
        resume.publish(folder, run / "model", leave_out=("scores.json", sharing.SAMPLES))
        run_files.copy_file(folder / sharing.SAMPLES, run / sharing.SAMPLES)
        matrix = details.pop("confusion_matrix")
        table, names = io.StringIO(), [escapes.csv_cell(label) for label in labels]
        rows = [[name, *counts] for name, counts in zip(names, matrix, strict=True)]
        csv.writer(table).writerows([["true class", *names], *rows])
        write_text(run / "confusion_matrix.csv", table.getvalue())
        log_lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        samples = load_file(run / sharing.SAMPLES)
        best_model = training.load_classifier(str(run / "model"))
        apart = training.logits_apart(best_model, samples["images"], samples["logits"], form, accelerator)
        if not apart <= (tolerance := training.LOGITS_TOLERANCE[accelerator.mixed_precision]):
            say(
                f"WARNING: the model in {run / 'model'} does not give the logits that were scored: they differ by {apart:.2g} of "
                f"the largest, at most {tolerance:g} was expected; do not trust the scores of this run, and report it"
            )
        (run / "model" / "figures").mkdir()
        try:
            for name, figure in pictures(best_model, log_lines, details, matrix, samples):
                figures.save(figure, run / "model" / "figures" / f"{name}.png")
        except Exception as error:  # hours of training are worth more than their pictures
            say(f"not all pictures could be drawn ({type(error).__name__}: {error})")
        if form.channels in (1, 3):
            example = samples["images"][0].permute(1, 2, 0).squeeze(2)  # (C, H, W) -> (H, W, 3) or (H, W)
            Image.fromarray(example.numpy()).save(run / "model" / "example.png")
        scored_images = details.pop("images")
        launch = f"accelerate launch --config_file recipes/accelerate/{'fsdp2' if sharded else 'ddp'}.yaml"
        on_hub = lambda name: None if name in (None, *data.EMBEDDED) or Path(name).expanduser().exists() else name
        results = {
            "metrics": details.pop("metrics"),
            "metrics_of": f"{scored}, "
            + ("the best scoring, kept in model/" if selects else "the last scoring, in model/"),
            **details,
            "train_seconds": round(training_seconds, 1),
            "total_seconds": round(seconds["total"] + time.monotonic() - began, 1),
            "seconds": {
                "reading": round(reading_seconds, 1),
                **{name: round(seconds[name], 1) for name in ("input", "model", "scoring")},
            },
            "images_per_second": round(step * together * world / (training_seconds - seconds["scoring"]), 1),
            "steps": step,
            "images_per_step": together * world,
            "skipped_steps": skipped_steps,
            "resumed_at_steps": resumed_at,
            "lives": starts,
            "image_size": [form.height, form.width],
            "parameters": parameters,
            "trained_parameters": trained,
            "attention_query": backbone.attention_query,
            "answer": sharing.in_words(samples["logits"][0], labels),  # to example.png
            "saved_logits_apart": apart,
            "weights_sha256": checksum(sharing.weights_of(run / "model")),
            "seed": args.seed,
            "preset": args.preset or args.model_name_or_path,
            "base_model_hub_id": on_hub(args.model_name_or_path),
            "command": ("python " if world == 1 else f"{launch} --num_processes {world} ") + shlex.join(sys.argv),
            **environment.environment_info(device.type, world, accelerator.mixed_precision),
            "data": {
                "name": args.dataset_name,
                "hub_id": on_hub(args.dataset_name),
                "config": args.dataset_config,
                "license": data_license,
                "train_images": None if stream else len(train_images),
                "scored_images": scored_images,
                "scored": scored,
                "labels": labels,
                "skipped_images": len(skipped),
                "skipped_first": skipped[:20],
                "fingerprints": {} if stream else {name: part._fingerprint for name, part in splits.items()},
            },
        }
        sharing.write_card(run / "model", TEMPLATE, results, presets.as_yaml(args))
        write_text(run / resume.FINISHED, json.dumps(results, indent=2) + "\n")
        if skipped:
            say(f"{len(skipped)} images could not be read and were skipped; {skipped[0]}")
        low, high = results["intervals"]["accuracy"]
        print(
            f"accuracy on {scored}: {results['metrics']['accuracy']:.2%} (95% interval {low:.2%} to {high:.2%}); "
            f"the model is in {run / 'model'}"
        )
    leave(0)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        told = (ValueError, OSError, FloatingPointError, StrictDataclassError)  # a traceback would hide the sentence
        processes.leave_after(error, in_a_sentence=isinstance(error, told))

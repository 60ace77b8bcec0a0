"""Train or fine-tune a Vision Transformer on any image data set: one run, top to bottom.

    accelerate launch recipes/train.py --config recipes/configs/demo.yaml [--key value ...]

Every key is a field of `hf_vit.presets.TrainArguments`. The run folder then holds

    config.yaml     what was resolved; `--config` on it repeats the run
    metrics.jsonl   a line a log step and a line a scoring
    model/          config, weights, image processor, code and card: ready for `from_pretrained` and for the Hub
    last/           the last weights, where model/ holds those of an earlier, better scoring
    results.json    metrics with their intervals, scores of each class, times, seed, commit, command, hardware, versions, data
    confusion_matrix.csv   a row a true class, a column an answer
"""

import contextlib
import csv
import itertools
import json
import os
import shlex
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path


# This folder holds evaluate.py, which would hide the library of that name.
sys.path = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, gather_object, set_seed
from huggingface_hub.errors import StrictDataclassError
from tqdm import tqdm

from hf_vit import data, presets, sharing, training
from hf_vit.augment import augment, mix


TEMPLATE = Path(__file__).resolve().parents[1] / "model_cards" / "template.md"


def main():
    began = time.time()
    args = presets.parse(sys.argv[1:])
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    accelerator = Accelerator(
        mixed_precision=training.pick_precision(args.mixed_precision, device_type),
        log_with=training.trackers(args.report_to) or None,
        project_dir=args.output_dir,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=6))],  # one process may download for hours
    )
    if accelerator.device.type == "cpu":
        training.use_all_cores()
    set_seed(args.seed)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    if not accelerator.is_main_process:
        transformers.utils.logging.set_verbosity_error()
    if args.optimizer == "muon" and accelerator.mixed_precision == "fp16":
        raise ValueError("muon does not go with fp16, whose loss scaling knows one optimizer: use bf16, or adamw")
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes
    run = Path(args.output_dir)
    if (run / "config.yaml").exists() and not args.overwrite:
        state = "a finished" if (run / "results.json").exists() else "an unfinished"
        raise ValueError(f"{run} already holds {state} run: choose another --output_dir, or pass --overwrite true")
    accelerator.wait_for_everyone()

    def say(text):
        if accelerator.is_main_process:
            tqdm.write(text)

    # Data: uint8 images in memory where they fit, else decoded by workers
    columns = {key: getattr(args, key) for key in ("train_split", "eval_split", "image_column", "label_column")}
    columns["label_names"] = presets.read_names(args.label_names)
    with accelerator.main_process_first():
        splits = data.load(args.dataset_name, args.dataset_config, args.streaming)
        if args.streaming:
            stream, eval_rows, labels, scored = data.prepare_stream(splits, **columns)
        else:
            sizes = {key: getattr(args, key) for key in ("eval_fraction", "train_fraction", "shots", "seed")}
            splits, labels, scored = data.prepare(splits, **columns, **sizes)
            stream, eval_rows = None, splits["eval"]
    model, processor = training.build_model(
        labels, args.model_name_or_path, args.preset, args.image_size, presets.overrides(args.config_overrides)
    )
    form = data.image_form(processor, model.config)
    train_form = data.training_form(form, None if stream else splits["train"], args.crop, args.crop_scale)
    say(f"reading {len(eval_rows) + (0 if stream else len(splits['train'])):,} images")
    eval_images = data.Images(eval_rows, form, args.on_bad_image)
    if stream:
        train_images = data.Stream(stream, labels, train_form, args.seed, args.shuffle_buffer, args.on_bad_image)
    else:
        train_images = data.Images(splits["train"], train_form, args.on_bad_image, fill=True)
    unscored = [label for index, label in enumerate(labels) if not (eval_images.labels == index).any()]
    if unscored:
        say(
            f"no image of {', '.join(unscored[:5])}{' ...' if len(unscored) > 5 else ''} is among those that are scored"
        )
    workers = args.num_workers
    if workers is None:
        workers = min(8, max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))

    # Model: whole, or in part frozen, or with low-rank updates; a teacher beside it
    model.to(device)
    training.freeze(model, args.freeze_backbone, args.freeze_layers)
    training.check_first_size(args.first_image_size, model.config)
    backbone = model.vit
    if args.lora_rank > 0:
        model = training.add_lora(model, args.lora_rank, args.lora_alpha, args.lora_dropout)
    teacher = None
    if args.teacher_name_or_path is not None:
        teacher = training.Teacher(args.teacher_name_or_path, labels, form, device)
    weights = None
    if args.balance == "weights":
        weights = data.class_weights(train_images.labels, len(labels)).to(device)
    average = training.AverageModel(model, args.ema_decay) if args.ema_decay > 0 else None
    network = model
    set_seed(args.seed, device_specific=True)  # each process drops other paths and patches

    def loss_of(model, pixel_values, targets, **kwargs):
        """The loss of a batch (B, C, H, W) with targets (B, L), and its logits (B, L)."""
        logits = model(pixel_values, **kwargs).logits
        loss = training.loss_of(logits, targets, args.loss, weights)
        if teacher is not None:
            with accelerator.autocast():
                answers = teacher(pixel_values)
            taught = training.distillation_loss(logits, answers, args.distillation_temperature)
            loss = (1 - args.distillation_alpha) * loss + args.distillation_alpha * taught
        return loss, logits

    # Batch size, optimizer, steps
    batch, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if args.auto_find_batch_size:

        def trial(pixel_values):
            with accelerator.autocast():
                return loss_of(
                    network, pixel_values, torch.full((len(pixel_values), len(labels)), 1 / len(labels), device=device)
                )[0]

        network.train()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # the run is the same without the trial
            fitting = training.find_batch_size(network, trial, form, batch, device)
        fitting = int(accelerator.gather(torch.tensor([fitting], device=device)).min())
        if fitting < batch:
            say(f"{batch} images do not fit in memory: {batch // fitting} x {fitting} instead, to the same effect")
            batch, accumulation = fitting, accumulation * (batch // fitting)
    accelerator.gradient_accumulation_steps = accumulation
    if training.pick_compile(args.compile, device.type):
        model.compile()
    betas = (args.adam_beta1, args.adam_beta2)
    optimizers = training.build_optimizers(
        model, args.optimizer, args.learning_rate, args.weight_decay, betas, args.layer_decay
    )
    model, *optimizers = accelerator.prepare(model, *optimizers)

    together = batch * accumulation  # images a process and step
    passes_an_epoch = None if stream else accumulation * max(1, len(train_images) // (together * world))
    if not stream and args.num_train_epochs is None:
        args.num_train_epochs = training.default_epochs(len(train_images), args.model_name_or_path is None)
    total_steps = args.max_train_steps or max(1, round(args.num_train_epochs * passes_an_epoch / accumulation))
    warmup_steps = round(args.warmup_ratio * total_steps)
    first_stage = round(args.first_stage * total_steps) if args.first_image_size else 0

    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    parameters = sum(p.numel() for p in network.parameters())
    say(
        f"{args.dataset_name}: {', '.join(labels[:10])}{' ...' if len(labels) > 10 else ''}\n"
        + ("a stream of images" if stream else f"{len(train_images):,} images")
        + f" to train on, {len(eval_images):,} to score ({scored}), {len(labels)} classes\n"
        f"{parameters:,} parameters"
        + (f" ({trained:,} trained)" if trained < parameters else "")
        + f", {form.height}x{form.width} pixels, {total_steps:,} steps"
        + ("" if stream else f" in {total_steps * accumulation / passes_an_epoch:.4g} epochs")
        + f", on {device} x {world} (mixed precision: {accelerator.mixed_precision})"
    )
    if accelerator.is_main_process:
        for name in ("model", "last"):
            shutil.rmtree(run / name, ignore_errors=True)
        for name in ("metrics.jsonl", "results.json", "confusion_matrix.csv"):
            (run / name).unlink(missing_ok=True)
        run.mkdir(parents=True, exist_ok=True)
        (run / "config.yaml").write_text(presets.as_yaml(args))
    if args.report_to != "none":
        accelerator.init_trackers("hf_vit", {key: value for key, value in vars(args).items() if value is not None})

    def log(step, epoch, **values):
        if accelerator.is_main_process:
            with open(run / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": step, "epoch": epoch, **values}) + "\n")
        accelerator.log(values, step=step)

    def train_batches(epoch):
        """This process's batches of one epoch, as many for each step as it accumulates."""
        starts = range(0, together, batch)
        if stream:
            steps = train_images.batches(epoch, together, rank, world)
            return (
                {key: value[start : start + batch] for key, value in rows.items()}
                for rows in steps
                for start in starts
            )
        shares = train_images.labels.numpy() if args.balance == "sampling" else None
        order = data.epoch_batches(
            len(train_images), together, args.seed, epoch, rank, world, shares, args.augment_repeats
        )
        passes = [ids[start : start + batch] for ids in order for start in starts]
        return data.loader(train_images, passes, workers)

    def evaluate():
        share = data.batches_in_order(len(eval_images), args.per_device_eval_batch_size, rank, world)
        logits, rows = training.predict(
            network if average is None else average.model,
            data.loader(eval_images, share, workers),
            form,
            accelerator,
            len(eval_images),
        )
        return logits, eval_images.labels[rows]

    def save(folder):
        if accelerator.is_main_process:
            training.save_model(network if average is None else average.model, folder, args.lora_save)
            processor.save_pretrained(folder)

    # A test split selects nothing: only a validation split, or a part of train, decides which weights are kept.
    selects = not scored.startswith("test")
    if not selects:
        say("test images select nothing: the last weights are kept (a split called validation would keep the best)")
    step, best, answers = 0, None, None  # best: the metrics of model/; answers: the logits and labels behind them
    loss_sum = torch.zeros(3, device=device)  # of the loss, of correct images, of images, since the last log line
    gradient_norm = torch.zeros(())
    scoring_seconds, training_began = 0.0, time.time()
    since = training_began
    bar = tqdm(
        total=total_steps,
        unit="step",
        mininterval=1 if sys.stderr.isatty() else 20,  # in a log file, a line now and then
        disable=not accelerator.is_main_process,
    )
    try:
        for epoch in itertools.count():
            passes = 0
            for number, rows in enumerate(train_batches(epoch)):
                model.train()
                if args.freeze_backbone:
                    backbone.eval()  # no dropout in what is not trained
                passes += 1
                rows = {key: value.to(device, non_blocking=True) for key, value in rows.items()}
                pixel_values = augment(
                    rows["images"], rows["index"], args.seed, epoch, form,
                    crop=args.crop, crop_scale=args.crop_scale, shift=args.shift, flip=args.flip,
                    auto_augment=args.auto_augment, magnitude=args.rand_magnitude, jitter=args.color_jitter, erase=args.erase,
                )  # fmt: skip
                targets = training.soft_targets(rows["labels"], len(labels), args.label_smoothing)
                # All passes of one step are mixed alike: as one large batch would be.
                pixel_values, targets = mix(
                    pixel_values, targets, args.mixup, args.cutmix, args.seed, epoch, number // accumulation
                )
                sized = {}
                if step < first_stage:
                    pixel_values = training.shrink(pixel_values, args.first_image_size)
                    sized = {"interpolate_pos_encoding": True}
                rate = training.learning_rate(
                    step, total_steps, warmup_steps, args.learning_rate,
                    args.lr_scheduler_type, args.lr_decay_ratio, args.lr_stages,
                )  # fmt: skip
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = rate * group["lr_scale"]

                with accelerator.accumulate(model):
                    loss, logits = loss_of(model, pixel_values, targets, **sized)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and args.max_grad_norm > 0:
                        gradient_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()

                with torch.no_grad():
                    correct = (logits.argmax(1) == rows["labels"]).sum()
                    loss_sum += torch.stack(
                        [loss.detach().float() * len(targets), correct, torch.full_like(correct, len(targets))]
                    )
                if not accelerator.sync_gradients:
                    continue
                step += 1
                bar.update()
                if average is not None:
                    average.update(network)
                if step % args.log_steps == 0 or step == total_steps:
                    total_loss, correct, seen = accelerator.reduce(loss_sum, reduction="sum").tolist()
                    now = time.time()
                    speed = seen / (now - since)
                    bar.set_postfix(
                        train_loss=f"{total_loss / seen:.3f}",
                        train_accuracy=f"{correct / seen:.1%}",
                        images_per_second=f"{speed:,.0f}",
                        refresh=False,
                    )
                    log(
                        step, epoch + 1, loss=total_loss / seen, accuracy=correct / seen, learning_rate=rate,
                        gradient_norm=float(gradient_norm), images_per_second=speed,
                    )  # fmt: skip
                    loss_sum.zero_()
                    since = now

                if args.eval_steps is not None:
                    due = step % args.eval_steps == 0
                else:
                    passes_a_scoring = args.eval_epochs * passes_an_epoch
                    due = step * accumulation // passes_a_scoring > (step - 1) * accumulation // passes_a_scoring
                if due or step == total_steps:
                    paused = time.time()
                    logits, truth = evaluate()
                    metrics = {**training.score(logits, truth), "step": step, "epoch": epoch + 1}
                    say(
                        f"step {step:,}, epoch {epoch + 1}: {scored} accuracy {metrics['accuracy']:.2%}, "
                        f"loss {metrics['loss']:.4f}"
                    )
                    log(
                        **{key if key in ("step", "epoch") else f"eval_{key}": value for key, value in metrics.items()}
                    )
                    merit = lambda metrics: (metrics["accuracy"], -metrics["loss"])
                    if not selects or best is None or merit(metrics) > merit(best):
                        best, answers = metrics, (logits, truth)
                        if selects:
                            save(run / "model")
                    since += time.time() - paused
                    scoring_seconds += time.time() - paused
                if step == total_steps:
                    break
            if passes == 0:
                raise ValueError(f"the stream holds fewer than the {together * world} images of one step")
            if step == total_steps:
                break
    except BaseException:
        if step > 0:
            with contextlib.suppress(OSError):  # a full disk must not hide what went wrong
                save(run / "last")
            say(f"stopped in step {step + 1}: the weights so far are in {run / 'last'}")
        raise
    finally:
        bar.close()
    training_seconds = time.time() - training_began

    # The run's results, and the card that is made from them
    if not selects:
        save(run / "model")
    elif best["step"] != total_steps:
        save(run / "last")
    skipped = sorted(set(gather_object([*train_images.skipped, *eval_images.skipped])))
    if accelerator.is_main_process:
        details = training.report(*answers, labels)
        with open(run / "confusion_matrix.csv", "w", newline="", encoding="utf-8") as file:
            rows = [[name, *counts] for name, counts in zip(labels, details.pop("confusion_matrix"), strict=True)]
            csv.writer(file).writerows([["true class", *labels], *rows])
        results = {
            "metrics": best,
            "metrics_of": f"{scored}, "
            + ("the best scoring, kept in model/" if selects else "the last scoring, in model/"),
            **details,
            "train_seconds": round(training_seconds, 1),
            "total_seconds": round(time.time() - began, 1),
            "images_per_second": round(step * accumulation * batch * world / (training_seconds - scoring_seconds), 1),
            "steps": step,
            "images_per_step": accumulation * batch * world,
            "image_size": [form.height, form.width],
            "parameters": parameters,
            "trained_parameters": trained,
            "seed": args.seed,
            "preset": args.preset or args.model_name_or_path,
            "command": "accelerate launch "
            + (f"--num_processes {world} " if world > 1 else "")
            + shlex.join(sys.argv),
            **sharing.circumstances(device.type, world, accelerator.mixed_precision),
            "data": {
                "name": args.dataset_name,
                "config": args.dataset_config,
                "train_images": None if stream else len(train_images),
                "scored_images": len(answers[1]),
                "scored": scored,
                "labels": labels,
                "skipped_images": len(skipped),
                "skipped_first": skipped[:20],
                "fingerprints": {} if stream else {name: part._fingerprint for name, part in splits.items()},
            },
        }
        (run / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        sharing.write_card(run / "model", TEMPLATE, results, presets.as_yaml(args), args.model_name_or_path)
        if skipped:
            print(f"{len(skipped)} images could not be read and were skipped; {skipped[0]}")
        low, high = results["intervals"]["accuracy"]
        print(
            f"accuracy on {scored}: {best['accuracy']:.2%} (95% interval {low:.2%} to {high:.2%}); "
            f"the model is in {run / 'model'}"
        )
    accelerator.end_training()


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, StrictDataclassError) as error:  # one sentence; a traceback would hide it
        sys.exit(f"error: {error}")

"""Train or fine-tune a Vision Transformer on any image data set: one run, top to bottom.

    accelerate launch recipes/train.py --config recipes/configs/demo.yaml [--key value ...]

Every key is a field of `hf_vit.presets.TrainArguments`. The run folder then holds

    config.yaml     what was resolved; `--config` on it repeats the run
    metrics.jsonl   a line a log step and a line a scoring
    model/          config, weights, image processor, code and card: ready for `from_pretrained` and for the Hub
    last/           the last weights, where model/ holds those of an earlier, better epoch
    results.json    metrics, times, seed, commit, command, hardware, versions, data
"""

import contextlib
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path


# This folder holds evaluate.py, which would hide the library of that name.
sys.path = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from huggingface_hub.errors import StrictDataclassError
from tqdm import tqdm

from hf_vit import data, presets, sharing, training
from hf_vit.augment import augment, mixup


TEMPLATE = Path(__file__).resolve().parents[1] / "model_cards" / "template.md"


def main():
    began = time.time()
    args = presets.parse(sys.argv[1:])
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    accelerator = Accelerator(
        mixed_precision=training.pick_precision(args.mixed_precision, device_type),
        gradient_accumulation_steps=args.gradient_accumulation_steps,
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
    with accelerator.main_process_first():
        splits, labels, scored = data.prepare(
            data.load(args.dataset_name, args.dataset_config),
            **{key: getattr(args, key) for key in ("train_split", "eval_split", "eval_fraction")},
            **{key: getattr(args, key) for key in ("image_column", "label_column", "seed")},
        )
    model, processor = training.build_model(
        labels, args.model_name_or_path, args.preset, args.image_size, presets.overrides(args.config_overrides)
    )
    form = data.image_form(processor, model.config)
    train_images, eval_images = data.Images(splits["train"], form), data.Images(splits["eval"], form)
    workers = min(8, os.cpu_count()) if args.num_workers is None else args.num_workers

    # Model, optimizer, schedule
    model.to(device)
    average = training.AverageModel(model, args.ema_decay) if args.ema_decay > 0 else None
    optimizers = training.build_optimizers(
        model, args.optimizer, args.learning_rate, args.weight_decay, (args.adam_beta1, args.adam_beta2)
    )
    if training.pick_compile(args.compile, device.type):
        model.compile()
    network = model
    model, *optimizers = accelerator.prepare(model, *optimizers)

    batch = args.per_device_train_batch_size
    accumulation = args.gradient_accumulation_steps
    passes_an_epoch = max(1, len(train_images) // (batch * world))
    total_steps = args.max_train_steps or max(1, round(args.num_train_epochs * passes_an_epoch / accumulation))
    epochs = math.ceil(total_steps * accumulation / passes_an_epoch)
    warmup_steps = round(args.warmup_ratio * total_steps)

    say(
        f"{args.dataset_name}: {len(train_images):,} images to train on, {len(eval_images):,} to score ({scored}), "
        f"{len(labels)} classes\n"
        f"{sum(p.numel() for p in network.parameters()):,} parameters, {form.height}x{form.width} pixels, {total_steps:,} "
        f"steps in {epochs} epochs, on {device} x {world} (mixed precision: {accelerator.mixed_precision})"
    )
    if accelerator.is_main_process:
        for name in ("model", "last"):
            shutil.rmtree(run / name, ignore_errors=True)
        for name in ("metrics.jsonl", "results.json"):
            (run / name).unlink(missing_ok=True)
        run.mkdir(parents=True, exist_ok=True)
        (run / "config.yaml").write_text(presets.as_yaml(args))

    def log(**record):
        if accelerator.is_main_process:
            with open(run / "metrics.jsonl", "a") as file:
                file.write(json.dumps(record) + "\n")

    def evaluate():
        share = training.predict(
            network if average is None else average.model,
            data.loader(
                eval_images,
                data.batches_in_order(len(eval_images), args.per_device_eval_batch_size, rank, world),
                workers,
            ),
            form,
            accelerator,
            len(eval_images),
        )
        return training.score(share, eval_images.labels)

    def save(folder):
        if accelerator.is_main_process:
            (network if average is None else average.model).save_pretrained(folder)
            processor.save_pretrained(folder)

    # A test split selects nothing: only a validation split, or a part of train, decides which epoch is kept.
    selects = not scored.startswith("test")
    step, best, metrics = 0, None, None
    loss_sum = torch.zeros(3, device=device)  # of the loss, of correct images, of images, since the last log line
    scoring_seconds, training_began = 0.0, time.time()
    since = training_began
    bar = tqdm(
        total=total_steps,
        unit="step",
        mininterval=1 if sys.stderr.isatty() else 20,  # in a log file, a line now and then
        disable=not accelerator.is_main_process,
    )
    model.train()
    try:
        for epoch in range(epochs):
            order = data.epoch_batches(len(train_images), batch, args.seed, epoch, rank, world)
            for number, rows in enumerate(data.loader(train_images, list(order), workers)):
                rows = {key: value.to(device, non_blocking=True) for key, value in rows.items()}
                pixel_values = augment(
                    rows["images"], rows["index"], args.seed, epoch, form,
                    crop=args.crop, shift=args.shift, flip=args.flip, erase=args.erase,
                )  # fmt: skip
                targets = training.soft_targets(rows["labels"], len(labels), args.label_smoothing)
                if args.mixup > 0:
                    pixel_values, targets = mixup(pixel_values, targets, args.mixup, args.seed, epoch, number)
                rate = training.learning_rate(step, total_steps, warmup_steps, args.learning_rate)
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = rate

                with accelerator.accumulate(model):
                    outputs = model(pixel_values, labels=targets)
                    accelerator.backward(outputs.loss)
                    if accelerator.sync_gradients and args.max_grad_norm > 0:
                        accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()

                with torch.no_grad():
                    correct = (outputs.logits.argmax(1) == rows["labels"]).sum()
                    loss_sum += torch.stack(
                        [outputs.loss.float() * len(targets), correct, torch.full_like(correct, len(targets))]
                    )
                if not accelerator.sync_gradients:
                    continue
                step += 1
                bar.update()
                if average is not None:
                    average.update(network)
                if step % args.log_steps == 0 or step == total_steps:
                    loss, correct, seen = accelerator.reduce(loss_sum, reduction="sum").tolist()
                    now = time.time()
                    speed = seen / (now - since)
                    bar.set_postfix(
                        loss=f"{loss / seen:.3f}", accuracy=f"{correct / seen:.1%}", images_per_second=f"{speed:,.0f}"
                    )
                    log(
                        step=step, epoch=epoch + 1, loss=loss / seen, accuracy=correct / seen,
                        learning_rate=rate, images_per_second=speed,
                    )  # fmt: skip
                    loss_sum.zero_()
                    since = now
                if step == total_steps:
                    break

            if (epoch + 1) % args.eval_epochs == 0 or step == total_steps:
                paused = time.time()
                metrics = evaluate()
                since += time.time() - paused
                scoring_seconds += time.time() - paused
                say(
                    f"epoch {epoch + 1}/{epochs}: {scored} accuracy {metrics['accuracy']:.2%}, loss {metrics['loss']:.4f}"
                )
                log(step=step, epoch=epoch + 1, **{f"eval_{key}": value for key, value in metrics.items()})
                if selects and (best is None or metrics["accuracy"] > best["accuracy"]):
                    best = {**metrics, "epoch": epoch + 1}
                    save(run / "model")
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
    elif best["epoch"] != epochs:
        save(run / "last")
    if accelerator.is_main_process:
        results = {
            "metrics": best if selects else {**metrics, "epoch": epochs},
            "metrics_of": f"{scored}, "
            + ("the best epoch, kept in model/" if selects else "the last epoch, in model/"),
            "train_seconds": round(training_seconds, 1),
            "total_seconds": round(time.time() - began, 1),
            "images_per_second": round(step * accumulation * batch * world / (training_seconds - scoring_seconds), 1),
            "steps": step,
            "image_size": [form.height, form.width],
            "parameters": sum(p.numel() for p in network.parameters()),
            "seed": args.seed,
            "preset": args.preset or args.model_name_or_path,
            "command": "accelerate launch " + " ".join(sys.argv),
            **sharing.circumstances(device.type, world, accelerator.mixed_precision),
            "data": {
                "name": args.dataset_name,
                "config": args.dataset_config,
                "train_images": len(train_images),
                "scored_images": len(eval_images),
                "scored": scored,
                "labels": labels,
                "fingerprints": {name: part._fingerprint for name, part in splits.items()},
            },
        }
        (run / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        sharing.write_card(run / "model", TEMPLATE, results, presets.as_yaml(args), args.model_name_or_path)
        print(f"accuracy on {scored}: {results['metrics']['accuracy']:.2%}; the model is in {run / 'model'}")
    accelerator.end_training()


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, StrictDataclassError) as error:  # one sentence; a traceback would hide it
        sys.exit(f"error: {error}")

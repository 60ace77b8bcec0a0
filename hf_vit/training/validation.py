"""Evaluation while a run trains: its metrics, and the best weights so far."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from hf_vit.data.splits import describe_scored
from hf_vit.evaluation.calibration import fit_temperature, folded_temperature
from hf_vit.evaluation.multi_label import DEFAULT_THRESHOLD, choose_thresholds
from hf_vit.evaluation.prediction_table import image_names, prediction_table
from hf_vit.evaluation.scores import classification_report, compute_metrics, headline, surest_mistakes
from hf_vit.system.run_files import NUM_SAMPLES, PREDICTIONS, SAMPLES
from hf_vit.training.checkpoints import save_best
from hf_vit.training.distributed import run_on_main
from hf_vit.training.run import Run
from hf_vit.training.state import TrainState


def evaluate(run: Run, state: TrainState) -> bool:
    """Evaluate the weights, and keep them if they are the best; False if a signal interrupted it.

    A test split selects nothing: the last weights are kept.
    """
    seconds, step = run.seconds_of_training(state), state.step
    images, split = run.data.eval_images, run.data.scored
    with run.whole_model() as model:
        predictions = run.predict(model, images, split, stopped=lambda: run.signals.asked is not None)
        if predictions is None:
            return False
        logits, rows = predictions  # (n, L), (n,)
        labels = images.labels[rows]
        metrics = {
            **compute_metrics(logits, labels, choose(run, logits, labels)),
            "step": step,
            "epoch": state.epoch + 1,
        }
        is_best = run.best is None or merit(metrics) > merit(run.best)
        if is_best if run.data.selects_best else step == run.batches.total_steps:
            run_on_main(run.accelerator, lambda: keep_best(run, model, metrics, logits, labels, rows))
            run.best = metrics
    name, value = headline(metrics)
    run.print(
        f"step {step:,}, epoch {state.epoch + 1}: {name.replace('_', ' ')} on {describe_scored(split)} {value:.2%}, "
        f"loss {metrics['loss']:.4f}"
    )
    values = {f"eval_{name}": value for name, value in metrics.items() if name not in ("step", "epoch")}
    run.log(step, state.epoch + 1, **values, seconds=seconds)
    return True


def merit(metrics: dict) -> tuple[float, float]:
    """By accuracy, or mean average precision; if equal by loss."""
    return headline(metrics)[1], -metrics["loss"]


def choose(run: Run, logits, labels) -> torch.Tensor | None:
    """The thresholds (L,) of several labels an image; a test split chooses none."""
    if not run.data.several_labels:
        return None
    if run.data.selects_best:
        return choose_thresholds(logits, labels)
    return torch.full((labels.shape[1],), DEFAULT_THRESHOLD)


def keep_best(run: Run, model, metrics: dict, logits, labels, rows):
    """Write `checkpoints/best-N`: the model, its scores, all predictions, and samples of the images with labels and logits.

    The model that is written is calibrated on these images, unless they are for testing; which weights are the best is decided
    without that.
    """
    calibrates = run.args.calibrate and run.data.selects_best
    temperature = fit_temperature(logits, labels) if calibrates else 1.0
    logits = logits / temperature
    thresholds = choose(run, logits, labels)
    images, mistakes = run.data.eval_images, surest_mistakes(labels, logits, thresholds=thresholds)
    scores = {
        "metrics": metrics,
        "calibrated_metrics": {**metrics, **compute_metrics(logits, labels, thresholds)},
        "temperature": temperature,
        "images": len(labels),
        "mistakes": image_names(*images.sources(rows[mistakes])),
        **classification_report(logits, labels, run.data.labels, thresholds),
    }
    if thresholds is not None:
        model.config.thresholds = dict(zip(run.data.labels, scores["thresholds"], strict=True))
    size = sum(parameter.nbytes for parameter in model.parameters())
    generator = torch.Generator().manual_seed(run.args.seed)
    drawn = torch.randperm(len(labels), generator=generator)[:NUM_SAMPLES]
    samples = {}
    for prefix, indices in (("", drawn), ("mistaken_", mistakes)):
        if len(indices):
            samples[f"{prefix}images"] = images.__getitems__(rows[indices].tolist())["images"]
            samples |= {f"{prefix}labels": labels[indices], f"{prefix}logits": logits[indices]}

    def write(folder: Path):
        with folded_temperature(model, temperature):
            run.write_model(model, folder)
        save_file(samples, folder / SAMPLES)
        table = prediction_table(*images.sources(rows), labels, logits, run.data.labels, thresholds)
        (folder / PREDICTIONS).write_text(table, encoding="utf-8", newline="")

    save_best(run.folder, metrics["step"], scores, size, write)

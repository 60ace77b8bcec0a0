"""Evaluation while a run trains, and the best weights so far."""

import contextlib
from pathlib import Path

from safetensors.torch import save_file

from hf_vit.data.splits import describe_scored
from hf_vit.evaluation.calibration import folded_head
from hf_vit.system.run_files import EVALUATED, SAMPLES
from hf_vit.training.checkpoints import save_best
from hf_vit.training.distributed import run_on_main
from hf_vit.training.log import print_main
from hf_vit.training.run import Run
from hf_vit.training.task import Evaluation


def evaluate(run: Run) -> bool:
    """Evaluate the weights, and keep them if they are the best; False if a signal interrupted it.

    A test split selects nothing: the last weights are kept.
    """
    state, task, data = run.state, run.task, run.data
    seconds = state.clock()
    with run.whole_model() as model:
        evaluation = task.evaluate(model, run.predictor)
        if evaluation is None:
            return False
        metrics = {**evaluation.metrics, "step": state.step, "epoch": state.epoch + 1}
        is_best = run.best is None or task.selection_score(metrics) > task.selection_score(run.best)
        if is_best if data.selects_best else state.step == run.plan.total_steps:
            run_on_main(run.accelerator, lambda: keep_best(run, model, metrics, evaluation))
            run.best = metrics
    print_main(f"step {state.step:,}, epoch {state.epoch + 1}: {task.describe(metrics, describe_scored(data.scored))}")
    run.log.log(**{f"eval_{name}": value for name, value in evaluation.metrics.items()}, seconds=seconds)
    state.evaluated_step = state.step
    return True


def keep_best(run: Run, model, metrics: dict, evaluation: Evaluation):
    """Write `checkpoints/best-N`: the model, calibrated if that was asked for, its scores, tables and samples of the images."""
    scores, samples, tables = run.task.artifacts(model, evaluation)

    def write(folder: Path):
        with folded_head(model, scores["temperature"]) if "temperature" in scores else contextlib.nullcontext():
            run.write_model(model, folder)
        save_file(samples, folder / SAMPLES)
        if evaluation.logits is not None:
            save_file({"logits": evaluation.logits, "labels": evaluation.labels}, folder / EVALUATED)
        for name, text in tables.items():
            (folder / name).write_text(text, encoding="utf-8", newline="")

    needed = sum(parameter.nbytes for parameter in model.parameters())
    save_best(run.folder, metrics["step"], {"metrics": metrics, **scores}, needed, write)

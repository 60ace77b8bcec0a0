"""Evaluation while a run trains, and the best weights so far."""

from hf_vit.data.splits import describe_scored
from hf_vit.training.distributed import run_on_main
from hf_vit.training.run import Run
from hf_vit.training.state import TrainState


def evaluate(run: Run, state: TrainState) -> bool:
    """Evaluate the weights, and keep them if they are the best; False if a signal interrupted it.

    A test split selects nothing: the last weights are kept.
    """
    seconds, step, task = run.seconds_of_training(state), state.step, run.task
    with run.whole_model() as model:
        scored = task.score(run, model)
        if scored is None:
            return False
        metrics = {**scored.metrics, "step": step, "epoch": state.epoch + 1}
        is_best = run.best is None or task.merit(metrics) > task.merit(run.best)
        if is_best if run.data.selects_best else step == run.batches.total_steps:
            run_on_main(run.accelerator, lambda: task.keep_best(run, model, metrics, scored))
            run.best = metrics
    run.print(f"step {step:,}, epoch {state.epoch + 1}: {task.describe(metrics, describe_scored(run.data.scored))}")
    values = {f"eval_{name}": value for name, value in metrics.items() if name not in ("step", "epoch")}
    run.log(step, state.epoch + 1, **values, seconds=seconds)
    return True

"""What a finished run leaves: the published model, its card and pictures, and results.json."""

import json
import shutil
import time
from pathlib import Path

from accelerate.utils import gather_object
from safetensors.torch import load_file

from hf_vit.card import write_card
from hf_vit.data.splits import describe_scored
from hf_vit.evaluation.results import Results
from hf_vit.system.environment import environment_info
from hf_vit.system.errors import UserError
from hf_vit.system.files import atomic_dir, checksum, write_text
from hf_vit.system.recipes_folder import RECIPES
from hf_vit.system.run_files import EVALUATED, PREDICTIONS, SAMPLES, copy_listed
from hf_vit.system.text import counted
from hf_vit.training.checkpoints import load_best
from hf_vit.training.inputs import on_hub
from hf_vit.training.log import print_main
from hf_vit.training.run import Run
from hf_vit.training.run_folder import FINISHED, LOG


def report(run: Run, command: str) -> Results | None:
    """Publish the best model with its card and pictures, and write results.json; the `Results`, on the main process."""
    began = time.monotonic()
    skipped = sorted(set(gather_object([*run.data.train_images.skipped, *run.data.eval_images.skipped])))
    save_last_weights(run)
    if not run.accelerator.is_main_process:
        return None
    scores, folder, log = publish_model(run), run.folder / "model", read_log(run.folder)
    samples = load_file(run.folder / SAMPLES)
    answers = run.task.report(folder, scores, samples, run.accelerator)
    try:
        run.task.draw(folder / "figures", log, scores, samples)
    except Exception as error:  # hours of training are worth more than their pictures
        print_main(f"not all pictures could be drawn ({type(error).__name__}: {error})")
    results = collect_results(run, scores, answers, skipped, command)
    results.seconds["report"] = round(time.monotonic() - began, 1)
    results.warnings = run.task.faults(results, log)
    write_card(folder, RECIPES / run.task.card, results, run.plan.to_yaml())
    write_text(run.folder / FINISHED, results.to_json())
    print_main(closing_lines(run, results, skipped))
    return results


def save_last_weights(run: Run):
    """Write last/, if model/ will hold weights of an earlier, better evaluation."""
    if run.data.selects_best and run.best["step"] != run.plan.total_steps:
        with run.whole_model() as model:
            if run.accelerator.is_main_process:
                vars(model.config).pop("thresholds", None)  # of the best weights, calibrated
                with atomic_dir(run.folder / "last") as folder:
                    run.write_model(model, folder)


def publish_model(run: Run) -> dict:
    """Copy the best weights to model/, and their samples and tables; what was saved with the scores."""
    if (found := load_best(run.folder)) is None:
        raise UserError("the best weights cannot be read back: the same command evaluates the last ones again")
    folder, scores = found
    scores["metrics"] |= scores.pop("calibrated_metrics", {})
    with atomic_dir(run.folder / "model") as aside:
        copy_listed(folder, aside, leave_out=("scores.json", EVALUATED, SAMPLES, PREDICTIONS))
    for name in (SAMPLES, PREDICTIONS):
        if (folder / name).is_file():
            shutil.copy(folder / name, run.folder / name)
    if (folder / EVALUATED).is_file():  # the bootstrap takes its time, and is for the weights that stay
        scores["intervals"] = run.task.intervals(**load_file(folder / EVALUATED), scores=scores)
    return scores


def collect_results(run: Run, scores: dict, answers: dict, skipped: list[str], command: str) -> Results:
    """The results of a run, without its warnings.

    Args:
        scores: what `publish_model` returned.
        answers: what the task reported.
        skipped: names of images that could not be read.
    """
    args, accelerator, data, state = run.plan.args, run.accelerator, run.data, run.state
    apart = ("confusion_matrix", "images", "metrics", "mistakes")  # the last names files of the owner
    details = {name: scores[name] for name in scores if name not in apart}
    kept = "the best evaluation, kept in model/" if data.selects_best else "the last evaluation, in model/"
    seconds = {"reading": data.seconds, **state.seconds, "model": state.seconds["step"] - state.seconds["input"]}
    named = {name: round(seconds[name], 1) for name in ("reading", "input", "model", "scoring")}
    return Results(
        metrics=scores["metrics"],
        metrics_of=f"{data.scored}, {kept}",
        **details,
        train_seconds=round(seconds["training"], 1),
        total_seconds=round(time.monotonic() - state.began, 1),
        seconds=named,
        images_per_second=round(state.step * run.plan.images_per_step / seconds["step"], 1),
        steps=state.step,
        images_per_step=run.plan.images_per_step,
        skipped_steps=state.skipped_steps,
        resumed_at_steps=state.resumed_at,
        image_size=[data.spec.height, data.spec.width],
        parameters=run.parameters[0],
        trained_parameters=run.parameters[1],
        **answers,
        weights_sha256=checksum(next((run.folder / "model").glob("*model.safetensors"))),
        seed=args.seed,
        preset=args.preset or args.model_name_or_path,
        base_model_hub_id=on_hub(args.model_name_or_path),
        command=command,
        **environment_info(accelerator.device.type, accelerator.num_processes, accelerator.mixed_precision),
        data={
            "name": args.dataset_name,
            "hub_id": on_hub(args.dataset_name),
            "config": args.dataset_config,
            "license": data.license,
            "train_images": data.train_size,
            "scored_images": scores["images"],
            "scored": data.scored,
            "scored_duplicates": data.scored_duplicates,
            "labels": data.labels,
            "skipped_images": len(skipped),
            "skipped_first": skipped[:20],
            "fingerprints": data.fingerprints,
        },
    )


def closing_lines(run: Run, results: Results, skipped: list[str]) -> str:
    """The last lines of a run: its faults, its score, where the model is, and what to do next."""
    interval, folder, form = "", run.folder / "model", ".2%" if run.task.has_accuracy else ".4g"
    for low, high in list((results.intervals or {}).values())[:1]:
        interval = f" (95% interval {low:{form}} to {high:{form}})"
    lines = [f"WARNING: {fault}" for fault in results.warnings]
    if skipped:
        lines.append(f"{counted(len(skipped), 'image')} could not be read: skipped; {skipped[0]}")
    said = run.task.describe(results.metrics, describe_scored(run.data.scored))
    lines.append(f"{said}{interval}; model, card and figures are in {folder}")
    lines.append(f"next: {run.task.next_command(run.folder)}")
    return "\n".join(lines)


def read_log(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]

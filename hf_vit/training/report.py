"""What a finished run leaves: the published model, tables, and results.json."""

import csv
import io
import json
import time
from pathlib import Path

import torch
from accelerate.utils import gather_object
from PIL import Image
from safetensors.torch import load_file

from hf_vit.evaluation.classifiers import load_classifier
from hf_vit.evaluation.prediction import LOGITS_TOLERANCE, logits_difference
from hf_vit.evaluation.results import Results
from hf_vit.evaluation.scores import format_prediction
from hf_vit.system.command_line import own_line
from hf_vit.system.environment import environment_info
from hf_vit.system.errors import UserError
from hf_vit.system.escapes import csv_cell
from hf_vit.system.files import atomic_dir, checksum, write_text
from hf_vit.system.run_files import PREDICTIONS, SAMPLES, copy_file
from hf_vit.training.checkpoints import load_best
from hf_vit.training.inputs import on_hub
from hf_vit.training.run import Run
from hf_vit.training.run_folder import publish_best
from hf_vit.training.state import TrainState


COUNTS = ("label", "true positives", "false positives", "false negatives", "true negatives")


def save_last_weights(run: Run):
    """Write last/, if model/ will hold weights of an earlier, better evaluation."""
    if run.data.selects_best and run.best["step"] != run.batches.total_steps:
        with run.whole_model() as model:
            if run.accelerator.is_main_process:
                with atomic_dir(run.folder / "last") as folder:
                    run.write_model(model, folder)


def skipped_images(run: Run) -> list[str]:
    """Names of the images of all processes that could not be read."""
    return sorted(set(gather_object([*run.data.train_images.skipped, *run.data.eval_images.skipped])))


def publish_model(run: Run) -> dict:
    """Copy the best weights to model/, and their samples; what was saved with the scores."""
    if (found := load_best(run.folder)) is None:
        raise UserError("the best weights cannot be read back: the same command scores the last ones again")
    folder, details = found
    details["metrics"] = details.pop("calibrated_metrics", details["metrics"])
    publish_best(folder, run.folder / "model", leave_out=("scores.json", SAMPLES, PREDICTIONS))
    copy_file(folder / SAMPLES, run.folder / SAMPLES)
    if (folder / PREDICTIONS).is_file():  # a run without labels, or that began with an earlier version, kept none
        copy_file(folder / PREDICTIONS, run.folder / PREDICTIONS)
    return details


def write_confusion_matrix(run: Run, scores: dict):
    """Write confusion_matrix.csv of what `publish_model` returned."""
    table, names = io.StringIO(), [csv_cell(label) for label in run.data.labels]
    rows = [[name, *counts] for name, counts in zip(names, scores["confusion_matrix"], strict=True)]
    csv.writer(table).writerows([COUNTS if run.data.several_labels else ["true class", *names], *rows])
    write_text(run.folder / "confusion_matrix.csv", table.getvalue())


def check_saved_model(run: Run) -> tuple[object, float]:
    """model/ as a stranger would load it, and how far its logits are from the scored ones; a warning if too far."""
    samples = load_file(run.folder / SAMPLES)
    model = load_classifier(str(run.folder / "model"))
    difference = logits_difference(model, samples["images"], samples["logits"], run.data.spec, run.accelerator)
    tolerance = LOGITS_TOLERANCE[run.accelerator.mixed_precision]
    if not difference <= tolerance:
        run.print(
            f"WARNING: the model in {run.folder / 'model'} does not give the logits that were scored: they differ by "
            f"{difference:.2g} of the largest, at most {tolerance:g} was expected; do not trust the scores of this run, and report it"
        )
    return model, difference


def save_example(samples: dict, spec, folder: Path):
    """The first sample as example.png, if it is grey or RGB."""
    if spec.channels in (1, 3):
        example = samples["images"][0].permute(1, 2, 0).squeeze(2)  # (C, H, W) -> (H, W, 3) or (H, W)
        Image.fromarray(example.numpy()).save(folder / "example.png")


def describe_answers(run: Run, scores: dict, difference: float) -> dict:
    """What results.json holds of a classifier's answers; `difference` is that of the saved model's logits."""
    thresholds = torch.tensor(scores["thresholds"]) if run.data.several_labels else None
    answer = load_file(run.folder / SAMPLES)["logits"][0]  # to example.png
    return {
        "attention_query": run.backbone.attention_query,
        "answer": format_prediction(answer, run.data.labels, thresholds),
        "saved_logits_apart": difference,
    }


def collect_results(run: Run, state: TrainState, scores: dict, answers: dict, skipped: list[str]) -> Results:
    """The results of a run, without its warnings.

    Args:
        scores: what `publish_model` returned.
        answers: of a classifier, what `describe_answers` gives.
        skipped: names of images that could not be read.
    """
    args, accelerator, data = run.args, run.accelerator, run.data
    apart = ("confusion_matrix", "images", "metrics", "mistakes")  # the last names files of the owner
    details = {name: scores[name] for name in scores if name not in apart}
    world, seconds = accelerator.num_processes, state.seconds
    kept = "the best scoring, kept in model/" if data.selects_best else "the last scoring, in model/"
    weights = next(
        path for name in ("model", "adapter_model") if (path := run.folder / "model" / f"{name}.safetensors").exists()
    )
    environment = environment_info(accelerator.device.type, world, accelerator.mixed_precision)
    return Results(
        metrics=scores["metrics"],
        metrics_of=f"{data.scored}, {kept}",
        **details,
        train_seconds=round(seconds["training"], 1),
        total_seconds=round(seconds["total"] + time.monotonic() - run.began, 1),
        seconds={
            "reading": round(data.seconds, 1),
            **{name: round(seconds[name], 1) for name in ("input", "model", "scoring")},
        },
        images_per_second=round(state.step * run.images_per_step / (seconds["input"] + seconds["model"]), 1),
        steps=state.step,
        images_per_step=run.images_per_step,
        skipped_steps=state.skipped_steps,
        resumed_at_steps=state.resumed_at,
        lives=state.lives,
        image_size=[data.spec.height, data.spec.width],
        parameters=run.parameters,
        trained_parameters=run.trainable_parameters,
        **answers,
        weights_sha256=checksum(weights),
        seed=args.seed,
        preset=args.preset or args.model_name_or_path,
        base_model_hub_id=on_hub(args.model_name_or_path),
        command=own_line(world, "fsdp2" if run.is_sharded else "ddp"),
        **environment,
        data={
            "name": args.dataset_name,
            "hub_id": on_hub(args.dataset_name),
            "config": args.dataset_config,
            "license": data.license,
            "train_images": None if data.is_stream else len(data.train_images),
            "scored_images": scores["images"],
            "scored": data.scored,
            "scored_duplicates": data.scored_duplicates,
            "labels": data.labels,
            "skipped_images": len(skipped),
            "skipped_first": skipped[:20],
            "fingerprints": {} if data.is_stream else {name: part._fingerprint for name, part in data.splits.items()},
        },
    )


def read_log(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

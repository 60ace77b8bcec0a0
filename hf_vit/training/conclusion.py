"""What a run says at its end: what is wrong with its result, where things are, and the command to go on with."""

import math
import statistics
from pathlib import Path

from hf_vit.data.splits import describe_scored
from hf_vit.evaluation.scores import headline
from hf_vit.system.command_line import from_here, shell_line
from hf_vit.training.arguments import TrainArguments
from hf_vit.training.run import Run


# A run that learns nothing stays within a few percent of the loss of equal probabilities, whatever the reason; a rate that is too
# large by ten gives many times as much.
EXPLODED = 1.5
LAST_LINES = 5  # of the log, whose median loss is that of the end: a single bad batch is no explosion


def uninformed_loss(args: TrainArguments, num_labels: int) -> float:
    """The training loss of answers that know nothing: equal probabilities for all labels, or for yes and no of each.

    Label smoothing and mixing change nothing in it, because targets sum to 1, or are a yes and a no. The asymmetric loss is
    smaller.
    """
    loss = math.log(2 if args.loss in ("binary_cross_entropy", "asymmetric") else num_labels)
    if args.teacher_name_or_path is not None:  # at most, of a teacher that is sure
        part = args.distillation_alpha
        loss = (1 - part) * loss + part * args.distillation_temperature**2 * math.log(num_labels)
    return loss


def find_faults(args: TrainArguments, log: list[dict], results: dict) -> list[str]:
    """A sentence for each reason not to trust the model; none for a good one.

    Args:
        log: lines of metrics.jsonl.
        results: what results.json holds.
    """
    found, labels = [], results["data"]["labels"]
    losses = [line["loss"] for line in log if line.get("loss") is not None][-LAST_LINES:]
    known = uninformed_loss(args, len(labels))
    name, value = headline(results["metrics"])
    several, low = name != "accuracy", results["intervals"][name][0]
    if several and args.balance == "weights":
        losses = [loss for loss in losses if not math.isfinite(loss)]  # weights of positives have no mean of 1
    if losses and not (last := statistics.median(losses)) <= EXPLODED * known:
        found.append(
            f"The training loss exploded: it is {last:.3g} at the end, and {known:.3g} for a model that knows nothing. Train again "
            f"with a smaller --learning_rate than {args.learning_rate:g}."
        )
    counts = [row["images"] for row in results["per_class"] if row["images"]]
    largest = max(results["per_class"], key=lambda row: row["images"])
    share = (statistics.mean(counts) if several else largest["images"]) / results["data"]["scored_images"]
    if low <= share:
        chance = "a random order of the images" if several else f"answering {largest['label']} every time"
        found.append(
            f"No better than chance: the {name.replace('_', ' ')} is {value:.2%} (at least {low:.2%}, with 95% confidence), and "
            f"{chance} gives {share:.2%}. Train for longer, on more images, or look at the labels."
        )
    duplicates = results["data"]["scored_duplicates"] or 0
    if duplicates / results["data"]["scored_images"] > value - low:  # more than chance may add
        found.append(
            f"Too good to be true: {duplicates:,} of the {results['data']['scored_images']:,} scored images look the same as an image "
            "that was trained on. Take them out of one of the splits (audit.py lists them), and train again."
        )
    return found


def next_command(run: Run, script: str) -> str:
    """Classify an image of the data; evaluate, where there is no image file to classify.

    Args:
        script: the path of train.py.
    """
    model, scripts = run.folder / "model", Path(script).resolve().parent
    if (model / "example.png").is_file():
        path, image = run.data.eval_images.rows[0]["image"]["path"], model / "example.png"
        if path and Path(run.args.dataset_name).is_dir() and Path(path).is_file():
            image = from_here(path)
        return shell_line(scripts / "classify.py", model, image)
    return shell_line(scripts / "eval.py", "--model_name_or_path", model, "--dataset_name", run.args.dataset_name)


def closing_lines(run: Run, results: dict, script: str) -> str:
    """The last lines of a run: its accuracy or mean average precision, the card, the pictures, and what to do next; before them, its faults."""
    name, value = headline(results["metrics"])
    folder, (low, high) = run.folder / "model", results["intervals"][name]
    pictures, seconds = len(list((folder / "figures").glob("*.png"))), results["seconds"]["report"]
    lines = [
        *(f"WARNING: {fault}" for fault in results["warnings"]),
        f"{name.replace('_', ' ')} on {describe_scored(run.data.scored)}: {value:.2%} (95% interval {low:.2%} to {high:.2%}); "
        f"the model is in {folder}",
        f"its card is {folder / 'README.md'}, with {pictures} pictures in {folder / 'figures'}; {seconds:.0f} s to check and draw",
        f"next: {next_command(run, script)}",
    ]
    return "\n".join(lines)

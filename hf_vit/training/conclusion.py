"""What a run says at its end: what is wrong with its result, where things are, and the command to go on with."""

import math
import statistics
from pathlib import Path

from hf_vit.data.splits import describe_scored
from hf_vit.evaluation.results import Results
from hf_vit.evaluation.scores import headline
from hf_vit.system.command_line import from_here, script_name, shell_line
from hf_vit.training.arguments import TrainArguments
from hf_vit.training.pretrain_arguments import PretrainArguments
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


def find_faults(args: TrainArguments, log: list[dict], results: Results) -> list[str]:
    """A sentence for each reason not to trust the model; none for a good one.

    Args:
        log: lines of metrics.jsonl.
    """
    found, labels = [], results.data["labels"]
    losses = [line["loss"] for line in log if line.get("loss") is not None][-LAST_LINES:]
    known = uninformed_loss(args, len(labels))
    name, value = headline(results.metrics)
    several, low = name != "accuracy", results.intervals[name][0]
    if several and args.balance == "weights":
        losses = [loss for loss in losses if not math.isfinite(loss)]  # weights of positives have no mean of 1
    if losses and not (last := statistics.median(losses)) <= EXPLODED * known:
        found.append(
            f"The training loss exploded: it is {last:.3g} at the end, and {known:.3g} for a model that knows nothing. Train again "
            f"with a smaller --learning_rate than {args.learning_rate:g}."
        )
    counts = [row["images"] for row in results.per_class if row["images"]]
    largest = max(results.per_class, key=lambda row: row["images"])
    share = (statistics.mean(counts) if several else largest["images"]) / results.data["scored_images"]
    if low <= share:
        chance = "a random order of the images" if several else f"answering {largest['label']} every time"
        compared = f"the {name.replace('_', ' ')} is {value:.2%} (at least {low:.2%}, with 95% confidence), and {chance} gives {share:.2%}"
        if value > share:
            images = f"{results.data['scored_images']:,} images are too few to tell it from chance"
            found.append(f"{images}: {compared}. Hold out more by --eval_fraction, or train for longer.")
        else:
            found.append(
                f"No better than chance: {compared}. Train for longer, on more images, or look at the labels."
            )
    duplicates = results.data["scored_duplicates"] or 0
    if duplicates / results.data["scored_images"] > value - low:  # more than chance may add
        found.append(
            f"Too good to be true: {duplicates:,} of the {results.data['scored_images']:,} scored images look the same as an image "
            f"that was trained on. Take them out of one of the splits ({script_name('audit')} lists them), and train again."
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
    words = ["--model_name_or_path", model, "--dataset_name", run.args.dataset_name]
    held_out = run.data.scored == f"part of {run.args.train_split}"
    return shell_line(scripts / "eval.py", *words, *(["--split", run.args.train_split] if held_out else []))


def closing_lines(run: Run, results: Results, script: str) -> str:
    """The last lines of a run: its accuracy or mean average precision, the card, the pictures, and what to do next; before them, its faults."""
    name, value = headline(results.metrics)
    low, high = results.intervals[name]
    scored = f"{name.replace('_', ' ')} on {describe_scored(run.data.scored)}"
    said = f"{scored}: {value:.2%} (95% interval {low:.2%} to {high:.2%})"
    return _closing_lines(run, results, said, next_command(run, script))


def _closing_lines(run: Run, results: Results, said: str, following: str) -> str:
    folder, seconds = run.folder / "model", results.seconds["report"]
    pictures = len(list((folder / "figures").glob("*.png")))
    lines = [
        *(f"WARNING: {fault}" for fault in results.warnings),
        f"{said}; the model is in {folder}",
        f"its card is {folder / 'README.md'}, with {pictures} pictures in {folder / 'figures'}; {seconds:.0f} s to check and draw",
        f"next: {following}",
    ]
    return "\n".join(lines)


def find_pretraining_faults(args: PretrainArguments, results: Results) -> list[str]:
    """A sentence for each reason not to go on from a model that was trained without labels."""
    loss = results.metrics["loss"]
    if not (args.norm_pix_loss or args.teacher_name_or_path) or loss < 1:
        return []
    return [
        f"Nothing was learned: the loss is {loss:.3g}, and 1 for an answer that is always 0. Train for longer, or with another "
        f"--learning_rate than {args.learning_rate:g}."
    ]


def pretraining_lines(run: Run, results: Results, script: str) -> str:
    """The last lines of a run without labels: what was scored, and the command that fine-tunes the model.

    Args:
        script: the path of pretrain.py.
    """
    words = ["--dataset_name", run.args.dataset_name, "--model_name_or_path", run.folder / "model"]
    words += ["--output_dir", f"{run.folder}-finetuned"]
    following = shell_line(Path(script).resolve().with_name("train.py"), *words)
    said = run.task.describe(results.metrics, describe_scored(run.data.scored))
    return _closing_lines(run, results, said, following)

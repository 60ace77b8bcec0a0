"""Tables of the runs that model_cards keeps: results, presets, seeds, and what each way to fine-tune gives."""

import json
import statistics
from pathlib import Path

import yaml
from benchmarks.kept_runs import TRANSFER, read_seeds

from hf_vit.system.errors import UserError


def header(*titles: str) -> list[str]:
    """The first two lines of a table in Markdown."""
    return [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]


def describe_machines(runs: list[dict]) -> str:
    """Hardware and commit of these runs or measurements, each pair once."""
    said = []
    for run in runs:
        commit, changed, _ = (run["commit"] or "unknown").partition(" ")
        said.append(f"{run['hardware']}, commit {commit[:7]}{' with local changes' if changed else ''}")
    return "; ".join(dict.fromkeys(said))


def results(house: Path) -> str:
    """One row per published run."""
    lines = header("run", "images", "accuracy", "training", "hardware")
    for file in sorted(house.glob("model_cards/*/results.json")):
        run = json.loads(file.read_text())
        data = run["data"]
        lines.append(
            f"| [{file.parent.name}](model_cards/{file.parent.name}/README.md) "
            f"| {data['train_images']:,} of {Path(data['name']).name} "
            f"| {100 * run['metrics']['accuracy']:.2f}% on {data['scored_images']:,} {data['scored']} images "
            f"| {run['train_seconds']:,.0f} s, {run['images_per_second']:,.0f} images/s "
            f"| {run['hardware']} |"
        )
    return "\n".join(lines)


def presets(house: Path) -> str:
    """One row per preset: what it trains on, from what, and the result where it was run."""
    lines = header("preset", "data", "model", "hardware", "training", "accuracy")
    for file in sorted(house.glob("recipes/configs/*.yaml")):
        preset = yaml.safe_load(file.read_text())
        card = house / "model_cards" / file.stem / "results.json"
        model = f"fine-tuned {preset['model_name_or_path']}" if "model_name_or_path" in preset else "from scratch"
        model = "pre-trained without labels" if file.stem.startswith("pretrain-") else model
        run = "no card yet | |"
        if card.is_file():
            results = json.loads(card.read_text())
            low, high = results["intervals"]["accuracy"]
            run = (
                f"{results['hardware']} | {results['train_seconds']:,.0f} s | "
                f"[{results['metrics']['accuracy']:.2%}](../model_cards/{file.stem}/README.md) ({low:.1%} to {high:.1%})"
            )
        lines.append(f"| [{file.stem}](configs/{file.name}) | {preset['dataset_name']} | {model} | {run} |")
    return "\n".join(lines)


def seeds(house: Path) -> str:
    """One row per run that was repeated with other seeds: how far its accuracy varies."""
    lines = header("run", "seeds", "accuracy, mean", "standard deviation, points", "lowest", "highest", "by seed")
    repeated = []
    for folder in sorted(folder.parent for folder in house.glob("model_cards/*/seeds")):
        if not (folder / "results.json").is_file():
            continue
        runs = read_seeds(folder)
        accuracies = [100 * run["metrics"]["accuracy"] for run in runs]
        lines.append(
            f"| [{folder.name}](../../model_cards/{folder.name}/README.md) | {len(runs)} | {statistics.mean(accuracies):.2f}% "
            f"| {statistics.stdev(accuracies):.2f} | {min(accuracies):.2f}% | {max(accuracies):.2f}% "
            f"| {', '.join(f'{accuracy:.2f}%' for accuracy in accuracies)} |"
        )
        repeated += runs
    if repeated:
        lines.append(f"\n{describe_machines(repeated)}.")
    return "\n".join(lines)


def transfer(house: Path) -> str:
    """The table of recipes/transfer.py, from the published runs: seed 0 in a method's own folder, the others in its seeds/."""
    folder = house / "model_cards" / "transfer"
    runs = {name: read_seeds(folder / name) for name in ("pretrained", *TRANSFER)}
    return transfer_table(runs, json.loads((folder / "knn" / "results.json").read_text()))


def transfer_table(runs: dict[str, list[dict]], knn: dict) -> str:
    """One row per fine-tuning method: what it trains, for how long, and its accuracy.

    Args:
        runs: the results.json of each seed, by the names of TRANSFER and "pretrained".
        knn: what recipes/eval.py wrote of the frozen features, with its "seconds" and the data set they are "halves_of".
    """
    count = len(runs["scratch"])
    if any(len(runs[name]) != count for name in TRANSFER):
        raise UserError(f"not every method has {count} seeds, as scratch has: let recipes/transfer.py finish")
    accuracy = {name: [run["metrics"]["accuracy"] for run in runs[name]] for name in TRANSFER}
    base = statistics.mean(accuracy["scratch"])
    lines = header("method", "trained parameters", "steps", "training", "accuracy", "points")
    for name, title in TRANSFER.items():
        mean = statistics.mean(accuracy[name])
        spread = f" ± {100 * statistics.stdev(accuracy[name]):.2f}" if count > 1 else ""
        seconds = statistics.mean(run["train_seconds"] - run["seconds"]["scoring"] for run in runs[name])
        points = "-" if name == "scratch" else f"{100 * (mean - base):+.2f}"
        lines.append(
            f"| {title} | {runs[name][0]['trained_parameters']:,} | {runs[name][0]['steps']:,} | {seconds:,.1f} s "
            f"| {mean:.2%}{spread} | {points} |"
        )
    points = 100 * (knn["knn_accuracy"] - base)
    lines.append(f"| k-NN | 0 | 0 | {knn['seconds']:,.1f} s | {knn['knn_accuracy']:.2%} | {points:+.2f} |")
    before, after = runs["pretrained"][0], runs["full"][0]
    first, second, hub_id = before["data"], after["data"], after["base_model_hub_id"]
    loaded = f", pushed to the Hub as `{hub_id}` and loaded from there" if hub_id else ""
    spread = (
        f"mean and sample standard deviation of {count} seeds with the same images and start"
        if count > 1
        else "one seed"
    )
    lines.append(
        f"\nPre-trained on one half of {knn['halves_of']} ({', '.join(first['labels'])}; {first['train_images']:,} images, "
        f"{before['train_seconds']:,.0f} s, {before['metrics']['accuracy']:.2%} on {first['scored_images']:,} "
        f"{first['scored']} images{loaded}), then trained on {second['train_images']:,} images of the other half "
        f"({', '.join(second['labels'])}) and evaluated on {second['scored_images']:,} {second['scored']} images. "
        f"Accuracy: {spread}. Points: against the mean from scratch, which uses the optimizer and learning rate of the "
        "pre-training. Training: mean, without evaluation; for k-NN, the whole command with all of its probes. "
        f"{describe_machines([run for name in ('pretrained', *TRANSFER) for run in runs[name]])}."
    )
    return "\n".join(lines)


def fine_tuning(house: Path) -> str:
    """One row per checkpoint, data set and number of images of `benchmarks/fine_tuning.py`: the accuracy of each method."""
    runs = json.loads((house / "model_cards" / "fine_tuning.json").read_text())
    methods = {"probe": "probe", "cached probe": "probe, cached features", "lora": "LoRA", "full": "full fine-tuning"}
    lines = header("checkpoint", "data set", "images", *methods.values(), "seeds")
    for key in dict.fromkeys((run["checkpoint"], run["dataset"], run["size"]) for run in runs):
        row = [run for run in runs if (run["checkpoint"], run["dataset"], run["size"]) == key]
        cells = []
        for method in methods:
            scores = [100 * run["accuracy"] for run in row if run["method"] == method]
            cells.append(_mean_and_deviation(scores))
        seeds = len({run["seed"] for run in row})
        lines.append(f"| {key[0]} | {key[1]} | {key[2]:,} | {' | '.join(cells)} | {seeds} |")
    sizes = {run["checkpoint"]: run["parameters"] for run in runs if run["method"] == "full"}
    said = ", ".join(f"{name} {count / 1e6:.1f} M" for name, count in sizes.items())
    lines.append(
        "\nAccuracy on test images: mean and, of several seeds, sample standard deviation; a seed draws the images too. Parameters: "
        f"{said}. {describe_machines(runs)}."
    )
    return "\n".join(lines)


def pretraining(house: Path) -> str:
    """One row per number of labels, length and rate of `benchmarks/pretraining.py`: the accuracy from both starts."""
    runs = json.loads((house / "model_cards" / "pretraining.json").read_text())
    starts = ("pre-trained", "from scratch")
    lines = header("labels", "epochs", "learning rate", *starts, "points", "seeds")
    for key in sorted({(run["size"], run["num_train_epochs"], run["learning_rate"]) for run in runs}):
        row = [run for run in runs if (run["size"], run["num_train_epochs"], run["learning_rate"]) == key]
        scores = {start: [100 * run["accuracy"] for run in row if run["start"] == start] for start in starts}
        cells = [_mean_and_deviation(scores[start]) for start in starts]
        gain = statistics.mean(scores["pre-trained"]) - statistics.mean(scores["from scratch"])
        lines.append(f"| {key[0]:,} | {key[1]:g} | {key[2]:g} | {' | '.join(cells)} | {gain:+.1f} | {len(row) // 2} |")
    lines.append(
        f"\nAccuracy on {runs[0]['scored_images']:,} test images: mean and, of several seeds, sample standard deviation; a seed draws the "
        f"labelled images too. {runs[0]['parameters'] / 1e6:.1f} M parameters. {describe_machines(runs)}."
    )
    return "\n".join(lines)


def _mean_and_deviation(scores: list[float]) -> str:
    """Percents as a table shows them."""
    spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
    return f"{statistics.mean(scores):.1f}%{spread}" if scores else "not run"

"""Write the tables of the two README.md from the JSON files of model_cards and from the tests of faults, so that none is typed.

    python recipes/tables.py [--keep RUN NAME]

It also writes the cards in model_cards anew, from their results. `--keep runs/demo demo` first copies what model_cards keeps of a
finished run to model_cards/demo; `--keep runs/demo-1 demo/seeds/1` only the numbers of the same run with another seed,
`--keep runs/patch8 tried/cifar10/patch8` those of one that was tried, and `--keep runs/transfer transfer` all runs of
recipes/transfer.py. A test fails while a page or a card and its results differ.
"""

import argparse
import ast
import json
import shutil
import statistics
from functools import partial
from pathlib import Path

import yaml

from hf_vit.system.errors import run_script


HOUSE = Path(__file__).resolve().parents[1]
NUMBERS = ("results.json", "metrics.jsonl", "confusion_matrix.csv", "config.yaml")
OF_MODEL = ("README.md", "example.png", "config.json", "preprocessor_config.json", "model.safetensors")
# Keys of a run that was tried which its row leaves out.
NOT_SHOWN = (
    "dataset_name",
    "output_dir",
    "image_column",
    "eval_epochs",
    "num_workers",
    "config_overrides",
)
LARGEST_WEIGHTS = 5_000_000  # bytes that git may well hold


def keep(run: Path, name: str, house: Path):
    """Copy what model_cards/`name` keeps of a finished run, in place of what it kept; of a further seed and of what was tried
    only the numbers, and of what was fine-tuned by recipes/transfer.py no weights. Images of a data set without a known licence,
    and pictures that show them, stay out.

    Raises:
        ValueError: if the run is not there or not finished.
    """
    from hf_vit.hub import sharing

    target = house / "model_cards" / name
    if (run / "knn").is_dir():
        keep(run / "pretrained", f"{name}/pretrained", house)
        for method in TRANSFER:
            for place in sorted((run / method).iterdir(), key=lambda place: int(place.name)):
                keep(place, f"{name}/{method}" + (f"/seeds/{place.name}" if place.name != "0" else ""), house)
        (target / "knn").mkdir(exist_ok=True)
        text = sharing.read_for_others(run / "knn" / "results.json")
        (target / "knn" / "results.json").write_text(text, encoding="utf-8")
        return
    found, _ = sharing.read_run(run)
    target.mkdir(parents=True, exist_ok=True)
    for file in (*NUMBERS, *OF_MODEL):
        (target / file).unlink(missing_ok=True)
    if (target / "figures").exists():
        shutil.rmtree(target / "figures")
    for file in NUMBERS:
        (target / file).write_text(sharing.read_for_others(run / file), encoding="utf-8")
    if {"seeds", "tried"} & set(Path(name).parts):
        return
    left_out = set()
    if found["data"].get("license") is None:
        left_out = {"example.png", *(f"{name}.png" for name, shows_images in sharing.PICTURES.items() if shows_images)}
    if target.name in TRANSFER or sharing.weights_of(run / "model").stat().st_size >= LARGEST_WEIGHTS:
        left_out.add("model.safetensors")
    shutil.copytree(run / "model" / "figures", target / "figures", ignore=lambda *_: left_out)
    for file in (run / "model" / name for name in OF_MODEL if name not in left_out):
        if file.is_file():
            shutil.copy(file, target)


def cards(house: Path):
    """Write the card of each kept run anew, as recipes/train.py wrote it beside the model."""
    from hf_vit.hub import sharing

    for file in sorted(house.glob("model_cards/**/results.json")):
        folder, config = file.parent, file.with_name("config.yaml")
        if config.is_file() and (folder / "README.md").is_file():
            text = config.read_text(encoding="utf-8")
            where = str(Path(yaml.safe_load(text)["output_dir"], "model"))
            template = house / "model_cards" / "template.md"
            sharing.write_card(folder, template, json.loads(file.read_text()), text, where=where)


def results(house: Path) -> str:
    """One row a published run."""
    lines = ["| run | images | accuracy | training | hardware |", "|---|---|---|---|---|"]
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


def tried(house: Path) -> str:
    """One row a run on the way to a preset: what was other than there, and what it gave."""
    lines = ["| preset | tried | what was other | images seen | training | accuracy |", "|---|---|---|---|---|---|"]
    for file in sorted(house.glob("model_cards/tried/*/*/results.json")):
        run, preset = json.loads(file.read_text()), house / "recipes" / "configs" / f"{file.parts[-3]}.yaml"
        is_now, was = (_values(config) for config in (preset, file.with_name("config.yaml")))
        other = [
            f"{key} {was[key]} for {is_now[key]}"
            for key in is_now
            if key not in NOT_SHOWN and was.get(key) != is_now[key]
        ]
        lines.append(
            f"| [{preset.stem}](configs/{preset.name}) | {file.parts[-2]} | {', '.join(other)} "
            f"| {run['steps'] * run['images_per_step']:,} | {run['train_seconds']:,.0f} s | {run['metrics']['accuracy']:.2%} |"
        )
    return "\n".join(lines)


def _values(config: Path) -> dict:
    """What a preset, or the config.yaml of a run, comes to, with the fields of its architecture beside its keys."""
    from hf_vit.training import arguments as presets

    args = presets.parse(["--config", str(config)])
    return {"patch_dropout_rate": 0, **vars(args), **presets.overrides(args.config_overrides)}


def with_its_seeds(folder: Path) -> list[dict]:
    """The results.json of a kept run and of its repetitions, by seed.

    Raises:
        ValueError: if they differ in more than the seed.
    """
    places = [folder, *(file.parent for file in folder.glob("seeds/*/results.json"))]
    runs = [json.loads((place / "results.json").read_text()) for place in places]
    configs = [yaml.safe_load((place / "config.yaml").read_text()) for place in places]
    differing = {
        key
        for config in configs
        for key in config.keys() | configs[0].keys()
        if config.get(key) != configs[0].get(key)
    }
    if differing - {"seed", "output_dir"} or len({run["seed"] for run in runs}) < len(runs):
        raise ValueError(
            f"{folder} and its seeds/ are not one run with other seeds: their config.yaml differ in {sorted(differing)}; wanted a "
            "seed of its own for each, and else no difference but output_dir"
        )
    return sorted(runs, key=lambda run: run["seed"])


def seeds(house: Path) -> str:
    """One row a run that was repeated with other seeds, and how far its accuracy varies."""
    lines = [
        "| run | seeds | accuracy, mean | standard deviation, points | lowest | highest | by seed |",
        "|---|---|---|---|---|---|---|",
    ]
    each = []
    for folder in sorted(file.parent for file in house.glob("model_cards/*/results.json")):
        if not (folder / "seeds").is_dir():
            continue
        runs = with_its_seeds(folder)
        scores = [100 * run["metrics"]["accuracy"] for run in runs]
        lines.append(
            f"| [{folder.name}](../model_cards/{folder.name}/README.md) | {len(runs)} | {statistics.mean(scores):.2f}% "
            f"| {statistics.stdev(scores):.2f} | {min(scores):.2f}% | {max(scores):.2f}% "
            f"| {', '.join(f'{score:.2f}%' for score in scores)} |"
        )
        each += runs
    if each:
        lines.append(f"\n{_machines(each)}.")
    return "\n".join(lines)


def families(house: Path) -> str:
    """One row a public format: which references were loaded, what they are given back as, the largest difference of all."""
    rows = json.loads((house / "model_cards" / "parity.json").read_text())
    lines = ["| format | reference | given back as | largest difference |", "|---|---|---|---|"]
    for family in dict.fromkeys(row["family"] for row in rows):
        mine = [row for row in rows if row["family"] == family]
        references = dict.fromkeys(row["reference"] for row in mine)
        natives = dict.fromkeys(row["native"] for row in mine)
        back = "the same" if list(natives) == list(references) else ", ".join(natives)
        largest = max(max(row["loaded"], row["given_back"]) for row in mine)
        lines.append(f"| {family} | {', '.join(references)} | {back} | {largest:.1e} |")
    return "\n".join(lines)


def presets(house: Path) -> str:
    """One row a preset: what it trains on, from what, and where it was run, what came of it."""
    lines = ["| preset | data | model | hardware | training | accuracy |", "|---|---|---|---|---|---|"]
    for file in sorted(house.glob("recipes/configs/*.yaml")):
        preset = yaml.safe_load(file.read_text())
        card = house / "model_cards" / file.stem / "results.json"
        model = f"fine-tuned {preset['model_name_or_path']}" if "model_name_or_path" in preset else "from scratch"
        run = "not run here | |"
        if card.is_file():
            results = json.loads(card.read_text())
            low, high = results["intervals"]["accuracy"]
            run = (
                f"{results['hardware']} | {results['train_seconds']:,.0f} s | "
                f"[{results['metrics']['accuracy']:.2%}](../model_cards/{file.stem}/README.md) ({low:.1%} to {high:.1%})"
            )
        lines.append(f"| [{file.stem}](configs/{file.name}) | {preset['dataset_name']} | {model} | {run} |")
    return "\n".join(lines)


def _benchmark(house: Path) -> dict:
    return json.loads((house / "model_cards" / "benchmark.json").read_text())


def _machine(run: dict) -> str:
    commit, changed, _ = (run["commit"] or "unknown").partition(" ")
    return f"{run['hardware']}, commit {commit[:7]}{changed and ' with local changes'}"


def _machines(runs: list[dict]) -> str:
    return "; ".join(dict.fromkeys(map(_machine, runs)))


def _where(part: dict) -> str:
    return f"{part['date']}, {_machine(part)}"


def speed(house: Path) -> str:
    """One row a model size and kind of pass: milliseconds of each contender, and the share of the machine's ceiling."""
    measured = _benchmark(house)["model"]
    names = ("hf_vit", *measured["peers"])
    lines = [
        f"| model | batch | pass | {' | '.join(f'{name}, ms' for name in names)} | times the best peer | share of ceiling |",
        "|---|---|---|" + "---|" * (len(names) + 2),
    ]
    for row in measured["sizes"]:
        for what, title in (("forward", "forward"), ("step", "training step")):
            one = row[what]
            times = " | ".join(f"{one[f'{name}_ms']:,.4g}" for name in names)
            lines.append(
                f"| {row['model']} | {row['batch']} | {title} | {times} | {one['against_best_peer']:.2f} "
                f"| {one['share_of_ceiling']:.2f} |"
            )
    growth = measured["growth"]
    by_batch = ", ".join(f"{batch}: {time:,.0f}" for batch, time in growth["step_ms_by_batch"].items())
    by_patches = ", ".join(f"{count}: {time:,.0f}" for count, time in growth["forward_ms_by_patches"].items())
    peers = ", ".join(f"{name} {version}" for name, version in measured["peers"].items())
    lines.append(
        f"\nMedians of {measured['rounds']} rounds in turns, also of the ratios, which are taken in each round; beside {peers}. The ceiling is the bare matrix products of the same "
        f"shapes. Milliseconds of a step of ViT-Ti by batch: {by_batch}; of its forward pass, 8 images, by patches: {by_patches}. "
        f"{_where(measured)}."
    )
    return "\n".join(lines)


def loops(house: Path) -> str:
    """What passes between a start and an answer: loading, the input, and seconds to an accuracy beside the reference loop."""
    measured = _benchmark(house)
    lines = ["| what | hf_vit | transformers, or the reference loop | ratio |", "|---|---|---|---|"]
    for key, title in (("scratch", "from scratch"), ("tuned", "fine-tuned")):
        race = measured["accuracy"][key]
        ours, theirs = race["hf_vit"], race["reference"]
        seconds = lambda side, runs=race["repeats"]: (
            f"{side['seconds']:.1f} s" if side["seconds"] is not None else f"in {side['reached']} of {runs} runs"
        )
        lines.append(
            f"| to {race['target']:.1%}, {title}, D=64, 4 layers, 7x7 patches | {seconds(ours)} "
            f"| {seconds(theirs)} within {race['reference_epochs']} epochs (best of each run, median: {theirs['accuracy']:.1%}) "
            f"| {race['ratio'] or '-'} |"
        )
    for row in measured["loader"]["kinds"]:
        lines.append(
            f"| read {row['data']} | {row['hf_vit']:,.0f} images/s | {row['reference']:,.0f} images/s | {row['ratio']:.1f} |"
        )
    loading = measured["loading"]
    ours, theirs = loading["hf_vit"], loading["transformers"]
    lines += [
        f"| from_pretrained of ViT-B, from its native folder | {ours['loaded']:.2f} s | {theirs['loaded']:.2f} s "
        f"| {loading['loading_ratio']:.2f} |",
        f"| its peak memory, in sizes of the weights, before they are used | {ours['memory']:.2f} | {theirs['memory']:.2f} | - |",
        f"| import | {ours['imported']:.1f} s | {theirs['imported']:.1f} s | - |",
        f"| part of the demo's time that is the model's | {measured['demo']['model_share']:.1%} | - | - |",
    ]
    lines.append(
        f"\nTrained and scored on fashion-mnist-mini; a ratio above 1 means that hf_vit is faster. {measured['loader']['workers']} processes read. {_where(measured['accuracy'])}."
    )
    return "\n".join(lines)


def budget(house: Path) -> str:
    """The demo beside the reference loop, which gets as many images, or as many seconds of training."""
    measured = _benchmark(house)["budget"]
    lines = [
        "| training | epochs | seconds | accuracy, mean | by seed | hf_vit is ahead by, points |",
        "|---|---|---|---|---|---|",
    ]
    for row in measured["rows"]:
        gain = "-" if row["gain"] is None else f"{row['gain']:+.2f}"
        by_seed = ", ".join(f"{accuracy:.2%}" for accuracy in row["accuracies"])
        lines.append(
            f"| {row['who']} | {row['epochs']:g} | {row['seconds']:.0f} s | {row['accuracy']:.2%} | {by_seed} | {gain} |"
        )
    lines.append(
        f"\n{measured['train_images']:,} images to train on; accuracy of the last weights on {measured['test_images']:,} test images; "
        + (f"medians of {measured['seeds']} seeds for epochs and seconds" if measured["seeds"] > 1 else "one seed")
        + ", seconds without the scorings. The reference loop trains a native "
        f"ViT of the same sizes, at the best of three learning rates, {measured['reference_learning_rate']:g}. {_where(measured)}."
    )
    return "\n".join(lines)


def savings(house: Path) -> str:
    """One row a way to save work: how much faster it is than the same without, and what it costs in accuracy."""
    measured = _benchmark(house)
    runs, merged = measured["savings"], measured["merging"]
    lines = ["| what | beside | times as fast | accuracy | points |", "|---|---|---|---|---|"]
    for row in runs["rows"]:
        flags = [f"--{name} {value}" for name, value in row["flags"].items() if name != "config_overrides"]
        named = ", ".join([row["what"], *(f"`{flag}`" for flag in flags)])
        if row["beside"] is None:
            lines.append(f"| {named}, {row['seconds']:.0f} s | - | 1 | {row['accuracy']:.2%} | - |")
        else:
            lines.append(
                f"| {named} | {row['beside']} | {row['times_faster']:.2f} | {row['accuracy']:.2%} | {row['points']:+.2f} |"
            )
    for row in merged["rows"]:
        if row["r"] == "0":
            lines.append(f"| a model of {merged['patches']} patches, evaluated | - | 1 | {row['accuracy']:.2%} | - |")
        else:
            lines.append(
                f"| token merging, r = {row['r']} | the same model | {row['times_faster']:.2f} | {row['accuracy']:.2%} "
                f"| {row['points']:+.2f} |"
            )
    lines.append(
        f"\nFrom scratch the demo's model; fine-tuning a model of D = {runs['hidden_size']} on the half of the training images that it was not "
        f"pre-trained on; means of {runs['seeds']} seeds. Token merging on one trained model of 6 layers. Of 2,000 test images, so that "
        f"1.5 points are within the 95% interval of each accuracy. {_where(runs)}."
    )
    return "\n".join(lines)


def loader(house: Path) -> str:
    """One row a kind of data: images a second through rows that are transformed one by one, and through hf_vit.data."""
    measured = _benchmark(house)["loader"]
    lines = [
        "| data | `with_transform`, PIL | hf_vit.data, normalised on the CPU | ratio | bytes, for a device to normalise | ratio | decoded once, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in measured["kinds"]:
        lines.append(
            f"| {row['data']} | {row['reference']:,.0f} images/s | {row['hf_vit']:,.0f} images/s | {row['ratio']:.1f} "
            f"| {row['hf_vit_bytes']:,.0f} images/s | {row['ratio_of_bytes']:.1f} | {row['seconds_to_fill_memory'] or '-'} |"
        )
    lines.append(
        f"\nMedians of {measured['rounds']} rounds in turns, {measured['workers']} worker processes each; {_where(measured)}."
    )
    return "\n".join(lines)


def costs(house: Path) -> str:
    """What a checkpoint costs, and what ten times the data cost in memory."""
    checkpoint, stream = (_benchmark(house)[part] for part in ("checkpoint", "stream"))
    growth = stream["megabytes_of_ten_times_as_many"] / stream["megabytes"] - 1
    return (
        "| what | measured |\n|---|---|\n"
        f"| a training step of tiny-patch16-224, 64 images | {checkpoint['step_seconds']:.2f} s |\n"
        f"| a checkpoint of it, {checkpoint['checkpoint_megabytes']:.0f} MB, written, synced and summed | "
        f"{checkpoint['checkpoint_seconds']:.2f} s |\n"
        f"| that, every 100 steps | {100 * checkpoint['cost_every_100_steps']:.2f}% of the run |\n"
        f"| peak memory of an epoch over a stream of {stream['images']:,} photos | {stream['megabytes']:.0f} MB |\n"
        f"| the same over ten times as many | {stream['megabytes_of_ten_times_as_many']:.0f} MB ({100 * growth:+.1f}%) |\n\n"
        f"{_where(checkpoint)}."
    )


def faults(house: Path, of_sharing: bool = False) -> str:
    """One row a fault that a test brings about: its docstring, `fault | what happens`."""
    lines = ["| fault | what happens |", "|---|---|"]
    for file in sorted(house.glob("tests/**/test_*.py"), key=lambda file: file.name):
        if (file.stem in ("test_publish", "test_trust", "test_app", "test_space")) is not of_sharing:
            continue
        functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
        said = [ast.get_docstring(function) or "" for function in functions if function.name.startswith("test_")]
        lines += [f"| {' '.join(text.split()).rstrip('.')} |" for text in said if " | " in text]
    return "\n".join(lines)


TRANSFER = {
    "scratch": "from scratch",
    "full": "full fine-tuning",
    "layer-decay": "full, lower layers slower",
    "lora": "LoRA",
    "probe": "linear probe",
}  # folders of recipes/transfer.py, and what they are called here


def transfer(house: Path) -> str:
    """The table of recipes/transfer.py, from the published runs: seed 0 in a method's own folder, the others in its seeds/."""
    folder = house / "model_cards" / "transfer"
    runs = {name: with_its_seeds(folder / name) for name in ("pretrained", *TRANSFER)}
    return transfer_table(runs, json.loads((folder / "knn" / "results.json").read_text()))


def transfer_table(runs: dict[str, list[dict]], knn: dict) -> str:
    """One row a method to fine-tune: what it trains, for how long, and what it scores.

    Args:
        runs: the results.json of each seed, by the names of TRANSFER and "pretrained".
        knn: what recipes/eval.py wrote of the frozen features, with its "seconds" and what the data are "halves_of".
    """
    accuracy = {name: [run["metrics"]["accuracy"] for run in runs[name]] for name in TRANSFER}
    base = statistics.mean(accuracy["scratch"])
    lines = ["| method | trained parameters | steps | training | accuracy | points |", "|---|---|---|---|---|---|"]
    seeds = len(runs["scratch"])
    if any(len(runs[name]) != seeds for name in TRANSFER):
        raise ValueError(f"not every method has {seeds} seeds, as scratch has: let recipes/transfer.py finish")
    for name, title in TRANSFER.items():
        mean = statistics.mean(accuracy[name])
        spread = f" ± {100 * statistics.stdev(accuracy[name]):.2f}" if seeds > 1 else ""
        seconds = statistics.mean(run["train_seconds"] - run["seconds"]["scoring"] for run in runs[name])
        points = "-" if name == "scratch" else f"{100 * (mean - base):+.2f}"
        lines.append(
            f"| {title} | {runs[name][0]['trained_parameters']:,} | {runs[name][0]['steps']:,} | {seconds:,.1f} s | {mean:.2%}{spread} | {points} |"
        )
    lines.append(
        f"| k-NN | 0 | 0 | {knn['seconds']:,.1f} s | {knn['knn_accuracy']:.2%} | {100 * (knn['knn_accuracy'] - base):+.2f} |"
    )
    before, after = runs["pretrained"][0], runs["full"][0]
    first, second, hub_id = before["data"], after["data"], after["base_model_hub_id"]
    each = [run for name in ("pretrained", *TRANSFER) for run in runs[name]]
    lines.append(
        f"\nHalves of {knn['halves_of']}: pre-trained on {', '.join(first['labels'])} ({first['train_images']:,} images, "
        f"{before['train_seconds']:,.0f} s, {before['metrics']['accuracy']:.2%} on {first['scored_images']:,} {first['scored']} images)"
        + (f", pushed to the Hub as `{hub_id}` and loaded from there" if hub_id else "")
        + f"; then {', '.join(second['labels'])} learnt from {second['train_images']:,} images and scored on "
        f"{second['scored_images']:,} {second['scored']} images. Accuracy: "
        + (
            f"mean and sample standard deviation of {seeds} seeds, of the same images and start; "
            if seeds > 1
            else "of one seed; "
        )
        + "points: against the mean from scratch, which takes the pre-training's own optimizer and rate; training: mean, without "
        f"scoring, for k-NN the whole command, with its start and all of its probes. {_machines(each)}."
    )
    return "\n".join(lines)


TABLES = {
    "results": results,
    "seeds": seeds,
    "tried": tried,
    "transfer": transfer,
    "families": families,
    "presets": presets,
    "speed": speed,
    "loops": loops,
    "budget": budget,
    "savings": savings,
    "loader": loader,
    "costs": costs,
    "faults": faults,
    "sharing": partial(faults, of_sharing=True),
}
PAGES = ("README.md", "recipes/README.md")


def with_tables(page: str, house: Path) -> str:
    """A page with each table between its marks replaced."""
    for name, table in TABLES.items():
        before, start, rest = page.partition(f"<!-- {name}: recipes/tables.py writes this -->")
        if start:
            _, end, after = rest.partition(f"<!-- /{name} -->")
            page = f"{before}{start}\n{table(house)}\n{end}{after}"
    return page


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--keep", nargs=2, metavar=("RUN", "NAME"), help="copy a finished run to model_cards/NAME first"
    )
    args = parser.parse_args()
    if args.keep is not None:
        keep(Path(args.keep[0]), args.keep[1], HOUSE)
    cards(HOUSE)
    for page in PAGES:
        (HOUSE / page).write_text(with_tables((HOUSE / page).read_text(), HOUSE))


if __name__ == "__main__":
    run_script(main)

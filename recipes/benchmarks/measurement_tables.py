"""Tables of what was measured: parity of formats (parity.json), and speed (benchmark.json)."""

import json
from pathlib import Path

from benchmarks.run_tables import describe_machines, header


def _read(house: Path, part: str, file: str = "benchmark.json") -> tuple[dict, str]:
    """A part of benchmark.json, and where and when it was measured."""
    measured = json.loads((house / "model_cards" / file).read_text())[part]
    return measured, f"{measured['date']}, {describe_machines([measured])}."


def families(house: Path) -> str:
    """One row per public format: which references were loaded, what they are exported as, and the largest difference."""
    rows = json.loads((house / "model_cards" / "parity.json").read_text())
    lines = header("format", "reference", "exported as", "largest difference", "at another size")
    for family in dict.fromkeys(row["family"] for row in rows):
        mine = [row for row in rows if row["family"] == family]
        references = ", ".join(dict.fromkeys(row["reference"] for row in mine))
        natives = ", ".join(dict.fromkeys(row["native"] for row in mine))
        exported = "the same" if natives == references else natives
        largest = max(max(row["loaded"], row["given_back"]) for row in mine)
        resized = max(row["resized"] for row in mine)
        lines.append(f"| {family} | {references} | {exported} | {largest:.1e} | {resized:.1e} |")
    return "\n".join(lines)


def speed(house: Path, file: str = "benchmark.json") -> str:
    """One row per model size and kind of pass: milliseconds of each contender."""
    measured, where = _read(house, "model", file)
    names = ("hf_vit", *measured["peers"])
    lines = header("model", "batch", "pass", *(f"{name}, ms" for name in names), "times the best peer")
    for row in measured["sizes"]:
        for kind, title in (("forward", "forward"), ("step", "training step")):
            one = row[kind]
            times = " | ".join(f"{one[f'{name}_ms']:,.4g}" for name in names)
            lines.append(f"| {row['model']} | {row['batch']} | {title} | {times} | {one['against_best_peer']:.2f} |")
    peers = ", ".join(f"{name} {version}" for name, version in measured["peers"].items())
    lines.append(
        f"\nMedians of {measured['rounds']} rounds in turns; ratios are taken within each round. Peers: {peers}. {where}"
    )
    return "\n".join(lines)


def speed_avx2(house: Path) -> str:
    """`speed` where the CPU was held to the instructions of an older one."""
    return speed(house, "benchmark-avx2.json")


def budget(house: Path) -> str:
    """The demo beside the reference loop, which gets as many images, or as many seconds of training."""
    measured, where = _read(house, "budget")
    lines = header("training", "epochs", "seconds", "accuracy, mean", "by seed", "hf_vit is ahead by, points")
    for row in measured["rows"]:
        gain = "-" if row["gain"] is None else f"{row['gain']:+.2f}"
        by_seed = ", ".join(f"{accuracy:.2%}" for accuracy in row["accuracies"])
        lines.append(
            f"| {row['who']} | {row['epochs']:g} | {row['seconds']:.0f} s | {row['accuracy']:.2%} | {by_seed} | {gain} |"
        )
    medians = f"medians of {measured['seeds']} seeds" if measured["seeds"] > 1 else "one seed"
    lines.append(
        f"\n{measured['train_images']:,} training images; accuracy of the last weights on {measured['test_images']:,} test "
        f"images; epochs and seconds: {medians}, without evaluation. The reference uses the best of three learning rates, "
        f"{measured['reference_learning_rate']:g}. {where}"
    )
    return "\n".join(lines)


def savings(house: Path) -> str:
    """One row per way to save work: how much faster it is than the same run without it, and its cost in accuracy."""
    (trained, where), (merged, _) = _read(house, "savings"), _read(house, "merging")
    lines = header("what", "beside", "times as fast", "accuracy", "points")
    for row in trained["rows"]:
        flags = [f"`--{name} {value}`" for name, value in row["flags"].items() if name != "config_overrides"]
        title = ", ".join([row["what"], *flags])
        if row["beside"] is None:
            lines.append(f"| {title}, {row['seconds']:.0f} s | - | 1 | {row['accuracy']:.2%} | - |")
        else:
            lines.append(
                f"| {title} | {row['beside']} | {row['times_faster']:.2f} | {row['accuracy']:.2%} | {row['points']:+.2f} |"
            )
    for row in merged["rows"]:
        if row["r"] == "0":
            lines.append(f"| evaluating a model of {merged['patches']} patches | - | 1 | {row['accuracy']:.2%} | - |")
        else:
            lines.append(
                f"| token merging, r = {row['r']} | the same model | {row['times_faster']:.2f} | {row['accuracy']:.2%} "
                f"| {row['points']:+.2f} |"
            )
    lines.append(
        f"\nMeans of {trained['seeds']} seeds. From scratch: the demo's model. Fine-tuning: a model with D = "
        f"{trained['hidden_size']}, on the half of the training images that it was not pre-trained on. Token merging: one "
        f"trained model with 6 layers. With 2,000 test images, 1.5 points are within the 95% interval. {where}"
    )
    return "\n".join(lines)


def loader(house: Path) -> str:
    """One row per kind of data: images a second through rows that are transformed one by one, and through hf_vit.data."""
    measured, where = _read(house, "loader")
    ours, as_bytes = "hf_vit.data, normalised on the CPU", "bytes, for a device to normalise"
    lines = header("data", "`with_transform`, PIL", ours, "ratio", as_bytes, "ratio")
    for row in measured["kinds"]:
        lines.append(
            f"| {row['data']} | {row['reference']:,.0f} images/s | {row['hf_vit']:,.0f} images/s | {row['ratio']:.1f} "
            f"| {row['hf_vit_bytes']:,.0f} images/s | {row['ratio_of_bytes']:.1f} |"
        )
    lines.append(
        f"\nMedians of {measured['rounds']} rounds in turns, {measured['workers']} worker processes each. {where}"
    )
    return "\n".join(lines)


def loading(house: Path) -> str:
    """Import and from_pretrained of ViT-B beside native transformers."""
    measured, where = _read(house, "loading")
    ours, theirs = measured["hf_vit"], measured["transformers"]
    lines = header("what", "hf_vit", "transformers")
    for key, title, unit in (
        ("imported", "import", " s"),
        ("loaded", "`from_pretrained` of ViT-B, from its native folder", " s"),
        ("memory", "peak memory of that, in sizes of the weights, before they are used", ""),
    ):
        lines.append(f"| {title} | {ours[key]:.2f}{unit} | {theirs[key]:.2f}{unit} |")
    return "\n".join([*lines, f"\nMedians of {measured['rounds']} rounds in turns. {where}"])


def memory(house: Path) -> str:
    """One row per model size and batch: the computed peak of each way to train, and of inference."""
    measured, where = _read(house, "memory")
    lines = header("model", "batch", "full", "checkpointing", "LoRA", "head", "inference")
    for row in measured["rows"]:
        peaks = " | ".join(f"{row[way] / 2**30:.1f}" for way in ("full", "checkpointing", "lora", "head", "inference"))
        lines.append(f"| ViT-{row['model']}/16 | {row['batch']} | {peaks} |")
    checked = measured["checked"]
    difference = max(abs(way["allocated"] / way["computed"] - 1) for way in checked["ways"])
    lines.append(
        f"\nComputed from the shapes of all tensors, measured on no GPU. As a check, the same steps of ViT-{checked['model']}/16 with "
        f"a batch of {checked['batch']} ran on a CPU: what PyTorch's allocator gave out differs by at most {difference:.2%}. "
        f"torch {measured['versions']['torch']}. {where}"
    )
    return "\n".join(lines)


def work(house: Path) -> str:
    """One row per model size: operations per image, and what they come to at a stated speed."""
    measured, _ = _read(house, "memory")
    operations, speeds = "GFLOP an image, inference", "images/s at 100 TFLOP/s, inference"
    lines = header("model", "parameters", operations, "full training", speeds, "full training")
    for row in measured["work"]:
        counts = [row["forward"], row["step"]]
        cells = [f"{count / 1e9:.1f}" for count in counts] + [
            f"{float(f'{1e14 / count:.2g}'):,.0f}" for count in counts
        ]
        lines.append(f"| ViT-{row['model']}/16 | {row['parameters']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)

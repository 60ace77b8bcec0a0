"""Write the tables of measurements into the handbook, and the ledger of runs, from the JSON files of model_cards.

    python recipes/benchmarks/tables.py

A test fails while a page and its results differ.
"""

import json
from functools import partial
from pathlib import Path


HOUSE = Path(__file__).resolve().parents[2]


def header(*titles: str) -> list[str]:
    """The first two lines of a table in Markdown."""
    return [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]


def describe_commit(commit: str | None) -> str:
    name, changed, _ = (commit or "unknown").partition(" ")
    return name[:7] + (" with local changes" if changed else "")


def _read(house: Path, part: str, file: str = "benchmark.json") -> tuple[dict, str]:
    """A part of benchmark.json, and where and when it was measured."""
    measured = json.loads((house / "model_cards" / file).read_text())[part]
    return measured, f"{measured['date']}, {measured['hardware']}, commit {describe_commit(measured['commit'])}."


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


def ledger(house: Path) -> str:
    """One row per run that model_cards keeps."""
    lines = header("run", "data", "accuracy", "training", "hardware", "commit", "command")
    for file in sorted(house.glob("model_cards/**/results.json")):
        run, name = json.loads(file.read_text()), str(file.parent.relative_to(house / "model_cards"))
        if "train_seconds" not in run:
            continue
        data, (low, high) = run["data"], run["intervals"]["accuracy"]
        images = f"{data['train_images']:,} of {Path(data['name']).name}, {data['scored_images']:,} {data['scored']}"
        lines.append(
            f"| [{name}]({name}) | {images} | {run['metrics']['accuracy']:.2%} ({low:.1%} to {high:.1%}) "
            f"| {run['train_seconds']:,.0f} s | {run['hardware']} | {describe_commit(run['commit'])} | `{run['command']}` |"
        )
    return "\n".join(lines)


TABLES = {
    "ledger": ledger,
    "families": families,
    "speed": speed,
    "speed_avx2": partial(speed, file="benchmark-avx2.json"),
    "loader": loader,
    "loading": loading,
}


def pages(house: Path) -> list[Path]:
    return [house / "model_cards" / "README.md", *sorted((house / "recipes" / "docs").glob("*.md"))]


def fill_tables(page: str, house: Path) -> str:
    """A page with each table between its marks replaced."""
    for name, table in TABLES.items():
        before, start, rest = page.partition(f"<!-- {name}: recipes/benchmarks/tables.py writes this -->")
        if start:
            _, end, after = rest.partition(f"<!-- /{name} -->")
            page = f"{before}{start}\n{table(house)}\n{end}{after}"
    return page


if __name__ == "__main__":
    for path in pages(HOUSE):
        path.write_text(fill_tables(path.read_text(), HOUSE))

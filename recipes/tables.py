"""Write the tables of README.md from the JSON files of model_cards, so that no number is typed.

Run it with `python recipes/tables.py`; a test fails while README and results differ.
"""

import json
from pathlib import Path


HOUSE = Path(__file__).parents[1]


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
            f"| {run['train_seconds']:.0f} s, {run['images_per_second']:,.0f} images/s "
            f"| {run['hardware']} |"
        )
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


def with_tables(readme: str, house: Path) -> str:
    """The README with each table between its marks replaced."""
    for name, table in (("results", results(house)), ("families", families(house))):
        before, start, rest = readme.partition(f"<!-- {name}: recipes/tables.py writes this -->")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        readme = f"{before}{start}\n{table}\n{end}{after}"
    return readme


if __name__ == "__main__":
    readme = HOUSE / "README.md"
    readme.write_text(with_tables(readme.read_text(), HOUSE))

"""Write the results table of README.md from model_cards/*/results.json, so that no number is typed.

Run it with `python recipes/tables.py`; a test fails while README and results differ.
"""

import json
from pathlib import Path


HOUSE = Path(__file__).parents[1]
START, END = "<!-- results: recipes/tables.py writes this from model_cards/*/results.json -->", "<!-- /results -->"


def table(files: list[Path]) -> str:
    """One row a published run."""
    lines = ["| run | images | accuracy | training | hardware |", "|---|---|---|---|---|"]
    for file in files:
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


def with_table(readme: str, files: list[Path]) -> str:
    """The README with its table replaced."""
    before, _, rest = readme.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{table(files)}\n{END}{after}"


if __name__ == "__main__":
    readme = HOUSE / "README.md"
    readme.write_text(with_table(readme.read_text(), sorted(HOUSE.glob("model_cards/*/results.json"))))

"""Write the tables of the README and the handbook, and the cards in model_cards, from the JSON files of model_cards.

    python recipes/tables.py
    python recipes/tables.py --keep runs/demo demo
    python recipes/tables.py --keep runs/demo-1 demo/seeds/1

`--keep runs/demo demo` first copies what model_cards keeps of a finished run to model_cards/demo; `--keep runs/demo-1 demo/seeds/1`
the numbers of the same run with another seed; `--keep runs/transfer transfer` all runs of recipes/transfer.py. A test fails while
a page or a card and its results differ.
"""

import argparse
from pathlib import Path

from command_line import Parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, "[--keep RUN NAME]")
    keep = "first copy a finished run to model_cards/NAME; by default nothing is copied"
    parser.add_argument("--keep", nargs=2, metavar=("RUN", "NAME"), help=keep)
    return parser.parse_args(argv)


if __name__ == "__main__":  # a wrong flag is answered before the imports, which take seconds
    ARGUMENTS = parse_args()

from benchmarks import measurement_tables, run_tables
from benchmarks.kept_runs import keep, write_cards

from hf_vit.system.errors import run_script


HOUSE = Path(__file__).resolve().parents[1]
TABLES = {
    "results": run_tables.results,
    "presets": run_tables.presets,
    "seeds": run_tables.seeds,
    "transfer": run_tables.transfer,
    "fine_tuning": run_tables.fine_tuning,
    "pretraining": run_tables.pretraining,
    "families": measurement_tables.families,
    "speed": measurement_tables.speed,
    "speed_avx2": measurement_tables.speed_avx2,
    "budget": measurement_tables.budget,
    "savings": measurement_tables.savings,
    "loader": measurement_tables.loader,
    "loading": measurement_tables.loading,
    "memory": measurement_tables.memory,
    "work": measurement_tables.work,
}


def pages(house: Path) -> list[Path]:
    return [house / "README.md", house / "recipes" / "README.md", *sorted((house / "recipes" / "docs").glob("*.md"))]


def fill_tables(page: str, house: Path) -> str:
    """A page with each table between its marks replaced."""
    for name, table in TABLES.items():
        before, start, rest = page.partition(f"<!-- {name}: recipes/tables.py writes this -->")
        if start:
            _, end, after = rest.partition(f"<!-- /{name} -->")
            page = f"{before}{start}\n{table(house)}\n{end}{after}"
    return page


def main(args: argparse.Namespace):
    if args.keep is not None:
        keep(Path(args.keep[0]), args.keep[1], HOUSE)
    write_cards(HOUSE)
    for page in pages(HOUSE):
        page.write_text(fill_tables(page.read_text(), HOUSE))


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))

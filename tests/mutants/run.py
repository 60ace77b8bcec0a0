"""Small wrong versions of the code, tried one at a time: does a test notice?

    python tests/mutants/run.py                        every mutant of every room, which takes an hour on two cores
    python tests/mutants/run.py data figures           those of two rooms
    python tests/mutants/run.py --id causal-attention  one

Each room has its mutants in a YAML file beside this one: a text that stands once in a file, a wrong one in its place, and one
sentence that says what is wrong. A mutant is put into a copy of the working tree, and the room's tests run until one fails; those
that the mutant names go first. At the end the tests that failed run once without a mutant, and must pass. The exit code is 1 if a
mutant survived, or if a test fails without one.
"""

import argparse
import ast
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml


HERE = Path(__file__).resolve().parent
HOUSE = HERE.parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "*.egg-info", "build", "runs")
MOST_SECONDS = 1800  # of a pytest run; a mutant that never ends is noticed


@dataclass(frozen=True)
class Mutant:
    """`old` stands once in `file`, a path below the root, and is replaced by `new`, which is `wrong`, a sentence.

    Args:
        tests: test files, relative to tests/, or single tests of them, that run before those of the room.
    """

    room: str
    id: str
    file: str
    tests: list[str]
    wrong: str
    old: str
    new: str


def read_mutants() -> list[Mutant]:
    return [
        Mutant(file.stem, **entry)
        for file in sorted(HERE.glob("*.yaml"))
        for entry in yaml.safe_load(file.read_text(encoding="utf-8"))
    ]


def mutated(mutant: Mutant, house: Path) -> str:
    """The text of the mutant's file with the mutant in it; ValueError if it does not apply."""
    text = (house / mutant.file).read_text(encoding="utf-8")
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(f"mutant {mutant.id}: its old text stands {count} times in {mutant.file}, wanted once")
    text = text.replace(mutant.old, mutant.new)
    if mutant.file.endswith(".py"):
        ast.parse(text, mutant.file)
    return text


def room_tests(room: str) -> str:
    """Folder or file of a room's tests, relative to tests/."""
    return room if (HOUSE / "tests" / room).is_dir() else f"test_{room}.py"


@contextlib.contextmanager
def copy_of_the_house() -> Iterator[Path]:
    """A copy of the working tree."""
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        house, site = Path(folder, "house"), Path(folder, "site")
        shutil.copytree(HOUSE, house, symlinks=True, ignore=LEFT_OUT)
        site.mkdir()
        (site / "hf_vit_recipes").symlink_to(house / "recipes")  # the name of recipes/ in an installation
        Path(folder, "tmp").mkdir()
        yield house


def environment(house: Path) -> dict[str, str]:
    """Under which `hf_vit` and `hf_vit_recipes` are those of the copy, before those of an installation."""
    path = os.pathsep.join(map(str, (house.parent / "site", house)))
    # No bytecode: that of a file which changes twice in a second would be taken for the new one's.
    own = {
        "PYTHONPATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(house.parent / "tmp"),
    }
    return {**os.environ, **own}


def failed_tests(house: Path, tests: Iterable[str], *options: str) -> list[str]:
    """Run tests, given relative to tests/ -> the names of those that fail."""
    line = [sys.executable, "-m", "pytest", "-rfE", "--tb=no", "-p", "no:cacheprovider", *options]
    line += [f"tests/{test}" for test in tests]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    with subprocess.Popen(line, cwd=house, env=environment(house), **pipes) as process:
        try:
            printed, _ = process.communicate(timeout=MOST_SECONDS)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return [f"no end after {MOST_SECONDS} s"]
            raise
    found = re.findall(r"^(?:FAILED|ERROR) tests/(.+?)(?: - .*)?$", printed, re.MULTILINE)
    if bool(process.returncode) != bool(found):
        raise RuntimeError(f"pytest ended with {process.returncode}:\n{printed[-3000:]}")
    return found


def try_mutant(mutant: Mutant, house: Path, quick: bool) -> str | None:
    """The test that notices a mutant, or None; `quick`: of those that it names."""
    file, text = house / mutant.file, mutated(mutant, house)
    before = file.read_text(encoding="utf-8")
    file.write_text(text, encoding="utf-8")
    try:
        for tests in [mutant.tests] if quick else [mutant.tests, [room_tests(mutant.room)]]:
            if failed := failed_tests(house, tests, "--exitfirst"):
                return failed[0]
    finally:
        file.write_text(before, encoding="utf-8")
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mutants = read_mutants()
    rooms = list(dict.fromkeys(mutant.room for mutant in mutants))
    parser.add_argument("rooms", nargs="*", metavar="room", help=f"of {', '.join(rooms)}; all if none is named")
    parser.add_argument("--id", nargs="+", default=[], help="mutants by their names")
    parser.add_argument("--quick", action="store_true", help="run only the tests that the mutants name")
    args = parser.parse_args()
    if unknown := {*args.rooms, *args.id} - {*rooms, *(mutant.id for mutant in mutants)}:
        parser.error(f"there is no room or mutant {', '.join(sorted(unknown))}")
    if args.rooms or args.id:
        mutants = [mutant for mutant in mutants if mutant.room in args.rooms or mutant.id in args.id]
    noticed = {}
    with copy_of_the_house() as house:
        for mutant in mutants:
            began = time.monotonic()
            noticed[mutant.id] = try_mutant(mutant, house, args.quick)
            seconds = f"{time.monotonic() - began:.0f}"
            print(f"{mutant.room} {mutant.id}, {seconds} s: {noticed[mutant.id] or 'SURVIVED'}", flush=True)
        failed = sorted({test for test in noticed.values() if test is not None and ".py" in test})
        unsound = failed_tests(house, failed) if failed else []
    survived = [name for name, test in noticed.items() if test is None]
    print(f"\n{len(mutants)} mutants, {len(survived)} survived: {', '.join(survived) or 'none'}")
    if unsound:
        print(f"these tests fail without a mutant, too: {', '.join(unsound)}")
    return int(bool(survived or unsound))


if __name__ == "__main__":
    sys.exit(main())

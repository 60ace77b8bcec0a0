"""Claims about the mutants; `python tests/mutants/run.py` tries them."""

from mutants.run import HOUSE, mutated, read_mutants, room_tests


MUTANTS = read_mutants()


def test_every_mutant_applies_once_and_changes_its_file():
    assert [mutant.id for mutant in MUTANTS if mutated(mutant, HOUSE) == (HOUSE / mutant.file).read_text()] == []


def test_every_mutant_has_a_name_of_its_own_and_tests_that_are_there():
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)
    for name in {name for mutant in MUTANTS for name in (*mutant.tests, room_tests(mutant.room))}:
        path, _, test = name.partition("::")
        assert (HOUSE / "tests" / path).exists(), name
        assert not test or f"def {test.partition('[')[0]}(" in (HOUSE / "tests" / path).read_text(), name

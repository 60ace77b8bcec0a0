"""The short form of `make torture`."""

import pytest
from torture import torture


@pytest.mark.slow
def test_a_run_killed_at_random_instants_and_inside_a_checkpoint_write_ends_as_if_nothing_had_happened(tmp_path):
    """SIGKILL at any instant | the same command continues from the last whole checkpoint: same weights, losses and scores, to the last bit."""
    hits = torture(tmp_path, runs=2, seed=1)
    assert any("was written" in one for hit in hits for one in hit)

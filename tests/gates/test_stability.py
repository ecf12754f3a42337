"""Counts of a step are equal in every process; ``tests/gates/stability.py`` is the long run."""

from __future__ import annotations

import pytest

from tests.gates.stability import count, results


@pytest.mark.slow
def test_counts_of_a_busy_process_equal_those_of_this_one() -> None:
    """This process is pytest's, with the state that other tests left."""
    assert results(1, loaded=True, families=["gpt2"]) == [count(["gpt2"])]

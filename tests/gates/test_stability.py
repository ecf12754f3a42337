"""Counts are the same in every process; ``tests/gates/stability.py`` is this at length."""

from __future__ import annotations

import pytest

from tests.gates.stability import count, results


@pytest.mark.takes_long
def test_a_process_on_a_busy_machine_counts_as_this_one_does() -> None:
    """Which is pytest, with all that other tests left in it."""
    assert results(1, loaded=True, families=["gpt2"]) == [count(["gpt2"])]

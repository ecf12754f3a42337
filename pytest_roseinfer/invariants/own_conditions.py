"""Conditions the harness counts itself: the oracle shows them, so no cache has to count them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pytest_roseinfer.findings.finding import Finding
from pytest_roseinfer.invariants.invariant import ATTENTION, OPERATION, invariant

if TYPE_CHECKING:
    from pytest_roseinfer.cases.operations.operation import Operation
    from pytest_roseinfer.oracle import Oracle
    from pytest_roseinfer.running.observation import Observation

LAST_POSITION = "last_position"
"""A row began at the last position of its block, the others being filled."""
OUT_OF_ROOM_MID_BATCH = "out_of_room_mid_batch"
"""A write was refused of which the first row alone would have found room."""
NAME_USED_AGAIN = "name_used_again"
"""A sequence began under the name of one that was freed."""
OWN_CONDITIONS = (LAST_POSITION, OUT_OF_ROOM_MID_BATCH, NAME_USED_AGAIN)


@invariant(rank=5, needs=("path_counts",), after=(OPERATION, ATTENTION))
def own_conditions(seen: Observation) -> Finding | None:
    """A cache leaves out of its counts what the harness counts itself."""
    for name in seen.ran:
        if name in OWN_CONDITIONS and name in seen.declared.conditions:
            return Finding(f"path_counts() counts {name!r}, which the harness counts itself")
    return None


def own_conditions_met(oracle: Oracle, step: Operation) -> Counter[str]:
    """Which of them a step meets that is about to be done."""
    met: Counter[str] = Counter()
    rows = step.rows()
    if step.fits(oracle):
        met[LAST_POSITION] = sum(_begins_at_the_last_position(oracle, seq) for seq, _ in rows)
        met[NAME_USED_AGAIN] = sum(_begins_again(oracle, seq) for seq in step.changed())
    else:
        met[OUT_OF_ROOM_MID_BATCH] = int(bool(rows) and oracle.fits(rows[:1]))
    return +met


def _begins_again(oracle: Oracle, seq: int) -> bool:
    return seq not in oracle.sequences and oracle.lives[seq] > 0


def _begins_at_the_last_position(oracle: Oracle, seq: int) -> bool:
    # A page holds a token at least, so blocks of one position, all of them last, do not count.
    pages = oracle.sequences.get(seq)
    return len(pages[-1].tokens) == oracle.block_size - 1 if pages else False

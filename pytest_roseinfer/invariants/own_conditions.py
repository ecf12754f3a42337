"""Conditions the harness counts itself: the oracle shows them, so no cache has to count them.

``KVCacheAdapter.conditions`` says what each of them means.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pytest_roseinfer.adapters.names.condition_names import OWN_CONDITIONS
from pytest_roseinfer.adapters.reuse_conditions import USED_AGAIN
from pytest_roseinfer.findings.finding import Finding
from pytest_roseinfer.invariants.invariant import ATTENTION, OPERATION, Observation, invariant

if TYPE_CHECKING:
    from pytest_roseinfer.cases.operations.operation import Operation
    from pytest_roseinfer.oracle.oracle import Oracle


@invariant(rank=5, needs=("path_counts",), after=(OPERATION, ATTENTION))
def own_conditions(seen: Observation) -> Finding | None:
    """A cache leaves out of its counts what the harness counts itself."""
    for name in seen.ran:
        if name in (*OWN_CONDITIONS, *USED_AGAIN) and name in seen.declared.conditions:
            return Finding(f"path_counts() counts {name!r}, which the harness counts itself")
    return None


def own_conditions_met(oracle: Oracle, step: Operation) -> Counter[str]:
    """Count the conditions that a step will meet, which is about to be done."""
    met: Counter[str] = Counter()
    admitted = step.admitted(oracle)
    if admitted is not step:
        rows = step.rows()
        met["out_of_room_mid_batch"] = int(bool(rows) and oracle.fits(rows[:1]))
    if admitted:
        for seq, _ in admitted.rows():
            # A page holds a token at least, so blocks of one position, always last, do not count.
            if at := oracle.on_last(seq):
                met["last_position"] += at == oracle.block_size - 1
        for seq in admitted.changed():
            met["name_used_again"] += seq not in oracle.named and oracle.lives[seq] > 0
    return +met

"""Blocks that are kept for later texts are given to others in the order that a cache declares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.findings.finding import location_of_block
from pytest_roseinfer.invariants.invariant import Finding, Observation, invariant

if TYPE_CHECKING:
    from pytest_roseinfer.findings.released import Released


@invariant(rank=3, needs=("texts", "table", "ledger"))
def evictions(seen: Observation) -> Finding | None:
    if seen.declared.evicts == "any":
        return None
    kept = seen.after.ledger(0).cached
    staying = {block: each for block, each in seen.released.items() if block in kept}
    for block, gone in seen.released.items():
        if block in kept or _still_there(seen, gone):
            continue
        for other, stays in staying.items():
            if stays.goes_before(gone):
                return Finding(
                    f"block {block} was evicted and block {other} was not, which "
                    + _why(stays, gone),
                    location_of_block(seen, 0, block),
                )
    return None


def _still_there(seen: Observation, was: Released) -> bool:
    """Return True if a sequence has by now, in that block or another, what the block held.

    Where it stored that anew, the block is one too many and not evicted.
    """
    return any(
        tuple(page.tokens[: len(was.tokens)]) == was.tokens
        for seq, table in seen.after.tables_of(0).items()
        for page, _ in zip(seen.oracle.sequences[seq], table, strict=False)
    )


def _why(stays: Released, gone: Released) -> str:
    if stays.step != gone.step:
        return f"was released earlier, in step {stays.step} and not in step {gone.step}"
    return f"was released with it and lies nearer to the tail: {stays.at} is behind {gone.at}"

"""Swap space that is taken must belong to sequences that are swapped out."""

from __future__ import annotations

from pytest_roseinfer.invariants.invariant import Finding, Observation, invariant


@invariant(rank=2, needs=("ledger", "swap_out"))
def swap_space(seen: Observation) -> Finding | None:
    most = seen.oracle.away.swapped_blocks(seen.spec.block_size)
    for layer in range(seen.spec.num_layers):
        taken = seen.after.ledger(layer).swapped or 0
        if taken > most:
            return Finding(
                f"layer {layer}: {taken} blocks of swap space are taken, and what is swapped out "
                f"fills {most}"
            )
    return None

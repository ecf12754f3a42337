"""What the blocks of a cache hold, as far as the tokens are known that were written there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_roseinfer.oracle.oracle import Oracle

Contents = Mapping[int, Sequence[int]]
"""The tokens in each block that is held, or free and kept for texts that come."""


def contents_of(
    oracle: Oracle,
    tables: Mapping[int, Sequence[int | None]],
    cached: Collection[int],
    before: Contents,
) -> Contents:
    """Return what blocks hold after a step; a cached one holds what it held ``before``."""
    found = {block: before[block] for block in cached if block in before}
    for seq, blocks in tables.items():
        # Of a block that others held too, what a sequence does not see stays until it writes there.
        due = oracle.length(seq) + oracle.unseen[seq] - oracle.unwritten(seq)
        for at, (block, page) in enumerate(zip(blocks, oracle.sequences[seq], strict=False)):
            if block is None:
                continue
            written = tuple(page.tokens[: max(0, due - at * oracle.block_size)])
            held = before.get(block, ())
            if oracle.coming(seq) and held == tuple(page.tokens):
                written = held  # it was found, and need not be copied back
            found[block] = max(found.get(block, ()), written, key=len)
    return found

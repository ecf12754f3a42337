"""What the blocks of a cache hold, as far as the tokens are known that were written there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.pages import Page, Table

Contents = Mapping[int, Sequence[int]]
"""The tokens in each block that is held, or free and kept for texts that come."""


def contents_of(
    oracle: Oracle,
    tables: Mapping[int, Sequence[int | None]],
    cached: Collection[int],
    before: Contents,
    shown: Mapping[int, Table],
) -> Contents:
    """Return what blocks hold after a step; a cached one holds what it held ``before``.

    What a long write moved out of a window at once may be kept in a block that no table ``shown``
    before had, or had with less in it: it counts as held, by blocks below 0, as long as any block
    is kept.
    """
    found = {block: before[block] for block in cached if block in before}
    passed = {tuple(before[block]) for block in before if block < 0}
    for seq, blocks in tables.items():
        # Of a block that others held too, what a sequence does not see stays until it writes there.
        due = oracle.length(seq) + oracle.unseen[seq] - oracle.unwritten(seq)
        for at, (block, page) in enumerate(zip(blocks, oracle.sequences[seq], strict=False)):
            if block is None:
                if _moved_out_unseen(shown.get(seq, ()), at, cached, before, page):
                    passed.add(tuple(page.tokens))
                continue
            written = tuple(page.tokens[: max(0, due - at * oracle.block_size)])
            held = before.get(block, ())
            if oracle.coming(seq) and held == tuple(page.tokens):
                written = held  # it was found, and need not be copied back
            found[block] = max(found.get(block, ()), written, key=len)
    if cached:
        found |= {-1 - at: page for at, page in enumerate(sorted(passed))}
    return found


def _moved_out_unseen(
    table: Table, at: int, cached: Collection[int], before: Contents, page: Page
) -> bool:
    """Return True if no table showed a block with all of a page before it was given back."""
    if at >= len(table):
        return True
    block = table[at]
    return block is not None and block in cached and before.get(block) != tuple(page.tokens)

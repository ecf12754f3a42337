"""Kinds of batches that show what a write of several rows does wrong, by what the rows find."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_roseinfer.oracle.oracle import Oracle

FEWEST_ROWS = 3
"""Rows of a batch that is counted; in a smaller one, the first and the last are all."""
MIXED_LENGTHS = "mixed lengths"
"""Sequences of different lengths."""
ONE_POSITION = "one position"
"""Rows that all begin at one position of their blocks, which hold more tokens than one."""
MIXED_POSITIONS = "mixed positions"
"""Rows that begin at different positions of their blocks."""
BOUNDARY = "boundary"
"""A row that fills its block, or begins one after the sequence's first."""
SHARED_TWICE = "shared twice"
"""A sequence with a block that two hold."""
LAST_SHARED = "last block shared"
"""A sequence whose last block two hold."""


def batch_kinds(oracle: Oracle, rows: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Yield the kinds of a batch of at least ``FEWEST_ROWS`` that is about to be appended."""
    size, lengths = oracle.block_size, [oracle.length(seq) for seq, _ in rows]
    if len({*lengths}) > 1:
        yield MIXED_LENGTHS
    if size > 1:
        yield ONE_POSITION if len({length % size for length in lengths}) == 1 else MIXED_POSITIONS
    if any(length and length % size in (0, size - 1) for length in lengths):
        yield BOUNDARY
    blocks = oracle.blocks()
    holders = [of_group for seq, _ in rows for of_group in blocks.holders_of(seq)]
    if any(2 in of_group for of_group in holders):
        yield SHARED_TWICE
    if any(of_group[-1:] == [2] for of_group in holders):
        yield LAST_SHARED

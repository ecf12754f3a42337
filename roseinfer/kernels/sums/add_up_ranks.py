"""Adds up a row over ranks inside of a kernel, through memory that all of their GPUs write to.

Each rank has an inbox. A program writes its row's numbers to the inboxes of the others, every one
in a word together with a stamp, and waits until the words of the others have come to its own. A
word is written at once, so who sees the stamp sees the number: there are no flags and no fences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from roseinfer.kernels.moves import taken

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.kernels.moves import Given
    from roseinfer.kernels.sums.exchange import Exchange


def arguments(exchange: Exchange | None) -> tuple[tuple[Tensor | None, ...], tuple[int, int, int]]:
    """Return a kernel's arguments for an exchange, pointers and constants, or for none."""
    if exchange is None:
        return (None, None, None, None), (0, 0, 1)
    return exchange.pointers, exchange.constants


def exchange_moved(given: Given) -> dict[str, int]:
    """Count what comes from other ranks. What goes to them is written to their GPUs' memory."""
    others = given["RANKS"] - 1
    if not others:
        return {}
    rows, width = given["residual"].shape
    return {
        "inbox": taken(given["inbox"], others * rows * width),
        "inboxes": taken(given["inboxes"], others),
        "rounds": 2 * taken(given["rounds"], rows),
    }


@triton.jit
def _are_missing(words, stamp, inside):
    """Tell if some words have another stamp."""
    return tl.max((inside & ((words >> 32).to(tl.int32) != stamp)).to(tl.int32), 0) > 0


@triton.jit
def add_up_ranks(
    own, row, n, inside, inbox, inboxes, rounds, gone,
    N: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Add up what all ranks have of a row, in float32 and in their order: all get the same bits.

    Rounds of a row take turns with two places. Who writes to a place has taken the round before
    from everybody. They sent it in a later launch than the one that read the place last, and a
    launch writes nothing before those in front of it have ended. So what is written over was read,
    and a place holds the words of this round, or those of two rounds ago with another stamp.
    That stays so where the count goes on from the largest number to the smallest.
    """
    stamp = tl.load(rounds + row) + 1
    SIZE: tl.constexpr = ROWS * N
    begin = (stamp & 1).to(tl.int64) * (RANKS * SIZE) + row * N
    number = own.to(tl.uint32, bitcast=True).to(tl.int64)
    words = (stamp.to(tl.int64) << 32) | number
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            place = tl.load(inboxes + rank).to(tl.pointer_type(tl.int64))
            place = tl.multiple_of(place, 16)
            tl.store(place + begin + RANK * SIZE + n, words, inside)
    total = tl.zeros_like(own)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += own
        else:
            place = inbox + begin + rank * SIZE + n
            come = tl.load(place, inside, other=0, volatile=True)
            waits = _are_missing(come, stamp, inside)
            while waits:
                come = tl.load(place, inside, other=0, volatile=True)
                ended = tl.load(gone, volatile=True)
                waits = _are_missing(come, stamp, inside) & (ended == 0)
            total += come.to(tl.int32).to(tl.float32, bitcast=True)
    tl.debug_barrier()  # every warp has read how many rounds there were
    tl.store(rounds + row, stamp)
    return total

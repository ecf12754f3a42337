"""Adds up a row over ranks inside of a kernel, through memory that all of their GPUs write to.

Each rank has an inbox. A program writes its row's numbers to the inboxes of the others, one or two
in a word together with a stamp, and waits until the words of the others have come to its own. A
word is written at once, so who sees the stamp sees the numbers: there are no flags and no fences.
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


def arguments(
    exchange: Exchange | None,
) -> tuple[tuple[Tensor | None, ...], tuple[int, int, int, int]]:
    """Return a kernel's arguments for an exchange, pointers and constants, or for none."""
    if exchange is None:
        return (None, None, None, None), (0, 0, 1, 1)
    return exchange.pointers, exchange.constants


def exchange_moved(given: Given) -> dict[str, int]:
    """Count what comes from other ranks. What goes to them is written to their GPUs' memory."""
    others = given["RANKS"] - 1
    if not others:
        return {}
    rows, width = given["residual"].shape
    return {
        "inbox": taken(given["inbox"], others * rows * (width // given["TOGETHER"])),
        "inboxes": taken(given["inboxes"], given["RANKS"]),
        "rounds": 2 * taken(given["rounds"], rows),
    }


@triton.jit
def _are_missing(words, stamp, inside):
    """Tell if some words have another stamp."""
    return tl.max((inside & ((words >> 32).to(tl.int32) != stamp)).to(tl.int32), 0) > 0


@triton.jit
def _packed(numbers, TOGETHER: tl.constexpr):
    """Put the numbers that a word carries into the lower half of one."""
    if TOGETHER == 1:
        packed = numbers.to(tl.float32).to(tl.uint32, bitcast=True).to(tl.int64)
    else:  # the compiler looks at what follows a return
        PAIRS: tl.constexpr = numbers.shape[0] // 2
        bits = numbers.to(tl.uint16, bitcast=True).to(tl.int64)
        low, high = tl.split(tl.reshape(bits, (PAIRS, 2)))
        packed = low | (high << 16)
    return packed


@triton.jit
def _unpacked(words, dtype: tl.constexpr, TOGETHER: tl.constexpr):
    """Return in float32 the numbers that words carry."""
    if TOGETHER == 1:
        numbers = words.to(tl.int32).to(tl.float32, bitcast=True)
    else:
        bits = tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF)
        pairs = bits.to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        numbers = tl.reshape(pairs, (2 * words.shape[0],))
    return numbers


@triton.jit
def places_of(inboxes, RANKS: tl.constexpr):
    """Load where the inboxes of all ranks are, which no launch changes."""
    places = ()
    for rank in tl.static_range(RANKS):
        places = places + (tl.load(inboxes + rank),)  # type: ignore[assignment]  # noqa: RUF005
    return places


@triton.jit
def add_up_ranks(
    own, row, inbox, places, rounds, gone, dtype: tl.constexpr,
    N: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Add up what all ranks have of a row, in their order: all get the same bits.

    What a rank has is rounded, and so is the sum, as where the model's own modules are shared.

    Rounds of a row take turns with two places. Who writes to a place has taken the round before
    from everybody. They sent it in a later launch than the one that read the place last, and a
    launch writes nothing before those in front of it have ended. So what is written over was read,
    and a place holds the words of this round, or those of two rounds ago with another stamp.
    That stays so where the count goes on from the largest number to the smallest.
    """
    stamp = tl.load(rounds + row) + 1
    WORDS: tl.constexpr = N // TOGETHER
    TILE: tl.constexpr = own.shape[0] // TOGETHER
    SIZE: tl.constexpr = ROWS * WORDS
    w = tl.arange(0, TILE)
    inside = w < WORDS
    begin = (stamp & 1).to(tl.int64) * (RANKS * SIZE) + row * WORDS
    own = own.to(dtype)
    words = (stamp.to(tl.int64) << 32) | _packed(own, TOGETHER)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            place = tl.multiple_of(places[rank].to(tl.pointer_type(tl.int64)), 16)
            tl.store(place + begin + RANK * SIZE + w, words, inside)
    total = tl.zeros_like(own).to(tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += own.to(tl.float32)
        else:
            place = inbox + begin + rank * SIZE + w
            come = tl.load(place, inside, other=0, volatile=True)
            waits = _are_missing(come, stamp, inside)
            while waits:
                come = tl.load(place, inside, other=0, volatile=True)
                ended = tl.load(gone, volatile=True)
                waits = _are_missing(come, stamp, inside) & (ended == 0)
            total += _unpacked(come, dtype, TOGETHER)
    tl.debug_barrier()  # every warp has read how many rounds there were
    tl.store(rounds + row, stamp)
    return total.to(dtype).to(tl.float32)

"""All-reduce of a row inside a kernel, through memory that all ranks' GPUs write to.

Each rank has an inbox. A program writes its row's values to the inboxes of the others, one or two
per word together with a stamp, and waits until the words of the others have arrived in its own. A
word is written at once, so a reader that sees the stamp sees the values: there are no flags and
no fences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.kernels.kernel import TrafficTable


@dataclass(frozen=True, slots=True)
class AllReduceBuffers:
    """One rank's buffers for adding up rows with the same kernel on the other ranks."""

    rank: int
    ranks: int
    values_per_word: int
    """Values per word: two of 16 bits, as ranks round theirs, or one."""
    max_rows: int
    """Largest number of rows that a launch adds up. Each row has a program, which waits for
    the same row's program on every other GPU. All programs of a launch are resident at once, so
    none waits for one that cannot start."""
    inbox: Tensor
    """64-bit words, ``[2, ranks, max_rows, words of a row]``, received from each rank."""
    inboxes: Tensor
    """Addresses of every rank's inbox."""
    rounds: Tensor
    """All-reduces so far of each row. A launch increments them itself, so it may be in a graph."""
    gone: Tensor
    """1 when a rank has exited, after which no kernel waits for it."""


_ALONE = {
    **dict.fromkeys(("inbox", "inboxes", "rounds", "gone")),
    "ROWS": 0,
    "RANK": 0,
    "RANKS": 1,
    "VALUES_PER_WORD": 1,
}
"""Arguments of a launch that adds up nothing of other ranks."""


def all_reduce_arguments(exchange: AllReduceBuffers | None) -> dict[str, Any]:
    """Return a kernel's arguments for all-reduce buffers, or for none."""
    if exchange is None:
        return _ALONE
    return {
        "inbox": exchange.inbox,
        "inboxes": exchange.inboxes,
        "rounds": exchange.rounds,
        "gone": exchange.gone,
        "ROWS": exchange.max_rows,
        "RANK": exchange.rank,
        "RANKS": exchange.ranks,
        "VALUES_PER_WORD": exchange.values_per_word,
    }


ALL_REDUCE_TRAFFIC: TrafficTable = {
    "inbox": lambda residual, RANKS, VALUES_PER_WORD: (
        (RANKS - 1) * (residual.numel() // VALUES_PER_WORD)
    ),
    "inboxes": lambda RANKS: RANKS if RANKS > 1 else 0,
    "rounds": lambda residual, RANKS: 2 * len(residual) if RANKS > 1 else 0,
}
"""Traffic of what other ranks send. What is sent to them is written to their GPUs' memory."""


@triton.jit
def _are_missing(words, stamp, inside):
    """Return True if some words have another stamp."""
    return tl.max((inside & ((words >> 32).to(tl.int32) != stamp)).to(tl.int32), 0) > 0


@triton.jit
def _pack_words(numbers, VALUES_PER_WORD: tl.constexpr):
    """Pack the values of a word into its lower half."""
    if VALUES_PER_WORD == 1:
        packed = numbers.to(tl.float32).to(tl.uint32, bitcast=True).to(tl.int64)
    else:  # the compiler checks what follows a return
        PAIRS: tl.constexpr = numbers.shape[0] // 2
        bits = numbers.to(tl.uint16, bitcast=True).to(tl.int64)
        low, high = tl.split(tl.reshape(bits, (PAIRS, 2)))
        packed = low | (high << 16)
    return packed


@triton.jit
def _unpack_words(words, dtype: tl.constexpr, VALUES_PER_WORD: tl.constexpr):
    """Return the values of words in float32."""
    if VALUES_PER_WORD == 1:
        numbers = words.to(tl.int32).to(tl.float32, bitcast=True)
    else:
        bits = tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF)
        pairs = bits.to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        numbers = tl.reshape(pairs, (2 * words.shape[0],))
    return numbers


@triton.jit
def load_inbox_addresses(inboxes, RANKS: tl.constexpr):
    """Load the addresses of all ranks' inboxes, which no launch changes."""
    places = ()
    for rank in tl.static_range(RANKS):
        places = places + (tl.load(inboxes + rank),)  # type: ignore[assignment]  # noqa: RUF005
    return places


@triton.jit
def all_reduce_row(
    own, row, inbox, places, rounds, gone, dtype: tl.constexpr,
    N: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    VALUES_PER_WORD: tl.constexpr,
):  # fmt: skip
    """Add up a row over all ranks, in their order: all get the same bits.

    Each rank's row is rounded, and so is the sum, as where the model's own modules are sharded.

    Rounds of a row alternate between two places. A writer to a place has received the previous
    round from all ranks. They sent it in a later launch than the one that last read the place, and
    a launch writes nothing before the previous ones have ended. So what is overwritten was read,
    and a place holds the words of this round, or those of two rounds ago with another stamp. That
    stays true where the count wraps from the largest number to the smallest.
    """
    stamp = tl.load(rounds + row) + 1
    WORDS: tl.constexpr = N // VALUES_PER_WORD
    TILE: tl.constexpr = own.shape[0] // VALUES_PER_WORD
    SIZE: tl.constexpr = ROWS * WORDS
    w = tl.arange(0, TILE)
    inside = w < WORDS
    begin = (stamp & 1).to(tl.int64) * (RANKS * SIZE) + row * WORDS
    own = own.to(dtype)
    words = (stamp.to(tl.int64) << 32) | _pack_words(own, VALUES_PER_WORD)
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
            total += _unpack_words(come, dtype, VALUES_PER_WORD)
    tl.debug_barrier()  # every warp has read the round count
    tl.store(rounds + row, stamp)
    return total.to(dtype).to(tl.float32)

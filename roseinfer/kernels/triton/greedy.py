"""The end of a greedy step: the argmax of every row, and the advance by one position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.language as tl
from torch import Tensor

from roseinfer.kernels.kernel import kernel
from roseinfer.kernels.runtime import cdiv, next_power_of_2

if TYPE_CHECKING:
    from roseinfer.kernels.kernel import TrafficTable

_MAX_STRIPS = 32
"""Largest number of programs that share a row; a second kernel combines their results."""
_TILE = 1024


def _strip_elements(best: Tensor, strips: int) -> int:
    return len(best) * strips


_STRIP_RESULTS: TrafficTable = dict.fromkeys(("best", "place", "kind"), _strip_elements)
"""Traffic of the first kernel's outputs for each strip."""
_STRIP_TRAFFIC: TrafficTable = {**_STRIP_RESULTS, "logits": lambda own, N: len(own) * N}
_ADVANCE_TRAFFIC: TrafficTable = {
    **_STRIP_RESULTS,
    **dict.fromkeys(("chosen", "tokens", "active"), lambda chosen: len(chosen)),
    "lengths": lambda chosen: 2 * len(chosen),
}


@kernel(_STRIP_TRAFFIC)
def _strip_kernel(
    logits, best, place, kind,
    l_r, strips,
    N: tl.constexpr, STRIP: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Find a strip's largest logit, its first position, and flags for NaN and finite logits."""
    row = tl.program_id(0).to(tl.int64)
    strip = tl.program_id(1)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    top = tl.full((TILE,), float("-inf"), tl.float32)
    at_top = tl.zeros((TILE,), tl.int32)
    broken = tl.zeros((TILE,), tl.int32)
    finite = tl.zeros((TILE,), tl.int32)
    for at in range(0, STRIP, TILE):
        n = strip * STRIP + at + tl.arange(0, TILE)
        x = tl.load(logits + row * l_r + n, n < N, other=float("-inf")).to(tl.float32)
        broken |= (x != x).to(tl.int32)
        finite |= (tl.abs(x) < float("inf")).to(tl.int32)
        higher = x > top
        top = tl.where(higher, x, top)
        at_top = tl.where(higher, n, at_top)
    highest = tl.max(top, 0)
    tl.store(best + row * strips + strip, highest)
    tl.store(place + row * strips + strip, tl.min(tl.where(top == highest, at_top, N), 0))
    tl.store(kind + row * strips + strip, tl.max(broken, 0) * 2 + tl.max(finite, 0))


@kernel(_ADVANCE_TRAFFIC)
def _advance_kernel(
    best, place, kind, chosen, tokens, lengths, active,
    strips, l_r, a_r,
    N: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    strip = tl.arange(0, TILE)
    inside = strip < strips
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    highest = tl.load(best + row * strips + strip, inside, other=float("-inf"))
    first = tl.load(place + row * strips + strip, inside, other=N)
    kinds = tl.load(kind + row * strips + strip, inside, other=0)
    token = tl.min(tl.where(highest == tl.max(highest, 0), first, N), 0).to(tl.int64)
    usable = tl.max(kinds, 0) == 1  # some logit is finite, and none is NaN
    tl.store(chosen + row, tl.where(usable, token, -1))
    tl.store(tokens + row, tl.where(usable, token, 0))
    length = tl.load(lengths + row * l_r)
    tl.store(lengths + row * l_r, length + tl.load(active + row * a_r))


def argmax_and_advance(
    logits: Tensor, chosen: Tensor, tokens: Tensor, lengths: Tensor, active: Tensor
) -> None:
    """Set ``chosen`` to each row's argmax, the first of equals, and add ``active`` to ``lengths``.

    A row with NaN or without finite logits gets -1 in ``chosen`` and 0 in ``tokens``.
    """
    rows, width = logits.shape
    strip = cdiv(cdiv(width, _MAX_STRIPS), _TILE) * _TILE
    strips = cdiv(width, strip)
    best = logits.new_empty((rows, strips), dtype=torch.float32)
    place, kind = logits.new_empty((2, rows, strips), dtype=torch.int32)
    results = {"best": best, "place": place, "kind": kind, "strips": strips}
    _strip_kernel.launch(
        (rows, strips), **results,
        logits=logits, l_r=logits.stride(0), N=width, STRIP=strip, TILE=_TILE,
    )  # fmt: skip
    _advance_kernel.launch(
        (rows,), num_warps=1, **results,
        chosen=chosen, tokens=tokens, lengths=lengths, active=active,
        l_r=lengths.stride(0), a_r=active.stride(0), N=width, TILE=next_power_of_2(strips),
    )  # fmt: skip

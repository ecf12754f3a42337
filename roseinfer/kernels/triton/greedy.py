"""The end of a greedy step: the argmax of every row, and the advance by one position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from roseinfer.kernels.runtime import cdiv, launch, next_power_of_2
from roseinfer.kernels.traffic import declare_traffic, num_bytes

if TYPE_CHECKING:
    from roseinfer.kernels.traffic import LaunchArguments

_MAX_STRIPS = 32
"""Largest number of programs that share a row; a second kernel combines their results."""
_TILE = 1024
_STRIP_RESULTS = ("best", "place", "kind")
"""Outputs of the first kernel for each strip."""


def _strips_traffic(arguments: LaunchArguments) -> dict[str, int]:
    """Count all logits, and the results of each strip."""
    rows = len(arguments["logits"])
    results = {
        name: num_bytes(arguments[name], rows * arguments["strips"]) for name in _STRIP_RESULTS
    }
    return results | {"logits": num_bytes(arguments["logits"], rows * arguments["N"])}


def _advance_traffic(arguments: LaunchArguments) -> dict[str, int]:
    """Count the results of each strip, and the state of every row."""
    rows = len(arguments["chosen"])
    results = {
        name: num_bytes(arguments[name], rows * arguments["strips"]) for name in _STRIP_RESULTS
    }
    state = {name: num_bytes(arguments[name], rows) for name in ("chosen", "tokens", "active")}
    return results | state | {"lengths": 2 * num_bytes(arguments["lengths"], rows)}


@declare_traffic(_strips_traffic)
@triton.jit
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


@declare_traffic(_advance_traffic)
@triton.jit
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
    launch(
        _strip_kernel, (rows, strips), logits, best, place, kind,
        logits.stride(0), strips, width, strip, _TILE, pdl=True,
    )  # fmt: skip
    launch(
        _advance_kernel, (rows,), best, place, kind, chosen, tokens, lengths, active,
        strips, lengths.stride(0), active.stride(0),
        width, next_power_of_2(strips), num_warps=1, pdl=True,
    )  # fmt: skip

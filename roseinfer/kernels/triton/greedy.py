"""The end of a greedy step: choose every row's likeliest token and move on by one position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from roseinfer.kernels.runtime import launch, num_tiles, power_of_two
from roseinfer.kernels.traffic import moves, taken

if TYPE_CHECKING:
    from roseinfer.kernels.traffic import Given

_STRIPS = 32
"""A row is shared among so many programs; a second kernel combines what they found."""
_TILE = 1024
_FOUND = ("best", "place", "kind")
"""What the first kernel says of a strip."""


def _strips_moved(given: Given) -> dict[str, int]:
    """Count all logits, and what is found of each strip."""
    rows = len(given["logits"])
    found = {name: taken(given[name], rows * given["strips"]) for name in _FOUND}
    return found | {"logits": taken(given["logits"], rows * given["N"])}


def _advance_moved(given: Given) -> dict[str, int]:
    """Count what is found of each strip, and the state of every row."""
    rows = len(given["chosen"])
    found = {name: taken(given[name], rows * given["strips"]) for name in _FOUND}
    state = {name: taken(given[name], rows) for name in ("chosen", "tokens", "active")}
    return found | state | {"lengths": 2 * taken(given["lengths"], rows)}


@moves(_strips_moved)
@triton.jit
def _strip_kernel(
    logits, best, place, kind,
    l_r, strips,
    N: tl.constexpr, STRIP: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Find a strip's largest number, the first place that has it, and what kinds there are."""
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


@moves(_advance_moved)
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
    usable = tl.max(kinds, 0) == 1  # something finite somewhere, and NaN nowhere
    tl.store(chosen + row, tl.where(usable, token, -1))
    tl.store(tokens + row, tl.where(usable, token, 0))
    length = tl.load(lengths + row * l_r)
    tl.store(lengths + row * l_r, length + tl.load(active + row * a_r))


def advance_to_likeliest(
    logits: Tensor, chosen: Tensor, tokens: Tensor, lengths: Tensor, active: Tensor
) -> None:
    """Choose the first of the largest logits of each row, and add ``active`` to ``lengths``.

    A row with NaN or nothing finite gets -1 in ``chosen`` and 0 in ``tokens``.
    """
    rows, width = logits.shape
    strip = num_tiles(num_tiles(width, _STRIPS), _TILE) * _TILE
    strips = num_tiles(width, strip)
    best = logits.new_empty((rows, strips), dtype=torch.float32)
    place, kind = logits.new_empty((2, rows, strips), dtype=torch.int32)
    launch(
        _strip_kernel, (rows, strips), logits, best, place, kind,
        logits.stride(0), strips, width, strip, _TILE, early=True,
    )  # fmt: skip
    launch(
        _advance_kernel, (rows,), best, place, kind, chosen, tokens, lengths, active,
        strips, lengths.stride(0), active.stride(0),
        width, power_of_two(strips), num_warps=1, early=True,
    )  # fmt: skip

"""Which rows visit which expert, in tiles of rows that one program can take.

A visit is numbered ``row * most + place``, its place among the experts of its row. Few rows need no
table: a program looks through the experts of all rows for those that visit its own. Of many rows
the visits are put in order of their experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from roseinfer.kernels.moves import taken
from roseinfer.kernels.products.streamed import tile_of_rows
from roseinfer.kernels.runtime import power_of_two

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer.kernels.moves import Given

MOST_ROWS = 64
"""With more, a tile would have rows of which few visit its expert."""
_TILE_R = 64


@dataclass(frozen=True, slots=True)
class Visits:
    """The visits of some rows, cut into tiles of visits to one expert each."""

    experts: Tensor
    """``[rows, most]``, no expert twice in a row."""
    order: Tensor
    """All visits, those to one expert next to each other. Not read where rows are few."""
    tiles: Tensor
    """``[3, tiles]``: experts of tiles, and where in that order they begin and end; nor this."""
    num_tiles: int
    tile_rows: int
    tile_visits: int = 0
    """There is a tile for each visit, and so many are looked through; 0 if one for each expert."""

    @property
    def few(self) -> bool:
        return len(self.experts) <= MOST_ROWS


def visits_of(experts: Tensor, num_experts: int) -> Visits:
    """Cut the visits of ``[rows, most]`` experts into tiles, without waiting for the device."""
    rows, most = experts.shape
    if rows <= MOST_ROWS:
        by_visit, tile = rows * most < num_experts, tile_of_rows(rows)
        if by_visit:
            looked_through = power_of_two(rows * most)
            return Visits(experts, experts, experts, rows * most, tile, looked_through)
        return Visits(experts, experts, experts, num_experts, tile)
    found, order = experts.flatten().sort(stable=True)
    each = torch.arange(num_experts + 1, dtype=found.dtype, device=found.device)
    begins = torch.searchsorted(found, each)
    counts = begins.diff()
    ends_of_tiles = ((counts + _TILE_R - 1) // _TILE_R).cumsum(0)
    num_tiles = rows * most // _TILE_R + min(num_experts, rows * most)
    at = torch.arange(num_tiles, device=found.device)
    of = torch.searchsorted(ends_of_tiles, at, right=True)  # one too many where there is no tile
    first = torch.cat([ends_of_tiles.new_zeros(1), ends_of_tiles])[of]
    begin = begins[of] + (at - first) * _TILE_R
    end = torch.cat([begins[1:], begins[-1:]])[of]
    tiles = torch.stack([of, begin, torch.minimum(begin + _TILE_R, end)])
    return Visits(experts, order, tiles, num_tiles, _TILE_R)


def visited(given: Given) -> Callable[[], int]:
    """Return what counts the experts that are visited when a kernel runs."""
    experts = given["experts"]
    return lambda: len(experts.unique())


def tables_moved(given: Given) -> dict[str, int]:
    """Count what says which rows visit which expert."""
    visits = given["rows"] * given["MOST"]
    if given["FEW"]:
        return {"experts": taken(given["experts"], visits)}
    order, tiles = given["order"], given["tiles"]
    return {"order": taken(order, visits), "tiles": taken(tiles, tiles.numel())}


@triton.jit
def visits_of_tile(
    experts, order, tiles, tile, rows, num_tiles,
    MOST: tl.constexpr, TILE_R: tl.constexpr, FEW: tl.constexpr, TILE_V: tl.constexpr,
):  # fmt: skip
    """Return the expert of a tile and its visits, padded with -1; all are where there are none."""
    r = tl.arange(0, TILE_R)
    if FEW:
        expert = tile
        if TILE_V:
            expert = tl.load(experts + tile)
        visits = tl.full((TILE_R,), -1, tl.int32)
        for place in tl.static_range(MOST):
            own = tl.load(experts + r * MOST + place, r < rows, other=-1)
            visits = tl.where(own == expert, r * MOST + place, visits)
        if TILE_V:  # the tile of the first visit to an expert takes all of them
            v = tl.arange(0, TILE_V)
            before = tl.load(experts + v, v < tile, other=-1)
            visits = tl.where(tl.max((before == expert).to(tl.int32), 0) > 0, -1, visits)
    else:
        expert = tl.load(tiles + tile).to(tl.int32)
        v = tl.load(tiles + num_tiles + tile) + r
        last = tl.load(tiles + 2 * num_tiles + tile)
        visits = tl.load(order + v, v < last, other=-1).to(tl.int32)
    return expert, visits

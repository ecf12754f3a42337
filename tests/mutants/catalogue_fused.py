"""Bugs in kernels of fused families that the check of a model at its load does not run."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, Mutant

_ROTARY = "roseinfer.kernels.triton.rope"
_VISITS = "roseinfer.kernels.triton.experts"


def _fused(name: str, wrong: str, module: str, function: str, find: str, replace: str) -> Mutant:
    return Mutant(name, wrong, module, function, find, replace, targets=(ENGINE,))


def _of_many_rows(name: str, wrong: str, function: str, find: str, replace: str) -> Mutant:
    directed = "experts_of_many_rows"
    return Mutant(name, wrong, _VISITS, function, find, replace, targets=(), directed=directed)


MUTANTS = (
    _fused(
        "rotated-at-packed-positions",
        "The rotary kernel reads positions as if they were contiguous.",
        _ROTARY,
        "_rotate_kernel",
        "position = tl.load(positions + token * p_s).to(tl.int64)",
        "position = tl.load(positions + token).to(tl.int64)",
    ),
    _fused(
        "rotated-by-the-row",
        "The rotary kernel uses a token's row in the step as its position.",
        _ROTARY,
        "_rotate_kernel",
        "position = tl.load(positions + token * p_s).to(tl.int64)",
        "position = token",
    ),
    _fused(
        "rotated-backwards",
        "Heads are rotated in the opposite direction.",
        _ROTARY,
        "load_rotated",
        "sine = tl.where(dims < HALF, -sine, sine)",
        "sine = tl.where(dims < HALF, sine, -sine)",
    ),
    _fused(
        "single-row-routed-to-the-first-experts",
        "A single row is routed to the first experts, whichever it chose.",
        _VISITS,
        "load_tile_routing",
        "expert = tl.load(experts + tile)",
        "expert = tile",
    ),
    _of_many_rows(
        "last-row-of-an-expert-dropped",
        "With many rows, the last row routed to an expert is left out.",
        "load_tile_routing",
        "visits = tl.load(order + v, v < last, other=-1).to(tl.int32)",
        "visits = tl.load(order + v, v < last - 1, other=-1).to(tl.int32)",
    ),
    _of_many_rows(
        "tile-of-the-previous-expert",
        "With many rows, an expert's first tile is computed by the previous expert.",
        "route_rows",
        "of = torch.searchsorted(ends_of_tiles, at, right=True)",
        "of = torch.searchsorted(ends_of_tiles, at)",
    ),
    _of_many_rows(
        "routing-of-few-rows-used-for-many",
        "More rows than a tile has are routed as if one tile held them.",
        "route_rows",
        """
        if rows <= MAX_ROWS:
            ...
        """,
        """
        if rows <= 2 * MAX_ROWS:
            ...
        """,
    ),
)

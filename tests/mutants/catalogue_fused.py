"""Bugs in the kernels of fused families, which the trial of a model at its load does not run."""

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
        "The rotation reads positions as if they lay side by side.",
        _ROTARY,
        "_rotate_kernel",
        "position = tl.load(positions + token * p_s).to(tl.int64)",
        "position = tl.load(positions + token).to(tl.int64)",
    ),
    _fused(
        "rotated-by-the-row",
        "A token is rotated by its row in the step.",
        _ROTARY,
        "_rotate_kernel",
        "position = tl.load(positions + token * p_s).to(tl.int64)",
        "position = token",
    ),
    _fused(
        "rotated-backwards",
        "The other half of a head turns backwards.",
        _ROTARY,
        "load_rotated",
        "sine = tl.where(dims < HALF, -sine, sine)",
        "sine = tl.where(dims < HALF, sine, -sine)",
    ),
    _fused(
        "only-row-visits-the-first-experts",
        "A row that is alone visits the first experts, whichever it chose.",
        _VISITS,
        "load_tile_routing",
        "expert = tl.load(experts + tile)",
        "expert = tile",
    ),
    _of_many_rows(
        "last-visit-of-a-tile-dropped",
        "Of many rows the last that visits an expert is left out.",
        "load_tile_routing",
        "visits = tl.load(order + v, v < last, other=-1).to(tl.int32)",
        "visits = tl.load(order + v, v < last - 1, other=-1).to(tl.int32)",
    ),
    _of_many_rows(
        "tile-of-the-expert-in-front",
        "Of many rows the first that visit an expert go to the one in front of it.",
        "route_rows",
        "of = torch.searchsorted(ends_of_tiles, at, right=True)",
        "of = torch.searchsorted(ends_of_tiles, at)",
    ),
    _of_many_rows(
        "visits-of-few-rows-in-many",
        "More rows than a tile has are looked through in one tile.",
        "route_rows",
        """
        if rows <= MOST_ROWS:
            ...
        """,
        """
        if rows <= 2 * MOST_ROWS:
            ...
        """,
    ),
)

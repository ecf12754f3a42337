"""Bugs in the kernels of fused families, which the trial of a model at its load does not run."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, Mutant

_ROTARY = "roseinfer.kernels.rotary"
_VISITS = "roseinfer.kernels.experts.visits"


def _fused(name: str, wrong: str, module: str, find: str, replace: str) -> Mutant:
    return Mutant(name, wrong, module, find, replace, targets=(ENGINE,))


def _of_many_rows(name: str, wrong: str, find: str, replace: str) -> Mutant:
    return Mutant(name, wrong, _VISITS, find, replace, targets=(), directed="experts_of_many_rows")


MUTANTS = (
    _fused(
        "rotated-at-packed-positions",
        "The rotation reads positions as if they lay side by side.",
        _ROTARY,
        "tl.load(positions + token * p_s)",
        "tl.load(positions + token)",
    ),
    _fused(
        "rotated-by-the-row",
        "A token is rotated by its row in the step.",
        _ROTARY,
        "    position = tl.load(positions + token * p_s).to(tl.int64)\n",
        "    position = token\n",
    ),
    _fused(
        "rotated-backwards",
        "The other half of a head turns backwards.",
        _ROTARY,
        "tl.where(dims < HALF, -sine, sine)",
        "tl.where(dims < HALF, sine, -sine)",
    ),
    _fused(
        "only-row-visits-the-first-experts",
        "A row that is alone visits the first experts, whichever it chose.",
        _VISITS,
        "expert = tl.load(experts + tile)",
        "expert = tile",
    ),
    _of_many_rows(
        "last-visit-of-a-tile-dropped",
        "Of many rows the last that visits an expert is left out.",
        "tl.load(order + v, v < last, other=-1)",
        "tl.load(order + v, v < last - 1, other=-1)",
    ),
    _of_many_rows(
        "tile-of-the-expert-in-front",
        "Of many rows the first that visit an expert go to the one in front of it.",
        "torch.searchsorted(ends_of_tiles, at, right=True)",
        "torch.searchsorted(ends_of_tiles, at)",
    ),
    _of_many_rows(
        "visits-of-few-rows-in-many",
        "More rows than a tile has are looked through in one tile.",
        "    if rows <= MOST_ROWS:\n        by_visit",
        "    if rows <= 2 * MOST_ROWS:\n        by_visit",
    ),
)

"""Bugs in the kernels of fused families, which the trial of a model at its load does not run."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, Mutant

_ROTARY = "roseinfer.kernels.rotary"


def _fused(name: str, wrong: str, module: str, find: str, replace: str) -> Mutant:
    return Mutant(name, wrong, module, find, replace, targets=(ENGINE,))


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
)

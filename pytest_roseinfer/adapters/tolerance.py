"""What a quantised cache promises: how far it may be off, and from what."""

from __future__ import annotations

from dataclasses import dataclass

OVER = ("token", "block")
MOST = 0.25
"""With more than that, one token could be read for another."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far what a cache reads back may be from what was written."""

    of_greatest: float
    """As a part of the greatest value, in size, that shares the scale: 1/254 for a scale that maps
    this value to 127, with a little for rounding the scale; 1/16 for ``float8_e4m3fn``."""
    over: str = "token"
    """What is searched for the greatest value: all heads of a ``"token"``, or all that stood in its
    ``"block"`` since that was taken. Keys, values and layers are apart in either case."""
    tensors: str = "float32"
    """The dtype of what the cache is handed and what it returns."""

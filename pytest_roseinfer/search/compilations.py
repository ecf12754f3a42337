"""Counts the kernels that Triton compiles: on a GPU a search waits mostly for these."""

from __future__ import annotations

from typing import Any


class Compilations:
    """A listener of Triton's compiler."""

    def __init__(self, next_listener: Any = None) -> None:
        self.count = 0
        self._next = next_listener

    def __call__(self, *, cache_hit: bool, **said: Any) -> None:
        self.count += not cache_hit
        if self._next is not None:
            self._next(cache_hit=cache_hit, **said)


def compiled_so_far() -> int:
    """Return how many kernels this process has compiled; those read from a cache do not count."""
    from triton import knobs

    if not isinstance(knobs.compilation.listener, Compilations):
        knobs.compilation.listener = Compilations(knobs.compilation.listener)
    return knobs.compilation.listener.count

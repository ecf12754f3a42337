"""Shares out the examples of a test to searches, each aimed at one of the target's paths."""

from __future__ import annotations

from itertools import product
from time import monotonic
from typing import TYPE_CHECKING

from pytest_roseinfer import settings
from pytest_roseinfer.running import coverage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pytest_roseinfer.adapters.base import Adapter

_TURNS_AGAIN = 5
_Turn = tuple[str | None, str, int]
"""A path to aim at, the name of the turn, and the examples due."""


def in_turns(adapter: type[Adapter], examples: int, of_a_turn: int) -> Iterator[_Turn]:
    """Share out examples to searches, and yield those of this part of the test.

    Paths take turns, so that a bug on the last one is found before all examples of the others ran.
    Without paths the aim is None.
    """
    paths = coverage.current().of(adapter).paths
    shares: Mapping[str | None, float] = {name: adapter.paths[name].share for name in paths}
    shares = shares or {None: 1.0}
    each = examples / sum(shares.values())
    turns = max(1, round(each / of_a_turn))
    searches = {aim: max(1, round(turns * min(1, share))) for aim, share in shares.items()}
    due_here = set(settings.current().part.share_of([*shares]))
    for turn, (aim, share) in product(range(turns), shares.items()):
        before, then = (-(-at * searches[aim] // turns) for at in (turn, turn + 1))
        if then > before and aim in due_here:
            due = [round(at * each * share / searches[aim]) for at in (before, then)]
            yield aim, str(turn), max(1, due[1] - due[0])


def turns_again(
    still_missing: Callable[[], Iterable[str | None]], of_a_turn: int, ends: float
) -> Iterator[_Turn]:
    """Yield further searches, aimed at what is still missing, until nothing is or time is over.

    Bad luck with the examples is no verdict. What so many more do not reach, none will.
    """
    for turn in range(_TURNS_AGAIN):
        for aim in still_missing() if monotonic() < ends else ():
            yield aim, f"again {turn}", of_a_turn

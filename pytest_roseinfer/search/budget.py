"""Sharing out the examples of a search among the paths it aims at."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_TURNS_AGAIN = 5


def in_turns(
    paths: Iterable[str], examples: int, of_a_turn: int
) -> Iterator[tuple[str | None, str, int]]:
    """Searches as (path to aim at, name of the turn, examples due).

    In turns: a bug on the last path is not found only after all the others' examples. Without
    paths there is nothing to aim at, and None stands for that.
    """
    aims: list[str | None] = [*paths] or [None]
    turns = max(1, round(examples / len(aims) / of_a_turn))
    searches = list(product(range(turns), aims))
    for at, (turn, aim) in enumerate(searches):
        due = (at + 1) * examples // len(searches) - at * examples // len(searches)
        yield aim, str(turn), max(1, due)


def turns_again(
    still_missing: Callable[[], Iterable[str | None]], of_a_turn: int
) -> Iterator[tuple[str | None, str, int]]:
    """Searches that follow those, aimed at what is still missing until nothing is.

    Bad luck with the examples is no verdict. What so many more do not reach, none will.
    """
    for turn in range(_TURNS_AGAIN):
        for aim in still_missing():
            yield aim, f"again {turn}", of_a_turn

"""Sharing out the examples of a search among the paths it aims at."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def in_turns(
    paths: Iterable[str], examples: int, of_a_turn: int
) -> Iterator[tuple[str | None, int, int]]:
    """Searches as (path to aim at, number of the turn, examples due).

    In turns: a bug on the last path is not found only after all the others' examples. Without
    paths there is nothing to aim at, and None stands for that.
    """
    aims: list[str | None] = [*paths] or [None]
    turns = max(1, round(examples / len(aims) / of_a_turn))
    searches = list(product(range(turns), aims))
    for at, (turn, aim) in enumerate(searches):
        due = (at + 1) * examples // len(searches) - at * examples // len(searches)
        yield aim, turn, max(1, due)

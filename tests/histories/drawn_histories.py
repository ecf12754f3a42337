"""Checks of drawn histories without a search: a failing history is not shrunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, given, seed, settings

from pytest_roseinfer.histories.strategies import histories

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_roseinfer import History, KVCacheAdapter


_PER_SEED = 25
"""Histories of one seed, few because they are similar."""


def check_drawn_histories(
    adapter: type[KVCacheAdapter],
    examples: int,
    seed_number: int,
    check: Callable[[History], object],
) -> None:
    """Draw histories and pass each to a check, until it fails."""
    for begin in range(0, examples, _PER_SEED):
        _check_histories_of_seed(
            adapter, min(_PER_SEED, examples - begin), f"{seed_number} {begin}", check
        )


def _check_histories_of_seed(
    adapter: type[KVCacheAdapter],
    examples: int,
    seed_value: str,
    check: Callable[[History], object],
) -> None:
    @seed(seed_value)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(histories(adapter))
    def attempt(history: History) -> None:
        check(history)

    attempt()

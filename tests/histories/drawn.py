"""Drawn histories without a search: what fails on one is not made smaller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, given, seed, settings

from pytest_roseinfer.histories.strategies import histories

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_roseinfer import History, KVCacheAdapter


_OF_A_SEED = 25
"""The histories of one seed are much alike."""


def drawn(
    adapter: type[KVCacheAdapter], examples: int, number: int, do: Callable[[History], object]
) -> None:
    """Hand drawn histories to a check until it fails."""
    for begin in range(0, examples, _OF_A_SEED):
        _drawn(adapter, min(_OF_A_SEED, examples - begin), f"{number} {begin}", do)


def _drawn(
    adapter: type[KVCacheAdapter], examples: int, of_seed: str, do: Callable[[History], object]
) -> None:
    @seed(of_seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(histories(adapter))
    def attempt(history: History) -> None:
        do(history)

    attempt()

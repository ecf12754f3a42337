"""What an adapter says of windows, and what the harness cannot judge together with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.oracle.windows import AT_ONCE, NEXT_TRY, WINDOW_GIVES_BACK, WINDOW_POOLS

if TYPE_CHECKING:
    from pytest_roseinfer.adapters.cache import KVCacheAdapter

_WITH_TEXTS = ("fork", "truncate", "look_up", "use_queue")
_JUDGED = {"match_finds": "some", "match_granularity": "block", "evicts": "any"}
_CHOICES = {"window_pools": WINDOW_POOLS, "window_gives_back": WINDOW_GIVES_BACK}


def refuse_windows(adapter: type[KVCacheAdapter]) -> None:
    """Raise ``TypeError`` where what is said of windows makes no sense or cannot be judged."""
    name, groups = adapter.__name__, adapter.window_groups
    if type(groups) is not int or groups < 0:
        raise TypeError(
            f"{name}.window_groups is {groups!r}: write how many groups of layers with different "
            "windows the cache can be built with, 0 if layers have none"
        )
    for attribute, choices in _CHOICES.items():
        if (said := getattr(adapter, attribute)) not in choices:
            known = " or ".join(map(repr, choices))
            raise TypeError(f"{name}.{attribute} is {said!r}, and must be {known}")
    if not groups:
        return
    told = "texts" in adapter.abilities
    others = _WITH_TEXTS if told else ("preempt",)
    for method in ("swap_out", *others):
        if method in adapter.abilities:
            both = " and texts" if told and method in others else ""
            raise TypeError(
                f"{name} defines {method}, which cannot be judged with windows{both} yet"
            )
    if told:
        _refuse_promises(adapter)
    if adapter.tolerance:
        raise TypeError(f"{name} has a tolerance, which cannot be judged with windows yet")
    if adapter.row_conditions:
        raise TypeError(f"{name} has row_conditions, whose counts differ from window to window")
    gives_back = adapter.window_gives_back
    if gives_back == NEXT_TRY and (adapter.atomic_batches or "reserve" in adapter.abilities):
        raise TypeError(
            f"{name}.window_gives_back is {gives_back!r}, which is said of a cache that admits "
            "row by row: set atomic_batches = False, and leave out reserve"
        )
    needs_prefill = gives_back != AT_ONCE and "fork" in adapter.abilities
    if needs_prefill and "prefill" not in adapter.abilities:
        raise TypeError(
            f"{name} must define prefill: forks are compared with copies, which must be one write "
            "where a write gives back what left the window before it"
        )


def _refuse_promises(adapter: type[KVCacheAdapter]) -> None:
    """Refuse what a cache says of texts that is not known where each group keeps blocks."""
    for attribute, judged in _JUDGED.items():
        if (said := getattr(adapter, attribute)) != judged:
            raise TypeError(
                f"{adapter.__name__}.{attribute} is {said!r}; with windows and texts, "
                f"{judged!r} alone can be judged yet"
            )

"""What an adapter says of windows, and what the harness cannot judge together with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.oracle.windows import WINDOW_GIVES_BACK, WINDOW_POOLS

if TYPE_CHECKING:
    from pytest_roseinfer.adapters.cache import KVCacheAdapter

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
    for method in ("texts", "preempt", "swap_out"):
        if method in adapter.abilities:
            raise TypeError(f"{name} defines {method}, which cannot be judged with windows yet")
    if adapter.tolerance:
        raise TypeError(f"{name} has a tolerance, which cannot be judged with windows yet")
    if adapter.row_conditions:
        raise TypeError(f"{name} has row_conditions, whose counts differ from window to window")
    needs_prefill = adapter.window_gives_back == "next write" and "fork" in adapter.abilities
    if needs_prefill and "prefill" not in adapter.abilities:
        raise TypeError(
            f"{name} must define prefill: forks are compared with copies, which must be one write "
            "where a write gives back what left the window before it"
        )

"""Conditions about what a cache gives out, gets back and gives out again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_roseinfer.adapters.cache import KVCacheAdapter

USED_AGAIN: Mapping[str, str] = {
    "handle_used_again": "reserve",
    "slot_used_again": "kept_in",
    "list_used_again": "kept_in",
    "block_used_while_away": "table",
}
"""The harness counts each of them, where an adapter names it and defines this method."""


def refuse_what_is_not_shown(adapter: type[KVCacheAdapter]) -> None:
    """Raise ``TypeError`` where a condition could never be met, since nothing shows it."""
    for name, method in USED_AGAIN.items():
        if name in adapter.conditions and method not in adapter.abilities:
            raise TypeError(
                f"{adapter.__name__}.conditions names {name!r}: define {method}(), which shows it"
            )

"""The names of the conditions that the harness counts itself, and errors for others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_roseinfer.words import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

USED_AGAIN: Mapping[str, str] = {
    "handle_used_again": "reserve",
    "slot_used_again": "kept_in",
    "list_used_again": "kept_in",
    "block_used_while_away": "table",
}
"""The harness counts each of them, where an adapter names it and defines this method."""


def refuse_what_is_not_shown(adapter: type[Any]) -> None:
    """Raise ``TypeError`` where a condition could never be met, since nothing shows it."""
    for name, method in USED_AGAIN.items():
        if name in adapter.conditions and method not in adapter.abilities:
            raise TypeError(
                f"{adapter.__name__}.conditions names {name!r}: define {method}(), which shows it"
            )


OWN_CONDITIONS = ("last_position", "out_of_room_mid_batch", "name_used_again")
"""The harness counts each of them where an adapter names it."""
_UNNAMED = ("left_a_window", "prefix_found", "hash_collision", "calls_in_flight")
"""It counts these where they may be met, be they named or not."""
FINDS_PREFIXES = frozenset(
    ("texts", "matched", "prefill", "table", "ledger", "sharing=equal prefixes")
)
"""What shows that a sequence began with what was found of its text."""
COUNTED = (*OWN_CONDITIONS, *USED_AGAIN, *_UNNAMED)


def refuse_uncounted(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for a condition that the harness does not count, nor the cache."""
    if "path_counts" in adapter.abilities:
        return
    for name in adapter.conditions:
        if name not in COUNTED:
            raise TypeError(
                f"{adapter.__name__}.conditions names {name!r}, which only path_counts() could "
                f"count, and that is not defined{did_you_mean(name, COUNTED)}"
            )

"""The conditions that the harness counts, and names of others that nothing would count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.adapters.reuse_conditions import USED_AGAIN
from pytest_roseinfer.mistakes import did_you_mean

if TYPE_CHECKING:
    from pytest_roseinfer.adapters.cache import KVCacheAdapter

OWN_CONDITIONS = ("last_position", "out_of_room_mid_batch", "name_used_again")
"""The harness counts each of them where an adapter names it."""
_UNNAMED = ("left_a_window", "prefix_found", "hash_collision", "calls_in_flight")
"""It counts these where they may be met, be they named or not."""
COUNTED = (*OWN_CONDITIONS, *USED_AGAIN, *_UNNAMED)


def refuse_uncounted(adapter: type[KVCacheAdapter]) -> None:
    """Raise ``TypeError`` for a condition that the harness does not count, nor the cache."""
    if "path_counts" in adapter.abilities:
        return
    for name in adapter.conditions:
        if name not in COUNTED:
            raise TypeError(
                f"{adapter.__name__}.conditions names {name!r}, which only path_counts() could "
                f"count, and that is not defined{did_you_mean(name, COUNTED)}"
            )

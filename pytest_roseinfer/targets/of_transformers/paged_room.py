"""Room for requests in transformers' paged cache, asked for as its continuous batching does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_roseinfer.adapters.cache import CacheFull

if TYPE_CHECKING:
    from collections.abc import Sequence

    Requests = Sequence[tuple[Any, int]]


def find_room(cache: Any, requests: Requests) -> None:
    """Give every request blocks for so many more tokens, or none of them any."""
    if not _fit(cache, requests):
        # The engine does so before it takes a request's blocks away.
        cache.evict_cached_blocks()
        if not _fit(cache, requests):
            raise CacheFull(f"no room for {[count for _, count in requests]} more tokens")
    for state, count in requests:
        if not cache.can_store_request_tokens(state, count):
            raise RuntimeError(f"request {state.request_id} was promised room and got none")


def _fit(cache: Any, requests: Requests) -> bool:
    cache.pool.try_to_free_sectors()
    needed = [
        {
            kind: allocator.needs_new_blocks(state.request_id, state.current_len(), count)
            for kind, allocator in cache.cache_allocators.items()
        }
        for state, count in requests
    ]
    return bool(cache.count_storable_requests(needed) == len(needed))

"""transformers' paged cache with forks: one prompt that is answered several times."""

from __future__ import annotations

from pytest_roseinfer.adapters.cache import CacheFull
from pytest_roseinfer.targets.paged_attention_cache import PagedAttentionCacheAdapter


class ForkedPagedAttentionCacheAdapter(PagedAttentionCacheAdapter):
    """A fork shares the full blocks and copies the last one at once if it is partial."""

    fork_shares = "full blocks"

    def fork(self, parent: int, child: int) -> None:
        self.cache.pool.try_to_free_sectors()
        state, name = self.states[parent], str(child)
        copies: dict[str, tuple[list[int], list[int]]]
        copies = {kind: ([], []) for kind in self.cache.cache_allocators}
        if not self.cache.prepare_fork_request(state, [name], copies):
            self.cache.evict_cached_blocks()
            if not self.cache.prepare_fork_request(state, [name], copies):
                raise CacheFull(f"no room for a fork of request {state.request_id}")
        self.cache.perform_cache_copy(copies)
        self.states[child] = state.fork(name)
        self.attended[child] = list(self.attended[parent])

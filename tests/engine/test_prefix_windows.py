"""Prefix cache of layers with a window: blocks that left it are evicted without their entries."""

from __future__ import annotations

import pytest
import torch

from roseinfer import AppendPolicy, KVBlockManager, SamplingParams
from roseinfer.engine.prefix_cache import PrefixCache
from roseinfer.engine.request import Request, RequestBlockAllocator
from roseinfer.kv.sequence import CachedSequence, reserve

SIZE, WINDOW, NUM_BLOCKS = 4, 7, 40
STEM = range(3 * SIZE)


class _Requests:
    """Requests that store tokens in blocks of one windowed layer, without a model."""

    def __init__(self) -> None:
        self.kv = KVBlockManager(
            1,
            1,
            1,
            SIZE,
            NUM_BLOCKS + 1,
            "cpu",
            torch.float32,
            AppendPolicy(triton=False),
            windows=[WINDOW],
        )
        self.cache = PrefixCache(self.kv)
        self._allocator = RequestBlockAllocator(self.kv, self.cache, lambda _: None)

    @property
    def num_free(self) -> int:
        return self.kv.num_free_blocks(0)

    def begin(self, *tokens: int) -> Request:
        sequence = CachedSequence([[]], list(tokens))
        request = Request(0, SamplingParams(), 0, len(tokens), 1, sequence, None)
        self._allocator.reuse_prefix(request)
        return request

    def store(self, request: Request) -> None:
        """Store all tokens of a request in one step."""
        count = request.num_unstored
        reserve(self.kv, [request.sequence], [count])
        request.sequence.num_stored += count
        self._allocator.publish_stored_blocks(request)

    def end(self, *requests: Request) -> None:
        for request in requests:
            self._allocator.release_blocks(request)


@pytest.fixture
def requests() -> _Requests:
    return _Requests()


def test_partial_block_is_no_hit_without_the_blocks_before_it(requests: _Requests) -> None:
    """The next token would attend to them."""
    long, short = requests.begin(*range(30)), requests.begin(*STEM, 98)
    requests.store(long)
    left = requests.cache.num_evictable_blocks
    assert left == (30 - WINDOW + 1) // SIZE
    requests.store(short)
    requests.end(short)  # its partial block is the last to be evicted
    assert requests.cache.num_evictable_blocks == left + 1
    assert requests.cache.evict(left) == left
    again = requests.begin(*STEM, 98, 99)
    assert again.num_cached_tokens == 0
    requests.store(again)
    requests.end(long, again)
    requests.cache.clear()
    assert requests.num_free == NUM_BLOCKS


def test_removed_entries_leave_no_block_to_evict(requests: _Requests) -> None:
    long = requests.begin(*range(30))
    requests.store(long)
    left, free = requests.cache.num_evictable_blocks, requests.num_free
    assert left == (30 - WINDOW + 1) // SIZE
    requests.cache.clear()
    assert (requests.cache.num_evictable_blocks, requests.num_free) == (0, free + left)
    assert requests.cache.evict(1) == 0
    requests.end(long)
    assert requests.num_free == NUM_BLOCKS

"""This distribution's prefix cache on its block manager, without a model.

It calls a ``RequestBlockAllocator`` as the scheduler and the runner do, so that bugs are found in
histories that take milliseconds. These are internals of the engine, which users reach by ``LLM``.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

from pytest_roseinfer import PrefixTraits
from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.capabilities.cache_data import CacheSpec, Ledger
from pytest_roseinfer.targets.roseinfer_kv import GroupedManager, WindowedManager
from roseinfer import OutOfBlocks, SamplingParams
from roseinfer.engine import prefix_cache
from roseinfer.engine.request import Request, RequestBlockAllocator
from roseinfer.kv.sequence import CachedSequence

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from pytest_roseinfer.targets.roseinfer_manager import ReadManager

_KERNELS_OFF = {"triton": False}
_CHUNK = 3
"""Tokens of a prompt stored in one step; blocks of 4 or 5 take more than one step."""


class PrefixCachedManager(KVCacheAdapter):
    """Cache whose sequences are requests without a model; keys and values are inputs."""

    full_errors = (OutOfBlocks,)
    scratch_blocks = frozenset({0})
    prefixes = PrefixTraits(
        shares="equal prefixes",
        granularity="token",
        recomputed_tokens=1,
        finds="some",
        evicts_when="needed",
        keeps_prefix=True,
    )
    conditions: ClassVar[Sequence[str]] = (
        "block_found",
        "tail_found",
        "evicted",
        "name_used_again",
        "last_position",
    )
    # Other targets test how the manager moves keys and values.
    dtypes = ("float32",)
    head_counts = (1, 2)
    head_dims = (4, 1)
    block_sizes = (4, 1, 2, 3, 5)

    manager: type[ReadManager] = GroupedManager

    def make(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.reader = self.manager()
        self.reader.make(replace(spec, options=_KERNELS_OFF))
        self.kv = self.reader.manager
        self.prefix_cache = prefix_cache.PrefixCache(self.kv)
        self.block_allocator = RequestBlockAllocator(
            self.kv, self.prefix_cache, withdraw=lambda _: None
        )
        self.requests: dict[int, Request] = {}
        self.counts: Counter[str] = Counter()

    # ------------------------------------------------------------------------------ texts

    def use_tokens(self, token_ids: Sequence[Sequence[int]]) -> None:
        self.row_tokens = token_ids

    def hashing(self) -> AbstractContextManager[object]:
        """Return a context that sets the hash function of the prefix cache."""
        return nullcontext()

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        """Start a request and release it, as the scheduler does with a prompt that has no room."""
        unused = [*self.prefix_cache.evictable_entries]
        request = self.start_request(token_ids)
        self.release(request)
        for entry in unused:  # a lookup is no use of entries
            self.prefix_cache.evictable_entries.move_to_end(entry)
        return request.num_cached_tokens

    def look_up(self, token_ids: Sequence[int]) -> object:
        return list(token_ids)

    def begin_with(self, found: Any, seq: int) -> int:
        self.requests[seq] = request = self.start_request(found)
        self.count_hits(request)
        del request.sequence.token_ids[request.num_cached_tokens :]
        return request.num_cached_tokens

    # ----------------------------------------------------------------------------- writes

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Append as a step with decoding sequences or chunks of prompts."""
        requests = [self.requests.get(seq) or self.start_request([]) for seq in seqs]
        self.take_blocks(requests, counts)
        for request, token_ids in zip(requests, self.row_tokens, strict=True):
            request.sequence.token_ids += token_ids
        self.requests.update(zip(seqs, requests, strict=True))
        self.store(requests, counts, key, value)

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        (token_ids,) = self.row_tokens
        self.requests[seq] = self.store_prompt(self.request(token_ids), key, value)

    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.store_prompt(self.requests[seq], key, value)

    def store_prompt(self, request: Request, key: torch.Tensor, value: torch.Tensor) -> Request:
        """Store the tokens of a prompt that are not cached, chunk by chunk."""
        self.admit(request)
        self.count_hits(request)
        while request.num_unstored:
            stored = request.sequence.num_stored
            count = min(request.num_unstored, _CHUNK)
            chunk = slice(stored, stored + count)
            self.take_blocks([request], [count])
            self.store([request], [count], key[:, chunk], value[:, chunk])
        return request

    def admit(self, request: Request) -> None:
        """Admit a prompt if there is room for all of it.

        If there is room for all but the copy of a cached tail, the prefix cache is cleared first.
        """
        before = self.block_allocator.available
        whole = self.block_allocator.count_needed_blocks(request.sequence, request.num_unstored)
        self.start(request)
        used = before - self.block_allocator.available
        if (
            used + self.block_allocator.count_needed_blocks(request.sequence, request.num_unstored)
            <= before
        ):
            return
        self.release(request)
        if whole > before:
            raise OutOfBlocks(needed=whole, free=before, owner="the cache")
        self.block_allocator.clear_prefix_cache()
        self.start(request)

    def take_blocks(self, requests: Sequence[Request], counts: Sequence[int]) -> None:
        """Evict enough cached blocks for a step, or raise."""
        needed = sum(
            map(
                self.block_allocator.count_needed_blocks,
                (each.sequence for each in requests),
                counts,
            )
        )
        if needed > self.block_allocator.available:
            raise OutOfBlocks(needed=needed, free=self.block_allocator.available, owner="the cache")
        self.block_allocator.ensure(needed)

    def store(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Store the next tokens of requests, and publish filled blocks to the prefix cache."""
        lists = [request.sequence.block_lists for request in requests]
        plans = self.kv.plan_groups(lists, counts)
        for layer in range(self.spec.num_layers):
            self.kv.write(plans[self.kv.group_of(layer)], layer, key[layer], value[layer])
        for request, count in zip(requests, counts, strict=True):
            session = request.sequence
            session.num_stored += count
            session.token_capacity = len(session.block_lists[0]) * self.kv.block_size
            with self.hashing():
                self.block_allocator.publish_stored_blocks(request)

    # --------------------------------------------------------------------------- requests

    def request(self, token_ids: Sequence[int]) -> Request:
        session = CachedSequence([[] for _ in self.reader.first_layers], list(token_ids))
        return Request(
            id=0,
            params=SamplingParams(),
            seed=0,
            prompt_length=len(token_ids),
            max_generated_tokens=1,
            sequence=session,
            text=None,
        )

    def start_request(self, token_ids: Sequence[int]) -> Request:
        request = self.request(token_ids)
        self.start(request)
        return request

    def start(self, request: Request) -> None:
        with self.hashing():
            self.block_allocator.reuse_prefix(request)

    def release(self, request: Request) -> None:
        with self.hashing():
            self.block_allocator.release_blocks(request)

    def preempt(self, seq: int) -> None:
        self.release(self.requests[seq])

    def free(self, seq: int) -> None:
        self.release(self.requests.pop(seq))

    # ------------------------------------------------------------------------ inspection

    def count_hits(self, request: Request) -> None:
        full, tail = divmod(request.num_cached_tokens, self.kv.block_size)
        self.counts["block_found"] += bool(full)
        self.counts["tail_found"] += bool(tail)

    def path_counts(self) -> Mapping[str, int]:
        return {**self.counts, "evicted": self.prefix_cache.num_evictions}

    def lists(self) -> ReadManager:
        """Return the manager with the block lists as they are now."""
        sessions = {seq: request.sequence for seq, request in self.requests.items()}
        self.reader.lists = {seq: session.block_lists for seq, session in sessions.items()}
        return self.reader

    def table(self, seq: int, layer: int) -> Sequence[int | None]:
        return self.lists().table(seq, layer)

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.lists().peek(seq, layer)

    def gather(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.lists().gather(seq, layer)

    def arena(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.reader.arena()

    def ledger(self, layer: int) -> Ledger:
        """Return the manager's ledger without the references of the prefix cache."""
        books = self.reader.ledger(layer)
        group, first = self.kv.group_of(layer), self.reader.first_id(layer)
        used = Counter(books.refcounts)
        used.subtract(each.block_ids[group] - first for each in self.prefix_cache._entries.values())
        unused = [entry.block_ids[group] - first for entry in self.prefix_cache.evictable_entries]
        refcounts = {block: count for block, count in used.items() if count}
        free, num_free = [*books.free, *unused], self.block_allocator.available
        return Ledger(refcounts, free, books.total, unused, num_free=num_free)


class WindowedPrefixes(PrefixCachedManager):
    """Cache whose groups keep the blocks of a prefix that their windows need, in one pool.

    Tails are not cached: the harness cannot check partial blocks with windows yet.
    """

    manager = WindowedManager
    windows = PrefixCachedManager.windows.but(groups=3, pools="shared")
    arena: Any = KVCacheAdapter.arena  # not offered
    look_up: Any = KVCacheAdapter.look_up  # cannot be checked with windows yet
    begin_with: Any = KVCacheAdapter.begin_with
    prefixes = PrefixCachedManager.prefixes.but(granularity="block", evicts_when="any time")
    conditions = tuple(name for name in PrefixCachedManager.conditions if name != "tail_found")

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        patch.object(self.prefix_cache, "_add_tail").start()

    def lists(self) -> ReadManager:
        reader = super().lists()
        assert isinstance(reader, WindowedManager)
        reader.lengths = Counter(
            {seq: own.sequence.num_stored for seq, own in self.requests.items()}
        )
        return reader

    def ledger(self, layer: int) -> Ledger:
        books, cached, unused = self.reader.ledger(layer), Counter[int](), []
        for entry in self.prefix_cache._entries.values():
            cached.update(entry.block_ids)
            if entry in self.prefix_cache.evictable_entries:
                borrowed = self.prefix_cache._borrowed_blocks
                unused += [each for each in entry.block_ids if each and each not in borrowed]
        unused += [entry.block_ids[group] for entry, group in self.prefix_cache._evictable_blocks]
        used = {block: count - cached[block] for block, count in books.refcounts.items()}
        refcounts = {block: count for block, count in used.items() if count}
        num_free = self.kv.num_free_blocks(layer) + self.prefix_cache.num_evictable_blocks
        return Ledger(refcounts, [*books.free, *unused], books.total, unused, num_free=num_free)


class HashedPrefixes(PrefixCachedManager):
    """Cache with many hash collisions, which it must resolve."""

    def use_hash(self, hashed: Callable[[object], int]) -> None:
        self.hashed = hashed

    def hashing(self) -> AbstractContextManager[object]:
        return patch.object(prefix_cache, "chain_hash", lambda *chain: self.hashed(chain))


class ResetPrefixes(PrefixCachedManager):
    """Cache that is reset while sequences go on, as by ``Engine.reset_prefix_cache``."""

    def reset(self) -> None:
        self.prefix_cache.reset()

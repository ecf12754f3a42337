"""This distribution's prefix cache on its block manager, driven without a model.

It does what the scheduler and the runner do with a ``RequestBlockAllocator``, so that bugs there
show in histories of milliseconds. These are internals of the engine: users have them through
``LLM``.
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
"""So many tokens of a prompt are stored in a step: blocks of 4 or 5 take more than one."""


class PrefixCachedManager(KVCacheAdapter):
    """Sequences are requests without a model: what they store is handed over."""

    full_errors = (OutOfBlocks,)
    scratch_blocks = frozenset({0})
    prefixes = PrefixTraits(
        shares="equal prefixes",
        granularity="token",
        recomputed_tokens=1,
        finds="some",
        keeps_prefix=True,
    )
    conditions: ClassVar[Sequence[str]] = (
        "block_found",
        "tail_found",
        "evicted",
        "name_used_again",
        "last_position",
    )
    # How the manager moves what is stored is looked at elsewhere.
    dtypes = ("float32",)
    head_counts = (1, 2)
    head_dims = (4, 1)
    block_sizes = (4, 1, 2, 3, 5)

    manager: type[ReadManager] = GroupedManager

    def make(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.shown = self.manager()
        self.shown.make(replace(spec, options=_KERNELS_OFF))
        self.kv = self.shown.manager
        self.prefix_cache = prefix_cache.PrefixCache(self.kv)
        self.block_allocator = RequestBlockAllocator(
            self.kv, self.prefix_cache, withdraw=lambda _: None
        )
        self.requests: dict[int, Request] = {}
        self.counts: Counter[str] = Counter()

    # ------------------------------------------------------------------------------ texts

    def use_tokens(self, said: Sequence[Sequence[int]]) -> None:
        self.row_tokens = said

    def hashing(self) -> AbstractContextManager[object]:
        """Return a context in which the prefix cache hashes as it is to."""
        return nullcontext()

    def match_prefix(self, said: Sequence[int]) -> int:
        """Begin with it and give it back, as the scheduler does with a prompt that has no room."""
        unused = [*self.prefix_cache.evictable_entries]
        request = self.started(said)
        self.give_back(request)
        for entry in unused:  # nothing was used
            self.prefix_cache.evictable_entries.move_to_end(entry)
        return request.num_cached_tokens

    def look_up(self, said: Sequence[int]) -> object:
        return list(said)

    def begin_with(self, found: Any, seq: int) -> int:
        self.requests[seq] = request = self.started(found)
        self.count_found(request)
        del request.sequence.token_ids[request.num_cached_tokens :]
        return request.num_cached_tokens

    # ----------------------------------------------------------------------------- writes

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Append as a step does that has sequences which decode, or chunks of prompts."""
        requests = [self.requests.get(seq) or self.started([]) for seq in seqs]
        self.take_blocks(requests, counts)
        for request, said in zip(requests, self.row_tokens, strict=True):
            request.sequence.token_ids += said
        self.requests.update(zip(seqs, requests, strict=True))
        self.store(requests, counts, key, value)

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        (said,) = self.row_tokens
        self.requests[seq] = self.store_prompt(self.request(said), key, value)

    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.store_prompt(self.requests[seq], key, value)

    def store_prompt(self, request: Request, key: torch.Tensor, value: torch.Tensor) -> Request:
        """Store what is not found of a prompt, chunk by chunk."""
        self.admit(request)
        self.count_found(request)
        while request.num_unstored:
            stored = request.sequence.num_stored
            count = min(request.num_unstored, _CHUNK)
            chunk = slice(stored, stored + count)
            self.take_blocks([request], [count])
            self.store([request], [count], key[:, chunk], value[:, chunk])
        return request

    def admit(self, request: Request) -> None:
        """Begin a prompt if there is room for all of it.

        Where all but the copy of a tail that was found has room, nothing is to be found.
        """
        before = self.block_allocator.available
        whole = self.block_allocator.count_needed_blocks(request.sequence, request.num_unstored)
        self.start(request)
        held = before - self.block_allocator.available
        if (
            held + self.block_allocator.count_needed_blocks(request.sequence, request.num_unstored)
            <= before
        ):
            return
        self.give_back(request)
        if whole > before:
            raise OutOfBlocks(needed=whole, free=before, where="the cache")
        self.block_allocator.clear_prefix_cache()
        self.start(request)

    def take_blocks(self, requests: Sequence[Request], counts: Sequence[int]) -> None:
        """Make sure that there are blocks for a step."""
        needed = sum(
            map(
                self.block_allocator.count_needed_blocks,
                (each.sequence for each in requests),
                counts,
            )
        )
        if needed > self.block_allocator.available:
            raise OutOfBlocks(needed=needed, free=self.block_allocator.available, where="the cache")
        self.block_allocator.ensure(needed)

    def store(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Store the next tokens of requests, and offer what they filled to the prefix cache."""
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
        session = CachedSequence([[] for _ in self.shown.first_layers], list(token_ids))
        return Request(
            id=0,
            params=SamplingParams(),
            seed=0,
            prompt_length=len(token_ids),
            max_generated_tokens=1,
            sequence=session,
            text=None,
        )

    def started(self, token_ids: Sequence[int]) -> Request:
        request = self.request(token_ids)
        self.start(request)
        return request

    def start(self, request: Request) -> None:
        with self.hashing():
            self.block_allocator.reuse_prefix(request)

    def give_back(self, request: Request) -> None:
        with self.hashing():
            self.block_allocator.release_blocks(request)

    def preempt(self, seq: int) -> None:
        self.give_back(self.requests[seq])

    def free(self, seq: int) -> None:
        self.give_back(self.requests.pop(seq))

    # ------------------------------------------------------------------------ looking on

    def count_found(self, request: Request) -> None:
        full, tail = divmod(request.num_cached_tokens, self.kv.block_size)
        self.counts["block_found"] += bool(full)
        self.counts["tail_found"] += bool(tail)

    def path_counts(self) -> Mapping[str, int]:
        return {**self.counts, "evicted": self.prefix_cache.num_evictions}

    def lists(self) -> ReadManager:
        """Return the manager with the block lists as they are now."""
        sessions = {seq: request.sequence for seq, request in self.requests.items()}
        self.shown.lists = {seq: session.block_lists for seq, session in sessions.items()}
        return self.shown

    def table(self, seq: int, layer: int) -> Sequence[int | None]:
        return self.lists().table(seq, layer)

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.lists().peek(seq, layer)

    def gather(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.lists().gather(seq, layer)

    def arena(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.shown.arena()

    def ledger(self, layer: int) -> Ledger:
        """Show the manager's books without what the prefix cache holds for itself."""
        books = self.shown.ledger(layer)
        group, first = self.kv.group_of(layer), self.shown.first_id(layer)
        held = Counter(books.refcounts)
        held.subtract(each.block_ids[group] - first for each in self.prefix_cache._entries.values())
        unused = [entry.block_ids[group] - first for entry in self.prefix_cache.evictable_entries]
        refcounts = {block: count for block, count in held.items() if count}
        free, num_free = [*books.free, *unused], self.kv.num_free_blocks(layer) + len(unused)
        return Ledger(refcounts, free, books.total, unused, num_free=num_free)


class WindowedPrefixes(PrefixCachedManager):
    """Each group keeps of a prefix what its window needs, all of them in one pool.

    No tail is kept: what ends within a block cannot be judged with windows yet.
    """

    manager = WindowedManager
    windows = PrefixCachedManager.windows.but(groups=3, pools="shared")
    arena: Any = KVCacheAdapter.arena  # not offered
    look_up: Any = KVCacheAdapter.look_up  # cannot be judged with windows yet
    begin_with: Any = KVCacheAdapter.begin_with
    prefixes = PrefixCachedManager.prefixes.but(granularity="block")
    conditions = tuple(name for name in PrefixCachedManager.conditions if name != "tail_found")

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        patch.object(self.prefix_cache, "_add_tail").start()

    def lists(self) -> ReadManager:
        shown = super().lists()
        assert isinstance(shown, WindowedManager)
        shown.lengths = Counter(
            {seq: own.sequence.num_stored for seq, own in self.requests.items()}
        )
        return shown

    def ledger(self, layer: int) -> Ledger:
        books, kept, unused = self.shown.ledger(layer), Counter[int](), []
        for entry in self.prefix_cache._entries.values():
            kept.update(entry.block_ids)
            if entry in self.prefix_cache.evictable_entries:
                lent = self.prefix_cache._borrowed_blocks
                unused += [each for each in entry.block_ids if each and each not in lent]
        unused += [entry.block_ids[group] for entry, group in self.prefix_cache._evictable_blocks]
        held = {block: count - kept[block] for block, count in books.refcounts.items()}
        refcounts = {block: count for block, count in held.items() if count}
        num_free = self.kv.num_free_blocks(layer) + self.prefix_cache.num_evictable_blocks
        return Ledger(refcounts, [*books.free, *unused], books.total, unused, num_free=num_free)


class HashedPrefixes(PrefixCachedManager):
    """What differs often has one hash, and is told apart all the same."""

    def use_hash(self, hashed: Callable[[object], int]) -> None:
        self.hashed = hashed

    def hashing(self) -> AbstractContextManager[object]:
        return patch.object(prefix_cache, "chain_hash", lambda *chain: self.hashed(chain))

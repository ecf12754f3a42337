"""A windowed cache with prefix reuse, in which each group finds blocks of its own."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import CacheFull, CacheSpec, KVCacheAdapter, Ledger
from tests.capabilities.caches.window_cache import Pool, SharedPoolCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tests.capabilities.caches.window_cache import Group

    Key = tuple[int, tuple[int, ...]]
    """A group, and the tokens up to the end of a block."""


@dataclass
class KeepingPool(Pool):
    """A pool whose blocks can be found until they are evicted."""

    block_of: dict[Key, int] = field(default_factory=dict)
    key_of: dict[int, Key] = field(default_factory=dict)

    def take(self) -> int:
        block = super().take()
        if (key := self.key_of.pop(block, None)) is not None:
            del self.block_of[key]
        return block

    def drop(self, blocks: Any) -> None:
        """Free blocks so that they are taken last."""
        before = len(self.unused)
        super().drop(blocks)
        self.unused[:] = self.unused[before:] + self.unused[:before]

    def hold(self, block: int) -> None:
        if not self.holders[block]:
            self.unused.remove(block)
        self.holders[block] += 1

    def register(self, key: Key, block: int) -> None:
        if self.block_of.setdefault(key, block) == block:
            self.key_of[block] = key


class WindowedTextCache(SharedPoolCache):
    """Begins a prompt with a prefix whose live tokens every group still stores. It is right."""

    prefixes = SharedPoolCache.prefixes.but(
        shares="equal prefixes", recomputed_tokens=1, finds="some"
    )
    fork: Any = KVCacheAdapter.fork  # not offered
    truncate: Any = KVCacheAdapter.truncate  # not offered
    reserve: Any = KVCacheAdapter.reserve  # not offered
    fill: Any = KVCacheAdapter.fill  # not offered

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.token_ids: dict[int, list[int]] = {}

    def new_pool(self) -> KeepingPool:
        return KeepingPool(list(range(self.spec.num_blocks)))

    def use_tokens(self, token_ids: Sequence[Sequence[int]]) -> None:
        self.row_tokens = token_ids

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        super().fill(super().reserve(seqs, counts), key, value)
        for seq, token_ids in zip(seqs, self.row_tokens, strict=True):
            self.token_ids.setdefault(seq, []).extend(token_ids)
            self.register(seq)

    def register(self, seq: int) -> None:
        size = self.spec.block_size
        for at, group in enumerate(self.groups):
            for page, block in enumerate(group.tables[seq][: self.lengths[seq] // size]):
                if block is not None:
                    token_ids = tuple(self.token_ids[seq][: (page + 1) * size])
                    self.pool_of(group).register((at, token_ids), block)

    def pool_of(self, group: Group) -> KeepingPool:
        assert isinstance(group.pool, KeepingPool)
        return group.pool

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        (token_ids,) = self.row_tokens
        previous = deepcopy((self.groups, self.lengths, self.token_ids))
        found = self.match_prefix(token_ids)
        self.begin(seq, token_ids[:found])
        self.row_tokens = [token_ids[found:]]
        try:
            self.append_many([seq], [len(token_ids) - found], key[:, found:], value[:, found:])
        except CacheFull:
            self.groups, self.lengths, self.token_ids = previous
            raise

    def begin(self, seq: int, token_ids: Sequence[int]) -> None:
        self.lengths[seq], self.token_ids[seq] = len(token_ids), list(token_ids)
        for at, group in enumerate(self.groups):
            first = self.first_needed(group, len(token_ids))
            blocks = self.blocks_of(at, token_ids)[first:]
            group.tables[seq] = [*[None] * first, *blocks]
            for block in blocks:
                assert block is not None
                self.pool_of(group).hold(block)

    def first_needed(self, group: Group, found: int) -> int:
        return self.first_live(group.window, found) // self.spec.block_size

    def blocks_of(self, at: int, token_ids: Sequence[int]) -> list[int | None]:
        ends = range(self.spec.block_size, len(token_ids) + 1, self.spec.block_size)
        pool = self.pool_of(self.groups[at])
        return [pool.block_of.get((at, tuple(token_ids[:end]))) for end in ends]

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        size = self.spec.block_size
        for found in range((len(token_ids) - 1) // size * size, 0, -size):
            blocks = [
                self.blocks_of(at, token_ids[:found])[self.first_needed(group, found) :]
                for at, group in self.lookup_groups()
            ]
            if None not in {block for each in blocks for block in each}:
                return found
        return 0

    def lookup_groups(self) -> list[tuple[int, Group]]:
        return list(enumerate(self.groups))

    def free(self, seq: int) -> None:
        if seq in self.lengths:
            super().free(seq)
        del self.token_ids[seq]

    def preempt(self, seq: int) -> None:
        super().free(seq)

    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.row_tokens = [self.token_ids[seq]]
        self.prefill(seq, key, value)

    def ledger(self, layer: int) -> Ledger:
        pool = self.pool_of(self.group_of(layer))
        books = super().ledger(layer)
        return Ledger(books.refcounts, books.free, books.total, {*pool.key_of} & {*books.free})

"""Windowed paged caches, one for each choice of the window traits."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_roseinfer import (
    CacheFull,
    CacheSpec,
    KVCacheAdapter,
    Ledger,
    TruncationTraits,
    WindowTraits,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Slots = list[tuple[int, int]]
    """A block and a position for each token."""


class CannotTrim(Exception):
    """A block that would be needed was freed."""


@dataclass
class Pool:
    unused: list[int]
    holders: Counter[int] = field(default_factory=Counter)

    def take(self) -> int:
        if not self.unused:
            raise CacheFull
        block = self.unused.pop()
        self.holders[block] = 1
        return block

    def drop(self, blocks: Iterable[int | None]) -> None:
        for block in blocks:
            if block is None:
                continue
            self.holders[block] -= 1
            if not self.holders[block]:
                self.unused.append(block)


@dataclass
class Group:
    """The layers of one window, which have equal tables."""

    window: int | None
    pool: Pool
    tables: dict[int, list[int | None]] = field(default_factory=dict)


class WindowCache(KVCacheAdapter):
    """Has a pool per group, and frees blocks at once after a write. It is right."""

    dtypes = ("float32",)
    head_counts = (1, 2)
    head_dims: ClassVar[Sequence[int]] = (4, 1)
    block_sizes: ClassVar[Sequence[int]] = (4, 1, 2, 3)
    windows = WindowTraits(groups=3)
    truncation = TruncationTraits(errors=(CannotTrim,))

    def make(self, spec: CacheSpec) -> None:
        self.spec = spec
        shape = (spec.num_layers, spec.num_blocks, spec.num_heads, spec.block_size, spec.head_dim)
        self.keys = torch.zeros(shape, device=spec.device)
        self.values = torch.zeros_like(self.keys)
        self.windows_of_groups = list(dict.fromkeys(spec.windows))
        self.groups = [Group(window, self.new_pool()) for window in self.windows_of_groups]
        if self.windows.pools == "shared":
            for group in self.groups:
                group.pool = self.groups[0].pool
        self.lengths: Counter[int] = Counter()

    def new_pool(self) -> Pool:
        return Pool(list(range(self.spec.num_blocks)))

    def group_of(self, layer: int) -> Group:
        return self.groups[self.windows_of_groups.index(self.spec.windows[layer])]

    # ------------------------------------------------------------------- live tokens

    @classmethod
    def first_live(cls, window: int | None, length: int) -> int:
        return max(0, length - window + 1) if window else 0

    def live_of(self, group: Group, length: int) -> int:
        """Return the first live position, which decides the blocks to free."""
        return self.first_live(group.window, length)

    def slide(self, seq: int) -> None:
        for group in self.groups:
            self.slide_in(group, seq)

    def slide_in(self, group: Group, seq: int) -> None:
        table = group.tables.get(seq, [])
        num_freed = self.live_of(group, self.lengths[seq]) // self.spec.block_size
        self.give_back(group, table, num_freed)

    def give_back(self, group: Group, table: list[int | None], num_freed: int) -> None:
        group.pool.drop(table[:num_freed])
        table[:num_freed] = [None] * len(table[:num_freed])

    # ---------------------------------------------------------------------- writing

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.append_many([seq], [key.shape[1]], key, value)

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self.fill(self.reserve(seqs, counts), key, value)

    def reserve(
        self, seqs: Sequence[int], counts: Sequence[int]
    ) -> tuple[Sequence[int], list[Slots]]:
        """Return the sequences, and for each group the slots of their tokens."""
        previous = deepcopy((self.groups, self.lengths))
        slots: list[Slots] = [[] for _ in self.groups]
        copies: list[list[tuple[int, int]]] = [[] for _ in self.groups]
        try:
            for seq, count in zip(seqs, counts, strict=True):
                if self.windows.frees == "next write":
                    self.slide(seq)
                for group, own, copied in zip(self.groups, slots, copies, strict=True):
                    own += [self.slot(group, seq, more, copied) for more in range(count)]
                self.lengths[seq] += count
        except CacheFull:
            self.groups, self.lengths = previous
            raise
        for layer in range(self.spec.num_layers):
            for source, target in copies[self.groups.index(self.group_of(layer))]:
                self.copy(layer, source, target)
        return seqs, slots

    def copy(self, layer: int, source: int, target: int) -> None:
        for cache in (self.keys, self.values):
            cache[layer, target] = cache[layer, source]

    def slot(
        self, group: Group, seq: int, more: int, copied: list[tuple[int, int]]
    ) -> tuple[int, int]:
        """Return the slot of the token that comes ``more`` after the next one."""
        table = group.tables.setdefault(seq, [])
        position = (self.lengths[seq] + more) % self.spec.block_size
        if position == 0:
            table.append(group.pool.take())
        last = table[-1]
        assert last is not None
        if group.pool.holders[last] > 1:
            own = group.pool.take()
            copied.append((last, own))
            group.pool.drop([last])
            table[-1] = last = own
        return last, position

    def fill(
        self,
        reservation: tuple[Sequence[int], list[Slots]],
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        seqs, slots = reservation
        for layer in range(self.spec.num_layers):
            own = slots[self.groups.index(self.group_of(layer))]
            for cache, new in ((self.keys, key), (self.values, value)):
                for row, (block, position) in enumerate(own):
                    cache[layer, block, :, position] = new[layer, row]
        if self.windows.frees == "at once":
            for seq in seqs:
                self.slide(seq)

    # -------------------------------------------------------------- whole sequences

    def fork(self, parent: int, child: int) -> None:
        self.lengths[child] = self.lengths[parent]
        for group in self.groups:
            table = group.tables[child] = list(group.tables[parent])
            group.pool.holders.update(block for block in table if block is not None)

    def free(self, seq: int) -> None:
        del self.lengths[seq]
        for group in self.groups:
            group.pool.drop(group.tables.pop(seq))

    @classmethod
    def can_truncate(cls, spec: CacheSpec, stored: int, length: int) -> bool:
        """Return True if every block needed after a truncation is still held for sure."""
        size = spec.block_size
        for window in spec.windows:
            needed, freed = (cls.first_live(window, n) // size for n in (length, stored))
            if needed < min(freed, -(-length // size)):
                return False
        return True

    def truncate(self, seq: int, length: int) -> None:
        if not self.can_truncate(self.spec, self.lengths[seq], length):
            raise CannotTrim
        self.lengths[seq] = length
        kept = -(-length // self.spec.block_size)
        for group in self.groups:
            group.pool.drop(group.tables[seq][kept:])
            del group.tables[seq][kept:]

    # ---------------------------------------------------------------------- reading

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.first_live(self.spec.windows[layer], self.lengths[seq])
        return self.tokens_from(start, seq, layer)

    def tokens_from(self, start: int, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.spec.block_size
        table = self.group_of(layer).tables[seq]
        places = range(start, self.lengths[seq])
        blocks = [table[at // size] for at in places]
        slots = [at % size for at in places]
        return self.keys[layer][blocks, :, slots], self.values[layer][blocks, :, slots]

    def attend(self, seqs: Sequence[int], query: torch.Tensor, layer: int) -> torch.Tensor:
        output = torch.empty_like(query)
        for row, (seq, row_query) in enumerate(zip(seqs, query, strict=True)):
            keys, values = self.attended_tokens(seq, layer)
            times = len(row_query) // keys.shape[1]
            keys, values = keys.repeat_interleave(times, 1), values.repeat_interleave(times, 1)
            scores = torch.einsum("hd,thd->ht", row_query, keys) * self.spec.head_dim**-0.5
            output[row] = torch.einsum("ht,thd->hd", torch.softmax(scores, -1), values)
        return output

    def attended_tokens(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.peek(seq, layer)

    def table(self, seq: int, layer: int) -> Sequence[int | None]:
        return self.group_of(layer).tables[seq]

    def ledger(self, layer: int) -> Ledger:
        pool = self.group_of(layer).pool
        return Ledger(dict(pool.holders), pool.unused, self.spec.num_blocks)

    def arena(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values


class SharedPoolCache(WindowCache):
    """Has one pool for all groups, and frees blocks on the next write. It is right."""

    windows = WindowCache.windows.but(pools="shared", frees="next write")


class FixedWindowCache(WindowCache):
    """Is built for one model, whose layers have a window of five tokens or none. It is right."""

    windows = WindowTraits(groups=2, sizes=(5, None))

    def make(self, spec: CacheSpec) -> None:
        if not {*spec.windows} <= {5, None}:
            raise ValueError(f"windows {spec.windows}")
        super().make(spec)


class LazyCache(WindowCache):
    """Has a pool per group, and frees blocks on the next write. It is right."""

    windows = WindowCache.windows.but(frees="next write")


class EagerSharedCache(WindowCache):
    """Has one pool for all groups, and frees blocks at once. It is right."""

    windows = WindowCache.windows.but(pools="shared")


class CopyingCache(EagerSharedCache):
    """Copies a shared block when it is cut, and truncates all sequences or none. It is right."""

    truncation = EagerSharedCache.truncation.but(copies=True)

    def truncate(self, seq: int, length: int) -> None:
        self.truncate_many([seq], [length])

    def truncate_many(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:
        for seq, length in zip(seqs, lengths, strict=True):
            if not self.can_truncate(self.spec, self.lengths[seq], length):
                raise CannotTrim
        previous = deepcopy((self.groups, self.lengths))
        copies: list[tuple[Group, int, int]] = []
        try:
            for seq, length in zip(seqs, lengths, strict=True):
                within = length < self.lengths[seq] and length % self.spec.block_size
                super().truncate(seq, length)
                copies += self.own_last_blocks(seq) if within else []
        except CacheFull:
            self.groups, self.lengths = previous
            raise
        for group, source, target in copies:
            for layer, window in enumerate(self.spec.windows):
                if window == group.window:
                    self.copy(layer, source, target)

    def own_last_blocks(self, seq: int) -> list[tuple[Group, int, int]]:
        """Give a sequence its last blocks alone; return the copies to make, by group."""
        copies = []
        for group in self.groups:
            last = group.tables[seq][-1]
            if last is not None and group.pool.holders[last] > 1:
                group.tables[seq][-1] = own = group.pool.take()
                group.pool.drop([last])
                copies.append((group, last, own))
        return copies


class TryingCache(SharedPoolCache):
    """Admits row by row, and frees blocks before it knows that a row fits. It is right."""

    windows = SharedPoolCache.windows.but(frees="next try")
    atomic_batches = False
    reserve: Any = KVCacheAdapter.reserve  # not offered
    fill: Any = KVCacheAdapter.fill  # not offered

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        begin = 0
        for seq, count in zip(seqs, counts, strict=True):
            self.give_back_for(seq)
            rows = slice(begin, begin + count)
            super().fill(super().reserve([seq], [count]), key[:, rows], value[:, rows])
            begin += count

    def give_back_for(self, seq: int) -> None:
        self.slide(seq)


RIGHT = (WindowCache, SharedPoolCache, LazyCache, EagerSharedCache, CopyingCache, TryingCache)

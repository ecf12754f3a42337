"""Simulation of a prefix cache in use, with its invariants.

The stored value of a token is a number that stands for the token and all before it, so a block that
follows another prefix can be recognized however it was reached.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from roseinfer.config import AppendPolicy
from roseinfer.engine import prefix_cache
from roseinfer.engine.prefix_cache import HeldPrefix, PrefixCache, PrefixEntry
from roseinfer.kv.manager import KVBlockManager
from roseinfer.kv.sequence import CachedSequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAYERS = 2
REAL_HASH = prefix_cache.chain_hash
HASHES: dict[str, Callable[[int, int | tuple[int, ...]], int]] = {
    "chained": REAL_HASH,
    "three values": lambda before, link: REAL_HASH(before, link) % 3,
    "constant": lambda before, link: 0,  # noqa: ARG005
}


@dataclass(frozen=True)
class Shape:
    block_size: int = 4
    groups: int = 1
    blocks: int = 20

    @property
    def layers_per_group(self) -> int:
        return LAYERS // self.groups


@dataclass(eq=False)
class Sequence:
    tokens: list[int]
    block_lists: list[list[int]]
    stored: int
    held_prefix: HeldPrefix

    @property
    def session(self) -> CachedSequence:
        return CachedSequence(self.block_lists, self.tokens, self.stored)


class PrefixCacheSimulation:
    """A cache of blocks, a prefix cache on it, and the sequences that use both."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.kv = KVBlockManager(
            LAYERS,
            1,
            1,
            shape.block_size,
            shape.blocks + 1,
            "cpu",
            torch.float32,
            AppendPolicy(triton=False),
            layers_per_group=shape.layers_per_group,
        )
        self.cache = PrefixCache(self.kv)
        self.sequences: list[Sequence] = []
        self._numbers: dict[tuple[int, ...], int] = {}

    # ------------------------------------------------------------------------------- steps

    def start(self, tokens: list[int]) -> Sequence:
        held_prefix, block_lists, num_tokens = self.cache.match(tokens)
        sequence = Sequence(list(tokens), block_lists, num_tokens, held_prefix)
        self.sequences.append(sequence)
        return sequence

    def plan(self, sequence: Sequence, num_tokens: int, *, write: bool = True) -> None:
        """Reserve slots for tokens, and write keys and values, without counting them."""
        start, size = sequence.stored, self.shape.layers_per_group
        new = self.payload_of(sequence.tokens[: start + num_tokens])[start:]
        for group, block_ids in enumerate(sequence.block_lists):
            plan = self.kv.plan_append(group * size, [block_ids], [num_tokens])
            for layer in range(group * size, (group + 1) * size):
                if write:
                    self.kv.write(plan, layer, new[:, None, None] + layer, -new[:, None, None])

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Run one forward pass and register the blocks that became full."""
        self.plan(sequence, num_tokens)
        sequence.stored += num_tokens
        self.insert(sequence)

    def insert(self, sequence: Sequence) -> None:
        self.cache.insert(sequence.held_prefix, sequence.session)

    def run(self, tokens: list[int]) -> Sequence:
        """Return a sequence that has stored all its tokens."""
        sequence = self.start(tokens)
        self.grow(sequence, len(tokens) - sequence.stored)
        return sequence

    def truncate(self, sequence: Sequence) -> None:
        """Drop reserved positions."""
        self.kv.truncate_groups([sequence.block_lists], [sequence.stored])

    def release(self, sequence: Sequence) -> None:
        self.cache.release(sequence.held_prefix, sequence.session)
        self.free(sequence)

    def forget(self, sequence: Sequence) -> None:
        self.cache.release_and_invalidate(sequence.held_prefix)
        self.free(sequence)

    def free(self, sequence: Sequence) -> None:
        for group, block_ids in enumerate(sequence.block_lists):
            self.kv.free_blocks(group * self.shape.layers_per_group, block_ids)
        self.sequences.remove(sequence)
        self.poison()

    def evict(self, blocks: int) -> int:
        evictable, free = len(self.cache.evictable_entries), self.free_blocks
        freed = self.cache.evict(blocks)
        assert self.free_blocks == free + freed
        assert freed == min(blocks, evictable)
        self.poison()
        return freed

    def keep(self, *tokens: int) -> None:
        """Store these sequences and release them."""
        self.release(self.run(list(tokens)))

    # ----------------------------------------------------------------------------- inspection

    @property
    def free_blocks(self) -> int:
        (free,) = {self.kv.num_free_blocks(layer) for layer in range(LAYERS)}
        return free

    @property
    def entries(self) -> list[PrefixEntry]:
        return list(self.cache._entries.values())

    def hit(self, *tokens: int) -> int:
        """Return the number of tokens that a prompt would reuse. Its sequence never runs."""
        sequence = self.start(list(tokens))
        self.check()
        self.release(sequence)
        return sequence.stored

    def payload_of(self, tokens: list[int] | tuple[int, ...]) -> torch.Tensor:
        prefixes = [tuple(tokens[: end + 1]) for end in range(len(tokens))]
        numbers = [self._numbers.setdefault(each, 10 + len(self._numbers)) for each in prefixes]
        return torch.tensor(numbers, dtype=torch.float32)

    def poison(self) -> None:
        """Fill free blocks with NaN: nothing may read them."""
        for group in range(self.shape.groups):
            layers = slice(
                group * self.shape.layers_per_group, (group + 1) * self.shape.layers_per_group
            )
            free = [index for index, holders in self.refcounts(group).items() if not holders]
            self.kv.keys[layers, free] = self.kv.values[layers, free] = float("nan")

    def refcounts(self, group: int) -> dict[int, int]:
        first = group * (self.shape.blocks + 1)
        return {at: self.kv.refcount(first + at) for at in range(1, self.shape.blocks + 1)}

    # ------------------------------------------------------------------------- invariants

    def check(self) -> None:
        self._check_contents()
        self._check_counts()
        self._check_order()
        self._check_structure()

    def _check_contents(self) -> None:
        for sequence in self.sequences:
            self._check_stored(sequence.block_lists, sequence.tokens[: sequence.stored])
        for entry in self.entries:
            chain = list(ancestors(entry))[::-1]
            lists = [
                [each.block_ids[group] for each in chain] for group in range(self.shape.groups)
            ]
            self._check_stored(lists, [token for each in chain for token in each.tokens])

    def _check_stored(self, block_lists: list[list[int]], tokens: list[int]) -> None:
        expected = self.payload_of(tokens)
        for layer in range(LAYERS):
            block_ids = block_lists[layer // self.shape.layers_per_group]
            key, value = self.kv.gather_sequence(layer, block_ids)
            assert torch.equal(key.flatten(), expected + layer)
            assert torch.equal(value.flatten(), -expected)

    def _check_counts(self) -> None:
        """Every reference belongs to the list of a sequence or to the cache."""
        holders = Counter(
            block_id
            for sequence in self.sequences
            for block_ids in sequence.block_lists
            for block_id in block_ids
        )
        holders.update(block_id for entry in self.entries for block_id in entry.block_ids)
        for group in range(self.shape.groups):
            first = group * (self.shape.blocks + 1)
            counts = self.refcounts(group)
            assert counts == {at: holders[first + at] for at in counts}
            assert self.free_blocks == sum(not holders for holders in counts.values())
        users = Counter(
            entry
            for sequence in self.sequences
            for entry in (
                *sequence.held_prefix.matched,
                *sequence.held_prefix.inserted,
                *([sequence.held_prefix.tail] if sequence.held_prefix.tail else []),
            )
        )
        for entry in self.entries:
            assert entry.num_holders == users[entry]
            for block_id in entry.block_ids:
                assert self.kv.refcount(block_id) == entry.num_holders + 1
                assert self.kv.block_info(block_id).length == len(entry.tokens)
        unused = [entry for entry in self.entries if not entry.num_holders]
        assert set(self.cache.evictable_entries) == set(unused)
        assert len(self.cache.evictable_entries) == len(unused)

    def _check_order(self) -> None:
        """No entry is evicted before the unused entries below it."""
        order = list(self.cache.evictable_entries)
        for at, entry in enumerate(order):
            assert not set(order[:at]) & set(ancestors(entry))

    def _check_structure(self) -> None:
        entries = self.entries
        below: list[PrefixEntry] = [self.cache._root]
        for entry in below:
            below += entry.children
        assert set(below[1:]) == set(entries)
        assert len(below) - 1 == len(entries) <= self.shape.blocks
        for key, entry in self.cache._entries.items():
            assert entry.cached
            assert entry.key == key
            assert entry.parent is not None
            assert entry.end == entry.parent.end + len(entry.tokens)
            assert not entry.parent.end % self.shape.block_size
            assert 0 < len(entry.tokens) <= self.shape.block_size

    def finish(self) -> None:
        """End all sequences, and check that they leave no block or entry."""
        for sequence in list(self.sequences):
            self.release(sequence)
            self.check()
        assert len(self.cache.evictable_entries) == len(self.entries)
        self.cache.clear()
        self.check()
        assert len(self.cache.evictable_entries) == 0
        assert not self.entries
        assert not self.cache._root.children
        assert self.free_blocks == self.shape.blocks


def ancestors(entry: PrefixEntry) -> Iterator[PrefixEntry]:
    at: PrefixEntry | None = entry
    while at is not None and at.parent is not None:
        yield at
        at = at.parent


def prefix_of(entry: PrefixEntry) -> tuple[int, ...]:
    return tuple(token for each in list(ancestors(entry))[::-1] for token in each.tokens)

"""A cache that stores a block for every text, as prefix caches do. It is right."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from pytest_roseinfer import CacheFull, CacheSpec, KVCacheAdapter, Ledger, PrefixTraits

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence


class TextCache(KVCacheAdapter):
    """Finds a full block by the tokens of its sequence up to the block's end.

    A block that becomes full is replaced by an equal one, if there is one. A block without holders
    keeps its tokens until it is evicted.
    """

    prefixes = PrefixTraits(shares="equal prefixes", evicts="least recent", evicts_when="needed")

    def make(self, spec: CacheSpec) -> None:
        self.spec = spec
        shape = (spec.num_layers, spec.num_blocks, spec.num_heads, spec.block_size, spec.head_dim)
        self.keys = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=spec.device)
        self.values = torch.zeros_like(self.keys)
        self.holders = [0] * spec.num_blocks
        self.unused = list(range(spec.num_blocks))
        """Blocks without holders, in the order of their eviction."""
        self.block_of: dict[Hashable, int] = {}
        self.key_of: dict[int, Hashable] = {}
        self.tables: dict[int, list[int]] = {}
        self.token_ids: dict[int, list[int]] = {}

    def use_tokens(self, token_ids: Sequence[Sequence[int]]) -> None:
        self.row_tokens = token_ids

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        size = self.spec.block_size
        needed = sum(len(self.token_ids.get(seq, ())) % size == 0 for seq in seqs)
        if needed > len(self.unused):
            raise CacheFull(f"{needed} blocks needed, {len(self.unused)} free")
        for row, (seq, token_ids) in enumerate(zip(seqs, self.row_tokens, strict=True)):
            self.write(seq, token_ids, key[:, row : row + 1], value[:, row : row + 1])

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the tokens that are not found; found blocks need no room if they have holders."""
        (token_ids,) = self.row_tokens
        found = self.hold_found(token_ids)
        begin = len(found) * self.spec.block_size
        self.tables[seq], self.token_ids[seq] = found, list(token_ids[:begin])
        self.write(seq, token_ids[begin:], key[:, begin:], value[:, begin:])

    def hold_found(self, token_ids: Sequence[int]) -> list[int]:
        """Hold the found blocks of a text, if there is room for the rest of it."""
        found = self.found(token_ids)
        needed = -(-len(token_ids) // self.spec.block_size) - len(found)
        needed += sum(not self.holders[block] for block in found)
        if needed > len(self.unused):
            raise CacheFull(f"{needed} blocks needed, {len(self.unused)} free")
        for block in found:
            self.hold(block)
        return found

    def found(self, token_ids: Sequence[int]) -> list[int]:
        size = self.spec.block_size
        found = []
        for end in range(size, len(token_ids) + 1, size):
            block = self.find(token_ids[:end])
            if block is None:
                break
            found.append(block)
        return found

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        return len(self.found(token_ids)) * self.spec.block_size

    def look_up(self, token_ids: Sequence[int]) -> object:
        return list(token_ids)

    def begin_with(self, prefix: Any, seq: int) -> int:
        """Begin with the blocks found now; those of the lookup may be evicted since."""
        self.tables[seq] = self.found(prefix)
        for block in self.tables[seq]:
            self.hold(block)
        tokens = len(self.tables[seq]) * self.spec.block_size
        self.token_ids[seq] = list(prefix[:tokens])
        return tokens

    def find(self, token_ids: Sequence[int]) -> int | None:
        return self.block_of.get(self.key(token_ids))

    def key(self, token_ids: Sequence[int]) -> Hashable:
        return tuple(token_ids)

    def write(
        self, seq: int, token_ids: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        size = self.spec.block_size
        table, stored = self.tables.setdefault(seq, []), self.token_ids.setdefault(seq, [])
        for at, token in enumerate(token_ids):
            if len(stored) % size == 0:
                table.append(self.open())
            position = self.position(seq)
            self.keys[:, table[-1], :, position] = key[:, at]
            self.values[:, table[-1], :, position] = value[:, at]
            stored.append(token)
            if len(stored) % size == 0:
                self.register(table, stored)

    def position(self, seq: int) -> int:
        """Return the position of the next token in its last block."""
        return len(self.token_ids.get(seq, ())) % self.spec.block_size

    def register(self, table: list[int], token_ids: Sequence[int]) -> None:
        key = self.key(token_ids)
        other = self.block_of.setdefault(key, table[-1])
        if other == table[-1]:
            self.key_of[other] = key
            return
        self.hold(other)
        self.drop(table[-1])
        table[-1] = other

    def open(self) -> int:
        block = self.unused.pop(0)
        self.block_of.pop(self.key_of.pop(block, None), None)
        self.holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        if not self.holders[block]:
            self.unused.remove(block)
        self.holders[block] += 1

    def drop(self, block: int) -> None:
        self.holders[block] -= 1
        if not self.holders[block]:
            # Blocks without a key are evicted first, as nothing can find them.
            self.unused.insert(len(self.unused) if block in self.key_of else 0, block)

    def free(self, seq: int) -> None:
        for block in reversed(self.tables.pop(seq)):
            self.drop(block)
        del self.token_ids[seq]

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (
            cache[layer, self.tables[seq]].transpose(1, 2).flatten(0, 1)[: len(self.token_ids[seq])]
            for cache in (self.keys, self.values)
        )
        return keys, values

    def table(self, seq: int, layer: int) -> list[int]:  # noqa: ARG002  (one for all layers)
        return self.tables[seq]

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002
        refcounts = {block: count for block, count in enumerate(self.holders) if count}
        cached = self.key_of.keys() & set(self.unused)
        return Ledger(refcounts, self.unused, self.spec.num_blocks, cached)

    def arena(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values


class HashedTextCache(TextCache):
    """Stores one block for each hash, and compares its tokens."""

    def use_hash(self, hashed: Callable[[object], int]) -> None:
        self.hashed = hashed
        self.holds: dict[Hashable, list[int]] = {}

    def key(self, token_ids: Sequence[int]) -> Hashable:
        return self.hashed(list(token_ids))

    def register(self, table: list[int], token_ids: Sequence[int]) -> None:
        """Register a block, unless another text's block has its hash."""
        key = self.key(token_ids)
        if key not in self.block_of:
            self.holds[key] = list(token_ids)
        if self.holds[key] == list(token_ids):
            super().register(table, token_ids)

    def find(self, token_ids: Sequence[int]) -> int | None:
        key = self.key(token_ids)
        return self.block_of.get(key) if self.holds.get(key) == list(token_ids) else None


class HashesOnce(HashedTextCache):
    """Caches hashes, so that most lookups compute none."""

    def use_hash(self, hashed: Callable[[object], int]) -> None:
        super().use_hash(cache(lambda token_ids: hashed(list(token_ids))))

    def key(self, token_ids: Sequence[int]) -> Hashable:
        return self.hashed(tuple(token_ids))


class RenewedTextCache(TextCache):
    """Replaces an equal block without holders by a new one, and evicts the old one first."""

    def register(self, table: list[int], token_ids: Sequence[int]) -> None:
        older = self.find(token_ids)
        if older is not None and not self.holders[older]:
            del self.key_of[older], self.block_of[self.key(token_ids)]
            self.unused.remove(older)
            self.unused.insert(0, older)
        super().register(table, token_ids)

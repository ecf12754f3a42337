"""A cache that keeps a block for every text, as caches of prefixes do. It is right."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from pytest_roseinfer import CacheFull, CacheSpec, KVCacheAdapter, Ledger, PrefixTraits

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence


class TextCache(KVCacheAdapter):
    """A full block is found again by what its sequence says up to its end.

    As soon as a block is full it is given up for another one that holds the same. A block that
    nobody holds any more keeps what it holds until it is needed.
    """

    prefixes = PrefixTraits(shares="equal prefixes", evicts="least recent")

    def make(self, spec: CacheSpec) -> None:
        self.spec = spec
        shape = (spec.num_layers, spec.num_blocks, spec.num_heads, spec.block_size, spec.head_dim)
        self.keys = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=spec.device)
        self.values = torch.zeros_like(self.keys)
        self.holders = [0] * spec.num_blocks
        self.unused = list(range(spec.num_blocks))
        """Blocks nobody holds, those first that go first."""
        self.block_of: dict[Hashable, int] = {}
        self.key_of: dict[int, Hashable] = {}
        self.tables: dict[int, list[int]] = {}
        self.said: dict[int, list[int]] = {}

    def use_tokens(self, said: Sequence[Sequence[int]]) -> None:
        self.row_tokens = said

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        size = self.spec.block_size
        needed = sum(len(self.said.get(seq, ())) % size == 0 for seq in seqs)
        if needed > len(self.unused):
            raise CacheFull(f"{needed} blocks needed, {len(self.unused)} free")
        for row, (seq, said) in enumerate(zip(seqs, self.row_tokens, strict=True)):
            self.write(seq, said, key[:, row : row + 1], value[:, row : row + 1])

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write what is not found; blocks that are found need no room if somebody holds them."""
        (said,) = self.row_tokens
        found = self.hold_found(said)
        begin = len(found) * self.spec.block_size
        self.tables[seq], self.said[seq] = found, list(said[:begin])
        self.write(seq, said[begin:], key[:, begin:], value[:, begin:])

    def hold_found(self, said: Sequence[int]) -> list[int]:
        """Hold what is found of a text, if there is room for the rest of it."""
        found = self.found(said)
        needed = -(-len(said) // self.spec.block_size) - len(found)
        needed += sum(not self.holders[block] for block in found)
        if needed > len(self.unused):
            raise CacheFull(f"{needed} blocks needed, {len(self.unused)} free")
        for block in found:
            self.hold(block)
        return found

    def found(self, said: Sequence[int]) -> list[int]:
        size = self.spec.block_size
        found = []
        for end in range(size, len(said) + 1, size):
            block = self.find(said[:end])
            if block is None:
                break
            found.append(block)
        return found

    def match_prefix(self, said: Sequence[int]) -> int:
        return len(self.found(said)) * self.spec.block_size

    def look_up(self, token_ids: Sequence[int]) -> object:
        return list(token_ids)

    def begin_with(self, prefix: Any, seq: int) -> int:
        """What was there when it was looked up may be gone, so it is looked up again."""
        self.tables[seq] = self.found(prefix)
        for block in self.tables[seq]:
            self.hold(block)
        tokens = len(self.tables[seq]) * self.spec.block_size
        self.said[seq] = list(prefix[:tokens])
        return tokens

    def find(self, said: Sequence[int]) -> int | None:
        return self.block_of.get(self.key(said))

    def key(self, said: Sequence[int]) -> Hashable:
        return tuple(said)

    def write(self, seq: int, said: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        size = self.spec.block_size
        table, so_far = self.tables.setdefault(seq, []), self.said.setdefault(seq, [])
        for at, token in enumerate(said):
            if len(so_far) % size == 0:
                table.append(self.open())
            position = self.position(seq)
            self.keys[:, table[-1], :, position] = key[:, at]
            self.values[:, table[-1], :, position] = value[:, at]
            so_far.append(token)
            if len(so_far) % size == 0:
                self.register(table, so_far)

    def position(self, seq: int) -> int:
        """Return where in its last block the next token goes."""
        return len(self.said.get(seq, ())) % self.spec.block_size

    def register(self, table: list[int], said: Sequence[int]) -> None:
        key = self.key(said)
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
            # Blocks without a key go first: they are of no use to anybody.
            self.unused.insert(len(self.unused) if block in self.key_of else 0, block)

    def free(self, seq: int) -> None:
        for block in reversed(self.tables.pop(seq)):
            self.drop(block)
        del self.said[seq]

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (
            cache[layer, self.tables[seq]].transpose(1, 2).flatten(0, 1)[: len(self.said[seq])]
            for cache in (self.keys, self.values)
        )
        return keys, values

    def table(self, seq: int, layer: int) -> list[int]:  # noqa: ARG002  (one for all layers)
        return self.tables[seq]

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002
        held = {block: count for block, count in enumerate(self.holders) if count}
        cached = self.key_of.keys() & set(self.unused)
        return Ledger(held, self.unused, self.spec.num_blocks, cached)

    def arena(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values


class HashedTextCache(TextCache):
    """It keeps one block for each hash, and compares what the block holds."""

    def use_hash(self, hashed: Callable[[object], int]) -> None:
        self.hashed = hashed
        self.holds: dict[Hashable, list[int]] = {}

    def key(self, said: Sequence[int]) -> Hashable:
        return self.hashed(list(said))

    def register(self, table: list[int], said: Sequence[int]) -> None:
        """A block whose hash another one has is known to its sequence alone."""
        key = self.key(said)
        if key not in self.block_of:
            self.holds[key] = list(said)
        if self.holds[key] == list(said):
            super().register(table, said)

    def find(self, said: Sequence[int]) -> int | None:
        key = self.key(said)
        return self.block_of.get(key) if self.holds.get(key) == list(said) else None


class HashesOnce(HashedTextCache):
    """It remembers hashes, so that most lookups need none."""

    def use_hash(self, hashed: Callable[[object], int]) -> None:
        super().use_hash(cache(lambda said: hashed(list(said))))

    def key(self, said: Sequence[int]) -> Hashable:
        return self.hashed(tuple(said))


class RenewedTextCache(TextCache):
    """A block that is stored anew takes the place of one that nobody holds, which goes first."""

    def register(self, table: list[int], said: Sequence[int]) -> None:
        older = self.find(said)
        if older is not None and not self.holders[older]:
            del self.key_of[older], self.block_of[self.key(said)]
            self.unused.remove(older)
            self.unused.insert(0, older)
        super().register(table, said)

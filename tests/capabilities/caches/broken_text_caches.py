"""Caches with broken prefix reuse."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import CacheFull
from tests.capabilities.caches.text_cache import HashedTextCache, TextCache

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    import torch

    from pytest_roseinfer import CacheSpec


class KeysByTheBlockAlone(TextCache):
    """24: leaves the prefix of a block out of its key."""

    def key(self, token_ids: Sequence[int]) -> Hashable:
        return tuple(token_ids[-self.spec.block_size :])


class KeysByBlockAndPosition(TextCache):
    """Has the position of a block in its key, and not its prefix."""

    def key(self, token_ids: Sequence[int]) -> Hashable:
        return len(token_ids), *token_ids[-self.spec.block_size :]


class KeysByABareHash(TextCache):
    """24, S3: has hashes of four values as keys, and does not compare the tokens."""

    def key(self, token_ids: Sequence[int]) -> Hashable:
        return hash(tuple(token_ids)) % 4


class FreesTheDuplicatesBlock(TextCache):
    """S19: replaces a block by an equal one without holding it."""

    def register(self, table: list[int], token_ids: Sequence[int]) -> None:
        key = self.key(token_ids)
        other = self.block_of.setdefault(key, table[-1])
        if other == table[-1]:
            self.key_of[other] = key
            return
        self.drop(table[-1])
        table[-1] = other


class FindsEvictedBlocks(TextCache):
    """2: finds a block after it was evicted."""

    def open(self) -> int:
        block = self.unused.pop(0)
        self.holders[block] = 1
        return block


class FindsAPartialBlock(TextCache):
    """S4: finds a block one token before it is full."""

    def found(self, token_ids: Sequence[int]) -> list[int]:
        size = self.spec.block_size
        if len(token_ids) % size != size - 1 or size == 1:
            return super().found(token_ids)
        return super().found([*token_ids, token_ids[-1]])


class ForgetsToCountHits(TextCache):
    """3: counts found blocks without holders as free room too."""

    def prefill(self, seq, key, value):  # type: ignore[no-untyped-def]
        size, (token_ids,) = self.spec.block_size, self.row_tokens
        found = self.found(token_ids)
        if -(-len(token_ids) // size) - len(found) <= len(self.unused):
            for block in found:
                self.hold(block)
            begin = len(found) * size
            self.tables[seq], self.token_ids[seq] = found, list(token_ids[:begin])
            self.write(seq, token_ids[begin:], key[:, begin:], value[:, begin:])
            return
        super().prefill(seq, key, value)


class PrefillsOnAFoundPrefix(TextCache):
    """T29: writes the whole prompt after the found prefix that it begins with."""

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        (token_ids,) = self.row_tokens
        self.begin_with(token_ids, seq)
        self.write(seq, token_ids, key, value)


class RevivesWithoutItsKey(TextCache):
    """Does not find a cached block that a sequence holds again."""

    def hold(self, block: int) -> None:
        if not self.holders[block]:
            self.block_of.pop(self.key_of.pop(block), None)
        super().hold(block)


class FindsUnwrittenBlocks(TextCache):
    """S2: finds the first block of a text as soon as it is begun."""

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        size = self.spec.block_size
        begun = any(
            token_ids[: len(stored)] == stored for stored in self.token_ids.values() if stored
        )
        return max(super().match_prefix(token_ids), size if begun and len(token_ids) >= size else 0)


class DoesNotCompare(HashedTextCache):
    """24, S3: takes a block for another one with the same hash."""

    def find(self, token_ids: Sequence[int]) -> int | None:
        return self.block_of.get(self.key(token_ids))


class DropsHits(HashedTextCache):
    """Misses a block without holders whose hash collides with no other text's."""

    def use_hash(self, hashed: Callable[[object], int]) -> None:
        super().use_hash(hashed)
        self.texts_of_hash: dict[Hashable, set[tuple[int, ...]]] = {}

    def register(self, table: list[int], token_ids: Sequence[int]) -> None:
        self.texts_of_hash.setdefault(self.key(token_ids), set()).add(tuple(token_ids))
        super().register(table, token_ids)

    def find(self, token_ids: Sequence[int]) -> int | None:
        block = super().find(token_ids)
        if block is None or self.holders[block] or len(self.texts_of_hash[self.key(token_ids)]) > 1:
            return block
        return None


class ReusesAStaleLookup(TextCache):
    """S1: begins a sequence with the blocks of an earlier lookup, whatever they hold now."""

    def look_up(self, token_ids: Sequence[int]) -> object:
        return list(token_ids), self.found(token_ids)

    def begin_with(self, found: Any, seq: int) -> int:
        token_ids, blocks = found
        for block in blocks:
            self.hold(block)
        self.tables[seq] = list(blocks)
        self.token_ids[seq] = token_ids[: len(blocks) * self.spec.block_size]
        return len(self.token_ids[seq])


class RenewsOnARefusal(TextCache):
    """Makes the blocks that a refused prompt found the most recently used."""

    def hold_found(self, token_ids: Sequence[int]) -> list[int]:
        found = self.found(token_ids)
        for block in found:
            self.hold(block)
        if -(-len(token_ids) // self.spec.block_size) - len(found) > len(self.unused):
            for block in reversed(found):
                self.drop(block)
            raise CacheFull
        return found


class EvictsWhileBlocksAreFree(TextCache):
    """Evicts the block without holders that was released first, even if another has no key."""

    def drop(self, block: int) -> None:
        self.holders[block] -= 1
        if not self.holders[block]:
            self.unused.append(block)


class CountsOneMore(TextCache):
    """Returns the length of the lookup for the tokens it reused."""

    def begin_with(self, found: Any, seq: int) -> int:
        super().begin_with(found, seq)
        return len(found)


class EvictsTheMostRecent(TextCache):
    """Evicts the block that was freed last."""

    def open(self) -> int:
        self.unused.insert(0, self.unused.pop())
        return super().open()


class EvictsBySeconds(TextCache):
    """T31: has the times of releases in whole seconds, and evicts by block number within one."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.released = [0] * spec.num_blocks
        """Second of the latest release of each block."""

    def drop(self, block: int) -> None:
        super().drop(block)
        self.released[block] = int(time.monotonic())

    def open(self) -> int:
        self.unused.sort(key=lambda block: (block in self.key_of, self.released[block], block))
        return super().open()


class EvictsTheHeadFirst(TextCache):
    """Frees the blocks of a sequence from its head on, so that the head is evicted first."""

    def free(self, seq: int) -> None:
        for block in self.tables.pop(seq):
            self.drop(block)
        del self.token_ids[seq]


class HitsDoNotRenew(TextCache):
    """Returns a block that was reused to its old place in the order of evictions."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.evictable: list[int] = []

    def drop(self, block: int) -> None:
        super().drop(block)
        if not self.holders[block] and block in self.key_of:
            if block in self.evictable:
                later = self.evictable[self.evictable.index(block) :]
                self.unused.remove(block)
                earlier = [each for each in self.unused if each not in later]
                self.unused.insert(len(earlier), block)
            else:
                self.evictable.append(block)

    def open(self) -> int:
        block = super().open()
        if block in self.evictable:
            self.evictable.remove(block)
        return block


BROKEN = (
    EvictsTheMostRecent,
    EvictsBySeconds,
    EvictsTheHeadFirst,
    HitsDoNotRenew,
    ReusesAStaleLookup,
    CountsOneMore,
    RevivesWithoutItsKey,
    FindsUnwrittenBlocks,
    DoesNotCompare,
    DropsHits,
    KeysByTheBlockAlone,
    KeysByABareHash,
    FreesTheDuplicatesBlock,
    FindsEvictedBlocks,
    FindsAPartialBlock,
    ForgetsToCountHits,
    PrefillsOnAFoundPrefix,
    RenewsOnARefusal,
    EvictsWhileBlocksAreFree,
)


class NeverHashes(TextCache):
    """Takes a hash function and does not call it."""

    def use_hash(self, hashed: Callable[[object], int]) -> None: ...

"""Caches that keep a block for every text, and do it wrongly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.capabilities.caches.text_cache import HashedTextCache, TextCache

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from pytest_roseinfer import CacheSpec


class KnowsTheBlockAlone(TextCache):
    """24: its key leaves out what came before the block."""

    def key(self, said: Sequence[int]) -> Hashable:
        return tuple(said[-self.spec.block_size :])


class KnowsTheBlockAtItsPlace(TextCache):
    """Its key says at which position a block stands, and leaves out what came before it."""

    def key(self, said: Sequence[int]) -> Hashable:
        return len(said), *said[-self.spec.block_size :]


class KnowsABareHash(TextCache):
    """24, S3: its keys are hashes of four values, and what they stand for is not compared."""

    def key(self, said: Sequence[int]) -> Hashable:
        return hash(tuple(said)) % 4


class FreesTheDuplicatesBlock(TextCache):
    """S19: it gives up a block for an equal one, and does not hold that."""

    def register(self, table: list[int], said: Sequence[int]) -> None:
        key = self.key(said)
        other = self.block_of.setdefault(key, table[-1])
        if other == table[-1]:
            self.key_of[other] = key
            return
        self.drop(table[-1])
        table[-1] = other


class FindsWhatWasEvicted(TextCache):
    """2: a block that is taken for something else can still be found."""

    def open(self) -> int:
        block = self.unused.pop(0)
        self.holders[block] = 1
        return block


class FindsAPartialBlock(TextCache):
    """S4: a block is known one token before it is full."""

    def found(self, said: Sequence[int]) -> list[int]:
        size = self.spec.block_size
        if len(said) % size != size - 1 or size == 1:
            return super().found(said)
        return super().found([*said, said[-1]])


class ForgetsToCountHits(TextCache):
    """3: blocks that a prompt finds, and nobody holds, are counted as room as well."""

    def prefill(self, seq, key, value):  # type: ignore[no-untyped-def]
        size, (said,) = self.spec.block_size, self.row_tokens
        found = self.found(said)
        if -(-len(said) // size) - len(found) <= len(self.unused):
            for block in found:
                self.hold(block)
            begin = len(found) * size
            self.tables[seq], self.said[seq] = found, list(said[:begin])
            self.write(seq, said[begin:], key[:, begin:], value[:, begin:])
            return
        super().prefill(seq, key, value)


class RevivesWithoutItsKey(TextCache):
    """A block that somebody holds again is not found by the next."""

    def hold(self, block: int) -> None:
        if not self.holders[block]:
            self.block_of.pop(self.key_of.pop(block), None)
        super().hold(block)


class FindsWhatIsNotWritten(TextCache):
    """S2: it says that the last block of a text is there as soon as it is begun."""

    def match_prefix(self, said: Sequence[int]) -> int:
        size = self.spec.block_size
        begun = any(said[: len(known)] == known for known in self.said.values() if known)
        return max(super().match_prefix(said), size if begun and len(said) >= size else 0)


class DoesNotCompare(HashedTextCache):
    """24, S3: it takes a block for another one that has the same hash."""

    def find(self, said: Sequence[int]) -> int | None:
        return self.block_of.get(self.key(said))


class DropsHits(HashedTextCache):
    """It misses a block that nobody holds, though no other text ever had its hash."""

    def use_hash(self, hashed: Callable[[object], int]) -> None:
        super().use_hash(hashed)
        self.alike: dict[Hashable, set[tuple[int, ...]]] = {}

    def register(self, table: list[int], said: Sequence[int]) -> None:
        self.alike.setdefault(self.key(said), set()).add(tuple(said))
        super().register(table, said)

    def find(self, said: Sequence[int]) -> int | None:
        block = super().find(said)
        if block is None or self.holders[block] or len(self.alike[self.key(said)]) > 1:
            return block
        return None


class TakesWhatWasThere(TextCache):
    """S1: it begins a sequence with the blocks of the lookup, whatever they hold by now."""

    def look_up(self, said: Sequence[int]) -> object:
        return list(said), self.found(said)

    def begin_with(self, found: Any, seq: int) -> int:
        said, blocks = found
        for block in blocks:
            self.hold(block)
        self.tables[seq] = list(blocks)
        self.said[seq] = said[: len(blocks) * self.spec.block_size]
        return len(self.said[seq])


class CountsOneMore(TextCache):
    """It says of a text that it took as much as was looked up."""

    def begin_with(self, found: Any, seq: int) -> int:
        super().begin_with(found, seq)
        return len(found)


class EvictsTheMostRecent(TextCache):
    """It takes the block that was released last."""

    def open(self) -> int:
        self.unused.insert(0, self.unused.pop())
        return super().open()


class EvictsTheHeadFirst(TextCache):
    """It releases the blocks of a sequence from its head on, so that they go in this order."""

    def free(self, seq: int) -> None:
        for block in self.tables.pop(seq):
            self.drop(block)
        del self.said[seq]


class HitsDoNotRenew(TextCache):
    """A block that was found again goes where it stood among those that wait."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.kept: list[int] = []

    def drop(self, block: int) -> None:
        super().drop(block)
        if not self.holders[block] and block in self.key_of:
            if block in self.kept:
                later = self.kept[self.kept.index(block) :]
                self.unused.remove(block)
                ahead = [each for each in self.unused if each not in later]
                self.unused.insert(len(ahead), block)
            else:
                self.kept.append(block)

    def open(self) -> int:
        block = super().open()
        if block in self.kept:
            self.kept.remove(block)
        return block


BROKEN = (
    EvictsTheMostRecent,
    EvictsTheHeadFirst,
    HitsDoNotRenew,
    TakesWhatWasThere,
    CountsOneMore,
    RevivesWithoutItsKey,
    FindsWhatIsNotWritten,
    DoesNotCompare,
    DropsHits,
    KnowsTheBlockAlone,
    KnowsABareHash,
    FreesTheDuplicatesBlock,
    FindsWhatWasEvicted,
    FindsAPartialBlock,
    ForgetsToCountHits,
)


class NeverHashes(TextCache):
    """It takes a hash function and leaves it alone."""

    def use_hash(self, hashed: Callable[[object], int]) -> None: ...

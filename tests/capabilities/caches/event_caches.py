"""Prefix caches that send events of their blocks: a right one, and broken ones."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from pytest_roseinfer import AllBlocksCleared, BlockRemoved, BlockStored
from tests.capabilities.caches.epoch_caches import SequencesLive
from tests.capabilities.caches.reserving_caches import ReservingCache

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from pytest_roseinfer import CacheSpec
    from pytest_roseinfer.capabilities.cache_data import Event
    from tests.capabilities.caches.reserving_caches import Reservation


class EventCache(ReservingCache):
    """Keeps copies of equal blocks, and sends an event for the first and the last. It is right."""

    reset_errors = (SequencesLive,)

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.copies: dict[Hashable, list[int]] = defaultdict(list)
        self.unread: list[Event] = []

    def events(self) -> list[Event]:
        events, self.unread = self.unread, []
        return events

    def register(self, table: list[int], token_ids: Sequence[int]) -> None:
        key, block = self.key(token_ids), table[-1]
        self.key_of[block] = key
        self.copies[key].append(block)
        if self.block_of.setdefault(key, block) == block:
            self.send_stored(token_ids)

    def send_stored(self, token_ids: Sequence[int]) -> None:
        parent, size = self.parent(token_ids), self.spec.block_size
        self.unread.append(BlockStored([self.key(token_ids)], parent, token_ids[-size:]))

    def parent(self, token_ids: Sequence[int]) -> Hashable | None:
        return self.key(token_ids[: -self.spec.block_size]) or None

    def open(self) -> int:
        block = self.unused.pop(0)
        self.holders[block] = 1
        if (key := self.key_of.pop(block, None)) is not None:
            self.evict(block, key)
        return block

    def evict(self, block: int, key: Hashable) -> None:
        self.copies[key].remove(block)
        if self.copies[key]:
            self.block_of[key] = self.copies[key][0]
        else:
            del self.block_of[key]
            self.unread.append(BlockRemoved([key]))

    def reset(self) -> None:
        if any(self.holders):
            raise SequencesLive
        for books in (self.block_of, self.key_of, self.copies):
            books.clear()
        self.unread.append(AllBlocksCleared())


class NeverSendsRemoved(EventCache):
    """T30: sends no event for a block that is evicted."""

    def events(self) -> list[Event]:
        return [event for event in super().events() if not isinstance(event, BlockRemoved)]


class SendsRemovedWhileACopyLives(EventCache):
    """T30: sends that a block is removed when the first of its copies is evicted."""

    def evict(self, block: int, key: Hashable) -> None:
        super().evict(block, key)
        if self.copies[key]:
            self.unread.append(BlockRemoved([key]))


class NeverSendsCleared(EventCache):
    """T30: sends no event for a reset."""

    def events(self) -> list[Event]:
        return [event for event in super().events() if not isinstance(event, AllBlocksCleared)]


class SendsClearedOfARefusedReset(EventCache):
    """T30: sends that all blocks are cleared, and then refuses the reset."""

    def reset(self) -> None:
        if any(self.holders):
            self.unread.append(AllBlocksCleared())
        super().reset()


class SendsStoredOnce(EventCache):
    """T30: sends no event for a block that is stored again after its eviction."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.sent: set[Hashable] = set()

    def send_stored(self, token_ids: Sequence[int]) -> None:
        if self.key(token_ids) not in self.sent:
            super().send_stored(token_ids)
        self.sent.add(self.key(token_ids))


class IgnoresItsReset(SendsStoredOnce):
    """T30: takes the blocks of before a reset for known, and does not send them again."""

    def evict(self, block: int, key: Hashable) -> None:
        super().evict(block, key)
        if not self.copies[key]:
            self.sent.remove(key)


class SendsStoredWhenReserved(EventCache):
    """T30: sends that blocks are stored as soon as room for their tokens is reserved."""

    def reserve(self, seqs: Sequence[int], counts: Sequence[int]) -> Reservation:
        size, reservation = self.spec.block_size, super().reserve(seqs, counts)
        for seq, _ in reservation:
            token_ids = [*self.token_ids[seq], *self.reserved[seq]]
            for end in range(size, len(token_ids) + 1, size):
                self.send_stored(token_ids[:end])
        return reservation


class SendsPartialBlocks(EventCache):
    """T30: sends that a block is stored, with the tokens that it has, before it is full."""

    def free(self, seq: int) -> None:
        size, token_ids = self.spec.block_size, self.token_ids.get(seq, [])
        if token_ids and (part := len(token_ids) % size):
            parent = self.key(token_ids[:-part]) or None
            self.unread.append(BlockStored([self.key(token_ids)], parent, token_ids[-part:]))
        super().free(seq)


class NamesTheLatestParent(EventCache):
    """T30: names the block of the latest event as the parent of the next one."""

    latest: Hashable | None = None

    def parent(self, token_ids: Sequence[int]) -> Hashable | None:
        parent, self.latest = self.latest, self.key(token_ids)
        return parent


class SendsCopiesWithoutAParent(EventCache):
    """T30: sends a copy of a stored block again, without its parent."""

    def register(self, table: list[int], token_ids: Sequence[int]) -> None:
        super().register(table, token_ids)
        key, size = self.key(token_ids), self.spec.block_size
        if len(self.copies[key]) > 1:
            self.unread.append(BlockStored([key], None, token_ids[-size:]))


class SendsStoredBeforeRemoved(EventCache):
    """T30: sends the stored blocks of a step before the removed ones, whatever came first."""

    def events(self) -> list[Event]:
        return sorted(super().events(), key=lambda event: isinstance(event, BlockRemoved))


BROKEN = (
    NeverSendsRemoved,
    SendsRemovedWhileACopyLives,
    NeverSendsCleared,
    SendsClearedOfARefusedReset,
    SendsStoredOnce,
    IgnoresItsReset,
    SendsStoredWhenReserved,
    SendsPartialBlocks,
    NamesTheLatestParent,
    SendsCopiesWithoutAParent,
    SendsStoredBeforeRemoved,
)

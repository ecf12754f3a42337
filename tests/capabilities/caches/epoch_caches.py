"""Prefix caches that can be reset: right ones, and broken ones."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tests.capabilities.caches.reserving_caches import ReservingCache
from tests.capabilities.caches.swap_cache import SwapTextCache
from tests.capabilities.caches.text_cache import TextCache
from tests.capabilities.caches.windowed_text_cache import KeepingPool, WindowedTextCache

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import torch

    from pytest_roseinfer import CacheSpec


_LOG = logging.getLogger(__name__)


class ResettingCache(SwapTextCache, ReservingCache):
    """Stores each token with its epoch, so that sequences go on over a reset. It is right."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.epoch = 0

    def reset(self) -> None:
        self.epoch += 1
        self.block_of.clear()
        self.key_of.clear()

    def use_tokens(self, token_ids: Sequence[Sequence[int]]) -> None:
        super().use_tokens([self.of_this_epoch(row) for row in token_ids])

    def of_this_epoch(self, token_ids: Sequence[int]) -> Any:
        return [(self.epoch, token) for token in token_ids]

    def renewed(self, tokens: Sequence[Any]) -> Any:
        return self.of_this_epoch([token_id for _, token_id in tokens])

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        return super().match_prefix(self.of_this_epoch(token_ids))

    def look_up(self, token_ids: Sequence[int]) -> object:
        return list(token_ids)

    def begin_with(self, prefix: Any, seq: int) -> int:
        return TextCache.begin_with(self, self.of_this_epoch(prefix), seq)


class SequencesLive(Exception):
    """A cache is not reset while sequences hold blocks."""


class RefusingCache(ResettingCache):
    """Is not reset while sequences hold blocks. It is right."""

    reset_errors = (SequencesLive,)

    def reset(self) -> None:
        if any(self.holders):
            raise SequencesLive
        super().reset()


class OnlyLogsTheReset(ResettingCache):
    """T12: logs a reset, and keeps all blocks."""

    def reset(self) -> None:
        _LOG.info("the cache is reset")


class LogsWhileSequencesLive(ResettingCache):
    """T12: does nothing but log a reset while sequences hold blocks."""

    def reset(self) -> None:
        if any(self.holders):
            _LOG.info("the cache is not reset: sequences hold blocks")
        else:
            super().reset()


class ForgetsAndRefuses(RefusingCache):
    """T12: forgets the texts that it stores, and then refuses the reset."""

    def reset(self) -> None:
        self.block_of.clear()
        self.key_of.clear()
        super().reset()


class PublishesWhatIsFilled(ResettingCache):
    """T12: finds a prompt that was computed before a reset and filled in after it."""

    def fill(self, reservation: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        rows = [(seq, self.renewed(row)) for seq, row in reservation]
        super().fill(rows, key, value)


class PublishesWhatComesBack(ResettingCache):
    """T12: finds the tokens of a sequence that was swapped out before a reset."""

    def finish_swap_in(self, coming: Any) -> None:
        token_ids, keys, values = self.swapped_out[coming[0]]
        self.swapped_out[coming[0]] = self.renewed(token_ids), keys, values
        super().finish_swap_in(coming)


class PublishesSequencesThatGoOn(ResettingCache):
    """T12: finds blocks that a sequence with older tokens fills after a reset."""

    def key(self, token_ids: Sequence[Any]) -> Hashable:
        return self.epoch, *(token for _, token in token_ids)


class ForgetsThatItWasPreempted(ResettingCache):
    """T12: resumes a sequence with the blocks that it had, though it was reset in between."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def preempt(self, seq: int) -> None:
        self.kept[seq] = self.keys[:, self.tables[seq]], self.values[:, self.tables[seq]]
        super().preempt(seq)

    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        kept = zip((key, value), self.kept.pop(seq), strict=True)
        length = key.shape[1]
        key, value = (
            was.transpose(2, 3).flatten(1, 2)[:, :length].to(new.dtype) for new, was in kept
        )
        super().resume(seq, key, value)


class BeginsWithOldBlocks(ResettingCache):
    """T12: begins with blocks that were looked up before a reset, unless they were overwritten."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.writes = [0] * spec.num_blocks

    def open(self) -> int:
        block = super().open()
        self.writes[block] += 1
        return block

    def look_up(self, token_ids: Sequence[int]) -> object:
        blocks = self.found(self.of_this_epoch(token_ids))
        return token_ids, [(block, self.writes[block]) for block in blocks]

    def begin_with(self, prefix: Any, seq: int) -> int:
        token_ids, blocks = prefix
        table = self.tables[seq] = []
        for block, writes in blocks:
            if self.writes[block] != writes:
                break
            self.hold(block)
            table.append(block)
        tokens = len(table) * self.spec.block_size
        self.token_ids[seq] = self.of_this_epoch(token_ids[:tokens])
        return tokens


class FreesHeldBlocks(ResettingCache):
    """T12: frees the blocks of sequences that go on."""

    def reset(self) -> None:
        super().reset()
        for table in self.tables.values():
            for block in table:
                self.drop(block)


class FreesAllBlocks(ResettingCache):
    """T12: lists all blocks as free, though sequences hold some."""

    def reset(self) -> None:
        super().reset()
        self.unused = list(range(self.spec.num_blocks))


class SleepsAndKeepsItsHashes(ResettingCache):
    """T13: drops all data and keeps the hashes of blocks without holders."""

    def reset(self) -> None:
        self.keys[:, self.unused] = 0
        self.values[:, self.unused] = 0


class ResettingWindowedCache(WindowedTextCache):
    """Forgets the blocks of all groups, and has no sequences that go on. It is right."""

    reset_errors = (SequencesLive,)

    def reset(self) -> None:
        if any(any(group.pool.holders.values()) for group in self.groups):
            raise SequencesLive
        for group in self.groups:
            self.forget(self.pool_of(group))

    def forget(self, pool: KeepingPool) -> None:
        pool.block_of.clear()
        pool.key_of.clear()


class ForgetsTheFirstGroup(ResettingWindowedCache):
    """T12: keeps the blocks of all groups but the first over a reset."""

    def forget(self, pool: KeepingPool) -> None:
        for key in [key for key in pool.block_of if key[0] == 0]:
            del pool.key_of[pool.block_of.pop(key)]


class TieredCache(ResettingCache):
    """Copies blocks that are evicted to a slow tier, and prompts from there. It is right."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.slow_tier: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}

    def reset(self) -> None:
        super().reset()
        self.slow_tier.clear()

    def open(self) -> int:
        block = self.unused[0]
        if block in self.key_of:
            copies = self.keys[:, block].clone(), self.values[:, block].clone()
            self.slow_tier[self.tier_key(self.key_of[block])] = copies
        return super().open()

    def tier_key(self, key: Any) -> Hashable:
        return tuple(key)

    def register(self, table: list[int], token_ids: Sequence[Any]) -> None:
        key = self.key(token_ids)
        if key not in self.block_of and (copies := self.slow_tier.get(self.tier_key(key))):
            self.keys[:, table[-1]], self.values[:, table[-1]] = copies
        super().register(table, token_ids)


class KeepsTheSlowTier(TieredCache):
    """T12: forgets the blocks of the fast tier only."""

    def reset(self) -> None:
        ResettingCache.reset(self)

    def tier_key(self, key: Any) -> Hashable:
        return tuple(token for _, token in key)


RIGHT = (ResettingCache, RefusingCache, ResettingWindowedCache, TieredCache)
BROKEN = (
    OnlyLogsTheReset,
    LogsWhileSequencesLive,
    ForgetsAndRefuses,
    PublishesWhatIsFilled,
    PublishesWhatComesBack,
    PublishesSequencesThatGoOn,
    ForgetsThatItWasPreempted,
    BeginsWithOldBlocks,
    FreesHeldBlocks,
    FreesAllBlocks,
    SleepsAndKeepsItsHashes,
    ForgetsTheFirstGroup,
    KeepsTheSlowTier,
)

"""Caches that can be truncated only to lengths that they recorded: right ones, and broken ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tests.capabilities.caches.truncating_caches import CannotTrim, CutCache

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from pytest_roseinfer import CacheSpec


class EndsOfWritesCache(CutCache):
    """Records a checkpoint at the end of each write, as a recurrent state does. It is right."""

    truncation = CutCache.truncation.but(lengths="checkpoints", errors=(CannotTrim,))
    head_counts: ClassVar[Sequence[int]] = (1, 2)
    head_dims: ClassVar[Sequence[int]] = (4,)

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.recorded: dict[int, set[int]] = {}
        """Lengths of the checkpoints of each sequence."""

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        self.append_many(seqs, [1] * len(seqs), key, value)

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.append_many([seq], [key.shape[1]], key, value)

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        before = self.lengths.copy()
        super().append(
            [seq for seq, count in zip(seqs, counts, strict=True) for _ in range(count)], key, value
        )
        for seq in seqs:
            self.record(seq, before[seq], self.lengths[seq])

    def record(self, seq: int, begin: int, end: int) -> None:
        recorded = sorted(self.recorded.get(seq, ()))
        self.recorded[seq] = {*self.checkpoints(self.spec, recorded, begin, end)}

    def fork(self, parent: int, child: int) -> None:
        super().fork(parent, child)
        self.recorded[child] = {*self.recorded.get(parent, ())}

    def free(self, seq: int) -> None:
        super().free(seq)
        self.recorded.pop(seq, None)

    def truncate(self, seq: int, length: int) -> None:
        self.truncate_many([seq], [length])

    def truncate_many(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:
        for seq, length in zip(seqs, lengths, strict=True):
            if not self.has_checkpoint(seq, length):
                raise CannotTrim(f"sequence {seq} has no checkpoint at {length} tokens")
        for seq, length in zip(seqs, lengths, strict=True):
            super().truncate(seq, length)
            self.drop_checkpoints(seq, length)

    def has_checkpoint(self, seq: int, length: int) -> bool:
        return length in (0, self.lengths[seq], *self.recorded.get(seq, ()))

    def drop_checkpoints(self, seq: int, length: int) -> None:
        """Drop the checkpoints of the tokens that were cut off."""
        self.recorded[seq] = {each for each in self.recorded.get(seq, ()) if each <= length}


class EndsOfBlocksCache(EndsOfWritesCache):
    """Records a checkpoint at the end of each block, wherever writes end. It is right."""

    @classmethod
    def checkpoints(
        cls, spec: CacheSpec, recorded: Sequence[int], begin: int, end: int
    ) -> Iterable[int]:
        size = spec.block_size
        return (*recorded, *range(begin - begin % size + size, end + 1, size))


class LastTwoCache(EndsOfWritesCache):
    """Keeps the checkpoints of the last two writes. It is right."""

    @classmethod
    def checkpoints(
        cls,
        spec: CacheSpec,  # noqa: ARG003
        recorded: Sequence[int],
        begin: int,  # noqa: ARG003
        end: int,
    ) -> Iterable[int]:
        return (*recorded[-1:], end)


class TruncatesWithoutACheckpoint(EndsOfWritesCache):
    """Truncates to any length before the last checkpoint."""

    def has_checkpoint(self, seq: int, length: int) -> bool:
        return length <= max(self.recorded.get(seq, ()), default=0)


class ForksWithoutCheckpoints(EndsOfWritesCache):
    """Begins a fork without the checkpoints of its parent."""

    def fork(self, parent: int, child: int) -> None:
        super().fork(parent, child)
        del self.recorded[child]


class SharesCheckpointsWithForks(EndsOfWritesCache):
    """Records the checkpoints of a fork as its parent's too."""

    def record(self, seq: int, begin: int, end: int) -> None:  # noqa: ARG002
        self.recorded.setdefault(seq, set()).update((end,))

    def fork(self, parent: int, child: int) -> None:
        super().fork(parent, child)
        self.recorded[child] = self.recorded[parent]


class KeepsCheckpointsOfCutTokens(EndsOfWritesCache):
    """Keeps the checkpoints of tokens that were cut off, and truncates other tokens to them."""

    def drop_checkpoints(self, seq: int, length: int) -> None:
        """Do nothing."""


class KeepsCheckpointsOfTheName(EndsOfWritesCache):
    """Leaves the checkpoints of a freed sequence to the next one of its name."""

    def free(self, seq: int) -> None:
        CutCache.free(self, seq)


RIGHT = (EndsOfWritesCache, EndsOfBlocksCache, LastTwoCache)
BROKEN = (
    TruncatesWithoutACheckpoint,
    ForksWithoutCheckpoints,
    SharesCheckpointsWithForks,
    KeepsCheckpointsOfCutTokens,
    KeepsCheckpointsOfTheName,
)

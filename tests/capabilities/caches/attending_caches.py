"""A paged cache that attends over its blocks, and the ways in which people get that wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from pytest_roseinfer import FastPath

from .paged_cache import PagedCache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class AttendingCache(PagedCache):
    paths: ClassVar[Mapping[str, FastPath]] = {
        **PagedCache.paths,
        "in_one_go": FastPath(equals="one_by_one"),
    }

    def attend(self, seqs: Sequence[int], query: torch.Tensor, layer: int) -> torch.Tensor:
        self.counts["in_one_go" if len(seqs) > 1 else "one_by_one"] += 1
        outputs = []
        for seq, row in zip(seqs, query, strict=True):
            keys, values = self.blocks_of(seq, layer)
            keys, values = self.for_each(row, keys), self.for_each(row, values)
            outputs.append(self.weigh(row, keys, values, self.length_of(seq)))
        return torch.stack(outputs).to(query.dtype)

    def blocks_of(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whole blocks, ``[heads, tokens, head_dim]``; the last token may not end them."""
        blocks = self.tables[seq]
        return (
            self.keys[layer, blocks].transpose(0, 1).flatten(1, 2).float(),
            self.values[layer, blocks].transpose(0, 1).flatten(1, 2).float(),
        )

    def for_each(self, query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Return the head that each query head attends to."""
        return cache.repeat_interleave(len(query) // len(cache), 0)

    def length_of(self, seq: int) -> int:
        return self.lengths[seq]

    def weigh(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: int
    ) -> torch.Tensor:
        """Attend to the first so many tokens of one sequence."""
        scores = torch.einsum("hd,htd->ht", query.float(), keys[:, :length])
        weights = torch.softmax(scores * self.scale, -1)
        return torch.einsum("ht,htd->hd", weights, values[:, :length])

    @property
    def scale(self) -> float:
        return float(self.spec.head_dim**-0.5)


class SwapsHeads(AttendingCache):
    def for_each(self, query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        return super().for_each(query, cache.flip(0))


class GroupsQueryHeadsTheOtherWay(AttendingCache):
    def for_each(self, query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        return cache.repeat(len(query) // len(cache), 1, 1)


class MissesTheLastToken(AttendingCache):
    def length_of(self, seq: int) -> int:
        return max(1, super().length_of(seq) - 1)


class TakesATokenTooMany(AttendingCache):
    """The last block may have one that was never written, or that another sequence left there."""

    def length_of(self, seq: int) -> int:
        return super().length_of(seq) + 1


class WeighsTheTailWithZero(AttendingCache):
    """It masks the scores behind the last token and not the values: zero times NaN is NaN."""

    def weigh(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: int
    ) -> torch.Tensor:
        scores = torch.einsum("hd,htd->ht", query.float(), keys) * self.scale
        scores[:, length:] = float("-inf")
        return torch.einsum("ht,htd->hd", torch.softmax(scores, -1), values)


class _TakesFromAnother(AttendingCache):
    """It takes from the first sequence as far as that goes."""

    takes: ClassVar[tuple[int, ...]]

    def blocks_of(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = list(super().blocks_of(seq, layer))
        first = min(self.tables)
        length = min(self.lengths[first], self.lengths[seq])
        for kind in self.takes:
            both[kind][:, :length] = super().blocks_of(first, layer)[kind][:, :length]
        return both[0], both[1]


class TakesKeysOfAnother(_TakesFromAnother):
    takes = (0,)


class TakesValuesOfAnother(_TakesFromAnother):
    takes = (1,)


class AnswersInOrder(AttendingCache):
    """Its rows come back in the order of the sequences' names."""

    def attend(self, seqs: Sequence[int], query: torch.Tensor, layer: int) -> torch.Tensor:
        return super().attend(sorted(seqs), query, layer)


class ReadsTheFirstLayer(AttendingCache):
    def blocks_of(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return super().blocks_of(seq, layer * 0)


class ForgetsTheScale(AttendingCache):
    scale = 1.0


class StoresTheQuery(AttendingCache):
    def attend(self, seqs: Sequence[int], query: torch.Tensor, layer: int) -> torch.Tensor:
        found = super().attend(seqs, query, layer)
        for seq, row in zip(seqs, query, strict=True):
            self.keys[layer, self.tables[seq][-1], :, -1] = row[0]
        return found

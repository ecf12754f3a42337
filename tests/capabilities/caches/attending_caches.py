"""A paged cache that attends over its blocks, and broken variants."""

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
            outputs.append(self.attend_one(row, keys, values, self.length_of(seq)))
        return torch.stack(outputs).to(query.dtype)

    def blocks_of(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whole blocks, ``[heads, tokens, head_dim]``, which may contain more tokens."""
        blocks = self.tables[seq]
        return (
            self.keys[layer, blocks].transpose(0, 1).flatten(1, 2).float(),
            self.values[layer, blocks].transpose(0, 1).flatten(1, 2).float(),
        )

    def for_each(self, query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Return the KV head of each query head."""
        return cache.repeat_interleave(len(query) // len(cache), 0)

    def length_of(self, seq: int) -> int:
        return self.lengths[seq]

    def attend_one(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: int
    ) -> torch.Tensor:
        """Attend to the first ``length`` tokens of one sequence."""
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


class OmitsTheLastToken(AttendingCache):
    def length_of(self, seq: int) -> int:
        return max(1, super().length_of(seq) - 1)


class AttendsToAnUnwrittenToken(AttendingCache):
    """Attends to a slot of the last block that is unwritten, or holds another sequence's token."""

    def length_of(self, seq: int) -> int:
        return super().length_of(seq) + 1


class MasksScoresOnly(AttendingCache):
    """Masks the scores after the last token and not the values: zero times NaN is NaN."""

    def attend_one(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: int
    ) -> torch.Tensor:
        scores = torch.einsum("hd,htd->ht", query.float(), keys) * self.scale
        scores[:, length:] = float("-inf")
        return torch.einsum("ht,htd->hd", torch.softmax(scores, -1), values)


class _ReadsAnotherSequence(AttendingCache):
    """Reads the tokens of the first sequence, up to its length."""

    kinds: ClassVar[tuple[int, ...]]

    def blocks_of(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = list(super().blocks_of(seq, layer))
        first = min(self.tables)
        length = min(self.lengths[first], self.lengths[seq])
        for kind in self.kinds:
            both[kind][:, :length] = super().blocks_of(first, layer)[kind][:, :length]
        return both[0], both[1]


class ReadsKeysOfAnotherSequence(_ReadsAnotherSequence):
    kinds = (0,)


class ReadsValuesOfAnotherSequence(_ReadsAnotherSequence):
    kinds = (1,)


class ReturnsRowsInNameOrder(AttendingCache):
    """Returns rows in the order of the sequences' names."""

    def attend(self, seqs: Sequence[int], query: torch.Tensor, layer: int) -> torch.Tensor:
        return super().attend(sorted(seqs), query, layer)


class ReadsTheFirstLayer(AttendingCache):
    def blocks_of(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return super().blocks_of(seq, layer * 0)


class ForgetsTheScale(AttendingCache):
    scale = 1.0


class StoresTheQuery(AttendingCache):
    def attend(self, seqs: Sequence[int], query: torch.Tensor, layer: int) -> torch.Tensor:
        output = super().attend(seqs, query, layer)
        for seq, row in zip(seqs, query, strict=True):
            self.keys[layer, self.tables[seq][-1], :, -1] = row[0]
        return output

"""Caches that would pass a careless harness. Each has one bug; none may pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_roseinfer import CacheSpec, FastPath, conformance

from .list_cache import ListCache
from .paged_cache import PagedCache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class ReturnsItsInputs(ListCache):
    """Returns the tensors of its inputs, so that tokens which it never stored read back right."""

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        for i, seq in enumerate(seqs):
            self.rows.setdefault(seq, []).append((key[:, i], value[:, i]))  # type: ignore[arg-type]

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = zip(*self.rows[seq], strict=True)
        return torch.stack(keys, 1)[layer], torch.stack(values, 1)[layer]


class IgnoresAppends(ListCache):
    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        pass

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        nothing = torch.empty(0, self.spec.num_heads, self.spec.head_dim)
        return nothing, nothing


class WritesNothing(PagedCache):
    """Has right books."""

    def write(self, *_: object) -> None:
        self.counts["row_by_row"] += 1


class PeekSharesMemory(PagedCache):
    """Stores nothing, and returns the caller's own tensors as stored ones."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.inputs: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        super().append(seqs, key, value)
        for i, seq in enumerate(seqs):
            self.inputs.setdefault(seq, []).append((key[:, i], value[:, i]))

    def write(self, *_: object) -> None:
        self.counts["row_by_row"] += 1

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = zip(*self.inputs[seq], strict=True)
        return torch.stack(keys, 1)[layer], torch.stack(values, 1)[layer]


class ChangesItsInputs(ListCache):
    """Stores the right tokens, and changes the caller's keys, which attention may still need."""

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        super().append(seqs, key, value)
        key.div_(2)


class UploadsItsTableLate(PagedCache):
    """Updates the table on the device at a read, unless the number of blocks is unchanged.

    The bug has no effect if all sequences are read after every step.
    """

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.uploaded: dict[int, list[int]] = {}

    def gather(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = self.tables[seq]
        if len(self.uploaded.get(seq, ())) != len(blocks):
            self.uploaded[seq] = [*blocks]
        keys, values = (
            cache[layer, self.uploaded[seq]].transpose(1, 2).flatten(0, 1)[: self.lengths[seq]]
            for cache in (self.keys, self.values)
        )
        return keys, values

    def truncate(self, seq: int, length: int) -> None:
        keep = -(-length // self.spec.block_size)
        self.unused += self.tables[seq][keep:]
        del self.tables[seq][keep:]
        self.lengths[seq] = length

    def free(self, seq: int) -> None:
        self.uploaded.pop(seq, None)
        super().free(seq)


class NeverTakesItsFastPath(PagedCache):
    def write(
        self, blocks: list[int], positions: list[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        for i, (block, position) in enumerate(zip(blocks, positions, strict=True)):
            super().write([block], [position], key[:, i : i + 1], value[:, i : i + 1])


class _Claims(PagedCache):
    """Writes row by row, and counts the path that ``claim`` returns."""

    def claim(self) -> str:
        raise NotImplementedError

    def write(
        self, blocks: list[int], positions: list[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        counts = self.counts.copy()
        for i, (block, position) in enumerate(zip(blocks, positions, strict=True)):
            super().write([block], [position], key[:, i : i + 1], value[:, i : i + 1])
        self.counts = counts
        self.counts[self.claim()] += 1


class ClaimsAPathItsRowsRuleOut(_Claims):
    """Counts a fast path that can only write one position, for rows of two."""

    def claim(self) -> str:
        return "all_rows"


class ClaimsAPathItsSwitchesRuleOut(_Claims):
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {"batched": (True, False)}
    paths: ClassVar[Mapping[str, FastPath]] = {
        "all_rows": FastPath(equals="row_by_row", never_with=[{"batched": False}])
    }

    def claim(self) -> str:
        return "all_rows"


class ClaimsAPathForNothing(PagedCache):
    def free(self, seq: int) -> None:
        super().free(seq)
        self.counts["all_rows"] += 1


class ClaimsNoPath(_Claims):
    def claim(self) -> str:
        return "new_block"


class TakesAnUndeclaredPath(_Claims):
    def claim(self) -> str:
        return "shortcut"


TestReturnsItsInputs = conformance(ReturnsItsInputs)
TestIgnoresAppends = conformance(IgnoresAppends)
TestWritesNothing = conformance(WritesNothing)
TestPeekSharesMemory = conformance(PeekSharesMemory)
TestChangesItsInputs = conformance(ChangesItsInputs)
TestUploadsItsTableLate = conformance(UploadsItsTableLate)
TestNeverTakesItsFastPath = conformance(NeverTakesItsFastPath)
TestClaimsAPathItsRowsRuleOut = conformance(ClaimsAPathItsRowsRuleOut)
TestClaimsAPathItsSwitchesRuleOut = conformance(ClaimsAPathItsSwitchesRuleOut)
TestClaimsAPathForNothing = conformance(ClaimsAPathForNothing)
TestClaimsNoPath = conformance(ClaimsNoPath)
TestTakesAnUndeclaredPath = conformance(TakesAnUndeclaredPath)

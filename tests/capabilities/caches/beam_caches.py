"""Caches whose sequences are reordered, as by beam search: right ones, and broken ones."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import torch

from pytest_roseinfer import CacheSpec, KVCacheAdapter
from tests.capabilities.caches.branching_text_caches import BranchingTextCache
from tests.capabilities.caches.truncating_caches import CopiesAtTheCut, CutCache

if TYPE_CHECKING:
    from collections.abc import Sequence


class BeamCache(CutCache):
    """Exchanges tables, and copies a shared block when it is written to. It is right."""

    head_counts = (1, 2)
    head_dims = (4,)
    standard_bad_calls: ClassVar[Sequence[str]] = ("reorder_unknown",)
    bad_call_errors: ClassVar[tuple[type[BaseException], ...]] = (KeyError,)
    prefill = CopiesAtTheCut.prefill

    def reorder(self, seqs: Sequence[int], sources: Sequence[int]) -> None:
        if lacking := {*sources} - self.tables.keys():
            raise KeyError(f"unknown sources: {lacking}")
        self.exchange(seqs, sources)

    def exchange(self, seqs: Sequence[int], sources: Sequence[int]) -> None:
        tables = [self.tables[source] for source in sources]
        lengths = [self.lengths[source] for source in sources]
        for table in tables:
            self.hold(table)
        for seq in seqs:
            self.drop(self.tables[seq])
        for seq, table, length in zip(seqs, tables, lengths, strict=True):
            self.tables[seq], self.lengths[seq] = list(table), length

    def hold(self, table: list[int]) -> None:
        self.holders.update(table)


class HoldsASourceOnce(BeamCache):
    """1: counts one holder of a source's blocks, however many sequences get them."""

    def exchange(self, seqs: Sequence[int], sources: Sequence[int]) -> None:
        self.held: set[int] = set()
        super().exchange(seqs, sources)

    def hold(self, table: list[int]) -> None:
        if id(table) not in self.held:
            super().hold(table)
        self.held.add(id(table))


class ReordersOneByOne(BeamCache):
    """10: reorders one sequence after another, and takes tokens that one before has got."""

    def exchange(self, seqs: Sequence[int], sources: Sequence[int]) -> None:
        for seq, source in zip(seqs, sources, strict=True):
            super().exchange([seq], [source])


class DropsBeforeItHolds(BeamCache):
    """25: drops the old blocks of all sequences before it holds those that they get."""

    def exchange(self, seqs: Sequence[int], sources: Sequence[int]) -> None:
        tables = [self.tables[source] for source in sources]
        lengths = [self.lengths[source] for source in sources]
        for seq in seqs:
            self.drop(self.tables[seq])
        for seq, table, length in zip(seqs, tables, lengths, strict=True):
            self.hold(table)
            self.tables[seq], self.lengths[seq] = list(table), length


class WritesToABeamsBlock(BeamCache):
    """1: writes to the last block of a reordered sequence, whoever else got it."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.reordered: set[int] = set()

    def exchange(self, seqs: Sequence[int], sources: Sequence[int]) -> None:
        super().exchange(seqs, sources)
        self.reordered.update(seqs)

    def must_copy(self, seq: int) -> bool:
        return seq not in self.reordered and super().must_copy(seq)


class KeepsTheLengths(BeamCache):
    """T4: exchanges tables, and leaves the length of each sequence as it was."""

    def exchange(self, seqs: Sequence[int], sources: Sequence[int]) -> None:
        lengths = {seq: self.lengths[seq] for seq in seqs}
        super().exchange(seqs, sources)
        for seq, length in lengths.items():
            self.lengths[seq] = length


class LeaksDroppedBeams(BeamCache):
    """Keeps the blocks of a sequence whose tokens nobody gets."""

    def exchange(self, seqs: Sequence[int], sources: Sequence[int]) -> None:
        for seq in {*seqs} - {*sources}:
            self.hold(self.tables[seq])
        super().exchange(seqs, sources)


class LeavesDroppedBeams(BeamCache):
    """Leaves a sequence as it is if nobody gets its tokens."""

    def exchange(self, seqs: Sequence[int], sources: Sequence[int]) -> None:
        kept = [(seq, source) for seq, source in zip(seqs, sources, strict=True) if seq in sources]
        super().exchange([seq for seq, _ in kept], [source for _, source in kept])


class RowCache(KVCacheAdapter):
    """Has a row of tensors for each sequence, which it selects anew. It is right."""

    fork_shares = "nothing"
    head_counts = (1, 2)
    head_dims = (4,)
    max_sequences = 8

    def make(self, spec: CacheSpec) -> None:
        self.spec = spec
        shape = (
            spec.num_layers,
            self.max_sequences,
            spec.num_heads,
            spec.num_blocks * spec.block_size,
        )
        dtype = getattr(torch, spec.dtype)
        self.keys = torch.zeros((*shape, spec.head_dim), dtype=dtype, device=spec.device)
        self.values = torch.zeros_like(self.keys)
        self.rows: dict[int, int] = {}
        self.lengths: Counter[int] = Counter()

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        for at, seq in enumerate(seqs):
            self.prefill(seq, key[:, at : at + 1], value[:, at : at + 1])

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if seq not in self.rows:
            self.rows[seq] = next(
                row for row in range(self.max_sequences) if row not in self.rows.values()
            )
        begin, end = self.lengths[seq], self.lengths[seq] + key.shape[1]
        if end > self.keys.shape[3]:
            more = torch.zeros_like(self.keys)
            self.keys, self.values = (
                torch.cat([kind, more], 3) for kind in (self.keys, self.values)
            )
            self.prefill(seq, key, value)
            return
        self.keys[:, self.rows[seq], :, begin:end] = key.transpose(1, 2).to(self.keys.dtype)
        self.values[:, self.rows[seq], :, begin:end] = value.transpose(1, 2).to(self.keys.dtype)
        self.lengths[seq] = end

    def free(self, seq: int) -> None:
        del self.rows[seq], self.lengths[seq]

    def reorder(self, seqs: Sequence[int], sources: Sequence[int]) -> None:
        rows, from_rows = [self.rows[seq] for seq in seqs], [self.rows[seq] for seq in sources]
        lengths = {seq: self.lengths[source] for seq, source in zip(seqs, sources, strict=True)}
        self.select(rows, from_rows)
        for seq, length in lengths.items():
            self.lengths[seq] = length

    def select(self, rows: list[int], from_rows: list[int]) -> None:
        for kind in (self.keys, self.values):
            kind[:, rows] = kind[:, from_rows]

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        row, length = self.rows[seq], self.lengths[seq]
        keys, values = (
            kind[layer, row, :, :length].transpose(0, 1) for kind in (self.keys, self.values)
        )
        return keys, values


class SelectsRowsInPlace(RowCache):
    """10: copies one row after another, also from rows that were overwritten."""

    def select(self, rows: list[int], from_rows: list[int]) -> None:
        for row, from_row in zip(rows, from_rows, strict=True):
            super().select([row], [from_row])


class SelectsKeysOnly(RowCache):
    """Selects the rows of keys, and leaves those of values."""

    def select(self, rows: list[int], from_rows: list[int]) -> None:
        self.keys[:, rows] = self.keys[:, from_rows]


class SelectsInTheFirstLayer(RowCache):
    """Selects the rows of the first layer, and leaves those of the others."""

    def select(self, rows: list[int], from_rows: list[int]) -> None:
        for kind in (self.keys, self.values):
            kind[0, rows] = kind[0, from_rows]


class TextBeamCache(BranchingTextCache):
    """Exchanges the token ids of sequences with their blocks. It is right."""

    head_counts = (1, 2)
    head_dims = (4,)
    block_sizes = (2, 4, 1, 3)

    def reorder(self, seqs: Sequence[int], sources: Sequence[int]) -> None:
        tables = [list(self.tables[source]) for source in sources]
        token_ids = [list(self.token_ids[source]) for source in sources]
        for table in tables:
            for block in table:
                self.hold(block)
        for seq in seqs:
            for block in reversed(self.tables[seq]):
                self.drop(block)
        for seq, table, ids in zip(seqs, tables, token_ids, strict=True):
            self.tables[seq] = table
            self.token_ids[seq] = self.text_of_beam(self.token_ids[seq], ids)

    def text_of_beam(self, old: list[int], new: list[int]) -> list[int]:  # noqa: ARG002
        """Return the token ids of a sequence after it got other tokens."""
        return new


class KeepsTheTextOfABeam(TextBeamCache):
    """S3: registers the blocks that a sequence fills under the text that it had before."""

    def text_of_beam(self, old: list[int], new: list[int]) -> list[int]:
        return (old + new)[: len(new)]


RIGHT = (BeamCache, RowCache, TextBeamCache)
BROKEN = (
    HoldsASourceOnce,
    ReordersOneByOne,
    DropsBeforeItHolds,
    WritesToABeamsBlock,
    KeepsTheLengths,
    LeaksDroppedBeams,
    LeavesDroppedBeams,
    SelectsRowsInPlace,
    SelectsKeysOnly,
    SelectsInTheFirstLayer,
    KeepsTheTextOfABeam,
)

"""Caches with one bug each, as real caches have had."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from .paged_cache import PagedCache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from pytest_roseinfer import CacheSpec, Ledger


class SwapsRows(PagedCache):
    """Swaps the first and the last row of a batch in the fast path."""

    def write(
        self, blocks: list[int], positions: list[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        if len(blocks) > 1 and len(set(positions)) == 1:
            blocks = [blocks[-1], *blocks[1:-1], blocks[0]]
        super().write(blocks, positions, key, value)


class LosesTheBlock(PagedCache):
    def free(self, seq: int) -> None:
        block = self.tables.pop(seq + 1)  # the sequence after it
        self.unused += block


class HasNoBooks(PagedCache):
    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002
        raise RuntimeError("books are gone")


class WorksTheSecondTime(PagedCache):
    """Behaves differently on its first build."""

    built = 0

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        type(self).built += 1

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        if self.built == 1:
            key = -key
        super().append(seqs, key, value)


class FillsFromTheEnd(PagedCache):
    """Leaves different bits in storage for each option; every sequence reads back right."""

    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {"from_the_end": (False, True)}

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        if spec.options["from_the_end"]:
            self.unused.reverse()

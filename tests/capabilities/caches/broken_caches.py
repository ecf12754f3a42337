"""Caches with one bug each, of the kind that people write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from .paged_cache import PagedCache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from pytest_roseinfer import CacheSpec, Ledger


class SwapsRows(PagedCache):
    """The fast path writes the first row of a batch where the last one belongs, and back."""

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
    """What it does depends on how often it was built."""

    built = 0

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        type(self).built += 1

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        if self.built == 1:
            key = -key
        super().append(seqs, key, value)


class FillsFromTheEnd(PagedCache):
    """No sequence reads back wrong, but one option leaves other bits behind than the other."""

    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {"from_the_end": (False, True)}

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        if spec.options["from_the_end"]:
            self.unused.reverse()

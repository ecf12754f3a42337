"""Several tokens to each of some sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_roseinfer.cases.operations.operation import Move, Write, laid_out, operation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_roseinfer.cases.operations.operation import Driven, Rows, Writer


@operation
@dataclass(frozen=True, slots=True)
class AppendMany(Write):
    """Several tokens to each of some sequences."""

    seqs: tuple[int, ...]
    counts: tuple[int, ...]
    layout: str = "plain"

    needs = frozenset({"append_many"})

    def rows(self) -> Rows:
        return list(zip(self.seqs, self.counts, strict=True))

    def words(self) -> str:
        each = ", ".join(f"{count} to sequence {seq}" for seq, count in self.rows())
        return f"append tokens: {each}{laid_out(self.layout)}"

    def drive(self, cache: Driven) -> None:
        cache.adapter.append_many(self.seqs, self.counts, cache.key, cache.value)

    @classmethod
    def moves(cls, writer: Writer) -> Iterable[Move]:
        yield Move(1, 1, lambda: cls._drawn(writer))

    @classmethod
    def _drawn(cls, writer: Writer) -> AppendMany:
        seqs = writer.batch(writer.fresh(1))
        return cls(seqs, tuple(writer.count(seq) for seq in seqs), writer.layout())

"""A new sequence with a whole prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_roseinfer.cases.operations.operation import Move, Write, laid_out, operation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_roseinfer.cases.operations.operation import Driven, Rows, Writer


@operation
@dataclass(frozen=True, slots=True)
class Prefill(Write):
    """A new sequence with a whole prompt."""

    seq: int
    count: int
    layout: str = "plain"

    needs = frozenset({"prefill"})

    def rows(self) -> Rows:
        return [(self.seq, self.count)]

    def words(self) -> str:
        return f"prefill sequence {self.seq} with {self.count} tokens{laid_out(self.layout)}"

    def drive(self, cache: Driven) -> None:
        cache.adapter.prefill(self.seq, cache.key, cache.value)

    @classmethod
    def moves(cls, writer: Writer) -> Iterable[Move]:
        if not writer.crowded:
            yield Move(5, 2, lambda: cls._drawn(writer))

    @classmethod
    def _drawn(cls, writer: Writer) -> Prefill:
        (seq,) = writer.fresh(1)
        return cls(seq, writer.count(seq), writer.layout())

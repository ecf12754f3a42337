"""One token to each of some sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_roseinfer.cases.operations.operation import (
    MOST_SEQUENCES,
    Move,
    Write,
    laid_out,
    listed,
    operation,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_roseinfer.cases.operations.operation import Driven, Operation, Rows, Writer


@operation
@dataclass(frozen=True, slots=True)
class Append(Write):
    """One token to each of some sequences, in this order; unseen names start empty."""

    seqs: tuple[int, ...]
    layout: str = "plain"

    def rows(self) -> Rows:
        return [(seq, 1) for seq in self.seqs]

    def words(self) -> str:
        return f"append one token to {listed(self.seqs)}{laid_out(self.layout)}"

    def drive(self, cache: Driven) -> None:
        cache.adapter.append(self.seqs, cache.key, cache.value)

    def reversed(self) -> Operation:
        return replace(self, seqs=self.seqs[::-1])

    def halves(self) -> list[Operation]:
        at = len(self.seqs) // 2
        return [replace(self, seqs=half) for half in (self.seqs[:at], self.seqs[at:]) if half]

    @classmethod
    def moves(cls, writer: Writer) -> Iterable[Move]:
        yield Move(0, 3, lambda: cls._to_some(writer))
        if writer.live:
            yield Move(6, 3, lambda: cls(tuple(writer.live), writer.layout()))

    @classmethod
    def _to_some(cls, writer: Writer) -> Append:
        live = writer.live
        most = (0 if len(live) >= MOST_SEQUENCES else 1) if live else 3
        fresh = writer.fresh(writer.between(0 if live else 1, most))
        return cls(writer.batch(fresh), writer.layout())

"""Writing the tokens that room was reserved for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_roseinfer.cases.operations import operation

if TYPE_CHECKING:
    from pytest_roseinfer.oracle import Oracle, Written


@operation.register
@dataclass(frozen=True, slots=True)
class Fill(operation.Operation):
    """Write the tokens of the oldest reservation that is still open."""

    needs = frozenset({"reserve", "fill"})
    called = "fill"

    def words(self) -> str:
        return "write the tokens that room was reserved for first"

    def written(self, oracle: Oracle) -> Written:
        return oracle.reserved[0]

    def change(self, oracle: Oracle) -> None:
        oracle.reserved.pop(0)

    def drive(self, cache: operation.Driven) -> None:
        handle, cache.planned_with = cache.reserved.pop(0)
        cache.adapter.fill(handle, cache.key, cache.value)

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if writer.oracle.reserved:
            yield operation.Move(4, 2, cls)

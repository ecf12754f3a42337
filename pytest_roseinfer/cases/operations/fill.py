"""Writing the tokens that room was reserved for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_roseinfer.cases.operations.operation import Move, Operation, operation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_roseinfer.cases.operations.operation import Driven, Writer
    from pytest_roseinfer.oracle import Oracle, Written


@operation
@dataclass(frozen=True, slots=True)
class Fill(Operation):
    """Write the tokens of the oldest reservation that is still open."""

    needs = frozenset({"reserve", "fill"})
    called = "fill"

    def words(self) -> str:
        return "write the tokens that room was reserved for first"

    def written(self, oracle: Oracle) -> Written:
        return oracle.reserved[0]

    def change(self, oracle: Oracle) -> None:
        oracle.reserved.pop(0)

    def drive(self, cache: Driven) -> None:
        handle, cache.planned_with = cache.reserved.pop(0)
        cache.adapter.fill(handle, cache.key, cache.value)

    @classmethod
    def moves(cls, writer: Writer) -> Iterable[Move]:
        if writer.oracle.reserved:
            yield Move(4, 2, cls)

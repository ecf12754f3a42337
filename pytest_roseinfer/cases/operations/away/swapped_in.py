"""Finish copying a sequence back; it can be read and appended to from here on."""

from __future__ import annotations

from pytest_roseinfer.cases.operations import operation
from pytest_roseinfer.cases.operations.away.swap_out import SwapOut
from pytest_roseinfer.oracle.away import Stage


@operation.register
class SwappedIn(operation.Operation):
    seq: int

    needs = SwapOut.needs

    def words(self) -> str:
        return f"finish swapping sequence {self.seq} in"

    def possible(self, oracle: operation.Oracle) -> bool:
        return oracle.away.stages.get(self.seq) is Stage.COMING

    def changed(self) -> list[int]:
        return [self.seq]

    def brings_back(self) -> list[int]:
        return [self.seq]

    def change(self, oracle: operation.Oracle) -> None:
        oracle.away.end(self.seq)

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.swapped_in(cache.moving.pop(self.seq))

    def copies_blocks(self, fork_shares: str) -> bool:  # noqa: ARG002
        return True

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if coming := writer.oracle.away.at(Stage.COMING):
            yield operation.Move(13, 10, lambda: cls(writer.pick(coming)))

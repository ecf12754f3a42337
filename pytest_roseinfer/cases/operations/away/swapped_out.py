"""Finish copying a sequence out; its blocks are free for others from here on."""

from __future__ import annotations

from pytest_roseinfer.cases.operations import operation
from pytest_roseinfer.cases.operations.away.swap_out import SwapOut
from pytest_roseinfer.oracle.away import Stage


@operation.register
class SwappedOut(operation.Operation):
    seq: int

    needs = SwapOut.needs

    def words(self) -> str:
        return f"finish swapping sequence {self.seq} out"

    def possible(self, oracle: operation.Oracle) -> bool:
        return oracle.away.stages.get(self.seq) is Stage.LEAVING

    def changed(self) -> list[int]:
        return [self.seq]

    def change(self, oracle: operation.Oracle) -> None:
        oracle.away.stages[self.seq] = Stage.OUT
        if oracle.swap_out_holds:
            oracle.give_up(self.seq)

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.swapped_out(cache.moving.pop(self.seq))

    def copies_blocks(self, fork_shares: str) -> bool:  # noqa: ARG002
        return True

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if leaving := writer.oracle.away.at(Stage.LEAVING):
            yield operation.Move(13, 10, lambda: cls(writer.pick(leaving)))

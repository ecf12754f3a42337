"""Take blocks for a sequence that is swapped out, and begin to copy it back."""

from __future__ import annotations

from pytest_roseinfer.cases.flood import floods
from pytest_roseinfer.cases.operations import operation
from pytest_roseinfer.cases.operations.away.swap_out import SwapOut
from pytest_roseinfer.oracle.away import Stage


@operation.register
class SwapIn(operation.Operation):
    seq: int

    needs = SwapOut.needs

    def words(self) -> str:
        return f"begin to swap sequence {self.seq} in"

    def possible(self, oracle: operation.Oracle) -> bool:
        return oracle.away.stages.get(self.seq) is Stage.OUT

    def changed(self) -> list[int]:
        return [self.seq]

    def fits(self, oracle: operation.Oracle) -> bool:
        return oracle.fits([(self.seq, len(oracle.away.tokens[self.seq]))])

    def may_find_blocks(self) -> bool:
        return True

    def change(self, oracle: operation.Oracle) -> None:
        tokens = oracle.away.tokens[self.seq]
        oracle.append([(self.seq, len(tokens))], tokens)
        oracle.away.stages[self.seq] = Stage.COMING

    def drive(self, cache: operation.Driven) -> None:
        cache.moving[self.seq] = cache.adapter.swap_in(self.seq)

    def copies_blocks(self, fork_shares: str) -> bool:  # noqa: ARG002
        return True

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        steps = [cls(seq) for seq in writer.oracle.away.at(Stage.OUT)]
        fitting = [step for step in steps if step.fits(writer.oracle)]
        if steps:
            yield operation.Move(13, 10 if fitting else 3, lambda: writer.pick(fitting or steps))
            yield from floods(writer)

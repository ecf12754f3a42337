"""Have a sequence give up its blocks; its tokens are written again later."""

from __future__ import annotations

from pytest_roseinfer.cases.operations import operation
from pytest_roseinfer.oracle.away import Stage


@operation.register
class Preempt(operation.Operation):
    seq: int

    needs = frozenset({"preempt", "resume"})
    of_tokens = True

    def words(self) -> str:
        return f"preempt sequence {self.seq}"

    def uses(self) -> list[int]:
        return [self.seq]

    def changed(self) -> list[int]:
        return [self.seq]

    def change(self, oracle: operation.Oracle) -> None:
        oracle.away.leave(self.seq, Stage.PREEMPTED, oracle.tokens(self.seq))
        oracle.give_up(self.seq)

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.preempt(self.seq)

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if writer.filled:
            yield operation.Move(12, 3, lambda: cls(writer.pick(writer.filled)))

"""Begin to copy a sequence out of the cache."""

from __future__ import annotations

from pytest_roseinfer.cases.operations import operation
from pytest_roseinfer.oracle.away import Stage


@operation.register
class SwapOut(operation.Operation):
    seq: int

    of_tokens = True
    needs = frozenset({"swap_out", "swapped_out", "swap_in", "swapped_in"})

    def words(self) -> str:
        return f"begin to swap sequence {self.seq} out"

    def uses(self) -> list[int]:
        return [self.seq]

    def possible(self, oracle: operation.Oracle) -> bool:
        if not operation.Operation.possible(self, oracle):
            return False
        taken = oracle.away.swapped_blocks(oracle.block_size)
        return taken + len(oracle.sequences[self.seq]) <= oracle.capacity

    def changed(self) -> list[int]:
        return [self.seq]

    def change(self, oracle: operation.Oracle) -> None:
        oracle.away.leave(self.seq, Stage.LEAVING, oracle.tokens(self.seq))
        if not oracle.swap_out_holds:
            oracle.give_up(self.seq)

    def drive(self, cache: operation.Driven) -> None:
        cache.moving[self.seq] = cache.adapter.swap_out(self.seq)

    def copies_blocks(self, fork_shares: str) -> bool:  # noqa: ARG002
        return True

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if fitting := [seq for seq in writer.filled if cls(seq).possible(writer.oracle)]:
            yield operation.Move(13, 6, lambda: cls(writer.pick(fitting)))

"""Begin a new sequence with all that another has, sharing what can be shared."""

from __future__ import annotations

from pytest_roseinfer.cases.operations import operation
from pytest_roseinfer.cases.operations.writes.copy import Copy


@operation.register
class Fork(operation.Operation):
    parent: int
    child: int

    needs = frozenset({"fork"})
    of_tokens = True

    def words(self) -> str:
        return f"fork sequence {self.parent} as sequence {self.child}"

    def begins(self) -> list[int]:
        return [self.child]

    def uses(self) -> list[int]:
        return [self.parent]

    def changed(self) -> list[int]:
        return [self.child]

    def fits(self, oracle: operation.Oracle) -> bool:
        return oracle.fork_fits(self.parent)

    def change(self, oracle: operation.Oracle) -> None:
        oracle.fork(self.parent, self.child)

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.fork(self.parent, self.child)

    def copies_blocks(self, fork_shares: str) -> bool:
        return fork_shares != "blocks"

    def unshared(self, oracle: operation.Oracle) -> Copy:
        return Copy(self.parent, self.child, oracle.length(self.parent))

    @classmethod
    def of_any(cls, writer: operation.Writer) -> Fork:
        return cls(writer.pick(writer.filled), *writer.fresh(1))

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if writer.filled and len(writer.oracle.sequences) < operation.MOST_SEQUENCES:
            yield operation.Move(7, 4, lambda: cls.of_any(writer))

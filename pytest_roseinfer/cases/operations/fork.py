"""A sequence that begins as another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_roseinfer.cases.operations import operation
from pytest_roseinfer.cases.operations.copy import Copy

if TYPE_CHECKING:
    from pytest_roseinfer.oracle import Oracle


@operation.register
@dataclass(frozen=True, slots=True)
class Fork(operation.Operation):
    """A new sequence with all that another has, sharing what can be shared."""

    parent: int
    child: int

    needs = frozenset({"fork"})

    def words(self) -> str:
        return f"fork sequence {self.parent} as sequence {self.child}"

    def changed(self) -> list[int]:
        return [self.child]

    def fits(self, oracle: Oracle) -> bool:
        return oracle.fork_fits(self.parent)

    def change(self, oracle: Oracle) -> None:
        oracle.fork(self.parent, self.child)

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.fork(self.parent, self.child)

    def copies_blocks(self, fork_shares: str) -> bool:
        return fork_shares != "blocks"

    def unshared(self, oracle: Oracle) -> Copy:
        return Copy(self.parent, self.child, oracle.length(self.parent))

    def blocks_unshared(self, oracle: Oracle) -> int:
        return len(oracle.sequences[self.parent]) + 1

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if writer.live and not writer.crowded:
            yield operation.Move(7, 4, lambda: cls.of_any(writer))

    @classmethod
    def of_any(cls, writer: operation.Writer) -> Fork:
        return cls(writer.pick(writer.live), *writer.fresh(1))

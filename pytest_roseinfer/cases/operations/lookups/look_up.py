"""Look a text up for a sequence that begins later, with what is found of it by then.

The looking up and the beginning are two steps, with others between them that may evict what was
found.
"""

from __future__ import annotations

from pytest_roseinfer.cases.operations import operation
from pytest_roseinfer.plural import some


@operation.register
class LookUp(operation.Operation):
    seq: int
    count: int

    needs = frozenset({"texts", "look_up", "begin_with"})

    def words(self) -> str:
        tokens = some(self.count, "token")
        return f"look up the first {tokens} of what sequence {self.seq} will say"

    def begins(self) -> list[int]:
        return [self.seq]

    def change(self, oracle: operation.Oracle) -> None:
        oracle.looked_up[self.seq] = self.count

    def said(self, oracle: operation.Oracle) -> list[operation.Said]:
        return oracle.said([(self.seq, self.count)])

    def drive(self, cache: operation.Driven) -> None:
        cache.looked_up[self.seq] = cache.adapter.look_up(cache.said[0].tokens)

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        def drawn() -> LookUp:
            seq = writer.beginner()
            return cls(seq, writer.count(seq))

        if len(writer.oracle.sequences) < operation.MOST_SEQUENCES:
            yield operation.Move(9, 3, drawn)

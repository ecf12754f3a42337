"""Begin a new sequence with a whole prompt."""

from __future__ import annotations

from pytest_roseinfer.cases.operations import operation
from pytest_roseinfer.plural import some


@operation.register
class Prefill(operation.Write):
    seq: int
    count: int
    layout: str = "plain"

    needs = frozenset({"prefill"})

    def rows(self) -> operation.Rows:
        return [(self.seq, self.count)]

    def words(self) -> str:
        tokens = some(self.count, "token")
        return f"prefill sequence {self.seq} with {tokens}{self.laid_out()}"

    def begins(self) -> list[int]:
        return [self.seq]

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.prefill(self.seq, cache.key, cache.value)

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        def drawn() -> Prefill:
            seq = writer.beginner()
            return cls(seq, writer.count(seq), writer.layout())

        if len(writer.oracle.sequences) < operation.MOST_SEQUENCES:
            yield operation.Move(5, 3 if writer.finds_prompts else 2, drawn)

"""Append one token to each of some sequences, with padding rows where a sequence is None."""

from __future__ import annotations

from pytest_roseinfer.cases.operations import operation
from pytest_roseinfer.oracle.oracle import padding_token


@operation.register
class AppendPadded(operation.Write):
    seqs: tuple[int | None, ...]
    layout: str = "plain"

    needs = frozenset({"append_padded"})

    def rows(self) -> operation.Rows:
        return [(seq, 1) for seq in self.seqs if seq is not None]

    def padding(self) -> int:
        return self.seqs.count(None)

    def first(self, rows: int) -> operation.Operation:
        refused = [at for at, seq in enumerate(self.seqs) if seq is not None][rows]
        return AppendPadded(self.seqs[:refused], self.layout)

    def words(self) -> str:
        rows = ["padding" if seq is None else str(seq) for seq in self.seqs]
        return f"append one token to rows {', '.join(rows)}{self.laid_out()}"

    def inputs(self, tokens: operation.Tokens) -> operation.Tokens:
        coming = iter(tokens)
        return [
            padding_token(row) if seq is None else next(coming) for row, seq in enumerate(self.seqs)
        ]

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.append_padded(self.seqs, cache.key, cache.value)

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        def drawn() -> AppendPadded:
            seqs: list[int | None] = list(writer.batch(writer.fresh(1)))
            for _ in range(writer.between(1, 3)):
                seqs.insert(writer.between(0, len(seqs)), None)
            return cls(tuple(seqs), writer.layout())

        yield operation.Move(2, 1, drawn)

"""One token to each of some sequences, with rows in between that are padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_roseinfer.cases.operations import operation
from pytest_roseinfer.oracle import padding_token

if TYPE_CHECKING:
    from collections.abc import Sequence


@operation.register
@dataclass(frozen=True, slots=True)
class AppendPadded(operation.Write):
    """One token to each of some sequences; where the sequence is None, a padding row."""

    seqs: tuple[int | None, ...]
    layout: str = "plain"

    needs = frozenset({"append_padded"})

    def rows(self) -> operation.Rows:
        return [(seq, 1) for seq in self.seqs if seq is not None]

    def padding(self) -> int:
        return self.seqs.count(None)

    def words(self) -> str:
        rows = ["padding" if seq is None else str(seq) for seq in self.seqs]
        return f"append one token to rows {', '.join(rows)}{self.laid_out()}"

    def inputs(self, tokens: Sequence[int]) -> list[int]:
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

"""Append several tokens to each of some sequences."""

from __future__ import annotations

from pytest_roseinfer.cases.operations import operation


@operation.register
class AppendMany(operation.Write):
    seqs: tuple[int, ...]
    counts: tuple[int, ...]
    layout: str = "plain"

    needs = frozenset({"append_many"})

    def rows(self) -> operation.Rows:
        return list(zip(self.seqs, self.counts, strict=True))

    def first(self, rows: int) -> operation.Operation:
        return AppendMany(self.seqs[:rows], self.counts[:rows], self.layout)

    def words(self) -> str:
        each = ", ".join(f"{count} to sequence {seq}" for seq, count in self.rows())
        return f"append tokens: {each}{self.laid_out()}"

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.append_many(self.seqs, self.counts, cache.key, cache.value)

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        yield operation.Move(1, 1, lambda: cls(*writer.rows(), writer.layout()))

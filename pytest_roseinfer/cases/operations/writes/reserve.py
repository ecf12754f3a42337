"""Reserve room for several tokens of some sequences, which a ``Fill`` writes later.

The oracle takes them as stored from now on, and knows which are not written yet.
"""

from __future__ import annotations

from pytest_roseinfer.cases.operations import operation


@operation.register
class Reserve(operation.Operation):
    seqs: tuple[int, ...]
    counts: tuple[int, ...]
    layout: str = "plain"

    needs = frozenset({"reserve", "fill"})

    def rows(self) -> operation.Rows:
        return list(zip(self.seqs, self.counts, strict=True))

    def words(self) -> str:
        each = ", ".join(f"{count} of sequence {seq}" for seq, count in self.rows())
        return f"reserve room for tokens: {each}"

    def change(self, oracle: operation.Oracle) -> None:
        tokens = oracle.new_tokens(self.rows())
        oracle.reserved.append(operation.Written(self.rows(), tokens, self.layout))
        oracle.append(self.rows(), tokens)

    def drive(self, cache: operation.Driven) -> None:
        handle = cache.adapter.reserve(self.seqs, self.counts)
        cache.reserved.append((handle, cache.options))

    def copies_blocks(self, fork_shares: str) -> bool:  # noqa: ARG002
        return True

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        yield operation.Move(3, 1, lambda: cls(*writer.rows(), writer.layout()))

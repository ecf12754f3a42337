"""Begin a sequence with what a lookup found, as far as it is still there."""

from __future__ import annotations

from pytest_roseinfer.cases.flood import floods
from pytest_roseinfer.cases.operations import operation


@operation.register
class Take(operation.Operation):
    seq: int

    needs = frozenset({"texts", "look_up", "begin_with"})

    def words(self) -> str:
        return f"begin sequence {self.seq} with what was found for it"

    def changed(self) -> list[int]:
        return [self.seq]

    def possible(self, oracle: operation.Oracle) -> bool:
        return self.seq in oracle.looked_up

    def change(self, oracle: operation.Oracle) -> None:
        del oracle.looked_up[self.seq]
        oracle.sequences[self.seq] = []

    def drive(self, cache: operation.Driven) -> object:
        return cache.adapter.begin_with(cache.looked_up.pop(self.seq), self.seq)

    def settle(self, oracle: operation.Oracle, answer: object) -> str | None:
        """Have the sequence say as much of its text as the cache took."""
        if not isinstance(answer, int) or answer < 0:
            return f"begin_with() returned {answer!r}, and must say how many tokens it took"
        rows = [(self.seq, answer)]
        oracle.append(rows, oracle.new_tokens(rows))
        oracle.found.begin(self.seq, len(oracle.sequences[self.seq]))
        return None

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if writer.oracle.looked_up:
            yield operation.Move(10, 3, lambda: cls(writer.pick([*writer.oracle.looked_up])))
            yield from floods(writer)

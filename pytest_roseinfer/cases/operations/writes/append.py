"""Append one token to each of some sequences, in this order; unseen names start empty."""

from __future__ import annotations

from pytest_roseinfer.cases.operations import operation


@operation.register
class Append(operation.Write):
    seqs: tuple[int, ...]
    layout: str = "plain"

    def rows(self) -> operation.Rows:
        return [(seq, 1) for seq in self.seqs]

    def words(self) -> str:
        seqs = f"sequence{'s' * (len(self.seqs) != 1)} {', '.join(map(str, self.seqs))}"
        return f"append one token to {seqs}{self.laid_out()}"

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.append(self.seqs, cache.key, cache.value)

    def first(self, rows: int) -> operation.Operation:
        return Append(self.seqs[:rows], self.layout)

    def reversed(self) -> operation.Operation:
        return Append(self.seqs[::-1], self.layout)

    def halves(self) -> list[operation.Operation]:
        at = len(self.seqs) // 2
        return [Append(half, self.layout) for half in (self.seqs[:at], self.seqs[at:]) if half]

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        def drawn() -> Append:
            live = len(writer.live)
            least, most = (0, int(live < operation.MOST_SEQUENCES)) if live else (1, 3)
            if live and writer.finds_prompts and writer.between(0, 1):
                most = 0
            return cls(writer.batch(writer.fresh(writer.between(least, most))), writer.layout())

        few = writer.finds_prompts and not writer.live
        yield operation.Move(0, 1 if few else 3, drawn)
        if writer.live:
            yield operation.Move(6, 3, lambda: cls(tuple(writer.live), writer.layout()))
